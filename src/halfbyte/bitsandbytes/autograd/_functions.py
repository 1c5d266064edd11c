"""`matmul` and `matmul_4bit` over halfbyte's linears, with the state object of bitsandbytes."""

from __future__ import annotations

import dataclasses
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from ...autograd.int8 import int8_linear
from ...autograd.linear import quantized_linear
from ...formats import int8 as int8_ops
from ..quant_state import QuantState, StoredWeight


class GlobalOutlierPooler:
    """Outlier columns shared by all layers of one width; a singleton."""

    _instance: GlobalOutlierPooler | None = None

    def __init__(self) -> None:
        raise RuntimeError("call GlobalOutlierPooler.get_instance()")

    def initialize(self) -> None:
        """Forget all columns."""
        self.outliers: set[int] = set()
        self.model_dim: int | None = None

    @classmethod
    def get_instance(cls) -> GlobalOutlierPooler:
        """Return the only instance."""
        if cls._instance is None:
            cls._instance = cls.__new__(cls)
            cls._instance.initialize()
        return cls._instance

    def add_outliers(self, outlier_idx: Tensor, feature_dim: int) -> None:
        """Add columns of a layer; layers with another `feature_dim` than the first layer are ignored."""
        self.model_dim = self.model_dim or feature_dim
        if feature_dim == self.model_dim:
            self.outliers.update(outlier_idx.tolist())

    def get_current_outlier_idx(self) -> Tensor:
        """Return the columns, int64."""
        return torch.tensor(sorted(self.outliers), dtype=torch.int64)


@dataclasses.dataclass
class MatmulLtState:
    """State of an int8 weight: codes `CB` int8 [N, K], scales `SCB` fp32 [N], and the outlier columns `idx`."""

    force_no_igemmlt: bool = False
    CB: Tensor | None = None
    SB: Tensor | None = None
    SCB: Tensor | None = None
    SBt: Tensor | None = None
    CBt: Tensor | None = None
    subB: Tensor | None = None
    outlier_pool: GlobalOutlierPooler | None = None
    idx: Tensor | None = None
    # Class attributes, not fields, as in bitsandbytes: `==` and repr do not read them.
    has_accumulated_gradients = False
    threshold = 0.0
    is_training = True
    has_fp16_weights = True
    use_pool = False

    def reset_grads(self) -> None:
        """Forget the weight's codes and scales."""
        self.CB = self.SB = self.SCB = self.SBt = self.CBt = None


class _Int8TrainedWeight(torch.autograd.Function):
    """x·Wᵀ + b with a float W that is quantized in the forward; W's gradient is not quantized."""

    @staticmethod
    def forward(ctx, input, weight, bias, threshold):
        codes, absmax = int8_ops.quantize_rows_int8(weight.detach().contiguous(), None, 0.0)
        ctx.save_for_backward(input, codes, absmax)
        with torch.no_grad():
            return int8_linear(input, StoredWeight.int8(codes, absmax, input.dtype), bias, threshold).clone()

    @staticmethod
    def backward(ctx, grad):
        input, codes, absmax = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = grad @ int8_ops.dequantize_rows_int8(codes, absmax, grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = flat.t() @ input.reshape(-1, input.shape[-1])
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0)
        return grad_input, grad_weight, grad_bias, None


class _ColumnsFirst(torch.autograd.Function):
    """x·W + b for a packed weight stored as [K, N]; values are dequantized again in the backward."""

    @staticmethod
    def forward(ctx, input, weight, bias):
        ctx.weight = weight
        return F.linear(input, weight.dequantize(input.dtype).t(), bias)

    @staticmethod
    def backward(ctx, grad):
        grad_input = grad @ ctx.weight.dequantize(grad.dtype).t() if ctx.needs_input_grad[0] else None
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return grad_input, None, grad_bias


def matmul(
    A: Tensor,
    B: Tensor,
    out: Tensor | None = None,
    state: MatmulLtState | None = None,
    threshold: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply A [..., K] by an int8 weight [N, K] (LLM.int8(), arXiv:2208.07339).

    In training on a CPU the weight is dequantized and A is not quantized, as in bitsandbytes.

    Args:
        A: fp32, fp16 or bf16.
        B: the weight, float if `state.has_fp16_weights`; otherwise `state.CB` and `state.SCB` are read.
        out: receives the result, or None.
        state: the weight's state; default: an empty one.
        threshold: overrides the state's if positive: columns of A that reach it are not quantized.
        bias: [N] or None.

    Returns:
        [..., N] in A's dtype.

    Raises:
        ValueError: B is int8 and the state has no codes or no scales.
    """
    state = state or MatmulLtState()
    if threshold > 0:
        state.threshold = threshold
    if state.has_fp16_weights or state.CB is None or state.SCB is None:
        if B.dtype == torch.int8:
            raise ValueError(
                "B is int8 and the state lacks codes or scales: set state.CB and SCB, and no has_fp16_weights"
            )
        result = _Int8TrainedWeight.apply(A, B, bias, state.threshold)
    else:
        weight = StoredWeight.int8(state.CB, state.SCB, A.dtype)
        if A.device.type == "cpu" and state.is_training:
            result = quantized_linear(A, weight, bias)
        else:
            if state.threshold and A.device.type != "cpu" and A.numel() and not torch.compiler.is_compiling():
                state.idx = int8_ops.outlier_columns(A.detach().reshape(-1, A.shape[-1]), state.threshold)[0]
            result = int8_linear(A, weight, bias, state.threshold)
    return result if out is None else out.copy_(result)


def matmul_4bit(
    A: Tensor,
    B: Tensor,
    quant_state: QuantState | None,
    out: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply A [..., K] by a packed 4-bit weight [N, K].

    A few rows run on kernels that read the packed codes. With a gradient the weight is dequantized in the forward and
    again in the backward.

    Args:
        A: fp32, fp16 or bf16.
        B: packed codes as `quantize_4bit` returns them, or their transpose.
        quant_state: their state. The shape [K, N] is deprecated.
        out: receives the result, or None.
        bias: [N] or None.

    Returns:
        [..., N] in A's dtype, or in autocast's.

    Raises:
        ValueError: no state, or A does not have the weight's width.
    """
    if quant_state is None:
        raise ValueError("matmul_4bit needs quant_state: move the layer to its device first, which quantizes it")
    rows, columns = quant_state.shape
    weight = StoredWeight.packed(B, quant_state)
    if A.shape[-1] == columns:
        result = quantized_linear(A, weight, bias)
    elif A.shape[-1] == rows:
        warnings.warn(
            "the state describes a weight [in_features, out_features], which is deprecated and slower. "
            "Re-quantize from the weight [out_features, in_features]",
            DeprecationWarning,
            stacklevel=2,
        )
        result = _ColumnsFirst.apply(A, weight, bias)
    else:
        raise ValueError(f"A has {A.shape[-1]} columns and the weight's shape is {[rows, columns]}: check the state")
    return result if out is None else out.copy_(result)
