"""Cases of users, written from the README and docs/ alone before any was tried: those that failed, and earlier ones."""

import shutil
from pathlib import Path

from tests.helpers.hostile.cases import Case, edited, gone
from tests.helpers.hostile.inputs import DATA, RUN
from tests.helpers.hostile.rows_config import both

HUB = "https://huggingface.co"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 132\n"
EVERY_USE = ("generate run prompts.jsonl", "chat run", "serve run --port 0", "eval run data.jsonl", "merge run",
             "export run --gguf f16")  # fmt: skip


def lost_config(path: Path) -> None:
    """A run's adapter as it was copied from there alone."""
    (path / "adapter").rename(path.parent / "alone")


KEYS = [
    Case("+ modules with spaces between", ["check", "run.yaml", "target_modules=q_proj v_proj"],
         says="target_modules", fix="target_modules: [q_proj, v_proj]"),
    Case("+ all-linear among others", both("'target_modules=[all-linear, lm_head]'"), says="all-linear",
         fix="without other names"),
    Case("+ a variable that no shell filled in", both("'output_dir=$HOME/out'"), says=("output_dir", "HOME"),
         fix="/out"),
    Case("+ a folder below ~", "check run.yaml output_dir=~/out", code=0, says="out", never=("output    ~",)),
    Case("+ a dataset's page", both(f"dataset={HUB}/datasets/tatsu-lab/alpaca"), says=HUB,
         fix="tatsu-lab/alpaca"),
    Case("+ a run in place of its file", "train run", code=2, says="run's folder", fix="run/run.yaml --resume",
         given=("run",)),
    Case("+ half an environment of torchrun", "train run.yaml", says="RANK, MASTER_ADDR, MASTER_PORT",
         environment={"WORLD_SIZE": "2"}),
    Case("+ a percentage as a share of steps", "check run.yaml warmup_ratio=10", says="warmup_ratio", fix="below 1"),
    Case("+ files by a pattern", "check run.yaml dataset=*.jsonl"),
    Case("+ a colon without a space", ["check", "run.yaml", "parallel={tensor:3}"], fix="{tensor: 3}"),
    Case("+ a checkpoint behind --resume", "train run.yaml --resume stopped/checkpoint-4", code=2, says="checkpoint-4",
         fix="resume_from_checkpoint=stopped/checkpoint-4"),
    Case("+ a launcher's rank", "check run.yaml", says=("RANK", "'2'"), environment={"WORLD_SIZE": "2", "RANK": "2",
         "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}),
]  # fmt: skip

FILES = [
    Case("+ prompts in a table", "generate run prompts.csv", says="prompts.csv", fix="one prompt", given=("run",),
         files={"prompts.csv": "prompt\nhello\n"}),
    Case("+ an adapter file without a byte", "merge run x", fix="copy", given=("run",),
         files={"run/adapter/adapter_model.safetensors": b""}),
    Case("+ semicolons between fields", "check run.yaml dataset=d.csv", says=("d.csv:1", "semicolons"), fix="commas",
         files={"d.csv": "prompt;completion\na;b\nc;d\n"}),
    Case("+ weights that Git has not fetched", ("check run.yaml", "merge run"), says="model.safetensors",
         fix="git lfs pull", files={"model/model.safetensors": POINTER}, given=("run",)),
    Case("+ a run whose base is gone", EVERY_USE, says=("run/config.resolved.yaml", "model"), fix="model_name_or_path",
         given=("run",), files={"model": gone}),
    Case("+ an adapter alone whose base is gone", ("generate alone prompts.jsonl", "merge alone"),
         says="alone/adapter_config.json", fix="base_model_name_or_path", given=("run",),
         files={"run": lost_config, "model": gone}),
]  # fmt: skip

HUB_FOLDER = "models--a--b"


def snapshot_of(path: Path) -> None:
    """The hub's cache as it keeps a model."""
    shutil.copytree(path.parents[2] / "model", path)


SECOND = [
    Case("+ a name whose letters are composed otherwise", ["check", "run.yaml", "dataset=caf\u00e9.jsonl"],
         says="Unicode normalization", fix="rename", files={"cafe\u0301.jsonl": DATA}),
    Case("+ a blank that does not break", both(), says=("run.yaml:6", "U+00A0"),
         files={"run.yaml": RUN.replace("r: 2", "r:\u00a02")}),
    Case("+ the hub's folder of a model", both(f"model_name_or_path={HUB_FOLDER}"), says="config.json",
         fix=f"{HUB_FOLDER}/snapshots/0123", files={f"{HUB_FOLDER}/snapshots/0123": snapshot_of}),
    Case("+ a run of a newer version", ("generate run prompts.jsonl", "merge run", "export run --gguf f16"),
         says=("run/config.resolved.yaml:", "key_of_tomorrow"), given=("run",),
         files={"run/config.resolved.yaml": lambda path: path.write_text(path.read_text() + "key_of_tomorrow: 3\n")}),
    Case("+ a run into its data's folder", both("dataset=d output_dir=d/out"), says=("output_dir: d/out", "folder d"),
         fix="outside", files={"d/a.jsonl": DATA}),
    Case("+ prompts from a dash", "generate run -", says="standard input", given=("run",)),
]  # fmt: skip

THIRD = [
    Case("+ a type of GGUF to merge into", "merge run m --quantize Q4_K_M", says="Q4_K_M",
         fix="export RUN --gguf q4_k_m", given=("run",)),
    Case("+ a format without its options", both("quantization=blockwise4"), says="blockwise4",
         never=("unpack",)),
    Case("+ an adapter by its file", both("adapter_path=run/adapter/adapter_model.safetensors"),
         fix="run/adapter", given=("run",)),
    Case("+ a run for a model", both("model_name_or_path=run"), fix="adapter_path=run/adapter",
         given=("run",)),
]  # fmt: skip

FOURTH = [
    Case("+ two files in one text", ["check", "run.yaml", "dataset=data.jsonl, more.jsonl"],
         says="data.jsonl, more.jsonl", fix="[data.jsonl, more.jsonl]"),
    Case("+ a model newer than transformers", ("check run.yaml", "train run.yaml", "generate model prompts.jsonl"),
         says=("model/config.json", "model_type", "llama9"), fix="update transformers",
         files={"model/config.json": edited(model_type="llama9")}),
]  # fmt: skip

ROWS = [*KEYS, *FILES, *SECOND, *THIRD, *FOURTH]
