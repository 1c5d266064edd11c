"""Fused forwards of a vision tower's modules, of any family, and attention over all images of a batch at once.

**Attention.** transformers' towers of Qwen's kind compute images of any size in one sequence, and attend within
`cu_seqlens`: the patches of an image, or of a window. Unless FlashAttention is installed, they call attention once for
each segment. `bind_tower` registers "halfbyte_flash_vision" in its place: transformers gives any implementation whose
name contains "flash" all segments in one call. On CUDA in 16 bits it is FlashAttention's variable lengths. Elsewhere
adjacent segments of equal length, as windows mostly have, are computed as one batch. On one core of an Intel Xeon that
takes as long as the loop, 0.97 to 1.10 times (16 uneven images, 6,956 patches, 16 heads of 80; whole, windows; fp32,
bf16).

**Modules.** A class is known by what its forward computes, not by its name: `_computes` runs the forward on a stand-in.
Norms, RoPE of towers of Qwen's and GLM's kind, and gated units run as one kernel each; patches are embedded by a GEMM
in place of a convolution. Rows of other than a multiple of 16 bytes, as the 3,420 values of Qwen2.5-VL's MLPs, have no
fast GEMM in cuBLAS: frozen weights are then padded with zeros for the call, which takes a fraction of what it saves.
Linears with LoRA are computed with their adapters (`projections.lora_forward`).
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..autograd import attention
from ..autograd.lora_mlp import glu
from ..autograd.norms import layer_norm, rms_norm
from ..autograd.rope import rope
from ..dispatch import on_compiler
from ..formats.base import is_quantized
from ..formats.codebooks import constant
from ..layers.plain import is_plain_lora, read_linear
from ..ops.rope import rotate
from .families import ACTIVATIONS
from .layer import epsilon
from .patch_record import existing_record, record
from .projections import lora_forward

VISION_NAME = "halfbyte_flash_vision"  # transformers gives `cu_seqlens` to implementations named "...flash..."
LONG = 1024  # fewest patches of an image for cuDNN's attention; it compiles each number and length of images, 0.5 s
FLASH_WIDTH = 8  # FlashAttention's heads are multiples of this many values
ALIGNED = 8  # values of 16 bits; cuBLAS' fast GEMMs read rows of multiples of them
PADDED = 64  # a padded row is a multiple of this many values

Forward = Callable[..., Any]
ACTIVATION_NAMES = {type(ACT2FN[name]): kind for name, kind in ACTIVATIONS.items()}


def bind_tower(tower: nn.Module) -> bool:
    """Bind fused forwards to a tower's modules; `unbind_tower` undoes it.

    Returns:
        Whether all images of a batch are attended to at once.
    """
    segmented, config = _is_segmented(tower), _config(tower)
    if segmented and config._attn_implementation == "sdpa":
        AttentionInterface.register(VISION_NAME, attend_segments)
        AttentionMaskInterface.register(VISION_NAME, sdpa_mask)
        record(tower).implementation = config._attn_implementation
        config._attn_implementation = VISION_NAME
    blocks = [block for blocks in tower.modules() if isinstance(blocks, nn.ModuleList) for block in blocks]
    in_blocks = {id(module) for block in blocks for module in block.modules()}
    for module in tower.modules():
        forward = _fused_forward(module, id(module) in in_blocks)
        if forward is not None and "forward" not in vars(module):
            module.forward = MethodType(forward, module)
    return segmented and config._attn_implementation == VISION_NAME


def unbind_tower(tower: nn.Module) -> None:
    """Undo `bind_tower`; does nothing on a tower that is not bound."""
    patched, config = existing_record(tower), _config(tower)
    if patched is not None and patched.implementation is not None:
        config._attn_implementation, patched.implementation = patched.implementation, None
    for module in tower.modules():
        if getattr(vars(module).get("forward"), "__func__", None) in FORWARDS:
            del module.forward


def _config(tower: nn.Module) -> Any:
    return getattr(tower, "config", None)


def _is_segmented(tower: nn.Module) -> bool:
    """Return whether a tower's attention takes `cu_seqlens`."""
    has_choice = hasattr(_config(tower), "_attn_implementation")
    return has_choice and any(_takes_segments(module) for module in tower.modules())


def _takes_segments(module: nn.Module) -> bool:
    is_attention = type(module).__name__.endswith("Attention")
    return is_attention and "cu_seqlens" in inspect.signature(type(module).forward).parameters


# --- modules ---------------------------------------------------------------------------------------------------------


