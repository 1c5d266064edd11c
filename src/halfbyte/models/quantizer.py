"""Registers halfbyte's 4-bit formats with transformers, so that `from_pretrained` quantizes while it loads.

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=HalfbyteConfig(), device_map={"": "cuda"})

transformers hands over one checkpoint tensor at a time; it is quantized on the target device and dropped, so that
device memory peaks at the quantized model plus one tensor. Checkpoints that bitsandbytes quantized keep their bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import CheckpointError, HalfbyteError, ModelError
from ..formats import Blockwise4
from ..formats.blockwise4 import PART_OF_KEY, STATE_KEYS
from ..layers import Linear4bit, quantized_parameter
from ..notices import notice
from ..tensor import QuantizedTensor

QUANT_METHOD = "halfbyte"


@register_quantization_config(QUANT_METHOD)
class HalfbyteConfig(QuantizationConfigMixin):
    """How the linear layers of a model are stored.

    Args:
        bnb_4bit_quant_type: "nf4" or "fp4".
        bnb_4bit_blocksize: weights per scale.
        bnb_4bit_use_double_quant: store the scales in 8 bits too.
        llm_int8_skip_modules: names of modules left as they are; default: the output head and what is tied to it.
            (bitsandbytes' name, which pre-quantized checkpoints carry for every bit width.)
    """

    def __init__(
        self,
        bnb_4bit_quant_type: str = "nf4",
        bnb_4bit_blocksize: int = 64,
        bnb_4bit_use_double_quant: bool = True,
        llm_int8_skip_modules: list[str] | None = None,
        **kwargs: Any,
    ):
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.bnb_4bit_quant_type = bnb_4bit_quant_type
        self.bnb_4bit_blocksize = bnb_4bit_blocksize
        self.bnb_4bit_use_double_quant = bnb_4bit_use_double_quant
        self.llm_int8_skip_modules = llm_int8_skip_modules
        self.format  # noqa: B018  raises on options that no format has

    @property
    def format(self) -> Blockwise4:
        return Blockwise4(self.bnb_4bit_quant_type, self.bnb_4bit_blocksize, self.bnb_4bit_use_double_quant)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """What a saved config.json says. It names bitsandbytes, whose checkpoint layout this is, so that the saved
        model loads in either tool; `load_model` recognises it."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.bnb_4bit_quant_type,
            "bnb_4bit_use_double_quant": self.bnb_4bit_use_double_quant,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "bfloat16",
            "llm_int8_skip_modules": self.llm_int8_skip_modules,
        }


class _Quantize(ConversionOps):
    """Checkpoint tensor → frozen quantized parameter, on the device the tensor is on."""

    def __init__(self, hf_quantizer: HalfbyteQuantizer):
        self.hf_quantizer = hf_quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, model: nn.Module, **kwargs: Any
    ) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            self.hf_quantizer.attempt(name, functools.partial(self._quantize, name, weight, model), result)
        return result

    def _quantize(self, name: str, weight: Tensor, model: nn.Module) -> nn.Parameter:
        _check_shape(model, weight, name)
        try:
            return quantized_parameter(weight, self.hf_quantizer.quantization_config.format)
        except ModelError as error:
            raise ModelError(f"{name}: {error.message}", error.fix) from error


class _Deserialize(ConversionOps):
    """bitsandbytes' entries of one weight → frozen quantized parameter with the same bytes."""

    def __init__(self, hf_quantizer: HalfbyteQuantizer):
        self.hf_quantizer = hf_quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, model: nn.Module, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Any]:
        if len(input_dict) == 1:  # an ordinary weight: norms, embeddings, skipped modules
            return input_dict
        entries = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        state = {key.removeprefix("weight").lstrip("."): value for key, value in entries.items()}
        result: dict[str, Tensor] = {}

        def load() -> nn.Parameter:
            format_, parts, shape, dtype = Blockwise4.from_state(state, full_layer_name)
            tensor = QuantizedTensor(format_, parts, shape, dtype)
            _check_shape(model, tensor, full_layer_name)
            return nn.Parameter(tensor, requires_grad=False)

        self.hf_quantizer.attempt("weight", load, result)
        return result

    def __deepcopy__(self, memo: Any) -> _Deserialize:
        """transformers copies converters for each layer; failures must reach the one quantizer it asks at the end."""
        return self


def _check_shape(model: nn.Module, weight: Tensor, name: str) -> None:
    module, _ = get_module_from_name(model, name)
    _check_same_shape(name, tuple(weight.shape), (module.out_features, module.in_features))


def _check_same_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(
            f"{name} has shape {found} in the checkpoint, {expected} in the model",
            "check that config.json belongs to these weights",
        )


@register_quantizer(QUANT_METHOD)
class HalfbyteQuantizer(HfQuantizer):
    """Replaces `nn.Linear` by `Linear4bit` and fills it while loading."""

    requires_calibration = False
    quantization_config: HalfbyteConfig

    def __init__(self, quantization_config: QuantizationConfigMixin, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.failure: HalfbyteError | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes per weight that transformers reserves before loading; its default would reserve the 16-bit model."""
        if self.param_needs_quantization(model, param_name):
            return self.quantization_config.format.bits_per_weight(tuple(param.shape)) / 8
        return param.element_size()

    def attempt(self, key: str, make: Callable[[], nn.Parameter], result: dict[str, Tensor]) -> None:
        """Put `make()` into `result`, or keep the first failure until everything is loaded.

        transformers turns exceptions of a conversion into log lines and one that names no tensor.
        """
        try:
            result[key] = make()
        except HalfbyteError as error:
            self.failure = self.failure or error

    def update_device_map(self, device_map: Any) -> Any:
        from ..hardware import best_device

        return {"": best_device()} if device_map is None else device_map

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        skip = self.get_modules_to_not_convert(
            model, self.quantization_config.llm_int8_skip_modules, model._keep_in_fp32_modules
        )
        replaced = 0
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and should_convert_module(name, skip):
                model.set_submodule(name, Linear4bit.unfilled(module))
                replaced += 1
        if not replaced:
            raise ModelError(
                f"{type(model).__name__} has no nn.Linear layers to quantize", "load it with load_in_4bit: false"
            )
        stacked = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 2)
        if stacked:
            notice("stacked-experts", f"{stacked / 1e6:.0f}M weights in stacked expert parameters stay in 16 bits")
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        for name, module in model.named_modules():
            if isinstance(module, Linear4bit) and not isinstance(module.weight, QuantizedTensor):
                raise CheckpointError(f"{name}.weight is missing from the checkpoint", "re-download the checkpoint")
        for name, parameter in model.named_parameters():  # transformers 5.17 takes any shape when there is a quantizer
            _check_same_shape(name, tuple(parameter.shape), self.shapes[name])
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        return isinstance(module, Linear4bit) and name == "weight"

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        if not self.pre_quantized:
            return []
        suffixes = [*filter(None, PART_OF_KEY), "quant_map", *STATE_KEYS.values()]
        sources = [*(f"weight.{suffix}" for suffix in suffixes), "weight"]
        return [WeightConverter(source_patterns=sources, target_patterns="weight", operations=[_Deserialize(self)])]

    def is_serializable(self, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True
