"""Storage of a merged model's linear layers: 16 bits, halfbyte's formats, or another tool's layout (layouts.py).

NVFP4 for servers differs from halfbyte's in two ways. Servers fuse q, k and v (and gate and up) into one matrix with
one factor, so these layers share it. Activations, if they are quantized, have a fixed scale, from the largest input on
the run's text. In compressed-tensors' layout the factor is a power of two: the file stores its reciprocal, which is
then exact also for readers that round it to 16 bits (bf16 would change all values of a matrix by up to 0.4%).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import SIXTEEN, Origin, Storage
from ..formats import Format, Stack, named, names
from ..formats.base import Parts, entry_name
from ..formats.nvfp4 import GLOBAL_SCALE, INPUT_GLOBAL_SCALE, INPUT_SCALE, PACKED, SCALE
from ..loading.checkpoint import NAMES
from ..loading.completeness import meta_model
from ..loading.expert_stacks import supported_stacks
from ..loading.find import load_model_config
from ..loading.quantizer import HalfbyteConfig, quantizable
from ..modeling.architectures import expert_stacks, is_router
from ..qat.model import qat_format
from ..tensor import QuantizedTensor
from ..utils.errors import ConfigError, ModelError
from ..utils.notices import notice
from .layouts import GROUP_SIZES, LAYOUTS, NVFP4_BLOCK, TILE, Layout, Loader
from .shards import Entry

Quantize = str | Mapping[str, str] | None

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
NVFP4_RANGE = 6 * 448  # the largest E2M1 code times the largest E4M3 scale
FOUR_OVER_SIX_RANGE = 6 * 256
TYPICAL_SHAPE = (4096, 4096)  # for counting bits per weight
PACKAGE_OF: dict[Loader, str] = {
    "bitsandbytes": "bitsandbytes",
    "fp8": "accelerate",
}  # of each tool that is not halfbyte
JSON_NUMBER_BYTES = 24  # longest repr of a float; JSON entries are padded by it so that their size is known


@dataclass(frozen=True)
class Packing:
    """Storage of a merged model's weights.

    Attributes:
        name: as given by the user; "16bit" if nothing is quantized.
        formats: parameter name → format; the other parameters keep 16 bits.
        config: from the names of further modules that stay in 16 bits to the `quantization_config` of config.json; None
            in 16 bits.
        layout: the other tool's layout; None for halfbyte's formats.
        peers: parameter name → all parameters that share its factor.
        stacks: names of parameters that are stacks of experts, written as one tensor.
    """

    name: str = SIXTEEN
    formats: Mapping[str, Format] = field(default_factory=dict)
    config: Callable[[Sequence[str]], Mapping[str, Any]] | None = None
    layout: Layout | None = None
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacks: frozenset[str] = frozenset()

    @property
    def loader(self) -> Loader:
        """Tool that loads the model."""
        return self.layout.loader if self.layout else "halfbyte"

    @property
    def calibrated(self) -> bool:
        """Whether the scale of activations is stored."""
        return self.layout is not None and self.layout.calibrated

    def is_scheme(self, scheme: str | None) -> bool:
        """Return whether every quantized layer is stored as training with `qat_scheme: scheme` rounded it."""
        return scheme is not None and set(self.formats.values()) == {qat_format(scheme)} and not self.peers

    @property
    def bits(self) -> float:
        """Bits per weight, scales included, of the layers with the fewest bits."""
        matrices = (f.matrix_format if isinstance(f, Stack) else f for f in self.formats.values())
        return min((format_.bits_per_weight(TYPICAL_SHAPE) for format_ in matrices), default=16.0)

    def entries(self, name: str, parameter: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Entry, ...]:
        """Return the checkpoint entries of a quantized parameter that the checkpoint calls `name`.

        Raises:
            ModelError: the format cannot store the shape.
        """
        if len(shape) == 3 and parameter not in self.stacks:
            raise ModelError(
                f"{self.name} stores each expert by itself, and the base stores {name} {shape} as one tensor",
                "store it in a format of halfbyte, e.g. nf4 or fp8",
            )
        try:
            entries = _state_entries(self.layout, self.formats[parameter], shape, dtype)
        except ModelError as error:
            raise ModelError(f"{self.name} cannot hold {name}: {error.message}", error.fix) from error
        return tuple(Entry(entry_name(name, suffix), *entry) for suffix, entry in entries.items())

    def state(self, weight: QuantizedTensor, input_amax: float = 1.0) -> dict[str, Tensor]:
        """Return suffix → tensor of the checkpoint entries of one weight.

        Args:
            input_amax: largest magnitude of its input, for a layout that stores the scale of activations.
        """
        return _state(self.layout, weight.format, weight.parts, tuple(weight.shape), weight.dtype, input_amax)

    def quantize(self, weight: Tensor, format: Format, amax: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Quantize a matrix.

        Args:
            amax: returns the largest magnitude of the matrices that share its factor, fp32 []; called for NVFP4 only.
        """
        if self.layout is None or self.layout.nvfp4 is None:
            return format.quantize(weight)
        largest = amax()
        if self.layout.nvfp4 == "compressed-tensors":
            mantissa, exponent = torch.frexp(largest / FOUR_OVER_SIX_RANGE)
            largest = FOUR_OVER_SIX_RANGE * torch.ldexp(torch.ones_like(mantissa), exponent)
        return quantize_together(weight, format, largest)


