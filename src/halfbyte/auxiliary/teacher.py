"""The teacher of a distillation run: preflight check, loading, and use in each step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..config.policy import DISTILLING
from ..config.schema import RunKeys
from ..data.collate import make_collator
from ..methods.answers import as_adapter, without_adapter
from ..modeling.compute_dtype import compute_autocast
from ..modeling.distillation import Teacher, use_teacher
from ..modeling.packing import isolate_for_run
from ..modeling.patch import patch
from ..modeling.tiny_model import check_positions
from ..utils.console import Console
from ..utils.errors import ModelError, attribute_to_key
from ..utils.text import one_line
from .model import KEY, AuxiliaryModel, additional_adapter, find_teacher

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

ADAPTER_NAME = "teacher"  # PEFT's name of the teacher's adapter on the trained model


def check_teacher(
    config: RunKeys,
    model_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
    longest: int,
) -> None:
    """Check that the teacher exists and has the run's vocabulary; print its name.

    Args:
        model_config: transformers' config of the trained model.
        longest: tokens of the longest row, with its answer.

    Raises:
        HalfbyteError: a check fails.
    """
    if config.method not in DISTILLING:
        return
    with attribute_to_key(KEY):
        teacher = find_teacher(config)
        if teacher.files is not None:
            name, trust = f"the teacher {teacher.files.name}", config.trust_remote_code
            check_positions(teacher.files.config, longest, trust_remote_code=trust, name=name)
        teacher.check(KEY, config, model_config, tokenizer)
    console.print(one_line(f"teacher: {_describe(teacher)}"), soft_wrap=True)


def _describe(teacher: AuxiliaryModel) -> str:
    name = f"the adapter in {teacher.adapter}" if teacher.adapter else "the model without its adapter"
    if teacher.files is None:
        return f"{name}; it shares the model's weights"
    return f"{name}, on {teacher.files.name}" if teacher.adapter else teacher.files.name


@contextlib.contextmanager
def loaded_teacher(
    config: RunKeys,
    trained: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Dataset,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[None]:
    """Load the teacher of a run, if it has one, and let the losses of `trained` use it inside.

    Args:
        rows: the training set.
        dtype: compute dtype.

    Raises:
        HalfbyteError: it cannot be loaded, or packed documents attend to each other in it.
    """
    if config.method not in DISTILLING:
        yield
        return
    auxiliary = find_teacher(config)
    if auxiliary.files is not None:
        model = _load(config, auxiliary, tokenizer, rows, device, dtype)
        teacher = Teacher(model, partial(compute_autocast, model, dtype))
    elif auxiliary.adapter is None:
        teacher = Teacher(trained, partial(without_adapter, trained))
    else:
        teacher = Teacher(trained, partial(as_adapter, trained, ADAPTER_NAME))
    with contextlib.ExitStack() as stack:
        if auxiliary.files is None and auxiliary.adapter is not None:
            stack.enter_context(additional_adapter(config, trained, auxiliary.adapter, ADAPTER_NAME))
        stack.enter_context(use_teacher(trained, teacher))
        yield


def _load(
    config: RunKeys,
    teacher: AuxiliaryModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Dataset,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """Load a teacher with its own weights, frozen, in eval mode, with the run's kernels."""
    model = teacher.load(config, device, dtype)
    model.requires_grad_(False)
    if config.use_kernels and device.type != "cpu":
        patch(model)
    isolation = isolate_for_run(model, config, make_collator(config, tokenizer, device), rows, dtype)
    if isolation is not None and isolation.method != "positions":
        assert teacher.files is not None
        raise ModelError(
            f"padding_free: true: documents would see each other in the teacher {teacher.files.name}",
            "set padding_free: false",
        )
    return model.eval()
