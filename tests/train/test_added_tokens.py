"""New tokens: their rows are the only ones that are trained, saved and merged, and every reload computes the same."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from halfbyte.adapters.lora import add_adapter
from halfbyte.config import load_config
from halfbyte.export.gguf_adapter import export_adapter
from halfbyte.export.merge import merge
from halfbyte.export.served_adapter import export_served
from halfbyte.generation.run import generate
from halfbyte.modeling.head import causal_lm_loss, uses_hidden_states
from halfbyte.runs.saved import load_saved
from halfbyte.train.preflight import prepare_run
from halfbyte.train.run import train
from halfbyte.utils.errors import CheckpointError, HalfbyteError
from tests.helpers.merge_runs import logits_in_fp32 as logits
from tests.helpers.merge_runs import save_base, save_tied_and_untied
from tests.helpers.sft_runs import keys
from tests.helpers.tiny_runs import run_config, tiny_llama

DELTA = "token_adapter.trainable_tokens_delta"
NEW = "<tool> what is<call>"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Bases whose embeddings have rows for 272 tokens, of 259; data with two new tokens."""
    rows = [{"prompt": f"<call>{n}?", "completion": f"<tool>{n % 7}"} for n in range(24)]
    folder = save_tied_and_untied(tmp_path_factory.mktemp("tokens"), rows)
    save_base(folder / "tied in 16 bits", torch.bfloat16, tie_word_embeddings=True)
    return folder


def config_of(bases, output, base, **changed):
    config = keys(
        bases, output, model_name_or_path=str(bases / base), max_steps=3, sample_prompts=0, load_in_4bit=False
    )
    config |= {"add_tokens": {"<tool>": "what is"}, "add_special_tokens": ["<call>"], "target_modules": ["q_proj"]}
    return load_config(None, config | changed)


