"""Fuzzing of text readers with pieces of YAML, JSONL, templates and other tools' configs.

A case passes if it raises only halfbyte's errors, within a second of CPU time.
"""

import gc
import json
import os
import resource
from pathlib import Path

from hypothesis import strategies as st

from halfbyte.cli.import_config import convert
from halfbyte.config import RunConfig, load_config
from halfbyte.config.foreign import foreign_names
from halfbyte.config.yaml import read_mapping
from halfbyte.data.chat import ChatTemplate
from halfbyte.data.formats import documents, recognise
from halfbyte.data.sources import read_sources
from halfbyte.utils.errors import HalfbyteError

SECONDS, BYTES = 1.0, 2**30  # a case's most

ODD = [
    "\x00", "\x07", "\x1b[31m", "\ud800", "\ufeff", "\u2028", "\x85", "\t", "\r", "\r\n", "\n", " ", "  ", "é",
    "😀", "日本",
    "'", '"', "\\", "\\u", "\\ud83d", "\\x", "$", "~", "#", " # ", "%", "@", "`", "%YAML 1.1\n---\n", "---\n", "...\n",
]  # fmt: skip
VALUES = [
    "", "null", "true", "no", "-1", "0", "1", "1e3", "2e-4", ".nan", ".inf", "1e999", "9" * 5000, "0x10", "0b1",
    "1_0", "1:30",
    "2024-01-01", "text", "a: b", "{", "}", "[", "]", "[]", "{}", "[a, b]", "{a: 1}", "{a: {b: [1, 2]}}", "? a",
    "- a", "*a",
    "&a", "&a [*a]", "<<", "!!int x", "!!int 7", "!!bool x", "!!timestamp x", "!!binary x", "!!set {a}",
    "!!omap [a: 1]",
    "!!python/object/apply:os.system [ls]", "!x y", "|\n  a\n", ">-\n  b\n",
    "[" * 200, "{a: " * 60, "- " * 100, "x" * 3000,
    "nf4", "auto", "all-linear", "data.jsonl", "/", ".", "x/y", "a\0b",
]  # fmt: skip
KEYS = [
    *RunConfig.model_fields,
    *foreign_names(),
    "<<",
    "? x",
    "[a]",
    "{a: 1}",
    "''",
    "k" * 2000,
    "&k k",
    "!!int k",
    "*a",
]

odd_text = st.text(st.characters(exclude_categories=()), max_size=30) | st.sampled_from(ODD + VALUES)
value = st.sampled_from(VALUES) | odd_text | st.lists(st.sampled_from(ODD + VALUES), max_size=4).map("".join)
pair = st.tuples(st.sampled_from(KEYS) | odd_text, st.sampled_from([": ", ":", ": &a ", ": *a ", " "]), value)
GOOD = "model_name_or_path: m\ndataset: d.jsonl\n"
yaml_text = st.one_of(
    st.lists(pair.map("".join), max_size=8).map("\n".join),
    st.lists(pair.map("".join), max_size=3).map(lambda lines: GOOD + "\n".join(lines)),
    st.lists(odd_text, max_size=12).map("".join),
)

ours = st.tuples(st.sampled_from([*RunConfig.model_fields]), st.just(": "), value).map("".join)
theirs = st.tuples(st.sampled_from(foreign_names()), st.just(": "), value).map("".join)
import_text = st.lists(theirs | theirs | ours | odd_text, min_size=1, max_size=8).map("\n".join)

leaf = st.none() | st.booleans() | st.integers() | st.floats() | odd_text
columns = st.sampled_from(
    ["messages", "conversations", "prompt", "completion", "instruction", "input", "output", "text", "tools", "system",
     "role", "from", "content", "value", "tool_calls", "function", "name", "arguments", "type", "weight", "id"]
)  # fmt: skip
roles = st.sampled_from(
    ["user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation", "x", ""]
)
turn = st.dictionaries(columns, leaf, max_size=4).flatmap(lambda more: roles.map(lambda role: more | {"role": role}))
nested = st.recursive(
    leaf | turn, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(columns | odd_text, inner, max_size=4)
)
row = st.dictionaries(columns, nested, max_size=5) | st.fixed_dictionaries({"messages": st.lists(turn, max_size=5)})
line = row.map(json.dumps) | nested.map(json.dumps) | odd_text
broken = st.tuples(line, st.integers(0, 200), st.sampled_from([*ODD, "[" * 300, '{"a":' * 300, "9" * 5000])).map(
    lambda made: made[0][: made[1]] + made[2] + made[0][made[1] :]
)
good = st.lists(st.tuples(odd_text, odd_text), min_size=1, max_size=3).map(
    lambda pairs: json.dumps({"messages": [{"role": "user", "content": said} for said in sum(pairs, ())]})
)
jsonl_text = st.one_of(
    st.lists(line | broken, max_size=6).map("\n".join),
    st.lists(good, min_size=1, max_size=3).map("\n".join),
    st.tuples(good, line | broken).map("\n".join),
)

