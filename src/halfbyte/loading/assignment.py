"""Which format each linear layer of a model is stored in: one for all, or one for each pattern of names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import SIXTEEN, Storage
from ..formats import FORMATS, Blockwise4, named
from ..formats.base import Format
from ..modeling.architectures import expert_stacks
from ..modeling.layer import decoder_layers
from ..reading.model_config import CONFIG
from ..reading.tensors import read_header, safetensors_files
from ..utils.errors import ModelError
from ..utils.notices import notice

if TYPE_CHECKING:
    from torch import nn


SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert")  # what a quantized checkpoint says it leaves whole
EXPERTS = re.compile(r"\.(\d+)\.(?:\w+\.)*experts\.")  # in a name: the number of the layer that has them
FLOATS = ("BF16", "F16", "F32")  # in the header of a file


@dataclass(frozen=True)
class Choice:
    """Formats by patterns of module names; the first pattern that matches decides, and None leaves a layer in 16 bits.

    Attributes:
        patterns: (pattern as in `fnmatch`, format), in order.
        skip_first, skip_last: decoder layers at either end that are left in 16 bits whole.
    """

    patterns: tuple[tuple[str, Format | None], ...]
    skip_first: int = 0
    skip_last: int = 0

    def assign(self, model: nn.Module, names: Collection[str]) -> dict[str, Format]:
        """Module name → format, of those `names` (linear layers of `model`) that are quantized.

        Raises:
            ModelError: a pattern matches no layer, or no decoder layer is left to quantize.
        """
        matchers = [(re.compile(fnmatch.translate(pattern)), format) for pattern, format in self.patterns]
        for (pattern, _), (matcher, _) in zip(self.patterns, matchers, strict=True):
            if not any(map(matcher.match, names)):
                near = difflib.get_close_matches(pattern, names, 1, 0.0)
                raise ModelError(
                    f"quantization: {pattern!r} matches no linear layer", f"layers are named like {', '.join(near)}"
                )
        kept = self._kept_layers(model)
        formats: dict[str, Format] = {}
        unmatched = []
        for name in names:
            matched = [format for matcher, format in matchers if matcher.match(name)]
            if not matched:
                unmatched.append(name)
            elif matched[0] is not None and not name.startswith(kept):
                formats[name] = matched[0]
        if unmatched:
            said = f"no pattern of quantization names {len(unmatched)} linear layers, {unmatched[0]} first: they stay"
            notice("quantization-unmatched", f"{said} in 16 bits (a last pattern '*' would name them)")
        return formats

    def _kept_layers(self, model: nn.Module) -> tuple[str, ...]:
        """Prefixes of the names in the decoder layers that are skipped."""
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
        kept = [*range(self.skip_first), *range(depth - self.skip_last, depth)]
        return tuple(f"{prefix}.{index}." for index in kept)


def choose(storage: Storage) -> Choice:
    """The formats that `storage` names.

    Raises:
        ModelError: a format or one of its options does not exist.
    """

    def format_of(spec: str) -> Format | None:
        try:
            return None if spec == SIXTEEN else named(spec)
        except ModelError as error:
            raise ModelError(f"quantization: {error.message}", error.fix) from error

    patterns = tuple((pattern, format_of(spec)) for pattern, spec in storage.formats)
    return Choice(patterns, storage.skip_first, storage.skip_last)


def stored_names(entry: Any) -> set[str]:
    """Modules that a checkpoint's `quantization_config` names as quantized, which ours alone does."""
    return {name for modules in entry.get("formats", {}).values() for name in modules}


def left_whole(entry: Mapping[str, Any]) -> list[str] | None:
    """What a checkpoint's `quantization_config` says is not quantized, as `quantizable` takes it: patterns of names."""
    if entry.get("quant_method") == "compressed-tensors":
        return [each[3:] if each.startswith("re:") else f"{re.escape(each)}$" for each in entry.get("ignore") or []]
    return next(filter(None, map(entry.get, SKIPPED)), None)


def _whole_in_files(model_config: Any, stacks: Collection[str]) -> list[str]:
    """Those of `stacks` that a quantized checkpoint has in 16 or 32 bits, which its config does not say, as of the
    layers of their numbers; none where its files are not here."""
    folder = Path(getattr(model_config, "_name_or_path", None) or "")
    if not stacks or not (folder / CONFIG).is_file():
        return []
    whole: dict[str, bool] = {}  # by layer
    for file in safetensors_files(folder):
        for name, entry in read_header(file).items():
            if (layer := EXPERTS.search(name)) and not name.endswith("bias"):
                sound = entry["dtype"] in FLOATS and name.endswith(("_proj", "weight"))
                whole[layer[1]] = whole.get(layer[1], True) and sound
    return [name for name in stacks if (layer := EXPERTS.search(name)) and whole.get(layer[1], False)]


def stored_formats(storage: Storage, model_config: Any, model: nn.Module, names: Collection[str]) -> dict[str, Format]:
    """Module name → format, of those `names` that are quantized: as `storage` says, but for those that `model_config`
    says are stored so."""
    entry = getattr(model_config, "quantization_config", None) or {}
    found = next(filter(None, (cls.from_quantization_config(entry) for cls in FORMATS.values())), None)
    if found is not None:
        formats, stacks = dict.fromkeys(names, found), [name for name in expert_stacks(model, []) if name in names]
        if isinstance(found, Blockwise4):  # what experts' scales are nested in comes apart (`stored_stacks`)
            formats |= {name: replace(found, nested=False) for name in stacks}
        for name in _whole_in_files(model_config, stacks):
            del formats[name]
        return formats
    if "formats" not in entry:
        return choose(storage).assign(model, names)
    stored = {name: named(spec) for spec, modules in entry["formats"].items() for name in modules}
    return choose(storage).assign(model, names) | stored if entry.get("others") else stored
