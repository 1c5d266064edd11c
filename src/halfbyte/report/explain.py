"""Rules that find faults in the recorded files of a run. Each finding has evidence, an effect, and keys to change.

Rules are deterministic and conservative: a rule that cannot be decided from the records is silent. The findings are
ordered by severity, then in the order of `RULES`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..utils.text import size
from .run import Record, Run

BROKEN = 0  # the run or its result is broken
LOSES = 1  # training loses quality
COSTS = 2  # training costs time or memory
SEVERITIES = ("broken", "quality", "cost")
FEWEST = 8  # records that a trend is judged from


@dataclass(frozen=True)
class Finding:
    """Something to change.

    Attributes:
        severity: BROKEN, LOSES or COSTS.
        problem: one sentence that names the fault.
        evidence: the recorded numbers.
        effect: what changing the keys does.
        keys: what to change.
    """

    severity: int
    problem: str
    evidence: str
    effect: str
    keys: str


Rule = Callable[[Run], Iterator[Finding]]


def explain(run: Run) -> list[Finding]:
    """Return the findings of all rules; a rule whose files have malformed values is left out."""
    findings = []
    for rule in RULES:
        try:
            findings += list(rule(run))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            continue
    return sorted(findings, key=lambda finding: finding.severity)


def _column(records: Sequence[Record], key: str) -> list[float]:
    return [
        float(record[key])
        for record in records
        if isinstance(record.get(key), int | float) and math.isfinite(record[key])
    ]


def _split(run: Run, name: str = "train") -> dict[str, Any]:
    split = (run.data or {}).get(name)
    return split if isinstance(split, dict) else {}


# --- the end of the run ----------------------------------------------------------------------------------------------


def _stopped(run: Run) -> Iterator[Finding]:
    if stopped := (run.environment or {}).get("stopped"):
        keys = "memory_limit_gib, per_device_train_batch_size, max_length" if "memory" in str(stopped) else "see above"
        yield Finding(BROKEN, "The run ended with an error", str(stopped), "the run can finish", keys)


def _checks(run: Run) -> Iterator[Finding]:
    reload = (run.checks or {}).get("adapter_reload") or {}
    largest, logit = reload.get("largest_difference"), reload.get("largest_logit")
    if largest and logit and largest > 0.05 * logit:
        evidence = f"largest difference of a logit {largest:.3g}, of logits up to {logit:.3g}"
        problem = "The saved adapter gives other answers than the trained model"
        yield Finding(BROKEN, problem, evidence, "the saved file is the trained model", "adapter_dtype: float32")


def _lost_in_merge(run: Run) -> Iterator[Finding]:
    for merge in run.merges:
        share = ((merge.get("update_kept") or {}).get(merge.get("written")) or {}).get("share")
        if share is not None and share < 0.9:
            target = merge.get("quantize") or merge.get("dtype")
            problem = f"The merge into {target} loses part of the training"
            evidence = f"{share:.1%} of the update is in the merged weights"
            effect = "the merged file has the whole update"
            yield Finding(BROKEN, problem, evidence, effect, "merge --quantize with more bits, merge_aware, qat_scheme")


# --- data ------------------------------------------------------------------------------------------------------------


def _end_of_turn(run: Run) -> Iterator[Finding]:
    if (run.data or {}).get("eos_trained") is False:
        evidence = f"no trained row ends with a stop token ({_split(run).get('documents', '?')} documents)"
        effect = "answers end where the data end them"
        yield Finding(BROKEN, "The model does not learn to end its answers", evidence, effect, "chat_template_path")


def _untrained(run: Run) -> Iterator[Finding]:
    split = _split(run)
    tokens, trained = split.get("tokens") or 0, split.get("trained_tokens") or 0
    if tokens and trained / tokens < 0.02:
        evidence = f"{trained:,} of {tokens:,} tokens are trained"
        effect = "more tokens count in the loss"
        yield Finding(LOSES, "Hardly any token is trained", evidence, effect, "assistant_only_loss, train_on, dataset")
    dropped, documents = sum((split.get("dropped") or {}).values()), split.get("documents") or 0
    if dropped > 0.1 * (dropped + documents):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in split["dropped"].items() if count)
        evidence = f"{dropped:,} of {dropped + documents:,} documents: {reasons}"
        yield Finding(
            LOSES, "Many documents are dropped", evidence, "they are trained", "max_length, overlong, dataset"
        )
    if split.get("truncated", 0) > 0.1 * documents > 0:
        evidence = f"{split['truncated']:,} of {documents:,} documents are cut at max_length"
        evidence += f": {run.config['max_length']:,}" if "max_length" in run.config else ""
        effect = "the ends of long answers, with their stop tokens, are learned"
        yield Finding(LOSES, "Many documents are cut", evidence, effect, "max_length")
    if split.get("empty_answers", 0) > 0.02 * documents > 0:
        evidence = f"{split['empty_answers']:,} of {documents:,} documents have an empty answer"
        yield Finding(LOSES, "Empty answers are trained", evidence, "the model is not taught to say nothing", "dataset")
    if (contradicting := split.get("contradicting", 0)) > 0.02 * (split.get("rows") or documents) > 0:
        evidence = f"{contradicting:,} answers are rated better and worse than the same other one"
        yield Finding(LOSES, "Rows contradict one another", evidence, "their gradients do not cancel", "dataset")


def _padding(run: Run) -> Iterator[Finding]:
    split = _split(run)
    efficiency = split.get("packing_efficiency")
    if efficiency is not None and efficiency < 0.6 and (split.get("rows") or 0) > 8:
        evidence = f"packed rows are {efficiency:.0%} full"
        yield Finding(COSTS, "Packing leaves rows empty", evidence, "fewer steps for the same tokens", "max_length")
    histogram, rows = split.get("length_histogram") or {}, run.config.get("per_device_train_batch_size") or 1
    lengths = histogram.get("counts") or []
    apart = efficiency is None and not run.config.get("packing") and not run.config.get("padding_free")
    if apart and rows > 1 and sum(lengths) >= 64:
        mean = (split.get("tokens") or 0) / max(split.get("documents") or 1, 1)
        longest = histogram["edges"][-1]
        if mean and longest > 6 * mean:
            evidence = f"documents have {mean:,.0f} tokens on average and up to {longest:,}; {rows} are padded together"
            effect = "a step computes no padding"
            yield Finding(COSTS, "Steps compute much padding", evidence, effect, "packing: true")


def _leakage(run: Run) -> Iterator[Finding]:
    hashes: dict[str, set[str]] = {"train": set(), "eval": set()}
    for line in run.row_losses:
        hashes.setdefault(str(line.get("split")), set()).add(str(line.get("hash")))
    if shared := hashes["train"] & hashes["eval"]:
        evidence = f"{len(shared)} of {len(hashes['eval'])} held-out documents are training documents, too"
        effect = "the held-out loss measures new documents"
        yield Finding(BROKEN, "The evaluation reads training rows", evidence, effect, "eval_dataset, eval_split_size")
    trained = [line.get("hash") for line in run.row_losses if line.get("split") == "train"]
    if len(trained) - len(set(trained)) > 0.1 * len(trained) > 1:
        evidence = f"{len(trained) - len(set(trained))} of {len(trained)} sampled training documents are repeated"
        yield Finding(LOSES, "Training documents are repeated", evidence, "each is learned as often", "dataset")


# --- loss ------------------------------------------------------------------------------------------------------------


def _loss(run: Run) -> Iterator[Finding]:
    losses = _column(run.train, "loss")
    if run.config.get("method", "sft") != "sft" or len(losses) < FEWEST:
        return
    if losses[0] < 0.05:
        evidence = f"{losses[0]:.4f} at step {run.train[0]['step']}"
        effect = "a loss that says something"
        problem = "The loss is implausibly low from the start"
        yield Finding(BROKEN, problem, evidence, effect, "dataset (answers in the prompts?), train_on, adapter_path")
    tenth = max(2, len(losses) // 10)
    start, end = statistics.fmean(losses[:tenth]), statistics.fmean(losses[-tenth:])
    spread = statistics.pstdev(losses[:tenth] + losses[-tenth:])
    rates = _column(run.train, "learning_rate")
    if rates and max(rates) == 0:
        evidence = "the learning rate is 0 in every record"
        yield Finding(BROKEN, "Nothing is learned", evidence, "weights change", "learning_rate, warmup_steps")
    elif end > 1.2 * start and end - start > 3 * spread / math.sqrt(tenth):
        evidence = f"mean loss {start:.3f} in the first tenth of the records, {end:.3f} in the last"
        effect = "the loss falls"
        yield Finding(
            BROKEN, "The loss rises", evidence, effect, "learning_rate (a third), max_grad_norm, warmup_steps"
        )
    elif len(losses) >= 30 and abs(end - start) < 0.002 * start and spread < 0.01 * start:
        evidence = f"mean loss {start:.4f} in the first tenth of the records, {end:.4f} in the last"
        yield Finding(
            LOSES, "The loss stays flat", evidence, "the run learns", "learning_rate (ten times), target_modules"
        )
    yield from _spikes(run, losses)


def _spikes(run: Run, losses: Sequence[float]) -> Iterator[Finding]:
    if len(losses) < 30:
        return
    steps = [record["step"] for record in run.train if isinstance(record.get("loss"), int | float)]
    spikes = []
    for at in range(10, len(losses)):
        window = losses[max(0, at - 20) : at]
        middle = statistics.median(window)
        deviation = statistics.median(abs(value - middle) for value in window)
        if losses[at] > middle + max(12 * deviation, middle):
            spikes.append((steps[at], losses[at], middle))
    if spikes:
        step, loss, middle = max(spikes, key=lambda spike: spike[1] / spike[2])
        evidence = f"{loss:.3f} at step {step:,}, where the median of the steps before is {middle:.3f}"
        evidence += f"; {len(spikes)} such steps" if len(spikes) > 1 else ""
        effect = "one bad row does not move the adapter far"
        yield Finding(LOSES, "The loss spikes", evidence, effect, "max_grad_norm, learning_rate; look at these rows")


def _held_out(run: Run) -> Iterator[Finding]:
    if len(run.evals) < 3:
        return
    metric = run.numbers.evaluated[0].name
    losses = [(record["step"], record["loss"]) for record in run.evals if isinstance(record.get("loss"), int | float)]
    trained = _column(run.train, "loss")
    if len(losses) < 3 or metric != "loss" or len(trained) < FEWEST:
        return
    best_step, best = min(losses, key=lambda pair: pair[1])
    last_step, last = losses[-1]
    middle = len(trained) // 2
    falls = statistics.fmean(trained[middle:]) < statistics.fmean(trained[:middle])
    if best_step < last_step and last > 1.05 * best and falls and not (run.best or {}).get("loaded"):
        evidence = (
            f"held-out loss {best:.4f} at step {best_step:,}, {last:.4f} at step {last_step:,}; training loss falls"
        )
        effect = f"the run ends with the weights of step {best_step:,}"
        keys = "load_best_model_at_end, early_stopping_patience, num_train_epochs"
        yield Finding(LOSES, "The run overfits", evidence, effect, keys)


def _gradients(run: Run) -> Iterator[Finding]:
    norms, limit = _column(run.train, "grad_norm"), run.config.get("max_grad_norm") or 0
    if len(norms) < FEWEST:
        return
    tenth = max(2, len(norms) // 10)
    start, end = statistics.median(norms[: 2 * tenth]), statistics.median(norms[-tenth:])
    if end > 20 * start > 0 and end > 1:
        evidence = f"median norm {start:.3g} at the start, {end:.3g} at the end"
        yield Finding(LOSES, "Gradients grow", evidence, "training is stable", "learning_rate (a third), warmup_steps")
    elif limit and len(norms) >= 20 and statistics.median(norms) > 10 * limit:
        share = sum(norm > limit for norm in norms) / len(norms)
        evidence = (
            f"{share:.0%} of steps exceed max_grad_norm: {limit:g}; the median norm is {statistics.median(norms):.3g}"
        )
        effect = "the step's length follows its gradient again"
        yield Finding(LOSES, "Nearly every gradient is clipped hard", evidence, effect, "max_grad_norm, learning_rate")
    elif max(norms) == 0:
        yield Finding(BROKEN, "Gradients are 0", f"in all {len(norms)} records", "weights change", "target_modules")


# --- policy optimization ---------------------------------------------------------------------------------------------


def _rewards(run: Run) -> Iterator[Finding]:
    equal = _column(run.train, "frac_reward_zero_std")
    if len(equal) >= FEWEST and statistics.fmean(equal) > 0.8:
        evidence = f"in {statistics.fmean(equal):.0%} of groups all answers have one reward, and no gradient"
        effect = "more of the sampled answers train"
        yield Finding(
            LOSES, "Rewards do not tell answers apart", evidence, effect, "reward_funcs, num_generations, dataset"
        )
    cut = _column(run.train, "completions/clipped_ratio")
    if len(cut) >= FEWEST and statistics.fmean(cut) > 0.3:
        evidence = f"{statistics.fmean(cut):.0%} of answers reach max_completion_length"
        effect = "rewards judge whole answers"
        yield Finding(LOSES, "Answers are cut by their limit", evidence, effect, "max_completion_length")


# --- time and memory -------------------------------------------------------------------------------------------------


def _time(run: Run) -> Iterator[Finding]:
    gather, idle = (_column(run.train, key) for key in ("gather_share", "idle_share"))
    for shares, problem, keys in (
        (gather, "Steps wait for sharded weights", "parallel: data instead of shard, or a larger batch"),
        (idle, "Pipeline stages are idle", "gradient_accumulation_steps, pipeline_schedule"),
    ):
        if len(shares) >= FEWEST and statistics.median(shares) > 0.3:
            evidence = f"{statistics.median(shares):.0%} of the median step"
            yield Finding(COSTS, problem, evidence, "up to that much faster", keys)
    pairs = [(r["fastest_seconds"], r["slowest_seconds"]) for r in run.train if r.get("slowest_seconds")]
    if len(pairs) >= FEWEST and (ratio := statistics.median(slow / fast for fast, slow in pairs if fast)) > 1.3:
        evidence = f"the slowest process takes {ratio:.2f} times the fastest one's step"
        yield Finding(COSTS, "Processes are unequally fast", evidence, "all wait less", "packing: true, parallel")
    seconds = _column(run.train[1:], "step_seconds")
    planned = (run.memory or {}).get("step_seconds")
    on_gpu = not str((run.memory or {}).get("device", "cpu")).startswith("cpu")
    if planned and on_gpu and len(seconds) >= FEWEST and statistics.median(seconds) > 2 * planned:
        evidence = f"median {statistics.median(seconds):.3g} s, planned {planned:.3g} s"
        yield Finding(
            COSTS, "Steps are slower than planned", evidence, "see the kernels' reasons", "use_kernels, dtype"
        )
    kernels = (run.environment or {}).get("kernels") or {}
    if on_gpu and kernels.get("enabled") is False:
        yield Finding(COSTS, "Fused kernels are off", str(kernels.get("reason")), "faster steps", "use_kernels: true")


def _memory(run: Run) -> Iterator[Finding]:
    used = [(r["step"], r["memory_bytes"]) for r in run.train if r.get("memory_bytes")]
    capacity = (run.memory or {}).get("capacity_bytes")
    if len(used) < 20 or not capacity:
        return
    middle = len(used) // 2
    (step, half), (last_step, last) = used[middle], used[-1]
    if last > half * 1.05 and last_step > step:
        rate = (last - half) / (last_step - step)
        end = last_step + (capacity - last) / rate
        if end < 10 * last_step:
            evidence = f"{size(half)} at step {step:,}, {size(last)} at step {last_step:,} of {size(capacity)}"
            effect = f"at this rate the memory ends at step {end:,.0f}"
            yield Finding(LOSES, "Memory grows while the run trains", evidence, effect, "packing: true, max_length")


RULES: tuple[Rule, ...] = (
    *(_stopped, _leakage, _end_of_turn, _loss, _held_out, _gradients, _untrained, _rewards),
    *(_checks, _lost_in_merge, _memory, _padding, _time),
)
