"""RunConfig: the validated keys of one run, and writing them as YAML."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from ..optim import OPTIMIZERS, SCHEDULES, parse_options
from ..utils.html import name_table
from .contradictions import run_contradictions
from .methods import WITH_DEFAULTS, defaults_of
from .schema import SECTIONS, RunKeys
from .section import Contradiction, Section, nearest
from .several import several_contradictions, with_datasets
from .yaml import dump_value

# Formats that names selected before 2026-11-29; here, so that a saved run is looked up without importing torch.
EARLIER_SPECS = {f"kbit{bits}": f"kbit:{bits}:bnf" for bits in (2, 3, 4, 5)}
PATHS = (  # keys whose value is a path or a list of paths
    "model_name_or_path", "teacher_model_name_or_path", "adapter_path", "dataset", "eval_dataset",
    "chat_template_path", "output_dir", "resume_from_checkpoint",
)  # fmt: skip


def expand_home(paths: Any) -> Any:
    """Expand `~` in the value of a key of `PATHS`, like a shell."""
    if isinstance(paths, list):
        return [expand_home(path) for path in paths]
    if isinstance(paths, dict):  # an entry of `dataset`
        return paths | {"path": expand_home(paths.get("path"))}
    if not isinstance(paths, str) or "\0" in paths:  # a path with a null byte is refused where it is opened
        return paths
    return os.path.expanduser(paths)


class RunConfig(RunKeys):
    """Everything one run needs. `RunConfig(**keys)` validates; `load_config` reads a YAML file with overrides."""

    @model_validator(mode="before")
    @classmethod
    def _datasets_of_adapters(cls, keys: Any) -> Any:
        """Accept adapters with a dataset each in place of `dataset`."""
        return with_datasets(keys) if isinstance(keys, dict) else keys

    _expand_home = field_validator(*PATHS)(expand_home)

    @field_validator("report_to", mode="before")
    @classmethod
    def _report_to_list(cls, value: Any) -> Any:
        """Accept a single name and `none`, like transformers."""
        return ([] if value == "none" else [value]) if isinstance(value, str) else value

    @field_validator("optim_args", "lr_scheduler_kwargs", mode="before")
    @classmethod
    def _options(cls, value: Any) -> Any:
        """Accept transformers' text."""
        if not isinstance(value, str):
            return value
        try:
            return parse_options(value)
        except ValueError as error:
            raise PydanticCustomError(
                "format", "must be `key=value, key=value`, not {value}", {"value": repr(str(error))}
            ) from None

    @field_validator("max_steps")
    @classmethod
    def _steps(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise PydanticCustomError(
                "steps", "must be a positive number of steps, or -1 for all epochs, not {value}", {"value": value}
            )
        return value

    @field_validator("warmup_steps", "eval_steps", "save_steps", "eval_split_size")
    @classmethod
    def _integer_or_share(cls, value: float | None) -> float | None:
        if value is not None and value >= 1 and value != int(value):
            raise PydanticCustomError(
                "whole", "must be a whole number, or a share below 1, not {value}", {"value": value}
            )
        return value

    @field_validator("lr_scheduler_type", "optim")
    @classmethod
    def _named(cls, value: str, info: Any) -> str:
        names = SCHEDULES if info.field_name == "lr_scheduler_type" else tuple(OPTIMIZERS)
        if value not in names:
            raise PydanticCustomError(
                "named",
                "must be one of {names}, not {value}",
                {"names": ", ".join(names), "value": repr(value), "near": nearest(value, names)},
            )
        return value

    def _repr_html_(self) -> str:
        """Return the keys that were given, as notebooks show them."""
        return name_table(given_keys(self))

    def fill_in(self) -> None:
        defaults = defaults_of(self.method, adapter=self.use_peft)
        for key in WITH_DEFAULTS - self.model_fields_set:
            default = type(self).model_fields[key].default
            self.__dict__[key] = defaults.get(key, default)  # not added to model_fields_set

    def contradictions(self) -> Iterator[Contradiction]:
        yield from run_contradictions(self)
        yield from several_contradictions(self)


def written_keys(section: type[Section]) -> dict[str, FieldInfo]:
    """Return the keys of a section that files of a run contain: all but secrets."""
    return {key: field for key, field in section.model_fields.items() if not field.exclude}


def given_keys(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the keys that were given and their values, without secrets, in the order of the sections."""
    for section in SECTIONS:
        yield from ((key, getattr(config, key)) for key in written_keys(section) if key in config.model_fields_set)


def dump_given(config: RunConfig) -> str:
    """Return the keys that were given as YAML, from which `halfbyte train` repeats the run."""
    return "".join(f"{dump_value(key, value)}\n" for key, value in given_keys(config))


def dump_config(config: RunConfig) -> str:
    """Return every key as YAML, by section, with its description; `load_config` reads it back equal."""
    lines: list[str] = []
    for section in SECTIONS:
        lines.append(f"\n# {section.__doc__}" if lines else f"# {section.__doc__}")
        for key, field in written_keys(section).items():
            lines.append(f"{dump_value(key, getattr(config, key)):<38} # {field.description}")
    return "\n".join(lines) + "\n"


def with_specs(config: RunConfig, specs: Mapping[str, str]) -> RunConfig:
    """Return `config` with the names of formats in `specs` replaced by their specs.

    A run's config.resolved.yaml has specs, since the format that a name selects may change. Names in such a file are
    from before they did.
    """
    stored, scheme = config.quantization, config.qat_scheme
    if isinstance(stored, dict):
        stored = {pattern: specs.get(name, name) for pattern, name in stored.items()}
    elif stored is not None:
        stored = specs.get(stored, stored)
    scheme = scheme if scheme is None else specs.get(scheme, scheme)
    return config.model_copy(update={"quantization": stored, "qat_scheme": scheme})
