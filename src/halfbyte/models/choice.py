"""Which format each linear layer of a model is stored in: one for all, or one for each pattern of names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import KEEP, SIXTEEN
from ..errors import ModelError
from ..formats import FORMATS, named, names
from ..formats.base import Format
from ..formats.blockwise4 import Blockwise4
from ..notices import notice

if TYPE_CHECKING:
    from torch import nn

    from ..config import RunConfig


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
        prefix, depth = decoder_layers(model)
        if self.skip_first + self.skip_last >= depth:
            raise ModelError(
                f"skip_quant_first_layers: {self.skip_first} and skip_quant_last_layers: {self.skip_last} "
                f"leave none of the {depth} layers to quantize",
                "lower them, or set load_in_4bit: false",
            )
        kept = [*range(self.skip_first), *range(depth - self.skip_last, depth)]
        return tuple(f"{prefix}.{index}." for index in kept)


def decoder_layers(model: nn.Module) -> tuple[str, int]:
    """Name and length of the list of decoder layers.

    Raises:
        ModelError: the model has no such list.
    """
    from torch import nn

    depth = model.config.get_text_config().num_hidden_layers  # type: ignore[operator, union-attr]
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, depth
    raise ModelError(f"{type(model).__name__} has no list of {depth} decoder layers", "remove skip_quant_*_layers")


def choose(
    quantization: str | Mapping[str, str] | None,
    *,
    quant_type: str = "nf4",
    blocksize: int = 64,
    double_quant: bool = True,
    skip_first: int = 0,
    skip_last: int = 0,
) -> Choice:
    """The choice that a configuration describes.

    Args:
        quantization: a format's name or spec for every layer, or pattern → name, spec or "16bit"; None: `quant_type`.
        quant_type, blocksize, double_quant: see `Blockwise4`; the last two also say what the names nf4 and fp4 mean.
        skip_first, skip_last: see `Choice`.

    Raises:
        ModelError: a format or one of its options does not exist.
    """

    def format_of(name: str) -> Format | None:
        if name == SIXTEEN:
            return None
        if name in ("nf4", "fp4"):
            return Blockwise4(name, blocksize, double_quant)  # type: ignore[arg-type]
        try:
            return named(name)
        except ModelError as error:
            raise ModelError(f"quantization: {error.message}", error.fix) from error

    if quantization is None:
        return Choice((("*", Blockwise4(quant_type, blocksize, double_quant)),), skip_first, skip_last)  # type: ignore[arg-type]
    given = {"*": quantization} if isinstance(quantization, str) else quantization
    patterns = tuple((pattern, format_of(name)) for pattern, name in given.items())
    return Choice(patterns, skip_first, skip_last)


def configured(config: RunConfig) -> Choice:
    """The choice of a run whose weights are quantized; with `quantization: keep`, for the layers that are not kept."""
    return choose(
        None if config.quantization == KEEP else config.quantization,
        quant_type=config.bnb_4bit_quant_type,
        blocksize=config.bnb_4bit_blocksize,
        double_quant=config.bnb_4bit_use_double_quant,
        skip_first=config.skip_quant_first_layers,
        skip_last=config.skip_quant_last_layers,
    )


def stored_formats(
    config: RunConfig, entry: Mapping[str, Any], model: nn.Module, names: Collection[str]
) -> dict[str, Format]:
    """Module name → format, of those `names` that are quantized in a run: as its keys say, but for those that `entry`,
    the `quantization_config` of the model's config.json, says are stored so."""
    found = next(filter(None, (cls.from_quantization_config(entry) for cls in FORMATS.values())), None)
    if found is not None:
        return dict.fromkeys(names, found)
    if "formats" not in entry:
        return configured(config).assign(model, names)
    stored = {name: named(spec) for spec, modules in entry["formats"].items() for name in modules}
    return configured(config).assign(model, names) | stored if entry.get("others") else stored


def qat_format(scheme: str) -> Format:
    """The format that `qat_scheme` names; the same name in `halfbyte merge --quantize` stores it.

    Raises:
        ModelError: there is no such format, or it cannot be quantized to.
    """
    try:
        format_ = named(scheme)
    except ModelError as error:
        raise ModelError(f"qat_scheme: {error.message}", error.fix) from error
    if not type(format_).examples():
        raise ModelError(
            f"qat_scheme: {scheme} is only read from checkpoints", f"use one of {', '.join(sorted(names()))}"
        )
    return format_
