"""Distillation: teachers that are none."""

import shutil

from tests.helpers.hostile.cases import Case, cut, edited
from tests.helpers.hostile.rows_config import both
from tests.helpers.hostile.rows_preference import SCORED, lines, pair
from tests.helpers.hostile.rows_rewards import PROMPTS

GKD = "method=gkd per_device_train_batch_size=2 max_completion_length=4"
ADAPTER = "run/adapter/adapter_model.safetensors"


def taught(name: str, keys: str, **wishes) -> Case:
    """Refused by `check` and by `train` alike."""
    files = {**PROMPTS, **wishes.pop("files", {})}
    return Case(name, both(f"{GKD} {keys}"), files=files, **wishes)


def other_words(path) -> None:
    """A copy of the model that says it has fewer tokens."""
    shutil.copytree(path.parent / "model", path)
    edited(vocab_size=100)(path / "config.json")


ROWS = [
    taught("+ distillation without teacher", "", says="teacher_model_name_or_path"),
    taught("+ a model that teaches itself", "teacher_model_name_or_path=model"),
    taught("+ a teacher whose adapter is cut", "teacher_model_name_or_path=run", says="adapter_model.safetensors",
           given=("run",), files={ADAPTER: cut()}),
    taught("+ between more than two divergences", "teacher_model_name_or_path=run beta=1.5", says="beta",
           given=("run",), fix="to 1"),
    taught("+ more than all answers", "teacher_model_name_or_path=run lmbda=2", says="lmbda", given=("run",)),
    taught("+ a teacher of other words", "teacher_model_name_or_path=teacher", says="teacher/config.json",
           files={"teacher": other_words}),
    taught("+ a reward model teaches", "teacher_model_name_or_path=scored/adapter", says="scored/adapter",
           first=f"{SCORED} dataset=pairs.jsonl", files={"pairs.jsonl": lines(pair())["data.jsonl"]}),
]  # fmt: skip
