"""Causal attention within documents, which may share a prompt, and its backward as sums of one order: equal runs give
equal bits.

p = exp(s − logsumexp) where a query sees a key, else 0, of scores s = scale·q·kᵀ; δ = Σ dout·out over a head;
ds = p·(dout·vᵀ − δ); dq = scale·ds·k, dk = scale·dsᵀ·q, dv = pᵀ·dout (Dao 2023, arXiv:2307.08691, algorithm 2).

Capped scores are c·tanh(scale·q·kᵀ/c), and ds gets their slope, 1 − tanh² (Gemma 2, arXiv:2408.00118, section 2). A
sink is one more score of a head, whose value is 0 (gpt-oss, arXiv:2508.10925, section 2.2): it is part of logsumexp,
which is all that the formulas above need of it, and dsink = −Σ exp(sink − logsumexp)·δ.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.notices import notice

SCRATCH = 1 << 29  # bytes of ds at a time; without its repeatable option cuDNN takes 2**28 for 4×2048 of 32 heads
Spans = tuple[Tensor, Tensor]  # int32 [N] each: where the document of a token begins, and where it ends


class Scores(NamedTuple):
    """How scores are made of q·k, and which of them are looked at.

    Attributes:
        scale: they are multiplied by.
        window: tokens of its document that a token sees, itself among them; None: all.
        softcap: they become softcap · tanh(score / softcap); None: they stay.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class Branches(NamedTuple):
    """N tokens of prompts that stand once before all of their answers: each of these is a document, and an answer sees
    its prompt, too.

    Attributes:
        documents, prompts: of each token, as of `attention_backward`.
        places: int64 [K], the tokens that each document sees, its prompt's before its own, one document's behind the
            other's; then any.
        bounds: int32 [documents + 1], where each begins among the tokens.
        key_bounds: int32 [documents + 1], where those that each sees begin in `places`.
        longest, longest_keys: at least as many as any document has, and sees.
    """

    documents: Spans
    prompts: Spans
    places: Tensor
    bounds: Tensor
    key_bounds: Tensor
    longest: int
    longest_keys: int


@functools.cache
def cudnn() -> Any:
    """NVIDIA's package nvidia-cudnn-frontend; None where it is not installed, or does not load."""
    if importlib.util.find_spec("cudnn") is None:
        return None
    try:
        import cudnn as package
    except (ImportError, OSError, RuntimeError) as error:
        notice("cudnn-package", f"nvidia-cudnn-frontend is installed and not used: {error}")
        return None
    return package


def spans(bounds: Tensor, tokens: int) -> Spans:
    """Where each token's document begins and ends, as row numbers; waits for nothing on the device.

    Args:
        bounds: int32 [documents + 1], where each document begins, then `tokens`; those of no tokens are passed over.
        tokens: N, of all documents.
    """
    index = torch.searchsorted(bounds, torch.arange(tokens, dtype=bounds.dtype, device=bounds.device), right=True)
    return bounds[index - 1], bounds[index]


def seen(
    documents: Spans, window: int | None = None, prompts: Spans | None = None, tokens: int | None = None
) -> Tensor:
    """Bool [M, N]: whether the token of a row sees that of a column; the rows are the last M of N tokens.

    Args:
        documents: where each row's document begins; the other half is not read.
        window: tokens of its document that a token sees, itself among them; None: all.
        prompts: where the prompt that each row sees before its document begins and ends; None: there is none.
        tokens: N; None: M.
    """
    first = documents[0]
    columns = torch.arange(len(first) if tokens is None else tokens, device=first.device)
    rows = columns[len(columns) - len(first) :]
    if window is not None:
        first = torch.maximum(first, rows - window + 1)
    found = (columns <= rows[:, None]) & (columns >= first[:, None])
    if prompts is None:
        return found
    begins, ends = prompts
    return found | ((columns >= begins[:, None]) & (columns < ends[:, None]))


