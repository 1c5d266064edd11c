"""Convolutions and scans of packed rows: state in transformers' recurrent layers restarts with each document.

transformers writes all such layers in the same style: a forward calls `causal_conv1d_fn` and a scan, functions of its
module. Here the same forward runs with replacements for these functions. They isolate documents for the convolution and
the scan only; linears, attention and MLPs run on the packed batch. On GPUs, convolutions are
`autograd.recurrent.causal_conv`. The delta rule is flash-linear-attention's kernel with document bounds, if it is
installed and has a backward (`fla_refuses_backward`), otherwise `autograd.recurrent.delta_rule`. Mamba-2's scan is
`autograd.recurrent.chunk_scan`, since transformers' holds a matrix of states for every token. Convolution, delta rule
and Mamba-2's scan are also used for full rows. For all other functions, documents of similar length become rows of
transformers' own function.

Layers are not listed: a layer that calls one of `REPLACEMENTS` by name is replaced, and the probe (`packing`) tests
whether this isolates documents. (Mamba-2's fused kernel of mamba-ssm contains the output linear and would skip adapters
on it, so it is not used.)
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd.recurrent import causal_conv, chunk_scan, delta_rule
from ..dispatch import on_compiler
from ..ops.attention import Spans, spans
from ..utils.notices import notice
from .packed_forwards import PACKED_KEYWORDS, length_groups
from .patch_record import existing_record, record
from .transformers_versions import given_cache

Function = Callable[..., Any]

PACKAGE = "flash-linear-attention"
GPU_DEVICES = ("cuda", "xpu", "meta")  # meta: a plan counts a GPU's saved tensors


@dataclass(frozen=True)
class DocumentLayout:
    """Document bounds of a batch on the host, and index tensors made from them.

    Attributes:
        starts: start of each nonempty document in the flattened batch, then its number of tokens N.
    """

    starts: tuple[int, ...]
    device: torch.device

    @cached_property
    def bounds(self) -> Tensor:
        """int64 [documents + 1]: `starts` on the device."""
        return torch.tensor(self.starts, device=self.device)

    @cached_property
    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """Groups of `length_groups`, on the device."""
        return [(index.to(self.device), real.to(self.device)) for index, real in length_groups(list(self.starts))]

    @cached_property
    def order(self) -> Tensor:
        """int64 [N]: index of each token in the concatenation of `groups` without padding."""
        return torch.cat([index[real] for index, real in self.groups]).argsort()

    def gapped(self, gap: int) -> Tensor:
        """int64 [N]: index of each token if `gap` positions are inserted before each document."""
        lengths = self.bounds.diff()
        inserted = torch.arange(1, len(lengths) + 1, device=self.device) * gap
        return torch.arange(self.starts[-1], device=self.device) + inserted.repeat_interleave(
            lengths, output_size=self.starts[-1]
        )


@dataclass(frozen=True)
class Documents:
    """The documents of a batch of N tokens, as a layer's keyword arguments describe them.

    Attributes:
        cu_seqlens: int [documents + 1], start of each in the flattened batch, then N; documents may be empty.
        tokens: N.
        spans: `ops.attention.spans` of the documents; None: computed when needed.
    """

    cu_seqlens: Tensor
    tokens: int
    spans: Spans | None = None

    @property
    def begins(self) -> Tensor:
        """int32 [N]: start of each token's document. Does not synchronize with the device."""
        return (self.spans or spans(self.cu_seqlens.int(), self.tokens))[0]

    @property
    def layout(self) -> DocumentLayout:
        """Bounds on the host. Synchronizes with the device once a batch."""
        global _latest_layout
        bounds = self.cu_seqlens
        version = 0 if bounds.is_inference() else bounds._version  # a CUDA graph's inputs are written in place
        if _latest_layout is None or _latest_layout[0] is not bounds or _latest_layout[1] != version:
            starts = tuple(sorted(set(bounds.tolist())))
            _latest_layout = bounds, version, DocumentLayout(starts, bounds.device)
        return _latest_layout[2]


_latest_layout: tuple[Tensor, int, DocumentLayout] | None = None  # of the current batch, shared by its layers


