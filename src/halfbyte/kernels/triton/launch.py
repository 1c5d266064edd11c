"""Launching a Triton kernel in a few microseconds of host time.

`kernel[grid](...)` binds names, specialises every argument and hashes a string in each call; its result then queries
the driver about every pointer and calls profiler hooks. The compiled kernel depends only on the arguments' dtypes and
devices, on which pointers are aligned to 16 bytes, and on the integers. So a `Launcher` caches it under these and calls
it with addresses. Other calls (the first one, unaligned pointers) use Triton's own launch. There is no autotuning: grid
and blocks are functions of the shape, next to each kernel.

Checks, strides and grids depend only on the operands' layouts. An operation whose Python code costs as much as the
launch passes those as a key and repeats the launch that it made for the key before (`repeat`).

A kernel that does not compile for a device, or exceeds its resources, raises `Unavailable` before any launch, and
dispatch runs another one, also while a CUDA graph is captured.

A step of fixed shape has a handful of keys. Batches of varying lengths would add ever more, so the table is cleared
when it reaches `TABLE` entries.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction

from ...dispatch import Unavailable
from ..device import device_of

TABLE = 4096

_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")


def layouts(*tensors: Tensor) -> tuple:
    """Everything about tensors except their addresses: shapes, strides, dtypes, device indices."""
    return (
        *map(_shape, tensors), *map(Tensor.stride, tensors), *map(_dtype, tensors), *map(Tensor.get_device, tensors)
    )  # fmt: skip


class Launcher:
    """A jitted kernel with a table of its compiled variants.

    The kernel's parameters are pointers, then numbers, then constexprs; a call passes one tuple of each.

    Args:
        function: the `triton.jit` function.
        options: Triton's compile options, e.g. `enable_fp_fusion=False`.
    """

    def __init__(self, function: Any, **options: Any):
        self.function, self.options = function, options
        self._compiled: dict[tuple, Any] = {}
        self._refused: dict[tuple, str] = {}
        self.known: dict[tuple, tuple[Any, int, tuple]] = {}

    def repeat(self, key: tuple, tensors: tuple[Tensor, ...]) -> bool:
        """Launch on `tensors` what a call with `key` launched before; return False if there was none.

        `key` must determine programs, numbers and constants, and contain the layouts of all operands.
        """
        launch = self.known.get(key)
        if launch is None:
            return False
        compiled, programs, arguments = launch
        device = tensors[0].get_device()
        addresses = [*map(Tensor.data_ptr, tensors)]
        if reduce(operator.or_, addresses) % 16 or device != torch.accelerator.current_device_index():
            return False
        _run(compiled, programs, device, addresses, arguments)
        return True

    def __call__(
        self,
        programs: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple,
        warps: int,
        key: tuple | None = None,
    ) -> None:
        """Run `programs` programs of `warps` warps, on the current stream of the first tensor's device.

        `warps` must follow from the constants and dtypes, since the table's key does not contain it. `key` is for later
        calls of `repeat`.

        Raises:
            Unavailable: the kernel does not compile for this device or exceeds its resources; nothing was launched.
        """
        device = tensors[0].get_device()
        # Triton launches on the current device, but tensors of a model on several devices may be on others.
        if device >= 0 and device != torch.accelerator.current_device_index():
            with torch.accelerator.device_index(device):
                compiled = self._launch(device, programs, tensors, numbers, constants, warps)
        else:
            compiled = self._launch(device, programs, tensors, numbers, constants, warps)
        if key is not None and compiled is not None:
            _keep(self.known, key, (compiled, programs, (*numbers, *constants)))

    def _launch(self, device, programs, tensors, numbers, constants, warps) -> Any:
        """Launch, and return the compiled kernel if its pointers are aligned, else None."""
        key = (numbers, constants, *map(_dtype, tensors), *map(Tensor.get_device, tensors))
        addresses = [*map(Tensor.data_ptr, tensors)]
        aligned = reduce(operator.or_, addresses) % 16 == 0
        compiled = self._compiled.get(key) if aligned else None
        if compiled is None:
            compiled = self._compile(key, programs, tensors, numbers, constants, warps)
            if compiled is None:
                return None
            if aligned:
                _keep(self._compiled, key, compiled)
        _run(compiled, programs, device, addresses, (*numbers, *constants))
        return compiled if aligned else None

    def _compile(self, key, programs, tensors, numbers, constants, warps) -> Any:
        """Compile and load the kernel for these arguments; None in the interpreter, which runs it directly."""
        variant = key[1:]  # refusals do not depend on numbers, which vary between calls
        if variant in self._refused:
            raise Unavailable(self._refused[variant])
        grid, options = (programs, 1, 1), {"num_warps": warps, **self.options}
        if isinstance(self.function, InterpretedFunction):
            self.function[grid](*tensors, *numbers, *constants, **options)
            return None
        try:
            compiled = self.function.warmup(*tensors, *numbers, *constants, grid=grid, **options)
            compiled.run  # noqa: B018  (loads the kernel, which fails if the device lacks resources)
        except (TritonError, RuntimeError) as error:  # from Triton, its passes, ptxas or the driver
            if _in_capture(tensors[0]) and not isinstance(error, TritonError):
                raise  # may be caused by the capture and says nothing about the kernel
            self._refused[variant] = f"it does not run on {device_of(tensors[0]).name}: {_reason(error)}"
            raise Unavailable(self._refused[variant]) from error
        return compiled


def _in_capture(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is being captured on the tensor's device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _reason(error: Exception) -> str:
    told = getattr(error, "error_message", None) or str(error.__cause__ or error)  # else the kernel's source
    return next((line for line in told.splitlines() if line.strip()), type(error).__name__).strip()


def _run(compiled: Any, programs: int, device: int, addresses: list[int], arguments: tuple) -> None:
    """Launch without the metadata and hooks of Triton's own profiler."""
    stream = driver.active.get_current_stream(device)
    compiled.run(
        programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *arguments
    )


def _keep(table: dict[tuple, Any], key: tuple, value: Any) -> None:
    if len(table) >= TABLE:
        table.clear()
    table[key] = value
