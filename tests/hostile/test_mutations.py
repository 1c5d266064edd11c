"""What `check` calls ready reaches its first step, and what it refuses `train` refuses in the same words, leaving no
file: over a good configuration of which one to three keys were changed at random."""

import json
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from halfbyte.config import RunConfig
from halfbyte.config.yaml import dump_value
from halfbyte.formats import FORMATS
from halfbyte.optim import OPTIMIZERS, SCHEDULES
from tests.helpers.hostile.cases import COLOURS, Case, place, snapshot
from tests.helpers.marks import slow_except

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")

BASE = {
    "model_name_or_path": "model",
    "dataset": "data.jsonl",
    "output_dir": "out",
    "device": "cpu",
    "max_length": 128,
    "max_steps": 1,
    "warmup_steps": 0,
    "r": 2,
    "sample_prompts": 1,
    "sample_max_new_tokens": 2,
}
PATIENCE = 40.0  # seconds, in which the first step must come
EDGES: dict[Any, list] = {
    bool: [True, False],
    int: [-1, 0, 1, 2, 3, 17, 64, 1000, 10**6, 2**31 - 1, 2**32, 2**63, 10**30],
    float: [-1.0, 0.0, 1e-30, 1e-9, 0.01, 0.5, 0.999, 1.0, 1.5, 3.0, 100.0, 1e6, 1e30, float("inf"), float("nan")],
    str: ["", " ", "none", "auto", "0", "x" * 300, "a/b", "data.jsonl", "run.yaml", "model", "nothing", "ü[b]\n"],
    NoneType: [None],
}
LAYERS = ["q_proj", "down_proj", "model.layers.0.mlp.up_proj", "lm_head", "embed_tokens", "norm", "nothing", "mlp"]
PATTERNS = [*LAYERS, "*", "*.mlp.*", "(", ".*proj", "layers.1"]
SPECS = [*FORMATS, "nf4", "fp4", "16bit", "keep", "blockwise4:nf4:128:plain", "nothing", "int4:7"]
# Values that a key's type does not say.
KNOWN: dict[str, list] = {
    "attn_implementation": ["eager", "sdpa", "flex_attention", "flash_attention_2", "paged|eager", "foo", "a/b"],
    "device": ["cpu", "cuda", "cuda:7", "xpu", "tpu", "cpu:0", "cuda:99999999999999999999"],
    "quantization": [*SPECS, "mixture.yaml", "run.yaml", "nofile.yaml", {"*": "nf4", "*.mlp.*": "int8"}, {"x": "nf4"}],
    "qat_scheme": SPECS,
    "target_modules": ["all-linear", *PATTERNS, *([name] for name in LAYERS), LAYERS[:2], []],
    "modules_to_save": [None, [], *([name] for name in LAYERS)],
    "rank_pattern": [{}, *({name: rank} for name in PATTERNS for rank in (1, 4, 10**9))],
    "alpha_pattern": [{}, *({name: alpha} for name in PATTERNS for alpha in (0.5, 1e9))],
    "adapter_path": ["run/adapter", "run", "nothing", "run/checkpoint-2"],
    "dataset": ["data.jsonl", ["data.jsonl", "data.jsonl"], "nothing.jsonl", "model", "empty.jsonl", "one.jsonl", []],
    "eval_dataset": ["data.jsonl", "one.jsonl", "empty.jsonl", "nothing.jsonl", ["data.jsonl"], None],
    "column_mapping": [{}, {"prompt": "messages"}, {"nothing": "messages"}, {"messages": "nothing"}],
    "chat_template_path": [None, "plain.jinja", "broken.jinja", "empty.jinja", "nothing.jinja", "model"],
    "output_dir": ["out", "new/deep/er", "ü ö", "run", "run.yaml/x", "model", "x" * 300, "", ".", "-o", "out/../o2"],
    "lr_scheduler_type": list(SCHEDULES),
    "optim": list(OPTIMIZERS),
    "report_to": ["none", "all", [], ["none"], ["wandb"], ["nonsense"], "tensorboard", ["all", "none"]],
    "resume_from_checkpoint": [None, True, False, "run/checkpoint-2", "nothing", "run"],
    "sample_prompts": [0, 3, 10**6, [], [""], ["one row"], ["one " * 1000], ["ü\ud800"]],
    "method": ["sft", "dpo", ""],
}
FILES = {
    "mixture.yaml": "'*.mlp.*': int8\n'*': nf4\n",
    "empty.jsonl": "",
    "one.jsonl": json.dumps({"prompt": "nine", "completion": " rows"}) + "\n",
    "plain.jinja": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "broken.jinja": "{% for message in %}",
    "empty.jinja": "",
}


