"""Checks that all ranks agree on keys, versions, GPUs and output folder, before any long work: a difference would
end in a hang or in silently different losses.
"""

from __future__ import annotations

import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...config.schema import RunKeys
from ...mesh.mesh import Mesh
from ...utils.errors import ConfigError
from ...utils.text import cut

PER_HOST_KEYS = frozenset(["device", "dataset_num_proc"])
PACKAGES = ("torch", "transformers", "peft")
VISIBILITY_TIMEOUT = 15.0  # seconds until another host sees a new file; network file systems cache directories


def check_agreement(mesh: Mesh, config: RunKeys) -> None:
    """Check that all ranks have equal keys and versions and a GPU each.

    Raises:
        ConfigError: on every rank, with the first difference or the shared GPU.
    """
    if mesh.size == 1:
        return
    keys = {key: repr(value) for key, value in config.model_dump().items() if key not in PER_HOST_KEYS}
    versions = {"halfbyte": __version__} | {name: metadata.version(name) for name in PACKAGES}
    facts: dict[str, Any] = {"keys": keys, "versions": versions, "gpu": _gpu(mesh)}
    gathered = mesh.gather(facts)
    for name, fix in (
        ("versions", "install the same versions on every host"),
        ("keys", "start all processes with the same file and the same keys"),
    ):
        for rank, rank_facts in enumerate(gathered):
            for key, value in gathered[0][name].items():
                if (rank_value := rank_facts[name][key]) != value:
                    detail = f"{key} is {cut(value, 80)} in process 0, and {cut(rank_value, 80)} in process {rank}"
                    raise ConfigError(f"the processes of this run differ: {detail}", fix)
    gpus = [rank_facts["gpu"] for rank_facts in gathered]
    for rank, gpu in enumerate(gpus):
        if gpu and gpus.index(gpu) < rank:
            problem = f"processes {gpus.index(gpu)} and {rank} of this run have the same GPU ({gpu})"
            raise ConfigError(problem, "start at most one process per GPU of a host, numbered from 0")


def _gpu(mesh: Mesh) -> str:
    """Return the UUID of this rank's GPU; empty on a CPU."""
    if mesh.device_type == "cpu":
        return ""
    return str(torch.cuda.get_device_properties(mesh.local).uuid)


def check_shared(mesh: Mesh, folder: Path) -> None:
    """Check that all ranks see the folder that the main rank writes to.

    Raises:
        ConfigError: on every rank, with the ranks that do not see it.
    """
    if mesh.size == 1:
        return
    mark = folder / mesh.from_main(f".seen-by-all-{os.getpid()}")
    try:
        if mesh.is_main:
            mark.touch()
        mesh.barrier()
        until = time.monotonic() + VISIBILITY_TIMEOUT
        while not (seen := mark.exists()) and time.monotonic() < until:
            time.sleep(0.5)
        blind = [str(rank) for rank, sees in enumerate(mesh.gather(seen)) if not sees]
    finally:
        if mesh.is_main:
            mark.unlink(missing_ok=True)
    if blind:
        problem = f"output_dir: files that process 0 writes into {folder} are not visible to process {', '.join(blind)}"
        raise ConfigError(problem, "name a folder on a disk that every host has at the same path")
