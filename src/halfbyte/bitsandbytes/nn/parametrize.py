"""4-bit parameters of any module, such as stacked experts, by `torch.nn.utils.parametrize`: each access dequantizes."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.utils.parametrize as P
from torch import Tensor, nn

from .. import functional as F


class Bnb4bitParametrization(nn.Module):
    """Maps packed codes to values of the state's shape and dtype.

    Args:
        quant_state: state of the codes.
    """

    def __init__(self, quant_state: F.QuantState):
        super().__init__()
        self.quant_state = quant_state

    @torch.no_grad()
    def forward(self, quantized_param: Tensor) -> Tensor:
        """Return the dequantized values."""
        return F.dequantize_4bit(quantized_param, self.quant_state)


def _check_parameter(module: nn.Module, name: str) -> Tensor:
    if not hasattr(module, name):
        raise AttributeError(f"Module does not have parameter '{name}'")
    parameter = getattr(module, name)
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"Parameter '{name}' is not an instance of nn.Parameter")
    return parameter


def replace_parameter_4bit_prequantized(
    module: nn.Module, param_name: str, qs_dict: dict[str, Any], device: torch.device
) -> None:
    """Dequantize a parameter that holds packed codes at each access.

    Args:
        module: owner of the parameter.
        param_name: its attribute name.
        qs_dict: result of `QuantState.as_dict`.
        device: device of the state.

    Raises:
        AttributeError: the module has no such attribute.
        TypeError: the attribute is not a parameter.
    """
    _check_parameter(module, param_name)
    _parametrize(module, param_name, F.QuantState.from_dict(qs_dict, device=device))


def replace_parameter_4bit(
    module: nn.Module,
    param_name: str,
    compress_statistics: bool = False,
    quant_type: Literal["nf4", "fp4"] = "nf4",
    blocksize: int | None = None,
) -> None:
    """Quantize a parameter of any shape in place and dequantize it at each access.

    Args:
        module: owner of the parameter.
        param_name: its attribute name.
        compress_statistics, quant_type, blocksize: as in `functional.quantize_4bit`.

    Raises:
        AttributeError: the module has no such attribute.
        TypeError: the attribute is not a parameter.
    """
    values = _check_parameter(module, param_name).data
    packed, state = F.quantize_4bit(
        values, blocksize=blocksize, compress_statistics=compress_statistics, quant_type=quant_type
    )
    setattr(module, param_name, nn.Parameter(packed, requires_grad=False))
    _parametrize(module, param_name, state)


def _parametrize(module: nn.Module, param_name: str, state: F.QuantState) -> None:
    """Register the parametrization, cache its values during a forward, and write packed codes to the state dict."""
    P.register_parametrization(module, param_name, Bnb4bitParametrization(state), unsafe=True)
    module.register_state_dict_post_hook(partial(_parametrized_state_dict_post_hook, param_name=param_name))
    module.register_forward_pre_hook(_enable_parametrization_cache)
    # always_call: checkpointing stops its recomputation with an exception, and the counter must still fall.
    module.register_forward_hook(_disable_parametrization_cache, always_call=True)


def _disable_parametrization_cache(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    # A pre-hook that raises before the cache is enabled must not make the counter negative.
    P._cache_enabled = max(0, P._cache_enabled - 1)
    if not P._cache_enabled:
        P._cache = {}


def _enable_parametrization_cache(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    P._cache_enabled += 1


def _parametrized_state_dict_post_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    *,
    param_name: str = "weight",
    **kwargs: Any,
) -> None:
    """Replace the parametrization's entry by the parameter's name and its state's entries."""
    original = f"{prefix}parametrizations.{param_name}.original"
    if original not in state_dict:
        return
    state_dict[f"{prefix}{param_name}"] = state_dict.pop(original)
    parametrizations: Any = module.parametrizations
    parametrization = next(
        candidate for candidate in parametrizations[param_name] if isinstance(candidate, Bnb4bitParametrization)
    )
    for key, value in parametrization.quant_state.as_dict(packed=True).items():
        state_dict[f"{prefix}{param_name}.{key}"] = value
