"""Runs that adapt or train the head and the embedding: every file they leave computes the same, in other tools too."""

import shutil

import pytest
import torch
from gguf import GGUFReader
from peft import PeftModel
from transformers import AutoModelForCausalLM

from halfbyte.adapters.lora import add_adapter
from halfbyte.config import load_config
from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.merge import merge
from halfbyte.formats import named
from halfbyte.generation.run import generate
from halfbyte.layers import QuantizedLinear, hold_table, quantized_parameter
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.runs.saved import load_saved
from halfbyte.train.run import train
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError, ModelError
from tests.helpers.merge_runs import logits_in_fp32 as logits
from tests.helpers.merge_runs import save_tied_and_untied
from tests.helpers.sft_runs import keys
from tests.helpers.tiny_runs import run_config, tiny_llama

BOTH = ["embed_tokens", "lm_head"]
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    rows = [{"prompt": f"what is {n}?", "completion": f"it is {n % 7}"} for n in range(24)]
    return save_tied_and_untied(tmp_path_factory.mktemp("ends"), rows)


def run(place, output, base, resume=None, **changed):
    config = keys(place, output, model_name_or_path=str(place / base), sample_prompts=0, load_in_4bit=False)
    train(load_config(None, config | {"max_steps": 3, "learning_rate": 1e-2} | changed), resume=resume)
    return output


CASES = {
    "LoRA on both": ("tied", {"target_modules": ["q_proj", *BOTH]}, False),
    "one copy of both": ("tied", {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, True),
    "LoRA on the head": ("untied", {"target_modules": ["q_proj", "lm_head"]}, False),
    "DoRA on both": ("untied", {"target_modules": BOTH, "use_dora": True, "lora_dropout": 0.0}, False),
    "LoRA on the tied head": ("tied", {"target_modules": ["lm_head"]}, False),
    "a copy of each": ("tied", {"modules_to_save": BOTH}, False),
}
QUICK = ("LoRA on both", "one copy of both")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_every_file_computes_what_was_trained(place, tmp_path, case):
    base, changed, stays_tied = CASES[case]
    output = run(place, tmp_path / "run", base, **{"target_modules": ["q_proj"]} | changed)
    assert "full_logits" not in notices.notices_so_far()
    assert ("untied" in notices.notices_so_far()) == (base == "tied" and not stays_tied)
    ids = torch.randint(0, 250, (1, 9))
    trained = load_saved(str(output)).model
    expected = logits(trained, ids)
    plain = AutoModelForCausalLM.from_pretrained(place / base, dtype=torch.float32)
    assert (logits(plain, ids) - expected).abs().max() > 0.05
    reloaded = PeftModel.from_pretrained(plain, output / "adapter")
    assert torch.equal(logits(reloaded, ids), expected)

    merge(output, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.tie_word_embeddings == stays_tied
    assert (logits(merged, ids) - expected).abs().max() <= 0.03 * expected.abs().max()  # stored in 16 bits
    export_gguf(output, "f32", tmp_path / "model.gguf")
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert torch.equal(tensors["token_embd.weight"], merged.get_input_embeddings().weight)
    assert ("output.weight" in tensors) == (not stays_tied)
    if not stays_tied:
        assert torch.equal(tensors["output.weight"], merged.get_output_embeddings().weight)

    answers = generate(trained, [ids[0].tolist()], max_new_tokens=8, stops=[])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = reloaded.generate(input_ids=ids, **options)[0, ids.shape[1] :]
    assert list(answers[0])[-8:] == theirs.tolist()


@pytest.mark.parametrize(
    "changed",
    [
        {"target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.2},
        pytest.param(
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_resumed_run_is_bit_equal(place, tmp_path, changed):
    whole = run(place, tmp_path / "whole", "tied", save_steps=2, **changed)
    ignored = shutil.ignore_patterns("adapter", "checkpoint-3", ".lock")
    shutil.copytree(whole, tmp_path / "again", ignore=ignored)
    again = run(place, tmp_path / "again", "tied", resume=True, save_steps=2, **changed)
    assert (again / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("storage", ["nf4", "kbit3"])
@pytest.mark.parametrize("changed", [{}, {"use_dora": True}])
def test_adapters_of_quantized_ends_get_pefts_gradients(tied, storage, changed):
    """An embedding stored in few bits, and a head that is tied to it: one stored tensor."""
    stored, plain = (tiny_llama(tie_word_embeddings=tied, hidden_size=64) for _ in range(2))
    plain.load_state_dict(stored.state_dict())
    embedding, weight = stored.model.embed_tokens, quantized_parameter(stored.model.embed_tokens.weight, named(storage))
    hold_table(embedding)
    embedding.weight = weight
    plain.model.embed_tokens.weight = torch.nn.Parameter(weight.dequantize(torch.float32))
    if tied:
        stored.lm_head = QuantizedLinear.unfilled(stored.lm_head)
        stored.lm_head.weight = weight
        plain.lm_head.weight = plain.model.embed_tokens.weight
    config = run_config("o", r=3, target_modules=BOTH, lora_dropout=0.0, **changed)
    ours, theirs = add_adapter(stored, config), add_adapter(plain, config)
    ids = torch.randint(0, 64, (2, 12))
    parameters = [(mine, other) for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True)]
    trained = [(mine, other) for mine, other in parameters if other.requires_grad]
    with torch.no_grad():
        for mine, other in trained:
            mine.copy_(other.add_(0.1 * torch.randn_like(other)))
    causal_lm_loss(ours, {"input_ids": ids, "labels": ids})[0].backward()
    theirs(input_ids=ids, labels=ids).loss.mul(ids[:, 1:].numel()).backward()
    for mine, other in trained:
        assert (mine.grad - other.grad).norm() <= 1e-4 * other.grad.norm()
    assert "full_logits" not in notices.notices_so_far()


@pytest.mark.parametrize(
    ("tied", "changed"),
    [
        (True, {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]}),
        (True, {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
        (True, {"target_modules": ["q_proj"], "modules_to_save": ["k_proj"], "ensure_weight_tying": True}),
        (False, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True}),
    ],
)
def test_contradicting_adapters_of_the_ends_are_refused(tied, changed):
    with pytest.raises(ModelError):
        add_adapter(tiny_llama(tie_word_embeddings=tied), run_config("o", **changed))


def test_tying_needs_a_copy_to_tie():
    with pytest.raises(ConfigError, match="ensure_weight_tying"):
        load_config(None, {"model_name_or_path": "m", "dataset": "d", "ensure_weight_tying": True})
