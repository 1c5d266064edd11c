"""The operators of `torch.ops.bitsandbytes` with upstream's schemas, over halfbyte's ops.

They are always defined in the namespace `halfbyte_bnb`, which this package calls under torch.compile. `register` also
defines them in the namespace `bitsandbytes`; the real package defines the same names when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..formats import Blockwise4, blockwise4
from ..formats import int8 as int8_ops
from ..formats.codebooks import dequantize_blockwise8, quantize_blockwise8
from ..formats.linear import linear_rows
from ..ops import blockwise_cuda
from .updates import check_update, optimizer_update_8bit_blockwise, optimizer_update_32bit

OWN = "halfbyte_bnb"
UPSTREAM = "bitsandbytes"


def _bytes(packed: Tensor) -> Tensor:
    """uint8 [bytes] of packed codes in any storage dtype."""
    return packed.contiguous().view(-1).view(torch.uint8)


def quantize_4bit(A: Tensor, blocksize: int, quant_type: str, quant_storage: torch.dtype) -> tuple[Tensor, Tensor]:
    on_gpu = A.device.type == "cuda"
    quantize = blockwise_cuda.quantize_blockwise4_cuda if on_gpu else blockwise4.quantize_blockwise4
    packed, absmax = quantize(A.contiguous(), blocksize, quant_type)
    return packed.view(-1).view(quant_storage).unsqueeze(1), absmax


def dequantize_4bit(
    A: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    absmax = absmax.float()
    flat = blockwise4.dequantize_blockwise4(_bytes(A), absmax, None, blocksize, quant_type, prod(shape), dtype)
    return flat.view(*shape)


def gemm_4bit(
    A: Tensor,
    B: Tensor,
    shapeB: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    rows, columns = shapeB
    tensors = {"packed": _bytes(B).view(-1, 1), "absmax": absmax}
    if absmax_8bit is not None and absmax_code is not None and absmax_offset is not None:
        tensors |= {"absmax": absmax_8bit, "nested_absmax": absmax}
        tensors |= {"nested_code": absmax_code, "nested_offset": absmax_offset.float()}
    format_ = Blockwise4(quant_type, blocksize, absmax_8bit is not None)  # type: ignore[arg-type]
    x = A.reshape(-1, columns)
    return format_.linear(x, tensors, (rows, columns), bias).view(*A.shape[:-1], rows)


def gemv_4bit(A: Tensor, B: Tensor, shapeB: Sequence[int], absmax: Tensor, code: Tensor, blocksize: int) -> Tensor:
    packed = _bytes(B)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[: prod(shapeB)]
    weight = dequantize_blockwise8(codes, absmax, code, blocksize, A.dtype).view(*shapeB)
    return linear_rows(A.reshape(-1, A.shape[-1]), weight).view(*A.shape[:-1], shapeB[0])


def quantize_blockwise(A: Tensor, code: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    on_gpu = A.device.type == "cuda"
    return (blockwise_cuda.quantize_blockwise8_cuda if on_gpu else quantize_blockwise8)(A, code, blocksize)


def dequantize_blockwise(A: Tensor, absmax: Tensor, code: Tensor, blocksize: int, dtype: torch.dtype) -> Tensor:
    return dequantize_blockwise8(A.contiguous(), absmax, code, blocksize, dtype)


def int8_linear_matmul(A: Tensor, B: Tensor) -> Tensor:
    return int8_ops.exact_int8_matmul(A, B)


def int8_vectorwise_quant(A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    x = A.reshape(-1, A.shape[-1])
    columns = chosen = None
    if threshold:
        columns, over = int8_ops.outlier_columns(x, threshold)
        chosen = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device).scatter_(0, columns, over)
    codes, absmax = int8_ops.quantize_rows_int8(x, chosen, threshold)
    return codes.view(A.shape), absmax, columns


def int8_vectorwise_dequant(A: Tensor, stats: Tensor) -> Tensor:
    rows = A.reshape(-1, A.shape[-1])
    return int8_ops.dequantize_rows_int8(rows, stats.reshape(-1), torch.float32).view(A.shape)


def int8_mm_dequant(
    A: Tensor, row_stats: Tensor, col_stats: Tensor, dtype: torch.dtype | None = None, bias: Tensor | None = None
) -> Tensor:
    scales = row_stats.reshape(-1), col_stats.reshape(-1)
    product = A.reshape(-1, A.shape[-1])
    return int8_ops.scale_int8_product(product, *scales, bias, dtype or torch.float16).view(A.shape)


def int8_scaled_mm(
    A: Tensor,
    B: Tensor,
    row_stats: Tensor,
    col_stats: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return int8_mm_dequant(int8_linear_matmul(A, B), row_stats, col_stats, dtype, bias)


def int8_mixed_scaled_mm(
    A: Tensor,
    CA: Tensor,
    CB: Tensor,
    SCA: Tensor,
    SCB: Tensor,
    outlier_cols: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    y = int8_scaled_mm(CA, CB, SCA, SCB, bias, A.dtype)
    if outlier_cols is None:
        return y, None
    rows = A.reshape(-1, A.shape[-1])
    outliers = rows.index_select(1, outlier_cols)
    weight = int8_ops.dequantize_rows_int8(CB.index_select(1, outlier_cols), SCB.reshape(-1), A.dtype)
    y.view(-1, y.shape[-1]).addmm_(outliers, weight.t())
    return y, outliers


def int8_double_quant(A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    rows, row_absmax, columns = int8_vectorwise_quant(A, threshold)
    x = A.reshape(-1, A.shape[-1])
    inliers = x.masked_fill(x.abs() >= threshold, 0) if threshold else x
    by_column, column_absmax = int8_ops.quantize_rows_int8(inliers.t().contiguous(), None, 0.0)
    by_column = by_column.t().contiguous()
    if columns is not None:
        by_column[:, columns] = 0
    return rows, by_column.view(A.shape), row_absmax, column_absmax, columns


def _blocks(numel: Any, blocksize: int) -> Any:
    return -(numel // -blocksize)


def _quantize_4bit_fake(A, blocksize, quant_type, quant_storage):
    n = A.numel()
    packed = A.new_empty(((n + 1) // (quant_storage.itemsize * 2), 1), dtype=quant_storage)
    return packed, A.new_empty((_blocks(n, blocksize),), dtype=torch.float32)


def _vectorwise_quant_fake(A, threshold=0.0):
    columns = A.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64) if threshold else None
    return torch.empty_like(A, dtype=torch.int8), A.new_empty(prod(A.shape[:-1]), dtype=torch.float32), columns


def _double_quant_fake(A, threshold=0.0):
    rows, absmax, columns = _vectorwise_quant_fake(A, threshold)
    return rows, torch.empty_like(A, dtype=torch.int8), absmax, A.new_empty(A.shape[-1], dtype=torch.float32), columns


def _quantize_blockwise_fake(A, code, blocksize):
    absmax = A.new_empty((_blocks(A.numel(), blocksize),), dtype=torch.float32)
    return torch.empty_like(A, dtype=torch.uint8, memory_format=torch.contiguous_format), absmax


def _mixed_fake(A, CA, CB, SCA, SCB, outlier_cols=None, bias=None):
    y = A.new_empty((*CA.shape[:-1], CB.shape[0]))
    return y, None if outlier_cols is None else A.new_empty((prod(A.shape[:-1]), outlier_cols.shape[0]))


def _product_fake(A, B, shapeB, *_, **__):
    return A.new_empty((*A.shape[:-1], shapeB[0]))


# Schema, implementation and fake. Names in _WITH_OUT also get the overload `.out`, with a last argument for the result.
_OPS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    (
        "int8_mixed_scaled_mm(Tensor A, Tensor CA, Tensor CB, Tensor SCA, Tensor SCB, Tensor? outlier_cols=None, "
        "Tensor? bias=None) -> (Tensor, Tensor?)",
        int8_mixed_scaled_mm,
        _mixed_fake,
    ),
    (
        "int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, Tensor? bias=None, "
        "ScalarType? dtype=None) -> Tensor",
        int8_scaled_mm,
        lambda A, B, row_stats, col_stats, bias=None, dtype=None: A.new_empty(
            (*A.shape[:-1], B.shape[0]), dtype=dtype or torch.float16
        ),
    ),
    (
        "int8_linear_matmul(Tensor A, Tensor B) -> Tensor",
        int8_linear_matmul,
        lambda A, B: A.new_empty((*A.shape[:-1], B.shape[0]), dtype=torch.int32),
    ),
    (
        "int8_vectorwise_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)",
        int8_vectorwise_quant,
        _vectorwise_quant_fake,
    ),
    (
        "int8_vectorwise_dequant(Tensor A, Tensor stats) -> Tensor",
        int8_vectorwise_dequant,
        lambda A, stats: torch.empty_like(A, dtype=torch.float32),
    ),
    (
        "int8_mm_dequant(Tensor A, Tensor row_stats, Tensor col_stats, ScalarType? dtype=None, Tensor? bias=None) "
        "-> Tensor",
        int8_mm_dequant,
        lambda A, row_stats, col_stats, dtype=None, bias=None: torch.empty_like(A, dtype=dtype or torch.float16),
    ),
    (
        "int8_double_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor, Tensor, Tensor?)",
        int8_double_quant,
        _double_quant_fake,
    ),
    (
        "dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) "
        "-> Tensor",
        dequantize_4bit,
        lambda A, absmax, blocksize, quant_type, shape, dtype: A.new_empty(shape, dtype=dtype),
    ),
    (
        "quantize_4bit(Tensor A, int blocksize, str quant_type, ScalarType quant_storage) -> (Tensor, Tensor)",
        quantize_4bit,
        _quantize_4bit_fake,
    ),
    (
        "gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, "
        "Tensor? bias=None, Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor",
        gemm_4bit,
        _product_fake,
    ),
    (
        "dequantize_blockwise(Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype) -> Tensor",
        dequantize_blockwise,
        lambda A, absmax, code, blocksize, dtype: torch.empty_like(
            A, dtype=dtype, memory_format=torch.contiguous_format
        ),
    ),
    (
        "quantize_blockwise(Tensor A, Tensor code, int blocksize) -> (Tensor, Tensor)",
        quantize_blockwise,
        _quantize_blockwise_fake,
    ),
    (
        "gemv_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize) -> Tensor",
        gemv_4bit,
        _product_fake,
    ),
    (
        "optimizer_update_32bit(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) state1, "
        "Tensor(a3!)? state2, Tensor(a4!)? unorm_vec, float max_unorm, float param_norm, float beta1, float beta2, "
        "float beta3, float alpha, float eps, float weight_decay, int step, float lr, float gnorm_scale, "
        "bool skip_zeros=False) -> ()",
        optimizer_update_32bit,
        lambda optimizer_name, g, p, *_, **__: check_update(g, p),
    ),
    (
        "optimizer_update_8bit_blockwise(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) state1, "
        "Tensor(a3!)? state2, float beta1, float beta2, float beta3, float alpha, float eps, int step, float lr, "
        "Tensor(a4!) qmap1, Tensor(a5!)? qmap2, Tensor(a6!) absmax1, Tensor(a7!)? absmax2, float weight_decay, "
        "float gnorm_scale, bool skip_zeros=False) -> ()",
        optimizer_update_8bit_blockwise,
        lambda optimizer_name, g, p, *_, **__: check_update(g, p),
    ),
)
_WITH_OUT = ("int8_linear_matmul", "dequantize_4bit", "dequantize_blockwise", "gemv_4bit")


def _into(function: Callable[..., Tensor]) -> Callable[..., None]:
    """Return `function` with a last argument that receives the result."""

    def run(*arguments: Any, out: Any = None) -> None:
        if out is None:
            arguments, out = arguments[:-1], arguments[-1]
        result = function(*arguments)
        if out.shape != result.shape or out.dtype != result.dtype or out.device != result.device:
            raise ValueError(
                f"out is {out.dtype} {list(out.shape)} on {out.device}: the result is {result.dtype} "
                f"{list(result.shape)} on {result.device}"
            )
        out.copy_(result)

    return run


def kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name, with its overload, and the implementation of each operator."""
    for schema, function, _ in _OPS:
        name = schema.partition("(")[0]
        yield name, function
        if name in _WITH_OUT:
            yield f"{name}.out", _into(function)


