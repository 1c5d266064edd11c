"""A run's folder that says trust_remote_code: true, with a base that brings code: the code runs only where one asks."""

import json
import shutil

import pytest
import torch

from halfbyte.cli.answers import answer_file, chat
from halfbyte.cli.app import app
from halfbyte.config import dump_config, load_config
from halfbyte.evaluation.held_out import evaluate
from halfbyte.export.gguf_adapter import export_adapter
from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.merge import merge
from halfbyte.runs.saved import load_saved
from halfbyte.serve.model import Limits, load
from halfbyte.utils.errors import ModelError
from tests.helpers.serve_tiny import byte_tokenizer, random_adapter, random_model

CODE = """
import os
open(os.environ["HALFBYTE_TEST_MARK"], "w").close()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The file that the base's code makes when it is run."""
    monkeypatch.setenv("HALFBYTE_TEST_MARK", str(tmp_path / "it-ran"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *prompt: "/quit")
    return tmp_path / "it-ran"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "own"
    random_model(byte_tokenizer()).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(base, tmp_path):
    """A run as one would find it: its base by path, and the switch on."""
    own = tmp_path / "own"
    random_adapter(base, tmp_path / "run" / "adapter", 0)
    shutil.copytree(base, own)
    (own / "code.py").write_text(CODE)
    config = json.loads((own / "config.json").read_text())
    auto = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
    (own / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": auto}))
    keys = {"dataset": "d", "load_in_4bit": False, "dtype": "float32", "device": "cpu", "trust_remote_code": True}
    resolved = dump_config(load_config(None, {"model_name_or_path": str(own), **keys}))
    assert "trust_remote_code: true" in resolved
    (tmp_path / "run" / "config.resolved.yaml").write_text(resolved)
    (tmp_path / "rows.jsonl").write_text('{"text": "Once upon a time."}\n')
    (tmp_path / "prompts.txt").write_text("Once\n")
    return tmp_path / "run"


def talk(run, place, trust):
    chat(str(run), compare_base=False, max_new_tokens=2, temperature=0.0, trust_remote_code=trust)


WAYS = {
    "load_saved": lambda run, at, trust: load_saved(str(run), [f"trust_remote_code={trust}"]),
    "generate": lambda run, at, trust: list(answer_file(str(run), at / "prompts.txt", 2, 0.0, 8, trust)),
    "chat": talk,
    "eval": lambda run, at, trust: evaluate(str(run), str(at / "rows.jsonl"), ["trust_remote_code=true"] * trust),
    "serve": lambda run, at, trust: load(str(run), {}, Limits(), trust),
    "merge": lambda run, at, trust: merge(run, at / "merged", trust_remote_code=trust),
    "export": lambda run, at, trust: export_gguf(run, "f16", at / "x.gguf", trust_remote_code=trust),
    "adapter": lambda run, at, trust: export_adapter(run, "f16", at / "x.gguf", trust_remote_code=trust),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_s_own_configuration_does_not_switch_code_on(run, mark, tmp_path, way):
    with pytest.raises(ModelError, match=f"{tmp_path}/own") as refused:
        WAYS[way](run, tmp_path, False)
    assert not mark.exists()
    assert "--trust-remote-code" in refused.value.fix
    assert "trust_remote_code=True" in refused.value.fix


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("export", "adapter", "merge")])
def test_the_command_s_own_word_does(run, mark, tmp_path, way):
    WAYS[way](run, tmp_path, True)
    assert mark.exists()


@pytest.mark.parametrize("way", ["export", "adapter"])
def test_llama_cpp_knows_no_such_model_but_it_was_read(run, mark, tmp_path, way):
    with pytest.raises(ModelError, match="own"):
        WAYS[way](run, tmp_path, True)
    assert mark.exists()


def test_merging_with_one_s_word(run, mark, tmp_path):
    merge(run, tmp_path / "merged", trust_remote_code=True, verify=False)
    assert mark.exists()


def test_code_of_a_tokenizer_beside_the_adapter(base, mark, tmp_path):
    """The base brings none; the folder with the adapter does."""
    random_adapter(base, tmp_path / "adapter", 0)
    byte_tokenizer().save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "code.py").write_text(CODE)
    path = tmp_path / "adapter" / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": [None, "code.OwnTokenizer"]}, "tokenizer_class": "OwnTokenizer"}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    with pytest.raises(ModelError):
        merge(tmp_path / "adapter", tmp_path / "merged", verify=False)
    assert not mark.exists()


@pytest.mark.parametrize("command", ["eval", "chat", "generate", "serve", "merge", "export"])
def test_each_command_takes_the_word(command):
    from typer.main import get_command

    options = {name for each in get_command(app).commands[command].params for name in each.opts}
    assert "--trust-remote-code" in options


def test_eval_passes_it_on(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    looked, seen, data = [], [], tmp_path / "data.jsonl"
    data.write_text("{}\n")
    monkeypatch.setattr("halfbyte.runs.saved.look_up", lambda name, given, *_: looked.append(given))
    monkeypatch.setattr("halfbyte.evaluation.held_out.evaluate", lambda *words: seen.append(words) or 1 / 0)
    for words in (["dtype=float32", "--trust-remote-code"], ["trust_remote_code=true"]):
        CliRunner().invoke(app, ["eval", "run", str(data), *words])
    given = [["dtype=float32", "trust_remote_code=true"], ["trust_remote_code=true"]]
    assert looked == given
    assert seen == [("run", str(data), words) for words in given]
