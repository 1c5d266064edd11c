"""Codebooks: the real values that codes represent, as fp32 tensors cached per device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

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
    def made(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return make(*arguments)

    return cast(_Make, functools.cache(made))


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


def dynamic_map(device: torch.device | str = "cpu", *, signed: bool = True) -> Tensor:
    """fp32 [256], sorted: the dynamic 8-bit data type (Dettmers 2015, arXiv:1511.04561; 2021, arXiv:2110.02861).

    Decade i of seven has the midpoints of 2^i (unsigned: 2^(i+1)) equal steps of [0.1, 1], scaled by 10^(i-6); 0 and 1
    complete it.
    """
    values = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1, dtype=torch.float32, device="cpu")
        # Scale as a Python float, product in fp32, sorted as doubles: this order reproduces bitsandbytes' bits.
        magnitudes = (10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        values += magnitudes + ([-value for value in magnitudes] if signed else [])
    return torch.tensor(sorted([*values, 0.0, 1.0]), dtype=torch.float32, device=device)
