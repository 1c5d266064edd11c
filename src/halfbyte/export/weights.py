"""The weights of a merged model: which tensors it has, how each is made, and writing them shard by shard.

A weight that is stored quantized is quantized from its fp32 values, which are never rounded to 16 bits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from halfbyte.config import Resolved
from halfbyte.formats import Stack
from halfbyte.formats.base import entry_name
from halfbyte.formats.nvfp4 import INPUT_SCALE
from halfbyte.loading.load import resolve_dtype
from halfbyte.modeling.adapters import WRONG_BASE
from halfbyte.reading.tensors import INDEX
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import CheckpointError, ModelError
from halfbyte.utils.files import write_json

from ..loading.checkpoint import DTYPES, BaseCheckpoint, Stored
from .adapter import AdapterLayers
from .experts import PackedStacks, Piece
from .kept import Kept
from .packing import NVFP4_RANGE, Packing, padded_state, quantize_together
from .shards import Entry, write_shard

Target = Literal["original", "dequantized"]


@dataclass(frozen=True)
class Output:
    """A weight of the merged checkpoint: made from the base's `source`, it becomes the model's `parameter`.

    Attributes:
        entry: the weight in 16 bits (or as the base stores it).
        packed: what is written instead of `entry` where the weight is quantized.
        piece: which rows of which expert it is, where `parameter` is a stack of experts.
        parts: of a stack that is written whole, packed: what the base has of it, pieces or itself.
    """

    entry: Entry
    source: Stored
    parameter: str
    packed: tuple[Entry, ...] = ()
    piece: Piece | None = None
    parts: tuple[Output, ...] = ()

    @property
    def written(self) -> tuple[Entry, ...]:
        return self.packed or (self.entry,)


class MergedWeights:
    """The weights of base and adapter as one.

    Attributes:
        trained_dtype: what the base was cast to when it was trained on, before any quantization.
        as_trained: quantization-aware training rounded the weights to the very formats of `packing`.
        shards: file name → its tensors; the base's own files and order.
        packing: how the linear layers are stored.
        input_amax: module name → largest magnitude among its inputs, for a packing that stores it.
        untied: the base shares one weight between embedding and head, and the adapter changes one of them, or each in
            its own way: the merged model then has two.

    Raises:
        CheckpointError: the base lacks a tensor that the adapter changes, or has it in another shape.
    """

    def __init__(self, run: Resolved, base: BaseCheckpoint, adapter: AdapterLayers, packing: Packing | None = None):
        self.base, self.adapter, self.packing = base, adapter, packing or Packing()
        self.input_amax: dict[str, float] = {}
        self._group_amax: dict[tuple[Target, tuple[str, ...]], Tensor] = {}
        self._formats = {} if base.quantized and not base.in_part else dict(adapter.quantized)
        stacks = {} if base.quantized and not base.in_part else dict(adapter.stacks)
        self._stacks = PackedStacks(stacks, self._experts)
        computed = run.precision.compute
        self.trained_dtype = DTYPES[base.dtype] if adapter.whole_model else resolve_dtype(computed, adapter.device)
        self.as_trained = self.packing.is_scheme(run.storage.qat_scheme)
        self.untied = False
        self._kept: dict[Target, dict[str, Kept]] = {}
        self.shards: dict[str, list[Output]] = {file: [] for file in base.headers}
        self._pieces: set[str] = set()
        for stored in base.weights:
            parameter, is_whole, piece = adapter.parameter_of(stored.name)
            self._add(stored.name, stored, parameter, piece)
            if stored.parts:
                self._formats.pop(parameter, None)
                self._stacks.formats.pop(parameter, None)
            self._pieces |= set() if is_whole or piece else {parameter}
        for parameter, tied_to in adapter.tied.items():
            if adapter.changed & {parameter, tied_to}:
                self._untie(parameter, tied_to)
        self._check()
        for name in sorted(self.packing.stacks):
            self._join(name)
        for shard in self.shards.values():
            shard[:] = [self._with_packed(output) for output in shard]

    @property
    def outputs(self) -> list[Output]:
        """Every weight, in the order of the shards."""
        return [output for shard in self.shards.values() for output in shard]

    def _with_packed(self, output: Output) -> Output:
        if output.parameter not in self.packing.formats:
            return output
        name, shape, dtype = output.entry.name, output.entry.shape, self._packed_dtype(output)
        return replace(output, packed=self.packing.entries(name, output.parameter, shape, dtype))

    def _join(self, name: str) -> None:
        """Have a stack written whole, under its own name, where the first of its parts is."""
        parts = tuple(output for output in self.outputs if output.parameter == name)
        first, shape = parts[0], self._stored_shape(name)
        for shard in self.shards.values():
            if first in shard:
                entry = Entry(name, first.entry.dtype, shape, sum(output.entry.nbytes for output in parts))
                shard[shard.index(first)] = Output(entry, first.source, name, parts=parts)
            shard[:] = [output for output in shard if output not in parts]

    def _stored_shape(self, stack: str) -> tuple[int, ...]:
        """[E, N, K] of a stack."""
        shape = self.adapter.shapes[stack]
        return (shape[0], shape[2], shape[1]) if stack in self.adapter.transposed else shape

    def _packed_dtype(self, output: Output) -> torch.dtype:
        """What the values of a quantized weight are said to be; ModelOpt's layout is for bf16."""
        return torch.bfloat16 if self.packing.calibrated else DTYPES[output.entry.dtype]

    def _add(self, name: str, source: Stored, parameter: str, piece: Piece | None = None) -> None:
        dtype, size = self.base.written_dtype(source), self.base.written_bytes(source)
        shape = self.adapter.shapes[parameter] if self._is_turned(source, parameter) else source.shape
        self.shards[source.file].append(Output(Entry(name, dtype, shape, size), source, parameter, (), piece))

    def _is_turned(self, source: Stored, parameter: str) -> bool:
        """Whether the base has a stack packed, and so as [E, N, K], where the model has [E, K, N]."""
        shape = self.adapter.shapes.get(parameter, ())
        return bool(source.parts) and parameter in self.adapter.transposed and source.shape == (shape[0], *shape[:0:-1])

    def _untie(self, parameter: str, tied_to: str) -> None:
        """Give both their own tensor, made from the one that the base stores."""
        outputs = {output.parameter: output for output in self.outputs}
        stored = outputs.get(tied_to) or outputs.get(parameter)
        if stored is None:
            return  # `_check` says what is missing
        self.untied = True
        for name in {parameter, tied_to} - {stored.parameter}:
            for shard in self.shards.values():
                shard[:] = [output for output in shard if output.parameter != name]
            self._add(name, stored.source, name)

    def _check(self) -> None:
        if beyond := sorted(self._pieces & (self.adapter.changed | self._formats.keys() | self.packing.formats.keys())):
            wrong = f"{beyond[0]} is put together from several tensors, and cannot be merged"
            raise CheckpointError(wrong, "merge it with PEFT (merge_and_unload)")
        outputs = {output.parameter: output for output in self.outputs}
        for name in sorted(self.adapter.changed | self.packing.formats.keys()):
            expected = self.adapter.shapes[name]
            if name not in outputs and name in self.adapter.changed:
                raise CheckpointError(f"{self.base.folder} lacks {name}, which the adapter changes", WRONG_BASE)
            if name not in outputs:
                raise CheckpointError(f"{self.base.folder} lacks {name}", "re-download the checkpoint")
            output = outputs[name]
            found, expected = output.entry.shape, output.piece.shape(expected) if output.piece else expected
            if found != expected:
                raise CheckpointError(
                    f"{self.base.folder}: {name} has shape {found}, its config.json says {expected}",
                    "check that config.json belongs to these weights",
                )

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(entry.nbytes for output in self.outputs for entry in output.written)

    def is_whole(self, output: Output) -> bool:
        """Whether `output` is all of its parameter (experts are stacked from several)."""
        return output.parameter not in self._pieces and output.piece is None and not output.parts

    def rounded(self, target: Target) -> set[str]:
        """The parameters whose values are rounded on the way."""
        return {
            output.parameter
            for output in self.outputs
            if output.packed or self._is_computed(output, target) or output.entry.dtype != output.source.dtype
        }

    def _is_computed(self, output: Output, target: Target) -> bool:
        return (
            output.parameter in self.adapter.changed
            or bool(output.source.parts)
            or (target == "dequantized" and output.parameter in self._formats | self._stacks.formats)
        )

    def write(self, folder: Path, target: Target, advance: Callable[[int], None]) -> dict[str, dict[str, int]]:
        """Write the weight files and their index into `folder`.

        Args:
            advance: called with the bytes of each tensor written.

        Returns:
            File name → tensor name → CRC-32.

        Raises:
            CheckpointError: a merged weight is NaN, or does not fit the dtype.
        """
        sums = {}
        for file, outputs in self.shards.items():
            by_name = {output.written[0].name: output for output in outputs}

            def make(entries: tuple[Entry, ...], by_name: dict[str, Output] = by_name) -> Mapping[str, Tensor]:
                advance(sum(entry.nbytes for entry in entries))
                return self.state(by_name[entries[0].name], target)

            sums[file] = write_shard(folder / file, [output.written for output in outputs], make)
        if (self.base.folder / INDEX).exists():
            weight_map = {name: file for file, names in sums.items() for name in names}
            write_json(folder / INDEX, {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map})
        return sums

    def state(self, output: Output, target: Target) -> dict[str, Tensor]:
        """Entry → tensor, of one weight of the merged model."""
        if not output.packed:
            return {output.entry.name: self.tensor(output, target)}
        packed = self.stack(output, target) if output.parts else self._packed_and_counted(output, target)
        state = packed.format.to_state(packed.parts, tuple(packed.shape), packed.dtype)
        if self.packing.calibrated:
            amax = self.input_amax[output.parameter.removesuffix(".weight")]
            state[INPUT_SCALE] = torch.tensor(amax / NVFP4_RANGE)
        sizes = {entry.name: entry.nbytes for entry in output.packed}
        return padded_state({entry_name(output.entry.name, key): value for key, value in state.items()}, sizes)

    def quantized(self, output: Output, target: Target) -> QuantizedTensor:
        """A weight that is stored quantized, in its format."""
        return self._packed(self.values(output, target), output, target)

    @torch.no_grad()
    def _packed(self, weight: Tensor, output: Output, target: Target) -> QuantizedTensor:
        format_, name = self.packing.formats[output.parameter], output.entry.name
        try:
            if peers := self.packing.peers.get(output.parameter):
                parts = quantize_together(weight, format_, self._amax(peers, target))
            else:
                parts = format_.quantize(weight)
        except ModelError as error:
            raise CheckpointError(f"the merged {name}: {error.message}", error.fix) from error
        return QuantizedTensor(format_, parts, tuple(weight.shape), self._packed_dtype(output))

    def _packed_and_counted(self, output: Output, target: Target) -> QuantizedTensor:
        """A weight that is stored quantized, and how much of its update came through, for `kept`."""
        if output.parameter not in self.adapter.changed:
            return self.quantized(output, target)
        before = self._base_values(output, target)
        weight = self.adapter.merged(output.parameter, before.clone())
        packed, without = (self._packed(each, output, target) for each in (weight, before))
        stored, unchanged = packed.dequantize(torch.float32), without.dequantize(torch.float32)
        self._kept.setdefault(target, {})[output.entry.name] = Kept.of(stored, unchanged, weight - before)
        return packed

    @torch.no_grad()
    def stack(self, output: Output, target: Target) -> QuantizedTensor:
        """A stack of experts that is written whole, in its format, and how much of each one's update came through."""
        format_, shape, name = self.packing.formats[output.parameter], output.entry.shape, output.parameter
        each, found = (format_.each if isinstance(format_, Stack) else format_), self._kept.setdefault(target, {})

        def experts() -> Iterator[Tensor]:
            for at, (weight, before) in enumerate(self.experts(output, target)):
                if name in self.adapter.changed:
                    both = (QuantizedTensor.quantize(matrix, each) for matrix in (weight, before))
                    stored, without = (matrix.dequantize(torch.float32) for matrix in both)
                    found[f"{name}.{at}"] = Kept.of(stored, without, weight - before)
                yield weight

        try:
            parts = format_.join(experts(), shape)
        except ModelError as error:
            raise CheckpointError(f"the merged {name}: {error.message}", error.fix) from error
        return QuantizedTensor(format_, parts, shape, self._packed_dtype(output))

    @torch.no_grad()
    def experts(self, output: Output, target: Target) -> Iterator[tuple[Tensor, Tensor]]:
        """fp32 [N, K] twice, of each expert of a stack: merged before any rounding, and without the adapter."""
        name, parts = output.parameter, output.parts
        pieces = {(each.piece.expert, each.piece.part): each for each in parts if each.piece}
        if not pieces:
            before = self._base_values(parts[0], target)
            weight = self.adapter.merged(name, before.clone()) if name in self.adapter.changed else before
            turned = name in self.adapter.transposed
            yield from zip(*((each.mT if turned else each).contiguous() for each in (weight, before)), strict=True)
        for at in range(output.entry.shape[0]) if pieces else ():
            own = [pieces[key] for key in sorted(pieces) if key[0] == at]
            before = torch.cat([self._base_values(each, target) for each in own])
            yield torch.cat([self.values(each, target) for each in own]), before

    def _amax(self, parameters: tuple[str, ...], target: Target) -> Tensor:
        """fp32 []: the largest magnitude in a group of merged weights, which are made once more for it."""
        key = (target, parameters)
        if key not in self._group_amax:
            group = [output for output in self.outputs if output.parameter in parameters]
            self._group_amax[key] = torch.stack([self.values(each, target).abs().amax() for each in group]).amax()
        return self._group_amax[key]

    @torch.no_grad()
    def values(self, output: Output, target: Target) -> Tensor:
        """fp32: one weight of the merged model before any rounding."""
        before = self._base_values(output, target)
        if output.parameter not in self.adapter.changed:
            return before
        return self.adapter.merged(output.parameter, before, output.piece)

    def _base_values(self, output: Output, target: Target) -> Tensor:
        """fp32, owned by the caller: a weight of the base merged onto, without the adapter."""
        name = output.parameter
        if target == "dequantized" and name in self._stacks.formats:
            return self._packed_stack(output)
        weight = self.base.read(output.source).to(self.adapter.device)
        if self._is_turned(output.source, name):
            weight = weight.mT
        if target == "dequantized" and name in self._formats:
            # transformers casts to the dtype of the run before it quantizes
            weight = weight.to(self.trained_dtype)
            return QuantizedTensor.quantize(weight, self._formats[name]).dequantize(torch.float32)
        if self.as_trained and name in self.packing.formats:
            weight = weight.to(self.trained_dtype)
        return weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def _packed_stack(self, output: Output) -> Tensor:
        """fp32: experts, or a piece of one, as they were quantized when they were trained on."""
        shape = self.adapter.shapes[output.parameter]
        if output.piece is not None:
            matrix = self._stacks.expert(output.parameter, output.piece.expert, shape)
            return matrix[output.piece.rows(shape[1])].clone()
        transposed, stored = output.parameter in self.adapter.transposed, self._stored_shape(output.parameter)
        whole = torch.stack([self._stacks.expert(output.parameter, at, stored) for at in range(shape[0])])
        return whole.mT.contiguous() if transposed else whole

    def _experts(self, parameter: str) -> Iterator[Tensor]:
        """Each expert [N, K] of the base's checkpoint, in the dtype that transformers casts it to."""
        parts = self._of_stack[parameter]
        pieces = {(each.piece.expert, each.piece.part): each.source for each in parts if each.piece}
        whole = None if pieces else self.base.read(parts[0].source)
        for at in range(self.adapter.shapes[parameter][0]):
            if whole is not None:
                weight = whole[at].mT if parameter in self.adapter.transposed else whole[at]
            else:
                weight = torch.cat([self.base.read(pieces[key]) for key in sorted(pieces) if key[0] == at])
            yield weight.to(self.adapter.device, self.trained_dtype)

    @functools.cached_property
    def _of_stack(self) -> dict[str, list[Output]]:
        """Stack → the tensors that it is made of."""
        found: dict[str, list[Output]] = {}
        for output in self.outputs:
            if output.parameter in self._stacks.formats:
                found.setdefault(output.parameter, []).extend(output.parts or [output])
        return found

    @torch.no_grad()
    def tensor(self, output: Output, target: Target) -> Tensor:
        """One tensor of the merged model in 16 bits: computed in fp32 and rounded once, or as the base stores it."""
        name, dtype = output.parameter, output.entry.dtype
        if not self._is_computed(output, target):
            weight = self.base.read(output.source)
            return weight if dtype == output.source.dtype else weight.to(DTYPES[dtype])
        before = self._base_values(output, target)
        if name not in self.adapter.changed:
            return self._finite(before, before.to(DTYPES[dtype]), output)
        weight = self.adapter.merged(name, before.clone(), output.piece)
        rounded = self._finite(weight, weight.to(DTYPES[dtype]), output)
        without = before.to(DTYPES[dtype]).float()
        found = {output.entry.name: (rounded.float(), without, weight - before)}
        if name in self.adapter.experts and output.piece is None:  # a stack: each expert counts
            found = {f"{name}.{at}": each for at, each in enumerate(zip(*found.popitem()[1], strict=True))}
        self._kept.setdefault(target, {}).update({each: Kept.of(*values) for each, values in found.items()})
        return rounded

    def kept(self, target: Target) -> Kept:
        """What of the update is in the weights written onto `target`: near nothing where ΔW is below half a step of a
        base whose weights are exact in what is written, near everything otherwise."""
        return Kept.sum(self._kept.get(target, {}).values())

    def experts_arrived(self, target: Target) -> tuple[int, int] | None:
        """Of the tensors of single experts that the adapter changes, how many are stored with a change, and how many
        there are; None: it is on no experts."""
        stacks = tuple(f"{name}." for name in self.adapter.experts)
        pieces = {each.entry.name for each in self.outputs if each.piece and each.parameter in self.adapter.experts}
        own = [each for name, each in self._kept.get(target, {}).items() if name in pieces or name.startswith(stacks)]
        trained = [each for each in own if each.total]
        return (sum(bool(each.along) for each in trained), len(trained)) if stacks else None

    def cast(self, dtype: torch.dtype, trained: bool) -> dict[str, torch.dtype]:
        """Name → `dtype`, of the 16-bit weights that a base loaded in it has as they were cast, and the merged model as
        they are stored; `trained`: that base is the one trained on, whose quantized weights were cast before."""
        before = self._formats | self._stacks.formats if trained else {}
        return {
            output.parameter: dtype
            for output in self.outputs
            if DTYPES.get(output.entry.dtype, dtype) != dtype
            and not output.packed
            and output.parameter not in before
            and output.parameter not in self.adapter.whole
        }

    @staticmethod
    def _finite(weight: Tensor, rounded: Tensor, output: Output) -> Tensor:
        if not bool(torch.isfinite(rounded).all()):
            what = "does not fit float16" if bool(torch.isfinite(weight).all()) else "has NaN or Inf"
            raise CheckpointError(f"the merged {output.entry.name} {what}", "train with a lower learning rate")
        return rounded

    def config(self) -> dict[str, object]:
        """config.json of the merged model: the base's, with the quantization and the dtype that are written."""
        config = json.loads(json.dumps(self.base.config))
        config.pop("quantization_config", None)
        if self.packing.config is not None:
            config["quantization_config"] = self.packing.config
        sizes: dict[str, int] = {}
        for output in self.outputs:
            sizes[output.entry.dtype] = sizes.get(output.entry.dtype, 0) + output.entry.nbytes
        dtype = str(DTYPES[max(sizes, key=lambda name: sizes[name])]).removeprefix("torch.")
        for section in (config, config.get("text_config")):
            if not isinstance(section, dict):
                continue
            for key in {"dtype", "torch_dtype"} & section.keys() or {"dtype"}:
                section[key] = dtype
            if self.untied:
                section["tie_word_embeddings"] = False
        return config
