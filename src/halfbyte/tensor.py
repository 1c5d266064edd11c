"""QuantizedTensor: a tensor subclass whose storage is the parts of a format.

A frozen `nn.Linear`, with or without PEFT's LoRA,
works with a quantized weight unchanged. Operations follow four rules:

- `F.linear` and `F.embedding` run on the parts; detach, clone, device moves and sharding map over the parts.
- An operation that returns new tensors (norms, comparisons, matmuls) reads a dequantized copy. The first one logs a
  notice, since the copy takes the memory that quantization saved. Operations that PEFT needs log nothing.
- `copy_`, `weight.data = values` and arithmetic in place (`weight += values`) quantize. Every other write raises a
  ModelError, as does `requires_grad_(True)`.
- A view (transpose, slice, reshape) is a `ReadOnlyView` of a dequantized copy. A write to it raises a ModelError, since
  it would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .autograd.linear import decode, quantized_linear
from .formats import Format, from_spec
from .formats.base import DECODED
from .utils.errors import ModelError
from .utils.notices import notice

aten = torch.ops.aten
ALIGNMENT = 16  # bytes; every part starts at a multiple of it in a shard's buffer
# views by rows, which are no-ops on a shard of bytes
STRUCTURAL = (aten.view.default, aten.slice.Tensor, aten.detach.default, aten.alias.default, aten.as_strided.default)


class QuantizedTensor(Tensor):
    """A frozen floating-point tensor stored in a quantized format.

    Args:
        format: storage format.
        parts: the stored tensors, as listed by `format.part_specs(shape)`.
        shape: shape of the values.
        dtype: dtype of the values; the default of `dequantize()`.
    """

    format: Format
    name = ""  # name of the parameter in its model, set by the loader and used in errors

    @staticmethod
    def __new__(cls, format: Format, parts: dict[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype):
        device = next(iter(parts.values())).device
        return Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)

    def __init__(self, format: Format, parts: dict[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype):
        self.format = format
        self._names = tuple(parts)
        vars(self).update(parts)

    @classmethod
    def quantize(cls, weight: Tensor, format: Format) -> QuantizedTensor:
        """Quantize `weight` (any shape; a float dtype) on its device; on "meta", create meta parts."""
        if weight.is_meta:
            specs = format.part_specs(tuple(weight.shape))
            parts = {name: torch.empty(size, dtype=dtype, device="meta") for name, (size, dtype) in specs.items()}
            return cls(format, parts, tuple(weight.shape), weight.dtype)
        values = weight.detach().float() if weight.dtype is torch.float64 else weight.detach()
        return cls(format, format.quantize(values), tuple(weight.shape), weight.dtype)

    @classmethod
    def quantize_stack(cls, weights: Iterable[Tensor], format: Format, shape: tuple[int, ...]) -> QuantizedTensor:
        """Quantize matrices [N, K] to a stack of `shape` [E, N, K], one at a time; each is freed before the next.

        Raises:
            ModelError: a matrix has NaN or Inf, or the format does not support stacks of this shape.
        """
        dtypes: set[torch.dtype] = set()

        def matrices() -> Iterator[Tensor]:
            for weight in weights:
                dtypes.add(weight.dtype)
                yield weight.detach()

        stacked = format.stacked()
        parts = stacked.quantize_stack(matrices(), shape)
        return cls(stacked, parts, shape, dtypes.pop())

    @property
    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        return {name: getattr(self, name) for name in self._names}

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Stored bytes, scales included."""
        return sum(stored.numel() * stored.element_size() for stored in self.parts.values())

    @property
    def is_freed(self) -> bool:
        """Whether FSDP2 has freed its memory until the next all-gather."""
        return any(stored.untyped_storage().nbytes() == 0 < stored.numel() for stored in self.parts.values())

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Values in `dtype` (default: the tensor's own), rounded once from fp32.

        Raises:
            ModelError: `dtype` is not a float dtype of 16, 32 or 64 bits.
        """
        return decode(self.format, self.parts, tuple(self.shape), dtype or self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        return f"QuantizedTensor({self.format.spec}, shape={shape}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self):
        return list(self._names), (self.format.spec, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, outer_size, outer_stride):
        return cls(from_spec(meta[0]), inner, outer_size, meta[1])

    def _stable_hash_for_caching(self) -> str:
        """Cache key for torch.compile: the properties that a compiled graph depends on."""
        return f"{self.format.spec} {tuple(self.shape)} {self.dtype} {self.device}"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.linear and _is_weight(*args, **kwargs):
            return quantized_linear(*args, **kwargs)
        if function is F.embedding:
            return _embedding(*args, **kwargs)
        handler = _FUNCTIONS.get(function)
        if handler is not None:
            return handler(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if torch.is_inference_mode_enabled() and not any(map(_is_inference, args)):
                # in inference mode, torch fails on views of a wrapper subclass
                with torch.inference_mode(False), torch.no_grad():
                    return function(*args, **kwargs)
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        handler = _HANDLERS.get(function)
        if handler is not None:
            return handler(function, *args, **kwargs)
        if function.namespace != "aten":
            raise ModelError(f"{function} is not defined on a quantized weight", "pass weight.dequantize() to it")
        if function._can_decompose():  # inference mode does not decompose `to`, `reshape` and others before dispatch
            return function.decompose(*args, **kwargs)
        aliases = _aliased_arguments(function, args, kwargs)
        if any(aliases.values()):
            raise ModelError(
                f"{function} cannot change a quantized weight in place ({next(iter(aliases))!r})",
                "quantize new values by weight.copy_(values) or weight.data = values; merge adapters by "
                "`halfbyte merge`",
            )
        notice("quantized-read", f"{function} reads a quantized weight: each such operation dequantizes it")
        # Autograd transposes the saved operands of a matmul, and only reads them.
        if not aliases or torch._C._current_graph_task_id() != -1:
            return _read(function, *args, **kwargs)
        return _view(function, *args, **kwargs)

    def map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> QuantizedTensor:
        """A tensor with the same format and shape whose parts are `function(part)`."""
        parts = {name: function(stored) for name, stored in self.parts.items()}
        mapped = QuantizedTensor(self.format, parts, tuple(self.shape), dtype or self.dtype)
        mapped.name = self.name
        return mapped

    def split_for(self, dim: int, n: int) -> list[QuantizedTensor]:
        """Split into `n` equal tensors along `dim`, bit-equal and each in its own memory; see `Format.split`."""
        format_, shards = self.format.split(self.parts, tuple(self.shape), dim, n)
        shape = tuple(size // n if axis == dim else size for axis, size in enumerate(self.shape))
        return [QuantizedTensor(format_, parts, shape, self.dtype) for parts in shards]

    def to_bytes(self, chunks: int = 1) -> Tensor:
        """uint8 [chunks, length]: the bytes of all parts, padded to equal chunks."""
        offsets, total = part_offsets(self.format, tuple(self.shape))
        length = -(-total // (chunks * ALIGNMENT)) * ALIGNMENT
        buffer = torch.zeros(chunks * length, dtype=torch.uint8, device=self.device)
        for name, stored in self.parts.items():
            raw = stored.contiguous().view(-1).view(torch.uint8)
            buffer[offsets[name] : offsets[name] + raw.numel()] = raw
        return buffer.view(chunks, length)

    @classmethod
    def from_bytes(cls, raw: Tensor, format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> QuantizedTensor:
        """Inverse of `to_bytes`; the parts are views of `raw`."""
        offsets, _ = part_offsets(format, shape)
        parts = {}
        for name, (size, part_dtype) in format.part_specs(shape).items():
            end = offsets[name] + math.prod(size) * part_dtype.itemsize
            parts[name] = raw[offsets[name] : end].view(part_dtype).view(size)
        return cls(format, parts, shape, dtype)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        raise ModelError("FSDP2 tried to all-gather an unsharded quantized tensor", "shard modules with fully_shard")

    fsdp_post_all_gather = fsdp_pre_all_gather


class ReadOnlyView(Tensor):
    """View of a dequantized copy of a quantized weight. Operations give plain tensors, and views of it this class."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        aliases = _aliased_arguments(function, args, kwargs)
        if any(aliases.values()):
            raise ModelError(
                f"{function} would change a view of a dequantized copy, and not the quantized weight",
                "change a clone, and quantize it by weight.copy_(values)",
            )
        with torch._C._DisableTorchDispatch():
            result = function(*args, **kwargs)
        return _read_only(result) if aliases else result


def _read_only(result: Any) -> Any:
    """Return plain views as `ReadOnlyView`s. Views of fake tensors, which have no data, stay as they are."""
    return tree_map_only(Tensor, lambda view: view.as_subclass(ReadOnlyView) if type(view) is Tensor else view, result)


class QuantizedShard(Tensor):
    """One rank's shard of a QuantizedTensor under FSDP2: an equal slice of its bytes.

    Slices ignore row and block boundaries, nested scales included: frozen parts are only read after an all-gather, so a
    shard cannot be dequantized. `rows` is the number of rows that FSDP2 assumes the shard to hold. Operations of
    `QuantizedTensor` create shards, so `fully_shard` also works in programs that do not import `parallel`.
    """

    def __new__(cls, raw: Tensor, spec: str, full_shape: tuple[int, ...], rows: int, dtype: torch.dtype):
        shape = torch.Size((rows, *full_shape[1:]))
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=raw.device)

    def __init__(self, raw: Tensor, spec: str, full_shape: tuple[int, ...], rows: int, dtype: torch.dtype):
        self.raw = raw
        self.spec = spec
        self.full_shape = tuple(full_shape)
        self.rows = rows

    def __tensor_flatten__(self):
        return ["raw"], (self.spec, self.full_shape, self.rows, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, outer_size, outer_stride):
        return cls(inner["raw"], *meta)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedShard({self.spec}, {self.raw.numel()} bytes of a {self.full_shape} tensor)"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):  # type: ignore[override]
        shard, kwargs = args[0], kwargs or {}
        if function is aten.copy_.default:
            shard.raw.copy_(args[1].raw)
            return shard
        # FSDP2 views, narrows and pads shards by rows; these are no-ops on equal byte slices.
        if function in STRUCTURAL:
            return shard._with(shard.raw)
        if function is aten.clone.default:
            return shard._with(shard.raw.clone())
        if function is aten.empty_like.default:
            return shard._with(torch.empty_like(shard.raw, device=kwargs.get("device")))
        if function is aten.new_empty.default:  # for a rank without rows: the bytes are never read
            return shard._with(torch.zeros_like(shard.raw))
        if function in (aten._to_copy.default, aten._pin_memory.default):
            kwargs.pop("dtype", None)
            return shard._with(function(shard.raw, *args[1:], **kwargs))
        if function is aten.is_pinned.default:
            return shard.raw.is_pinned()
        raise ModelError(f"{function} is not defined on a shard of a quantized weight")

    def _with(self, raw: Tensor) -> QuantizedShard:
        return QuantizedShard(raw, self.spec, self.full_shape, self.rows, self.dtype)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.raw,), (self.spec, self.full_shape, self.dtype)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is not None:  # FSDP2 refilled the gathered buffer in place; the parts are views of it
            return None
        spec, full_shape, dtype = metadata
        return QuantizedTensor.from_bytes(outputs[0].view(-1), from_spec(spec), full_shape, dtype), outputs


