"""Where the rows of policy optimization come from: prompts are answered, the answers rewarded and compared.

A generation is of `answers_a_generation` answers, to the next prompts of the epoch's order. It is drawn from the
weights as they are when its first micro-batch is asked for, and it lasts for `steps_per_generation` micro-batches,
`num_iterations` times. Checkpoints hold it, with log-probabilities, rewards and advantages, so a run that resumes
within it trains on the very same rows; what is drawn for the next one depends on the run's seed and its number alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfbyte.batch import to_device
from halfbyte.config import RunConfig
from halfbyte.data.shared_prefix import GIVEN
from halfbyte.generation import Completion, Sampling
from halfbyte.methods.answers import as_reference
from halfbyte.methods.grpo import BONUS, CORRECTS, PolicyOptimization
from halfbyte.ops import IGNORE_INDEX
from halfbyte.plan.memory_plan import RolloutPlan
from halfbyte.rl.rewards.score import Rewards
from halfbyte.utils.errors import CheckpointError, ConfigError
from halfbyte.utils.files import write_json

from ..reading import read_json
from ..reading.tensors import ADAPTER
from ..runs.layout import COMPLETIONS_PER_GENERATION
from ..runs.layout import GENERATION_STATE as STATE
from ..train.metrics import MetricsFile
from ..train.sampler import Counting
from ..train.stepper import Stepper, beside_graphs
from .importance import Mismatch
from .rollout_batch import Answered, Monotony
from .served import ServedRollouts, engine_of
from .statistics import means_of, numbers_of, passes

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from ..train.callbacks import Callbacks

ROUNDS = 10  # of sampling for groups with spread, at most (DAPO's own code has as many)
KEPT = COMPLETIONS_PER_GENERATION
MOST = 64 * 2**20  # bytes of a generation's lines in completions.jsonl, as far as possible
COMPARED = 512  # tokens by which a server's weights are compared with those that train
EVALUATION = 2**30  # the number of the generation whose draws evaluations have
AGAIN = "resume from an earlier checkpoint, or start a new run in another output_dir"

Row = dict[str, Any]


@dataclass
class Generation:
    """The answers that a run is training on.

    Attributes:
        number: of this generation in the run, from 0.
        rows: the answers, in the order of training; see `PolicyOptimization`.
    """

    number: int
    rows: list[Row] = field(default_factory=list)


class _Share:
    """The micro-batches of an epoch, from one of them on; `total` of them."""

    def __init__(self, total: int, made: Callable[[], Iterator[dict[str, Any]]]):
        self.total, self._made = total, made

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._made()


class Generations:
    """Answers prompts for a run.

    Args:
        model: that trains; answers are drawn from it as it is, its adapter included.
        rows: the prompts.
        computing: what a forward of training runs in.
        stops: tokens that end an answer.
        file: completions.jsonl.
        shared: adjacent answers share their prompt in training.
        plan: of rollouts; None: as `Rollouts` finds best.
        files: SHA-256 of further files that a resumed run must find as they are.
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
        files: Mapping[str, str] | None = None,
        stepper: Stepper | None = None,
    ):
        self.config, self.method, self.model, self.tokenizer = config, method, model, tokenizer
        self.rows, self.rewards, self.device, self.computing = rows, rewards, device, computing
        self.stops, self.file, self.shared = stops, file, shared
        self.plan, self.files = plan, rewards.files | dict(files or {})
        self.engine = engine_of(config, model, config.answers_per_generation, plan)
        self.group = config.group_size
        self.size = config.per_device_train_batch_size
        self.batches = config.micro_batches_per_generation
        self._current: Generation | None = None
        self._since: list[dict[str, float]] = []  # numbers of the generations since the last record
        self._last: dict[str, float] = {}
        self._monotony = Monotony()
        self.stepper = stepper or Stepper(lambda batch: {})
        server = self.engine if isinstance(self.engine, ServedRollouts) else None
        self.mismatch = Mismatch(config, method, server)
        self._compared_engines = server is None

    # --- rows for the loop -------------------------------------------------------------------------------------------

    def share(
        self, collate: Counting, epoch: int, skip: int, callbacks: Callbacks, settle: Callable[[], None]
    ) -> _Share:
        """Return the micro-batches of an epoch after the first `skip`; each generation is sampled when it is reached.

        Args:
            settle: reads the numbers of the last step, called before a generation is sampled.
        """
        prompts = self.config.answers_per_generation // self.group
        count, lasts = len(self.rows) // prompts, self.batches * self.config.num_iterations
        order = torch.randperm(
            len(self.rows), generator=torch.Generator().manual_seed(self.config.seed + epoch)
        ).tolist()

        def made() -> Iterator[dict[str, Any]]:
            for at in range(skip // lasts, count):
                chosen = order[at * prompts : (at + 1) * prompts]
                if self._current is None or self._current.number != epoch * count + at:
                    settle()
                rows = self._generation(epoch * count + at, chosen, collate, callbacks).rows
                for batch in range(max(skip - at * lasts, 0), lasts):
                    begin = batch % self.batches * self.size
                    yield collate(rows[begin : begin + self.size])

        return _Share(count * lasts - skip, made)

    def taken(self) -> dict[str, float]:
        """Means over the generations since the last record, or else those of the one that is trained on."""
        found, self._since = means_of(self._since) if self._since else self._last, []
        return found

    def _generation(self, number: int, chosen: list[int], collate: Counting, callbacks: Callbacks) -> Generation:
        """The generation of a number: the present one, or a new one."""
        if self._current is None or self._current.number != number:
            self.mismatch.look()
            answered = self._sampled(chosen, number, _progress(callbacks))
            self._monotony.look_at(answered)
            began = time.perf_counter()
            rows = self._compared(answered, collate)
            answered.numbers["compare_seconds"] = time.perf_counter() - began
            self._write(answered, rows, callbacks)
            self._current = Generation(number, self._weighed(self._shuffled(rows, number)))
            self._last = answered.numbers
            self._since.append(self._last)
        return self._current

    def _shuffled(self, rows: list[Row], number: int) -> list[Row]:
        """`rows` in the order of training: by groups, whose answers stay together and may share their prompt."""
        drawn = torch.Generator().manual_seed(self.config.seed + number)
        groups = torch.randperm(len(rows) // self.group, generator=drawn).tolist()
        return [rows[group * self.group + at] for group in groups for at in range(self.group)]

    def _sampled(self, chosen: list[int], number: int, progress: Mapping[str, Any]) -> Answered:
        """Answers to the prompts of these indices.

        With `dynamic_sampling` (DAPO, arXiv:2503.14476, section 3.2) groups without spread are exchanged for those of
        other prompts, in an order that the generation's number decides.
        """
        found = self.answer(chosen, self._prompts(chosen), self.group, number, progress)
        if not self.config.dynamic_sampling:
            return found
        drawn = torch.Generator().manual_seed(self.config.seed + number)
        others = [at for at in torch.randperm(len(self.rows), generator=drawn).tolist() if at not in {*chosen}]
        asked, seconds = len(chosen), {name: found.numbers[name] for name in ("rollout_seconds", "reward_seconds")}
        for _ in range(ROUNDS - 1):
            dull = found.dull(self.weights, self.group)
            taken, others = others[: len(dull)], others[len(dull) :]
            if not taken:
                break
            more = self.answer(taken, self._prompts(taken), self.group, number, progress)
            asked += len(taken)
            seconds = {name: value + more.numbers[name] for name, value in seconds.items()}
            useless = more.dull(self.weights, self.group)
            useful = [at for at in range(len(taken)) if at not in useless]
            for own, theirs in zip(dull, useful, strict=False):
                found.exchange(own, more, theirs, self.group)
        found.numbers = numbers_of(found.completions, found.scored, self.weights, self.group) | seconds
        found.numbers["dynamic_sampling/prompts"] = asked
        return found

    def _prompts(self, indices: list[int]) -> list[Row]:
        return [self.rows[index] for index in indices]

    # --- answers and rewards -----------------------------------------------------------------------------------------

    def answer(
        self, indices: list[int], prompts: list[Row], each: int, number: int, progress: Mapping[str, Any]
    ) -> Answered:
        """Draw `each` answers to every prompt, and ask for their rewards.

        Args:
            indices: of the prompts; they and `number`, of a generation, decide what is drawn.
            progress: what reward functions are told of the run.
        """
        completions, texts, drawn = self.draw(indices, prompts, each, number)
        began = time.perf_counter()
        asked = [row for row in prompts for _ in range(each)]
        columns = {name: [row["columns"].get(name) for row in asked] for name in self.rewards.columns}
        turns = [_as_turns(row["prompt"], text) for row, text in zip(asked, texts, strict=True)]
        ids = [list(completion.ids) for completion in completions]
        prompt_ids = [row["prompt_ids"] for row in asked]
        read = [text for row in prompts for text in [str(self.tokenizer.decode(row["prompt_ids"]))] * each]
        with beside_graphs(self.stepper, self.device):  # models may judge
            scored = self.rewards.score(
                [row["prompt"] for row in asked], turns, ids, columns, progress, prompt_ids, read
            )
        numbers = numbers_of(completions, scored, self.weights, each)
        numbers |= {"rollout_seconds": drawn, "reward_seconds": time.perf_counter() - began}
        return Answered(asked, completions, texts, scored, numbers)

    def draw(
        self, indices: list[int], prompts: list[Row], each: int, number: int
    ) -> tuple[list[Completion], list[str], float]:
        """`each` answers to every prompt, a prompt's behind each other, their texts, and the seconds that took."""
        config, began = self.config, time.perf_counter()
        self.model.eval()
        sampling = Sampling(
            config.temperature, config.top_k, config.top_p, seed=config.seed + (number << 32), min_p=config.min_p or 0.0
        )
        given = [row["prompt_ids"] for row in prompts]
        completions = self._drawn(given, each, indices, sampling)
        seconds = time.perf_counter() - began
        if not self._compared_engines:
            self._compare_engines([ids for ids in given for _ in range(each)], completions)
        texts = [str(self.tokenizer.decode(each.ids, skip_special_tokens=True)) for each in completions]
        return completions, texts, seconds

    def _drawn(self, prompts: list[list[int]], each: int, keys: list[int], sampling: Sampling) -> list[Completion]:
        def draw() -> list[Completion]:
            stays = False
            try:
                found = self.engine.generate(
                    prompts,
                    each,
                    max_new_tokens=self.config.max_completion_length,
                    sampling=sampling,
                    stops=self.stops,
                    keys=keys,
                )
                stays = self.plan is not None and self.plan.stays
                return found
            finally:
                if not stays:  # a step needs the memory, and so does another try
                    self.engine.free()

        with beside_graphs(self.stepper, self.device):
            return self.stepper.with_room(draw)

    def _compare_engines(self, prompts: list[list[int]], completions: list[Completion]) -> None:
        """Whether a server that answers for the first time has the weights of this model, by a few of its answers."""
        assert isinstance(self.engine, ServedRollouts)
        collate = Counting(self.method, self.method.collator(self.config, self.tokenizer, self.device))
        blank = {"advantage": 0.0, "items": 0.0, CORRECTS: False}
        rows: list[Row] = []
        for ids, answer in zip(prompts, completions, strict=True):
            if sum(len(row["sampled"]) for row in rows) < COMPARED:
                rows.append(as_row(ids, answer.ids) | blank | {"sampled": answer.log_probs.tolist()})
        with beside_graphs(self.stepper, self.device):
            self.stepper.with_room(partial(self._score, rows, "here", collate))
        there, here = (torch.tensor([x for row in rows for x in row[name]]) for name in ("sampled", "here"))
        self._compared_engines = self.engine.check_same_model(there, here)

    @property
    def weights(self) -> list[float]:
        """Of the reward functions."""
        return self.config.reward_weights or [1.0] * len(self.rewards.specs)

    def _compared(self, answered: Answered, collate: Counting) -> list[Row]:
        """The answers as rows of training, with their advantages."""
        rows = []
        for prompt, completion in zip(answered.prompts, answered.completions, strict=True):
            given = prompt["prompt_ids"]
            trained = completion.ended or not self.config.mask_truncated_completions
            row = as_row(given, completion.ids, trained)
            row |= {"sampled": completion.log_probs.tolist() if trained else []}
            row |= {GIVEN: len(given)} if self.shared else {}
            rows.append(row | {"advantage": 0.0, "items": 0.0, CORRECTS: self.mismatch.corrects})
        with beside_graphs(self.stepper, self.device):
            divergence = self.stepper.with_room(partial(self._add_log_probs, rows, collate))
        advantages = self.method.advantages(answered.rewards, divergence)
        for row, advantage in zip(rows, advantages.tolist(), strict=True):
            row["advantage"] = advantage
        return rows

    @property
    def _moves(self) -> bool:
        """Whether the model moves on while a generation lasts, so that log-probabilities from before are needed."""
        return self.batches * self.config.num_iterations > self.config.gradient_accumulation_steps

    def _add_log_probs(self, rows: list[Row], collate: Counting) -> Tensor | None:
        """What the policy, as it is, and the reference make of the answers, where either is needed.

        Returns:
            log π/π_ref [N] of whole answers, where the reward has it as a part.
        """
        apart = self.config.method == "rloo" and bool(self.config.beta)
        if self._moves or apart:
            self._score(rows, "old", collate)
        if self.config.beta:
            with as_reference(self.model):
                self._score(rows, "reference", collate)
        if not apart:
            return None
        found = torch.tensor([sum(row["old"]) - sum(row["reference"]) for row in rows])
        for row in rows:
            del row["reference"]
            if not self._moves:
                del row["old"]
        return found

    @torch.no_grad()
    def _score(self, rows: list[Row], name: str, collate: Counting) -> None:
        """Give each row the log-probabilities of its answer's tokens, by the training forward, as `name`."""
        for begin in range(0, len(rows), self.size):
            some = rows[begin : begin + self.size]
            batch = to_device(collate.collate(some), self.device)
            with self.computing():
                log_probs, _ = self.method.log_probs(self.model, batch)
            lengths = [len(row["sampled"]) for row in some]
            parts = log_probs[: sum(lengths)].cpu().split(lengths)
            for row, part in zip(some, parts, strict=True):
                row[name] = part.tolist()

    def _weighed(self, rows: list[Row]) -> list[Row]:
        """`rows`, each with its part of what its step's loss is divided by, and of its step's mean entropy."""
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

    # --- what is left behind -----------------------------------------------------------------------------------------

    def _write(self, answered: Answered, rows: list[Row], callbacks: Callbacks) -> None:
        """Lines of completions.jsonl; a step's are those of the generation that began with it."""
        if self.file.path.exists() and self.file.path.stat().st_size > MOST:
            return
        scored, step = answered.scored, callbacks.state.global_step + 1
        for at in range(min(len(rows), KEPT)):
            completion = answered.completions[at]
            line = {"kind": "completion", "step": step, "prompt": answered.prompts[at]["prompt"]}
            line |= {"completion": answered.texts[at], "tokens": len(completion.ids), "ended": completion.ended}
            line |= {"rewards": {name: values[at] for name, values in scored.rewards.items()}}
            line |= {name: rows[at][name] for name in ("advantage",) if name in rows[at]}
            line |= {name: values[at] for name, values in scored.extra.items() if name not in line}
            self.file.append(line)

    def save(self, folder: Path) -> None:
        """Put what resuming needs beside the weights of a checkpoint."""
        current = None if self._current is None else asdict(self._current)
        answered = None if self.plan is None else [self.plan.weights, self.plan.pages]
        state: dict[str, Any] = {
            "current": current,
            "since": self._since,
            "last": self._last,
            "files": self.files,
        }
        state |= {"answered": answered, "outside": self.mismatch.outside}
        state["corrects"] = self.mismatch.corrects
        state["monotony"] = self._monotony.seen
        write_json(folder / STATE, state)

    def load(self, checkpoint: Path) -> None:
        """Go on with the generation that a checkpoint holds.

        Raises:
            CheckpointError: it holds none.
        """
        state = read_generation(checkpoint)
        self._current = None if state["current"] is None else Generation(**state["current"])
        self._since, self._last = state["since"], state["last"]
        self.mismatch.outside = state.get("outside", 0.0)
        self.mismatch.corrects = state.get("corrects", self.mismatch.corrects)
        self._monotony.seen = {name: (value, times) for name, (value, times) in state.get("monotony", {}).items()}

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, held_out: Dataset, callbacks: Callbacks) -> dict[str, float]:
        """Rewards and lengths of answers to the held-out prompts, which are drawn alike each time."""
        each = self.config.num_generations_eval or self.group
        prompts = [held_out[index] for index in range(len(held_out))]
        answered = self.answer(list(range(len(prompts))), prompts, each, EVALUATION, _progress(callbacks))
        numbers = answered.numbers | passes(next(iter(answered.scored.rewards.values())), each)
        return {name: value for name, value in numbers.items() if not name.endswith("seconds")}

    def close(self) -> None:
        """End the processes of reward functions, and give pages back."""
        self.rewards.close()
        self.engine.free()
        if isinstance(self.engine, ServedRollouts):
            self.engine.close()


def read_generation(checkpoint: Path) -> dict[str, Any]:
    """The generation that a checkpoint holds.

    Raises:
        CheckpointError: it is not what halfbyte wrote.
    """
    state = read_json(checkpoint / STATE, CheckpointError, AGAIN)
    if not isinstance(state, dict) or {"current", "since", "last", "files"} - state.keys():
        raise CheckpointError(f"{checkpoint / STATE} is not what halfbyte wrote", AGAIN)
    return state


def answered_with(checkpoint: Path) -> tuple[str, int] | None:
    """How rollouts of the run that made `checkpoint` read weights, and their bytes of pages; None where it is older.

    Raises:
        CheckpointError: it is not what halfbyte wrote.
    """
    match read_generation(checkpoint).get("answered"):
        case None:
            return None
        case ["packed" | "unpacked" as weights, int() as pages]:
            return weights, pages
    raise CheckpointError(f"{checkpoint / STATE} is not what halfbyte wrote", AGAIN)


def digest_of(adapter: Path) -> dict[str, str]:
    """SHA-256 of a saved adapter, by the path of its file."""
    file = (adapter / ADAPTER).resolve()
    with file.open("rb") as opened:
        return {str(file): hashlib.file_digest(opened, "sha256").hexdigest()}


def check_same_files(files: Mapping[str, str], checkpoint: Path) -> None:
    """The files of reward functions, and of the reference, must be those that the checkpoint's run had.

    Args:
        files: their SHA-256, by path.

    Raises:
        ConfigError: one has changed.
    """
    before = read_generation(checkpoint)["files"]
    for path, digest in files.items():
        if path in before and before[path] != digest:
            raise ConfigError(
                f"{path} has changed since {checkpoint} was made",
                "restore it, or start a new run in another output_dir (adapter_path continues weights)",
            )


def as_row(prompt: Sequence[int], answer: Sequence[int], trained: bool = True) -> Row:
    """A text of a prompt and its answer, with labels where that is trained."""
    ids, given = list(answer), list(prompt)
    labels = ids if trained else [IGNORE_INDEX] * len(ids)
    return {"input_ids": given + ids, "labels": [IGNORE_INDEX] * len(given) + labels}


def _as_turns(prompt: Any, text: str) -> Any:
    """An answer in the form of its prompt: a text, or turns."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _progress(callbacks: Callbacks) -> Mapping[str, Any]:
    """What reward functions are told of the run, as transformers names it."""
    state = callbacks.state
    names: Sequence[str] = ("global_step", "max_steps", "num_train_epochs", "epoch")
    return {name: getattr(state, name) for name in names}
