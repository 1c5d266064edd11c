"""Checkpoint entries of formats that halfbyte defines: each part under its name, and a JSON that says what they are.

For a parameter `weight` in format `f`: `weight` holds the codes, `weight.<part>` every other part, and
`weight.quant_state.halfbyte__f` the JSON: spec, dtype, shape.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from ..errors import CheckpointError, ModelError
from .base import FLOATS, FORMATS, Format, Parts

CODES = "packed"  # the part that is stored under the parameter's own name


def state_key(format_name: str) -> str:
    """The suffix of the JSON entry."""
    return f"quant_state.halfbyte__{format_name}"


def write_state(format: Format, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """What `Format.to_state` returns."""
    meta = {"spec": format.spec, "dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
    state = {"" if name == CODES else name: part for name, part in parts.items()}
    state[state_key(format.name)] = torch.frombuffer(bytearray(json.dumps(meta).encode()), dtype=torch.uint8)
    return state


def read_state(
    format_name: str, state: Parts, name: str
) -> tuple[Format, dict[str, Tensor], tuple[int, ...], torch.dtype]:
    """What `Format.from_state` returns: parts of the shapes and dtypes that the JSON implies, floats finite.

    Raises:
        CheckpointError: an entry of parameter `name` is missing, misshapen, not finite or contradicts another.
    """
    key = state_key(format_name)
    if key not in state:
        raise CheckpointError(f"{name}.{key} is missing", "re-download the checkpoint")
    try:
        meta = json.loads(bytes(state[key].cpu().tolist()))
        kind, _, options = meta["spec"].partition(":")
        if kind != format_name:
            raise ModelError(f"spec {meta['spec']!r} is not one of {format_name}")
        format_ = FORMATS[kind].parse(options)
        shape, dtype = tuple(torch.Size(meta["shape"])), getattr(torch, meta["dtype"])
        if dtype not in FLOATS or min(shape, default=0) < 0:
            raise ModelError(f"a weight of {meta['dtype']} {shape}")
    except (ValueError, TypeError, KeyError, AttributeError, ModelError) as error:
        raise CheckpointError(f"{name}.{key} is not usable: {error!r}", "re-download the checkpoint") from error
    parts = {}
    for part, (size, expected) in format_.part_specs(shape).items():
        suffix = "" if part == CODES else part
        label = f"{name}.{suffix}".rstrip(".")
        if suffix not in state:
            raise CheckpointError(f"{label} is missing from the checkpoint", "re-download the checkpoint")
        found = parts[part] = state[suffix]
        if tuple(found.shape) != size or found.dtype != expected:
            raise CheckpointError(
                f"{label} is {found.dtype} {tuple(found.shape)}, expected {expected} {size} for a weight of {shape}",
                "re-download the checkpoint",
            )
        if found.is_floating_point() and not found.is_meta and not bool(torch.isfinite(found).all()):
            raise CheckpointError(f"{label} has NaN or Inf", "re-download the checkpoint")
    return format_, parts, shape, dtype
