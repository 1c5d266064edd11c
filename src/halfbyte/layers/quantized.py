"""Drop-in modules: `nn.Linear` and `nn.Embedding` whose frozen weight is a `QuantizedTensor`.

The format defines the state-dict entries (`Format.to_state`). For NF4 and FP4 they equal those of bitsandbytes' modules
of the same names, for saving and loading. Loading a full-precision weight quantizes it.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..formats import FORMATS, Blockwise4, Format, recognize
from ..formats.base import FLOATS, entry_name
from ..tensor import QuantizedTensor
from ..utils.errors import CheckpointError


def quantized_parameter(weight: Tensor, format: Format) -> nn.Parameter:
    """A frozen parameter holding `weight` in `format`; a weight that is quantized already keeps its format."""
    if not isinstance(weight, QuantizedTensor):
        weight = QuantizedTensor.quantize(weight, format)
    return nn.Parameter(weight, requires_grad=False)


class QuantizedWeight:
    """State-dict entries of a module whose `weight` is quantized."""

    weight: Any

    @classmethod
    def plain_class(cls) -> type:
        """Return the class of such a module with a plain weight."""
        return next(base for base in cls.__mro__ if not issubclass(base, QuantizedWeight))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        weight = destination.pop(f"{prefix}weight")
        if not isinstance(weight, QuantizedTensor) or weight.is_meta or weight.is_freed:  # no data to save
            destination[f"{prefix}weight"] = weight
            return
        for suffix, value in weight.format.to_state(weight.parts, tuple(weight.shape), weight.dtype).items():
            destination[entry_name(f"{prefix}weight", suffix)] = value

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        name = f"{prefix}weight"
        entries = _entries(state_dict, name)
        if entries.keys() - {""} or ("" in entries and entries[""].dtype not in (*FLOATS, torch.float64)):
            cls = recognize(entries, prefer=type(self.weight.format))
            format_, parts, shape, dtype = cls.from_state(entries, name)
            loaded = QuantizedTensor(format_, parts, shape, dtype)
            used = {entry_name(name, suffix) for suffix in entries}
            state_dict = {key: value for key, value in state_dict.items() if key not in used}
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


def _entries(state_dict: dict[str, Any], name: str) -> dict[str, Tensor]:
    """Suffix → entry, for all entries that may belong to the quantized parameter `name`."""
    entries = _keys_below(state_dict, name)
    of_module = {suffix for cls in FORMATS.values() for suffix in cls.state_suffixes() if suffix.startswith("../")}
    entries |= {suffix: entry_name(name, suffix) for suffix in of_module if entry_name(name, suffix) in state_dict}
    return {suffix: state_dict[key] for suffix, key in entries.items()}


def _keys_below(state_dict: dict[str, Any], name: str) -> dict[str, str]:
    """Suffix → key, for the key `name` and all keys that extend it after a dot."""
    return {key.removeprefix(name).lstrip("."): key for key in state_dict if f"{key}.".startswith(f"{name}.")}


def hold_stacks(module: nn.Module) -> None:
    """Have `module` save and load its quantized parameters in the layout of their formats.

    For modules of other packages with quantized stacks. The entries are named like those of a `QuantizedLinear`:
    `gate_up_proj`, `gate_up_proj.absmax`, ...
    """
    module.register_state_dict_post_hook(_write_stacks)
    module.register_load_state_dict_pre_hook(_read_stacks)


def _stacks(module: nn.Module) -> dict[str, Any]:
    parameters = module.named_parameters(recurse=False)
    return {name: parameter for name, parameter in parameters if isinstance(parameter, QuantizedTensor)}


def _write_stacks(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, stack in _stacks(module).items():
        if stack.is_meta or stack.is_freed:  # no data to save
            continue
        del state[f"{prefix}{name}"]
        entries = stack.format.to_state(stack.parts, tuple(stack.shape), stack.dtype)
        state |= {entry_name(f"{prefix}{name}", suffix): value for suffix, value in entries.items()}


def _read_stacks(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, stack in _stacks(module).items():
        full = f"{prefix}{name}"
        stored_keys = _keys_below(state, full)
        if not stored_keys.keys() - {""}:
            continue
        entries = {suffix: state.pop(key) for suffix, key in stored_keys.items()}
        cls = recognize(entries, prefer=type(stack.format))
        format_, parts, shape, dtype = cls.from_state(entries, full)
        if shape != tuple(stack.shape):
            raise CheckpointError(
                f"{full} has shape {shape} in the checkpoint, {tuple(stack.shape)} in the model",
                "load a checkpoint of this model",
            )
        loaded = QuantizedTensor(format_, parts, shape, dtype).to(stack.device)
        setattr(module, name, nn.Parameter(loaded, requires_grad=False))
        state[full] = getattr(module, name).detach()


def hold_table(embedding: nn.Embedding) -> None:
    """Prepare an embedding of any class for a quantized table, which a loader sets afterwards.

    The embedding's own forward still runs, and `F.embedding` dequantizes the rows that are looked up. The class of the
    embedding is replaced by a subclass that saves and loads quantized weights.
    """
    cls = type(embedding)
    if cls not in _quantized_classes:
        name, bases = f"Quantized{cls.__name__}", (QuantizedWeight, cls)
        _quantized_classes[cls] = type(name, bases, {"__module__": cls.__module__})
    embedding.__class__ = _quantized_classes[cls]
    embedding.weight.requires_grad_(False)


_quantized_classes: dict[type, type] = {}  # class of an embedding → its subclass


def _adapt_peft(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Adapt PEFT's modules to quantized weights of a layer that they wrap."""
    wrapped = submodule if name in ("base_layer", "original_module") else None
    if wrapped is not None and any(isinstance(parameter, QuantizedTensor) for parameter in wrapped.parameters()):
        from .tuner_layers import adapt_class  # imports PEFT

        adapt_class(type(module))


