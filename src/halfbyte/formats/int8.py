"""LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339): row-wise int8 weights and their GEMM.

    code = round(v · 127 / absmax(row)), halves to even        v ≈ code · absmax · (1/127)
    x·Wᵀ ≈ (codes of x)·(codes of W)ᵀ · absmax(x row) · absmax(W row) / 127²

Columns of x with an outlier, |x| ≥ threshold, leave the int8 GEMM: their codes are zero and their outliers do not count
in the row's absmax. They are multiplied in x's dtype with the dequantized columns of W (section 3.2).

Only the device knows which columns these are. As in bitsandbytes, the host reads their number, which synchronises with
a GPU. This is not possible while a CUDA graph is captured. Then the C largest columns are gathered, C = ⌈K/32⌉ and at
least 64, with zeros for those below the threshold. This costs C/K of a 16-bit GEMM, about 3%, and one topk. If more
than C columns have outliers, the graph quantizes the smallest of them. (In models about 0.1% of columns have outliers;
section 4.)

Weights have the layout of bitsandbytes' Linear8bitLt. A module whose parameter `weight` has shape [..., K] and N rows
in all has the entries:

    weight         int8 [..., K]
    SCB            fp32 [N], the rows' absmax
    weight_format  uint8 [] = 0, row-major; missing in older checkpoints

The layout does not record the dtype of the values; they load as bfloat16. bitsandbytes rounds a weight to fp16 before
it computes codes and halfbyte does not: the bytes are equal for fp16 weights, and the values of other weights are at
least as close.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import CheckpointError, ModelError
from .base import (
    DAMAGED,
    DECODED,
    OptionlessFormat,
    Parts,
    PartSpecs,
    Shards,
    check_parts,
    check_weight_finite,
    cut,
    entry_name,
    register_format,
    split_parts,
)
from .linear import PackedProduct, linear_rows

INVERSE_127 = 7.874015718698502e-3  # bitsandbytes' constant, for bit-equal dequantized values
INVERSE_127_SQUARED = 6.200012e-5  # the constant of bitsandbytes' CUDA kernel
SMALLEST = 1e-35  # for a smaller absmax 127/absmax would overflow; such a row becomes zeros
OUTLIER_SHARE, FEWEST_OUTLIERS = 32, 64
CUDA_ROWS = 32  # torch._int_mm needs more than 16 rows on CUDA


def check_matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2 or tensor.dtype not in DECODED:
        raise ModelError(f"int8: {name} is {tensor.dtype} {list(tensor.shape)}", "pass a floating-point matrix")


@op("triton.int8")
def quantize_rows_int8(x: Tensor, chosen: Tensor | None, threshold: float) -> tuple[Tensor, Tensor]:
    """Quantize each row of x to int8 [M, K] codes and fp32 [M] absmax.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        chosen: bool [K], columns with zero codes; their values of at least `threshold` do not count in absmax. Or None.
        threshold: in x's unit; not read without `chosen`.
    """
    check_matrix("x", x)
    values = x.float()
    counted = values if chosen is None else values.masked_fill(chosen & (values.abs() >= threshold), 0)
    absmax = torch.linalg.vector_norm(counted, torch.inf, dim=1)
    codes = (values * (127.0 / absmax.clamp(min=SMALLEST)).unsqueeze(1)).round_()
    if chosen is not None:
        codes.masked_fill_(chosen, 0)
    return codes.to(torch.int8), absmax


@op("triton.int8")
def dequantize_rows_int8(codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize int8 [N, K] with absmax fp32 [N] to `dtype` [N, K], rounded once from fp32."""
    return (codes.float().mul_(absmax.unsqueeze(1)).mul_(INVERSE_127)).to(dtype)


