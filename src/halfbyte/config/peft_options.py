"""Check `peft_config`, the options of PEFT's types, against PEFT's dataclass of the type.

PEFT is imported here only when a run has the key, since configurations are read without it.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from ..adapter_kinds import AdapterKind
from ..utils.text import brief
from .section import Contradiction, nearest

KEY = "peft_config"
SELECTION_KEYS = ("exclude_modules", "layers_to_transform", "layers_pattern")
RUN_KEYS = ("target_modules", "modules_to_save", *SELECTION_KEYS)  # options of PEFT's that are keys of a run
# Options that a run sets itself, or that describe a saved adapter.
SET_BY_RUN = (
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    "inference_mode",
)


def option_contradictions(row: AdapterKind, adapter: Any) -> Iterator[Contradiction]:
    """Yield unknown options, values of another type, and what PEFT's dataclass itself refuses.

    Args:
        adapter: a run's keys.
    """
    config_class = _config_class(row)
    annotations = typing.get_type_hints(config_class)
    names = option_names(row)
    for name, value in (adapter.peft_config or {}).items():
        written = f"{KEY}: {{{name}: {brief(value)}}}"
        if name in RUN_KEYS:
            yield KEY, f"{written}: {name} is a key of the run", f"set {name} outside of {KEY}"
        elif name not in names:
            near = nearest(name, names)
            fix = f"did you mean {near}?" if near else f"use {', '.join(names)}"
            yield KEY, f"{written}: {row.name} has no option {name!r}", fix
        elif problem := _type_problem(annotations[name], value):
            yield KEY, f"{written}: {problem}", f"correct {name}"
    for key in SELECTION_KEYS:
        if getattr(adapter, key) is not None and key not in annotations:
            yield key, f"{key} with {row.chosen}, of which PEFT has no such option", "list modules in target_modules"
    try:
        targets = None if adapter.target_modules == "all-linear" else adapter.target_modules
        config_class(task_type="CAUSAL_LM", target_modules=targets, **row.options(adapter))
    except (TypeError, ValueError, AttributeError) as error:
        yield KEY, f"{KEY}: {error}", f"see PEFT's {config_class.__name__}"


def option_names(row: AdapterKind) -> list[str]:
    """Return the options of a type that `peft_config` may set."""
    fields = dataclasses.fields(_config_class(row))
    return [field.name for field in fields if field.init and field.name not in (*RUN_KEYS, *SET_BY_RUN)]


def _config_class(row: AdapterKind) -> Any:
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType

    return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(row.peft_type)]


def _type_problem(annotation: Any, value: Any) -> str | None:
    """Return how a value differs from the annotation of its field, or None; sets and enums are written as in JSON."""
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))
        adapter.validate_json(json.dumps(value), strict=True)
    except (PydanticUserError, TypeError):  # a dataclass of PEFT's as annotation, which has its own configuration
        return None
    except ValidationError as error:
        return error.errors(include_url=False)[0]["msg"]
    return None
