"""Quantizer for transformers: `from_pretrained` quantizes to halfbyte's formats while it loads.

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=HalfbyteConfig(), device_map={"": "cuda"})

transformers passes one checkpoint tensor at a time; it is quantized on the target device and dropped, so device memory
peaks at the quantized model plus one tensor. Checkpoints that were quantized before keep their bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform
from transformers.quantizers import AutoHfQuantizer, HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..adapters.initial import ResidualBase
from ..config import Origin, Storage, storage_of
from ..formats import Blockwise4, Format, named, of_checkpoint, recognize
from ..formats.base import FLOATS, QUANT_METHOD, entry_name
from ..layers import QuantizedLinear, QuantizedWeight, hold_table, quantized_parameter
from ..modeling.architectures import (
    conv1d_layers,
    count_unquantized_stacks,
    expert_stacks,
    non_text_modules,
    per_layer_tables,
    quantizable,
    runs_experts,
    unquantized_modules,
)
from ..modeling.layer import decoder_layers
from ..modeling.transformers_versions import original_codes
from ..tensor import QuantizedTensor
from ..utils.errors import CheckpointError, HalfbyteError, ModelError
from ..utils.notices import notice
from .assignment import format_assignment, skipped_modules
from .completeness import meta_model
from .expert_stacks import is_stacking, prepare_stacks, prequantized_converter, stacked_parameter, stacking_converter
from .find import load_model_config
from .quantized_model import as_linear, dequantize, mark_quantized, unfilled_conv1d

PAIRS = ("formats", "vision")  # fields of a `Storage` that are tuples of pairs, and lists in a file


@register_quantization_config(QUANT_METHOD)
class HalfbyteConfig(QuantizationConfigMixin):
    """Storage of a model's linear layers, for `from_pretrained(..., quantization_config=HalfbyteConfig(...))`.

    transformers then loads the model with quantized linears. A saved model has these values in its config.json, so it
    is loaded without a configuration.

    Args:
        storage: formats by pattern; default: from `keys`.
        llm_int8_skip_modules: names of modules that are not quantized; default: the output head and modules tied to it.
            (bitsandbytes' name, which pre-quantized checkpoints use for every bit width.)
        formats: spec → names of the modules stored in it; replaces `storage` in a saved model's config.json.
        others: for an unpacked GGUF file, its type → number of linear layers of that type outside of `formats`: they
            are stored in 16 bits and quantized while loading, by `storage`.
        kept: for an unpacked GGUF file, its type → number of linear layers that keep it; informative.
        ways: number of ranks that share the model's memory.
        on_host: decoder layers whose quantized stacks stay in host memory.
        keys: `bnb_4bit_quant_type`, `bnb_4bit_blocksize`, `bnb_4bit_use_double_quant`, `quantization`,
            `quantize_vision_tower`, `skip_quant_first_layers`, `skip_quant_last_layers`, as in a run's configuration.

    Raises:
        ModelError: no such format.
        ConfigError: no such key, or keys that contradict each other.
    """

    def __init__(
        self,
        storage: Storage | Mapping[str, Any] | None = None,
        *,
        llm_int8_skip_modules: list[str] | None = None,
        formats: Mapping[str, list[str]] | None = None,
        others: Mapping[str, int] | None = None,
        kept: Mapping[str, int] | None = None,
        ways: int = 1,
        on_host: Collection[int] = (),
        quant_method: str = QUANT_METHOD,
        **keys: Any,
    ):
        self.quant_method = QUANT_METHOD
        self.llm_int8_skip_modules = llm_int8_skip_modules
        if isinstance(storage, Mapping):  # written by `to_dict`: pairs in a list, since JSON files sort keys
            pairs = {key: value and tuple(map(tuple, value)) for key, value in storage.items() if key in PAIRS}
            storage = Storage(**{**storage, **pairs})
        self.storage = storage_of(storage, **keys)
        self.assignment = format_assignment(self.storage)
        stored = {name: named(spec) for spec, names in (formats or {}).items() for name in names}
        self.formats: dict[str, Format] = stored  # module name → format, assigned when the model is known
        self.others = others or {}
        self.ways, self.on_host = ways, frozenset(on_host)
        self.kept = kept or {}
        self.dtype = "bfloat16"  # the model's dtype, which bitsandbytes computes in after loading a saved config.json
        self.is_assigned = False  # whether `assign` has run
        self.all_quantized = False  # whether every linear layer that may be quantized is
        self.stacks: frozenset[str] = frozenset()  # names in `formats` that are stacked expert parameters
        self.tables: frozenset[str] = frozenset()  # names in `formats` that are embeddings
        self.initial: ResidualBase | None = None  # changes weights of linear layers before they are quantized

    def assign(self, model: nn.Module, names: Collection[str]) -> dict[str, Format]:
        """Return module name → format for those of `names` that are quantized."""
        if not self.formats:
            self.formats = self.assignment.assign(model, names)
        elif beyond := sorted(self.formats.keys() - names):
            raise CheckpointError(
                f"config.json stores {beyond[0]} as {self.formats[beyond[0]].spec}, but the model has no such layer",
                "check that config.json belongs to these weights",
            )
        elif self.others:
            self.formats = self.assignment.assign(model, names) | self.formats
        self.all_quantized, self.is_assigned = len(self.formats) == len(names), True
        return self.formats

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a saved config.json; before a model was loaded, all settings.

        If every layer is NF4 or FP4, the entry has bitsandbytes' name and keys, since the checkpoint has its layout, so
        both tools load the saved model. transformers loads neither stacks nor embeddings in bitsandbytes' formats, so a
        model with them gets halfbyte's name.
        """
        of_layers = set(self.formats.values())
        format_ = next(iter(of_layers), None)
        beyond = self.stacks or self.tables
        if self.all_quantized and not beyond and len(of_layers) == 1 and isinstance(format_, Blockwise4):
            return {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "load_in_8bit": False,
                "bnb_4bit_quant_type": format_.quant_type,
                "bnb_4bit_use_double_quant": format_.nested,
                "bnb_4bit_quant_storage": "uint8",
                "bnb_4bit_compute_dtype": self.dtype,
                "llm_int8_skip_modules": self.llm_int8_skip_modules,
            }
        names = {
            spec: [name for name, format_ in self.formats.items() if format_.spec == spec]
            for spec in dict.fromkeys(format_.spec for format_ in self.formats.values())
        }
        entry = {"quant_method": QUANT_METHOD, "llm_int8_skip_modules": self.llm_int8_skip_modules, "formats": names}
        if self.is_assigned:
            return entry
        return entry | {
            "storage": asdict(self.storage),
            "others": dict(self.others),
            "kept": dict(self.kept),
            "ways": self.ways,
            "on_host": sorted(self.on_host),
        }

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return the config of a `to_dict` entry, from before or after a model was loaded."""
        stored_format = of_checkpoint(config_dict)
        if config_dict.get("quant_method") != QUANT_METHOD and stored_format is not None:
            config_dict = {
                "storage": Storage((("*", stored_format.spec),)),
                "llm_int8_skip_modules": skipped_modules(config_dict),
            }
        return super().from_dict(dict(config_dict), return_unused_kwargs, **kwargs)


_merge_configs = AutoHfQuantizer.merge_quantization_configs


def _merge_quantization_configs(stored: Any, requested: QuantizationConfigMixin | None) -> QuantizationConfigMixin:
    """Let a `HalfbyteConfig` load a checkpoint that another tool quantized.

    transformers rejects a config of another class than the checkpoint's, and asks no quantizer. Every other pair of
    configs goes to transformers' own function.
    """
    if not isinstance(requested, HalfbyteConfig):
        return _merge_configs(stored, requested)
    entry = stored if isinstance(stored, dict) else stored.to_dict()
    if entry.get("quant_method") != QUANT_METHOD and of_checkpoint(entry) is None:
        raise ModelError(
            f"the checkpoint is stored as {entry.get('quant_method')}, which halfbyte does not load yet",
            "use the 16-bit model, or a bitsandbytes one",
        )
    config = HalfbyteConfig.from_dict(entry)
    config.ways, config.on_host = requested.ways, requested.on_host
    formats = list(config.formats.values()) or [format_ for _, format_ in config.assignment.patterns if format_]
    specs = ", ".join(dict.fromkeys(format_.spec for format_ in formats))
    notice("prequantized", f"the checkpoint is already quantized ({specs}): keeping its bytes")
    return config


AutoHfQuantizer.merge_quantization_configs = staticmethod(_merge_quantization_configs)


class _Quantize(ConversionOps):
    """Conversion of a checkpoint tensor to a frozen quantized parameter, on the tensor's device."""

    def __init__(self, hf_quantizer: HalfbyteQuantizer):
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: dict[str, Any], *, model: nn.Module, **kwargs: Any) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            make = functools.partial(_quantized, self.hf_quantizer, name, weight, model)
            self.hf_quantizer.attempt(name, make, result)
        return result


