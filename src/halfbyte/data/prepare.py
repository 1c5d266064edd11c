"""Prepare a run's data: from the configuration to tokenized training and evaluation rows, and a report on every row."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import datasets
import numpy as np
import torch
from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from ..config.datasets import DatasetEntry, entries_of
from ..config.schema import DataSection, RunKeys
from ..utils.errors import ConfigError, DataError
from ..utils.notices import notice, remark
from ..utils.streams import no_dataset_bars
from ..utils.waiting import counting
from .chat import ChatTemplate, tool_text
from .collate import Collator, make_collator
from .columns import ARRAYS, array_bytes, columns_of
from .encode import CUT_AWAY, INSTRUCTION, ONE_IMAGE, TOO_LONG, UNTRAINED, Encoder
from .formats import Document, count_images, documents, has_images, number_in, recognise
from .image_processor import ImageProcessor
from .images import COLUMNS as IMAGE_COLUMNS
from .images import (
    IMAGES,
    OTHER_MEDIA,
    PLACEHOLDER,
    STORED,
    ImageSource,
    any_values,
    has_placeholders,
    refuse_other_media,
    with_image_column,
)
from .mixture import draw_rows
from .report import count_unread, endings, held_out, ragged, report_unread, samples, split_report
from .rows import StreamedRows
from .sources import Row, Source, parse_csv_values, read_sources
from .tables import Table, pack, with_column

ROWS_PER_PROCESS = 5_000  # with fewer rows, starting a process costs more time than it saves
ROWS_WITH_PROGRESS = 2_000
IDS, NUMBERS = datasets.List(Value("int32")), datasets.List(Value("float64"))
ENCODED = Features(
    {
        "input_ids": IDS,
        "labels": IDS,
        "length": Value("int64"),
        "dropped": Value("string"),
        "ends": IDS,
        "across": Value("int64"),
        "empty": Value("bool"),
        "not_shown": datasets.List(Value("string")),
    }
)
REMEDY = {
    TOO_LONG: "raise max_length, or set overlong: truncate",
    CUT_AWAY: "raise max_length: the answers start after it",
    ONE_IMAGE: "raise max_length",
    UNTRAINED: "check the roles and columns of the data (column_mapping, dataset_format): the rows have no answers",
}
LATER = "further"  # name of the rows of later blocks of a stream
NO_END: dict[str, Any] = {"eos_trained": None, "stop_tokens": []}  # for rows that train no end of an answer
CALIBRATION_ROW = 512  # tokens per row
FIRST_ANSWERS = ("chosen_ids", "completion_ids")


class NothingKeptError(DataError):
    """All rows are dropped."""


@dataclass(frozen=True)
class PreparedData:
    """Tokenized data.

    Attributes:
        train, eval: columns input_ids and labels (unshifted, -100 on untrained tokens), if packed seq_lengths, and
            further columns of the data, as lists with a value per document.
        report: the contents of data_report.json.
        answers: documents per row of the data; rows with several documents have seq_lengths, packed or not.
        together: how many of these documents one forward takes.
        counted: how many units of per_device_train_batch_size a row counts for.
        stream: with `streaming: true` the training rows, a `streaming.RowStream`; `train` is its first block.
        shared: whether the documents of a row share their prompt, stored once before them (`shared_prefix`).
    """

    train: Dataset
    eval: Dataset | None
    report: dict[str, Any]
    answers: int = 1
    together: int = 1
    shared: bool = False
    counted: int = 1
    stream: StreamedRows | None = None


@dataclass
class Documents:
    """Documents as JSON text (Arrow would merge the keys of all rows), with their locations, the numbers of their
    datasets (`origins`) and their sources.

    Attributes:
        columns: further columns of the prepared rows, name → a value per document.
        features: their types.
    """

    texts: list[str] = field(default_factory=list)
    locations: list[str] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    masks: dict[str, None] = field(default_factory=dict)
    columns: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    features: dict[str, Any] = field(default_factory=dict)

    @property
    def left_out(self) -> Counter[str]:
        """Rows with a value in each column or key that is neither trained nor shown (`count_unread`)."""
        return sum((Counter(source.get("left_out", {})) for source in self.sources), Counter())

    def select(self, indices: np.ndarray) -> Documents:
        texts, locations, origins = (
            [values[i] for i in indices] for values in (self.texts, self.locations, self.origins)
        )
        columns = {name: [values[i] for i in indices] for name, values in self.columns.items()}
        return replace(self, texts=texts, locations=locations, origins=origins, columns=defaultdict(list, columns))


@dataclass(frozen=True)
class Split:
    """One finished split: its documents, the rows made of them, and its part of the report."""

    documents: Dataset
    rows: Dataset
    report: dict[str, Any]


class Prepare(Protocol):
    """Prepares the data of a run, or the rows of `sources`: a block of a stream.

    Args:
        sources: None: the run's datasets.
        later: whether other blocks came before: there is no report and no evaluation, and nothing is checked that holds
            for all rows only.
    """

    def __call__(self, sources: Sequence[Source] | None = None, later: bool = False) -> PreparedData: ...


def prepare(config: RunKeys, tokenizer: PreTrainedTokenizerBase, columns: Sequence[str] = ()) -> PreparedData:
    """Read, recognise, split, mask, tokenize and (if configured) pack the data of a run.

    Conversations, and with a chat template also prompt-completion and Alpaca rows, are rendered with the template and
    trained on assistant turns. Without a template, prompt-completion and Alpaca rows use a plain instruction format.
    Every token of plain text is trained. EOS is appended wherever no template writes it.

    Args:
        config: the keys of `DataSection`, and seed.
        tokenizer: a fast one with EOS, with its final chat template: the loader applies chat_template_path. If rows
            have tools that the template does not write, it is extended (`ChatTemplate.save_tools`).
        columns: number columns of the data that the prepared rows keep as lists, one number per document. Declared
            columns with arrays (`data.columns`) are kept in any case.

    Raises:
        DataError: the data are missing, malformed, of unknown layout, or leave nothing to train on.
        ModelError: the tokenizer has no character offsets or no EOS token.
        ConfigError: eval_split_size leaves nothing to train on.
    """
    return preparer(config, tokenizer, columns)()


def preparer(config: RunKeys, tokenizer: PreTrainedTokenizerBase, columns: Sequence[str] = ()) -> Prepare:
    """Return the function that prepares rows as `prepare` describes."""
    template = template_of(config, tokenizer)
    images = ImageProcessor(config, tokenizer)
    encoder = Encoder(tokenizer, template, max_length=config.max_length, overlong=config.overlong, images=images)
    read = partial(_read, config, template, columns, images)
    finish = partial(_finish, encoder, config)
    return split_preparer(config, encoder, read, finish, ends_of=lambda rows: endings(rows, tokenizer))


def split_preparer(
    config: RunKeys,
    encoder: Encoder,
    read: Callable[..., Documents],
    finish: Callable[[Documents, str], Split],
    *,
    ends_of: Callable[[Dataset], dict[str, Any]],
    header: Mapping[str, Any] = MappingProxyType({}),
    as_texts: Callable[[Dataset], Dataset] = lambda documents: documents,
    answered: bool = True,
) -> Prepare:
    """Return the function that prepares the splits of a run, or of a block of a stream, and reports on them.

    Args:
        read: as in `read_parts`.
        finish: takes the documents of a split and its name.
        ends_of: returns how the documents of the training split end, for the report.
        header: first entries of the report.
        as_texts: returns documents of a split with `input_ids` and `labels`, as samples for the report.
        answered: whether documents contain answers, so that held-out ones can be measured.
    """
    tokenizer, template = encoder.tokenizer, encoder.template

    def prepare_rows(sources: Sequence[Source] | None = None, later: bool = False) -> PreparedData:
        if later:
            return PreparedData(finish(read([], sources=sources), LATER).rows, None, {})
        training, evaluated, summaries = read_parts(config, read, sources)
        train = finish(training, "training")
        evaluation = finish(evaluated, "evaluation") if evaluated else None
        if template is not None:
            template.save_tools()
        report = {
            **header,
            "sources": summaries,
            "template": tokenizer.chat_template,
            "mask": "; ".join(training.masks),
            "train": train.report,
            "eval": evaluation.report if evaluation else None,
            **ends_of(train.documents),
            "samples": samples(as_texts(train.documents), tokenizer),
            "held_out": held_out(as_texts(evaluation.documents)) if evaluation and answered else [],
        }
        return PreparedData(train.rows, evaluation.rows if evaluation else None, report)

    return prepare_rows


def template_of(config: RunKeys, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """Return the tokenizer's chat template; errors name its file or key."""
    path = config.chat_template_path
    if not tokenizer.chat_template:
        if path is not None:
            raise ConfigError(
                f"chat_template_path: {path} is empty", "give the path of a Jinja file, or remove the key"
            )
        return None
    file = Path(config.model_name_or_path, "chat_template.jinja")
    try:
        return ChatTemplate(tokenizer)
    except DataError as error:
        named = f"chat_template_path: {path}" if path else file if file.is_file() else config.model_name_or_path
        raise DataError(f"{named}: {error.message}", error.fix) from None


