"""Sharded loading: the ranks of a host load a checkpoint together, each entry read and quantized by one of them.

transformers' own loader runs in every rank, over all entries of the checkpoint. Entries that another rank reads are
tensors on the meta device, so renaming, merging, splitting and tying happen in every rank. Each parameter is real in
the rank that has read its entries. Then `distribute_tensors` sends every rank its share.

Entries are assigned by decoder layer (by numbered block, whatever its name), so entries that transformers merges are in
one rank. If they are not, or if a checkpoint does not load entry by entry, every rank loads the full checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Origin
from ..mesh.mesh import SINGLE_PROCESS, Mesh
from ..mesh.sharded_linears import AXIS
from ..modeling.layer import decoder_layers
from ..parallel.shard.placement import Placement, distribute_tensors, gather_loaded, local_group
from ..parallel.tensor import sharded_dims
from ..reading.tensors import read_header, safetensors_files
from ..utils.errors import HalfbyteError
from ..utils.notices import notice
from .checkpoint import TYPES, base_folder
from .completeness import meta_model

BLOCK_PREFIX = re.compile(r".*?\.\d+(?=\.)")  # a name up to its first number

Load = Callable[..., Any]
OtherStages = Callable[[Any, int], Callable[[str], bool]]


@dataclass(frozen=True)
class ModelShare:
    """The part of a model that each rank of a mesh keeps.

    Attributes:
        along: mesh axes along which the weights of decoder layers are sharded; other weights are replicated. With
            "tensor" alone, only tensor-parallel linears are sharded, by rows or columns.
        elsewhere: called with the model and a pipeline coordinate; returns a function that tells by name whether a
            parameter belongs only to other stages, so it stays on the meta device. None: there are no stages.
    """

    mesh: Mesh = SINGLE_PROCESS
    along: tuple[str, ...] = ()
    elsewhere: OtherStages | None = None

    def placements(self, model: Any) -> Callable[[str], Placement]:
        """Return a function from a parameter's name to its placement."""
        axes = self.along if self.mesh.degree(*self.along) > 1 else ()
        layers = f"{decoder_layers(model)[0]}." if axes else ""
        dims = sharded_dims(model) if axes == (AXIS,) else None
        stage_range = range(self.mesh.degree("pipeline"))
        absent = [self.elsewhere(model, stage) for stage in stage_range] if self.elsewhere else []

        def placement(name: str) -> Placement:
            stages = frozenset(stage for stage, lacks in enumerate(absent) if not lacks(name)) if absent else None
            if dims is not None:
                return Placement(axes if name in dims else (), stages, dims.get(name))
            return Placement(axes if name.startswith(layers) else (), stages)

        return placement

    @property
    def memory_degree(self) -> int:
        """Number of ranks that hold one model."""
        return self.mesh.degree(*self.along, *(("pipeline",) if self.elsewhere else ()))


def load_together(origin: Origin, config: Any, share: ModelShare, device: torch.device, load: Load) -> Any:
    """Load a model in all ranks together; each keeps its share.

    Args:
        place: the checkpoint's folder or hub id.
        load: loads the model; called with `device` and, if entries are given, a `state_dict` and the model's class
            `cls`.

    Returns:
        The model. Sharded parameters are pieces: see `parallel.shard.placement`.

    Raises:
        HalfbyteError: `load` raised it in some rank.
    """
    mesh = share.mesh
    local = local_group(mesh)
    folder = mesh.local_first(lambda: base_folder(origin))
    reason = "" if safetensors_files(folder) else "it has no safetensors files"
    if not reason:
        ranks = len(local.ranks)
        make = functools.partial(_load_own_entries, origin, folder, config, local.index, ranks, load, device)
        model, reason = _gather_results(mesh, make)
    if not reason:
        read = gather_loaded(model, mesh, local)
        reason = f"no rank alone can make {read.missing[0]}" if read.missing else ""
    if reason:
        notice("loaded-whole", f"every rank loads all of {origin.name}: {reason}")
        model = None  # free it before the next one is loaded
        on = device if share.memory_degree == 1 else torch.device("cpu")
        model, _ = _gather_results(mesh, lambda: (load(device=on), ""))
        read = gather_loaded(model, mesh, local)
    distribute_tensors(model, read, mesh, local, share.placements(model), device)
    return model


