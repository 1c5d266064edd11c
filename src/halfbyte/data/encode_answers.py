"""Convert rows of preference and RL training to token ids of prompts and answers, and masks of trained tokens.

A prompt and an answer are tokenized together, as in supervised fine-tuning, and split where the answer starts. A token
across the border belongs to the answer. Tokens on which a row's answers differ belong to the answers, even before the
first trained token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..utils.errors import DataError
from ..utils.text import brief
from .encode import CUT_AWAY, TOO_LONG, UNTRAINED, Encoder, RenderedText, check_rendered, has_answer, instruction_of
from .formats import Document
from .image_processor import ESCAPE
from .images import IMAGES
from .preference import Kind

EQUAL = "with two equal answers"
NO_PROMPT = "without a token that belongs to the prompt only"
CUT = "with an answer cut at max_length"
NO_ROOM = "with a prompt that leaves no room for an answer"
NAMES: dict[Kind, tuple[str, ...]] = {
    "pairs": ("chosen", "rejected"),
    "unpaired": ("completion",),
    "prompts": (),
    "stepwise": ("steps",),
}


@dataclass(frozen=True)
class _Encoded:
    """A prompt with one answer.

    Attributes:
        trained: bool, one per id.
        ends: index and id of the token that ends each trained turn.
        begin: index of the answer's first token.
        beyond: estimated tokens after the tokenized beginning.
        across: number of tokens across the border of prompt and answer.
    """

    ids: np.ndarray
    trained: np.ndarray
    ends: list[tuple[int, int]]
    begin: int
    beyond: int
    across: int


class AnswerEncoder(Encoder):
    """Converter from rows (JSON text, see `data.preference`) to columns of ids and masks.

    Args:
        tokenizer, template, max_length, overlong: as in `Encoder`; `max_length` bounds a prompt with one answer.
        row_type: type of the rows.
        everything: train every token of an answer, including turns of other roles.
        room: tokens that a prompt without answers must leave for an answer.
        separator: text after each step.
        uncut: drop rows with a truncated answer: a reward model scores the end of an answer, which truncation changes.
    """

    def __init__(
        self,
        *args: Any,
        row_type: Kind,
        everything: bool = False,
        room: int = 1,
        separator: str = "\n",
        uncut: bool = False,
        **options: Any,
    ):
        super().__init__(*args, **options)
        self.row_type, self.everything = row_type, everything
        self.room, self.separator = room, separator
        self.uncut = uncut

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Convert `document` and `location` to columns.

        The columns are prompt_ids; `_ids` and `_mask` of each answer (see `NAMES`); the row's own columns; `length` (of
        the longest answer with its prompt, before truncation); `dropped`, `ends`, `across`, `empty` and `not_shown` as
        in `Encoder`; and `otherwise`: whether the chat template writes the prompt differently without an answer.
        """
        rows = [json.loads(row) for row in batch["document"]]
        if self.row_type == "prompts":
            encoded = self._prompts(rows, batch["location"], batch.get(IMAGES))
        elif self.row_type == "stepwise":
            encoded = self._steps(rows, batch["location"])
        else:
            encoded = self._answers(rows, batch["location"], batch.get(IMAGES))
        return {key: [row[key] for row in encoded] for key in encoded[0]}

    def _answers(
        self, rows: list[dict[str, Any]], locations: list[str], images: list[Any] | None
    ) -> list[dict[str, Any]]:
        documents = [document for row in rows for document in row["answers"]]
        answers_per_row = len(NAMES[self.row_type])
        each_location = [location for location in locations for _ in range(answers_per_row)]
        texts = self._texts(documents, each_location)
        each_images = None if images is None else [stored for stored in images for _ in range(answers_per_row)]
        texts, tokenized = self._tokenized(texts, each_images, each_location)
        answers = [
            self._answer(document, text, *tokens)
            for document, text, tokens in zip(documents, texts, tokenized, strict=True)
        ]
        otherwise = self._otherwise(
            documents[::answers_per_row], [text.plain or text.text for text in texts[::answers_per_row]]
        )
        encoded = []
        for index, row in enumerate(rows):
            span = slice(index * answers_per_row, (index + 1) * answers_per_row)
            empty = not all(map(has_answer, documents[span]))
            label = {"label": row["label"]} if "label" in row else {}
            lost = sorted({name for text in texts[span] for name in text.not_shown})
            encoded.append(
                {**self._row(answers[span]), **label, "empty": empty, "otherwise": otherwise[index], "not_shown": lost}
            )
            if images is not None:
                encoded[-1][IMAGES] = texts[span.start].images
                self._check_prompt_images(encoded[-1], locations[index])
        return encoded

    def _check_prompt_images(self, row: Mapping[str, Any], location: str) -> None:
        """Check that the tokens of images are those of the prompt's images."""
        assert self.images is not None
        index = self.images.image_token_id
        answers = sum(int(np.equal(row[f"{name}_ids"], index).sum()) for name in NAMES[self.row_type])
        if answers or int(np.equal(row["prompt_ids"], index).sum()) != sum(image["tokens"] for image in row[IMAGES]):
            token = self.tokenizer.convert_ids_to_tokens(index)
            wrong = f"{location}: an answer has an image, or a text contains {token}, the token of images"
            raise DataError(wrong, "move images to the prompt, or remove the token")

    def _otherwise(self, documents: list[Document], texts: list[str]) -> list[bool]:
        """Return for each document whether the chat template writes its prompt differently without an answer, as in
        generation."""
        chats = [index for index, document in enumerate(documents) if document.get("messages")]
        prompts = []
        for document in (documents[index] for index in chats):
            answers = [at for at, message in enumerate(document["messages"]) if message["role"] == "assistant"]
            prompts.append({**document, "messages": document["messages"][: answers[document.get("given", 0)]]})
        alone = self.template.prompts_of(prompts) if self.template else []
        differ = {
            index
            for index, prompt in zip(chats, alone, strict=True)
            if not (isinstance(prompt, str) and texts[index].startswith(prompt))
        }
        return [index in differ for index in range(len(documents))]

    def _answer(self, document: Document, text: Any, ids: np.ndarray, offsets: np.ndarray, length: int) -> _Encoded:
        beyond, begin = length - len(ids), len(ids)
        across = self._across(text, offsets)
        offsets = self._visible(text.text, ids, offsets)
        if text.turns:
            answer = np.flatnonzero(self._from(text.turns[0].start, ids, offsets))
            begin = int(answer[0]) if len(answer) else begin
        untrained = self._untrained(text, ids, offsets)
        ids, trained, ends, added = self._with_bos_and_eos(text, ids, offsets)
        begin += added
        if self.everything:
            trained[begin:] = True
            trained[added : added + len(untrained)] &= ~untrained
        return _Encoded(ids, trained, list(zip(ends, self._end_tokens(ids, ends), strict=True)), begin, beyond, across)

    def _row(self, answers: list[_Encoded]) -> dict[str, Any]:
        """Return the row of a prompt and its answers, each truncated to max_length together with the prompt."""
        first = answers[0].ids
        begin = min(answer.begin for answer in answers)
        for answer in answers[1:]:
            differs = np.flatnonzero(first[:begin] != answer.ids[:begin])
            begin = int(differs[0]) if len(differs) else begin
        limit = self.max_length
        length = max(len(answer.ids) + answer.beyond for answer in answers)
        row: dict[str, Any] = {"prompt_ids": first[:begin], "length": length, "ends": []}
        row["across"] = sum(answer.across for answer in answers)
        for name, answer in zip(NAMES[self.row_type], answers, strict=True):
            row[f"{name}_ids"] = answer.ids[begin:limit]
            row[f"{name}_mask"] = answer.trained[begin:limit].astype(np.int8)
            row["ends"] += [token for index, token in answer.ends if index < limit]
        names = NAMES[self.row_type]
        if not all(answer.trained.any() or answer.beyond for answer in answers):
            row["dropped"] = UNTRAINED
        elif not len(row["prompt_ids"]):
            row["dropped"] = NO_PROMPT
        elif too_long := self._why_too_long(length):
            row["dropped"] = too_long
        elif not all(row[f"{name}_mask"].any() for name in names):
            row["dropped"] = CUT_AWAY
        else:
            equal = len(names) > 1 and np.array_equal(*(row[f"{name}_ids"] for name in names))
            row["dropped"] = EQUAL if equal else ""
        return row

    def _prompts(
        self, rows: list[dict[str, Any]], locations: list[str], images: list[Any] | None
    ) -> list[dict[str, Any]]:
        encoded = []
        documents = [row["prompt"] for row in rows]
        stored: list[dict[str, Any]] = [{} for _ in rows]
        if images is None:
            prompts = self._prompt_ids(documents, locations)
        else:
            prompts, stored = self._image_prompts(documents, locations, images)
        for row, ids, row_images, location in zip(rows, prompts, stored, locations, strict=True):
            full = len(ids) > self.max_length - self.room
            if row_images and not full:
                self._check_prompt_images({"prompt_ids": ids, **row_images}, location)
            encoded.append(
                {
                    **row_images,
                    "prompt_ids": ids[: self.max_length],
                    "prompt": self._as_typed(row["asked"]),
                    "columns": self._as_typed(row["columns"]),
                    "length": len(ids),
                    "dropped": NO_ROOM if full else "",
                    "ends": [],
                    "across": 0,
                    "empty": False,
                    "otherwise": False,
                    "not_shown": [],
                }
            )
        return encoded

    def _image_prompts(
        self, documents: list[Document], locations: list[str], images: list[Any]
    ) -> tuple[list[list[int]], list[dict[str, Any]]]:
        """Return the ids of prompts with the tokens of their images, and the images with their numbers of tokens."""
        assert self.template is not None  # prompts with images have turns
        rendered: Any = self.template.prompts_of(documents)
        check_rendered(rendered, locations)
        texts = [RenderedText(text, None, bare=False) for text in rendered]
        texts, tokenized = self._tokenized(texts, images, locations)
        return [ids.tolist() for ids, _, _ in tokenized], [{IMAGES: text.images} for text in texts]

    def _as_typed(self, value: Any) -> str:
        """Return a value as JSON, in which tokens of images that were escaped are as a user typed them."""
        text = json.dumps(value, ensure_ascii=False)
        if self.images is not None and ESCAPE in text:
            for escaped, token in self.images.typed.items():
                text = text.replace(escaped, token)
        return text

    def _steps(self, rows: list[dict[str, Any]], locations: list[str]) -> list[dict[str, Any]]:
        """Return rows of a prompt (as in generation) and its steps, each followed by the separator.

        Steps are tokenized separately, as in TRL, so that each has its own last token, which carries the label.

        Raises:
            DataError: a step with its separator has no token.
        """
        prompts = self._prompt_ids([row["prompt"] for row in rows], locations)
        texts = [step for row in rows for step in row["steps"]]
        encoded = self.tokenizer([self.separator, *texts], add_special_tokens=False, verbose=False)["input_ids"]
        separator, steps = encoded[0], iter(encoded[1:])
        encoded_rows = []
        for row, prompt, location in zip(rows, prompts, locations, strict=True):
            ids: list[int] = []
            mask: list[int] = []
            for text, step in zip(row["steps"], steps, strict=False):
                if not (step or separator):
                    wrong = f"{location}: the step {brief(text)} has no token"
                    raise DataError(wrong, "write the step's text, or set step_separator")
                ids += [*step, *separator]
                mask += [0] * (len(ids) - len(mask) - 1) + [1]
            length, room = len(prompt) + len(ids), max(self.max_length - len(prompt), 0)
            mask = mask[:room]
            dropped = self._why_too_long(length) or ("" if any(mask) else CUT_AWAY)
            encoded_rows.append(
                {
                    "prompt_ids": prompt[: self.max_length],
                    "steps_ids": ids[:room],
                    "steps_mask": mask,
                    "right": row["labels"][: sum(mask)],
                    "length": length,
                    "dropped": dropped if prompt else NO_PROMPT,
                    "ends": [],
                    "across": 0,
                    "empty": False,
                    "otherwise": False,
                    "not_shown": [],
                }
            )
        return encoded_rows

    def _why_too_long(self, length: int) -> str:
        """Return why a row with an answer is dropped for its length, or ""."""
        if length <= self.max_length:
            return ""
        return TOO_LONG if self.overlong == "drop" else CUT if self.uncut else ""

    def _prompt_ids(self, documents: list[Document], locations: list[str]) -> list[list[int]]:
        """Return the ids of prompts as in generation."""
        if self.template is not None:
            texts = self.template.prompts_of(documents)
            check_rendered(texts, locations)
        else:
            texts = [instruction_of(document) for document in documents]
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        prefix = self.prefix if self.template is None else []
        return [ids if ids[:1] == prefix[:1] else [*prefix, *ids] for ids in encoded]
