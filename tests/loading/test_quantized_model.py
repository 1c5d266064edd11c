"""Quantized models for transformers, PEFT and TRL: config, flags, size, casts, and dequantization."""

import json

import peft
import pytest
import torch
import transformers

from halfbyte.layers import QuantizedLinear
from halfbyte.loading.load import load_model
from halfbyte.loading.quantizer import HalfbyteConfig
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import HalfbyteError, ModelError

TOKENS = torch.tensor([[5, 9, 3, 77, 21, 4, 4, 60]])
SETTINGS = [
    {},
    {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False, "skip_quant_first_layers": 2},
    {"quantization": {"*.down_proj": "kbit5", "*": "nf4"}},
    {"quantization": "int8", "skip_quant_last_layers": 1},
    {"llm_int8_skip_modules": ["lm_head"], "bnb_4bit_blocksize": 256, "ways": 2, "on_host": [1]},
]


def from_pretrained(folder, config=None, auto=transformers.AutoModelForCausalLM, dtype=torch.float32, **keys):
    config = HalfbyteConfig() if config is None else config
    return auto.from_pretrained(folder, quantization_config=config, dtype=dtype, **keys)


def plain(folder, **keys):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **keys)


@torch.no_grad()
def logits(model):
    return model.eval()(TOKENS).logits


@pytest.mark.parametrize("keys", SETTINGS, ids=str)
def test_config_keeps_its_settings_before_loading(keys, tmp_path):
    config = HalfbyteConfig(**keys)
    config.to_json_file(tmp_path / "c.json")  # sorts keys
    again = HalfbyteConfig.from_dict(json.loads((tmp_path / "c.json").read_text()))
    assert (again.storage, again.ways, again.on_host) == (config.storage, config.ways, config.on_host)
    assert again.llm_int8_skip_modules == config.llm_int8_skip_modules
    assert again.to_dict() == config.to_dict() == config.to_diff_dict()


def test_config_of_a_loaded_model_round_trips(tiny_checkpoint):
    for config in (HalfbyteConfig(), HalfbyteConfig(quantization="int8")):
        loaded = from_pretrained(tiny_checkpoint(), config).config.quantization_config
        again = HalfbyteConfig.from_dict(json.loads(json.dumps(loaded.to_dict())))
        found = set(again.formats.values()) or {format_ for _, format_ in again.assignment.patterns}
        assert set(loaded.formats.values()) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_plain_transformers_computes_in_the_dtype_of_the_saved_model(dtype, tiny_checkpoint, tmp_path):
    pytest.importorskip("bitsandbytes")
    folder = tiny_checkpoint(hidden_size=64, intermediate_size=128)  # bitsandbytes' CPU kernel takes no others
    model = from_pretrained(folder, dtype=dtype)
    model.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert entry["bnb_4bit_compute_dtype"] == str(dtype).removeprefix("torch.")
    if dtype is torch.float32:
        keys = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        theirs = transformers.BitsAndBytesConfig(load_in_4bit=True, **keys)
        assert torch.equal(logits(plain(tmp_path)), logits(plain(folder, quantization_config=theirs, dtype=dtype)))


def test_casting_the_model_is_refused(tiny_checkpoint):
    model = from_pretrained(tiny_checkpoint())
    for cast in (lambda: model.to(torch.float16), lambda: model.to(dtype=torch.float16), model.half, model.float):
        with pytest.raises(ValueError):  # as transformers raises of bitsandbytes' models
            cast()
    assert model.to("cpu") is model
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("quantization", ["nf4", "kbit5", "int8"])
def test_dequantized_model_is_a_plain_one(quantization, tiny_checkpoint, tmp_path):
    model = from_pretrained(tiny_checkpoint(), HalfbyteConfig(quantization=quantization))
    before = logits(model)
    plain_model = model.dequantize()
    assert type(plain_model) is transformers.LlamaForCausalLM
    assert not hasattr(plain_model, "is_loaded_in_4bit")
    assert type(plain_model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    torch.testing.assert_close(logits(plain_model), before, rtol=0, atol=1e-5)
    plain_model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(logits(plain(tmp_path, dtype=torch.float32)), logits(plain_model))
    assert plain_model.half().dtype is torch.float16


def test_prepared_for_kbit_training(tiny_checkpoint):
    """Checkpointing is on, inputs get gradients, and 16-bit weights are saved with the dtype they were loaded in."""
    model = from_pretrained(tiny_checkpoint(), dtype=torch.bfloat16)
    prepared = peft.prepare_model_for_kbit_training(model)
    assert prepared.is_gradient_checkpointing
    assert prepared.get_input_embeddings()(TOKENS).requires_grad
    weights = [m.weight for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert {w.dtype for w in weights} == {torch.bfloat16}
    assert model.model.norm.weight.dtype is torch.float32
    adapted = peft.get_peft_model(prepared, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4)).train()
    adapted(TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


def test_quantized_weights_cannot_be_trained(tiny_checkpoint):
    model = peft.get_peft_model(
        from_pretrained(tiny_checkpoint()), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["v_proj"])
    )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and "v_proj" in name]
    assert all("modules_to_save" in name for name in trained)  # a dequantized copy
    assert trained
    with pytest.raises(HalfbyteError, match=r"model\.layers\.0\.self_attn\.q_proj"):
        from_pretrained(tiny_checkpoint()).requires_grad_(True)


