"""NVFP4 weights, quantized here or by NVIDIA's ModelOpt.

`halfbyte.ops.nvfp4` specifies the values. A matrix is padded with zero columns to a multiple of 16; leading dimensions
count as rows; a vector is one row. ModelOpt's entries for a parameter `weight`, low nibble first:

    weight          uint8 [N, K/2]
    weight_scale    float8_e4m3fn [N, K/16]
    weight_scale_2  fp32 []
    input_scale     fp32 []: a calibrated activation scale. halfbyte ignores it: activations are 16-bit or, in the
                    `nvfp4` recipe, scaled by their own amax
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.e2m1 import E4M3_NAN, dequantize_e2m1
from ..ops.nvfp4 import BLOCK, Metric, packed_nvfp4
from ..utils.errors import CheckpointError, ModelError
from ..utils.notices import notice
from .base import Format, Parts, PartSpecs, check_parts, cut, entry_name, register_format, split_parts

CHOICES: dict[str, Metric | None] = {"plain": None, "46mse": "MSE", "46l1": "L1", "46absmax": "AbsMax"}
SCALE, FACTOR, INPUT_SCALE = "../weight_scale", "../weight_scale_2", "../input_scale"
DAMAGED = "re-download the checkpoint"


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrix that stores a tensor of `shape`."""
    columns = shape[-1] if shape else 1
    return torch.Size(shape[:-1]).numel(), columns


