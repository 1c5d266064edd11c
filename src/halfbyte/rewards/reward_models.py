"""Reward models in `reward_funcs`: find them and compare them with the model that trains, before reading any
weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..auxiliary.model import AuxiliaryModel, adapter_in, check_origin, origin_of
from ..config import Origin
from ..config.methods import SCORES
from ..config.schema import ModelSection, RunKeys
from ..loading.find import ModelFiles, find_model, local_origin, preflight_model, read_model_config
from ..modeling.architectures import SUFFIXES, stored_task
from ..reading.tensors import ADAPTER, ADAPTER_AGAIN, read_adapter_config, read_header
from ..utils.errors import ConfigError, attribute_to_key
from .specs import MODEL, RewardSpec

SEPARATOR = "\n"  # text after each step, the default of method: prm


@dataclass(frozen=True)
class RewardModelFiles(AuxiliaryModel):
    """The files of a reward model. Its adapter has the score head; without adapter the model itself has it.

    Attributes:
        spec: its entry in `reward_funcs`.
        scores: task type, a key of `SCORES`: one score of the whole answer, or classes of each step.
    """

    spec: RewardSpec
    scores: str

    @property
    def separator(self) -> str:
        return str(self.spec.options.get("step_separator", SEPARATOR))


def check_reward_models(config: RunKeys, specs: Sequence[RewardSpec]) -> None:
    """Check the reward models of a run as far as possible without importing libraries that read them.

    Raises:
        HalfbyteError: a model is missing or damaged, or is an adapter without a score head.
    """
    for spec in specs:
        if spec.function_name != MODEL:
            continue
        path = str(spec.options["path"])
        with attribute_to_key(key_of(path)):
            adapter = adapter_in(path)
            if adapter is None:
                preflight_model(_model_origin(config, path))
                continue
            _task_type(adapter)
            check_origin(origin_of(config, path, adapter), adapter)


def key_of(path: str) -> str:
    """Return the prefix of errors about the reward model at `path`."""
    return f"reward_funcs: model: {path}"


def find_reward_models(config: RunKeys, specs: Sequence[RewardSpec]) -> list[RewardModelFiles]:
    """Return the reward models of a run.

    Raises:
        HalfbyteError: a model is missing or damaged, or has no score head; or two models on the training weights have
            heads of different kinds.
    """
    models = []
    for spec in specs:
        if spec.function_name != MODEL:
            continue
        path = str(spec.options["path"])
        adapter = adapter_in(path)
        with attribute_to_key(key_of(path)):
            if adapter is None:
                models.append(_find_checkpoint(config, spec, path))
                continue
            origin = origin_of(config, path, adapter)
            base = None if origin is None else find_model(origin)
            models.append(RewardModelFiles(adapter, base, spec, _task_type(adapter)))
    scores = {model.scores for model in models if model.files is None}
    if len(scores) > 1:
        raise ConfigError(
            "reward_funcs: one model scores answers and one scores steps, but both share the training model's weights,"
            " which have one head",
            "remove one of them",
        )
    return models


def _task_type(adapter: Path) -> str:
    """Return the task type of an adapter's head, a key of `SCORES`."""
    task_type, fix = read_adapter_config(adapter).get("task_type"), "give an adapter of method: reward or method: prm"
    labels = SCORES[task_type][0] if task_type in SCORES else 0
    if not labels:
        raise ConfigError(f"{adapter} has no score head (its task_type is {task_type})", fix)
    head = read_header(adapter / ADAPTER, ADAPTER_AGAIN).get("base_model.model.score.weight")
    if head is not None and head["shape"][0] != labels:
        raise ConfigError(f"{adapter} is a classifier with {head['shape'][0]} labels", fix)
    return str(task_type)


def _model_origin(config: ModelSection, path: str) -> Origin:
    return Origin(path, trust_remote_code=config.trust_remote_code)


def _find_checkpoint(config: RunKeys, spec: RewardSpec, path: str) -> RewardModelFiles:
    origin = _model_origin(config, path)
    location, model_config = local_origin(origin), read_model_config(origin)
    classes = getattr(model_config, "architectures", None) or [""]
    task_type = stored_task(classes)
    if task_type is None:
        raise ConfigError(
            f"{path} is a {classes[0] or 'model'}, which has no score head",
            f"give a model for {' or '.join(SUFFIXES)}, or one trained with method: reward or method: prm",
        )
    labels, label_count = model_config.num_labels, SCORES[task_type][0]
    if labels != label_count:
        raise ConfigError(f"{path} has {labels} labels", f"give a model with {label_count}")
    return RewardModelFiles(None, ModelFiles(path, location, model_config), spec, task_type)
