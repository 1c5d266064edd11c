"""Find and load a run's model, an adapter or a plain model, for evaluation, generation or merging."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RunConfig, Storage, load_config
from ..config.initialisations import initialisation, read_by
from ..config.methods import SCORES
from ..config.run_config import EARLIER_SPECS, with_specs
from ..config.schema import RunKeys
from ..loading.find import ModelFiles, find_model, preflight_model
from ..modeling.rope_scaling import saved_rope
from ..reading import read_text
from ..reading.json import read_json
from ..reading.model_config import CONFIG, read_config
from ..reading.tensors import ADAPTER_CONFIG, read_adapter_config
from ..utils.errors import CheckpointError, ConfigError, ModelError
from ..utils.files import clear_leftovers
from ..utils.notices import notice
from .layout import ADAPTER, ADAPTERS, ENVIRONMENT, INITIAL, MODEL, RESOLVED_CONFIG

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..adapters.initial import InitialAdapter

RESOLVED_AGAIN = "copy the run's file there again"
BASES = ("auto", "original", "dequantized")  # base weights that an adapter is merged into, see `export.merge.merge`
REQUIRED_KEYS = ("model_name_or_path", "load_in_4bit", "r", "max_length", "learning_rate", "seed")  # by any version


@dataclass
class SavedPaths:
    """Paths of a saved model.

    Attributes:
        base: folder or hub id of the base model; empty if the run's configuration names it.
        adapter: folder with adapter_config.json, or None.
        resolved: the run's config.resolved.yaml, or None for a model without a run.
    """

    base: str
    adapter: Path | None
    resolved: Path | None

    @property
    def run_dir(self) -> Path | None:
        """The run's folder, or None for a model without a run."""
        return self.resolved.parent if self.resolved else None


@dataclass
class Saved:
    """A loaded model in eval mode, with its tokenizer and configuration.

    Attributes:
        initial: the adapter of the run before the first step, if `init_lora_weights` computed a product that is not 0.
    """

    model: torch.nn.Module
    tokenizer: PreTrainedTokenizerBase
    config: RunKeys
    paths: SavedPaths
    initial: InitialAdapter | None = None


def find(name: str) -> SavedPaths:
    """Locate a run's output_dir, a checkpoint or adapter folder, or a model.

    Raises:
        CheckpointError: a folder that is none of these.
    """
    folder = Path(name)
    if not folder.is_dir():
        return SavedPaths(name, None, None)
    clear_leftovers(folder)  # restores files that a killed process had moved aside
    for adapter in (folder / ADAPTER, folder):
        if (adapter / ADAPTER_CONFIG).is_file():
            configs = (parent / RESOLVED_CONFIG for parent in (folder, folder.parent))
            resolved = next((config for config in configs if config.is_file()), None)
            base = "" if resolved else read_adapter_config(adapter).get("base_model_name_or_path")
            if not (base or resolved):
                raise CheckpointError(
                    f"{adapter}/adapter_config.json does not name its base model", "add base_model_name_or_path"
                )
            return SavedPaths(str(base), adapter, resolved)
    for model in (folder / MODEL, folder):
        if (model / CONFIG).is_file():
            resolved = folder / RESOLVED_CONFIG
            return SavedPaths(str(model), None, resolved if resolved.is_file() else None)
    if several := sorted(path.parent for path in folder.glob(f"{ADAPTERS}/*/{ADAPTER}")):
        wrong = f"{name} holds the runs of {len(several)} adapters"
        raise CheckpointError(wrong, f"name one of them: {several[0]}")
    raise CheckpointError(
        f"{name}: neither a run (adapter/ or model/), an adapter (adapter_config.json) nor a model (config.json)",
        "name a run's output_dir after it has finished, or one of its checkpoint folders",
    )


def find_trained(folder: Path) -> SavedPaths:
    """Locate a run or an adapter to merge.

    Raises:
        CheckpointError: there is no such folder, or it holds neither.
    """
    paths = find(str(folder))
    if paths.adapter is None and not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}", "name a run's output_dir or an adapter")
    return paths


def find_adapter(name: str) -> Path:
    """Return the adapter's folder of a run or of an adapter.

    Raises:
        CheckpointError: there is none.
    """
    folder = find(name).adapter
    if folder is None:
        raise CheckpointError(f"{name} has no adapter_config.json", "name an adapter's folder or a run's output_dir")
    return folder


