"""The interface of a quantized storage format: named parts, and the conversions between parts and values.

A format is a frozen dataclass of its options. It lists its parts once (`part_specs`); the tensor subclass, saving,
loading, sharding and compiling derive everything from that list.
"""

from __future__ import annotations

import abc
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, TypeGuard

import torch
from torch import Tensor

from ..reading import parse_json
from ..utils.errors import CheckpointError, ModelError
from .linear import PackedProduct, linear_rows

Parts = Mapping[str, Tensor]
PartSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]
Shards = tuple["Format", list[dict[str, Tensor]]]  # format of all shards of a matrix, parts of each
Loaded = tuple["Format", dict[str, Tensor], tuple[int, ...], torch.dtype]  # format, parts, shape and dtype of values

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DECODED = (*FLOATS, torch.float64)  # dtypes of dequantized values
SIDES = ("rows", "columns")
META_KEY = "quant_state.halfbyte__"  # before the format's name: key of the entry with spec, shape and dtype
DAMAGED = "re-download the checkpoint"  # what to do about wrong entries
QUANT_METHOD = "halfbyte"  # `quant_method` in config.json of a checkpoint that stores a format per layer


class QuantizedLike(Protocol):
    """The attributes of `tensor.QuantizedTensor` that `autograd` reads; the class is defined above `autograd`."""

    format: Format
    requires_grad: bool

    @property
    def parts(self) -> dict[str, Tensor]: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def detach(self) -> Tensor: ...
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor: ...


Weight = Tensor | QuantizedLike


def is_quantized(weight: Any) -> TypeGuard[QuantizedLike]:
    """Whether `weight` is a `QuantizedTensor`."""
    return hasattr(weight, "format")


