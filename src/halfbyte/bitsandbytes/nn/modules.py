"""Quantized parameters, linears and embeddings of bitsandbytes: moving a parameter to a device quantizes it.

The parameters hold packed codes (`Params4bit`) or int8 codes (`Int8Params`) as their data, and the state as
attributes, so that they pickle, copy, shard and serialize as bitsandbytes' parameters do.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...formats.blockwise4 import dequantize_rows_blockwise4
from ...formats.int8 import dequantize_rows_int8
from .. import functional as F
from ..autograd._functions import MatmulLtState, matmul, matmul_4bit
from ..optim.optimizer import GlobalOptimManager
from ..utils import OutlierTracer

logger = logging.getLogger("bitsandbytes.nn.modules")  # the name that users of bitsandbytes configure


class _XavierEmbedding(nn.Embedding):
    """Embedding with Xavier-uniform initial values, and fp32 state in 8-bit optimizers."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        GlobalOptimManager.get_instance().register_module_override(self, "weight", {"optim_bits": 32})

    def reset_parameters(self) -> None:
        """Draw Xavier-uniform values and zero the padding row."""
        nn.init.xavier_uniform_(self.weight)
        self._fill_padding_idx_with_zero()


class StableEmbedding(_XavierEmbedding):
    """Embedding with a layer norm after it, for training with 8-bit optimizers (arXiv:2110.02861, section 2.3).

    Args: as in `nn.Embedding`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.norm = nn.LayerNorm(embedding_dim, device=device)

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., embedding_dim] in the weight's dtype; the norm runs in the default dtype."""
        return self.norm(super().forward(input).to(torch.get_default_dtype())).to(self.weight.dtype)


