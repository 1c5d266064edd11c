"""`cuda/optimizer8.cu`: optimizer steps with 8-bit state in bitsandbytes' dynamic map."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...formats.codebooks import dynamic_map
from ...ops.optimizer import ROUNDINGS, RULES, Parameters, update_parameters
from ..device import device_at, device_of
from ..operands import bump_versions
from ..parameter_tables import COLUMNS, TILE, tables
from ..tiling import ceil_div
from . import Kernel, cubin, remembered

AMPERE = (8, 0)  # redux.sync
THREADS, GROUP = 512, 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Step(ctypes.Structure):
    """The struct of this name in `cuda/optimizer8.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tiles", "table", "coefficients", "steps", "found", "values")),
        ("tile_count", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
    )


@remembered
def _kernel(device: int, rule: str, rounding: str, weight: torch.dtype, gradient: torch.dtype, aligned: bool) -> Kernel:
    constants = {
        "RULE": [*RULES].index(rule),
        "ROUNDING": ROUNDINGS.index(rounding),
        "WEIGHT": DTYPES.index(weight),
        "GRADIENT": DTYPES.index(gradient),
        "ALIGNED": int(aligned),
    }
    return Kernel(cubin("optimizer8", device_at(device).capability, constants, [Step]), "optimizer8")


@functools.cache
def _values(device: torch.device) -> Tensor:
    return torch.stack([dynamic_map(signed=signed) for signed in (True, False)]).to(device)


def obstacle(coefficients: Tensor, steps: Tensor, parameters: Parameters, found_inf: Tensor | None) -> str | None:
    if parameters.storage != "dynamic8":
        return "needs storage dynamic8"
    return (
        None if device_of(coefficients).at_least(AMPERE) else "needs an NVIDIA GPU of compute capability 8.0 or newer"
    )


@update_parameters.kernel("cuda", unless=obstacle, rank=-1)
def update(coefficients: Tensor, steps: Tensor, parameters: Parameters, found_inf: Tensor | None) -> None:
    device = coefficients.device
    tiles, table, aligned = tables(parameters, device)
    if not len(tiles):
        return
    pointers = [tensor.data_ptr() for tensor in (tiles, table, coefficients, steps)]
    found_inf_address = None if found_inf is None else found_inf.data_ptr()
    step = Step(*pointers, found_inf_address, _values(device).data_ptr(), len(tiles), COLUMNS)
    weight, gradient = parameters.weights[0].dtype, parameters.gradients[0].dtype
    blocks = min(ceil_div(len(tiles) * (TILE // GROUP), THREADS // 32), 2 * device_of(coefficients).multiprocessors)
    with torch.cuda.device(coefficients.get_device()):
        kernel = _kernel(coefficients.get_device(), parameters.rule, parameters.rounding, weight, gradient, aligned)
        kernel(blocks, THREADS, [step])
    bump_versions(*parameters.weights)
