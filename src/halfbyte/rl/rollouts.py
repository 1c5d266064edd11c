"""Rollouts of policy optimization: sample answers to prompts, score them, and turn them into training rows.

A generation has `answers_per_generation` answers to the next prompts of the epoch's order. It is sampled from the
current weights when its first micro-batch is requested, and trained on for `steps_per_generation` micro-batches,
`num_iterations` times. Checkpoints contain it, with log-probabilities, rewards and advantages, so a run that resumes
within a generation trains on the same rows. The samples of the next generation depend only on the run's seed, the
weights and the generation's number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..batch import BONUS, CORRECTS, to_device
from ..config import RunConfig
from ..data.shared_prefix import GIVEN
from ..generation import Completion, Sampling
from ..methods.answers import as_reference
from ..methods.grpo import WEIGHT, PolicyOptimization
from ..ops import IGNORE_INDEX
from ..plan.memory_plan import RolloutPlan
from ..reading import read_json
from ..rewards.score import Rewards
from ..runs.layout import COMPLETIONS_PER_GENERATION
from ..runs.layout import GENERATION_STATE as STATE
from ..runs.metrics import MetricsFile
from ..train.sampler import CountingCollator
from ..train.stepper import Stepper, free_stream_caches
from ..utils.errors import CheckpointError
from ..utils.files import write_json
from ..utils.notices import notice
from ..utils.waiting import waiting
from .rollout_batch import RewardMonitor, RolloutBatch, mean_numbers, pass_rates, rollout_numbers
from .served import MIN_TOKENS, OTHER_WEIGHTS_SHARE, ServedRollouts, engine_of

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from ..train.callbacks import Callbacks

MAX_ROUNDS = 10  # of dynamic sampling, as in DAPO's code
MAX_COMPLETIONS_BYTES = 64 * 2**20  # size of completions.jsonl above which nothing is added
COMPARED_TOKENS = 512  # tokens by which a server's weights are compared with the trained ones
EVALUATION = 2**30  # generation number that seeds the samples of evaluations
MISMATCH_SHARE = 0.1  # share of ratios outside 0.9 to 1.1 above which `auto` enables the correction
FAINT_WEIGHT = 0.5  # mean sequence weight below which a notice recommends token weights
RESTART = "resume from an earlier checkpoint, or start a new run in another output_dir"

Row = dict[str, Any]


@dataclass
class Generation:
    """The generation that a run is training on.

    Attributes:
        number: number of this generation in the run, from 0.
        rows: the answers as training rows, in the order of training; see `PolicyOptimization`.
    """

    number: int
    rows: list[Row] = field(default_factory=list)


class _EpochBatches:
    """The remaining micro-batches of an epoch; `total` is their number."""

    def __init__(self, total: int, produce: Callable[[], Iterator[dict[str, Any]]]):
        self.total, self._produce = total, produce

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._produce()


class ImportanceCorrection:
    """Importance-sampling correction: rollouts and the training forward round differently.

    Attributes:
        outside: share of ratios of training to rollout outside 0.9 to 1.1 in the last step, see `methods.grpo`.
        corrects: whether the loss is weighted; once enabled, it stays enabled.
    """

    def __init__(self, config: RunConfig, method: PolicyOptimization, server: ServedRollouts | None):
        self.config, self.method, self.server = config, method, server
        wanted = config.importance_sampling_correction
        self._tokens = 0.0
        self.outside, self.corrects = 0.0, wanted is True or (wanted == "auto" and server is not None)

    def add_step(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> None:
        """Take the numbers of a step; give a notice if sequence weights are small."""
        tokens = max(counts["trained_tokens"], 1)
        self._tokens = tokens
        self.outside, weight = sums.get("sampling/outside", 0.0) / tokens, sums.get(WEIGHT, tokens) / tokens
        if self.corrects and weight < FAINT_WEIGHT and self.method.policy.sampling_mode.startswith("sequence"):
            problem = f"importance weights of whole answers are {weight:.2g} on average, so little is learned"
            notice("faint-weights", f"{problem}; importance_sampling_mode: token_truncate weights each token")

    def update(self) -> None:
        """Decide whether the next generation is corrected.

        Raises:
            TrainingError: the server has other weights.
        """
        found = f"{self.outside:.0%} of the last step's ratios of training to rollout are outside of 0.9 to 1.1"
        if self.server is not None and self._tokens >= MIN_TOKENS and self.outside > OTHER_WEIGHTS_SHARE:
            raise self.server.other_weights_error(found)
        automatic = self.config.importance_sampling_correction == "auto"
        if automatic and not self.corrects and self.outside > MISMATCH_SHARE:
            self.corrects = True
            notice("importance-sampling", f"{found}: the loss is weighted from now on (importance_sampling_correction)")


class Generations:
    """Samples the generations of a run.

    Args:
        model: the trained model; answers are sampled from it with its current adapter.
        rows: the prompts.
        computing: the context of a training forward.
        stops: tokens that end an answer.
        file: completions.jsonl.
        shared: whether adjacent answers share their prompt in training.
        plan: plan of rollouts; None: `Rollouts` chooses.
        stepper: the stepper of the run; its CUDA graphs are freed if sampling runs out of memory.
    """

    def __init__(
        self,
        config: RunConfig,
        method: PolicyOptimization,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        rows: Dataset,
        rewards: Rewards,
        *,
        device: torch.device,
        computing: Callable[[], AbstractContextManager[Any]],
        stops: list[int],
        file: MetricsFile,
        shared: bool = False,
        plan: RolloutPlan | None = None,
        stepper: Stepper | None = None,
    ):
        self.config, self.method, self.model, self.tokenizer = config, method, model, tokenizer
        self.rows, self.rewards, self.device, self.computing = rows, rewards, device, computing
        self.stops, self.file, self.shared = stops, file, shared
        self.plan = plan
        self.engine = engine_of(config, model, config.answers_per_generation, plan)
        self.group = config.group_size
        self.size = config.per_device_train_batch_size
        self.batches = config.micro_batches_per_generation
        self._current: Generation | None = None
        self._since_record: list[dict[str, float]] = []  # numbers of the generations since the last record
        self._last: dict[str, float] = {}
        self._monitor = RewardMonitor()
        self.stepper = stepper or Stepper(lambda batch: {})
        server = self.engine if isinstance(self.engine, ServedRollouts) else None
        self.correction = ImportanceCorrection(config, method, server)
        self._server_verified = server is None

    # --- rows for the loop -------------------------------------------------------------------------------------------

    def epoch_batches(
        self, collate: CountingCollator, epoch: int, skip: int, callbacks: Callbacks, settle: Callable[[], None]
    ) -> _EpochBatches:
        """Return the micro-batches of an epoch after the first `skip`; each generation is sampled when it is reached.

        Args:
            settle: reads the numbers of the last step, called before a generation is sampled.
        """
        prompts = self.config.answers_per_generation // self.group
        count, lasts = len(self.rows) // prompts, self.batches * self.config.num_iterations
        order = torch.randperm(
            len(self.rows), generator=torch.Generator().manual_seed(self.config.seed + epoch)
        ).tolist()

        def produce() -> Iterator[dict[str, Any]]:
            for at in range(skip // lasts, count):
                chosen = order[at * prompts : (at + 1) * prompts]
                if self._current is None or self._current.number != epoch * count + at:
                    settle()
                rows = self._generation(epoch * count + at, chosen, collate, callbacks).rows
                for batch in range(max(skip - at * lasts, 0), lasts):
                    begin = batch % self.batches * self.size
                    yield collate(rows[begin : begin + self.size])

        return _EpochBatches(count * lasts - skip, produce)

    def taken(self) -> dict[str, float]:
        """Return the mean numbers of the generations since the last record, or of the current generation."""
        found = mean_numbers(self._since_record) if self._since_record else self._last
        self._since_record = []
        return found

    def _generation(
        self, number: int, chosen: list[int], collate: CountingCollator, callbacks: Callbacks
    ) -> Generation:
        """Return generation `number`: the current one, or a new one."""
        if self._current is None or self._current.number != number:
            self.correction.update()
            batch = self._sample(chosen, number, _progress(callbacks))
            self._monitor.add(batch)
            began = time.perf_counter()
            rows = self._training_rows(batch, collate)
            batch.numbers["compare_seconds"] = time.perf_counter() - began
            self._write(batch, rows, callbacks)
            self._current = Generation(number, self._with_divisors(self._shuffled(rows, number)))
            self._last = batch.numbers
            self._since_record.append(self._last)
        return self._current

    def _shuffled(self, rows: list[Row], number: int) -> list[Row]:
        """Return `rows` in the order of training: groups are shuffled, so that their answers can share a prompt."""
        drawn = torch.Generator().manual_seed(self.config.seed + number)
        groups = torch.randperm(len(rows) // self.group, generator=drawn).tolist()
        return [rows[group * self.group + at] for group in groups for at in range(self.group)]

    def _sample(self, chosen: list[int], number: int, progress: Mapping[str, Any]) -> RolloutBatch:
        """Return scored answers to the prompts of these indices.

        With `dynamic_sampling` (DAPO, arXiv:2503.14476, section 3.2) groups without spread are replaced with groups of
        other prompts, in an order that the generation's number seeds.
        """
        found = self.answer(chosen, self._prompts(chosen), self.group, number, progress)
        if not self.config.dynamic_sampling:
            return found
        drawn = torch.Generator().manual_seed(self.config.seed + number)
        others = [at for at in torch.randperm(len(self.rows), generator=drawn).tolist() if at not in {*chosen}]
        sampled, seconds = len(chosen), {name: found.numbers[name] for name in ("rollout_seconds", "reward_seconds")}
        for _ in range(MAX_ROUNDS - 1):
            flat = found.without_spread(self.weights, self.group)
            taken, others = others[: len(flat)], others[len(flat) :]
            if not taken:
                break
            more = self.answer(taken, self._prompts(taken), self.group, number, progress)
            sampled += len(taken)
            seconds = {name: value + more.numbers[name] for name, value in seconds.items()}
            still_flat = more.without_spread(self.weights, self.group)
            spread = [at for at in range(len(taken)) if at not in still_flat]
            for own, theirs in zip(flat, spread, strict=False):
                found.replace_group(own, more, theirs, self.group)
        found.numbers = rollout_numbers(found.completions, found.scored, self.weights, self.group) | seconds
        found.numbers["dynamic_sampling/prompts"] = sampled
        return found

    def _prompts(self, indices: list[int]) -> list[Row]:
        return [self.rows[index] for index in indices]

    # --- answers and rewards -----------------------------------------------------------------------------------------

    def answer(
        self, indices: list[int], prompts: list[Row], each: int, number: int, progress: Mapping[str, Any]
    ) -> RolloutBatch:
        """Sample `each` answers to every prompt, and score them.

        Args:
            indices: indices of the prompts, which seed the samples together with the generation's `number`.
            progress: state of the run, for reward functions.
        """
        completions, texts, seconds = self.draw(indices, prompts, each, number)
        began = time.perf_counter()
        repeated = [row for row in prompts for _ in range(each)]
        columns = {name: [row["columns"].get(name) for row in repeated] for name in self.rewards.columns}
        turns = [_as_turns(row["prompt"], text) for row, text in zip(repeated, texts, strict=True)]
        ids = [list(completion.ids) for completion in completions]
        prompt_ids = [row["prompt_ids"] for row in repeated]
        prompt_texts = [text for row in prompts for text in [str(self.tokenizer.decode(row["prompt_ids"]))] * each]
        with free_stream_caches(self.stepper, self.device):  # reward models need memory
            scored = self.rewards.score(
                [row["prompt"] for row in repeated], turns, ids, columns, progress, prompt_ids, prompt_texts
            )
        numbers = rollout_numbers(completions, scored, self.weights, each)
        numbers |= {"rollout_seconds": seconds, "reward_seconds": time.perf_counter() - began}
        return RolloutBatch(repeated, completions, texts, scored, numbers)

    @waiting("sampling answers")
    def draw(
        self, indices: list[int], prompts: list[Row], each: int, number: int
    ) -> tuple[list[Completion], list[str], float]:
        """Return `each` adjacent answers to every prompt, their texts, and the seconds of sampling."""
        config, began = self.config, time.perf_counter()
        self.model.eval()
        sampling = Sampling(
            config.temperature, config.top_k, config.top_p, seed=config.seed + (number << 32), min_p=config.min_p or 0.0
        )
        given = [row["prompt_ids"] for row in prompts]
        completions = self._generate(given, each, indices, sampling)
        seconds = time.perf_counter() - began
        if not self._server_verified:
            self._verify_server([ids for ids in given for _ in range(each)], completions)
        texts = [str(self.tokenizer.decode(each.ids, skip_special_tokens=True)) for each in completions]
        return completions, texts, seconds

    def _generate(self, prompts: list[list[int]], each: int, keys: list[int], sampling: Sampling) -> list[Completion]:
        def draw() -> list[Completion]:
            resident = False
            try:
                found = self.engine.generate(
                    prompts,
                    each,
                    max_new_tokens=self.config.max_completion_length,
                    sampling=sampling,
                    stops=self.stops,
                    keys=keys,
                )
                resident = self.plan is not None and self.plan.stays
                return found
            finally:
                if not resident:  # a step, or the retry after out-of-memory, needs the memory
                    self.engine.free()

        with free_stream_caches(self.stepper, self.device):
            return self.stepper.retry_without_graphs(draw)

    def _verify_server(self, prompts: list[list[int]], completions: list[Completion]) -> None:
        """Check that a server has this model's weights, by the log-probabilities of a few of its first answers."""
        assert isinstance(self.engine, ServedRollouts)
        collate = CountingCollator(self.method, self.method.collator(self.config, self.tokenizer, self.device))
        blank = {"advantage": 0.0, "items": 0.0, CORRECTS: False}
        rows: list[Row] = []
        for ids, answer in zip(prompts, completions, strict=True):
            if sum(len(row["sampled"]) for row in rows) < COMPARED_TOKENS:
                rows.append(as_row(ids, answer.ids) | blank | {"sampled": answer.log_probs.tolist()})
        with free_stream_caches(self.stepper, self.device):
            self.stepper.retry_without_graphs(partial(self._score, rows, "here", collate))
        there, here = (torch.tensor([x for row in rows for x in row[name]]) for name in ("sampled", "here"))
        self._server_verified = self.engine.check_same_model(there, here)

    @property
    def weights(self) -> list[float]:
        """Weights of the reward functions."""
        return self.config.reward_weights or [1.0] * len(self.rewards.specs)

    def _training_rows(self, batch: RolloutBatch, collate: CountingCollator) -> list[Row]:
        """Return the answers as training rows, with their advantages."""
        rows = []
        for prompt, completion in zip(batch.prompts, batch.completions, strict=True):
            given = prompt["prompt_ids"]
            trained = completion.ended or not self.config.mask_truncated_completions
            row = as_row(given, completion.ids, trained)
            row |= {"sampled": completion.log_probs.tolist() if trained else []}
            row |= {GIVEN: len(given)} if self.shared else {}
            rows.append(row | {"advantage": 0.0, "items": 0.0, CORRECTS: self.correction.corrects})
        with free_stream_caches(self.stepper, self.device):
            divergence = self.stepper.retry_without_graphs(partial(self._add_log_probs, rows, collate))
        advantages = self.method.advantages(batch.rewards, divergence)
        for row, advantage in zip(rows, advantages.tolist(), strict=True):
            row["advantage"] = advantage
        return rows

    @property
    def _is_off_policy(self) -> bool:
        """Whether weights change during a generation, so that the loss needs log-probabilities from its beginning."""
        return self.batches * self.config.num_iterations > self.config.gradient_accumulation_steps

    def _add_log_probs(self, rows: list[Row], collate: CountingCollator) -> Tensor | None:
        """Add the log-probabilities of the current policy and of the reference to the rows, if the loss needs them.

        Returns:
            log π/π_ref [N] of each answer, if it is a part of the reward (RLOO).
        """
        in_reward = self.config.method == "rloo" and bool(self.config.beta)
        if self._is_off_policy or in_reward:
            self._score(rows, "old", collate)
        if self.config.beta:
            with as_reference(self.model):
                self._score(rows, "reference", collate)
        if not in_reward:
            return None
        found = torch.tensor([sum(row["old"]) - sum(row["reference"]) for row in rows])
        for row in rows:
            del row["reference"]
            if not self._is_off_policy:
                del row["old"]
        return found

    @torch.no_grad()
    def _score(self, rows: list[Row], name: str, collate: CountingCollator) -> None:
        """Add the log-probabilities of each row's answer tokens, by the training forward, as column `name`."""
        for begin in range(0, len(rows), self.size):
            some = rows[begin : begin + self.size]
            batch = to_device(collate.collate(some), self.device)
            with self.computing():
                log_probs, _ = self.method.log_probs(self.model, batch)
            lengths = [len(row["sampled"]) for row in some]
            parts = log_probs[: sum(lengths)].cpu().split(lengths)
            for row, part in zip(some, parts, strict=True):
                row[name] = part.tolist()

    def _with_divisors(self, rows: list[Row]) -> list[Row]:
        """Add each row's part of the divisor of its step's loss, and of the divisor of its step's mean entropy."""
        share = sum(len(row["sampled"]) for row in rows) / len(rows)
        for row in rows:
            row["items"] = self.method.items(len(row["sampled"]), share)
        step = self.size * self.config.gradient_accumulation_steps
        for begin in range(0, len(rows), step):
            some = rows[begin : begin + step]
            items, tokens = sum(row["items"] for row in some), sum(len(row["sampled"]) for row in some)
            for row in some:
                row[BONUS] = items * len(row["sampled"]) / max(tokens, 1)
        return rows

    # --- files -------------------------------------------------------------------------------------------------------

    def _write(self, batch: RolloutBatch, rows: list[Row], callbacks: Callbacks) -> None:
        """Append a generation to completions.jsonl, with the number of its first step."""
        if self.file.path.exists() and self.file.path.stat().st_size > MAX_COMPLETIONS_BYTES:
            return
        scored, step = batch.scored, callbacks.state.global_step + 1
        for at in range(min(len(rows), COMPLETIONS_PER_GENERATION)):
            completion = batch.completions[at]
            line = {"kind": "completion", "step": step, "prompt": batch.prompts[at]["prompt"]}
            line |= {"completion": batch.texts[at], "tokens": len(completion.ids), "ended": completion.ended}
            line |= {"rewards": {name: values[at] for name, values in scored.rewards.items()}}
            line |= {name: rows[at][name] for name in ("advantage",) if name in rows[at]}
            line |= {name: values[at] for name, values in scored.extra.items() if name not in line}
            self.file.append(line)

    def save(self, folder: Path) -> None:
        """Write the state that resuming needs into a checkpoint's folder."""
        current = None if self._current is None else asdict(self._current)
        answered = None if self.plan is None else [self.plan.weights, self.plan.pages]
        state: dict[str, Any] = {"current": current, "since": self._since_record, "last": self._last}
        state |= {"answered": answered, "outside": self.correction.outside}
        state["corrects"] = self.correction.corrects
        state["monotony"] = self._monitor.seen
        write_json(folder / STATE, state)

    def load(self, checkpoint: Path) -> None:
        """Load the generation of a checkpoint.

        Raises:
            CheckpointError: it has none.
        """
        state = read_generation(checkpoint)
        self._current = None if state["current"] is None else Generation(**state["current"])
        self._since_record, self._last = state["since"], state["last"]
        self.correction.outside = state.get("outside", 0.0)
        self.correction.corrects = state.get("corrects", self.correction.corrects)
        self._monitor.seen = {name: (value, times) for name, (value, times) in state.get("monotony", {}).items()}

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, held_out: Dataset, callbacks: Callbacks) -> dict[str, float]:
        """Return rewards and lengths of answers to the held-out prompts; every evaluation uses the same seeds."""
        each = self.config.num_generations_eval or self.group
        prompts = [held_out[index] for index in range(len(held_out))]
        batch = self.answer(list(range(len(prompts))), prompts, each, EVALUATION, _progress(callbacks))
        numbers = batch.numbers | pass_rates(next(iter(batch.scored.rewards.values())), each)
        return {name: value for name, value in numbers.items() if not name.endswith("seconds")}

    def close(self) -> None:
        """End the processes of reward functions, and free the engine's memory."""
        self.rewards.close()
        self.engine.free()
        if isinstance(self.engine, ServedRollouts):
            self.engine.close()


