"""Losses of classification, embeddings and reranking, as in transformers and sentence-transformers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import Batch

MASKED = float("-inf")


def classification(logits: Tensor, target: Tensor, problem: str) -> Tensor:
    """Return the loss of each text, fp32 [N]: transformers' loss of its `problem_type`, not yet averaged over texts.

    Args:
        logits: fp32 [N, labels].
        target: fp32, ids of labels [N]; indicators [N, labels]; or numbers [N].
    """
    if problem == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1)
    if problem == "regression":
        return (logits.squeeze(-1) - target).square()
    return F.cross_entropy(logits, target.long(), reduction="none")


def in_batch_similarities(embeddings: Tensor, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
    """Return the scaled cosine similarities [R, N] of anchors and documents, and the index of each positive, int64 [R].

    Every document of the batch is a candidate; anchors, padding, and copies of an anchor's positive are masked
    (-inf). Rows of padding are copies of the first row.

    Args:
        embeddings: fp32 [N, H]; a row's first text is its anchor, the second its positive.
    """
    begins, normalized = batch["begins"], F.normalize(embeddings, dim=-1)
    positive, texts = begins + 1, torch.arange(len(embeddings), device=embeddings.device)
    is_anchor = torch.zeros_like(batch["real"], dtype=torch.bool).index_fill(0, begins, True)
    masked = is_anchor | (batch["real"] == 0)
    copies = batch["hash"] == batch["hash"][positive].unsqueeze(1)
    masked = masked | (copies & (texts != positive.unsqueeze(1)))
    similarities = scale * normalized[begins] @ normalized.mT
    return similarities.masked_fill(masked, MASKED), positive


def pair_similarities(embeddings: Tensor, batch: Batch) -> Tensor:
    """Return the cosine similarity of the two texts of each row, fp32 [R]."""
    first, second = embeddings[batch["begins"]], embeddings[batch["begins"] + 1]
    return F.cosine_similarity(first, second, dim=-1)


def cosent(similarities: Tensor, target: Tensor, real: Tensor) -> Tensor:
    """Return log(1 + Σ exp(s_i − s_j)) over all pairs of rows with target_i < target_j, 0-d (CoSENT).

    Args:
        similarities: scaled, fp32 [R].
    """
    ordered = (target.unsqueeze(1) < target) & (real.unsqueeze(1) * real > 0)
    differences = (similarities.unsqueeze(1) - similarities).masked_fill(~ordered, MASKED)
    return torch.cat([differences.new_zeros(1), differences.flatten()]).logsumexp(0)


def ranknet(scores: Tensor, target: Tensor, row: Tensor) -> Tensor:
    """Return the mean of log(1 + exp(s_j − s_i)) over the pairs with target_i > target_j of each query, summed over
    queries (RankNet, Burges et al. 2005).

    Args:
        scores, target: fp32 [N].
        row: int64 [N], the query of each document; -1: padding.
    """
    same = _same_query(row)
    pairs = same & (target.unsqueeze(1) > target)
    losses = torch.where(pairs, F.softplus(scores - scores.unsqueeze(1)), 0)
    pairs_of_query = same.float() @ pairs.sum(1).float()  # [N], by document
    return (losses.sum(1) / pairs_of_query.clamp(min=1)).sum()


def listnet(scores: Tensor, target: Tensor, row: Tensor) -> Tensor:
    """Return −Σ softmax(target) log softmax(scores) of each query, summed over queries (ListNet, Cao et al. 2007).

    Args: as of `ranknet`.
    """
    same = _same_query(row)
    in_list = same | torch.eye(len(row), dtype=torch.bool, device=row.device)  # padding is a list of one

    def log_share(values: Tensor) -> Tensor:
        return values - values.expand(len(values), -1).masked_fill(~in_list, MASKED).logsumexp(1)

    losses = -log_share(target).exp() * log_share(scores)
    return torch.where(row >= 0, losses, 0).sum()


def _same_query(row: Tensor) -> Tensor:
    """Return bool [N, N]: whether two documents belong to one query."""
    return (row.unsqueeze(1) == row) & (row >= 0)
