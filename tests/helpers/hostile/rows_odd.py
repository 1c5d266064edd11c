"""Cases of the same classes that are not on the list: odd users, odd files, odd machines."""

import gzip
import json
import struct
from pathlib import Path

import torch

from tests.helpers.hostile.cases import Case, Link, cut, edited, gone, later, mode, some, tensors
from tests.helpers.hostile.inputs import DATA, RUN, STOPPED, TEMPLATE
from tests.helpers.hostile.rows_config import both, config
from tests.helpers.hostile.rows_data import PAIR, data
from tests.helpers.hostile.rows_generate import ADAPTER, generate
from tests.helpers.hostile.rows_generate import CONFIG as ADAPTER_CONFIG
from tests.helpers.hostile.rows_models import CONFIG, WEIGHTS
from tests.helpers.hostile.rows_runs import RAN, stopped

RAN_OUT = ("out", "out/*")
TOKENIZER, ITS_CONFIG = "model/tokenizer.json", "model/tokenizer_config.json"
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


def without_token(name: str):
    """A tokenizer whose config and file do not name this special token."""

    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        content.pop(name, None)
        path.write_text(json.dumps(content))

    return change


# Each of these alone in `make test-all`.
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
    *later(
        good("+ a BOM and Windows' line ends in run.yaml", files={"run.yaml": "\ufeff" + RUN.replace("\n", "\r\n")})
    ),
    either("+ run.yaml in UTF-16", files={"run.yaml": RUN.encode("utf-16")}),
    refused("+ tabs in YAML", "run.yaml", files={"run.yaml": RUN + "rank_pattern:\n\tq_proj: 4\n"}),
    *later(either("+ a number that YAML takes for text", "check run.yaml", files=config(learning_rate="2e-4"))),
    either("+ a quoted number", files=config(learning_rate='"0.1"')),
    either("+ a whole float for an int", files=config(r="16.0")),
    refused("+ an empty pattern", "target_modules", files=config(target_modules='""')),
    refused("+ no dataset in the list", "dataset", files=config(dataset="[]")),
    refused("+ a pattern that takes for ever", "target_modules", files=config(target_modules=r'"(([a-z0-9_.])+)+\\$"')),
    refused("+ a pattern that is none", "target_modules", files=config(target_modules='"(q_proj"')),
    either("+ max_length of 20 digits", "check run.yaml max_length=99999999999999999999"),
    either("+ max_length of 1", "check run.yaml max_length=1"),
    either("+ no steps", "check run.yaml max_steps=0"),
    either("+ epochs past counting", "check run.yaml max_steps=-1 num_train_epochs=1e308"),
    refused("+ epochs of nan", "num_train_epochs", "num_train_epochs=.nan"),
    *later(either("+ evaluated at nothing", "check run.yaml eval_split_size=2 eval_steps=1e-300")),
    either("+ warmed up for ever", "check run.yaml warmup_steps=1e18"),
    *later(either("+ steps of a billion batches", "check run.yaml gradient_accumulation_steps=1000000000")),
    *later(
        either(
            "+ evaluated a billion at a time", "check run.yaml eval_split_size=2 per_device_eval_batch_size=1000000000"
        )
    ),
    *later(either("+ tokenized by 5000 processes", "check run.yaml dataset_num_proc=5000")),
    refused("+ all rows held out", "eval_split_size", "eval_split_size=17"),
    refused("+ a folder for a template", "model", "chat_template_path=model"),
    refused("+ an empty template", "empty.jinja", "chat_template_path=empty.jinja", files={"empty.jinja": ""}),
    refused("+ bytes for a template", "b.jinja", "chat_template_path=b.jinja", files={"b.jinja": b"\xff\xfe\x00"}),
    refused("+ a key that is a number", "run.yaml", files={"run.yaml": RUN + "1: 2\n"}),
    refused("+ a key that is a list", "run.yaml", files={"run.yaml": RUN + "? [a]\n: b\n"}),
    refused("+ a key that is nothing", "run.yaml", files={"run.yaml": RUN + "null: 3\n"}),
    refused("+ two documents", "run.yaml", files={"run.yaml": RUN + "---\nr: 3\n"}),
    refused("+ a key of 100,000 letters", "run.yaml", files={"run.yaml": f"{RUN}{'k' * 100_000}: 3\n"}),
    refused("+ a module to save that is not there", "modules_to_save", "modules_to_save=[nothing]"),
    refused("+ output_dir is /dev/null", "output_dir", "output_dir=/dev/null"),
    refused("+ output_dir is the model", "output_dir", "output_dir=model"),
    either("+ output_dir is this folder", "check run.yaml output_dir=."),
    either("+ output_dir is a link to nowhere", files={"out": Link("nowhere/there")}),
    refused("+ resumed from nowhere", "nowhere", "resume_from_checkpoint=nowhere"),
    refused("+ a rank for a module without adapter", "rank_pattern", "'rank_pattern={lm_head: 4}'"),
    refused("+ alpha past floats", "lora_alpha", "lora_alpha=1e999"),
    either(
        "+ an empty prompt to answer", "train run.yaml sample_max_new_tokens=2 'sample_prompts=[\"\"]'", after=RAN_OUT
    ),
    *later(either("+ a NUL to answer", "train run.yaml", files=config(sample_prompts='["\\0"]'), after=RAN_OUT)),
    *later(either("+ too long to answer", f"train run.yaml 'sample_prompts=[\"{'a' * 2000}\"]'", after=RAN_OUT)),
]

