"""Affine integers of GPTQ, AWQ and compressed-tensors checkpoints. 4-bit codes are loaded and saved byte for byte.

Weights are quantized to them without calibration: nearest, with the best scale of each group (`affine.py`).

    value[n, k] = (code − zero[group(k), n]) · scale[group(k), n]

Eight codes share an int32, those of eight neighbouring inputs; eight zeros, those of neighbouring outputs. The product
of a 5-bit integer and a 16-bit scale is exact in fp32 and rounded once; in fp16 this equals the multiplication of the
published readers.

A module whose parameter `weight` has K inputs and N outputs in G groups has these parts, which are GPTQ's entries:

    qweight  int32 [K/8, N]
    qzeros   int32 [G, N/8]
    scales   fp16, bf16 or fp32 [G, N]
    g_idx    int32 [K], the group of each input, if it is stored; in any order after quantization with `desc_act`

In memory the inputs of such a weight are sorted by group, and `order` int32 [2, K] replaces g_idx: the input that each
row of codes belongs to, and the inverse of this permutation.

GPTQ's first format stores zeros minus one; `checkpoint_format: gptq_v2` stores the zeros. AWQ stores qweight as
[K, N/8]: a word has eight neighbouring outputs in the order 0, 2, 4, 6, 1, 3, 5, 7, like its zeros (AutoAWQ's "gemm"
version). The "pack-quantized" layout of compressed-tensors is the transpose of gptq_v2; its signed codes and zeros, -8
to 7, are stored with 8 added:

    weight_packed      int32 [N, K/8]
    weight_zero_point  int32 [N/8, G]; none where all zeros are 0, which is 8 in memory
    weight_scale       bf16 or fp16 [N, G]
    weight_shape       int64 [2]: N, K
    weight_g_idx       int32 [K], as g_idx

Codes and zeros of b bits take K·b/32 and N·b/32 words instead: one stream of bits, lowest first. The width follows from
the shapes, so a file may mix widths. Other widths than 4 are loaded into bit planes (`formats.integers`), with the
values of the file, and saved in halfbyte's layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import CheckpointError, ModelError
from .affine import quantize_affine
from .base import (
    DAMAGED,
    FLOATS,
    Format,
    Loaded,
    Parts,
    PartSpecs,
    Shards,
    check_parts,
    cut,
    entry_name,
    register_format,
    split_parts,
)
from .bitplane import BLOCK
from .compressed_tensors import PACK as PACK_QUANTIZED
from .compressed_tensors import WIDTHS, scheme_of
from .hqq import HQQ
from .integers import WORD, codes_per_period, order_of_groups, planes_group, to_planes, unpack_words
from .linear import PackedProduct, linear_rows

BITS = 4
PACK = 8  # codes per word
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each of eight neighbours in a word


def _unpack(words: Tensor, dim: int) -> Tensor:
    """Unpack to int32 codes, lowest bits first; `dim` of `words` grows eightfold."""
    codes = [(words >> shift) & 15 for shift in range(0, 32, 4)]
    return torch.stack(codes, dim=dim + 1).flatten(dim, dim + 1)


def _pack(codes: Tensor, dim: int, bits: int = BITS) -> Tensor:
    """Pack int32 codes of a width that divides 32; for 4 bits, the inverse of `_unpack`."""
    places = codes.unflatten(dim, (-1, WORD // bits)).unbind(dim + 1)
    return functools.reduce(torch.bitwise_or, [code << bits * i for i, code in enumerate(places)]).contiguous()


@op("triton.dequantize")
def dequantize_int4(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    group_index: Tensor | None,
    order: Tensor | None,
    zero_shift: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize a packed matrix with K inputs and N outputs, or a stack, whose tensors have a leading dimension E.

    Args:
        qweight: int32 [K/8, N].
        qzeros: int32 [G, N/8].
        scales: [G, N], a 16- or 32-bit float.
        group_index: int32 [K], the group of each row of codes; None: G groups of equal length.
        order: int32 [2, K], the input of each row of codes, and the row of each input; None: rows are inputs.
        zero_shift: added to a stored zero, modulo 16.

    Returns:
        `dtype` [N, K] or [E, N, K], rounded once from fp32.
    """
    if qweight.dim() == 3:
        stored = qweight, qzeros, scales, group_index, order
        experts = ([None if part is None else part[e] for part in stored] for e in range(len(qweight)))
        return torch.stack([dequantize_int4.reference(*parts, zero_shift, dtype) for parts in experts])
    codes = _unpack(qweight, 0)
    zeros = (_unpack(qzeros, 1) + zero_shift) & 15
    factors = scales.float()
    if group_index is None:
        runs = codes.view(len(scales), -1, codes.shape[1])
        values = ((runs - zeros.unsqueeze(1)) * factors.unsqueeze(1)).view(codes.shape)
    else:
        group = group_index.long()
        values = (codes - zeros[group]) * factors[group]
    if order is not None:
        values = values[order[1]]
    return values.t().to(dtype).contiguous()


