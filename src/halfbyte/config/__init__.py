"""What a run wants: one flat YAML file, the same names on the command line and in Python."""

from .schema import (
    BITSANDBYTES_OPTIMIZERS,
    KEEP,
    OPTIMIZERS,
    SCHEDULES,
    SECTIONS,
    SIXTEEN,
    TEXT_KEYS,
    TORCH_OPTIMIZERS,
    Level,
    RunConfig,
    allowed,
    dump_config,
    explain,
    load_config,
)

__all__ = [
    "BITSANDBYTES_OPTIMIZERS",
    "KEEP",
    "OPTIMIZERS",
    "SCHEDULES",
    "SECTIONS",
    "SIXTEEN",
    "TEXT_KEYS",
    "TORCH_OPTIMIZERS",
    "Level",
    "RunConfig",
    "allowed",
    "dump_config",
    "explain",
    "load_config",
]
