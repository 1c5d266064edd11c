"""Stand-in for bitsandbytes' C library: the symbols that other packages call by pointer, as Python functions.

Axolotl and Unsloth call dequantization and the one-row product with `ctypes` pointers to tensors' data. Here a symbol
wraps the pointers as tensors and runs halfbyte's ops, on the stream that it is given.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..formats.codebooks import dequantize_blockwise8
from ..utils.errors import ModelError
from . import _ops
from .cuda_specs import get_rocm_gpu_arch
from .utils import gpu_view

HIP_ENVIRONMENT = torch.version.hip is not None
ROCM_GPU_ARCH = get_rocm_gpu_arch()
ROCM_WARP_SIZE_64 = ROCM_GPU_ARCH.startswith("gfx9")
BNB_BACKEND = "ROCm" if HIP_ENVIRONMENT else "CUDA" if torch.cuda.is_available() else "CPU"

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_INSTEAD = {"quantize": "functional.quantize_4bit or quantize_blockwise", "igemm": "functional.int8_linear_matmul"}


def _view(name: str, pointer: Any, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` values of `dtype` at a pointer, sharing its memory.

    Raises:
        ModelError: the pointer is null or, on a machine with a GPU, does not point to the GPU's memory.
    """
    address = pointer.value if isinstance(pointer, ctypes.c_void_p) else pointer
    size = count * dtype.itemsize
    if not size:
        return torch.empty(0, dtype=dtype)
    if not address:
        raise ModelError(f"the pointer {name} is null", "pass get_ptr(tensor) of a tensor on the device")
    if torch.cuda.is_available():
        try:
            return gpu_view(address, size).view(dtype)
        except RuntimeError as error:
            raise ModelError(f"the pointer {name} is not on the GPU: {error}", "move the tensor to the GPU") from error
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def _on_stream(stream: Any) -> Any:
    address = stream.value if isinstance(stream, ctypes.c_void_p) else stream
    if not address or not torch.cuda.is_available():
        return torch.cuda.stream(None)  # no change
    return torch.cuda.stream(torch.cuda.ExternalStream(address))


def _dequantize(
    quant_type: str,
    dtype: torch.dtype,
    code: Any,
    A: Any,
    absmax: Any,
    out: Any,
    blocksize: int,
    n: int,
    stream: Any = None,
) -> None:
    blocksize, n = int(getattr(blocksize, "value", blocksize)), int(getattr(n, "value", n))
    with _on_stream(stream):
        scales = _view("absmax", absmax, -(-n // blocksize), torch.float32)
        result = _view("out", out, n, dtype)
        if quant_type:
            packed = _view("A", A, (n + 1) // 2, torch.uint8)
            result.copy_(_ops.dequantize_4bit(packed, scales, blocksize, quant_type, (n,), dtype))
            return
        codes, values = _view("A", A, n, torch.uint8), _view("code", code, 256, torch.float32)
        result.copy_(dequantize_blockwise8(codes, scales, values, blocksize, dtype))


def _gemv(
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    A: Any,
    B: Any,
    absmax: Any,
    datatype: Any,
    out: Any,
    lda: int,
    ldb: int,
    ldc: int,
    blocksize: int,
    stream: Any = None,
) -> None:
    """out [m] = W·A for A [k] and a packed W [m, k]. `n` is 1 and rows are contiguous, so the strides are not read."""
    m, k, blocksize = (int(getattr(value, "value", value)) for value in (m, k, blocksize))
    with _on_stream(stream):
        x, packed = _view("A", A, k, dtype), _view("B", B, (m * k + 1) // 2, torch.uint8)
        scales = _view("absmax", absmax, -(-m * k // blocksize), torch.float32)
        values = _view("datatype", datatype, 16, torch.float32)
        y = _ops.gemv_4bit(x.view(1, k), packed, (m, k), scales, values, blocksize)
        _view("out", out, m, dtype).copy_(y.view(-1))


class Symbol:
    """A C symbol: callable, with `argtypes` and `restype` as in ctypes."""

    restype: Any = None

    def __init__(self, name: str, function: Callable[..., None], argtypes: list[Any]):
        self.__name__ = name
        self._function = function
        self.argtypes = argtypes

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)


def _symbols() -> dict[str, Symbol]:
    symbols = {}
    argtypes: list[Any]
    for short, dtype in _DTYPES.items():
        for quant_type in ("", "nf4", "fp4"):
            name = f"cdequantize_blockwise_{short}" + (f"_{quant_type}" if quant_type else "")
            argtypes = [_POINTER] * 4 + [_INT, _INT, _POINTER]
            symbols[name] = Symbol(name, functools.partial(_dequantize, quant_type, dtype), argtypes)
        for name in (f"cgemv_4bit_inference_{short}", f"cgemm_4bit_inference_naive_{short}"):
            argtypes = [_INT] * 3 + [_POINTER] * 5 + [_INT] * 4 + [_POINTER]
            symbols[name] = Symbol(name, functools.partial(_gemv, dtype), argtypes)
    return symbols


class BNBNativeLibrary:
    """The symbols by attribute or item. Any other name raises an error that names the function to call instead."""

    compiled_with_cuda = True

    def __init__(self) -> None:
        self._symbols = _symbols()

    def __getattr__(self, name: str) -> Symbol:
        if name in (symbols := vars(self).get("_symbols", {})):
            return symbols[name]
        if name.startswith("__"):
            raise AttributeError(name)
        instead = next((call for fragment, call in _INSTEAD.items() if fragment in name), "the function of that name")
        raise RuntimeError(
            f"halfbyte.bitsandbytes has no C symbol {name}: call {instead} of bitsandbytes.functional with tensors"
        )

    def __getitem__(self, name: str) -> Symbol:
        return getattr(self, name)


lib = BNBNativeLibrary()


def get_native_library() -> BNBNativeLibrary:
    """Return `lib`; there is no binary to load."""
    return lib