@op("cuda.few_rows", "triton.few_rows", "native.few_rows")
def linear_int4(
    x: Tensor,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    group_index: Tensor | None,
    order: Tensor | None,
    zero_shift: int,
    bias: Tensor | None,
) -> Tensor:
    """`F.linear` of rows with a packed weight; no gradient.

    Kernels may sum in another order, and scale sums in fp32 where the reference rounds weights to x's dtype.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        qweight, qzeros, scales, group_index, order, zero_shift: as in `dequantize_int4`.
        bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    weight = dequantize_int4(qweight, qzeros, scales, group_index, order, zero_shift, x.dtype)
    return linear_rows(x, weight, bias)


ENTRIES = {"qweight": "../qweight", "qzeros": "../qzeros", "scales": "../scales", "g_idx": "../g_idx"}
PACKED = {
    "qweight": "../weight_packed", "qzeros": "../weight_zero_point", "scales": "../weight_scale",
    "g_idx": "../weight_g_idx", "shape": "../weight_shape",
}  # fmt: skip
GROUPS = ("runs", "listed", "ordered", "indexed")  # how inputs are divided into groups: see `Int4.groups`
ZERO_CODES = -0x77777778  # 0x88888888: eight codes of 8, the zero point of symmetric weights


@dataclass(frozen=True)
class Int4(Format):
    """Affine integers in another tool's layout. Weights in memory have 4 bits; others describe a checkpoint.

    Args:
        group_size: inputs that share a scale and a zero; with `groups` "indexed", K over the number of groups.
        scale_dtype: dtype of the stored scales: "float16", "bfloat16" or "float32".
        groups: "runs": `group_size` consecutive inputs; "listed": the same, and checkpoints list them in `g_idx`;
            "ordered": `group_size` inputs anywhere, sorted by group in memory; "indexed": of any sizes, not sorted.
        bits: bits of a code.
    """

    group_size: int = 128
    scale_dtype: str = "float16"
    groups: str = "runs"
    bits: int = BITS

    names: ClassVar[dict[str, str]] = {}
    widths: ClassVar[tuple[int, ...]] = (2, 3, 4, 8)
    zero_shift: ClassVar[int] = 0
    symmetric: ClassVar[bool] = True  # whether `quantize` gives all zeros 8
    parts_of_checkpoints: ClassVar[tuple[str, ...]] = (*ENTRIES, "order")
    entries: ClassVar[dict[str, str]] = ENTRIES  # part → suffix

    @property
    def spec(self) -> str:
        width = "" if self.bits == BITS else f":{self.bits}"
        return f"{self.name}:{self.group_size}:{self.scale_dtype}:{self.groups}{width}"

    @classmethod
    def parse(cls, options: str) -> Self:
        group_size, scale_dtype, groups, *bits = options.split(":")
        if groups not in GROUPS:
            raise ValueError(f"groups are {', '.join(GROUPS)}, not {groups!r}")
        return cls(int(group_size), scale_dtype, groups, *map(int, bits))

    @classmethod
    def examples(cls) -> list[Format]:
        """No examples: the contract test quantizes shapes that these formats do not store."""
        return []

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        _, run = codes_per_period(self.bits)
        if len(shape) != 2 or shape[0] % run or shape[1] % run:
            raise ModelError(f"{self.name} stores matrices whose dimensions are multiples of {run}, not {shape}")
        outputs, inputs = shape
        groups = -(-inputs // self.group_size)
        specs: PartSpecs = {
            "qweight": ((inputs * self.bits // WORD, outputs), torch.int32),
            "qzeros": ((groups, outputs * self.bits // WORD), torch.int32),
            "scales": ((groups, outputs), getattr(torch, self.scale_dtype)),
        }
        if self.groups == "ordered":
            return specs | {"order": ((2, inputs), torch.int32)}
        return specs | {"g_idx": ((inputs,), torch.int32)} if self.groups == "indexed" else specs

    @property
    def in_memory(self) -> Format:
        if self.bits == BITS:
            return self
        group = planes_group(self.group_size) or BLOCK
        return HQQ(self.bits, group, False, self.scale_dtype, ordered=self.groups == "ordered")

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_weight(weight)
        self.part_specs(tuple(weight.shape))  # raises for a shape that it does not store
        if self.groups not in ("runs", "listed"):
            raise ModelError(f"{self.spec}: weights are quantized in the order of inputs", "use runs or listed groups")
        if WORD % self.bits:
            raise ModelError(f"{self.spec}: weights are quantized to 2, 4 or 8 bits", "use one of them")
        scale_dtype = getattr(torch, self.scale_dtype)
        codes, zeros, scales = quantize_affine(weight, self.group_size, self.bits, self.symmetric, scale_dtype)
        return {
            "qweight": _pack(codes.t(), 0, self.bits),
            "qzeros": _pack((zeros.t() - self.zero_shift) & (2**self.bits - 1), 1, self.bits),
            "scales": scales.t().contiguous(),
        }

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.bits != BITS:  # to be written: weights that are read are in bit planes
            format_, planes = self._as_planes(parts, dict.fromkeys(ENTRIES, self.spec))
            return format_.dequantize(planes, shape, dtype)
        stored = parts["qweight"], parts["qzeros"], parts["scales"], parts.get("g_idx"), parts.get("order")
        return dequantize_int4(*stored, self.zero_shift, dtype)

    def dequantize_stack(self, parts: Parts, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        return self.dequantize(parts, shape, dtype)

    def product(self, parts: Parts, shape: tuple[int, int]) -> PackedProduct | None:
        stored = parts["qweight"], parts["qzeros"], parts["scales"], parts.get("g_idx")
        return PackedProduct(linear_int4, (*stored, None, self.zero_shift), parts.get("order"))

    def concat_rows(self, pieces: Sequence[Parts], shape: tuple[int, int]) -> tuple[Format, dict[str, Tensor]]:
        first = pieces[0]
        common = next((name for name in ("g_idx", "order") if name in first), "")
        orders = [piece[common] for piece in pieces if common and not piece[common].is_meta]
        if any(not torch.equal(piece, orders[0]) for piece in orders):
            raise ModelError(
                f"{self.name}: matrices with the same input have different group orders (desc_act)",
                "use a checkpoint quantized without desc_act",
            )
        return self, {
            name: tensor if name == common else torch.cat([piece[name] for piece in pieces], 1)
            for name, tensor in first.items()
        }

    def _split(self, parts: Parts, shape: tuple[int, int], dim: int, n: int) -> Shards | int:
        shard_size = shape[dim] // n
        if shard_size % PACK:
            return PACK
        if not dim:
            cuts = {name: cut(parts[name], n, 1) for name in ("qweight", "qzeros", "scales")}
            return self, split_parts(n, cuts, {name: parts[name] for name in ("g_idx", "order") if name in parts})
        if self.groups == "ordered":
            return replace(self, groups="indexed")._split(self._in_order_of_inputs(parts), shape, dim, n)
        cuts = {"qweight": cut(parts["qweight"], n, 0)}
        if self.groups == "indexed":  # every shard may hold inputs of every group
            groups = len(parts["scales"])
            if shard_size % groups:
                return math.lcm(groups, PACK)
            cuts["g_idx"] = cut(parts["g_idx"], n, 0)
            return replace(self, group_size=shard_size // groups), split_parts(
                n, cuts, {k: parts[k] for k in ("qzeros", "scales")}
            )
        size = math.gcd(shard_size, self.group_size)
        for name in ("qzeros", "scales"):
            cuts[name] = cut(parts[name].repeat_interleave(self.group_size // size, 0), n, 0)
        return replace(self, group_size=size), split_parts(n, cuts, {})

    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        stored = self._stored_from_parts(self._in_order_of_inputs(parts), shape)
        return {self.entries[part_name]: value for part_name, value in stored.items()}

    def _in_order_of_inputs(self, parts: Parts) -> dict[str, Tensor]:
        """Parts as checkpoints store them: codes in the order of inputs, and `g_idx` if checkpoints list it."""
        parts = dict(parts)
        if self.groups in ("runs", "indexed"):
            return parts
        group_index = torch.arange(parts["qweight"].shape[0] * PACK, device=parts["qweight"].device) // self.group_size
        if (order := parts.pop("order", None)) is not None:
            group_index = group_index[order[1]]
            parts["qweight"] = _pack(_unpack(parts["qweight"], 0)[order[1]], 0)
        return parts | {"g_idx": group_index.int()}

    def _sorted_by_group(self, parts: dict[str, Tensor]) -> tuple[Self, dict[str, Tensor]]:
        """Sort the inputs of an "indexed" weight by group, if its groups have equal sizes."""
        group_index = parts.get("g_idx")
        if group_index is None or group_index.is_meta:
            return self, parts
        sizes = torch.bincount(group_index, minlength=len(parts["scales"]))
        if not bool((sizes == self.group_size).all()):
            return self, parts
        parts = {name: value for name, value in parts.items() if name != "g_idx"}
        if bool((group_index.diff() >= 0).all()):
            return replace(self, groups="listed"), parts
        order = group_index.argsort(stable=True)
        parts["qweight"] = _pack(_unpack(parts["qweight"], 0)[order], 0)
        parts["order"] = torch.stack([order, order.argsort()]).int()
        return replace(self, groups="ordered"), parts

    @classmethod
    def from_state(cls, state: Parts, name: str) -> Loaded:
        labels = {part_name: entry_name(name, key) for part_name, key in cls.entries.items()}
        stored = {part_name: state[key] for part_name, key in cls.entries.items() if key in state}
        for part_name in ("qweight", "scales"):
            if part_name not in stored:
                raise CheckpointError(f"{labels[part_name]} is missing from the checkpoint", DAMAGED)
            shape = tuple(stored[part_name].shape)
            if len(shape) != 2 or 0 in shape:
                raise CheckpointError(f"{labels[part_name]} is {shape}, expected a matrix", DAMAGED)
        dtype = stored["scales"].dtype
        if dtype not in FLOATS:
            raise CheckpointError(f"{labels['scales']} is {dtype}, not a float", DAMAGED)
        bits = cls._bits(stored, labels)
        (outputs, inputs), groups = cls._sizes(stored, labels, bits)
        if inputs % groups:
            message = f"{labels['scales']} has {groups} groups, which do not divide {inputs} inputs"
            raise CheckpointError(message, DAMAGED)
        listed = "indexed" if "g_idx" in stored else "runs"
        format_ = cls(inputs // groups, str(dtype).removeprefix("torch."), listed, bits)
        try:
            specs = format_._stored_specs((outputs, inputs))
        except ModelError as error:
            raise CheckpointError(f"{name}: {error.message}", DAMAGED) from error
        check_parts(stored, specs, cls.entries, name)
        parts = format_._parts_from_stored(stored)
        format_.check_values(parts, labels)
        if bits != BITS:
            return (*format_._as_planes(parts, labels), (outputs, inputs), dtype)
        format_, parts = format_._sorted_by_group(parts)
        return format_, parts, (outputs, inputs), dtype

    def _as_planes(self, parts: Parts, labels: Mapping[str, str]) -> tuple[Format, dict[str, Tensor]]:
        """Format and parts of a weight of another width than 4 bits, in bit planes."""
        scales = parts["scales"].t()
        if (words := parts.get("qzeros")) is None:
            zeros = torch.full(scales.shape, 2 ** (self.bits - 1), dtype=torch.int32, device=scales.device)
        else:
            zeros = (unpack_words(words, self.bits, 1).int().t() + self.zero_shift) & (2**self.bits - 1)
        index = parts.get("g_idx")
        order = None if index is None else order_of_groups(index, scales.shape[1], labels["g_idx"])
        codes = unpack_words(parts["qweight"], self.bits, 0).t()
        return to_planes(codes, scales, zeros, self.bits, labels["qweight"], order)

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        scales, index = parts["scales"], parts.get("g_idx")
        if scales.is_meta:
            return
        wrong = int((~torch.isfinite(scales)).sum())
        if wrong:
            raise CheckpointError(f"{labels['scales']} has {wrong} scales that are NaN or Inf", DAMAGED)
        if index is not None and not 0 <= int(index.min()) <= int(index.max()) < scales.shape[-2]:
            message = f"{labels['g_idx']} has groups {int(index.min())} to {int(index.max())} of {scales.shape[-2]}"
            raise CheckpointError(message, DAMAGED)
        if self.zero_shift:  # tools read such a zero as 0, as 2^bits, or carry into the next zero
            zeros = unpack_words(parts["qzeros"], self.bits, -1)
            wrapped = int((zeros == 2**self.bits - self.zero_shift).sum())
            if wrapped:
                raise CheckpointError(
                    f"{labels['qzeros']} has {wrapped} zeros that wrap: {2**self.bits - 1} stands for 0 minus one",
                    "convert the checkpoint to checkpoint_format gptq_v2, which stores zeros as they are",
                )

    @classmethod
    def _bits(cls, stored: Parts, labels: Mapping[str, str]) -> int:
        """Bits of a code, from the shapes of checkpoint entries by part.

        Raises:
            CheckpointError: they fit no width that this format has.
        """
        zeros, outputs = stored.get("qzeros"), stored["scales"].shape[1]
        if zeros is None or zeros.dim() != 2:  # `check_parts` names it
            return BITS
        return cls._checked_width(zeros.shape[1] * WORD, outputs, labels["qzeros"])

    @classmethod
    def _checked_width(cls, bits: int, codes: int, label: str) -> int:
        """Return bits / codes, if this format has codes of that width; `label` is the entry that holds them."""
        width, remainder = divmod(bits, max(codes, 1))
        if remainder or width not in cls.widths:
            raise CheckpointError(
                f"{label} holds {bits} bits for {codes} codes, not {', '.join(map(str, cls.widths))} a code",
                f"use a checkpoint of one of these widths; otherwise {DAMAGED}",
            )
        return width

    @classmethod
    def _sizes(cls, stored: Parts, labels: Mapping[str, str], bits: int) -> tuple[tuple[int, int], int]:
        """Shape of the weight and number of groups, from checkpoint entries by part."""
        groups, outputs = stored["scales"].shape
        return (outputs, stored["qweight"].shape[0] * WORD // bits), groups

    def _stored_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        """Shape and dtype of each checkpoint entry, by part."""
        return self.part_specs(shape)

    def _parts_from_stored(self, stored: Parts) -> dict[str, Tensor]:
        """Parts in memory from checkpoint entries by part."""
        return dict(stored)

    def _stored_from_parts(self, parts: Parts, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Checkpoint entries by part, the inverse of `_parts_from_stored`."""
        return dict(parts)

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        return frozenset(cls.entries.values())

    @classmethod
    def _from_gptq_config(cls, entry: Mapping[str, Any], checkpoint_format: str) -> Self:
        bits, size = _check_config(entry, "checkpoint_format", checkpoint_format, cls.widths), entry.get("group_size")
        return cls(size if isinstance(size, int) and size > 0 else 128, bits=bits)


