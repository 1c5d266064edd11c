"""Base class of a section of keys: strict types, no unknown keys, no contradictions."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ..utils.text import brief
from .aliases import REFUSED_VALUES, VALUES
from .yaml import dump_value

Contradiction = tuple[str, str, str]  # key to change, problem, fix
LARGEST = 2**31 - 1  # largest value of any number except the seed; libraries overflow above it


class Section(BaseModel):
    """A group of keys. Unknown keys, values of another type and contradictions are refused."""

    model_config = ConfigDict(
        extra="forbid",
        protected_namespaces=(),
        validate_assignment=True,
        strict=True,
        allow_inf_nan=False,
        defer_build=True,  # most sections are only inherited from
    )

    @field_validator("*", mode="before")
    @classmethod
    def _accept_paths_and_other_names(cls, value: Any, info: Any) -> Any:
        """Convert paths, and values that other tools name differently; refuse values without an equivalent."""
        if not isinstance(value, str):
            return os.fspath(value) if isinstance(value, os.PathLike) else value
        if refusal := REFUSED_VALUES.get(info.field_name, {}).get(value):
            raise contradiction(info.field_name, f"{info.field_name}: {value}: {refusal[0]}", refusal[1])
        return VALUES.get(info.field_name, {}).get(value, value)

    @field_validator(
        *("target_modules", "dataset", "eval_dataset", "quantization", "parallel", "loss_type", "loss_weights"),
        *("optim_target_modules", "optim_bits", "adapters", "sweep"),
        *("exclude_modules", "layers_to_transform", "layers_pattern"),
        check_fields=False,
    )
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if value is not None and not value:
            raise PydanticCustomError("empty", "must name at least one, not {value}", {"value": repr(value)})
        return value

    @field_validator(
        *("model_name_or_path", "adapter_path", "teacher_model_name_or_path", "chat_template_path"),
        *("dataset", "eval_dataset", "attn_implementation"),
        check_fields=False,
    )
    @classmethod
    def _not_blank(cls, value: Any) -> Any:
        several = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and not text.strip() for text in several):
            raise PydanticCustomError("empty", "must not be blank, not {value}", {"value": brief(value)})
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _small_enough(cls, value: Any, info: Any) -> Any:
        several = value.values() if isinstance(value, Mapping) else value
        numbers = several if isinstance(value, Mapping | list) else [value]
        too_large = [number for number in numbers if isinstance(number, int | float) and abs(number) > LARGEST]
        if too_large and info.field_name not in ("seed", "rope_scaling"):  # a base of frequencies may be larger
            raise PydanticCustomError(
                "limit", "must be at most {most}, not {value}", {"most": f"{LARGEST:,}", "value": brief(too_large[0])}
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Derive missing values, then raise the first contradiction."""
        self.fill_in()
        for key, message, fix in self.contradictions():
            raise contradiction(key, message, fix)
        return self

    def fill_in(self) -> None:
        """Set keys that were not given and whose default depends on other keys."""

    def contradictions(self) -> Iterable[Contradiction]:
        """Yield a contradiction for each pair of keys that exclude each other."""
        return ()

    def written(self, key: str) -> str:
        """Return `key: value` as in a YAML file."""
        return dump_value(key, getattr(self, key))

    def is_default(self, key: str) -> bool:
        """Return whether the key has the schema's default."""
        return bool(getattr(self, key) == type(self).model_fields[key].get_default(call_default_factory=True))


def contradiction(key: str, message: str, fix: str) -> PydanticCustomError:
    """Return the error that `reading.explain` prints with the key's file and line."""
    return PydanticCustomError("contradiction", "{message}", {"key": key, "message": message, "fix": fix})


def respelled(name: str, names: Iterable[str]) -> str:
    """Return `nearest` for names of algorithms: short ones that differ by a letter (ppo, dpo) are two algorithms, so
    a guess must have the same letters."""
    near = nearest(name, names)
    return near if len(name) > 5 or sorted(name.lower()) == sorted(near) else ""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the name most similar to `name`, or an empty string."""
    return next(iter(difflib.get_close_matches(name.lower().replace("-", "_"), list(names), n=1)), "")
