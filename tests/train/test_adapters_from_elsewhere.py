"""Adapters as PEFT, other tools and older versions write them: loaded as by plain PEFT, or refused for the reason."""

import contextlib
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from halfbyte.adapters.lora import WRONG_BASE
from halfbyte.config import load_config
from halfbyte.export.gguf_adapter import export_adapter
from halfbyte.export.merge import merge
from halfbyte.loading.load import load_model
from halfbyte.runs.saved import load_saved
from halfbyte.train.run import train
from halfbyte.utils import notices
from halfbyte.utils.errors import CheckpointError
from tests.helpers.marks import slow_except

IDS = torch.arange(5, 25)[None]
FLOAT = ["dtype=float32", "load_in_4bit=false", "device=cpu"]


def base_of(place, folder, tied=True):
    """A copy of the tiny model in float32, whose head is its embedding if `tied`."""
    shutil.copytree(place / "model", folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tie_word_embeddings=tied)
    model.config.tie_word_embeddings = tied
    model.save_pretrained(folder)
    return folder


def moved(model):
    """The model with trained weights that add something."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn_like(parameter)
    return model.eval()


def written(base, folder, **keys):
    """An adapter that plain PEFT made on `base`, in `folder`, and its logits."""
    keys = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]} | keys
    model = moved(get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**keys)))
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(IDS).logits


def ours(folder):
    with torch.no_grad():
        return load_saved(str(folder), FLOAT).model(IDS).logits


WHOLE = {
    "embeddings and head, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "embeddings among the targets": {"target_modules": ["q_proj", "embed_tokens"]},
    "head among the targets": {"target_modules": ["q_proj", "lm_head"]},
    "embeddings and head among the targets, tied": {"target_modules": ["embed_tokens", "lm_head"]},
    "a regular expression, DoRA": {"target_modules": r".*(embed_tokens|q_proj)", "use_dora": True},
}


@pytest.mark.parametrize("case", WHOLE)
def test_embeddings_and_heads_are_loaded_as_peft_does(place, tmp_path, case):
    base = base_of(place, tmp_path / "base", tied="tied" in case)
    theirs = written(base, tmp_path / "adapter", **WHOLE[case])
    assert torch.allclose(ours(tmp_path / "adapter"), theirs, atol=1e-4)


@pytest.mark.parametrize("case", slow_except(WHOLE, ["embeddings and head among the targets, tied"]))
def test_embeddings_and_heads_are_merged(place, tmp_path, case):
    base = base_of(place, tmp_path / "base", tied="tied" in case)
    theirs = written(base, tmp_path / "adapter", **WHOLE[case])
    merge(str(tmp_path / "adapter"), tmp_path / "merged")
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(IDS).logits
    assert (found - theirs).abs().max() < 0.02 * theirs.abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_adapter_of_the_head_needs_a_base_with_a_head(place, tmp_path, tied):
    shutil.copytree(place / "model", tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(place / "model", tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    written(tmp_path / "base", tmp_path / "adapter", target_modules=["lm_head"])
    with pytest.raises(CheckpointError) if tied else contextlib.nullcontext():
        export_adapter(tmp_path / "adapter", "f32", tmp_path / "adapter.gguf")


@pytest.mark.parametrize("load_in_4bit", slow_except([False, True], [True]))
def test_training_continues_from_an_adapter_of_embeddings_and_head(place, tmp_path, load_in_4bit):
    base = base_of(place, tmp_path / "base", tied=False)
    written(base, tmp_path / "adapter", target_modules=["embed_tokens", "lm_head"])
    more = {"model_name_or_path": str(base), "adapter_path": str(tmp_path / "adapter"), "load_in_4bit": load_in_4bit}
    train(load_config(None, keys(place, tmp_path / "out", **more)))
    merge(str(tmp_path / "out"), tmp_path / "merged")


@pytest.mark.parametrize("action", [lambda folder, out: ours(folder), merge], ids=["load", "merge"])
@pytest.mark.parametrize("case", [name for name in WHOLE if "targets" in name])
def test_another_base_than_the_one_that_an_adapter_file_holds_is_refused(place, tmp_path, case, action):
    base = base_of(place, tmp_path / "base", tied="tied" in case)
    written(base, tmp_path / "adapter", **WHOLE[case])
    file = base / "model.safetensors"
    save_file({name: 1.1 * tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError):
        action(str(tmp_path / "adapter"), tmp_path / "merged")


def test_a_whole_module_that_the_config_does_not_name_is_refused(place, tmp_path):
    base = base_of(place, tmp_path / "base", tied=False)
    written(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    edit(tmp_path / "adapter", {"modules_to_save": None}, {})
    for action in (ours, lambda folder: merge(str(folder), tmp_path / "merged")):
        with pytest.raises(CheckpointError):
            action(tmp_path / "adapter")


def edit(folder, config, tensors):
    """Change keys of an adapter's config, and tensors of its file by the end of their name (None removes them)."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    file = folder / "adapter_model.safetensors"
    held = load_file(file)
    for name, end in itertools.product(list(held), tensors):
        if name.endswith(end):
            del held[name]
    save_file(held, file, metadata={"format": "pt"})


