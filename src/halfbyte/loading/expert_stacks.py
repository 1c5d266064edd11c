"""Stacked experts while they load: each expert is quantized, or its codes are read, before it is stacked.

A checkpoint stores an expert's matrices separately. transformers' converters read a layer's matrices, stack them and
pass the stack to the quantizer. `stacking_converter` quantizes each expert before stacking, one at a time.
`prequantized_converter` does the same for checkpoints that were quantized before, whose matrices have scales of their
own: bitsandbytes' 4-bit formats, DeepSeek's FP8 tiles, GPTQ, AWQ, compressed-tensors' INT4. A stack keeps their codes
and values. Only bitsandbytes' nested scales are un-nested, exactly: two matrices cannot share their blocks, so a weight
takes 4.5 bits instead of 4.13.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from ..formats import Format, recognize
from ..formats.base import FLOATS, entry_name
from ..formats.int4 import PACKED, Int4
from ..layers import hold_stacks
from ..modeling.architectures import expert_stacks
from ..modeling.experts import NAME
from ..modeling.transformers_versions import original_codes
from ..tensor import QuantizedTensor
from ..utils.errors import CheckpointError, ModelError
from ..utils.notices import notice

EXPERT = re.compile(r"\.experts\.(\d+)\.(.*)")
SHAPE = PACKED["shape"]
MISMATCH_FIX = "check that config.json belongs to these weights"

Entries = dict[str, list[Any]]  # suffix → an entry of each expert


class StackQuantizer(Protocol):
    """The parts of `HalfbyteQuantizer` that converters of stacks call."""

    stacks: dict[str, Any]
    dtypes: dict[str, torch.dtype]
    quantization_config: Any

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool: ...

    def format_of(self, param_name: str) -> Format: ...

    def keep_unquantized(self, param_name: str) -> None: ...

    def attempt(self, key: str, make: Callable[[], nn.Parameter], result: dict[str, Tensor]) -> None: ...


def stack_unsupported_reason(format_: Format, shape: tuple[int, ...], stored: bool = False) -> str | None:
    """Return why experts of `shape` [E, N, K] cannot be stored in a format, or None.

    Args:
        stored: whether the checkpoint stores them in this format.
    """
    if not stored and not type(format_).examples():
        return f"{format_.spec} needs calibration"
    try:
        format_.stacked().check_stack(shape)
    except ModelError as error:
        return error.message
    return None


def supported_stacks(
    model: Any, stacks: Mapping[str, Any], formats: dict[str, Format], stored: bool = False
) -> list[str]:
    """Return those of `stacks` that `formats` can store; remove the others from `formats`, and log them.

    Stacks of a transposed module are quantized together or not at all, since the module has one orientation.

    Args:
        stored: whether the checkpoint stores them in these formats.
    """
    reasons: dict[str, str] = {}
    for name in stacks.keys() & formats.keys():
        shape = _stored_shape(model.get_parameter(name), stacks[name])
        if reason := stack_unsupported_reason(formats[name], shape, stored):
            reasons[name] = reason
    for name, module in stacks.items():
        siblings = {sibling for sibling in stacks if stacks[sibling] is module}
        apart = siblings & reasons.keys() or siblings - formats.keys() or len(siblings) < 2
        if module.is_transposed and name in formats and apart:
            reasons.setdefault(name, "stacks of transposed experts are quantized together, or not at all")
    for name, reason in reasons.items():
        formats.pop(name)
        leaf = name.rpartition(".")[2]
        notice(f"stack-{leaf}-{reason}", f"keeping {leaf} of the experts in 16 bits: {reason}")
    return [name for name in stacks if name in formats]


def _stored_shape(weight: Tensor, module: Any) -> tuple[int, ...]:
    shape = tuple(weight.shape)
    return (shape[0], shape[2], shape[1]) if module.is_transposed else shape


def prepare_module(module: Any) -> None:
    """Prepare a module for quantized stacks: [E, N, K] with contiguous K, also where the model has [E, K, N].

    The module's weights are on the meta device, before loading.
    """
    hold_stacks(module)
    if module.is_transposed:
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            empty = torch.empty_like(getattr(module, name).transpose(1, 2), memory_format=torch.contiguous_format)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
        module.is_transposed = False


def prepare_stacks(
    model: Any, formats: dict[str, Format], skip_modules: list[str] | None = None, stored: bool = False
) -> dict[str, Any]:
    """Prepare the stacks in `formats` of a model on the meta device; unsupported ones are removed from `formats`.

    Args:
        stored: whether the checkpoint stores them in these formats.

    Returns:
        Parameter → its module, for the stacks to quantize.
    """
    stacks = expert_stacks(model, skip_modules)
    quantized = {name: stacks[name] for name in supported_stacks(model, stacks, formats, stored)}
    for module in {id(module): module for module in quantized.values()}.values():
        prepare_module(module)
    if quantized:
        use_halfbyte_experts(model)
    return quantized


def use_halfbyte_experts(model: Any) -> None:
    """Select `modeling.experts` to run the model's experts."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = NAME