def _fused_forward(module: Any, in_block: bool) -> Forward | None:
    """Return the fused forward of a module, or None.

    Args:
        in_block: whether the module is part of a tower's block, whose norms are read by linears only. Under autocast
            torch's LayerNorm returns fp32, which would matter elsewhere.
    """
    forward = type(module).forward
    if is_plain_lora(module):
        return lora_forward
    if type(module) is nn.LayerNorm:
        plain = in_block and module.weight is not None and module.bias is not None and len(module.normalized_shape) == 1
        return layer_norm_forward if plain else None
    if type(module) is nn.Conv3d:
        plain = module.groups == 1 and module.padding == (0,) * 3 and module.dilation == (1,) * 3
        return patch_forward if plain else None
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight"):
        return rms_norm_forward if _computes(forward, "norm") else None
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
        is_known = type(getattr(module, "act_fn", None)) in ACTIVATION_NAMES
        return gated_forward if is_known and _computes(forward, "unit") else None
    if _takes_segments(module) and all(hasattr(module, name) for name in ("qkv", "proj", "num_heads", "scaling")):
        rotation = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb_vision", None)
        equal = module.qkv.out_features == 3 * module.proj.in_features  # as many key heads as query heads
        return attention_forward if equal and rotation is not None and _computes(rotation, "rotation") else None
    return None


@constant
def _computes(function: Forward, kind: str) -> bool:
    """Return whether a class's forward, or a function, computes a norm, a gated unit or a rotation as known here."""
    generator = torch.Generator().manual_seed(0)
    x, y, cos, sin = (torch.randn(3, 2, 8, generator=generator, device="cpu") for _ in range(4))
    weight = torch.linspace(0.5, 2, 8, device="cpu")
    unit = {
        "gate_proj": lambda x: 2 * x, "up_proj": lambda x: x + 1, "act_fn": torch.sigmoid, "down_proj": lambda x: 3 * x,
    }  # fmt: skip
    try:
        if kind == "norm":
            stand_in = SimpleNamespace(weight=weight, variance_epsilon=0.1, eps=0.1)
            return torch.allclose(function(stand_in, x), F.rms_norm(x, (8,), weight, 0.1))
        if kind == "unit":
            return torch.allclose(function(SimpleNamespace(**unit), x), 3 * torch.sigmoid(2 * x) * (x + 1))
        cos, sin = cos[:, 0], sin[:, 0]
        results = function(x, y, cos, sin)
        pairs = zip(results, (x, y), strict=True)
        return all(torch.allclose(result[None], _rotated(value, cos, sin)) for result, value in pairs)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return False  # it needs more than the stand-in has


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [N, H, D] by cos and sin [N, D]; returns [1, N, H, D]."""
    return rotate(x.transpose(0, 1)[None], cos[None], sin[None]).transpose(1, 2)


def rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm."""
    return rms_norm(hidden_states, self.weight, epsilon(self))


def layer_norm_forward(self: Any, input: Tensor) -> Tensor:
    """LayerNorm, in 16 bits where its input is; torch's own in fp32."""
    if input.element_size() != 2:
        return type(self).forward(self, input)
    return layer_norm(input, self.weight, self.bias, self.eps)


