"""Rollouts of policy optimization: sample answers to prompts, score them, and turn them into training rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..batch import BONUS, CORRECTS
from ..data.images import IMAGES
from ..data.shared_prefix import GIVEN
from ..generation import Completion
from ..memory.allocators import free_stream_caches
from ..methods.answers import as_reference
from ..methods.base import Collate
from ..methods.grpo import WEIGHT, PolicyOptimization
from ..rewards.score import Rewards
from ..utils.notices import notice
from .rollout_batch import RolloutBatch, pass_rates, rollout_numbers
from .sampler import AnswerSampler, Row, as_row
from .served import MIN_TOKENS, OTHER_WEIGHTS_SHARE, ServedRollouts

if TYPE_CHECKING:
    from datasets import Dataset

PROMPT = "prompt_number"  # of an answer's row, if prompts have images: index of its prompt
MAX_ROUNDS = 10  # of dynamic sampling, as in DAPO's code
EVALUATION = 2**30  # generation number that seeds the samples of evaluations
MISMATCH_SHARE = 0.1  # share of ratios outside 0.9 to 1.1 above which `auto` enables the correction
FAINT_WEIGHT = 0.5  # mean sequence weight below which a notice recommends token weights


@dataclass(frozen=True)
class ImageCollator:
    """A collator of answers to prompts with images, which rows name by the number of their prompt, `PROMPT`.

    Attributes:
        prompts: rows of the training set, with stored images.
        collate: the method's collator.
    """

    prompts: Dataset
    collate: Collate

    def __call__(self, rows: list[Row]) -> Row:
        return self.collate([{**row, IMAGES: self.prompts[row[PROMPT]][IMAGES]} for row in rows])


class ImportanceCorrection:
    """Importance-sampling correction: rollouts and the training forward round differently.

    Args:
        setting: `importance_sampling_correction`.
        server: the server that samples; None: this process does.

    Attributes:
        outside: share of ratios of training to rollout outside 0.9 to 1.1 in the last step, see `methods.grpo`.
        corrects: whether the loss is weighted; once enabled, it stays enabled.
    """

    method: PolicyOptimization
    server: ServedRollouts | None
    is_automatic: bool
    corrects: bool
    outside: float

    def __init__(self, setting: bool | str, method: PolicyOptimization, server: ServedRollouts | None):
        self.method = method
        self.server = server
        self.is_automatic = setting == "auto"
        self.corrects = setting is True or (self.is_automatic and server is not None)
        self.outside = 0.0
        self._tokens = 0.0

    def add_step(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> None:
        """Take the numbers of a step; give a notice if sequence weights are small."""
        tokens = max(counts["trained_tokens"], 1)
        self._tokens = tokens
        self.outside = sums.get("sampling/outside", 0.0) / tokens
        weight = sums.get(WEIGHT, tokens) / tokens
        if self.corrects and weight < FAINT_WEIGHT and self.method.policy.sampling_mode.startswith("sequence"):
            problem = f"importance weights of whole answers are {weight:.2g} on average, so little is learned"
            notice("faint-weights", f"{problem}; importance_sampling_mode: token_truncate weights each token")

    def update(self) -> None:
        """Decide whether the next generation is corrected.

        Raises:
            TrainingError: the server has other weights.
        """
        mismatch = f"{self.outside:.0%} of the last step's ratios of training to rollout are outside of 0.9 to 1.1"
        if self.server is not None and self._tokens >= MIN_TOKENS and self.outside > OTHER_WEIGHTS_SHARE:
            raise self.server.other_weights_error(mismatch)
        if self.is_automatic and not self.corrects and self.outside > MISMATCH_SHARE:
            self.corrects = True
            notice(
                "importance-sampling", f"{mismatch}: the loss is weighted from now on (importance_sampling_correction)"
            )


@dataclass
class PolicyRollouts:
    """Samples the answers of `grpo` and `rloo`, scores them and makes training rows of them.

    Attributes:
        prompts: rows of the training set.
        shares_prompts: whether adjacent answers share their prompt in training.
    """

    sampler: AnswerSampler
    prompts: Dataset
    rewards: Rewards
    shares_prompts: bool

    def __post_init__(self) -> None:
        self.policy = self.sampler.policy
        self.config = self.policy.config

    # --- answers and rewards -----------------------------------------------------------------------------------------

    def generation(self, indices: list[int], number: int, progress: Mapping[str, Any]) -> RolloutBatch:
        """Return the scored answers of generation `number` to the prompts of these indices.

        With `dynamic_sampling` (DAPO, arXiv:2503.14476, section 3.2) groups without spread are replaced with groups of
        other prompts, in an order that the generation's number seeds.
        """
        batch = self._answers_to(indices, number, progress)
        if not self.config.dynamic_sampling:
            return batch
        group_size = self.config.group_size
        generator = torch.Generator().manual_seed(self.config.seed + number)
        order = torch.randperm(len(self.prompts), generator=generator).tolist()
        unused = [index for index in order if index not in {*indices}]
        prompt_count = len(indices)
        seconds = {name: batch.numbers[name] for name in ("rollout_seconds", "reward_seconds")}
        for _ in range(MAX_ROUNDS - 1):
            flat_groups = batch.without_spread(self.reward_weights, group_size)
            retried, unused = unused[: len(flat_groups)], unused[len(flat_groups) :]
            if not retried:
                break
            fresh = self._answers_to(retried, number, progress)
            prompt_count += len(retried)
            seconds = {name: value + fresh.numbers[name] for name, value in seconds.items()}
            flat_again = fresh.without_spread(self.reward_weights, group_size)
            spread_groups = [group for group in range(len(retried)) if group not in flat_again]
            for target, source in zip(flat_groups, spread_groups, strict=False):
                batch.replace_group(target, fresh, source, group_size)
        numbers = rollout_numbers(batch.completions, batch.scored, self.reward_weights, group_size)
        batch.numbers = numbers | seconds | {"dynamic_sampling/prompts": prompt_count}
        return batch

    def _answers_to(self, indices: list[int], number: int, progress: Mapping[str, Any]) -> RolloutBatch:
        prompts = [{**self.prompts[index], PROMPT: index} for index in indices]
        return self.answer(indices, prompts, self.config.group_size, number, progress)

    def answer(
        self, indices: list[int], prompts: list[Row], n: int, number: int, progress: Mapping[str, Any]
    ) -> RolloutBatch:
        """Sample `n` answers to every prompt, and score them.

        Args:
            indices: indices of the prompts, which seed the samples together with the generation's `number`.
            progress: state of the run, for reward functions.
        """
        answers = self.sampler.sample(prompts, n, indices, number)
        start = time.perf_counter()
        repeated = [row for row in prompts for _ in range(n)]
        prompt_texts = [str(self.policy.tokenizer.decode(row["prompt_ids"])) for row in prompts]
        pairs = zip(repeated, answers.texts, strict=True)
        with free_stream_caches(self.policy.graphs, self.policy.device):  # reward models need memory
            scored = self.rewards.score(
                [row["prompt"] for row in repeated],
                [
                    text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
                    for row, text in pairs
                ],
                [list(completion.ids) for completion in answers.completions],
                {name: [row["columns"].get(name) for row in repeated] for name in self.rewards.columns},
                progress,
                [row["prompt_ids"] for row in repeated],
                [text for text in prompt_texts for _ in range(n)],
            )
        numbers = rollout_numbers(answers.completions, scored, self.reward_weights, n)
        numbers |= {"rollout_seconds": answers.seconds, "reward_seconds": time.perf_counter() - start}
        return RolloutBatch(repeated, answers.completions, answers.texts, scored, numbers)

    @property
    def reward_weights(self) -> list[float]:
        """Weights of the reward functions."""
        return self.config.reward_weights or [1.0] * len(self.rewards.specs)

    # --- training rows -----------------------------------------------------------------------------------------------

    def training_rows(self, batch: RolloutBatch, corrected: bool) -> list[Row]:
        """Return the answers as training rows, with their advantages; `corrected` by importance sampling or not."""
        rows = [
            self._training_row(prompt, answer) | {CORRECTS: corrected}
            for prompt, answer in zip(batch.prompts, batch.completions, strict=True)
        ]
        log_ratios = self.policy.between_steps(partial(self._add_log_probs, rows))
        advantages = self.policy.method.advantages(batch.rewards, log_ratios)
        for row, advantage in zip(rows, advantages.tolist(), strict=True):
            row["advantage"] = advantage
        return rows

    def _training_row(self, prompt: Row, answer: Completion) -> Row:
        """Return the row of an answer, without advantage, loss divisors and log-probabilities of training."""
        trained = answer.ended or not self.config.mask_truncated_completions
        row = as_row(prompt["prompt_ids"], answer.ids, trained)
        row["sampled"] = answer.log_probs.tolist() if trained else []
        if self.shares_prompts:
            row[GIVEN] = len(prompt["prompt_ids"])
        if self.sampler.images is not None:
            row[PROMPT] = prompt[PROMPT]
            if answer.ids[-1] in self.sampler.images.placeholder_ids:  # would count as an image; no token reads it
                row["input_ids"][-1] = self.sampler.stops[0]
        return row | {"advantage": 0.0, "items": 0.0}

    def _add_log_probs(self, rows: list[Row]) -> Tensor | None:
        """Add the log-probabilities of the current policy and of the reference to the rows, if the loss needs them.

        Returns:
            log π/π_ref [N] of each answer, if it is a part of the reward (RLOO).
        """
        config = self.config
        # Weights change during such a generation, so that the loss needs log-probabilities from its beginning.
        is_off_policy = config.micro_batches_per_generation * config.num_iterations > config.gradient_accumulation_steps
        is_in_reward = config.method == "rloo" and bool(config.beta)
        columns: dict[str, list[list[float]]] = {}
        if is_off_policy or is_in_reward:
            columns["old"] = self.policy.log_probs(rows)
        if config.beta:
            with as_reference(self.policy.model):
                columns["reference"] = self.policy.log_probs(rows)
        log_ratios = None
        if is_in_reward:
            answers = zip(columns["old"], columns.pop("reference"), strict=True)
            log_ratios = torch.tensor([sum(old) - sum(reference) for old, reference in answers])
            if not is_off_policy:
                del columns["old"]
        for name, column in columns.items():
            for row, log_probs in zip(rows, column, strict=True):
                row[name] = log_probs
        return log_ratios

    def in_training_order(self, rows: Sequence[Row], number: int) -> list[Row]:
        """Return the rows of generation `number` in the order of training, with the divisors of their steps.

        Each row gets its part of the divisor of its step's loss, and of the divisor of its step's mean entropy.
        """
        rows = shuffled_groups(rows, self.config.group_size, self.config.seed + number)
        tokens_per_answer = sum(len(row["sampled"]) for row in rows) / len(rows)
        for row in rows:
            row["items"] = self.policy.method.items(len(row["sampled"]), tokens_per_answer)
        rows_per_step = self.config.per_device_train_batch_size * self.config.gradient_accumulation_steps
        for begin in range(0, len(rows), rows_per_step):
            step_rows = rows[begin : begin + rows_per_step]
            items = sum(row["items"] for row in step_rows)
            tokens = sum(len(row["sampled"]) for row in step_rows)
            for row in step_rows:
                row[BONUS] = items * len(row["sampled"]) / max(tokens, 1)
        return rows

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, held_out: Dataset, progress: Mapping[str, Any]) -> dict[str, float]:
        """Return rewards and lengths of answers to the held-out prompts; every evaluation uses the same seeds."""
        n = self.config.num_generations_eval or self.config.group_size
        prompts = [held_out[index] for index in range(len(held_out))]
        batch = self.answer(list(range(len(prompts))), prompts, n, EVALUATION, progress)
        numbers = batch.numbers | pass_rates(next(iter(batch.scored.rewards.values())), n)
        return {name: value for name, value in numbers.items() if not name.endswith("seconds")}

    def close(self) -> None:
        """End the processes of reward functions, and free the engine's memory."""
        self.rewards.close()
        self.sampler.close()


def shuffled_groups(rows: Sequence[Row], group_size: int, seed: int) -> list[Row]:
    """Return `rows` with shuffled groups; a group's rows stay adjacent, so that its answers can share a prompt."""
    groups = torch.randperm(len(rows) // group_size, generator=torch.Generator().manual_seed(seed)).tolist()
    return [rows[group * group_size + index] for group in groups for index in range(group_size)]
