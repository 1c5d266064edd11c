"""Reading YAML with line numbers, and writing YAML that reads back equal.

PyYAML follows YAML 1.1, where `2e-4` is text because it has no dot. Learning rates are often written like that, so the
reader and the writer use the floats of YAML 1.2.

Files are limited in size, in depth and in the number of values after expanding aliases. A repeated key is an error, in
nested mappings as well; PyYAML would use the last value.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor

from ..reading import read_text
from ..utils.errors import ConfigError
from ..utils.text import brief, cut, visible

LARGEST = 2**21  # bytes of a file; enough for the patterns of 40,000 modules
DEEPEST = 50  # levels of nesting
MOST_VALUES = 200_000  # with aliases expanded
_SPACE = re.compile(
    r"(?:^|[:-])[ \t]*[^\S \t\n\r]|^ *\t", re.MULTILINE
)  # whitespace other than plain spaces where YAML allows only these
_WRITE_ONE = "`halfbyte init MODEL DATA > run.yaml` writes one"
_FLATTEN = "write a flat list of keys; no key needs that much"
_QUOTE = "correct it; text with any of : # , [ ] { } & * ! | > % @ ` in it goes in quotes"
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_TAG = "tag:yaml.org,2002:"
_NUMBER_TAGS = {_TAG + name for name in ("int", "float", "bool", "timestamp")}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "timestamp": "a date"}


@dataclass(frozen=True)
class Located:
    """A value and its place, e.g. `run.yaml:4` or `command line`."""

    value: Any
    source: str


class _Refused(yaml.MarkedYAMLError):
    """An error that PyYAML does not report as a YAML error, with its own fix."""

    def __init__(self, problem: str, mark: yaml.Mark, fix: str):
        super().__init__(problem=problem, problem_mark=mark)
        self.fix = fix


class _LoadingRules(Composer, SafeConstructor):
    """Rules of both loaders: size limits, no repeated keys, and only YAML errors."""

    depth = 0  # levels of nesting of the current node
    values = 0  # composed so far, with aliases expanded
    expanded: dict[yaml.Node, int]  # values in each node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node and count its values, including all nested ones."""
        event = self.peek_event()
        values_before, is_alias = self.values, isinstance(event, yaml.AliasEvent)
        self.depth, self.values = self.depth + 1, self.values + 1
        if self.depth > DEEPEST:
            raise _Refused(f"nested more than {DEEPEST} levels deep", event.start_mark, _FLATTEN)
        node = super().compose_node(parent, index)
        if is_alias and node not in self.expanded:
            raise _Refused(
                "an alias refers to a value that contains it", event.start_mark, "write the value instead of the alias"
            )
        self.depth, self.values = self.depth - 1, self.values + (self.expanded[node] if is_alias else 0)
        if self.values > MOST_VALUES:
            raise _Refused(f"more than {MOST_VALUES:,} values with aliases expanded", event.start_mark, _FLATTEN)
        if not is_alias and node is not None:
            self.expanded[node] = self.values - values_before
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        for key, value in node.value if node.flow_style else ():
            is_empty = isinstance(value, yaml.ScalarNode) and not value.value and not value.style
            if isinstance(key, yaml.ScalarNode) and ":" in key.value and not key.style and is_empty:
                name, _, written = key.value.partition(":")
                problem = f"a space is missing after the colon of {brief(key.value)}"
                raise _Refused(problem, key.start_mark, f"write {{{cut(name, 80)}: {cut(written, 80)}}}")
        first: dict[tuple[str, str], yaml.Node] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if first.setdefault((key.tag, key.value), key) is not key:
                line = first[key.tag, key.value].start_mark.line + 1
                problem = f"{cut(key.value, 80)} is given twice, first in line {line}"
                raise _Refused(problem, key.start_mark, "keep one of them")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # e.g. int() of 5,000 digits, month 13, `!!bool foo`
            type_name = node.tag.removeprefix(_TAG)
            problem = f"{brief(node.value)} is not {_KINDS.get(type_name, type_name)}"
            raise _Refused(problem, node.start_mark, "give such a value, or put it in quotes") from error


class _Loader(_LoadingRules, yaml.SafeLoader):
    """SafeLoader with the numbers of YAML 1.2, no dates, and the limits above."""

    def __init__(self, text: str):
        super().__init__(text)
        self.expanded = {}


if yaml.__with_libyaml__:

    class _FastLoader(_LoadingRules, yaml.CSafeLoader):
        """`_Loader` on libyaml's parser: several times as fast, but vague about errors."""

        def __init__(self, text: str):
            yaml.CSafeLoader.__init__(self, text)
            Composer.__init__(self)  # in place of libyaml's composer, which ignores `compose_node`
            self.expanded = {}


class _Dumper(yaml.SafeDumper):
    """SafeDumper with the number rules of `_Loader`, and every scalar on one line."""

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
        anchored = re.compile(rf"(?:{pattern.pattern})\Z")
        cls.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", anchored, list("-+.0123456789"))  # type: ignore[attr-defined]