def patch_forward(self: Any, input: Tensor) -> Tensor:
    """Embed patches [N, C, T, H, W] of the kernel's size by a GEMM; other inputs are convolved."""
    if input.shape[2:] != self.weight.shape[2:]:
        return type(self).forward(self, input)
    return F.linear(input.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def gated_forward(self: Any, x: Tensor) -> Tensor:
    """Run a gated unit: down(activation(gate(x)) · up(x))."""
    activation = ACTIVATION_NAMES[type(self.act_fn)]
    linears = self.gate_proj, self.up_proj, self.down_proj
    dense = _padded(linears, x)
    if dense is None:
        gate, up, down = linears
        return down(glu(gate(x), up(x), activation))
    gate, up = (F.linear(x, *weights) for weights in dense[:2])
    return F.linear(glu(gate, up, activation), *dense[2])


def _padded(linears: Sequence[Any], x: Tensor) -> list[tuple[Tensor, Tensor | None]] | None:
    """Return weights and biases of gate, up and down for a padded width, or None if the linears run as they are."""
    width = linears[0].weight.shape[0] if hasattr(linears[0], "weight") else 0
    frozen = not (torch.is_grad_enabled() and x.requires_grad)
    if width % ALIGNED == 0 or not _reads_aligned(x) or not frozen or on_compiler():
        return None
    padding, dense = -width % PADDED, []
    for linear, sides in zip(linears, ((0, 0, 0, padding), (0, 0, 0, padding), (0, padding)), strict=True):
        read = read_linear(linear)
        if isinstance(read, str) or read.adapters or read.weight.requires_grad:
            return None
        weight: Any = read.weight
        bias = read.bias
        values = weight.dequantize(x.dtype) if is_quantized(weight) else weight.to(x.dtype)
        bias = bias if bias is None or len(sides) == 2 else F.pad(bias, (0, padding))
        dense.append((F.pad(values, sides), bias))
    return dense


def _reads_aligned(x: Tensor) -> bool:
    """Return whether GEMMs with rows of other than a multiple of 16 bytes are slow: in 16 bits on CUDA."""
    return x.is_cuda and x.element_size() == 2


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    *args: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    max_seqlen: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attend within segments, with q and k rotated in place in the output of their common projection.

    Args:
        hidden_states: [N, hidden size].
        cu_seqlens: int32 [segments + 1], the first patch of each segment, and N.
        position_embeddings: cos and sin [N, D].
        max_seqlen: patches of the longest segment; None: computed.

    Returns:
        [N, hidden size].
    """
    if args or position_embeddings is None or self.config._attn_implementation != VISION_NAME:
        kwargs |= {} if max_seqlen is None else {"max_seqlen": max_seqlen}
        return type(self).forward(
            self, hidden_states, cu_seqlens, *args, position_embeddings=position_embeddings, **kwargs
        )
    q, k, v = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).permute(1, 2, 0, 3)[:, None]
    cos, sin = position_embeddings
    q, k = rope(q, k, cos[None], sin[None])
    attend = AttentionInterface()[VISION_NAME]
    dropout = self.attention_dropout if self.training else 0.0
    segments = {"cu_seq_lens_q": cu_seqlens, "max_length_q": max_seqlen}
    out, _ = attend(self, q, k, v, None, dropout=dropout, scaling=self.scaling, **segments)
    return self.proj(out.flatten(-2).flatten(0, 1))


FORWARDS = (rms_norm_forward, layer_norm_forward, patch_forward, gated_forward, attention_forward, lora_forward)


# --- attention -------------------------------------------------------------------------------------------------------


def attend_segments(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to all patches of the same segment, as transformers' AttentionInterface calls it.

    Args:
        query, key, value: [1, H, N, D], or [B, H, N, D] without segments, which is transformers' SDPA.
        cu_seq_lens_q: int32 [segments + 1], the first patch of each segment, and N.
        max_length_q: patches of the longest segment.

    Returns:
        [1, N, H, D], and None (no weights).
    """
    if cu_seq_lens_q is None or dropout:
        options = kwargs | {"dropout": dropout, "scaling": scaling}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    width = (attention.capability(q.device) or (0, 0)) >= attention.AMPERE and q.shape[-1] % FLASH_WIDTH == 0
    if q.dtype in attention.DTYPES and width and not on_compiler():
        longest = int(max_length_q or cu_seq_lens_q.diff().max())
        segments = len(cu_seq_lens_q) - 1
        if segments > 1 and longest >= LONG and segments * longest == len(q) and not torch.is_grad_enabled():
            q, k, v = (x.unflatten(0, (segments, longest)).transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(attention.BACKENDS, set_priority=True):
                out = F.scaled_dot_product_attention(q, k, v, scale=scaling)
            return out.transpose(1, 2).flatten(0, 1)[None], None
        out = attention.varlen_attention(q, k, v, cu_seq_lens_q.to(torch.int32), longest, scaling, causal=False)
    else:
        out = segment_attention(q, k, v, cu_seq_lens_q, scaling)
    return out[None], None


def segment_attention(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float | None) -> Tensor:
    """Attention within segments by torch's SDPA, which computes adjacent segments of equal length as one batch.

    Args:
        query, key, value: [N, H, D].
        bounds: int [segments + 1], the first token of each segment, and N.
        scale: factor of the scores; None: 1/√D.

    Returns:
        [N, H, D].
    """
    outputs, position = [], 0
    for length, segments in itertools.groupby(bounds.diff().tolist()):
        end = position + length * sum(1 for _ in segments)
        if length:
            q, k, v = (x[position:end].unflatten(0, (-1, length)).transpose(1, 2) for x in (query, key, value))
            outputs.append(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1))
        position = end
    return torch.cat(outputs)
