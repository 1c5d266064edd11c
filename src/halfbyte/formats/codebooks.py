"""Codebooks: the real values that codes represent, as fp32 tensors cached per device; and 8-bit blockwise quantization.

The latter takes any sorted code of up to 256 values (Dettmers et al. 2021, arXiv:2110.02861). A tensor is read flat,
row-major, in blocks that may cross rows. Each block has one scale, its largest magnitude (absmax). A value's code is
the index of the nearest value of the code after division by the scale. On a CPU bitsandbytes finds codes in a table of
65,536 points over [-1, 1]; the specification does the same there, so that bytes are equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..utils.errors import ModelError

_Make = TypeVar("_Make", bound=Callable[..., Any])

# QLoRA (Dettmers et al. 2023, arXiv:2305.14314), appendix E: quantiles of a normal distribution with an exact zero.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

# Sign, two exponent bits, one mantissa bit, in the order of bitsandbytes' codes; twelfths, divided in fp32.
FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)


def constant(make: _Make) -> _Make:
    """Cache tensors with real data, even where the caller runs under FakeTensorMode (the memory plan)."""

    @functools.wraps(make)
    def with_real_data(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return make(*arguments)

    return cast(_Make, functools.cache(with_real_data))


@constant
def codebook4(quant_type: str, device: torch.device) -> Tensor:
    """fp32 [16]: the value of each 4-bit code of "nf4" or "fp4", largest magnitude 1."""
    if quant_type == "nf4":
        return torch.tensor(NF4, dtype=torch.float32, device=device)
    half = torch.tensor(FP4_TWELFTHS, dtype=torch.float32, device=device) / 12.0
    return torch.cat([half, 0.0 - half])  # code 8 is +0.0, as in bitsandbytes' table


@constant
def thresholds4(quant_type: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """fp32 [15] midpoints between neighbouring values, and uint8 [16]: rank by value → code."""
    ordered, code_of_rank = codebook4(quant_type, device).sort(stable=True)
    return (ordered[:-1] + ordered[1:]) / 2, code_of_rank.to(torch.uint8)


def dynamic_map(
    device: torch.device | str = "cpu", *, signed: bool = True, exponent_bits: int = 7, bits: int = 8
) -> Tensor:
    """fp32 [256], sorted: the dynamic data type (Dettmers 2015, arXiv:1511.04561; 2021, arXiv:2110.02861).

    Decade i of `exponent_bits` has the midpoints of 2^(i + bits - 1 - exponent_bits) equal steps of [0.1, 1] (unsigned:
    twice as many), scaled by 10^(i + 1 - exponent_bits). The last decade also has the midpoints of one step less than
    its remaining codes. 0 and 1 complete the 2^bits values; zeros fill the rest.
    """
    free, values = bits - 1 - exponent_bits, []

    def add(steps: int, decade: int) -> None:
        edges = torch.linspace(0.1, 1, steps + 1, dtype=torch.float32, device="cpu")
        # Scale as a Python float, product in fp32, sorted as doubles: this order reproduces bitsandbytes' bits.
        magnitudes = (10 ** (decade + 1 - exponent_bits) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        values.extend(magnitudes + ([-value for value in magnitudes] if signed else []))

    for decade in range(exponent_bits):
        add(int(2 ** (decade + free + (not signed))), decade)
    if free > 0:
        add(2**free - 1, exponent_bits - 1)
    if len(values) + 2 != 2**bits:
        raise ModelError(
            f"a dynamic map of {bits} bits with {exponent_bits} exponent bits has {len(values) + 2} values",
            "use a signed map, or exponent_bits = bits - 1",
        )
    return torch.tensor(sorted([*values, 0.0, 1.0, *[0.0] * (256 - 2**bits)]), dtype=torch.float32, device=device)


def linear_map(*, signed: bool = True, bits: int = 8, zero: bool = True) -> Tensor:
    """fp32 [256]: equal steps of [-1, 1], or of [0, 1] if not signed; zeros in the middle fill the rest.

    Args:
        signed: whether the map has negative values.
        bits: 2^bits values, one less if signed and (`zero` or fewer than 8 bits).
        zero: represent 0 exactly.
    """
    count = 2**bits - (signed and (zero or bits < 8))
    values = torch.linspace(-1.0 if signed else 0.0, 1.0, count)
    half = count // 2
    return torch.cat([values[:half], torch.zeros(256 - count), values[half:]])


def fp8_map(*, signed: bool = True, exponent_bits: int = 5, mantissa_bits: int = 2, bits: int = 8) -> Tensor:
    """fp32 [256], sorted: magnitudes of a small float divided by the largest; zeros fill the rest.

    A value is m·2^-b for exponent 0 and (1 + m)·2^(1 + b - e) for exponent e, with b = 2^(exponent_bits - 1).

    Raises:
        ModelError: the bits do not add up to `bits`.
    """
    if exponent_bits + mantissa_bits + signed != bits:
        raise ModelError(
            f"{exponent_bits} exponent and {mantissa_bits} mantissa bits do not make {bits} bits",
            f"use exponent_bits + precision_bits = {bits - signed}",
        )
    bias = 2 ** (exponent_bits - 1)
    mantissas = [m / 2**mantissa_bits for m in range(2**mantissa_bits)]
    values = [m * 2.0**-bias for m in mantissas]
    values += [(1 + m) * 2.0 ** (1 + bias - e) for e in range(1, 2**exponent_bits) for m in mantissas]
    values += [-value for value in values] if signed else []
    code = torch.tensor(sorted([*values, *[0.0] * (256 - 2**bits)]), dtype=torch.float32)
    return code / code.max()


def normal_map(offset: float = 0.9677083, *, extra: bool = True) -> Tensor:
    """fp32 [256], sorted: quantiles of a normal distribution divided by the largest (QLoRA, appendix E).

    Args:
        offset: probability of the largest quantile.
        extra: 8 positive and 7 negative values, as in NF4; else 7 of each. Zeros fill the rest.
    """

    def quantiles(count: int) -> Tensor:
        return torch.special.ndtri(torch.linspace(offset, 0.5, count + 1)[:-1].double())

    positive, negative = quantiles(8 if extra else 7), -quantiles(7)
    values = torch.cat([positive, torch.zeros(256 - len(positive) - len(negative)), negative]).float().sort().values
    return values / values.max()


def quantize_blockwise8(x: Tensor, code: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """Quantize a tensor of n values.

    Args:
        x: any shape; fp32, fp16 or bf16.
        code: fp32 [≤ 256], sorted, on the device of `x`.
        blocksize: values per scale.

    Returns:
        uint8 codes of x's shape and absmax fp32 [⌈n/blocksize⌉].
    """
    flat = x.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % blocksize)).view(-1, blocksize)
    absmax = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
    normal = blocks * (1.0 / absmax).unsqueeze(1)  # NaN in a block of zeros, which encodes as 0 below
    if x.device.type == "cpu":
        normal = ((normal + 1) * 0.5 * 65535 + 0.5).int().float() / 65535 * 2 - 1
    index = torch.bucketize(normal, (code[:-1] + code[1:]) / 2).masked_fill_(absmax.unsqueeze(1) == 0, 0)
    return index.to(torch.uint8).view(-1)[: flat.numel()].view(x.shape), absmax


def dequantize_blockwise8(codes: Tensor, absmax: Tensor, code: Tensor, blocksize: int, dtype: torch.dtype) -> Tensor:
    """Dequantize codes to `dtype` of their shape, rounded once from fp32; see `quantize_blockwise8`."""
    values = code[codes.reshape(-1).int()].float()
    scales = absmax.float().repeat_interleave(blocksize)[: values.numel()]
    return (values * scales).to(dtype).view(codes.shape)
