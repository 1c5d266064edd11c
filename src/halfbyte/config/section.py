"""What every section of a run's keys is: typed, strict, and free of contradictions."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ..utils.text import brief

if TYPE_CHECKING:
    from .contradictions import Contradiction

LARGEST = 2**31 - 1  # of any number but the seed: what counts beyond it cannot be meant, and libraries overflow


class Section(BaseModel):
    """Keys that belong together; unknown ones, values of another type and contradictions are refused."""

    model_config = ConfigDict(
        extra="forbid", protected_namespaces=(), validate_assignment=True, strict=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _paths_as_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator(
        *("target_modules", "dataset", "eval_dataset", "quantization", "parallel", "loss_type", "loss_weights"),
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
        if any(isinstance(each, str) and not each.strip() for each in several):
            raise PydanticCustomError("empty", "must not be blank, as {value} is", {"value": brief(value)})
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _small_enough(cls, value: Any, info: Any) -> Any:
        several = value.values() if isinstance(value, Mapping) else value
        numbers = several if isinstance(value, Mapping | list) else [value]
        too_large = [each for each in numbers if isinstance(each, int | float) and abs(each) > LARGEST]
        if too_large and info.field_name != "seed":
            raise PydanticCustomError(
                "limit", "must be at most {most}, not {value}", {"most": f"{LARGEST:,}", "value": brief(too_large[0])}
            )
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        """Each rule names the key to change."""
        self.fill_in()
        for key, message, fix in self.contradictions():
            raise contradiction(key, message, fix)
        return self

    def fill_in(self) -> None:
        """Give keys that were not given what follows from the others."""

    def contradictions(self) -> Iterable[Contradiction]:
        """(key, what is wrong, fix) for each pair of keys that cannot both hold."""
        return ()


def contradiction(key: str, message: str, fix: str) -> PydanticCustomError:
    """What `reading.explain` says with the place of the key."""
    return PydanticCustomError("contradiction", "{message}", {"key": key, "message": message, "fix": fix})


def nearest(name: str, names: Iterable[str]) -> str:
    """The name most like `name`; empty where none is."""
    return next(iter(difflib.get_close_matches(name.lower().replace("-", "_"), list(names), n=1)), "")