def _check_config(entry: Mapping[str, Any], key: str, supported: str, widths: Sequence[int]) -> int:
    """Return the bits of a GPTQ or AWQ checkpoint; raise a CheckpointError for unsupported widths and layouts."""
    method, bits = entry["quant_method"], entry.get("bits", BITS)
    if bits not in widths:
        raise CheckpointError(
            f"this {method} checkpoint has {bits}-bit weights", f"use one with {' or '.join(map(str, widths))} bits"
        )
    setting = str(entry.get(key) or supported).lower()
    if setting != supported:
        raise CheckpointError(f"this {method} checkpoint has {key} {setting!r}", f"use one with {key} {supported!r}")
    return int(bits)


def _exchanged(words: Tensor) -> Tensor:
    """Transpose matrices of 8×8 codes: int32 [n, 8, m], where code j of word i becomes code i of word j."""
    words = words.clone(memory_format=torch.contiguous_format)
    for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        low, high = words.unflatten(1, (-1, 2, distance)).unbind(2)
        difference = ((low >> 4 * distance) ^ high) & mask
        high ^= difference
        low ^= difference << 4 * distance
    return words


def _reordered(words: Tensor, order: Sequence[int]) -> Tensor:
    """Move code `order[i]` of every word to place i."""
    codes = [((words >> 4 * place) & 15) << 4 * i for i, place in enumerate(order)]
    return functools.reduce(torch.bitwise_or, codes)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _transposed(parts: Parts) -> dict[str, Tensor]:
    return {part_name: value.t().contiguous() if value.dim() == 2 else value for part_name, value in parts.items()}


