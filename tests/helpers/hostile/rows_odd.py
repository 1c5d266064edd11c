"""Cases of the same classes that are not on the list: odd users, odd files, odd machines."""

import gzip
import json
import struct
from pathlib import Path

from tests.helpers.hostile.cases import Case, Link, cut, edited, gone, tensors
from tests.helpers.hostile.inputs import DATA, RUN, STOPPED
from tests.helpers.hostile.rows_config import both, config
from tests.helpers.hostile.rows_data import PAIR, data
from tests.helpers.hostile.rows_generate import CONFIG as ADAPTER_CONFIG
from tests.helpers.hostile.rows_models import CONFIG, WEIGHTS
from tests.helpers.hostile.rows_runs import RAN, stopped

RAN_OUT = ("out", "out/*")
ITS_CONFIG = "model/tokenizer_config.json"
MESSAGES = '{{"messages": {}}}\n'


def good(name: str, run: str = "check run.yaml", **more) -> Case:
    return Case(name, run, code=0, **more)


def refused(name: str, says, more: str = "", **wishes) -> Case:
    """By `check` and by `train` alike."""
    return Case(name, both(more), says=says, **wishes)


def either(name: str, run: str = "check run.yaml", **more) -> Case:
    """It works or is refused, whichever halfbyte thinks right; but without a word of anybody else, and in time."""
    return Case(name, run, code=(0, 1, 2), **more)


def moved(new: str):
    def move(path: Path) -> None:
        path.rename(path.parent / new)

    return move


