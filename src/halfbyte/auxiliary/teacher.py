"""The teacher of a run: compared with the model before it begins, loaded, and asked in each step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.auxiliary.find import KEY, TeacherFiles, check_vocabulary, digest_of_model, find_teacher
from halfbyte.config import RunConfig
from halfbyte.config.policy import DISTILLING
from halfbyte.data.collate import make_collator
from halfbyte.loading.find import ModelFiles
from halfbyte.loading.load import check_stored, load_model, load_tokenizer
from halfbyte.methods.answers import as_adapter, without_adapter
from halfbyte.modeling.adapters import check_adapter_files, compute_autocast, load_adapter
from halfbyte.modeling.distillation import Teacher, use_teacher
from halfbyte.modeling.packing import isolate_for_run
from halfbyte.modeling.patch import patch
from halfbyte.modeling.tiny_model import check_positions
from halfbyte.utils.console import Console
from halfbyte.utils.errors import ModelError, attribute_to_key

from ..rl.rollouts import check_same_files, digest_of
from ..utils.text import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..train.preflight import PreparedRun

TEACHER = "teacher"  # PEFT's name of its adapter


def check_teacher(
    config: RunConfig,
    model_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path | None,
    console: Console,
    longest: int,
) -> None:
    """Whether the teacher of a run is there, speaks of the same tokens, and is as it was; said.

    Args:
        model_config: transformers', of the model that trains.
        checkpoint: that the run goes on from.
        longest: tokens of the longest row, with its answer.

    Raises:
        HalfbyteError: it is not, and why.
    """
    if config.method not in DISTILLING:
        return
    with attribute_to_key(KEY):
        found = find_teacher(config)
        if found.adapter is not None:
            check_adapter_files(found.adapter)
        if found.files is not None:
            check_stored(found.files, config.storage)
            who = f"the teacher {found.files.name}"
            check_positions(found.files.config, longest, trust_remote_code=config.trust_remote_code, who=who)
            check_vocabulary(KEY, found.files, model_config, tokenizer.get_vocab(), tokens_of(found.files))
    if checkpoint is not None:
        check_same_files(teacher_files(config), checkpoint)
    console.print(one_line(f"teacher: {_said(found)}"), soft_wrap=True)


def teacher_files(config: RunConfig) -> dict[str, str]:
    """SHA-256 of what teaches a run, an adapter and the model that it is on, each by its path or hub id; none of the
    model that trains."""
    if config.method not in DISTILLING:
        return {}
    found = find_teacher(config)
    adapter = {} if found.adapter is None else digest_of(found.adapter)
    return adapter if found.files is None else adapter | digest_of_model(found.files)


def _said(found: TeacherFiles) -> str:
    who = f"the adapter in {found.adapter}" if found.adapter else "the model without its adapter"
    if found.files is None:
        return f"{who}; it shares the model's weights"
    return f"{who}, on {found.files.name}" if found.adapter else found.files.name


def tokens_of(files: ModelFiles) -> dict[str, int] | None:
    """Token → id; None of a model without tokenizer."""
    if Path(files.place.name).is_dir() and not Path(files.place.name, "tokenizer.json").is_file():
        return None
    return load_tokenizer(files.place).get_vocab()


@contextlib.contextmanager
def teaching(run: PreparedRun, trained: Any) -> Iterator[None]:
    """Around the training of a run: its teacher, if it has one, is there to be asked.

    Raises:
        HalfbyteError: it cannot be loaded, or packed documents see each other in it.
    """
    config = run.config
    if config.method not in DISTILLING:
        yield
        return
    found = find_teacher(config)
    if found.files is None:
        with _on_own_weights(config, trained, found) as teacher, use_teacher(trained, teacher):
            yield
        return
    model = _loaded(run, found)
    with use_teacher(trained, Teacher(model, partial(compute_autocast, model, run.machine.compute_dtype))):
        yield


@contextlib.contextmanager
def _on_own_weights(config: RunConfig, model: Any, found: TeacherFiles) -> Iterator[Teacher]:
    """The model that trains with the teacher's adapter instead of its own, or with none."""
    if found.adapter is None:
        yield Teacher(model, partial(without_adapter, model))
        return
    load_adapter(model, found.adapter, config.model_name_or_path, TEACHER)
    try:
        yield Teacher(model, partial(as_adapter, model, TEACHER))
    finally:
        model.delete_adapter(TEACHER)


def _loaded(run: PreparedRun, found: TeacherFiles) -> Any:
    """A teacher with weights of its own, frozen, in eval mode, with the run's kernels."""
    config, machine = run.config, run.machine
    assert found.files is not None
    how: dict[str, Any] = {"device": machine.device, "attn_implementation": config.attn_implementation}
    model = load_model(found.files, run.config.storage, dtype=machine.compute_dtype, **how)
    if found.adapter is not None:
        model = load_adapter(model, found.adapter, found.files.name)
    model.requires_grad_(False)
    if config.use_kernels and machine.device.type != "cpu":
        patch(model)
    plain = make_collator(config, run.tokenizer, machine.device)
    isolation = isolate_for_run(model, config, plain, run.data.train, machine.compute_dtype)
    if isolation is not None and isolation.way != "positions":
        raise ModelError(
            f"padding_free: true: documents would see each other in the teacher {found.files.name}",
            "set padding_free: false",
        )
    return model.eval()
