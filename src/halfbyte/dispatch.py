"""One registry from (op, device type) to the function that runs it.

An op is a plain torch function: its body is the specification, and runs wherever there is no twin. A device twin
registers itself with `@op.kernel("cuda", "xpu")`; Triton twins live in `halfbyte.kernels.<module>`, CPU twins in
`halfbyte.kernels.<module>_cpu`, and are imported the first time a tensor of such a device arrives. ROCm devices are
"cuda" in torch, so they take the same twins.

Eager calls go through a dictionary (0.8 µs measured) instead of `torch.library` (9 µs) or `custom_op` (27 µs); what
must be opaque to `torch.compile` is registered with `torch.library` once, in `halfbyte.autograd`.

A kernel that cannot run here raises `Unavailable` before it has changed anything, and the reference runs instead.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .notices import notice


class Unavailable(ImportError):
    """A kernel does not build for this device, or does not fit it; no argument of the op has changed."""


class Op:
    """A torch reference with device twins. Calling it runs the twin for the first tensor argument's device."""

    def __init__(self, reference: Callable[..., Any], *modules: str):
        self.reference, self.modules = reference, modules
        self._by_type: dict[str, Callable[..., Any]] = {"meta": reference}
        self._by_device: dict[torch.device, Callable[..., Any]] = {}  # what was found: a device's type is a slow string
        functools.update_wrapper(self, reference)

    def kernel(self, *device_types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function, of the reference's signature, for these device types."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            for device_type in device_types:
                self._by_type[device_type] = function
            self._by_device.clear()
            return function

        return register

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = tensor.device
        function = self._by_device.get(device)
        if function is None:
            function = self._by_device[device] = self._by_type.get(device.type) or self._resolve(device.type)
        try:
            return function(tensor, *args, **kwargs)
        except Unavailable:
            return self.reference(tensor, *args, **kwargs)

    def _resolve(self, device_type: str) -> Callable[..., Any]:
        """Import what has kernels for this device; where nothing has, fall back to the reference, and say so once."""
        named = [name for name in self.modules if name.startswith("native.") == (device_type == "cpu")]
        reason = f"there is no {device_type} kernel"
        for name in named:
            try:
                importlib.import_module(f"halfbyte.kernels.{name}")
            except ImportError as error:  # no Triton, or no C compiler
                reason = str(error)
        if device_type not in self._by_type:
            notice(
                f"kernels-{'-'.join(self.modules)}-{device_type}",
                f"{self.reference.__name__}: {reason}; the torch reference runs on {device_type} instead, more slowly",
            )
            self._by_type[device_type] = self.reference
        return self._by_type[device_type]


def op(*modules: str) -> Callable[[Callable[..., Any]], Op]:
    """Make the decorated reference an `Op` whose kernels are in these modules of `halfbyte.kernels`."""
    return lambda reference: Op(reference, *modules)


def on_compiler() -> bool:
    """True while torch.compile traces: then calls must go through the opaque `torch.library` ops."""
    return torch.compiler.is_compiling()
