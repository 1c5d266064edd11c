"""PEFT's merges into quantized weights: rounded once, restored to the byte, reported."""

import copy

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from halfbyte.formats import from_spec
from halfbyte.formats.retained_update import RetainedUpdate
from halfbyte.layers import QuantizedLinear
from halfbyte.layers.quantized import hold_table, quantized_parameter
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError
from halfbyte.utils.notices import notices_so_far, reset_notices

FORMATS = ["blockwise4:nf4:64:nested", "kbit:3:nf", "int8", "fp8:row", "hqq:4:64", "nvfp4:1d:plain"]
NF4 = FORMATS[0]
KINDS = {
    "lora": peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False),
    "dora": peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False, use_dora=True),
    "oft": peft.OFTConfig(target_modules=["0", "2"], oft_block_size=16, init_weights=False),
    "miss": peft.MissConfig(target_modules=["0", "2"], r=4, init_weights="bat"),
    "ia3": peft.IA3Config(target_modules=["0", "2"], feedforward_modules=["2"], init_ia3_weights=False),
    "road": peft.RoadConfig(target_modules=["0", "2"], group_size=16, init_weights=False),
    "hira": peft.HiraConfig(target_modules=["0", "2"], r=4, init_weights=False),
}
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


def base(spec=NF4, dtype=torch.float32):
    torch.manual_seed(0)
    format_ = from_spec(spec)
    first, last = nn.Linear(64, 96, dtype=dtype), nn.Linear(96, 64, bias=False, dtype=dtype)
    return nn.Sequential(
        QuantizedLinear.from_linear(first, format_), nn.GELU(), QuantizedLinear.from_linear(last, format_)
    )