def test_new_head_stays_unquantized(tiny_checkpoint, tmp_path):
    model = from_pretrained(tiny_checkpoint(), auto=transformers.AutoModelForTokenClassification, num_labels=3)
    assert type(model.score) is torch.nn.Linear
    assert model.score.weight.requires_grad
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantizedLinear)
    model(TOKENS, labels=torch.zeros_like(TOKENS)).loss.backward()
    assert model.score.weight.grad.norm() > 0
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, quantization_config=HalfbyteConfig())
    assert torch.equal(again.score.weight, model.score.weight)
    assert torch.equal(logits(again), logits(model))


THEIRS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


@pytest.mark.parametrize("kind", THEIRS)
def test_folder_of_bitsandbytes_loads_into_quantized_linears(kind, tiny_checkpoint, tmp_path):
    """The stored bytes stay, whatever formats the config asks for, and whatever the head."""
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(**THEIRS[kind])
    plain(tiny_checkpoint(), quantization_config=config, dtype=torch.float32).save_pretrained(tmp_path)
    model = from_pretrained(tmp_path, HalfbyteConfig(bnb_4bit_blocksize=256))
    weight = model.model.layers[1].mlp.down_proj.weight
    expected = load_model(str(tmp_path), dtype="float32", device="cpu").model.layers[1].mlp.down_proj.weight
    assert weight.format == expected.format
    assert torch.equal(weight, expected)
    assert (model.is_loaded_in_4bit, model.is_loaded_in_8bit) == (kind != "int8", kind == "int8")
    autos = transformers.AutoModel, transformers.AutoModelForSequenceClassification
    for auto in autos:
        made = from_pretrained(tmp_path, auto=auto)
        base = made.model if hasattr(made, "score") else made
        assert torch.equal(base.layers[1].mlp.down_proj.weight, expected)
    own = plain(tmp_path, dtype=torch.float32)  # without our config it stays bitsandbytes'
    assert type(own.model.layers[1].mlp.down_proj).__module__.startswith("bitsandbytes")


def test_modules_on_the_disk_are_refused(tiny_checkpoint, tmp_path):
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    places |= {"lm_head": "cpu", "model.rotary_emb": "cpu"}
    with pytest.raises(ModelError, match=r"model\.layers\.1"):
        from_pretrained(tiny_checkpoint(), device_map=places, offload_folder=tmp_path)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    folder = tmp_path_factory.mktemp("gpt2")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_conv1d_is_quantized_transposed(gpt2, tmp_path):
    """Bytes equal bitsandbytes', either tool loads them, and dequantizing gives a Conv1D again."""
    model = from_pretrained(gpt2)
    layer = model.transformer.h[1].mlp.c_fc
    assert isinstance(layer, QuantizedLinear)
    expected = QuantizedTensor.quantize(plain(gpt2).transformer.h[1].mlp.c_fc.weight.t(), layer.weight.format)
    assert torch.equal(layer.weight.detach(), expected)
    model.save_pretrained(tmp_path / "four")
    again = from_pretrained(tmp_path / "four")
    assert torch.equal(logits(again), logits(model))
    found = logits(model.dequantize())
    model.save_pretrained(tmp_path / "whole")
    assert type(model.transformer.h[1].mlp.c_fc).__name__ == "Conv1D"
    torch.testing.assert_close(logits(again), found, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(plain(tmp_path / "whole", dtype=torch.float32)), found, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_lora_trains_on_conv1d(gpt2):
    """Steps equal those on the dequantized Conv1D."""
    losses = []
    for dequantized in (False, True):
        model = from_pretrained(gpt2)
        model = model.dequantize() if dequantized else model
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["c_attn", "c_proj"], r=4, fan_in_fan_out=True, lora_dropout=0.0)
        adapted = peft.get_peft_model(model.eval(), config)
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(3):
            loss = adapted(TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
