"""Replace the kernels of the real package's operators, and the step of its optimizers, in place.

The operators keep their schemas and fakes; each device's kernel is registered over the real one, and removing the
registration restores it. An optimizer's step runs its own `init_state` and `update_step`, records the updates, and
runs them in one launch for each rule, storage and dtype, on the current stream and without blocking.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from ..optim.parameters import closure_loss
from ._ops import UPSTREAM, kernels
from .updates import UpdateBatch, collected

DEVICES = ("CPU", "CUDA", "XPU")
# On a CPU, bitsandbytes calls this operator with codes that it has reordered for AVX512.
REORDERED = ("gemv_4bit", "gemv_4bit.out")

_library: torch.library.Library | None = None
_base: Any = None  # bitsandbytes' Optimizer8bit while its step is replaced
_real_step: Callable[..., Any] | None = None
_batches: WeakKeyDictionary[Optimizer, UpdateBatch] = WeakKeyDictionary()


def is_active() -> bool:
    """Return whether the real package runs halfbyte's kernels."""
    return _library is not None


def start(real: ModuleType) -> None:
    """Replace kernels and steps of the real package; on an exception, undo all replacements."""
    global _library, _base, _real_step
    base = real.optim.optimizer.Optimizer8bit
    real_step = base.step
    library = torch.library.Library(UPSTREAM, "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*[Oo]verriding a previously registered kernel")
            for name, function in kernels():
                for device in DEVICES:
                    if device != "CPU" or name not in REORDERED:
                        library.impl(name, function, device, allow_override=True)  # the default from torch 2.13 on
        _replace_step(base, real_step, _step)
    except BaseException:
        library._destroy()
        _replace_step(base, _step, real_step)
        raise
    _library = library
    _base = base
    _real_step = real_step


def stop() -> None:
    """Restore what `start` replaced."""
    global _library, _base, _real_step
    if _library is None:
        return
    _library._destroy()
    assert _real_step is not None
    _replace_step(_base, _step, _real_step)
    _library = _base = _real_step = None
    _batches.clear()


def _replace_step(base: Any, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Set the step of the subclasses of `base` that inherit `old`; torch wraps it for hooks where optimizers exist."""
    for cls in _with_subclasses(base):
        step = vars(cls).get("step")
        if step is old:
            cls.step = new
        elif step is not None and getattr(step, "__wrapped__", None) is old:
            cls.step = Optimizer.profile_hook_step(new)
            cls.step.hooked = True


def _with_subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


@torch.no_grad()
def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Update all parameters of a bitsandbytes optimizer."""
    loss = closure_loss(closure)
    if not self.initialized:
        self.check_overrides()
        self.to_gpu()
        self.initialized = True
    with collected() as updates:
        for number, group in enumerate(self.param_groups):
            for index, weight in enumerate(group["params"]):
                if weight.grad is None:
                    continue
                if not self.state[weight]:
                    self.init_state(group, weight, number, index)
                self.update_step(group, weight, number, index)
    _batches.setdefault(self, UpdateBatch()).run(updates)
    for device in {update.weight.device for update in updates} if self.is_paged else ():
        if device.type != "cpu":  # the host may read paged state
            torch.accelerator.synchronize(device)
    return loss