def _read(
    config: DataSection,
    template: ChatTemplate | None,
    columns: Sequence[str],
    processor: ImageProcessor,
    entries: Sequence[DatasetEntry],
    evaluating: bool = False,
    sources: Sequence[Source] | None = None,
) -> Documents:
    if sources is None:
        sources = read_sources(entries, config.dataset_split, evaluating=evaluating)
    arrays, image_source = columns_of(sources), ImageSource(config.media_dir, config.allow_image_urls)
    images: list[list[dict[str, Any]]] = []
    raw = Documents(features={name: NUMBERS for name in columns} | {column.name: ARRAYS for column in arrays})
    for source in sources:
        layout = recognise(
            source,
            format=config.dataset_format,
            mapping=config.column_mapping,
            text_field=config.dataset_text_field,
        )
        source = with_image_column(parse_csv_values(source, layout.columns, columns), config.column_mapping)
        pairs = layout.format in ("prompt-completion", "alpaca")
        everything = not (config.completion_only_loss if pairs else config.assistant_only_loss)
        for (location, document), row in zip(documents(source, layout), source.rows, strict=True):
            turned = in_turns(document, template, location, images=True)
            row_images = images_of(turned, row, image_source, processor, source.path, location)
            ready = for_template(turned, template, location, images=True) | {"train_all": everything}
            images.append(row_images[: count_images(ready)])  # turns after the last answer are left out
            if config.train_on == "last" and "messages" in ready:
                answers = sum(message["role"] == "assistant" for message in ready["messages"])
                ready["given"] = max(ready.get("given", 0), answers - 1)
            for name in columns:
                raw.columns[name].append([number_in(row, name, location)])
            for column in arrays:
                raw.columns[column.name].append([array_bytes(row, column, location)])
            text = json.dumps(ready, ensure_ascii=False, default=str)
            if not text.isascii():
                check_unicode(text, location)
            raw.texts.append(text)
            raw.locations.append(location)
            raw.origins.append(source.dataset)
        raw.masks[mask_of(layout.format, everything, template)] = None
        read_columns = [*raw.features, *(IMAGE_COLUMNS if any(images) else ())]
        left_out = count_unread(source, layout.columns, read_columns)
        summary = {"path": source.path, "format": layout.format, "why": layout.why, "rows": len(source.rows)}
        raw.sources.append(summary | ({"left_out": dict(left_out)} if left_out else {}))
    if any(images):
        check_image_run(config, processor)
        raw.columns[IMAGES], raw.features[IMAGES] = images, STORED
        raw.texts = processor.escaped(raw.texts)
    report_unread([entry.path for entry in entries], raw.left_out)
    return raw


