"""Cases of users, written from the README and docs/ alone before any was tried: those that failed, and earlier ones."""

import shutil
from pathlib import Path

from tests.helpers.hostile.cases import Case, Link, edited, gone
from tests.helpers.hostile.inputs import DATA, RUN
from tests.helpers.hostile.rows_config import both
from tests.helpers.hostile.rows_data import data

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
    Case("+ modules with commas between", both("target_modules=q_proj,v_proj"), says="target_modules",
         fix="target_modules: [q_proj, v_proj]"),
    Case("+ all-linear among others", both("'target_modules=[all-linear, lm_head]'"), says="all-linear",
         fix="without other names"),
    Case("+ a variable that no shell filled in", both("'output_dir=$HOME/out'"), says=("output_dir", "HOME"),
         fix="/out"),
    Case("+ a variable in braces that is not set", both("'dataset=${NOWHERE}/data.jsonl'"),
         says=("dataset", "NOWHERE")),
    Case("+ a folder below ~", "check run.yaml output_dir=~/out", code=0, says="out", never=("output    ~",)),
    Case("+ a model below ~ that is not there", both("model_name_or_path=~/nothing"), says="nothing", never=("~",)),
    Case("+ a model's page", both(f"model_name_or_path={HUB}/Qwen/Qwen3-8B"), says=HUB, fix="Qwen/Qwen3-8B"),
    Case("+ a GGUF file's address", both(f"model_name_or_path={HUB}/a/b/resolve/main/q.gguf"), says=HUB),
    Case("+ a dataset's page", both(f"dataset={HUB}/datasets/tatsu-lab/alpaca"), says=HUB,
         fix="tatsu-lab/alpaca"),
    Case("+ a warmup longer than the run", "check run.yaml warmup_steps=1000", code=0,
         says=("warmup_steps", "never reached", "1000", "2.0e-07 of 2.0e-04")),
    Case("+ a run that is warmup alone", "check run.yaml max_steps=-1 num_train_epochs=0.0001", code=0,
         says="warmup_steps"),
    Case("+ key and value apart", "train run.yaml r 8", code=2, says="KEY=VALUE", fix="write r=8"),
    Case("+ blanks around the sign", ["check", "run.yaml", "r = 8"], code=2, fix="write r=8"),
    Case("+ a run in place of its file", "train run", code=2, says="run's folder", fix="run/run.yaml --resume",
         given=("run",)),
    Case("+ a folder that holds no run", "train run.yaml output_dir=.", says=("output_dir", "model/"),
         never=("already holds a run",)),
    Case("+ heads cut in three, before processes start", both("'parallel={tensor: 3}'"), says=("tensor: 3", "4")),
    Case("+ a tracker of several processes", "train run.yaml 'parallel={data: 2}' report_to=nonsense",
         says="report_to: nonsense", never=("process 1",)),
    Case("+ half an environment of torchrun", "train run.yaml", says="RANK, MASTER_ADDR, MASTER_PORT",
         environment={"WORLD_SIZE": "2"}),
]  # fmt: skip

