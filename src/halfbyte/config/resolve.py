"""What a run's flat keys come to: typed sections, which everything below takes in place of the keys.

`resolve` is asked once, where a run begins. Below, nobody asks which key or which default a value came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import ConfigDict

from ..utils.errors import ConfigError
from ..utils.notices import notice
from .contradictions import RECIPE_OPTIONS
from .reading import given_section
from .schema import KEEP, AdapterSection, QuantizationSection, RunConfig

NAMES_BEFORE = {  # of `load_model`'s options, before they had the names of the keys
    "quant_type": "bnb_4bit_quant_type",
    "blocksize": "bnb_4bit_blocksize",
    "double_quant": "bnb_4bit_use_double_quant",
}


@dataclass(frozen=True)
class Origin:
    """The model a run begins with.

    Attributes:
        name: a folder with a Hugging Face checkpoint, a GGUF file, or a hub id.
        revision: branch, tag or commit of a hub model; None: its main branch.
        trust_remote_code: whether code that comes with it is run.
        keep: of a GGUF file: linear layers whose type a format holds keep their values.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    keep: bool = False


@dataclass(frozen=True)
class Storage:
    """How the frozen linear layers of a model are stored.

    Attributes:
        formats: (pattern of module names as in `fnmatch`, spec of a format or `SIXTEEN`), of which the first that
            matches decides. Empty: nothing is quantized.
        skip_first, skip_last: decoder layers at either end that stay in 16 bits.
        keep: of a GGUF file: linear layers whose type a format holds keep their values, and `formats` is of the others.
        qat_scheme: spec of the format that 16-bit weights are rounded to in every forward; None: they are not.
    """

    formats: tuple[tuple[str, str], ...] = ()
    skip_first: int = 0
    skip_last: int = 0
    keep: bool = False
    qat_scheme: str | None = None

    @property
    def quantized(self) -> bool:
        """Whether any weight is stored in fewer than 16 bits."""
        return bool(self.formats)


@dataclass(frozen=True)
class Precision:
    """What is computed in. A dtype is torch's name for it, or "auto": what the device is fast in.

    Attributes:
        compute: dtype of matrix products and activations.
        weights: dtype of the weights that are not quantized.
        recipe: what products with frozen weights are computed in.
        recipe_options: the options of that recipe, by key.
    """

    compute: str = "auto"
    weights: str = "auto"
    recipe: str = "bf16"
    recipe_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Parallel:
    """How many ways a run is divided; the product is the number of processes, one a device.

    Attributes:
        data: ways that rows are, each with all weights.
        shard: ways that rows and the bytes of the frozen weights are; where there are any, those bytes are along
            `context`, too.
        tensor: ways that each product is.
        pipeline: ways that the layers are.
        context: ways that the tokens of each row are.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def size(self) -> int:
        return math.prod(getattr(self, each.name) for each in fields(self))

    @property
    def slices(self) -> int:
        """Of frozen bytes."""
        return self.shard * self.context if self.shard > 1 else 1

    def __str__(self) -> str:
        """As the key is written."""
        ways = {each.name: getattr(self, each.name) for each in fields(self)}
        return f"{{{', '.join(f'{name}: {n}' for name, n in ways.items() if n > 1) or 'data: 1'}}}"


@dataclass(frozen=True)
class Sliced(Parallel):
    """The same ways, where frozen bytes are divided along `context` without any `shard`: what the memory plan makes of
    a run that fits no device whole."""

    @property
    def slices(self) -> int:
        return self.context


class Adapter(AdapterSection):
    """The low-rank adapter of a run, and the model under it."""

    model_config = ConfigDict(frozen=True, validate_assignment=False)

    origin: Origin


@dataclass(frozen=True)
class Resolved:
    """A run's sections.

    Attributes:
        adapter: None for full fine-tuning.
        parallel: None: as the memory plan finds best for the processes there are.
    """

    origin: Origin
    storage: Storage
    precision: Precision
    adapter: Adapter | None
    parallel: Parallel | None


def resolve(config: RunConfig) -> Resolved:
    """The sections that a run's keys describe."""
    storage = _storage(config)
    revision = None if config.model_revision == "main" else config.model_revision
    origin = Origin(config.model_name_or_path, revision, config.trust_remote_code, storage.keep)
    adapter = Adapter(**_keys_of(AdapterSection, config), origin=origin) if config.use_peft else None
    parallel = None if config.parallel == "auto" else Parallel(**config.parallel)
    return Resolved(origin, storage, _precision(config), adapter, parallel)


def storage_of(storage: Storage | None = None, /, **keys: Any) -> Storage:
    """`storage`, or what the quantization keys describe, given in Python: `load_in_4bit`, `quantization`, ...

    Other tools' names are read as in a run's file, and said.

    Raises:
        ConfigError: no such key, or not such a value, or keys that contradict each other.
    """
    if storage is not None:
        if keys:
            raise ConfigError(f"{', '.join(keys)} beside a storage", "give one of the two")
        return storage
    for before in NAMES_BEFORE.keys() & keys.keys():
        now = NAMES_BEFORE[before]
        notice(f"renamed {before}", f"{before} is read as {now}; the old name goes in the next version")
        keys[now] = keys.pop(before)
    return _storage(given_section(QuantizationSection, keys))


def _storage(keys: QuantizationSection) -> Storage:
    if not keys.quantized:
        return Storage(qat_scheme=keys.qat_scheme)
    usual = _four_bit(keys, keys.bnb_4bit_quant_type)
    keep = keys.quantization == KEEP
    chosen = usual if keep or keys.quantization is None else keys.quantization
    patterns = chosen.items() if isinstance(chosen, dict) else [("*", chosen)]
    formats = tuple((pattern, _four_bit(keys, spec) if spec in ("nf4", "fp4") else spec) for pattern, spec in patterns)
    return Storage(formats, keys.skip_quant_first_layers, keys.skip_quant_last_layers, keep)


def _four_bit(keys: QuantizationSection, kind: str) -> str:
    """What nf4 or fp4 means with these keys."""
    scales = "nested" if keys.bnb_4bit_use_double_quant else "plain"
    return f"blockwise4:{kind}:{keys.bnb_4bit_blocksize}:{scales}"


def _precision(config: RunConfig) -> Precision:
    """Full fine-tuning keeps float32 weights, unless a dtype is asked for: an update of 1e-4 of a weight is lost in
    bfloat16's 8 bits."""
    weights = "float32" if not config.use_peft and config.dtype == "auto" else config.dtype
    options = {key: getattr(config, key) for key in RECIPE_OPTIONS.get(config.recipe, ())}
    if config.recipe == "nvfp4":
        options["seed"] = config.seed
    return Precision(config.dtype, weights, config.recipe, options)


def _keys_of(section: type[AdapterSection], config: RunConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in section.model_fields}
