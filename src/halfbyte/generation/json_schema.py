"""Checks of a JSON schema that llguidance leaves to its callers: unknown keywords, and recursion without an end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..utils.errors import ConfigError
from ..utils.text import brief

SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
SCHEMAS = frozenset({"items", "additionalItems", "additionalProperties"})
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding",
    "contentMediaType", "$comment", "$schema", "$id", "$anchor", "discriminator",
})  # fmt: skip
ASSERTIONS = frozenset({
    "$ref", "type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "format",
})  # fmt: skip
KEYWORDS = SCHEMA_MAPS | SCHEMA_LISTS | SCHEMAS | ANNOTATIONS | ASSERTIONS  # with these llguidance holds a text to them
ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")


def check_keywords(schema: dict[str, Any]) -> None:
    """Check that a schema has no keyword that would be ignored.

    Raises:
        ConfigError: names the keyword, and where it stands.
    """
    for path, subschema in _subschemas(schema, "#"):
        for keyword in subschema.keys() - KEYWORDS:
            raise ConfigError(
                f"{brief(keyword)} at {path} of the JSON schema is not supported", "remove it; it would be ignored"
            )


def check_recursion(schema: dict[str, Any]) -> None:
    """Check that a text of finite length can match a schema.

    Raises:
        ConfigError: each text would contain another text that matches the same part of the schema.
    """
    pointers = {
        subschema["$ref"] for _, subschema in _subschemas(schema, "#") if isinstance(subschema.get("$ref"), str)
    }
    unproven = {pointer: _at(schema, pointer) for pointer in pointers}
    while proven := [pointer for pointer, subschema in unproven.items() if _is_finite(subschema, unproven)]:
        for pointer in proven:
            del unproven[pointer]
    if not _is_finite(schema, unproven):
        raise ConfigError(
            f"the JSON schema refers to itself without an end: {', '.join(map(brief, sorted(unproven)))}",
            "make one of the properties or items optional",
        )


def _subschemas(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema and all schemas in it, with their JSON pointers."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword, value in schema.items():
        if keyword in SCHEMA_MAPS and isinstance(value, dict):
            for name, subschema in value.items():
                yield from _subschemas(subschema, f"{path}/{keyword}/{name}")
        elif keyword in SCHEMA_LISTS and isinstance(value, list):
            for number, subschema in enumerate(value):
                yield from _subschemas(subschema, f"{path}/{keyword}/{number}")
        elif keyword in SCHEMAS:
            yield from _subschemas(value, f"{path}/{keyword}")


def _at(schema: Any, pointer: str) -> Any:
    """Return the schema at a JSON pointer, or True, which all texts match, for a reference of another kind."""
    if pointer != "#" and not pointer.startswith("#/"):
        return True
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(name)] if name.isdecimal() and int(name) < len(schema) else True
        else:
            schema = schema.get(name, True) if isinstance(schema, dict) else True
    return schema


def _is_finite(schema: Any, unproven: dict[str, Any]) -> bool:
    """Return whether a text matches a schema without a reference of `unproven`."""
    if not isinstance(schema, dict):
        return schema is not False
    conjuncts = [schema, *(conjunct for conjunct in schema.get("allOf", ()) if isinstance(conjunct, dict))]
    if any(conjunct.get("$ref") in unproven for conjunct in conjuncts):
        return False
    if any("enum" in conjunct or "const" in conjunct for conjunct in conjuncts):
        return True
    for conjunct in conjuncts:
        for keyword in ("anyOf", "oneOf"):
            if keyword in conjunct and not any(_is_finite(option, unproven) for option in conjunct[keyword]):
                return False
    types = schema.get("type", ALL_TYPES)
    types = [types] if isinstance(types, str) else types
    if any(name not in ("object", "array") for name in types):
        return True
    required = {name for conjunct in conjuncts for name in conjunct.get("required", ())}
    items = max(conjunct.get("minItems", 0) for conjunct in conjuncts)
    needed = {
        "object": [
            conjunct.get("properties", {}).get(name, conjunct.get("additionalProperties", True))
            for conjunct in conjuncts
            for name in required
        ],
        "array": [item for conjunct in conjuncts for item in _first_items(conjunct, items)],
    }
    return any(all(_is_finite(subschema, unproven) for subschema in needed[name]) for name in types)


def _first_items(schema: dict[str, Any], count: int) -> list[Any]:
    """Return the schemas of the first `count` items of an array, without repetitions of the last one."""
    items = schema.get("items", True)
    if isinstance(items, list):  # before JSON schema 2020-12
        first, tail = items, schema.get("additionalItems", True)
    else:
        first, tail = schema.get("prefixItems", []), items
    return [*first[:count], *([tail] if count > len(first) else [])]