def images_of(
    document: Document, row: Row, source: ImageSource, processor: ImageProcessor, data_file: str, location: str
) -> list[dict[str, Any]]:
    """Return the stored images of a row, see `ImageSource.take`.

    A column of images without a placeholder in the turns belongs to them only if the model takes images.

    Raises:
        DataError: as `ImageSource.take`; the row is no conversation, or has videos or audio.
        ModelError: the model takes no images.
    """
    named, media = (any_values(row, columns) for columns in (IMAGE_COLUMNS, OTHER_MEDIA))
    if not (has_images(document) or named or media or has_placeholders(document)):
        return []
    refuse_other_media(row, document, bool(media) and processor.takes_images, location)
    if not has_images(document) and not (named and (has_placeholders(document) or processor.takes_images)):
        if has_placeholders(document) and processor.takes_images:
            problem = f"{location}: {PLACEHOLDER} in a row without images is trained as text"
            notice("image-placeholders", f"{problem}; images are read from a column named {' or '.join(IMAGE_COLUMNS)}")
        return []
    _ = processor.family  # raises if the model takes no images
    if "messages" not in document:
        wrong = f"{location}: column {named[0]} has images, and the row is no conversation whose turns show them"
        raise DataError(wrong, "write it as messages, and give a chat template if the model has none")
    return source.take(document, row, data_file, location)


