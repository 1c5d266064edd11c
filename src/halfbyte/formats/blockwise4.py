"""NF4 and FP4 with optional nested scales; bytes and state-dict keys are interchangeable with bitsandbytes'.

A tensor is read flat, row-major, in blocks that may cross rows. Each block has one scale, its largest magnitude
(absmax). A weight's code is the nearest of 16 values after division by the scale. Two codes share a byte, the even
element in the high nibble. Nested scales (double quantization, QLoRA section 3) store absmax minus its mean in 8 bits
of the signed dynamic data type, in blocks of 256 scales.

Bytes equal those of bitsandbytes' CPU backend, values those of all its backends: value = fp32 codebook entry × fp32
scale, rounded once to the result's dtype. A nested scale is rounded twice (× then +), never a fused multiply-add.

Decoding runs linears y = x·Wᵀ + b for a few rows x [M, K]. These are bound by reading W [N, K], so kernels decode W in
registers and never write it: they move K·N/2 bytes of codes and a scale per block.

Checkpoint entries of a parameter `weight`:

    weight                                uint8 [(n+1)//2, 1]
    weight.absmax                         fp32 [blocks], or uint8 [blocks] when nested
    weight.quant_map                      fp32 [16], the codebook
    weight.nested_absmax                  fp32 [⌈blocks/256⌉]        only when nested
    weight.nested_quant_map               fp32 [256]                 only when nested
    weight.quant_state.bitsandbytes__nf4  uint8, JSON: quant_type, blocksize, dtype, shape[, nested_blocksize,
                                          nested_dtype, nested_offset]   (or __fp4)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import CheckpointError, ModelError
from .base import (
    DAMAGED,
    DECODED,
    Format,
    Parts,
    PartSpecs,
    Shards,
    check_finite,
    check_not_negative,
    check_parts,
    check_weight_finite,
    entry_name,
    json_entry,
    read_json_entry,
    register_format,
    split_parts,
)
from .codebooks import codebook4, dequantize_blockwise8, dynamic_map, quantize_blockwise8, thresholds4
from .linear import PackedProduct, linear_rows

NESTED_BLOCK = 256


def _normalized(flat: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """fp32 values in [-1, 1] of a flat tensor, and fp32 absmax per block.

    As in bitsandbytes' CPU backend, full blocks multiply by the reciprocal and a partial last block divides; some codes
    differ between the two. An all-zero full block keeps absmax 0 and encodes zeros.
    """
    flat = flat.float()
    full = flat.numel() // blocksize * blocksize
    blocks = flat[:full].view(-1, blocksize)
    absmax = torch.linalg.vector_norm(blocks, torch.inf, dim=1) if full else flat.new_empty(0)
    scaled = (blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(1)).clamp_(-1, 1).view(-1)
    if full < flat.numel():
        tail_max = flat[full:].abs().max().clamp(min=1e-38)
        absmax = torch.cat([absmax, tail_max.view(1)])
        scaled = torch.cat([scaled, (flat[full:] / tail_max).clamp_(-1, 1)])
    return scaled, absmax


@op("triton.blockwise4", "native.blockwise4")
def quantize_blockwise4(weight: Tensor, blocksize: int, quant_type: str) -> tuple[Tensor, Tensor]:
    """Quantize a tensor of n values to packed codes and scales.

    Args:
        weight: any shape; fp32, fp16 or bf16.
        blocksize: values per scale, 32-4096.
        quant_type: "nf4" or "fp4".

    Returns:
        packed uint8 [(n+1)//2, 1] and absmax fp32 [⌈n/blocksize⌉]. With odd n the last low nibble encodes 0.
    """
    scaled, absmax = _normalized(weight.reshape(-1), blocksize)
    if scaled.numel() % 2:
        scaled = torch.nn.functional.pad(scaled, (0, 1))
    midpoints, code_of_rank = thresholds4(quant_type, weight.device)
    rank = torch.bucketize(scaled, midpoints, out_int32=True)
    codes = rank.to(torch.uint8) if quant_type == "nf4" else code_of_rank[rank]
    return ((codes[::2] << 4) | codes[1::2]).unsqueeze(1), absmax


@op("triton.blockwise4", "native.blockwise4")
def dequantize_blockwise4(
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    numel: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize packed codes.

    Args:
        packed: uint8, (numel+1)//2 bytes.
        absmax: fp32 [⌈numel/blocksize⌉], or uint8 of that length when `nested` is given.
        nested: fp32 [⌈blocks/256⌉] second-level scales, fp32 [256] their code, fp32 [] offset.
        blocksize: values per scale; even.
        quant_type: "nf4" or "fp4".
        numel: number of values.
        dtype: fp32, fp16 or bf16.

    Returns:
        `dtype` [numel].
    """
    scales = absmax if nested is None else dequantize_scales(absmax, *nested)
    codes = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], dim=1).view(-1)[:numel]
    values = codebook4(quant_type, packed.device)[codes.int()]
    return (values * scales.repeat_interleave(blocksize)[:numel]).to(dtype)


