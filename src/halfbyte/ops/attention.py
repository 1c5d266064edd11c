"""Causal attention within packed documents, which may share a prompt. Its backward sums in one fixed order, so equal
runs give equal bits.

p = exp(s − logsumexp) where a query attends to a key, else 0, with scores s = scale·q·kᵀ; δ = Σ dout·out over a head;
ds = p·(dout·vᵀ − δ); dq = scale·ds·k, dk = scale·dsᵀ·q, dv = pᵀ·dout (Dao 2023, arXiv:2307.08691, algorithm 2).

Capped scores are c·tanh(scale·q·kᵀ/c); ds is multiplied by their slope, 1 − tanh² (Gemma 2, arXiv:2408.00118, section
2). A sink is an extra score per head with value 0 (gpt-oss, arXiv:2508.10925, section 2.2). It enters the formulas
above through logsumexp only, and dsink = −Σ exp(sink − logsumexp)·δ.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.notices import notice

SCRATCH = 1 << 29  # bytes of ds written at a time; non-deterministic cuDNN uses 2**28 for 4×2048 tokens of 32 heads
Spans = tuple[Tensor, Tensor]  # int32 [N] each: the first token of each token's document, and its end


class Scores(NamedTuple):
    """How scores are computed from q·k, and the attention window.

    Attributes:
        scale: factor of q·k.
        window: tokens of its document that a token attends to, itself included; None: all.
        softcap: scores become softcap · tanh(score / softcap); None: no cap.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class Branches(NamedTuple):
    """N tokens in which each prompt is stored once, before all its answers. Every prompt and answer is a document; an
    answer attends to its prompt and to itself.

    Attributes:
        documents, prompts: per token, as in `attention_backward`.
        attended: int64 [K], the tokens that each document attends to, its prompt's first, concatenated over documents;
            then padding.
        bounds: int32 [documents + 1], the first token of each document.
        key_bounds: int32 [documents + 1], the offset of each document in `attended`.
        longest, longest_keys: upper bounds of a document's queries and keys.
    """

    documents: Spans
    prompts: Spans
    attended: Tensor
    bounds: Tensor
    key_bounds: Tensor
    longest: int
    longest_keys: int


@functools.cache
def cudnn() -> Any:
    """The package nvidia-cudnn-frontend, or None where it is not installed or does not load."""
    if importlib.util.find_spec("cudnn") is None:
        return None
    try:
        import cudnn as package
    except (ImportError, OSError, RuntimeError) as error:
        notice("cudnn-package", f"nvidia-cudnn-frontend does not load and is not used: {error}")
        return None
    return package


def spans(bounds: Tensor, tokens: int) -> Spans:
    """First token and end of each token's document. Does not synchronise with the device.

    Args:
        bounds: int32 [documents + 1], the first token of each document, then `tokens`. Empty documents are skipped.
        tokens: N, of all documents.
    """
    index = torch.searchsorted(bounds, torch.arange(tokens, dtype=bounds.dtype, device=bounds.device), right=True)
    return bounds[index - 1], bounds[index]


