"""Check the int8 reference: codes, the product, and the split of outlier columns."""

import pytest
import torch

from halfbyte.formats import int8
from halfbyte.utils.errors import ModelError

needs_exact_products = pytest.mark.skipif(
    not int8.multiplies_int8(torch.empty(1, 1), 1), reason="torch._int_mm is inexact on this CPU: it has no VNNI"
)


def inputs(rows=20, width=256, outliers=(3, 200), dtype=torch.float32):
    x = torch.randn(rows, width).clamp_(-4, 4)
    for at, column in enumerate(outliers):
        x[at % rows, column] = 30.0 + at
    return x.to(dtype)


def test_codes_by_hand():
    codes, absmax = int8.quantize_rows_int8(torch.tensor([[127.0, -0.5, 1.5, 2.5], [0, 0, 0, 0]]), None, 0.0)
    assert codes.tolist() == [[127, 0, 2, 2], [0, 0, 0, 0]]  # halves to even
    assert absmax.tolist() == [127.0, 0.0]
    assert int8.dequantize_rows_int8(codes, absmax, torch.float32).tolist() == [[127.0, 0.0, 2.0, 2.0], [0.0] * 4]


def test_outliers_leave_the_codes_and_do_not_count():
    x = torch.tensor([[8.0, 1.0, 2.0], [3.0, 0.5, 1.0]])
    codes, absmax = int8.quantize_rows_int8(x, torch.tensor([True, False, False]), 6.0)
    assert absmax.tolist() == [2.0, 3.0]  # 3.0 is in an outlier column, but no outlier
    assert codes.tolist() == [[0, 64, 127], [0, 21, 42]]


@needs_exact_products
def test_every_outlier_is_split_off_however_many_there_are():
    """204 of 4,096 columns, more than a graph's 128: with the rest quantized the error was 2.2e-2."""
    x = torch.randn(16, 4096).clamp_(-4, 4)
    columns = torch.randperm(4096)[:204]
    x[torch.arange(204) % 16, columns] = 40.0
    weight = torch.randn(32, 4096)
    assert int8.outlier_capacity(4096) < 204
    few = torch.randn(16, 4096).clamp_(-4, 4)
    assert error(x, weight, 6.0) < 1.1 * error(few, weight, 6.0)


@pytest.mark.parametrize(("width", "expected"), [(16, 16), (256, 64), (4096, 128), (14336, 448)])
def test_capacity(width, expected):
    assert int8.outlier_capacity(width) == expected


def error(x, weight, threshold):
    codes, absmax = int8.quantize_rows_int8(weight, None, 0.0)
    y = int8.int8_linear(x, codes, absmax, None, threshold)
    truth = x.double() @ int8.dequantize_rows_int8(codes, absmax, torch.float64).t()
    return float((y - truth).norm() / truth.norm())


@needs_exact_products
def test_the_split_keeps_small_values():
    """An outlier of 30 makes the int8 step of its row 0.24; split off, it is below 0.04."""
    x, weight = inputs(rows=4, outliers=(3, 200, 5, 9)), torch.randn(48, 256)
    assert error(x, weight, 6.0) < 0.008 < error(x, weight, 0.0)
    assert error(x, weight, 0.5) < 1e-4  # nearly every column has an outlier
    assert error(x, weight, 100.0) == error(x, weight, 0.0)  # none reaches the threshold


@needs_exact_products
def test_product_is_scaled_and_biased():
    x, w, bias = inputs(outliers=()), torch.randn(48, 256), torch.randn(48)
    codes, absmax = int8.quantize_rows_int8(w, None, 0.0)
    x_codes, x_absmax = int8.quantize_rows_int8(x, None, 0.0)
    exact = (x_codes.double() * x_absmax.unsqueeze(1) / 127) @ (codes.double() * absmax.unsqueeze(1) / 127).t() + bias
    torch.testing.assert_close(int8.int8_linear(x, codes, absmax, bias, 0.0).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_nonfinite_inputs_propagate(bad, threshold):
    x, w = inputs(), torch.randn(48, 256)
    x[2, 5] = bad
    y = int8.int8_linear(x, *int8.quantize_rows_int8(w, None, 0.0), None, threshold)
    assert not y[2].isfinite().any()
    assert y[3].isfinite().all()


def test_other_arguments_are_refused():
    with pytest.raises(ModelError):
        int8.quantize_rows_int8(torch.ones(3), None, 0.0)
    with pytest.raises(ModelError, match=r"torch\.int32"):
        int8.quantize_rows_int8(torch.ones(3, 3, dtype=torch.int32), None, 0.0)
