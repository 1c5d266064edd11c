"""A checkpoint that the processes of a host load together: each entry is read, and quantized, by one of them.

transformers' own loader runs in every process, over all entries of the checkpoint. Those that another process reads are
stood in for by tensors on the meta device; what it renames, merges, splits or ties is so done everywhere, and each
parameter comes out real in the process that has read its entries. Then `hand_out` gives everybody what it keeps.

Entries are divided by decoder layers (by blocks, whatever their names), so that what transformers merges or splits lies
in one process; where it does not, or where a checkpoint does not load entry by entry, every process loads it whole.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Origin
from ..modeling.layer import decoder_layers
from ..parallel.mesh import ALONE, Mesh
from ..parallel.shard.placement import Placement, all_read, crew_of, hand_out
from ..parallel.tensor.layers import AXIS
from ..parallel.tensor.model import divided_along
from ..reading.tensors import read_header, safetensors_files
from ..utils.errors import HalfbyteError
from ..utils.notices import notice
from .checkpoint import TYPES, folder_of
from .completeness import meta_model

BLOCK = re.compile(r".*?\.\d+(?=\.)")  # a name up to its first number

Load = Callable[..., Any]
Elsewhere = Callable[[Any, int], Callable[[str], bool]]


@dataclass(frozen=True)
class Share:
    """What each process of a mesh is to keep of a model.

    Attributes:
        along: axes of the mesh along which the weights of decoder layers are cut; the rest is whole everywhere. Along
            "tensor" alone, those whose products are divided, by rows or columns.
        elsewhere: of the model and a place along "pipeline", whether a parameter is only in others' stages, by its
            name; it stays on the meta device there. None: nothing is.
    """

    mesh: Mesh = ALONE
    along: tuple[str, ...] = ()
    elsewhere: Elsewhere | None = None

    def placements(self, model: Any) -> Callable[[str], Placement]:
        """Placement of a parameter, by its name."""
        axes = self.along if self.mesh.ways(*self.along) > 1 else ()
        layers = f"{decoder_layers(model)[0]}." if axes else ""
        dims = divided_along(model) if axes == (AXIS,) else None
        absent = [self.elsewhere(model, place) for place in range(self.mesh.ways("pipeline"))] if self.elsewhere else []

        def placement(name: str) -> Placement:
            stages = frozenset(place for place, other in enumerate(absent) if not other(name)) if absent else None
            if dims is not None:
                return Placement(axes if name in dims else (), stages, dims.get(name))
            return Placement(axes if name.startswith(layers) else (), stages)

        return placement

    @property
    def of_memory(self) -> int:
        """Processes that hold one model."""
        return self.mesh.ways(*self.along, *(("pipeline",) if self.elsewhere else ()))


def load_together(place: Origin, config: Any, share: Share, device: torch.device, load: Load) -> Any:
    """The model that `load` loads in one process, of which each keeps its share.

    Args:
        place: the checkpoint's folder, or its hub id.
        load: called with `device`, and with a `state_dict` and the model's class `cls` where entries are given.

    Returns:
        The model. Parameters that are cut are pieces: see `parallel.shard.placement`.

    Raises:
        HalfbyteError: what `load` raises in any process.
    """
    mesh = share.mesh
    crew = crew_of(mesh)
    folder = mesh.first(lambda: folder_of(place))
    why = "" if safetensors_files(folder) else "it is no safetensors"
    if not why:
        model, why = _all(mesh, lambda: _own_share(place, folder, config, crew.place, len(crew.ranks), load, device))
    if not why:
        read = all_read(model, mesh, crew)
        why = f"no process alone can make {read.unread[0]}" if read.unread else ""
    if why:
        notice("loaded-whole", f"every process loads {place.name} whole: {why}")
        model = None  # before the next one is there
        on = device if share.of_memory == 1 else torch.device("cpu")
        model, _ = _all(mesh, lambda: (load(device=on), ""))
        read = all_read(model, mesh, crew)
    hand_out(model, read, mesh, crew, share.placements(model), device)
    return model


def _all(mesh: Mesh, make: Callable[[], tuple[Any, str]]) -> tuple[Any, str]:
    """What `make` gives here, and the first reason of any process why it is of no use.

    Raises:
        HalfbyteError: the first that it raised in any process.
    """
    made, error, why = None, None, ""
    try:
        made, why = make()
    except HalfbyteError as raised:
        error = raised
    answers = mesh.gather((error, why))
    if first := next((other for other, _ in answers if other is not None), None):
        raise first from error
    return made, next((other for _, other in answers if other), "")


def _own_share(
    place: Origin, folder: Path, config: Any, own: int, ways: int, load: Load, device: torch.device
) -> tuple[Any, str]:
    cls = type(meta_model(place, config))
    if cls.__module__.startswith("transformers_modules."):
        return None, "it comes with code of its own"
    with contextlib.ExitStack() as opened:
        entries = _entries(folder, own, ways, opened)
        try:
            return load(device=device, state_dict=entries, cls=cls), ""
        except HalfbyteError as error:
            if error.__cause__ is None or isinstance(error.__cause__, HalfbyteError):
                raise
            return None, error.message  # transformers' or torch's words: of a tensor that is not here, maybe


# --- who reads what --------------------------------------------------------------------------------------------------


def divided(sizes: Mapping[str, int], ways: int) -> dict[str, int]:
    """Entry of a checkpoint → who of `ways` processes reads it.

    Blocks go to whoever has least, largest first; all that is in none (embedding, head, last norm) is one of them: tied
    weights are compared where both are.

    Args:
        sizes: entry → bytes.
    """
    blocks: dict[str, int] = {}
    for name, size in sizes.items():
        blocks[_block(name)] = blocks.get(_block(name), 0) + size
    load, reader = [0] * ways, {}
    for block in sorted(blocks, key=lambda block: (-blocks[block], block)):
        reader[block] = load.index(min(load))
        load[reader[block]] += blocks[block]
    return {name: reader[_block(name)] for name in sizes}


def _block(name: str) -> str:
    found = BLOCK.match(name)
    return found.group() if found else ""


def _entries(folder: Path, own: int, ways: int, opened: contextlib.ExitStack) -> dict[str, Any]:
    """Entry → what transformers' loader reads it from."""
    from safetensors import safe_open

    headers = {file: read_header(file) for file in safetensors_files(folder)}
    described = {name: entry for header in headers.values() for name, entry in header.items()}
    sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in described.items()}
    reader = divided(sizes, ways)
    entries: dict[str, Any] = {}
    for file, header in headers.items():
        mine = [name for name in header if reader[name] == own]
        if mine:
            tensors = opened.enter_context(safe_open(file, framework="pt"))
            entries |= {name: tensors.get_slice(name) for name in mine}
        entries |= {name: Absent(**entry) for name, entry in header.items() if reader[name] != own}
    return entries


class Absent:
    """An entry that another process reads; as much of a slice of safetensors as transformers' loader asks for.

    Args:
        dtype, shape: as in a safetensors head.
    """

    def __init__(self, dtype: str, shape: list[int], **_: Any):
        self.dtype, self.shape = dtype, shape

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, index: Any) -> Absent:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(self.shape, dtype=dtype or TYPES.get(self.dtype, torch.uint8), device="meta")
