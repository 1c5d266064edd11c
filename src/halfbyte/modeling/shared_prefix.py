"""Attention of answers that share a prompt, and the models that support it.

A batch of `data.shared_prefix` stores a prompt once, before its answers. Its layers get `Sharing` as a keyword argument
(`attention.with_shared_prefixes`), so transformers' own forwards support it too, on any device. In 16 bits on a GPU,
and in float32 on a CPU, attention is `autograd.attention.shared_prefix_attention`; otherwise two calls of SDPA: one for
all prompts, and one for all answers, each with the keys of its prompt.
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
from ..batch import BOUNDS, BRANCHES, KEY_POSITIONS, LONGEST
from ..config.schema import RunKeys
from ..ops.attention import Branches
from .config_facts import is_capped
from .families import family_of_config

SHARING_KEYWORDS = (BRANCHES, KEY_POSITIONS, *BOUNDS, *LONGEST)


def unshared_reason(config: RunKeys, model_config: Any) -> str:
    """Return why a run's answers do not share their prompts, or "".

    Args:
        model_config: transformers' config of the complete model.
    """
    text = model_config.get_text_config()
    family, window = family_of_config(text), getattr(text, "sliding_window", None)
    if family is None or not family.patched:
        return f"halfbyte does not know the layers of {text.model_type}"
    if family.own_layer:
        return "transformers' forward of the model's layers runs"
    if family.mixer is not None:
        return "some of the model's layers have a recurrent state"
    if text is not model_config:
        return "the model takes images"
    if not config.use_kernels:
        return "use_kernels: false leaves attention to transformers"
    if config.attn_implementation not in (None, "sdpa"):
        return f"attn_implementation is {config.attn_implementation}"
    if is_capped(text):
        return "the model caps its attention scores"
    if family.sinks:
        return "the model's heads have sinks"
    if getattr(text, "attention_dropout", None):
        return "attention_dropout is set"
    if window is not None and window < config.max_length:
        return f"the model's attention has a window of {window} tokens, below max_length"
    return ""


class Segments(NamedTuple):
    """A batch's prompts and answers as rows of two padded batches.

    Attributes:
        prompts: int64 [R, P], token indices of each prompt, padded on the right.
        answers: int64 [S, A], token indices of each answer, padded on the right.
        keys: int64 [S, K + A], token indices of its prompt (padded on the left), then of the answer.
        seen: bool [S, 1, A, K + A], attention mask.
        order: int64 [N], index of each token's result in the flattened results of `prompts`, then `answers`; 0 for
            padding.
    """

    prompts: Tensor
    answers: Tensor
    keys: Tensor
    seen: Tensor
    order: Tensor


class PrefixCache:
    """Keys and values of a batch, one entry per layer, which answers of a second forward attend to.

    Attributes:
        layers: detached keys and values of the first forward; the second removes them.
        is_filled: whether the first forward is complete. Its recomputation in backward then changes nothing here.
    """

    def __init__(self) -> None:
        self.layers: deque[tuple[Tensor, Tensor]] = deque()
        self.is_filled = False

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Save a layer's keys and values [N, H, D], or, in the second forward, prepend those of the first."""
        if not self.is_filled:
            self.layers.append((key.detach(), value.detach()))
        elif self.layers:
            keys, values = self.layers.popleft()
            return torch.cat([keys, key]), torch.cat([values, value])
        return key, value