@op("triton.int8")
def scale_int8_product(
    product: Tensor, x_absmax: Tensor, w_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Scale an int32 product of codes to `dtype` [M, N] by the absmax of rows (fp32 [M], [N]), and add bias [N]."""
    y = product.float().mul_(x_absmax.unsqueeze(1) * w_absmax).mul_(INVERSE_127_SQUARED)
    return (y if bias is None else y.add_(bias)).to(dtype)


def outlier_capacity(width: int) -> int:
    """Columns out of `width` that a CUDA graph multiplies in 16 bits."""
    return min(width, max(FEWEST_OUTLIERS, -(-width // (16 * OUTLIER_SHARE)) * 16))


def outlier_columns(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Columns of x [M, K] that hold an outlier, int64 [C], and whether each reaches the threshold, bool [C].

    In a CUDA graph they are the C = `outlier_capacity(K)` columns with the largest magnitudes: some may hold no
    outlier, and an outlier column may be missing. Otherwise all reach the threshold.
    """
    largest = torch.linalg.vector_norm(x, torch.inf, dim=0)
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        columns = (largest >= threshold).nonzero().view(-1)
        return columns, torch.ones_like(columns, dtype=torch.bool)
    top = torch.topk(largest, outlier_capacity(x.shape[1]), sorted=False)
    return top.indices, top.values >= threshold


def multiplies_int8(x: Tensor, rows: int) -> bool:
    """Return whether torch._int_mm supports codes [*, K] like `x` and [`rows`, K]; CUDA needs multiples of 8."""
    if x.device.type == "cuda":
        return x.shape[-1] % 8 == 0 and rows % 8 == 0
    return x.device.type == "cpu" and _exact_on_this_cpu()


@functools.cache
def _exact_on_this_cpu() -> bool:
    """Return whether torch._int_mm is exact on this CPU. On x86 CPUs without VNNI oneDNN accumulates int8 products in
    16 bits, which saturate."""
    codes = torch.full((CUDA_ROWS, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(codes, codes.t()) == 64 * 127**2).all())


def int8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x·Wᵀ, int32 [M, N], exact, from int8 [M, K] and [N, K]."""
    rows = x.shape[0]
    if x.device.type == "cuda" and rows < CUDA_ROWS:
        x = torch.nn.functional.pad(x, (0, 0, 0, CUDA_ROWS - rows))
    return torch._int_mm(x, weight.t())[:rows]


def exact_int8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x·Wᵀ, int32 [..., N], exact, from int8 [..., K] and [N, K] of any size, also where torch._int_mm does not run."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.numel() and multiplies_int8(rows, weight.shape[0]):
        product = int8_matmul(rows, weight)
    else:
        dtype = torch.float32 if x.shape[-1] * 128**2 <= 2**24 else torch.float64  # sums that are exact in the mantissa
        product = (rows.to(dtype) @ weight.to(dtype).t()).to(torch.int32)
    return product.view(*x.shape[:-1], weight.shape[0])


def int8_linear(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    """x·Wᵀ + b, [M, N] in x's dtype, with x quantized per row.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        codes, absmax: W as `quantize_rows_int8` returns it.
        bias: [N] or None.
        threshold: columns of x with a magnitude of at least this are multiplied unquantized; 0: none.
    """
    if not threshold:
        x_codes, x_absmax = quantize_rows_int8(x, None, 0.0)
        return scale_int8_product(int8_matmul(x_codes, codes), x_absmax, absmax, bias, x.dtype)
    columns, over = outlier_columns(x, threshold)
    chosen = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device).scatter_(0, columns, over)
    x_codes, x_absmax = quantize_rows_int8(x, chosen, threshold)
    y = scale_int8_product(int8_matmul(x_codes, codes), x_absmax, absmax, bias, x.dtype)
    outliers = x.index_select(1, columns).masked_fill_(~over, 0)
    return y.addmm_(outliers, dequantize_rows_int8(codes.index_select(1, columns), absmax, x.dtype).t())


@op("triton.gemv8", "native.few_rows")
def linear_int8(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of unquantized rows with an int8 weight; no gradient.

    Kernels may sum in another order, and do not round the weights, which the reference rounds to x's dtype.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        codes, absmax: int8 [N, K] and fp32 [N], as in `dequantize_rows_int8`.
        bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    return linear_rows(x, dequantize_rows_int8(codes, absmax, x.dtype), bias)


SUFFIXES = {"codes": "", "absmax": "../SCB"}
WEIGHT_FORMAT = "../weight_format"


@register_format
@dataclass(frozen=True)
class Int8(OptionlessFormat):
    """8-bit integers with one scale per row."""

    name: ClassVar[str] = "int8"
    names: ClassVar[dict[str, str]] = {"int8": "int8"}

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        rows = torch.Size(shape[:-1]).numel()
        return {"codes": (tuple(shape), torch.int8), "absmax": ((rows,), torch.float32)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_weight(weight)
        codes, absmax = quantize_rows_int8(weight.reshape(-1, weight.shape[-1]), None, 0.0)
        check_weight_finite(absmax, "a row with one would be lost")
        return {"codes": codes.view(weight.shape), "absmax": absmax}

    def rows_concatenate(self, rows: int) -> bool:
        return True

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        codes = parts["codes"].reshape(-1, shape[-1])
        return dequantize_rows_int8(codes, parts["absmax"], dtype).view(shape)

    def product(self, parts: Parts, shape: tuple[int, int]) -> PackedProduct | None:
        return PackedProduct(linear_int8, (parts["codes"], parts["absmax"]))

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize_rows_int8(parts["codes"][rows], parts["absmax"][rows], dtype)

    def _split(self, parts: Parts, shape: tuple[int, int], dim: int, n: int) -> Shards | int:
        codes, absmax = {"codes": cut(parts["codes"], n, dim)}, parts["absmax"]
        if dim:
            return self, split_parts(n, codes, {"absmax": absmax})
        return self, split_parts(n, codes | {"absmax": cut(absmax, n, 0)}, {})

    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        state = {suffix: parts[part_name] for part_name, suffix in SUFFIXES.items()}
        return state | {WEIGHT_FORMAT: torch.zeros((), dtype=torch.uint8, device=parts["codes"].device)}

    @classmethod
    def from_state(cls, state: Parts, name: str) -> tuple[Int8, dict[str, Tensor], tuple[int, ...], torch.dtype]:
        parts = {part_name: state[suffix] for part_name, suffix in SUFFIXES.items() if suffix in state}
        shape = tuple(parts["codes"].shape) if "codes" in parts else ()
        rows, label = torch.Size(shape[:-1]).numel(), entry_name(name, SUFFIXES["absmax"])
        if "codes" in parts and "absmax" in parts and tuple(parts["absmax"].shape) != (rows,):
            scale_size = tuple(parts["absmax"].shape)
            raise CheckpointError(f"{name} is {shape}, and its scales {label} are {scale_size}", DAMAGED)
        check_parts(parts, cls().part_specs(shape), SUFFIXES, name)
        layout = state.get(WEIGHT_FORMAT, torch.zeros((), dtype=torch.uint8))
        # older bitsandbytes could save other orders than row-major
        if not layout.is_meta and (layout.dtype != torch.uint8 or layout.numel() != 1 or layout.item()):
            message = f"{entry_name(name, WEIGHT_FORMAT)} is not 0 (row-major)"
            raise CheckpointError(message, "save the model again with bitsandbytes 0.45 or newer")
        cls().check_values(parts, {"codes": name, "absmax": label})
        return cls(), parts, shape, torch.bfloat16

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        absmax = parts["absmax"]
        if not absmax.is_meta and not bool((absmax.isfinite() & (absmax >= 0)).all()):
            raise CheckpointError(f"{labels['absmax']} has scales that are negative, NaN or Inf", DAMAGED)

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Int8 | None:
        if entry.get("quant_method", "bitsandbytes") != "bitsandbytes" or not entry.get("load_in_8bit"):
            return None
        return cls()