def adapted(kind="lora", spec=NF4, dtype=torch.float32):
    model = peft.get_peft_model(base(spec, dtype), copy.deepcopy(KINDS[kind]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and kind == "miss":
                parameter.normal_(std=0.1)
            elif name.endswith("lora_B.default.weight"):
                parameter.mul_(0.2)
    return model.eval()


def weights(model):
    return {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedTensor)}


def stored_bytes(model):
    return {
        (name, part): stored.clone() for name, weight in weights(model).items() for part, stored in weight.parts.items()
    }


def assert_bytes(model, expected):
    assert all(torch.equal(stored, expected[key]) for key, stored in stored_bytes(model).items())


def dequantized(model):
    """The same adapted model on plain weights in float32, in which PEFT's own merge is exact."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, QuantizedLinear):
            module.weight = nn.Parameter(module.weight.dequantize(torch.float32), requires_grad=False)
            module.__class__ = nn.Linear
    return plain


@pytest.mark.parametrize("safe", [False, True], ids=["plain", "safe"])
@pytest.mark.parametrize(("kind", "spec"), [("lora", spec) for spec in FORMATS] + [(kind, NF4) for kind in KINDS])
@torch.no_grad()
def test_a_merge_rounds_the_sum_once_and_unmerging_restores_the_bytes(kind, spec, safe):
    model = adapted(kind, spec)
    before, outputs = stored_bytes(model), model(X)
    addresses = {name: weight.data_ptr() for name, weight in weights(model).items()}
    plain = dequantized(model)
    plain.merge_adapter()
    model.merge_adapter(safe_merge=safe)
    for name, weight in weights(model).items():
        expected = QuantizedTensor.quantize(plain.get_parameter(name), weight.format)
        torch.testing.assert_close(weight.dequantize(), expected.dequantize(), rtol=1e-4, atol=1e-5)
        assert weight.data_ptr() == addresses[name]
    merged = model(X)
    assert (merged - outputs).norm() < (base(spec)(X) - outputs).norm()
    model.unmerge_adapter()
    assert_bytes(model, before)
    assert torch.equal(model(X), outputs)
    unloaded = model.merge_and_unload(safe_merge=safe)
    assert type(unloaded[0]) is QuantizedLinear
    assert torch.equal(unloaded(X), merged)


@pytest.mark.parametrize("kind", ["lora", "ia3", "road"])
@torch.no_grad()
def test_a_weight_in_bfloat16_is_merged_in_float32(kind):
    model = adapted(kind, dtype=torch.bfloat16)
    before = stored_bytes(model)
    bias = model.get_parameter("base_model.model.0.base_layer.bias").clone()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.zero_()
        elif "ia3" in name or "road_alpha" in name:
            parameter.fill_(1)
        elif "road_theta" in name:
            parameter.zero_()
    plain = dequantized(model)
    model.merge_adapter()
    for name, weight in weights(model).items():
        torch.testing.assert_close(weight.dequantize(torch.float32), plain.get_parameter(name), rtol=1e-5, atol=1e-6)
    model.unmerge_adapter()
    assert_bytes(model, before)
    assert torch.equal(model.get_parameter("base_model.model.0.base_layer.bias"), bias)


@torch.no_grad()
def test_two_adapters_are_merged_in_turn_and_unmerged_together():
    model = adapted()
    model.add_adapter("second", copy.deepcopy(KINDS["lora"]))
    before = stored_bytes(model)
    model.merge_adapter(["default"])
    first = stored_bytes(model)
    model.merge_adapter(["second"])
    assert any(not torch.equal(stored, first[key]) for key, stored in stored_bytes(model).items())
    model.unmerge_adapter()
    assert_bytes(model, before)


@torch.no_grad()
def test_disabled_adapters_restore_the_bytes():
    model = adapted()
    expected = base()(X)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(model(X), expected)


@torch.no_grad()
def test_a_weight_that_was_written_to_is_unmerged_by_subtraction():
    model = adapted()
    model.merge_adapter()
    weight = model.base_model.model[0].base_layer.weight
    weight.copy_(weight.dequantize() + 1)
    layer = model.base_model.model[0]
    expected = weight.dequantize() - layer.get_delta_weight("default")
    model.unmerge_adapter()
    torch.testing.assert_close(
        weight.dequantize(), QuantizedTensor.quantize(expected, weight.format).dequantize(), rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_a_copied_model_is_unmerged_by_subtraction():
    model = adapted()
    before, expected = stored_bytes(model), model(X)
    model.merge_adapter()
    copied = copy.deepcopy(model)
    copied.unmerge_adapter()
    model.unmerge_adapter()
    assert_bytes(model, before)
    assert (copied(X) - expected).norm() < 0.3 * expected.norm()


@pytest.mark.parametrize(("safe", "error"), [(True, ValueError), (False, ModelError)])
@torch.no_grad()
def test_a_merge_that_fails_changes_nothing(safe, error):
    model = adapted()
    before, layer = stored_bytes(model), model.base_model.model[2]
    layer.lora_B["default"].weight[0, 0] = float("nan")
    with pytest.raises(error, match="NaN"):
        layer.merge(safe_merge=safe)
    assert_bytes(model, before)
    assert isinstance(layer.base_layer.weight, QuantizedTensor)
    assert not layer.merged


@torch.no_grad()
def test_the_share_of_the_update_kept_is_reported_for_all_layers():
    reset_notices()
    model = adapted()
    before = {name: weight.dequantize() for name, weight in weights(model).items()}
    plain = dequantized(model)
    plain.merge_adapter()
    model.merge_adapter()
    expected = RetainedUpdate.sum(
        RetainedUpdate.of(weight.dequantize(), before[name], plain.get_parameter(name) - before[name])
        for name, weight in weights(model).items()
    )
    assert f"{expected.share:.1%}" in notices_so_far()["peft-merge"]
    assert "halfbyte merge" in notices_so_far()["peft-merge"]


def test_peft_sees_a_quantization_backend():
    layers = [module for module in adapted("miss").modules() if isinstance(module, BaseTunerLayer)]
    assert len(layers) == 2
    for layer in layers:
        assert layer.quantization_backend.supports_merge
        assert torch.equal(layer.get_base_weight(), layer.get_base_layer().weight.dequantize())
        layer.set_base_weight(torch.ones(layer.out_features, layer.in_features))
        assert isinstance(layer.get_base_layer().weight, QuantizedTensor)
        assert torch.equal(layer.get_base_weight(), torch.ones(layer.out_features, layer.in_features))
    plain = peft.get_peft_model(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), KINDS["miss"])
    assert all(m.quantization_backend is None for m in plain.modules() if isinstance(m, BaseTunerLayer))


@torch.no_grad()
def test_tokens_of_a_quantized_table():
    """PEFT's TrainableTokens: merging writes the trained rows into the table."""
    torch.manual_seed(0)
    table = nn.Embedding(32, 64)
    hold_table(table)
    table.weight = quantized_parameter(table.weight.detach(), from_spec(NF4))
    model = peft.get_peft_model(
        nn.Sequential(table), peft.TrainableTokensConfig(target_modules=["0"], token_indices=[3, 5])
    )
    model.base_model.model[0].trainable_tokens_delta["default"].mul_(1.5)
    ids, before = torch.arange(32), stored_bytes(model)
    expected = model(ids)
    model.merge_adapter()
    assert (model(ids) - expected).norm() < 0.2 * expected.norm()
    assert (model(ids)[3] - expected[3]).norm() < 0.2 * expected[3].norm()
    model.unmerge_adapter()
    assert_bytes(model, before)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_initialisations_that_change_the_base_quantize_it(init):
    torch.manual_seed(0)
    model = peft.get_peft_model(
        base(), peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=init, lora_alpha=4)
    )
    for index in (0, 2):
        layer = model.base_model.model[index]
        rest = base()[index].weight.dequantize() - layer.get_delta_weight("default")
        expected = QuantizedTensor.quantize(rest, from_spec(NF4)).dequantize()
        torch.testing.assert_close(layer.base_layer.weight.dequantize(), expected, rtol=1e-3, atol=1e-4)


def test_modules_to_save_train_a_dequantized_copy(tmp_path):
    config = peft.LoraConfig(target_modules=["0"], modules_to_save=["2"], r=4)
    model = peft.get_peft_model(base(), config)
    before, wrapper = stored_bytes(model), model.base_model.model[2]
    copied = wrapper.modules_to_save["default"]
    assert type(copied) is nn.Linear
    assert torch.equal(copied.weight, wrapper.original_module.weight.dequantize())
    torch.testing.assert_close(model(X), base()(X))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(X).square().sum().backward()
    optimizer.step()
    assert not torch.equal(copied.weight, wrapper.original_module.weight.dequantize())
    assert_bytes(model, before)
    model.save_pretrained(tmp_path)
    expected = model.eval()(X)
    torch.testing.assert_close(peft.PeftModel.from_pretrained(base(), tmp_path)(X), expected)
    torch.testing.assert_close(peft.PeftModel.from_pretrained(dequantized(base()), tmp_path)(X), expected)
    with model.disable_adapter():
        torch.testing.assert_close(model(X), base()(X))
    assert type(model.merge_and_unload()[2]) is nn.Linear
