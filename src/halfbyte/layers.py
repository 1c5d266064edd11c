"""Drop-in modules: `nn.Linear` and `nn.Embedding` whose frozen weight is a `QuantizedTensor`.

Their state dicts are those of bitsandbytes' modules of the same names, in both directions; a full-precision weight in a
state dict is quantized as it is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError
from .formats import Blockwise4, Format
from .tensor import QuantizedTensor


def quantized_parameter(weight: Tensor, format: Format) -> nn.Parameter:
    """A frozen parameter holding `weight` in `format`; an already quantized weight is taken as it is."""
    if not isinstance(weight, QuantizedTensor):
        weight = QuantizedTensor.quantize(weight, format)
    return nn.Parameter(weight, requires_grad=False)


class _QuantizedWeight:
    """State-dict entries of a module whose `weight` is quantized."""

    weight: Any

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        weight = destination.pop(f"{prefix}weight")
        if not isinstance(weight, QuantizedTensor):  # a shard under FSDP2: only adapters are saved from those
            destination[f"{prefix}weight"] = weight
            return
        for suffix, value in weight.format.to_state(weight.parts, tuple(weight.shape), weight.dtype).items():
            destination[f"{prefix}weight.{suffix}".rstrip(".")] = value

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        name = f"{prefix}weight"
        mine = [key for key in state_dict if key == name or key.startswith(f"{name}.")]
        entries = {key.removeprefix(name).lstrip("."): state_dict[key] for key in mine}
        if set(entries) > {""}:
            format_, parts, shape, dtype = type(self.weight.format).from_state(entries, name)
            loaded = QuantizedTensor(format_, parts, shape, dtype)
            state_dict = {key: value for key, value in state_dict.items() if not key.startswith(f"{name}.")}
        elif "" in entries:
            loaded = QuantizedTensor.quantize(entries[""].to(self.weight.dtype), self.weight.format)
        else:
            super()._load_from_state_dict(  # type: ignore[misc]
                state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
            return
        if loaded.shape != self.weight.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(loaded.shape)} in the checkpoint, {tuple(self.weight.shape)} in the model",
                "load a checkpoint of this model",
            )
        self.weight = nn.Parameter(loaded.to(self.weight.device), requires_grad=False)
        super()._load_from_state_dict(  # type: ignore[misc]
            {**state_dict, name: self.weight.detach()},
            prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs,
        )  # fmt: skip
        for key in [f"{name}.{suffix}" for suffix in entries if suffix]:
            if key in unexpected_keys:
                unexpected_keys.remove(key)


class Linear4bit(_QuantizedWeight, nn.Linear):
    """`nn.Linear` with a frozen 4-bit weight.

    The product runs in the input's dtype (or autocast's). A new module holds quantized random weights; use
    `from_linear` or `load_state_dict` for real ones.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`; dtype is that of the dequantized weight.
        quant_type: "nf4" or "fp4".
        blocksize: weights per scale.
        compress_statistics: quantize the scales too (double quantization).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        quant_type: str = "nf4",
        blocksize: int = 64,
        compress_statistics: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        format_ = Blockwise4(quant_type, blocksize, compress_statistics)  # type: ignore[arg-type]
        self.weight = quantized_parameter(self.weight, format_)

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: Format) -> Linear4bit:
        """The same layer with its weight in `format`; the bias is shared."""
        module = cls.unfilled(linear)
        module.weight = quantized_parameter(linear.weight, format)
        return module

    @classmethod
    def unfilled(cls, linear: nn.Linear) -> Linear4bit:
        """The same layer, its weight not quantized yet: a loader sets it."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.in_features, module.out_features = linear.in_features, linear.out_features
        module.weight, module.bias = linear.weight, linear.bias
        module.weight.requires_grad_(False)
        return module.train(linear.training)

    def extra_repr(self) -> str:
        spec = self.weight.format.spec if isinstance(self.weight, QuantizedTensor) else "none yet"
        return f"{super().extra_repr()}, format={spec}"


class LinearNF4(Linear4bit):
    """`Linear4bit` in NF4."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any):
        super().__init__(in_features, out_features, bias, quant_type="nf4", **options)


class LinearFP4(Linear4bit):
    """`Linear4bit` in FP4."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any):
        super().__init__(in_features, out_features, bias, quant_type="fp4", **options)


class Embedding4bit(_QuantizedWeight, nn.Embedding):
    """`nn.Embedding` with a frozen 4-bit table; only the rows looked up are dequantized.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: as in `nn.Embedding`.
        quant_type, blocksize, compress_statistics: as in `Linear4bit`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        quant_type: str = "nf4",
        blocksize: int = 64,
        compress_statistics: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        format_ = Blockwise4(quant_type, blocksize, compress_statistics)  # type: ignore[arg-type]
        self.weight = quantized_parameter(self.weight, format_)
