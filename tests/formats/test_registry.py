"""Names of formats, inherited methods of a new format, and recognition of checkpoint entries."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from halfbyte.formats import FORMATS, Blockwise4, Format, from_spec, named, names, recognize
from halfbyte.layers import QuantizedLinear
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import CheckpointError, ModelError


@dataclass(frozen=True)
class Bytes(Format):
    """A minimal format: one scale per tensor, one byte per value."""

    levels: int = 127

    name: ClassVar[str] = "bytes"
    names: ClassVar[dict[str, str]] = {"byte8": "bytes:127"}

    @property
    def spec(self):
        return f"{self.name}:{self.levels}"

    @classmethod
    def parse(cls, options):
        return cls(int(options))

    @classmethod
    def examples(cls):
        return [cls()]

    def part_specs(self, shape):
        return {"codes": (shape, torch.int8), "scale": ((), torch.float32)}

    def quantize(self, weight):
        scale = weight.float().abs().max() / self.levels
        return {"codes": (weight / scale).round().to(torch.int8), "scale": scale}

    def dequantize(self, parts, shape, dtype):
        return (parts["codes"] * parts["scale"]).to(dtype)


@dataclass(frozen=True)
class Beside(Bytes):
    """The same format with its scale in a separate module entry, as in bitsandbytes."""

    name: ClassVar[str] = "beside"
    names: ClassVar[dict[str, str]] = {}

    def to_state(self, parts, shape, dtype):
        return {"": parts["codes"], "../toy_scale": parts["scale"]}

    @classmethod
    def from_state(cls, state, name):
        if "../toy_scale" not in state:
            raise CheckpointError(f"{name}: toy_scale is missing", "re-download the checkpoint")
        return cls(), {"codes": state[""], "scale": state["../toy_scale"]}, tuple(state[""].shape), torch.float32


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    for cls in (Bytes, Beside):
        monkeypatch.setitem(FORMATS, cls.name, cls)
    yield
    from_spec.cache_clear()


def linear(format):
    return QuantizedLinear.from_linear(nn.Linear(70, 33), format)


def test_a_format_need_not_split():
    with pytest.raises(ModelError, match="bytes:127:"):
        linear(Bytes()).weight.split_for(0, 3)


def test_names():
    assert named("nf4") == Blockwise4("nf4", 64, True)
    assert named("byte8") == Bytes(127)
    assert named("blockwise4:fp4:32:plain") == Blockwise4("fp4", 32, False)
    assert {"nf4", "fp4", "byte8"} <= set(names())


def test_every_name_means_a_format():
    for name, spec in names().items():
        assert named(name).spec == spec


@pytest.mark.parametrize(("name", "said"), [("nf5", "nf4"), ("zzz", "byte8.*nf4"), ("byte", "byte8"), ("", None)])
def test_unknown_name_suggests_the_nearest(name, said):
    with pytest.raises(ModelError, match=said):
        named(name)


@pytest.mark.parametrize("spec", ["blockwise4:nf4", "blockwise4:nf4:48:plain", "blockwise4:nf9:64:plain", "bytes:x"])
def test_a_wrong_spec_is_answered_with_an_example(spec):
    with pytest.raises(ModelError):
        named(spec)


def test_entries_are_recognised():
    for cls in (Blockwise4, Bytes, Beside):
        for example in cls.examples():
            layer = linear(example)
            state = example.to_state(layer.weight.parts, (33, 70), torch.float32)
            for without in state:
                entries = set(state) - {without}
                assert recognize(entries, cls) is cls
            assert recognize(state, prefer=Blockwise4) is cls


@pytest.mark.parametrize("format", [Bytes(100), Beside()], ids=lambda format: format.name)
@pytest.mark.parametrize("into", [Blockwise4(), Bytes(), Beside()], ids=lambda format: format.name)
def test_a_state_dict_of_any_format_loads_into_any_module(format, into):
    source, target = nn.ModuleDict({"q": linear(format)}), nn.ModuleDict({"q": linear(into)})
    result = target.load_state_dict(source.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert target["q"].weight.format == format
    assert torch.equal(target["q"].weight.dequantize(), source["q"].weight.dequantize())
    assert torch.equal(target["q"].bias, source["q"].bias)


def test_inherited_entries():
    layer = linear(Bytes())
    state = layer.state_dict()
    assert set(state) == {"bias", "weight", "weight.scale", "weight.quant_state.halfbyte__bytes"}
    assert set(linear(Beside()).state_dict()) == {"bias", "weight", "toy_scale"}


def test_a_new_module_of_any_format():
    layer = QuantizedLinear(70, 33, format=Bytes(), dtype=torch.bfloat16)
    assert isinstance(layer.weight, QuantizedTensor)
    assert "format=bytes:127" in repr(layer)
    x = torch.eye(70, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y - layer.bias, layer.weight.dequantize().T, atol=2e-3, rtol=1e-2)
    y.sum().backward()
    torch.testing.assert_close(x.grad[0], layer.weight.dequantize().sum(0), atol=2e-2, rtol=1e-2)
