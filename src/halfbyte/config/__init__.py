"""What a run wants: one flat YAML file, the same names on the command line and in Python."""

from .reading import TEXT_KEYS, allowed, explain, load_config
from .resolve import Adapter, Origin, Parallel, Precision, Resolved, Sliced, Storage, resolve, storage_of
from .schema import (
    KEEP,
    SCHEDULES,
    SECTIONS,
    SIXTEEN,
    Level,
    RunConfig,
    dump_config,
    dump_given,
)

__all__ = [
    "KEEP",
    "SCHEDULES",
    "SECTIONS",
    "SIXTEEN",
    "TEXT_KEYS",
    "Adapter",
    "Level",
    "Origin",
    "Parallel",
    "Precision",
    "Resolved",
    "RunConfig",
    "Sliced",
    "Storage",
    "allowed",
    "dump_config",
    "dump_given",
    "explain",
    "load_config",
    "resolve",
    "storage_of",
]