@dataclass(frozen=True)
class Sharing:
    """Layout of shared prompts in a batch of N tokens; `cache` joins it to a second batch."""

    branches: Branches
    cache: PrefixCache | None = None

    @classmethod
    def of(cls, batch: Mapping[str, Any], cache: PrefixCache | None = None) -> Sharing:
        """Read the tensors of a batch of `data.shared_prefix`."""
        begins, lasts, openings, closings = batch[BRANCHES].unbind()
        bounds = (batch[name] for name in (KEY_POSITIONS, *BOUNDS, *LONGEST))
        return cls(Branches((begins, lasts), (openings, closings), *bounds), cache)

    @cached_property
    def segments(self) -> Segments:
        """Layout for `padded_attention`; synchronizes with the device."""
        bounds = self.branches.bounds
        documents, prompts = self.branches.documents, self.branches.prompts
        spans = [(begin, end) for begin, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False) if begin < end]
        firsts = torch.tensor([begin for begin, _ in spans], device=bounds.device)
        lasts = documents[1][firsts].tolist()
        openings, closings = (x[firsts].tolist() for x in prompts)
        answers = [(*span, *prompt) for span, *prompt in zip(spans, openings, closings, strict=True) if prompt[1]]
        preceding = int(documents[0][0])  # tokens of the preceding batch
        # a part that no answer follows is padding
        roots = [span for span, last, ends in zip(spans, lasts, closings, strict=True)
                 if not ends and last > preceding + span[1]]  # fmt: skip
        return _segments(roots, answers, len(documents[0]), preceding, bounds.device)


def _segments(
    roots: list[tuple[int, int]], answers: list[tuple[int, ...]], tokens: int, preceding: int, device: torch.device
) -> Segments:
    """Build segments from prompts (begin, end) and answers (begin, end, prompt's begin and end).

    Indices of answers' keys are offset by `preceding` tokens of a preceding batch.
    """
    longest = max((closing - opening for *_, opening, closing in answers), default=0)
    longest = max([longest, *(end - begin for begin, end in roots)])
    longest_answer = max((end - begin for begin, end, *_ in answers), default=0)
    prompts = torch.zeros(len(roots), longest, dtype=torch.int64)
    answer_rows = torch.zeros(len(answers), longest_answer, dtype=torch.int64)
    keys = torch.zeros(len(answers), longest + longest_answer, dtype=torch.int64)
    missing = torch.zeros(len(answers), 1, 1, 1, dtype=torch.int64)
    order = torch.zeros(tokens, dtype=torch.int64)
    for row, (begin, end) in enumerate(roots):
        prompts[row, : end - begin] = torch.arange(begin, end)
        order[begin:end] = row * longest + torch.arange(end - begin)
    for row, (begin, end, opening, closing) in enumerate(answers):
        answer_rows[row, : end - begin] = torch.arange(begin, end)
        keys[row, longest : longest + end - begin] = preceding + answer_rows[row, : end - begin]
        keys[row, longest - (closing - opening) : longest] = torch.arange(opening, closing)
        missing[row] = longest - (closing - opening)
        order[begin:end] = prompts.numel() + row * longest_answer + torch.arange(end - begin)
    columns = torch.arange(longest + longest_answer)
    seen = (columns >= missing) & (columns <= torch.arange(longest, longest + longest_answer).unsqueeze(-1))
    return Segments(*(tensor.to(device) for tensor in (prompts, answer_rows, keys, seen, order)))


def attend(query: Tensor, key: Tensor, value: Tensor, sharing: Sharing, scale: float | None) -> Tensor:
    """Causal attention of a batch [B, H, T, D] with shared prompts, N = B·T: [B, T, H, D]."""
    rows, _, length, _ = query.shape
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if sharing.cache is not None:
        key, value = sharing.cache.extend(key, value)
    if causal.supports_shared_prefix(query):
        out = causal.shared_prefix_attention(query, key, value, sharing.branches, scale)
    else:
        out = padded_attention(query, key, value, sharing.segments, scale)
    return out.unflatten(0, (rows, length))


def padded_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """Compute `attend` on flat tensors [N, H, D] by SDPA of two padded batches; keys may include a preceding batch."""

    def attended(queries: Tensor, keys: Tensor, seen: Tensor | None) -> Tensor:
        q, k, v = (
            x.index_select(0, indices.flatten()).unflatten(0, indices.shape).transpose(1, 2)
            for x, indices in ((query, queries), (key, keys), (value, keys))
        )
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)

    answers = attended(segments.answers, segments.keys, segments.seen)
    if not len(segments.prompts):
        return answers.index_select(0, segments.order)
    prompts = attended(segments.prompts, segments.prompts, None)
    return torch.cat([prompts, answers]).index_select(0, segments.order)
