"""Reward models: found, and compared with the model that trains, before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...auxiliary.find import adapter_in, look_over_origin, origin_of
from ...config import Origin, RunConfig
from ...config.methods import SCORES
from ...loading.find import ModelFiles, find_model, local_origin, preflight_model, read_model_config
from ...reading.tensors import read_adapter_config
from ...utils.errors import ConfigError, of_key
from .specs import MODEL, RewardSpec

SEPARATOR = "\n"  # behind each step, as method: prm has it
WHOLE = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}  # ends of classes' names


@dataclass(frozen=True)
class JudgeFiles:
    """A reward model that was found.

    Attributes:
        scores: which of `SCORES`: a score of the whole answer, or classes of each step.
        adapter: its adapter, which has the head; None where the model itself has it.
        files: the model, or what its adapter is on; None where that is the model which trains: one set of weights.
    """

    spec: RewardSpec
    scores: str
    adapter: Path | None
    files: ModelFiles | None

    @property
    def separator(self) -> str:
        return str(self.spec.options.get("step_separator", SEPARATOR))


def look_over_judges(config: RunConfig, specs: Sequence[RewardSpec]) -> None:
    """What can be said of the reward models of a run before anything is imported to read them.

    Raises:
        HalfbyteError: one is not there, or damaged, or an adapter without a head that scores.
    """
    for spec in specs:
        if spec.kind != MODEL:
            continue
        path = str(spec.options["path"])
        with of_key(key_of(path)):
            adapter = adapter_in(path)
            if adapter is None:
                preflight_model(_whole_origin(config, path))
                continue
            _kind_of(adapter)
            look_over_origin(origin_of(config, path, adapter), adapter)


def key_of(path: str) -> str:
    """What errors about the reward model at `path` begin with."""
    return f"reward_funcs: model: {path}"


def find_judges(config: RunConfig, specs: Sequence[RewardSpec]) -> list[JudgeFiles]:
    """The reward models of a run.

    Raises:
        HalfbyteError: one is not there, or damaged, or scores nothing; or two on the weights that train have heads of
            different kinds.
    """
    found = [_found(config, spec) for spec in specs if spec.kind == MODEL]
    kinds = {each.scores for each in found if each.files is None}
    if len(kinds) > 1:
        raise ConfigError(
            "reward_funcs: one model scores answers and one steps, and both share the model's weights: it has one head",
            "leave one of them out",
        )
    return found


def _found(config: RunConfig, spec: RewardSpec) -> JudgeFiles:
    path = str(spec.options["path"])
    adapter = adapter_in(path)
    with of_key(key_of(path)):
        if adapter is None:
            return _whole(config, spec, path)
        kind, origin = _kind_of(adapter), origin_of(config, path, adapter)
        return JudgeFiles(spec, kind, adapter, None if origin is None else find_model(origin))


def _kind_of(adapter: Path) -> str:
    """Which of `SCORES` the head of an adapter has."""
    kind = read_adapter_config(adapter).get("task_type")
    if kind not in SCORES:
        raise ConfigError(
            f"{adapter} has no head that scores (its task_type is {kind})",
            "name what method: reward or method: prm has trained",
        )
    return str(kind)


def _whole_origin(config: RunConfig, path: str) -> Origin:
    return Origin(path, trust_remote_code=config.trust_remote_code)


def _whole(config: RunConfig, spec: RewardSpec, path: str) -> JudgeFiles:
    origin = _whole_origin(config, path)
    place, model_config = local_origin(origin), read_model_config(origin)
    classes = getattr(model_config, "architectures", None) or [""]
    kind = next((scores for end, scores in WHOLE.items() if str(classes[0]).endswith(end)), None)
    if kind is None:
        raise ConfigError(
            f"{path} is a {classes[0] or 'model'}, which scores nothing",
            f"name a model for {' or '.join(WHOLE)}, or what method: reward or method: prm has trained",
        )
    labels, wanted = model_config.num_labels, SCORES[kind][0]
    if labels != wanted:
        raise ConfigError(f"{path} has {labels} labels", f"name one with {wanted}")
    return JudgeFiles(spec, kind, None, ModelFiles(path, place, model_config))