CONTRADICTIONS = {
    "smaller rank": ({"r": 2}, {}),
    "larger rank": ({"r": 8}, {}),
    "rank by pattern": ({"rank_pattern": {"q_proj": 2}}, {}),
    "no B": ({}, {"0.self_attn.q_proj.lora_B.weight"}),
    "no A": ({}, {"1.self_attn.q_proj.lora_A.weight"}),
    "other targets": ({"target_modules": ["k_proj"]}, {}),
    "targets that no model has": ({"target_modules": ["nonsense"]}, {}),
    "more targets": ({"target_modules": ["q_proj", "k_proj"]}, {}),
    "a pattern of other targets": ({"target_modules": ".*k_proj"}, {}),
    "fewer layers": ({"layers_to_transform": [0]}, {}),
    "no magnitudes": ({"use_dora": True}, {}),
    "no head": ({"modules_to_save": ["lm_head"]}, {}),
    "biases": ({"lora_bias": True}, {}),
    "no rank": ({"r": None}, {}),
    "no dropout": ({"lora_dropout": None}, {}),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_tensors_that_contradict_their_config_are_named(place, tmp_path, case):
    base = base_of(place, tmp_path / "base", tied=False)
    written(base, tmp_path / "adapter")
    edit(tmp_path / "adapter", *CONTRADICTIONS[case])
    with pytest.raises(CheckpointError) as found:
        ours(tmp_path / "adapter")
    assert "adapter_config.json" in found.value.message
    assert found.value.fix != WRONG_BASE


def test_a_smaller_model_is_named_as_another_model(place, tmp_path):
    base = base_of(place, tmp_path / "base", tied=False)
    written(base, tmp_path / "adapter")
    edit(tmp_path / "adapter", {}, {f"1.self_attn.q_proj.lora_{side}.weight" for side in "AB"})
    with pytest.raises(CheckpointError) as found:
        ours(tmp_path / "adapter")
    assert found.value.fix == WRONG_BASE


def test_new_rows_of_an_embedding_come_from_the_adapter(place, tmp_path):
    """PEFT saves a grown embedding in full, although only q_proj has an adapter."""
    base = base_of(place, tmp_path / "base", tied=False)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(rows + 2)
    model = moved(get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    ids = torch.tensor([[5, 6, rows, rows + 1]])
    with torch.no_grad():
        found = load_saved(str(tmp_path / "adapter"), FLOAT).model(ids).logits
        assert torch.allclose(found, model(ids).logits, atol=1e-4)


def test_added_tokens_grow_the_base(place, tmp_path):
    base = base_of(place, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = model.get_input_embeddings().weight.shape[0]
    tokenizer.add_tokens([f"<new{n}>" for n in range(rows + 2 - len(tokenizer))], special_tokens=True)
    model.resize_token_embeddings(rows + 2)
    keys = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}
    keys |= {"modules_to_save": ["embed_tokens", "lm_head"]}
    model = moved(get_peft_model(model, LoraConfig(**keys)))
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    saved = load_saved(str(tmp_path / "adapter"), FLOAT)
    ids = torch.tensor([[5, 6, rows, rows + 1]])
    with torch.no_grad():
        assert torch.allclose(saved.model(ids).logits, model(ids).logits, atol=1e-4)
    assert len(saved.tokenizer) == len(tokenizer)
    assert any(key.startswith("grown") for key in notices.notices_so_far())
    with pytest.raises(CheckpointError) as found:
        merge(str(tmp_path / "adapter"), tmp_path / "merged")
    assert "tokens" in found.value.fix


def test_experts_factors_under_their_own_names(place, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    more = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "vocab_size": 270}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **more, num_experts_per_tok=2, tie_word_embeddings=False))
    shutil.copytree(place / "model", tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(tmp_path / "base")
    factors = {}
    for expert in range(4):
        for name, (rows, columns) in {"gate_proj": (16, 32), "up_proj": (16, 32), "down_proj": (32, 16)}.items():
            at = f"base_model.model.model.layers.0.mlp.experts.{expert}.{name}"
            factors |= {f"{at}.lora_A.weight": torch.randn(4, columns), f"{at}.lora_B.weight": torch.randn(rows, 4)}
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter/adapter_model.safetensors", metadata={"format": "pt"})
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(tmp_path / "base"), "r": 4}
    said |= {"lora_alpha": 8, "target_modules": ["gate_proj", "up_proj", "down_proj"], "bias": "none"}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(said))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(IDS).logits
    assert torch.allclose(ours(tmp_path / "adapter"), theirs, atol=1e-4)


