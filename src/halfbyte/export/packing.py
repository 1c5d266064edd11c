"""What a merged model's linear layers are stored in: 16 bits, any of halfbyte's formats, or another tool's own layout.

Four layouts belong to other tools, each with the config.json that makes the tool load it:

    bnb-nf4, bnb-fp4   transformers with bitsandbytes, 4 bits with nested scales in blocks of 64
    bnb-int8           transformers with bitsandbytes, LLM.int8()
    fp8-block          transformers' fine-grained FP8 (DeepSeek-V3's layout), vLLM: E4M3 with a scale per 128×128 tile
    nvfp4-modelopt     vLLM, TensorRT-LLM: NVIDIA ModelOpt's NVFP4, activations scaled by a calibrated `input_scale`

The last one has two rules that halfbyte's own NVFP4 has not. Servers run q, k and v (and gate and up) as one matrix
with one factor, so that layers which are fused share it. And activations are quantized with a fixed scale, that of the
largest input on the run's text.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfbyte.config import SIXTEEN, Origin, Storage
from halfbyte.formats import Format, Stack, names
from halfbyte.formats.base import entry_name
from halfbyte.formats.nvfp4 import BLOCK, INPUT_SCALE
from halfbyte.loading.expert_stacks import supported_stacks
from halfbyte.loading.quantizer import HalfbyteConfig, quantizable
from halfbyte.modeling.architectures import expert_stacks
from halfbyte.ops.float8 import TILE
from halfbyte.qat.model import qat_format
from halfbyte.utils.errors import ConfigError, ModelError

from ..loading.checkpoint import NAMES
from ..loading.completeness import meta_model
from ..loading.find import load_model_config
from .shards import Entry

Quantize = str | Mapping[str, str] | None
Loader = Literal["halfbyte", "bitsandbytes", "fp8"]

FOREIGN = {
    "bnb-nf4": "blockwise4:nf4:64:nested",
    "bnb-fp4": "blockwise4:fp4:64:nested",
    "bnb-int8": "int8",
    "fp8-block": "fp8:tile",
    "nvfp4-modelopt": "nvfp4:1d:plain",
}
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
NVFP4_RANGE = 6 * 448  # the largest E2M1 code times the largest E4M3 scale
TYPICAL = (4096, 4096)  # a shape to count bits on
NUMBER = 24  # bytes that the longest repr of a float takes: JSON entries are padded, so that sizes are known before


@dataclass(frozen=True)
class Packing:
    """How the weights of a merged model are stored.

    Attributes:
        name: as the user calls it; "16bit" for weights that are not quantized.
        formats: parameter name → format; the other parameters keep 16 bits.
        config: the `quantization_config` of config.json; None in 16 bits.
        loader: what reads the model back.
        peers: parameter name → all parameters that it shares a factor with.
        calibrated: whether `input_scale` is stored.
        stacks: those parameters that are stacks of experts, each of which is written whole.
    """

    name: str = SIXTEEN
    formats: Mapping[str, Format] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    loader: Loader = "halfbyte"
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    calibrated: bool = False
    stacks: frozenset[str] = frozenset()

    def is_scheme(self, scheme: str | None) -> bool:
        """Whether every quantized layer is stored as training with `qat_scheme: scheme` rounded it."""
        return scheme is not None and set(self.formats.values()) == {qat_format(scheme)} and not self.peers

    @property
    def bits(self) -> float:
        """Of a weight in the layers that have the fewest, scales included."""
        of_each = (each.each if isinstance(each, Stack) else each for each in self.formats.values())
        return min((each.bits_per_weight(TYPICAL) for each in of_each), default=16.0)

    def entries(self, name: str, parameter: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Entry, ...]:
        """The checkpoint entries of a quantized parameter that the checkpoint calls `name`.

        Raises:
            ModelError: the format cannot hold the shape.
        """
        try:
            found = _state_entries(self.formats[parameter], shape, dtype)
        except ModelError as error:
            raise ModelError(f"{self.name} cannot hold {name}: {error.message}", error.fix) from error
        suffixed = found | ({INPUT_SCALE: ("F32", (), 4)} if self.calibrated else {})
        return tuple(Entry(entry_name(name, suffix), *each) for suffix, each in suffixed.items())


def packing(quantize: Quantize, origin: Origin, *, experts: bool = True) -> Packing:
    """The packing that a user asks for, for the model of a run.

    Args:
        experts: whether stacks of experts are among the layers; other tools' layouts have them in 16 bits.
        quantize: one of `FOREIGN`, a name or spec of a format, or pattern of module names → name, spec or "16bit", as
            in a run's `quantization:`; None for 16 bits.

    Raises:
        ConfigError: there is no such target, or it does not fit the model.
    """
    if quantize is None or quantize == SIXTEEN:
        return Packing()
    foreign = isinstance(quantize, str) and quantize in FOREIGN
    try:
        chosen = FOREIGN[str(quantize)] if foreign else quantize
        patterns = chosen.items() if isinstance(chosen, Mapping) else [("*", chosen)]
        ours = HalfbyteConfig(Storage(tuple(patterns)))
        model = meta_model(origin, load_model_config(origin))
        linears = quantizable(model)
        stacks = expert_stacks(model) if experts and not foreign else {}
        formats = ours.assign(model, [*linears, *stacks])
    except ModelError as error:
        fix = f"{error.fix}; for other tools: {', '.join(FOREIGN)}"
        raise ConfigError(error.message.replace("quantization:", "quantize:"), fix) from error
    if not formats:
        raise ConfigError(f"quantize: {type(model).__name__} has no linear layer to store in it", "merge in 16 bits")
    for format_ in formats.values():
        if not type(format_).examples():
            raise ConfigError(
                f"quantize: {format_.spec} needs calibration, which halfbyte leaves to other tools",
                f"use one of {', '.join(sorted(names()))}",
            )
    packed = ours.stacks = frozenset(supported_stacks(model, stacks, formats))
    parameters = {f"{name}.weight": formats[name] for name in linears if name in formats}
    parameters |= {name: formats[name].stacked() for name in packed}
    if not foreign:
        return Packing(_name(quantize), parameters, ours.to_dict(), stacks=packed)
    kept = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in linears]
    return _foreign(str(quantize), parameters, {name: tuple(linears[name].weight.shape) for name in linears}, kept)


def _name(quantize: str | Mapping[str, str]) -> str:
    if isinstance(quantize, str):
        return quantize
    return ",".join(f"{pattern}={format_}" for pattern, format_ in quantize.items())


def _foreign(
    name: str, formats: Mapping[str, Format], shapes: Mapping[str, tuple[int, ...]], kept: list[str]
) -> Packing:
    if name == "fp8-block":
        # transformers divides a side evenly among its scales, and one scale covers any side up to a tile
        _check_sides(name, shapes, {module: [n for n in size if n > TILE] for module, size in shapes.items()}, TILE)
        return Packing(name, formats, _fp8_config(kept), "fp8")
    if name == "nvfp4-modelopt":
        _check_sides(name, shapes, shapes, BLOCK)
        return Packing(name, formats, _modelopt_config(kept), peers=_peers(formats), calibrated=True)
    return Packing(name, formats, _bitsandbytes_config(name, kept), "bitsandbytes")


def _check_sides(
    name: str, shapes: Mapping[str, tuple[int, ...]], sides: Mapping[str, Sequence[int]], unit: int
) -> None:
    for module, own in sides.items():
        if any(side % unit for side in own):
            raise ConfigError(
                f"quantize: {name} cannot hold {module}.weight {shapes[module]}: it takes sides in multiples of {unit}",
                "use fp8 or nf4",
            )


def _bitsandbytes_config(name: str, kept: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": name != "bnb-int8",
        "load_in_8bit": name == "bnb-int8",
        "llm_int8_skip_modules": kept,
        "llm_int8_threshold": 6.0,
    }
    if name == "bnb-int8":
        return config
    return config | {
        "bnb_4bit_quant_type": name.removeprefix("bnb-"),
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": "bfloat16",
    }


def _fp8_config(kept: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [TILE, TILE],
        "modules_to_not_convert": kept,
    }


def _modelopt_config(kept: list[str]) -> dict[str, Any]:
    values = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": None,
        "group_size": BLOCK,
        "ignore": kept,
        "config_groups": {"group_0": {"input_activations": values, "weights": values, "targets": ["Linear"]}},
    }


def _peers(formats: Mapping[str, Format]) -> dict[str, tuple[str, ...]]:
    """Parameter → the parameters that a server fuses with it, itself included."""
    found = {}
    for parameter in formats:
        parent, _, own = parameter.removesuffix(".weight").rpartition(".")
        for group in FUSED:
            if own in group:
                siblings = (f"{parent}.{each}.weight" for each in group)
                found[parameter] = tuple(each for each in siblings if each in formats)
    return found


def check_loader(loader: Loader) -> None:
    """Raise a ConfigError when the tool that would read the model back is not installed."""
    needed = {"bitsandbytes": "bitsandbytes", "fp8": "accelerate"}.get(loader)
    if needed and importlib.util.find_spec(needed) is None:
        raise ConfigError(
            f"verifying needs {needed}, which is not installed", f"pip install {needed}, or merge with --no-verify"
        )


# --- tensors ---------------------------------------------------------------------------------------------------------


def quantize_together(weight: Tensor, format: Format, amax: Tensor) -> dict[str, Tensor]:
    """NVFP4 parts of `weight` [N, K] with the factor of a group of matrices whose largest magnitude is `amax`.

    The factor follows from the largest value, so that one more row, which holds it, brings it in; the row is dropped.
    """
    parts = format.quantize(torch.cat([weight, amax.expand(1, weight.shape[1])]))
    return {"packed": parts["packed"][:-1], "scale": parts["scale"][:-1], "factor": parts["factor"]}


def padded_state(state: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """`state` with its JSON entries lengthened by spaces to their announced sizes, in bytes."""
    return {name: _padded(tensor, sizes[name]) if "quant_state" in name else tensor for name, tensor in state.items()}


def _padded(text: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(text, (0, size - len(text)), value=ord(" "))


@functools.cache
def _state_entries(
    format: Format, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Suffix → safetensors dtype, shape and bytes of the entries that store a tensor."""
    specs = format.part_specs(shape)
    parts = {part: torch.zeros(size, dtype=part_dtype) for part, (size, part_dtype) in specs.items()}
    found = {}
    for suffix, value in format.to_state(parts, shape, dtype).items():
        spare = NUMBER if "quant_state" in suffix else 0
        size = (value.numel() + spare,) if spare else tuple(value.shape)
        found[suffix] = (NAMES[value.dtype], size, value.nbytes + spare)
    return found