def run(bases, output, base, **changed):
    train(config_of(bases, output, base, **changed))
    return output


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        ("tied", {}),
        ("untied", {"resize_token_embeddings_to_multiple_of": 64, "add_special_tokens": [f"<{n}>" for n in range(20)]}),
        ("tied", {"add_special_tokens": [f"<{n}>" for n in range(20)], "trainable_token_indices": [5]}),
    ],
)
def test_new_tokens_are_trained_saved_and_merged(bases, tmp_path, base, changed):
    output = run(bases, tmp_path / "run", base, **changed)
    saved = load_file(output / "adapter" / "adapter_model.safetensors")
    rows = json.loads((output / "adapter" / "adapter_config.json").read_text())["trainable_token_indices"]
    deltas = {name: tensor for name, tensor in saved.items() if DELTA in name}
    assert len(deltas) == len(rows) == (1 if base == "tied" else 2)
    assert not any(name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in saved)
    assert all(len(tensor) == len(ids) for tensor, ids in zip(deltas.values(), rows.values(), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(output / "adapter")
    ids = torch.tensor([tokenizer(NEW)["input_ids"]])
    assert {tokenizer.convert_tokens_to_ids("<tool>")} < set(ids[0].tolist())

    found = load_saved(str(output))
    assert found.tokenizer(NEW)["input_ids"] == ids[0].tolist()
    expected = logits(found.model, ids)
    plain = AutoModelForCausalLM.from_pretrained(bases / base, dtype=torch.float32)
    needed = 1 + max(max(ids) for ids in rows.values())
    if needed > plain.get_input_embeddings().weight.shape[0]:
        plain.resize_token_embeddings(needed)
        assert needed % changed.get("resize_token_embeddings_to_multiple_of", 1) == 0
    torch.testing.assert_close(logits(PeftModel.from_pretrained(plain, output / "adapter"), ids), expected)

    merge(output, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")(NEW)["input_ids"] == ids[0].tolist()
    assert merged.config.tie_word_embeddings == (base == "tied")
    assert merged.config.vocab_size == expected.shape[-1] == max(272, needed)
    error = (logits(merged, ids) - expected).abs().max()
    assert error <= 0.02 * expected.abs().max()  # stored in 16 bits


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_the_head_get_pefts_gradient_without_full_logits(tied):
    torch.manual_seed(0)
    model = add_adapter(
        tiny_llama(tie_word_embeddings=tied), run_config("o", r=2, lora_dropout=0, trainable_token_indices=[3, 40])
    )
    ids = torch.randint(0, 64, (2, 12))
    batch = {"input_ids": ids, "labels": ids}
    assert uses_hidden_states(model, {"input_ids": ids})
    deltas = [parameter for name, parameter in model.named_parameters() if "trainable_tokens_delta" in name]
    assert len(deltas) == (1 if tied else 2)
    with torch.no_grad():
        for delta in deltas:
            delta.add_(torch.randn_like(delta))
    causal_lm_loss(model, batch)[0].backward()
    gradients = [delta.grad.clone() for delta in deltas]
    model.zero_grad()
    model(**batch).loss.mul(ids[:, 1:].numel()).backward()
    for gradient, delta in zip(gradients, deltas, strict=True):
        torch.testing.assert_close(gradient, delta.grad, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        expected = model(**batch).loss * ids[:, 1:].numel()
        torch.testing.assert_close(causal_lm_loss(model, batch)[0], expected)


def test_new_tokens_on_a_quantized_base_answer_and_continue(bases, tmp_path):
    output = run(bases, tmp_path / "run", "tied in 16 bits", load_in_4bit=True)
    saved = load_saved(str(output))
    prompt = saved.tokenizer(NEW)["input_ids"]
    answers = list(generate(saved.model, [prompt], max_new_tokens=4))
    assert answers
    report = merge(output, tmp_path / "merged")
    assert report.targets[report.target].explained
    changed = {"add_tokens": None, "add_special_tokens": None, "adapter_path": str(output / "adapter")}
    again = run(bases, tmp_path / "again", "tied in 16 bits", load_in_4bit=True, **changed)
    first, second = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (output, again))
    assert {name: tensor.shape for name, tensor in first.items()} == {name: t.shape for name, t in second.items()}
    assert AutoTokenizer.from_pretrained(again / "adapter")(NEW)["input_ids"] == prompt
    with pytest.raises(CheckpointError, match="tokens"):
        export_adapter(output)
    with pytest.raises(CheckpointError, match="tokens"):
        export_served(output)


def test_resume_of_new_tokens_is_bit_equal(bases, tmp_path):
    whole = run(bases, tmp_path / "whole", "tied", max_steps=4)
    parts = tmp_path / "parts"
    run(bases, parts, "tied", max_steps=4)
    shutil.rmtree(parts / "adapter")
    shutil.rmtree(parts / "checkpoint-4", ignore_errors=True)
    given = load_config(parts / "config.resolved.yaml", ["resume_from_checkpoint=true"])
    train(given)
    first, second = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (whole, parts))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"add_tokens": ["a"]}, "add_tokens"),
        ({"add_special_tokens": ["<tool>"]}, "add_special_tokens"),
        ({"add_tokens": ["<new>", "<new>"]}, "add_tokens"),
        ({"add_tokens": None, "add_special_tokens": None, "trainable_token_indices": [272]}, "trainable_token_indices"),
        ({"add_tokens": {"<tool>": ""}}, "add_tokens"),
        ({"modules_to_save": ["lm_head"]}, "add_tokens"),
        ({"use_peft": False, "target_modules": "all-linear"}, "add_tokens"),
    ],
)
def test_bad_tokens_are_refused_by_key(bases, tmp_path, changed, key):
    """`check` refuses them, too: it prepares the run and writes nothing."""
    with pytest.raises(HalfbyteError, match=key):
        prepare_run(config_of(bases, tmp_path / "run", "untied", **changed), writes=False)
    assert not (tmp_path / "run").exists()
