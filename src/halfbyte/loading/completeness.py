"""Check that a checkpoint holds the model of its config.json, from file headers, before any weight is read.

The check runs transformers' own loader on the meta device, with tensors that have shapes and no data. Renamed keys,
stacked experts and tied weights are therefore handled exactly as in loading. It takes 0.1 s for an 8B model.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Origin
from ..formats import of_checkpoint
from ..formats.base import QUANT_METHOD
from ..modeling.architectures import auto_class, expert_stacks
from ..reading.boundary import answered, text_of
from ..reading.model_config import CONFIG, EXPERTS, LAYERS
from ..reading.tensors import AGAIN, SINGLE, pickled_files, read_state, safetensors_files
from ..utils.errors import CheckpointError, HalfbyteError
from ..utils.notices import notice
from ..utils.streams import no_loading_bars, quiet_transformers
from .checkpoint import DTYPES, TYPES, BaseCheckpoint, Stored

MISMATCH_FIX = "check that config.json belongs to these weights, or re-download the checkpoint"
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
PICKLE_FIX = "save it again where you trust it (model.save_pretrained writes safetensors)"


def check_complete(origin: Origin, config: Any) -> None:
    """Compare names and shapes of a local checkpoint's weights with the model that its config describes.

    Args:
        origin: its folder; a hub id is not checked.
        config: its transformers config.

    Raises:
        CheckpointError: the config describes no model that can be built, or a weight is missing, misshapen or damaged.
    """
    folder = Path(origin.name)
    if not folder.is_dir():
        return
    stored = getattr(config, "quantization_config", None)
    if stored is not None and not _is_supported(stored if isinstance(stored, dict) else stored.to_dict()):
        return  # loading reports the unsupported format
    weights = _weights(origin, folder)
    _check_experts(weights, folder, config.get_text_config())
    text = config.get_text_config()
    for key in LAYERS:
        if getattr(text, key, 0) > len(weights):
            message = (
                f"{folder / CONFIG}: {key} is {getattr(text, key)}, and the checkpoint holds {len(weights)} tensors"
            )
            raise CheckpointError(message, MISMATCH_FIX)
    model = meta_model(origin, config)
    for name, module in expert_stacks(model, []).items() if stored is not None else ():
        if module.is_transposed and name in weights:  # quantized stacks have the other orientation
            shape = model.get_parameter(name).shape
            weights[name] = weights[name] if weights[name].shape == shape else weights[name].transpose(1, 2)
    if model.__module__.startswith("transformers_modules."):  # the checkpoint's own code may load in any way
        return
    with (
        answered(f"the weights in {folder} do not fit {CONFIG}", MISMATCH_FIX),
        quiet_transformers(),
        no_loading_bars(),
    ):
        _, info = type(model).from_pretrained(
            None,
            config=_unquantized_config(config),
            state_dict=weights,
            device_map={"": "meta"},
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by name
        )
    check_loaded(info, str(folder), config)


def meta_model(origin: Origin, config: Any) -> Any:
    """Build a model on torch's meta device: names and shapes, no weights, and no quantization.

    Args:
        origin: folder or hub id, for errors and for the model's own code.
        config: its transformers config.

    Raises:
        CheckpointError: the config describes no model that can be built.
    """
    path = Path(origin.name) / CONFIG
    try:
        with (
            answered(f"{path} describes no model that can be built", MISMATCH_FIX),
            torch.device("meta"),
            quiet_transformers(),
        ):
            return auto_class(config).from_config(
                _unquantized_config(config), attn_implementation="eager", trust_remote_code=origin.trust_remote_code
            )
    except CheckpointError as error:
        cause = error.__cause__
        unknown = cause.args[0] if isinstance(cause, KeyError) and cause.args else None
        if keys := [key for key, value in _flat_keys(config.to_dict()) if value == unknown is not None]:
            raise CheckpointError(f"{path}: {keys[0]}: transformers knows no {unknown!r}", MISMATCH_FIX) from error
        raise


def _flat_keys(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a config, nested keys joined by dots, and their values."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat_keys(value, f"{within}{key}.")
        else:
            yield f"{within}{key}", value


def _unquantized_config(config: Any) -> Any:
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _is_supported(entry: Mapping[str, Any]) -> bool:
    try:
        return entry.get("quant_method") == QUANT_METHOD or of_checkpoint(entry) is not None
    except HalfbyteError as error:
        raise CheckpointError(f"{CONFIG}: quantization_config: {error.message}", error.fix) from error
    except Exception as error:
        raise CheckpointError(f"{CONFIG}: quantization_config: {text_of(error)}", MISMATCH_FIX) from error


def _weights(origin: Origin, folder: Path) -> dict[str, Tensor]:
    """Return name → meta tensor of the weight's shape; for a quantized weight, the shape of its values."""
    if not safetensors_files(folder):
        tensors: dict[str, Tensor] = {}
        if not (files := pickled_files(folder)):
            raise CheckpointError(f"{folder} holds no weights: there is no {SINGLE}", "re-download the checkpoint")
        for file in files:
            state = read_state(file, AGAIN, "meta", PICKLE_FIX)
            if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
                raise CheckpointError(f"{file} is no dict of tensors", PICKLE_FIX)
            tensors |= state
        return tensors
    with answered(f"cannot read the headers of {folder}", MISMATCH_FIX):
        base = BaseCheckpoint(origin)
        weights = base.weights
    held = {entry["dtype"] for header in base.headers.values() for entry in header.values()}
    if base.quantized and not base.in_part and held <= DTYPES.keys():  # codes of all formats have other dtypes
        method = base.config["quantization_config"].get("quant_method")
        wrong = f"{folder}: {CONFIG} declares {method} quantization, but every tensor is stored in 16 bits or more"
        raise CheckpointError(wrong, f"re-download the checkpoint, or remove quantization_config from {CONFIG}")
    for weight in weights:
        if not base.quantized and weight.name.endswith(".weight") and weight.dtype not in DTYPES:
            wrong = f"{folder}: {weight.name} is stored as {weight.dtype}, but {CONFIG} has no quantization_config"
            raise CheckpointError(wrong, "re-download config.json")
    if base.quantized:
        # An expert has all entries that other experts of its layer have; a format may have optional ones.
        names = (name for header in base.headers.values() for name in header)
        holders: dict[tuple[str, str], dict[str, set[int]]] = {}  # layer and matrix → entry → experts
        for name in names:
            if match := EXPERT.fullmatch(name):
                matrix = match[3].split(".")[1]
                holders.setdefault((match[1], matrix), {}).setdefault(match[3], set()).add(int(match[2]))
        for (prefix, _), entries in holders.items():
            experts = set().union(*entries.values())
            for suffix, holders_of_entry in entries.items():
                if missing := experts - holders_of_entry:
                    raise CheckpointError(
                        f"{folder} lacks {prefix}{min(missing)}{suffix}, which other experts have", MISMATCH_FIX
                    )
        _check_formats(weights, folder)
        if base.config["quantization_config"].get("quant_method") != QUANT_METHOD:
            base.check_scales()
    return {
        weight.name: torch.empty(weight.shape, dtype=TYPES.get(weight.dtype, torch.uint8), device="meta")
        for weight in weights
    }