DATASETS = [
    refused("+ CSV with semicolons", "d.csv", "dataset=d.csv", files={"d.csv": "prompt;completion\na;b\n"}),
    *later(either("+ CSV with NUL", "check run.yaml dataset=d.csv", files={"d.csv": "prompt,completion\na\0,b\n"})),
    either("+ a CSV field of 200,000", "check run.yaml dataset=d.csv", files={
         "d.csv": f"prompt,completion\na,{'b ' * 100_000}\n"}),
    refused("+ CSV with rows too wide", "d.csv", "dataset=d.csv", files={"d.csv": "prompt,completion\na,b,c,d\n"}),
    refused("+ CSV of headers", "d.csv", "dataset=d.csv", files={"d.csv": "prompt,completion\n"}),
    refused("+ Parquet that is text", "d.parquet", "dataset=d.parquet", files={"d.parquet": PAIR}),
    refused("+ Parquet of nothing", "d.parquet", "dataset=d.parquet", files={"d.parquet": ""}),
    refused("+ Parquet's first letters", "d.parquet", "dataset=d.parquet", files={
         "d.parquet": b"PAR1" + b"\xff" * 40 + b"PAR1"}),
    *later(either("+ JSON named JSONL", files=data(json.dumps([json.loads(PAIR)] * 3, indent=1)))),
    either("+ rows below a key", "check run.yaml dataset=d.json", files={"d.json": json.dumps({"data": [json.loads(
         PAIR)] * 3})}),
    *some(refused(f"+ a row that is {row}", "data.jsonl:2", files=data(f"{PAIR}{row}\n")) for row in ("null", "[]", "3",
         '"a"')),
    *some((refused(f"+ messages are {given}", "data.jsonl:1", files=data(MESSAGES.format(given))) for given in (
        "[]", "null", '"a"', "[1]", '[{"role": "user"}]', '[{"content": "a"}]', '[{"role": "user", "content": 3}]',
        '[{"role": "martian", "content": "a"}]', '[{"role": "user", "content": {"a": [1]}}]',
        '[{"role": ["user"], "content": "a"}]')), 3),
    refused("+ a picture in a turn", "data.jsonl:1, turn 1", files=data(MESSAGES.format(
        '[{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "b"}]'))),
    refused("+ arguments of a call in a list", "data.jsonl:1, turn 2", fix="arguments", files=data(MESSAGES.format(
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"function":'
        ' {"name": "f", "arguments": [1]}}]}]'))),
    refused("+ rows of two layouts", "data.jsonl:2", files=data(MESSAGES.format(
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]') + PAIR)),
    either("+ JSON with a key twice", files=data('{"prompt": "a", "prompt": "b", "completion": "c"}\n')),
    either("+ data in UTF-16", files=data(DATA.encode("utf-16"))),
    refused("+ data in latin-1", "data.jsonl", files=data(PAIR.replace("a", "é").encode("latin-1"))),
    refused("+ gzip named JSONL", "data.jsonl", files=data(gzip.compress(DATA.encode()))),
    refused("+ a folder of other things", "dd", "dataset=dd", files={"dd/a.doc": "x"}),
    *later(either("+ a folder of two kinds", "check run.yaml dataset=dd", files={"dd/a.jsonl": PAIR,
         "dd/b.csv": "prompt,completion\na,b\n"})),
    refused("+ the model for a dataset", "model", "dataset=model"),
    refused("+ run.yaml for a dataset", "run.yaml", "dataset=run.yaml"),
    refused("+ a device for a dataset", "/dev/zero", "dataset=/dev/zero"),
    refused("+ standard input for a dataset", "/dev/stdin", "dataset=/dev/stdin"),
    refused("+ a process's memory for a dataset", "/proc/self/mem", "dataset=/proc/self/mem"),
    *later(*(good(f"+ data in {name!r}", ["check", "run.yaml", f"dataset={name}"], files={name: DATA}) for name in (
        "two words.jsonl", "größe 模型.jsonl", "a%20b#c.jsonl", "x$HOME~ ?.jsonl", "-dash.jsonl", "a=b.jsonl",
        "q'.jsonl"))),
    either("+ data in a name of other bytes", ["check", "run.yaml", "dataset=a\udcff.jsonl"], files={
         "a\udcff.jsonl": DATA}),
    either("+ one line of 10 MB", "check run.yaml dataset=d.txt", files={"d.txt": "ab " * 3_300_000}),
    *later(either("+ text with NUL", "check run.yaml dataset=d.txt", files={"d.txt": "a\0b\n"})),
    refused("+ a column that is not there", ("column_mapping", "nope"), "'column_mapping={prompt: nope}'", files=data(
         PAIR)),
    refused("+ one column for two parts", ("column_mapping", "both prompt and completion"),
         "'column_mapping={prompt: a, completion: a}'", files=data('{"a": "x", "b": "y"}\n')),
    refused("+ answers without a letter", "all answers are empty", files=data('{"prompt": "a", "completion": ""}\n')),
    refused("+ other columns in eval_dataset", "e.jsonl", "eval_dataset=e.jsonl", files={"e.jsonl": '{"x": 1}\n'}),
    refused("+ all of it too long", "max_length", "overlong=drop max_length=2"),
]  # fmt: skip

MODELS = [
    *later(good("+ a model by a link", "check run.yaml model_name_or_path=link", files={"link": Link("model")})),
    *later(good("+ weights by a link, as in a cache", files={"blob": lambda path: (path.parent / WEIGHTS).rename(path),
         WEIGHTS: Link("../blob")})),
    *later(good("+ a model that may only be read", "train run.yaml", files={"model": mode(0o555)}, after=RAN_OUT)),
    *later(*(good(f"+ a model in {name!r}", ["check", "run.yaml", f"model_name_or_path={name}"], files={"model": moved(
         name.strip("/"))}) for name in ("two words", "größe 模型", "a%20b#c", "model/"))),
    *some((either(f"+ a tokenizer without {name}", files={ITS_CONFIG: without_token(name)})
      for name in ("eos_token", "pad_token")), 2),
    refused("+ no chat template for messages", "chat template", files={"model/chat_template.jinja": gone}),
    *later(either("+ a template without generation marks", "train run.yaml", after=RAN_OUT,
         files={"model/chat_template.jinja":
        TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")})),
    *later(either("+ a template without a generation prompt", "train run.yaml", after=RAN_OUT, files={
         "model/chat_template.jinja":
        TEMPLATE.partition("{% if add_generation_prompt %}")[0]})),
    refused("+ a template in the model's folder that is none", "chat_template.jinja", files={
         "model/chat_template.jinja": "{% if"}),
    refused("+ ids past the embeddings", "config.json", files={CONFIG: edited(vocab_size=20),
        WEIGHTS: tensors(lambda held: held.update({name: held[name][:20].clone(
        ) for name in held if "embed" in name or "lm_head" in name}))}),
    *some((refused(f"+ config.json with {key}: {value!r}", "config", files={CONFIG: edited(**{key: value})}) for key,
         value in (
        ("model_type", "foo"), ("model_type", 3), ("vocab_size", 0), ("vocab_size", 2), ("hidden_size", 0), (
        "hidden_size", None),
        ("intermediate_size", -4), ("num_hidden_layers", 10**6), ("num_hidden_layers", "two"), ("num_key_value_heads",
        3),
        ("head_dim", 0), ("rms_norm_eps", "small"), ("hidden_act", "nothing"), ("max_position_embeddings", -1),
        ("rope_parameters", {"rope_type": "spiral"}), ("rope_parameters", [1]), ("dtype", "float99"), (
        "tie_word_embeddings", "maybe"))), 6),
    *[refused(f"+ stored as {value}", "stored as", files={CONFIG: edited(quantization_config=value)})
      for value in ({}, {"quant_method": "magic"})],
    refused("+ stored as AWQ, by config.json alone", "stored in 16 bits or more", fix="quantization_config",
         files={CONFIG: edited(quantization_config={"quant_method": "awq", "bits": 4})}),
    *later(either("+ config.json with architectures of nothing", files={CONFIG: edited(architectures=["Nothing"])})),
    either("+ config.json with a BOM", files={CONFIG: lambda path: path.write_text("\ufeff" + path.read_text())}),
    refused("+ a model for classes", "model", files={CONFIG: '{"model_type": "bert"}'}),
    either("+ generation_config.json of text", "train run.yaml", files={"model/generation_config.json": "what"},
         after=RAN_OUT),
    either("+ generation_config.json with words for numbers", "train run.yaml", files={"model/generation_config.json":
        '{"temperature": "hot", "eos_token_id": "x"}'}, after=RAN_OUT),
    *some((refused(f"+ weights with {name}", "model.safetensors", files={WEIGHTS: content}) for name, content in (
        ("nothing in them", b""), ("a header of 2**63", header({}, 2**63)), ("a header of text", header(b"{what")),
        ("a header of a list", header(b"[]")), ("an unknown dtype", header({"a": {"dtype": "F99", "shape": [1],
        "data_offsets": [0, 4]}})),
        ("a negative shape", header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})),
        ("shapes past memory", header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}})),
        ("offsets past the end", header({"a": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}})),
        ("a header of 60,000 brackets", header(b"[" * 60_000)))), 4),
    refused("+ a folder for weights", "model.safetensors", files={WEIGHTS: lambda path: (gone(path), path.mkdir())}),
    *some((refused(f"+ an index that is {name}", "model.safetensors.index.json", files={
        WEIGHTS: gone, "model/model.safetensors.index.json": content}) for name, content in (
        ("a list", "[]"), ("empty", "{}"), ("text", "what"), ("of numbers", '{"weight_map": {"a": 3}}'),
        ("a list inside", '{"weight_map": ["a"]}'), ("for a shard that is gone",
        '{"weight_map": {"a": "model-1.safetensors"}}'),
        ("for all of this machine", '{"weight_map": {"a": "/etc/passwd"}}'))), 3),
    *some((refused(f"+ a tokenizer with {name}", "tokenizer", files={file: content}) for name, file, content in (
        ("a config of a list", ITS_CONFIG, "[]"), ("a config of text", ITS_CONFIG, "what"), ("an empty file",
        TOKENIZER, ""),
        ("an empty mapping", TOKENIZER, "{}"), ("a model of nothing", TOKENIZER, '{"model": null}'))), 2),
    *later(either("+ a tokenizer of a class that is not there", files={ITS_CONFIG: edited(tokenizer_class="Nothing")})),
    *later(either("+ a template of 3", files={ITS_CONFIG: edited(chat_template=3)})),
    *some((refused(f"+ a GGUF file that {name}", "m.gguf", "model_name_or_path=m.gguf", files={
         "m.gguf": content}) for name, content in (
        ("is text", PAIR), ("is empty", b""), ("is a head alone", gguf()), ("is of version 99", gguf(99)),
        ("counts 2**60 keys", gguf(key_count=2**60)), ("counts 2**60 tensors", gguf(tensor_count=2**60)),
        ("has a name of 2**62 letters", gguf(key_count=1, rest=struct.pack("<Q", 2**62))))), 3),
]  # fmt: skip

