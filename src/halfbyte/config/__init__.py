"""The configuration of a run: one flat YAML file, with the same keys on the command line and in Python."""

from .reading import TEXT_KEYS, allowed, explain, load_config, storage_of
from .resolved import Origin, Parallel, Precision, RopeScaling, Sliced, Storage
from .run_config import RunConfig, dump_config, dump_given
from .schema import KEEP, SECTIONS, SIXTEEN, Adapter, Level

__all__ = [
    "KEEP",
    "SECTIONS",
    "SIXTEEN",
    "TEXT_KEYS",
    "Adapter",
    "Level",
    "Origin",
    "Parallel",
    "Precision",
    "RopeScaling",
    "RunConfig",
    "Sliced",
    "Storage",
    "allowed",
    "dump_config",
    "dump_given",
    "explain",
    "load_config",
    "storage_of",
]