def quantize_scales(absmax: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize scales: uint8 [blocks], fp32 [⌈blocks/256⌉] second-level scales, fp32 [] offset (the mean).

    Args:
        absmax: fp32 [blocks].
        code: fp32 [256], sorted (`dynamic_map`).
    """
    offset = absmax.mean()
    quantized, second = quantize_blockwise8(absmax - offset, code, NESTED_BLOCK)
    return quantized, second, offset


def dequantize_scales(quantized: Tensor, second: Tensor, code: Tensor, offset: Tensor) -> Tensor:
    """Dequantize nested scales to fp32 [blocks]; arguments are as `quantize_scales` returns them."""
    return dequantize_blockwise8(quantized, second, code, NESTED_BLOCK, torch.float32).add_(offset)


def _scales_of(absmax: Tensor, nested: tuple[Tensor, Tensor, Tensor] | None, block: Tensor) -> Tensor:
    """Scales, fp32, of the blocks with these indices."""
    if nested is None:
        return absmax[block]
    second, code, offset = nested
    return code[absmax[block].int()] * second[block // NESTED_BLOCK] + offset


def dequantize_rows_blockwise4(
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    width: int,
    rows: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize chosen rows of a [*, width] table, to `dtype` [rows, width]. See `dequantize_blockwise4`."""
    if width % blocksize == 0:  # whole blocks per row: gather bytes and scales, then dequantize a smaller table
        blocks_per_row = width // blocksize
        block = rows.long().unsqueeze(1) * blocks_per_row + torch.arange(blocks_per_row, device=packed.device)
        scales = _scales_of(absmax, nested, block).view(-1)
        codes = packed.view(-1, width // 2).index_select(0, rows).view(-1)
        numel = rows.numel() * width
        return dequantize_blockwise4(codes, scales, None, blocksize, quant_type, numel, dtype).view(-1, width)
    element = rows.long().unsqueeze(1) * width + torch.arange(width, device=packed.device)
    byte = packed.view(-1)[element >> 1]
    codes = torch.where(element % 2 == 0, byte >> 4, byte & 15)
    scales = _scales_of(absmax, nested, element // blocksize)
    return (codebook4(quant_type, packed.device)[codes.int()] * scales).to(dtype)


@op(
    "cuda.gemv4_row", "cuda.gemm4", "cuda.gemv4", "cuda.few_rows", "triton.few_rows",
    "native.few_rows", "native.decode4",
)  # fmt: skip
def linear_blockwise4(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    rows: int,
    bias: Tensor | None,
) -> Tensor:
    """`F.linear` of rows with a packed weight; no gradient.

    Kernels may sum in another order, and keep weights in fp32 where the reference rounds them to x's dtype.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        packed: uint8, (N·K+1)//2 bytes.
        absmax, nested, blocksize, quant_type: as in `dequantize_blockwise4`; blocks may cross rows.
        rows: N.
        bias: [N] in x's dtype, or None.
    Returns:
        [M, N] in x's dtype.
    """
    return linear_rows(x, dequantized(x, packed, absmax, nested, blocksize, quant_type, rows), bias)


def dequantized(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    rows: int,
) -> Tensor:
    """Dequantized weight of `linear_blockwise4`, [N, K] in x's dtype."""
    numel = rows * x.shape[1]
    values = dequantize_blockwise4(packed, absmax, nested, blocksize, quant_type, numel, x.dtype)
    return values.view(rows, x.shape[1])


BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
STATE_KEYS = {quant_type: f"quant_state.bitsandbytes__{quant_type}" for quant_type in ("nf4", "fp4")}
PART_OF_KEY = {"": "packed", "absmax": "absmax", "nested_absmax": "nested_absmax", "nested_quant_map": "nested_code"}


@register_format
@dataclass(frozen=True)
class Blockwise4(Format):
    """4-bit codes with one scale per `blocksize` weights.

    Args:
        quant_type: "nf4" or "fp4".
        blocksize: one of 32, 64, ..., 4096.
        nested: store the scales in 8 bits (double quantization).
    """

    quant_type: Literal["nf4", "fp4"] = "nf4"
    blocksize: int = 64
    nested: bool = False

    name: ClassVar[str] = "blockwise4"
    names: ClassVar[dict[str, str]] = {"nf4": "blockwise4:nf4:64:nested", "fp4": "blockwise4:fp4:64:nested"}

    def __post_init__(self) -> None:
        if self.quant_type not in STATE_KEYS:
            raise ModelError(f"quant_type {self.quant_type!r} is not a 4-bit type", "use 'nf4' or 'fp4'")
        if self.blocksize not in BLOCKSIZES:
            raise ModelError(f"blocksize {self.blocksize} is not supported", f"use one of {BLOCKSIZES}")

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.quant_type}:{self.blocksize}:{'nested' if self.nested else 'plain'}"

    @classmethod
    def parse(cls, options: str) -> Blockwise4:
        quant_type, blocksize, scales = options.split(":")
        return cls(quant_type, int(blocksize), scales == "nested")  # type: ignore[arg-type]

    @classmethod
    def examples(cls) -> list[Format]:
        return [cls("nf4", 64, False), cls("nf4", 64, True), cls("fp4", 32, True), cls("nf4", 1024, False)]

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        numel = torch.Size(shape).numel()
        blocks = -(-numel // self.blocksize)
        specs: PartSpecs = {"packed": (((numel + 1) // 2, 1), torch.uint8)}
        if not self.nested:
            return specs | {"absmax": ((blocks,), torch.float32)}
        return specs | {
            "absmax": ((blocks,), torch.uint8),
            "nested_absmax": ((-(-blocks // NESTED_BLOCK),), torch.float32),
            "nested_code": ((256,), torch.float32),
            "nested_offset": ((), torch.float32),
        }

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_weight(weight)
        packed, absmax = quantize_blockwise4(weight, self.blocksize, self.quant_type)
        check_weight_finite(absmax, "a block with one would hold only NaN")
        return self._nested(packed, absmax) if self.nested else {"packed": packed, "absmax": absmax}

    def _nested(self, packed: Tensor, absmax: Tensor) -> dict[str, Tensor]:
        code = dynamic_map(absmax.device)
        quantized, second, offset = quantize_scales(absmax, code)
        return {
            "packed": packed,
            "absmax": quantized,
            "nested_absmax": second,
            "nested_code": code,
            "nested_offset": offset,
        }

    def nested_parts(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor] | None:
        """The argument `nested` of `dequantize_blockwise4`."""
        return (parts["nested_absmax"], parts["nested_code"], parts["nested_offset"]) if self.nested else None

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numel = torch.Size(shape).numel()
        return dequantize_blockwise4(
            parts["packed"], parts["absmax"], self.nested_parts(parts), self.blocksize, self.quant_type, numel, dtype
        ).view(shape)

    def product(self, parts: Parts, shape: tuple[int, int]) -> PackedProduct:
        scales = parts["absmax"], self.nested_parts(parts)
        return PackedProduct(linear_blockwise4, (parts["packed"], *scales, self.blocksize, self.quant_type, shape[0]))

    def stacked(self) -> Blockwise4:
        """This format: like bitsandbytes, it stores a stack as one flat tensor."""
        return self

    def quantize_stack(self, weights: Iterable[Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        if self.nested:  # nested scales span matrices, so they are computed from all plain ones
            return self._nested(**replace(self, nested=False).quantize_stack(weights, shape))
        return super().quantize_stack(weights, shape)

    def concat_rows(self, pieces: Sequence[Parts], shape: tuple[int, int]) -> tuple[Format, dict[str, Tensor]]:
        plain = replace(self, nested=False)
        plain.check_stack((len(pieces), *shape))
        scales = [
            dequantize_scales(piece["absmax"], *nested) if (nested := self.nested_parts(piece)) else piece["absmax"]
            for piece in pieces
        ]
        return plain, {"packed": torch.cat([piece["packed"] for piece in pieces]), "absmax": torch.cat(scales)}

    def expert(self, parts: Parts, shape: tuple[int, ...], index: int) -> tuple[Format, dict[str, Tensor]]:
        """See `Format`. Where a block of nested scales spans experts, the scales are a copy that is not nested."""
        self.check_stack(shape)
        run = shape[1] * shape[2]
        blocks = run // self.blocksize
        first = index * blocks
        codes, absmax = parts["packed"][index * run // 2 : (index + 1) * run // 2], parts["absmax"]
        nested = self.nested_parts(parts)
        if nested is None:
            return self, {"packed": codes, "absmax": absmax[first : first + blocks]}
        second, code, offset = nested
        begin, end = first // NESTED_BLOCK, -(-(first + blocks) // NESTED_BLOCK)
        if blocks % NESTED_BLOCK == 0:
            scales = {"absmax": absmax[first : first + blocks], "nested_absmax": second[begin:end]}
            return self, {"packed": codes, **scales, "nested_code": code, "nested_offset": offset}
        covering = dequantize_scales(absmax[begin * NESTED_BLOCK : first + blocks], second[begin:end], code, offset)
        return replace(self, nested=False), {"packed": codes, "absmax": covering[-blocks:]}

    def check_stack(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 3 or (shape[1] * shape[2]) % self.blocksize:
            raise ModelError(
                f"{self.spec}: a stack of shape {tuple(shape)} has no whole blocks in each matrix",
                f"rows × columns must be a multiple of {self.blocksize}: take smaller blocks or another format",
            )

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize_rows_blockwise4(
            parts["packed"],
            parts["absmax"],
            self.nested_parts(parts),
            self.blocksize,
            self.quant_type,
            shape[1],
            rows,
            dtype,
        )

    def _split(self, parts: Parts, shape: tuple[int, int], dim: int, n: int) -> Shards | int:
        run = shape[1] // n if dim else shape[0] * shape[1] // n  # contiguous values of one shard
        lines = shape[0] if dim else 1

        def cut(tensor: Tensor) -> list[Tensor]:
            return [shard.reshape(-1).clone() for shard in tensor.view(lines, n, -1).unbind(1)]

        codes = [shard.unsqueeze(1) for shard in cut(parts["packed"])] if run % 2 == 0 else []
        if self.nested and not dim and run % (self.blocksize * NESTED_BLOCK) == 0:
            cuts = {"packed": codes, "absmax": cut(parts["absmax"]), "nested_absmax": cut(parts["nested_absmax"])}
            return self, split_parts(n, cuts, {name: parts[name] for name in ("nested_code", "nested_offset")})
        size = max((size for size in BLOCKSIZES if self.blocksize % size == 0 == run % size), default=0)
        if not size:
            return BLOCKSIZES[0]
        nested = self.nested_parts(parts)
        scales = parts["absmax"] if nested is None else dequantize_scales(parts["absmax"], *nested)
        scales = scales.repeat_interleave(self.blocksize // size)[: shape[0] * shape[1] // size]
        return Blockwise4(self.quant_type, size), split_parts(n, {"packed": codes, "absmax": cut(scales)}, {})

    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        packed = parts["packed"]
        meta: dict[str, Any] = {
            "quant_type": self.quant_type,
            "blocksize": self.blocksize,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(shape),
        }
        state = {suffix: parts[part_name] for suffix, part_name in PART_OF_KEY.items() if part_name in parts}
        state["quant_map"] = codebook4(self.quant_type, packed.device).clone()
        if self.nested:
            offset = float(parts["nested_offset"])
            meta |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
        state[STATE_KEYS[self.quant_type]] = json_entry(meta)
        return state

    @classmethod
    def from_state(cls, state: Parts, name: str) -> tuple[Blockwise4, dict[str, Tensor], tuple[int, ...], torch.dtype]:
        meta = read_quant_state(state, name)
        nested = "nested_offset" in meta
        try:
            format_ = cls(meta["quant_type"], meta["blocksize"], nested)
            shape, dtype = tuple(torch.Size(meta["shape"])), getattr(torch, meta["dtype"])
            offset = float(meta.get("nested_offset", 0.0))
        except (KeyError, ModelError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{name}: its quant_state is not usable: {error!r}", DAMAGED) from error
        if nested and (meta.get("nested_blocksize"), meta.get("nested_dtype")) != (NESTED_BLOCK, "float32"):
            message = f"{name}: its nested scales are not float32 in blocks of {NESTED_BLOCK}"
            raise CheckpointError(message, "re-quantize the model")
        if min(shape, default=0) < 0:
            raise CheckpointError(f"{name}: its quant_state has the shape {shape}", DAMAGED)
        if dtype not in DECODED:
            raise CheckpointError(f"{name}: dtype {dtype} is not a 16- or 32-bit float", "re-quantize the model")
        parts = {part_name: state[suffix] for suffix, part_name in PART_OF_KEY.items() if suffix in state}
        if "packed" in parts:
            # bitsandbytes can store the bytes viewed as bf16, fp16 or fp32 (bnb_4bit_quant_storage).
            parts["packed"] = parts["packed"].contiguous().view(-1).view(torch.uint8).view(-1, 1)
        if nested:
            parts["nested_offset"] = torch.tensor(offset, dtype=torch.float32, device=next(iter(state.values())).device)
        suffixes = {part_name: suffix for suffix, part_name in PART_OF_KEY.items()}
        check_parts(parts, format_.part_specs(shape), suffixes, name)
        labels = {key: entry_name(name, suffixes.get(key, key)) for key in parts}
        format_.check_values(parts, labels)
        stored_map = state.get("quant_map")
        if stored_map is not None and not stored_map.is_meta:
            expected = codebook4(format_.quant_type, stored_map.device)
            if stored_map.shape != expected.shape or not torch.allclose(stored_map.float(), expected, atol=1e-6):
                message = f"{name}.quant_map is not the {format_.quant_type} codebook"
                raise CheckpointError(message, "re-quantize the model")
        return format_, parts, shape, dtype

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Blockwise4 | None:
        if entry.get("quant_method", "bitsandbytes") != "bitsandbytes" or not entry.get("load_in_4bit"):
            return None
        nested = bool(entry.get("bnb_4bit_use_double_quant"))
        return cls(entry.get("bnb_4bit_quant_type", "fp4"), nested=nested)

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        check_finite(parts, labels)
        scales = "nested_absmax" if self.nested else "absmax"
        check_not_negative(parts[scales], labels[scales])


def read_quant_state(state: Parts, name: str) -> dict[str, Any]:
    """The JSON `quant_state` entry of a bitsandbytes 4-bit weight, as a dict.

    Raises:
        CheckpointError: the entry is missing or is not JSON.
    """
    for key in STATE_KEYS.values():
        if key in state:
            return read_json_entry(state, key, name)
    raise CheckpointError(f"{name}.quant_state.bitsandbytes__* is missing", DAMAGED)