def group_begins(positions: Tensor, group: int, shift: int) -> Tensor:
    """First token of each token's group, int64 [B, T], counted in its row; see `modeling.shifted_attention`.

    Groups of a document begin at its tokens 0, `group`, 2·`group`, …; with a shift at 0, `shift`, `shift` + `group`, …

    Args:
        positions: int64 [B, T], restarting with each document.
        shift: 0, or tokens of the first group.
    """
    within = ((positions + (group - shift) % group) // group * group - (group - shift) % group).clamp(min=0)
    return torch.arange(positions.shape[1], device=positions.device) - positions + within


def group_bounds(begins: Tensor, group: int, documents: int) -> Tensor:
    """Bounds of all groups for variable-length attention, int32 [groups + 1]. Does not synchronise with the device.

    Args:
        begins: [B, T] from `group_begins`.
        documents: upper bound on the number of documents in the batch.

    Returns:
        The first token of each group in the flattened batch, then B·T, which repeats as padding: empty groups.
    """
    rows, length = begins.shape
    tokens = rows * length
    groups = min(tokens, tokens // group + 2 * documents)
    index = torch.arange(tokens, device=begins.device)
    starts = (begins == index[:length]).flatten()
    number = torch.where(starts, starts.cumsum(0) - 1, groups)
    bounds = torch.full((groups + 1,), tokens, dtype=torch.int32, device=begins.device)
    return bounds.scatter_(0, number, torch.where(starts, index, tokens).to(torch.int32))


def attention_mask(
    documents: Spans, window: int | None = None, prompts: Spans | None = None, tokens: int | None = None
) -> Tensor:
    """Attention mask, bool [M, N], of the last M of N tokens.

    Args:
        documents: the first token of each row's document; the ends are not read.
        window: tokens of its document that a token attends to, itself included; None: all.
        prompts: first token and end of the prompt that each row attends to before its document; None: no prompt.
        tokens: N; None: M.
    """
    first = documents[0]
    columns = torch.arange(len(first) if tokens is None else tokens, device=first.device)
    rows = columns[len(columns) - len(first) :]
    if window is not None:
        first = torch.maximum(first, rows - window + 1)
    mask = (columns <= rows[:, None]) & (columns >= first[:, None])
    if prompts is None:
        return mask
    begins, ends = prompts
    return mask | ((columns >= begins[:, None]) & (columns < ends[:, None]))


def _scored(products: Tensor, scores: Scores) -> tuple[Tensor, Tensor | float]:
    """Scores of q·kᵀ, and their derivative with respect to scale·q·kᵀ."""
    if scores.softcap is None:
        return scores.scale * products, 1.0
    tanh = torch.tanh(products * (scores.scale / scores.softcap))
    return scores.softcap * tanh, 1 - tanh.square()


@op("triton.attention", "native.attention")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Spans,
    scores: Scores,
    sinks: Tensor | None = None,
    prompts: Spans | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in which a token attends to itself, the tokens before it in its document, and its prompt.

    Args:
        query: [M, Hq, D], of the last M of N tokens; key, value: [N, Hk, D], Hk dividing Hq. All have one dtype and a
            contiguous last dimension.
        sinks: [Hq] learned sinks in any float dtype, or None.
        documents, scores, prompts: as in `attention_backward`, for the M tokens.

    Returns:
        [M, Hq, D] in query's dtype, contiguous; fp32 logsumexp [Hq, M]. Both are computed in fp32.
    """
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1).float() for x in (query, key, value))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    masked_scores = _scored(q @ k.mT, scores)[0].masked_fill(
        ~attention_mask(documents, scores.window, prompts, len(key)), -torch.inf
    )
    total = masked_scores.logsumexp(-1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[:, None])
    out = (masked_scores - total.unsqueeze(-1)).exp() @ v
    return out.transpose(0, 1).to(query.dtype).contiguous(), total


@op("triton.attention", "native.attention")
def attention_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: Spans,
    scores: Scores,
    sinks: Tensor | None = None,
    prompts: Spans | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `attention`.

    Args:
        dout, query, out: [N, Hq, D] of one dtype with a contiguous last dimension.
        key, value: [N, Hk, D] in that dtype and layout, Hk dividing Hq.
        logsumexp: fp32 [Hq, N], contiguous, of the scores and the sinks if there are any.
        documents: int32 [N] each: the first token of each token's document, and the end of the last document that
            attends to the token. This is its own document (see `spans`); for a prompt's token it is the last answer,
            which follows the prompt.
        scores: a window is supported without `prompts` only.
        sinks: as in `attention`, to get their gradient, or None.
        prompts: int32 [N] each: first token and end of the prompt of a token's document; an empty range without one.

    Returns:
        Gradients of query, key and value, contiguous; fp32 [Hq] gradient of sinks, or None.
    """
    group = query.shape[1] // key.shape[1]
    sees = attention_mask(documents, scores.window, prompts)
    q, do, o = (x.transpose(0, 1).float() for x in (query, dout, out))
    k, v = (x.transpose(0, 1).float().repeat_interleave(group, 0) for x in (key, value))
    scored, slope = _scored(q @ k.mT, scores)
    p = torch.where(sees, torch.exp(scored - logsumexp.unsqueeze(-1)), 0.0)
    delta = (do * o).sum(-1)
    ds = p * slope * (do @ v.mT - delta.unsqueeze(-1))
    dq = scores.scale * (ds @ k)
    dk = scores.scale * (ds.mT @ q)
    dv = p.mT @ do
    dk, dv = (x.unflatten(0, (-1, group)).sum(1) for x in (dk, dv))
    dq, dk, dv = (x.transpose(0, 1).to(query.dtype).contiguous() for x in (dq, dk, dv))
    return dq, dk, dv, None if sinks is None else sinks_gradient(sinks, logsumexp, delta)


def sinks_gradient(sinks: Tensor, logsumexp: Tensor, delta: Tensor) -> Tensor:
    """Gradient of the sinks, fp32 [Hq].

    Args:
        delta: fp32 [Hq, N], Σ dout·out over a head.
    """
    return -((sinks.float()[:, None] - logsumexp).exp() * delta).sum(1)


def parts_of_rows(query: Tensor, key: Tensor, max_bytes: int = SCRATCH) -> tuple[int, int] | None:
    """Rows and key heads whose ds fits in `max_bytes`, or None where one head's does not fit. cuDNN's deterministic
    backward writes ds, T × T 16-bit numbers a head.

    Args:
        query: [B, Hq, T, D]; key: [B, Hk, T, D].
    """
    rows, heads, length, _ = query.shape
    keys = key.shape[1]
    fitting = max_bytes // (2 * (heads // keys) * length * length)
    return (_divisor(rows, fitting // keys), _divisor(keys, fitting)) if fitting else None


def _divisor(number: int, limit: int) -> int:
    return next(size for size in range(min(number, max(1, limit)), 0, -1) if number % size == 0)


@op("cuda.cudnn_attention")
def rows_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention where every row is one document.

    Args:
        dout, query, out: [B, Hq, T, D] of one dtype with a contiguous last dimension.
        key, value: [B, Hk, T, D] in that dtype and layout.
        logsumexp: fp32 [B, Hq, T, 1], contiguous.
        scale: factor of q·k.

    Returns:
        Gradients of query, key and value.
    """
    rows, heads, length, _ = query.shape
    bounds = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (dout, query, key, value, out))
    log = logsumexp.view(rows, heads, length).transpose(0, 1).reshape(heads, -1)
    gradients = attention_backward(*flat, log, spans(bounds, rows * length), Scores(scale))[:3]
    dq, dk, dv = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in gradients)
    return dq, dk, dv
