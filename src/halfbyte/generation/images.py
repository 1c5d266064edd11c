"""Prompts with images: their embeddings and positions, made by the model's own code, one prompt at a time.

The complete model's forward embeds text and images and calls its text model, where it is stopped. Tower and projector
run with the adapter of the prompt's row. halfbyte's decoder then reads the prompt and generates as for text.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modeling.architectures import text_model
from ..modeling.compute_dtype import compute_autocast, no_input_casts
from ..modeling.layer import causal_lm_of
from ..utils.errors import ModelError
from .adapters import adapter_layers, adapter_set

# The model's inputs for the images of one prompt, as its processor makes them.
Columns = Mapping[str, Tensor]
# Arguments of text models that decoders make themselves, or that change no hidden state.
READ = {
    "input_ids", "attention_mask", "position_ids", "inputs_embeds", "cache", "past_key_values", "use_cache",
    "return_dict", "cache_position", "visual_pos_masks", "deepstack_visual_embeds", "mm_token_type_ids",
    "token_type_ids", "output_attentions", "output_hidden_states", "labels",
}  # fmt: skip


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt of T tokens with images.

    Attributes:
        embeddings: of text and images [T, K], before the text model's own scale.
        positions: time, height and width of M-RoPE, int64 [3, T]; None: tokens are counted.
        shift: difference between the position of a later token and the number of tokens before it.
        image: number of the image that a token belongs to, int64 [T]; -1 for text.
        added: values that the first layers add to the hidden states of images' tokens (Qwen3-VL's deepstack), [n, K]
            each.
    """

    embeddings: Tensor
    positions: Tensor | None
    shift: int
    image: Tensor
    added: Sequence[Tensor]


class PlacedPrompt(NamedTuple):
    """A prompt with images among a decoder's tokens [B, T]: its row, and the index of its first token there."""

    row: int
    begin: int
    prompt: ImagePrompt

    @property
    def tokens(self) -> slice:
        return slice(self.begin, self.begin + len(self.prompt.image))


class _Stop(Exception):
    """Raised where the text model would begin."""


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt.

    Attributes:
        model: a model that takes images, or a PeftModel around one.
        adapter: name of the row's adapter; None for the base.
        columns: see `Columns`.
    """

    model: Any
    adapter: str | None
    columns: Columns

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> ImagePrompt:
        """Embed the prompt, tokens int64 [T] without padding.

        Raises:
            ModelError: the model's forward passes its text model something that halfbyte's decoder does not read.
        """
        causal = causal_lm_of(self.model)
        backbone, text = causal.base_model, text_model(causal)
        tokens = tokens.unsqueeze(0)
        columns = {name: value.to(tokens.device) for name, value in self.columns.items()}
        positions, shift = _positions(backbone, tokens, columns)
        inputs = columns if positions is None else {**columns, "position_ids": positions}
        received: dict[str, Any] = {}

        def stop(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            received.update(zip(inspect.signature(text.forward).parameters, arguments, strict=False))
            received.update(keywords)
            raise _Stop

        hook = text.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with self.computing(), contextlib.suppress(_Stop):
                backbone(input_ids=tokens, use_cache=False, **inputs)
        finally:
            hook.remove()
        unknown = [name for name, value in received.items() if value is not None and name not in READ]
        if unknown:
            raise ModelError(
                f"{type(backbone).__name__} passes its text model {min(unknown)}, which halfbyte's decoder does not"
                " read",
                "generate with transformers",
            )
        embeddings = received["inputs_embeds"][0]
        is_image = tokens[0] == causal.config.image_token_id
        begins = is_image & ~F.pad(is_image, (1, 0))[:-1]
        image = (begins.cumsum(0) - 1).where(is_image, -1)
        added = [values.to(embeddings) for values in received.get("deepstack_visual_embeds") or ()]
        return ImagePrompt(embeddings, None if positions is None else positions[:, 0], shift, image, added)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Run the model's forward with the row's adapter, in the dtype that halfbyte computes in."""
        model, layers = self.model, adapter_layers(self.model)
        with adapter_set(model, layers, self.adapter), no_input_casts(model), compute_autocast(model):
            yield


def embed_prompts(images: Mapping[int, PromptImages], tokens: Sequence[Tensor]) -> dict[int, ImagePrompt]:
    """Embed the prompts of rows that have images, rows with one prompt and adapter once.

    Args:
        images: row → its images.
        tokens: of each row, int64 [T].
    """
    embedded: dict[tuple[Any, ...], ImagePrompt] = {}
    prompts = {}
    for row, prompt in images.items():
        key = id(prompt.columns), prompt.adapter, tuple(tokens[row].tolist())
        if key not in embedded:
            embedded[key] = prompt.embed(tokens[row])
        prompts[row] = embedded[key]
    return prompts


def _positions(backbone: Any, tokens: Tensor, columns: Columns) -> tuple[Tensor | None, int]:
    """Return the M-RoPE positions [3, 1, T] and the shift of later tokens, by the model's own function."""
    if not hasattr(backbone, "get_rope_index"):
        return None, 0
    names = inspect.signature(backbone.get_rope_index).parameters
    positions, shifts = backbone.get_rope_index(tokens, **{key: columns[key] for key in columns if key in names})
    return positions, int(shifts)
