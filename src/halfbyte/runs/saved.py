"""Loading what a run left behind, an adapter, or a plain model, to evaluate it or talk to it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RunConfig, Storage, load_config
from ..config.methods import SCORES
from ..loading.find import ModelFiles, explain_remote_code, find_model, preflight_model
from ..reading import read_text
from ..reading.boundary import answered
from ..reading.model_config import CONFIG, read_config
from ..reading.tensors import ADAPTER_CONFIG, read_adapter_config
from ..utils.errors import CheckpointError, ConfigError, ModelError
from ..utils.files import clear_leftovers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

RESOLVED = "config.resolved.yaml"
RESOLVED_AGAIN = "copy the run's file there again"
WRITTEN = ("model_name_or_path", "load_in_4bit", "r", "max_length", "learning_rate", "seed")  # in order, by any version


@dataclass
class Place:
    """Where the parts of a saved model lie.

    Attributes:
        base: folder or hub id of the model under the adapter; empty when the run's configuration names it.
        adapter: folder with adapter_config.json, or None.
        resolved: the run's config.resolved.yaml, or None for a model that no run of ours left.
    """

    base: str
    adapter: Path | None
    resolved: Path | None

    @property
    def run_dir(self) -> Path | None:
        """The run's folder, or None for a model that no run of ours left."""
        return self.resolved.parent if self.resolved else None


@dataclass
class Saved:
    """A model ready to answer, in eval mode."""

    model: torch.nn.Module
    tokenizer: PreTrainedTokenizerBase
    config: RunConfig
    place: Place


def find(name: str) -> Place:
    """Recognise a run's output_dir, a checkpoint or adapter folder, or a model.

    Raises:
        CheckpointError: a folder with none of these in it.
    """
    folder = Path(name)
    if not folder.is_dir():
        return Place(name, None, None)
    clear_leftovers(folder)  # what a process that was killed had taken out of its place is put back
    for adapter in (folder / "adapter", folder):
        if (adapter / "adapter_config.json").is_file():
            resolved = next((at / RESOLVED for at in (folder, folder.parent) if (at / RESOLVED).is_file()), None)
            base = "" if resolved else _base_of(adapter)
            return Place(base, adapter, resolved)
    for model in (folder / "model", folder):
        if (model / "config.json").is_file():
            resolved = folder / RESOLVED if (folder / RESOLVED).is_file() else None
            return Place(str(model), None, resolved)
    raise CheckpointError(
        f"{name}: neither a run (adapter/ or model/), an adapter (adapter_config.json) nor a model (config.json)",
        "name a run's output_dir after it has finished, or one of its checkpoint folders",
    )


def find_trained(folder: Path) -> Place:
    """What a run left in `folder`, or an adapter: something that may be merged.

    Raises:
        CheckpointError: there is no such folder, or nothing of the kind in it.
    """
    place = find(str(folder))
    if place.adapter is None and not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}", "name a run's output_dir or an adapter")
    return place


def find_adapter(name: str) -> Path:
    """The folder of an adapter, which may be that of a run.

    Raises:
        CheckpointError: there is none.
    """
    folder = find(name).adapter
    if folder is None:
        raise CheckpointError(f"{name} has no adapter_config.json", "name an adapter's folder or a run's output_dir")
    return folder


def look_up(name: str, overrides: Iterable[str] = (), dataset: str = "none") -> tuple[Place, RunConfig]:
    """Where a run, an adapter or a model is, and the configuration to load it with; imports no torch.

    Args: as those of `load_saved`.

    Raises:
        CheckpointError, ConfigError, ModelError: nothing loadable there.
    """
    place = find(name)
    config = saved_config(place, overrides, dataset)
    with _base_named(place):
        preflight_model(config.origin)
    return place, config


@contextlib.contextmanager
def _base_named(place: Place) -> Iterator[None]:
    """Around looking for a base: where there is none, that is said of the file which names it."""
    try:
        yield
    except ModelError as error:
        if place.adapter is None:
            raise
        file = place.resolved or place.adapter / ADAPTER_CONFIG
        key = "model_name_or_path" if place.resolved else "base_model_name_or_path"
        said = f"the base that {file} names: {error.message}"
        raise ModelError(said, f"put it back, or correct {key} there") from error


def _base_of(adapter: Path) -> str:
    base = read_adapter_config(adapter).get("base_model_name_or_path")
    if not base:
        raise CheckpointError(
            f"{adapter}/adapter_config.json does not name its base model", "add base_model_name_or_path"
        )
    return str(base)


def saved_config(place: Place, overrides: Iterable[str] = (), dataset: str = "none") -> RunConfig:
    """The configuration to load `place` with: the run's own, or the model as it is stored, and then `overrides`.

    Code that comes with the base is run where `overrides` say trust_remote_code=true. A run's folder may come from
    somebody else, so what its own configuration says about that does not count.
    """
    overrides = ["trust_remote_code=false", *overrides]
    named = any(token.removeprefix("--").partition("=")[0] == "quantization" for token in overrides)
    quantized = named or _is_quantized(place.base)
    defaults = {"model_name_or_path": place.base, "dataset": dataset, "load_in_4bit": quantized}
    if place.resolved:
        _check_whole(place.resolved)
    with _known_keys(place):
        config = load_config(place.resolved, overrides, defaults)
    if place.base and not place.adapter:
        config.model_name_or_path = place.base
    return config