def _gather_results(mesh: Mesh, make: Callable[[], tuple[Any, str]]) -> tuple[Any, str]:
    """Call `make` and gather the outcomes: return its result here, and the first reason of any rank against its use.

    Raises:
        HalfbyteError: the first that `make` raised in any rank.
    """
    model = error = None
    reason = ""
    try:
        model, reason = make()
    except HalfbyteError as raised:
        error = raised
    outcomes = mesh.gather((error, reason))
    if first := next((raised for raised, _ in outcomes if raised is not None), None):
        raise first from error
    return model, next((reason for _, reason in outcomes if reason), "")


def _load_own_entries(
    origin: Origin, folder: Path, config: Any, local_rank: int, ranks: int, load: Load, device: torch.device
) -> tuple[Any, str]:
    """Load a model from this rank's entries: (model, "") or (None, reason why this is impossible)."""
    cls = type(meta_model(origin, config))
    if cls.__module__.startswith("transformers_modules."):
        return None, "it comes with its own code"
    with contextlib.ExitStack() as opened:
        entries = _entries(folder, local_rank, ranks, opened)
        try:
            return load(device=device, state_dict=entries, cls=cls), ""
        except HalfbyteError as error:
            if error.__cause__ is None or isinstance(error.__cause__, HalfbyteError):
                raise
            return None, error.message  # an error of transformers or torch, perhaps due to an absent entry


# --- assignment of entries to ranks ----------------------------------------------------------------------------------


def assign_readers(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return entry of a checkpoint → the rank that reads it, one of `ranks`.

    Blocks go to the rank with the fewest bytes, largest first. All entries outside of blocks (embedding, head, last
    norm) form one block, since transformers compares tied weights.

    Args:
        sizes: entry → bytes.
    """
    blocks: dict[str, int] = {}
    for name, size in sizes.items():
        blocks[_block(name)] = blocks.get(_block(name), 0) + size
    load, reader = [0] * ranks, {}
    for block in sorted(blocks, key=lambda block: (-blocks[block], block)):
        reader[block] = load.index(min(load))
        load[reader[block]] += blocks[block]
    return {name: reader[_block(name)] for name in sizes}


def _block(name: str) -> str:
    match = BLOCK_PREFIX.match(name)
    return match.group() if match else ""


def _entries(folder: Path, local_rank: int, ranks: int, opened: contextlib.ExitStack) -> dict[str, Any]:
    """Return entry → slice that transformers' loader reads it from."""
    from safetensors import safe_open

    headers = {file: read_header(file) for file in safetensors_files(folder)}
    described = {name: entry for header in headers.values() for name, entry in header.items()}
    sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in described.items()}
    readers = assign_readers(sizes, ranks)
    entries: dict[str, Any] = {}
    for file, header in headers.items():
        mine = [name for name in header if readers[name] == local_rank]
        if mine:
            tensors = opened.enter_context(safe_open(file, framework="pt"))
            entries |= {name: tensors.get_slice(name) for name in mine}
        entries |= {name: AbsentSlice(**entry) for name, entry in header.items() if readers[name] != local_rank}
    return entries


class AbsentSlice:
    """An entry that another rank reads; implements the part of safetensors' slices that transformers' loader uses.

    Args:
        dtype, shape: as in a safetensors header.
    """

    def __init__(self, dtype: str, shape: list[int], **_: Any):
        self.dtype, self.shape = dtype, shape

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, index: Any) -> AbsentSlice:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(self.shape, dtype=dtype or TYPES.get(self.dtype, torch.uint8), device="meta")
