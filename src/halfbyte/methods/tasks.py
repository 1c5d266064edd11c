"""Classification of texts and of words, embeddings, and reranking.

Classifiers and rerankers train a head `score`, which is saved with the adapter and merged with it: plain transformers
loads the merged model as sequence or token classification. Embeddings have no head; their folders are also
sentence-transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..reading.model_config import CONFIG, read_config
from ..reading.tensors import ADAPTER, ADAPTER_AGAIN, read_header
from ..utils.errors import CheckpointError, ConfigError, DataError
from ..utils.text import brief
from .base import LOSS, Batch, Collate, Method, Metric, Numbers

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from ..config.schema import RunKeys
    from ..data.prepare import Prepare, PreparedData

NDCG = Metric("ndcg_at_10", "nDCG@10", ".3f")
RECALLS = (Metric("recall_at_1", "recall@1", ".3f"), Metric("recall_at_10", "recall@10", ".3f"))
CORRELATIONS = (Metric("spearman", "Spearman", ".3f"), Metric("pearson", "Pearson", ".3f"))
LOSS_ONLY = Numbers()
F1 = Metric("f1", "macro F1", ".3f")


def _check_saved_head(folder: Path, labels: list[str] | None) -> None:
    """Check that the adapter to continue has the labels of the run's rows, in the same order.

    Raises:
        CheckpointError: it has others.
    """
    head = read_header(folder / ADAPTER, ADAPTER_AGAIN).get("base_model.model.score.weight")
    outputs = 1 if labels is None else len(labels)
    fix = "name the labels in its order in `labels`, or remove adapter_path"
    if head is not None and head["shape"][0] != outputs:
        raise CheckpointError(f"adapter_path: {folder} has {head['shape'][0]} labels, and the run {outputs}", fix)
    if labels is None or not (folder / CONFIG).is_file():
        return
    saved = read_config(folder).get("id2label")
    if isinstance(saved, dict) and list(saved.values()) != labels:
        wrong = f"adapter_path: {folder} has the labels {brief(list(saved.values()))}, and the run {brief(labels)}"
        raise CheckpointError(wrong, fix)


@dataclass(frozen=True)
class Task(Method):
    """The common part of all tasks: rows of texts with targets.

    Attributes:
        numbers: of the run; the first one is summed over rows that `over` counts.
    """

    numbers: Numbers = LOSS_ONLY

    rows = "labelled"

    def of(self, config: RunKeys) -> Self:
        if not config.use_peft:
            raise ConfigError(
                f"use_peft: false with method: {config.method}: the trained head is saved with an adapter",
                "set use_peft: true",
            )
        return self.configured(config)

    def configured(self, config: RunKeys) -> Self:
        """Return this method with its own keys."""
        raise NotImplementedError

    def preparer(self, config: RunKeys, tokenizer: PreTrainedTokenizerBase) -> Prepare:
        from ..data.prepare_tasks import preparer_of_tasks

        return preparer_of_tasks(config, tokenizer)

    def documents(self, config: RunKeys, data: PreparedData) -> PreparedData:
        from ..data.tables import packed

        splits = [rows for rows in (data.train, data.eval) if rows is not None]
        texts = max(count for rows in splits for (count,) in rows["texts"])

        def packed_rows(rows: Any) -> Any:
            return None if rows is None else packed(rows, texts * config.max_length)

        if config.packing:
            data = replace(data, train=packed_rows(data.train), eval=packed_rows(data.eval))
        return replace(data, answers=texts, together=texts)

    def check_training(self, config: RunKeys, data: PreparedData) -> None:
        from ..data.label_ids import check_contrast

        report = data.report["train"]
        if config.adapter_path:
            _check_saved_head(Path(config.adapter_path), report.get("label_names"))
        if "labels" in report:
            words = config.method == "token_classification"
            check_contrast(report["labels"], report["documents"], "words" if words else config.problem_type)

    def blank(self, batch: Batch) -> dict[str, Any]:
        fills = {"real": 0, "real_rows": 0, "answer": -1, "row": -1}
        columns = {name: batch[name].new_full(batch[name].shape, fill) for name, fill in fills.items() if name in batch}
        return {**batch, **columns}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the model's outputs of a batch; here the head's at the batch's positions `at`, fp32 [M, labels]."""
        from .answers import score

        return score(model, batch, "at")

    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return self.sums_of(batch, self.outputs(model, batch))

    def sums_of(self, batch: Batch, outputs: Tensor) -> dict[str, Tensor]:
        """Return the sums of a batch from its `outputs`."""
        raise NotImplementedError