def _check_formats(weights: Iterable[Stored], folder: Path) -> None:
    """Check that the experts of a layer, which are stacked, are stored in one format.

    Raises:
        CheckpointError: names the first expert that differs.
    """
    formats: dict[tuple[str, str], tuple[str, str]] = {}  # layer and matrix → name and format of the first expert
    for weight in weights:
        if match := EXPERT.fullmatch(weight.name):
            first, spec = formats.setdefault((match[1], match[3]), (weight.name, weight.spec))
            if spec != weight.spec:
                raise CheckpointError(
                    f"{folder}: {weight.name} is stored as {weight.spec or '16 bits'}, {first} as {spec or '16 bits'}",
                    "use a checkpoint that stores all experts of a layer in one format",
                )


def _check_experts(weights: Mapping[str, Tensor], folder: Path, config: Any) -> None:
    """Check that no expert is missing, misshapen, or beyond the config's count.

    transformers stacks experts: it would not name the missing one, and would drop experts beyond the count.
    """
    if getattr(config, "zero_expert_num", None):  # LongCat's identity experts; transformers stores only some of them
        return
    groups: dict[tuple[str, str], dict[int, Tensor]] = {}
    for name, weight in weights.items():
        if match := EXPERT.fullmatch(name):
            groups.setdefault((match[1], match[3]), {})[int(match[2])] = weight
    counts: dict[str, int] = {}
    for (prefix, _), experts in groups.items():
        counts[prefix] = max(counts.get(prefix, 0), max(experts) + 1)
    limits = {key: getattr(config, key, None) for key in EXPERTS}
    key, limit = next(((key, limit) for key, limit in limits.items() if type(limit) is int), ("", 0))
    if key and counts and max(counts.values()) > limit:
        stored = max(counts.values())
        message = f"{folder / CONFIG}: {key} is {limit}, and the checkpoint holds {stored} experts a layer"
        raise CheckpointError(message, MISMATCH_FIX)
    for (prefix, suffix), experts in groups.items():
        if missing := [expert for expert in range(counts[prefix]) if expert not in experts]:
            raise CheckpointError(f"{folder} lacks {prefix}{missing[0]}{suffix}", MISMATCH_FIX)
        [(usual, _)] = Counter(tuple(weight.shape) for weight in experts.values()).most_common(1)
        for expert, weight in experts.items():
            if tuple(weight.shape) != usual:
                message = f"{folder}: {prefix}{expert}{suffix} has shape {tuple(weight.shape)}, other experts {usual}"
                raise CheckpointError(message, MISMATCH_FIX)


