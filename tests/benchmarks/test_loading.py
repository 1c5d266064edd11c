"""benchmarks.loading: the checkpoint that it writes, its digests of pieces, and its bars."""

import hashlib
from types import SimpleNamespace

import pytest
import torch

from benchmarks import loading
from halfbyte.loading import sharded
from halfbyte.loading.load import load_model
from halfbyte.reading.tensors import read_header, read_tensors, safetensors_files


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    found = loading.write(SimpleNamespace(work=work, model="tiny", layers=3))
    return work / "model", found


def test_checkpoint_has_a_file_per_layer_and_loads(written):
    folder, found = written
    files = safetensors_files(folder)
    assert found["files"] == len(files) == 3 + 3  # layers; embedding, head and last norm
    assert found["gb"] == sum(file.stat().st_size for file in files) / 1e9
    model = load_model(str(folder), load_in_4bit=False, dtype="bfloat16", device="cpu")
    assert model.config.num_hidden_layers == 3
    weights = model.model.layers[1].mlp.up_proj.weight, model.model.layers[2].mlp.up_proj.weight
    assert torch.equal(*weights)
    assert weights[0].float().std().item() == pytest.approx(0.02, rel=0.02)


def test_counted_entries(written):
    folder, _ = written
    file = safetensors_files(folder)[0]
    with loading.counted_entries() as sizes, loading.contextlib.ExitStack() as opened:
        entries = sharded._entries(folder, 0, 1, opened)
        for name in read_header(file):
            assert torch.equal(entries[name][:], read_tensors(file)[name])
    assert sum(sizes) == sum(tensor.nbytes for tensor in read_tensors(file).values())


def test_digests_of_pieces(written):
    model = load_model(str(written[0]), quantization="nf4", dtype="bfloat16", device="cpu")
    first, second = loading.piece_digests(model, 2)
    assert first.keys() == second.keys() == dict(model.named_parameters()).keys()
    layer, embedding = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"
    assert first[layer] != second[layer]
    weight = model.get_parameter(embedding).detach().view(torch.uint8).numpy()
    assert first[embedding] == second[embedding] == hashlib.sha256(weight).hexdigest()


def test_summary():
    ranks = [
        {"entries_bytes": 3, "disk_bytes": 4, "share_gib": 1.0, "peak_gib": 1.5, "host_gib": 2, "host_growth_gib": 1},
        {"entries_bytes": 5, "disk_bytes": 8, "share_gib": 2.0, "peak_gib": 2.25, "host_gib": 3, "host_growth_gib": 2},
    ]
    one = {"host_gib": 1.5, "host_growth_gib": 0.5}
    found = loading.summary(ranks, one, [2, 6])
    assert (found["read"], found["disk"]) == (1.0, 1.5)
    assert found["excess_tensors"] == 0.5 * 2**30 / 6
    assert (found["host_gib"], found["host_gib_bar"]) == (5, 2.5)
    assert (found["host_growth_gib"], found["host_growth_gib_bar"]) == (3, 1.5)
    ranks[1]["disk_bytes"] = None
    assert loading.summary(ranks, None, [2, 6])["disk"] is None


def test_host_peak_sees_memory_that_is_freed_again():
    with loading.HostPeak() as host:
        block = torch.ones(2**26, dtype=torch.uint8)
        loading.time.sleep(0.1)
        del block
    assert host.peak - host.before > 0.9 * 2**26
