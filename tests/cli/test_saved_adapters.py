"""Every way in which an adapter comes from a folder, and every way in which the folder can be wrong: one error each.

What generates, evaluates, serves, merges, exports or goes on training checks alike, because all load alike.
"""

import ast
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import halfbyte
from halfbyte.adapters.lora import add_adapter, load_adapter
from halfbyte.cli.answers import answer_file, chat
from halfbyte.config import dump_config, load_config
from halfbyte.evaluation.held_out import evaluate
from halfbyte.export.gguf_adapter import export_adapter
from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.merge import merge
from halfbyte.runs.saved import load_saved
from halfbyte.serve.model import load
from halfbyte.train.run import train
from halfbyte.utils import notices
from halfbyte.utils.errors import CheckpointError
from tests.helpers.serve_tiny import byte_tokenizer, random_adapter, random_model
from tests.helpers.sources import PACKAGE, syntax_nodes
from tests.helpers.tiny_runs import make_loop, run_config

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
KEYS = {"dataset": "d.jsonl", "load_in_4bit": False, "dtype": "float32", "device": "cpu", "max_length": 64}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    random_model(byte_tokenizer()).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def original(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    random_adapter(base, folder / "adapter", 0)
    config = load_config(None, {"model_name_or_path": str(base), **KEYS})
    (folder / "config.resolved.yaml").write_text(dump_config(config))
    return folder


@pytest.fixture
def run(original, tmp_path):
    notices.reset_notices()
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"text": "Once upon a time."}\n')
    (tmp_path / "prompts.txt").write_text("Once\n")
    lines = iter(["Hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda *prompt: next(lines))
    return tmp_path


def continued(run, base, inputs):
    config = load_config(None, {"model_name_or_path": str(base), **KEYS, "adapter_path": str(run / "adapter")})
    add_adapter(AutoModelForCausalLM.from_pretrained(base), config)


WAYS = {
    "generate": lambda run, base, inputs: list(answer_file(str(run), inputs / "prompts.txt", 2, 0.0, 8)),
    "chat": lambda run, base, inputs: chat(str(run), compare_base=False, max_new_tokens=2, temperature=0.0),
    "eval": lambda run, base, inputs: evaluate(str(run), str(inputs / "rows.jsonl")),
    "serve": lambda run, base, inputs: load(str(run), {}),
    "serve --adapter": lambda run, base, inputs: load(str(base), {"more": str(run)}),
    "merge": lambda run, base, inputs: merge(run, inputs / "merged", verify=False),
    "export": lambda run, base, inputs: export_gguf(run, "f16", inputs / "x.gguf"),
    "export --adapter-only": lambda run, base, inputs: export_adapter(run, "f16", inputs / "y.gguf"),
    "adapter_path": continued,
}


def tensors(change):
    def harm(adapter):
        found = load_file(adapter / WEIGHTS)
        change(found, min(found))
        save_file(found, adapter / WEIGHTS)

    return harm


def configured(**keys):
    def harm(adapter):
        path = adapter / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return harm


def truncated(adapter):
    (adapter / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes()[:-100])


def pickled(adapter):
    (adapter / WEIGHTS).unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps({}))


NAME = r"base_model\.model\S+layers\.0\S+lora_A\.weight"
HARMS = {
    "missing tensor": (tensors(lambda found, name: found.pop(name)), f"{WEIGHTS}.*{NAME}"),
    "unknown tensor": (tensors(lambda found, _: found.update(x=torch.ones(1))), WEIGHTS),
    "misshapen": (tensors(lambda found, name: found.update({name: torch.ones(2, 3)})), rf"{NAME}.*shape \(2, 3\)"),
    "NaN": (tensors(lambda found, name: found[name][0, 0].fill_(torch.nan)), f"{NAME}.*NaN"),
    "infinite": (tensors(lambda found, name: found[name][1, 1].fill_(-torch.inf)), f"{NAME}.*NaN"),
    "truncated": (truncated, rf"\S+{WEIGHTS}"),
    "removed": (lambda at: (at / WEIGHTS).unlink(), rf"\S+{WEIGHTS}"),
    "a pickle": (pickled, r"adapter_model\.bin"),
    "other names": (configured(target_modules=["nothing"]), r"nothing"),
    "a rank of words": (configured(r="much"), f"{CONFIG}:.*'much'"),
    "a rank beyond memory": (configured(r=10**9), f"{CONFIG}:.*1000000000"),
    "a rank that the tensors have not": (configured(r=60_000), f"{CONFIG}.*60000.*{WEIGHTS}"),
    "patterns of no kind": (configured(rank_pattern=[1]), f"{CONFIG}: rank_pattern"),
    "a base of no kind": (configured(base_model_name_or_path=[1]), f"{CONFIG}: base_model_name_or_path"),
    "an expression that does not end": (configured(target_modules="("), f"{CONFIG}:"),
    "unknown kind": (configured(peft_type="NEW"), f"{CONFIG}.*peft_type 'NEW'"),
    "broken JSON": (lambda at: (at / CONFIG).write_text("{"), f"{CONFIG}:1:.*JSON"),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "export"])  # llama.cpp has no tokenizer of bytes
