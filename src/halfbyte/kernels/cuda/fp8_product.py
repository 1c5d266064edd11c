"""FP8 GEMMs on NVIDIA GPUs with FP8 units: torch._scaled_mm, or cuBLASLt with a term.

torch's function has no beta. `cublasLtMatmul` itself adds its product to what is there, with one scale for each operand
and bf16 results; it is called by ctypes, from the library that torch has loaded. At [8192, 4096] on an H200 a term
costs 20 to 40 µs so, where one added to a finished product costs 57: 3 ms of an 8B step.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ...dispatch import Unavailable
from ...notices import notice
from ...ops.float8 import E5M2
from ...ops.fp8_product import Term, emulated, fp8_product
from ..device import device_of

MULTIPLE = 16  # of the sizes of an FP8 product
WORKSPACE = 32 << 20  # bytes that cuBLASLt may ask for, as NVIDIA recommends for Hopper
PLANS = 1024  # that are remembered; some hundred bytes of a forgotten one stay
# Of cublasLt.h: types, the compute type, and attributes of a product and of what is preferred.
F32, BF16, E4M3_CODES, E5M2_CODES, COMPUTE_32F = 0, 14, 28, 29, 68
TRANSA, A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUM, MAX_WORKSPACE_BYTES = 3, 17, 18, 25, 1


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Cublas:
    """The library, with a handle for one device."""

    def __init__(self, device: int):
        try:
            self._library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")
        except OSError as error:
            raise Unavailable(str(error)) from error
        self.handle = self.made("Create")

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, f"cublasLt{name}")(*arguments)
        if status:
            raise Unavailable(f"cublasLt{name} failed with status {status}")

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """What a function makes that takes where to put it first."""
        made = ctypes.c_void_p()
        self(name, ctypes.byref(made), *arguments)
        return made

    def set(self, kind: str, to: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self(f"{kind}SetAttribute", to, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


@functools.cache
def _cublas(device: int) -> _Cublas:
    with torch.cuda.device(device):
        return _Cublas(device)


class _Plan:
    """out [M, N] += a·bᵀ for one set of sizes and types. To cuBLAS, whose matrices are columns, outᵀ += (bᵀ)ᵀ·aᵀ."""

    def __init__(self, device: int, m: int, n: int, k: int, a_type: int, fast: bool):
        self._cublas = cublas = _cublas(device)
        self._product = cublas.made("MatmulDescCreate", COMPUTE_32F, F32)
        self._set(TRANSA, ctypes.c_int(1))
        self._set(FAST_ACCUM, ctypes.c_int8(fast))
        layouts = ((E4M3_CODES, k, n, k), (a_type, k, m, k), (BF16, n, m, n))
        made = [cublas.made("MatrixLayoutCreate", kind, *map(ctypes.c_int64, sizes)) for kind, *sizes in layouts]
        self._b, self._a, self._out = made
        preference = cublas.made("MatmulPreferenceCreate")
        cublas.set("MatmulPreference", preference, MAX_WORKSPACE_BYTES, ctypes.c_size_t(WORKSPACE))
        self._found, count = _Found(), ctypes.c_int()
        results = 1, ctypes.byref(self._found), ctypes.byref(count)
        cublas("MatmulAlgoGetHeuristic", cublas.handle, self._product, *made, self._out, preference, *results)
        cublas("MatmulPreferenceDestroy", preference)
        if not count.value:
            raise Unavailable(f"cuBLASLt adds no product [{m}, {k}] by [{n}, {k}]")

    def _set(self, attribute: int, value: Any) -> None:
        self._cublas.set("MatmulDesc", self._product, attribute, value)

    def __call__(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        self._set(A_SCALE_POINTER, ctypes.c_void_p(b_scale.data_ptr()))
        self._set(B_SCALE_POINTER, ctypes.c_void_p(a_scale.data_ptr()))
        workspace = torch.empty(self._found.workspace, dtype=torch.uint8, device=out.device)
        one, onto = ctypes.byref(ctypes.c_float(1)), ctypes.c_void_p(out.data_ptr())
        self._cublas(
            "Matmul", self._cublas.handle, self._product, one, ctypes.c_void_p(b.data_ptr()), self._b,
            ctypes.c_void_p(a.data_ptr()), self._a, one, onto, self._out, onto, self._out,
            ctypes.byref(self._found.algorithm), ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(self._found.workspace), ctypes.c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
        )  # fmt: skip


@functools.lru_cache(PLANS)
def _plan(*arguments: Any) -> _Plan | Unavailable:
    """A plan, or why there is none: what was refused is not asked for again."""
    try:
        return _Plan(*arguments)
    except Unavailable as error:
        return error


def obstacle(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *_: Any) -> str | None:
    needed = (9, 0) if b_scale.dim() else (8, 9)  # scales per row: Hopper and later
    if not device_of(a).at_least(needed):
        return f"{a.device.type} has no FP8 units that torch multiplies with"
    if a.shape[1] % MULTIPLE or b.shape[0] % MULTIPLE:
        return f"{a.shape[1]} and {b.shape[0]} are not both multiples of {MULTIPLE}, as FP8 products need"
    return None


def term_obstacle(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, fast: bool, term: Term | None = None
) -> str | None:
    if term is None or b_scale.dim() or out.dtype is not torch.bfloat16:
        return "is for products with a term, one scale and bf16"
    if any(tensor.data_ptr() % 16 for tensor in (a, b, a_scale, b_scale, out)):
        return "needs tensors at multiples of 16 bytes"
    return obstacle(a, b, a_scale, b_scale)


@fp8_product.kernel("cuda", unless=term_obstacle, rank=1)
def cublaslt(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, fast: bool, term: Term) -> None:
    """The term is written first, and the product added to it. Whatever fails then, the next kernel writes anew."""
    plan = _plan(out.get_device(), *out.shape, a.shape[1], E5M2_CODES if a.dtype is E5M2 else E4M3_CODES, fast)
    if isinstance(plan, Unavailable):
        raise Unavailable(str(plan))
    term.write(out)
    with torch.cuda.device(out.get_device()):
        plan(a, b, a_scale, b_scale, out)


@fp8_product.kernel("cuda", unless=obstacle, rank=2)
def scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, fast: bool, term: Term | None = None
) -> None:
    if b_scale.dim():
        a_scale, b_scale = a_scale.expand(a.shape[0], 1).contiguous(), b_scale.view(1, -1)
    result = out if out.dtype is torch.bfloat16 else torch.empty_like(out, dtype=torch.bfloat16)
    torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast, out=result)
    if result is not out:
        out.copy_(result)
    if term is not None:
        term.add(out)


@fp8_product.kernel("cuda", rank=3)
def emulate(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, fast: bool, term: Term | None = None
) -> None:
    why = obstacle(a, b, a_scale, b_scale)
    notice("fp8-product-cuda", f"{why}: FP8 codes are multiplied in 16 or 32 bits, with equal results")
    emulated(a, b, a_scale, b_scale, out, term)
