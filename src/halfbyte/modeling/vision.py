"""The vision tower of a model in training: attention over all images of a batch at once, no graph where it is frozen.

transformers' towers of Qwen's kind compute images of any size in one sequence, and attend within `cu_seqlens`: the
patches of an image, or of a window. Unless FlashAttention is installed, they call attention once for each segment.
`bind_vision` registers "halfbyte_flash_vision" in its place: transformers gives any implementation whose name contains
"flash" all segments in one call. On CUDA in 16 bits it is FlashAttention's variable lengths. Elsewhere adjacent
segments of equal length, as windows mostly have, are computed as one batch. On one core of an Intel Xeon that takes as
long as the loop, 0.97 to 1.10 times (16 uneven images, 6,956 patches, 16 heads of 80; whole, windows; fp32, bf16).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..autograd import attention
from ..dispatch import on_compiler
from ..utils.errors import ModelError
from ..utils.hardware import is_out_of_memory
from .architectures import non_text_modules
from .layer import causal_lm_of
from .patch_record import existing_record, record

VISION_NAME = "halfbyte_flash_vision"  # transformers gives `cu_seqlens` to implementations named "...flash..."
FLASH_WIDTH = 8  # FlashAttention's heads are multiples of this many values
FEATURES = "get_image_features"
OFF = "set vision_cache: false"


def bind_vision(model: nn.Module) -> str:
    """Bind attention over all images at once to the model's towers, and run frozen towers without a graph.

    Returns:
        Description of the attention; "" if nothing was bound. `unbind_vision` undoes it.
    """
    causal_lm = causal_lm_of(model)
    backbone, names = getattr(causal_lm, "base_model", None), non_text_modules(causal_lm)
    if not names or not hasattr(backbone, FEATURES):
        return ""
    if FEATURES not in vars(backbone):
        modules = [causal_lm.get_submodule(name) for name in names]
        setattr(backbone, FEATURES, MethodType(_without_graph(type(backbone), modules), backbone))
    bound = ""
    for tower in _segmented_towers(causal_lm, names):
        if tower.config._attn_implementation == "sdpa":
            AttentionInterface.register(VISION_NAME, attend_segments)
            AttentionMaskInterface.register(VISION_NAME, sdpa_mask)
            record(tower).implementation = tower.config._attn_implementation
            tower.config._attn_implementation = VISION_NAME
        if tower.config._attn_implementation == VISION_NAME:
            bound = "halfbyte: all images of a batch at once"
    return bound


def unbind_vision(model: nn.Module) -> None:
    """Undo `bind_vision`; does nothing on a model that is not bound."""
    causal_lm = causal_lm_of(model)
    vars(getattr(causal_lm, "base_model", causal_lm)).pop(FEATURES, None)
    for tower in _segmented_towers(causal_lm, non_text_modules(causal_lm)):
        patched = existing_record(tower)
        if patched is not None and patched.implementation is not None:
            tower.config._attn_implementation, patched.implementation = patched.implementation, None


def _segmented_towers(causal_lm: Any, names: list[str]) -> Iterator[Any]:
    """Yield the towers whose attention takes `cu_seqlens`."""
    for name in names:
        tower = causal_lm.get_submodule(name)
        if hasattr(getattr(tower, "config", None), "_attn_implementation") and any(
            _takes_segments(module) for module in tower.modules()
        ):
            yield tower


def _takes_segments(module: nn.Module) -> bool:
    is_attention = type(module).__name__.endswith("Attention")
    return is_attention and "cu_seqlens" in inspect.signature(module.forward).parameters


def _without_graph(backbone: type, modules: Sequence[nn.Module]) -> Callable[..., Any]:
    """Return a backbone's `get_image_features` that makes no graph if nothing of its tower and projector is trained.

    Args:
        modules: tower and projector.
    """
    original = getattr(backbone, FEATURES)

    @functools.wraps(original)  # transformers' `generate` takes the names of the tower's inputs from its signature
    def features(self: Any, *args: Any, **kwargs: Any) -> Any:
        trained = any(parameter.requires_grad for module in modules for parameter in module.parameters())
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            return original(self, *args, **kwargs)

    return features


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


# --- features that were computed before ------------------------------------------------------------------------------


@dataclass(frozen=True)
class VisionOutput:
    """Structure of a backbone's `get_image_features` output: its tensors and its class.

    Attributes:
        output_class: transformers' class of the output.
        is_list: whether `pooler_output` is a list of tensors [T, H], one per image, instead of one [images, T, H].
        deepstack: number of tensors in `deepstack_features`, which the first decoder layers add; 0: there are none.
    """

    output_class: Any
    is_list: bool
    deepstack: int = 0

    def joined(self, output: Any) -> Tensor:
        """Return the features [T, H·(1 + deepstack)] of the only image of an output."""
        deepstack = [feature[0] for feature in getattr(output, "deepstack_features", None) or ()]
        return torch.cat([output.pooler_output[0], *deepstack], -1)

    def split(self, features: Tensor) -> Any:
        """Return the output for features [N, H·(1 + deepstack)] of any number of images."""
        pooled, *deepstack = features.chunk(1 + self.deepstack, -1)
        output = self.output_class(pooler_output=[pooled] if self.is_list else pooled[None])
        if deepstack:
            output.deepstack_features = [[feature] for feature in deepstack]
        return output


class _ReachedError(Exception):
    """Ends the forward of `image_outputs`."""


@contextlib.contextmanager
def _replaced(backbone: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Bind another `get_image_features` inside."""
    bound = vars(backbone).get(FEATURES)
    setattr(backbone, FEATURES, MethodType(function, backbone))
    try:
        yield
    finally:
        delattr(backbone, FEATURES)
        if bound is not None:
            setattr(backbone, FEATURES, bound)


