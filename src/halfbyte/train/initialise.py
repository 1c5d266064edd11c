"""The initial factors of a run's adapter: compute them from base and data, save them, read them again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..adapters.initial import AdapterInitialiser, InitialAdapter
from ..adapters.lora import save_adapter
from ..config.initialisations import read_by
from ..data.prepare import drawn_documents
from ..loading.observe import observe_gradients, observe_inputs
from ..ops import IGNORE_INDEX
from ..runs.layout import INITIAL, MOMENTS
from ..utils.files import new_directory, new_file, remove
from .preflight import PreparedRun

OBSERVED_TOKENS = 65_536  # of the training rows, at most
BATCH_TOKENS = 2048  # trained tokens of a batch, at least


def initial_factors(run: PreparedRun) -> AdapterInitialiser | InitialAdapter | None:
    """Return what initialises the adapter while the base loads: on resuming, the factors that the run started with.

    Raises:
        CheckpointError: a resumed run has no initial adapter.
        ModelError: the initialisation does not fit the model or the data.
    """
    adapter = run.config.adapter
    if adapter is None or adapter.adapter_path or read_by(adapter) == "nothing":
        return None
    if run.checkpoint is not None:
        return InitialAdapter(run.checkpoint.parent / INITIAL, adapter)
    initial = AdapterInitialiser(adapter, run.config.seed)
    files, storage = run.files, run.config.storage
    machine: Any = {"device": run.machine.device, "dtype": run.machine.weights_dtype}
    if initial.reads == "inputs":
        observe_inputs(initial, files, storage, [ids for ids, _ in documents(run)], **machine)
    elif initial.reads == "gradients":
        observe_gradients(initial, files, storage, labelled_batches(run), **machine)
    elif initial.reads == "stored":
        initial.batches = labelled_batches(run)
    return initial


def documents(run: PreparedRun) -> Iterator[tuple[list[int], list[int]]]:
    """Yield ids and labels of documents of training rows, up to `OBSERVED_TOKENS`, in an order of the seed."""
    return drawn_documents(run.data.train, run.config.seed, OBSERVED_TOKENS)


def labelled_batches(run: PreparedRun) -> list[dict[str, Tensor]]:
    """Return batches of documents with at least `BATCH_TOKENS` trained tokens each, unless there are fewer in all."""
    batches: list[dict[str, Tensor]] = []
    rows: list[tuple[list[int], list[int]]] = []
    trained = 0
    for ids, labels in documents(run):
        rows.append((ids, labels))
        trained += sum(label != IGNORE_INDEX for label in labels)
        if trained >= BATCH_TOKENS:
            batches.append(_padded(rows, run.machine.device))
            rows = []
            trained = 0
    return batches or [_padded(rows, run.machine.device)]


def _padded(rows: list[tuple[list[int], list[int]]], device: torch.device) -> dict[str, Tensor]:
    width = max(len(ids) for ids, _ in rows)
    padding = [width - len(ids) for ids, _ in rows]
    columns = {
        "input_ids": [ids + [0] * missing for (ids, _), missing in zip(rows, padding, strict=True)],
        "attention_mask": [[1] * (width - missing) + [0] * missing for missing in padding],
        "labels": [labels + [IGNORE_INDEX] * missing for (_, labels), missing in zip(rows, padding, strict=True)],
    }
    return {name: torch.tensor(values, device=device) for name, values in columns.items()}


def keep_initial(run: PreparedRun, initial: AdapterInitialiser | InitialAdapter, model: Any) -> None:
    """Write the adapter before the first step, from which resuming, merging and serving get the base again."""
    folder = run.config.output_path / INITIAL
    if isinstance(initial, InitialAdapter) and initial.folder.resolve() == folder.resolve():
        return
    remove(folder)
    with new_directory(folder) as temporary:
        if isinstance(initial, InitialAdapter):
            shutil.copytree(initial.folder, temporary, dirs_exist_ok=True)
        else:
            save_adapter(model, temporary)
            initial.save_offsets(temporary)
    if isinstance(initial, AdapterInitialiser) and initial.mean_squares:
        with new_file(run.config.output_path / MOMENTS) as temporary:
            initial.save_mean_squares(temporary)
