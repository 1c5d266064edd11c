"""Counts the bytes that code allocates, on shapes alone: tensors without data run through the code itself."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..dispatch import Op

LOGITS = "logits"  # the tag of what a head allocates


class Ledger(TorchDispatchMode):
    """Counts the bytes of live storages while it is entered.

    Attributes:
        live, peak: bytes now, and at the highest moment.
        peak_by_tag: bytes of that moment, by the tag under which they were allocated.
        sizes: bytes of a storage → how many such are alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.tag = "activations"
        self.peak_by_tag: dict[str, int] = {}
        self._live_by_tag: dict[str, int] = {}
        self.sizes: Counter[int] = Counter()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hidden = False

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """Storages that were there before, such as weights: views of them cost nothing."""
        for tensor in tensors:
            parts = getattr(tensor, "parts", {"": tensor})  # a QuantizedTensor's
            self._known.update(part.untyped_storage() for part in parts.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        run = _grouped_product if func is torch.ops.aten._grouped_mm.default else func
        result = run(*args, **(kwargs or {}))
        if not self._hidden:
            self.note(result)
        return result

    def note(self, result: Any) -> None:
        """Count the tensors in `result` that are not known yet."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())

    def _note(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size, tag = storage.nbytes(), self.tag
        weakref.finalize(storage, self._change, -size, tag)
        self._change(size, tag)

    def _change(self, size: int, tag: str) -> None:
        self.live += size
        self.sizes[abs(size)] += 1 if size > 0 else -1
        self._live_by_tag[tag] = self._live_by_tag.get(tag, 0) + size
        if self.live > self.peak:
            self.peak, self.peak_by_tag = self.live, dict(self._live_by_tag)

    def highest(self) -> int:
        """The peak since this was asked last."""
        found, self.peak, self.peak_by_tag = self.peak, self.live, dict(self._live_by_tag)
        return found

    @contextlib.contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Enter what is allocated inside under `tag`."""
        before, self.tag = self.tag, tag
        try:
            yield
        finally:
            self.tag = before

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Count nothing inside."""
        before, self._hidden = self._hidden, True
        try:
            yield
        finally:
            self._hidden = before


def _grouped_product(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch's product of experts. As fake tensors it takes bfloat16 alone, where a CPU multiplies float32, too."""
    result = torch.ops.aten._grouped_mm.default(a.to(torch.bfloat16), b.to(torch.bfloat16), *args, **kwargs)
    return result if a.dtype is torch.bfloat16 else torch.empty_like(result, dtype=a.dtype)


@contextlib.contextmanager
def kernels(ledger: Ledger, device_type: str) -> Iterator[None]:
    """Inside, ops (`dispatch.Op`) allocate their results and nothing else, as kernels do.

    Only a CPU has no kernel for the loss: there the reference's own tensors count.
    """
    call = Op.__call__

    def run(self: Op, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if device_type == "cpu" and ledger.tag == LOGITS:
            return self.reference(tensor, *args, **kwargs)
        if isinstance(tensor, FakeTensor):
            return _like_results(self.reference, tensor, *args, **kwargs)
        with ledger.hidden():
            result = call(self, tensor, *args, **kwargs)
        ledger.note(result)
        return result

    Op.__call__ = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        Op.__call__ = call  # type: ignore[method-assign]


def _like_results(reference: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """New fake tensors for the results of `reference`, which runs on the meta device: tables that it keeps for later
    must not be fake. What it returns of its arguments is those."""
    leaves, spec = tree_flatten((args, kwargs))
    own: dict[int, Tensor] = {}

    def as_meta(tensor: Tensor) -> Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        own[meta.untyped_storage()._cdata] = tensor
        return meta

    with _disable_current_modes():
        given = [as_meta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        arguments, options = tree_unflatten(given, spec)
        results, result_spec = tree_flatten(reference(*arguments, **options))
    found = []
    for result in results:
        if not isinstance(result, Tensor):
            found.append(result)
            continue
        argument = own.get(result.untyped_storage()._cdata)
        shape, strides = tuple(result.shape), result.stride()
        if argument is None:
            argument = torch.empty_strided(shape, strides, dtype=result.dtype, device="cpu")
        elif (tuple(argument.shape), argument.stride()) != (shape, strides):
            argument = argument.as_strided(shape, strides, argument.storage_offset() + result.storage_offset())
        found.append(argument)
    return tree_unflatten(found, result_spec)
