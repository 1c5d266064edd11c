"""Weight files: invalid headers, indices and pickles are refused with the file and a fix."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.reading.model_config import read_config, read_generation_config
from halfbyte.reading.tensors import check_checkpoint, read_header, read_state, read_tensors, safetensors_files
from halfbyte.utils.errors import CheckpointError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "empty": torch.ones(0)}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def header_of(file):
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(file, header):
    data = file.read_bytes()
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :])


def test_a_sound_file(file):
    assert read_header(file)["a"]["shape"] == [2, 3]
    found = read_tensors(file)
    assert torch.equal(found["a"], torch.arange(6.0).view(2, 3))
    assert found.keys() == {"a", "b", "empty"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "Q9"}, "'Q9'"),
        ({"dtype": ["F32"]}, None),
        ({"shape": [-2, -3]}, None),
        ({"shape": [2**62, 3]}, None),
        ({"shape": [2, 3.0]}, None),
        ({"shape": [2, 4]}, None),
        ({"data_offsets": [0, 2**63]}, None),
        ({"data_offsets": [4, 28]}, None),
        ({"data_offsets": [24]}, "data_offsets"),
        ({"data_offsets": None}, "data_offsets"),
    ],
)
def test_invalid_header_entries(file, changes, said):
    header = header_of(file)
    header["a"] |= changes
    with_header(file, header)
    with pytest.raises(CheckpointError, match=said):
        read_header(file)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[]", None),
        (b'{"a": 5}', "data_offsets"),
        (b'{"__metadata__": {"x": 1}}', "__metadata__"),
        (b'{"x": {}, "x": {}}', "'x'"),
        (b"[" * 100_000, "nested"),
        (b"\xff", "UTF-8"),
        (b"", None),
    ],
)
def test_invalid_headers(file, header, said):
    with_header(file, header)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("length", [3, 2**40, 2**63, 2**64 - 1])
def test_header_lengths_beyond_the_file(file, length):
    file.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError):
        read_header(file)


def test_overlapping_tensors_are_refused(file):
    header = header_of(file)
    header["c"] = dict(header["a"])
    with_header(file, header)
    with pytest.raises(CheckpointError):
        read_header(file)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, r"'\.\./model\.safetensors'"),
        ({"weight_map": {"a": "/etc/passwd"}}, "'/etc/passwd'"),
        ({"weight_map": {"a": "sub\\one.safetensors"}}, None),
        ({"weight_map": {"a": ".."}}, None),
        ({"weight_map": {"a": "x\0.safetensors"}}, None),
        ({"weight_map": {"a": "one.bin"}}, "'one.bin'"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors"),
        ({"weight_map": {"a": 5}}, "weight_map"),
        ({"weight_map": {}}, "weight_map"),
        ([1], "weight_map"),
        ({"weight_map": {"a": "one.safetensors"}, "metadata": 5}, None),
    ],
)
def test_an_index_stays_in_its_folder(file, index, said):
    file.rename(file.with_name("one.safetensors"))
    if isinstance(index, dict):
        index = {"metadata": {}} | index
    (file.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=said):
        safetensors_files(file.parent)


def test_links_are_followed_for_the_hubs_cache(file):
    blob = file.rename(file.with_name("blob"))
    file.symlink_to(blob)
    assert safetensors_files(file.parent) == [file]
    blob.unlink()
    with pytest.raises(CheckpointError):
        safetensors_files(file.parent)


class Runs:
    def __reduce__(self):
        return os.mkdir, (self.path,)

    def __init__(self, path):
        self.path = str(path)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_pickle_is_not_run(tmp_path, write, device):
    write({"a": Runs(tmp_path / "ran")}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"state\.pt") as caught:
        read_state(tmp_path / "state.pt", "do this", device)
    assert caught.value.fix == "do this"
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0, 10, 200, -10])
def test_a_truncated_state(tmp_path, keep):
    torch.save({"a": torch.ones(100)}, tmp_path / "state.pt")
    (tmp_path / "state.pt").write_bytes((tmp_path / "state.pt").read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"state\.pt"):
        read_state(tmp_path / "state.pt", "")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": "64"}, "hidden_size.*1.*'64'"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"text_config": {"num_hidden_layers": -1}}, r"text_config\.num_hidden_layers"),
        ({"text_config": 5}, "text_config"),
        ({"quantization_config": "nf4"}, "quantization_config"),
        ({"quantization_config": {"formats": {"int8": "all"}}}, r"quantization_config\.formats"),
        ({"transformers_weights": "../x.safetensors"}, "transformers_weights"),
        ({"model_type": 5}, "model_type"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ([], None),
    ],
)
def test_invalid_configs(tmp_path, config, said):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said) as caught:
        check_checkpoint(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_unusual_valid_configs(tmp_path):
    config = {"num_key_value_heads": None, "intermediate_size": [64, 96], "pad_token_id": -1, "eos_token_id": [1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == config
    assert read_generation_config(tmp_path) == {}
    for key, value in (("eos_token_id", "x"), ("temperature", "hot"), ("top_k", [1])):
        (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
        with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key}"):
            check_checkpoint(tmp_path)