def packing(quantize: Quantize, origin: Origin, *, experts: bool = True) -> Packing:
    """Return the packing that the user requests, for the model of a run.

    Args:
        experts: whether halfbyte's formats include stacks of experts.
        quantize: one of `LAYOUTS`, a name or spec of a format, or module name pattern → name, spec or "16bit", as in a
            run's `quantization:`; None for 16 bits.

    Raises:
        ConfigError: the target does not exist, or does not fit the model.
    """
    if quantize is None or quantize == SIXTEEN:
        return Packing()
    model = meta_model(origin, load_model_config(origin))
    linears = quantizable(model)
    if isinstance(quantize, str) and quantize in LAYOUTS:
        return _foreign(quantize, LAYOUTS[quantize], model, linears)
    patterns = quantize.items() if isinstance(quantize, Mapping) else [("*", quantize)]
    stacks = expert_stacks(model) if experts else {}
    try:
        quantization = HalfbyteConfig(Storage(tuple(patterns)))
        formats = quantization.assign(model, [*linears, *stacks])
    except ModelError as error:
        fix = f"{error.fix}; layouts of other tools: {', '.join(LAYOUTS)}"
        raise ConfigError(error.message.replace("quantization:", "quantize:"), fix) from error
    if not formats:
        raise _no_linears(model)
    for format_ in formats.values():
        if not type(format_).examples():
            raise ConfigError(
                f"quantize: {format_.spec} is a layout of other tools",
                f"use one of {', '.join(LAYOUTS)}, or for halfbyte {', '.join(sorted(names()))}",
            )
    packed = quantization.stacks = frozenset(supported_stacks(model, stacks, formats))
    parameters = {f"{name}.weight": formats[name] for name in linears if name in formats}
    parameters |= {name: formats[name].stacked() for name in packed}
    name = quantize if isinstance(quantize, str) else ",".join(f"{key}={value}" for key, value in quantize.items())
    return Packing(name, parameters, lambda _: quantization.to_dict(), stacks=packed)


def _no_linears(model: nn.Module) -> ConfigError:
    message = f"quantize: {type(model).__name__} has no linear layer to store in it"
    return ConfigError(message, "merge in 16 bits")


def _foreign(name: str, layout: Layout, model: Any, linears: Mapping[str, nn.Linear]) -> Packing:
    """Return the packing of layout `name` for a model on the meta device.

    Raises:
        ConfigError: a weight has a shape that the layout cannot store, or experts need calibrated activations.
    """
    if not linears:
        raise _no_linears(model)
    stacks = expert_stacks(model)
    if stacks and layout.calibrated and layout.nvfp4 == "compressed-tensors":
        raise ConfigError(f"quantize: {name} needs a scale of each expert's input", "use nvfp4a16")
    stacks = stacks if layout.experts else {}
    shapes = {module: tuple(linear.weight.shape) for module, linear in linears.items()}
    for stack, module in stacks.items():
        _, *sides = model.get_parameter(stack).shape
        shapes[stack] = tuple(reversed(sides)) if module.is_transposed else tuple(sides)
    if layout.loader == "fp8":
        # transformers splits a side evenly among its scales; one scale covers any side up to a tile
        _check_sides(name, shapes, {module: [n for n in size if n > TILE] for module, size in shapes.items()}, TILE)
    elif layout.nvfp4:
        _check_sides(name, shapes, shapes, NVFP4_BLOCK)
    elif layout.has_groups:
        _check_sides(name, shapes, shapes, 8)
    group = _group_size(name, shapes) if layout.has_groups else NVFP4_BLOCK
    is_half = getattr(model.config.get_text_config(), "dtype", None) == torch.float16
    scales = "float16" if is_half else "bfloat16"
    format_ = named(layout.spec.format(group=group, scales=scales))
    formats = {f"{module}.weight": format_ for module in linears} | dict.fromkeys(stacks, format_)
    skipped = [
        module_name
        for module_name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_router(module)) and module_name not in linears
    ]
    return Packing(
        name,
        formats,
        lambda further: layout.config(list(dict.fromkeys([*skipped, *further])), group),
        layout,
        _peers(formats) if layout.nvfp4 else {},
    )


