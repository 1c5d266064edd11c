"""Tables on the device for kernels that update a list of parameters in one launch.

A kernel's arguments cannot be a list, so addresses are read from a table. Work is divided into tiles of `TILE`
elements; blocks of every storage divide a tile, so each scale belongs to one tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.optimizer import Parameters
from ..utils.hardware import is_capturing
from .tiling import ceil_div

TILE = 2048  # elements
# of the address table: elements, row, weight, gradient, correction, codes and scales of three states, then `draws`
COLUMNS = 13
WIDE = [2, 3, 4, 5, 7, 9]  # columns of addresses that kernels read in 16 bytes


def tables(parameters: Parameters, device: torch.device) -> tuple[Tensor, Tensor, bool]:
    """Tiles int32 [tiles, 2] and addresses int64 [n, COLUMNS] on the device, and whether all are aligned to 16 bytes.

    Both are kept; the addresses are copied again for another `parameters.version`. A CUDA graph repeats a copy that it
    captured, so it finds its own addresses also after steps on other tensors.
    """
    launch = parameters.launch
    if "tiles" not in launch:
        counts = torch.tensor([ceil_div(weight.numel(), TILE) for weight in parameters.weights])
        number = torch.repeat_interleave(torch.arange(len(counts)), counts)
        tile = torch.arange(len(number)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        launch["tiles"] = torch.stack([number, tile], dim=1).int().to(device)
        launch["table"] = fixed_columns(parameters)
    if launch.get("version") != parameters.version:
        table = launch["table"].pin_memory() if device.type == "cuda" else launch["table"].clone()
        for column, tensors in ((2, parameters.weights), (3, parameters.gradients)):
            table[:, column] = torch.tensor([*map(Tensor.data_ptr, tensors)])
        launch["aligned"] = not (table[:, WIDE] % 16).any()
        if is_capturing():  # the graph's copy reads `table` later, and a capture must not free pinned memory
            launch.setdefault("captured", []).extend((launch.get("host"), table))
        if "on_device" not in launch:
            launch["on_device"] = torch.empty_like(table, device=device)
        launch["on_device"].copy_(table, non_blocking=True)
        launch |= {"version": parameters.version, "host": table}
    return launch["tiles"], launch["on_device"], launch["aligned"]


def ends_of_tiles(parameters: Parameters, device: torch.device) -> Tensor:
    """int32 [n + 1] on the device: 0, then the number of tiles up to and including each parameter; kept."""
    if "ends" not in parameters.launch:
        counts = [0, *(ceil_div(weight.numel(), TILE) for weight in parameters.weights)]
        parameters.launch["ends"] = torch.tensor(counts).cumsum(0).int().to(device)
    ends: Tensor = parameters.launch["ends"]
    return ends


def fixed_columns(parameters: Parameters) -> Tensor:
    """The address table without weights and gradients, on the host."""
    rows = []
    for i, (row, weight) in enumerate(zip(parameters.rows.tolist(), parameters.weights, strict=True)):
        correction = parameters.corrections[i].data_ptr() if parameters.corrections else 0
        entry = [weight.numel(), row, 0, 0, correction]
        for codes, scales in parameters.states[i]:
            entry += [codes.data_ptr(), 0 if scales is None else scales.data_ptr()]
        draw = parameters.draws[i] if parameters.draws else (0, 0)
        rows.append([*entry, *[0] * (COLUMNS - 2 - len(entry)), *draw])
    return torch.tensor(rows, dtype=torch.int64).view(-1, COLUMNS)
