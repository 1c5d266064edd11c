"""Stacked experts while they load: each expert is quantized as it is read, before transformers would merge them.

A checkpoint has an expert's matrices apart; transformers' converters read those of a layer, stack them and hand the
stack to the quantizer. `stacking` gives it converters that do the same to quantized experts, one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from ..formats import Format
from ..formats.base import FLOATS
from ..layers import hold_stacks
from ..layers.experts import NAME
from ..modeling.architectures import expert_stacks
from ..tensor import QuantizedTensor
from ..utils.errors import CheckpointError, ModelError
from ..utils.notices import notice

if TYPE_CHECKING:
    from .quantizer import HalfbyteQuantizer

EXPERT = re.compile(r"\.experts\.(\d+)\.(.*)")
ANOTHER = "check that config.json belongs to these weights"


def stackable(format_: Format, shape: tuple[int, ...], stored: bool = False) -> str | None:
    """Why experts of `shape` [E, N, K] cannot be stored in a format; None: they can.

    Args:
        stored: whether the checkpoint has them so.
    """
    if not stored and not type(format_).examples():
        return f"{format_.spec} needs calibration"
    try:
        format_.stacked().check_stack(shape)
    except ModelError as error:
        return error.message
    return None


def fitting(model: Any, stacks: Mapping[str, Any], formats: dict[str, Format], stored: bool = False) -> list[str]:
    """Those of `stacks` that `formats` stores; what cannot be is taken out of `formats`, and said.

    A transposed module is stored whole or not at all, since it has one orientation.

    Args:
        stored: whether the checkpoint has them so.
    """
    why = {
        name: found
        for name in stacks.keys() & formats.keys()
        if (found := stackable(formats[name], _stored_shape(model.get_parameter(name), stacks[name]), stored))
    }
    for name, module in stacks.items():
        own = {other for other in stacks if stacks[other] is module}
        if module.is_transposed and name in formats and (own & why.keys() or own - formats.keys() or len(own) < 2):
            why.setdefault(name, "experts that lie transposed are stored all, or not at all")
    for name, found in why.items():
        formats.pop(name)
        leaf = name.rpartition(".")[2]
        notice(f"stack-{leaf}-{found}", f"{leaf} of the experts stays in 16 bits: {found}")
    return [name for name in stacks if name in formats]


def _stored_shape(weight: Tensor, module: Any) -> tuple[int, ...]:
    shape = tuple(weight.shape)
    return (shape[0], shape[2], shape[1]) if module.is_transposed else shape


def make_room(module: Any) -> None:
    """Have a module hold quantized stacks: they lie [E, N, K], K contiguous, where the model has [E, K, N], too.

    Its weights are on the meta device: they are not loaded yet.
    """
    hold_stacks(module)
    if module.is_transposed:
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            empty = torch.empty_like(getattr(module, name).transpose(1, 2), memory_format=torch.contiguous_format)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
        module.is_transposed = False


def store_stacks(
    model: Any, formats: dict[str, Format], skip_modules: list[str] | None = None, stored: bool = False
) -> dict[str, Any]:
    """Prepare the stacks of a model on the meta device that `formats` names; what cannot be stored so leaves `formats`.

    Args:
        stored: whether the checkpoint has them so.

    Returns:
        Parameter → its module, of those that are to be quantized.
    """
    stacks = expert_stacks(model, skip_modules)
    found = {name: stacks[name] for name in fitting(model, stacks, formats, stored)}
    for module in {id(module): module for module in found.values()}.values():
        make_room(module)
    if found:
        run_ours(model)
    return found


def run_ours(model: Any) -> None:
    """Have the model's experts run in `layers.experts`."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = NAME


class OneByOne(WeightConverter):
    """A converter whose operation is handed entries that are not read yet."""

    __slots__ = ()

    def materialize_tensors(self) -> dict[str, Any]:
        found = dict(self.collected_tensors)
        self.collected_tensors.clear()
        return found


class _QuantizeEach(ConversionOps):
    """All entries of one stack → a frozen quantized parameter, its experts read and quantized one after another.

    Args:
        operations: transformers', for stacks that stay in 16 bits.
    """

    def __init__(self, hf_quantizer: HalfbyteQuantizer, operations: list[ConversionOps]):
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
        counts = {len(each) for each in entries}
        if counts != {shape[0]}:
            raise CheckpointError(
                f"{name}: the checkpoint has {sorted(counts)} matrices of {shape[0]} experts", ANOTHER
            )

        def experts() -> Iterator[Tensor]:
            for at in range(shape[0]):
                parts = [read_entry(each[at]) for each in entries]
                weight = torch.cat(parts) if len(parts) > 1 else parts[0]
                if tuple(weight.shape) != shape[1:]:
                    found, wanted = tuple(weight.shape), shape[1:]
                    said = f"{name}: expert {at} has shape {found} in the checkpoint, {wanted} in the model"
                    raise CheckpointError(said, ANOTHER)
                yield weight

        matrices = experts()
        first = next(matrices)
        if first.is_meta:  # another process reads it
            whole = torch.empty(shape, dtype=first.dtype, device="meta")
            return nn.Parameter(QuantizedTensor.quantize(whole, format_.stacked()), requires_grad=False)

        def all_of() -> Iterator[Tensor]:
            yield first
            yield from matrices

        return stacked_parameter(name, all_of(), format_, shape)

    def __deepcopy__(self, memo: Any) -> _QuantizeEach:
        """transformers copies converters for each layer; failures must reach the one quantizer it asks at the end."""
        return self


def stacked_parameter(name: str, experts: Iterable[Tensor], format_: Format, shape: tuple[int, ...]) -> nn.Parameter:
    """A frozen stack of `shape` [E, N, K]; errors name the parameter."""
    try:
        return nn.Parameter(QuantizedTensor.quantize_stack(experts, format_, shape), requires_grad=False)
    except ModelError as error:
        raise ModelError(f"{name}: {error.message}", error.fix) from error


def read_entry(entry: Tensor | Callable[[], Tensor]) -> Tensor:
    """transformers reads an entry when it is asked to; before saving, and where threads read, it is a tensor."""
    if isinstance(entry, Tensor):
        return entry
    return entry() if callable(entry) else entry.result()


def as_in_file(codes: Tensor) -> Tensor:
    """transformers 5.17 casts E4M3 codes to the model's dtype, which holds them exactly; later versions do not."""
    if codes.dtype not in FLOATS:
        return codes
    cast = codes.to(torch.float8_e4m3fn)
    return cast if torch.equal(cast.to(codes.dtype), codes) else codes


def stacking(conversion: Any, hf_quantizer: HalfbyteQuantizer) -> Any:
    """A converter of transformers' as one that quantizes experts one at a time, where all it does is stack them."""
    if not only_stacks(conversion):
        return conversion
    operation = _QuantizeEach(hf_quantizer, conversion.operations)
    sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
    ours = OneByOne(list(sources), list(targets), operations=[operation])
    ours.scope_prefix, ours.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
    return ours


def only_stacks(conversion: Any) -> bool:
    """Whether all that a converter of transformers' does is to stack experts, gate above up."""
    if not isinstance(conversion, WeightConverter):
        return False
    kinds = [(type(each), getattr(each, "dim", None)) for each in conversion.operations]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def is_stacking(conversion: Any) -> bool:
    """Whether a converter is one that `stacking` made."""
    return isinstance(conversion, OneByOne)
