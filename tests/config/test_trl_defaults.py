"""Our defaults against TRL's: docs/preference.md lists every difference."""

import dataclasses
import re
from pathlib import Path

import pytest
from peft import LoraConfig
from transformers import TrainingArguments

from halfbyte.config import RunConfig
from halfbyte.config.foreign import foreign_names
from halfbyte.config.methods import methods_of

trl = pytest.importorskip("trl")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "preference.md"
EXPERIMENTAL = {"cpo": "CPOConfig", "orpo": "ORPOConfig"}
NAMES = {
    "sft": "SFTConfig", "dpo": "DPOConfig", "kto": "KTOConfig", "reward": "RewardConfig", "grpo": "GRPOConfig",
    "rloo": "RLOOConfig", **EXPERIMENTAL,
}  # fmt: skip
SAMPLED = {"reward_funcs": ["exact"], "per_device_train_batch_size": 8}
NEEDED = {"grpo": SAMPLED, "rloo": SAMPLED}
NOT_A_DEFAULT = {"activation_checkpointing"}  # transformers' key of that name is a deprecated alias of another


@pytest.mark.parametrize("kind", [LoraConfig, TrainingArguments, trl.ModelConfig, trl.ScriptArguments, *NAMES],
                         ids=lambda kind: kind if isinstance(kind, str) else kind.__name__)  # fmt: skip
def test_every_field_of_peft_transformers_and_trl_is_known(kind):
    """An unknown key would get the name of another key as advice, by its spelling."""
    fields = dataclasses.fields(configuration(kind) if isinstance(kind, str) else kind)
    unknown = {field.name for field in fields} - {*RunConfig.model_fields, *foreign_names()}
    assert not unknown


def configuration(method):
    if method in EXPERIMENTAL:
        module = pytest.importorskip(f"trl.experimental.{method}")
        return getattr(module, EXPERIMENTAL[method])
    return getattr(trl, NAMES[method])


def documented():
    """Return the keys in the table of the page."""
    table = PAGE.read_text(encoding="utf-8").split("## What differs from TRL")[1]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def differing(method):
    """Return the common keys with different defaults."""
    config = RunConfig(model_name_or_path="m", dataset="d", method=method, **NEEDED.get(method, {}))
    found = set()
    for field in dataclasses.fields(configuration(method)):
        key = RunConfig.model_fields.get(field.name)
        if key is None or (methods_of(key) and method not in methods_of(key)) or field.name in NEEDED.get(method, {}):
            continue
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
        theirs = made if field.default is dataclasses.MISSING else field.default
        mine = getattr(config, field.name)
        if mine != theirs and [mine] != theirs:
            found.add(field.name)
    return found - NOT_A_DEFAULT


@pytest.mark.parametrize("method", NAMES)
def test_every_default_that_differs_is_documented(method):
    assert differing(method) <= documented()


def test_every_documented_difference_exists():
    everywhere = set().union(*map(differing, NAMES))
    others = {"router_aux_loss_coef", "cpo_alpha"}  # by what unset means, and in a method that TRL has no class for
    assert documented() - others <= everywhere
