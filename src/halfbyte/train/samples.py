"""A few prompts answered before, during and after training, to show what changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..batch import Batch
from ..config.schema import RunKeys
from ..data.answer_documents import documents_of
from ..data.chat import prompt_text
from ..data.image_processor import ImageProcessor
from ..data.images import IMAGES
from ..generation import forget, generate
from ..generation.decoder import context_length
from ..generation.images import Columns
from ..generation.sampling import stop_tokens
from ..memory.allocators import GraphMemory, free_stream_caches
from ..ops import IGNORE_INDEX
from ..parallel.shard.model import sharded
from ..runs.metrics import MetricsFile
from ..utils.hardware import free_cached_memory
from ..utils.notices import notice
from ..utils.waiting import waiting
from .checkpoint import random_states, set_random_states

if TYPE_CHECKING:
    from .pipeline_stepper import PipelinedStepper

TEXT_PROMPT_TOKENS = 32  # tokens of a plain text that serve as its prompt
PROMPTS_PER_BATCH = {"cpu": 8}  # by device type; on other devices the plan includes the KV cache of one prompt
LONGEST_PROMPT = 512  # longer prompts are chosen only if too few shorter ones exist
PIPELINE_WIDTH = 64  # through a pipeline, texts are padded to multiples of this


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        text: of the ids, with special tokens; an image has one of its tokens.
        reference: the data's answer; None if the prompt is given in the config.
        images: stored images, in their order.
        processor: reads them.
    """

    ids: list[int]
    text: str
    reference: str | None = None
    images: Sequence[Mapping[str, Any]] = ()
    processor: ImageProcessor | None = None

    @property
    def image_inputs(self) -> Columns | None:
        """The model's inputs for the images; None without images."""
        if self.processor is None or not self.images:
            return None
        return self.processor.columns([self.images], torch.tensor([self.ids]))


def pick_prompts(
    config: RunKeys, tokenizer: PreTrainedTokenizerBase, rows: Dataset, *, templated: bool
) -> list[Prompt]:
    """Return the prompts of `config.sample_prompts`: the given texts, or the prompts of its number of first `rows`.

    Args:
        rows: tokenized rows, held-out ones if the run has some.
        templated: whether the data uses the chat template; given prompts then use it too.
    """
    if isinstance(config.sample_prompts, list):
        return [_given(text, tokenizer, templated) for text in config.sample_prompts]
    count = config.sample_prompts
    images = ImageProcessor(config, tokenizer) if IMAGES in rows.column_names else None
    candidates = [from_row(row, tokenizer, images) for row in rows.select(range(min(len(rows), 4 * count)))]
    return sorted(candidates, key=lambda prompt: len(prompt.ids) > LONGEST_PROMPT)[:count]


def _given(text: str, tokenizer: PreTrainedTokenizerBase, templated: bool) -> Prompt:
    if not templated:
        return Prompt(tokenizer(text)["input_ids"], text)
    turns = [{"role": "user", "content": text}]
    rendered = prompt_text(tokenizer, turns)
    return Prompt(tokenizer(rendered, add_special_tokens=False)["input_ids"], rendered)