def define(namespace: str) -> torch.library.Library:
    """Define all operators in a namespace; they are removed with the returned library."""
    library = torch.library.Library(namespace, "FRAGMENT")
    for schema, function, fake in _OPS:
        name, _, signature = schema.partition("(")
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
        if name in _WITH_OUT:
            arguments = signature.rpartition(") ->")[0]
            library.define(f"{name}.out({arguments}, Tensor! out) -> ()")
            library.impl(f"{name}.out", _into(function), "CompositeExplicitAutograd")
            torch.library.register_fake(f"{namespace}::{name}.out", lambda *_, **__: None, lib=library)
    return library


_library = define(OWN)
_upstream: torch.library.Library | None = None


def register() -> None:
    """Define the operators in the namespace `bitsandbytes`, unless they are."""
    global _upstream
    if _upstream is None:
        _upstream = define(UPSTREAM)


def unregister() -> None:
    """Remove the operators from the namespace `bitsandbytes`."""
    global _upstream
    if _upstream is not None:
        _upstream._destroy()
        _upstream = None
        vars(torch.ops).pop(UPSTREAM, None)  # it caches the removed overloads


def eager_or_compiled() -> Any:
    """Return where to call an operator: this module's functions, or under torch.compile the opaque operators."""
    return getattr(torch.ops, OWN) if torch.compiler.is_compiling() else _Eager


class _Eager:
    """This module's functions; in eager mode a call through torch's dispatcher costs 9 µs."""


for _schema, _function, _ in _OPS:
    setattr(_Eager, _schema.partition("(")[0], staticmethod(_function))