RUNS = [
    Case("+ resumed with another rank", f"train run.yaml {STOPPED} --resume r=4", says="r", given=("stopped",)),
    Case("+ resumed with fewer rows", f"train run.yaml {STOPPED} --resume", given=("stopped",), code=(0, 1),
         files=data("".join(DATA.splitlines(True)[:5]))),
    stopped("+ metrics.jsonl cut in a line", {"stopped/metrics.jsonl": cut(0.9)}, code=0, after=RAN, gone=RAN),
    *later(stopped("+ no metrics.jsonl", {"stopped/metrics.jsonl": gone}, code=(0, 1), after=RAN, gone=RAN)),
    *later(stopped("+ metrics.jsonl is a folder", {"stopped/metrics.jsonl": lambda path: (gone(path), path.mkdir())},
         says="metrics.jsonl")),
    *later(stopped("+ a file for a checkpoint", {"stopped/checkpoint-9": "x"}, code=(0, 1), after=RAN, gone=RAN)),
    *later(stopped("+ a checkpoint of no number", {"stopped/checkpoint-abc/x": "x"}, code=0, after=RAN, gone=RAN)),
    stopped("+ a step that is text", {f"stopped/checkpoint-{n}/trainer_state.json": edited(global_step="4") for n in (
         2, 4)}, says="trainer_state.json"),
    stopped("+ a lock that is a folder", {"stopped/.lock": lambda path: (path.unlink(missing_ok=True), path.mkdir())},
         says=".lock"),
    stopped("+ a run that was moved", {"stopped": moved("elsewhere")}, code=0, after=("stopped", "stopped/*"),
         gone=RAN),
    *later(Case("+ resumed after the run was moved", f"train run.yaml {STOPPED} output_dir=elsewhere --resume", code=0,
         given=("stopped",),
         files={"stopped": moved("elsewhere")}, after=("elsewhere/*",), gone=("elsewhere/*",))),
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
    *some((Case(f"+ {command.split()[0]} into a full disk", command, code=(1, 0), given=("run",),
         wishes={"full": [1]}) for
      command in ("check run.yaml", "env", "init model data.jsonl",
         "generate run prompts.jsonl --max-new-tokens 4")), 2),
    Case("+ a file of 20 kB at most to export to", "export model --gguf f16 --out x.gguf",
         fix="ulimit -f", wishes={"limits": {"RLIMIT_FSIZE": 20_000}}),
    Case("+ train tells a full disk", "train run.yaml", code=(0, 1), wishes={"full": [1]}, after=RAN_OUT),
    *later(good("+ standard input is closed", wishes={"closed": [0]})),
    *later(Case("+ standard output is closed", "check run.yaml", code=(0, 1, 120), wishes={"closed": [1]})),
    Case("+ standard error is closed", "check run.yaml seed=x", wishes={"closed": [2]}),
    *later(good("+ 64 open files", "train run.yaml", wishes={"limits": {"RLIMIT_NOFILE": 64}}, after=RAN_OUT)),
    *later(Case("+ memory for nothing", "train run.yaml", code=(0, 1), after=RAN_OUT,
         wishes={"limits": {"RLIMIT_AS": 2**28}})),
    Case("+ files of 20 kB at most", "train run.yaml", says="out", after=RAN_OUT, wishes={"limits": {
         "RLIMIT_FSIZE": 20_000}}),
    *later(either("+ no folder for temporary files", environment={"TMPDIR": "/nowhere"})),
    *some((good(f"+ {name}={value!r}", environment={name: value}) for name, value in (
        ("LC_ALL", "C"), ("LC_ALL", "xx_YY.nothing"), ("LANG", None), ("PYTHONUTF8", "0"), ("TERM", "dumb"), ("TERM",
        None),
        ("NO_COLOR", "1"), ("COLUMNS", "0"), ("COLUMNS", "many"), ("COLUMNS", "1"), ("COLUMNS", "5000"), ("HOME",
        "/nowhere"),
        ("HF_ENDPOINT", "what"), ("HTTPS_PROXY", "what"), ("CUDA_VISIBLE_DEVICES", "what"), ("LINES", "x"))), 0),
    *later(either("+ a file for a cache", "train run.yaml", environment={"HALFBYTE_CACHE": "/etc/hostname"},
         after=RAN_OUT)),
    *later(good("+ warnings are errors", environment={"PYTHONWARNINGS": "error"}, wishes={"fresh": True}, seconds=20)),
    *later(good("+ threads of words", environment={"OMP_NUM_THREADS": "many"}, wishes={"fresh": True}, seconds=20)),
    *some(good(f"+ a terminal of {columns} columns", "train run.yaml", wishes={"columns": columns},
         after=RAN_OUT) for columns in (1, 40, 400)),
]  # fmt: skip

