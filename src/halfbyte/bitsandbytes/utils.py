"""Helpers of `bitsandbytes.utils`: packed dicts, outlier dimensions, replacement of linears."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..formats.base import json_entry


def pack_dict_to_tensor(source_dict: dict[str, Any]) -> Tensor:
    """Return a dict as uint8 JSON bytes."""
    return json_entry(source_dict)


def unpack_tensor_to_dict(tensor_data: Tensor) -> dict[str, Any]:
    """Return the dict that `pack_dict_to_tensor` stored."""
    return json.loads(bytes(tensor_data.cpu().tolist()).decode())


class _DeviceMemory:
    """Memory that a GPU can read, for `torch.as_tensor`, by the CUDA array interface."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def gpu_view(address: int, size: int) -> Tensor:
    """uint8 [size] on the GPU: memory at an address of the GPU's, or of unified or pinned host memory.

    Raises:
        RuntimeError: the GPU cannot read the address.
    """
    return torch.as_tensor(_DeviceMemory(address, size), device="cuda")


def sync_gpu(t: Tensor) -> None:
    """Wait for the device of `t`."""
    if t.device.type != "cpu":
        torch.accelerator.synchronize(t.device)


def execute_and_return(command_string: str) -> tuple[str, str]:
    """Run a command and return its stdout and stderr, stripped."""
    done = subprocess.run(shlex.split(command_string), capture_output=True, text=True, check=False)
    return done.stdout.strip(), done.stderr.strip()


def find_outlier_dims(
    weight: Tensor, reduction_dim: int = 0, zscore: float = 4.0, topk: int | None = None, rdm: bool = False
) -> Tensor:
    """Return the indices, int64, of dimensions with outliers.

    Args:
        weight: [N, K]; dimensions are columns for `reduction_dim` 0.
        zscore: deviation of a dimension's standard deviation from the mean, in standard deviations.
        topk: return this number of dimensions with the largest standard deviation instead.
        rdm: return `topk` random dimensions instead.
    """
    if rdm:
        return torch.randint(0, weight.shape[1], (topk or 0,), device=weight.device)
    deviation = weight.float().std(reduction_dim)
    if topk is not None:
        return deviation.topk(topk).indices
    return ((deviation - deviation.mean()) / deviation.std() > zscore).nonzero().view(-1)


class OutlierTracer:
    """Outlier dimensions of a model's linears, found from their inputs in forward passes; a singleton."""

    _instance: OutlierTracer | None = None

    def __init__(self) -> None:
        raise RuntimeError("call OutlierTracer.get_instance()")

    @classmethod
    def get_instance(cls) -> OutlierTracer:
        """Return the only instance."""
        if cls._instance is None:
            cls._instance = cls.__new__(cls)
            cls._instance.last_w = None
        return cls._instance

    last_w: Tensor | None

    def initialize(self, model: nn.Module) -> None:
        """Hook all linears of `model`."""
        self.last_w, self.initialized = None, True
        self.hvalue2outlier_idx: dict[int, Tensor] = {}
        self.hooks = [
            module.register_forward_pre_hook(outlier_hook)
            for module in model.modules()
            if isinstance(module, nn.Linear)
        ]

    def is_initialized(self) -> bool:
        """Return whether a model is hooked."""
        return getattr(self, "initialized", False)

    def get_hvalue(self, weight: Tensor) -> int:
        """Return the key of a weight: its address."""
        return weight.data_ptr()

    def get_outliers(self, weight: Tensor) -> Tensor | None:
        """Return the outlier dimensions of a weight, or None before its forward."""
        if not self.is_initialized():
            raise RuntimeError("no model is traced: call initialize(model) first")
        return self.hvalue2outlier_idx.get(self.get_hvalue(weight))


def outlier_hook(module: nn.Module, input: tuple[Tensor, ...]) -> None:
    """Forward pre-hook that records the outlier dimensions of a linear's input and removes itself."""
    tracer = OutlierTracer.get_instance()
    key = tracer.get_hvalue(module.weight)  # type: ignore[arg-type]
    if key not in tracer.hvalue2outlier_idx:
        x = input[0].detach().reshape(-1, input[0].shape[-1])
        extreme = (x.abs() > 6).any(0)
        dims = torch.cat([find_outlier_dims(x), extreme.nonzero().view(-1)]).unique()
        tracer.hvalue2outlier_idx[key] = dims
    else:
        for hook in tracer.hooks:
            hook.remove()


def replace_linear(
    model: nn.Module,
    linear_replacement: Callable[..., nn.Module],
    skip_modules: Iterable[str] = ("lm_head",),
    copy_weights: bool = False,
    post_processing_function: str | None = None,
) -> nn.Module:
    """Replace the linears of `model`, in place.

    Args:
        linear_replacement: called with in_features, out_features and whether there is a bias.
        skip_modules: names of modules, as attributes, that stay.
        copy_weights: share the weight and bias.
        post_processing_function: name of a method that is called with the old linear.
    """
    skipped = tuple(skip_modules)
    for name, module in model.named_children():
        replace_linear(module, linear_replacement, skipped, copy_weights, post_processing_function)
        if isinstance(module, nn.Linear) and name not in skipped:
            new = linear_replacement(module.in_features, module.out_features, module.bias is not None)
            setattr(model, name, new)
            if copy_weights:
                new.weight, new.bias = module.weight, module.bias
            if post_processing_function is not None and hasattr(module, post_processing_function):
                getattr(module, post_processing_function)(module)
    return model