class Embedding(_XavierEmbedding):
    """`nn.Embedding` with Xavier-uniform initial values.

    Args: as in `nn.Embedding`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        device: Any = None,
    ):
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight,
            device=device,
        )  # fmt: skip


def _rebuild(cls: type, data: Tensor, requires_grad: bool, attributes: dict[str, Any]) -> Any:
    """Return a parameter of class `cls` with these attributes; it shares the memory of `data`."""
    parameter: Any = Tensor._make_subclass(cls, data, requires_grad)
    vars(parameter).update(attributes)
    return parameter


def _state_property(read: Callable[[Any], Any], name: str) -> property:
    """Property of a weight that reads its quantization state: FSDP resolves dotted state-dict keys by attribute."""

    def value(self: Params4bit) -> Any:
        state = self.quant_state
        attribute = None if state is None else read(state)
        if attribute is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}: it has no such state")
        return attribute

    return property(value)


class Params4bit(nn.Parameter):
    """A frozen 4-bit weight: float data until it is moved to a device, then packed codes and a `quant_state`.

    Args:
        data: float weight, or packed codes if `bnb_quantized`.
        requires_grad: must be False once quantized.
        quant_state: state of packed codes.
        blocksize: values per scale; default 64.
        compress_statistics: quantize the scales too.
        quant_type: "fp4" or "nf4".
        quant_storage: dtype as which the codes are viewed.
        module: layer that receives the state when the weight is quantized.
        bnb_quantized: whether `data` is packed.
        kwargs: ignored, as in bitsandbytes.
    """

    quant_state: Any
    blocksize: int
    compress_statistics: bool
    quant_type: str
    quant_storage: torch.dtype
    module: Any
    bnb_quantized: bool

    def __new__(
        cls,
        data: Tensor | None = None,
        requires_grad: bool = False,
        quant_state: F.QuantState | None = None,
        blocksize: int | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        module: nn.Module | None = None,
        bnb_quantized: bool = False,
        **kwargs: Any,
    ) -> Params4bit:
        self = Tensor._make_subclass(cls, torch.empty(0) if data is None else data, requires_grad)
        self.blocksize = blocksize or 64
        self.compress_statistics = compress_statistics
        self.quant_type = quant_type
        self.quant_state = quant_state
        self.quant_storage = quant_storage
        self.bnb_quantized = bnb_quantized
        self.data = torch.empty(0) if data is None else data
        self.module = module
        return self

    absmax = _state_property(lambda state: state.absmax, "absmax")
    code = _state_property(lambda state: state.code, "code")
    quant_map = _state_property(lambda state: state.code, "quant_map")
    offset = _state_property(lambda state: state.offset, "offset")
    state2 = _state_property(lambda state: state.state2, "state2")
    nested_absmax = _state_property(lambda state: state.state2 and state.state2.absmax, "nested_absmax")
    nested_blocksize = _state_property(lambda state: state.state2 and state.state2.blocksize, "nested_blocksize")
    nested_quant_map = _state_property(lambda state: state.state2 and state.state2.code, "nested_quant_map")
    nested_dtype = _state_property(lambda state: state.state2 and state.state2.dtype, "nested_dtype")
    nested_offset = _state_property(lambda state: state.offset, "nested_offset")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "data": self.data, "requires_grad": self.requires_grad}

    def __setstate__(self, state: dict[str, Any]) -> None:
        attributes = dict(state)
        self.data = attributes.pop("data")
        self.requires_grad = attributes.pop("requires_grad")
        vars(self).update(attributes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self), self.data, self.requires_grad, dict(vars(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Params4bit:
        attributes = {name: value for name, value in vars(self).items() if name != "module"}
        new = _rebuild(type(self), self.data.clone(), self.requires_grad, copy.deepcopy(attributes, memo))
        new.module = memo.get(id(self.module), self.module)
        memo[id(self)] = new
        return new

    def __copy__(self) -> Params4bit:
        return _rebuild(type(self), self.data, self.requires_grad, vars(self))

    @classmethod
    def from_prequantized(
        cls,
        data: Tensor,
        quantized_stats: dict[str, Any],
        requires_grad: bool = False,
        device: Any = "cuda",
        module: nn.Module | None = None,
        **kwargs: Any,
    ) -> Params4bit:
        """Build a weight on `device` from packed codes and the entries of `QuantState.as_dict`."""
        state = F.QuantState.from_dict(quantized_stats, device=device)
        self = cls(
            data.to(device), requires_grad, state, state.blocksize, state.nested, state.quant_type or "fp4", data.dtype,
            module, bnb_quantized=True,
        )  # fmt: skip
        if module is not None:
            module.quant_state = state  # type: ignore[assignment]
        return self

    def _quantize(self, device: Any) -> Params4bit:
        """Quantize on `device`, in place."""
        packed, state = F.quantize_4bit(
            self.data.contiguous().to(device),
            blocksize=self.blocksize,
            compress_statistics=self.compress_statistics,
            quant_type=self.quant_type,
            quant_storage=self.quant_storage,
        )
        self.data = packed
        self.quant_state = state
        self.bnb_quantized = True
        if self.module is not None:
            self.module.quant_state = state
        return self

    def cpu(self) -> Params4bit:  # type: ignore[override]
        """`to("cpu")`."""
        return self.to(device="cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Params4bit:  # type: ignore[override]
        """`to` the CUDA device."""
        return self.to(device="cuda" if device is None else device, non_blocking=non_blocking)

    def xpu(self, device: Any = None, non_blocking: bool = False) -> Params4bit:  # type: ignore[override]
        """`to` the XPU device."""
        return self.to(device="xpu" if device is None else device, non_blocking=non_blocking)

    def to(self, *args: Any, **kwargs: Any) -> Params4bit:
        """Move to a device; a weight that is not quantized yet is quantized there, in place."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type != "meta" and not self.bnb_quantized:
            return self._quantize(device)
        if self.quant_state is not None and device is not None:
            self.quant_state.to(device)
        converted = None if self.bnb_quantized else dtype  # codes viewed as a float dtype must not be converted
        return self._with_data(nn.Parameter.to(self, device=device, dtype=converted, non_blocking=non_blocking))

    def _with_data(self, data: Tensor) -> Params4bit:
        """Return a parameter of `data` with the attributes of this one."""
        return type(self)(
            data, self.requires_grad, self.quant_state, self.blocksize, self.compress_statistics, self.quant_type,
            self.quant_storage, self.module, self.bnb_quantized,
        )  # fmt: skip

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in (torch.chunk, torch.split):  # FSDP2 shards a weight with these
            return tuple(args[0]._with_data(piece) for piece in result)
        return result


def fix_4bit_weight_quant_state_from_module(module: Embedding4bit | Linear4bit) -> None:
    """Set the quantization state of a weight that lost its attributes, as under FSDP, from its module's copy."""
    weight: Any = module.weight
    if getattr(weight, "quant_state", None) is not None:
        return
    if getattr(module, "quant_state", None) is None:
        logger.warning("the 4-bit weight is not quantized yet: move the layer to its device with .to(device)")
        return
    if not isinstance(weight, Params4bit):
        weight = Params4bit(weight, quant_storage=module.quant_storage, bnb_quantized=True)
        module.weight = weight
    weight.quant_state = module.quant_state


