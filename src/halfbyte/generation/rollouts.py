"""Rollouts: several completions of many prompts, with the log-probabilities of their tokens.

Rows join and leave one batch (`schedule`) over a paged cache; rows of one prompt share its full pages (`paged`). A
prompt is prefilled once for all its completions. Adapters are applied without merging.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import psutil
import torch
from torch import Tensor

from ..modeling.layer import causal_lm_of
from ..ops.paged_attention import PAGE
from ..tensor import QuantizedTensor
from ..utils.errors import ConfigError, ModelError
from ..utils.hardware import reservable_bytes
from ..utils.notices import notice
from .adapters import Unsupported
from .batch import Batch, Readback, draw
from .cache_dtypes import CACHES
from .images import Columns, ImagePrompt, PromptImages
from .paged import PagedDecoder
from .run import ACTIVE, Lengths, chosen_adapters, new_tokens
from .sampling import Sampling, eos_tokens, report_unread_keys
from .schedule import RESERVED_SEATS, Admission, Group, Pages, Row, Schedule, page_count
from .stock import stock_engine

WEIGHTS = "auto", "packed", "unpacked"
PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}  # prompt tokens per prefill
PACKED_MAX_ROWS = 64  # up to this many rows, a GPU multiplies 4-bit codes faster than 16-bit weights
POSITION_MULTIPLE = 1024  # the number of RoPE positions is a multiple of this


@dataclass(frozen=True)
class Completion:
    """The tokens generated after a prompt.

    Attributes:
        ids: new tokens, including a stop token.
        log_probs: fp32 [len(ids)] on the CPU: log softmax(logits / temperature) over the full vocabulary, ignoring
            top_k, top_p and min_p; temperature 0 counts as 1.
        ended: whether the last token is a stop token (otherwise the length limit was reached).
    """

    ids: list[int]
    log_probs: Tensor
    ended: bool


class Rollouts:
    """The rollout engine of a model; caches its pages and CUDA graphs between calls.

    Args:
        model: a causal LM, or a PeftModel around one; unchanged; dropout is off.
        rows: maximum number of completions in progress.
        memory_gib: memory for pages; None: as much as a call's rows need, at most 80% of the free memory of a GPU or
            half of a CPU's.
        kv_cache: "auto" (the model's dtype), "fp8" or "int4" (`ops.paged_attention4`).
        weights: "packed": each GEMM decodes quantized weights. "unpacked": they are decoded once per call into the
            model's dtype, to the values that training multiplies by. "auto": unpacked where that is faster and takes at
            most 40% of the free memory.

    Raises:
        ConfigError: an argument out of range.
    """

    def __init__(
        self,
        model: Any,
        *,
        rows: int = 256,
        memory_gib: float | None = None,
        kv_cache: str = "auto",
        weights: str = "auto",
    ):
        for name, value, choices in (("kv_cache", kv_cache, tuple(CACHES)), ("weights", weights, WEIGHTS)):
            if value not in choices:
                raise ConfigError(f"{name} is {value!r}", f"use one of {', '.join(choices)}")
        if rows < 1:
            raise ConfigError(f"rows is {rows}", "use 1 or more")
        if memory_gib is not None and not memory_gib > 0:
            raise ConfigError(f"memory_gib is {memory_gib}", "use a number above 0")
        self.model = model
        self.rows = rows
        self.memory_gib = memory_gib
        self.kv_cache = kv_cache
        self.weights = weights
        self._decoder: PagedDecoder | None = None
        self._adapter: str | None = None
        self._batch: Batch | None = None

    def free(self) -> None:
        """Free pages, decoded weights and CUDA graphs; the next call rebuilds them."""
        self._batch = self._decoder = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int = 1,
        *,
        max_new_tokens: Lengths = None,
        sampling: Sampling | None = None,
        stops: Sequence[int] | None = None,
        adapter: str | None = ACTIVE,
        keys: Sequence[int] | None = None,
        images: Sequence[Columns | None] | None = None,
    ) -> list[Completion]:
        """Return `n` completions of each prompt, in the order of the prompts.

        A draw depends on the seed, the prompt's key, the completion's index and the token's position, not on the other
        rows.

        Args:
            prompts: token ids.
            max_new_tokens: maximum for all completions, or one for each prompt; default: as in `generate`.
            sampling: default: temperature 1. Without a seed, torch's global generator provides one.
            stops: tokens that end a completion; default: the EOS tokens of the model's generation config.
            adapter: "active", an adapter's name, or None for the base; its values are read again in each call.
            keys: a number for each prompt, of which the low 32 bits are used; default: its index.
            images: for each prompt, the model's inputs for its images, or None, as in `generate`.

        Raises:
            ModelError: a prompt is empty or exceeds the model's positions together with `max_new_tokens`; the logits
                are NaN; or the memory is too small for one row.
            ConfigError: an argument out of range.
        """
        if n < 1:
            raise ConfigError(f"n is {n}", "ask for 1 or more completions of each prompt")
        keys = range(len(prompts)) if keys is None else keys
        images = [None] * len(prompts) if images is None else images
        for field, values in (("keys", keys), ("images", images)):
            if len(values) != len(prompts):
                raise ConfigError(f"{field} has {len(values)} entries for {len(prompts)} prompts", "give one for each")
        if not prompts:
            return []
        lengths = new_tokens(self.model, prompts, max_new_tokens)
        name = chosen_adapters(self.model, adapter, 1)[0]
        sampling = sampling or Sampling(temperature=1.0)
        seed = int(torch.randint(2**62, ())) if sampling.seed is None else sampling.seed
        groups = [Group(key, prompt, n) for key, prompt in zip(keys, prompts, strict=True)]
        rows = [Row(group, number, limit) for group, limit in zip(groups, lengths, strict=True) for number in range(n)]
        ends = eos_tokens(self.model) if stops is None else set(stops)
        report_unread_keys(self.model, sampling)
        # Long rows must not be left running alone at the end.
        longest_first = sorted(rows, key=lambda row: -row.max_tokens)
        by_group = {
            group: PromptImages(self.model, name, columns)
            for group, columns in zip(groups, images, strict=True)
            if columns
        }
        run = _Generation(longest_first, replace(sampling, seed=None), ends, seed, by_group)
        try:
            decoder, batch = self._ready(rows, name)
        except Unsupported as reason:
            self.free()
            notice(f"rollouts: {reason}", f"rollouts use transformers' own forward in static batches: {reason}")
            with self._evaluating():
                run.in_batches(self.model, name, self.rows)
        else:
            with self._evaluating() if by_group else contextlib.nullcontext():
                run.over_pages(decoder, batch)
        return [Completion(row.ids, torch.tensor(row.log_probs), row.ended) for row in rows]

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Run the model's own forward without dropout inside."""
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)

    @torch.inference_mode()
    def _ready(self, rows: Sequence[Row], adapter: str | None) -> tuple[PagedDecoder, Batch]:
        """Return a decoder with the adapter's values, and a batch with the pages that these rows need or memory allows.

        Raises:
            Unsupported: the model needs transformers' own forward.
        """
        longest = max(len(row.group.prompt) + row.max_tokens for row in rows)
        decoder, unpacked = self._decoder, self._unpacks(min(len(rows), self.rows))
        if decoder is not None and (
            self._adapter != adapter or decoder.unpacked != unpacked or decoder.positions < longest + 1
            or not decoder.renew(self.model)
        ):  # fmt: skip
            decoder = None
            self.free()
        if decoder is None:
            positions = -(-(longest + 1) // POSITION_MULTIPLE) * POSITION_MULTIPLE
            decoder = PagedDecoder(self.model, adapter, positions, CACHES[self.kv_cache], unpacked)
        self._decoder, self._adapter = decoder, adapter
        if self.memory_gib is not None:
            memory = int(self.memory_gib * 2**30)
        else:
            allocated = decoder.pages * decoder.page_bytes + decoder.seats * decoder.state_bytes
            memory = allocated + int(_free_bytes(decoder.device) * (0.8 if decoder.device.type == "cuda" else 0.5))
        seats = self._seats(decoder, rows, memory)
        target_pages, min_pages = pages_needed(rows, seats - RESERVED_SEATS) + 1, page_count(longest) + 1
        if decoder.pages < target_pages or decoder.seats < seats:
            max_pages = max((memory - seats * decoder.state_bytes) // decoder.page_bytes, decoder.pages)
            if max_pages < min_pages:
                needed, available = (f"{n * decoder.page_bytes / 2**30:.2f} GiB" for n in (min_pages, max_pages))
                raise ModelError(
                    f"a row of {longest} tokens needs {needed} of key-value cache, and only {available} are available",
                    "raise memory_gib, lower max_new_tokens, or use kv_cache: fp8 or int4",
                )
            if min(target_pages, max_pages) > decoder.pages or decoder.seats < seats:
                self._batch = None  # its CUDA graphs hold the old addresses
                decoder.make_pages(min(target_pages, max_pages), seats)
        if self._batch is None or self._batch.row_table.shape[1] < page_count(longest + 1):
            self._batch = Batch(decoder, decoder.seats - RESERVED_SEATS, page_count(decoder.positions))
        return decoder, self._batch

    def _seats(self, decoder: PagedDecoder, rows: Sequence[Row], memory: int) -> int:
        """Return the seats for all rows, or for as many as fit their states in half of the memory."""
        if not decoder.state_bytes:
            return self.rows + RESERVED_SEATS
        row_seats = min(self.rows, len(rows))
        pages = (pages_needed(rows, row_seats) + 1) * decoder.page_bytes
        if pages + (row_seats + RESERVED_SEATS) * decoder.state_bytes > memory:
            row_seats = max(1, min(row_seats, memory // 2 // decoder.state_bytes - RESERVED_SEATS))
        return max(row_seats + RESERVED_SEATS, decoder.seats)

    def _unpacks(self, rows: int) -> bool:
        """Return whether to decode the weights once per call."""
        if self.weights != "auto":
            return self.weights == "unpacked"
        parameters: Any = self.model.parameters()  # 3-dimensional stacks of experts stay packed
        weights = [weight for weight in parameters if isinstance(weight.data, QuantizedTensor) and weight.dim() == 2]
        device = next(self.model.parameters()).device
        if not weights or (device.type != "cpu" and rows <= PACKED_MAX_ROWS):
            return False
        if self._decoder is not None and self._decoder.unpacked:  # already decoded
            return True
        return sum(2 * weight.numel() for weight in weights) <= 0.4 * _free_bytes(device)


def _free_bytes(device: torch.device) -> int:
    """Return the free bytes of a device, including torch's cached blocks."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return reservable_bytes(device) + cached


def pages_needed(rows: Sequence[Row], seats: int) -> int:
    """Return the pages with which no row is preempted, if the longest prompts run together."""
    unshared, shared = [], {}
    for row in rows:
        full = len(row.group.prompt) // PAGE
        unshared.append(page_count(len(row.group.prompt) + row.max_tokens) - full)
        shared[row.group] = full + 1
    groups = -(-seats // max(1, len(rows) // len(shared))) + 1
    reserve = 1 + min(seats, len(rows)) // 8
    return sum(sorted(unshared)[-seats:]) + sum(sorted(shared.values())[-groups:]) + reserve


class _Generation:
    """One call of `Rollouts.generate`.

    Args:
        images: of the groups whose prompts have some.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        sampling: Sampling,
        stops: set[int],
        seed: int,
        images: Mapping[Group, PromptImages],
    ):
        self.all_rows = rows
        self.sampling = sampling
        self.stops = stops
        self.seed = seed
        self.images = images

    @torch.inference_mode()
    def over_pages(self, decoder: PagedDecoder, batch: Batch) -> None:
        schedule = Schedule(self.all_rows, Pages(decoder.pages), decoder.seats - RESERVED_SEATS)
        readback, budget = Readback(decoder.device), PREFILL_TOKENS.get(decoder.device.type, PREFILL_TOKENS["cpu"])
        batch.seed.fill_(self.seed)
        use = partial(self._use, schedule.add)
        while schedule.waiting or schedule.seated:
            admission = schedule.admit(budget)
            if admission.documents:
                documents = [(d.tokens, d.pages, d.seat) for d in admission.documents]
                logits = decoder.prefill(documents, self._embedded(admission, decoder.device))
                for document, document_logits in zip(admission.documents, logits, strict=True):
                    document.logits = document_logits
            if admission.copies:
                decoder.copy_pages(admission.copies)
            if admission.states and decoder.state_bytes:
                decoder.copy_states(admission.states)
            if admission.starts:
                started = [row for row, _ in admission.starts]
                logits = torch.stack([d.logits for _, d in admission.starts if d.logits is not None])
                readback.add(batch.begin(started, logits, self.sampling), partial(use, started))
            readback.settle(readback.lag)
            if not schedule.reserve(settled=not len(readback)):
                readback.settle()
                schedule.reserve(settled=True)
            rows = schedule.advance()
            if rows:
                readback.add(batch.step(rows, self.sampling), partial(use, rows))
            readback.settle(readback.lag if rows else 0)

    @torch.inference_mode(False)  # the model's own code may keep tensors, which training reads later
    def _embedded(self, admission: Admission, device: torch.device) -> dict[int, ImagePrompt]:
        """Return the prompts with images among the documents to prefill, by number, and set the shifts of their
        groups."""
        groups = {id(document): row.group for row, document in admission.starts}
        prompts = {}
        for number, document in enumerate(admission.documents):
            group = groups[id(document)]
            if group in self.images:
                prompts[number] = self.images[group].embed(torch.tensor(group.prompt, device=device))
                group.shift = prompts[number].shift
        return prompts

    def _use(self, add: Callable[..., None], rows: Sequence[Row], tokens: list[int], log_probs: list[float]) -> None:
        """Pass tokens that the host has read to `add`."""
        for row, token, log_prob in zip(rows, tokens, log_probs, strict=True):
            if log_prob != log_prob:
                raise ModelError("the model's logits are NaN", "check its weights, and its adapter's")
            if not row.finished:  # a finished row may have one more token in flight
                add(row, token, log_prob, self.stops)

    def in_batches(self, model: Any, adapter: str | None, max_rows: int) -> None:
        """Generate in batches of rows with similar prompt lengths; a batch ends with its last row."""
        device = next(model.parameters()).device
        ordered = sorted(self.all_rows, key=lambda row: len(row.group.prompt))
        seed = torch.tensor([self.seed], device=device)
        for rows in (ordered[at : at + max_rows] for at in range(0, len(ordered), max_rows)):
            longest = len(rows[-1].group.prompt)
            engine = stock_engine(model, [adapter] * len(rows), longest + max(row.max_tokens for row in rows))
            padding = [longest - len(row.group.prompt) for row in rows]
            tokens = [[0] * short + list(row.group.prompt) for short, row in zip(padding, rows, strict=True)]
            images = {at: self.images[row.group] for at, row in enumerate(rows) if row.group in self.images}
            batch = torch.tensor(tokens, device=device), torch.tensor(padding, device=device)
            logits = engine.prefill(*batch, images=images)
            keys = [[row.group.key, row.generation, len(row.group.prompt)] for row in rows]
            noise_keys = torch.tensor(keys, device=device)
            while True:
                drawn, log_probs = draw(logits.contiguous(), noise_keys, seed, self.sampling)
                self._use(Row.add, rows, drawn.tolist(), log_probs.tolist())
                if all(row.finished for row in rows):
                    break
                logits, noise_keys = engine.step(drawn), noise_keys + noise_keys.new_tensor([0, 0, 1])


# --- TRL --------------------------------------------------------------------------------------------------------------


def rollout_func(model: Any, **options: Any) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Make a `rollout_func` for GRPOTrainer (TRL 1.16) that generates with `Rollouts`, not transformers' `generate`.

    It reads the packed weights of the model in training and its current adapter.

    Args:
        model: the trainer's model, or the PeftModel around it.
        options: of `Rollouts`.

    Raises:
        ConfigError: an option is out of range; or, when called, the trainer trains another model.
    """
    engine = Rollouts(model, **options)

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return prompt_ids, completion_ids and logprobs, one list for each of `prompts`."""
        trained = trainer.accelerator.unwrap_model(trainer.model)
        if causal_lm_of(trained) is not causal_lm_of(model):
            raise ConfigError("rollout_func: the trainer trains another model", "make it of the model you give TRL")
        engine.model, tokenizer = trained, trainer.processing_class
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        counts = {count for _, count in groups}
        n = counts.pop() if len(counts) == 1 else 1
        unique_prompts = [prompt for prompt, _ in groups] if n > 1 else prompts
        template = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        ids: list[list[int]] = []
        for prompt in unique_prompts:  # a text, or chat messages, tokenized as TRL does
            if isinstance(prompt, str):
                ids.append(tokenizer(prompt)["input_ids"])
                continue
            encoded = tokenizer.apply_chat_template(
                [prompt], add_generation_prompt=True, tokenize=True, return_dict=True, **template
            )
            ids.append(encoded["input_ids"][0])
        sampling = Sampling(trainer.temperature, trainer.top_k or 0, trainer.top_p, min_p=trainer.min_p or 0.0)
        completions = engine.generate(
            ids, n, max_new_tokens=trainer.max_completion_length, sampling=sampling, stops=trainer.eos_token_ids
        )
        engine.free()
        return {
            "prompt_ids": [prompt for prompt in ids for _ in range(n)],
            "completion_ids": [completion.ids for completion in completions],
            "logprobs": [completion.log_probs.tolist() for completion in completions],
        }

    return rollout