class _Deserialize(ConversionOps):
    """Conversion of the checkpoint's entries of a weight to a frozen quantized parameter with the same bytes."""

    def __init__(self, hf_quantizer: HalfbyteQuantizer, suffixes: Mapping[str, str]):
        self.hf_quantizer, self.suffixes = hf_quantizer, suffixes

    def convert(
        self, input_dict: dict[str, Any], *, model: nn.Module, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Any]:
        entries = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        if not self.hf_quantizer.param_needs_quantization(model, full_layer_name):
            dtype = model.get_parameter(full_layer_name).dtype  # norms, embeddings, skipped modules
            return {key: value.to(dtype) for key, value in entries.items()}
        state = {self.suffixes[key]: value for key, value in entries.items()}
        result: dict[str, Tensor] = {}

        def load() -> nn.Parameter:
            if any(value.is_meta for value in state.values()):  # another rank reads it
                empty = model.get_parameter(full_layer_name).to("meta")
                return quantized_parameter(empty, self.hf_quantizer.stored_format(full_layer_name))
            if self.hf_quantizer.quantization_config.others and state.keys() == {""} and state[""].dtype in FLOATS:
                weight = state[""].to(model.get_parameter(full_layer_name).dtype)
                return _quantized(self.hf_quantizer, full_layer_name, weight, model)
            if "" in state:
                state[""] = original_codes(state[""])
            if state.keys() == {""} and state[""].dtype in FLOATS:
                self.hf_quantizer.keep_unquantized(full_layer_name)
                return nn.Parameter(state[""].to(model.get_parameter(full_layer_name).dtype), requires_grad=False)
            cls = recognize(state, prefer=type(self.hf_quantizer.stored_format(full_layer_name)))
            format_, parts, shape, dtype = cls.from_state(state, full_layer_name)
            tensor = QuantizedTensor(format_, parts, shape, dtype)
            _check_shape(model, tensor, full_layer_name)
            return nn.Parameter(tensor, requires_grad=False)

        self.hf_quantizer.attempt(full_layer_name, load, result)
        return result

    def __deepcopy__(self, memo: Any) -> _Deserialize:
        """Return self: transformers copies converters per layer, but failures must reach the one quantizer."""
        return self


