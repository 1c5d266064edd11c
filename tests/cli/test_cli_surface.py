"""The public command line: names, options, exit codes, and a quick help."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from halfbyte.cli import app, main
from halfbyte.cli.train import _saved_message
from halfbyte.config import RunConfig
from halfbyte.runs import checkpoints
from halfbyte.runs.manifest import write_manifest
from halfbyte.utils.files import write_json

DRAWING = ["--top-k", "--top-p", "--min-p", "--repetition-penalty"]
SURFACE = {
    "init": ["model", "data", "--method", "--teacher"],
    "check": ["run", "--gpus", "--gpu-memory", "--price"],
    "preview": ["run", "-n --count", "--rollouts"],
    "train": ["run", "--resume", "--verbose"],
    "ps": ["folders"],
    "stop": ["run", "--now"],
    "board": ["folders", "--host", "--port", "--read-only", "--allow"],
    "explain": ["run"],
    "eval": ["model", "data", "overrides", "--trust-remote-code"],
    "chat": ["model", "--compare-base", "--max-new-tokens", "--temperature", *DRAWING, "--trust-remote-code"],
    "generate": [
        "model",
        "prompts",
        "--max-new-tokens",
        "--temperature",
        "--batch-size",
        "--image",
        *DRAWING,
        "--trust-remote-code",
    ],
    "serve": [
        "model",
        "--host",
        "--port",
        "--adapter",
        "--max-prompt-tokens",
        "--max-tokens",
        "--max-seconds",
        "--max-queue",
        "--kv-cache",
        "--api-key",
        "--api-key-file",
        "--allowed-host",
        "--trust-remote-code",
    ],
    "merge": ["run", "out", "--base", "--quantize", "--verify --no-verify", "--min-update-kept", "--trust-remote-code"],
    "fit": ["run", "--to", "--out", "--rank", "--data", "--tokens", "--trust-remote-code"],
    "trace": ["run", "files", "--trust-remote-code"],
    "mix": ["model", "data", "--bits", "--formats", "--tokens"],
    "export": [
        "source",
        "--gguf",
        "--adapter",
        "--out",
        "--adapter-only",
        "--importance --imatrix",
        "--min-update-kept",
        "--trust-remote-code",
    ],
    "env": ["--kernels", "--device"],
    "demo": ["output_dir"],
    "schema": [],
    "import-config": ["file"],
    "queue": [],
}
QUEUE = {"add": ["run"], "list": [], "move": ["job", "place"], "remove": ["job"], "run": ["--gpus"]}


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


def test_commands_and_options_are_frozen():
    group = typer.main.get_command(app)

    def spelled(parameter):
        is_option = parameter.param_type_name == "option"
        return " ".join([*parameter.opts, *parameter.secondary_opts]) if is_option else parameter.name

    def surface(commands):
        return {name: [spelled(parameter) for parameter in command.params] for name, command in commands.items()}

    found = surface(group.commands)
    assert found == SURFACE
    assert surface(group.commands["queue"].commands) == QUEUE
    assert list(found) == list(SURFACE)
    assert [option.opts for option in group.params] == [
        ["--version"],
        ["--debug"],
        ["--install-completion"],
        ["--show-completion"],
    ]


def test_help_lists_every_command_in_full_and_imports_nothing_heavy():
    program = (
        "import sys, time\n"
        "start = time.process_time()\n"
        "from halfbyte.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "spent = time.process_time() - start\n"
        "heavy = {'torch', 'transformers', 'datasets', 'peft', 'pydantic', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert spent < 0.5, spent\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in SURFACE)
    assert "..." not in done.stdout.split("Commands:")[1]


@pytest.mark.parametrize("name", SURFACE)
def test_every_command_has_help(name):
    shown = run(name, "--help")
    assert shown.exit_code == 0
    assert "Usage: " in shown.output
    assert run(name, "-h").output == shown.output


def test_a_known_error_is_one_message_and_exit_1(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("model_name_or_path: m\ndataset: d\nlearning_rte: 1\n")
    assert exit_code("train", str(tmp_path / "run.yaml")) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        f"error: {tmp_path}/run.yaml:3: unknown key 'learning_rte'",
        "  fix: did you mean learning_rate?",
    ]


def test_what_is_saved_names_the_newest_whole_checkpoint(tmp_path):
    config = RunConfig(model_name_or_path="m", dataset="d", output_dir=str(tmp_path))
    assert "checkpoint-" not in _saved_message(config, [])
    for step in (9, 10):
        checkpoint = tmp_path / f"checkpoint-{step}"
        write_json(checkpoint / checkpoints.STATE, {"config": {}, "data": {}, "window": {}})
        write_manifest(checkpoint, step)
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-12.set-aside-77").mkdir()
    saved_message = _saved_message(config, ["train", "run.yaml", "output_dir=b c", "--resume", "--r", "8"])
    assert f"{tmp_path}/checkpoint-10" in saved_message
    assert "`halfbyte train run.yaml 'output_dir=b c' --r 8 --resume`" in saved_message


def test_overrides_and_options_may_mix(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        "halfbyte.cli.train.train_run", lambda config, resume, given, verbose: seen.append((config, resume))
    )
    (tmp_path / "run.yaml").write_text("model_name_or_path: m\ndataset: d\n")
    arguments = ["r=4", "--learning_rate", "1e-4", "--resume", "--max-steps", "-1", "--seed=7"]
    assert exit_code("train", str(tmp_path / "run.yaml"), *arguments) == 0
    config, resume = seen[0]
    assert (config.r, config.learning_rate, config.max_steps, config.seed, resume) == (4, 1e-4, -1, 7, True)


def test_merge_refuses_an_unknown_base(capsys):
    assert exit_code("merge", "out", "--base", "best") == 2
    assert "not one of auto, original, dequantized" in capsys.readouterr().err


def test_version(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out.startswith("halfbyte 0.")


def test_schema_has_every_key_with_its_meaning_and_no_secret():
    schema = json.loads(CliRunner().invoke(app, ["schema"]).stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False
    assert schema["properties"].keys() == RunConfig.model_fields.keys() - {"hub_token"}
    assert all(key["description"] for key in schema["properties"].values())
