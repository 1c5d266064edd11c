"""GGUF files with impossible keys are refused before anything is built from them."""

import struct

import gguf
import pytest

from halfbyte.export.gguf_model import export_gguf
from halfbyte.gguf.importer import import_gguf
from halfbyte.utils.errors import CheckpointError
from tests.helpers.gguf_models import save_model

U32 = struct.pack("<I", gguf.GGUFValueType.UINT32)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    save_model(folder / "model", "llama")
    export_gguf(folder / "model", "q4_0", folder / "m.gguf", device="cpu")
    return (folder / "m.gguf").read_bytes()


def keyed(name, value):
    """A uint32 key of the file, as its bytes."""
    return name.encode() + U32 + struct.pack("<I", value)


def assert_refused(tmp_path, data, said):
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=said) as caught:
        import_gguf(tmp_path / "m.gguf", tmp_path / "back")
    assert str(tmp_path / "m.gguf") in str(caught.value)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("key", "was", "value", "said"),
    [
        ("llama.block_count", 2, 0, "llama.block_count.*0"),
        ("llama.block_count", 2, 2**30, None),
        ("llama.attention.head_count", 4, 0, "head_count"),
        ("llama.attention.head_count", 4, 2**32 - 1, "head_count"),
        ("llama.attention.head_count_kv", 2, 3, None),
        ("llama.embedding_length", 64, 128, None),
        ("tokenizer.ggml.eos_token_id", None, 5000, "eos_token_id is 5000.*272 tokens"),
    ],
)
def test_a_key_out_of_bounds(file, tmp_path, key, was, value, said):
    if was is None:
        at = file.index(key.encode() + U32) + len(key) + 4
        old = file[at - len(key) - 4 : at + 4]
    else:
        old = keyed(key, was)
    assert file.count(old) == 1
    assert_refused(tmp_path, file.replace(old, keyed(key, value)), said)


@pytest.mark.parametrize(
    ("key", "kind", "said"),
    [
        ("llama.block_count", gguf.GGUFValueType.FLOAT32, "block_count"),
        ("llama.rope.freq_base", gguf.GGUFValueType.INT32, None),
        ("tokenizer.ggml.bos_token_id", gguf.GGUFValueType.FLOAT32, "bos_token_id"),
    ],
)
def test_a_key_of_another_type(file, tmp_path, key, kind, said):
    at = file.index(key.encode()) + len(key)
    data = file[:at] + struct.pack("<I", kind) + file[at + 4 :]
    if said is None:  # a whole number where a fraction may stand
        (tmp_path / "m.gguf").write_bytes(data)
        import_gguf(tmp_path / "m.gguf", tmp_path / "back")
    else:
        assert_refused(tmp_path, data, said)
