"""Other projects' products with 4-bit weights, and their NF4 dequantization, for `benchmarks.weights`.

Marlin needs a library with gptqmodel's operators `torch.ops.gptqmodel_marlin_bf16` (its `gptqmodel_ext/marlin`, built
with `torch.utils.cpp_extension.load(..., is_python_module=False)`). The other peers are in torch (tinygemm, which
torchao's int4 weights use) or in packages that can be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

GROUP = 128
UINT4_BIAS_8 = 4 << 8 | 8 << 17 | 1 << 50  # vLLM's ScalarType of unsigned 4-bit codes with bias 8

# Makes one random weight [N, K] and returns the product with it, a function of x [M, K] in bf16.
Product = Callable[[Tensor], Tensor]


def marlin(rows: int, columns: int) -> tuple[Product, float]:
    """Return a product by Marlin with groups of 128 and symmetric codes, and the bytes of its weight."""
    ops = torch.ops.gptqmodel_marlin_bf16
    words = torch.iinfo(torch.int32)
    codes = torch.randint(words.min, words.max, (columns // 8, rows), dtype=torch.int32, device="cuda")
    packed = ops.gptq_marlin_repack(codes, torch.empty(0, dtype=torch.int32, device="cuda"), columns, rows, 4)
    scales = torch.rand(columns // GROUP, rows, device="cuda").mul_(0.01).bfloat16()
    count = torch.cuda.get_device_properties(0).multi_processor_count
    workspace = torch.zeros(max(count, 128), dtype=torch.int32, device="cuda")

    def product(x: Tensor) -> Tensor:
        return ops.gptq_marlin_gemm_bf16(
            x, None, packed, None, scales, None, None, None, None, workspace, UINT4_BIAS_8, len(x), rows, columns,
            True, False, True, False, None, None,
        )  # fmt: skip

    return product, packed.numel() * 4 + scales.numel() * 2


def tinygemm(rows: int, columns: int) -> tuple[Product, float]:
    """Return a product by torch's int4 kernel with groups of 128, and the bytes of its weight."""
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.rand(columns // GROUP, rows, 2, device="cuda").mul_(0.01).bfloat16()
    product = partial(torch.ops.aten._weight_int4pack_mm, mat2=packed, qGroupSize=GROUP, qScaleAndZeros=scales)
    return product, codes.numel() + scales.numel() * 2


def bitsandbytes(rows: int, columns: int) -> tuple[Product, float]:
    """Return bitsandbytes' `matmul_4bit` with NF4 in blocks of 64, and the bytes of its weight."""
    import bitsandbytes as peer

    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
    packed, state = peer.functional.quantize_4bit(weight, quant_type="nf4")

    def product(x: Tensor) -> Tensor:
        return peer.matmul_4bit(x, packed.t(), quant_state=state)

    return product, weight.numel() / 2 + weight.numel() / 64 * 4


PRODUCTS = {"marlin": marlin, "tinygemm": tinygemm, "bitsandbytes": bitsandbytes}


def bitsandbytes_dequantize(weight: Tensor, nested: bool) -> Callable[[], Tensor]:
    """Return bitsandbytes' dequantization of `weight` in NF4, which allocates its result."""
    import bitsandbytes.functional as peer

    packed, state = peer.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    return partial(peer.dequantize_4bit, packed, state)


def unsloth_dequantize(weight: Tensor, nested: bool) -> Callable[[], Tensor]:
    """Return Unsloth's `fast_dequantize` of `weight` as its layers call it, into a buffer that all weights share."""
    import bitsandbytes.functional as peer
    import unsloth  # noqa: F401 - its kernels cannot be imported without it
    from unsloth.kernels.utils import fast_dequantize

    packed, state = peer.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    return partial(fast_dequantize, packed, state, use_global_buffer=True)


DEQUANTIZATIONS: dict[str, Callable[[Tensor, bool], Callable[[], Tensor]]] = {
    "bitsandbytes": bitsandbytes_dequantize,
    "unsloth": unsloth_dequantize,
}


def load_marlin(path: str) -> Any:
    """Load the library with gptqmodel's operators."""
    torch.ops.load_library(path)