def image_outputs(model: nn.Module, columns: Mapping[str, Tensor]) -> tuple[VisionOutput, Tensor]:
    """Run the vision tower and the projector on the columns of one image, as the model's forward would.

    Returns:
        The layout of the output, and the features [T, W].

    Raises:
        ModelError: the forward of the model does not call `get_image_features`, or gets something else from it.
    """
    backbone: Any = causal_lm_of(model).base_model
    outputs: list[Any] = []

    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs.append(getattr(type(self), FEATURES)(self, *args, **kwargs))
        raise _ReachedError

    ids = torch.zeros(1, 1, dtype=torch.int64, device=next(iter(columns.values())).device)
    try:
        with _replaced(backbone, compute), contextlib.suppress(_ReachedError):
            backbone(input_ids=ids, use_cache=False, **columns)
    except Exception as error:  # of the model's own code, which may read all of its inputs before the tower
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{type(backbone).__name__} does not give features of one image: {error}", OFF) from error
    pooled = getattr(outputs[0], "pooler_output", None) if outputs else None
    if pooled is None or len(pooled) != 1 or pooled[0].dim() != 2:
        raise ModelError(f"{type(backbone).__name__} has no features of one image", OFF)
    deepstack = len(getattr(outputs[0], "deepstack_features", None) or ())
    layout = VisionOutput(type(outputs[0]), not isinstance(pooled, Tensor), deepstack)
    return layout, layout.joined(outputs[0])


@contextlib.contextmanager
def reading_features(model: nn.Module, layout: VisionOutput) -> Iterator[None]:
    """Have a model read features in place of `pixel_values` inside.

    Args:
        layout: from `image_outputs`.
    """

    def features(self: Any, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        return layout.split(pixel_values)

    with _replaced(causal_lm_of(model).base_model, features):
        yield


def release_tower(model: nn.Module) -> None:
    """Replace the vision tower and the projector of a model that reads features by empty modules."""
    causal_lm = causal_lm_of(model)
    for name in non_text_modules(causal_lm):
        causal_lm.set_submodule(name, nn.Module())