def from_row(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None = None) -> Prompt:
    """Return the first document of a row up to its first trained token; the first trained part is the reference.

    Args:
        images: reads the row's images; None: rows have none.
    """
    document = documents_of(row)[0] if row.get("seq_lengths") else row
    ids, labels = document["input_ids"], document["labels"]
    length = len(ids)
    token = None if images is None else images.image_token_id
    stored = row.get(IMAGES) or []
    ends = list(accumulate(image["tokens"] for image in stored))
    begins = [at for at in range(1, length) if labels[at] != IGNORE_INDEX == labels[at - 1]] or [length]
    if images is not None and stored and images.copies(stored[0]) > 1:  # alone, the first image has other tokens
        begins = [at for at in begins if ids[:at].count(token) != ends[0]] or begins
    begin = begins[0]
    if begin <= 1:  # plain text: all tokens are trained
        begin = max(1, min(TEXT_PROMPT_TOKENS, length // 2))
    while ids[:begin].count(token) not in (0, *ends):  # an image is shown in full
        begin += 1
    end = next((at for at in range(begin, length) if labels[at] == IGNORE_INDEX), length)
    prompt, reference = list(ids[:begin]), _text(tokenizer, ids[begin:end])
    if images is None or not ends:
        return Prompt(prompt, str(tokenizer.decode(prompt)), reference)
    shown = [image for image, end in zip(stored, ends, strict=True) if end <= prompt.count(token)]
    once = [now for before, now in pairwise([None, *prompt]) if now != token or before != token]
    return Prompt(prompt, str(tokenizer.decode(once)), reference, shown, images)


def with_features(prompts: Sequence[Prompt], rows: Dataset) -> list[Prompt]:
    """Return prompts whose images name the files of their features, as those of the rows that they are from do."""
    if not any(prompt.images for prompt in prompts):
        return list(prompts)
    named = {image["sha256"]: image for row in rows[IMAGES] for image in row}
    return [replace(prompt, images=[named[image["sha256"]] for image in prompt.images]) for prompt in prompts]


def _text(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(frozen=True)
class SampleLog:
    """Answers prompts every few steps of a run, and writes them to samples.jsonl.

    Attributes:
        file: samples.jsonl.
        prompts: the prompts.
        answer: returns the model's answers to them; collective.
        steps: optimizer steps between answers.
        writes: whether this rank writes the file.
    """

    file: MetricsFile
    prompts: Sequence[Prompt]
    answer: Callable[[], list[str]]
    steps: int
    writes: bool

    def is_due(self, step: int) -> bool:
        """Return whether the prompts are answered after `step`."""
        return step % self.steps == 0

    def sample(self, step: int, graphs: GraphMemory, device: torch.device) -> None:
        """Answer the prompts after `step`, and write the answers; random states do not change.

        Args:
            graphs: of the run's steps, which are freed if the memory does not suffice.
        """
        random = random_states()
        with free_stream_caches(graphs, device):
            answers = graphs.retry_without_graphs(self.answer)
        set_random_states(random)
        self.write(step, answers)

    def write(self, step: int, answers: Sequence[str]) -> None:
        """Write the answers after `step`, unless a run that is resumed has written them."""
        if not self.writes or any(record["step"] == step for record in self.file.records()):
            return
        for prompt, answer in zip(self.prompts, answers, strict=True):
            line = {"kind": "sample", "step": step, "prompt": prompt.text, "answer": answer}
            self.file.append({**line, "reference": prompt.reference})


@waiting("answering the prompts of generations.json")
def answer_prompts(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    data_stops: Sequence[str],
    pipelined: PipelinedStepper | None,
) -> list[str]:
    """Return the model's answers to the prompts of generations.json.

    Args:
        data_stops: tokens that end the trained turns.
        pipelined: runs the stages of a pipeline; None: the model is in one piece.
    """
    stops = stop_tokens(tokenizer, model, data_stops)
    if pipelined is not None:
        return answer_in_stages(pipelined, tokenizer, prompts, max_new_tokens=max_new_tokens, stops=stops)
    return answer(model, tokenizer, prompts, max_new_tokens=max_new_tokens, stops=stops)


def answer(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, max_new_tokens: int, stops: list[int]
) -> list[str]:
    """Return each prompt's greedy continuation within the model's context, without special tokens.

    Frees torch's cached memory before and after. A sharded model, which is gathered for each token, continues all
    prompts in one batch; a CPU continues several.
    """
    model.eval()
    limit, device = context_length(model), next(model.parameters()).device
    lengths = [max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt.ids)) for prompt in prompts]
    fitting = [at for at, new in enumerate(lengths) if new > 0]
    answers = [""] * len(prompts)
    if long := len(prompts) - len(fitting):
        notice("long-samples", f"{long} of {len(prompts)} sample prompts fill the model's context of {limit} tokens: "
               "they get no answers")  # fmt: skip
    free_cached_memory(device)
    try:
        size = len(fitting) if sharded(model) else PROMPTS_PER_BATCH.get(device.type, 1)
        for first in range(0, len(fitting), size or 1):
            batch = fitting[first : first + size]
            continuations = generate(
                model,
                [prompts[at].ids for at in batch],
                max_new_tokens=[lengths[at] for at in batch],
                stops=stops,
                images=[prompts[at].image_inputs for at in batch],
            )
            for at, tokens in zip(batch, continuations, strict=True):
                answers[at] = _text(tokenizer, tokens)
    finally:
        forget(model)
        free_cached_memory(device)  # other streams cannot use the memory pools of decoding graphs
    return answers


def answer_in_stages(
    stepper: PipelinedStepper,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    stops: Sequence[int],
) -> list[str]:
    """Return each prompt's greedy continuation through a pipeline, without a KV cache: one forward per token."""
    model, device = stepper.stages.model, stepper.pipeline.device
    limit = context_length(model) or math.inf
    texts, unfinished = [list(prompt.ids) for prompt in prompts], list(range(len(prompts)))
    model.eval()

    def read(batch: Batch) -> Tensor:
        with stepper.autocast():
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        return logits[0, batch["last"]].argmax(-1, keepdim=True).float()

    for _ in range(max_new_tokens):
        unfinished = [index for index in unfinished if len(texts[index]) < limit]
        if not unfinished:
            break
        tokens = stepper.map_last_stage([_padded(texts[index], device) for index in unfinished], read, 1)
        for index, token in zip(unfinished, tokens[:, 0].long().tolist(), strict=True):
            texts[index].append(token)
        unfinished = [index for index in unfinished if texts[index][-1] not in stops]
    answers = (text[len(prompt.ids) :] for text, prompt in zip(texts, prompts, strict=True))
    return [_text(tokenizer, ids) for ids in answers]


def _padded(ids: list[int], device: torch.device) -> dict[str, Any]:
    """Return a row with padding on its right, which causal attention of the text does not read."""
    row = F.pad(torch.tensor([ids], device=device), (0, -len(ids) % PIPELINE_WIDTH))
    return {"input_ids": row, "last": len(ids) - 1}
