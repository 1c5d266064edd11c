"""Stacks of checkpoints that were quantized before: each expert's codes are taken as they are, one expert at a time.

Such a checkpoint has an expert's matrices apart, each with scales of its own: bitsandbytes' 4-bit ones, DeepSeek's FP8
tiles, GPTQ, AWQ, compressed-tensors' INT4. A stack has their codes and values. Only bitsandbytes' nested scales come
apart, exactly: they are nested in blocks that two matrices cannot share, so a weight has 4.5 bits where it had 4.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from ..formats import Format, recognize
from ..formats.base import FLOATS, entry_name
from ..formats.int4 import Int4
from ..tensor import QuantizedTensor
from ..utils.errors import CheckpointError, ModelError
from .expert_stacks import ANOTHER, OneByOne, as_in_file, only_stacks, read_entry

if TYPE_CHECKING:
    from .quantizer import HalfbyteQuantizer

Entries = dict[str, list[Any]]  # suffix → an entry of each expert


class _TakeEach(ConversionOps):
    """All entries of one stack → a frozen quantized parameter with their codes.

    Args:
        operations: transformers', for stacks that the checkpoint has in 16 bits.
        patterns: pattern → the checkpoint's matrix that it is an entry of (gate, up), and its suffix.
    """

    def __init__(
        self, hf_quantizer: HalfbyteQuantizer, operations: list[ConversionOps], patterns: dict[str, tuple[str, str]]
    ):
        self.hf_quantizer, self.operations, self.patterns = hf_quantizer, operations, patterns

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **kwargs: Any) -> dict[str, Any]:
        matrices: dict[str, Entries] = {source: {} for source, _ in self.patterns.values()}
        for pattern, entries in input_dict.items():
            source, suffix = self.patterns[pattern]
            matrices[source][suffix] = entries
        plain = all(found.keys() == {""} for found in matrices.values())
        if plain and all(read_entry(found[""][0]).dtype in FLOATS for found in matrices.values()):
            return self._in_16_bits(full_layer_name, model, matrices, kwargs)
        shape = tuple(model.get_parameter(full_layer_name).shape)
        result: dict[str, Tensor] = {}
        self.hf_quantizer.attempt(full_layer_name, lambda: self._stack(full_layer_name, matrices, shape), result)
        return result

    def _in_16_bits(self, name: str, model: Any, matrices: dict[str, Entries], how: dict[str, Any]) -> dict[str, Any]:
        dtype = model.get_parameter(name).dtype
        if name in self.hf_quantizer.stacks:
            self.hf_quantizer.leave(name)
        found: dict[str, Any] = {
            source: [read_entry(each).to(dtype) for each in entries[""]] for source, entries in matrices.items()
        }
        for operation in self.operations:
            found = operation.convert(found, **(how | {"source_patterns": [*matrices]}))
        return found

    def _stack(self, name: str, matrices: dict[str, Entries], shape: tuple[int, ...]) -> nn.Parameter:
        counts = {len(each) for entries in matrices.values() for each in entries.values()}
        if counts != {shape[0]}:
            raise CheckpointError(f"{name}: the checkpoint has {sorted(counts)} entries of {shape[0]} experts", ANOTHER)
        experts = self._experts(name, matrices, shape)
        each, parts, dtype = next(experts)
        stacked = each.stacked()

        def filled() -> Iterator[Mapping[str, Tensor]]:
            yield parts
            for at, (other, own, _) in enumerate(experts, 1):
                if other != each:
                    said = f"{name}: expert {at} is stored as {other.spec}, and expert 0 as {each.spec}"
                    raise CheckpointError(said, "use a checkpoint with all experts of a layer stored alike")
                yield own

        self.hf_quantizer.quantization_config.formats[name] = each
        if next(iter(parts.values())).is_meta:  # another process reads it
            whole = QuantizedTensor.quantize(torch.empty(shape, dtype=dtype, device="meta"), stacked)
        else:
            whole = QuantizedTensor(stacked, stacked.stack_parts(filled(), shape), shape, dtype)
        return nn.Parameter(whole, requires_grad=False)

    def _experts(
        self, name: str, matrices: dict[str, Entries], shape: tuple[int, ...]
    ) -> Iterator[tuple[Format, dict[str, Tensor], torch.dtype]]:
        """Format, parts and dtype of each expert of the stack, its gate above its up."""
        each = (shape[1] // len(matrices), shape[2])
        stored = type(self.hf_quantizer.format_of(name))
        before = name.partition(".experts.")[0]
        for at in range(shape[0]):
            found: list[tuple[Format, dict[str, Tensor], tuple[int, ...], torch.dtype]] = []
            for source, entries in matrices.items():
                label = f"{before}.experts.{at}.{source.rpartition('*.')[2]}"
                state = {suffix: read_entry(entries[suffix][at]) for suffix in entries}
                unread = any(tensor.is_meta for tensor in state.values())  # by this process
                if unread and not issubclass(stored, Int4):  # whose options are in shapes, not in numbers
                    whole = QuantizedTensor.quantize(
                        torch.empty(each, device="meta"), self.hf_quantizer.format_of(name)
                    )
                    found.append((whole.format, whole.parts, each, self.hf_quantizer.dtypes[name]))
                    continue
                if "" in state:
                    state[""] = as_in_file(state[""])
                found.append(recognize(state, prefer=stored).from_state(state, label))
                if found[-1][2] != each:
                    said = f"{label} has shape {found[-1][2]} in the checkpoint, {each} in the model"
                    raise CheckpointError(said, ANOTHER)
            first, _, _, dtype = found[0]
            if any(other != first for other, *_ in found):
                raise CheckpointError(f"{name}: gate and up of expert {at} are stored otherwise", ANOTHER)
            try:
                yield (*first.concat_rows([parts for _, parts, *_ in found], each), dtype)
            except ModelError as error:
                raise ModelError(f"{name}: expert {at}: {error.message}", error.fix) from error

    def __deepcopy__(self, memo: Any) -> _TakeEach:
        """transformers copies converters for each layer; failures must reach the one quantizer it asks at the end."""
        return self


def taking(conversion: Any, hf_quantizer: HalfbyteQuantizer, suffixes: set[str]) -> Any:
    """A converter of transformers' as one that takes quantized experts, where all it does is to stack them.

    Args:
        suffixes: of entries that belong to a quantized weight.
    """
    if not only_stacks(conversion):
        return conversion
    patterns: dict[str, tuple[str, str]] = {}
    for source in conversion._original_source_patterns:
        bare = source.removesuffix("$")
        for suffix in sorted(suffixes - {""}):
            patterns[f"{entry_name(bare, suffix)}$"] = source, suffix
        patterns[f"{bare}$"] = source, ""
    operation = _TakeEach(hf_quantizer, conversion.operations, patterns)
    ours = OneByOne([*patterns], list(conversion._original_target_patterns), operations=[operation])
    ours.scope_prefix, ours.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
    return ours
