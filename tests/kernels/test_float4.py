"""GEMMs on FP4 tensor cores, which no test machine has: the order of their operands, and the check before the first."""

import numpy as np
import pytest
import torch

from halfbyte.dispatch import Unavailable
from halfbyte.formats.nvfp4 import quantize_nvfp4
from halfbyte.kernels.cuda import float4
from halfbyte.ops.float4 import emulated

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def tensor_core(a, b, a_scales, b_scales, *, out_dtype):
    """Multiply operands laid out as in the cuBLAS 12.8 documentation, section 3.1.4.3."""

    def values(codes, scales):
        packed = codes.view(torch.uint8).numpy()
        nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
        numbers = np.where(nibbles & 8, -1.0, 1.0) * MAGNITUDES[nibbles & 7]
        across = -(-numbers.shape[1] // 64)
        row, column = np.indices((len(packed), numbers.shape[1] // 16))
        tile = row // 128 * across + column // 4
        offset = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        return numbers * scales.float().numpy()[offset].repeat(16, 1)

    return torch.from_numpy(values(a, a_scales) @ values(b.t(), b_scales).T).to(out_dtype)


@pytest.fixture(autouse=True)
def forget():
    float4._is_right.cache_clear()
    yield
    float4._is_right.cache_clear()


@pytest.mark.parametrize(("rows", "outputs", "width", "tile"), [(5, 32, 64, 1), (130, 160, 96, 16), (300, 64, 320, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gemm_equals_the_reference(monkeypatch, rows, outputs, width, tile, dtype):
    monkeypatch.setattr(torch, "_scaled_mm", tensor_core)
    a = quantize_nvfp4(torch.randn(rows, width), 1)
    b = quantize_nvfp4(torch.randn(outputs, width) * 0.02, tile)
    operands = a.codes, b.codes, a.scales, b.scales, a.factor * b.factor, dtype
    torch.testing.assert_close(float4.scaled_mm(*operands), emulated(*operands), rtol=1e-2, atol=1e-3)


def test_a_gemm_that_reads_scales_in_another_order_is_not_used(monkeypatch):
    def other_order(a, b, a_scales, b_scales, *, out_dtype):
        return tensor_core(a, b, a_scales.view(-1, 2).flip(1).reshape(-1), b_scales, out_dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", other_order)
    a = quantize_nvfp4(torch.randn(4, 64), 1)
    with pytest.raises(Unavailable):
        float4.scaled_mm(a.codes, a.codes, a.scales, a.scales, a.factor, torch.bfloat16)


def test_a_torch_without_fp4_gemms_is_not_used(monkeypatch):
    monkeypatch.delattr(torch, "_scaled_mm")
    a = quantize_nvfp4(torch.randn(4, 64), 1)
    with pytest.raises(Unavailable):
        float4.scaled_mm(a.codes, a.codes, a.scales, a.scales, a.factor, torch.bfloat16)