def part_offsets(format: Format, shape: tuple[int, ...]) -> tuple[dict[str, int], int]:
    """Byte offset of each part in a flat buffer, and the buffer's length."""
    offsets, end = {}, 0
    for name, (size, dtype) in format.part_specs(shape).items():
        offsets[name] = end
        end += -(-math.prod(size) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _aliased_arguments(function: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[Tensor, bool]:
    """Return the quantized weights and views of them that `function` writes to (True) or returns a view of (False)."""
    aliases: dict[Tensor, bool] = {}
    for position, argument in enumerate(function._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if argument.alias_info is not None and isinstance(tensor, (QuantizedTensor, ReadOnlyView)):
                aliases[tensor] = argument.alias_info.is_write
    return aliases


def _is_weight(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the weight, and no other argument of `F.linear`, is quantized."""
    return [isinstance(tensor, QuantizedTensor) for tensor in (input, weight, bias)] == [False, True, False]


def _embedding(
    index: Tensor, weight: QuantizedTensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """`F.embedding` on a frozen quantized table; dequantizes only the rows that are looked up."""
    if max_norm is not None:
        raise ModelError("max_norm would renormalize a quantized table in place", "leave max_norm unset")
    decoded = torch.float32 if weight.dtype is torch.float64 else weight.dtype
    rows = weight.format.dequantize_rows(weight.parts, tuple(weight.shape), index.reshape(-1), decoded)
    return rows.to(weight.dtype).view(*index.shape, weight.shape[1])


def _to_copy(function, tensor: QuantizedTensor, *, dtype=None, device=None, non_blocking=False, **kwargs):
    """`.to(...)`: the dtype changes the dtype of dequantized values; the device moves the parts."""
    if dtype is not None and dtype not in DECODED:
        raise ModelError(f"a quantized weight has no values in {dtype} ({tensor!r})", "convert weight.dequantize()")
    return tensor.map(lambda stored: stored.to(device=device, non_blocking=non_blocking, copy=True), dtype)


def _split(function, tensor: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedShard]:
    if dim != 0:
        raise ModelError("a quantized weight is sharded by its first dimension only", "use FSDP2's default placement")
    slices = tensor.to_bytes(-(-tensor.shape[0] // size))
    return [QuantizedShard(raw, tensor.format.spec, tuple(tensor.shape), size, tensor.dtype) for raw in slices]


def _new_shard(function, tensor: QuantizedTensor, size, **kwargs) -> QuantizedShard:
    """`new_zeros`, by which FSDP2 allocates a shard before it copies into it."""
    raw = torch.zeros_like(tensor.to_bytes(-(-tensor.shape[0] // size[0]))[0])
    return QuantizedShard(raw, tensor.format.spec, tuple(tensor.shape), size[0], tensor.dtype)


def _copy(function, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, QuantizedTensor):
        return target.copy_(source.dequantize(), non_blocking)
    if not isinstance(source, QuantizedTensor):
        source = QuantizedTensor.quantize(source.to(target.device, target.dtype), target.format)
    for stored, new in zip(target.parts.values(), source.parts.values(), strict=True):
        stored.copy_(new, non_blocking=non_blocking)
    return target


def _read(function, *args: Any, **kwargs: Any) -> Any:
    """Run `function` on dequantized copies."""
    args, kwargs = tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, (args, kwargs))
    return function(*args, **kwargs)


def _view(function, *args: Any, **kwargs: Any) -> Any:
    """Return views of dequantized copies."""
    return _read_only(_read(function, *args, **kwargs))


def _update(function, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Change the dequantized values in place, and quantize them."""
    if not isinstance(tensor, QuantizedTensor):
        return _read(function, tensor, *args, **kwargs)
    values = tensor.dequantize()
    _read(function, values, *args, **kwargs)
    _notice_rounding(tensor)
    return _copy(function, tensor, values)


def _equal(function, left: Tensor, right: Tensor) -> bool:
    """`torch.equal`: compares the parts of tensors with one format, and dequantized values otherwise."""
    if isinstance(left, QuantizedTensor) and isinstance(right, QuantizedTensor):
        comparable = (left.format, left.shape, left.dtype) == (right.format, right.shape, right.dtype)
        if comparable and all(torch.equal(stored, right.parts[name]) for name, stored in left.parts.items()):
            return True
    return _read(function, left, right)


def _expert(function, tensor: QuantizedTensor, dim: int, index: int) -> Tensor:
    """`stack[e]`: one matrix of a stack [E, N, K], as views of the stack's parts."""
    if tensor.dim() != 3 or dim != 0:
        return _view(function, tensor, dim, index)
    index = index + len(tensor) if index < 0 else index
    if not 0 <= index < len(tensor):
        raise IndexError(f"expert {index} of a stack of {len(tensor)}")
    format_, parts = tensor.format.expert(tensor.parts, tuple(tensor.shape), index)
    return QuantizedTensor(format_, parts, tuple(tensor.shape[1:]), tensor.dtype)


def _same_shape_view(function, tensor: QuantizedTensor, size: list[int]) -> Tensor:
    if tuple(size) != tuple(tensor.shape):
        return _view(function, tensor, size)
    return tensor.map(aten.alias.default)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default), lambda function, tensor: tensor.map(function)),
    aten.clone.default: lambda function, tensor, **kwargs: tensor.map(torch.clone),
    aten.as_strided.default: lambda function, tensor, *args, **kwargs: tensor.map(aten.alias.default),
    aten.view.default: _same_shape_view,
    aten._to_copy.default: _to_copy,
    aten._pin_memory.default: lambda function, tensor, *args: tensor.map(Tensor.pin_memory),
    aten.empty_like.default: lambda function, tensor, *, dtype=None, device=None, **kwargs: tensor.map(
        lambda stored: torch.empty_like(stored, device=device), dtype
    ),
    aten.copy_.default: _copy,
    **dict.fromkeys((aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor), _update),
    # No notice for these: DoRA adds the low-rank product to the weight to compute row norms, and PEFT's own forward of
    # parameter wrappers adds it to a stack.
    aten.add.Tensor: _read,
    aten.baddbmm.default: _read,
    aten.addmm.default: _read,
    aten.equal.default: _equal,
    aten.is_pinned.default: lambda function, tensor, *args: all(stored.is_pinned() for stored in tensor.parts.values()),
    aten.split.Tensor: _split,
    aten.select.int: _expert,
    aten.new_zeros.default: _new_shard,
}


def _is_inference(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.is_inference()


def _detach(tensor: QuantizedTensor) -> Tensor:
    """`detach`; in inference mode torch fails on wrapper subclasses, so map over the parts."""
    if torch.is_inference_mode_enabled():
        return tensor.map(Tensor.detach)
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.detach(tensor)


def _export(tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> None:
    """Refuse `__dlpack__`: torch would export address 0."""
    raise ModelError(f"a quantized weight cannot be exported by dlpack ({tensor!r})", "export weight.dequantize()")


def _requires_grad(tensor: QuantizedTensor, requires_grad: bool = True) -> Tensor:
    """`requires_grad_`; raises a ModelError for True."""
    if requires_grad:
        fix = "train an adapter on it (target_modules), or leave it in 16 bits (llm_int8_skip_modules)"
        raise ModelError(f"{tensor.name or 'a quantized weight'} is frozen and gets no gradient ({tensor!r})", fix)
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.requires_grad_(tensor, False)


def _set_requires_grad(tensor: QuantizedTensor, requires_grad: bool) -> None:
    """Handle `tensor.requires_grad = …`. Returns None: torch would never free a tensor that a setter returns."""
    _requires_grad(tensor, requires_grad)


def _notice_rounding(tensor: QuantizedTensor) -> None:
    notice(
        "quantized-data",
        f"values written to a quantized weight are rounded to {tensor.format.spec}; `halfbyte merge` merges an "
        "adapter without rounding",
    )


def _set_data(tensor: QuantizedTensor, values: Tensor) -> None:
    """`tensor.data = values`: share the parts of quantized values, or quantize plain values.

    As with a plain tensor, the old parts are not overwritten, and device and dtype become those of the values.
    Exception: assigning values of the same format does not change the dtype, because PEFT assigns
    `weight.data.to(torch.float32)`.
    """
    if isinstance(values, QuantizedTensor) and (values.format, values.shape) == (tensor.format, tensor.shape):
        values = values.map(lambda stored: stored, tensor.dtype)
    if not isinstance(values, QuantizedTensor):
        if values.shape != tensor.shape:
            raise ModelError(f"values {tuple(values.shape)} do not fit {tensor!r}", "assign values of its shape")
        _notice_rounding(tensor)
        values = QuantizedTensor.quantize(values, tensor.format)
    with torch._C.DisableTorchFunctionSubclass():
        # Sets shape, dtype and device, not the parts, which are attributes.
        Tensor.data.__set__(tensor, values)  # type: ignore[attr-defined]
    for name in tensor._names:
        delattr(tensor, name)
    tensor.__init__(values.format, values.parts, tuple(values.shape), values.dtype)  # type: ignore[misc]


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.detach: _detach,
    torch.detach: _detach,
    Tensor.requires_grad_: _requires_grad,
    Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.__dlpack__: _export,
    Tensor.share_memory_: lambda tensor: [stored.share_memory_() for stored in tensor.parts.values()] and tensor,
    Tensor.data_ptr: lambda tensor: next(iter(tensor.parts.values())).data_ptr(),  # address of the codes
}