def _group_size(name: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the largest group size that divides the inputs of every layer; log it if it is not the usual one.

    Raises:
        ConfigError: none does; the error names a layer.
    """
    usual, *smaller = GROUP_SIZES
    beyond = next((module for module, shape in shapes.items() if shape[1] % usual), None)
    if beyond is None:
        return usual
    message = f"{usual} does not divide the {shapes[beyond][1]} inputs of {beyond}"
    for size in smaller:
        if all(inputs % size == 0 for _, inputs in shapes.values()):
            notice("merge-groups", f"{name} with groups of {size}: {message}")
            return size
    smallest = GROUP_SIZES[-1]
    module = next(module for module, shape in shapes.items() if shape[1] % smallest)
    raise ConfigError(
        f"quantize: {name} cannot hold {module}.weight {shapes[module]}: groups of"
        f" {', '.join(map(str, GROUP_SIZES))} inputs do not divide it",
        "use fp8-block, or fp8 or nf4 of halfbyte",
    )


def _check_sides(
    name: str, shapes: Mapping[str, tuple[int, ...]], sides: Mapping[str, Sequence[int]], unit: int
) -> None:
    for module, sizes in sides.items():
        if any(side % unit for side in sizes):
            raise ConfigError(
                f"quantize: {name} cannot hold {module}.weight {shapes[module]}: it takes sides in multiples of {unit}",
                "use fp8 or nf4",
            )


def _peers(formats: Mapping[str, Format]) -> dict[str, tuple[str, ...]]:
    """Return parameter → the parameters that a server fuses with it, including itself."""
    peers = {}
    for parameter in formats:
        parent, _, name = parameter.removesuffix(".weight").rpartition(".")
        group = next((group for group in FUSED if name in group), ())
        siblings = [f"{parent}.{sibling}.weight" for sibling in group]
        peers[parameter] = tuple(sibling for sibling in siblings if sibling in formats) or (parameter,)
    return peers


def check_loader(loader: Loader) -> None:
    """Raise ConfigError if the tool that loads the model is not installed."""
    needed = PACKAGE_OF.get(loader)
    if needed and importlib.util.find_spec(needed) is None:
        raise ConfigError(
            f"verifying needs {needed}, which is not installed", f"pip install {needed}, or merge with --no-verify"
        )


# --- tensors ---------------------------------------------------------------------------------------------------------


def quantize_together(weight: Tensor, format: Format, amax: Tensor) -> dict[str, Tensor]:
    """Quantize `weight` [N, K] to NVFP4 with the factor of a group of matrices with maximum magnitude `amax`.

    The factor follows from the largest value, so a row with that value is appended, and dropped again.
    """
    stored = format.quantize(torch.cat([weight, amax.expand(1, weight.shape[1])]))
    return {"packed": stored["packed"][:-1], "scale": stored["scale"][:-1], "factor": stored["factor"]}


def padded_state(state: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Pad the JSON entries of `state` with spaces to their announced sizes, in bytes."""
    return {
        name: F.pad(tensor, (0, sizes[name] - len(tensor)), value=ord(" ")) if "quant_state" in name else tensor
        for name, tensor in state.items()
    }


def _state(
    layout: Layout | None,
    format: Format,
    parts: Parts,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    input_amax: float = 1.0,
) -> dict[str, Tensor]:
    """Return suffix → tensor of the checkpoint entries of one weight; see `Packing.state`."""
    if layout is None or layout.nvfp4 is None:
        return format.to_state(parts, shape, dtype)
    input_scale = torch.tensor(input_amax / NVFP4_RANGE)
    if layout.nvfp4 == "modelopt":
        return format.to_state(parts, shape, dtype) | {INPUT_SCALE: input_scale}
    state = {
        PACKED: parts["packed"],
        SCALE: parts["scale"].view(torch.float8_e4m3fn),
        GLOBAL_SCALE: parts["factor"].reciprocal().reshape(1),
    }
    return state | ({INPUT_GLOBAL_SCALE: input_scale.reciprocal().reshape(1)} if layout.calibrated else {})


@functools.cache
def _state_entries(
    layout: Layout | None, format: Format, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return suffix → safetensors dtype, shape and bytes of the entries that store a tensor."""
    specs = format.part_specs(shape)
    parts = {part: torch.zeros(size, dtype=part_dtype) for part, (size, part_dtype) in specs.items()}
    entries = {}
    for suffix, value in _state(layout, format, parts, shape, dtype).items():
        spare = JSON_NUMBER_BYTES if "quant_state" in suffix else 0
        size = (value.numel() + spare,) if spare else tuple(value.shape)
        entries[suffix] = (NAMES[value.dtype], size, value.nbytes + spare)
    return entries