def test_names_of_older_versions_of_transformers(place, tmp_path):
    """Gemma 3 before transformers 4.52: language_model.model.layers."""
    torch.manual_seed(0)
    text = {"vocab_size": 270, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    shutil.copytree(place / "model", tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    model = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "base", dtype=torch.float32)
    keys = {"r": 4, "target_modules": r".*language_model.*\.q_proj", "task_type": "CAUSAL_LM"}
    model = moved(get_peft_model(model, LoraConfig(**keys)))
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    old = {key.replace("model.model.language_model.", "model.language_model.model."): value
           for key, value in load_file(file).items()}  # fmt: skip
    assert old.keys() != load_file(file).keys()
    save_file(old, file, metadata={"format": "pt"})
    with torch.no_grad():
        theirs = model(input_ids=IDS).logits
        found = load_saved(str(tmp_path / "adapter"), FLOAT).model(input_ids=IDS).logits
    assert torch.allclose(found, theirs, atol=1e-4)


def test_a_config_whose_quantization_is_null(place, tmp_path):
    base = base_of(place, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    model = load_model(str(base), load_in_4bit=False)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("initialised", ["pissa", "olora", "pissa_niter_4"])
def test_an_adapter_that_changed_its_base_is_refused_on_quantized_weights(place, tmp_path, initialised):
    base = base_of(place, tmp_path / "base")
    written(base, tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": initialised}))
    with pytest.raises(CheckpointError):
        load_saved(str(tmp_path / "adapter"), ["load_in_4bit=true", "device=cpu"])
    again = {"adapter_path": str(tmp_path / "adapter"), "load_in_4bit": True}
    with pytest.raises(CheckpointError):
        train(load_config(None, keys(place, tmp_path / "out", **again)))


def keys(place, output, data="data", **more):
    found = {"model_name_or_path": str(place / "model"), "dataset": str(place / f"{data}.jsonl"), "r": 4}
    found |= {"output_dir": str(output), "device": "cpu", "dtype": "float32", "load_in_4bit": False, "max_steps": 2}
    return found | {"learning_rate": 1e-2, "warmup_steps": 0, "sample_prompts": 0, "max_length": 64} | more


@pytest.mark.slow
def test_keys_that_a_saved_adapter_has_decided_are_named(place, tmp_path):
    train(load_config(None, keys(place, tmp_path / "first", lora_dropout=0.0)))
    notices.reset_notices()
    more = {"adapter_path": str(tmp_path / "first/adapter"), "modules_to_save": ["lm_head"]}
    more |= {"target_modules": ["q_proj"], "lora_dropout": 0.5, "init_lora_weights": "gaussian"}
    train(load_config(None, keys(place, tmp_path / "second", **more)))
    named = notices.notices_so_far()["adapter_shape"]
    assert all(key in named for key in ("lora_dropout 0.0", "modules_to_save", "target_modules", "init_lora_weights"))


@pytest.mark.parametrize("folder", slow_except([".", "adapter"], ["."]))
def test_the_code_of_both_cards_runs(place, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(place)
    train(load_config(None, keys(place, tmp_path / "out", model_name_or_path="model", max_steps=1, warmup_steps=0)))
    monkeypatch.chdir(tmp_path / "out" / folder)
    code = re.search(r"```python\n(.*?)\n```", Path("README.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(code.replace("FOLDER_OF_BASE", str(place / "model")), names)
    assert isinstance(names["model"], PeftModel)


@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16"], ["bfloat16"]))
def test_adapters_in_bf16_train_a_head_that_scores(place, tmp_path, dtype):
    rows = [json.loads(line) for line in (place / "data.jsonl").read_text().splitlines()]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " no"} for row in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    more = {"method": "reward", "adapter_dtype": "bfloat16", "dtype": dtype, "dataset": str(tmp_path / "pairs.jsonl")}
    train(load_config(None, keys(place, tmp_path / "out", **more)))
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_adapters_in_bf16_beside_a_head_that_is_trained_whole(place, tmp_path):
    more = {"adapter_dtype": "bfloat16", "modules_to_save": ["lm_head"]}
    train(load_config(None, keys(place, tmp_path / "out", **more)))
    held = load_file(tmp_path / "out/adapter/adapter_model.safetensors")
    assert {name.rpartition(".")[0].rpartition(".")[2]: tensor.dtype for name, tensor in held.items()} == {
        "lora_A": torch.bfloat16, "lora_B": torch.bfloat16, "lm_head": torch.float32,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"use_dora": True}, {"adapter_dtype": "bfloat16"}], ids=str)
def test_a_run_in_bf16_finds_its_saved_adapter_sound(place, tmp_path, more):
    train(load_config(None, keys(place, tmp_path / "out", dtype="bfloat16", **more)))
    found = json.loads((tmp_path / "out/checks.json").read_text())["adapter_reload"]
    assert found["median_difference"] <= 0.02 * found["largest_logit"]
    if "adapter_dtype" in more:
        assert found["equal"]
