"""Start the ranks of a run with Ray Train on the hosts of its cluster: `pip install 'halfbyte[ray]'`.

    from halfbyte.config import load_config
    from halfbyte.train.ray import train_on_ray

    train_on_ray(load_config("run.yaml", {"parallel": {"data": 2, "shard": 8}}))

Each worker calls `train`, as a rank of torchrun does, and connects to the others by the environment that Ray sets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..utils.errors import ConfigError


def train_on_ray(config: RunConfig, *, resume: str | bool | None = None, **scaling: Any) -> Path:
    """Train as `config` describes on a Ray cluster, and return `output_dir`, which must be on a shared disk.

    Args:
        resume: as in `train`.
        scaling: keywords of `ray.train.ScalingConfig`; default: one worker per rank of `parallel`, each with a GPU
            unless `device` is cpu.

    Raises:
        ConfigError: Ray is not installed; `parallel` is auto and `num_workers` is not given.
        ray.train.v2.api.exceptions.TrainingFailedError: a worker failed; its cause is the worker's error.
    """
    try:
        from ray.train import ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise ConfigError(f"Ray Train is not installed: {error}", "pip install 'halfbyte[ray]'") from error
    layout, gpus = config.layout, config.device != "cpu"
    if layout is None and "num_workers" not in scaling:
        fix = "set parallel, such as {data: 2}, or give num_workers"
        raise ConfigError("parallel: auto does not say how many workers Ray is to start", fix)
    options = {"num_workers": layout.size if layout else None, "use_gpu": gpus} | scaling

    def worker() -> None:
        from .run import train

        train(config, resume=resume)

    backend = TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "cpu:gloo")  # numbers go from host to host
    TorchTrainer(worker, torch_config=backend, scaling_config=ScalingConfig(**options)).fit()
    return config.output_path
