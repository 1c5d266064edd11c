"""Convolutions and scans of packed rows: what runs through a row in transformers' own layers starts anew with each
document.

transformers writes every such layer alike: a forward that calls `causal_conv1d_fn`, then a scan, functions of its file.
Here that very forward runs with others in their place. They take the documents out of their rows for the convolution
and the scan alone; the linears around these, attention and MLPs see the packed batch. Convolutions on GPUs are
`autograd.recurrent`. The delta rule is flash-linear-attention's kernel, which reads where documents begin, where that
is installed and has a backward (`refuses_backward`), and `autograd.recurrent` elsewhere. Both are so of whole rows,
too. For all other functions documents of like length become rows of transformers' own, whatever library that is of.

No layer is listed: what calls one of `STAND_INS` by name is such a layer, and the probe (`isolation`) asks whether that
was enough. (Mamba-2's fused kernel of mamba-ssm, which has the output's linear inside, is not taken: adapters on that
linear would be left out.)
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.recurrent import causal_conv, delta_rule
from ..dispatch import on_compiler
from ..ops.attention import Spans, spans
from ..utils.notices import notice
from .keywords import cache_of
from .packed_forwards import OF_PACKED, groups

Function = Callable[..., Any]

PACKAGE = "flash-linear-attention"
ON_GPUS = ("cuda", "xpu", "meta")  # a plan counts what a GPU keeps


@dataclass(frozen=True)
class Places:
    """Where documents are, as the host knows it.

    Attributes:
        all: where each that has tokens begins in the flattened batch, then its tokens N.
    """

    all: tuple[int, ...]
    device: torch.device

    @cached_property
    def bounds(self) -> Tensor:
        """int64 [documents + 1]: the same on the device."""
        return torch.tensor(self.all, device=self.device)

    @cached_property
    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """As `unpacking.groups` gives them."""
        return [(index.to(self.device), real.to(self.device)) for index, real in groups(list(self.all))]

    @cached_property
    def order(self) -> Tensor:
        """int64 [N]: where each token stands behind one another in `groups`, padding left out."""
        return torch.cat([index[real] for index, real in self.groups]).argsort()

    def gapped(self, gap: int) -> Tensor:
        """int64 [N]: where each token goes if `gap` places are left free before each document."""
        lengths = self.bounds.diff()
        before = torch.arange(1, len(lengths) + 1, device=self.device) * gap
        return torch.arange(self.all[-1], device=self.device) + before.repeat_interleave(
            lengths, output_size=self.all[-1]
        )


@dataclass(frozen=True)
class Documents:
    """What a layer is told of the documents of its batch of N tokens.

    Attributes:
        told: int [documents + 1], where each begins in the flattened batch, then N; documents may be empty.
        tokens: N.
        spans: of `ops.attention.spans`; None: worked out where they are needed.
    """

    told: Tensor
    tokens: int
    spans: Spans | None = None

    @property
    def begins(self) -> Tensor:
        """int32 [N]: where the document of each token begins. Waits for nothing on the device."""
        return (self.spans or spans(self.told.int(), self.tokens))[0]

    @property
    def places(self) -> Places:
        """Waits for the device, once a batch."""
        global _latest
        version = 0 if self.told.is_inference() else self.told._version  # a graph's inputs are written in place
        if _latest is None or _latest[0] is not self.told or _latest[1] != version:
            found = tuple(sorted(set(self.told.tolist())))
            _latest = self.told, version, Places(found, self.told.device)
        return _latest[2]


_latest: tuple[Tensor, int, Places] | None = None  # of the batch whose layers run: each of them asks


def documents_of(kwargs: Mapping[str, Any], rows: int, length: int) -> Documents | None:
    """The documents that a layer's keyword arguments tell of.

    Args:
        kwargs: with `cu_seq_lens_q`, int [documents + 1], where they are known; documents may be empty.
        rows, length: of the batch.

    Returns:
        None where nothing is known, or as many are told of as there are rows; on a CPU also where that is so without
        the empty ones, and where they are not of this batch.
    """
    told = kwargs.get("cu_seq_lens_q")
    if told is None or told.numel() == rows + 1:  # as many as rows
        return None
    found = Documents(told, rows * length, kwargs.get("document_spans"))
    if told.is_cpu and (len(found.places.all) == rows + 1 or found.places.all[-1] != rows * length):
        return None
    return found


@functools.cache
def missing() -> str | None:
    """Why flash-linear-attention's kernels cannot be called; None: they can."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: F401 (transformers calls it)
    except ModuleNotFoundError:
        return "is not installed, or older than 0.6"
    except Exception as error:  # without a GPU its import fails in many ways
        return f"cannot be imported ({type(error).__name__}: {error})"
    return None