def check_image_run(config: DataSection, processor: ImageProcessor) -> None:
    """Check that the keys of a run and its model allow rows with images.

    Raises:
        ConfigError: they do not.
        ModelError: the model's processor is missing, or of another model.
    """
    if config.streaming:
        wrong = "streaming: the rows have images, and rows with images are read before training"
        raise ConfigError(wrong, "set streaming: false")
    processor.check()
    key = "packing" if config.packing else "padding_free"
    if not getattr(config, key):
        return
    if processor.family.cross_attention:
        wrong = f"{key}: the text of {processor.model_config.model_type} reads its images by cross-attention"
        raise ConfigError(f"{wrong}, whose masks are made for one document per row", f"set {key}: false")


def for_template(document: Document, template: ChatTemplate | None, location: str, *, images: bool = False) -> Document:
    """Convert a document to a form that the template can render: a conversation that it writes in full, or without a
    template a text or a prompt with its completion. The other arguments and the errors are those of `in_turns`."""
    document = in_turns(document, template, location, images=images)
    return template.adapt(document) if template is not None and "messages" in document else document


def in_turns(document: Document, template: ChatTemplate | None, location: str, *, images: bool = False) -> Document:
    """Return a document as a conversation, also a prompt and its completion if there is a template; plain text as it
    is.

    Args:
        images: whether turns may have images.

    Raises:
        DataError: the template cannot render it, or a turn has an image although none may.
    """
    if not images and has_images(document):
        raise DataError(
            f"{location}: the row has an image, and its method trains on text alone",
            "remove the image, or train with sft, dpo, kto, reward, grpo or rloo",
        )
    if "prompt" in document:
        if template is None:
            notice("no-template", f"no chat template: writing rows as {INSTRUCTION!r} and the completion")
            texts = [document["system"]] if "system" in document else []
            texts += [tool_text(document["tools"])] if "tools" in document else []
            return document | ({"system": "\n\n".join(texts)} if texts else {})
        earlier, answer = prompt_turns(document), {"role": "assistant", "content": document["completion"]}
        prompt_answers = len(document.get("history", ())) // 2
        tools = {"tools": document["tools"]} if "tools" in document else {}
        document = {"messages": [*earlier, answer]} | ({"given": prompt_answers} if prompt_answers else {}) | tools
    if "messages" not in document:
        return document
    if template is None:
        raise DataError(
            f"{location} is a conversation, but the tokenizer has no chat template",
            "give one with chat_template_path, or use the tokenizer of the instruction-tuned model",
        )
    return document


def prompt_turns(document: Document) -> list[dict[str, Any]]:
    """Return the turns of a document with a prompt, up to its answer."""
    system = [{"role": "system", "content": document["system"]}] if "system" in document else []
    return [*system, *document.get("history", ()), {"role": "user", "content": document["prompt"]}]