@contextlib.contextmanager
def _known_keys(place: Place) -> Iterator[None]:
    """Around reading a run's configuration: a key of another version is no misspelling."""
    try:
        yield
    except ConfigError as error:
        if place.resolved is None or not re.match(rf"{re.escape(str(place.resolved))}:\d+: unknown key", error.message):
            raise
        fix = "use the halfbyte that wrote it (environment.json says which), or take that line out"
        raise ConfigError(error.message, fix) from error


def _check_whole(resolved: Path) -> None:
    """Whether a run's configuration has all that it was written with; what is cut off would be taken for a default.

    Raises:
        CheckpointError: it has not.
    """
    text = read_text(resolved, CheckpointError, RESOLVED_AGAIN)
    if missing := [key for key in WRITTEN if not re.search(rf"^{key}:", text, re.MULTILINE)]:
        raise CheckpointError(f"{resolved} is cut short: it lacks {', '.join(missing)}", RESOLVED_AGAIN)
    if not text.endswith("\n"):
        raise CheckpointError(f"{resolved} is cut short: its last line has no end", RESOLVED_AGAIN)


def _is_quantized(model: str) -> bool:
    """Whether a model folder holds weights that were quantized before."""
    return bool(model) and Path(model, CONFIG).is_file() and "quantization_config" in read_config(Path(model))


def load_saved(name: str, overrides: Iterable[str] = (), dataset: str = "none", *, scores: bool = False) -> Saved:
    """Load a run (its base quantized as it was trained on, its adapter on top), an adapter, or a model.

    A run with `qat_scheme` has its linear layers stored in that format, adapters merged.

    Args:
        name: a run's output_dir, a checkpoint or adapter folder, a model's folder or hub id.
        overrides: `key=value`, e.g. `load_in_4bit=true` to quantize a plain model, or `trust_remote_code=true`, which
            only counts here.
        dataset: put into the configuration where no run gives one.
        scores: take a reward model too, which answers nothing.

    Raises:
        CheckpointError, ConfigError, ModelError: nothing loadable there, or it brings code that is not trusted.
    """
    place, config = look_up(name, overrides, dataset)
    from ..loading.load import load_tokenizer, resolve_dtype
    from ..modeling.adapters import check_adapter_files, check_base_unchanged, load_adapter
    from ..qat.model import quantize_trained, round_merged

    template = place.adapter / "chat_template.jinja" if place.adapter else None
    if template and template.is_file():  # the one trained with, wherever chat_template_path is now
        config.chat_template_path = str(template)
    if place.adapter:
        kind = read_adapter_config(place.adapter).get("task_type")
        if not scores and kind in SCORES:
            raise CheckpointError(
                f"{name} is a reward model: it scores texts, and writes none",
                f"measure it with `halfbyte eval`, or load it with PEFT and {SCORES[kind][1]}",
            )
        check_adapter_files(place.adapter)
    if place.adapter:
        check_base_unchanged(place.adapter, quantized=config.storage.quantized)
    files = find_model(config.origin)
    tokenizer = load_tokenizer(files.place, chat_template_path=config.chat_template_path)
    scheme = config.storage.qat_scheme
    rounded = scheme and not place.adapter  # what was trained is rounded, not what is left in 16 bits
    model = _load_base(files, config, config.storage, "float32" if rounded else config.precision.compute)
    if place.adapter:
        rows = model.get_input_embeddings().weight.shape[0]
        model = load_adapter(model, place.adapter, config.model_name_or_path)
        if model.get_input_embeddings().weight.shape[0] > rows:  # the tokens that the adapter adds
            tokenizer = trained_tokenizer(place.adapter, config)
    if scheme:
        round_merged(model)
        quantize_trained(model)
        if rounded:
            model.to(resolve_dtype(config.precision.compute, next(model.parameters()).device))
    if not scores:
        _stop_at_all_ends(model, tokenizer, place)
    return Saved(model.eval(), tokenizer, config, place)


def _stop_at_all_ends(model: Any, tokenizer: PreTrainedTokenizerBase, place: Place) -> None:
    """Let a model's generation config name all tokens that end an answer, for whatever generates with it."""
    from ..generation.sampling import eos_tokens
    from .ends import all_ends, data_report, known_ends

    learned = known_ends(data_report(place.run_dir), tokenizer)
    model.generation_config.eos_token_id = all_ends(sorted(eos_tokens(model)), [tokenizer.eos_token_id], learned)


def _load_base(files: ModelFiles, config: RunConfig, storage: Storage, dtype: str) -> Any:
    """The model without adapters, on its device but for experts that do not fit there."""
    from ..loading.load import load_model
    from ..memory.expert_offload import offload_experts
    from ..modeling.layer import decoder_layers
    from ..plan.experts import while_answering
    from ..utils.hardware import chosen_device, free_bytes
    from ..utils.notices import notice

    device, attention = chosen_device(config.device), config.attn_implementation
    waiting = while_answering(config, files.config, device, free_bytes(device))
    how: dict[str, Any] = {"attn_implementation": attention, "experts_on_host": waiting}
    model = load_model(files, storage, dtype=dtype, device=device, **how)
    if waiting:
        notice("experts-wait", f"experts of {len(waiting)} layers wait in the host's memory: the device is small")
        offload_experts([*decoder_layers(model)[1]], waiting, device)
    return model


def trained_tokenizer(folder: Path | None, config: RunConfig) -> Any:
    """The tokenizer in an adapter's or a model's folder, as it is there; the base's where it holds none.

    Raises:
        CheckpointError, ModelError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    from ..loading.load import load_tokenizer

    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return load_tokenizer(config.origin, chat_template_path=config.chat_template_path)
    with explain_remote_code(str(folder)), answered(f"cannot load the tokenizer in {folder}", "copy the base's files there"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
