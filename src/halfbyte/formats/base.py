"""What a stored format is: named parts, and two functions between parts and values.

A format is a frozen dataclass of its options. It lists its parts once (`part_specs`); the tensor subclass, saving,
loading, sharding and compiling derive everything from that list.
"""

from __future__ import annotations

import abc
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.linear import add_term, linear_rows
from ..reading import parse_json
from ..utils.errors import CheckpointError, ModelError

Parts = Mapping[str, Tensor]
PartSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DECODED = (*FLOATS, torch.float64)  # dtypes of dequantized values
SIDES = ("rows", "columns")
QUANT_METHOD = "halfbyte"  # what config.json calls a checkpoint whose layers name their formats


class Format(abc.ABC):
    """A way to store a floating-point tensor in fewer bits. Subclasses are frozen dataclasses of their options.

    Attributes:
        name: what `spec` starts with.
        names: what users call the format in `quantization:`, e.g. "nf4" → the spec that it means.
    """

    name: ClassVar[str]
    names: ClassVar[dict[str, str]]

    @property
    @abc.abstractmethod
    def spec(self) -> str:
        """Name and options as one string, read back by `formats.from_spec`; what torch.compile knows a format by."""

    @classmethod
    @abc.abstractmethod
    def parse(cls, options: str) -> Format:
        """The format from its `spec` after the name."""

    @classmethod
    @abc.abstractmethod
    def examples(cls) -> list[Format]:
        """A few option sets that together reach every path of the format; the contract test runs each of them."""

    @abc.abstractmethod
    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        """Name, shape and dtype of each part that stores a tensor of `shape`, in a fixed order."""

    @abc.abstractmethod
    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Parts of `weight` (any shape; fp32, fp16 or bf16), on its device.

        Raises:
            ModelError: the weight has NaN or Inf, or a dtype the format does not take.
        """

    @abc.abstractmethod
    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Values of `shape` in `dtype`, rounded once from fp32."""

    def values(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """`dequantize` in any dtype of `DECODED`; float64 holds the fp32 values.

        Raises:
            ModelError: another dtype.
        """
        if dtype is torch.float64:
            return self.dequantize(parts, shape, torch.float32).double()
        if dtype not in FLOATS:
            raise ModelError(
                f"a weight in {self.spec} is not dequantized to {dtype}", "use float32, float16, bfloat16 or float64"
            )
        return self.dequantize(parts, shape, dtype)

    def linear(self, x: Tensor, parts: Parts, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        """[M, N] = x·Wᵀ + b for x [M, K], no gradient. Formats override it where few rows need no dequantized copy."""
        return linear_rows(x, self.dequantize(parts, shape, x.dtype), bias)

    def linear_plus(
        self, x: Tensor, parts: Parts, shape: tuple[int, int], bias: Tensor | None, term: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """`linear` and an adapter's u·Bᵀ, if given: u [M, r], B [N, r]. Formats override it that add it on the way."""
        return add_term(self.linear(x, parts, shape, bias), term)

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        """`dtype` [rows, width]: chosen rows of a two-dimensional table. Formats override it to decode only those."""
        return self.dequantize(parts, shape, dtype)[rows]

    def stacked(self) -> Format:
        """The format of a stack [E, N, K] of matrices, each quantized by itself as this format says."""
        return FORMATS["stack"].parse(self.spec)

    def join(self, weights: Iterable[Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Parts of a stack of `shape` [E, N, K] from its matrices [N, K] in order, one in memory at a time.

        Raises:
            ModelError: this is no format of stacks (`stacked`), or a matrix, which is named, has NaN or Inf.
        """
        raise ModelError(f"{self.spec} stores matrices, not stacks of them", "take its stacked()")

    def fill(self, experts: Iterable[Parts], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Parts of a stack of `shape` [E, N, K] from those of its matrices in order, one in memory at a time.

        Raises:
            ModelError: this is no format of stacks (`stacked`).
        """
        raise ModelError(f"{self.spec} stores matrices, not stacks of them", "take its stacked()")

    def whole_rows(self, rows: int) -> bool:
        """Whether the parts of matrices with so many rows, one after another, are those of one matrix of all rows."""
        return False

    def dequantize_stack(self, parts: Parts, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor | None:
        """`dtype` [E, N, K] in one call, of the parts of E matrices with a leading dimension E; None: not in one."""
        count, rows, columns = shape
        if not self.whole_rows(rows):
            return None
        whole = (count * rows, columns)
        flat = {name: parts[name].reshape(size) for name, (size, _) in self.part_specs(whole).items()}
        return self.dequantize(flat, whole, dtype).view(shape)

    def above(self, pieces: Sequence[Parts], shape: tuple[int, int]) -> tuple[Format, dict[str, Tensor]]:
        """Matrices of `shape` [N, K], one above the other, as a matrix of a stack: its format, and its parts.

        The values are the same. Where scales are nested in what matrices do not share, they come apart.

        Raises:
            ModelError: what shares a scale would cross them, or they have different codebooks, scales or orders.
        """
        if len(pieces) == 1:
            return self, dict(pieces[0])
        if not self.whole_rows(shape[0]):
            raise ModelError(
                f"{self.spec}: matrices of shape {shape} cannot be stacked: they share no scales", "use 16-bit weights"
            )
        specs = self.part_specs((len(pieces) * shape[0], shape[1]))
        return self, {name: torch.cat([each[name] for each in pieces]).view(size) for name, (size, _) in specs.items()}

    def check_stack(self, shape: tuple[int, ...]) -> None:
        """Look whether this stores stacks of `shape`.

        Raises:
            ModelError: it is none, [E, N, K], or blocks would cross its matrices.
        """
        raise ModelError(f"{self.spec} stores matrices, not stacks of them", "take its stacked()")

    def expert(self, parts: Parts, shape: tuple[int, ...], index: int) -> tuple[Format, dict[str, Tensor]]:
        """Matrix `index` of a stack of `shape` [E, N, K]: its format, and its parts as views.

        Raises:
            ModelError: this is no format of stacks.
        """
        raise ModelError(f"{self.spec} stores matrices, not stacks of them", "take its stacked()")

    def split(self, parts: Parts, shape: tuple[int, ...], dim: int, n: int) -> tuple[Format, list[dict[str, Tensor]]]:
        """A matrix as `n` equal ones, each in memory of its own; on the meta device, their shapes.

        Together they have the values of the whole, bit for bit. Where one of these does not begin with a block of this
        format, they are in one with smaller blocks, or with scales that are not nested.

        Args:
            shape: of the matrix.
            dim: 0: each has some of its rows; 1: of its columns.

        Returns:
            The format of all, and the parts of each, in order.

        Raises:
            ModelError: `n` does not divide it, or no block of any size ends where they do.
        """
        if len(shape) != 2 or dim not in (0, 1):
            raise ModelError(
                f"{self.spec}: a tensor of shape {tuple(shape)} is not split along {dim}", "split matrices"
            )
        if shape[dim] % n:
            raise ModelError(f"{self.spec}: {shape[dim]} {SIDES[dim]} are not split {n} ways", "take a divisor of them")
        found = self._split(parts, (shape[0], shape[1]), dim, n)
        if isinstance(found, int):
            message = f"{self.spec}: a matrix of shape {tuple(shape)} is not split into {n} by {SIDES[dim]}"
            raise ModelError(
                message, f"what each gets must be a multiple of {found}: split it fewer ways, or use another format"
            )
        format_, parts_of = found
        sides = tuple(size // n if each == dim else size for each, size in enumerate(shape))
        return format_, [{name: each[name] for name in format_.part_specs(sides)} for each in parts_of]

    def _split(
        self, parts: Parts, shape: tuple[int, int], dim: int, n: int
    ) -> tuple[Format, list[dict[str, Tensor]]] | int:
        """`split` of sides that divide; or what rows, columns or values of each must be a multiple of."""
        raise ModelError(f"{self.spec}: nothing splits weights of this format", "use parallel: {data: N} or {shard: N}")

    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        """Checkpoint entries: suffix after the parameter's name ("" for the codes themselves) → tensor.

        A suffix "../SCB" is the entry `SCB` beside the parameter `weight`. Unless a format overrides this for another
        tool's layout, the first part is the codes, the others go by their names, and `quant_state.halfbyte__<name>`
        holds JSON: spec, shape, dtype.
        """
        codes, *others = parts
        meta = {"spec": self.spec, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        state = {"": parts[codes], **{name: parts[name] for name in others}}
        return state | {_meta_key(self.name): json_entry(meta)}

    @classmethod
    def from_state(cls, state: Parts, name: str) -> tuple[Format, dict[str, Tensor], tuple[int, ...], torch.dtype]:
        """The reverse of `to_state`: format, parts, shape and dtype.

        Raises:
            CheckpointError: an entry of parameter `name` is missing, misshapen or contradicts another.
        """
        key = _meta_key(cls.name)
        meta = read_json_entry(state, key, name)
        try:
            head, _, options = meta["spec"].partition(":")
            if head != cls.name:
                raise ValueError(f"{head!r} is not {cls.name!r}")
            format_ = cls.parse(options)
            shape, dtype = tuple(int(size) for size in meta["shape"]), getattr(torch, meta["dtype"])
            if min(shape, default=0) < 0 or dtype not in DECODED:
                raise ValueError(f"a {dtype} weight of shape {shape}")
            specs = format_.part_specs(shape)
        except (KeyError, ModelError, AttributeError, TypeError, ValueError) as error:
            message = f"{name}.{key} is not usable: {error!r}"
            raise CheckpointError(message, "re-download the checkpoint") from error
        suffixes = {part: "" if not at else part for at, part in enumerate(specs)}
        parts = {part: state[suffix] for part, suffix in suffixes.items() if suffix in state}
        check_parts(parts, specs, suffixes, name)
        format_.check_values(parts, {part: entry_name(name, suffix) for part, suffix in suffixes.items()})
        return format_, parts, shape, dtype

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        """Look for values in loaded parts that no quantizer writes; parts of a stack have a leading dimension more.

        Args:
            labels: part → its key in the checkpoint.

        Raises:
            CheckpointError: there is one.
        """
        check_finite(parts, labels)

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        """Suffixes of all checkpoint entries that some options of the format write; what it is recognised by."""
        shape, found = (2, 64), set[str]()
        for example in cls.examples():
            parts = example.quantize(torch.ones(shape, device="cpu"))
            found |= example.to_state(parts, shape, torch.float32).keys()
        return frozenset(found)

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        """The format of a checkpoint that another tool quantized, from its config.json's `quantization_config`.

        None: not a checkpoint of this format. Its weights are then read by `from_state` of the returned format's class.
        """
        return None

    def bits_per_weight(self, shape: tuple[int, ...]) -> float:
        """Stored bits over weights, scales included."""
        bytes_ = sum(torch.Size(size).numel() * dtype.itemsize for size, dtype in self.part_specs(shape).values())
        return 8 * bytes_ / max(torch.Size(shape).numel(), 1)

    def check_weight(self, weight: Tensor) -> None:
        if weight.dtype not in FLOATS:
            raise ModelError(
                f"cannot quantize a {weight.dtype} tensor to {self.name}", "convert it to a 16- or 32-bit float"
            )

    def quantize_expert(self, weight: Tensor, at: int) -> dict[str, Tensor]:
        """`quantize`, whose errors name expert `at`."""
        try:
            return self.quantize(weight)
        except ModelError as error:
            raise ModelError(f"expert {at}: {error.message}", error.fix) from error


FORMATS: dict[str, type[Format]] = {}


def register_format(cls: type[Format]) -> type[Format]:
    """Make a format known by each of its names, for `from_spec` and for the contract test."""
    FORMATS[cls.name] = cls
    return cls


def cut(part: Tensor, n: int, dim: int) -> list[Tensor]:
    """`part` as n equal ones along `dim`, each in memory of its own."""
    return [each.clone(memory_format=torch.contiguous_format) for each in part.tensor_split(n, dim)]


def split_parts(n: int, cuts: Mapping[str, Sequence[Tensor]], shared: Parts) -> list[dict[str, Tensor]]:
    """The parts of each of n matrices: its own of `cuts`, and `shared` ones, by name."""
    return [
        {name: own[i] for name, own in cuts.items()} | {name: part.clone() for name, part in shared.items()}
        for i in range(n)
    ]


def json_entry(value: dict[str, Any]) -> Tensor:
    """uint8 [bytes], on the CPU: a JSON object as a checkpoint entry."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def read_json_entry(state: Parts, key: str, name: str) -> dict[str, Any]:
    """The reverse of `json_entry` for entry `key` of parameter `name`.

    Raises:
        CheckpointError: the entry is missing or is not a JSON object.
    """
    if key not in state:
        raise CheckpointError(f"{name}.{key} is missing from the checkpoint", "re-download the checkpoint")
    entry, fix = state[key], "re-download the checkpoint"
    if entry.dtype != torch.uint8 or entry.ndim != 1:
        raise CheckpointError(f"{name}.{key} is not JSON: it is {entry.dtype} {tuple(entry.shape)}", fix)
    value = parse_json(bytes(entry.cpu().tolist()), f"{name}.{key} is not JSON", CheckpointError, fix)
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}.{key} is not a JSON object", "re-download the checkpoint")
    return value


def check_parts(parts: Parts, specs: PartSpecs, suffixes: Mapping[str, str], name: str) -> None:
    """Compare loaded parts with what the format lists; `suffixes` names each part's entry in the checkpoint.

    Raises:
        CheckpointError: a part of parameter `name` is missing, or has another shape or dtype.
    """
    for part, (size, dtype) in specs.items():
        label = entry_name(name, suffixes.get(part, part))
        if part not in parts:
            raise CheckpointError(f"{label} is missing from the checkpoint", "re-download the checkpoint")
        found = parts[part]
        if tuple(found.shape) != size or found.dtype != dtype:
            raise CheckpointError(
                f"{label} is {found.dtype} {tuple(found.shape)}, expected {dtype} {size}", "re-download the checkpoint"
            )


def check_finite(parts: Parts, labels: Mapping[str, str]) -> None:
    """Look for NaN and Inf in loaded scales.

    Raises:
        CheckpointError: a part, called as `labels` has it, has one.
    """
    for part, found in parts.items():
        if found.dtype in FLOATS and not found.is_meta and not bool(torch.isfinite(found).all()):
            raise CheckpointError(f"{labels[part]} has NaN or Inf", "re-download the checkpoint")


def check_not_negative(scales: Tensor, label: str) -> None:
    """Compare loaded scales, called `label`, with what every quantizer writes.

    Raises:
        CheckpointError: one is negative.
    """
    if not scales.is_meta and bool((scales < 0).any()):
        raise CheckpointError(f"{label} has negative scales", "re-download the checkpoint")


def entry_name(name: str, suffix: str) -> str:
    """Key in a checkpoint of the entry with this suffix of parameter `name`."""
    if suffix.startswith("../"):
        return name.rpartition(".")[0] + name.rpartition(".")[1] + suffix[3:]
    if suffix.startswith("_"):
        return name + suffix
    return f"{name}.{suffix}" if suffix else name


def parameter_of_entry(entry: str, suffix: str) -> str | None:
    """The parameter (`weight` of a module) whose entry with this suffix is `entry`; None when it cannot be one."""
    if suffix.startswith("../"):
        module, dot, last = entry.rpartition(".")
        return f"{module}{dot}weight" if last == suffix[3:] else None
    if suffix.startswith("_"):
        return entry.removesuffix(suffix) if entry.endswith(suffix) else None
    return entry.removesuffix(f".{suffix}") if entry.endswith(f".{suffix}") else None


def _meta_key(format_name: str) -> str:
    return f"quant_state.halfbyte__{format_name}"
