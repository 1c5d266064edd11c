"""Adapters of the vision tower and its projector, and quantized towers: in training, in plain PEFT, and merged."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

import halfbyte
from halfbyte.adapters.lora import add_adapter, save_adapter
from halfbyte.config import load_config
from halfbyte.data.collate import make_collator
from halfbyte.data.prepare import prepare
from halfbyte.export.merge import merge
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.find import load_model_config
from halfbyte.loading.load import load_model
from halfbyte.loading.tokenizers import load_run_tokenizer
from halfbyte.modeling.architectures import all_linear, vision_part, vision_parts
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.plan.shapes import ModelShapes
from halfbyte.train.inputs import check_images
from halfbyte.utils.errors import ConfigError, ModelError
from tests.helpers.image_models import save_image_model, write_image_rows

TOWER, PROJECTOR = KEYS = ("freeze_vision_tower", "freeze_multi_modal_projector")
LAST_LINEARS = {"qwen2_5_vl": ("attn.proj", "mlp.2"), "qwen3_vl": ("attn.proj", "linear_fc2"),
                "llava": ("out_proj", "linear_2"), "gemma3": ("out_proj", None)}  # of tower and projector  # fmt: skip


def configured(folder, **keys):
    keys = {"model_name_or_path": str(folder), "dataset": str(folder / "data.jsonl"), "output_dir": str(folder / "out"),
            "device": "cpu", "dtype": "float32", "r": 4, "load_in_4bit": False, "max_length": 400} | keys  # fmt: skip
    return load_config(None, keys)


def adapted_parts(model):
    """Names of modules with an adapter, by the part of the model: a key that freezes it, or None."""
    parts = vision_parts(model.get_base_model())
    names = {name.removeprefix("base_model.model.").partition(".lora_")[0]
             for name, p in model.named_parameters() if p.requires_grad}  # fmt: skip
    return {part: {name for name in names if vision_part(name, parts) == part} for part in (None, *KEYS)}


@pytest.mark.parametrize("name", LAST_LINEARS)
def test_parts_that_are_not_frozen_get_adapters_on_all_their_linears(name, tmp_path):
    model = save_image_model(tmp_path, name)
    names = [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear) and n != "lm_head"]
    parts = vision_parts(model)
    for key, last in zip(KEYS, LAST_LINEARS[name], strict=True):
        config = configured(tmp_path, **{key: False})
        if last is None:  # Gemma 3's projector is a matrix of its own
            with pytest.raises(ModelError, match=key):
                add_adapter(AutoModelForImageTextToText.from_pretrained(tmp_path), config)
            continue
        adapted = adapted_parts(add_adapter(AutoModelForImageTextToText.from_pretrained(tmp_path), config))
        assert adapted[key] == {n for n in names if vision_part(n, parts) == key}
        assert any(n.endswith(last) for n in adapted[key])
        assert adapted[None] == {n for n in names if vision_part(n, parts) is None}
        assert not adapted[next(other for other in KEYS if other != key)]


def test_names_in_target_modules_leave_frozen_parts_out(tmp_path):
    save_image_model(tmp_path, "gemma3")
    config = configured(tmp_path, target_modules=["q_proj", "v_proj"])
    adapted = adapted_parts(add_adapter(AutoModelForImageTextToText.from_pretrained(tmp_path), config))
    assert len(adapted[None]) == 14
    assert not adapted[TOWER]
    both = configured(tmp_path, target_modules=["q_proj", "v_proj"], freeze_vision_tower=False)
    assert len(adapted_parts(add_adapter(AutoModelForImageTextToText.from_pretrained(tmp_path), both))[TOWER]) == 6
    with pytest.raises(ModelError, match=TOWER):
        add_adapter(AutoModelForImageTextToText.from_pretrained(tmp_path), configured(tmp_path, target_modules=["fc1"]))


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_loss_and_gradients_equal_transformers_and_peft(name, tmp_path):
    """Gradients are as close to PEFT's in float64 as PEFT's own in float32 are, which is up to 1e-5."""
    save_image_model(tmp_path, name)
    write_image_rows(tmp_path)
    config = configured(tmp_path, **dict.fromkeys(KEYS, False), init_lora_weights=False)
    tokenizer = load_run_tokenizer(config)
    batch = make_collator(config, tokenizer)(list(prepare(config, tokenizer).train))
    model = add_adapter(load_model(str(tmp_path), load_in_4bit=False, device="cpu", dtype="float32"), config).train()
    other = AutoModelForImageTextToText.from_pretrained(tmp_path)
    targets = all_linear(other, KEYS)
    other = get_peft_model(other, LoraConfig(r=4, lora_alpha=16, target_modules=targets)).train()
    state = dict(model.named_parameters())
    for key, value in other.named_parameters():
        value.data.copy_(state[key])
    trained = {key: value for key, value in other.named_parameters() if value.requires_grad}
    loss = other(**batch, use_cache=False).loss
    expected = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    exact_loss = other.double()(**batch | {"pixel_values": batch["pixel_values"].double()}, use_cache=False).loss
    exact = torch.autograd.grad(exact_loss, list(trained.values()), materialize_grads=True)
    halfbyte.patch(model)
    total, count = causal_lm_loss(model, batch)
    gradients = torch.autograd.grad(total / count, [state[key] for key in trained], materialize_grads=True)
    assert (total / count).item() == pytest.approx(loss.item(), rel=1e-5)
    unread = {"llava": 12, "qwen3_vl": 0}[name]  # tensors of a last layer that nothing reads
    assert sum(bool(gradient.any()) for gradient in gradients) == len(trained) - unread
    for gradient, wanted, true in zip(gradients, expected, exact, strict=True):
        assert (gradient - true).norm() <= 2 * (wanted - true).norm() + 1e-6 * true.norm()


def test_saved_adapter_of_a_quantized_tower_reloads_and_merges(tmp_path):
    """PEFT on the same base has equal logits; the merged model differs by the rounding of its weights."""
    folder = tmp_path / "model"
    save_image_model(folder, "qwen2_5_vl")
    write_image_rows(folder)
    keys = dict.fromkeys(KEYS, False) | {"init_lora_weights": False, "quantize_vision_tower": True}
    config = configured(folder, **keys, load_in_4bit=True, bnb_4bit_blocksize=32)

    def base():
        return load_model(str(folder), config.storage, device="cpu", dtype="float32")

    model = add_adapter(base(), config)
    quantized = {name for name, module in base().named_modules() if isinstance(module, QuantizedLinear)}
    assert {name for name in all_linear(base(), [TOWER])} <= quantized
    assert not any("merger" in name for name in quantized)
    tokenizer = load_run_tokenizer(config)
    inputs = make_collator(config, tokenizer)(list(prepare(config, tokenizer).train)[:2])
    inputs.pop("labels")
    save_adapter(model, tmp_path / "adapter")
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
        assert torch.equal(PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()(**inputs).logits, logits)
        plain = AutoModelForImageTextToText.from_pretrained(folder)
        on_original = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(**inputs).logits
        merge(tmp_path / "adapter", tmp_path / "merged", verify=False)
        merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(merged.eval()(**inputs).logits, on_original, rtol=0, atol=0.1)
    assert (on_original - logits).abs().max() > 0.1  # the quantized tower counts


def test_formats_of_a_tower_are_planned_as_they_are_stored(tmp_path):
    save_image_model(tmp_path, "llava")
    patterns = {"*.layers.0.*": "int8", "*.fc2": "16bit", "*": "nf4"}
    config = configured(tmp_path, load_in_4bit=True, bnb_4bit_blocksize=32, quantize_vision_tower=patterns)
    model = load_model(str(tmp_path), config.storage, device="cpu", dtype="float32")
    specs = {n: m.weight.format.spec for n, m in model.model.vision_tower.named_modules()
             if isinstance(m, QuantizedLinear)}  # fmt: skip
    assert {n.rpartition("layers.")[2][0] for n, spec in specs.items() if spec.startswith("int8")} == {"0"}
    assert any(n.endswith("fc2") for n in specs)
    assert not any(n.endswith("1.mlp.fc2") for n in specs)
    shapes = ModelShapes(config, load_model_config(str(tmp_path)), torch.device("cpu"))
    stored = {n: m.weight.format.spec for n, m in shapes.causal_lm.model.vision_tower.named_modules()
              if isinstance(m, QuantizedLinear)}  # fmt: skip
    assert stored == specs


def test_towers_that_are_not_there_and_rows_without_images_are_refused(tmp_path, tiny_checkpoint):
    text = tiny_checkpoint()
    refused = {TOWER: False}, {TOWER: False, "use_peft": False}, {"quantize_vision_tower": True, "load_in_4bit": True}
    for keys in refused:
        config = configured(tmp_path, model_name_or_path=str(text), **keys)
        with pytest.raises(ModelError, match=next(iter(keys))):
            ModelShapes(config, load_model_config(str(text)), torch.device("cpu"))
    save_image_model(tmp_path, "llava")
    (tmp_path / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", '
                                         '"content": "b"}]}')  # fmt: skip
    config = configured(tmp_path, freeze_vision_tower=False)
    shapes = ModelShapes(config, load_model_config(str(tmp_path)), torch.device("cpu"))
    with pytest.raises(ConfigError, match=TOWER):
        check_images(config, shapes, prepare(config, load_run_tokenizer(config)), 1, 1)


@pytest.mark.parametrize(
    ("keys", "key"),
    [({"quantize_vision_tower": "nf4"}, "quantize_vision_tower"),
     ({"quantize_vision_tower": True, "load_in_4bit": True, "merge_aware": True}, "quantize_vision_tower")],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_refused(keys, key, tmp_path):
    with pytest.raises(ConfigError, match=key):
        configured(tmp_path, **keys)