COMMANDS = [
    generate("+ prompts with a BOM and Windows' line ends", '\ufeff{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n', code=0),
    generate("+ prompts of messages", MESSAGES.format('[{"role": "user", "content": "a"}]'), code=(0, 1)),
    generate("+ a prompt that is a list", '{"prompt": ["a"]}\n', says="1"),
    generate("+ rows that are no prompts", '{"question": "a"}\n', says="1"),
    generate("+ prompts that are no JSON", "what\n", says="1"),
    *some((Case(f"+ generate {more}", f"generate run prompts.jsonl {more}", code=(0, 1, 2), given=("run",),
         seconds=8) for more in (
        "--batch-size 1000000000 --max-new-tokens 2", "--max-new-tokens 99999999999999999999",
        "--temperature nan --max-new-tokens 2",
        "--temperature inf --max-new-tokens 2", "--temperature 1e-320 --max-new-tokens 2",
        "--temperature 1e30 --max-new-tokens 2")), 2),
    Case("+ an adapter's rank says otherwise", ("generate run prompts.jsonl", "merge run m"), says="lora_", given=(
         "run",),
         files={ADAPTER_CONFIG: edited(r=8)}),
    Case("+ an adapter with a tensor too many", ("generate run prompts.jsonl", "merge run m"), says="extra", given=(
         "run",),
         files={ADAPTER: tensors(lambda held: held.update(extra=torch.zeros(2)))}),
    Case("+ an adapter whose base went away", ("generate run/adapter prompts.jsonl", "merge run/adapter m"),
         says="gone", given=("run",),
         files={ADAPTER_CONFIG: edited(base_model_name_or_path="./gone"), "run/config.resolved.yaml": gone}),
    *some((Case(f"+ serve {more}", f"serve run --port 0 {more}", code=(1, 2), given=("run",)) for more in (
        "--adapter a", "--adapter =run", "--adapter a=", "--adapter a=run --adapter a=run", "--adapter 'a=nowhere'",
        "--host nowhere.invalid", "--host 0.0.0.0", "--max-seconds nan")), 4),
    *later(Case("+ chat: a line of 1 MB", "chat run --max-new-tokens 2", code=(0, 1), given=("run",), wishes={
         "stdin": b"a " * 500_000 + b"\n"})),
    Case("+ chat: a misspelt command", "chat run --max-new-tokens 2", code=1, says="line 1", given=("run",), wishes={
         "stdin": b"/rest\n/quit\n"}),
    Case("+ chat: nothing at all", "chat run", code=0, given=("run",)),
    Case("+ chat: NUL and escapes", "chat run --max-new-tokens 2", code=(0, 1), given=("run",), wishes={
         "stdin": b"\0\x1b[2J\n"}),
    Case("+ eval: rows without text", "eval run e.jsonl", says="e.jsonl", given=("run",), files={
         "e.jsonl": '{"x": 1}\n'}),
    Case("+ eval: an unknown key", "eval run data.jsonl max_lenght=4", says="max_lenght", fix="max_length", given=(
         "run",)),
    *some((Case(f"+ merge into {where!r}", f"merge run {where}", says=where.strip("/"), given=("run",)) for where in (
        "run", "run/adapter", "data.jsonl", "data.jsonl/m")), 2),
    Case("+ merge a model, not a run", "merge model m", given=()),
    Case("+ merge onto what nobody knows", "merge run m --base foo", says="foo", code=(1, 2), given=("run",)),
    Case("+ export: in capitals", "export model --gguf Q8_0 --out x.gguf", code=0, after=("x.*",), seconds=4),
    Case("+ export: a folder for the file", "export model --gguf f16 --out data", says="data", files={"data": None}),
    Case("+ export: no text for importances", "export model --gguf q4_0 --out x.gguf --importance nope.jsonl",
         says="nope.jsonl"),
    Case("+ export: importances of something else", "export model --gguf q4_0 --out x.gguf --importance i.gguf",
         says="i.gguf",
         files={"i.gguf": gguf()}),
    Case("+ export: the adapter of a model", "export model --gguf f16 --out x.gguf --adapter-only", says="model"),
    *some((Case(f"+ mix {more}", f"mix model data.jsonl {more}", code=(1, 2)) for more in ("--bits nan", "--formats ,",
         "--formats nf4,nf4 --bits 1")), 1),
    Case("+ import-config: a BOM and Windows' line ends", "import-config a.yml", code=0, says="model", files={
        "a.yml": "\ufeffbase_model: model\r\ndatasets:\r\n  - path: data.jsonl\r\n    type: chat_template\r\n"}),
    *some((Case(f"+ import-config: {name}", "import-config a.yml", code=(0, 1), files={
         "a.yml": f"base_model: model\n{text}"}) for name, text in (
        ("datasets of text", "datasets: data.jsonl\n"), ("datasets of numbers", "datasets: [1, 2]\n"),
        ("a sequence of 5000 digits", f"sequence_len: {'9' * 5000}\ndatasets:\n  - path: d\n"), ("nothing else", ""),
        ("datasets without paths", "datasets:\n  - type: alpaca\n"), ("an odd key", "? {a: b}\n: c\n"),
        ("a rate of words", "learning_rate: fast\ndatasets:\n  - path: d\n    type: alpaca\n"))), 3),
    *later(Case("+ init for names with signs", ["init", "model: #x", "it's \"data\".jsonl"], code=0,
         says="model_name_or_path", seconds=4,
         files={"model": moved("model: #x"), "it's \"data\".jsonl": DATA})),
    Case("+ env: a device that nobody knows", "env --device what", says="what", code=(1, 2)),
    Case("+ demo over something else", "demo model", says="model"),
]  # fmt: skip

