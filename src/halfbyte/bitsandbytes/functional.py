"""The functions of `bitsandbytes.functional`, over halfbyte's ops. On the CPU their bytes equal bitsandbytes'."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import deprecated

from ..autograd.linear import quantized_linear
from ..formats import codebooks
from ..formats.base import FLOATS
from ..formats.blockwise4 import BLOCKSIZES, NESTED_BLOCK, STATE_KEYS
from ..formats.int8 import exact_int8_matmul
from ._ops import eager_or_compiled
from .cextension import lib
from .quant_state import QuantState, StoredWeight
from .utils import pack_dict_to_tensor, unpack_tensor_to_dict

__all__ = [
    "GlobalPageManager", "QuantState", "batched_igemm", "check_matmul", "create_dynamic_map", "create_fp8_map",
    "create_linear_map", "create_normal_map", "dequantize_4bit", "dequantize_blockwise", "dequantize_fp4",
    "dequantize_nf4", "elementwise_func", "fill", "gemv_4bit", "get_4bit_type", "get_paged", "get_ptr",
    "has_avx512bf16", "igemm", "int8_double_quant", "int8_linear_matmul", "int8_mm_dequant",
    "int8_vectorwise_dequant", "int8_vectorwise_quant", "is_on_gpu", "lib", "optimizer_update_8bit_blockwise",
    "optimizer_update_32bit", "pack_dict_to_tensor", "prefetch_tensor", "quantize_4bit", "quantize_blockwise",
    "quantize_fp4", "quantize_nf4", "unpack_tensor_to_dict",
]  # fmt: skip

FIRST_CUDA_DEVICE = torch.device("cuda", index=0)
C = 127.0  # upstream's name of the largest int8 code
name2qmap: dict[str, Tensor] = {}  # upstream's cache of maps by name
INT4 = tuple(code / 7 for code in (7, 6, 5, 4, 3, 2, 1, 0, 0, -1, -2, -3, -4, -5, -6, -7))
AF4 = (
    1.0, 0.7242486476898193, 0.5549623370170593, 0.4256388247013092, 0.3167566657066345, 0.2196127474308014,
    0.12934483587741852, 0.0427316389977932, 0.0, -0.049348119646310806, -0.14982478320598602, -0.25607553124427795,
    -0.37369510531425476, -0.5124374032020569, -0.6944100856781006, -1.0,
)  # fmt: skip


def create_linear_map(signed: bool = True, total_bits: int = 8, add_zero: bool = True) -> Tensor:
    """Return fp32 [256] equal steps; see `formats.codebooks.linear_map`."""
    return codebooks.linear_map(signed=signed, bits=total_bits, zero=add_zero)


def create_normal_map(offset: float = 0.9677083, use_extra_value: bool = True) -> Tensor:
    """Return fp32 [256] normal quantiles; see `formats.codebooks.normal_map`. It does not need scipy."""
    return codebooks.normal_map(offset, extra=use_extra_value)


def create_fp8_map(signed: bool = True, exponent_bits: int = 5, precision_bits: int = 2, total_bits: int = 8) -> Tensor:
    """Return fp32 [256] values of a small float; see `formats.codebooks.fp8_map`."""
    return codebooks.fp8_map(signed=signed, exponent_bits=exponent_bits, mantissa_bits=precision_bits, bits=total_bits)


def create_dynamic_map(signed: bool = True, max_exponent_bits: int = 7, total_bits: int = 8) -> Tensor:
    """Return fp32 [256], the dynamic data type; see `formats.codebooks.dynamic_map`."""
    return codebooks.dynamic_map(signed=signed, exponent_bits=max_exponent_bits, bits=total_bits)


def _dynamic_code(device: torch.device) -> Tensor:
    if "dynamic" not in name2qmap:
        name2qmap["dynamic"] = create_dynamic_map()
    return name2qmap["dynamic"].to(device)


def get_4bit_type(typename: str, device: torch.device | str | None = None, blocksize: int = 64) -> Tensor:
    """Return the fp32 [16] codebook of "nf4", "fp4", "int4" or "af4" on `device` (default: "cuda").

    af4: AbnormalFloat (Yoshida 2023, arXiv:2306.06965), for blocks of 64.

    Raises:
        NotImplementedError: another name, or af4 with another block size.
    """
    device = torch.device(device or "cuda")
    if typename in ("nf4", "fp4"):
        return codebooks.codebook4(typename, device).clone()
    if typename == "int4":
        return torch.tensor(INT4, device=device)
    if typename == "af4" and blocksize == 64:
        return torch.tensor(AF4, device=device)
    raise NotImplementedError(f"unknown 4-bit type {typename!r} for blocks of {blocksize}: use nf4, fp4 or int4")


def _check_floats(A: Tensor, operation: str) -> None:
    if A.dtype not in FLOATS:
        raise ValueError(f"{operation} supports tensors in fp32, fp16 and bf16, got {A.dtype}: convert the tensor")


def _stored(result: Tensor, out: Tensor | None) -> Tensor:
    """Copy `result` to `out` and return that; without `out` return `result`."""
    return result if out is None else out.copy_(result)


def quantize_blockwise(
    A: Tensor,
    code: Tensor | None = None,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int = 4096,
    nested: bool = False,
) -> tuple[Tensor, QuantState]:
    """Quantize a tensor in blocks of 8-bit codes (Dettmers et al. 2021, arXiv:2110.02861).

    Args:
        A: any shape; fp32, fp16 or bf16.
        code: fp32 [256], sorted; default: the signed dynamic map.
        absmax, out: tensors that receive the scales and codes, or None.
        blocksize: values per scale.
        nested: quantize the scales too.

    Returns:
        uint8 codes of A's shape and their state.

    Raises:
        ValueError: another dtype.
    """
    _check_floats(A, "quantize_blockwise")
    code = _dynamic_code(A.device) if code is None else code.to(A.device, torch.float32)
    codes, scales = eager_or_compiled().quantize_blockwise(A.detach(), code, blocksize)
    codes, scales = _stored(codes, out), _stored(scales, absmax)
    if not nested:
        return codes, QuantState(absmax=scales, code=code, blocksize=blocksize, dtype=A.dtype)
    offset = scales.mean()
    second, state2 = quantize_blockwise(scales - offset, blocksize=blocksize)
    state = QuantState(absmax=second, code=code, blocksize=blocksize, dtype=A.dtype, offset=offset, state2=state2)
    return codes, state


def dequantize_blockwise(
    A: Tensor,
    quant_state: QuantState | None = None,
    absmax: Tensor | None = None,
    code: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int = 4096,
    nested: bool = False,
) -> Tensor:
    """Dequantize a result of `quantize_blockwise`.

    Args:
        A: uint8 codes of any shape.
        quant_state: their state. Without it `absmax`, `code` (default: the signed dynamic map) and `blocksize`
            describe them.
        out: tensor that receives the values, or None.
        nested: ignored: the state says whether its scales are quantized.

    Returns:
        values of A's shape in the state's dtype; fp32 without a state.

    Raises:
        ValueError: neither `quant_state` nor `absmax` is given.
    """
    if quant_state is None:
        if absmax is None:
            raise ValueError("dequantize_blockwise needs quant_state or absmax: pass the state of quantize_blockwise")
        code = _dynamic_code(A.device) if code is None else code.to(A.device)
        quant_state = QuantState(absmax=absmax, code=code, blocksize=blocksize, dtype=torch.float32)
    scales, code = quant_state.scales().float(), quant_state.code.to(A.device)
    run = eager_or_compiled().dequantize_blockwise
    return _stored(run(A, scales, code, quant_state.blocksize, quant_state.dtype), out)


def quantize_fp4(
    A: Tensor,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_storage: torch.dtype = torch.uint8,
) -> tuple[Tensor, QuantState]:
    """`quantize_4bit` to FP4."""
    return quantize_4bit(A, absmax, out, blocksize, compress_statistics, "fp4", quant_storage)


def quantize_nf4(
    A: Tensor,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_storage: torch.dtype = torch.uint8,
) -> tuple[Tensor, QuantState]:
    """`quantize_4bit` to NF4."""
    return quantize_4bit(A, absmax, out, blocksize, compress_statistics, "nf4", quant_storage)


def quantize_4bit(
    A: Tensor,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_type: str = "fp4",
    quant_storage: torch.dtype = torch.uint8,
) -> tuple[Tensor, QuantState]:
    """Quantize a tensor in blocks of 4-bit codes, two to a byte (QLoRA, arXiv:2305.14314).

    Args:
        A: any shape; fp32, fp16 or bf16.
        absmax, out: tensors that receive the scales and codes, or None.
        blocksize: values per scale: 32, 64 (default), ..., 4096.
        compress_statistics: quantize the scales to 8 bits (double quantization).
        quant_type: "nf4" or "fp4".
        quant_storage: dtype as which the bytes are viewed.

    Returns:
        codes [(A.numel()+1)//2 / itemsize, 1] of `quant_storage`, and their state.

    Raises:
        ValueError: another dtype, quant_type or blocksize.
    """
    _check_floats(A, "quantize_4bit")
    blocksize = blocksize or 64
    if quant_type not in STATE_KEYS:
        raise ValueError(f"quant_type is {quant_type!r}: use 'nf4' or 'fp4'")
    if blocksize not in BLOCKSIZES:
        raise ValueError(f"blocksize is {blocksize}: use one of {BLOCKSIZES}")
    packed, scales = eager_or_compiled().quantize_4bit(A.detach(), blocksize, quant_type, quant_storage)
    packed, scales = _stored(packed, out), _stored(scales, absmax)
    code = get_4bit_type(quant_type, device=A.device)
    offset = state2 = None
    if compress_statistics:
        offset = scales.mean()
        scales, state2 = quantize_blockwise(scales - offset, blocksize=NESTED_BLOCK)
    state = QuantState(
        absmax=scales, shape=A.shape, code=code, blocksize=blocksize, quant_type=quant_type, dtype=A.dtype,
        offset=offset, state2=state2,
    )  # fmt: skip
    return packed, state


def dequantize_fp4(
    A: Tensor,
    quant_state: QuantState | None = None,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
) -> Tensor:
    """`dequantize_4bit` from FP4."""
    return dequantize_4bit(A, quant_state, absmax, out, blocksize, "fp4")


def dequantize_nf4(
    A: Tensor,
    quant_state: QuantState | None = None,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
) -> Tensor:
    """`dequantize_4bit` from NF4."""
    return dequantize_4bit(A, quant_state, absmax, out, blocksize, "nf4")


def dequantize_4bit(
    A: Tensor,
    quant_state: QuantState | None = None,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
    quant_type: str = "fp4",
) -> Tensor:
    """Dequantize a result of `quantize_4bit`.

    Args:
        A: packed codes. The result of transposed codes, [1, bytes], is transposed too.
        quant_state: their state. Without it `absmax`, `out`, `blocksize` (default: 64) and `quant_type` describe them.
        out: tensor that receives the values.

    Returns:
        values of the state's shape and dtype, or `out`.

    Raises:
        ValueError: neither a state nor both `absmax` and `out` are given, or the bytes do not fit the shape.
    """
    if quant_state is None:
        if absmax is None or out is None:
            raise ValueError("dequantize_4bit without quant_state needs absmax and out: pass both, or the state")
        quant_state = QuantState(
            absmax=absmax, shape=out.shape, blocksize=blocksize or 64, quant_type=quant_type, dtype=out.dtype
        )
    state = quant_state
    stored, needed = A.numel() * A.itemsize, (prod(state.shape) + 1) // 2
    if stored < needed:
        raise ValueError(f"{stored} packed bytes do not hold values of shape {tuple(state.shape)}: pass all {needed}")
    run = eager_or_compiled().dequantize_4bit
    values = run(A, state.scales(), state.blocksize, state.quant_type, list(state.shape), state.dtype)
    values = _stored(values, out)
    return values.t() if A.shape[0] == 1 and values.dim() == 2 else values


def gemv_4bit(
    A: Tensor,
    B: Tensor,
    out: Tensor | None = None,
    transposed_A: bool = False,
    transposed_B: bool = False,
    state: QuantState | None = None,
) -> Tensor:
    """Multiply rows A [..., K] by the transpose of a packed weight of shape [N, K], without a gradient.

    Raises:
        ValueError: `state` is None.
    """
    if state is None:
        raise ValueError("gemv_4bit needs the state that quantize_4bit returned")
    with torch.no_grad():
        return _stored(quantized_linear(A, StoredWeight.packed(B, state)), out)


def has_avx512bf16() -> bool:
    """Return False: the CPU kernels read codes in the storage order, and need no conversion of the weight."""
    return False


def int8_linear_matmul(A: Tensor, B: Tensor, out: Tensor | None = None, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return A·Bᵀ, exact, in int32 [..., N] from int8 [..., K] and [N, K]."""
    return _stored(eager_or_compiled().int8_linear_matmul(A, B), out)


def int8_mm_dequant(
    A: Tensor, row_stats: Tensor, col_stats: Tensor, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return the scaled int32 product A [..., N] in fp16: A · row_stats · col_stats / 127² + bias."""
    return _stored(eager_or_compiled().int8_mm_dequant(A, row_stats, col_stats, torch.float16, bias), out)


def int8_vectorwise_quant(A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize each row of A [..., K] to int8 (LLM.int8(), arXiv:2208.07339).

    Returns:
        int8 codes, fp32 absmax [rows], and int64 indices of the columns with a magnitude of at least `threshold`,
        whose codes are zero (None without a threshold).
    """
    return eager_or_compiled().int8_vectorwise_quant(A.detach(), float(threshold))


def int8_vectorwise_dequant(A: Tensor, stats: Tensor) -> Tensor:
    """Dequantize int8 rows to fp32: A · stats / 127."""
    return eager_or_compiled().int8_vectorwise_dequant(A, stats)


@deprecated("int8_double_quant is deprecated in bitsandbytes: use int8_vectorwise_quant", category=FutureWarning)
def int8_double_quant(
    A: Tensor,
    col_stats: Tensor | None = None,
    row_stats: Tensor | None = None,
    out_col: Tensor | None = None,
    out_row: Tensor | None = None,
    threshold: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Quantize A to int8 by rows and by columns.

    Returns:
        codes by row, codes by column, fp32 absmax of rows and of columns, and outlier columns as in
        `int8_vectorwise_quant`.
    """
    by_row, by_column, row_scales, column_scales, outliers = eager_or_compiled().int8_double_quant(A, float(threshold))
    codes = _stored(by_row, out_row), _stored(by_column, out_col)
    return *codes, _stored(row_scales, row_stats), _stored(column_scales, col_stats), outliers


def optimizer_update_32bit(
    optimizer_name: str,
    g: Tensor,
    p: Tensor,
    state1: Tensor,
    beta1: float,
    eps: float,
    step: int,
    lr: float,
    state2: Tensor | None = None,
    beta2: float = 0.0,
    beta3: float = 0.0,
    alpha: float = 0.0,
    weight_decay: float = 0.0,
    gnorm_scale: float = 1.0,
    unorm_vec: Tensor | None = None,
    max_unorm: float = 0.0,
    skip_zeros: bool = False,
) -> None:
    """Update a weight and its fp32 states in place, by one step of an optimizer.

    Args:
        optimizer_name: "adam", "ademamix", "lion", "momentum", "rmsprop", "adagrad", "lamb" or "lars".
        g, p: gradient and weight of one shape, in fp32, fp16 or bf16; p is contiguous.
        state1, state2: fp32 of p's shape; state1 of AdEMAMix is [2, *shape].
        step: number of this step, from 1.
        gnorm_scale: factor of the gradient.
        unorm_vec: fp32 [1], receives the squared norm of the update if `max_unorm` is positive.
        max_unorm: largest norm of the update, without the learning rate, relative to the weight's norm; 0: no limit.

    Raises:
        ValueError: unknown optimizer, or tensors that do not fit.
        NotImplementedError: `skip_zeros`, or `max_unorm` of an optimizer other than adam, momentum, lamb and lars.
    """
    is_on_gpu([g, p, state1, state2, unorm_vec])
    eager_or_compiled().optimizer_update_32bit(  # 0.0: the operator computes the weight's norm on the device
        optimizer_name, g, p, state1, state2, unorm_vec, max_unorm, 0.0, beta1, beta2, beta3, alpha, eps, weight_decay,
        step, lr, gnorm_scale, skip_zeros,
    )  # fmt: skip


def optimizer_update_8bit_blockwise(
    optimizer_name: str,
    g: Tensor,
    p: Tensor,
    state1: Tensor,
    state2: Tensor | None,
    beta1: float,
    beta2: float,
    beta3: float,
    alpha: float,
    eps: float,
    step: int,
    lr: float,
    qmap1: Tensor,
    qmap2: Tensor | None,
    absmax1: Tensor,
    absmax2: Tensor | None,
    weight_decay: float = 0.0,
    gnorm_scale: float = 1.0,
    skip_zeros: bool = False,
) -> None:
    """Update a weight and its 8-bit states in place, by one step of an optimizer.

    Args:
        optimizer_name, g, p, step, gnorm_scale: as in `optimizer_update_32bit`.
        state1, state2: uint8 codes of p's shape; state1 of AdEMAMix is [2, *shape].
        qmap1, qmap2: fp32 [256], `create_dynamic_map(True)` and `create_dynamic_map(False)`.
        absmax1, absmax2: fp32 [blocks of 256]; absmax1 of AdEMAMix is [2, blocks].

    Raises:
        ValueError: unknown optimizer, another map, or tensors that do not fit.
        NotImplementedError: `skip_zeros`.
    """
    is_on_gpu([p, g, state1, state2, qmap1, qmap2, absmax1, absmax2])
    eager_or_compiled().optimizer_update_8bit_blockwise(
        optimizer_name, g, p, state1, state2, beta1, beta2, beta3, alpha, eps, step, lr, qmap1, qmap2, absmax1,
        absmax2, weight_decay, gnorm_scale, skip_zeros,
    )  # fmt: skip


_IGEMM = "check_matmul, igemm and batched_igemm are deprecated in bitsandbytes: use int8_linear_matmul"


def _output_shape(A: Tensor, B: Tensor, transposed_A: bool, transposed_B: bool) -> tuple[int, ...]:
    if A.dim() == B.dim() == 3 and A.shape[:2] == B.shape[:2] and not (transposed_A or transposed_B):
        return A.shape[2], B.shape[2]  # a weight gradient: the sum over batch and sequence
    rows, inner = (A.shape[-1], A.shape[-2]) if transposed_A else (A.shape[-2], A.shape[-1])
    depth, columns = (B.shape[-1], B.shape[-2]) if transposed_B else (B.shape[-2], B.shape[-1])
    batches = A.dim() == 3 and B.dim() == 3 and A.shape[0] != B.shape[0]
    if inner != depth or batches or not 2 <= B.dim() <= A.dim() <= 3:
        raise ValueError(f"shapes {list(A.shape)} and {list(B.shape)} do not multiply: check the transposes")
    return *A.shape[:-2], rows, columns


@deprecated(_IGEMM, category=FutureWarning)
def check_matmul(
    A: Tensor,
    B: Tensor,
    out: Tensor | None,
    transposed_A: bool,
    transposed_B: bool,
    expected_type: torch.dtype = torch.int8,
) -> tuple[int, ...]:
    """Return the shape of the product of A and B; `out` is not read.

    Raises:
        TypeError: a dtype is not `expected_type`.
        ValueError: the shapes do not multiply.
    """
    return _checked_shape(A, B, transposed_A, transposed_B, expected_type)


def _checked_shape(
    A: Tensor, B: Tensor, transposed_A: bool, transposed_B: bool, expected_type: torch.dtype = torch.int8
) -> tuple[int, ...]:
    if A.dtype != expected_type or B.dtype != expected_type:
        raise TypeError(f"A is {A.dtype} and B is {B.dtype}: convert both to {expected_type}")
    return _output_shape(A, B, transposed_A, transposed_B)


@deprecated(_IGEMM, category=FutureWarning)
def igemm(
    A: Tensor, B: Tensor, out: Tensor | None = None, transposed_A: bool = False, transposed_B: bool = False
) -> Tensor:
    """Return the exact int32 product of int8 matrices.

    Two 3-D tensors [B, S, I] and [B, S, O] that are not transposed give the weight gradient AᵀB [I, O].

    Raises:
        TypeError: a dtype is not int8.
        ValueError: the shapes do not multiply.
    """
    shape = _checked_shape(A, B, transposed_A, transposed_B)
    if A.dim() == B.dim() == 3 and len(shape) == 2:
        left, right = A.flatten(0, 1).t(), B.flatten(0, 1).t()
    else:
        left, right = (A.mT if transposed_A else A), (B if transposed_B else B.mT)
    if right.dim() == 3:
        product = torch.stack([exact_int8_matmul(a, b) for a, b in zip(left, right, strict=True)])
    else:
        product = exact_int8_matmul(left.contiguous(), right.contiguous())
    return _stored(product, out)


@deprecated(_IGEMM, category=FutureWarning)
def batched_igemm(
    A: Tensor, B: Tensor, out: Tensor | None = None, transposed_A: bool = False, transposed_B: bool = False
) -> Tensor:
    """Return the exact int32 products [B, M, N] of int8 matrices A [B, M, K] and B [B, K, N].

    Raises:
        ValueError: A or B is not 3-D.
    """
    if A.dim() != 3 or B.dim() != 3:
        raise ValueError(f"batched_igemm multiplies 3-D tensors, got {A.dim()}-D and {B.dim()}-D: use igemm")
    left, right = (A.mT if transposed_A else A), (B if transposed_B else B.mT)
    return _stored(torch.stack([exact_int8_matmul(a, b) for a, b in zip(left, right, strict=True)]), out)


def elementwise_func(func_name: str, A: Tensor, B: Tensor | None, value: float, prefetch: bool = True) -> None:
    """Run "fill", "arange" or "_mul" on A, in place.

    Raises:
        ValueError: another name.
    """
    if func_name == "fill":
        A.fill_(value)
    elif func_name == "arange":
        A.copy_(torch.arange(A.numel(), device=A.device).view(A.shape))
    elif func_name == "_mul" and B is not None:
        A.mul_(B)
    else:
        raise ValueError(f"unknown elementwise function {func_name!r}: use 'fill', 'arange' or '_mul' with B")


def fill(A: Tensor, value: float, device: Any = None, prefetch: bool = True) -> None:
    """Fill A with `value`, in place."""
    elementwise_func("fill", A, None, value)


def _mul(A: Tensor, B: Tensor, device: Any = None) -> None:
    elementwise_func("_mul", A, B, 0)


class GlobalPageManager:
    """Tensors that a caller has allocated with `get_paged` and appended to `paged_tensors`; a singleton."""

    _instance: GlobalPageManager | None = None
    paged_tensors: list[Tensor]

    def __init__(self) -> None:
        raise RuntimeError("Call get_instance() instead")

    def initialize(self) -> None:
        """Forget all tensors."""
        self.paged_tensors = []

    @classmethod
    def get_instance(cls) -> GlobalPageManager:
        """Return the manager of this process."""
        if cls._instance is None:
            cls._instance = cls.__new__(cls)
            cls._instance.initialize()
        return cls._instance

    def prefetch_all(self, to_cpu: bool = False) -> None:
        """Call `prefetch_tensor` for each tensor, from the last to the first."""
        for tensor in reversed(self.paged_tensors):
            prefetch_tensor(tensor, to_cpu)


def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device = FIRST_CUDA_DEVICE) -> Tensor:
    """Return a tensor of zeros in host memory, pinned where there is a GPU, for state of parameters on `device`.

    bitsandbytes returns unified memory. An update by `optimizer_update_*` on a GPU reads and writes the pinned memory
    over the bus; halfbyte's paged optimizers copy their state through windows on the device instead.
    """
    paged: Any = torch.zeros(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
    paged.is_paged, paged.page_deviceid = True, torch.device(device).index
    return paged


def prefetch_tensor(A: Tensor, to_cpu: bool = False) -> None:
    """Check that A is a result of `get_paged`, and do nothing else: it is not moved from host memory.

    Raises:
        ValueError: A is not paged.
    """
    if not getattr(A, "is_paged", False):
        raise ValueError("only results of get_paged can be prefetched")


def is_on_gpu(tensors: Iterable[Tensor | None]) -> bool:
    """Return True if the tensors are on one device (a GPU or the CPU); None and results of `get_paged` are skipped.

    Raises:
        RuntimeError: they are on several devices.
    """
    devices = {tensor.device for tensor in tensors if tensor is not None and not getattr(tensor, "is_paged", False)}
    if len(devices) > 1:
        raise RuntimeError(f"the tensors are on {sorted(map(str, devices))}: move them to one device")
    return True


def get_ptr(A: Tensor | None) -> ctypes.c_void_p | None:
    """Return the address of A's data, as the functions of `lib` take it; None for None."""
    return None if A is None else ctypes.c_void_p(A.data_ptr())


def _get_tensor_stream(tensor: Tensor) -> ctypes.c_void_p:
    stream = torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
    return ctypes.c_void_p(stream)