def _scored(products: Tensor, scores: Scores) -> tuple[Tensor, Tensor | float]:
    """Scores of q·kᵀ, and their slope by scale·q·kᵀ."""
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
    """Attention in which a token sees itself, those before it in its document, and its prompt.

    Args:
        query: [M, Hq, D], of the last M of N tokens; key, value: [N, Hk, D], Hk dividing Hq, of one dtype, the last
            dimension contiguous.
        sinks: [Hq], of any float dtype: a score of each head that every token gives beside its keys'; None: there are
            none.
        documents, scores, prompts: as of `attention_backward`, of those M tokens.

    Returns:
        [M, Hq, D] of query's dtype, contiguous, and fp32 [Hq, M], the logarithm of each softmax's sum; computed in
        fp32.
    """
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1).float() for x in (query, key, value))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    found = _scored(q @ k.mT, scores)[0].masked_fill(~seen(documents, scores.window, prompts, len(key)), -torch.inf)
    total = found.logsumexp(-1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[:, None])
    out = (found - total.unsqueeze(-1)).exp() @ v
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
    """Gradients of attention in which a token sees itself, those before it in its document, and a prompt.

    Args:
        dout, query, out: [N, Hq, D] of one dtype, the last dimension contiguous.
        key, value: [N, Hk, D], likewise, Hk dividing Hq.
        logsumexp: fp32 [Hq, N], contiguous, of scores, and of sinks where there are any.
        documents: int32 [N] each: where the document of a token begins, and where the last document ends that sees it:
            its own, as `spans` gives them, or of a prompt's tokens that of its last answer, which stand behind it.
        scores: a window without `prompts` only.
        sinks: as of `attention`, where their gradient is asked for; None: it is not.
        prompts: int32 [N] each: where the prompt of a token's document begins and ends; of no tokens where it has none.

    Returns:
        Those of query, key and value, contiguous, and fp32 [Hq] of sinks or None.
    """
    group = query.shape[1] // key.shape[1]
    sees = seen(documents, scores.window, prompts)
    q, do, o = (x.transpose(0, 1).float() for x in (query, dout, out))
    k, v = (x.transpose(0, 1).float().repeat_interleave(group, 0) for x in (key, value))
    found, slope = _scored(q @ k.mT, scores)
    p = torch.where(sees, torch.exp(found - logsumexp.unsqueeze(-1)), 0.0)
    delta = (do * o).sum(-1)
    ds = p * slope * (do @ v.mT - delta.unsqueeze(-1))
    dq, dk, dv = scores.scale * (ds @ k), scores.scale * (ds.mT @ q), p.mT @ do
    dk, dv = (x.unflatten(0, (-1, group)).sum(1) for x in (dk, dv))
    dq, dk, dv = (x.transpose(0, 1).to(query.dtype).contiguous() for x in (dq, dk, dv))
    return dq, dk, dv, None if sinks is None else sinks_gradient(sinks, logsumexp, delta)


def sinks_gradient(sinks: Tensor, logsumexp: Tensor, delta: Tensor) -> Tensor:
    """fp32 [Hq].

    Args:
        delta: fp32 [Hq, N], Σ dout·out over a head.
    """
    return -((sinks.float()[:, None] - logsumexp).exp() * delta).sum(1)


def parts_of_rows(query: Tensor, key: Tensor, most: int = SCRATCH) -> tuple[int, int] | None:
    """Rows, and heads of keys, whose ds cuDNN's repeatable backward writes at a time, T × T of 16 bits a head, into
    `most` bytes; None where one head's does not fit.

    Args:
        query: [B, Hq, T, D]; key: [B, Hk, T, D].
    """
    rows, heads, length, _ = query.shape
    keys = key.shape[1]
    fitting = most // (2 * (heads // keys) * length * length)
    return (_divisor(rows, fitting // keys), _divisor(keys, fitting)) if fitting else None


def _divisor(number: int, most: int) -> int:
    return next(size for size in range(min(number, max(1, most)), 0, -1) if number % size == 0)


@op("cuda.cudnn_attention")
def rows_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where every row is one document.

    Args:
        dout, query, out: [B, Hq, T, D] of one dtype, the last dimension contiguous.
        key, value: [B, Hk, T, D], likewise.
        logsumexp: fp32 [B, Hq, T, 1], contiguous.
        scale: of the scores.

    Returns:
        Those of query, key and value.
    """
    rows, heads, length, _ = query.shape
    bounds = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (dout, query, key, value, out))
    log = logsumexp.view(rows, heads, length).transpose(0, 1).reshape(heads, -1)
    gradients = attention_backward(*flat, log, spans(bounds, rows * length), Scores(scale))[:3]
    dq, dk, dv = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in gradients)
    return dq, dk, dv
