"""The training rows of a run that samples them: one generation after another.

A generation has `answers_per_generation` answers to the next prompts of the epoch's order. It is sampled from the
current weights when its first micro-batch is requested, and trained on for `steps_per_generation` micro-batches,
`num_iterations` times. Checkpoints contain it, with log-probabilities, rewards and advantages, so a run that resumes
within a generation trains on the same rows. The samples of the next generation depend only on the run's seed, the
weights and the generation's number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..reading import read_json
from ..runs.layout import COMPLETIONS_PER_GENERATION
from ..runs.layout import GENERATION_STATE as STATE
from ..runs.metrics import MetricsFile
from ..utils.errors import CheckpointError
from ..utils.files import write_json
from .distillation import DistillationRollouts
from .rollout_batch import RewardMonitor, RolloutBatch, mean_numbers
from .rollouts import ImportanceCorrection, PolicyRollouts
from .sampler import Row

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainerState

MAX_COMPLETIONS_BYTES = 64 * 2**20  # size of completions.jsonl above which nothing is added
RESTART = "resume from an earlier checkpoint, or start a new run in another output_dir"
STATE_KEYS = {"current", "since", "last", "answered", "outside", "corrects", "monotony"}


@dataclass
class Generation:
    """The generation that a run is training on.

    Attributes:
        number: number of this generation in the run, from 0.
        rows: the answers as training rows, in the order of training; see `PolicyOptimization`.
    """

    number: int
    rows: list[Row]


@dataclass
class RolloutLog:
    """Records generations: the answers in completions.jsonl, their numbers for metrics.jsonl, notices about rewards.

    Attributes:
        file: completions.jsonl.
        unrecorded: numbers of the generations since the last record.
        latest: numbers of the current generation.
    """

    file: MetricsFile
    monitor: RewardMonitor = field(default_factory=RewardMonitor)
    unrecorded: list[dict[str, float]] = field(default_factory=list)
    latest: dict[str, float] = field(default_factory=dict)

    def add(self, batch: RolloutBatch, rows: Sequence[Row], step: int) -> None:
        """Record a generation, whose first step is number `step`, with its training rows in the order of `batch`."""
        self.latest = batch.numbers
        self.unrecorded.append(batch.numbers)
        if self.file.path.exists() and self.file.path.stat().st_size > MAX_COMPLETIONS_BYTES:
            return
        scored = batch.scored
        for index, row in enumerate(rows[:COMPLETIONS_PER_GENERATION]):
            completion = batch.completions[index]
            line = {"kind": "completion", "step": step, "prompt": batch.prompts[index]["prompt"]}
            line |= {"completion": batch.texts[index], "tokens": len(completion.ids), "ended": completion.ended}
            line |= {"rewards": {name: rewards[index] for name, rewards in scored.rewards.items()}}
            line |= {"advantage": row["advantage"]} if "advantage" in row else {}
            line |= {name: column[index] for name, column in scored.extra.items() if name not in line}
            self.file.append(line)

    def take_numbers(self) -> dict[str, float]:
        """Return the mean numbers of the generations since the last record, or of the current generation."""
        numbers = mean_numbers(self.unrecorded) if self.unrecorded else self.latest
        self.unrecorded = []
        return numbers


@dataclass
class RolloutDataset:
    """The sampled rows of a run, for the training loop.

    Attributes:
        rollouts: samples, scores and converts answers.
        current: the generation that the run is training on.
    """

    rollouts: PolicyRollouts | DistillationRollouts
    log: RolloutLog
    current: Generation | None = None

    def __post_init__(self) -> None:
        setting = self.rollouts.config.importance_sampling_correction
        server = self.rollouts.sampler.server
        self.correction = ImportanceCorrection(setting, self.rollouts.policy.method, server)

    def micro_batches(
        self, epoch: int, skip: int, state: TrainerState, settle: Callable[[], None]
    ) -> Iterator[dict[str, Any]]:
        """Yield the micro-batches of an epoch after the first `skip`; each generation is sampled when it is reached.

        Args:
            settle: reads the numbers of the last step, called before a generation is sampled.
        """
        config = self.rollouts.config
        prompts = self.rollouts.prompts
        prompts_per_generation = config.answers_per_generation // config.group_size
        generations = len(prompts) // prompts_per_generation
        batches = config.micro_batches_per_generation
        batches_with_repeats = batches * config.num_iterations
        generator = torch.Generator().manual_seed(config.seed + epoch)
        order = torch.randperm(len(prompts), generator=generator).tolist()
        batch_size = config.per_device_train_batch_size
        for index in range(skip // batches_with_repeats, generations):
            number = epoch * generations + index
            if self.current is None or self.current.number != number:
                settle()
                indices = order[index * prompts_per_generation : (index + 1) * prompts_per_generation]
                self.current = self._generate(number, indices, state)
            rows = self.current.rows
            for batch in range(max(skip - index * batches_with_repeats, 0), batches_with_repeats):
                begin = batch % batches * batch_size
                yield self.rollouts.policy.collate(rows[begin : begin + batch_size])

    def _generate(self, number: int, indices: list[int], state: TrainerState) -> Generation:
        """Sample generation `number` to the prompts of these indices, and record it."""
        self.correction.update()
        batch = self.rollouts.generation(indices, number, _progress(state))
        self.log.monitor.add(batch)
        start = time.perf_counter()
        rows = self.rollouts.training_rows(batch, self.correction.corrects)
        batch.numbers["compare_seconds"] = time.perf_counter() - start
        self.log.add(batch, rows, state.global_step + 1)
        return Generation(number, self.rollouts.in_training_order(rows, number))

    def add_step(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        self.correction.add_step(sums, counts)

    def take_numbers(self) -> dict[str, float]:
        """Return the numbers of rollouts for the record of a step."""
        return self.log.take_numbers()

    def evaluate(self, held_out: Dataset, state: TrainerState) -> dict[str, float]:
        """Return the numbers of answers to the held-out prompts."""
        return self.rollouts.evaluate(held_out, _progress(state))

    def save(self, folder: Path) -> None:
        """Write the state that resuming needs into a checkpoint's folder."""
        plan = self.rollouts.sampler.plan  # a resumed run keeps it, because other matmuls round differently
        state = {
            "current": None if self.current is None else asdict(self.current),
            "since": self.log.unrecorded,
            "last": self.log.latest,
            "answered": None if plan is None else [plan.weights, plan.pages],
            "outside": self.correction.outside,
            "corrects": self.correction.corrects,
            "monotony": self.log.monitor.seen,
        }
        write_json(folder / STATE, state)

    def load(self, checkpoint: Path) -> None:
        """Load the generation of a checkpoint.

        Raises:
            CheckpointError: it has none.
        """
        state = read_generation(checkpoint)
        self.current = None if state["current"] is None else Generation(**state["current"])
        self.log.unrecorded = state["since"]
        self.log.latest = state["last"]
        self.log.monitor.seen = {name: (value, times) for name, (value, times) in state["monotony"].items()}
        self.correction.outside = state["outside"]
        self.correction.corrects = state["corrects"]


def read_generation(checkpoint: Path) -> dict[str, Any]:
    """Return the stored generation of a checkpoint.

    Raises:
        CheckpointError: it was not written by halfbyte.
    """
    state = read_json(checkpoint / STATE, CheckpointError, RESTART)
    if not isinstance(state, dict) or STATE_KEYS - state.keys():
        raise CheckpointError(f"{checkpoint / STATE} was not written by halfbyte", RESTART)
    return state


def rollout_plan_of(checkpoint: Path) -> tuple[str, int] | None:
    """Return how a checkpoint's rollouts read weights, and the bytes of their KV cache pages; None if not stored.

    Raises:
        CheckpointError: it was not written by halfbyte.
    """
    match read_generation(checkpoint)["answered"]:
        case None:
            return None
        case ["packed" | "unpacked" as weights, int() as pages]:
            return weights, pages
    raise CheckpointError(f"{checkpoint / STATE} was not written by halfbyte", RESTART)


def _progress(state: TrainerState) -> dict[str, Any]:
    """Return the state of the run for reward functions, by transformers' names."""
    return {name: getattr(state, name) for name in ("global_step", "max_steps", "num_train_epochs", "epoch")}