def _quantized(hf_quantizer: HalfbyteQuantizer, name: str, weight: Tensor, model: nn.Module) -> nn.Parameter:
    if name in hf_quantizer.transposed and not isinstance(weight, QuantizedTensor):
        weight = weight.transpose(1, 2)
    if name.removesuffix(".weight") in hf_quantizer.conv1d:
        weight = weight.t()
    _check_shape(model, weight, name)
    if isinstance(weight, QuantizedTensor):  # already stacked expert by expert
        return nn.Parameter(weight, requires_grad=False)
    if weight.dim() > 2:
        return stacked_parameter(name, weight, hf_quantizer.format_of(name), tuple(weight.shape))
    try:
        if initial := hf_quantizer.quantization_config.initial:
            weight = initial.residual(name.removesuffix(".weight"), weight, hf_quantizer.format_of(name))
        return quantized_parameter(weight, hf_quantizer.format_of(name))
    except ModelError as error:
        raise ModelError(f"{name}: {error.message}", error.fix) from error


def _is_halfbyte_conversion(conversion: WeightTransform) -> bool:
    deserializes = isinstance(conversion, WeightConverter) and isinstance(conversion.operations[0], _Deserialize)
    return deserializes or is_stacking(conversion)


def _check_shape(model: nn.Module, weight: Tensor, name: str) -> None:
    _check_same_shape(name, tuple(weight.shape), tuple(model.get_parameter(name).shape))