README = [  # what the README shows, with nothing wrong
    *later(good("+ README: merge", "merge run", given=("run",), after=("run/*",), seconds=4)),
    *later(good("+ README: merge in FP8", "merge run m --quantize fp8-block", given=("run",),
         after=("m", "m/*", "run/*"), seconds=4)),
    good("+ README: chat", "chat run --compare-base --max-new-tokens 4", given=("run",), wishes={
         "stdin": b"hello\n/quit\n"}),
    good("+ README: eval", "eval run data.jsonl", given=("run",), says="perplexity"),
    good("+ README: export", "export run --gguf q4_k_m", given=("run",), after=("run/*.gguf", "run/*"), seconds=4),
    good("+ README: export the adapter", "export run --gguf f16 --adapter-only", given=("run",), after=("run/*",)),
    good("+ README: mix", "mix model data.jsonl --bits 4.5 --tokens 128", says="bits per weight", seconds=6),
    good("+ README: preview", "preview run.yaml", says="trained"),
    good("+ README: env", "env --kernels"),
    good("+ README: a model and data, no file", "train model data.jsonl max_steps=2 max_length=64", after=(*RAN_OUT,
         "out/run.yaml")),
    *later(good("+ README: check a model and data", "check model data.jsonl max_length=64", says="ready")),
]  # fmt: skip

ROWS = README + CONFIGS + DATASETS + MODELS + RUNS + MACHINES + COMMANDS
