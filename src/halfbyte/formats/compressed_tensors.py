"""The `quantization_config` of compressed-tensors checkpoints, as llm-compressor writes them.

`config_groups` maps names of groups to schemes. A scheme has the arguments of weights and activations, its layout
(`format`; the checkpoint's own if it has none) and the modules it applies to (`targets`). halfbyte computes with 16-bit
activations, so activation arguments of FP8 and FP4 schemes are not used, with a notice. Which modules are quantized is
read from the entries of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..utils.errors import CheckpointError
from ..utils.notices import notice

METHOD = "compressed-tensors"
PACK = "pack-quantized"
FLOAT = "float-quantized"
NVFP4 = "nvfp4-pack-quantized"
MXFP4 = "mxfp4-pack-quantized"
WIDTHS = (2, 3, 4, 5, 6, 8)  # of pack-quantized integers
USE_SUPPORTED = (
    "use a checkpoint with W4A16 or W8A16 (pack-quantized), FP8 (float-quantized), NVFP4 or MXFP4 weights,"
    " or the 16-bit model"
)
SUPPORTED: dict[str, dict[str, Sequence[Any]]] = {
    PACK: {
        "weights.num_bits": WIDTHS,
        "weights.type": ["int"],
        "weights.strategy": ["group", "channel"],
        "input_activations": [None],
    },
    FLOAT: {
        "weights.num_bits": [8],
        "weights.type": ["float"],
        "weights.strategy": ["tensor", "channel", "block"],
        "weights.block_structure": [None, [128, 128]],
    },
    NVFP4: {
        "weights.num_bits": [4],
        "weights.type": ["float"],
        "weights.strategy": ["tensor_group"],
        "weights.group_size": [16],
    },
    MXFP4: {
        "weights.num_bits": [4],
        "weights.type": ["float"],
        "weights.strategy": ["group"],
        "weights.group_size": [32],
    },
}
DEFAULTS = {"weights.type": "int", "weights.strategy": "group"}


@dataclass(frozen=True)
class Scheme:
    """The quantization of weights that all groups of a checkpoint share.

    Attributes:
        layout: `format` of the scheme, one of `SUPPORTED`.
        bits: bits of a code in the first group; other groups may have other widths of pack-quantized integers.
        group_size: weights per scale, or None.
        symmetric: whether there are no zeros.
        strategy: granularity of the scales.
    """

    layout: str
    bits: int
    group_size: int | None
    symmetric: bool
    strategy: str


def scheme_of(entry: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a `quantization_config`; None if another tool has written it.

    Raises:
        CheckpointError: halfbyte does not read the scheme, or groups have layouts that one file may not mix.
    """
    if entry.get("quant_method") != METHOD:
        return None
    groups = entry.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError("this compressed-tensors checkpoint has no config_groups", USE_SUPPORTED)
    sparse = (entry.get("sparsity_config") or {}).get("format") or "dense"
    if sparse != "dense":
        raise CheckpointError(
            f"this compressed-tensors checkpoint has sparsity_config.format {sparse!r}", USE_SUPPORTED
        )
    schemes = [_scheme(name, group, entry) for name, group in groups.items()]
    first = schemes[0]
    for name, scheme in zip(groups, schemes, strict=True):
        if (scheme.layout, scheme.symmetric) != (first.layout, first.symmetric):
            raise CheckpointError(
                f"this compressed-tensors checkpoint mixes layouts: {next(iter(groups))} is {_described(first)}, {name}"
                f" is {_described(scheme)}",
                "use a checkpoint with one layout; widths and groups of pack-quantized integers may differ",
            )
    return first


def _scheme(name: str, group: Any, entry: Mapping[str, Any]) -> Scheme:
    """Return the scheme of one group.

    Raises:
        CheckpointError: halfbyte does not read it.
    """
    if not isinstance(group, Mapping):
        raise CheckpointError(f"config_groups.{name} of this compressed-tensors checkpoint is {group!r}", USE_SUPPORTED)
    weights, layout = group.get("weights") or {}, group.get("format") or entry.get("format")
    if layout == "naive-quantized" and weights.get("type") == "float":
        layout = FLOAT
    if layout not in SUPPORTED:
        raise CheckpointError(f"this compressed-tensors checkpoint has format {layout!r}", USE_SUPPORTED)
    for key, values in SUPPORTED[layout].items():
        of, _, argument = key.rpartition(".")
        setting = (weights if of else group).get(argument) or DEFAULTS.get(key)
        if setting not in values:
            raise CheckpointError(
                f"this compressed-tensors checkpoint has {key} {setting!r} (config_groups.{name})", USE_SUPPORTED
            )
    if group.get("input_activations"):
        notice(
            "activations-16",
            "activations stay in 16 bits: halfbyte does not use the activation scales of this compressed-tensors"
            " checkpoint",
        )
    size = weights.get("group_size")
    return Scheme(
        layout,
        int(weights["num_bits"]),
        size if isinstance(size, int) and size > 0 else None,
        bool(weights.get("symmetric", True)),
        weights.get("strategy") or "group",
    )


def _described(scheme: Scheme) -> str:
    return scheme.layout + ("" if scheme.symmetric else " with zeros")