@functools.cache
def refuses_backward() -> bool:
    """Whether flash-linear-attention raises in the backward of its gated delta rule: on Hopper with Triton 3.4 to
    3.7.0, whose code would be wrong (its issue 640), unless tilelang is there. Seen with 0.6.0 and Triton 3.6."""
    try:
        from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1  # what it asks itself
    except Exception:
        return False
    wrong = IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1
    return wrong and importlib.util.find_spec("tilelang") is None


def waits_for_nothing() -> bool:
    """Whether packed rows of a gated delta net, on a GPU, are computed without asking the device for anything."""
    return missing() is not None or refuses_backward()


def _runs_kernel(x: Tensor) -> bool:
    """Whether x goes to flash-linear-attention's gated delta rule."""
    return x.is_cuda and not waits_for_nothing()


def _gated(own: Function, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """transformers' gated delta rule of rows, by ours where they begin here and no kernel of the library is for it."""
    if _runs_kernel(query):
        return own(query, *args, **kwargs)
    return (_delta_rule if _is_ours(kwargs) else inspect.unwrap(own))(query, *args, **kwargs)


def _is_ours(kwargs: Mapping[str, Any]) -> bool:
    """Whether `autograd.recurrent` computes what a call of transformers' function asks for."""
    stateless = kwargs.get("initial_state") is None and not kwargs.get("output_final_state")
    return stateless and bool(kwargs.get("use_qk_l2norm_in_kernel")) and not on_compiler()


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, first: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    return delta_rule(query, key, value, g, beta, first), None


def _convolve(
    own: Function, documents: Documents | None, x: Tensor, weight: Tensor, bias: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """A causal convolution of x [B, C, T] with weight [C, K], over each document alone; None: over whole rows."""
    rows, channels, length = x.shape
    activation = kwargs.get("activation")
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if x.device.type in ON_GPUS and activation in (None, "silu", "swish") and not trained and not on_compiler():
        begins = _row_begins(rows, length, x.device) if documents is None else documents.begins
        flat = x.transpose(1, 2).reshape(rows * length, channels)
        return causal_conv(flat, weight, bias, begins, activation is not None).view(rows, length, channels).mT
    if documents is None:
        return own(x, weight, bias, **kwargs)
    flat, gap = x.transpose(1, 2).reshape(rows * length, channels), weight.shape[-1] - 1
    places = documents.places.gapped(gap)
    wide = x.new_zeros(places.numel() + gap * (len(documents.places.all) - 1), channels)
    wide = wide.index_copy(0, places, flat)
    out = own(wide.T[None], weight, bias, **without_bounds(kwargs))
    return out[0].T.index_select(0, places).view(rows, length, channels).transpose(1, 2)


def _whole_rows(own: Function, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _convolve(own, None, x, *args, **kwargs)


def _row_begins(rows: int, length: int, device: torch.device) -> Tensor:
    """int32 [B·T]: where the row of each token begins."""
    begins = torch.arange(rows, dtype=torch.int32, device=device) * length
    return begins.repeat_interleave(length, output_size=rows * length)


class _Scan:
    """A scan, over each document alone: of its arguments, tensors of the batch's tokens are taken apart.

    Args:
        tokens: the dimension of the tokens, in all that have three dimensions or more; that of rows is 0.
        bounded: flash-linear-attention's function, which transformers calls where it can, reads `cu_seqlens`.
        gated: it is the gated delta rule, which `_gated` computes.
    """

    def __init__(self, tokens: int = 1, bounded: bool = False, gated: bool = False):
        self.tokens, self.bounded, self.gated = tokens, bounded, gated

    def __call__(self, own: Function, documents: Documents, *args: Any, **kwargs: Any) -> Any:
        rows, length = args[0].shape[0], args[0].shape[self.tokens]
        kwargs = {key: value for key, value in kwargs.items() if key not in ("cu_seqlens", *OF_PACKED)}

        def flat(x: Any) -> Any:
            """[N, ...] of [B, T, ...]; anything else as it is."""
            if isinstance(x, Tensor) and x.dim() > 2 and (x.shape[0], x.shape[self.tokens]) == (rows, length):
                return _Flat(x.transpose(1, self.tokens).flatten(0, 1))
            return x

        given, named = [flat(x) for x in args], {key: flat(x) for key, x in kwargs.items()}

        function: Function = functools.partial(_gated, own) if self.gated else own

        def called(cut: Function, **more: Any) -> tuple[Tensor, bool]:
            parts = [self._cut(x, cut) for x in given]
            out = function(*parts, **{key: self._cut(x, cut) for key, x in named.items()}, **more)
            state = isinstance(out, tuple)
            return (out[0] if state else out).transpose(1, self.tokens), state

        kernel = _runs_kernel(args[0]) if self.gated else args[0].is_cuda and missing() is None
        if self.gated and not kernel and _is_ours(kwargs):
            tokens = torch.arange(rows * length, device=args[0].device)
            return _delta_rule(*args, **kwargs, first=(documents.begins == tokens).view(rows, length))
        if self.bounded and kernel:
            out, state = called(lambda x: x[None], cu_seqlens=documents.places.bounds)
            joined = out[0]
        else:
            outputs = []
            for index, real in documents.places.groups:
                out, state = called(lambda x, index=index: x.index_select(0, index.flatten()).unflatten(0, index.shape))
                outputs.append(out[real])
            joined = torch.cat(outputs).index_select(0, documents.places.order)
        joined = joined.unflatten(0, (rows, length)).transpose(1, self.tokens)
        return (joined, None) if state else joined

    def _cut(self, x: Any, cut: Function) -> Any:
        return cut(x.tokens).transpose(1, self.tokens) if isinstance(x, _Flat) else x


@dataclass(frozen=True)
class _Flat:
    """A tensor [N, ...] of a batch's tokens."""

    tokens: Tensor


def _unfused(own: Function, documents: Documents, *args: Any, **kwargs: Any) -> None:
    """In place of a kernel that has convolution and scan in one: transformers then calls these."""


CONVOLUTION, GATED = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
# Name in transformers' files → what is called in its place, with it and the documents before its arguments.
STAND_INS: dict[str, Function] = {
    CONVOLUTION: _convolve,
    GATED: _Scan(bounded=True, gated=True),
    "chunk_kimi_delta_attention": _Scan(bounded=True),
    "mamba2_chunk_scan": _Scan(),
    "mamba_selective_scan": _Scan(tokens=-1),
    "mamba2_split_conv1d_scan_combined": _unfused,
    "mamba_inner_fn": _unfused,
}


@functools.cache
def _names(cls: Any) -> tuple[str, ...]:
    """Those of `STAND_INS` that a class's forward calls; none of a class outside transformers."""
    if not cls.__module__.startswith("transformers.models."):
        return ()
    function = inspect.unwrap(cls.forward)
    code = getattr(function, "__code__", None)
    return tuple(name for name in STAND_INS if code is not None and name in code.co_names)


def forward_of(cls: Any, documents: Documents | None) -> Function:
    """The forward of a class, over each document alone; None: over whole rows."""
    whole: dict[str, Function] = {CONVOLUTION: _whole_rows, GATED: _gated}  # what is ours of whole rows, too
    if documents is None and not whole.keys() & set(_names(cls)):
        return cls.forward
    function: Any = inspect.unwrap(cls.forward)
    names = function.__globals__
    if documents is None:
        own = {name: functools.partial(whole[name], names[name]) for name in _names(cls) if name in whole}
    else:
        own = {name: functools.partial(STAND_INS[name], names[name], documents) for name in _names(cls)}
    made = FunctionType(function.__code__, names | own, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def without_bounds(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a layer's forward of transformers gets: told of bounds it refuses them without its libraries."""
    return {key: value for key, value in kwargs.items() if key not in OF_PACKED}


def say_what_is_missing(device: torch.device) -> None:
    """Once, that the scans of a model could be faster on a GPU."""
    if device.type != "cuda" or (missing() is None and not refuses_backward()):
        return
    why = f"{PACKAGE} {missing()}", "pip install 'halfbyte[scans]'"
    if missing() is None:
        why = f"{PACKAGE} has no backward on Hopper with this Triton", "install tilelang, or Triton 3.7.1"
    notice("scans", f"{why[0]}: gated delta nets run as products of torch's, more slowly; {why[1]}")


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of `model` that have such a forward and run it; patched ones keep documents apart already."""
    for module in model.modules():
        cls: Any = type(module)
        if _names(cls) and "forward" not in module.__dict__:
            yield module


def apart(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of such a layer, its documents apart where it is told of them."""
    hidden = args[0] if args else kwargs["hidden_states"]
    documents = None if cache_of(kwargs) or len(args) > 1 else documents_of(kwargs, *hidden.shape[:2])
    return forward_of(type(self), documents)(self, *args, **without_bounds(kwargs))
