"""Attention of answers that share a prompt, and in which models prompts are shared.

A batch of `data.shared_prefix` has the prompt once before its answers. Its layers get `Sharing` as a keyword argument
(`attention.share`); so transformers' own forwards do it, too, on any device. In 16 bits on a GPU, and in float32 on a
CPU, attention is `autograd.attention.shared_prefix_attention`, else two calls of torch's: of all prompts, and of all
answers, each with the keys of its prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd import attention as causal
from ..config import RunConfig
from ..ops.attention import Branches
from .families import of_config

BRANCHES, KEY_PLACES = "branches", "key_places"  # in a batch, see `data.shared_prefix`
BOUNDS, LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
OWN = (BRANCHES, KEY_PLACES, *BOUNDS, *LONGEST)


def why_apart(config: RunConfig, model_config: Any) -> str:
    """Why a run's prompts are not shared by their answers; "" where they are.

    Args:
        model_config: transformers', of the whole model.
    """
    text = model_config.get_text_config()
    family, window = of_config(text), getattr(text, "sliding_window", None)
    if family is None or not family.patched:
        return f"halfbyte does not know the layers of {text.model_type}"
    if family.own_layer:
        return "transformers' forward of the model's layers runs"
    if family.mixer is not None:
        return "some of the model's layers have a state that goes through a row"
    if text is not model_config:
        return "the model takes images"
    if not config.use_kernels:
        return "use_kernels: false leaves attention to transformers"
    if config.attn_implementation not in (None, "sdpa"):
        return f"attn_implementation: {config.attn_implementation} is asked for"
    if getattr(text, "attn_logit_softcapping", None):
        return "the model caps its attention scores"
    if family.sinks:
        return "the model's heads have sinks"
    if getattr(text, "attention_dropout", None):
        return "attention_dropout is set"
    if window is not None and window < config.max_length:
        return f"the model's attention has a window of {window} tokens, below max_length"
    return ""


class Segments(NamedTuple):
    """Parts of a batch in rows of two padded batches.

    Attributes:
        prompts: int64 [R, P], the tokens of each prompt; then any.
        answers: int64 [S, A], those of each answer; then any.
        keys: int64 [S, K + A], those of its prompt behind any, then its own.
        seen: bool [S, 1, A, K + A], which keys a token sees.
        order: int64 [N], where the result of each token of the batch stands behind those of `prompts` and `answers`
            flattened; of what fills up, 0.
    """

    prompts: Tensor
    answers: Tensor
    keys: Tensor
    seen: Tensor
    order: Tensor


class Kept:
    """The keys and values of a batch, a layer's behind the other's, which answers of a forward behind it see.

    Attributes:
        layers: of the first forward, without their gradients; the second takes them out.
        gives: whether the first forward is over. What is computed again for its backward then changes nothing here.
    """

    def __init__(self) -> None:
        self.layers: deque[tuple[Tensor, Tensor]] = deque()
        self.gives = False

    def beside(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [N, H, D]: in the second forward behind those of the first."""
        if not self.gives:
            self.layers.append((key.detach(), value.detach()))
        elif self.layers:
            keys, values = self.layers.popleft()
            return torch.cat([keys, key]), torch.cat([values, value])
        return key, value


@dataclass(frozen=True)
class Sharing:
    """How the N tokens of a batch share prompts; `kept`: with a batch behind it, or before it."""

    branches: Branches
    kept: Kept | None = None

    @classmethod
    def of(cls, batch: Mapping[str, Any], kept: Kept | None = None) -> Sharing:
        """Of a batch's tensors, see `data.shared_prefix`."""
        begins, lasts, openings, closings = batch[BRANCHES].unbind()
        places = (batch[name] for name in (KEY_PLACES, *BOUNDS, *LONGEST))
        return cls(Branches((begins, lasts), (openings, closings), *places), kept)

    @cached_property
    def segments(self) -> Segments:
        """The same for `padded`; waits for the device."""
        bounds, documents, prompts = self.branches.bounds, self.branches.documents, self.branches.prompts
        parts = [(begin, end) for begin, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False) if begin < end]
        firsts = torch.tensor([begin for begin, _ in parts], device=bounds.device)
        lasts = documents[1][firsts].tolist()
        openings, closings = (each[firsts].tolist() for each in prompts)
        answers = [(*part, *prompt) for part, *prompt in zip(parts, openings, closings, strict=True) if prompt[1]]
        before = int(documents[0][0])  # tokens of a batch before this
        # what no answer follows fills up
        roots = [part for part, last, ends in zip(parts, lasts, closings, strict=True)
                 if not ends and last > before + part[1]]  # fmt: skip
        return _segments(roots, answers, len(documents[0]), before, bounds.device)


def _segments(
    roots: list[tuple[int, int]], answers: list[tuple[int, ...]], tokens: int, before: int, device: torch.device
) -> Segments:
    """Of prompts (begin, end) and answers (begin, end, and the prompt's), whose keys lie behind `before` others."""
    longest = max((closing - opening for *_, opening, closing in answers), default=0)
    longest = max([longest, *(end - begin for begin, end in roots)])
    most = max((end - begin for begin, end, *_ in answers), default=0)
    prompts, own = (
        torch.zeros(len(roots), longest, dtype=torch.int64),
        torch.zeros(len(answers), most, dtype=torch.int64),
    )
    keys = torch.zeros(len(answers), longest + most, dtype=torch.int64)
    lacking = torch.zeros(len(answers), 1, 1, 1, dtype=torch.int64)
    order = torch.zeros(tokens, dtype=torch.int64)
    for row, (begin, end) in enumerate(roots):
        prompts[row, : end - begin] = torch.arange(begin, end)
        order[begin:end] = row * longest + torch.arange(end - begin)
    for row, (begin, end, opening, closing) in enumerate(answers):
        own[row, : end - begin] = torch.arange(begin, end)
        keys[row, longest : longest + end - begin] = before + own[row, : end - begin]
        keys[row, longest - (closing - opening) : longest] = torch.arange(opening, closing)
        lacking[row] = longest - (closing - opening)
        order[begin:end] = prompts.numel() + row * most + torch.arange(end - begin)
    places = torch.arange(longest + most)
    seen = (places >= lacking) & (places <= torch.arange(longest, longest + most).unsqueeze(-1))
    return Segments(*(each.to(device) for each in (prompts, own, keys, seen, order)))


def attend(query: Tensor, key: Tensor, value: Tensor, sharing: Sharing, scale: float | None) -> Tensor:
    """Causal attention of a batch [B, H, T, D], N = B·T: [B, T, H, D]."""
    rows, _, length, _ = query.shape
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if sharing.kept is not None:
        key, value = sharing.kept.beside(key, value)
    if causal.supports_shared_prefix(query):
        out = causal.shared_prefix_attention(query, key, value, sharing.branches, scale)
    else:
        out = padded(query, key, value, sharing.segments, scale)
    return out.unflatten(0, (rows, length))


def padded(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """The same of flat [N, H, D], as torch's attention of two padded batches; keys may be of more tokens before."""

    def attended(queries: Tensor, keys: Tensor, seen: Tensor | None) -> Tensor:
        q, k, v = (
            x.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)
            for x, places in ((query, queries), (key, keys), (value, keys))
        )
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)

    answers = attended(segments.answers, segments.keys, segments.seen)
    if not len(segments.prompts):
        return answers.index_select(0, segments.order)
    prompts = attended(segments.prompts, segments.prompts, None)
    return torch.cat([prompts, answers]).index_select(0, segments.order)
