"""Ray Train starts the ranks. Ray is not installed for tests: these check the calls to it, and a worker's work."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from halfbyte.config import load_config
from halfbyte.train import run
from halfbyte.train.ray import train_on_ray
from halfbyte.utils.errors import ConfigError


@pytest.fixture
def asked(monkeypatch):
    """A stand-in for Ray that records its arguments."""
    found = {}

    class TorchTrainer:
        def __init__(self, train_loop_per_worker, *, torch_config, scaling_config):
            found.update(worker=train_loop_per_worker, backend=torch_config.backend, **vars(scaling_config))

        def fit(self):
            found["worker"]()

    train, torch = ModuleType("ray.train"), ModuleType("ray.train.torch")
    train.ScalingConfig = lambda **keys: SimpleNamespace(**keys)
    torch.TorchConfig, torch.TorchTrainer = lambda **keys: SimpleNamespace(**keys), TorchTrainer
    for name, module in (("ray", ModuleType("ray")), ("ray.train", train), ("ray.train.torch", torch)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(run, "train", lambda config, resume: found.update(trained=config, resume=resume))
    return found


def config_of(tmp_path, **keys):
    keys = {"model_name_or_path": "m", "dataset": "d", "output_dir": str(tmp_path / "out")} | keys
    return load_config(None, keys)


@pytest.mark.parametrize(
    ("device", "gpus", "backend"), [(None, True, "cpu:gloo,cuda:nccl"), ("cpu", False, "cpu:gloo")]
)
def test_one_worker_per_rank(asked, tmp_path, device, gpus, backend):
    config = config_of(tmp_path, parallel={"data": 2, "shard": 2}, device=device)
    assert train_on_ray(config, resume=True, placement_strategy="SPREAD") == tmp_path / "out"
    assert (asked["num_workers"], asked["use_gpu"], asked["placement_strategy"]) == (4, gpus, "SPREAD")
    assert asked["backend"] == backend
    assert (asked["trained"], asked["resume"]) == (config, True)


def test_auto_needs_num_workers(asked, tmp_path):
    config = config_of(tmp_path, parallel="auto")
    with pytest.raises(ConfigError) as refused:
        train_on_ray(config)
    assert "num_workers" in refused.value.fix
    train_on_ray(config, num_workers=8)
    assert asked["num_workers"] == 8


def test_without_ray(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(ConfigError) as refused:
        train_on_ray(config_of(tmp_path))
    assert "halfbyte[ray]" in refused.value.fix
