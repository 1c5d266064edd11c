"""Log-probabilities of the reference: compute them once before training, cache them, compare them with the policy's.

The reference is the model before the first step, so no second model is needed. It is the model without its adapter; if
training continues from an adapter, uses quantization-aware training or trains all weights, it is the initial model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, List, Value
from safetensors.torch import save_file

from .. import __version__
from ..batch import REFERENCE
from ..data.answer_documents import trained_tokens
from ..data.collate_answers import answer_collator
from ..data.images import IMAGES
from ..data.tables import with_column
from ..mesh.mesh import DATA_AXES
from ..methods.answers import as_reference, log_probs
from ..methods.preference import reference_is_initial_model
from ..modeling.compute_dtype import compute_autocast
from ..modeling.layer import causal_lm_of
from ..reading.tensors import read_tensors
from ..utils.console import Console
from ..utils.errors import CheckpointError, ConfigError, TrainingError
from ..utils.files import cache_folder, new_file
from ..utils.notices import notice
from ..utils.text import one_line
from ..utils.waiting import waiting
from .preflight import PreparedRun

# Tolerance of a token's log-probability, relative to the mean of their absolute values.
ROUNDING, ROUNDING_16 = {torch.float32: 1e-4}, 1 / 64
CHECKED_ROWS = 4  # number of first rows, and of longest rows, on which policy and reference are compared
SPLITS = ("train", "eval")
IGNORED_KEYS = ("_name_or_path", "name_or_path", "transformers_version", "quantization_config", "architectures")


def add_reference(run: PreparedRun, model: Any, console: Console) -> tuple[Any, Any, dict[str, Any]]:
    """Add the reference's log-probabilities to the rows, unless each step computes them, and compare with the policy's.

    `model` must be in its state before the first step.

    Returns:
        Training rows, held-out rows, and for checks.json the origin of the log-probabilities, and the largest and mean
        difference of policy and reference per token.

    Raises:
        TrainingError: policy and reference differ before training by more than rounding.
    """
    start = time.time()
    origin = "each step"
    rows = run.data.train
    held_out = run.data.eval
    if run.computes_reference_once:
        splits = {"train": rows} | ({} if held_out is None else {"eval": held_out})
        log_probs_of, origin = _cached_or_computed(run, model, splits)
        rows = _add_column(rows, log_probs_of["train"])
        if held_out is not None:
            held_out = _add_column(held_out, log_probs_of["eval"])
        tokens = sum(map(len, log_probs_of.values()))
        line = f"reference: log-probabilities of {tokens:,} tokens, {origin}, {time.time() - start:.1f} s"
        console.print(one_line(line), soft_wrap=True)
    return rows, held_out, {"from": origin, **_compare(run, model, rows)}


@contextlib.contextmanager
def _as_reference(run: PreparedRun, model: Any) -> Iterator[None]:
    """Let the model compute as the reference inside."""
    with contextlib.nullcontext() if reference_is_initial_model(run.config) else as_reference(model):
        yield


def _add_column(rows: Any, values: torch.Tensor) -> Dataset:
    """Return `rows` with a column of their trained tokens' log-probabilities."""
    of_rows = values.split([trained_tokens(row) for row in rows])
    return with_column(rows, REFERENCE, [log_probs.numpy() for log_probs in of_rows], List(Value("float32")))


