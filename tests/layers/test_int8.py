"""Linear8bitLt against bitsandbytes' layer, with gradients, torch.compile and autocast."""

import copy

import pytest
import torch
from torch import nn

from halfbyte.autograd.int8 import int8_linear
from halfbyte.formats import Int8
from halfbyte.formats import int8 as ops
from halfbyte.layers.int8 import Linear8bitLt
from halfbyte.utils import notices
from halfbyte.utils.errors import CheckpointError, ModelError


def layer_of(rows=48, columns=256, dtype=torch.float32, threshold=6.0):
    return Linear8bitLt(columns, rows, dtype=dtype, threshold=threshold)


def inputs(*batch, width=256, dtype=torch.float32, outliers=True):
    x = torch.randn(*batch, width).clamp_(-4, 4)
    if outliers:
        x.view(-1, width)[0, 7] = 25.0
    return x.to(dtype)


@pytest.fixture
def bnb_layer():
    bnb = pytest.importorskip("bitsandbytes", minversion="0.50", reason="the test extra installs bitsandbytes")
    with torch.compiler.set_stance("force_eager"):
        yield lambda threshold=6.0: bnb.nn.Linear8bitLt(256, 48, has_fp16_weights=False, threshold=threshold).to("cpu")


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_loads_what_bitsandbytes_saved(bnb_layer, threshold):
    source, target = bnb_layer(threshold), layer_of(dtype=torch.float16, threshold=threshold)
    state = source.state_dict()
    assert set(state) == {"weight", "SCB", "weight_format", "bias"}
    assert target.load_state_dict(state, strict=True).missing_keys == []
    assert torch.equal(target.weight.parts["codes"], state["weight"])
    assert torch.equal(target.weight.parts["absmax"], state["SCB"])
    x = inputs(20, dtype=torch.float16)
    # The factor of their CPU backend is 6.200124e-5, a typo for 6.200012e-5.
    if ops.multiplies_int8(x, 48):  # theirs also multiplies where torch's int8 matmul is wrong
        torch.testing.assert_close(target.eval()(x), source.eval()(x), rtol=2e-3, atol=2e-3)
    # Both dequantize in training mode.
    torch.testing.assert_close(target.train()(x), source.train()(x), rtol=1e-3, atol=1e-3)


def test_bitsandbytes_loads_what_halfbyte_saved(bnb_layer):
    source, target = layer_of(), bnb_layer()
    assert target.load_state_dict(source.state_dict(), strict=True).unexpected_keys == []
    assert torch.equal(target.weight.CB, source.weight.parts["codes"])
    assert torch.equal(target.weight.SCB, source.weight.parts["absmax"])
    assert set(source.state_dict()) == set(target.state_dict())


def test_bytes_and_values_equal_those_of_bitsandbytes(bnb_layer):
    import bitsandbytes.functional as bnb

    weight = (torch.randn(67, 131) * 0.05).half()
    weight[5] = 0
    weight[6, ::3] = -0.0
    weight[7] = torch.linspace(-1, 1, 131) * torch.finfo(torch.float16).smallest_normal  # subnormals
    weight[8] = torch.linspace(-1, 1, 131) * torch.finfo(torch.float16).max
    stored = Int8().quantize(weight)
    weight[5, 0] = 1e-7  # theirs divides by zero in a row of zeros
    codes, absmax, _ = bnb.int8_vectorwise_quant(weight)
    rows = torch.arange(67) != 5
    assert torch.equal(stored["codes"][rows], codes[rows])
    assert torch.equal(stored["absmax"][rows], absmax[rows])
    values = bnb.int8_vectorwise_dequant(stored["codes"], stored["absmax"])
    assert torch.equal(Int8().dequantize(stored, (67, 131), torch.float32), values)


def test_activations_are_quantized_as_by_bitsandbytes(bnb_layer):
    import bitsandbytes.functional as bnb

    x = inputs(20, dtype=torch.float16)
    columns, over = ops.outlier_columns(x, 6.0)
    chosen = torch.zeros(256, dtype=torch.bool).scatter_(0, columns, over)
    expected = bnb.int8_vectorwise_quant(x.clone(), 6.0)
    assert columns[over].tolist() == expected[2].tolist() == [7]
    for mine, bnb_output in zip(ops.quantize_rows_int8(x, chosen, 6.0), expected[:2], strict=True):
        assert torch.equal(mine, bnb_output)


def test_other_memory_layouts_are_refused():
    state = layer_of().state_dict()
    state["weight_format"] = torch.tensor(1, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"weight_format.*row-major"):
        layer_of().load_state_dict(state)
    del state["weight_format"]  # before bitsandbytes 0.37.2
    layer_of().load_state_dict(state)


def step(layer, x):
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.float().pow(2).sum().backward()
    gradients = [y.detach(), x.grad, layer.bias.grad]
    layer.bias.grad = None
    return gradients


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [(3,), (2, 5), ()], ids=str)
def test_forward_is_close_and_backward_is_that_of_the_dequantized_weight(dtype, batch, training):
    layer, x = layer_of(dtype=dtype).train(training), inputs(*batch, dtype=dtype)
    y, dx, db = step(layer, x)
    weight = layer.weight.dequantize(dtype)
    truth = nn.functional.linear(x, weight, layer.bias)
    assert (y.shape, y.dtype) == (truth.shape, dtype)
    assert (y - truth).norm() < 0.01 * truth.norm()
    grad = (2 * y.float()).to(dtype)
    torch.testing.assert_close(dx, grad @ weight)
    torch.testing.assert_close(db, grad.reshape(-1, 48).sum(0))


def test_training_on_a_cpu_takes_the_dequantized_weight():
    layer, x = layer_of(), inputs(5)
    expected = nn.functional.linear(x, layer.weight.dequantize(), layer.bias)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.eval()(x), expected) is not ops.multiplies_int8(x, 48)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_compiled_equals_eager(threshold, training):
    torch._dynamo.reset()
    layer = layer_of(threshold=threshold).train(training)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager_decomp_partition")
    for rows in (5, 9):
        x = inputs(rows)
        for output, expected in zip(step(compiled, x), step(layer, x), strict=True):
            assert torch.equal(output, expected)


def test_where_torch_has_no_int8_product_the_weight_is_dequantized(monkeypatch):
    monkeypatch.setattr(ops, "multiplies_int8", lambda *args: False)
    layer, x = layer_of(), inputs(5)
    expected = nn.functional.linear(x, layer.weight.dequantize(), layer.bias)
    assert torch.equal(int8_linear(x, layer.weight, layer.bias), expected)
    assert "int8-product-cpu" in notices.notices_so_far()


def test_options():
    layer = layer_of(threshold=2.5)
    assert "format=int8, threshold=2.5" in repr(layer)
    assert copy.deepcopy(layer).threshold == 2.5
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ModelError, match="threshold"):
            layer_of(threshold=wrong)
    plain = nn.Linear(256, 48)
    assert Linear8bitLt.from_linear(plain, threshold=3).threshold == 3.0
    assert Linear8bitLt.from_linear(plain).bias is plain.bias