FILES = [
    Case("+ semicolons between fields", "check run.yaml dataset=d.csv", says=("d.csv:1", "semicolons"), fix="commas",
         files={"d.csv": "prompt;completion\na;b\nc;d\n"}),
    Case("+ commas in a .tsv", "check run.yaml dataset=d.tsv", says=("d.tsv:1", "commas"), fix=".csv",
         files={"d.tsv": "prompt,completion\na,b\nc,d\n"}),
    Case("+ weights that Git has not fetched", ("check run.yaml", "merge run"), says="model.safetensors",
         fix="git lfs pull", files={"model/model.safetensors": POINTER}, given=("run",)),
    Case("+ a tokenizer that Git has not fetched", ("check run.yaml", "export model --gguf f16"),
         says="tokenizer.json", fix="git lfs pull", files={"model/tokenizer.json": POINTER}),
    Case("+ data that Git has not fetched", "check run.yaml", says="data.jsonl", fix="git lfs pull",
         files=data(POINTER)),
    Case("+ a Parquet file that Git has not fetched", "check run.yaml dataset=d.parquet", says="d.parquet",
         fix="git lfs pull", files={"d.parquet": POINTER}),
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
    Case("+ more rows a step than there are", "check run.yaml gradient_accumulation_steps=1000000", code=0,
         says=("gradient_accumulation_steps", "1,000,000", "17", "")),
    Case("+ a name whose letters are composed otherwise", ["check", "run.yaml", "dataset=caf\u00e9.jsonl"],
         says="Unicode normalization", fix="rename", files={"cafe\u0301.jsonl": DATA}),
    Case("+ a blank that does not break", both(), says=("run.yaml:6", "U+00A0"),
         files={"run.yaml": RUN.replace("r: 2", "r:\u00a02")}),
    Case("+ an indent of another blank", both(), says=("run.yaml:10", "U+3000"),
         files={"run.yaml": RUN + "target_modules:\n\u3000- q_proj\n"}),
    Case("+ an indent by a tab", both(), says=("run.yaml:10", "U+0009"),
         files={"run.yaml": RUN + "target_modules:\n\t- q_proj\n"}),
    Case("+ the hub's folder of a model", both(f"model_name_or_path={HUB_FOLDER}"), says="config.json",
         fix=f"{HUB_FOLDER}/snapshots/0123", files={f"{HUB_FOLDER}/snapshots/0123": snapshot_of}),
    Case("+ a run of a newer version", ("generate run prompts.jsonl", "merge run", "export run --gguf f16"),
         says=("run/config.resolved.yaml:", "key_of_tomorrow"), given=("run",),
         files={"run/config.resolved.yaml": lambda path: path.write_text(path.read_text() + "key_of_tomorrow: 3\n")}),
    Case("+ a run into its data's folder", both("dataset=d output_dir=d/out"), says=("output_dir: d/out", "folder d"),
         fix="outside", files={"d/a.jsonl": DATA}),
    Case("+ a run into a data folder by another name", "check run.yaml dataset=d output_dir=e/out", says="output_dir",
         fix="outside", files={"d/a.jsonl": DATA, "e": Link("d")}),
    Case("+ prompts from a dash", "generate run -", says="standard input", given=("run",)),
]  # fmt: skip

THIRD = [
    Case("+ a type of GGUF to merge into", "merge run m --quantize Q4_K_M", says="Q4_K_M",
         fix="export RUN --gguf q4_k_m", given=("run",)),
    Case("+ a format that is only read", "merge run m --quantize gptq", fix="nf4",
         never=("unpack",), given=("run",)),
    Case("+ a format without its options", both("quantization=blockwise4"), says="blockwise4",
         never=("unpack",)),
    Case("+ an adapter by its file", both("adapter_path=run/adapter/adapter_model.safetensors"),
         fix="run/adapter", given=("run",)),
    Case("+ an adapter for a model", both("model_name_or_path=run/adapter"),
         fix="adapter_path=run/adapter", given=("run",)),
    Case("+ a run for a model", both("model_name_or_path=run"), fix="adapter_path=run/adapter",
         given=("run",)),
    Case("+ a number in quotes of another tool", "import-config a.yml", code=0, says="sequence_len: '4096'",
         never=(" fix: ",), files={"a.yml": "base_model: m\nadapter: lora\nsequence_len: '4096'\n"}),
    Case("+ two adapters of one name", "serve run --adapter poet=run --adapter poet=run", code=2, says="poet",
         given=("run",)),
]  # fmt: skip

FOURTH = [
    Case("+ all_linear", both("target_modules=all_linear"), says="all_linear", fix="all-linear"),
    Case("+ two files in one text", ["check", "run.yaml", "dataset=data.jsonl, more.jsonl"],
         says="data.jsonl, more.jsonl", fix="[data.jsonl, more.jsonl]"),
    Case("+ a type of GGUF to train on", both("quantization=Q4_K_M"), says="Q4_K_M", fix="--gguf q4_k_m"),
    Case("+ two formats in one text", ["check", "run.yaml", "quantization=nf4, kbit5"], says="quantization",
         fix="a mapping"),
    Case("+ a split of a file", "check run.yaml dataset_split=train[:10%]", code=0,
         says="dataset_split: train[:10%]"),
    Case("+ a model newer than transformers", ("check run.yaml", "train run.yaml", "generate model prompts.jsonl"),
         says=("model/config.json", "model_type", "llama9"), fix="update transformers",
         files={"model/config.json": edited(model_type="llama9")}),
]  # fmt: skip

ROWS = [*KEYS, *FILES, *SECOND, *THIRD, *FOURTH]
