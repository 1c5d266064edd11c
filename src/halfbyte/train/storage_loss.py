"""Loss of a run's own rows with its weights in 16 bits and as they will be stored, for formats under 4 bits.

The cost of 2 or 3 bits without calibration depends on the model: `docs/formats.md` has one that loses 0.07 nats by
`kbit3`, and one that loses more than 2. So a run measures it with its model and data.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence

from ..config import Storage
from ..formats import Format
from ..loading.assignment import format_assignment
from ..loading.find import ModelFiles
from ..loading.load import load_model
from ..loading.mixed_formats import loss_with_formats, measurable_stacks
from ..modeling.architectures import conv1d_layers, expert_stacks, per_layer_tables, quantizable
from ..modeling.compute_dtype import compute_autocast
from ..ops import IGNORE_INDEX
from ..utils.hardware import free_bytes, free_cached_memory
from ..utils.notices import notice, silent
from ..utils.text import size
from ..utils.waiting import waiting
from .planning import Machine

BITS = 4  # formats with codes of fewer bits are measured
ROWS = 8
TOKENS = 256  # of the beginning of a row
HEADROOM = 1.25  # memory relative to the 16-bit weights: activations, logits, quantized values of one layer


@dataclass(frozen=True)
class StorageLoss:
    """Loss per token, in nats, of all tokens at the beginnings of a run's first rows, without an adapter.

    Attributes:
        formats: specs of the run's formats under 4 bits.
        stored: loss with the linear layers as the run stores them.
        original: loss with the checkpoint's weights.
        seconds: of loading the 16-bit model and computing both losses.
    """

    formats: str
    stored: float
    original: float
    rows: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        losses = f"loss on {self.rows} of your rows {self.stored:.2f} (16 bits: {self.original:.2f})"
        return f"{self.formats}, without calibration: {losses}"


def storage_loss(
    files: ModelFiles, storage: Storage, machine: Machine, rows: Dataset, parameters: int
) -> StorageLoss | None:
    """Measure what the formats of `storage` under 4 bits cost, before the run's own model is loaded.

    Loads the 16-bit model, quantizes each weight while the rows pass its layer, and frees the model. If the device has
    no memory for the 16-bit weights, a notice says that the cost was not measured.

    Args:
        rows: training rows with `input_ids`.
        parameters: number of the model's weights.

    Returns:
        None if it was not measured: no format is under 4 bits, or the checkpoint is quantized.
    """
    assigned = [format_ for _, format_ in format_assignment(storage).patterns if format_]
    formats = {format_.spec for format_ in assigned if format_.code_bits < BITS}
    if not formats or hasattr(files.config, "quantization_config"):
        return None
    names = ", ".join(sorted(formats))
    needed = int(HEADROOM * machine.weights_dtype.itemsize * parameters)
    if needed > (free := free_bytes(machine.device)):
        memory = f"the 16-bit weights need {size(needed)} on {machine.device}, and {size(free)} are free"
        notice("storage-loss", f"not measuring what {names} costs without calibration: {memory}")
        return None
    started = time.perf_counter()
    first_rows = [torch.tensor(rows[index]["input_ids"][:TOKENS]) for index in range(min(len(rows), ROWS))]
    labels = pad_sequence(first_rows, batch_first=True, padding_value=IGNORE_INDEX).to(machine.device)
    batch = {"input_ids": labels.clamp(min=0), "labels": labels}  # one batch, since every batch quantizes again
    stored, original = _losses(files, storage, machine, batch)
    gc.collect()
    free_cached_memory(machine.device)
    tokens = sum(len(row) - 1 for row in first_rows)
    return StorageLoss(names, stored, original, len(first_rows), tokens, time.perf_counter() - started)


@waiting("measuring the loss of the stored weights")
def _losses(
    files: ModelFiles, storage: Storage, machine: Machine, batch: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Return the mean loss with quantized and with original weights."""
    with silent():  # the run's own model will be loaded with the same notices
        model = load_model(files, Storage(), dtype=machine.weights_dtype, device=machine.device)
        with compute_autocast(model, machine.compute_dtype):
            formats = _formats(model, storage)
            return loss_with_formats(model, formats, [batch]), loss_with_formats(model, {}, [batch])


def _formats(model: Any, storage: Storage) -> dict[str, Format]:
    """Return name of a linear layer, or key of `measurable_stacks` → format, as the run stores it.

    Conv1D layers and tables of embeddings keep their values: patterns may name them, so they are assigned, too.
    """
    linears = quantizable(model)
    names = [*linears, *expert_stacks(model), *conv1d_layers(model), *per_layer_tables(model)]
    assigned = format_assignment(replace(storage, vision=None)).assign(model, names)
    formats = {name: assigned[name] for name in linears if name in assigned}
    for key, group in measurable_stacks(model).items():
        name = f"{key.removesuffix('.*')}.{group.leaves[0]}" if key.endswith(".*") else key
        if name in assigned:
            formats[key] = assigned[name]
    return formats
