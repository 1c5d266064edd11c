"""Whether a checkpoint holds the model that its config.json describes: asked of the files' heads, before any weight is
read and before a run writes its first file.

transformers' own loader is run on the meta device, with tensors that have shapes and no data. So names that it changes,
experts that it stacks and weights that it ties are judged as loading judges them: 0.1 s for an 8B model.
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
from ..formats import FORMATS
from ..formats.base import QUANT_METHOD
from ..modeling.architectures import auto_class, expert_stacks
from ..reading.boundary import answered, text_of
from ..reading.model_config import CONFIG, EXPERTS, LAYERS
from ..reading.tensors import AGAIN, SINGLE, pickled_files, read_state, safetensors_files
from ..utils.errors import CheckpointError, HalfbyteError
from ..utils.notices import notice
from ..utils.transformers_logging import no_loading_bars, quiet
from .checkpoint import DTYPES, TYPES, BaseCheckpoint
from .find import load_model_config

ANOTHER = "check that config.json belongs to these weights, or re-download the checkpoint"
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
PICKLES = "save it again where you trust it (model.save_pretrained writes safetensors)"


def check_whole(place: Origin, config: Any) -> None:
    """Compare names and shapes of a local checkpoint's weights with those of the model that its config describes.

    Args:
        place: its folder; of a hub id nothing is known before it is loaded.
        config: transformers' config of it.

    Raises:
        CheckpointError: the config describes no model that can be built, or a weight is missing, misshapen or damaged.
    """
    folder = Path(place.name)
    if not folder.is_dir():
        return
    stored = getattr(config, "quantization_config", None)
    if stored is not None and not _is_read(stored if isinstance(stored, dict) else stored.to_dict()):
        return  # loading says which format it is
    weights = _weights(place, folder)
    _check_experts(weights, folder, config.get_text_config())
    text = config.get_text_config()
    for key in LAYERS:
        if getattr(text, key, 0) > len(weights):
            said = f"{folder / CONFIG}: {key} is {getattr(text, key)}, and the checkpoint holds {len(weights)} tensors"
            raise CheckpointError(said, ANOTHER)
    model = meta_model(place, config)
    for name, module in expert_stacks(model, []).items() if stored is not None else ():
        if module.is_transposed and name in weights:  # quantized stacks lie the other way
            shape = model.get_parameter(name).shape
            weights[name] = weights[name] if weights[name].shape == shape else weights[name].transpose(1, 2)
    if model.__module__.startswith("transformers_modules."):  # code that came with it loads as it likes
        return
    with answered(f"the weights in {folder} do not fit {CONFIG}", ANOTHER), quiet(), no_loading_bars():
        _, info = type(model).from_pretrained(
            None,
            config=_plain(config),
            state_dict=weights,
            device_map={"": "meta"},
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by name
        )
    check_loaded(info, str(folder), config)


def meta_model(place: Origin, config: Any = None) -> Any:
    """A model on torch's meta device: names and shapes, no weights, and none of them quantized.

    Args:
        config: transformers' config of it, where it was read.

    Raises:
        CheckpointError: it describes no model that can be built.
        ModelError: there is no such model, or none that can be trained.
    """
    config = load_model_config(place) if config is None else config
    path = Path(place.name) / CONFIG
    try:
        with answered(f"{path} describes no model that can be built", ANOTHER), torch.device("meta"), quiet():
            return auto_class(config).from_config(
                _plain(config), attn_implementation="eager", trust_remote_code=place.trust_remote_code
            )
    except CheckpointError as error:
        cause = error.__cause__
        unknown = cause.args[0] if isinstance(cause, KeyError) and cause.args else None
        if keys := [key for key, value in _flat(config.to_dict()) if value == unknown is not None]:
            raise CheckpointError(f"{path}: {keys[0]}: transformers knows no {unknown!r}", ANOTHER) from error
        raise


def _flat(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a config, those inside others with a dot, and their values."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{within}{key}.")
        else:
            yield f"{within}{key}", value


def _plain(config: Any) -> Any:
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _is_read(entry: Mapping[str, Any]) -> bool:
    try:
        return entry.get("quant_method") == QUANT_METHOD or any(
            cls.from_quantization_config(dict(entry)) for cls in FORMATS.values()
        )
    except HalfbyteError as error:
        raise CheckpointError(f"{CONFIG}: quantization_config: {error.message}", error.fix) from error
    except Exception as error:
        raise CheckpointError(f"{CONFIG}: quantization_config: {text_of(error)}", ANOTHER) from error


def _weights(place: Origin, folder: Path) -> dict[str, Tensor]:
    """Name → a tensor of the weight's shape, on the meta device; of a quantized weight, the shape of its values."""
    if not safetensors_files(folder):
        found: dict[str, Tensor] = {}
        if not (files := pickled_files(folder)):
            raise CheckpointError(f"{folder} holds no weights: there is no {SINGLE}", "re-download the checkpoint")
        for file in files:
            state = read_state(file, AGAIN, "meta", PICKLES)
            if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
                raise CheckpointError(f"{file} is no dict of tensors", PICKLES)
            found |= state
        return found
    with answered(f"cannot read the heads of {folder}", ANOTHER):
        base = BaseCheckpoint(place)
        weights = base.weights
    held = {entry["dtype"] for header in base.headers.values() for entry in header.values()}
    if base.quantized and not base.in_part and held <= DTYPES.keys():  # every format's codes are of another dtype
        method = base.config["quantization_config"].get("quant_method")
        said = f"{folder}: {CONFIG} says that it is quantized ({method}), and every tensor is stored in 16 bits or more"
        raise CheckpointError(said, f"re-download the checkpoint, or remove quantization_config from {CONFIG}")
    for each in weights:
        if not base.quantized and each.name.endswith(".weight") and each.dtype not in DTYPES:
            said = f"{folder}: {each.name} is stored as {each.dtype}, and {CONFIG} has no quantization_config"
            raise CheckpointError(said, "re-download config.json")
    if base.quantized:
        _check_entries((name for header in base.headers.values() for name in header), folder)
    return {
        each.name: torch.empty(each.shape, dtype=TYPES.get(each.dtype, torch.uint8), device="meta") for each in weights
    }


