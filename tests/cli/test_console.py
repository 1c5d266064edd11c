"""Any text, any encoding, any reader: what is printed is what was meant, and nothing else happens."""

import io
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from halfbyte.utils.console import Console, has_colours
from halfbyte.utils.streams import ENCODING_ERRORS
from halfbyte.utils.text import one_line, visible


def printed(*things, encoding="utf-8", **how) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=stream, width=40, **how).print(*things)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


@given(st.text())
def test_nothing_of_a_text_is_markup_or_obeyed(text):
    shown = printed(text, soft_wrap=True)
    assert set(shown) & {chr(code) for code in (*range(9), *range(11, 32), 127, *range(128, 160), 0x202E)} == set()
    assert printed("[bold]x[/nope] :smile:") == "[bold]x[/nope] :smile:\n"


@given(st.text(st.characters()), st.sampled_from(["ascii", "latin-1", "utf-8", "utf-16", "cp1252"]))
def test_every_encoding_takes_every_text(text, encoding):
    table = Table("part", box=None)
    table.add_row(text)
    printed(Text(text), table, encoding=encoding)
    text.encode(encoding, ENCODING_ERRORS)


def test_stand_ins_and_escapes():
    assert printed("EOS ✓ · … 猫", encoding="ascii") == "EOS ok | ... \\u732b\n"
    line = json.dumps({"answer": '猫 😀 "'}, ensure_ascii=False)
    assert json.loads(line.encode("ascii", ENCODING_ERRORS)) == {"answer": '猫 😀 "'}


def test_a_path_stays_within_its_line():
    assert one_line("a\nb\tc\x1b[31m\u202e\udcff") == "a\\nb\\tc\\x1b[31m\\u202e\\udcff"
    assert visible("a\nb\tc\x1b") == "a\nb\tc\\x1b"


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_reader_that_left(capsys):
    with pytest.raises(BrokenPipeError):
        Console(file=Gone()).print("a")
    staying = Console(file=Gone(), outlives_reader=True)
    staying.print("a")
    staying.print("b")
    assert staying.quiet


@pytest.mark.parametrize(("terminal", "colours"), [("xterm", True), ("dumb", False)])
def test_where_there_are_colours(terminal, colours, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", terminal)
    assert has_colours(Console(force_terminal=True, _environ=os.environ)) is colours
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours(Console(force_terminal=True, _environ=os.environ))


OTHERS = """
import logging, os, sys, warnings
from halfbyte.utils.streams import configure_streams
configure_streams(everything=bool(int(sys.argv[1])))
logging.getLogger("bitsandbytes").warning("theirs")
logging.getLogger("halfbyte.x").warning("ours \\x1b[31m")
warnings.warn("theirs, too")
from tqdm.auto import tqdm
list(tqdm(range(3), desc="their bar"))
"""


@pytest.mark.parametrize("everything", [0, 1])
def test_stderr_holds_our_own_words(everything):
    command = [sys.executable, "-c", OTHERS, str(everything)]
    fresh = {name: value for name, value in os.environ.items() if not name.startswith("TQDM_")}  # commands set them
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=fresh).stderr
    assert "ours \\x1b[31m\n" in said
    assert ("theirs" in said) == ("their bar" in said) == ("theirs, too" in said) == bool(everything)
