"""Differences between ranks are reported before any long work."""

import re
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest

from halfbyte.config import RunConfig
from halfbyte.parallel.launch import agreement
from halfbyte.parallel.launch.agreement import check_agreement, check_shared
from halfbyte.utils.errors import ConfigError

pytestmark = pytest.mark.dist


def message(check, *given):
    """Return the error message of this rank."""
    try:
        check(*given)
    except ConfigError as error:
        return error.message
    return None


def other_keys(mesh, keys):
    config = RunConfig(model_name_or_path="m", dataset="d", **(keys if mesh.rank else {}))
    return message(check_agreement, mesh, config)


@pytest.mark.slow
def test_different_keys_are_reported(two):
    first, second = two.run(other_keys, {"learning_rate": 0.1})
    assert first == second
    assert re.search("learning_rate is 0.0002 in process 0, .* 0.1 in process 1", first)
    assert two.run(other_keys, {}) == two.run(other_keys, {"device": "cpu"}) == [None, None]


def other_versions(mesh):
    version = metadata.version

    def theirs(name):
        return "2.0" if name == "torch" and mesh.rank else version(name)

    with mock.patch.object(agreement.metadata, "version", theirs):
        return message(check_agreement, mesh, RunConfig(model_name_or_path="m", dataset="d"))


@pytest.mark.slow
def test_different_versions_are_reported(two):
    first, second = two.run(other_versions)
    assert first == second
    assert f"torch is {metadata.version('torch')} in process 0" in first
    assert "2.0 in process 1" in first


def one_gpu(mesh):
    with mock.patch.object(agreement, "_gpu", return_value="GPU-1"):
        return message(check_agreement, mesh, RunConfig(model_name_or_path="m", dataset="d"))


def test_shared_gpu_is_reported(two):
    assert all(re.search("0 and 1 .*GPU-1", said) for said in two.run(one_gpu))


def folders(mesh, names):
    with mock.patch.object(agreement, "VISIBILITY_TIMEOUT", 0.2):
        return message(check_shared, mesh, Path(names[mesh.rank]))


def test_output_dir_invisible_to_a_rank_is_reported(two, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    assert two.run(folders, [first, first]) == [None, None]
    said = two.run(folders, [first, second])
    assert said[0].startswith("output_dir: ")
    assert first in said[0]
    assert said[0].endswith("process 1")
    assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_accelerate_parallelism_is_refused(monkeypatch, name):
    from halfbyte.mesh.ranks import rendezvous

    monkeypatch.setenv(name, "true")
    with pytest.raises(ConfigError, match=name), rendezvous(2):
        pass


def test_missing_master_address_is_reported(monkeypatch):
    from halfbyte.mesh.mesh import present_mesh

    for name in ("RANK", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2.*MASTER_ADDR"), present_mesh():
        pass


def test_a_port_in_use(monkeypatch):
    import socket

    from halfbyte.mesh.mesh import present_mesh

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        here = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        for name, value in here.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError), present_mesh():
            pass
