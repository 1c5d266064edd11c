"""Policy optimization: sample answers, reward them, and raise or lower their probability by comparison.

GRPO (arXiv:2402.03300) and its variants compare an answer with its group, RLOO (arXiv:2402.14740) with the group's
other answers. `rl.rollouts` samples; this file defines the rows of sampled answers and the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..batch import BONUS, CORRECTS, model_inputs
from ..ops import IGNORE_INDEX
from ..utils.errors import DataError
from .base import Batch, Collate, Method, Metric, Numbers, Rows
from .policy import Policy

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from ..config.policy import PolicySection
    from ..config.schema import RunKeys
    from ..data.prepare import PreparedData

ITEMS = "loss_items"
TOKENS = "trained_tokens"
ANSWERS = "answers"
BATCHES = "micro_batches"
WEIGHT = "sampling/importance_sampling_ratio/mean"
FAR = 0.1  # ratios further from 1 count as outside
REWARD_METRICS = (
    Metric("reward", "reward", ".3f"),
    Metric("reward_std", "spread of rewards", ".3f"),
    Metric("frac_reward_zero_std", "groups without spread", ".0%"),
    Metric("completions/mean_length", "tokens", ".0f"),
    Metric("completions/clipped_ratio", "cut off", ".0%"),
)


class PolicyOptimization(Method):
    """`grpo` or `rloo`.

    A row of a micro-batch is a sampled answer: `input_ids` and `labels` (the answer's tokens), `advantage`, `sampled`,
    and, if needed, `old` and `reference`: one log-probability per label. `items` is its share of the loss's divisor,
    `corrects` whether importance-sampling correction is on.
    """

    rows = "prompts"
    shares = True

    def __init__(self, config: RunKeys | None = None):
        if config is None:
            return
        names = [name for name in Policy.__dataclass_fields__ if name != "loss_type"]
        loss_type = "rloo" if config.method == "rloo" else str(config.loss_type)
        keys = {name: getattr(config, name) for name in names}
        keys["beta"] = 0.0 if loss_type == "rloo" else config.beta  # in RLOO the KL is part of the reward
        if config.kv_cache != "auto":  # an answer's ratio multiplies hundreds of token ratios with errors of 8%
            keys["importance_sampling_mode"] = config.importance_sampling_mode or "token_truncate"
        self.policy = Policy(loss_type=loss_type, **keys)
        self.config = config
        self.temperature = config.temperature
        self.longest = config.max_completion_length
        self.numbers = self._numbers()

    def of(self, config: RunKeys) -> Method:
        return type(self)(config)

    def _numbers(self) -> Numbers:
        ratios = ANSWERS if self.policy.by_answers else TOKENS
        kl = [Metric("kl", "KL to the reference", ".4f", TOKENS)] if self.policy.beta else []
        clipped = [
            Metric("clip_ratio/low_mean", "ratios clipped below", ".2%", ratios, brief=False),
            Metric("clip_ratio/high_mean", "ratios clipped above", ".2%", ratios, brief=False),
            Metric("clip_ratio/region_mean", "ratios clipped", ".2%", ratios, brief=False),
        ]
        difference = "sampling/sampling_logp_difference"
        mismatch = [
            Metric(f"{difference}/mean", "|Δ log p|, rollout against training", ".2g", TOKENS, brief=False),
            Metric(f"{difference}/max", "its largest in a micro-batch", ".2g", BATCHES, brief=False),
            Metric("sampling/outside", "ratios outside 0.9 to 1.1", ".2%", TOKENS, brief=False),
        ]
        if self.config.importance_sampling_correction and self.config.method == "grpo":
            mismatch.append(Metric(WEIGHT, "weights against the mismatch", ".4f", TOKENS, brief=False))
        entropy = Metric("entropy", "entropy", ".3f", TOKENS)
        trained = (Metric("loss", "loss", ".4f", ITEMS), *kl, entropy, *clipped, *mismatch)
        answers = self.config.num_generations_eval or self.config.num_generations or 2
        passed = [Metric(f"pass@{k}", f"pass@{k}", ".1%") for k in dict.fromkeys((1, answers))]
        return Numbers(trained, (*REWARD_METRICS[:1], *passed, *REWARD_METRICS[1:]), REWARD_METRICS)

    # --- rows --------------------------------------------------------------------------------------------------------

    def documents(self, config: RunKeys, data: PreparedData) -> PreparedData:
        """Add to each prompt a text of the length that it may reach with an answer, for memory planning."""
        from dataclasses import replace

        together = min(config.per_device_train_batch_size, config.num_generations or 2) if data.shared else 1
        train = _with_room(data.train, config, together)
        held_out = None if data.eval is None else _with_room(data.eval, config, together)
        needed = config.answers_per_generation // (config.num_generations or 1)
        if len(train) < needed:
            raise DataError(
                f"a generation takes {needed} prompts, but the data have {len(train)}",
                "give more data, or lower per_device_train_batch_size or gradient_accumulation_steps",
            )
        longest = config.max_completion_length * len(train)
        prompt_tokens = sum(map(len, train["prompt_ids"]))
        sizes = {"rows": len(train), "tokens": prompt_tokens + longest, "trained_tokens": longest}
        if together > 1:
            sizes |= {
                "computed_tokens": prompt_tokens + together * longest,
                "tokens_apart": together * (prompt_tokens + longest),
            }
        report = {**data.report, "train": {**data.report["train"], **sizes}}
        data = replace(data, train=train, eval=held_out, report=report, shared=together > 1)
        return replace(data, answers=together, together=together, counted=together)

    def micro_batches(self, config: RunKeys, rows: int) -> int:
        """Return the micro-batches of an epoch: those of each generation, times `num_iterations`; prompts that fill
        no generation are skipped."""
        prompts = config.answers_per_generation // (config.num_generations or 1)
        return rows // prompts * config.micro_batches_per_generation * config.num_iterations

    def advantages(self, rewards: Tensor, divergence: Tensor | None) -> Tensor:
        """Return the advantages [N] of a generation's answers from their rewards [N, F].

        Args:
            divergence: [N], log π/π_ref of whole answers, for RLOO's reward; None if `beta` is 0.
        """
        import torch

        from .policy_losses import combined, group_relative, leave_one_out

        config = self.config
        weights, group = torch.tensor(config.reward_weights or [1.0] * rewards.shape[1]), config.num_generations or 2
        if config.method == "grpo":
            return group_relative(rewards, weights, group, config.scale_rewards, config.multi_objective_aggregation)
        total = combined(rewards, weights)
        if config.reward_clip_range is not None:
            total = total.clamp(*config.reward_clip_range)
        if divergence is not None:
            total = total - (config.beta or 0.0) * divergence
        return leave_one_out(total, group, config.normalize_advantages)

    def collator(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        """Return the collator from answers to tensors: the base collator's, and flat ones for N tokens and R answers.

        On a GPU N is rounded to few sizes, since each costs a CUDA graph.
        """
        from dataclasses import replace

        import torch

        from ..data.collate import FINER
        from ..data.collate_answers import filled_size
        from ..data.shared_prefix import GIVEN, BranchCollator, as_trees

        base: Any = super().collator(config, tokenizer, device)
        trees = replace(BranchCollator.like(base, 1), max_length=None, widths=FINER)

        def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
            if GIVEN in rows[0]:
                batch, positions = trees(as_trees(rows))
                labels = [torch.tensor(row["labels"][1:]) for row in rows]
                of_rows = zip(labels, map(torch.from_numpy, positions), strict=True)
                at = torch.cat([position[:-1][following != IGNORE_INDEX] for following, position in of_rows])
                targets = torch.cat([following[following != IGNORE_INDEX] for following in labels])
            else:
                batch = base(rows)
                following = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
                at = (following != IGNORE_INDEX).nonzero().flatten()
                targets = following[at]
            lengths = torch.tensor([len(row["sampled"]) for row in rows])
            flat = {"sampled": [x for row in rows for x in row["sampled"]]}
            for name in ("old", "reference"):
                if row_has(rows, name):
                    flat[name] = [x for row in rows for x in row[name]]
            padding = (filled_size(len(at), batch["input_ids"].numel()) if base.rounded else len(at)) - len(at)

            def filled(values: Any, fill: float) -> torch.Tensor:
                return torch.nn.functional.pad(torch.as_tensor(values), (0, padding), value=fill)

            return {
                **batch,
                "at": filled(at, 0),
                "wanted": filled(targets, IGNORE_INDEX),
                "answer": filled(torch.arange(len(rows)).repeat_interleave(lengths), -1),
                "advantages": torch.tensor([row["advantage"] for row in rows]),
                "items": torch.tensor([row["items"] for row in rows], dtype=torch.float64),
                BONUS: torch.tensor([row.get(BONUS, 0.0) for row in rows]).sum(),
                **{name: filled(torch.tensor(values, dtype=torch.float32), 0.0) for name, values in flat.items()},
                CORRECTS: bool(rows[0].get(CORRECTS)),
            }

        return collate

    def tokens(self, rows: Rows) -> int:
        from ..data.shared_prefix import GIVEN, as_trees

        return super().tokens(as_trees(rows) if GIVEN in rows[0] else rows)

    def counts(self, batch: Batch) -> dict[str, float]:
        items = float(batch["items"].sum())
        return {ITEMS: items, TOKENS: int((batch["answer"] >= 0).sum()), ANSWERS: len(batch["advantages"]), BATCHES: 1}

    def items(self, tokens: int, share: float) -> float:
        """Return the share of an answer with `tokens` trained tokens in the loss's divisor.

        Args:
            share: trained tokens per answer of its generation.
        """
        of = {"generated": share, "tokens": float(tokens), "answers": 1.0, "longest": float(self.longest)}
        return of[self.policy.divisor]

    # --- the loss ----------------------------------------------------------------------------------------------------

    def log_probs(self, model: nn.Module, batch: Batch, *, train: bool = False) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies [N] of a micro-batch's answers, 0 for padding.

        Args:
            train: keep the gradient of the entropy.
        """
        from ..modeling.head import log_probs_at

        log_probs, entropy = log_probs_at(
            model,
            model_inputs(batch),
            batch["at"],
            batch["wanted"],
            temperature=self.temperature,
            entropy=True,
            entropy_grad=train and self.policy.entropy_coef != 0,
        )
        assert entropy is not None
        return log_probs, entropy.masked_fill(batch["answer"] < 0, 0.0)  # with full logits, padding has an entropy

    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        from .policy_losses import Answers, policy_loss

        log_probs, entropy = self.log_probs(model, batch, train=True)
        names = ("answer", "advantages", "old", "sampled", "reference", CORRECTS)
        answers = Answers(*(batch.get(name) for name in names))  # type: ignore[arg-type]
        terms = policy_loss(log_probs, entropy, answers, self.policy)
        loss = terms["loss"] - self.policy.entropy_coef * batch[BONUS] * terms["bonus"]
        sums = {
            "loss": loss,
            "kl": terms["kl"],
            "entropy": entropy.detach().sum(),
            "clip_ratio/low_mean": terms["low"],
            "clip_ratio/high_mean": terms["high"],
            "clip_ratio/region_mean": terms["low"] + terms["high"],
            WEIGHT: terms["weights"],
        }
        # Differences [N] of log-probabilities, training minus sampling.
        difference = (log_probs if answers.old is None else answers.old).detach() - answers.sampled
        size = difference.abs()
        outside = (difference.exp() - 1).abs() > FAR
        name = "sampling/sampling_logp_difference"
        largest = size.max() if len(size) else size.sum()
        sums |= {f"{name}/mean": size.sum(), f"{name}/max": largest, "sampling/outside": outside.to(size).sum()}
        return {metric.name: sums[metric.name] for metric in self.numbers.trained}


def row_has(rows: list[dict[str, Any]], name: str) -> bool:
    return rows[0].get(name) is not None


def _with_room(rows: Dataset, config: PolicySection, answers: int) -> Dataset:
    """Return `rows` with `input_ids` and `labels` as long as each prompt with `answers` answers of maximal length."""
    from ..data.prepare_answers import as_read
    from ..data.shared_prefix import ANSWERS
    from ..data.tables import with_column

    rows = rows.with_format(None)  # the prompts as they are stored
    new, prompts = answers * config.max_completion_length, rows["prompt_ids"]
    ids = [[*prompt, *prompt[-1:] * new] for prompt in prompts]
    labels = [[IGNORE_INDEX] * (len(row) - new) + row[-new:] for row in ids]
    columns: dict[str, list[list[int]]] = {"input_ids": ids, "labels": labels}
    if answers > 1:
        lengths = [[len(prompt), *[config.max_completion_length] * answers] for prompt in prompts]
        columns |= {"seq_lengths": lengths, ANSWERS: [[answers]] * len(rows)}
    for name, values in columns.items():
        rows = with_column(rows, name, values)
    return rows.with_transform(as_read)
