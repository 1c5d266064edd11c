"""The weights of a merged model: which tensors it has, how each is made, and writing them shard by shard."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from halfbyte.config import RunConfig
from halfbyte.errors import CheckpointError
from halfbyte.files import write_json
from halfbyte.models.checkpoint_files import INDEX
from halfbyte.models.load import resolve_dtype
from halfbyte.tensor import QuantizedTensor

from .adapter import ANOTHER_MODEL, AdapterLayers
from .base import DTYPES, BaseCheckpoint, Stored
from .shards import Entry, write_shard

Target = Literal["original", "dequantized"]


@dataclass(frozen=True)
class Output:
    """A tensor of the merged checkpoint: made from the base's `source`, it becomes the model's `parameter`."""

    entry: Entry
    source: Stored
    parameter: str


class MergedWeights:
    """The weights of base and adapter as one.

    Attributes:
        trained_dtype: what the base was cast to when it was trained on, before any quantization.
        shards: file name → its tensors; the base's own files and order.
        updates: target → [Σ kept·ΔW, Σ ΔW²] over the weights written: what of the update survived rounding.
        untied: the base shares one weight between embedding and head, and the adapter changes one of them, or each in
            its own way: the merged model then has two.

    Raises:
        CheckpointError: the base lacks a tensor that the adapter changes, or has it in another shape.
    """

    def __init__(self, config: RunConfig, base: BaseCheckpoint, adapter: AdapterLayers):
        self.base, self.adapter = base, adapter
        self._formats = {} if base.quantized else adapter.quantized
        self.trained_dtype = resolve_dtype(config.dtype, adapter.device)
        self.untied = False
        self.updates: dict[Target, list[float]] = {}
        self.shards: dict[str, list[Output]] = {file: [] for file in base.headers}
        pieces: set[str] = set()
        for stored in base.weights:
            parameter, is_whole = adapter.parameter_of(stored.name)
            self._add(stored.name, stored, parameter)
            pieces |= set() if is_whole else {parameter}
        for parameter, tied_to in adapter.tied.items():
            if adapter.changed & {parameter, tied_to}:
                self._untie(parameter, tied_to)
        self._check(pieces)
        for outputs in self.shards.values():  # wide ones first keeps every tensor aligned
            outputs.sort(key=lambda output: -(output.entry.nbytes // max(1, torch.Size(output.entry.shape).numel())))

    def _add(self, name: str, source: Stored, parameter: str) -> None:
        dtype, size = self.base.written_dtype(source), self.base.written_bytes(source)
        self.shards[source.file].append(Output(Entry(name, dtype, source.shape, size), source, parameter))

    def _untie(self, parameter: str, tied_to: str) -> None:
        """Give both their own tensor, made from the one that the base stores."""
        outputs = {output.parameter: output for shard in self.shards.values() for output in shard}
        stored = outputs.get(tied_to) or outputs.get(parameter)
        if stored is None:
            return  # `_check` says what is missing
        self.untied = True
        for name in {parameter, tied_to} - {stored.parameter}:
            for shard in self.shards.values():
                shard[:] = [output for output in shard if output.parameter != name]
            self._add(name, stored.source, name)

    def _check(self, pieces: set[str]) -> None:
        if beyond := sorted(pieces & (self.adapter.changed | self._formats.keys())):
            raise CheckpointError(f"{beyond[0]} is put together from several tensors, and cannot be merged")
        outputs = {output.parameter: output for shard in self.shards.values() for output in shard}
        for name in sorted(self.adapter.changed):
            expected = self.adapter.shapes[name]
            if name not in outputs:
                raise CheckpointError(f"{self.base.folder} lacks {name}, which the adapter changes", ANOTHER_MODEL)
            found = outputs[name].entry.shape
            if found != expected:
                raise CheckpointError(
                    f"{self.base.folder}: {name} has shape {found}, its config.json says {expected}",
                    "check that config.json belongs to these weights",
                )

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(output.entry.nbytes for shard in self.shards.values() for output in shard)

    def rounded(self, target: Target) -> set[str]:
        """The parameters whose values are rounded on the way."""
        return {
            output.parameter
            for shard in self.shards.values()
            for output in shard
            if self._is_computed(output, target) or output.entry.dtype != output.source.dtype
        }

    def _is_computed(self, output: Output, target: Target) -> bool:
        return (
            output.parameter in self.adapter.changed
            or bool(output.source.parts)
            or (target == "dequantized" and output.parameter in self._formats)
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
        self.updates.pop(target, None)
        for file, outputs in self.shards.items():
            by_name = {output.entry.name: output for output in outputs}

            def make(entry: Entry, by_name: dict[str, Output] = by_name) -> Tensor:
                advance(entry.nbytes)
                return self.tensor(by_name[entry.name], target)

            sums[file] = write_shard(folder / file, [output.entry for output in outputs], make)
        if (self.base.folder / INDEX).exists():
            weight_map = {name: file for file, names in sums.items() for name in names}
            write_json(folder / INDEX, {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map})
        return sums

    @torch.no_grad()
    def tensor(self, output: Output, target: Target) -> Tensor:
        """One tensor of the merged model: computed in fp32 and rounded once, or as the base stores it."""
        weight, name, dtype = self.base.read(output.source), output.parameter, output.entry.dtype
        if not self._is_computed(output, target):
            return weight if dtype == output.source.dtype else weight.to(DTYPES[dtype])
        weight = weight.to(self.adapter.device)
        if target == "dequantized" and name in self._formats:
            # transformers casts to the dtype of the run before it quantizes
            weight = weight.to(self.trained_dtype)
            weight = QuantizedTensor.quantize(weight, self._formats[name]).dequantize(torch.float32)
        if name not in self.adapter.changed:
            return self._finite(weight, weight.to(DTYPES[dtype]), output)
        before = weight.float()
        weight = self.adapter.merged(name, before.clone())
        rounded = self._finite(weight, weight.to(DTYPES[dtype]), output)
        update = weight - before
        sums = self.updates.setdefault(target, [0.0, 0.0])
        sums[0] += float(((rounded.float() - before) * update).sum(dtype=torch.float64))
        sums[1] += float(update.square().sum(dtype=torch.float64))
        return rounded

    def lost(self, target: Target) -> float:
        """The share of the update that rounding dropped, in what was written last: near 1 where ΔW is below half an
        ulp of a base whose weights are exact in the written dtype, near 0 otherwise."""
        kept, total = self.updates.get(target, (0.0, 0.0))
        return max(0.0, 1 - kept / total) if total else 0.0

    @staticmethod
    def _finite(weight: Tensor, rounded: Tensor, output: Output) -> Tensor:
        if not bool(torch.isfinite(rounded).all()):
            what = "does not fit float16" if bool(torch.isfinite(weight).all()) else "has NaN or Inf"
            raise CheckpointError(f"the merged {output.entry.name} {what}", "train with a lower learning rate")
        return rounded

    def config(self) -> dict[str, object]:
        """config.json of the merged model: the base's, not quantized, with the dtype that is written."""
        config = json.loads(json.dumps(self.base.config))
        config.pop("quantization_config", None)
        sizes: dict[str, int] = {}
        for output in (output for shard in self.shards.values() for output in shard):
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
