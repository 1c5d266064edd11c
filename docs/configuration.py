"""Write docs/configuration.md, a table of every key of a run, from the schema: `python docs/configuration.py`."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from halfbyte.config.methods import DEFAULTS, methods_of
from halfbyte.config.schema import SECTIONS

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

Every key of a run: in a YAML file, as `KEY=VALUE` on the command line, or as an argument of `halfbyte.finetune`.
`python docs/configuration.py` writes this page from the schema.
"""


def page() -> str:
    """Return the page."""
    return HEAD + "".join(section_table(section) for section in SECTIONS)


def section_table(section: Any) -> str:
    """Return one section of keys as a Markdown table under a heading."""
    lines = [f"\n## {section.__doc__}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in section.model_fields.items():
        cells = (f"`{key}`", type_name(field.annotation), default(key, field), field.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def type_name(annotation: Any) -> str:
    """Return the type of a key as a reader of YAML writes it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, UnionType):
        return " or ".join(dict.fromkeys(type_name(each) for each in arguments if each is not NoneType))
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of {type_name(arguments[0])} to {type_name(arguments[1])}"
    names = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "any"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def default(key: str, field: Any) -> str:
    """Return the default of a key; where methods have their own, one a method."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    methods = [method for method in methods_of(field) if key in DEFAULTS.get(method, {})]
    if value is None and methods:
        return ", ".join(f"{method}: `{DEFAULTS[method][key]}`" for method in methods)
    if value is None:
        return ""
    text = str(value).replace("\n", "\\n")
    return f"`{re.sub('^True$|^False$', lambda found: found[0].lower(), text)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