def check_loaded(info: Mapping[str, Any], name: str, config: Any) -> None:
    """Raise on missing or misshapen tensors in the `info` of from_pretrained(output_loading_info=True).

    Args:
        config: the model's config; keys whose value causes a wrong shape are named in the error.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
    """
    if missing := sorted(info["missing_keys"]):
        message = f"{name}: the checkpoint lacks {missing[0]}" + (
            f" and {len(missing) - 1} more" if missing[1:] else ""
        )
        raise CheckpointError(message, f"re-download the checkpoint, or {CONFIG} if it was edited")
    if misshapen := sorted(info["mismatched_keys"], key=str):
        key, shape, expected = misshapen[0]
        differing_sizes = set(expected) - set(shape)
        config_sizes = ((name, size) for name, size in _flat_keys(config.to_dict()) if type(size) is int)
        sizes = ", ".join(f"{name} {size}" for name, size in config_sizes if size in differing_sizes)
        by = f"{CONFIG} ({sizes})" if sizes else CONFIG
        raise CheckpointError(
            f"misshapen tensors: {name}: {key} has shape {tuple(shape)}, and by {by} it is {tuple(expected)}",
            MISMATCH_FIX,
        )
    if unexpected := sorted(info["unexpected_keys"]):
        notice(
            f"unexpected-{name}",
            f"{name}: ignoring {len(unexpected)} tensors of the checkpoint that the model lacks, first {unexpected[0]}",
        )


def check_finite(model: nn.Module, name: str) -> None:
    """Check that all weights are finite: one fp32 sum each, and a full scan only if the sum is not finite.

    Raises:
        CheckpointError: a tensor has NaN or Inf.
    """
    for key, tensor in model.state_dict().items():
        if type(tensor) is not Tensor or tensor.is_meta or not tensor.is_floating_point():
            continue
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise CheckpointError(f"{name}: {key} has NaN or Inf", "re-download the checkpoint, or take an earlier one")
