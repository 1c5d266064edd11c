"""Distillation: teachers that are none."""

from tests.helpers.hostile.cases import Case, cut, edited
from tests.helpers.hostile.rows_config import both
from tests.helpers.hostile.rows_data import data

GKD = "method=gkd per_device_train_batch_size=2 max_completion_length=4"
PROMPTS = data('{"prompt": "a small model"}\n{"prompt": "nine rows"}\n{"prompt": "each of them"}\n')
ADAPTER = "run/adapter/adapter_model.safetensors"


def taught(name: str, keys: str, **wishes) -> Case:
    """Refused by `check` and by `train` alike."""
    files = {**PROMPTS, **wishes.pop("files", {})}
    return Case(name, both(f"{GKD} {keys}"), files=files, **wishes)


ROWS = [
    taught("+ distillation without teacher", "", says="teacher_model_name_or_path"),
    taught("+ a teacher that is not there", "teacher_model_name_or_path=nobody/here/at-all", says="nobody/here/at-all"),
    taught("+ a model that teaches itself", "teacher_model_name_or_path=model"),
    taught("+ a teacher whose adapter is cut", "teacher_model_name_or_path=run", says="adapter_model.safetensors",
           given=("run",), files={ADAPTER: cut()}),
    taught("+ an adapter on nothing", "teacher_model_name_or_path=run/adapter", says="base_model_name_or_path",
           given=("run",), files={"run/adapter/adapter_config.json": edited(base_model_name_or_path=None)}),
    taught("+ between more than two divergences", "teacher_model_name_or_path=run beta=1.5", says="beta",
           given=("run",), fix="to 1"),
    taught("+ packed distillation", "teacher_model_name_or_path=run packing=true", says="packing", given=("run",),
           fix="padding_free"),
    taught("+ rewards of a teacher", "teacher_model_name_or_path=run reward_funcs=repetition", says="reward_funcs",
           given=("run",), fix="grpo"),
    Case("+ a teacher of pairs", both("method=dpo teacher_model_name_or_path=model"), says="teacher_model_name_or_path",
         fix="gkd"),
]  # fmt: skip
