"""What the processes of a run must have in common, compared before any long work: else it ends in a hang, or in losses
that no process alone would have."""

from __future__ import annotations

import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...config import RunConfig
from ...utils.errors import ConfigError
from ...utils.text import cut
from ..mesh import Mesh

OWN = frozenset(["device", "dataset_num_proc"])  # keys that may differ between hosts
PACKAGES = ("torch", "transformers", "peft")
PATIENCE = 15.0  # seconds until a file that one host has written is seen by another, whose file system may remember


def check_agreement(mesh: Mesh, config: RunConfig) -> None:
    """Whether all processes have the same keys and versions, and each a GPU of its own.

    Raises:
        ConfigError: in every process, the first difference; or which share a GPU.
    """
    if mesh.size == 1:
        return
    keys = {key: repr(value) for key, value in config.model_dump().items() if key not in OWN}
    versions = {"halfbyte": __version__} | {name: metadata.version(name) for name in PACKAGES}
    facts: dict[str, Any] = {"keys": keys, "versions": versions, "gpu": _gpu(mesh)}
    told = mesh.gather(facts)
    for what, fix in (
        ("versions", "install the same versions on every host"),
        ("keys", "start all with the same file and the same keys"),
    ):
        for rank, theirs in enumerate(told):
            if differing := _difference(told[0][what], theirs[what]):
                name, first, other = differing
                said = f"{name} is {cut(first, 80)} in process 0, and {cut(other, 80)} in process {rank}"
                raise ConfigError(f"the processes of this run differ: {said}", fix)
    gpus = [each["gpu"] for each in told]
    for rank, gpu in enumerate(gpus):
        if gpu and gpus.index(gpu) < rank:
            what = f"processes {gpus.index(gpu)} and {rank} of this run have the same GPU ({gpu})"
            raise ConfigError(what, "start at most a process for each GPU of a host, numbered from 0 on")


def _gpu(mesh: Mesh) -> str:
    """What names this process's GPU among all there are; empty on a CPU."""
    if mesh.kind == "cpu":
        return ""
    return str(torch.cuda.get_device_properties(mesh.local).uuid)


def _difference(first: dict[str, str], other: dict[str, str]) -> tuple[str, str, str] | None:
    return next(((name, value, other[name]) for name, value in first.items() if other[name] != value), None)


def check_shared(mesh: Mesh, folder: Path) -> None:
    """Whether all processes see the folder that the first one writes into.

    Raises:
        ConfigError: in every process, which do not.
    """
    if mesh.size == 1:
        return
    mark = folder / mesh.from_main(f".seen-by-all-{os.getpid()}")
    try:
        if mesh.is_main:
            mark.touch()
        mesh.wait()
        until = time.monotonic() + PATIENCE
        while not (seen := mark.exists()) and time.monotonic() < until:
            time.sleep(0.5)
        blind = [str(rank) for rank, sees in enumerate(mesh.gather(seen)) if not sees]
    finally:
        if mesh.is_main:
            mark.unlink(missing_ok=True)
    if blind:
        what = f"output_dir: what process 0 writes into {folder} is not seen by process {', '.join(blind)}"
        raise ConfigError(what, "name a folder on a disk that every host has at the same path")