@dataclass(frozen=True)
class SequenceClassification(Task):
    """Cross-entropy of a text's label, of each of several labels, or the squared error of a number, at the last token.

    Attributes:
        problem: transformers' `problem_type`.
    """

    problem: str = "single_label_classification"

    scores = "SEQ_CLS"

    def configured(self, config: RunKeys) -> Self:
        loss, accuracy = replace(LOSS, over="texts"), Metric("accuracy", "accuracy", ".3f", over="texts")
        trained = (loss,) if config.problem_type == "regression" else (loss, accuracy)
        further = CORRELATIONS if config.problem_type == "regression" else (F1,)
        return replace(
            self,
            problem=config.problem_type,
            numbers=Numbers(trained, (*trained, *further)),
        )

    def collator(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        from ..data.collate_tasks import task_collator

        several = self.problem == "multi_label_classification"
        return task_collator(config, tokenizer, device, per_text=len(config.labels or ()) if several else 1)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"texts": int(batch["real"].sum())}

    def real(self, batch: Batch) -> Tensor:
        """Return fp32 [N], 0 for padding."""
        return batch["real"]

    def sums_of(self, batch: Batch, outputs: Tensor) -> dict[str, Tensor]:
        from .task_losses import classification

        target, real = batch["target"], self.real(batch)
        loss = (classification(outputs, target, self.problem) * real).sum()
        if self.problem == "regression":
            return {"loss": loss}
        if self.problem == "multi_label_classification":
            right = ((outputs.detach() > 0) == (target > 0)).all(-1)
        else:
            right = outputs.detach().argmax(-1) == target.long()
        return {"loss": loss, "accuracy": (right * real).sum()}

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, real = self.outputs(model, batch), self.real(batch) > 0
        return {**self.sums_of(batch, logits), "logits": logits[real], "target": batch["target"][real]}

    def over_all_rows(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        import torch.nn.functional as F

        from .task_metrics import correlations, macro_f1

        logits, target = outputs["logits"], outputs["target"]
        if self.problem == "regression":
            return correlations(logits.squeeze(-1), target)
        if self.problem == "multi_label_classification":
            return {"f1": macro_f1(logits > 0, target > 0)}
        predicted, actual = (F.one_hot(ids, logits.shape[-1]).bool() for ids in (logits.argmax(-1), target.long()))
        return {"f1": macro_f1(predicted, actual)}


@dataclass(frozen=True)
class TokenClassification(SequenceClassification):
    """Cross-entropy of the label of each word, at its first token."""

    scores = "TOKEN_CLS"

    def configured(self, config: RunKeys) -> Self:
        trained = replace(LOSS, over="words"), Metric("accuracy", "accuracy", ".3f", over="words")
        return replace(self, numbers=Numbers(trained, (*trained, F1)))

    def collator(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        from ..data.collate_tasks import task_collator

        return task_collator(config, tokenizer, device, per_text=0)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"words": int((batch["answer"] >= 0).sum())}

    def real(self, batch: Batch) -> Tensor:
        return (batch["answer"] >= 0).float()


@dataclass(frozen=True)
class Embedding(Task):
    """Losses of cosine similarities between the embeddings of texts.

    `multiple_negatives_ranking` is the cross-entropy of an anchor's positive among all other documents of the batch
    (InfoNCE, arXiv:1807.03748; with in-batch negatives arXiv:1705.00652), `cosent` and `cosine_similarity` compare the
    similarities of pairs with their scores.

    Attributes:
        loss_type, scale: keys of the run.
        normalize: whether embeddings are normalized.
    """

    loss_type: str = "multiple_negatives_ranking"
    scale: float = 20.0
    normalize: bool = True

    scores = "FEATURE_EXTRACTION"

    def configured(self, config: RunKeys) -> Self:
        trained: tuple[Metric, ...] = (replace(LOSS, over="queries"),)
        further: tuple[Metric, ...] = CORRELATIONS
        if config.loss_type == "multiple_negatives_ranking":
            trained = (*trained, Metric("accuracy", "accuracy in the batch", ".3f", over="queries"))
            further = (NDCG, *RECALLS)
        return replace(
            self,
            loss_type=str(config.loss_type),
            scale=config.similarity_scale,
            normalize=config.normalize_embeddings,
            numbers=Numbers(trained, (*trained, *further)),
        )

    def check_training(self, config: RunKeys, data: PreparedData) -> None:
        super().check_training(config, data)
        ranks_pairs = config.loss_type == "cosent"
        scores = {score for row in data.train["target"] for score in row}
        if ranks_pairs and len(scores) < 2 and data.stream is None:
            raise DataError("all training rows have the same score: there is no contrast to learn", "add others")
        rows = min(config.per_device_train_batch_size, data.report["train"]["documents"])
        texts = min(count for counts in data.train["texts"] for count in counts)
        alone = ranks_pairs or (config.loss_type == "multiple_negatives_ranking" and texts < 3)
        if rows == 1 and alone and not config.packing:
            fix = "raise per_device_train_batch_size"
            raise DataError(
                "per_device_train_batch_size: 1 with rows without negatives: a batch has nothing to contrast its row"
                " with",
                fix if ranks_pairs else f"{fix} (other rows are negatives), or give negatives in every row",
            )

    def collator(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        from ..data.collate_tasks import task_collator

        return task_collator(config, tokenizer, device, per_text=None, grouped=True)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"queries": int(batch["real_rows"].sum())}

    def blank(self, batch: Batch) -> dict[str, Any]:  # its documents stay, since a softmax over none is NaN
        return {**batch, "real_rows": batch["real_rows"].new_zeros(batch["real_rows"].shape)}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        from .answers import pooled

        return pooled(model, batch)

    def sums_of(self, batch: Batch, outputs: Tensor) -> dict[str, Tensor]:
        import torch.nn.functional as F

        from .task_losses import cosent, in_batch_similarities, pair_similarities

        real = batch["real_rows"]
        if self.loss_type == "multiple_negatives_ranking":
            similarities, positive = in_batch_similarities(outputs, batch, self.scale)
            loss = F.cross_entropy(similarities, positive, reduction="none")
            right = similarities.detach().argmax(-1) == positive
            return {"loss": (loss * real).sum(), "accuracy": (right * real).sum()}
        similarities = pair_similarities(outputs, batch)
        if self.loss_type == "cosent":  # a loss of the batch, weighted by its rows
            return {"loss": cosent(self.scale * similarities, batch["target"], real) * real.sum()}
        return {"loss": ((similarities - batch["target"]).square() * real).sum()}

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        import torch.nn.functional as F

        from .task_losses import pair_similarities

        embeddings, real = self.outputs(model, batch), batch["real_rows"] > 0
        sums = self.sums_of(batch, embeddings)
        if self.loss_type != "multiple_negatives_ranking":
            return {**sums, "similarity": pair_similarities(embeddings, batch)[real], "target": batch["target"][real]}
        embeddings = F.normalize(embeddings, dim=-1)
        begins = batch["begins"][real]
        hashes = batch["hash"]
        documents = (batch["real"] > 0) & real[batch["row"].clamp(min=0)]  # a blank batch has texts, but no real rows
        documents[begins] = False
        return {
            **sums,
            "queries": embeddings[begins],
            "query_hash": hashes[begins],
            "positive_hash": hashes[begins + 1],
            "documents": embeddings[documents],
            "document_hash": hashes[documents],
        }

    def over_all_rows(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        from .task_metrics import correlations, retrieval

        if "similarity" in outputs:
            return correlations(outputs["similarity"], outputs["target"])
        names = ("queries", "query_hash", "documents", "document_hash", "positive_hash")
        return retrieval(*(outputs[name] for name in names))


@dataclass(frozen=True)
class Reranker(Task):
    """Losses of the score of a query with a document, at the last token of the two.

    `binary_cross_entropy` takes each document by itself, `ranknet` pairs of a query's documents, `listnet` all of them.

    Attributes:
        loss_type: key of the run.
    """

    loss_type: str = "binary_cross_entropy"

    scores = "SEQ_CLS"

    def configured(self, config: RunKeys) -> Self:
        over = "documents" if config.loss_type == "binary_cross_entropy" else "queries"
        trained = (replace(LOSS, over=over),)
        return replace(self, loss_type=str(config.loss_type), numbers=Numbers(trained, (*trained, NDCG, *RECALLS)))

    def collator(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        from ..data.collate_tasks import task_collator

        return task_collator(config, tokenizer, device, grouped=True)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"documents": int(batch["real"].sum()), "queries": int(batch["real_rows"].sum())}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().outputs(model, batch).squeeze(-1)

    def sums_of(self, batch: Batch, outputs: Tensor) -> dict[str, Tensor]:
        import torch.nn.functional as F

        from .task_losses import listnet, ranknet

        target = batch["target"]
        if self.loss_type == "binary_cross_entropy":
            loss = F.binary_cross_entropy_with_logits(outputs, target, reduction="none")
            return {"loss": (loss * batch["real"]).sum()}
        ranking = ranknet if self.loss_type == "ranknet" else listnet
        return {"loss": ranking(outputs, target, batch["row"])}

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        scores, row = self.outputs(model, batch), batch["row"]
        real = row >= 0
        sizes = row[real].unique(return_counts=True)[1]
        return {**self.sums_of(batch, scores), "scores": scores[real], "target": batch["target"][real], "sizes": sizes}

    def over_all_rows(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        from .task_metrics import reranking

        return reranking(outputs["scores"], outputs["target"], outputs["sizes"].tolist())
