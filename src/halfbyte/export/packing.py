"""Storage of a merged model's linear layers: 16 bits, halfbyte's formats, or another tool's layout.

Four layouts belong to other tools, each with the config.json that makes the tool load it:

    bnb-nf4, bnb-fp4   transformers with bitsandbytes, 4 bits with nested scales in blocks of 64
    bnb-int8           transformers with bitsandbytes, LLM.int8()
    fp8-block          transformers' fine-grained FP8 (DeepSeek-V3's layout), vLLM: E4M3 with a scale per 128×128 tile
    nvfp4-modelopt     vLLM, TensorRT-LLM: NVIDIA ModelOpt's NVFP4, activations scaled by a calibrated `input_scale`

nvfp4-modelopt differs from halfbyte's NVFP4 in two ways. Servers fuse q, k and v (and gate and up) into one matrix with
one factor, so these layers share it. Activations are quantized with a fixed scale, from the largest input on the run's
text.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import SIXTEEN, Origin, Storage
from ..formats import Format, Stack, names
from ..formats.base import entry_name
from ..formats.float8 import TILE
from ..formats.nvfp4 import BLOCK, INPUT_SCALE
from ..loading.checkpoint import NAMES
from ..loading.completeness import meta_model
from ..loading.expert_stacks import supported_stacks
from ..loading.find import load_model_config
from ..loading.quantizer import HalfbyteConfig, quantizable
from ..modeling.architectures import expert_stacks
from ..qat.model import qat_format
from ..utils.errors import ConfigError, ModelError
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
TYPICAL_SHAPE = (4096, 4096)  # for counting bits per weight
JSON_NUMBER_BYTES = 24  # longest repr of a float; JSON entries are padded by it so that their size is known


@dataclass(frozen=True)
class Packing:
    """Storage of a merged model's weights.

    Attributes:
        name: as given by the user; "16bit" if nothing is quantized.
        formats: parameter name → format; the other parameters keep 16 bits.
        config: the `quantization_config` of config.json; None in 16 bits.
        loader: tool that loads the model.
        peers: parameter name → all parameters that share its factor.
        calibrated: whether `input_scale` is stored.
        stacks: names of parameters that are stacks of experts, written as one tensor.
    """

    name: str = SIXTEEN
    formats: Mapping[str, Format] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    loader: Loader = "halfbyte"
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    calibrated: bool = False
    stacks: frozenset[str] = frozenset()

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
        try:
            entries = _state_entries(self.formats[parameter], shape, dtype)
        except ModelError as error:
            raise ModelError(f"{self.name} cannot hold {name}: {error.message}", error.fix) from error
        entries = entries | ({INPUT_SCALE: ("F32", (), 4)} if self.calibrated else {})
        return tuple(Entry(entry_name(name, suffix), *entry) for suffix, entry in entries.items())


def packing(quantize: Quantize, origin: Origin, *, experts: bool = True) -> Packing:
    """Return the packing that the user requests, for the model of a run.

    Args:
        experts: whether to include stacks of experts; layouts of other tools keep them in 16 bits.
        quantize: one of `FOREIGN`, a name or spec of a format, or module name pattern → name, spec or "16bit", as in a
            run's `quantization:`; None for 16 bits.

    Raises:
        ConfigError: the target does not exist, or does not fit the model.
    """
    if quantize is None or quantize == SIXTEEN:
        return Packing()
    foreign = isinstance(quantize, str) and quantize in FOREIGN
    try:
        chosen = FOREIGN[str(quantize)] if foreign else quantize
        patterns = chosen.items() if isinstance(chosen, Mapping) else [("*", chosen)]
        quantization = HalfbyteConfig(Storage(tuple(patterns)))
        model = meta_model(origin, load_model_config(origin))
        linears = quantizable(model)
        stacks = expert_stacks(model) if experts and not foreign else {}
        formats = quantization.assign(model, [*linears, *stacks])
    except ModelError as error:
        fix = f"{error.fix}; for other tools: {', '.join(FOREIGN)}"
        raise ConfigError(error.message.replace("quantization:", "quantize:"), fix) from error
    if not formats:
        raise ConfigError(f"quantize: {type(model).__name__} has no linear layer to store in it", "merge in 16 bits")
    for format_ in formats.values():
        if not type(format_).examples():
            raise ConfigError(
                f"quantize: {format_.spec} needs calibration, which halfbyte does not do",
                f"use one of {', '.join(sorted(names()))}",
            )
    packed = quantization.stacks = frozenset(supported_stacks(model, stacks, formats))
    parameters = {f"{name}.weight": formats[name] for name in linears if name in formats}
    parameters |= {name: formats[name].stacked() for name in packed}
    if not foreign:
        name = quantize if isinstance(quantize, str) else ",".join(f"{key}={value}" for key, value in quantize.items())
        return Packing(name, parameters, quantization.to_dict(), stacks=packed)
    skipped = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in linears]
    return _foreign(str(quantize), parameters, {name: tuple(linears[name].weight.shape) for name in linears}, skipped)


def _foreign(
    name: str, formats: Mapping[str, Format], shapes: Mapping[str, tuple[int, ...]], skipped: list[str]
) -> Packing:
    """Return the packing of `FOREIGN` layout `name`; `skipped` modules keep 16 bits.

    Raises:
        ConfigError: a weight has a shape that the layout cannot store.
    """
    config: dict[str, Any]
    if name == "fp8-block":
        # transformers splits a side evenly among its scales; one scale covers any side up to a tile
        _check_sides(name, shapes, {module: [n for n in size if n > TILE] for module, size in shapes.items()}, TILE)
        config = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [TILE, TILE],
            "modules_to_not_convert": skipped,
        }
        return Packing(name, formats, config, "fp8")
    if name == "nvfp4-modelopt":
        _check_sides(name, shapes, shapes, BLOCK)
        values = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
        config = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_scheme": None,
            "group_size": BLOCK,
            "ignore": skipped,
            "config_groups": {"group_0": {"input_activations": values, "weights": values, "targets": ["Linear"]}},
        }
        return Packing(name, formats, config, peers=_peers(formats), calibrated=True)
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": name != "bnb-int8",
        "load_in_8bit": name == "bnb-int8",
        "llm_int8_skip_modules": skipped,
        "llm_int8_threshold": 6.0,
    }
    if name != "bnb-int8":
        config |= {
            "bnb_4bit_quant_type": name.removeprefix("bnb-"),
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "bfloat16",
        }
    return Packing(name, formats, config, "bitsandbytes")


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
        for group in FUSED:
            if name in group:
                siblings = (f"{parent}.{sibling}.weight" for sibling in group)
                peers[parameter] = tuple(sibling for sibling in siblings if sibling in formats)
    return peers


def check_loader(loader: Loader) -> None:
    """Raise ConfigError if the tool that loads the model is not installed."""
    needed = {"bitsandbytes": "bitsandbytes", "fp8": "accelerate"}.get(loader)
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


@functools.cache
def _state_entries(
    format: Format, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return suffix → safetensors dtype, shape and bytes of the entries that store a tensor."""
    specs = format.part_specs(shape)
    parts = {part: torch.zeros(size, dtype=part_dtype) for part, (size, part_dtype) in specs.items()}
    entries = {}
    for suffix, value in format.to_state(parts, shape, dtype).items():
        spare = JSON_NUMBER_BYTES if "quant_state" in suffix else 0
        size = (value.numel() + spare,) if spare else tuple(value.shape)
        entries[suffix] = (NAMES[value.dtype], size, value.nbytes + spare)
    return entries
