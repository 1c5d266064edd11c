"""The inputs of a run: read and check its data, and digest all inputs, which a resumed run must find unchanged.

Checkpoints store the digests, by the configuration key that names the input. They depend on contents and not on paths,
so a moved file is the same input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..adapter_kinds import PREFIX
from ..auxiliary.model import adapter_digest, find_teacher
from ..auxiliary.teacher import check_teacher
from ..config import RunConfig
from ..config.initialisations import read_by
from ..config.methods import TASKS
from ..config.policy import DISTILLING, POLICY, SAMPLING
from ..data.batches import largest_id, longest_row
from ..data.image_processor import PIXEL_KEYS, PROCESSOR_FILES, ImageProcessor
from ..data.images import IMAGES
from ..data.prepare import PreparedData
from ..data.tables import digest_of_rows
from ..loading.find import ModelFiles
from ..mesh.mesh import Mesh
from ..methods import Method
from ..modeling.architectures import check_token_ids, vision_part, vision_parts
from ..modeling.task_models import check_task_model
from ..modeling.tiny_model import check_positions
from ..plan.shapes import ModelShapes
from ..plan.vision import BatchImages
from ..reading.files import open_bytes
from ..report.terminal import print_data
from ..rewards.reward_models import find_reward_models
from ..rewards.specs import MODEL, read_specs
from ..rl.preflight import check_rewards
from ..rl.served import check_server
from ..runs import checkpoints
from ..utils.console import Console
from ..utils.errors import ConfigError, DataError
from ..utils.notices import notice
from ..utils.waiting import waiting

IMAGE_KEYS = ("media_dir", "allow_image_urls", *PIXEL_KEYS)
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def data_identity(config: RunConfig, data: PreparedData, files: ModelFiles) -> dict[str, Any]:
    """Return digests of a run's data, adapter and tokenizer, and the size of the training set.

    Args:
        files: of the trained model.

    Returns:
        Rows, tokens and trained tokens of the training set, the digest of all its prepared columns (including the
        columns of reward functions), and the digests of other inputs by the key that names them; None: no such input.
    """
    sizes = {name: data.report["train"][name] for name in ("rows", "tokens", "trained_tokens")}
    folder = files.folder()
    template = [] if config.chat_template_path is None else [Path(config.chat_template_path)]
    has_images = has_image_rows(data)
    return {
        **sizes,
        "digest": digest_of_rows(data.train),
        "eval_dataset": None if data.eval is None else digest_of_rows(data.eval),
        "adapter_path": adapter_digest(Path(config.adapter_path)) if config.adapter_path else None,
        # the tokenizer's files and the chat template that is used instead of its own
        "chat_template_path": _digest_of_files([folder / name for name in TOKENIZER_FILES] + template, folder),
        "image_processor": _digest_of_files([folder / name for name in PROCESSOR_FILES], folder)
        if has_images
        else None,
    }


def _digest_of_files(paths: Iterable[Path], folder: Path) -> str:
    """Return the SHA-256 of the files that exist, of those in `folder` with their names."""
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file():
            with open_bytes(path) as stream:
                content = hashlib.file_digest(stream, "sha256")
            digest.update(f"{path.name if path.parent == folder else ''} {content.hexdigest()}".encode())
    return digest.hexdigest()


def model_reader(config: RunConfig, files: ModelFiles) -> Callable[[], dict[str, Any]]:
    """Find the models and reward functions of a run; return a function that reads them and returns their digests.

    The function reads all weights. It can run in a thread: finding models changes torch's settings, hashing does not.

    Args:
        files: of the trained model.
    """
    specs = read_specs(config.reward_funcs or [], None)
    models = find_reward_models(config, specs)
    teacher = find_teacher(config) if config.method in DISTILLING else None

    @waiting("hashing the files of the models")
    def read() -> dict[str, Any]:
        """Raises CheckpointError if a file is missing or damaged."""
        digests = iter([model.digest() for model in models])
        return {
            "model_name_or_path": files.digest(),
            "teacher_model_name_or_path": None if teacher is None else teacher.digest(),
            "reward_funcs": [next(digests) if spec.function_name == MODEL else spec.sha256 for spec in specs],
        }

    return read


def digests_of_models(
    config: RunConfig, files: ModelFiles, checkpoint: Path | None, is_main: bool
) -> Future[dict[str, Any]]:
    """Start to read the models for the digests that checkpoints store, in a thread beside the training.

    The digests of a resumed run are its checkpoint's, which `prepare_run` has compared. If a file cannot be read any
    more, checkpoints have no digests, with a notice.
    """
    digests: Future[dict[str, Any]] = Future()
    saved = {} if checkpoint is None else checkpoints.read_state(checkpoint)["data"]
    if not is_main or checkpoints.MODELS.keys() <= saved.keys():
        digests.set_result({key: saved[key] for key in checkpoints.MODELS if key in saved})
        return digests

    read_models = model_reader(config, files)

    def read() -> None:
        try:
            digests.set_result(read_models())
        except Exception as error:
            reason = f"the files of its models could not be read again: {error}"
            notice("no-digest", f"{reason}. A resumed run will not notice a change of these files")
            digests.set_result({})

    Thread(target=read, daemon=True).start()
    return digests


@waiting("reading and tokenizing the data")
def read_data(
    config: RunConfig,
    method: Method,
    files: ModelFiles,
    shapes: ModelShapes,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path | None,
    mesh: Mesh,
    console: Console,
    ranks: int,
    adapters: int,
) -> tuple[PreparedData, dict[str, Any]]:
    """Read, check and print the run's data; one rank of each host prepares it, the others read its cache.

    Args:
        ranks: processes of the run, which may only be checked by one.
        adapters: adapters that train at once.

    Returns:
        The data, and `data_identity`.
    """
    if config.method in TASKS:
        check_task_model(str(method.scores), shapes.causal_lm, config.method)
    data = mesh.local_first(lambda: method.ready(config, tokenizer, shapes.causal_lm.config))
    print_data(console, data.report)
    _check_data(config, shapes, tokenizer, data)
    check_images(config, shapes, data, ranks, adapters)
    method.check_training(config, data)
    identity = data_identity(config, data, files)
    if not mesh.all_equal(identity):
        raise DataError("the processes of this run read different data", "give all of them the same files")
    if checkpoint is not None:
        checkpoints.check_same_inputs(identity, checkpoint)
        models = mesh.from_main(model_reader(config, files)() if mesh.is_main else {})
        checkpoints.check_same_inputs(models, checkpoint)
    if method.rows == "prompts":
        model_config = shapes.causal_lm.config
        check_rewards(config, data, model_config, tokenizer, console)
        check_server(config, data, tokenizer, console)
        check_teacher(config, model_config, tokenizer, console, longest_text(data))
    return data, identity


def _check_data(config: RunConfig, shapes: ModelShapes, tokenizer: PreTrainedTokenizerBase, data: PreparedData) -> None:
    """Check that the model has embeddings for all token ids of the data, padding and ends of answers, and positions for
    the longest row."""
    splits = [rows for rows in (data.train, data.eval) if rows is not None]
    ends: Any = tokenizer.convert_tokens_to_ids(data.report.get("stop_tokens", []))
    named = {"padding": tokenizer.pad_token_id, "the end of an answer": max(filter(None, ends), default=None)}
    check_token_ids(shapes.causal_lm, {"tokens of the data": max(map(largest_id, splits)), **named})
    longest = longest_text(data) if data.stream is None else config.max_length
    check_positions(shapes.causal_lm.config, longest, trust_remote_code=config.trust_remote_code)


def check_images(config: RunConfig, shapes: ModelShapes, data: PreparedData, ranks: int, adapters: int) -> None:
    """Check that a run whose rows have images trains one adapter on one process, and that parts which are not frozen
    get images.

    Without such rows, keys of images get a notice.

    Args:
        ranks: processes of the run.
        adapters: adapters that train at once.

    Raises:
        ConfigError: it does not.
    """
    if not has_image_rows(data):
        for key in IMAGE_KEYS:
            if getattr(config, key):
                notice(key, f"{config.written(key)} has no effect: no row has an image")
        for key in config.trained_vision:
            wrong = f"{key}: false, but no row has an image: it would get no gradient"
            raise ConfigError(wrong, f"remove {key}, or give rows with images")
        if config.requires_vision_cache:
            wrong = f"{config.written('vision_cache')}, but no row has an image"
            raise ConfigError(wrong, "remove vision_cache")
        return
    parts = vision_parts(shapes.causal_lm)
    trained = [name.removeprefix(PREFIX) for name, p in shapes.model.named_parameters() if p.requires_grad]
    reads_rows = config.use_peft and read_by(config) not in ("nothing", "weights")
    refusals = (
        (ranks > 1, "parallel", "several processes", "remove it"),
        (adapters > 1, "adapters", "several adapters at once", "train them one after the other"),
        (reads_rows, "init_lora_weights", f"{config.init_lora_weights}, which reads rows", "set it to true"),
    )
    for applies, key, reason, fix in refusals:
        if applies:
            raise ConfigError(f"{key}: the rows have images, which are not trained with {reason}", fix)
    for name in trained:
        if (part := vision_part(name, parts)) is not None and getattr(config, part):
            key = "modules_to_save" if ".modules_to_save." in name else "target_modules"
            raise ConfigError(f"{key} names {name}, and {part}: true", f"set {part}: false, or remove it from {key}")


def has_image_rows(data: PreparedData) -> bool:
    """Return whether rows of a run have images."""
    return any(IMAGES in rows.column_names for rows in (data.train, data.eval) if rows is not None)


def rows_with_most_images(splits: Iterable[Any], count: int) -> Any | None:
    """Return at most `count` rows with most images, of the first of `splits` that has any; None without images."""
    with_images = (rows for rows in splits if IMAGES in rows.column_names and any(rows[IMAGES]))
    rows = next(with_images, None)
    if rows is None:
        return None
    counts = [len(images) for images in rows[IMAGES]]
    numbers = sorted(range(len(counts)), key=lambda number: -counts[number])[:count]
    return rows.select([number for number in numbers if counts[number]])


def most_images(
    config: RunConfig, data: PreparedData, tokenizer: PreTrainedTokenizerBase, cached: bool
) -> BatchImages | None:
    """Return the images of the micro-batch that can have most, for the memory plan; None if no row is left with one.

    Args:
        cached: whether their features are computed before training.
    """
    splits = [rows for rows in (data.train, data.eval) if rows is not None and IMAGES in rows.column_names]
    size = config.per_device_train_batch_size
    repeats = min(config.group_size, size) if config.method in POLICY else 1  # answers to a prompt are adjacent
    counts = [
        sorted((sum(image["tokens"] for image in row) for row in rows[IMAGES] for _ in range(repeats)), reverse=True)
        for rows in splits
    ]
    images = (image for rows in splits for row in rows[IMAGES] for image in row)
    largest = max(images, key=lambda image: image["tokens"], default=None)
    if largest is None:
        return None
    tokens = data.answers * max(sum(values[:size]) for values in counts)
    processor = ImageProcessor(config, tokenizer)
    count = processor.copies(largest)
    return BatchImages(processor.image_columns(largest, count), count * largest["tokens"], tokens, cached)


def longest_text(data: PreparedData) -> int:
    """Return the number of tokens in the longest row."""
    return max(longest_row(rows, data.answers) for rows in (data.train, data.eval) if rows is not None)


def notice_small_data(config: RunConfig, rows: int, data_parallel_degree: int) -> None:
    """Give a notice if a step would take more rows than the training set has."""
    rows_per_step = config.per_device_train_batch_size * config.gradient_accumulation_steps * data_parallel_degree
    if rows_per_step > rows and config.method not in SAMPLING and not config.streaming:
        keys = "per_device_train_batch_size and gradient_accumulation_steps"
        sizes = f"{keys} ask for {rows_per_step:,} rows a step, and the data has {rows:,}"
        notice("step-rows", f"{sizes}: a step uses them all")


def check_block(shapes: ModelShapes, rows: Any) -> None:
    """Check that the model has embeddings for the tokens of a later block of a stream."""
    if len(rows):
        check_token_ids(shapes.causal_lm, {"tokens of the data": largest_id(rows)})
