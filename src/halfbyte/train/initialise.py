"""The initial factors of a run's adapter: compute them from base and data, save them, read them again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..adapters.initial import AdapterInitialiser, InitialAdapter
from ..adapters.lora import save_adapter
from ..config.initialisations import read_by
from ..loading.streamed import observe_inputs
from ..runs.layout import INITIAL, MOMENTS
from ..utils.files import new_directory, new_file, remove
from .preflight import PreparedRun

OBSERVED_TOKENS = 65_536  # of the training rows, for second moments


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
    if read_by(adapter) == "inputs":
        observe_inputs(
            initial,
            run.files,
            run.config.storage,
            list(documents(run, OBSERVED_TOKENS)),
            device=run.machine.device,
            dtype=run.machine.weights_dtype,
        )
    return initial


def documents(run: PreparedRun, tokens: int) -> Iterator[list[int]]:
    """Yield documents of training rows in a random order that the seed determines, until they have so many tokens."""
    rows = run.data.train
    total = 0
    for index in np.random.default_rng(run.config.seed).permutation(len(rows)).tolist():
        row = rows[index]
        ids = np.asarray(row["input_ids"])
        for document in np.split(ids, np.cumsum(row.get("seq_lengths") or [len(ids)])[:-1]):
            yield document.tolist()
        total += len(ids)
        if total >= tokens:
            return


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