_with_own_numbers(_Loader)
if yaml.__with_libyaml__:
    _with_own_numbers(_FastLoader)
_with_own_numbers(_Dumper)
_Dumper.add_representer(str, _Dumper.represent_text)


def read_mapping(path: Path | str, text_keys: Collection[str] = (), fix: str = _WRITE_ONE) -> dict[str, Located]:
    """Read the top-level keys of a YAML file, each with its line.

    Args:
        path: the file, UTF-8.
        text_keys: keys whose value is text even when it looks like a number (`model_revision: 1234567`).
        fix: fix of the error if the file does not exist or has no mapping.

    Raises:
        ConfigError: no such file, not YAML, not a mapping, a repeated key, or a limit is exceeded.
    """
    path = Path(path)
    text = read_text(path, ConfigError, fix, LARGEST)
    with _loading(text, str(path)) as (loader, root):
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: expected `key: value` lines, found {_kind(root)}", fix)
        keys: dict[str, Located] = {}
        loader.flatten_mapping(root)
        for key_node, value_node in root.value:
            key = str(loader.construct_object(key_node, deep=True))
            value = _construct(loader, value_node, key in text_keys)
            keys[key] = Located(value, f"{path}:{key_node.start_mark.line + 1}")
        return keys


def read_patterns(path: str) -> dict[str, Any]:
    """Read a YAML file with one mapping, such as patterns of module names to formats.

    Raises:
        ConfigError: see `read_mapping`.
    """
    return {key: located.value for key, located in read_mapping(path, fix="name a YAML file with a mapping").items()}


@contextlib.contextmanager
def _loading(text: str, source: str, is_file: bool = True) -> Iterator[tuple[_LoadingRules, yaml.Node | None]]:
    """Give a loader of `text` and the root node; errors become ConfigErrors with `source` and, for files, the line."""
    try:
        yield _composed(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        spelled = visible(chr(error.character))
        problem = f"the character {spelled} is not allowed in YAML"
        fix = f'remove it, or write "{spelled}" in double quotes'
        raise ConfigError(f"{f'{source}:{line}' if is_file else source}: {problem}", fix) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f"{source}:{mark.line + 1}" if is_file and mark else source
        if isinstance(error, _Refused):
            raise ConfigError(f"{position}: {error.problem}", error.fix) from None
        odd = _SPACE.search(text) if is_file and mark else None
        if odd and mark and (line := text.count("\n", 0, odd.end())) <= mark.line:
            problem = f"not valid YAML: the character U+{ord(odd[0][-1]):04X} looks like a space"
            raise ConfigError(f"{source}:{line + 1}: {problem}", "write plain spaces") from None
        problem = error.problem or error.context or "it cannot be read"
        if error.context and problem.startswith("but "):
            problem = f"{error.context}, {problem}"
        problem = problem.replace(repr("\0"), "the end").replace("'<stream end>'", "the end")
        fix = "remove the tag" if "for the tag" in problem else _QUOTE
        raise ConfigError(f"{position}: not valid YAML: {problem}", fix) from None


def _composed(text: str) -> tuple[_LoadingRules, yaml.Node | None]:
    """Return a loader of `text` and its root node.

    libyaml is tried first; a text that it refuses is parsed again by PyYAML, whose errors say more. libyaml accepts
    texts that PyYAML refuses: tabs, so PyYAML parses texts with tabs, and rarities such as `[x?]`.
    """
    if yaml.__with_libyaml__ and "\t" not in text:
        with contextlib.suppress(yaml.YAMLError):
            fast = _FastLoader(text)
            return fast, fast.get_single_node()
    loader = _Loader(text)
    return loader, loader.get_single_node()


def _construct(loader: _LoadingRules, node: yaml.Node, is_text: bool) -> Any:
    if is_text and isinstance(node, yaml.ScalarNode) and node.tag in _NUMBER_TAGS:
        return node.value
    return loader.construct_object(node, deep=True)


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else "plain text"


def parse_scalar(text: str, source: str, is_text: bool = False) -> Any:
    """Parse `text` as a YAML value: `1e-4` is a float, `[q_proj, v_proj]` a list, empty text null.

    Args:
        where: place of the value, for errors.
        is_text: whether to return text even if it looks like a number.

    Raises:
        ConfigError: not valid YAML.
    """
    if text.startswith("*"):  # a pattern, not an alias: a single value has no anchors
        return text
    with _loading(text, source, is_file=False) as (loader, node):
        return None if node is None else _construct(loader, node, is_text)


def dump_value(key: str, value: Any) -> str:
    """Return `key: value` on one line, lists and mappings in brackets; `read_mapping` reads it back equal."""
    return f"{_dumped(key)}: {_dumped(value)}"


def _dumped(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**9, sort_keys=False)
    return text.removesuffix("...\n").strip("\n")


def dump_mapping(mapping: dict[str, Any]) -> str:
    """Return `key: value` lines in order; `read_mapping` reads the mapping back equal."""
    return yaml.dump(mapping, Dumper=_Dumper, allow_unicode=True, width=10**9, sort_keys=False)
