"""YAML as a run's configuration needs it: values with the line they stand on, and writing that reads back equal.

PyYAML follows YAML 1.1, where `2e-4` is text because it has no dot. Learning rates are written like that, so both the
reader and the writer here take YAML 1.2's floats.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "timestamp")}


@dataclass(frozen=True)
class Located:
    """A value and where it was written, e.g. `run.yaml:4` or `command line`."""

    value: Any
    where: str


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 numbers and no dates."""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes by the rules `_Loader` reads with, and keeps every scalar on one line."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _with_own_numbers(cls: type) -> None:
    replaced = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp"}
    cls.yaml_implicit_resolvers = {  # type: ignore[attr-defined]
        first: [(tag, pattern) for tag, pattern in rules if tag not in replaced]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in (("int", _INTEGER), ("float", _FLOAT)):
        whole = re.compile(rf"(?:{pattern.pattern})\Z")
        cls.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", whole, list("-+.0123456789"))  # type: ignore[attr-defined]


_with_own_numbers(_Loader)
_with_own_numbers(_Dumper)
_Dumper.add_representer(str, _Dumper.represent_text)


def read_mapping(path: Path | str, text_keys: Collection[str] = ()) -> dict[str, Located]:
    """The top-level keys of a YAML file, each with its line.

    Args:
        path: the file, UTF-8.
        text_keys: keys whose value is text even when it looks like a number (`model_revision: 1234567`).

    Raises:
        ConfigError: no such file, not YAML, not a mapping, or a key given twice.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}", "`halfbyte init MODEL DATA > run.yaml` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "name a YAML file in UTF-8") from None
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: expected `key: value` lines, found {_what(root)}", "see `halfbyte init`")
        return _located(loader, root, path, text_keys)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    finally:
        loader.dispose()


def read_patterns(path: str) -> dict[str, Any]:
    """The whole of a YAML file that holds one mapping, such as patterns of module names.

    Raises:
        ConfigError: see `read_mapping`.
    """
    return {key: found.value for key, found in read_mapping(path).items()}


def _located(loader: _Loader, root: yaml.MappingNode, path: Path, text_keys: Collection[str]) -> dict[str, Located]:
    found: dict[str, Located] = {}
    loader.flatten_mapping(root)
    for key_node, value_node in root.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        key = str(loader.construct_object(key_node, deep=True))
        if key in found:
            raise ConfigError(f"{where}: {key} is given twice, first at {found[key].where}", "keep one of them")
        found[key] = Located(_construct(loader, value_node, key in text_keys), where)
    return found


def _construct(loader: _Loader, node: yaml.Node, is_text: bool) -> Any:
    if is_text and isinstance(node, yaml.ScalarNode) and node.tag in _NUMBER_TAGS:
        return node.value
    return loader.construct_object(node, deep=True)


def _what(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else "plain text"


def parse_scalar(text: str, is_text: bool = False) -> Any:
    """The value of `text` as YAML reads it: `1e-4` a float, `[q_proj, v_proj]` a list, empty text null.

    Raises:
        ConfigError: not valid YAML.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _construct(loader, node, is_text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} is not a YAML value: {error}", "quote it") from None
    finally:
        loader.dispose()


def dump_value(key: str, value: Any) -> str:
    """`key: value` on one line; lists and mappings in brackets. `read_mapping` gives the equal value back."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**9, sort_keys=False)
    return f"{key}: {text.removesuffix('...' + chr(10)).strip(chr(10))}"


def dump_mapping(mapping: dict[str, Any]) -> str:
    """`key: value` lines, in order; `read_mapping` gives the equal mapping back."""
    return yaml.dump(mapping, Dumper=_Dumper, allow_unicode=True, width=10**9, sort_keys=False)