def look_up(name: str, overrides: Iterable[str] = (), dataset: str = "none") -> tuple[SavedPaths, RunConfig]:
    """Locate a run, an adapter or a model, and read the configuration to load it with, without importing torch.

    Args: as of `load_saved`.

    Raises:
        CheckpointError, ConfigError, ModelError: nothing loadable is there.
    """
    paths = find(name)
    config = saved_config(paths, overrides, dataset)
    try:
        preflight_model(config.origin)
    except ModelError as error:
        if paths.adapter is None:
            raise
        file = paths.resolved or paths.adapter / ADAPTER_CONFIG  # the file that refers to the missing base
        key = "model_name_or_path" if paths.resolved else "base_model_name_or_path"
        problem = f"the base model in {file}: {error.message}"
        raise ModelError(problem, f"put it back, or correct {key} there") from error
    return paths, config


def saved_config(paths: SavedPaths, overrides: Iterable[str] = (), dataset: str = "none") -> RunConfig:
    """Return the configuration to load `paths` with: the run's, else the model as stored; then `overrides`.

    The base's own code runs only if `overrides` have trust_remote_code=true. The run's value of this key is ignored,
    because the folder may be from another person.
    """
    overrides = ["trust_remote_code=false", *overrides]
    named = any(token.removeprefix("--").partition("=")[0] == "quantization" for token in overrides)
    quantized = named or _is_quantized(paths.base)
    defaults = {"model_name_or_path": paths.base, "dataset": dataset, "load_in_4bit": quantized}
    if paths.adapter and not paths.resolved:
        if rope := saved_rope(paths.adapter):
            defaults |= {"rope_scaling": dict(rope.options), "max_length": rope.length}
        defaults |= _pixel_limits(paths.adapter)
    if paths.resolved:
        _check_complete(paths.resolved)
    try:
        config = load_config(paths.resolved, overrides, defaults)
    except ConfigError as error:
        if paths.resolved is None or not re.match(rf"{re.escape(str(paths.resolved))}:\d+: unknown key", error.message):
            raise
        fix = f"use the halfbyte version that wrote it (see {ENVIRONMENT}), or remove that line"
        raise ConfigError(error.message, fix) from error  # the key is of another version, not misspelled
    if paths.base and not paths.adapter:
        config.model_name_or_path = paths.base
        config.rope_scaling = None  # its config.json has it
    return config if named else with_specs(config, EARLIER_SPECS)


def _pixel_limits(adapter: Path) -> dict[str, int]:
    """Return the limits on pixels that an adapter's processor was saved with, as keys of a configuration."""
    file, with_parts = (adapter / name for name in ("preprocessor_config.json", "processor_config.json"))
    stored = read_json(file, CheckpointError) if file.is_file() else {}
    if not stored and with_parts.is_file():
        stored = read_json(with_parts, CheckpointError).get("image_processor") or {}
    return {f"image_{key}": stored[key] for key in ("min_pixels", "max_pixels") if stored.get(key)}


def _check_complete(resolved: Path) -> None:
    """Check that a run's configuration is not truncated, because missing keys would get their defaults.

    Raises:
        CheckpointError: it is.
    """
    text = read_text(resolved, CheckpointError, RESOLVED_AGAIN)
    if missing := [key for key in REQUIRED_KEYS if not re.search(rf"^{key}:", text, re.MULTILINE)]:
        raise CheckpointError(f"{resolved} is truncated: {', '.join(missing)} are missing", RESOLVED_AGAIN)
    if not text.endswith("\n"):
        raise CheckpointError(f"{resolved} is truncated: its last line has no end", RESOLVED_AGAIN)


def _is_quantized(model: str) -> bool:
    """Return whether a model folder holds quantized weights."""
    return bool(model) and Path(model, CONFIG).is_file() and "quantization_config" in read_config(Path(model))