def documents_from(kwargs: Mapping[str, Any], rows: int, length: int) -> Documents | None:
    """Return the documents that a layer's keyword arguments describe.

    Args:
        kwargs: with `cu_seq_lens_q`, int [documents + 1], if known; documents may be empty.
        rows, length: shape of the batch.

    Returns:
        None if no bounds are given, or if each row is one document. On a CPU, empty documents are not counted for this,
        and bounds of another batch also give None.
    """
    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is None or bounds.numel() == rows + 1:  # one document per row
        return None
    documents = Documents(bounds, rows * length, kwargs.get("document_spans"))
    if bounds.is_cpu and (len(documents.layout.starts) == rows + 1 or documents.layout.starts[-1] != rows * length):
        return None
    return documents


@functools.cache
def fla_missing_reason() -> str | None:
    """Return why flash-linear-attention's kernels cannot be called, or None."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: F401 (transformers calls it)
    except ModuleNotFoundError:
        return "is not installed, or older than 0.6"
    except Exception as error:  # without a GPU its import fails in many ways
        return f"cannot be imported ({type(error).__name__}: {error})"
    return None


@functools.cache
def fla_refuses_backward() -> bool:
    """Return whether flash-linear-attention raises in the backward of its gated delta rule.

    It does on Hopper with Triton 3.4 to 3.7.0, whose code would be wrong (its issue 640), unless tilelang is installed.
    Seen with 0.6.0 and Triton 3.6.
    """
    try:
        from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1  # the flags that it checks
    except Exception:  # `fla_missing_reason` says why
        return False
    wrong = IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1
    return wrong and importlib.util.find_spec("tilelang") is None


def avoids_device_sync() -> bool:
    """Return whether packed rows of a gated delta net run on a GPU without device synchronisation."""
    return fla_missing_reason() is not None or fla_refuses_backward()


def _uses_fla(x: Tensor) -> bool:
    """Return whether x goes to flash-linear-attention's gated delta rule."""
    return x.is_cuda and not avoids_device_sync()


