"""The vision tower of a model in training: no graph where it is frozen, and features that were computed before.

`modeling.tower` has the fused forwards of its modules.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import BOUNDS, LONGEST
from ..utils.errors import ModelError
from ..utils.hardware import is_out_of_memory
from .architectures import non_text_modules, text_model
from .layer import causal_lm_of
from .tower import bind_tower, unbind_tower

FEATURES = "get_image_features"
ADD_DEEPSTACK = "_deepstack_process"  # method of Qwen3-VL's language model: adds features of images to hidden states
OFF = "set vision_cache: false"


def bind_vision(model: nn.Module) -> str:
    """Bind fused forwards to the model's towers (`modeling.tower`), and run frozen towers without a graph.

    Language models that add deepstack features then also take them for all tokens, see `_add_deepstack`.

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
    text = text_model(causal_lm)
    if hasattr(text, ADD_DEEPSTACK):
        setattr(text, ADD_DEEPSTACK, MethodType(_add_deepstack, text))
    segmented = [bind_tower(causal_lm.get_submodule(name)) for name in names]
    return "halfbyte: all images of a batch at once" if any(segmented) else ""


def unbind_vision(model: nn.Module) -> None:
    """Undo `bind_vision`; does nothing on a model that is not bound."""
    causal_lm = causal_lm_of(model)
    vars(getattr(causal_lm, "base_model", causal_lm)).pop(FEATURES, None)
    vars(text_model(causal_lm) or causal_lm).pop(ADD_DEEPSTACK, None)
    for name in non_text_modules(causal_lm):
        unbind_tower(causal_lm.get_submodule(name))


def _without_graph(backbone: type, modules: Sequence[nn.Module]) -> Callable[..., Any]:
    """Return a backbone's `get_image_features` that makes no graph if nothing of its tower and projector is trained.

    It drops the bounds of packed documents, which a tower would take for those of its images.

    Args:
        modules: tower and projector.
    """
    original = getattr(backbone, FEATURES)

    @functools.wraps(original)  # transformers' `generate` takes the names of the tower's inputs from its signature
    def features(self: Any, *args: Any, **kwargs: Any) -> Any:
        trained = any(parameter.requires_grad for module in modules for parameter in module.parameters())
        kwargs = {name: value for name, value in kwargs.items() if name not in (*BOUNDS, *LONGEST)}
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            return original(self, *args, **kwargs)

    return features


def _add_deepstack(self: Any, hidden: Tensor, is_image: Tensor | None, features: Tensor) -> Tensor:
    """Add features [N, H] to the hidden states [B, T, H] of image tokens, as the class does.

    Args:
        is_image: bool [B, T]; None: features are [B, T, H], 0 outside of images. No synchronization.
    """
    if is_image is None:
        return hidden + features.to(hidden.dtype)
    output: Tensor = getattr(type(self), ADD_DEEPSTACK)(self, hidden, is_image, features)
    return output


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
