"""Completeness of a checkpoint is checked from file headers: nothing is loaded or printed."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.config import Origin
from halfbyte.loading.completeness import check_complete
from halfbyte.loading.find import find_model, load_model_config
from halfbyte.utils import notices
from halfbyte.utils.errors import CheckpointError
from tests.helpers import all_families

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    """A copy of the tiny Llama in one file."""
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "tiny-llama")
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def assert_refused(folder, capfd, said):
    with pytest.raises(CheckpointError, match=said):
        find_model(Origin(str(folder)))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"hidden_size": 10**8, "head_dim": 16}, r"config\.json \(hidden_size 100000000"),
        ({"num_hidden_layers": 9_999}, "num_hidden_layers is 9999"),
        ({"num_hidden_layers": 3}, r"layers\.2\."),
        ({"hidden_act": "nope"}, r"config\.json: hidden_act: transformers knows no 'nope'"),
        ({"rms_norm_eps": "small"}, r"config\.json: .*rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, r"config\.json"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, r"config\.json: quantization_config: .*gptq"),
    ],
)
def test_a_config_of_another_model(folder, capfd, keys, said):
    configure(folder, **keys)
    assert_refused(folder, capfd, said)


def test_unexpected_tensors_are_reported(folder):
    change(folder, lambda tensors: tensors.update(extra=torch.ones(2)))
    find_model(Origin(str(folder)))
    assert any("extra" in said for said in notices.notices_so_far().values())


def test_pickled_weights_are_compared_too(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    find_model(Origin(str(folder)))
    torch.save({name: tensor for name, tensor in tensors.items() if name != UP}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=UP):
        find_model(Origin(str(folder)))
    torch.save([1], folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError):
        find_model(Origin(str(folder)))


@pytest.mark.slow
@pytest.mark.parametrize("name", all_families.NAMES)
def test_every_family_saved_by_transformers_is_complete(name, tmp_path):
    """And not, without its largest tensor."""
    try:
        model = all_families.build(name)
        model.save_pretrained(tmp_path)
        config = load_model_config(str(tmp_path))
        type(model).from_pretrained(tmp_path)
    except Exception as error:
        pytest.skip(f"transformers does not build, save or load it: {error!r:.80}")
    check_complete(Origin(str(tmp_path)), config)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[max(tensors, key=lambda key: tensors[key].numel())]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError):
        check_complete(Origin(str(tmp_path)), config)