def header(content: dict | bytes, length: int | None = None, body: bytes = b"\0" * 64):
    """A safetensors file with this header."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def gguf(version: int = 3, tensor_count: int = 0, key_count: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count) + rest


TOGETHER = good(
    "+ much that is odd and no mistake",
    ["check", "run.yaml", "model_name_or_path=größe 模型", "dataset=two words.jsonl"],
    files={
        "run.yaml": "\ufeff" + config(learning_rate="2e-4")["run.yaml"].replace("\n", "\r\n"),
        "two words.jsonl": json.dumps([json.loads(line) for line in DATA.splitlines()], indent=1),
        "größe 模型": Link("model"),
        "blob": lambda path: (path.parent / WEIGHTS).rename(path),
        WEIGHTS: Link("../blob"),
    },
    environment={"LC_ALL": "xx_YY.nothing", "LANG": None, "PYTHONUTF8": "0", "TERM": "dumb", "COLUMNS": "many"},
    wishes={"closed": [0]},
)
CONFIGS = [
    TOGETHER,
    refused("+ a pattern that takes for ever", "target_modules", files=config(target_modules=r'"(([a-z0-9_.])+)+\\$"')),
    refused("+ all rows held out", "eval_split_size", "eval_split_size=17"),
    refused("+ a key that is a list", "run.yaml", files={"run.yaml": RUN + "? [a]\n: b\n"}),
    refused("+ two documents", "run.yaml", files={"run.yaml": RUN + "---\nr: 3\n"}),
    Case("+ output_dir is the model", "train run.yaml output_dir=model", says="output_dir"),
    refused("+ resumed from nowhere", "nowhere", "resume_from_checkpoint=nowhere"),
]

DATASETS = [
    refused("+ CSV with rows too wide", "d.csv", "dataset=d.csv", files={"d.csv": "prompt,completion\na,b,c,d\n"}),
    refused("+ Parquet's first letters", "d.parquet", "dataset=d.parquet", files={
         "d.parquet": b"PAR1" + b"\xff" * 40 + b"PAR1"}),
    refused("+ a row that is null", "data.jsonl:2", files=data(f"{PAIR}null\n")),
    refused("+ a role that no template knows", "data.jsonl:1", files=data(MESSAGES.format(
        '[{"role": "martian", "content": "a"}]'))),
    refused("+ arguments of a call in a list", "data.jsonl:1, turn 2", fix="arguments", files=data(MESSAGES.format(
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"function":'
        ' {"name": "f", "arguments": [1]}}]}]'))),
    refused("+ rows of two layouts", "data.jsonl:2", files=data(MESSAGES.format(
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]') + PAIR)),
    refused("+ gzip named JSONL", "data.jsonl", files=data(gzip.compress(DATA.encode()))),
    refused("+ a device for a dataset", "/dev/zero", "dataset=/dev/zero"),
    either("+ data in a name of other bytes", ["check", "run.yaml", "dataset=a\udcff.jsonl"], files={
         "a\udcff.jsonl": DATA}),
    refused("+ one column for two parts", ("column_mapping", "both prompt and completion"),
         "'column_mapping={prompt: a, completion: a}'", files=data('{"a": "x", "b": "y"}\n')),
    refused("+ answers without a letter", "all answers are empty", files=data('{"prompt": "a", "completion": ""}\n')),
    refused("+ other columns in eval_dataset", "e.jsonl", "eval_dataset=e.jsonl", files={"e.jsonl": '{"x": 1}\n'}),
    refused("+ all of it too long", "max_length", "overlong=drop max_length=2"),
]  # fmt: skip

MODELS = [
    either("+ a tokenizer without pad_token", files={ITS_CONFIG: edited("pad_token")}),
    refused("+ no chat template for messages", "chat template", files={"model/chat_template.jinja": gone}),
    refused("+ ids past the embeddings", "config.json", files={CONFIG: edited(vocab_size=20),
        WEIGHTS: tensors(lambda held: held.update({name: held[name][:20].clone(
        ) for name in held if "embed" in name or "lm_head" in name}))}),
    *(refused(f"+ config.json with {key}: {value!r}", "config", files={CONFIG: edited(**{key: value})})
      for key, value in (
        ("model_type", 3), ("num_hidden_layers", 10**6), ("rope_parameters", {"rope_type": "spiral"}))),
    refused("+ stored as AWQ, by config.json alone", "stored in 16 bits or more", fix="quantization_config",
         files={CONFIG: edited(quantization_config={"quant_method": "awq", "bits": 4})}),
    either("+ generation_config.json with words for numbers", "train run.yaml", files={"model/generation_config.json":
        '{"temperature": "hot", "eos_token_id": "x"}'}, after=RAN_OUT),
    *(refused(f"+ weights with {name}", "model.safetensors", files={WEIGHTS: content}) for name, content in (
        ("a header of 2**63", header({}, 2**63)),
        ("offsets past the end", header({"a": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}})))),
    *(refused(f"+ an index that is {name}", "model.safetensors.index.json", files={
        WEIGHTS: gone, "model/model.safetensors.index.json": content}) for name, content in (
        ("of numbers", '{"weight_map": {"a": 3}}'),
        ("for all of this machine", '{"weight_map": {"a": "/etc/passwd"}}'))),
    refused("+ a tokenizer with a config of a list", "tokenizer", files={ITS_CONFIG: "[]"}),
    refused("+ a GGUF file that counts 2**60 keys", "m.gguf", "model_name_or_path=m.gguf", files={
        "m.gguf": gguf(key_count=2**60)}),
]  # fmt: skip

RUNS = [
    Case("+ resumed with another rank", f"train run.yaml {STOPPED} --resume r=4", says="r", given=("stopped",)),
    stopped("+ metrics.jsonl cut in a line", {"stopped/metrics.jsonl": cut(0.9)}, code=0, after=RAN, gone=RAN),
    stopped("+ a lock that is a folder", {"stopped/.lock": lambda path: (path.unlink(missing_ok=True), path.mkdir())},
         says=".lock"),
    stopped("+ a run that was moved", {"stopped": moved("elsewhere")}, code=0, after=("stopped", "stopped/*"),
         gone=RAN),
    Case("+ a damaged config.resolved.yaml", ("generate run prompts.jsonl", "merge run m",
         "export run --gguf f16 --out x.gguf"),
         says="config.resolved.yaml", given=("run",), files={"run/config.resolved.yaml": cut()}),
    Case("+ config.resolved.yaml of a model that went away", ("generate run prompts.jsonl", "merge run m",
         "eval run data.jsonl"),
         says="model", given=("run",), files={"model": gone}),
]  # fmt: skip

MACHINES = [
    Case("+ the folder it is in went away", ("check run.yaml", "env", "train model data.jsonl"), code=(1, 0), wishes={
         "nowhere": True}),
    Case("+ env into a full disk", "env", code=(1, 0), wishes={"full": [1]}),
    Case("+ a file of 20 kB at most to export to", "export model --gguf f16 --out x.gguf",
         fix="ulimit -f", wishes={"limits": {"RLIMIT_FSIZE": 20_000}}),
    Case("+ train tells a full disk", "train run.yaml", code=(0, 1), wishes={"full": [1]}, after=RAN_OUT),
    Case("+ standard error is closed", "check run.yaml seed=x", wishes={"closed": [2]}),
    Case("+ files of 20 kB at most", "train run.yaml", says="out", wishes={"limits": {
         "RLIMIT_FSIZE": 20_000}}),
    good("+ a terminal of 1 column", "train run.yaml", wishes={"columns": 1}, after=RAN_OUT),
]  # fmt: skip

COMMANDS = [
    Case("+ a temperature of NaN", "generate run prompts.jsonl --temperature nan --max-new-tokens 2", code=(0, 1, 2),
         given=("run",), seconds=8),
    Case("+ an adapter's rank says otherwise", ("generate run prompts.jsonl", "merge run m"), says="lora_", given=(
         "run",),
         files={ADAPTER_CONFIG: edited(r=8)}),
    Case("+ an adapter whose base went away", ("generate run/adapter prompts.jsonl", "merge run/adapter m"),
         says="gone", given=("run",),
         files={ADAPTER_CONFIG: edited(base_model_name_or_path="./gone"), "run/config.resolved.yaml": gone}),
    *(Case(f"+ serve {more}", f"serve run --port 0 {more}", code=(1, 2), given=("run",)) for more in (
        "--adapter =run", "--adapter a=run --adapter a=run", "--host nowhere.invalid")),
    Case("+ chat: a misspelt command", "chat run --max-new-tokens 2", code=1, says="line 1", given=("run",), wishes={
         "stdin": b"/rest\n/quit\n"}),
    Case("+ eval: an unknown key", "eval run data.jsonl max_lenght=4", says="max_lenght", fix="max_length", given=(
         "run",)),
    Case("+ merge into its adapter", "merge run run/adapter", says="run/adapter", given=("run",)),
    Case("+ export: importances of something else", "export model --gguf q4_0 --out x.gguf --importance i.gguf",
         says="i.gguf",
         files={"i.gguf": gguf()}),
    Case("+ bits that are none", "mix model data.jsonl --bits nan", code=(1, 2)),
    Case("+ demo over something else", "demo model", says="model"),
]  # fmt: skip

ROWS = CONFIGS + DATASETS + MODELS + RUNS + MACHINES + COMMANDS