def edges(key: str) -> list:
    """Values to try for a key: its own, and those at the edges of its types."""
    return KNOWN.get(key, []) * 2 + list(_of_type(RunConfig.model_fields[key].annotation))


def _of_type(annotation: Any):
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _of_type(arguments[0])
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _of_type(argument)
    elif origin is Literal:
        yield from arguments
    elif origin is list:
        yield from ([], ["a"], ["", "a"])
    elif origin is dict:
        yield from ({}, {"a": 1}, {"a": "b"})
    else:
        yield from EDGES[annotation]


def mutation(number: int) -> dict[str, Any]:
    """A configuration, always the same for a number."""
    dice = random.Random(number)
    keys = dice.sample(sorted(RunConfig.model_fields), dice.choice((1, 1, 2, 3)))
    return {key: dice.choice(edges(key)) for key in keys}


def errors(stream: bytes) -> str:
    """The error and its fix, without sizes of memory, which differ from one moment to the next."""
    text = COLOURS.sub("", stream.decode("utf-8", "backslashreplace"))
    found = re.search(r"^error: .*", text, re.MULTILINE | re.DOTALL)
    return re.sub(r"[\d.]+ [KMG]iB", "N", found[0]) if found else ""


def first_step(folder: Path, before: dict[str, str]) -> bool:
    """Whether a run below `folder` has recorded a step since it was as `before`."""
    after = snapshot(folder)
    changed = (folder / name for name in after if name.endswith("metrics.jsonl") and after[name] != before.get(name))
    return any('"kind": "train"' in path.read_text() for path in changed)


def disagreement(number: int, stage, base: Path, environment: dict[str, str]) -> str:
    """How `check` and `train` of a mutation differ; empty where they agree."""
    changed = mutation(number)
    text = "".join(dump_value(key, value) + "\n" for key, value in (BASE | changed).items())
    room = Path(tempfile.mkdtemp(prefix="mutation-"))
    folder, scratch = room / "case", room / "scratch"
    for path in (folder, scratch):
        path.mkdir()
    try:
        files = FILES | {"run.yaml": text.encode("utf-8", "surrogatepass")}
        place(Case("", "", files=files, given=("run",)), folder, base)
        for name in folder.glob("run/metrics.jsonl"):
            name.write_text(name.read_text().replace('"step": 1,', '"step": 0,'))
        before = snapshot(folder)
        checked = stage.run(["check", "run.yaml"], folder, scratch, environment=environment, limit=100)
        wrong = []
        if snapshot(folder) != before:
            wrong.append("check wrote files")
        asked = {"signal": "SIGTERM", "when": PATIENCE}  # to leave: a mutation may have two billion steps
        trained = stage.run(["train", "run.yaml"], folder, scratch, environment=environment, limit=100, **asked)
        reached, after = first_step(folder, before), snapshot(folder)
    finally:
        shutil.rmtree(room)
    said, later = errors(checked.err), errors(trained.err)
    if checked.code == 0:
        wrong += [] if reached else [f"check is ready, and train ends with {trained.code} before step 1: {later}"]
    else:
        wrong += [] if said else ["check fails without an error"]
        wrong += [] if said == later else [f"check says {said!r}, train {later!r}"]
        wrong += [] if after == before else [f"train leaves {sorted(after.keys() - before.keys())}"]
    for name, ended in (("check", checked), ("train", trained)):
        if b"Traceback" in ended.err or b"bug in halfbyte" in ended.err or ended.timed_out:
            wrong.append(f"{name}: {ended.err[-600:].decode(errors='replace')}")
    return f"{number} {changed}: {'; '.join(wrong)}" if wrong else ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", slow_except(range(40), [0]))
def test_check_says_what_train_does(number, stage, base, environment):
    wrong = disagreement(number, stage, base, environment)
    assert not wrong, wrong
