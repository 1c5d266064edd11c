"""GGUF headers: equal to the library's reading; wrong counts, lengths and types are refused."""

import struct

import gguf
import numpy as np
import pytest

from halfbyte.reading.gguf import read_head
from halfbyte.utils.errors import CheckpointError

U32, TEXT, ARRAY = 4, 8, 9
HUGE = 2**62


def text(value):
    return struct.pack("<Q", len(value)) + value


def head(keys=b"", tensors=b"", n_keys=None, n_tensors=None, version=3):
    counts = n_tensors if n_tensors is not None else bool(tensors), n_keys if n_keys is not None else bool(keys)
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + keys + tensors + bytes(64)


def array(kind, count, values=b""):
    return text(b"a") + struct.pack("<IIQ", ARRAY, kind, count) + values


def tensor(name=b"t", dimensions=1):
    return text(name) + struct.pack("<I", dimensions) + struct.pack(f"<{dimensions}QIQ", *[32] * dimensions, 0, 0)


def test_it_reads_the_librarys_files(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32("f", 0.1)
    writer.add_int8("i", -3)
    writer.add_bool("b", True)
    writer.add_array("texts", ["ä", "", "c"])
    writer.add_array("numbers", [1.5, -2.0])
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer.add_tensor("m", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_head(tmp_path / "m.gguf")
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    own = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert found.keys == own
    (described,) = found.tensors
    assert (described.name, described.shape, described.type) == ("m", (2, 3), 0)
    assert described.start == theirs.tensors[0].data_offset


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"GGUF\x03", "truncated"),
        (b"GGML" + bytes(60), "GGUF"),
        (head(version=1), "version 1"),
        (head(version=3 << 24), "big-endian"),
        (head(n_keys=HUGE), f"{HUGE} keys"),
        (head(n_tensors=HUGE), f"{HUGE} tensors"),
        (head(struct.pack("<Q", HUGE)), f"{HUGE} bytes"),
        (head(text(b"k") + struct.pack("<I", 99)), "99"),
        (head(text(b"\xff") + struct.pack("<II", U32, 1)), "utf-8"),
        (head((text(b"k") + struct.pack("<II", U32, 1)) * 2, n_keys=2), None),
        *((head(array(kind, HUGE)), f"{HUGE} values of a") for kind in (0, 7, 8, 12)),
        (head(array(ARRAY, 1)), "type 9"),
        (head(text(b"general.alignment") + struct.pack("<II", U32, 3)), None),
        (head(tensors=tensor(dimensions=5)), "5 dimensions"),
        (head(tensors=tensor())[:-70], "truncated"),
        (head(tensors=tensor() * 2, n_tensors=2), None),
    ],
)
def test_malformed_headers_are_refused(tmp_path, data, said):
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=said):
        read_head(tmp_path / "m.gguf")
