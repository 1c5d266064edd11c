"""The bit-plane kernels of kbit and hqq on a GPU: bit-equal to the references, past 2^31 values, and quick to fit."""

import pytest
import torch
from plane_cases import HQQ, KBIT, SHAPES, check_dequantize, check_quantize, weight_of

from halfbyte import notices
from halfbyte.formats import HQQ as HQQFormat
from halfbyte.formats import KBit, from_spec

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGER = (*SHAPES, (130, 33), (67, 1024), (1024, 4096), (33, 4097))


@pytest.mark.parametrize("spec", [*KBIT, *HQQ])
def test_dequantize(spec):
    check_dequantize([spec], DTYPES, LARGER, "cuda")


@pytest.mark.parametrize("spec", [spec for spec in KBIT if "affine" not in spec])
def test_dequantize_by_the_kernel_for_large_weights(spec, monkeypatch):
    """Some warps have a round more; Triton takes other counts of blocks, and all where NVRTC does not compile."""
    bitplane_cuda, shape = pytest.importorskip("halfbyte.kernels.cuda.bitplane"), (4099, 1024)
    if torch.cuda.get_device_capability() < bitplane_cuda.CAPABILITY:
        pytest.skip("needs Hopper")

    def kernel(packed, scales, zeros, *rest):
        return bitplane_cuda.dequantize(packed, scales, *rest)

    check_dequantize([spec], DTYPES[1:], [shape], "cuda", kernel=kernel)
    check_dequantize([spec], [torch.bfloat16], [(4099, 1056)], "cuda")

    from halfbyte.dispatch import Unavailable

    def refuse(*_):
        raise Unavailable("no NVRTC")

    monkeypatch.setattr(bitplane_cuda, "_kernel", refuse)
    monkeypatch.setattr(notices, "_said", {})
    check_dequantize([spec], [torch.bfloat16], [shape], "cuda")
    assert "no NVRTC" in notices.said()["dequantize-planes-cuda"]


@pytest.mark.parametrize("spec", KBIT)
def test_quantize(spec):
    check_quantize([spec], DTYPES, LARGER, "cuda")


@pytest.mark.parametrize("spec", [*KBIT, *HQQ])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_format_gives_the_same_bytes_as_on_a_cpu(spec, dtype):
    format = from_spec(spec)
    weight = weight_of((129, 515), dtype)
    expected, found = format.quantize(weight), format.quantize(weight.cuda())
    for name, part in expected.items():
        assert torch.equal(found[name].cpu(), part), name


@pytest.mark.parametrize("spec", ["kbit:4:nf", "hqq:4:64"])
def test_wide_ranges(spec):
    """Block scales from 1e-30 to 1e30: scales that E4M4 flushes, and a factor that brings in the rest."""
    exponent = torch.rand(1 << 12, 1, generator=torch.Generator().manual_seed(0)) * 60 - 30
    weight = torch.randn(1 << 12, 64, generator=torch.Generator().manual_seed(1)) * 10**exponent
    format = from_spec(spec)
    expected = format.quantize(weight)
    found = format.quantize(weight.cuda())
    for name, part in expected.items():
        assert torch.equal(found[name].cpu(), part), name
    values = format.dequantize(found, (1 << 12, 64), torch.float32).cpu()
    assert torch.equal(values, format.dequantize(expected, (1 << 12, 64), torch.float32))


@pytest.mark.parametrize("spec", ["kbit:5:nf", "kbit:2:affine", "hqq:3:64"])
def test_dequantizing_in_a_graph(spec):
    format, shape = from_spec(spec), (1024, 4096)
    parts = format.quantize(weight_of(shape, torch.bfloat16, "cuda"))
    expected = format.dequantize(parts, shape, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = format.dequantize(parts, shape, torch.bfloat16)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)


@pytest.mark.large(40)
@pytest.mark.parametrize("format", [KBit(5, "nf"), HQQFormat(2)], ids=lambda format: format.spec)
def test_more_than_two_to_the_31_values(format):
    rows, width = (2**31 + 4096) // 1024, 1024
    weight = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    weight[[0, 2**21, rows - 1], :] = 0.5
    values = format.dequantize(format.quantize(weight), (rows, width), torch.bfloat16)
    assert torch.equal(values, weight)


def test_fitting_hqq_takes_a_gibibyte_beside_the_weight():
    """The largest linear of a Llama-3.1-8B layer; how much work it is, `tests/formats/test_hqq.py` counts."""
    weight, format = torch.randn(14336, 4096, dtype=torch.bfloat16, device="cuda") * 0.02, HQQFormat(4, 64)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    format.quantize(weight)
    assert torch.cuda.max_memory_allocated() - before < 2**30
