"""Linear4bit, LinearNF4, LinearFP4 and Embedding4bit as drop-ins for torch's modules."""

import pytest
import torch
from torch import nn

from halfbyte.formats import Blockwise4
from halfbyte.layers import Embedding4bit, Linear4bit, LinearFP4, LinearNF4
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError


@pytest.mark.parametrize(("cls", "quant_type"), [(Linear4bit, "nf4"), (LinearNF4, "nf4"), (LinearFP4, "fp4")])
def test_linear_is_torchs_linear_with_a_quantized_weight(cls, quant_type):
    torch.manual_seed(3)
    plain = nn.Linear(70, 33)
    torch.manual_seed(3)
    layer = cls(70, 33)  # torch's initialization, quantized
    assert isinstance(layer, nn.Linear)
    assert layer.weight.format == Blockwise4(quant_type, 64, True)
    assert (layer.weight.shape, layer.in_features, layer.out_features) == ((33, 70), 70, 33)
    assert torch.equal(layer.weight.packed, QuantizedTensor.quantize(plain.weight, layer.weight.format).packed)
    assert torch.equal(layer.bias, plain.bias)
    assert layer.bias.requires_grad
    assert not layer.weight.requires_grad
    x = torch.randn(2, 5, 70)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight.dequantize(), layer.bias))


def test_options():
    layer = Linear4bit(
        70, 33, bias=False, quant_type="fp4", blocksize=128, compress_statistics=False, dtype=torch.bfloat16
    )
    assert layer.bias is None
    assert layer.weight.format == Blockwise4("fp4", 128, False)
    assert layer.weight.dtype == torch.bfloat16
    assert "blockwise4:fp4:128:plain" in repr(layer)
    with pytest.raises(ModelError, match="nf5"):
        Linear4bit(4, 4, quant_type="nf5")


def test_state_dict_keys_are_those_of_bitsandbytes():
    keys = set(nn.ModuleDict({"q": LinearNF4(64, 64)}).state_dict())
    expected = {"", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4"}
    assert keys == {f"q.weight{suffix}" for suffix in expected} | {"q.bias"}
    plain = set(LinearFP4(64, 64, bias=False, compress_statistics=False).state_dict())
    assert plain == {"weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__fp4"}


def test_a_state_dict_of_other_options_decides_the_format():
    source = nn.ModuleDict({"q": LinearFP4(70, 33, blocksize=256)})
    target = nn.ModuleDict({"q": LinearNF4(70, 33)})
    result = target.load_state_dict(source.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert target["q"].weight.format == Blockwise4("fp4", 256, True)
    assert torch.equal(target["q"].weight.dequantize(), source["q"].weight.dequantize())


def test_siblings_with_a_common_prefix():
    """The key of one module's `weight` is a prefix of another module's name."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = LinearNF4(64, 32)
            self.linear.weight_norm = nn.Parameter(torch.ones(32))

    source, target = Pair(), Pair()
    source.linear.weight_norm.data.fill_(2)
    target.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(target.linear.weight.packed, source.linear.weight.packed)
    assert target.linear.weight_norm[0] == 2
    plain = torch.randn(32, 64)
    target.load_state_dict({"linear.weight": plain, "linear.weight_norm": plain[:, 0], "linear.bias": plain[:, 1]})
    assert torch.equal(target.linear.weight.packed, QuantizedTensor.quantize(plain, Blockwise4("nf4", 64, True)).packed)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_embedding(quant_type):
    table = nn.Embedding(51, 37, padding_idx=3)
    layer = Embedding4bit(51, 37, padding_idx=3, quant_type=quant_type)
    layer.load_state_dict(table.state_dict())
    index = torch.tensor([[0, 50, 3], [7, 7, 1]])
    assert torch.equal(layer(index), layer.weight.dequantize()[index])
    assert layer(index).shape == (2, 3, 37)
    assert layer.padding_idx == 3
    reloaded = Embedding4bit(51, 37)
    reloaded.load_state_dict(layer.state_dict())
    assert torch.equal(reloaded(index), layer(index))


def test_from_linear_shares_the_bias():
    source = nn.Linear(70, 33).eval()
    layer = Linear4bit.from_linear(source, Blockwise4())
    assert layer.bias is source.bias
    assert not layer.training
