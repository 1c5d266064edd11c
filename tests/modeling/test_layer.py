"""Views of decoder layers, the list of them, and the one reader of linears with adapters."""

import pytest
import torch
from peft import LoraConfig

from halfbyte import generation
from halfbyte.layers.plain import read_linear
from halfbyte.modeling.layer import LayerView, decoder_layers, layer_view
from halfbyte.utils import notices
from tests.helpers.families import EXPERTS, HYBRIDS, OWN_LAYERS
from tests.helpers.families import FAMILIES as CONFIGS
from tests.helpers.patch_models import quantize, tiny

ROLES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", [name for name in CONFIGS if name not in (*HYBRIDS, *OWN_LAYERS)])
def test_a_view_shows_every_linear_and_norm_of_a_layer(family):
    name, layers = decoder_layers(tiny(family))
    assert (name, len(layers)) == ("model.layers", 2)
    view = layer_view(layers[0])
    assert isinstance(view, LayerView)
    mixture = view.family.experts.mixture if view.family.experts else ""
    dense = any(type(module).__name__ == view.family.name + "MLP" != mixture for module in layers[0].children())
    assert (view.mlp is None) == (family in EXPERTS and not dense)
    blocks = [block for block in (view.attention, view.mlp) if block is not None]
    seen = {id(linear): role for block in blocks for role, linear in block.linears.items()}
    if view.mlp is not None:
        named = layers[0].named_modules()
        assert seen == {id(m): name.rpartition(".")[2] for name, m in named if name.endswith("_proj")}
        assert view.family.fused or set(seen.values()) == ROLES - (set() if view.mlp.gated else {"gate_proj"})
    halves = view.attention_half, view.mlp_half
    norms = [norm for half in halves for norm in (half.norm, half.output_norm) if norm is not None]
    modules = {id(module) for module in layers[0].modules() if type(module).__name__.endswith("Norm")}
    assert {id(norm) for norm in (*norms, *(view.attention.norms or ()))} == modules
    x = torch.randn(3, 32)
    queries, keys, values = view.attention.split([linear(x) for linear in view.attention.inputs])
    assert (queries.shape, keys.shape, values.shape) == ((3, 32), (3, 16), (3, 16))


def test_windows_and_rotations_are_each_layers_own():
    views = [layer_view(layer) for layer in decoder_layers(tiny("Gemma3Text"))[1]]
    assert [view.attention.window for view in views] == [8, None]
    assert [view.attention.rope for view in views] == ["sliding_attention", "full_attention"]
    (gemma2, _) = (layer_view(layer) for layer in decoder_layers(tiny("Gemma2"))[1])
    assert (gemma2.attention.softcap, gemma2.attention.window) == (2.0, 8)
    assert layer_view(decoder_layers(tiny("Mistral"))[1][1]).attention.window == 8
    assert layer_view(decoder_layers(tiny("Llama"))[1][1]).attention.rope is None


# Each differs from Llama's block in something that the kernel of all layers in one launch does not know.
OTHERS = ("Granite", "Olmo2", "Cohere2", "SmolLM3", "Glm4", "Ernie4_5", "Ministral3", "Apertus")


@pytest.mark.parametrize("family", OTHERS)
def test_quantized_layers_are_generated_as_the_stock_model_does(family):
    model = quantize(tiny(family)).eval()
    prompt = torch.tensor([[5, 9, 17, 33, 2, 71]])
    keys = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **keys)[0, 6:].tolist()
    assert generation.generate(model, prompt.tolist(), max_new_tokens=12, stops=[]) == [expected]
    assert not [key for key in notices.notices_so_far() if key.startswith("generation")]


def test_adapters_by_name_or_active():
    model = tiny("Llama")
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    q = layer_view(decoder_layers(model)[1][0]).attention.inputs[0]

    def adapters(names=None):
        return [lora.name for lora in read_linear(q, names).adapters]

    assert (adapters(), adapters(["other", "default", "missing"]), adapters([])) == (
        ["default"],
        ["other", "default"],
        [],
    )
    with model.disable_adapter():
        assert (adapters(), adapters(["other"])) == ([], ["other"])
    read = read_linear(q)
    assert (read.base, read.adapters[0].a) == (q.base_layer, q.lora_A["default"].weight)
    q.lora_A["default"].register_forward_hook(lambda *_: None)
    assert read_linear(q) == "it has hooks"
    assert read_linear(q, ["other"]).base is q.base_layer
    q.base_layer.register_forward_hook(lambda *_: None)
    assert read_linear(q, []) == "it has hooks"
    model.merge_adapter(["default"])
    assert read_linear(q) == "its adapter is merged"
