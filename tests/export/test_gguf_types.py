"""Our encoders against the gguf library's: equal bytes where it has an encoder, its decoders for everything."""

import numpy as np
import pytest
import torch
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.gguf.quants import ENCODERS, FLOATS, Type, quantize, row_bytes
from halfbyte.utils.errors import CheckpointError

EQUAL = (Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.BF16, Type.F16, Type.F32)
# Relative RMS error on normal weights. ggml's own encoders get the same within 0.3% (test_gguf_llamacpp.py).
ERRORS = {
    Type.Q8_0: 0.006, Type.Q6_K: 0.02, Type.Q5_0: 0.045, Type.Q5_1: 0.04, Type.Q5_K: 0.04, Type.Q4_0: 0.09,
    Type.Q4_1: 0.082, Type.Q4_K: 0.077, Type.Q3_K: 0.16, Type.Q2_K: 0.3,
}  # fmt: skip


def decoded(encoded, type_):
    return quants.dequantize(encoded.numpy(), type_)


def relative_error(x, type_, importance=None):
    off = (decoded(quantize(x, type_, importance), type_) - x.numpy()) ** 2
    weight = 1.0 if importance is None else importance.numpy()
    return float(np.sqrt((off * weight).sum() / (x.numpy() ** 2 * weight).sum()))


def ugly():
    """Zeros, constants, one sign, outliers, tiny and large values."""
    x = torch.randn(16, 512) * 0.02
    x[0], x[1, :256], x[2], x[3], x[4, 100] = 0, 1.5, x[2].abs(), -x[3].abs(), 30
    x[5], x[6], x[7, ::2] = x[5] * 1e-5, x[6] * 1e4, 0
    return x


@pytest.mark.parametrize("type_", EQUAL, ids=lambda type_: type_.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_the_gguf_librarys(type_, dtype):
    x = ugly().to(dtype)
    expected = quants.quantize(x.float().numpy(), type_)
    assert np.array_equal(quantize(x, type_).numpy(), expected.view(np.uint8).reshape(16, -1))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30), min_size=32, max_size=32))
def test_bytes_of_any_block_are_the_gguf_librarys(values):
    x = torch.tensor([values])
    for type_ in (Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1):
        assert np.array_equal(quantize(x, type_).numpy(), quants.quantize(x.numpy(), type_)), type_.name


@pytest.mark.parametrize("type_", ENCODERS, ids=lambda type_: type_.name)
def test_the_error_on_normal_weights(type_):
    x = torch.randn(64, 1024) * 0.02
    assert quantize(x, type_).shape == (64, row_bytes(1024, type_))
    assert 0.7 * ERRORS[type_] < relative_error(x, type_) < ERRORS[type_]


@pytest.mark.parametrize("type_", set(ENCODERS) - {Type.Q8_0}, ids=lambda type_: type_.name)
def test_importances_lower_the_error_they_weigh(type_):
    x, importance = torch.randn(64, 1024) * 0.02, torch.rand(1024) ** 4 + 0.01
    plain = decoded(quantize(x, type_), type_)
    off = float(np.sqrt(((plain - x.numpy()) ** 2 * importance.numpy()).sum()))
    size = float(np.sqrt((x.numpy() ** 2 * importance.numpy()).sum()))
    assert relative_error(x, type_, importance) < 0.99 * off / size


@pytest.mark.parametrize("type_", [Type.Q4_K, Type.Q8_0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_refused(type_, value):
    x = torch.randn(2, 256)
    x[1, 7] = value
    with pytest.raises(CheckpointError, match="NaN"):
        quantize(x, type_)


def test_what_does_not_fit_fp16_is_refused():
    with pytest.raises(CheckpointError, match="float16"):
        quantize(torch.tensor([[1e5]]), Type.F16)
    assert set(FLOATS) == {Type.F32, Type.F16, Type.BF16}