def _check_same_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise CheckpointError(
            f"{name} has shape {shape} in the checkpoint, {expected} in the model",
            "check that config.json belongs to these weights",
        )


@register_quantizer(QUANT_METHOD)
class HalfbyteQuantizer(HfQuantizer):
    """Quantizer that replaces `nn.Linear` by `QuantizedLinear` and fills it; per-layer embeddings change in place."""

    requires_calibration = False
    quantization_config: HalfbyteConfig

    def __init__(self, quantization_config: QuantizationConfigMixin, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.failure: HalfbyteError | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.stacks: dict[str, Any] = {}  # parameter → its module, for stacked experts that are quantized
        self.transposed: set[str] = set()  # stacks that checkpoints store as [E, K, N]
        self.conv1d: frozenset[str] = frozenset()  # layers that are a `Conv1D` in transformers, with weights [in, out]
        self.dtypes: dict[str, torch.dtype] = {}  # stack → dtype of its values
        self.unquantized: list[str] = []  # linear layers that a quantized checkpoint stores in 16 or 32 bits
        self.on_host: tuple[str, ...] = ()  # name prefixes of stacks that stay in host memory

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return the bytes per weight that transformers reserves; its default would reserve the 16-bit model."""
        if self.param_needs_quantization(model, param_name):
            format_ = self.stored_format(param_name)
            return format_.bits_per_weight(tuple(param.shape)) / 8 / self.quantization_config.ways
        return param.element_size() / self.quantization_config.ways

    def format_of(self, param_name: str) -> Format:
        """Return the format of a quantized layer's weight, or of each expert in a stack."""
        return self.quantization_config.formats[param_name.removesuffix(".weight")]

    def stored_format(self, param_name: str) -> Format:
        """Return the format of a quantized parameter; for a stack, the format of the full stack."""
        format_ = self.format_of(param_name)
        return format_.stacked() if param_name in self.stacks else format_

    def keep_unquantized(self, param_name: str) -> None:
        """Keep a linear layer or a stack in 16 bits, as the checkpoint stores it."""
        if param_name not in self.stacks:
            self.unquantized.append(param_name.removesuffix(".weight"))
            return
        if param_name in self.transposed:
            self.stacks[param_name].is_transposed = True
            self.shapes[param_name] = tuple(self.shapes[param_name][at] for at in (0, 2, 1))
        self.quantization_config.formats.pop(param_name, None)
        del self.stacks[param_name]

    def attempt(self, key: str, make: Callable[[], nn.Parameter], result: dict[str, Tensor]) -> None:
        """Put `make()` into `result`, or save the first failure until loading is complete.

        transformers turns exceptions of conversions into log lines and one exception that names no tensor.
        """
        try:
            parameter = make()
            offloaded = key in self.stacks and key.startswith(self.on_host) and isinstance(parameter, QuantizedTensor)
            result[key] = nn.Parameter(parameter.detach().to("cpu"), requires_grad=False) if offloaded else parameter
        except HalfbyteError as error:
            self.failure = self.failure or error

    def update_device_map(self, device_map: Any) -> Any:
        from ..utils.hardware import best_device

        return {"": best_device()} if device_map is None else device_map

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config = self.quantization_config
        vision = config.storage.vision is not None
        if config.llm_int8_skip_modules is None and (vision or non_text_modules(model)):
            # saved, so that other tools skip them too
            skipped = unquantized_modules(model, non_text=not self.pre_quantized, vision=vision)
            config.llm_int8_skip_modules = skipped
        linears = quantizable(model, config.llm_int8_skip_modules)
        conv1d = conv1d_layers(model, config.llm_int8_skip_modules)
        stacks = expert_stacks(model, config.llm_int8_skip_modules)
        if not linears and not conv1d and not stacks:
            raise ModelError(
                f"{type(model).__name__} has no layers that compute x·Wᵀ + b (nn.Linear or Conv1D) to quantize",
                "load it with load_in_4bit: false",
            )
        tables = per_layer_tables(model, config.llm_int8_skip_modules, config.formats if self.pre_quantized else None)
        stored = config.assign(model, [*linears, *conv1d, *stacks, *tables]).keys()
        self.conv1d = frozenset(stored & conv1d.keys())
        for name in self.conv1d:
            model.set_submodule(name, unfilled_conv1d(conv1d[name]))
        for name in stored & linears.keys():
            model.set_submodule(name, QuantizedLinear.unfilled(linears[name]))
        for name in stored & tables.keys():
            hold_table(tables[name])
        config.tables = frozenset(stored & tables.keys())
        self.transposed = {name for name, module in stacks.items() if module.is_transposed}
        self.stacks = prepare_stacks(model, config.formats, config.llm_int8_skip_modules, self.pre_quantized)
        self.dtypes = {name: model.get_parameter(name).dtype for name in self.stacks}
        if config.on_host:
            layers, _ = decoder_layers(model)
            self.on_host = tuple(f"{layers}.{at}." for at in config.on_host)
        self.transposed &= self.stacks.keys()
        non_text = tuple(non_text_modules(model))
        if non_text and not any(name.startswith(non_text) for name in stored):
            notice("beside-text", f"keeping {', '.join(non_text)} in 16 bits: only the language model is quantized")
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        self._keep_linears(model)
        self._keep_new_heads(model)
        # Saving would reverse the conversions of loading, but these state dicts have the checkpoint's layout already.
        model._weight_conversions = [c for c in model._weight_conversions if not _is_halfbyte_conversion(c)]
        for name in list(self.stacks):
            if not isinstance(parameter := model.get_parameter(name), QuantizedTensor):
                if self.pre_quantized and not parameter.is_meta:
                    self.keep_unquantized(name)
                    continue
                raise CheckpointError(f"{name} is missing from the checkpoint", "re-download the checkpoint")
        for name, parameter in model.named_parameters():  # transformers 5.17 checks no shapes if there is a quantizer
            _check_same_shape(name, tuple(parameter.shape), self.shapes[name])
        for module in filter(runs_experts, model.modules()) if self.stacks else ():
            module.requires_grad_(False)  # `modeling.experts` computes no gradients of biases or 16-bit experts
        self.quantization_config.stacks = frozenset(self.stacks)
        self.quantization_config.dtype = str(model.dtype).removeprefix("torch.")
        mark_quantized(model, self.quantization_config.formats.values())
        if stacked := count_unquantized_stacks(model, self.stacks):
            notice("stacked-experts", f"keeping {stacked / 1e6:.0f}M weights of stacked experts in 16 bits")
        return model

    def _keep_linears(self, model: Any) -> None:
        """Make plain layers of the linears that a quantized checkpoint stores in 16 bits, and record all formats."""
        config = self.quantization_config
        if self.unquantized:
            count, first = len(self.unquantized), self.unquantized[0]
            notice(
                "stored-16", f"keeping {count} linear layers in 16 bits, as the checkpoint stores them, first {first}"
            )
            skipped = config.llm_int8_skip_modules or unquantized_modules(model)
            config.llm_int8_skip_modules = [*skipped, *self.unquantized]
        for name in self.unquantized:
            del config.formats[name]
            module = model.get_submodule(name)
            model.set_submodule(name, as_linear(module, module.weight))
        for name, parameter in model.named_parameters() if self.pre_quantized else ():
            if isinstance(parameter, QuantizedTensor) and name not in self.stacks and not parameter.is_meta:
                config.formats[name.removesuffix(".weight")] = parameter.format

    def _keep_new_heads(self, model: Any) -> None:
        """Keep a head that the checkpoint lacks in 16 bits, as transformers initialized it, and train it.

        Raises:
            CheckpointError: a weight of the base model is missing.
        """
        config, base = self.quantization_config, f"{model.base_model_prefix}."
        for name, module in list(model.named_modules()):
            if not isinstance(module, QuantizedWeight) or isinstance(module.weight, QuantizedTensor):
                continue
            is_base = model.base_model is model or name.startswith(base)
            if is_base or not isinstance(module, QuantizedLinear) or module.weight.is_meta:
                fix = "re-download the checkpoint"
                if model.base_model_prefix not in ("", "model"):
                    mapping = f"key_mapping={{'^model': '{model.base_model_prefix}'}}"
                    fix += f"; if its names begin with model., pass {mapping} to from_pretrained"
                raise CheckpointError(f"{name}.weight is missing from the checkpoint", fix)
            if config.llm_int8_skip_modules is None:  # saved, so that loading skips the head too
                config.llm_int8_skip_modules = unquantized_modules(model)
            config.llm_int8_skip_modules = [*config.llm_int8_skip_modules, name]
            del config.formats[name]
            model.set_submodule(name, as_linear(module, module.weight))
            model.get_submodule(name).requires_grad_(True)

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise if the device map puts modules on the disk, before anything is read.

        Raises:
            ModelError: names the first such module.
        """
        devices = device_map if isinstance(device_map, Mapping) else {}
        on_disk = [name for name, device in devices.items() if device == "disk"]
        if on_disk:
            further = f" and {len(on_disk) - 1} more" if len(on_disk) > 1 else ""
            raise ModelError(
                f"device_map puts {on_disk[0] or 'the model'}{further} on the disk,"
                " but quantized weights cannot be there",
                "put them on a GPU or the CPU, raise max_memory, or store the model in fewer bits",
            )

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        return param_name in self.stacks or (isinstance(module, QuantizedWeight) and name == "weight")

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        if not self.pre_quantized:
            return []
        classes = {type(format) for format in self.quantization_config.formats.values()}
        suffixes = {suffix for cls in classes for suffix in cls.state_suffixes()} - {""}
        # transformers replaces a pattern's match in a key by the target, and passes entries by their pattern
        patterns = {f"{entry_name('weight', suffix)}$": suffix for suffix in sorted(suffixes)} | {"weight": ""}
        converters = [WeightConverter([*patterns], "weight", operations=[_Deserialize(self, patterns)])]
        for leaf in {".".join(name.split(".")[-2:]) for name in self.stacks}:
            classes = {type(of(name)) for name in self.stacks for of in (self.format_of, self.stored_format)}
            suffixes = {s for cls in classes for s in cls.state_suffixes() if s and not s.startswith("../")}
            patterns = {f"{entry_name(leaf, suffix)}$": suffix for suffix in sorted(suffixes)} | {f"{leaf}$": ""}
            # before the linears' converter: `scales` may be a sibling of a weight, or below a stack
            converters.insert(0, WeightConverter([*patterns], leaf, operations=[_Deserialize(self, patterns)]))
        return converters

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        if self.stacks and self.pre_quantized:
            formats = {type(format_) for format_ in self.quantization_config.formats.values()}
            suffixes = {suffix for cls in formats for suffix in cls.state_suffixes()}
            weight_conversions = [prequantized_converter(c, self, suffixes) for c in weight_conversions]
        elif self.stacks:
            weight_conversions = [stacking_converter(conversion, self) for conversion in weight_conversions]
        return weight_conversions + self.get_weight_conversions()

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, Any]]:
        """Record the dtype that a model is saved in, which `.bfloat16()` may have changed."""
        self.quantization_config.dtype = str(model.dtype).removeprefix("torch.")
        return None, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # a name after saving
        return dequantize(model, dtype or model.dtype, self.stacks, self.conv1d)

    def is_serializable(self, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def assigned_formats(origin: Origin, storage: Storage) -> tuple[dict[str, Format], dict[str, Format]]:
    """Return parameter name → format, for linear layers and for stacked experts, without loading weights."""
    quantization = HalfbyteConfig(storage)
    quantizer = HalfbyteQuantizer(quantization, pre_quantized=False)
    quantizer.preprocess_model(meta_model(origin, load_model_config(origin)))
    formats = quantization.formats
    linears = {f"{name}.weight": format_ for name, format_ in formats.items() if name not in quantizer.stacks}
    return linears, {name: formats[name] for name in quantizer.stacks}
