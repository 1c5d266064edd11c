"""What a run wants: one flat YAML file, the same names on the command line and in Python."""

from .schema import (
    KEEP,
    SCHEDULES,
    SECTIONS,
    SIXTEEN,
    TEXT_KEYS,
    Level,
    RunConfig,
    allowed,
    dump_config,
    explain,
    load_config,
)

__all__ = [
    "KEEP",
    "SCHEDULES",
    "SECTIONS",
    "SIXTEEN",
    "TEXT_KEYS",
    "Level",
    "RunConfig",
    "allowed",
    "dump_config",
    "explain",
    "load_config",
]