register_module_module_registration_hook(_adapt_peft)


class QuantizedLinear(QuantizedWeight, nn.Linear):
    """`nn.Linear` with a frozen weight in any format.

    The GEMM runs in the input's dtype, or in autocast's. A new module holds quantized random weights; use `from_linear`
    or `load_state_dict` for trained ones. Loading a state dict in another format changes the module's format.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`; dtype is that of the dequantized weight.
        format: storage format of the weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: Format,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.weight = quantized_parameter(self.weight, format)

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: Format) -> Self:
        """The same layer with its weight in `format`; the bias is shared."""
        module = cls.unfilled(linear)
        module.weight = quantized_parameter(linear.weight, format)
        return module

    @classmethod
    def unfilled(cls, linear: nn.Linear) -> Self:
        """A module for `linear` that still holds its full-precision weight; a loader sets the quantized one."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.in_features, module.out_features = linear.in_features, linear.out_features
        module.weight, module.bias = linear.weight, linear.bias
        module.weight.requires_grad_(False)
        return module.train(linear.training)

    def extra_repr(self) -> str:
        spec = self.weight.format.spec if isinstance(self.weight, QuantizedTensor) else "none yet"
        return f"{super().extra_repr()}, format={spec}"


class Linear4bit(QuantizedLinear):
    """`QuantizedLinear` in NF4 or FP4.

    Args:
        in_features, out_features, bias, device, dtype: as in `QuantizedLinear`.
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
        format_ = Blockwise4(quant_type, blocksize, compress_statistics)  # type: ignore[arg-type]
        super().__init__(in_features, out_features, bias, format=format_, device=device, dtype=dtype)


class LinearNF4(Linear4bit):
    """`Linear4bit` in NF4."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any):
        super().__init__(in_features, out_features, bias, quant_type="nf4", **options)


class LinearFP4(Linear4bit):
    """`Linear4bit` in FP4."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any):
        super().__init__(in_features, out_features, bias, quant_type="fp4", **options)


class Embedding4bit(QuantizedWeight, nn.Embedding):
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