# --- computing -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _compute(run: PreparedRun, model: Any, rows: Any) -> torch.Tensor:
    """Return fp32 log-probabilities of all trained tokens of `rows`, in order. Ranks share the batches."""
    config, mesh = run.config, run.mesh
    collate = answer_collator(config, run.tokenizer, run.machine.device, answers=run.data.answers)
    lengths = [len(row["input_ids"]) for row in rows]
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])  # for little padding
    size = config.per_device_eval_batch_size or config.per_device_train_batch_size
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    of_rank = batches[mesh.coordinate(*DATA_AXES) :: mesh.degree(*DATA_AXES)]
    forwards = -(-len(batches) // mesh.degree(*DATA_AXES))  # of every rank, since sharded ranks gather together
    log_probs_of: dict[int, torch.Tensor] = {}  # by index of the row
    model.eval()
    for indices in of_rank + [order[-1:]] * (forwards - len(of_rank)):
        batch_rows = [rows[index] for index in indices]
        values = _log_probs(model, collate(batch_rows), run.machine.compute_dtype, run.machine.device)
        log_probs_of |= zip(indices, values.split([trained_tokens(row) for row in batch_rows]), strict=True)
    gathered = {index: values for shard in mesh.gather(log_probs_of) for index, values in shard.items()}
    return torch.cat([gathered[index] for index in range(len(rows))])


def _log_probs(model: Any, batch: dict[str, Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return log-probabilities of the trained tokens of `batch`, on the CPU, padding removed."""
    tokens = int((batch["answer"] >= 0).sum())
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    with compute_autocast(model, dtype):
        return log_probs(model, batch)[:tokens].float().cpu()


@torch.no_grad()
def _compare(run: PreparedRun, model: Any, rows: Any) -> dict[str, Any]:
    """Return the differences of policy and reference on the first rows and on the longest rows.

    Sliding windows and rope scaling affect the longest ones.

    Raises:
        TrainingError: they differ by more than rounding.
    """
    lengths = [len(row["input_ids"]) for row in rows]
    longest = sorted(range(len(lengths)), key=lambda index: -lengths[index])[:CHECKED_ROWS]
    chosen = list(dict.fromkeys([*range(min(len(lengths), CHECKED_ROWS)), *longest]))
    collate = answer_collator(run.config, run.tokenizer, run.machine.device, answers=run.data.answers)
    size = run.config.per_device_eval_batch_size or run.config.per_device_train_batch_size
    dtype = run.machine.compute_dtype
    model.eval()
    compared = []
    for first in range(0, len(chosen), size):
        batch = collate([rows[index] for index in chosen[first : first + size]])
        policies = _log_probs(model, batch, dtype, run.machine.device)
        if REFERENCE in batch:
            references = batch[REFERENCE][: len(policies)]
        else:
            with _as_reference(run, model):
                references = _log_probs(model, batch, dtype, run.machine.device)
        compared.append((policies, references.cpu()))
    policy, reference = (torch.cat(batches) for batches in zip(*compared, strict=True))
    difference, scale = (policy - reference).abs(), float(reference.abs().mean())
    if not float(difference.mean()) <= ROUNDING.get(dtype, ROUNDING_16) * max(scale, 1e-3):  # also if either is NaN
        raise TrainingError(
            f"before training the policy differs from its reference, by {float(difference.mean()):.3g} in the"
            f" log-probability of a token (their mean is {scale:.3g})",
            "the reference is the model without its adapter, which must compute the same at first: set"
            " init_lora_weights: true, or continue from an adapter with adapter_path, which then is the reference",
        )
    numbers = {"largest_difference": float(difference.max()), "mean_difference": float(difference.mean())}
    return {**numbers, "tokens": len(difference)}


# --- cache -----------------------------------------------------------------------------------------------------------


@waiting("computing the reference's log-probabilities")
def _cached_or_computed(run: PreparedRun, model: Any, splits: dict[str, Any]) -> tuple[dict[str, torch.Tensor], str]:
    """Return each split's log-probabilities, and whether they were computed or come from an earlier run's cache.

    A cache file is valid for the same frozen weights, tokens and arithmetic.
    """
    file = None if run.mesh.size > 1 else _file(run, model, splits)
    if file is not None and file.is_file():
        with contextlib.suppress(CheckpointError):  # a damaged file is computed again
            cached = read_tensors(file)
            if all(name in cached and len(cached[name]) == _tokens(rows) for name, rows in splits.items()):
                return cached, f"kept in {file}"
    with _as_reference(run, model):
        computed = {name: _compute(run, model, rows) for name, rows in splits.items()}
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with new_file(file) as aside:
                save_file(computed, aside)
        except (OSError, TrainingError) as error:
            notice("reference-cache", f"the reference's log-probabilities are not cached for other runs: {error}")
    return computed, "computed"


def _tokens(rows: Any) -> int:
    return sum(map(trained_tokens, rows))


def _file(run: PreparedRun, model: Any, splits: dict[str, Any]) -> Path | None:
    """Return the cache file of this reference and these rows; None without a cache."""
    try:
        folder = cache_folder() / "reference"
    except ConfigError:
        return None
    config, machine = run.config, run.machine
    size = config.per_device_eval_batch_size or config.per_device_train_batch_size
    arithmetic = (
        *(__version__, torch.__version__, str(machine.device), machine.compute_dtype, run.config.precision),
        *(config.use_kernels, config.attn_implementation, config.padding_free, config.storage, size),
        config.vision_cache == "fp8",
    )
    digest = hashlib.sha256(repr(arithmetic).encode())
    digest.update(describe(model).encode())
    for rows in splits.values():
        table = rows.with_format("arrow")[:]
        for column in ("input_ids", "labels", "seq_lengths"):
            for chunk in table[column].chunks:
                digest.update(np.ascontiguousarray(chunk.offsets.to_numpy()).data)
                digest.update(np.ascontiguousarray(chunk.flatten().to_numpy()).data)
        if IMAGES in table.column_names:
            digest.update(
                repr([[image["sha256"] for image in images] for images in table[IMAGES].to_pylist()]).encode()
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if reference_is_initial_model(config) or not tensor.requires_grad:
            digest.update(name.encode())
            for plain in plain_tensors(tensor.detach()):
                digest.update(plain.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return folder / f"{digest.hexdigest()[:32]}.safetensors"


def describe(model: torch.nn.Module) -> str:
    """Return a model's class and configuration, without paths; with the weights they determine its results."""
    plain = causal_lm_of(model)
    keys = {key: value for key, value in plain.config.to_dict().items() if key not in IGNORED_KEYS}
    return f"{type(plain).__name__} {json.dumps(keys, sort_keys=True, default=str)}"


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors of a tensor: itself, or the codes and scales of a quantized one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]
