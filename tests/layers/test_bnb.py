"""Views of bitsandbytes' weights: shared memory, values, held views, and the weights that are refused."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import halfbyte.bitsandbytes as own
from halfbyte.formats import Blockwise4, Int8
from halfbyte.layers.bnb import forget_view, is_bnb_linear, weight_view
from halfbyte.layers.plain import read_linear


@pytest.fixture(params=["own", "real"])
def bnb(request):
    return own if request.param == "own" else pytest.importorskip("bitsandbytes")


def packed(bnb, quant_type="nf4", nested=True, storage=torch.uint8, shape=(33, 70)):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(
        shape[1], shape[0], quant_type=quant_type, compress_statistics=nested, quant_storage=storage
    )
    return layer.to("cpu")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("quant_type", "storage"), [("nf4", torch.uint8), ("fp4", torch.bfloat16)])
def test_4bit_view_shares_memory_and_values(bnb, quant_type, nested, storage):
    layer = packed(bnb, quant_type, nested, storage, (34, 70))
    view = weight_view(layer)
    assert view.format == Blockwise4(quant_type, 64, nested)
    assert view.parts["packed"].data_ptr() == layer.weight.data_ptr()
    assert view.parts["absmax"] is layer.weight.quant_state.absmax
    values = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert torch.equal(view.dequantize(), values)


def test_8bit_view_shares_memory_and_values(bnb):
    layer = bnb.nn.Linear8bitLt(70, 33, has_fp16_weights=False)
    values = layer.weight.data.clone()
    layer = layer.to("cpu")
    first_view = weight_view(layer)
    layer.eval()(torch.randn(2, 70))  # moves the scales from the weight to the state
    view = weight_view(layer)
    assert view.format == first_view.format == Int8()
    assert view.parts["codes"].data_ptr() == layer.weight.data_ptr()
    assert torch.equal(view.dequantize(torch.float32), first_view.dequantize(torch.float32))
    assert (view.dequantize(torch.float32) - values).abs().max() <= values.abs().max() / 127


def test_a_view_is_held_until_the_weight_changes(bnb):
    layer = packed(bnb)
    view = weight_view(layer)
    assert weight_view(layer) is view
    layer.weight = packed(bnb).weight
    changed_view = weight_view(layer)
    assert changed_view is not view
    layer.weight.quant_state.absmax = layer.weight.quant_state.absmax.clone()
    assert weight_view(layer) is not changed_view
    assert weight_view(copy.deepcopy(layer)) is not weight_view(layer)


def test_views_do_not_keep_layers_alive(bnb):
    layer = packed(bnb)
    view = weakref.ref(weight_view(layer))
    forget_view(layer)
    gc.collect()
    assert view() is None
    view = weakref.ref(weight_view(layer))
    del layer
    gc.collect()
    assert view() is None


def unquantized(bnb):
    return bnb.nn.Linear4bit(64, 32)


def float8bit(bnb):
    return bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=True)


def changed(**fields):
    def make(bnb):
        layer = packed(bnb)
        for name, value in fields.items():
            state = layer.weight.quant_state.state2 if name == "nested_blocksize" else layer.weight.quant_state
            setattr(state, name.removeprefix("nested_"), value)
        return layer

    return make


def sharded(bnb):
    layer = packed(bnb)
    layer.weight.data = layer.weight.data[:100]
    return layer


@pytest.mark.parametrize(
    "make",
    [
        unquantized, float8bit, sharded, changed(quant_type="af4"), changed(blocksize=48),
        changed(nested_blocksize=128), changed(shape=torch.Size([70, 33])), changed(packing_format_for_cpu=True),
    ],
)  # fmt: skip
def test_other_weights_are_refused_with_a_reason(bnb, make):
    layer = make(bnb)
    assert is_bnb_linear(layer)
    assert isinstance(weight_view(layer), str)
    assert isinstance(read_linear(layer), str)


def test_layers_with_a_forward_of_their_own_are_not_read(bnb):
    class Other(bnb.nn.Linear4bit):
        def forward(self, x):
            return super().forward(x) * 2

    assert not is_bnb_linear(Other(64, 32))
    assert not is_bnb_linear(nn.Linear(64, 32))
    assert isinstance(read_linear(Other(64, 32)), str)
    assert read_linear(packed(bnb)).weight.shape == (33, 70)