EXPRESSIONS = [
    "messages", "messages[0]", "messages[-1]['content']", "messages[99]", "nothing", "nothing.at.all", "1", "'x'", "''",
    "bos_token", "tools", "range(10)", "range(99999)", "range(10 ** 12)", "'x' * 10 ** 10", "'x' * 10 ** 7",
    "10 ** (10 ** 7)",
    "10 ** 10 ** 3", "1 / 0", "1 % 0", "''.__class__", "''.join", "messages.append(1)", "[1] * 10 ** 9",
    "namespace(a='x')",
    "raise_exception('no')", "raise_exception(1)", "strftime_now('%Y')", "strftime_now(3)", "messages | tojson",
    "'%99999999d' % 1",
    "'{:>99999999}'.format(1)", "'x'.center(10 ** 9)", "messages | map('upper') | list", "messages | sort",
    "cycler", "self",
    "lipsum(99999)", "loop.index", "caller()", "dict(a=1).items()", "messages | groupby('role')",
    "messages | batch(0) | list",
    "(1, 2) | join(messages)", "messages | first | length", "'a' ~ messages ~ 1.5", "not messages", "x if y",
    "-messages",
    "'\\ud800'", "'a'.encode('utf-16')", "messages[0].update({1: 2})", "0.1 ** -999", "1e400 | int", "'9' * 5000 | int",
]  # fmt: skip
expression = st.sampled_from(EXPRESSIONS) | st.tuples(st.sampled_from(EXPRESSIONS), st.sampled_from(EXPRESSIONS)).map(
    lambda two: f"({two[0]}) ~ ({two[1]})"
)
piece = st.one_of(
    expression.map(lambda made: "{{ " + made + " }}"),
    expression.map(lambda made: "{% if " + made + " %}a{% endif %}"),
    expression.map(lambda made: "{% set x = " + made + " %}"),
    st.tuples(expression, expression).map(lambda two: "{% for m in " + two[0] + " %}{{ " + two[1] + " }}{% endfor %}"),
    st.sampled_from(
        ["{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}", "{% generation %}a{% endgeneration %}",
         "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include 'x' %}", "{% extends 'x' %}",
         "{% endfor %}", "{{", "}}", "{%", "{#",
         "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
         "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "{% break %}",
         "{% do x %}", "{% raw %}",
         "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
         "{{ " + "(" * 500 + "1" + ")" * 500 + " }}"]
    ),
    odd_text,
)  # fmt: skip
template_text = st.lists(piece, min_size=1, max_size=5).map("".join)


def read_yaml(text: str, folder: Path) -> None:
    load_config(written(text, folder / "run.yaml"))


def read_import(text: str, folder: Path) -> None:
    """Import a config and check that the result is valid YAML."""
    imported = convert(written(text, folder / "their.yaml"))
    imported.explain().encode()
    read_mapping(written(imported.as_yaml(), folder / "ours.yaml"))


def read_jsonl(text: str, folder: Path) -> None:
    for source in read_sources(str(written(text, folder / "data.jsonl"))):
        for where, document in documents(source, recognise(source)):
            json.dumps([where, document]).encode()


def read_template(text: str, tokenizer) -> None:
    tokenizer.chat_template = text
    template = ChatTemplate(tokenizer)
    template.turns_of(
        [template.adapt({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})]
    )
    template._bounded.end()


def written(text: str, path: Path) -> Path:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


def answered(read, text: str, place) -> bool:
    """Return True if `text` is accepted, False if it is refused with halfbyte's error.

    Raises:
        AssertionError: it takes too long.
    """
    gc.disable()  # avoids collecting hypothesis's objects in the measured time
    begin = sum(os.times()[:4])
    try:
        read(text, place)
        return True
    except HalfbyteError as error:
        str(error).encode()  # as whoever prints it does
        return False
    finally:
        took = sum(os.times()[:4]) - begin
        gc.enable()
        assert took < SECONDS, f"{took:.1f} s for {text[:500]!r}"


def peak(who: int) -> int:
    """Peak bytes of this process, or of its largest child."""
    return resource.getrusage(who).ru_maxrss * 1024
