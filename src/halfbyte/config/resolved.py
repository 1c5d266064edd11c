"""Typed values that a run's flat keys resolve to: the model, its storage, its precision and its parallel layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AXES = ("data", "shard", "tensor", "pipeline", "context")
ORIGINAL_CONTEXT = "original_max_position_embeddings"  # tokens that a model was trained for before RoPE scaling
# RoPE type → options in transformers' `rope_parameters`. `default` changes the base of the frequencies only.
ROPE_OPTIONS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", ORIGINAL_CONTEXT, "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": ("factor", ORIGINAL_CONTEXT, "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", ORIGINAL_CONTEXT, "attention_factor", "short_factor", "long_factor"),
    "default": ("rope_theta",),
}
ROPE_LIMITS = {"factor": (1, 10_000), "rope_theta": (1, 1e12)}  # least and most
ROPE_ORDER = {  # smaller and larger option: their values where they are not given
    ("low_freq_factor", "high_freq_factor"): (1.0, 4.0),
    ("beta_slow", "beta_fast"): (1.0, 32.0),
}


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling that a run applies to its model, see `modeling.rope_scaling`.

    Attributes:
        options: `rope_type` and its options, as in transformers' `rope_parameters`.
        length: tokens that the scaled model must reach, from which a missing factor follows.
    """

    options: Mapping[str, Any]
    length: int


@dataclass(frozen=True)
class Origin:
    """The model that a run starts from.

    Attributes:
        name: a folder with a Hugging Face checkpoint, a GGUF file, or a hub id.
        revision: branch, tag or commit of a hub model; None: its main branch.
        trust_remote_code: whether to run code that comes with the model.
        keep: for a GGUF file: linear layers whose type a halfbyte format represents keep their stored values.
        rope_scaling: RoPE scaling to apply to its config; None: as the config has it.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    keep: bool = False
    rope_scaling: RopeScaling | None = None


@dataclass(frozen=True)
class Storage:
    """How the frozen linear layers of a model are stored.

    Attributes:
        formats: pairs of an `fnmatch` pattern of module names and a format spec or `SIXTEEN`; the first match decides.
            Empty: nothing is quantized.
        skip_first, skip_last: number of first and of last decoder layers that stay in 16 bits.
        keep: for a GGUF file: linear layers whose type a halfbyte format represents keep their stored values;
            `formats` applies to the others.
        qat_scheme: spec of the format that every forward rounds 16-bit weights to; None: no rounding.
        merge_aware: whether every forward rounds the sum of a stored weight and its adapter to the weight's format.
        vision: pairs as in `formats`, for the linear layers of the vision tower; empty: as `formats` say. None: the
            tower stays in 16 bits.
    """

    formats: tuple[tuple[str, str], ...] = ()
    skip_first: int = 0
    skip_last: int = 0
    keep: bool = False
    qat_scheme: str | None = None
    merge_aware: bool = False
    vision: tuple[tuple[str, str], ...] | None = None

    @property
    def rounds(self) -> bool:
        """Whether forwards round the sum of weight and adapter, which merging stores."""
        return self.merge_aware or self.qat_scheme is not None

    @property
    def quantized(self) -> bool:
        """Whether any weight is stored in fewer than 16 bits."""
        return bool(self.formats)


@dataclass(frozen=True)
class Precision:
    """Dtypes and recipe of the computation. A dtype is its name in torch, or "auto": the device's fast one.

    Attributes:
        compute: dtype of matrix products and activations.
        weights: dtype of the weights that are not quantized.
        recipe: arithmetic of GEMMs with frozen weights (`recipe` of the configuration).
        recipe_options: the options of that recipe, by key.
    """

    compute: str = "auto"
    weights: str = "auto"
    recipe: str = "bf16"
    recipe_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Parallel:
    """Degree of each axis of parallelism. Their product is the number of processes, one per device.

    Attributes:
        data: data parallelism; every process has all weights.
        shard: data parallelism with sharded frozen weights (FSDP). With `context`, weights are sharded over both axes.
        tensor: tensor parallelism.
        pipeline: number of pipeline stages.
        context: context parallelism: slices of each sequence.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def size(self) -> int:
        """Number of processes."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def slices(self) -> int:
        """Number of slices that frozen weights are sharded into."""
        return self.shard * self.context if self.shard > 1 else 1

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes whose degree is above 1."""
        return tuple(axis for axis in AXES if getattr(self, axis) > 1)

    def __str__(self) -> str:
        """The value as the key `parallel` is written."""
        return f"{{{', '.join(f'{axis}: {getattr(self, axis)}' for axis in self.axes) or 'data: 1'}}}"


@dataclass(frozen=True)
class Sliced(Parallel):
    """The same degrees with frozen weights sharded over `context` although `shard` is 1.

    The memory plan chooses it for a run whose full weights fit no device.
    """

    @property
    def slices(self) -> int:
        return self.context