@register_format
@dataclass(frozen=True)
class Gptq(Int4):
    """GPTQ int4 (arXiv:2210.17323) in AutoGPTQ's format, which stores zeros minus one, modulo 16."""

    name: ClassVar[str] = "gptq"
    zero_shift: ClassVar[int] = 1

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        if entry.get("quant_method") != "gptq" or entry.get("checkpoint_format") == "gptq_v2":
            return None
        return cls._from_gptq_config(entry, "gptq")


@register_format
@dataclass(frozen=True)
class GptqV2(Int4):
    """GPTQ int4 in GPTQModel's second format, which stores the zeros."""

    name: ClassVar[str] = "gptq_v2"

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        if entry.get("quant_method") != "gptq" or entry.get("checkpoint_format") != "gptq_v2":
            return None
        return cls._from_gptq_config(entry, "gptq_v2")


@register_format
@dataclass(frozen=True)
class Awq(Int4):
    """AWQ int4 (arXiv:2306.00978), AutoAWQ's "gemm" version."""

    name: ClassVar[str] = "awq"
    widths: ClassVar[tuple[int, ...]] = (4,)
    symmetric: ClassVar[bool] = False

    def _stored_from_parts(self, parts: Parts, shape: tuple[int, ...]) -> dict[str, Tensor]:
        outputs = parts["qweight"].view(-1, shape[0] // PACK, PACK)  # [K/8, N/8, 8]
        qweight = _exchanged(outputs[:, :, _inverse(AWQ_ORDER)].transpose(1, 2)).flatten(0, 1)
        return {**parts, "qweight": qweight, "qzeros": _reordered(parts["qzeros"], _inverse(AWQ_ORDER))}

    @classmethod
    def _sizes(cls, stored: Parts, labels: Mapping[str, str], bits: int) -> tuple[tuple[int, int], int]:
        groups, outputs = stored["scales"].shape
        return (outputs, stored["qweight"].shape[0]), groups

    def _stored_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        return {**self.part_specs(shape), "qweight": ((shape[1], shape[0] // PACK), torch.int32)}

    def _parts_from_stored(self, stored: Parts) -> dict[str, Tensor]:
        outputs = _exchanged(stored["qweight"].unflatten(0, (-1, PACK)))  # [K/8, 8, N/8]
        qweight = outputs[:, AWQ_ORDER].transpose(1, 2).flatten(1).contiguous()
        return {**stored, "qweight": qweight, "qzeros": _reordered(stored["qzeros"], AWQ_ORDER)}

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        if entry.get("quant_method") != "awq":
            return None
        _check_config(entry, "version", "gemm", cls.widths)
        return cls()


@register_format
@dataclass(frozen=True)
class PackQuantized(Int4):
    """Symmetric "pack-quantized" integers of compressed-tensors, as written by llm-compressor (Kimi K2's experts).

    The zeros are 0 and not stored. In memory it has the parts and values of `GptqV2`.
    """

    name: ClassVar[str] = "pack_quantized"
    entries: ClassVar[dict[str, str]] = {part_name: key for part_name, key in PACKED.items() if part_name != "qzeros"}
    widths: ClassVar[tuple[int, ...]] = WIDTHS

    scale_dtype: str = "bfloat16"

    def _stored_from_parts(self, parts: Parts, shape: tuple[int, ...]) -> dict[str, Tensor]:
        stored = _transposed({part_name: value for part_name, value in parts.items() if part_name in self.entries})
        return stored | {"shape": torch.tensor(shape)}

    @classmethod
    def _bits(cls, stored: Parts, labels: Mapping[str, str]) -> int:
        if (recorded := stored.get("shape")) is None:
            raise CheckpointError(f"{labels['shape']} is missing from the checkpoint", DAMAGED)
        if recorded.is_meta or recorded.numel() != 2:  # `_sizes` names it
            return BITS
        words = stored["qweight"].shape[1]
        return cls._checked_width(words * WORD, int(recorded.flatten()[1]), labels["qweight"])

    @classmethod
    def _sizes(cls, stored: Parts, labels: Mapping[str, str], bits: int) -> tuple[tuple[int, int], int]:
        outputs, inputs = len(stored["qweight"]), stored["qweight"].shape[1] * WORD // bits
        recorded = stored["shape"]
        if recorded.numel() != 2 or not (recorded.is_meta or recorded.tolist() == [outputs, inputs]):
            values = "" if recorded.is_meta else f"{recorded.tolist()}, "
            raise CheckpointError(
                f"{labels['shape']} is {values}not the shape ({outputs}, {inputs}) of the codes {labels['qweight']}",
                "use a checkpoint whose weights have dimensions that are multiples of 8",
            )
        return (outputs, inputs), stored["scales"].shape[1]

    def _stored_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        specs = self.part_specs(shape).items()
        return {part_name: (size[::-1], dtype) for part_name, (size, dtype) in specs if part_name in self.entries}

    def _parts_from_stored(self, stored: Parts) -> dict[str, Tensor]:
        parts = _transposed({part_name: value for part_name, value in stored.items() if part_name != "shape"})
        groups, outputs = parts["scales"].shape
        if "qzeros" not in parts and self.bits == BITS:
            parts["qzeros"] = parts["qweight"].new_full((groups, outputs // PACK), ZERO_CODES)
        return {part_name: value for part_name in ENTRIES if (value := parts.get(part_name)) is not None}

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        scheme = scheme_of(entry)
        if scheme is None or (scheme.layout, scheme.symmetric) != (PACK_QUANTIZED, cls.symmetric):
            return None
        return cls(scheme.group_size or 128, bits=scheme.bits)


@register_format
@dataclass(frozen=True)
class PackQuantizedZeros(PackQuantized):
    """Asymmetric "pack-quantized" integers, which store a zero point per group."""

    name: ClassVar[str] = "pack_quantized_zeros"
    entries: ClassVar[dict[str, str]] = PACKED
    symmetric: ClassVar[bool] = False