class LazyConverter(WeightConverter):
    """A converter whose operation receives unread entries."""

    __slots__ = ()

    def materialize_tensors(self) -> dict[str, Any]:
        tensors = dict(self.collected_tensors)
        self.collected_tensors.clear()
        return tensors


class _QuantizeExperts(ConversionOps):
    """Conversion of all entries of a stack to a frozen quantized parameter, one expert at a time.

    Args:
        operations: transformers' operations, for stacks that stay in 16 bits.
    """

    def __init__(self, hf_quantizer: StackQuantizer, operations: list[ConversionOps]):
        self.hf_quantizer, self.operations = hf_quantizer, operations

    def convert(
        self, input_dict: dict[str, Any], *, source_patterns: list[str], full_layer_name: str, model: Any, **kwargs: Any
    ) -> dict[str, Any]:
        if not self.hf_quantizer.param_needs_quantization(model, full_layer_name):
            kwargs |= {"source_patterns": source_patterns, "full_layer_name": full_layer_name, "model": model}
            input_dict = {pattern: [read_entry(entry) for entry in entries] for pattern, entries in input_dict.items()}
            for operation in self.operations:
                input_dict = operation.convert(input_dict, **kwargs)
            return input_dict
        expected = tuple(model.get_parameter(full_layer_name).shape)
        entries = [input_dict.pop(pattern, []) for pattern in source_patterns]
        result: dict[str, Tensor] = {}
        self.hf_quantizer.attempt(full_layer_name, lambda: self._stack(full_layer_name, entries, expected), result)
        return result

    def _stack(self, name: str, entries: list[list[Any]], shape: tuple[int, ...]) -> nn.Parameter:
        format_ = self.hf_quantizer.format_of(name)
        counts = {len(source_entries) for source_entries in entries}
        if counts != {shape[0]}:
            raise CheckpointError(
                f"{name}: the checkpoint has {sorted(counts)} matrices for {shape[0]} experts", MISMATCH_FIX
            )

        def experts() -> Iterator[Tensor]:
            for expert in range(shape[0]):
                matrices_of_expert = [read_entry(source_entries[expert]) for source_entries in entries]
                weight = torch.cat(matrices_of_expert) if len(matrices_of_expert) > 1 else matrices_of_expert[0]
                if tuple(weight.shape) != shape[1:]:
                    described = f"shape {tuple(weight.shape)} in the checkpoint, {shape[1:]} in the model"
                    raise CheckpointError(f"{name}: expert {expert} has {described}", MISMATCH_FIX)
                yield weight

        matrices = experts()
        first = next(matrices)
        if first.is_meta:  # another rank reads it
            empty = torch.empty(shape, dtype=first.dtype, device="meta")
            return nn.Parameter(QuantizedTensor.quantize(empty, format_.stacked()), requires_grad=False)

        def all_experts() -> Iterator[Tensor]:
            yield first
            yield from matrices

        return stacked_parameter(name, all_experts(), format_, shape)

    def __deepcopy__(self, memo: Any) -> _QuantizeExperts:
        """Return self: transformers copies converters per layer, but failures must reach the one quantizer."""
        return self