def _gated_delta_rule(function: Function, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Gated delta rule of full rows: flash-linear-attention's kernel, else halfbyte's, else transformers'."""
    if _uses_fla(query):
        return function(query, *args, **kwargs)
    return (_delta_rule if _is_supported(kwargs) else inspect.unwrap(function))(query, *args, **kwargs)


def _is_supported(kwargs: Mapping[str, Any]) -> bool:
    """Return whether `autograd.recurrent.delta_rule` supports the arguments of a call to transformers' function."""
    stateless = kwargs.get("initial_state") is None and not kwargs.get("output_final_state")
    return stateless and bool(kwargs.get("use_qk_l2norm_in_kernel")) and not on_compiler()


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, first: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    return delta_rule(query, key, value, g, beta, first), None


def _convolve(
    function: Function,
    documents: Documents | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Causal convolution of x [B, C, T] with weight [C, K], isolated by document; None: over full rows."""
    rows, channels, length = x.shape
    activation = kwargs.get("activation")
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if x.device.type in GPU_DEVICES and activation in (None, "silu", "swish") and not trained and not on_compiler():
        begins = _row_starts(rows, length, x.device) if documents is None else documents.begins
        flat = x.transpose(1, 2).reshape(rows * length, channels)
        return causal_conv(flat, weight, bias, begins, activation is not None).view(rows, length, channels).mT
    if documents is None:
        return function(x, weight, bias, **kwargs)
    flat, gap = x.transpose(1, 2).reshape(rows * length, channels), weight.shape[-1] - 1
    indices = documents.layout.gapped(gap)
    wide = x.new_zeros(indices.numel() + gap * (len(documents.layout.starts) - 1), channels)
    wide = wide.index_copy(0, indices, flat)
    out = function(wide.T[None], weight, bias, **drop_packed_keywords(kwargs))
    return out[0].T.index_select(0, indices).view(rows, length, channels).transpose(1, 2)


def _row_starts(rows: int, length: int, device: torch.device) -> Tensor:
    """Return int32 [B·T]: start of each token's row in the flattened batch."""
    begins = torch.arange(rows, dtype=torch.int32, device=device) * length
    return begins.repeat_interleave(length, output_size=rows * length)


def _mamba2_scan(
    function: Function,
    documents: Documents | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """Mamba-2's scan by `autograd.recurrent.chunk_scan`, isolated by document; None: over full rows.

    Parameter names are transformers'. Its own function runs where a state continues, or with torch.compile.
    """
    if initial_states is not None or kwargs.get("z") is not None or on_compiler() or (D is not None and D.dim() > 1):
        return (function if documents is None else functools.partial(_Scan(), function, documents))(
            x, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, initial_states=initial_states, dt_softplus=dt_softplus,
            dt_limit=dt_limit, return_final_states=return_final_states, **kwargs,
        )  # fmt: skip
    rows, tokens = x.shape[:2]
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = F.softplus(dt) if dt_softplus else dt
    step = dt.clamp(*dt_limit).to(torch.promote_types(x.dtype, torch.float32))
    decay = A.to(step.dtype) * step
    begins = _row_starts(rows, tokens, x.device) if documents is None else documents.begins
    B, C = B.to(x.dtype), C.to(x.dtype)
    y, final = chunk_scan(x, step, decay, B, C, D, begins.view(rows, tokens))
    return (y, None if documents is not None else final.mT) if return_final_states else y


class _Scan:
    """Replacement for a scan that runs each document separately.

    Args:
        tokens: dimension of the tokens in arguments with three or more dimensions; rows are dimension 0.
        bounded: the function is flash-linear-attention's where available, and takes `cu_seqlens`.
        gated: the function is the gated delta rule.
    """

    def __init__(self, tokens: int = 1, bounded: bool = False, gated: bool = False):
        self.tokens = tokens
        self.bounded = bounded
        self.gated = gated

    def __call__(self, function: Function, documents: Documents, *args: Any, **kwargs: Any) -> Any:
        rows, length = args[0].shape[0], args[0].shape[self.tokens]
        kwargs = {key: value for key, value in kwargs.items() if key not in ("cu_seqlens", *PACKED_KEYWORDS)}

        def flat(x: Any) -> Any:
            """Flatten [B, T, ...] to [N, ...]; return other values unchanged."""
            if isinstance(x, Tensor) and x.dim() > 2 and (x.shape[0], x.shape[self.tokens]) == (rows, length):
                return _FlatTokens(x.transpose(1, self.tokens).flatten(0, 1))
            return x

        arguments, named = [flat(x) for x in args], {key: flat(x) for key, x in kwargs.items()}

        scan: Function = functools.partial(_gated_delta_rule, function) if self.gated else function

        def called(cut: Function, **keywords: Any) -> tuple[Tensor, bool]:
            cut_arguments = [self._cut(x, cut) for x in arguments]
            out = scan(*cut_arguments, **{key: self._cut(x, cut) for key, x in named.items()}, **keywords)
            state = isinstance(out, tuple)
            return (out[0] if state else out).transpose(1, self.tokens), state

        kernel = _uses_fla(args[0]) if self.gated else args[0].is_cuda and fla_missing_reason() is None
        if self.gated and not kernel and _is_supported(kwargs):
            tokens = torch.arange(rows * length, device=args[0].device)
            return _delta_rule(*args, **kwargs, first=(documents.begins == tokens).view(rows, length))
        if self.bounded and kernel:
            out, state = called(lambda x: x[None], cu_seqlens=documents.layout.bounds)
            joined = out[0]
        else:
            outputs = []
            for index, real in documents.layout.groups:
                out, state = called(lambda x, index=index: x.index_select(0, index.flatten()).unflatten(0, index.shape))
                outputs.append(out[real])
            joined = torch.cat(outputs).index_select(0, documents.layout.order)
        joined = joined.unflatten(0, (rows, length)).transpose(1, self.tokens)
        return (joined, None) if state else joined

    def _cut(self, x: Any, cut: Function) -> Any:
        return cut(x.tokens).transpose(1, self.tokens) if isinstance(x, _FlatTokens) else x


@dataclass(frozen=True)
class _FlatTokens:
    """A tensor [N, ...] with one entry per token of a batch."""

    tokens: Tensor


def _unavailable(function: Function, documents: Documents, *args: Any, **kwargs: Any) -> None:
    """Stand in for a kernel that fuses convolution and scan: None makes transformers call the separate functions."""


CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
MAMBA2_SCAN = "mamba2_chunk_scan"
# Name in transformers' modules → replacement, called with the original, the documents, and the original's arguments.
REPLACEMENTS: dict[str, Function] = {
    CONVOLUTION: _convolve,
    DELTA_RULE: _Scan(bounded=True, gated=True),
    "chunk_kimi_delta_attention": _Scan(bounded=True),
    MAMBA2_SCAN: _mamba2_scan,
    "mamba_selective_scan": _Scan(tokens=-1),
    "mamba2_split_conv1d_scan_combined": _unavailable,
    "mamba_inner_fn": _unavailable,
}


@functools.cache
def _replaced_calls(cls: Any) -> tuple[str, ...]:
    """Return the names of `REPLACEMENTS` that a class's forward calls; none for classes outside of transformers."""
    if not cls.__module__.startswith("transformers.models."):
        return ()
    function = inspect.unwrap(cls.forward)
    code = getattr(function, "__code__", None)
    return tuple(name for name in REPLACEMENTS if code is not None and name in code.co_names)


def document_forward(cls: Any, documents: Documents | None) -> Function:
    """Return a class's forward with replaced functions, isolated by document; `documents` None: for full rows."""
    full_rows: dict[str, Function] = {
        CONVOLUTION: lambda function, *args, **kwargs: _convolve(function, None, *args, **kwargs),
        DELTA_RULE: _gated_delta_rule,
        MAMBA2_SCAN: lambda function, *args, **kwargs: _mamba2_scan(function, None, *args, **kwargs),
    }
    if documents is None and not full_rows.keys() & set(_replaced_calls(cls)):
        return cls.forward
    stock: Any = inspect.unwrap(cls.forward)
    names, calls = stock.__globals__, _replaced_calls(cls)
    if documents is None:
        replacements = {name: functools.partial(full_rows[name], names[name]) for name in calls if name in full_rows}
    else:
        replacements = {name: functools.partial(REPLACEMENTS[name], names[name], documents) for name in calls}
    forward = FunctionType(stock.__code__, names | replacements, stock.__name__, stock.__defaults__, stock.__closure__)
    forward.__kwdefaults__ = stock.__kwdefaults__
    return forward


def drop_packed_keywords(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Remove document bounds from a layer's keywords: transformers' forwards reject them without their libraries."""
    return {key: value for key, value in kwargs.items() if key not in PACKED_KEYWORDS}


def notify_slow_scans(device: torch.device) -> None:
    """Log once if a library would make a model's scans faster on a GPU."""
    if device.type != "cuda" or (fla_missing_reason() is None and not fla_refuses_backward()):
        return
    why = f"{PACKAGE} {fla_missing_reason()}", "pip install 'halfbyte[scans]'"
    if fla_missing_reason() is None:
        why = f"{PACKAGE} has no backward on Hopper with this Triton", "install tilelang, or Triton 3.7.1"
    notice("scans", f"{why[0]}: halfbyte runs gated delta nets with its own kernels; {why[1]}")


def recurrent_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield unpatched modules whose forward calls one of `REPLACEMENTS`; patched ones isolate documents already."""
    for module in model.modules():
        cls: Any = type(module)
        if _replaced_calls(cls) and "forward" not in module.__dict__:
            yield module


def bind_mamba2_scans(model: nn.Module) -> int:
    """Bind `isolated_forward` to Mamba-2 layers, for full rows and documents alike; return how many are bound."""
    for module in recurrent_layers(model):
        cls: Any = type(module)
        if MAMBA2_SCAN in _replaced_calls(cls):
            record(module).scan = True
            module.forward = MethodType(isolated_forward, module)
    records = map(existing_record, model.modules())
    return sum(patched is not None and patched.scan for patched in records)


def unbind_mamba2_scan(module: nn.Module) -> None:
    """Undo `bind_mamba2_scans` for one module; does nothing on others."""
    patched = existing_record(module)
    if patched is not None and patched.scan:
        patched.scan = False
        del module.__dict__["forward"]


def isolated_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a recurrent layer's forward, with documents isolated if its keywords describe them."""
    hidden = args[0] if args else kwargs["hidden_states"]
    documents = None if given_cache(kwargs) or len(args) > 1 else documents_from(kwargs, *hidden.shape[:2])
    return document_forward(type(self), documents)(self, *args, **drop_packed_keywords(kwargs))