class Format(abc.ABC):
    """A way to store a floating-point tensor in fewer bits. Subclasses are frozen dataclasses of their options.

    Attributes:
        name: prefix of `spec`.
        names: user-facing name in `quantization:` → spec, e.g. "nf4" → "blockwise4:nf4:64:nested".
        parts_of_checkpoints: names of parts that weights of checkpoints can have, and no example has.
    """

    name: ClassVar[str]
    names: ClassVar[dict[str, str]]
    parts_of_checkpoints: ClassVar[tuple[str, ...]] = ()

    @property
    @abc.abstractmethod
    def spec(self) -> str:
        """Name and options as one string, parsed by `formats.from_spec`. Ops under torch.compile take this string."""

    @classmethod
    @abc.abstractmethod
    def parse(cls, options: str) -> Format:
        """The format with these `options`: its `spec` without the name."""

    @classmethod
    @abc.abstractmethod
    def examples(cls) -> list[Format]:
        """A few option sets that together cover every code path of the format; the contract test runs each."""

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
        """[M, N] = x·Wᵀ + b for x [M, K], without gradient."""
        product = self.product(parts, shape)
        return linear_rows(x, self.dequantize(parts, shape, x.dtype), bias) if product is None else product(x, bias)

    def product(self, parts: Parts, shape: tuple[int, int]) -> PackedProduct | None:
        """Return the op for `linear` with kernels for small M, or None if the weight is dequantized."""
        return None

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        """`dtype` [rows, width]: selected rows of a matrix. Formats override it to decode only these rows."""
        return self.dequantize(parts, shape, dtype)[rows]

    @property
    def in_memory(self) -> Format:
        """The format that `from_state` loads weights of this format in, as far as the options tell."""
        return self

    def stacked(self) -> Format:
        """The format of a stack [E, N, K] whose matrices are quantized separately in this format."""
        return FORMATS["stack"].parse(self.spec)

    def quantize_stack(self, weights: Iterable[Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Quantize a stack of `shape` [E, N, K] from its matrices, of which one is in memory at a time.

        Raises:
            ModelError: this format does not store such stacks (`check_stack`), or a matrix has NaN or Inf; the message
                names the matrix.
        """
        return self.stack_parts((self.quantize_expert(weight, index) for index, weight in enumerate(weights)), shape)

    def stack_parts(self, experts: Iterable[Parts], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Parts of a stack of `shape` [E, N, K] from the parts of its matrices, in order.

        Raises:
            ModelError: this format does not store such stacks (`check_stack`).
        """
        self.check_stack(shape)
        stored: dict[str, Tensor] = {}
        for index, parts in enumerate(experts):
            if not stored:
                specs, device = self.part_specs(shape).items(), next(iter(parts.values())).device
                stored = {name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in specs}
            for name, tensor in parts.items():
                stored[name].view(shape[0], *tensor.shape)[index] = tensor
        return stored

    def rows_concatenate(self, rows: int) -> bool:
        """Whether concatenating the parts of matrices of `rows` rows gives the parts of the taller matrix."""
        return False

    def dequantize_stack(self, parts: Parts, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor | None:
        """Dequantize E matrices, whose parts have a leading dimension E, in one call: `dtype` [E, N, K].

        Returns None if the format cannot do this in one call.
        """
        count, rows, columns = shape
        if not self.rows_concatenate(rows):
            return None
        flat_shape = (count * rows, columns)
        flat = {name: parts[name].reshape(size) for name, (size, _) in self.part_specs(flat_shape).items()}
        return self.dequantize(flat, flat_shape, dtype).view(shape)

    def concat_rows(self, pieces: Sequence[Parts], shape: tuple[int, int]) -> tuple[Format, dict[str, Tensor]]:
        """Concatenate matrices of `shape` [N, K] along their rows: the format and the parts of the result.

        The values do not change. Nested scales become plain scales, since each matrix has its own nested ones.

        Raises:
            ModelError: a block would span two matrices, or their codebooks, scales or group orders differ.
        """
        if len(pieces) == 1:
            return self, dict(pieces[0])
        if not self.rows_concatenate(shape[0]):
            raise ModelError(
                f"{self.spec}: matrices of shape {shape} cannot be stacked: they share no scales", "use 16-bit weights"
            )
        specs = self.part_specs((len(pieces) * shape[0], shape[1]))
        joined = {name: torch.cat([piece[name] for piece in pieces]) for name in specs}
        return self, {name: tensor.view(specs[name][0]) for name, tensor in joined.items()}

    def check_stack(self, shape: tuple[int, ...]) -> None:
        """Check that this format can store a stack of `shape`.

        Raises:
            ModelError: this format stores matrices only (see `stacked`), the shape is not [E, N, K], or a block would
                span two matrices.
        """
        raise self._stacks_error()

    def expert(self, parts: Parts, shape: tuple[int, ...], index: int) -> tuple[Format, dict[str, Tensor]]:
        """Matrix `index` of a stack of `shape` [E, N, K]: its format, and its parts as views.

        Raises:
            ModelError: this format does not store such stacks (`check_stack`).
        """
        raise self._stacks_error()

    def _stacks_error(self) -> ModelError:
        return ModelError(f"{self.spec} stores matrices, not stacks of them", "take its stacked()")

    def split(self, parts: Parts, shape: tuple[int, ...], dim: int, n: int) -> Shards:
        """Split a matrix into `n` equal shards along `dim`, each in its own memory; on the meta device, shapes only.

        The values of the shards are bit-equal to those of the matrix. Where a shard boundary falls inside a block, the
        shards use a format with smaller blocks or with scales that are not nested.

        Args:
            shape: shape of the matrix.
            dim: 0 splits rows, 1 splits columns.

        Returns:
            The format of all shards, and the parts of each shard, in order.

        Raises:
            ModelError: `n` does not divide the dimension, or a shard boundary falls inside a block of every size.
        """
        if len(shape) != 2 or dim not in (0, 1):
            raise ModelError(
                f"{self.spec}: a tensor of shape {tuple(shape)} is not split along {dim}", "split matrices"
            )
        if shape[dim] % n:
            raise ModelError(
                f"{self.spec}: {shape[dim]} {SIDES[dim]} cannot be split {n} ways", f"use a divisor of {shape[dim]}"
            )
        split = self._split(parts, (shape[0], shape[1]), dim, n)
        if isinstance(split, int):
            raise ModelError(
                f"{self.spec}: a matrix of shape {tuple(shape)} is not split into {n} by {SIDES[dim]}",
                f"each shard's size must be a multiple of {split}: split it fewer ways, or use another format",
            )
        format_, shards = split
        shard_shape = tuple(size // n if axis == dim else size for axis, size in enumerate(shape))
        return format_, [{name: shard[name] for name in format_.part_specs(shard_shape)} for shard in shards]

    def _split(self, parts: Parts, shape: tuple[int, int], dim: int, n: int) -> Shards | int:
        """`split` along a divisible dimension; or the number that the shard's size must be a multiple of."""
        raise ModelError(f"{self.spec}: nothing splits weights of this format", "use parallel: {data: N} or {shard: N}")

    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        """Checkpoint entries: suffix after the parameter's name ("" for the codes) → tensor.

        The suffix "../SCB" means the entry `SCB` of the module that owns the parameter. Unless a format overrides this
        for another tool's layout, the codes are the first part, the other parts use their own names as suffixes, and
        `quant_state.halfbyte__<name>` holds JSON with spec, shape and dtype.
        """
        meta = {"spec": self.spec, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        state = {suffix: parts[name] for name, suffix in _own_suffixes(parts).items()}
        return state | {META_KEY + self.name: json_entry(meta)}

    @classmethod
    def from_state(cls, state: Parts, name: str) -> Loaded:
        """Format, parts, shape and dtype from checkpoint entries: the inverse of `to_state`.

        Raises:
            CheckpointError: an entry of parameter `name` is missing, misshapen or contradicts another.
        """
        key = META_KEY + cls.name
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
            raise CheckpointError(message, DAMAGED) from error
        suffixes = _own_suffixes(specs)
        parts = {part_name: state[suffix] for part_name, suffix in suffixes.items() if suffix in state}
        check_parts(parts, specs, suffixes, name)
        format_.check_values(parts, {part_name: entry_name(name, suffix) for part_name, suffix in suffixes.items()})
        return format_, parts, shape, dtype

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        """Check loaded parts for values that no quantizer writes. The parts of a stack have one more leading dimension.

        Args:
            labels: part → its key in the checkpoint.

        Raises:
            CheckpointError: a part holds such a value.
        """
        check_finite(parts, labels)

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        """Suffixes of all checkpoint entries that this format writes with any options; `formats.recognize` reads it."""
        shape, suffixes = (2, 64), set[str]()
        for example in cls.examples():
            parts = example.quantize(torch.ones(shape, device="cpu"))
            suffixes |= example.to_state(parts, shape, torch.float32).keys()
        return frozenset(suffixes)

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        """The format of another tool's checkpoint, from the `quantization_config` in its config.json.

        Returns None if the checkpoint has another format. `from_state` of the returned format reads the weights.
        """
        return None

    def bits_per_weight(self, shape: tuple[int, ...]) -> float:
        """Stored bits per weight, scales included."""
        bytes_ = sum(torch.Size(size).numel() * dtype.itemsize for size, dtype in self.part_specs(shape).values())
        return 8 * bytes_ / max(torch.Size(shape).numel(), 1)

    @property
    def code_bits(self) -> int:
        """Bits of a weight's code, scales not included: those of the largest part."""
        shape = 1024, 1024
        parts = self.part_specs(shape).values()
        return round(max(torch.Size(size).numel() * 8 * dtype.itemsize for size, dtype in parts) / math.prod(shape))

    def check_weight(self, weight: Tensor) -> None:
        if weight.dtype not in FLOATS:
            raise ModelError(
                f"cannot quantize a {weight.dtype} tensor to {self.name}", "convert it to a 16- or 32-bit float"
            )

    def quantize_expert(self, weight: Tensor, index: int) -> dict[str, Tensor]:
        """`quantize` for matrix `index` of a stack; errors name it."""
        try:
            return self.quantize(weight)
        except ModelError as error:
            raise ModelError(f"expert {index}: {error.message}", error.fix) from error


class OptionlessFormat(Format):
    """A format whose spec is its name."""

    @property
    def spec(self) -> str:
        return self.name

    @classmethod
    def parse(cls, options: str) -> Self:
        if options:
            raise ModelError(f"{cls.name} has no option {options!r}", f"write {cls.name}")
        return cls()

    @classmethod
    def examples(cls) -> list[Format]:
        return [cls()]


FORMATS: dict[str, type[Format]] = {}


def register_format(cls: type[Format]) -> type[Format]:
    """Register a format for `from_spec`, `names` and the contract test."""
    FORMATS[cls.name] = cls
    return cls


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrix that stores a tensor of `shape`: leading dimensions count as rows."""
    return torch.Size(shape[:-1]).numel(), shape[-1] if shape else 1


def check_weight_finite(magnitudes: Tensor, loss: str) -> None:
    """Check the largest magnitudes of a weight that is being quantized.

    Args:
        loss: what a block with NaN or Inf would lose, for the error.

    Raises:
        ModelError: one is NaN or Inf.
    """
    if not bool(torch.isfinite(magnitudes).all()):
        raise ModelError("the weight has NaN or Inf", f"repair the checkpoint: {loss}")


def cut(tensor: Tensor, n: int, dim: int) -> list[Tensor]:
    """Split `part` into n equal tensors along `dim`, each in its own memory."""
    return [shard.clone(memory_format=torch.contiguous_format) for shard in tensor.tensor_split(n, dim)]


def split_parts(n: int, cuts: Mapping[str, Sequence[Tensor]], shared: Parts) -> list[dict[str, Tensor]]:
    """The parts of each of n shards: its own from `cuts`, and copies of the `shared` ones."""
    return [
        {name: shards[i] for name, shards in cuts.items()} | {name: tensor.clone() for name, tensor in shared.items()}
        for i in range(n)
    ]


def json_entry(value: dict[str, Any]) -> Tensor:
    """uint8 [bytes], on the CPU: a JSON object as a checkpoint entry."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def read_json_entry(state: Parts, key: str, name: str) -> dict[str, Any]:
    """Parse entry `key` of parameter `name`: the inverse of `json_entry`.

    Raises:
        CheckpointError: the entry is missing or is not a JSON object.
    """
    if key not in state:
        raise CheckpointError(f"{name}.{key} is missing from the checkpoint", DAMAGED)
    entry, fix = state[key], DAMAGED
    if entry.dtype != torch.uint8 or entry.ndim != 1:
        raise CheckpointError(f"{name}.{key} is not JSON: it is {entry.dtype} {tuple(entry.shape)}", fix)
    value = parse_json(bytes(entry.cpu().tolist()), f"{name}.{key} is not JSON", CheckpointError, fix)
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}.{key} is not a JSON object", DAMAGED)
    return value


def check_parts(parts: Parts, specs: PartSpecs, suffixes: Mapping[str, str], name: str) -> None:
    """Check loaded parts against the format's specs; `suffixes` maps each part to its suffix in the checkpoint.

    Raises:
        CheckpointError: a part of parameter `name` is missing, or has another shape or dtype.
    """
    for part_name, (size, dtype) in specs.items():
        label = entry_name(name, suffixes.get(part_name, part_name))
        if part_name not in parts:
            raise CheckpointError(f"{label} is missing from the checkpoint", DAMAGED)
        tensor = parts[part_name]
        if tuple(tensor.shape) != size or tensor.dtype != dtype:
            raise CheckpointError(f"{label} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {size}", DAMAGED)


def check_finite(parts: Parts, labels: Mapping[str, str]) -> None:
    """Check floating-point parts for NaN and Inf.

    Raises:
        CheckpointError: a part has one; the message uses its name in `labels`.
    """
    for part_name, tensor in parts.items():
        if tensor.dtype in FLOATS and not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{labels[part_name]} has NaN or Inf", DAMAGED)


def check_not_negative(scales: Tensor, label: str) -> None:
    """Check that loaded scales are not negative.

    Raises:
        CheckpointError: a scale is negative; the message names `label`.
    """
    if not scales.is_meta and bool((scales < 0).any()):
        raise CheckpointError(f"{label} has negative scales", DAMAGED)


def entry_name(name: str, suffix: str) -> str:
    """Checkpoint key of the entry with this suffix of parameter `name`."""
    if suffix.startswith("../"):
        return name.rpartition(".")[0] + name.rpartition(".")[1] + suffix[3:]
    if suffix.startswith("_"):
        return name + suffix
    return f"{name}.{suffix}" if suffix else name


def parameter_of_entry(entry: str, suffix: str) -> str | None:
    """Name of the parameter that `entry` with this suffix belongs to; None if the suffix does not match."""
    if suffix.startswith("../"):
        module, dot, last = entry.rpartition(".")
        return f"{module}{dot}weight" if last == suffix[3:] else None
    if suffix.startswith("_"):
        return entry.removesuffix(suffix) if entry.endswith(suffix) else None
    return entry.removesuffix(f".{suffix}") if entry.endswith(f".{suffix}") else None


def _own_suffixes(names: Iterable[str]) -> dict[str, str]:
    """Part → suffix in halfbyte's own layout, where the first part has the parameter's name."""
    return {name: name if index else "" for index, name in enumerate(names)}