class _LoadQuantizedExperts(ConversionOps):
    """Conversion of all entries of a stack to a frozen quantized parameter with their codes.

    Args:
        operations: transformers' operations, for stacks that the checkpoint stores in 16 bits.
        patterns: pattern → (matrix of the checkpoint (gate, up), suffix of the entry).
    """

    def __init__(
        self, hf_quantizer: StackQuantizer, operations: list[ConversionOps], patterns: dict[str, tuple[str, str]]
    ):
        self.hf_quantizer = hf_quantizer
        self.operations = operations
        self.patterns = patterns

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **kwargs: Any) -> dict[str, Any]:
        matrices: dict[str, Entries] = {source: {} for source, _ in self.patterns.values()}
        for pattern, entries in input_dict.items():
            source, suffix = self.patterns[pattern]
            matrices[source][suffix] = entries
        plain = all(state.keys() == {""} for state in matrices.values())
        if plain and all(read_entry(state[""][0]).dtype in FLOATS for state in matrices.values()):
            if full_layer_name in self.hf_quantizer.stacks:
                self.hf_quantizer.keep_unquantized(full_layer_name)
            dtype = model.get_parameter(full_layer_name).dtype
            tensors: dict[str, Any] = {
                source: [read_entry(entry).to(dtype) for entry in state[""]] for source, state in matrices.items()
            }
            for operation in self.operations:
                tensors = operation.convert(tensors, **(kwargs | {"source_patterns": [*matrices]}))
            return tensors
        shape = tuple(model.get_parameter(full_layer_name).shape)
        result: dict[str, Tensor] = {}
        self.hf_quantizer.attempt(full_layer_name, lambda: self._stack(full_layer_name, matrices, shape), result)
        return result

    def _stack(self, name: str, matrices: dict[str, Entries], shape: tuple[int, ...]) -> nn.Parameter:
        counts = {len(format_) for entries in matrices.values() for format_ in entries.values()}
        if counts != {shape[0]}:
            wrong = f"{name}: the checkpoint has {sorted(counts)} entries for {shape[0]} experts"
            raise CheckpointError(wrong, MISMATCH_FIX)
        experts = self._experts(name, matrices, shape)
        format_, first_parts, dtype = next(experts)
        stacked = format_.stacked()

        def filled() -> Iterator[Mapping[str, Tensor]]:
            yield first_parts
            for expert, (other_format, parts, _) in enumerate(experts, 1):
                if other_format != format_:
                    wrong = f"{name}: expert {expert} is stored as {other_format.spec}, expert 0 as {format_.spec}"
                    raise CheckpointError(wrong, "use a checkpoint that stores all experts of a layer in one format")
                yield parts

        self.hf_quantizer.quantization_config.formats[name] = format_
        if next(iter(first_parts.values())).is_meta:  # another rank reads it
            tensor = QuantizedTensor.quantize(torch.empty(shape, dtype=dtype, device="meta"), stacked)
        else:
            tensor = QuantizedTensor(stacked, stacked.stack_parts(filled(), shape), shape, dtype)
        return nn.Parameter(tensor, requires_grad=False)

    def _experts(
        self, name: str, matrices: dict[str, Entries], shape: tuple[int, ...]
    ) -> Iterator[tuple[Format, dict[str, Tensor], torch.dtype]]:
        """Yield format, parts and dtype of each expert of the stack, gate above up."""
        matrix_shape = (shape[1] // len(matrices), shape[2])
        stored = type(self.hf_quantizer.format_of(name))
        prefix = name.partition(".experts.")[0]
        for expert in range(shape[0]):
            loaded: list[tuple[Format, dict[str, Tensor], tuple[int, ...], torch.dtype]] = []
            for source, entries in matrices.items():
                label = f"{prefix}.experts.{expert}.{source.rpartition('*.')[2]}"
                state = {suffix: read_entry(entries[suffix][expert]) for suffix in entries}
                unread = any(tensor.is_meta for tensor in state.values())  # another rank reads it
                if unread and not issubclass(stored, Int4):  # Int4's options follow from the entries' shapes
                    tensor = QuantizedTensor.quantize(
                        torch.empty(matrix_shape, device="meta"), self.hf_quantizer.format_of(name)
                    )
                    loaded.append((tensor.format, tensor.parts, matrix_shape, self.hf_quantizer.dtypes[name]))
                    continue
                if unread and SHAPE in state:
                    state[SHAPE] = torch.tensor(matrix_shape)
                if "" in state:
                    state[""] = original_codes(state[""])
                loaded.append(recognize(state, prefer=stored).from_state(state, label))
                if loaded[-1][2] != matrix_shape:
                    wrong = f"{label} has shape {loaded[-1][2]} in the checkpoint, {matrix_shape} in the model"
                    raise CheckpointError(wrong, MISMATCH_FIX)
            first, _, _, dtype = loaded[0]
            if any(format_ != first for format_, *_ in loaded):
                raise CheckpointError(
                    f"{name}: gate and up of expert {expert} are stored in different formats", MISMATCH_FIX
                )
            try:
                yield (*first.concat_rows([parts for _, parts, *_ in loaded], matrix_shape), dtype)
            except ModelError as error:
                raise ModelError(f"{name}: expert {expert}: {error.message}", error.fix) from error

    def __deepcopy__(self, memo: Any) -> _LoadQuantizedExperts:
        """Return self: transformers copies converters per layer, but failures must reach the one quantizer."""
        return self


def stacked_parameter(name: str, experts: Iterable[Tensor], format_: Format, shape: tuple[int, ...]) -> nn.Parameter:
    """Quantize experts into a frozen stack of `shape` [E, N, K]; errors name the parameter."""
    try:
        return nn.Parameter(QuantizedTensor.quantize_stack(experts, format_, shape), requires_grad=False)
    except ModelError as error:
        raise ModelError(f"{name}: {error.message}", error.fix) from error


def read_entry(entry: Tensor | Callable[[], Tensor]) -> Tensor:
    """Read an entry: a callable or future of transformers, or a tensor (before saving, or read by threads)."""
    if isinstance(entry, Tensor):
        return entry
    return entry() if callable(entry) else entry.result()


def stacking_converter(conversion: Any, hf_quantizer: StackQuantizer) -> Any:
    """Replace a transformers converter that only stacks experts by one that quantizes each expert first."""
    if not only_stacks(conversion):
        return conversion
    operation = _QuantizeExperts(hf_quantizer, conversion.operations)
    sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
    converter = LazyConverter(list(sources), list(targets), operations=[operation])
    converter.scope_prefix, converter.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
    return converter


def prequantized_converter(conversion: Any, hf_quantizer: StackQuantizer, suffixes: set[str]) -> Any:
    """Replace a transformers converter that only stacks experts by one that stacks quantized experts.

    Args:
        suffixes: suffixes of the entries of a quantized weight.
    """
    if not only_stacks(conversion):
        return conversion
    patterns: dict[str, tuple[str, str]] = {}
    for source in conversion._original_source_patterns:
        bare = source.removesuffix("$")
        for suffix in sorted(suffixes - {""}):
            patterns[f"{entry_name(bare, suffix)}$"] = source, suffix
        patterns[f"{bare}$"] = source, ""
    operation = _LoadQuantizedExperts(hf_quantizer, conversion.operations, patterns)
    converter = LazyConverter([*patterns], list(conversion._original_target_patterns), operations=[operation])
    converter.scope_prefix, converter.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
    return converter


def only_stacks(conversion: Any) -> bool:
    """Return whether a transformers converter only stacks experts, gate above up."""
    if not isinstance(conversion, WeightConverter):
        return False
    operations = [(type(operation), getattr(operation, "dim", None)) for operation in conversion.operations]
    return operations in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def is_stacking(conversion: Any) -> bool:
    """Return whether a converter was made in this module."""
    return isinstance(conversion, LazyConverter)
