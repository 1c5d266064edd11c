"""One table from (op, device type) to kernels: `Op.kernel` adds a kernel, a call runs the first that accepts it.

An op is a plain torch function. Its body is the specification and runs where no kernel does. Kernels live in
`halfbyte.kernels.{triton,cuda,native}` and are imported the first time a tensor of their device arrives. ROCm devices
are "cuda" in torch, so they use the same kernels.

A kernel declares which calls it refuses (`unless`) and its priority (`rank`). The kernels that accept a call are tried
in order of rank. A kernel that does not compile or fit raises `Unavailable` before it changes any argument; dispatch
logs this once and runs the next one. `halfbyte env --kernels` prints the table with the reasons.

Eager calls use a dictionary (0.8 µs measured) instead of `torch.library` (9 µs) or `custom_op` (27 µs). Functions that
must be opaque to `torch.compile` are registered with `torch.library` once, in `halfbyte.autograd`.
"""

from __future__ import annotations

import bisect
import copy
import functools
import importlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.torch_version import TorchVersion

from .utils.notices import notice


class Unavailable(ImportError):
    """A kernel does not build for this device, or does not fit it; no argument of the op has changed."""


class Implementation(NamedTuple):
    """A kernel of an op.

    Args:
        rank: priority; the lowest rank that accepts a call runs.
        unless: takes the call's arguments and returns why this kernel refuses them, or None if it accepts them. None
            accepts every call.
        function: the kernel, with the op's signature.
    """

    rank: int
    unless: Callable[..., str | None] | None
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """Technology, module and function, such as "cuda.gemv4.gemv"."""
        return f"{self.function.__module__.removeprefix('halfbyte.kernels.')}.{self.function.__name__}"


Attempt = tuple[Callable[..., str | None] | None, Callable[..., Any]]  # `unless` and `function` of a kernel


class Op:
    """A torch reference with kernels. A call runs on the kernels for the device of its first argument."""

    def __init__(self, reference: Callable[..., Any], *modules: str):
        self.reference, self.modules = reference, modules
        self._added: dict[str, list[Implementation]] = {}
        self._imported: set[str] = {"meta"}  # device types whose modules are imported; meta tensors have no kernels
        self._by_device: dict[torch.device, tuple[Attempt, ...]] = {}  # by device: `device.type` is a slow string
        functools.update_wrapper(self, reference)

    def kernel(
        self, *device_types: str, unless: Callable[..., str | None] | None = None, rank: int = 0
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function for these device types; see `Implementation`."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            for device_type in device_types:
                rows = self._added.setdefault(device_type, [])
                bisect.insort(rows, Implementation(rank, unless, function), key=lambda row: row.rank)
            self._by_device.clear()
            return function

        return add

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            attempts = self._by_device[tensor.device]
        except KeyError:
            attempts = self._by_device[tensor.device] = self._attempts(tensor.device.type)
        for unless, function in attempts:
            if unless is None or unless(tensor, *args, **kwargs) is None:
                try:
                    return function(tensor, *args, **kwargs)
                except Unavailable as error:
                    name = Implementation(0, None, function).name
                    notice(
                        f"kernel-{name}",
                        f"{name}: {error}; using another kernel or the torch reference, which is slower",
                    )
        return self.reference(tensor, *args, **kwargs)

    def on(self, device_type: str) -> Op:
        """Return this op with the kernels of `device_type`, whatever device its tensors are on."""
        device_op, attempts = copy.copy(self), self._attempts(device_type)
        device_op._by_device = defaultdict(lambda: attempts)
        return device_op

    def _attempts(self, device_type: str) -> tuple[Attempt, ...]:
        return tuple((kernel.unless, kernel.function) for kernel in self.kernels(device_type))

    def choices(self, device_type: str, *args: Any, **kwargs: Any) -> list[tuple[str, str | None]]:
        """Each kernel for `device_type` by rank, with its reason to refuse these arguments or None."""
        return [
            (kernel.name, kernel.unless(*args, **kwargs) if kernel.unless else None)
            for kernel in self.kernels(device_type)
        ]

    def kernels(self, device_type: str) -> tuple[Implementation, ...]:
        """Kernels for `device_type`, by rank. Logs once which modules do not load, or that there are no kernels."""
        if device_type not in self._imported:
            self._imported.add(device_type)
            named = [name for name in self.modules if name.startswith("native.") == (device_type == "cpu")]
            missing = [reason for name in named if (reason := _import(name)) is not None]
            if named and not missing and device_type not in self._added:
                missing = [f"there is no {device_type} kernel"]
            if missing:
                name, fallbacks = self.reference.__name__, "other kernels or " if device_type in self._added else ""
                instead = f"using {fallbacks}the torch reference on {device_type}, which is slower"
                notice(f"kernels-{name}-{device_type}", f"{name}: {'; '.join(missing)}; {instead}")
        return tuple(self._added.get(device_type, ()))


def _import(name: str) -> str | None:
    """Import a module of `halfbyte.kernels`, which registers its kernels. Returns the reason if it does not load."""
    try:
        importlib.import_module(f"halfbyte.kernels.{name}")
    except ImportError as error:  # no Triton, or no C compiler
        return str(error)
    return None


def op(*modules: str) -> Callable[[Callable[..., Any]], Op]:
    """Make the decorated reference an `Op` with kernels in these modules of `halfbyte.kernels`."""
    return lambda reference: Op(reference, *modules)


def on_compiler() -> bool:
    """Return whether torch.compile is tracing: calls must then go through the opaque `torch.library` ops."""
    return torch.compiler.is_compiling() or (_CHECK_TRACING_CONTEXT and TracingContext.try_get() is not None)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Autocast's dtype for matmuls on this device type, or None where autocast is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def to_compute_dtype(x: Tensor) -> Tensor:
    """x in autocast's dtype; unchanged where autocast is off."""
    return x.to(autocast_dtype(x.device.type) or x.dtype)


# Before torch 2.13 `is_compiling` is false in functions that Dynamo does not trace into, such as `__torch_function__`
# of a tensor subclass, although they run on fake tensors. The tracing context shows this.
_CHECK_TRACING_CONTEXT = TorchVersion(torch.__version__) < TorchVersion("2.13")
