"""Every command refuses a wrong model, dataset, run or adapter before it imports torch."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, io, json, sys, time
from halfbyte.cli import main

said = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as stream, contextlib.suppress(SystemExit):
        main(arguments)
    said.append(stream.getvalue())
heavy = [name for name in ("torch", "transformers", "peft", "datasets", "numpy") if name in sys.modules]
print(json.dumps({"said": said, "heavy": heavy, "seconds": time.process_time()}))
"""

NO_FOLDER, NO_CONFIG = "there is no folder none", "empty has no config.json"
NO_FILE, NO_RUN = "no such file: none.jsonl (the closest existing one is one.jsonl)", "empty: neither a run"
NO_ADAPTER = "empty has no adapter_config.json"
MODEL, DATA = "model_name_or_path=model", "dataset=one.jsonl"
# Keys of a run's file, except one input.
INPUTS = {
    ("model_name_or_path=./none", DATA): NO_FOLDER,
    ("model_name_or_path=empty", DATA): NO_CONFIG,
    ("model_name_or_path=none.gguf", DATA): "there is no file none.gguf",
    ("model_name_or_path=torn", DATA): "torn/model.safetensors is truncated",
    (MODEL, "dataset=none.jsonl"): NO_FILE,
    (MODEL, "dataset=[one.jsonl, empty]"): "no data files in empty",
    (MODEL, "dataset=one.bin"): "one.bin is of an unknown kind",
    (MODEL, DATA, "eval_dataset=none.jsonl"): NO_FILE,
    (MODEL, DATA, "adapter_path=empty"): NO_ADAPTER,
}
SAVED = {
    ("./none",): NO_FOLDER,
    ("empty",): NO_RUN,
    ("moved",): "there is no folder base",  # its base
}


def of(command, inputs, *more):
    return {(command, *given, *more): words for given, words in inputs.items()}


COMMANDS = {
    "check": of("check run.yaml", INPUTS),
    "preview": of("preview run.yaml", INPUTS),
    "train": of("train run.yaml", INPUTS)
    | of("train run.yaml --resume", {(MODEL, DATA, "output_dir=old"): "old holds adapter/ and no checkpoint to resume"})
    | of("train run.yaml", {(MODEL, DATA, "output_dir=old"): "old already holds a run (adapter)"}),
    "init": {
        ("init", "./none", "one.jsonl"): NO_FOLDER,
        ("init", "empty", "one.jsonl"): NO_CONFIG,
        ("init", "model", "none.jsonl"): NO_FILE,
    },
    "mix": {
        ("mix", "./none", "one.jsonl"): NO_FOLDER,
        ("mix", "empty", "one.jsonl"): NO_RUN,
        ("mix", "model", "none.jsonl"): NO_FILE,
    },
    "eval": of("eval", SAVED, "one.jsonl") | {("eval", "model", "none.jsonl"): NO_FILE},
    "chat": of("chat", SAVED),
    "generate": of("generate", SAVED, "prompts.txt") | {("generate", "model", "none.txt"): "no such file: none.txt"},
    "merge": {("merge", "none"): "there is no folder none", ("merge", "empty"): NO_RUN},
    "fit": {("fit --to nf4", "none"): "there is no folder none", ("fit --to nf4", "empty"): NO_RUN},
    "board": {("board", "none"): "none is not a folder"},
    "explain": {("explain", "none"): "none is no run", ("explain", "empty"): "empty is no run"},
    "ps": {("ps", "none"): "none is not a folder"},
    "stop": {("stop", "none"): "none has no status.json"},
    "trace": {("trace", "none", "model"): "there is no folder none", ("trace", "empty", "model"): NO_RUN},
    "export": of("export --gguf q8_0", SAVED),
    "serve": of("serve", SAVED) | {("serve", "model", "--adapter", "a=model"): "model has no adapter_config.json"},
}


# Ends a command when it begins to import torch.
FIRST_IMPORT = """
import contextlib, gc, io, json, sys
from halfbyte.cli import main

class Met:
    collecting = None

    def find_spec(self, name, *_):
        if name == "torch":
            self.collecting = gc.isenabled()
            sys.exit(99)

sys.dont_write_bytecode = True  # else `keep_bytecode` looks for torch before any import
met, found = Met(), []
sys.meta_path.insert(0, met)
for arguments in json.loads(sys.argv[1]):
    met.collecting = None
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        main(arguments)
    found.append(met.collecting)
print(json.dumps(found))
"""
GOOD = [
    "check run.yaml model_name_or_path=model dataset=one.jsonl",
    "preview run.yaml model_name_or_path=model dataset=one.jsonl",
    "train run.yaml model_name_or_path=model dataset=one.jsonl",
    "init model one.jsonl",
    "mix model one.jsonl",
    "eval model one.jsonl",
    "chat model",
    "generate model prompts.txt",
    "merge trained",
    "fit trained --to nf4",
    "trace trained model",
    "export model --gguf q8_0",
    "serve model",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and a dataset with the files that are checked, and wrong variants of them."""
    place = tmp_path_factory.mktemp("inputs")
    for name in ("model", "torn", "empty", "moved", "old/adapter"):
        (place / name).mkdir(parents=True)
    for name in ("model", "torn"):
        (place / name / "config.json").write_text("{}")
    (place / "torn" / "model.safetensors").write_bytes(bytes([200, *[0] * 20]))
    (place / "moved" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "./base"}))
    (place / "run.yaml").write_text("max_steps: 1\n")
    (place / "trained").mkdir()
    (place / "trained" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "model"}))
    for name in ("one.jsonl", "one.bin", "prompts.txt"):
        (place / name).write_text('{"text": "one"}\n')
    return place


@pytest.mark.sampled(20)
@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_input_is_refused_before_torch_is_imported(folder, command):
    wanted = COMMANDS[command]
    arguments = [[*words.split(), *given] for words, *given in wanted]
    program = [sys.executable, "-c", PROGRAM, json.dumps(arguments)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=folder)
    found = json.loads(done.stdout.splitlines()[-1])
    for given, said, words in zip(arguments, found["said"], wanted.values(), strict=True):
        assert words in said, given
        assert "fix: " in said, given
    assert found["heavy"] == []
    assert found["seconds"] < 1.5  # CPU time; 0.5 s on an idle machine


@pytest.mark.slow
def test_torch_is_imported_without_garbage_collections(folder):
    """Collections would take a third of the import time."""
    program = [sys.executable, "-c", FIRST_IMPORT, json.dumps([words.split() for words in GOOD])]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=folder)
    found = dict(zip(GOOD, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert found == dict.fromkeys(GOOD, False)
    without_torch = {"board", "explain", "ps", "stop"}
    assert {words.split()[0] for words in GOOD} == COMMANDS.keys() - without_torch


def test_every_command_with_inputs_is_covered():
    from halfbyte.cli.app import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert names - {"env", "demo", "import-config", "schema"} == COMMANDS.keys()
