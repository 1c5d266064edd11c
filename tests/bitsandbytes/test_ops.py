"""Operators of `torch.ops`: schemas as upstream's, fakes, and both packages in one process."""

import bitsandbytes._ops  # noqa: F401  registers the real operators
import pytest
import torch

from halfbyte.bitsandbytes import _ops
from halfbyte.bitsandbytes import functional as F

own, real = torch.ops.halfbyte_bnb, torch.ops.bitsandbytes
NAMES = [
    f"{name}{overload}"
    for name in (schema.partition("(")[0] for schema, _, _ in _ops._OPS)
    for overload in (".default", *([".out"] if name in _ops._WITH_OUT else []))
]


def overload(namespace, name):
    op, _, variant = name.partition(".")
    return getattr(getattr(namespace, op), variant)


@pytest.mark.parametrize("name", NAMES)
def test_schema_equals_upstreams(name):
    mine, theirs = overload(own, name)._schema, overload(real, name)._schema
    assert str(mine).replace("halfbyte_bnb", "bitsandbytes") == str(theirs)


def calls():
    x, w = torch.randn(4, 64), torch.randn(32, 64)
    packed, state = F.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
    plain, plain_state = F.quantize_4bit(w, quant_type="nf4")
    codes, scales, _ = F.int8_vectorwise_quant(x)
    w_codes, w_scales, _ = F.int8_vectorwise_quant(w)
    product = F.int8_linear_matmul(codes, w_codes)
    map_ = F.create_dynamic_map()
    eight, absmax = own.quantize_blockwise(x, map_, 64)
    columns = torch.tensor([1, 5])
    nested = (state.state2.absmax, 64, "nf4", torch.randn(32), state.absmax, state.state2.code, state.offset)
    decode = (plain, plain_state.absmax, 64, "nf4", [32, 64], torch.bfloat16)
    row = (x, plain, [32, 64], plain_state.absmax, plain_state.code, 64)
    p, g = torch.randn(300), torch.randn(300)
    states = [torch.full((300,), code, dtype=torch.uint8) for code in (127, 0)]
    stats, maps = [torch.zeros(2), torch.zeros(2)], [map_, F.create_dynamic_map(signed=False)]
    numbers = (0.9, 0.999, 0.0, 0.0, 1e-8)
    return {
        "optimizer_update_32bit.default": (
            "lars", g, p, torch.rand(300), None, torch.zeros(1), 0.02, 17.0, *numbers, 0.1, 3, 1e-2, 0.5,
        ),
        "optimizer_update_8bit_blockwise.default": (
            "adam", g, p, *states, *numbers, 1, 1e-2, *maps, *stats, 0.1, 0.5,
        ),
        "int8_mixed_scaled_mm.default": (x, codes, w_codes, scales, w_scales, columns, None),
        "int8_scaled_mm.default": (codes, w_codes, scales, w_scales, torch.randn(32), torch.float32),
        "int8_linear_matmul.default": (codes, w_codes),
        "int8_linear_matmul.out": (codes, w_codes, torch.empty(4, 32, dtype=torch.int32)),
        "int8_vectorwise_quant.default": (x, 1.5),
        "int8_vectorwise_dequant.default": (codes, scales),
        "int8_mm_dequant.default": (product, scales, w_scales, torch.float32, None),
        "int8_double_quant.default": (x, 0.0),
        "quantize_4bit.default": (w, 64, "fp4", torch.uint8),
        "dequantize_4bit.default": decode,
        "dequantize_4bit.out": (*decode, torch.empty(32, 64, dtype=torch.bfloat16)),
        "gemm_4bit.default": (x, packed, [32, 64], *nested),
        "gemv_4bit.default": row,
        "gemv_4bit.out": (*row, torch.empty(4, 32)),
        "quantize_blockwise.default": (x, map_, 64),
        "dequantize_blockwise.default": (eight, absmax, map_, 64, torch.float16),
        "dequantize_blockwise.out": (eight, absmax, map_, 64, torch.float32, torch.empty(4, 64)),
    }  # fmt: skip


def test_all_operators_have_a_case():
    assert set(calls()) == set(NAMES)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    torch.library.opcheck(overload(own, name), calls()[name])


@pytest.mark.parametrize("name", ["dequantize_4bit.default", "int8_linear_matmul.default"])
def test_values_equal_upstreams(name):
    arguments = calls()[name]
    torch.testing.assert_close(overload(own, name)(*arguments), overload(real, name)(*arguments), rtol=2e-5, atol=1e-5)


def test_gemv_is_the_product_with_the_values():
    """bitsandbytes' own kernel reads codes in another order on a CPU with AVX512-BF16."""
    x, packed, shape, absmax, code, blocksize = calls()["gemv_4bit.default"]
    values = own.dequantize_4bit(packed, absmax, blocksize, "nf4", shape, torch.float32)
    expected = (x.double() @ values.double().t()).float()
    torch.testing.assert_close(own.gemv_4bit(x, packed, shape, absmax, code, blocksize), expected, rtol=2e-5, atol=1e-5)
