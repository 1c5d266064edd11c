"""Format assignment: the storage format of each linear layer, one for all or by patterns of module names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import SIXTEEN, Storage
from ..formats import Blockwise4, named, of_checkpoint
from ..formats.base import Format
from ..modeling.architectures import expert_stacks, non_text_modules
from ..modeling.layer import decoder_layers
from ..reading.model_config import CONFIG
from ..reading.tensors import read_header, safetensors_files
from ..utils.errors import ModelError
from ..utils.notices import notice

if TYPE_CHECKING:
    from torch import nn


SKIP_KEYS = (
    "llm_int8_skip_modules",
    "modules_to_not_convert",
    "skip_modules",
)  # keys of quantization_config for unquantized modules
EXPERTS = re.compile(r"\.(\d+)\.(?:\w+\.)*experts\.")  # layer number in the name of an expert's weight
FLOAT_DTYPES = ("BF16", "F16", "F32")  # dtypes in a safetensors header


@dataclass(frozen=True)
class FormatAssignment:
    """Formats by patterns of module names: the first matching pattern decides; the format None means 16 bits.

    Attributes:
        patterns: (pattern as in `fnmatch`, format), in order.
        skip_first, skip_last: number of decoder layers at either end that stay in 16 bits.
        vision: patterns of the vision tower's layers; None: `patterns` hold for them, too.
        key: the key of a run that has the patterns, for errors.
    """

    patterns: tuple[tuple[str, Format | None], ...]
    skip_first: int = 0
    skip_last: int = 0
    vision: tuple[tuple[str, Format | None], ...] | None = None
    key: str = "quantization"

    def assign(self, model: nn.Module, names: Collection[str]) -> dict[str, Format]:
        """Return module name → format for those of `names` (linear layers of `model`) that are quantized.

        Raises:
            ModelError: a pattern matches no layer, or no decoder layer is left to quantize.
        """
        if not names:
            raise ModelError(
                f"{type(model).__name__} has no linear layer to quantize (no nn.Linear, nor a subclass that computes"
                " x·Wᵀ + b)",
                "set load_in_4bit: false, and no quantization",
            )
        if self.vision is not None:
            prefixes = tuple(f"{name}." for name in non_text_modules(model))
            inside = [name for name in names if name.startswith(prefixes)]
            text = replace(self, vision=None).assign(model, [name for name in names if name not in inside])
            return text | FormatAssignment(self.vision, key="quantize_vision_tower").assign(model, inside)
        matchers = [(re.compile(fnmatch.translate(pattern)), format) for pattern, format in self.patterns]
        for (pattern, _), (matcher, _) in zip(self.patterns, matchers, strict=True):
            if not any(map(matcher.match, names)):
                near = difflib.get_close_matches(pattern, names, 1, 0.0)
                raise ModelError(
                    f"{self.key}: {pattern!r} matches no linear layer", f"layers are named like {', '.join(near)}"
                )
        skipped = self._skipped_layers(model)
        formats: dict[str, Format] = {}
        unmatched = []
        for name in names:
            matched = [format for matcher, format in matchers if matcher.match(name)]
            if not matched:
                unmatched.append(name)
            elif matched[0] is not None and not name.startswith(skipped):
                formats[name] = matched[0]
        if unmatched:
            message = f"no pattern of {self.key} matches {len(unmatched)} linear layers, e.g. {unmatched[0]}"
            notice(f"{self.key}-unmatched", f"{message}: keeping them in 16 bits (add a last pattern '*' for them)")
        return formats

    def _skipped_layers(self, model: nn.Module) -> tuple[str, ...]:
        """Return prefixes of the names in the skipped decoder layers."""
        if not self.skip_first and not self.skip_last:
            return ()
        prefix, layers = decoder_layers(model)
        depth = len(layers)
        if self.skip_first + self.skip_last >= depth:
            raise ModelError(
                f"skip_quant_first_layers: {self.skip_first} and skip_quant_last_layers: {self.skip_last} "
                f"leave none of the {depth} layers to quantize",
                "lower them, or set load_in_4bit: false",
            )
        skipped = [*range(self.skip_first), *range(depth - self.skip_last, depth)]
        return tuple(f"{prefix}.{index}." for index in skipped)


def format_assignment(storage: Storage) -> FormatAssignment:
    """Return the format assignment of `storage`.

    Raises:
        ModelError: a format or one of its options does not exist.
    """

    def patterns_of(key: str, formats: Iterable[tuple[str, str]]) -> tuple[tuple[str, Format | None], ...]:
        try:
            return tuple((pattern, None if spec == SIXTEEN else named(spec)) for pattern, spec in formats)
        except ModelError as error:
            raise ModelError(f"{key}: {error.message}", error.fix) from error

    vision = patterns_of("quantize_vision_tower", storage.vision) if storage.vision else None
    patterns = patterns_of("quantization", storage.formats)
    return FormatAssignment(patterns, storage.skip_first, storage.skip_last, vision)


def quantized_names(entry: Any) -> set[str]:
    """Return the quantized modules that a `quantization_config` lists; only halfbyte's lists them."""
    return {name for modules in entry.get("formats", {}).values() for name in modules}


def skipped_modules(entry: Mapping[str, Any]) -> list[str] | None:
    """Return the patterns of unquantized modules in a `quantization_config`, as `quantizable` takes them."""
    if entry.get("quant_method") == "compressed-tensors":
        ignored = entry.get("ignore") or []
        return [name[3:] if name.startswith("re:") else f"{re.escape(name)}$" for name in ignored]
    return next(filter(None, map(entry.get, SKIP_KEYS)), None)


def _float_stacks(model_config: Any, stacks: Collection[str]) -> list[str]:
    """Return the stacks that a quantized checkpoint stores in 16 or 32 bits, without its config saying so.

    Determined per layer from the headers of local files; empty if the files are not local.
    """
    folder = Path(getattr(model_config, "_name_or_path", None) or "")
    if not stacks or not (folder / CONFIG).is_file():
        return []
    is_float: dict[str, bool] = {}  # layer number → whether all its experts' weights are floats
    for file in safetensors_files(folder):
        for name, entry in read_header(file).items():
            if (layer := EXPERTS.search(name)) and not name.endswith("bias"):
                sound = entry["dtype"] in FLOAT_DTYPES and name.endswith(("_proj", "weight"))
                is_float[layer[1]] = is_float.get(layer[1], True) and sound
    return [name for name in stacks if (layer := EXPERTS.search(name)) and is_float.get(layer[1], False)]


def stored_formats(storage: Storage, model_config: Any, model: nn.Module, names: Collection[str]) -> dict[str, Format]:
    """Return module name → format for those of `names` that are quantized.

    Formats are assigned by `storage`, except for modules that `model_config` describes as stored quantized.
    """
    entry = getattr(model_config, "quantization_config", None) or {}
    stored_format = of_checkpoint(entry)
    if stored_format is not None:
        formats = dict.fromkeys(names, stored_format.in_memory)
        stacks = [name for name in expert_stacks(model, []) if name in names]
        if isinstance(stored_format, Blockwise4):  # experts' nested scales are un-nested when stacked (`expert_stacks`)
            formats |= {name: replace(stored_format, nested=False) for name in stacks}
        for name in _float_stacks(model_config, stacks):
            del formats[name]
        return formats
    if "formats" not in entry:
        return format_assignment(storage).assign(model, names)
    stored = {name: named(spec) for spec, modules in entry["formats"].items() for name in modules}
    return format_assignment(storage).assign(model, names) | stored if entry.get("others") else stored