class Linear4bit(nn.Linear):
    """`nn.Linear` with a frozen weight in 4 bits (QLoRA, arXiv:2305.14314); `.to(device)` quantizes it.

    Args:
        input_features, output_features, bias, device: as in `nn.Linear`.
        compute_dtype: dtype of the GEMM. Default: the first input's if that is fp32 or bf16, otherwise each input's.
        compress_statistics: quantize the scales too.
        quant_type: "fp4" or "nf4".
        quant_storage: dtype as which the codes are stored.
    """

    weight: Any

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ):
        super().__init__(input_features, output_features, bias, device)
        self.weight = Params4bit(
            self.weight.data,
            requires_grad=False,
            compress_statistics=compress_statistics,
            quant_type=quant_type,
            quant_storage=quant_storage,
            module=self,
        )
        self.compute_dtype = compute_dtype
        self.compute_type_is_set = compute_dtype is not None
        self.quant_state = None
        self.quant_storage = quant_storage

    def set_compute_type(self, x: Tensor) -> None:
        """Set `compute_dtype` to the dtype of an fp32 or bf16 input; warn if an fp16 input would run in fp32."""
        if x.dtype in (torch.float32, torch.bfloat16):
            self.compute_dtype = x.dtype
        elif x.dtype == torch.float16 and self.compute_dtype == torch.float32:
            logger.warning(
                "the input of Linear4bit is fp16 and its GEMM runs in fp32, which is slow: set compute_dtype to "
                "torch.float16 or torch.bfloat16"
            )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = getattr(self.weight, "quant_state", None)
        if state is not None:
            for key, value in state.as_dict(packed=True).items():
                destination[f"{prefix}weight.{key}"] = value if keep_vars else value.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., output_features] in x's dtype."""
        fix_4bit_weight_quant_state_from_module(self)
        if self.bias is not None and self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        compute = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(compute.dtype)
        return matmul_4bit(compute, self.weight, self.weight.quant_state, bias=bias).to(x.dtype)


class LinearFP4(Linear4bit):
    """`Linear4bit` in FP4."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ):
        super().__init__(
            input_features, output_features, bias, compute_dtype, compress_statistics, "fp4", quant_storage, device
        )


class LinearNF4(Linear4bit):
    """`Linear4bit` in NF4."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ):
        super().__init__(
            input_features, output_features, bias, compute_dtype, compress_statistics, "nf4", quant_storage, device
        )