def check_unicode(text: str, location: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = f"{location}: half a surrogate pair ({error.object[error.start]!r}) is not a character"
        raise DataError(wrong, "remove it, or write both halves") from error


def mask_of(format: str, everything: bool, template: ChatTemplate | None) -> str:
    if format == "text" or everything:
        return "every token"
    if template is None:
        return "completions, by character offsets"
    if not template.marked:
        remark(
            "generation-marks",
            "the chat template has no {% generation %} marks: finding assistant turns by rendering each "
            "conversation again with one turn replaced",
        )
    return f"assistant turns, by {template.mask}"


def read_parts(
    config: RunKeys, read: Callable[..., Documents], block: Sequence[Source] | None = None
) -> tuple[Documents, Documents | None, list[dict[str, Any]]]:
    """Return the training documents, the evaluation documents (None without evaluation), and the sources of both.

    Args:
        read: takes datasets, whether they are for evaluation, and the sources of their rows if these are read already.
        block: the sources of the training rows, if these are read already.

    Raises:
        ConfigError: eval_split_size leaves nothing to train on.
    """
    training = read(config.datasets, sources=block)
    if config.eval_dataset is not None:
        evaluated = read(entries_of(config.eval_dataset, config.max_samples), True)
        if evaluated.sources == training.sources:
            notice("same-data", "eval_dataset is the training dataset: its loss does not measure generalization")
        return training, evaluated, training.sources + evaluated.sources
    size, total = config.eval_split_size, len(training.texts)
    if not size:
        return training, None, training.sources
    count = int(size) if size >= 1 else max(1, round(size * total))  # a count, or a share
    if count >= total:
        raise ConfigError(
            f"eval_split_size {size:g} holds out {count} of {total} documents and leaves none to train on",
            "lower eval_split_size, or give eval_dataset",
        )
    order = np.random.default_rng(config.seed).permutation(total)  # the same data and seed give the same split
    return training.select(np.sort(order[count:])), training.select(np.sort(order[:count])), training.sources


def _finish(encoder: Encoder, config: RunKeys, raw: Documents, name: str) -> Split:
    encoded = encode(raw, encoder, config, ENCODED)
    total, trainable = len(raw.texts), kept_rows(encoded, f"{name} documents", config.max_length, REMEDY)
    truncated = sum(length > config.max_length for length in trainable["length"])
    if truncated:
        longest = f"the longest has {max(trainable['length']):,} tokens"
        notice(
            f"truncated:{name}",
            f"{truncated} of {total} {name} documents cut to max_length {config.max_length}: {longest}",
        )
    across = across_of(trainable, f"{name} documents")
    not_shown = not_shown_of(trainable, f"{name} documents")
    empty = sum(trainable["empty"])
    if empty == len(trainable) and name == "training":
        raise DataError(
            f"all answers are empty: {total} training documents would train only the end token",
            "check the rows and columns of the data (column_mapping, dataset_format)",
        )
    if empty:
        notice(
            f"empty:{name}",
            f"{empty} of {total} {name} documents have empty answers and train the model to answer nothing",
        )
    trainable, mixture = mixed(config, trainable, raw, encoded) if name == "training" else (trainable, {})
    columns = ["input_ids", "labels", *raw.features]
    rows = _pack(trainable, config, raw.features) if config.packing else trainable.select_columns(columns)
    capacity = config.max_length if config.packing else None
    report = split_report(encoded, trainable, rows, truncated, empty, capacity)
    return Split(trainable, rows, {**report, "tokens_across_border": across, "not_shown": not_shown, **mixture})


def mixed(config: RunKeys, trainable: Dataset, raw: Documents, encoded: Dataset) -> tuple[Dataset, dict[str, Any]]:
    """Return the training rows of an epoch, and with several datasets the rows and share of each for the report.

    Args:
        trainable: rows of `encoded` that are not dropped.
    """
    if len(config.datasets) == 1 or (config.streaming and config.mixing == "concat"):
        return trainable, {}
    origins = np.array(raw.origins)[np.array(list(encoded["dropped"])) == ""]
    drawn = np.arange(len(trainable)) if config.streaming else draw_rows(config, origins)
    if not np.array_equal(drawn, np.arange(len(trainable))):
        trainable = trainable.select(drawn)
    read, counts = (np.bincount(numbers, minlength=len(config.datasets)) for numbers in (origins, origins[drawn]))
    datasets_read = zip(config.datasets, read.tolist(), counts.tolist(), strict=True)
    shares = [
        {"path": entry.path, "rows": rows, "drawn": count, "share": count / len(drawn)}
        for entry, rows, count in datasets_read
    ]
    return trainable, {"mixture": shares}


def kept_rows(encoded: Dataset, name: str, max_length: int, remedies: Mapping[str, str]) -> Dataset:
    """Return the rows that are not dropped, with a notice for each reason.

    Args:
        name: what the rows are called, as in "training rows".
        remedies: reason to fix.

    Raises:
        DataError: all rows are dropped.
    """
    reasons = np.array(list(encoded["dropped"]))
    dropped = Counter(reason for reason in reasons.tolist() if reason)
    if dropped.total() == len(encoded):
        counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise NothingKeptError(
            f"zero trained tokens: all {len(encoded)} {name} are dropped ({counts}; max_length={max_length})",
            remedies[dropped.most_common(1)[0][0]],
        )
    for reason, count in dropped.items():
        notice(f"dropped:{name}:{reason}", f"{count} of {len(encoded)} {name} dropped: {reason}")
    return encoded.select(np.flatnonzero(reasons == ""))


def across_of(trainable: Dataset, name: str) -> int:
    """Count the tokens that hold the end of a prompt and the start of its answer, with a notice.

    Args:
        name: what the rows are called, as in "training rows".
    """
    across = np.array(trainable["across"])
    if total := int(across.sum()):
        notice(
            f"across:{name}",
            f"{np.count_nonzero(across):,} of {len(trainable):,} {name}: the tokenizer joins the end of the prompt and"
            f" the start of the answer in one token ({total:,} tokens), which generation, with the prompt alone, does"
            " not see; end prompts, and start answers, with other characters than white space",
        )
    return total


def not_shown_of(trainable: Dataset, name: str) -> dict[str, int]:
    """Count the rows by message part that the chat template does not write, with one notice.

    Args:
        name: what the rows are called, as in "training rows".
    """
    missing = Counter(name for names in trainable["not_shown"] for name in set(names))
    if missing:
        counts = ", ".join(f"{name} ({count:,} of {len(trainable):,})" for name, count in missing.most_common())
        notice(
            f"not-shown:{name}",
            f"{name}: the chat template does not write {counts}, so these parts are not trained; to train them, give a"
            " template that writes them with chat_template_path",
        )
    return dict(missing)


def encode(raw: Documents, encoder: Encoder, config: DataSection, features: Mapping[str, Any]) -> Dataset:
    """Return the columns that `encoder` makes of documents, in parallel if there are enough rows, and their further
    columns."""
    rows = len(raw.texts)
    columns = {"document": raw.texts, "location": raw.locations}
    types = {name: Value("string") for name in columns}
    if IMAGES in raw.features:
        columns[IMAGES], types[IMAGES] = raw.columns[IMAGES], STORED
        features = {**features, IMAGES: STORED}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(config.dataset_num_proc or max(1, rows // ROWS_PER_PROCESS), cores)
    with no_dataset_bars(), _counted(encoder, rows) as counted_encoder:
        encoded = Table.from_dict(columns, features=Features(types)).map(
            counted_encoder,
            batched=True,
            batch_size=256,
            num_proc=min(processes, rows) if processes > 1 else None,
            remove_columns=["document", "location"],
            features=Features(features),
            keep_in_memory=True,
            load_from_cache_file=False,
            new_fingerprint="tokenized",  # nothing is cached, so hashing the tokenizer would be wasted
        )
    for name, feature in raw.features.items():
        if name == IMAGES:  # the encoder's
            continue
        encoded = with_column(encoded, name, raw.columns[name], feature)
    return encoded


class _CountedEncoder:
    """An encoder that adds a byte to a file for each row, in whichever process."""

    def __init__(self, encoder: Encoder, file: str):
        self.encoder = encoder
        self.file = file

    def __call__(self, batch: Any) -> Any:
        columns = self.encoder(batch)
        with open(self.file, "a", encoding="ascii") as file:
            file.write("." * len(batch["document"]))
        return columns


@contextlib.contextmanager
def _counted(encoder: Encoder, rows: int) -> Iterator[Callable[[Any], Any]]:
    """Show how many of many rows are encoded; yields the encoder to use."""
    if rows < ROWS_WITH_PROGRESS:
        yield encoder
        return
    ended = threading.Event()
    with tempfile.NamedTemporaryFile() as file, counting("tokenizing", rows) as show:

        def watch() -> None:
            while not ended.wait(0.2):
                show(os.stat(file.name).st_size)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield _CountedEncoder(encoder, file.name)
        finally:
            ended.set()
            thread.join()
            show(os.stat(file.name).st_size)


def _pack(trainable: Dataset, config: DataSection, features: Mapping[str, Any]) -> Dataset:
    (ids, lengths), (labels, _) = ragged(trainable, "input_ids"), ragged(trainable, "labels")
    stops = np.cumsum(lengths)
    pixels = row_pixels(trainable, config.image_max_pixels_per_row)
    rows = pack(lengths.tolist(), config.max_length, pixels, config.image_max_pixels_per_row or 0)

    def joined(values: np.ndarray) -> list[np.ndarray]:
        return [np.concatenate([values[stops[i] - lengths[i] : stops[i]] for i in row]) for row in rows]

    columns: dict[str, list[Any]] = {"input_ids": joined(ids), "labels": joined(labels)}
    columns["seq_lengths"] = [lengths[row] for row in rows]
    features = {**{name: IDS for name in columns}, **features}
    for name in features.keys() - columns.keys():
        values = trainable[name][:]  # a list per document: of one value, or of its images
        columns[name] = [[value for i in row for value in values[i]] for row in rows]
    return Table.from_dict({name: columns[name] for name in features}, features=Features(features))


def row_pixels(rows: Dataset, limit: int | None, answers: int = 1) -> list[int] | None:
    """Return the pixels of each row that the tower reads; None: packed rows may hold any number.

    Args:
        limit: `image_max_pixels_per_row`.
        answers: documents of a row, each of which has the row's images.

    Raises:
        ConfigError: a row has more than `limit`.
    """
    if limit is None or IMAGES not in rows.column_names:
        return None
    images_of_rows = rows[IMAGES][:]
    pixels = [answers * sum(image["pixels"] for image in images) for images in images_of_rows]
    for images, count in zip(images_of_rows, pixels, strict=True):
        if count > limit:
            wrong = f"image_max_pixels_per_row: {limit:,} is less than the {count:,} pixels of the row"
            raise ConfigError(f"{wrong} of {images[0]['location']}", "raise it, or lower image_max_pixels")
    return pixels


def drawn_documents(rows: Dataset, seed: int, tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield ids and labels of documents of prepared rows, up to a number of tokens, in an order of the seed.

    A row with a prompt and answers is its prompt with its first answer.
    """
    total = 0
    for index in np.random.default_rng(seed).permutation(len(rows)).tolist():
        row = rows[index]
        answer: Sequence[int] = next((value for name, value in row.items() if name in FIRST_ANSWERS), [])
        ids = np.asarray(row["input_ids"] if "input_ids" in row else [*row["prompt_ids"], *answer])
        labels = np.asarray(row.get("labels") or ids)
        ends = np.cumsum(row.get("seq_lengths") or [len(ids)])[:-1]
        for document, document_labels in zip(np.split(ids, ends), np.split(labels, ends), strict=True):
            yield document.tolist(), document_labels.tolist()
        total += len(ids)
        if total >= tokens:
            return


# --- calibration text -------------------------------------------------------------------------------------------------


def calibration_rows(
    config: RunKeys, tokenizer: PreTrainedTokenizerBase, tokens: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the model's forward arguments and `labels`, one row at a time; see `packed_rows`."""
    return collated_rows(packed_rows(config, tokenizer, tokens), make_collator(config, tokenizer), device)


def packed_rows(config: RunKeys, tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[dict[str, Any]]:
    """Return rows for a packing collator, up to `tokens` tokens or the end of the text; every token is a label.

    Args:
        config: names the dataset; it needs packing and a max_length of `CALIBRATION_ROW`.

    Raises:
        DataError: no text.
    """
    rows = itertools.islice(prepare(config, tokenizer).train, max(1, tokens // CALIBRATION_ROW))
    return [{**row, "labels": row["input_ids"]} for row in rows]


def collated_rows(
    rows: Iterable[dict[str, Any]], collate: Collator, device: torch.device, together: int = 1
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the model's forward arguments and `labels` on `device`, `together` rows of `packed_rows` at a time."""
    remaining = iter(rows)
    while group := list(itertools.islice(remaining, together)):
        yield {key: value.to(device) for key, value in collate(group).items() if torch.is_tensor(value)}
