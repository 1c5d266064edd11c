"""Numbers of evaluations that are no means over batches: F1, correlations, nDCG and recall."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CUTOFF = 10  # documents of a ranking that nDCG and recall count
QUERIES_AT_ONCE = 256
RELEVANT = 0.5  # smallest score of a relevant document


def macro_f1(predicted: Tensor, actual: Tensor) -> float:
    """Return the mean F1 of the labels that occur, as scikit-learn's macro average.

    Args:
        predicted, actual: bool [n, labels], whether a row has each label.
    """
    both, either = (predicted & actual).sum(0).double(), predicted.sum(0).double() + actual.sum(0).double()
    occurring = either > 0
    return float((2 * both[occurring] / either[occurring]).mean()) if bool(occurring.any()) else 0.0


def correlations(predicted: Tensor, actual: Tensor) -> dict[str, float]:
    """Return the correlations of Pearson and Spearman; empty if one of the sides is constant.

    Args:
        predicted, actual: [n].
    """
    pearson = _pearson(predicted, actual)
    if pearson is None:
        return {}
    return {"pearson": pearson, "spearman": _pearson(_ranks(predicted), _ranks(actual)) or 0.0}


def _pearson(first: Tensor, second: Tensor) -> float | None:
    x, y = (values.double() - values.double().mean() for values in (first, second))
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale else None


def _ranks(values: Tensor) -> Tensor:
    """Return ranks, equal values their mean rank."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0)
    return ((ends - counts + ends - 1).double() / 2)[inverse]


def retrieval(
    queries: Tensor, query_hash: Tensor, documents: Tensor, document_hash: Tensor, positives: Tensor
) -> dict[str, float]:
    """Return nDCG and recall of the search for each query's positives among all documents.

    Equal documents count once; a query that occurs several times has several positives.

    Args:
        queries: [Q, H], normalized; documents: [D, H], normalized.
        query_hash, document_hash: int64 [Q], [D], equal for equal texts.
        positives: int64 [Q], the hash of each query's positive.
    """
    names, index = document_hash.unique(return_inverse=True)
    first = torch.full((len(names),), len(documents)).scatter_reduce(0, index, torch.arange(len(documents)), "amin")
    corpus = documents[first]
    relevant: dict[int, set[int]] = {}
    for query, positive in zip(query_hash.tolist(), torch.searchsorted(names, positives).tolist(), strict=True):
        relevant.setdefault(query, set()).add(positive)
    rows = {query: row for row, query in reversed(list(enumerate(query_hash.tolist())))}
    ranked = []
    for batch in torch.tensor(sorted(rows.values())).split(QUERIES_AT_ONCE):
        top = (queries[batch] @ corpus.mT).topk(min(CUTOFF, len(corpus))).indices.tolist()
        for row, documents_of_row in zip(batch.tolist(), top, strict=True):
            positive = relevant[int(query_hash[row])]
            ranked.append(([float(document in positive) for document in documents_of_row], [1.0] * len(positive)))
    return _ranking_numbers(ranked)


def reranking(scores: Tensor, target: Tensor, sizes: list[int]) -> dict[str, float]:
    """Return nDCG and recall of each query's own documents in the order of their scores; empty without a relevant one.

    Args:
        scores, target: [N], query after query.
        sizes: documents of each query.
    """
    ranked = []
    for query_scores, gains in zip(scores.split(sizes), target.double().split(sizes), strict=True):
        if float(gains.max()) > 0:
            ordered = gains[query_scores.argsort(descending=True, stable=True)]
            ranked.append((ordered.tolist(), gains.tolist()))
    return _ranking_numbers(ranked) if ranked else {}


def _ranking_numbers(ranked: list[tuple[list[float], list[float]]]) -> dict[str, float]:
    """Return the means over queries.

    Args:
        ranked: for each query the gains of its documents in order, and the gains of all its documents.
    """
    numbers = [dict(_of_query(ordered, gains)) for ordered, gains in ranked]
    return {name: sum(query[name] for query in numbers) / len(numbers) for name in numbers[0]}


def _of_query(ordered: list[float], gains: list[float]) -> Iterator[tuple[str, float]]:
    ideal = sorted(gains, reverse=True)
    yield f"ndcg_at_{CUTOFF}", _dcg(ordered) / _dcg(ideal)
    threshold = RELEVANT if max(gains) >= RELEVANT else max(gains)
    relevant = sum(gain >= threshold for gain in gains)
    for cutoff in (1, CUTOFF):
        yield f"recall_at_{cutoff}", sum(gain >= threshold for gain in ordered[:cutoff]) / relevant


def _dcg(gains: list[float]) -> float:
    """Return the discounted sum of gains: Σ gain / log₂(rank + 1)."""
    discounts = torch.log2(torch.arange(2, min(len(gains), CUTOFF) + 2, dtype=torch.float64))
    return float((torch.tensor(gains[:CUTOFF], dtype=torch.float64) / discounts).sum())
