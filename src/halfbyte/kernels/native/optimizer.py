"""C: optimizer steps of any number of parameters in one call, with threads over tiles.

With AdamW, fp32 weights and fp32 gradients a step moves 28 bytes an element with fp32 state and 16 with dynamic8.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops import optimizer as reference
from ...ops.optimizer import ROUNDINGS, RULES, TRUSTS, Parameters
from ...ops.optimizer_state import STORAGES, Storage, middles
from ...utils.errors import ModelError
from ..operands import bump_versions
from ..parameter_tables import fixed_columns
from . import library
from .blockwise4 import DTYPES

_pointer = ctypes.c_void_p


class _CodeTable(ctypes.Structure):
    """`code_table` of native/optimizer.c."""

    _fields_ = (("values", _pointer), ("buckets", _pointer))


class _Job(ctypes.Structure):
    """`update_job` of native/optimizer.c."""

    _fields_ = (
        *[(name, _pointer) for name in ("parameters", "ends", "coefficients", "steps")],
        ("tables", _CodeTable * 2),
        ("tiles", ctypes.c_int64),
        ("squares", _pointer),
        *[(name, ctypes.c_int32) for name in ("rule", "storage", "rounding", "weight", "gradient", "threads", "trust")],
    )


_lib = library("optimizer")
_lib.halfbyte_update_parameters.argtypes, _lib.halfbyte_update_parameters.restype = [_pointer], None
_lib.halfbyte_prepare_step.argtypes = [_pointer] * 4 + [ctypes.c_int64, ctypes.c_int, ctypes.c_double, ctypes.c_int]
_lib.halfbyte_prepare_step.restype = None
_lib.halfbyte_optimizer_tile.argtypes, _lib.halfbyte_optimizer_tile.restype = [], ctypes.c_int64
TILE = _lib.halfbyte_optimizer_tile()


@functools.cache
def _code_table(storage: Storage, signed: bool) -> tuple[Tensor, Tensor | None]:
    """fp32 values of the codes for a scale of 1, and the uint32 entries of `dynamic_block`."""
    codes = torch.arange(256, dtype=torch.uint8).view(storage.codes_dtype(signed))
    values = storage.ratios(codes, signed)
    if storage.name != "dynamic8":
        return values, None
    limits = middles(values)
    if signed:  # a negative ratio does not get the code of zero
        limits[126] = -torch.finfo(torch.float32).smallest_normal * 2**-23
    shift = 17 if signed else 16
    keys, (last,) = _keys(limits), _keys(torch.ones(1)).tolist()
    first = (-last >> shift) - 1 if signed else 0
    starts = torch.arange(first, (last >> shift) + 1, dtype=torch.int32) << shift
    entries = torch.searchsorted(keys, starts) << 24
    entries[(keys >> shift) - first] += 0xFFFFFF - (keys & (1 << shift) - 1)
    return values, entries.to(torch.uint32)


def _keys(values: Tensor) -> Tensor:
    """The bits of fp32 values, as int32 with the same order."""
    bits = values.view(torch.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


@reference.prepare_step.kernel("cpu")
def prepare_step(
    settings: Tensor,
    groups: Tensor,
    steps: Tensor,
    coefficients: Tensor,
    rule: str,
    factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    if not (steps.is_contiguous() and coefficients.is_contiguous()):
        raise ModelError("the steps or coefficients of an optimizer are not contiguous", "call `contiguous` first")
    settings, groups = settings.contiguous(), groups.contiguous()
    pointers = (tensor.data_ptr() for tensor in (settings, groups, steps, coefficients))
    scale, counted = 1.0 if factor is None else float(factor), found_inf is None or float(found_inf) == 0
    _lib.halfbyte_prepare_step(*pointers, len(steps), [*RULES].index(rule), scale, counted)
    bump_versions(steps, coefficients)


def obstacle(coefficients: Tensor, steps: Tensor, parameters: Parameters, *_: Any, **__: Any) -> str | None:
    if not parameters.weights:
        return None
    weight, gradient = parameters.weights[0].dtype, parameters.gradients[0].dtype
    if weight not in DTYPES or gradient not in DTYPES:
        return "takes fp32, bf16 and fp16"
    if parameters.rounding != "nearest" and weight != torch.bfloat16:
        return "rounds weights other than bf16 to the nearest only"
    return None


@reference.update_parameters.kernel("cpu", unless=obstacle)
def update_parameters(coefficients: Tensor, steps: Tensor, parameters: Parameters, found_inf: Tensor | None) -> None:
    if not parameters.weights or (found_inf is not None and float(found_inf) != 0):
        return
    coefficients, steps = coefficients.contiguous(), steps.contiguous()
    job = _launch_of(parameters).job
    job.coefficients = coefficients.data_ptr()
    job.steps = steps.data_ptr()
    job.threads = torch.get_num_threads()
    job.trust = 0
    _lib.halfbyte_update_parameters(ctypes.byref(job))
    bump_versions(*parameters.weights)


def trust_obstacle(coefficients: Tensor, parameters: Sequence[Parameters], trust: str) -> str | None:
    return next((why for group in parameters if (why := obstacle(coefficients, coefficients, group))), None)


@reference.scale_by_trust.kernel("cpu", unless=trust_obstacle)
def scale_by_trust(coefficients: Tensor, parameters: Sequence[Parameters], trust: str) -> Tensor:
    squares = torch.zeros(len(coefficients), 2)
    contiguous = coefficients.contiguous()
    for group in parameters:
        if not group.weights:
            continue
        launch = _launch_of(group)
        partial = torch.empty(launch.job.tiles, 2, dtype=torch.float64)
        job = launch.job
        job.coefficients = contiguous.data_ptr()
        job.threads = torch.get_num_threads()
        job.squares = partial.data_ptr()
        job.trust = 1 + [*TRUSTS].index(trust)
        _lib.halfbyte_update_parameters(ctypes.byref(job))
        tiles = torch.diff(launch.ends, prepend=torch.zeros(1, dtype=torch.int64))
        total = torch.zeros(len(tiles), 2, dtype=torch.float64)
        squares[group.rows.long()] = total.index_add_(
            0, torch.repeat_interleave(torch.arange(len(tiles)), tiles), partial
        ).float()
        reference.apply_trust(coefficients, squares, group.rows, trust)
    return squares


def _launch_of(parameters: Parameters) -> _Launch:
    """The kept arguments of a launch, with the current addresses."""
    launch: _Launch | None = parameters.launch.get("native")
    if launch is None:
        launch = parameters.launch["native"] = _Launch(parameters)
    launch.read_addresses(parameters)
    return launch


class _Launch:
    """The arguments of a launch, kept between steps."""

    def __init__(self, parameters: Parameters):
        self.table = fixed_columns(parameters)
        self.ends = ((self.table[:, 0] + TILE - 1) // TILE).cumsum(0)
        self.moving: tuple[list[int], list[int]] = [], []
        self.job = job = _Job(self.table.data_ptr(), self.ends.data_ptr(), tiles=int(self.ends[-1]))
        storage = STORAGES[parameters.storage]
        if storage.block:
            for signed in (False, True):
                values, buckets = _code_table(storage, signed)
                job.tables[signed] = _CodeTable(values.data_ptr(), None if buckets is None else buckets.data_ptr())
        job.rule, job.storage = [*RULES].index(parameters.rule), [*STORAGES].index(parameters.storage)
        job.rounding = ROUNDINGS.index(parameters.rounding)
        job.weight, job.gradient = DTYPES[parameters.weights[0].dtype], DTYPES[parameters.gradients[0].dtype]

    def read_addresses(self, parameters: Parameters) -> None:
        """Write the addresses of weights and gradients to the table if one has moved.

        Raises:
            ModelError: a weight or a gradient is not contiguous.
        """
        moving = [*map(Tensor.data_ptr, parameters.weights)], [*map(Tensor.data_ptr, parameters.gradients)]
        if moving == self.moving:
            return
        if not all(tensor.is_contiguous() for tensor in (*parameters.weights, *parameters.gradients)):
            raise ModelError("a weight or a gradient of an optimizer is not contiguous", "call `contiguous` first")
        self.table[:, 2], self.table[:, 3] = (torch.tensor(tensor) for tensor in moving)
        self.moving = moving
