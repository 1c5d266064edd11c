"""The forward of a model that reads images in two parts: everything up to its language model, and the language model.

The first part embeds tokens, runs vision tower and projector, and puts the features of images in the place of their
tokens. It reads sizes of images as numbers and synchronizes with the device, and its shapes follow the images. If
nothing in it is trained, it needs no gradient and can run before a training step. The shapes of the second part are
those of the tokens, so one CUDA graph replays it for any number of images.

The model's own forward is the first part: it runs until it calls its language model, whose arguments are recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import BOUNDS, COLUMNS, INPUT_IDS, LONGEST, POSITION_IDS, ROPE_POSITIONS, Batch, language_columns
from ..utils.errors import ModelError
from .architectures import non_text_modules, text_model
from .head import expected_head, verified_head
from .layer import causal_lm_of

DEEPSTACK, IMAGE_TOKENS = "deepstack_visual_embeds", "visual_pos_masks"  # arguments of Qwen3-VL's language model
IMAGES_EAGER = "steps on images run without CUDA graphs"  # in notices
# Model types whose steps with graphs equalled eager ones on a GPU (tests/train/test_image_graphs.py).
CONFIRMED = {"qwen2_5_vl", "qwen3_5", "mistral3", "gemma3"}
READ_BEFORE = (POSITION_IDS, ROPE_POSITIONS, *BOUNDS, *LONGEST)  # columns that only the model's forward reads


class _ReachedError(Exception):
    """Ends a forward at its language model."""


class LanguageInputs:
    """Replaces the images of a batch by the arguments of the model's language model, computed without a gradient.

    Args:
        model: a causal LM of transformers that reads images, plain or inside a `peft.PeftModel`, without an
            `unsplit_reason`. `modeling.vision` is bound to it.

    Call with a batch on the model's device and the function of a batch that runs the model's forward once. It returns
    the batch without the columns of images, and with `batch.language_columns`, which `head.last_hidden_state` reads.

    Raises:
        ModelError: the forward does not call its language model with embeddings, or its head needs full logits.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.language_model: Any = text_model(causal_lm_of(model))
        # of batches with images; others get the same arguments, so that they need no graphs of their own
        self.position_axes = 0  # axes of M-RoPE
        self.deepstack = 0  # number of layers that add features of images

    def __call__(self, batch: Batch, forward: Callable[[Batch], object]) -> dict[str, Any]:
        head = verified_head(self.model, {INPUT_IDS: batch[INPUT_IDS]})  # the first time, this runs a forward itself
        if isinstance(head, str):
            raise ModelError(f"the forward cannot be split: {head}", "please report the model")
        recorded: list[dict[str, Any]] = []
        with torch.no_grad(), self._recording(recorded), contextlib.suppress(_ReachedError):
            forward(batch)
        if not recorded or recorded[0].get("inputs_embeds") is None:
            raise ModelError(f"{type(self.language_model).__name__} gets no embeddings", "please report the model")
        columns = {name: value for name, value in batch.items() if not _is_read_before(name, value)}
        return columns | language_columns(self._uniform(recorded[0]))

    @contextlib.contextmanager
    def _recording(self, recorded: list[dict[str, Any]]) -> Iterator[None]:
        """Add the arguments of the language model to `recorded` in place of running it."""
        attributes = vars(self.language_model)
        bound = attributes.get("forward")

        def record(*args: Any, **kwargs: Any) -> None:
            if not args:
                recorded.append(kwargs)
            raise _ReachedError

        attributes["forward"] = record
        try:
            yield
        finally:
            del attributes["forward"]
            if bound is not None:
                attributes["forward"] = bound

    def _uniform(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return arguments with tensors of all tokens, equally many for batches with and without images."""
        embeddings, positions = arguments["inputs_embeds"], arguments.get("position_ids")
        rows, length, _ = embeddings.shape
        if positions is not None and positions.dim() == 3:
            self.position_axes = len(positions)
        elif positions is None and self.position_axes:  # as the language model would make them
            positions = torch.arange(length, device=embeddings.device).expand(self.position_axes, rows, length)
            arguments = arguments | {"position_ids": positions}
        if DEEPSTACK not in arguments:
            return arguments
        features = arguments[DEEPSTACK] or ()
        self.deepstack = max(self.deepstack, len(features))
        dense = [torch.zeros_like(embeddings) for _ in range(self.deepstack)]
        for tokens, feature in zip(dense, features, strict=False):
            tokens[arguments[IMAGE_TOKENS]] = feature.to(tokens.dtype)
        return arguments | {DEEPSTACK: dense or None, IMAGE_TOKENS: None}


def unsplit_reason(model: nn.Module) -> str | None:
    """Return why the forward of a model that reads images cannot be split at its language model, or None.

    Args:
        model: with its adapter, also on the meta device.
    """
    causal_lm: Any = causal_lm_of(model)
    if getattr(causal_lm.config.get_text_config(), "cross_attention_layers", None):
        return "the text reads images by cross-attention"
    if isinstance(reason := expected_head(model), str):
        return reason
    before = {name: causal_lm.get_submodule(name) for name in non_text_modules(causal_lm)}
    before["its embedding"] = causal_lm.get_input_embeddings()
    for name, module in before.items():
        if any(parameter.requires_grad for parameter in module.parameters()):
            return f"{name} is trained"
    return None


def _is_read_before(name: str, value: Any) -> bool:
    """Return whether only the forward up to the language model reads a column: images have undeclared ones."""
    is_number = not isinstance(value, Tensor) or value.dim() == 0
    return name in READ_BEFORE or (name not in COLUMNS and not is_number)
