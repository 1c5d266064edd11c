"""Convert documents to token ids and labels.

Every text is tokenized once, in one piece. A token is trained if its character offsets overlap a trained span. Labels
follow Hugging Face's convention: unshifted, -100 on untrained tokens, and always -100 on the first token of a document,
which no position predicts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..ops import IGNORE_INDEX
from ..utils.errors import DataError, HalfbyteError, ModelError
from .chat import ChatTemplate
from .formats import Document
from .image_processor import ESCAPE, ExpandedText, ImageProcessor, check_same_text, image_tokens
from .images import IMAGES
from .turns import Turn

TOO_LONG = "longer than max_length"
CUT_AWAY = "no trained tokens left after truncation"
UNTRAINED = "no trained tokens"
ONE_IMAGE = "cut to one of several images, which has other tokens alone"
# For long texts, see Encoder._tokenize.
CHARACTERS_A_TOKEN, READ_BEYOND = 16, 10_000
WORDS_BEYOND, VAST = 8, 2**20
Tokenized = tuple[
    np.ndarray, np.ndarray, int
]  # ids, offsets (start, stop, start, ...), and tokens of the complete text
# The instruction format for tokenizers without a chat template.
INSTRUCTION = "### Instruction:\n{prompt}\n\n### Response:\n"


@dataclass(frozen=True)
class RenderedText:
    """A rendered document.

    Attributes:
        turns: what to train; None: everything.
        bare: whether BOS and EOS are still missing.
        untrained: turns that the row excludes from training.
        not_shown: names of message parts that the text does not contain.
        images: the row's stored images; None: rows of this dataset have none.
        expanded: the text with the tokens of images, which `text` and `turns` are taken from; `plain` is without them.
    """

    text: str
    turns: list[Turn] | None
    bare: bool
    untrained: Sequence[Turn] = ()
    not_shown: Sequence[str] = ()
    images: Sequence[Mapping[str, Any]] | None = None
    expanded: ExpandedText | None = None
    plain: str = ""


class Encoder:
    """Converter from documents (JSON text, see formats.py) to columns of ids and labels.

    Instances are pickled into the tokenizing processes.

    Args:
        tokenizer: a fast one (with offsets), with an EOS token.
        template: renders conversations; None if no document is one.
        max_length: tokens that a document may have.
        overlong: truncate or drop longer documents.
        images: processes images of documents.

    Raises:
        ModelError: the tokenizer has no offsets or no EOS token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate | None,
        *,
        max_length: int,
        overlong: Literal["truncate", "drop"] = "truncate",
        images: ImageProcessor | None = None,
    ):
        if not tokenizer.is_fast:
            raise ModelError(
                f"{type(tokenizer).__name__} has no character offsets, which exact masks need",
                "use a checkpoint with a tokenizer.json",
            )
        if tokenizer.eos_token_id is None:
            raise ModelError("the tokenizer has no EOS token", "set eos_token in its tokenizer_config.json")
        self.tokenizer, self.template = tokenizer, template
        self.max_length = max_length
        self.overlong = overlong
        self.images = images
        largest = max(tokenizer.get_vocab().values())  # more than the number of tokens if ids have gaps
        self.is_marker = np.zeros(largest + 1, dtype=bool)  # by token id: control tokens, not pieces of text
        added = [index for index, token in tokenizer.added_tokens_decoder.items() if token.content.strip()]
        self.is_marker[[*added, tokenizer.eos_token_id]] = True
        # Marks such as </tool_call> are added tokens, too; only special tokens end an answer.
        special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.is_end = np.zeros(largest + 1, dtype=bool)
        self.is_end[[*special, tokenizer.eos_token_id]] = True
        self.prefix = _prefix_of(tokenizer)

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Convert `document` and `location` to columns.

        The columns are input_ids, labels, length (before truncation), dropped (the reason, or ""), ends, across, empty
        and not_shown.

        `ends` holds, for each trained turn that was not truncated, the id of the token that ends it, or -1 without one.
        `across` counts the tokens that hold the end of a prompt and the start of the answer. `empty` says that all
        answers are empty, so that only the end token is trained. `not_shown` names message parts that the chat template
        does not write. With a column `images`, the documents' stored images, `images` has those that are left, with
        their numbers of tokens.
        """
        documents = [json.loads(document) for document in batch["document"]]
        texts = self._texts(documents, batch["location"])
        texts, tokenized = self._tokenized(texts, batch.get(IMAGES), batch["location"])
        rows = [self._label(text, *tokens) for text, tokens in zip(texts, tokenized, strict=True)]
        for row, document, text, location in zip(rows, documents, texts, batch["location"], strict=True):
            if IMAGES in row and not row["dropped"]:
                self._check_image_tokens(row, location)
            row["not_shown"] = text.not_shown
            row["empty"] = not document.get("train_all") and not has_answer(document)
        return {key: [row[key] for row in rows] for key in rows[0]}

    def _texts(self, documents: list[Document], locations: list[str]) -> list[RenderedText]:
        """Render all documents. Conversations are rendered together, in the template's child process."""
        chats = [index for index, document in enumerate(documents) if "messages" in document]
        rendered = self.template.turns_of([documents[index] for index in chats]) if self.template else []
        check_rendered(rendered, [locations[index] for index in chats])
        rendered_chats = dict(zip(chats, rendered, strict=True))
        return [self._text(document, rendered_chats.get(index)) for index, document in enumerate(documents)]

    def _text(self, document: Document, rendered: Any) -> RenderedText:
        everything = document.get("train_all", False)
        if "text" in document:
            text, begin = document["text"], document.get("answer_from")
            return RenderedText(text, None if begin is None else [Turn(begin, len(text), len(text))], bare=True)
        if rendered is not None:
            text, turns, lost = rendered
            untrained = [turn for turn in turns if not turn.trained]
            return RenderedText(text, None if everything else turns, False, untrained, lost)
        prompt = instruction_of(document)
        text = prompt + document["completion"]
        return RenderedText(text, None if everything else [Turn(len(prompt), len(text), len(text))], bare=True)

    def _tokenized(
        self, texts: list[RenderedText], images: list[Any] | None, locations: list[str]
    ) -> tuple[list[RenderedText], list[Tokenized]]:
        """Return texts with the tokens of their images, if there are some, and their tokens as `_tokenize` does."""
        if images is None:
            return texts, self._tokenize(texts)
        texts = [self._with_images(*row) for row in zip(texts, images, locations, strict=True)]
        tokenized = self._tokenize(texts)
        self._check_same_text(texts, tokenized, locations)
        return texts, tokenized

    def _with_images(self, text: RenderedText, images: Sequence[Mapping[str, Any]], location: str) -> RenderedText:
        """Return a text with the tokens of its images in place of their placeholders."""
        assert self.images is not None
        trained = [*(text.turns or ()), *text.untrained]
        new = self.images.expanded(text.text, trained, images, location, self.max_length)
        count, moved = len(text.turns or ()), new.turns or []
        turns = None if text.turns is None else moved[:count]
        stored = [
            {**image, "tokens": expansion.tokens, "pixels": expansion.pixels, "nbytes": expansion.nbytes}
            for image, expansion in zip(images, new.images, strict=True)
        ]
        return replace(
            text, text=new.text, turns=turns, untrained=moved[count:], images=stored, expanded=new, plain=text.text
        )

    def _check_same_text(
        self, texts: Sequence[RenderedText], tokenized: Sequence[Tokenized], locations: Sequence[str]
    ) -> None:
        """Check that images change no token of the texts around them, in rows that are tokenized in full."""
        assert self.images is not None
        plain = self._tokenize([replace(text, text=text.plain) for text in texts])
        for text, (ids, offsets, length), (plain_ids, plain_offsets, _), location in zip(
            texts, tokenized, plain, locations, strict=True
        ):
            assert text.expanded is not None
            if length != len(ids):  # only its beginning is tokenized
                continue
            unexpanded, expanded = (text.plain, plain_ids, plain_offsets), (text.text, ids, offsets)
            check_same_text(unexpanded, expanded, text.expanded, self.tokenizer, location)

    def _check_image_tokens(self, row: Mapping[str, Any], location: str) -> None:
        """Check that all image tokens of a row belong to its images."""
        assert self.images is not None
        index = self.images.image_token_id
        if int((row["input_ids"] == index).sum()) != sum(image["tokens"] for image in row[IMAGES]):
            token = self.tokenizer.convert_ids_to_tokens(index)
            raise DataError(f"{location}: a text contains {token}, the token of images", "remove it from the text")

    def _tokenize(self, texts: list[RenderedText]) -> list[Tokenized]:
        """Return ids, offsets (start, stop, start, ...) and length in tokens of each text.

        Only the beginning of a very long text is tokenized; its length is extrapolated. The first max_length tokens
        equal those of the full text: words are tokenized independently, and the last words of the beginning, which
        might be cut, are never used. The exception is a text of over a million characters that is one word (no spaces):
        its tokens are those of its beginning.
        """
        first = READ_BEYOND + self.max_length * CHARACTERS_A_TOKEN
        tokenized: list[Tokenized | None] = [
            None if text.images is None or ESCAPE not in text.text else self._tokenize_typed(text.text)
            for text in texts
        ]
        while left := [index for index, answer in enumerate(tokenized) if answer is None]:
            begun = [texts[index].text[:first] for index in left]
            encoded = self.tokenizer(begun, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            for row, index in enumerate(left):
                ids = np.array(encoded["input_ids"][row], dtype=np.int64)
                length, total = len(ids), len(texts[index].text)
                if total > first:
                    far = total > VAST and length > 4 * self.max_length + READ_BEYOND
                    words = encoded.word_ids(row)
                    last = words[self.max_length] if self.max_length < length else None
                    # whether the first max_length tokens belong to words well before the end of the tokenized text
                    enough = last is not None and words[-1] is not None and last + WORDS_BEYOND < words[-1]
                    if not (far or enough):
                        continue
                    length = round(length * total / first)
                offsets = np.fromiter(chain.from_iterable(encoded["offset_mapping"][row]), dtype=np.int64)
                tokenized[index] = ids, offsets, length
            first *= 8
        return [answer for answer in tokenized if answer is not None]

    def _tokenize_typed(self, text: str) -> Tokenized:
        """Return the result of `_tokenize` for a text in which tokens of images were typed: these become plain text."""
        assert self.images is not None
        typed = self.images.typed
        pieces = re.split(f"({'|'.join(map(re.escape, typed))})", text)
        ids: list[int] = []
        offsets: list[int] = []
        begin = 0
        for piece in pieces:
            options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
            encoded = self.tokenizer(typed.get(piece, piece), split_special_tokens=piece in typed, **options)
            ids += encoded["input_ids"]
            offsets += [begin + position for span in encoded["offset_mapping"] for position in span]
            begin += len(piece)
        return np.array(ids, dtype=np.int64), np.array(offsets, dtype=np.int64), len(ids)

    def _label(self, text: RenderedText, ids: np.ndarray, offsets: np.ndarray, length: int) -> dict[str, Any]:
        beyond = length - len(ids)  # estimated tokens after the tokenized beginning
        across = self._across(text, offsets)
        image_spans = [] if text.expanded is None else image_tokens(offsets, text.expanded.spans)
        offsets = self._visible(text.text, ids, offsets)
        ids, trained, ends, _ = self._with_bos_and_eos(text, ids, offsets)
        for start, stop in image_spans:
            trained[start:stop] = False
        length = len(ids) + beyond
        dropped = "" if trained.any() or (beyond and text.turns != []) else UNTRAINED
        if length > self.max_length and not dropped:
            ends = [end for end in ends if end < self.max_length]
            # A row with images is cut at a turn: an image has all of its tokens, or is removed with them.
            size = self.max_length if not image_spans else max(ends, default=-1) + 1
            ids, trained = ids[:size], trained[:size]
            dropped = TOO_LONG if self.overlong == "drop" else "" if trained.any() else CUT_AWAY
        left = [image for image, span in zip(text.images or (), image_spans, strict=True) if span[1] <= len(ids)]
        if (
            not dropped
            and len(left) == 1 < len(image_spans)
            and self.images is not None
            and self.images.family.by_count
        ):
            dropped = ONE_IMAGE
        return ({} if text.images is None else {IMAGES: left}) | {
            "input_ids": ids,
            "labels": np.where(trained, ids, IGNORE_INDEX),
            "length": length,
            "dropped": dropped,
            "ends": self._end_tokens(ids, ends),
            "across": across,
        }

    def _with_bos_and_eos(
        self, text: RenderedText, ids: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, list[int], int]:
        """Return the ids of a text with BOS and EOS, their mask (bool, trained), the index of each trained turn's
        last token, and the number of ids added in front."""
        trained, ends = self._mask(text, ids, offsets)
        added = 0
        if not text.bare and (end := self._missing_end(text, ids, ends)) is not None:
            ids, trained = np.append(ids[: ends[-1] + 1], end), np.append(trained[: ends[-1] + 1], True)
            ends = [*ends[:-1], len(ids) - 1]
        if text.bare and len(ids):
            prefix = [] if self.prefix and ids[0] == self.prefix[0] else self.prefix
            suffix = [] if ids[-1] == self.tokenizer.eos_token_id else [self.tokenizer.eos_token_id]
            ids = np.concatenate([np.array(prefix, dtype=np.int64), ids, np.array(suffix, dtype=np.int64)])
            trained = np.concatenate([np.zeros(len(prefix), dtype=bool), trained, np.ones(len(suffix), dtype=bool)])
            ends, added = [len(ids) - 1], len(prefix)
        trained[:1] = False
        return ids, trained, ends, added

    def _missing_end(self, text: RenderedText, ids: np.ndarray, ends: list[int]) -> int | None:
        """Return the token that ends the last answer if the template writes nothing after it, else None."""
        last = text.turns[-1] if text.turns else None
        if last is None or not last.trained or not ends:
            return None
        if text.text[last.limit :].strip() or self.is_end[ids[ends[-1]]]:
            return None
        ending = self.template.ending if self.template else ""
        return int(self.tokenizer.convert_tokens_to_ids(ending) if ending else self.tokenizer.eos_token_id)

    def _end_tokens(self, ids: np.ndarray, ends: list[int]) -> list[int]:
        """Return the ids that end trained turns, -1 for ordinary text."""
        return [int(ids[end]) if self.is_end[ids[end]] else -1 for end in ends]

    def _across(self, text: RenderedText, offsets: np.ndarray) -> int:
        """Return the number of tokens that hold the end of a prompt and the start of a trained answer."""
        borders = np.array([turn.start for turn in text.turns or () if turn.trained])
        return int(sum(((offsets[::2] < border) & (border < offsets[1::2])).any() for border in borders))

    def _mask(self, text: RenderedText, ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Return the mask of trained tokens (bool), and the index of each turn's last token."""
        starts, stops = offsets[::2], offsets[1::2]
        if text.turns is None:
            last = next((i for i in reversed(range(len(ids))) if text.text[starts[i] : stops[i]].strip()), None)
            trained = ~self._untrained(text, ids, offsets)
            return trained, [] if last is None or not trained[last] else [last]
        trained, ends = np.zeros(len(ids), dtype=bool), list[int]()
        for turn in text.turns:
            if turn.trained:
                answer = self._tokens_of(turn, text.text, ids, offsets)
                trained |= answer
                visible = [i for i in np.flatnonzero(answer)[::-1][:8] if text.text[starts[i] : stops[i]].strip()]
                ends += visible[:1] or np.flatnonzero(answer)[-1:].tolist()
        return trained, ends

    def _untrained(self, text: RenderedText, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the mask (bool) of tokens in turns that the row excludes from training."""
        untrained = np.zeros(len(ids), dtype=bool)
        for turn in text.untrained:
            untrained |= self._tokens_of(turn, text.text, ids, offsets)
        return untrained

    def _tokens_of(self, turn: Turn, text: str, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the mask (bool) of a turn's answer and its end tokens."""
        starts, stops = offsets[::2], offsets[1::2]
        answer = np.zeros(len(ids), dtype=bool)
        for start, end in turn.spans or ((turn.start, turn.end),):
            answer |= self._from(start, ids, offsets) & (starts < end)
        closing = np.flatnonzero(self.is_marker[ids] & (starts >= turn.end) & (stops <= turn.limit))
        if len(closing):
            answer[np.searchsorted(starts, turn.end) : closing[-1] + 1] = True
        return answer

    def _from(self, character: int, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the mask (bool) of tokens that overlap the text from `character` on."""
        starts, stops = offsets[::2], offsets[1::2]
        return (stops > character) & ~(self.is_marker[ids] & (starts < character))

    def _visible(self, text: str, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the offsets of tokens without the white space that an added token takes from its neighbours.

        Phi-3's <|assistant|> takes the line break after it; a token with `lstrip` takes the white space before it.
        """
        visible = offsets.copy()
        for i in np.flatnonzero(self.is_marker[ids]):
            start, stop = offsets[2 * i : 2 * i + 2]
            if token := text[start:stop].strip():
                visible[2 * i] = text.index(token, start)
                visible[2 * i + 1] = visible[2 * i] + len(token)
        return visible


def instruction_of(document: Document) -> str:
    """Return the prompt of a document as text up to its answer, for tokenizers without a chat template."""
    system = f"{document['system']}\n\n" if "system" in document else ""
    turns = [turn["content"] for turn in document.get("history", ())]
    earlier = "".join(
        f"{INSTRUCTION.format(prompt=question)}{answer}\n\n"
        for question, answer in zip(turns[::2], turns[1::2], strict=True)
    )
    return system + earlier + INSTRUCTION.format(prompt=document["prompt"])


def check_rendered(rendered: Sequence[Any], locations: Sequence[str]) -> None:
    """Raise the first error in `rendered`, with the row's place.

    Raises:
        DataError: the chat template refuses a conversation.
    """
    for text, location in zip(rendered, locations, strict=True):
        if isinstance(text, HalfbyteError):
            raise DataError(f"{location}: {text.message}", text.fix) from text


def has_answer(document: Document) -> bool:
    """Return whether any trained message of a document is not empty."""
    return any(map(_has_content, _answers(document)))


def _answers(document: Document) -> list[dict[str, Any]]:
    """Return the messages that are trained."""
    if "messages" not in document:
        return [
            {
                "content": document["text"][document.get("answer_from", 0) :]
                if "text" in document
                else document["completion"]
            }
        ]
    answers = [message for message in document["messages"] if message["role"] == "assistant"]
    prompt_answers, untrained = document.get("given", 0), document.get("untrained", ())
    return [message for number, message in enumerate(answers) if number >= prompt_answers and number not in untrained]


def _has_content(message: dict[str, Any]) -> bool:
    """Return whether a message contains anything but white space."""
    content = message.get("content")
    texts = content if isinstance(content, list) else [content]
    attachments = [value for key, value in message.items() if key not in ("role", "content")]  # calls, thoughts
    return any(text.strip() if isinstance(text, str) else text for text in (*texts, *attachments))


def _prefix_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that a tokenizer puts before every text: [BOS] or nothing."""
    alone, with_special = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (False, True))
    for start in range(len(with_special) - len(alone) + 1):
        if with_special[start : start + len(alone)] == alone:
            return with_special[:start]
    return []
