"""Prepare the rows of preference and RL training: from the configuration to tokenized rows, and a report on every
row."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import datasets
from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from ..config.datasets import DatasetEntry
from ..config.policy import DISTILLING
from ..config.schema import RunKeys
from ..ops import IGNORE_INDEX
from ..utils.errors import DataError
from ..utils.notices import notice
from .chat import ChatTemplate
from .encode_answers import CUT, EQUAL, NAMES, NO_PROMPT, NO_ROOM, AnswerEncoder
from .formats import IMAGE_TYPES, Document, has_images
from .image_processor import ImageProcessor
from .images import COLUMNS as IMAGE_COLUMNS
from .images import IMAGES, OTHER_MEDIA, STORED, ImageSource, any_values, with_image_column
from .preference import Kind, recognise_rows, rows_in
from .prepare import (
    ENCODED,
    IDS,
    NO_END,
    REMEDY,
    Documents,
    Prepare,
    PreparedData,
    Split,
    across_of,
    check_image_run,
    check_unicode,
    encode,
    for_template,
    images_of,
    kept_rows,
    mask_of,
    mixed,
    not_shown_of,
    prompt_turns,
    split_preparer,
    template_of,
)
from .report import answers_report, count_unread, endings, images_report, report_unread
from .sources import Row, Source, parse_csv_values, read_sources
from .tables import Table

MOST_SHOWN = 1_000  # rows from which samples, and the held-out rows of `merge`, are taken
MASK = datasets.List(Value("int8"))
SCORED = ("reward", "prm")  # methods that learn the score of a complete answer
ANSWERED = ("pairs", "unpaired")  # kinds of rows whose trained tokens are an answer's
FIXES = {  # by kind of rows, if all labels are equal
    "unpaired": "add answers of the other label, or set method: sft to imitate desirable ones",
    "stepwise": "add steps of the other label",
}
REMEDIES = {
    **REMEDY,
    EQUAL: "give a different rejected answer (check column_mapping)",
    NO_PROMPT: "give a prompt that ends with white space or a turn, or put it in a separate column",
    CUT: "raise max_length: a reward model scores complete answers",
    NO_ROOM: "raise max_length, or lower max_completion_length",
}


def prepare_answers(config: RunKeys, tokenizer: PreTrainedTokenizerBase, row_type: Kind) -> PreparedData:
    """Read, recognise, split, mask and tokenize rows of `row_type`.

    The columns of the rows are, as lists of ints unless noted otherwise,

    - pairs: prompt_ids, chosen_ids, rejected_ids, chosen_mask, rejected_mask (1 on trained tokens), and margin (float)
      if the data has one;
    - unpaired: prompt_ids, completion_ids, completion_mask, label (bool: desirable);
    - prompts: prompt_ids, prompt (turns or text, as in the data), columns (the further columns, as in the data);
    - stepwise: prompt_ids, steps_ids, steps_mask (1 on the last token of each step), right (bool, one per step).

    A prompt with an answer has the ids and the trained tokens of the same conversation in supervised fine-tuning; with
    `assistant_only_loss: false` every token of an answer is trained. Answers over `max_length` are truncated, or their
    rows dropped (`overlong`; always for reward models, which score complete answers). A row stays if all its answers
    keep trained tokens.

    Args:
        config, tokenizer: as in `prepare`.

    Raises:
        DataError, ModelError, ConfigError: as in `prepare`; and for rows of another method, labels other than true and
            false, or equal labels everywhere.
    """
    return preparer_of_answers(config, tokenizer, row_type)()


def preparer_of_answers(config: RunKeys, tokenizer: PreTrainedTokenizerBase, row_type: Kind) -> Prepare:
    """Return the function that prepares rows as `prepare_answers` describes."""
    template, images = template_of(config, tokenizer), ImageProcessor(config, tokenizer)
    encoder = AnswerEncoder(
        tokenizer,
        template,
        images=images,
        max_length=config.max_length,
        overlong=config.overlong,
        row_type=row_type,
        everything=not config.assistant_only_loss,
        room=config.max_completion_length,
        separator=config.step_separator,
        uncut=config.method in SCORED,
    )

    def ends_of(rows: Dataset) -> dict[str, Any]:
        if row_type == "prompts":
            return _stops(encoder)
        return endings(rows, tokenizer) if row_type in ANSWERED else NO_END

    return split_preparer(
        config,
        encoder,
        partial(_read, config, template, row_type, images),
        partial(_finish, encoder, config),
        ends_of=ends_of,
        header={"kind": row_type},
        as_texts=partial(_as_texts, row_type),
        answered=row_type in ANSWERED,
    )


def _features(row_type: Kind) -> dict[str, Any]:
    """Return the features of encoded rows."""
    common = {name: ENCODED[name] for name in ("length", "dropped", "ends", "across", "empty", "not_shown")}
    common["otherwise"] = Value("bool")
    ids = {f"{name}_ids": IDS for name in ("prompt", *NAMES[row_type])}
    masks = {f"{name}_mask": MASK for name in NAMES[row_type]}
    further: dict[str, Any] = {
        "pairs": {},
        "unpaired": {"label": Value("bool")},
        "prompts": {"prompt": Value("string"), "columns": Value("string")},
        "stepwise": {"right": datasets.List(Value("bool"))},
    }[row_type]
    return {**ids, **masks, **further, **common}


def _read(
    config: RunKeys,
    template: ChatTemplate | None,
    row_type: Kind,
    processor: ImageProcessor,
    entries: Sequence[DatasetEntry],
    evaluating: bool = False,
    sources: Sequence[Source] | None = None,
) -> Documents:
    raw, margins = Documents(), {}
    image_source = ImageSource(config.media_dir, config.allow_image_urls)
    images: list[list[dict[str, Any]]] = []
    if sources is None:
        sources = read_sources(entries, config.dataset_split, evaluating=evaluating)
    for source in sources:
        layout = recognise_rows(source, row_type, config.column_mapping)
        source = with_image_column(parse_csv_values(source, layout.columns), config.column_mapping)
        first = len(raw.texts)
        as_text, answers = True, config.method in DISTILLING and config.lmbda < 1
        for location, row in rows_in(source, layout, templated=template is not None, answers=answers):
            as_text = as_text and any("text" in document for document in row.get("answers", ()))
            if "margin" in row:
                raw.columns["margin"].append(row.pop("margin"))
            columns = row.pop(IMAGES, {})
            row = _for_template(row, template, location)
            if row_type in ANSWERED:
                images.append(_images_of(row["answers"], columns, image_source, processor, source.path, location))
            elif row_type == "prompts" and template is not None and config.method not in DISTILLING:
                columns = _take_image_columns(row, processor)
                images.append(images_of(row["prompt"], columns, image_source, processor, source.path, location))
            else:
                columns = {**row.get("columns", {}), **columns}
                _refuse_images(row["prompt"], columns, processor, location, config.method)
            raw.texts.append(_text(row, location))
            raw.locations.append(location)
            raw.origins.append(source.dataset)
        if row_type == "stepwise":
            trained_part = "the last token of each step"
        elif config.assistant_only_loss:
            trained_part = mask_of("answers", False, template)
        else:
            trained_part = "every token of an answer"
        raw.masks[trained_part] = None
        rows = len(raw.texts) - first
        # Reward functions read the further columns of prompts. Only a reward model reads margins. Rows that are plain
        # texts with their prompt show no system text and no tools.
        unread = [] if config.method == "reward" else ["margin"]
        unread += ["system", "tools"] if as_text else []
        read = {field: name for field, name in layout.columns.items() if field not in unread}
        further = IMAGE_COLUMNS if any(images) else ()
        left_out = count_unread(source, read, None if row_type == "prompts" and config.reward_funcs else further)
        summary = {"path": source.path, "format": row_type, "why": layout.why, "rows": rows}
        raw.sources.append(summary | ({"left_out": dict(left_out)} if left_out else {}))
        margins[source.path] = "margin" in layout.columns
    if len(set(margins.values())) > 1:
        with_it, without = (next(path for path, has in margins.items() if has is present) for present in (True, False))
        raise DataError(f"{without} has no column margin, but {with_it} has one", "give it in both, or in neither")
    report_unread([entry.path for entry in entries], raw.left_out)
    raw.features = {name: Value("float64") for name in raw.columns}
    if any(images):
        check_image_run(config, processor)
        raw.columns[IMAGES], raw.features[IMAGES] = images, STORED
        raw.texts = processor.escaped(raw.texts)
    return raw


def _images_of(
    answers: Sequence[Document],
    columns: Row,
    image_source: ImageSource,
    processor: ImageProcessor,
    data_file: str,
    location: str,
) -> list[dict[str, Any]]:
    """Return the stored images of a prompt, which are removed from its turns in each of the answers' documents.

    Args:
        columns: the row's columns of images.

    Raises:
        DataError: as `ImageSource.take`, or the answers of a row have different images.
    """
    by_answer = [images_of(document, columns, image_source, processor, data_file, location) for document in answers]
    if any(images != by_answer[0] for images in by_answer):
        raise DataError(f"{location}: the answers have different images", "move the images to the prompt")
    return by_answer[0]


def _take_image_columns(row: dict[str, Any], processor: ImageProcessor) -> Row:
    """Remove the images of a prompt from what reward functions get: its columns, and the parts of its turns."""
    if isinstance(turns := row["asked"], list):
        row["asked"] = [_without_values(turn) for turn in turns]
    named = [name for name in IMAGE_COLUMNS if name in row["columns"]]
    images = {name: row["columns"].pop(name) for name in named} if named and processor.takes_images else {}
    return {name: value for name, value in row["columns"].items() if name in OTHER_MEDIA} | images


def _without_values(turn: Any) -> Any:
    """Return a turn of a row with `{"type": "image"}` for each image."""
    if not (isinstance(turn, dict) and isinstance(parts := turn.get("content"), list)):
        return turn
    is_image = [isinstance(part, dict) and part.get("type") in IMAGE_TYPES for part in parts]
    return {**turn, "content": [{"type": "image"} if image else p for p, image in zip(parts, is_image, strict=True)]}


def _refuse_images(prompt: Document, columns: Row, processor: ImageProcessor, location: str, method: str) -> None:
    """Check that a prompt has no images: it has steps, a teacher answers it too, or there is no chat template.

    Args:
        columns: further columns of the row.

    Raises:
        DataError: it has some.
    """
    named = any_values(columns, (*IMAGE_COLUMNS, *OTHER_MEDIA))
    if not has_images(prompt) and not (named and processor.takes_images):
        return
    if method in ("grpo", "rloo"):
        wrong = f"{location}: the prompt has an image, and the model has no chat template that says where it is"
        raise DataError(wrong, "give one with chat_template_path, or remove the image")
    wrong = f"{location}: the prompt has an image, and method: {method} trains on text alone"
    raise DataError(wrong, "remove the image, or train with sft, dpo, kto, reward, grpo or rloo")


def _for_template(row: dict[str, Any], template: ChatTemplate | None, location: str) -> dict[str, Any]:
    """Return the row with its documents in a form that the template writes."""
    if "answers" in row:
        # each with its own turns, whose images are taken out
        documents = [copy.deepcopy(document) for document in row["answers"]]
        return {**row, "answers": [for_template(document, template, location, images=True) for document in documents]}
    prompt: Document = row["prompt"]
    if template is None:
        return {**row, "prompt": for_template(prompt, None, location)}
    messages = prompt.get("messages")
    if messages is None:
        messages = prompt_turns(prompt)
    messages, tools = template.adapt_messages(messages, prompt.get("tools"))
    return {**row, "prompt": {"messages": messages, "tools": tools}}


def _text(row: dict[str, Any], location: str) -> str:
    try:
        text = json.dumps(row, ensure_ascii=False)
    except (TypeError, ValueError) as error:  # dates and bytes of a Parquet file
        wrong = f"{location}: a value of the row is neither text nor a number: {error}"
        raise DataError(wrong, "convert it to text") from error
    if not text.isascii():
        check_unicode(text, location)
    return text


def _finish(encoder: AnswerEncoder, config: RunKeys, raw: Documents, name: str) -> Split:
    row_type, total = encoder.row_type, len(raw.texts)
    encoded = encode(raw, encoder, config, _features(row_type))
    trainable = kept_rows(encoded, f"{name} rows", config.max_length, REMEDIES)
    truncated = sum(length > config.max_length for length in trainable["length"])
    if truncated:
        notice(
            f"truncated:{name}",
            f"{truncated} of {total} {name} rows have answers cut to max_length {config.max_length}:"
            f" the longest row has {max(encoded['length']):,} tokens",
        )
    if otherwise := sum(trainable["otherwise"]):
        notice(
            f"otherwise:{name}",
            f"{otherwise} of {total} {name} rows: the chat template writes the prompt differently without an answer, so"
            " generation sees another prompt than training",
        )
    _check_answers(trainable, row_type, name)
    contradicting = _contradicting(raw.texts, row_type)
    if contradicting:
        notice(f"contradicting:{name}", f"{contradicting} {name} rows contradict another row")
    across, not_shown = across_of(trainable, f"{name} rows"), not_shown_of(trainable, f"{name} rows")
    trainable, mixture = mixed(config, trainable, raw, encoded) if name == "training" else (trainable, {})
    report = answers_report(encoded, trainable, NAMES[row_type], truncated)
    report |= images_report(trainable)
    report |= {"tokens_across_border": across, "not_shown": not_shown}
    report |= {"contradicting": contradicting, "prompts_otherwise_alone": otherwise, **mixture}
    rows = trainable.select_columns([name for name in trainable.column_names if name not in (*ENCODED, "otherwise")])
    return Split(trainable, rows.with_transform(as_read) if row_type == "prompts" else rows, report)


def _check_answers(trainable: Dataset, row_type: Kind, name: str) -> None:
    """Check that the answers of a split are not all empty and its labels not all equal."""
    empty, total = sum(trainable["empty"]), len(trainable)
    if empty == total and row_type != "prompts" and name == "training":
        raise DataError(
            f"all {total} {name} rows have an empty answer", "check the rows and columns of the data (column_mapping)"
        )
    if empty:
        notice(f"empty:{name}", f"{empty} of {total} {name} rows have an empty answer")
    if name != "training" or row_type not in FIXES:
        return
    labels = (
        set(trainable["label"]) if row_type == "unpaired" else {label for row in trainable["right"] for label in row}
    )
    if len(labels) == 1:
        wrong = f"all {total} {name} rows have the label {json.dumps(labels.pop())}"
        raise DataError(f"{wrong}: there is no contrast to learn", FIXES[row_type])


def _contradicting(texts: list[str], row_type: Kind) -> int:
    """Count rows that contradict an earlier one: the same answers swapped, or the same answer with the other label."""
    if row_type == "prompts":
        return 0
    seen: set[tuple[int, int]] = set()
    count = 0
    for row in (json.loads(text) for text in texts):
        if row_type == "stepwise":
            row = _last_step(row)
        answers = [hash(json.dumps(document)) for document in row["answers"]]
        claim = (answers[0], answers[1] if len(answers) > 1 else row["label"])
        opposite = (claim[1], claim[0]) if len(answers) > 1 else (claim[0], not row["label"])
        count += opposite in seen
        seen.add(claim)
    return count


def _last_step(row: dict[str, Any]) -> dict[str, Any]:
    """Return a stepwise row as one answer with the label of its last step."""
    return {"answers": [[row["prompt"], row["steps"]]], "label": row["labels"][-1]}


def _as_texts(row_type: Kind, rows: Dataset) -> Dataset:
    """Return the first rows as ids and labels, each prompt with its first answer."""
    first = rows.select(range(min(len(rows), MOST_SHOWN)))
    name = next(iter(NAMES[row_type]), "")
    ids, labels = [], []
    for row in first:
        answer, mask = (row[f"{name}_ids"], row[f"{name}_mask"]) if name else ([], [])
        ids.append([*row["prompt_ids"], *answer])
        untrained = [IGNORE_INDEX] * len(row["prompt_ids"])
        labels.append(
            [*untrained, *(token if trained else IGNORE_INDEX for token, trained in zip(answer, mask, strict=True))]
        )
    return Table.from_dict({"input_ids": ids, "labels": labels}, features=Features({"input_ids": IDS, "labels": IDS}))


def _stops(encoder: AnswerEncoder) -> dict[str, Any]:
    """Return how answers will end: with the token that the chat template writes after them, or with EOS.

    Raises:
        DataError: the template writes none, so an answer would never end.
    """
    tokenizer = encoder.tokenizer
    if encoder.template is None:
        return {"eos_trained": True, "stop_tokens": [tokenizer.eos_token]}
    if not encoder.template.ending:
        raise DataError(
            "the chat template writes no special token after an answer, so the model's answers would never end",
            "give a template with an end-of-turn token with chat_template_path",
        )
    return {"eos_trained": True, "stop_tokens": [encoder.template.ending]}


def as_read(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Decode prompts and further columns, which are stored as JSON because Arrow would merge the keys of all rows."""
    return {
        name: [json.loads(value) for value in values] if name in ("prompt", "columns") else values
        for name, values in batch.items()
    }
