"""One registry from (op, device type) to the function that runs it.

An op is a plain torch function: its body is the specification, and runs wherever there is no twin. A device twin
registers itself with `@op.twin("cuda", "xpu")`; Triton twins live in `halfbyte.kernels.<module>`, CPU twins in
`halfbyte.kernels.<module>_cpu`, and are imported the first time a tensor of such a device arrives. ROCm devices are
"cuda" in torch, so they take the same twins.

Eager calls go through a dictionary (0.8 µs measured) instead of `torch.library` (9 µs) or `custom_op` (27 µs); what
must be opaque to `torch.compile` is registered with `torch.library` once, in `halfbyte.autograd`.

A twin whose kernel a device cannot run raises `Refused` before it has changed anything, and the reference runs instead.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .notices import notice


class Refused(RuntimeError):
    """A twin's kernel does not compile for this device or does not fit it, which was said; no argument has changed."""


class Op:
    """A torch reference with device twins. Calling it runs the twin for the first tensor argument's device."""

    def __init__(self, reference: Callable[..., Any], twins: str):
        self.reference, self.twins = reference, twins
        self._by_type: dict[str, Callable[..., Any]] = {"meta": reference}
        self._by_device: dict[torch.device, Callable[..., Any]] = {}  # what was found: a device's type is a slow string
        functools.update_wrapper(self, reference)

    def twin(self, *device_types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
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
        except Refused:
            return self.reference(tensor, *args, **kwargs)

    def _resolve(self, device_type: str) -> Callable[..., Any]:
        """Import the twins' module; without a twin for this device fall back to the reference, and say so once."""
        module = f"halfbyte.kernels.{self.twins}" + ("_cpu" if device_type == "cpu" else "")
        try:
            importlib.import_module(module)
            reason = f"{module} has no {device_type} kernel"
        except ImportError as error:  # no Triton, or no C compiler
            reason = str(error)
        if device_type not in self._by_type:
            notice(
                f"twins-{module}-{device_type}",
                f"{self.twins}: {reason}; the torch reference runs on {device_type} instead, more slowly",
            )
            self._by_type[device_type] = self.reference
        return self._by_type[device_type]


def op(*, twins: str) -> Callable[[Callable[..., Any]], Op]:
    """Make the decorated reference an `Op` whose device twins are in `halfbyte.kernels.<twins>`."""
    return lambda reference: Op(reference, twins)


def on_compiler() -> bool:
    """True while torch.compile traces: then calls must go through the opaque `torch.library` ops."""
    return torch.compiler.is_compiling()
