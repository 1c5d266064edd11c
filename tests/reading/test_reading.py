"""Readers of external files: every kind of path, and every kind of invalid text."""

import errno
import json
import os
import socket

import pytest

from halfbyte.reading import look, open_text, parse_json, read_json, read_text
from halfbyte.utils.errors import CheckpointError, ConfigError, DataError, explain_os_error
from halfbyte.utils.text import brief, cut, json_line, visible


def _pipe(path):
    os.mkfifo(path)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    ("make", "said", "fix"),
    [
        (_pipe, "pipe", "write what comes through it to a file, and name that"),
        (_socket, "socket", "name a file"),
        (lambda path: path.symlink_to("/dev/zero"), "device", "name a file"),
        (lambda path: path.symlink_to(path), "link", "repair the link"),
        (lambda path: path.symlink_to("gone"), "gone", "repair the link"),
        (lambda path: path.mkdir(), "folder", "name a file"),
        (lambda path: path.write_bytes(b"a: \xff"), ":1: byte 4", "save the file as"),
        (lambda path: path.write_text("\nné", "latin-1"), ":2: byte 2", "save the file as"),
        (lambda path: path.write_text("seed: 1", "utf-16"), "UTF-16", "save the file as UTF-8"),
        (lambda path: None, "no such file: ", "write one"),
    ],
)
def test_paths_that_are_not_text_files(tmp_path, make, said, fix):
    path = tmp_path / "x"
    make(path)
    with pytest.raises(DataError) as caught:
        read_text(path, DataError, "write one")
    assert said in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.fix.startswith(fix)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a" * 300, "the name is too long"),
        ("a/" * 3000, "the name is too long"),
        ("a\0b", "the name holds a character that no file's name has"),
        ("a\ud800b", "the name holds a character that no file's name has"),
        (f"{__file__}/below", "a part of its path is a file, not a folder"),
    ],
)
@pytest.mark.parametrize("read", [look, read_text, read_json])
def test_invalid_file_names(name, said, read):
    with pytest.raises(CheckpointError) as caught:
        read(name, CheckpointError)
    assert said in caught.value.message
    assert len(caught.value.message) < 900
    assert caught.value.message.isprintable()


def test_unreadable_files(tmp_path, monkeypatch):
    """Permissions are simulated, because tests run as root."""
    (tmp_path / "x").touch()

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ConfigError) as caught:
        read_text(tmp_path / "x")
    assert "chmod" in caught.value.fix


def test_byte_order_marks_are_skipped(tmp_path):
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert read_text(tmp_path / "x") == "a\nb"
    with open_text(tmp_path / "x", newline="") as file:
        assert file.read() == "a\r\nb"


def test_files_that_are_too_large(tmp_path):
    (tmp_path / "x").write_text("12345")
    assert read_text(tmp_path / "x", largest=5) == "12345"
    with pytest.raises(ConfigError):
        read_text(tmp_path / "x", largest=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a":\n}', "x.json:2: malformed JSON: Expecting value (column 1)"),
        ("9" * 5000, "x.json: a number has more digits than can be read"),
        ("[" * 100_000, "x.json: nested more than 100 levels deep"),
        ("[" * 101 + "]" * 101, "x.json: nested more than 100 levels deep"),
        ('{"a":' * 101 + "1" + "}" * 101, "x.json: nested more than 100 levels deep"),
        ('{"a": "\\ud800"}', "x.json: half a surrogate pair ('\\ud800') is no character"),
        ('{"\\uDFFF": 1}', "x.json: half a surrogate pair ('\\udfff') is no character"),
        (b"\xff", "x.json: byte 1 is not UTF-8"),
        ("", "x.json:1: malformed JSON: Expecting value (column 1)"),
    ],
)
def test_invalid_json(text, said):
    with pytest.raises(DataError) as caught:
        parse_json(text, "x.json", DataError, "copy it again")
    assert caught.value.message == said
    assert caught.value.fix == "copy it again"


def test_valid_json():
    deep, wide = "[" * 100 + "]" * 100, "[" + "[]," * 1000 + "[]]"
    assert parse_json(deep, "x")
    assert len(parse_json(wide, "x")) == 1001
    assert parse_json('"\\ud83d\\ude00 [[[[\\\\ud800"', "x") == "😀 [[[[\\ud800"
    assert parse_json(b'\xef\xbb\xbf{"a": 1, "a": 2}', "x") == {"a": 2}


def test_a_key_given_twice_where_that_counts():
    with pytest.raises(DataError, match=r"x.jsonl:7:.*'a'"):
        parse_json('{"b": {"a": 1, "a": 2}}', "x.jsonl", DataError, line=7, unique=True)


def test_why_explains_os_errors():
    assert explain_os_error(OSError(errno.ENOSPC, "No space left on device")) == "the disk is full"
    assert explain_os_error(OSError(errno.ETXTBSY, "Text file busy")) == "Text file busy"
    assert explain_os_error(OSError("odd")) == "odd"
    assert explain_os_error(OSError()) == "OSError"


def test_values_in_messages_are_short_and_escaped():
    bomb = "x"
    for _ in range(8):
        bomb = [bomb] * 9
    assert len(brief(bomb)) <= 120
    assert brief(["a", 1]) == "['a', 1]"
    assert len(brief(10**5000)) <= 120  # Python 3.11 to 3.13 raise ValueError in its repr
    assert "int" in brief(10**5000)
    assert visible("a\x1b[2J\u202eb\n\tü😀") == "a\\x1b[2J\\u202eb\n\tü😀"
    assert cut("abcdefghijklmnopqrstuvwxyz", 15) == "abcdefg...vwxyz"
    error = ConfigError(f"\x1b]0;x\x07{'y' * 10_000}\nnext", "\x9b0m")
    assert max(map(len, str(error).split("\n"))) <= 820
    assert "\x1b" not in str(error)
    assert "\x9b" not in error.fix
    assert error.message.endswith("\nnext")


def test_json_line_escapes_control_characters():
    value = {"answer": "a\x7f\x9b2J\u2028\u202eé\ud800\n\x1b"}
    line = json_line(value)
    assert json.loads(line) == value
    assert line.isprintable()
    assert "é" in line