def test_a_sound_adapter_passes(run, base, inputs, way):
    WAYS[way](run, base, inputs)
    assert not [key for key in notices.notices_so_far() if key.startswith("adapter_base")]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_adapter_is_refused_by_name(run, base, inputs, way, harm):
    damage, message = HARMS[harm]
    damage(run / "adapter")
    with pytest.raises(CheckpointError, match=message):
        WAYS[way](run, base, inputs)
    assert not list(inputs.glob("merged")) + list(inputs.glob("*.gguf"))


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_of_another_base_is_refused_by_name(run, inputs, tmp_path, way):
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_config(random_model(byte_tokenizer()).config.__class__(
        vocab_size=259, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    ))  # fmt: skip
    model.save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    config = load_config(None, {"model_name_or_path": str(other), **KEYS})
    (run / "config.resolved.yaml").write_text(dump_config(config))
    with pytest.raises(CheckpointError):
        WAYS[way](run, other, inputs)


@pytest.mark.parametrize("way", ["generate", "chat", "eval", "serve", "serve --adapter"])
@pytest.mark.parametrize("harm", ["NaN", "truncated", "removed", "broken JSON"])
def test_what_the_files_say_is_known_before_the_model_is_loaded(run, base, inputs, way, harm, monkeypatch):
    monkeypatch.setattr("halfbyte.loading.load.load_model", lambda *_, **__: pytest.fail("it was loaded"))
    damage, message = HARMS[harm]
    damage(run / "adapter")
    with pytest.raises(CheckpointError, match=message):
        WAYS[way](run, base, inputs)


def test_adapter_path_is_looked_at_before_the_data(run, base, tmp_path, monkeypatch):
    monkeypatch.setattr("halfbyte.data.prepare", lambda *_: pytest.fail("it was tokenized"))
    truncated(run / "adapter")
    (tmp_path / "d.jsonl").write_text('{"text": "one"}\n')
    keys = {"adapter_path": str(run / "adapter"), "output_dir": str(tmp_path / "out")}
    keys |= {"dataset": str(tmp_path / "d.jsonl")}
    with pytest.raises(CheckpointError, match=WEIGHTS):
        train(load_config(None, {"model_name_or_path": str(base), **KEYS, **keys}))
    assert not (tmp_path / "out").exists()


def test_a_base_of_another_name_is_said(run, base, tmp_path):
    moved = Path(shutil.copytree(base, tmp_path / "moved"))
    file = run / "config.resolved.yaml"
    file.write_text(file.read_text().replace(str(base), str(moved)))
    load_saved(str(run))
    assert f"{base}" in notices.notices_so_far()[f"adapter_base {run / 'adapter'}"]


def test_a_checkpoint_is_resumed_by_the_same_rules(tmp_path):
    make_loop(run_config(tmp_path, max_steps=2, save_steps=2)).train()
    tensors(lambda found, name: found[name][0, 0].fill_(torch.nan))(tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match=f"{NAME}.*NaN"):
        make_loop(run_config(tmp_path, max_steps=4)).train(tmp_path / "checkpoint-2")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("keys", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"use_rslora": True}])
def test_what_is_loaded_is_what_peft_loads(base, tmp_path, keys, quantized):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **keys)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)

    def fresh():
        return halfbyte.load_model(str(base), load_in_4bit=quantized, dtype="bfloat16", device="cpu")

    ours, theirs = load_adapter(fresh(), tmp_path, str(base)), PeftModel.from_pretrained(fresh(), tmp_path)
    assert not ours.training
    assert {n: p.dtype for n, p in ours.named_parameters()} == {n: p.dtype for n, p in theirs.named_parameters()}
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    ids = torch.arange(9)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert ours.peft_config["default"].base_model_name_or_path == str(base)


def test_embeddings_that_peft_saves_beside_an_adapter_of_the_head(base, tmp_path):
    """The base's own go; others would be another model's."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["lm_head"]))
    torch.nn.init.normal_(model.base_model.model.lm_head.lora_B["default"].weight)
    model.save_pretrained(tmp_path)
    name = "base_model.model.lm_head.base_layer.weight"
    assert name in load_file(tmp_path / WEIGHTS)
    ids = torch.arange(9)[None]
    again = load_adapter(AutoModelForCausalLM.from_pretrained(base), tmp_path, str(base))
    assert torch.equal(again(ids).logits, model(ids).logits)
    tensors(lambda found, _: found[name].mul_(2))(tmp_path)
    with pytest.raises(CheckpointError, match=name):
        load_adapter(AutoModelForCausalLM.from_pretrained(base), tmp_path, str(base))


PEFTS_OWN = ("PeftModel.from_pretrained", "PeftConfig.from_pretrained")


@pytest.mark.slow
def test_nothing_loads_an_adapter_in_another_way():
    """PEFT's own loading fills what a file lacks with random numbers, and asks the hub for files that are not there."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in syntax_nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                call = ast.unparse(node.func)
                if call in PEFTS_OWN or call.endswith(".load_adapter"):
                    found.append(f"{path.relative_to(PACKAGE)}: {call}")
    assert sorted(found) == [
        "adapters/initial.py: PeftConfig.from_pretrained",  # reads an existing file
        "adapters/lora.py: PeftConfig.from_pretrained",  # reads an existing file
        "export/trace.py: PeftModel.from_pretrained",  # reads a file as plain PEFT does, to compare
        "train/checks.py: PeftModel.from_pretrained",  # checks that plain PEFT reads the saved adapter
    ]
