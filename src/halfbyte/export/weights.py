"""The weights of a merged model: which tensors it has, how each is computed, and writing them shard by shard.

A quantized weight is quantized from its fp32 values, without rounding to 16 bits first.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..adapters.lora import WRONG_BASE
from ..config.schema import RunKeys
from ..formats import Format, Stack
from ..formats.base import entry_name
from ..formats.retained_update import RetainedUpdate
from ..loading.checkpoint import DTYPES, BaseCheckpoint, Stored
from ..loading.find import read_model_config
from ..loading.load import resolve_dtype
from ..modeling.rope_scaling import set_rope
from ..reading.tensors import INDEX
from ..tensor import QuantizedTensor
from ..utils.errors import CheckpointError, ModelError
from ..utils.files import write_json
from .adapter import AdapterLayers, Piece
from .packing import Packing, padded_state
from .shards import Entry, write_shard

Target = Literal["original", "dequantized"]


@dataclass(frozen=True)
class Output:
    """A weight of the merged checkpoint, computed from the base's `source` for the model's `parameter`.

    Attributes:
        entry: the weight in 16 bits (or as the base stores it).
        packed: entries written instead of `entry` if the weight is quantized.
        piece: the expert and rows it holds, if `parameter` is a stack of experts.
        sources: for a stack written as one packed tensor: the base's tensors that form it.
    """

    entry: Entry
    source: Stored
    parameter: str
    packed: tuple[Entry, ...] = ()
    piece: Piece | None = None
    sources: tuple[Output, ...] = ()

    @property
    def written(self) -> tuple[Entry, ...]:
        return self.packed or (self.entry,)

    @property
    def expert(self) -> int | None:
        """Index of the expert it belongs to; None for other weights, and for stacks."""
        return self.piece.expert if self.piece else None


def _pieces_by_expert(outputs: Sequence[Output]) -> dict[int, list[Output]]:
    """Expert → its pieces in the order of their rows; empty if the base stores stacks."""
    rows = sorted((output.piece.index, output.piece.expert, at) for at, output in enumerate(outputs) if output.piece)
    pieces: dict[int, list[Output]] = {}
    for _, expert, at in rows:
        pieces.setdefault(expert, []).append(outputs[at])
    return pieces


class PackedStacks:
    """The base's stacks of experts, quantized as in training; one in memory at a time.

    Args:
        formats: stack → the format of its experts.
        read: stack → its matrices [N, K], in the dtype that they were cast to before quantization.
    """

    def __init__(self, formats: dict[str, Format], read: Callable[[str], Iterable[Tensor]]):
        self.formats, self._read = formats, read
        self._packed: tuple[str, QuantizedTensor] | None = None

    def expert(self, name: str, at: int, shape: tuple[int, ...]) -> Tensor:
        """Return expert `at` of a stack of `shape` [E, N, K], dequantized, fp32 [N, K]."""
        if self._packed is None or self._packed[0] != name:
            self._packed = None  # free it before the next is built
            try:
                self._packed = name, QuantizedTensor.quantize_stack(self._read(name), self.formats[name], shape)
            except ModelError as error:
                raise ModelError(f"{name}: {error.message}", error.fix) from error
        expert: Any = self._packed[1][at]
        return expert.dequantize(torch.float32)


class MergedWeights:
    """The weights of a base and its adapter.

    Attributes:
        trained_dtype: dtype that the base was cast to in training, before quantization.
        as_trained: whether quantization-aware training rounded the weights to the formats of `packing`.
        shards: file name → its tensors, in the base's files and order.
        packing: storage of the linear layers.
        input_amax: module name → largest magnitude of its inputs, for a packing that stores it.
        untied: whether the base ties embedding and head and the adapter changes them differently, so that the merged
            model stores both.

    Raises:
        CheckpointError: the base lacks a tensor that the adapter changes, or has it in another shape.
    """

    def __init__(self, run: RunKeys, base: BaseCheckpoint, adapter: AdapterLayers, packing: Packing | None = None):
        self.base = base
        self.adapter = adapter
        self.packing = packing or Packing()
        self.input_amax: dict[str, float] = {}
        self._scaled = read_model_config(run.origin).get_text_config() if run.rope_scaling else None
        self._group_amax: dict[tuple[Target, tuple[str, ...], int | None], Tensor] = {}
        self._formats = {} if base.quantized and not base.in_part else dict(adapter.quantized)
        stacks = {} if base.quantized and not base.in_part else dict(adapter.stacks)
        self._stacks = PackedStacks(stacks, self._experts)
        computed = run.precision.compute
        self.trained_dtype = DTYPES[base.dtype] if adapter.is_full_model else resolve_dtype(computed, adapter.device)
        own_formats = run.storage.merge_aware and dict(self.packing.formats) == self._formats and not self.packing.peers
        self.as_trained = own_formats or self.packing.is_scheme(run.storage.qat_scheme)
        self.untied = False
        self._retained: dict[Target, dict[str, RetainedUpdate]] = {}
        self.shards: dict[str, list[Output]] = {file: [] for file in base.headers}
        self._pieces: set[str] = set()
        for stored in base.weights:
            parameter, is_whole, piece = adapter.parameter_of(stored.name)
            if parameter in adapter.dropped:
                continue
            if parameter in adapter.shared:  # a copy of the embedding; transformers reads a stored one that differs
                continue
            self._add(stored.name, stored, parameter, piece)
            if stored.entries:
                self._formats.pop(parameter, None)
                self._stacks.formats.pop(parameter, None)
            self._pieces |= set() if is_whole or piece else {parameter}
        for parameter, tied_to in adapter.tied.items():
            if adapter.changed & {parameter, tied_to} and parameter not in adapter.shared:
                self._untie(parameter, tied_to)
        self._check()
        for name, tensor in adapter.head.items():
            self._add_head(name, tensor)
        for name in sorted(self.packing.stacks):
            self._join(name)
        for shard in self.shards.values():
            for index, output in enumerate(shard):
                entry, parameter = output.entry, output.parameter
                if parameter in self.packing.formats:
                    packed = self.packing.entries(entry.name, parameter, entry.shape, self._packed_dtype(output))
                    shard[index] = replace(output, packed=packed)

    @property
    def outputs(self) -> list[Output]:
        """All weights, in the order of the shards."""
        return [output for shard in self.shards.values() for output in shard]

    def _join(self, name: str) -> None:
        """Replace a stack's tensors by one, under the stack's name, at the position of the first."""
        stack = self.stack_of_experts(name)
        for shard in self.shards.values():
            shard[:] = [
                stack if output is stack.sources[0] else output
                for output in shard
                if output is stack.sources[0] or output not in stack.sources
            ]

    def stack_of_experts(self, name: str) -> Output:
        """Return a stack as one output, also if `outputs` has its experts' tensors."""
        sources = tuple(output for output in self.outputs if output.parameter == name)
        if sources[0].sources:
            return sources[0]
        nbytes = sum(output.entry.nbytes for output in sources)
        entry = Entry(name, sources[0].entry.dtype, self._stored_shape(name), nbytes)
        return Output(entry, sources[0].source, name, sources=sources)

    def _stored_shape(self, stack: str) -> tuple[int, ...]:
        """Return the shape [E, N, K] of a stack."""
        shape = self.adapter.shapes[stack]
        return (shape[0], shape[2], shape[1]) if stack in self.adapter.transposed else shape

    def _packed_dtype(self, output: Output) -> torch.dtype:
        """Return the dtype recorded for a quantized weight; ModelOpt's layout is for bf16."""
        return torch.bfloat16 if self.packing.calibrated else DTYPES[output.entry.dtype]

    def _add(self, name: str, source: Stored, parameter: str, piece: Piece | None = None) -> None:
        dtype, size = self.base.written_dtype(source), self.base.written_bytes(source)
        shape = self.adapter.shapes[parameter] if self._is_transposed(source, parameter) else source.shape
        if self._grown_rows(source, parameter):
            size = size // shape[0] * self.adapter.shapes[parameter][0]
            shape = self.adapter.shapes[parameter]
        self.shards[source.file].append(Output(Entry(name, dtype, shape, size), source, parameter, (), piece))

    def _add_head(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of a classifier's head to the last file, in the dtype of most weights."""
        file, shape = next(reversed(self.shards)), tuple(tensor.shape)
        source = Stored(name, file, "F32", shape)
        dtype = self.base.written_dtype(Stored(name, file, self.base.dtype, shape))
        self.shards[file].append(
            Output(Entry(name, dtype, shape, tensor.numel() * DTYPES[dtype].itemsize), source, name)
        )

    def _is_transposed(self, source: Stored, parameter: str) -> bool:
        """Return whether the base stores a stack packed as [E, N, K] that the model has as [E, K, N]."""
        if not source.entries or parameter not in self.adapter.transposed:
            return False
        shape = self.adapter.shapes[parameter]
        return source.shape == (shape[0], *shape[:0:-1])

    def _grown_rows(self, source: Stored, parameter: str) -> int:
        """Return the rows that new tokens add to the base's tensor."""
        shape = self.adapter.shapes.get(parameter, ())
        grown = parameter in self.adapter.changed and shape[:1] == (self.adapter.rows,)
        return shape[0] - source.shape[0] if grown and shape[1:] == source.shape[1:] else 0

    def _untie(self, parameter: str, tied_to: str) -> None:
        """Give both parameters their own tensor; if the base stores only one, the other starts as its copy."""
        outputs = {output.parameter: output for output in self.outputs}
        stored = outputs.get(tied_to) or outputs.get(parameter)
        if stored is None:
            return  # `_check` raises for the missing tensor
        self.untied = True
        for name in {parameter, tied_to} - outputs.keys():  # transformers reads a stored head that differs, too
            self._add(name, stored.source, name)

    def _check(self) -> None:
        if beyond := sorted(self._pieces & (self.adapter.changed | self._formats.keys() | self.packing.formats.keys())):
            wrong = f"{beyond[0]} is assembled from several checkpoint tensors, which merge does not support"
            raise CheckpointError(wrong, "merge it with PEFT (merge_and_unload)")
        outputs = {output.parameter: output for output in self.outputs}
        for name in sorted(self.adapter.changed | self.packing.formats.keys()):
            expected = self.adapter.shapes[name]
            if name not in outputs and name in self.adapter.changed:
                raise CheckpointError(f"{self.base.folder} lacks {name}, which the adapter changes", WRONG_BASE)
            if name not in outputs:
                raise CheckpointError(f"{self.base.folder} lacks {name}", "re-download the checkpoint")
            output = outputs[name]
            shape, expected = output.entry.shape, output.piece.shape(expected) if output.piece else expected
            if shape != expected:
                raise CheckpointError(
                    f"{self.base.folder}: {name} has shape {shape}, its config.json says {expected}",
                    "check that config.json belongs to these weights",
                )

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(entry.nbytes for output in self.outputs for entry in output.written)

    def is_whole(self, output: Output) -> bool:
        """Return whether `output` is all of its parameter (experts are stacked from several outputs)."""
        return output.parameter not in self._pieces and output.piece is None and not output.sources

    def rounded(self, target: Target) -> set[str]:
        """Return the parameters whose values the merge rounds."""
        return {
            output.parameter
            for output in self.outputs
            if output.packed or self._is_computed(output, target) or output.entry.dtype != output.source.dtype
        }

    def _is_computed(self, output: Output, target: Target) -> bool:
        return (
            output.parameter in self.adapter.changed
            or bool(output.source.entries)
            or (target == "dequantized" and output.parameter in self._formats | self._stacks.formats)
        )

    def write(self, folder: Path, target: Target, advance: Callable[[int], None]) -> dict[str, dict[str, int]]:
        """Write the weight files and their index into `folder`.

        Args:
            advance: called with the bytes of each tensor written.

        Returns:
            File name → tensor name → CRC-32.

        Raises:
            CheckpointError: a merged weight is NaN, or exceeds the range of the dtype.
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
        """Return entry name → tensor for one weight of the merged model."""
        if not output.packed:
            return {output.entry.name: self.tensor(output, target)}
        packed = self.stack(output, target) if output.sources else self._packed_and_counted(output, target)
        state = self.packing.state(packed, self.input_amax.get(output.parameter.removesuffix(".weight"), 0.0))
        sizes = {entry.name: entry.nbytes for entry in output.packed}
        return padded_state({entry_name(output.entry.name, key): value for key, value in state.items()}, sizes)

    def quantized(self, output: Output, target: Target) -> QuantizedTensor:
        """Return a quantized weight in its format."""
        return self._packed(self.values(output, target), output, target)

    @torch.no_grad()
    def _packed(self, weight: Tensor, output: Output, target: Target) -> QuantizedTensor:
        format_, name = self.packing.formats[output.parameter], output.entry.name
        try:
            parts = self.packing.quantize(weight, format_, lambda: self._amax(output, target))
        except ModelError as error:
            raise CheckpointError(f"the merged {name}: {error.message}", error.fix) from error
        return QuantizedTensor(format_, parts, tuple(weight.shape), self._packed_dtype(output))

    def _packed_and_counted(self, output: Output, target: Target) -> QuantizedTensor:
        """Return a quantized weight, and record how much of its update is retained."""
        if output.parameter not in self.adapter.changed:
            return self.quantized(output, target)
        base_weight = self.base_values(output, target)
        weight = self.adapter.merged(output.parameter, base_weight.clone(), output.piece)
        packed = self._packed(weight, output, target)
        stored = packed.dequantize(torch.float32)
        stored_base = self._packed(base_weight, output, target).dequantize(torch.float32)
        update = RetainedUpdate.of(stored, stored_base, weight - base_weight)
        self._retained.setdefault(target, {})[output.entry.name] = update
        return packed

    @torch.no_grad()
    def stack(self, output: Output, target: Target) -> QuantizedTensor:
        """Return a packed stack of experts, and record how much of each expert's update is retained."""
        name, shape = output.parameter, output.entry.shape
        format_ = self.packing.formats[name]
        matrix_format = format_.matrix_format if isinstance(format_, Stack) else format_
        retained = self._retained.setdefault(target, {})

        def rounded(matrix: Tensor) -> Tensor:
            return QuantizedTensor.quantize(matrix, matrix_format).dequantize(torch.float32)

        def experts() -> Iterator[Tensor]:
            for index, (weight, base) in enumerate(self.experts(output, target)):
                if name in self.adapter.changed:
                    retained[f"{name}.{index}"] = RetainedUpdate.of(rounded(weight), rounded(base), weight - base)
                yield weight

        try:
            stored = format_.quantize_stack(experts(), shape)
        except ModelError as error:
            raise CheckpointError(f"the merged {name}: {error.message}", error.fix) from error
        return QuantizedTensor(format_, stored, shape, self._packed_dtype(output))

    @torch.no_grad()
    def experts(self, output: Output, target: Target) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each expert of a stack with and without the adapter, before rounding, fp32 [N, K]."""
        name = output.parameter
        pieces = _pieces_by_expert(output.sources)
        if not pieces:
            base = self.base_values(output.sources[0], target)
            weight = self.adapter.merged(name, base.clone()) if name in self.adapter.changed else base
            if name in self.adapter.transposed:
                weight, base = weight.mT, base.mT
            yield from zip(weight.contiguous(), base.contiguous(), strict=True)
        for expert in range(output.entry.shape[0]) if pieces else ():
            base = torch.cat([self.base_values(piece, target) for piece in pieces[expert]])
            yield torch.cat([self.values(piece, target) for piece in pieces[expert]]), base

    def stored_experts(self, output: Output, target: Target) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the values of each expert of a stack as they are stored, and before rounding, fp32 [N, K]."""
        experts = self.experts(output, target)
        if output.parameter in self.packing.stacks:
            stack: Any = self.stack(output, target)
            for index, (weight, _) in enumerate(experts):
                yield stack[index].dequantize(torch.float32), weight
            return
        pieces = _pieces_by_expert(output.sources)
        for index, (weight, _) in enumerate(experts):
            stored = [self.quantized(piece, target).dequantize(torch.float32) for piece in pieces[index]]
            yield torch.cat(stored), weight

    def _amax(self, output: Output, target: Target) -> Tensor:
        """Return the largest magnitude of the merged weights that share a factor with `output`, fp32 [].

        They are those of the packing's `peers`, and for an expert its own. Computes the weights once more.
        """
        peers = self.packing.peers[output.parameter]
        key = (target, peers, output.expert)
        if key not in self._group_amax:
            group = [other for other in self.outputs if other.parameter in peers and other.expert == output.expert]
            self._group_amax[key] = torch.stack([self.values(member, target).abs().amax() for member in group]).amax()
        return self._group_amax[key]

    @torch.no_grad()
    def values(self, output: Output, target: Target) -> Tensor:
        """Return one weight of the merged model before rounding, fp32."""
        base_weight = self.base_values(output, target)
        if output.parameter not in self.adapter.changed:
            return base_weight
        return self.adapter.merged(output.parameter, base_weight, output.piece)

    def base_values(self, output: Output, target: Target) -> Tensor:
        """Return a weight of the base without the adapter, fp32, owned by the caller."""
        name = output.parameter
        if target == "dequantized" and name in self._stacks.formats:
            return self._quantized_experts(output)
        weight = self.base.read(output.source).to(self.adapter.device)
        if self._is_transposed(output.source, name):
            weight = weight.mT
        unchanged = self.as_trained and name not in self.adapter.changed  # stored as it was loaded, rounded once
        if target == "dequantized" and name in self._formats and not unchanged:
            # transformers casts to the run's dtype before quantization
            weight = weight.to(self.trained_dtype)
            return self._dequantized(name, weight)
        if added := self._grown_rows(output.source, name):  # the adapter has the values of new rows
            weight = torch.cat([weight, weight.new_zeros(added, *weight.shape[1:])])
        if self.as_trained and name in self.packing.formats:
            weight = weight.to(self.trained_dtype)
        return weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def _dequantized(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight as training stored it, fp32; with the initial factors that its adapter starts from."""
        module = name.removesuffix(".weight")
        format_ = self._formats[name]
        initial = self.adapter.initial
        if initial is None:
            return QuantizedTensor.quantize(weight, format_).dequantize(torch.float32)
        residual = initial.residual(module, weight, format_)
        stored = QuantizedTensor.quantize(residual, format_).dequantize(torch.float32)
        product = initial.product(module)
        return stored if product is None else product.added_to(stored)

    def _quantized_experts(self, output: Output) -> Tensor:
        """Return experts, or a piece of one, quantized as in training, fp32."""
        shape = self.adapter.shapes[output.parameter]
        if output.piece is not None:
            matrix = self._stacks.expert(output.parameter, output.piece.expert, shape)
            return matrix[output.piece.rows(shape[1])].clone()
        stored_shape = self._stored_shape(output.parameter)
        experts = [self._stacks.expert(output.parameter, index, stored_shape) for index in range(shape[0])]
        stack = torch.stack(experts)
        return stack.mT.contiguous() if output.parameter in self.adapter.transposed else stack

    def _experts(self, parameter: str) -> Iterator[Tensor]:
        """Yield each expert [N, K] of the base's checkpoint, in the dtype that transformers casts it to."""
        pieces = _pieces_by_expert(self._of_stack[parameter])
        stacked = None if pieces else self.base.read(self._of_stack[parameter][0].source)
        for expert in range(self.adapter.shapes[parameter][0]):
            if stacked is not None:
                weight = stacked[expert].mT if parameter in self.adapter.transposed else stacked[expert]
            else:
                weight = torch.cat([self.base.read(piece.source) for piece in pieces[expert]])
            yield weight.to(self.adapter.device, self.trained_dtype)

    @functools.cached_property
    def _of_stack(self) -> dict[str, list[Output]]:
        """Stack name → the tensors that form it."""
        outputs: dict[str, list[Output]] = {}
        for output in self.outputs:
            if output.parameter in self._stacks.formats:
                outputs.setdefault(output.parameter, []).extend(output.sources or [output])
        return outputs

    @torch.no_grad()
    def tensor(self, output: Output, target: Target) -> Tensor:
        """Return a 16-bit tensor of the merged model: computed in fp32 and rounded once, or as the base stores it."""
        name, dtype = output.parameter, output.entry.dtype
        if name in self.adapter.head:
            head = self.adapter.head[name]
            return self._finite(head, head.to(DTYPES[dtype]), output)
        if not self._is_computed(output, target):
            weight = self.base.read(output.source)
            return weight if dtype == output.source.dtype else weight.to(DTYPES[dtype])
        base = self.base_values(output, target)
        if name not in self.adapter.changed:
            return self._finite(base, base.to(DTYPES[dtype]), output)
        weight = self.adapter.merged(name, base.clone(), output.piece)
        rounded = self._finite(weight, weight.to(DTYPES[dtype]), output)
        compared = rounded.float(), base.to(DTYPES[dtype]).float(), weight - base
        retained = self._retained.setdefault(target, {})
        if name in self.adapter.experts and output.piece is None:  # a stack: count each expert
            for expert, tensors in enumerate(zip(*compared, strict=True)):
                retained[f"{name}.{expert}"] = RetainedUpdate.of(*tensors)
        else:
            retained[output.entry.name] = RetainedUpdate.of(*compared)
        return rounded

    def retained(self, target: Target) -> RetainedUpdate:
        """Return the update retained in the weights written onto `target`.

        Near zero if ΔW is below half a step of a base that is exact in the written dtype, otherwise near one.
        """
        return RetainedUpdate.sum(self._retained.get(target, {}).values())

    def changed_experts(self, target: Target) -> tuple[int, int] | None:
        """Count the single-expert tensors that the adapter changes.

        Returns:
            The number stored with a change and the total; None without adapters on experts.
        """
        stacks = tuple(f"{name}." for name in self.adapter.experts)
        pieces = {o.entry.name for o in self.outputs if o.piece and o.parameter in self.adapter.experts}
        updates = self._retained.get(target, {}).items()
        trained = [u for name, u in updates if u.total and (name in pieces or name.startswith(stacks))]
        return (sum(bool(update.along) for update in trained), len(trained)) if stacks else None

    def cast(self, dtype: torch.dtype, trained: bool) -> dict[str, torch.dtype]:
        """Return parameter name → `dtype` for the 16-bit weights that a base loaded in `dtype` casts.

        The merged model keeps these weights uncast.

        Args:
            trained: whether that base is the trained one, whose quantized weights were cast before quantization.
        """
        quantized = self._formats | self._stacks.formats if trained else {}
        return {
            output.parameter: dtype
            for output in self.outputs
            if DTYPES.get(output.entry.dtype, dtype) != dtype
            and not output.packed
            and output.parameter not in quantized
            and output.parameter not in self.adapter.replaced.keys() | self.adapter.head.keys()
        }

    @staticmethod
    def _finite(weight: Tensor, rounded: Tensor, output: Output) -> Tensor:
        if not bool(torch.isfinite(rounded).all()):
            problem = "does not fit float16" if bool(torch.isfinite(weight).all()) else "has NaN or Inf"
            raise CheckpointError(f"the merged {output.entry.name} {problem}", "train with a lower learning rate")
        return rounded

    def _modules_beyond_the_model(self) -> list[str]:
        """Return names of modules with a matrix that transformers does not build, e.g. for multi-token prediction."""
        return [
            output.entry.name.removesuffix(".weight")
            for output in self.outputs
            if output.parameter not in self.adapter.shapes
            and output.entry.name.endswith(".weight")
            and len(output.entry.shape) == 2
        ]

    def config(self) -> dict[str, object]:
        """Return config.json of the merged model: the base's, with the new quantization and dtype."""
        config = json.loads(json.dumps(self.base.config))
        config.pop("quantization_config", None)
        if self.packing.config is not None:
            config["quantization_config"] = self.packing.config(self._modules_beyond_the_model())
        sizes: dict[str, int] = {}
        for output in self.outputs:
            sizes[output.entry.dtype] = sizes.get(output.entry.dtype, 0) + output.entry.nbytes
        dtype = str(DTYPES[max(sizes, key=lambda name: sizes[name])]).removeprefix("torch.")
        for section in (config, config.get("text_config")):
            if not isinstance(section, dict):
                continue
            for key in {"dtype", "torch_dtype"} & section.keys() or {"dtype"}:
                section[key] = dtype
            if self.adapter.rows is not None and "vocab_size" in section:
                section["vocab_size"] = self.adapter.rows
            if self.untied:
                section["tie_word_embeddings"] = False
        if self._scaled is not None:
            text = config.get("text_config")
            set_rope(text if isinstance(text, dict) else config, self._scaled)
        return config