class Int8Params(nn.Parameter):
    """An int8 weight: float data until it is moved to a device, then codes `CB` [N, K] with scales `SCB` [N].

    Args:
        data: float weight, or int8 codes.
        requires_grad: True only for float weights.
        has_fp16_weights: keep the float weight; it is quantized in each forward.
        CB, SCB: codes and scales of a quantized weight.
    """

    CB: Tensor | None
    SCB: Tensor | None
    has_fp16_weights: bool

    def __new__(
        cls,
        data: Tensor | None = None,
        requires_grad: bool = True,
        has_fp16_weights: bool = False,
        CB: Tensor | None = None,
        SCB: Tensor | None = None,
        **kwargs: Any,
    ) -> Int8Params:
        self = Tensor._make_subclass(cls, torch.empty(0) if data is None else data, requires_grad)
        self.CB, self.SCB = CB, SCB
        self.has_fp16_weights = has_fp16_weights
        return self

    def _quantize(self, device: Any) -> Int8Params:
        """Quantize on `device`, in place; a float weight to keep is moved in fp16."""
        if self.has_fp16_weights:
            return nn.Parameter.to(self, device)  # type: ignore[return-value]
        # bitsandbytes rounds to fp16 first: the codes of fp32 and bf16 weights depend on it.
        values = self.data.contiguous().to(device=device, dtype=torch.float16)
        codes, scales, _ = F.int8_vectorwise_quant(values)
        self.data = codes
        self.CB = codes
        self.SCB = scales
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Int8Params:
        new = _rebuild(type(self), self.data.clone(), self.requires_grad, copy.deepcopy(vars(self), memo))
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self), self.data, self.requires_grad, dict(vars(self)))

    def cpu(self) -> Int8Params:  # type: ignore[override]
        """`to("cpu")`."""
        return self.to(device="cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Int8Params:  # type: ignore[override]
        """`to` the CUDA device."""
        return self.to(device="cuda" if device is None else device, non_blocking=non_blocking)

    def xpu(self, device: Any = None, non_blocking: bool = False) -> Int8Params:  # type: ignore[override]
        """`to` the XPU device."""
        return self.to(device="xpu" if device is None else device, non_blocking=non_blocking)

    def to(self, *args: Any, **kwargs: Any) -> Int8Params:
        """Move to a device; a float weight is quantized there, in place."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        quantized = self.data.dtype == torch.int8
        has_data = device is not None and "meta" not in (device.type, self.data.device.type)
        if has_data and not quantized and not self.has_fp16_weights:
            return self._quantize(device)
        moved = nn.Parameter.to(self, device=device, dtype=None if quantized else dtype, non_blocking=non_blocking)
        new = Int8Params(moved, self.requires_grad, self.has_fp16_weights)
        if quantized:
            if self.CB is not None:
                new.CB = moved.data
            if self.SCB is not None:
                new.SCB = self.SCB if device is None else self.SCB.to(device)
        return new


def maybe_rearrange_weight(
    state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: Any, missing_keys: Any, unexpected_keys: Any,
    error_msgs: list[str],
) -> None:  # fmt: skip
    """Drop the `weight_format` entry of an int8 layer's state dict; a hook that runs before loading.

    Raises:
        ValueError: the format is not 0, row-major.
    """
    stored = state_dict.pop(f"{prefix}weight_format", None)
    if stored is not None and int(torch.as_tensor(stored).item()) != 0:
        raise ValueError(
            f"{prefix}weight_format is {stored}, not 0 (row-major): save the model with bitsandbytes 0.45 or newer"
        )


class Embedding8bit(nn.Embedding):
    """`nn.Embedding` with a frozen int8 table; the rows that are looked up are dequantized.

    Args:
        num_embeddings, embedding_dim, device, dtype: as in `nn.Embedding`.
    """

    weight: Any

    def __init__(self, num_embeddings: int, embedding_dim: int, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.dtype = self.weight.data.dtype
        self.weight = Int8Params(self.weight.data, has_fp16_weights=False, requires_grad=False)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        raise NotImplementedError("saving Embedding8bit is not supported: save the model before quantization")

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., embedding_dim] in the table's original dtype.

        Raises:
            RuntimeError: the table is not quantized yet.
        """
        weight = self.weight
        if getattr(weight, "SCB", None) is None:
            raise RuntimeError("the table of Embedding8bit is not quantized: move the layer to its device first")
        index = input.reshape(-1)
        rows = dequantize_rows_int8(weight.data[index], weight.SCB[index], self.dtype)
        return rows.view(*input.shape, self.embedding_dim)


class Embedding4bit(nn.Embedding):
    """`nn.Embedding` with a frozen 4-bit table; the rows that are looked up are dequantized.

    Args:
        num_embeddings, embedding_dim, dtype, device: as in `nn.Embedding`.
        quant_type: "fp4" or "nf4".
        quant_storage: dtype as which the codes are stored.
    """

    weight: Any

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: torch.dtype | None = None,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ):
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.dtype = self.weight.data.dtype
        self.weight = Params4bit(
            self.weight.data,
            requires_grad=False,
            compress_statistics=False,
            quant_type=quant_type,
            quant_storage=quant_storage,
            module=self,
        )
        self.quant_state = None
        self.quant_storage = quant_storage
        if embedding_dim % self.weight.blocksize:
            logger.warning(
                "rows of Embedding4bit have %d values, not a multiple of the block size %d: lookups are slower",
                embedding_dim, self.weight.blocksize,
            )  # fmt: skip

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        raise NotImplementedError("saving Embedding4bit is not supported: save the model before quantization")

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., embedding_dim] in the table's original dtype."""
        fix_4bit_weight_quant_state_from_module(self)
        state = self.weight.quant_state
        format_, tensors = state.as_format(self.weight)
        rows = dequantize_rows_blockwise4(
            tensors["packed"], tensors["absmax"], format_.nested_parts(tensors), format_.blocksize, format_.quant_type,
            self.embedding_dim, input.reshape(-1), self.dtype,
        )  # fmt: skip
        return rows.view(*input.shape, self.embedding_dim)


class EmbeddingFP4(Embedding4bit):
    """`Embedding4bit` in FP4."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: torch.dtype | None = None,
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ):
        super().__init__(num_embeddings, embedding_dim, dtype, "fp4", quant_storage, device)


class EmbeddingNF4(Embedding4bit):
    """`Embedding4bit` in NF4."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: torch.dtype | None = None,
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ):
        super().__init__(num_embeddings, embedding_dim, dtype, "nf4", quant_storage, device)


