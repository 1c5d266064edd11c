"""The trained policy between steps: sample answers from its current weights, and compute their log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..batch import CORRECTS, to_device
from ..config.schema import RunKeys
from ..data.image_processor import ImageProcessor
from ..data.images import IMAGES
from ..generation import Completion, Rollouts, Sampling
from ..generation.images import Columns
from ..memory.allocators import GraphMemory, free_stream_caches
from ..methods.base import CountingCollator
from ..methods.grpo import PolicyOptimization
from ..ops import IGNORE_INDEX
from ..plan.memory_plan import RolloutPlan
from ..utils.waiting import waiting
from .served import ServedRollouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPARED_TOKENS = 512  # tokens by which a server's weights are compared with the trained ones

Result = TypeVar("Result")
Row = dict[str, Any]


def as_row(prompt_ids: Sequence[int], answer_ids: Sequence[int], trained: bool = True) -> Row:
    """Return a row of a prompt and its answer; the answer has labels if it is trained."""
    labels = list(answer_ids) if trained else [IGNORE_INDEX] * len(answer_ids)
    return {"input_ids": [*prompt_ids, *answer_ids], "labels": [IGNORE_INDEX] * len(prompt_ids) + labels}


@dataclass(frozen=True)
class TrainedPolicy:
    """The policy that a run trains, for work between its steps.

    Attributes:
        autocast: returns the context of a training forward.
        collate: rows → micro-batch.
        graphs: the captured steps of the run, which are freed if other work runs out of memory.
    """

    config: RunKeys
    method: PolicyOptimization
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    collate: CountingCollator
    graphs: GraphMemory

    def between_steps(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the memory of a step. On out-of-memory, free the captured CUDA graphs and retry once."""
        with free_stream_caches(self.graphs, self.device):
            return self.graphs.retry_without_graphs(work)

    @torch.no_grad()
    def log_probs(self, rows: list[Row]) -> list[list[float]]:
        """Return the log-probabilities of each row's answer tokens, by the training forward."""
        batch_size = self.config.per_device_train_batch_size
        by_row: list[list[float]] = []
        for begin in range(0, len(rows), batch_size):
            batch_rows = rows[begin : begin + batch_size]
            batch = to_device(self.collate.collate(batch_rows), self.device)
            with self.autocast():
                log_probs, _ = self.method.log_probs(self.model, batch)
            lengths = [len(row["sampled"]) for row in batch_rows]
            by_row += [answer.tolist() for answer in log_probs[: sum(lengths)].cpu().split(lengths)]
        return by_row


class SampledAnswers(NamedTuple):
    """Answers to some prompts; the answers to one prompt are adjacent.

    Attributes:
        texts: the answers without special tokens.
        seconds: duration of sampling.
    """

    completions: list[Completion]
    texts: list[str]
    seconds: float


@dataclass
class AnswerSampler:
    """Samples answers from the policy's current weights.

    Attributes:
        engine: samples the tokens, in this process or on a server.
        stops: tokens that end an answer.
        plan: the planned memory of rollouts; None: the engine takes free memory.
        images: reads the images of prompts; None: prompts have none.
        is_verified: whether a server's weights were compared with the policy's.
    """

    policy: TrainedPolicy
    engine: Rollouts | ServedRollouts
    stops: list[int]
    plan: RolloutPlan | None = None
    images: ImageProcessor | None = None
    is_verified: bool = False

    @property
    def server(self) -> ServedRollouts | None:
        return self.engine if isinstance(self.engine, ServedRollouts) else None

    @waiting("sampling answers")
    def sample(self, prompts: Sequence[Row], n: int, keys: Sequence[int], generation: int) -> SampledAnswers:
        """Sample `n` answers to each prompt.

        Args:
            prompts: rows with `prompt_ids`, and with stored images if the run's rows have some.
            keys: a number for each prompt; seeds its answers, together with the number of the generation.
        """
        start = time.perf_counter()
        self.policy.model.eval()
        completions = self.policy.between_steps(partial(self._generate, prompts, n, keys, generation))
        seconds = time.perf_counter() - start
        if self.server is not None and not self.is_verified:
            repeated = [prompt["prompt_ids"] for prompt in prompts for _ in range(n)]
            self.is_verified = self._matches_server(self.server, repeated, completions)
        decode = self.policy.tokenizer.decode
        texts = [str(decode(completion.ids, skip_special_tokens=True)) for completion in completions]
        return SampledAnswers(completions, texts, seconds)

    def _generate(self, prompts: Sequence[Row], n: int, keys: Sequence[int], generation: int) -> list[Completion]:
        config = self.policy.config
        # a server reads no images
        images: dict[str, Any] = {} if self.images is None else {"images": [self._columns(row) for row in prompts]}
        seed = config.seed + (generation << 32)
        is_resident = False
        try:
            completions = self.engine.generate(
                [row["prompt_ids"] for row in prompts],
                n,
                max_new_tokens=config.max_completion_length,
                sampling=Sampling(config.temperature, config.top_k, config.top_p, seed=seed, min_p=config.min_p or 0.0),
                stops=self.stops,
                keys=keys,
                **images,
            )
            is_resident = self.plan is not None and self.plan.stays
            return completions
        finally:
            if not is_resident:  # a step, or the retry after out-of-memory, needs the memory
                self.engine.free()

    def _columns(self, row: Row) -> Columns | None:
        """Return the model's inputs for the images of a prompt, or None without images."""
        if not row[IMAGES] or self.images is None:
            return None
        return self.images.columns([row[IMAGES]], torch.tensor([row["prompt_ids"]]))

    def _matches_server(
        self, server: ServedRollouts, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
    ) -> bool:
        """Compare the server's log-probabilities of a few answers with the training forward's.

        Returns:
            Whether there were enough tokens to compare.

        Raises:
            TrainingError: the server has other weights.
        """
        rows: list[Row] = []
        for prompt, answer in zip(prompts, completions, strict=True):
            if sum(len(row["sampled"]) for row in rows) < COMPARED_TOKENS:
                untrained = {"advantage": 0.0, "items": 0.0, CORRECTS: False}
                rows.append(as_row(prompt, answer.ids) | untrained | {"sampled": answer.log_probs.tolist()})
        by_row = self.policy.between_steps(partial(self.policy.log_probs, rows))
        served = torch.tensor([log_prob for row in rows for log_prob in row["sampled"]])
        trained = torch.tensor([log_prob for row in by_row for log_prob in row])
        return server.check_same_model(served, trained)

    def close(self) -> None:
        """Free the engine's memory, or unload the adapter from the server."""
        self.engine.free()
        if self.server is not None:
            self.server.close()