def load_saved(name: str, overrides: Iterable[str] = (), dataset: str = "none", *, scores: bool = False) -> Saved:
    """Load a run (its base quantized as in training, with its adapter), an adapter, or a model.

    A run with `qat_scheme` or `merge_aware` has its linear layers stored in their format, adapters merged.

    Args:
        name: a run's output_dir, a checkpoint or adapter folder, a model's folder or hub id.
        overrides: `key=value`, e.g. `load_in_4bit=true` to quantize a plain model, or `trust_remote_code=true`, which
            only counts here.
        dataset: used in the configuration if there is no run.
        scores: also accept a model that scores or embeds texts and generates none.

    Raises:
        CheckpointError, ConfigError, ModelError: nothing loadable is there, or it has code that is not trusted.
    """
    paths, config = look_up(name, overrides, dataset)
    from ..adapters.lora import check_adapter_files, check_base_unchanged, load_adapter
    from ..generation.sampling import eos_tokens
    from ..loading.load import load_tokenizer, resolve_dtype
    from ..loading.tokenizers import start_new_tokens, trained_tokenizer
    from ..modeling.task_models import check_language_model
    from ..qat.model import quantize_trained, round_merged
    from .stop_tokens import data_report, joined_stop_tokens, known_stop_tokens

    template = paths.adapter / "chat_template.jinja" if paths.adapter else None
    if template and template.is_file():  # the template used in training, even if chat_template_path has moved
        config.chat_template_path = str(template)
    if paths.adapter:
        task_type = read_adapter_config(paths.adapter).get("task_type")
        if not scores and task_type in SCORES:
            does = "embeds" if task_type == "FEATURE_EXTRACTION" else "scores"
            raise CheckpointError(
                f"{name} {does} texts and does not generate any",
                f"measure it with `halfbyte eval`, or load it with PEFT and {SCORES[task_type][1]}",
            )
        check_adapter_files(paths.adapter)
    initial = initial_adapter(paths.run_dir, config) if paths.adapter else None
    if initial is not None and initial.modules:
        residual_base = f"its base is stored without the initial factors of {initial.chosen}, as in training"
        notice(f"residual-base {name}", f"{name}: {residual_base} ({initial.folder})")
    if paths.adapter and initial is None:
        check_base_unchanged(paths.adapter, quantized=config.storage.quantized)
    files = find_model(config.origin)
    check_language_model(files.config, files.name)
    trained_rows = paths.adapter and read_adapter_config(paths.adapter).get("trainable_token_indices")
    if trained_rows:
        tokenizer = trained_tokenizer(paths.adapter, config)
    else:
        tokenizer = load_tokenizer(files.origin, chat_template_path=config.chat_template_path)
    quantized_later = config.qat_scheme and not paths.adapter  # fully trained weights are quantized after loading
    dtype = "float32" if quantized_later else config.precision.compute
    model = _load_base(files, config, config.storage, dtype, initial)
    if trained_rows and paths.resolved:  # a reference without the adapter has the rows that training started from
        start_new_tokens(model, config, tokenizer)
    if paths.adapter:
        rows = model.get_input_embeddings().weight.shape[0]
        model = load_adapter(model, paths.adapter, config.model_name_or_path, initial=initial)
        if model.get_input_embeddings().weight.shape[0] > rows:  # the adapter adds tokens
            tokenizer = trained_tokenizer(paths.adapter, config)
    if config.storage.rounds:
        round_merged(model)
        quantize_trained(model)
        if quantized_later:
            model.to(resolve_dtype(config.precision.compute, next(model.parameters()).device))
    if not scores:
        learned = known_stop_tokens(data_report(paths.run_dir), tokenizer)
        ends = joined_stop_tokens(sorted(eos_tokens(model)), [tokenizer.eos_token_id], learned)
        model.generation_config.eos_token_id = ends
    return Saved(model.eval(), tokenizer, config, paths, initial)


def initial_adapter(run_dir: Path | None, config: RunKeys) -> InitialAdapter | None:
    """Return the adapter of a run before its first step, if `init_lora_weights` computed a product that is not 0.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if run_dir is None or not config.use_peft or initialisation(config).starts_at_zero or config.adapter_path:
        return None
    from ..adapters.initial import InitialAdapter

    return InitialAdapter(run_dir / INITIAL, config) if read_by(config) != "nothing" else None


def _load_base(
    files: ModelFiles, config: RunKeys, storage: Storage, dtype: str, initial: InitialAdapter | None = None
) -> Any:
    """Load the model without adapters to its device, with offloaded experts if they do not fit."""
    from ..loading.expert_offload import offload_experts
    from ..loading.load import load_model
    from ..modeling.layer import decoder_layers
    from ..plan.experts import offloaded_at_inference
    from ..utils.hardware import chosen_device, free_bytes

    device = chosen_device(config.device)
    offloaded = offloaded_at_inference(config, files.config, device, free_bytes(device))
    model = load_model(
        files,
        storage,
        dtype=dtype,
        device=device,
        attn_implementation=config.attn_implementation,
        experts_on_host=offloaded,
        initial=initial,
    )
    if offloaded:
        message = f"keeping the experts of {len(offloaded)} layers in host memory: the model does not fit {device}"
        notice("experts-offloaded", message)
        offload_experts([*decoder_layers(model)[1]], offloaded, device)
    return model
