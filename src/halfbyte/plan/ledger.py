"""Ledger of live tensor bytes: runs the real code on fake tensors and counts allocated and freed bytes."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..dispatch import Op
from ..ops.experts import multiplies_codes

aten = torch.ops.aten
# Frequent operators whose results follow from the shapes of their arguments. Fake tensors spend about 0.4 ms of Python
# on a call, and these are most calls of a replay.
VIEWS = frozenset(
    {
        aten._unsafe_view.default, aten.detach.default, aten.expand.default, aten.slice.Tensor, aten.t.default,
        aten.transpose.int, aten.unsqueeze.default, aten.view.default,
    }
)  # fmt: skip
ELEMENTWISE = frozenset(
    {
        aten.add.Tensor, aten.clone.default, aten.div.Scalar, aten.mul.Scalar, aten.mul.Tensor, aten.neg.default,
        aten.pow.Tensor_Scalar, aten.rsqrt.default, aten.silu.default, aten.sub.Tensor,
    }
)  # fmt: skip

LOGITS = "logits"  # tag of the head's and the loss's allocations


class Ledger(TorchDispatchMode):
    """Counts the bytes of live storages while it is entered.

    Attributes:
        live, peak: bytes now, and at the highest moment.
        tag: tag of new allocations.
        peak_by_tag: bytes at the highest moment, by tag.
        sizes: bytes of a storage → number of live storages of that size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.tag = "activations"
        self.peak_by_tag: dict[str, int] = {}
        self._live_by_tag: dict[str, int] = {}
        self.sizes: Counter[int] = Counter()
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hidden = False

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """Do not count the storages of these tensors, such as weights, or views of them."""
        for tensor in tensors:
            stored = getattr(tensor, "parts", {"": tensor})  # a QuantizedTensor has several
            self._counted.update(component.untyped_storage() for component in stored.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all calls come from torch's C++ with this query
        result = _by_shape(func, args, kwargs)
        if result is None:
            run = _grouped_mm if func is aten._grouped_mm.default else func
            result = run(*args, **(kwargs or {}))
        if not self._hidden:
            self.note(result)
        return result

    def note(self, result: Any) -> None:
        """Count the new storages in `result`."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())

    def _note(self, storage: Any) -> None:
        if storage in self._counted:
            return
        self._counted.add(storage)
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
        """Return the peak since the last call, and reset it."""
        peak = self.peak
        self.peak = self.live
        self.peak_by_tag = dict(self._live_by_tag)
        return peak

    @contextlib.contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Count allocations inside under `tag`."""
        previous, self.tag = self.tag, tag
        try:
            yield
        finally:
            self.tag = previous

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Count nothing inside."""
        previous, self._hidden = self._hidden, True
        try:
            yield
        finally:
            self._hidden = previous


def _by_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor | None:
    """Return the fake result of a frequent operator on fake tensors; None for all other calls."""
    first = args[0] if args and not kwargs else None
    if not isinstance(first, FakeTensor) or first.constant is not None:
        return None
    if func in VIEWS:
        with in_kernel_invocation_manager(first.fake_mode):
            view = func(*args)
        return FakeTensor(first.fake_mode, view, first.fake_device)
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not all(isinstance(t, FakeTensor) and t.dtype is first.dtype and t.dtype.is_floating_point for t in tensors):
        return None  # such as sums with type promotion
    if func in ELEMENTWISE and all(tensor.is_contiguous() for tensor in tensors):
        return _empty_like(first, torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    if func is aten.mm.default and first.shape[1] == args[1].shape[0]:
        return _empty_like(first, (first.shape[0], args[1].shape[1]))
    return None


def _empty_like(fake: FakeTensor, shape: Sequence[int]) -> FakeTensor:
    """Return a new contiguous fake tensor with the dtype and device of `fake`."""
    with in_kernel_invocation_manager(fake.fake_mode):
        meta = torch.empty(shape, dtype=fake.dtype, device="meta")
    return FakeTensor(fake.fake_mode, meta, fake.fake_device)


def _grouped_mm(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch._grouped_mm for fake tensors, which accepts only bfloat16; on a real CPU float32 works, too."""
    result = aten._grouped_mm.default(a.to(torch.bfloat16), b.to(torch.bfloat16), *args, **kwargs)
    return result if a.dtype is torch.bfloat16 else torch.empty_like(result, dtype=a.dtype)


@contextlib.contextmanager
def kernels(ledger: Ledger, device_type: str) -> Iterator[None]:
    """Make ops (`dispatch.Op`) allocate only their results, as kernels do.

    A CPU has no kernel for the loss, so there the reference's tensors count.
    """
    call = Op.__call__

    def run(self: Op, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self is multiplies_codes:  # a query whose answer depends on the device
            absent = device_type == "cuda" and not torch.cuda.is_available()
            with _disable_current_modes():
                return call(self, torch.empty(0, device="meta" if absent else device_type), *args, **kwargs)
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
    """Return new fake tensors for the results of `reference`; results that alias an argument alias it here, too."""
    leaves, spec = tree_flatten((args, kwargs))
    like = tuple(_Like.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    results, result_spec = _results(reference, like, spec)
    return tree_unflatten(
        [result.make(leaves) if isinstance(result, _Like) else result for result in results], result_spec
    )


@dataclass(frozen=True)
class _Like:
    """Description of a tensor: a new one, or a view into argument number `argument` at `offset` elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    argument: int | None = None
    offset: int = 0

    @classmethod
    def of(cls, tensor: Tensor, argument: int | None = None) -> _Like:
        offset = 0 if argument is None else int(tensor.storage_offset())
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, argument, offset)

    def make(self, arguments: list[Any]) -> Tensor:
        if self.argument is None:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")
        tensor = arguments[self.argument]
        if (tuple(tensor.shape), tensor.stride()) == (self.shape, self.strides):
            return tensor
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


@functools.lru_cache(maxsize=1024)  # a step calls most ops with few distinct shapes
def _results(reference: Callable[..., Any], leaves: tuple[Any, ...], spec: TreeSpec) -> tuple[list[Any], TreeSpec]:
    """Describe the results of `reference`, run on the meta device: tables that it caches must not be fake tensors."""
    arguments: dict[int, int] = {}  # by storage

    def as_meta(index: int, leaf: Any) -> Any:
        if not isinstance(leaf, _Like):
            return leaf
        meta = torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device="meta")
        arguments[meta.untyped_storage()._cdata] = index
        return meta

    with _disable_current_modes():
        arguments_and_keywords = [as_meta(index, leaf) for index, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(arguments_and_keywords, spec)
        results, result_spec = tree_flatten(reference(*args, **kwargs))
    return [
        _Like.of(result, arguments.get(result.untyped_storage()._cdata)) if isinstance(result, Tensor) else result
        for result in results
    ], result_spec
