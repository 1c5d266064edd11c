"""One table from (op, device type) to the kernels that compute it: `Op.kernel` adds a row, a call takes the first.

An op is a plain torch function: its body is the specification, and runs where no kernel does. Kernels live in
`halfbyte.kernels.{triton,cuda,native}` and are imported the first time a tensor of their device arrives. ROCm devices
are "cuda" in torch, so they take the same kernels.

A kernel says for which calls it is not made (`unless`), and its place among several (`rank`). Those that can are tried
in that order. One that does not compile or fit raises `Unavailable` before it has changed anything: that is logged
once, and the next one runs. `halfbyte env --kernels` prints the table with its reasons.

Eager calls go through a dictionary (0.8 µs measured) instead of `torch.library` (9 µs) or `custom_op` (27 µs); what
must be opaque to `torch.compile` is registered with `torch.library` once, in `halfbyte.autograd`.
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
        rank: of several that take a call, the lowest runs.
        unless: takes the call's arguments, as they are given, and returns why this kernel does not take those, None
            if it does; None: it takes all.
        function: of the op's signature.
    """

    rank: int
    unless: Callable[..., str | None] | None
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """Technology, module and function."""
        return f"{self.function.__module__.removeprefix('halfbyte.kernels.')}.{self.function.__name__}"


Attempt = tuple[Callable[..., str | None] | None, Callable[..., Any]]  # `unless` and `function` of a kernel


class Op:
    """A torch reference with kernels. Calling it runs what the first tensor argument's device has for the call."""

    def __init__(self, reference: Callable[..., Any], *modules: str):
        self.reference, self.modules = reference, modules
        self._added: dict[str, list[Implementation]] = {}
        self._imported: set[str] = {"meta"}  # device types whose modules were; what has no data has no kernels
        self._by_device: dict[torch.device, tuple[Attempt, ...]] = {}  # a device's type is a slow string
        functools.update_wrapper(self, reference)

    def kernel(
        self, *device_types: str, unless: Callable[..., str | None] | None = None, rank: int = 0
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add the decorated function, of the reference's signature, for these device types; see `Implementation`."""

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
                    self._say(function, error)
        return self.reference(tensor, *args, **kwargs)

    def on(self, device_type: str) -> Op:
        """The op as devices of this type run it, wherever its tensors are."""
        found, attempts = copy.copy(self), self._attempts(device_type)
        found._by_device = defaultdict(lambda: attempts)
        return found

    def _attempts(self, device_type: str) -> tuple[Attempt, ...]:
        return tuple((kernel.unless, kernel.function) for kernel in self.kernels(device_type))

    def choices(self, device_type: str, *args: Any, **kwargs: Any) -> list[tuple[str, str | None]]:
        """Each kernel for devices of this type, by rank, and why it does not take these arguments; None: it does."""
        return [
            (kernel.name, kernel.unless(*args, **kwargs) if kernel.unless else None)
            for kernel in self.kernels(device_type)
        ]

    def kernels(self, device_type: str) -> tuple[Implementation, ...]:
        """Those for devices of this type, by rank. Says once which module does not load, or that there are none."""
        if device_type not in self._imported:
            self._imported.add(device_type)
            named = [name for name in self.modules if name.startswith("native.") == (device_type == "cpu")]
            missing = [reason for name in named if (reason := _import(name)) is not None]
            if named and not missing and device_type not in self._added:
                missing = [f"there is no {device_type} kernel"]
            if missing:
                name, others = self.reference.__name__, "other kernels or " if device_type in self._added else ""
                instead = f"{others}the torch reference runs on {device_type} instead, more slowly"
                notice(f"kernels-{name}-{device_type}", f"{name}: {'; '.join(missing)}; {instead}")
        return tuple(self._added.get(device_type, ()))

    def _say(self, function: Callable[..., Any], error: Unavailable) -> None:
        name = Implementation(0, None, function).name
        notice(f"kernel-{name}", f"{name}: {error}; another kernel or the torch reference runs instead, more slowly")


def _import(name: str) -> str | None:
    """Import a module of `halfbyte.kernels`, which adds its kernels to their ops; returns why it does not load."""
    try:
        importlib.import_module(f"halfbyte.kernels.{name}")
    except ImportError as error:  # no Triton, or no C compiler
        return str(error)
    return None


def op(*modules: str) -> Callable[[Callable[..., Any]], Op]:
    """Make the decorated reference an `Op` whose kernels are in these modules of `halfbyte.kernels`."""
    return lambda reference: Op(reference, *modules)


def on_compiler() -> bool:
    """True while torch.compile traces: then calls must go through the opaque `torch.library` ops."""
    return torch.compiler.is_compiling() or (_unsaid and TracingContext.try_get() is not None)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Of matrix products on such a device, where autocast is on."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def to_compute_dtype(x: Tensor) -> Tensor:
    """x in autocast's dtype where it is on."""
    return x.to(autocast_dtype(x.device.type) or x.dtype)


# Before torch 2.13 `is_compiling` is false where Dynamo runs what it does not look into, such as the functions of a
# tensor subclass (`__torch_function__`), on tensors without data; that something is traced, this tells.
_unsaid = TorchVersion(torch.__version__) < TorchVersion("2.13")