def _check_entries(names: Iterable[str], folder: Path) -> None:
    """Whether each of a layer's experts has the entries that others have, of which a format may have some or not."""
    holders: dict[tuple[str, str], dict[str, set[int]]] = {}  # layer and matrix → entry → experts
    for name in names:
        if found := EXPERT.fullmatch(name):
            matrix = found[3].split(".")[1]
            holders.setdefault((found[1], matrix), {}).setdefault(found[3], set()).add(int(found[2]))
    for (before, _), entries in holders.items():
        experts = set().union(*entries.values())
        for after, own in entries.items():
            if missing := experts - own:
                raise CheckpointError(
                    f"{folder} lacks {before}{min(missing)}{after}, which other experts have", ANOTHER
                )


def _check_experts(weights: Mapping[str, Tensor], folder: Path, config: Any) -> None:
    """Whether each of a layer's experts is there, in the shape of the others, and has a place: transformers, which
    stacks them, would not say which it is, and leaves out those that the config does not count."""
    if getattr(config, "zero_expert_num", None):  # LongCat's pass their input on, and transformers stores some of them
        return
    groups: dict[tuple[str, str], dict[int, Tensor]] = {}
    for name, weight in weights.items():
        if found := EXPERT.fullmatch(name):
            groups.setdefault((found[1], found[3]), {})[int(found[2])] = weight
    counts: dict[str, int] = {}
    for (before, _), experts in groups.items():
        counts[before] = max(counts.get(before, 0), max(experts) + 1)
    key, most = next(((key, most) for key in EXPERTS if type(most := getattr(config, key, None)) is int), ("", 0))
    if key and counts and max(counts.values()) > most:
        said = f"{folder / CONFIG}: {key} is {most}, and the checkpoint holds {max(counts.values())} experts a layer"
        raise CheckpointError(said, ANOTHER)
    for (before, after), experts in groups.items():
        if missing := [at for at in range(counts[before]) if at not in experts]:
            raise CheckpointError(f"{folder} lacks {before}{missing[0]}{after}", ANOTHER)
        [(usual, _)] = Counter(tuple(weight.shape) for weight in experts.values()).most_common(1)
        for at, weight in experts.items():
            if tuple(weight.shape) != usual:
                said = f"{folder}: {before}{at}{after} has shape {tuple(weight.shape)}, other experts {usual}"
                raise CheckpointError(said, ANOTHER)


def check_loaded(info: Mapping[str, Any], name: str, config: Any) -> None:
    """What transformers' loader found: `info` as from_pretrained(output_loading_info=True) gives it.

    Args:
        config: the model's, whose keys are named where one of them says another size.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
    """
    if missing := sorted(info["missing_keys"]):
        message = f"{name}: the checkpoint lacks {missing[0]}" + (
            f" and {len(missing) - 1} more" if missing[1:] else ""
        )
        raise CheckpointError(message, f"re-download the checkpoint, or {CONFIG} where it was changed to ask for more")
    if misshapen := sorted(info["mismatched_keys"], key=str):
        key, found, expected = misshapen[0]
        others = set(expected) - set(found)
        said = ", ".join(
            f"{each} {size}" for each, size in _flat(config.to_dict()) if type(size) is int and size in others
        )
        by = f"{CONFIG} ({said})" if said else CONFIG
        raise CheckpointError(
            f"misshapen tensors: {name}: {key} has shape {tuple(found)}, and by {by} it is {tuple(expected)}", ANOTHER
        )
    if unexpected := sorted(info["unexpected_keys"]):
        said = f"{name}: {len(unexpected)} tensors of the checkpoint are no part of the model, first {unexpected[0]}"
        notice(f"unexpected-{name}", said)


def check_finite(model: nn.Module, name: str) -> None:
    """Whether all weights are numbers: a sum each, in fp32; only one that is not finite is looked at closely.

    Raises:
        CheckpointError: a tensor has NaN or Inf.
    """
    for key, tensor in model.state_dict().items():
        if type(tensor) is not Tensor or tensor.is_meta or not tensor.is_floating_point():
            continue
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise CheckpointError(f"{name}: {key} has NaN or Inf", "re-download the checkpoint, or take an earlier one")