def read_generation(checkpoint: Path) -> dict[str, Any]:
    """Return the stored generation of a checkpoint.

    Raises:
        CheckpointError: it was not written by halfbyte.
    """
    state = read_json(checkpoint / STATE, CheckpointError, RESTART)
    if not isinstance(state, dict) or {"current", "since", "last"} - state.keys():
        raise CheckpointError(f"{checkpoint / STATE} was not written by halfbyte", RESTART)
    return state


def rollout_plan_of(checkpoint: Path) -> tuple[str, int] | None:
    """Return how a checkpoint's rollouts read weights, and the bytes of their KV cache pages; None if not stored.

    Raises:
        CheckpointError: it was not written by halfbyte.
    """
    match read_generation(checkpoint).get("answered"):
        case None:
            return None
        case ["packed" | "unpacked" as weights, int() as pages]:
            return weights, pages
    raise CheckpointError(f"{checkpoint / STATE} was not written by halfbyte", RESTART)


def as_row(prompt: Sequence[int], answer: Sequence[int], trained: bool = True) -> Row:
    """Return a row of a prompt and its answer; the answer has labels if it is trained."""
    ids, given = list(answer), list(prompt)
    labels = ids if trained else [IGNORE_INDEX] * len(ids)
    return {"input_ids": given + ids, "labels": [IGNORE_INDEX] * len(given) + labels}


def _as_turns(prompt: Any, text: str) -> Any:
    """Return an answer in the form of its prompt: a text, or turns."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _progress(callbacks: Callbacks) -> Mapping[str, Any]:
    """Return the state of the run for reward functions, by transformers' names."""
    state = callbacks.state
    names: Sequence[str] = ("global_step", "max_steps", "num_train_epochs", "epoch")
    return {name: getattr(state, name) for name in names}