@register_format
@dataclass(frozen=True)
class Nvfp4(Format):
    """E2M1 codes with an E4M3 scale per block and one fp32 factor.

    Args:
        tiles: one scale per 16×16 tile (4.03 bits per weight), so that a weight and its transpose have equal values;
            otherwise one scale per 16 values of a row (4.5 bits).
        metric: error measure of a block that chooses between the scales of four-over-six; None: plain NVFP4.
    """

    tiles: bool = True
    metric: Metric | None = None

    name: ClassVar[str] = "nvfp4"
    names: ClassVar[dict[str, str]] = {
        "nvfp4": "nvfp4:2d:plain",
        "nvfp4-46": "nvfp4:2d:46mse",
        "nvfp4-1d": "nvfp4:1d:plain",
        "nvfp4-1d-46": "nvfp4:1d:46mse",
    }

    def __post_init__(self) -> None:
        if self.metric not in CHOICES.values():
            raise ModelError(f"four_over_six_metric {self.metric!r} is not a metric", "use 'MSE', 'L1' or 'AbsMax'")

    @property
    def spec(self) -> str:
        choice = next(word for word, metric in CHOICES.items() if metric == self.metric)
        return f"{self.name}:{'2d' if self.tiles else '1d'}:{choice}"

    @classmethod
    def parse(cls, options: str) -> Nvfp4:
        tiles, choice = options.split(":")
        return cls({"2d": True, "1d": False}[tiles], CHOICES[choice])

    @classmethod
    def examples(cls) -> list[Format]:
        return [cls(True), cls(False), cls(False, "MSE")]

    @property
    def tile(self) -> tuple[int, int]:
        return (BLOCK if self.tiles else 1), BLOCK

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        rows, columns = rows_and_columns(shape)
        blocks = -(-columns // BLOCK)
        return {
            "packed": ((rows, blocks * BLOCK // 2), torch.uint8),
            "scale": ((-(-rows // self.tile[0]), blocks), torch.uint8),
            "factor": ((), torch.float32),
        }

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_weight(weight)
        packed, scale, factor = packed_nvfp4(
            weight.reshape(rows_and_columns(tuple(weight.shape))), self.tile[0], self.metric
        )
        if not bool(torch.isfinite(factor)):
            raise ModelError("the weight has NaN or Inf", "repair the checkpoint: all scales would be lost")
        return {"packed": packed, "scale": scale, "factor": factor}

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        width = rows_and_columns(shape)[1]
        values = dequantize_e2m1(parts["packed"], parts["scale"], parts["factor"], self.tile, width, dtype)
        return values.view(shape)

    def dequantize_stack(self, parts: Parts, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor | None:
        if shape[1] % self.tile[0]:  # the last tile of each matrix is partial
            return None
        flat = {name: parts[name].flatten(0, 1) for name in ("packed", "scale")}
        return self.dequantize(flat | {"factor": parts["factor"]}, shape, dtype)

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        packed, scale = parts["packed"][rows], parts["scale"][rows // self.tile[0]]
        return dequantize_e2m1(packed, scale, parts["factor"], (1, BLOCK), shape[1], dtype)

    def _split(
        self, parts: Parts, shape: tuple[int, int], dim: int, n: int
    ) -> tuple[Format, list[dict[str, Tensor]]] | int:
        if dim and (shape[1] // n) % BLOCK:
            return BLOCK
        format_, scale = self, parts["scale"]
        if not dim and (shape[0] // n) % self.tile[0]:  # a shard boundary falls inside a tile
            format_, scale = replace(self, tiles=False), scale.repeat_interleave(self.tile[0], 0)[: shape[0]]
        cuts = {"packed": cut(parts["packed"], n, dim), "scale": cut(scale, n, dim)}
        return format_, split_parts(n, cuts, {"factor": parts["factor"]})

    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        """ModelOpt's entries for plain 1-d NVFP4 in bf16 without padding; halfbyte's own layout for anything else."""
        if self != Nvfp4(tiles=False) or len(shape) != 2 or shape[1] % BLOCK or dtype != torch.bfloat16:
            return super().to_state(parts, shape, dtype)
        return {"": parts["packed"], SCALE: parts["scale"].view(torch.float8_e4m3fn), FACTOR: parts["factor"]}

    @classmethod
    def from_state(cls, state: Parts, name: str) -> tuple[Format, dict[str, Tensor], tuple[int, ...], torch.dtype]:
        if not {SCALE, FACTOR} & state.keys():
            return super().from_state(state, name)
        if INPUT_SCALE in state:
            notice("nvfp4-input-scale", "NVFP4: input_scale is not used; activations are scaled by their own amax")
        parts = {
            part: state[key] for part, key in (("packed", ""), ("scale", SCALE), ("factor", FACTOR)) if key in state
        }
        packed = parts.get("packed")
        if packed is None or packed.dim() != 2:
            found = "missing" if packed is None else f"{tuple(packed.shape)}, not a matrix"
            raise CheckpointError(f"{name} is {found}", DAMAGED)
        if "factor" in parts and parts["factor"].numel() == 1:  # some exports write [1]
            parts["factor"] = parts["factor"].reshape(())
        format_, shape = cls(tiles=False), (packed.shape[0], 2 * packed.shape[1])
        specs = format_.part_specs(shape) | {"scale": ((shape[0], shape[1] // BLOCK), torch.float8_e4m3fn)}
        check_parts(parts, specs, {"packed": "", "scale": SCALE, "factor": FACTOR}, name)
        parts["scale"] = parts["scale"].view(torch.uint8)
        format_.check_values(parts, {"scale": entry_name(name, SCALE), "factor": entry_name(name, FACTOR)})
        return format_, parts, shape, torch.bfloat16

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        scale, factor = parts["scale"], parts["factor"]
        if scale.is_meta:
            return
        wrong = int((scale >= E4M3_NAN).sum())  # 0x7F is NaN, the sign bit is 0x80
        if wrong:
            raise CheckpointError(f"{labels['scale']} has {wrong} scales that are NaN or negative", DAMAGED)
        unusable = factor[~(factor.isfinite() & (factor >= 0))]
        if unusable.numel():
            raise CheckpointError(f"{labels['factor']} is {float(unusable[0])}, not a positive number", DAMAGED)

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        return super().state_suffixes() | {SCALE, FACTOR, INPUT_SCALE}

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        modelopt = entry.get("quant_method") == "modelopt" and entry.get("quant_algo") == "NVFP4"
        return cls(tiles=False) if modelopt else None