class Linear8bitLt(nn.Linear):
    """`nn.Linear` by LLM.int8() (arXiv:2208.07339); `.to(device)` quantizes the weight.

    Args:
        input_features, output_features, bias, device: as in `nn.Linear`.
        has_fp16_weights: keep a float weight that trains; it is quantized in each forward.
        threshold: input columns with a magnitude of at least this are multiplied unquantized; 0: none.
        index: stored as an attribute and not read.
    """

    weight: Any

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        has_fp16_weights: bool = True,
        threshold: float = 0.0,
        index: Any = None,
        device: Any = None,
    ):
        super().__init__(input_features, output_features, bias, device)
        self.state = MatmulLtState()
        self.index = index
        self.state.threshold = threshold
        self.state.has_fp16_weights = has_fp16_weights
        self.weight = Int8Params(self.weight.data, requires_grad=has_fp16_weights, has_fp16_weights=has_fp16_weights)
        self._register_load_state_dict_pre_hook(maybe_rearrange_weight)

    def _scales(self) -> Tensor | None:
        scales = getattr(self.weight, "SCB", None)
        return self.state.SCB if scales is None else scales

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scales = self._scales()
        if self.state.has_fp16_weights or scales is None:
            return
        destination[f"{prefix}SCB"] = scales if keep_vars else scales.detach()
        destination[f"{prefix}weight_format"] = torch.tensor(0, dtype=torch.uint8)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        key = f"{prefix}SCB"
        if key not in state_dict:
            return
        scales = self._scales()
        if scales is None:
            raise RuntimeError(
                "Loading a quantized checkpoint into non-quantized Linear8bitLt is not supported: "
                "move the layer to its device before load_state_dict"
            )
        scales.copy_(state_dict[key])
        if key in unexpected_keys:
            unexpected_keys.remove(key)

    def init_8bit_state(self) -> None:
        """Move codes and scales from the weight to the state."""
        codes = self.weight.CB
        self.state.CB = self.weight.data if codes is None else codes  # a loaded weight may have its scales only
        self.state.SCB = self.weight.SCB
        self.weight.CB = self.weight.SCB = None

    def to(self, *args: Any, **kwargs: Any) -> Linear8bitLt:
        """Move the layer and its matmul state."""
        result = super().to(*args, **kwargs)
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None:
            for name in ("CB", "SCB", "idx"):
                value = getattr(self.state, name)
                if value is not None:
                    setattr(self.state, name, value.to(device))
        return result

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., output_features] in x's dtype."""
        self.state.is_training = self.training
        if getattr(self.weight, "SCB", None) is not None and self.weight.dtype == torch.int8:
            self.init_8bit_state()
        if self.bias is not None and self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        out = matmul(x, self.weight, bias=self.bias, state=self.state)
        if not self.state.has_fp16_weights and self.state.CB is not None:
            self.weight.data = self.state.CB
        return out


class OutlierAwareLinear(nn.Linear):
    """Base of linears that compute outlier dimensions separately.

    A subclass defines `forward_with_outliers` and `quantize_weight`.

    Args:
        input_features, output_features, bias, device: as in `nn.Linear`.
    """

    def __init__(self, input_features: int, output_features: int, bias: bool = True, device: Any = None):
        super().__init__(input_features, output_features, bias, device)
        self.outlier_dim: Any = None
        self.is_quantized = False

    def forward_with_outliers(self, x: Tensor, outlier_idx: Tensor) -> Tensor:
        """Return the output, given the outlier dimensions."""
        raise NotImplementedError("a subclass of OutlierAwareLinear defines forward_with_outliers(x, outlier_idx)")

    def quantize_weight(self, w: Tensor, outlier_idx: Tensor) -> Tensor:
        """Return the quantized weight, given the outlier dimensions."""
        raise NotImplementedError("a subclass of OutlierAwareLinear defines quantize_weight(w, outlier_idx)")

    def forward(self, x: Tensor) -> Tensor:
        """Return the output; the first call reads the traced outliers and quantizes the weight."""
        if self.outlier_dim is None:
            tracer = OutlierTracer.get_instance()
            if not tracer.is_initialized():
                raise RuntimeError("no model is traced: call OutlierTracer.get_instance().initialize(model) first")
            self.outlier_dim = tracer.get_outliers(self.weight)
        if not self.is_quantized:
            self.weight.data.copy_(self.quantize_weight(self.weight, self.outlier_dim))
            self.is_quantized = True
        return self.forward_with_outliers(x, self.outlier_dim)
