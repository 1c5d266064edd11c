"""Calls of every op, over the shapes, dtypes, ranks and sizes that dispatch tells apart, on tensors without data.

What a call launches is up to dispatch; `benchmarks.kernel_matrix` writes it down and compiles it.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.autograd.attention import AMPERE, HOPPER, WIDEST
from halfbyte.dispatch import Op
from halfbyte.formats import Blockwise4, Format, from_spec
from halfbyte.kernels.device import device_of
from halfbyte.kernels.selection import empty, slot, weight4
from halfbyte.ops.attention import Scores
from halfbyte.ops.cross_entropy import Objective
from halfbyte.ops.decode_layers import DecoderLayer, Projections, Stack, Weight4
from halfbyte.ops.experts import LowRank, StackedWeight, Unit
from halfbyte.ops.float8 import E4M3, E5M2, TILE
from halfbyte.ops.glu import ACTIVATIONS
from halfbyte.ops.lora_glu import Factors
from halfbyte.ops.optimizer import ROUNDINGS, RULES, SETTINGS, TRUSTS, Coefficients, Parameters
from halfbyte.ops.optimizer_state import STORAGES
from halfbyte.ops.paged_attention import Shared


def on_gpu(name: str) -> SimpleNamespace:
    """The ops of this module as GPUs run them."""
    module = importlib.import_module(f"{ops.__name__}.{name}")
    return SimpleNamespace(**{key: op.on("cuda") for key, op in vars(module).items() if isinstance(op, Op)})


attention, bitplane, blockwise4, blockwise_cuda = map(on_gpu, ("attention", "bitplane", "blockwise4", "blockwise_cuda"))
causal_conv, chunk_scan, losses, delta_net = map(on_gpu, ("causal_conv", "chunk_scan", "cross_entropy", "delta_net"))
decode_attention, decode_layers = map(on_gpu, ("decode_attention", "decode_layers"))
divergence, e2m1, experts, float8, glu = map(on_gpu, ("divergence", "e2m1", "experts", "float8", "glu"))
hqq, int4, int8, linear, lora_glu, lora_read = map(on_gpu, ("hqq", "int4", "int8", "linear", "lora_glu", "lora_read"))
muon, norms, optimizer, paged_attention = map(on_gpu, ("muon", "norms", "optimizer", "paged_attention"))
rope, sample = map(on_gpu, ("rope", "sample"))

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FP32, FP16, BF16)
WIDTHS = (FP32, BF16)  # of what moves bytes alone: fp16 is as wide as bf16, and easier
RANK_ENDS = (4, 16, 32, 64)
HEADS = (64, 80, 96, 128, 192, 256)
HIDDEN, INNER, ROWS = 4096, 14336, 8192


@dataclass(frozen=True)
class Case:
    """A call of an op.

    Args:
        name: of its class, for people.
        call: what makes its tensors and runs it.
        dtype: of its activations.
        everyday: whether `make test` compiles it too.
    """

    name: str
    call: Callable[[], Any]
    dtype: torch.dtype
    everyday: bool = False


def apart(first: Iterable, *others: Iterable) -> list[tuple]:
    """Each value of `first` with the first ones of the others; and, for its last, each other value by itself.

    Kernels that are bound by memory hold few values of each: what they take does not multiply.
    """
    firsts, (*rests,) = list(first), [list(other) for other in others]
    heads = [rest[0] for rest in rests]
    found = [(value, *heads) for value in firsts]
    for i, rest in enumerate(rests):
        found += [(firsts[-1], *heads[:i], value, *heads[i + 1 :]) for value in rest[1:]]
    return list(dict.fromkeys(found))


def norm_cases() -> Iterator[Case]:
    for dtype, width in apart(WIDTHS, (HIDDEN, 128, 16384)):
        x, weight, rstd = empty(2, 512, width, dtype=dtype), empty(width, dtype=dtype), empty(2, 512)
        often = dtype is BF16 and width == HIDDEN

        def rms(x=x, weight=weight, rstd=rstd):
            for residual, offset in ((x, False), (None, True)):
                norms.rms_norm(x, residual, weight, 1e-6, offset)
                norms.rms_norm_float8(x, residual, weight, 1e-6, offset, slot(E4M3))
                for need_weight in (False, True):
                    norms.rms_norm_backward(x, x, weight, rstd, offset, residual, need_weight)

        def layer(x=x, weight=weight, rstd=rstd):
            norms.layer_norm(x, weight, weight, 1e-6)
            for need_weight in (False, True):
                norms.layer_norm_backward(x, x, weight, rstd, rstd, need_weight)

        def often_rms(x=x, weight=weight, rstd=rstd):
            norms.rms_norm_float8(x, x, weight, 1e-6, False, slot(E4M3))
            norms.rms_norm(x, x, weight, 1e-6, False)
            norms.rms_norm_backward(x, x, weight, rstd, False, x, True)

        if often:
            yield Case(f"RMSNorm of {width}", often_rms, dtype, True)
        yield Case(f"RMSNorm of {width}", rms, dtype)
        yield Case(f"LayerNorm of {width}", layer, dtype, often)
        yield Case("partial sums", partial(norms.sum_rows, empty(264, width), dtype), dtype, often)


def rope_cases() -> Iterator[Case]:
    for dtype, size, heads in apart(WIDTHS, (128, 64, 96, 256), ((32, 8), (8, 1))):
        q, k = empty(2, heads[0], 512, size, dtype=dtype), empty(2, heads[1], 512, size, dtype=dtype)
        weight, angles = empty(size, dtype=dtype), empty(1, 512, size, dtype=dtype)
        often = dtype is BF16 and size == 128 and heads == (32, 8)

        def turn(q=q, k=k, angles=angles):
            rope.rope_(q, k, angles, angles, False)
            rope.rope_(q, k, angles, angles, True)

        def norm(q=q, k=k, weight=weight, angles=angles, often=often):
            for offset in (False,) if often or q.shape[3] != 128 else (False, True):
                rope.qk_norm_rope(q, k, weight, weight, angles, angles, 1e-6, offset)
                for need_weight in (False, True):
                    rope.qk_norm_rope_backward_(q, k, q, k, weight, weight, angles, angles, 1e-6, offset, need_weight)

        yield Case(f"RoPE, heads of {size}", turn, dtype, often)
        yield Case(f"q/k norm and RoPE, heads of {size}", norm, dtype, often)


def glu_cases() -> Iterator[Case]:
    for dtype, activation in apart(WIDTHS, ("silu", *ACTIVATIONS)):
        gate = empty(1024, INNER, dtype=dtype)

        def unit(gate=gate, activation=activation):
            glu.glu(gate, gate, activation)
            for need_output in (False, True):
                glu.glu_backward_(gate, gate, gate, activation, need_output)

        yield Case(f"gated unit, {activation}", unit, dtype, dtype is BF16 and activation == "silu")


def lora_call(dtype: torch.dtype, rank: int, activation: str, float8: bool, width: int = INNER) -> None:
    """Both ways, where the unit is taken in one pass."""
    gate, low, v_down = (empty(ROWS, size, dtype=dtype) for size in (width, 2 * rank, rank))
    if not lora_glu.in_one_pass(gate, rank):
        return
    b, a = empty(width, rank, dtype=dtype), empty(rank, width, dtype=dtype)
    factors = Factors(b, b, a, 1.5, 0.7)
    if float8:
        lora_glu.lora_glu_float8(gate, gate, low, factors, activation, slot(E4M3))
        for columns in (None, empty(2 * width)):
            arguments = (gate, gate, gate, low, v_down, factors, activation, slot(E5M2), columns)
            lora_glu.lora_glu_backward_float8(*arguments)
    else:
        lora_glu.lora_glu(gate, gate, low, factors, activation)
        lora_glu.lora_glu_backward_(gate, gate, gate, low, v_down, factors, activation)


def lora_cases() -> Iterator[Case]:
    """Ranks beside 8 and 16 differ in what is masked alone, so those of a padded rank are compiled at its ends."""
    for dtype, rank in itertools.product(DTYPES, RANK_ENDS):
        often = dtype is FP16 and rank == 64
        activations = ACTIVATIONS if rank == 16 and dtype is BF16 else ("silu",)
        for activation, float8_ in itertools.product(activations, (False, True)):
            if float8_ and (rank not in (16, 32, 64) or dtype is not BF16 or activation != "silu"):
                continue
            name = f"gated unit with LoRA of rank {rank}" + (" in FP8" if float8_ else "")
            yield Case(name, partial(lora_call, dtype, rank, activation, float8_), dtype, often and not float8_)


def sinks_of(dtype: torch.dtype, window: int | None) -> list[Tensor | None]:
    """None; and those of 32 heads, beside a window, which heads with sinks have."""
    return [None, empty(32, dtype=dtype)] if window else [None]


def attend_call(dtype: torch.dtype, size: int, cache: torch.dtype, window: int | None, softcap: float | None) -> None:
    q, keys = empty(2, 32, 1, size, dtype=dtype), empty(2, 8, 1024, size, dtype=cache)
    first, last = empty(2, dtype=torch.int32), empty(1, dtype=torch.int64)
    for sinks in sinks_of(dtype, window):
        decode_attention.decode_attention(q, keys, keys, first, last, 0.1, window, softcap, sinks)
    new = empty(2, 8, 1, size, dtype=dtype)
    if cache is dtype:
        decode_attention.store_both_(new, new, keys, keys, last)


def cache_cases(name: str, attend: Callable[..., None], everyday: Collection[tuple]) -> Iterator[Case]:
    """Calls over caches; `everyday` has the dtypes and head sizes of plain ones that `make test` compiles."""
    for dtype, size, eight in itertools.product(DTYPES, HEADS, (False, True)):
        for window, softcap in ((None, None), (512, None), (None, 30.0)):
            if not (window or softcap) or (size == 256 and not eight and dtype is not FP32):
                often = (dtype, size) in everyday and not (eight or window or softcap)
                call = partial(attend, dtype, size, E4M3 if eight else dtype, window, softcap)
                yield Case(f"{name}, heads of {size}" + (" in an 8-bit cache" if eight else ""), call, dtype, often)


def attention_cases() -> Iterator[Case]:
    return cache_cases("decoding", attend_call, ((FP16, 256), (FP32, 128)))


def recurrent_cases() -> Iterator[Case]:
    """Qwen3.5's and Qwen3-Next's heads."""
    for dtype in DTYPES:

        def step(dtype: torch.dtype = dtype) -> None:
            seats, channels = empty(2, dtype=torch.int64), 2 * 16 * 128 + 32 * 128
            x, a = empty(2, channels, dtype=dtype), empty(2, 32, dtype=dtype)
            delta_net.conv_step_(x, empty(channels, 4, dtype=dtype), None, empty(4, channels, 3, dtype=dtype), seats)
            delta_net.delta_step_(x, a, a, empty(32), empty(32), empty(4, 32, 128, 128), seats, 16)

        yield Case("a step of a gated delta net", step, dtype, dtype is BF16)
    for dtype, silu in itertools.product(WIDTHS, (False, True)):

        def convolution(dtype: torch.dtype = dtype, silu: bool = silu) -> None:
            x, begins = empty(ROWS, 8192, dtype=dtype), empty(ROWS, dtype=torch.int32)
            given = x, empty(8192, 4, dtype=dtype), None, begins, silu
            causal_conv.causal_conv(*given)
            causal_conv.causal_conv_backward(x, *given)

        yield Case("a convolution over documents", convolution, dtype, dtype is BF16 and silu)


def scan_cases() -> Iterator[Case]:
    """Heads and states of Falcon-H1, the widest ones of Mamba-2 models."""
    for dtype, width in itertools.product((FP16, BF16), (64, 128)):

        def scan(dtype: torch.dtype = dtype, width: int = width) -> None:
            x, b = empty(1, ROWS, 4, width, dtype=dtype), empty(1, ROWS, 1, 256, dtype=dtype)
            step, begins, skip = empty(1, ROWS, 4), empty(1, ROWS, dtype=torch.int32), empty(4)
            factors = chunk_scan.chunk_factors(step, step, begins)
            states, _ = chunk_scan.chunk_states(x, factors, b)
            chunk_scan.chunk_outputs(x, factors, b, b, skip, begins, states)
            after = chunk_scan.chunk_state_gradients(x, factors, b)
            chunk_scan.chunk_gradients(x, x, factors, b, b, skip, begins, states, after)

        yield Case(f"Mamba-2's scan, heads of {width}", scan, dtype, dtype is BF16 and width == 64)


def rollout_cases() -> Iterator[Case]:
    """Two rows split their pages over programs, many do not, which takes no more of anything."""

    def attend(dtype: torch.dtype, size: int, cache: torch.dtype, window: int | None, softcap: float | None) -> None:
        for rows in (2, 512) if size == 128 else (2,):
            q, keys = empty(rows, 32, size, dtype=dtype), empty(1024, 8, 64, size, dtype=cache)
            tables, lengths = empty(rows, 32, dtype=torch.int32), empty(rows, dtype=torch.int32)
            bundles = empty(rows // 2, 3, dtype=torch.int32)
            for shared, sinks in itertools.product((None, Shared(bundles, lengths)), sinks_of(dtype, window)):
                paged_attention.paged_attention(q, keys, keys, tables, lengths, 0.1, window, softcap, shared, sinks)

    yield from cache_cases("decoding over pages", attend, ((FP16, 256),))
    for dtype, eight in itertools.product(DTYPES, (False, True)):

        def store(dtype: torch.dtype = dtype, eight: bool = eight) -> None:
            q, k, angles = empty(4, 32, 1, 128, dtype=dtype), empty(4, 8, 1, 128, dtype=dtype), empty(4, 1, 128)
            keys, places = empty(64, 8, 64, 128, dtype=E4M3 if eight else dtype), empty(4, dtype=torch.int64)
            paged_attention.rope_store_paged_(q, k, k, angles, angles, keys, keys, places, places)
            paged_attention.store_paged(keys, keys, places, places, k[:, :, 0], k[:, :, 0])

        yield Case("keys and values into pages" + (", 8 bits" if eight else ""), store, dtype, dtype is BF16)
    for temperature, filtered in itertools.product((1.0, 0.0), (False, True)):

        def draw(temperature: float = temperature, filtered: bool = filtered) -> None:
            logits, places = empty(4, 128_256), empty(4, 3, dtype=torch.int64)
            kept = empty(4, 128_256, dtype=torch.bool) if filtered else None
            sample.draw_tokens(logits, places, empty(1, dtype=torch.int64), temperature, kept)

        yield Case("sampling", draw, FP32, temperature > 0 and not filtered)


def training_attention_cases() -> Iterator[Case]:
    """`autograd.attention` takes the backward on Hopper alone, where it was measured; where answers share a prompt,
    from Ampere on; capped scores and sinks from there on, and on AMD's GPUs."""
    for dtype, size in itertools.product((FP16, BF16), HEADS):

        def call(dtype=dtype, size=size):
            q, k, numbers = empty(512, 32, size, dtype=dtype), empty(512, 8, size, dtype=dtype), empty(32, 512)
            spans, sinks = (empty(512, dtype=torch.int32), empty(512, dtype=torch.int32)), empty(32, dtype=dtype)
            device = device_of(q)
            nvidia = device.at_least(AMPERE)
            saved = q, q, k, k, q, numbers, spans
            if device.capability[0] == HOPPER and size <= WIDEST:
                for window in (None, 512):
                    attention.attention_backward(*saved, Scores(0.1, window))
            if nvidia and dtype is BF16 and size in (64, WIDEST):
                attention.attention_backward(*saved, Scores(0.1), None, spans)
            if (nvidia or device.kind == "hip") and size in ((64, 128, 192, 256) if dtype is BF16 else (256,)):
                for scores, own in ((Scores(0.1, 512, 50.0), None), (Scores(0.1, 512), sinks)):
                    attention.attention(q, k, k, spans, scores, own)
                    attention.attention_backward(*saved, scores)

        yield Case(f"attention in training, heads of {size}", call, dtype, dtype is BF16 and size == WIDEST)


def loss_cases() -> Iterator[Case]:
    objectives = (Objective(), Objective(softcap=30.0), Objective(label_smoothing=0.1, z_loss=1e-4))
    for dtype, vocabulary, objective in apart(WIDTHS, (262_144, 1000, 32_000), objectives):
        logits, labels = empty(512, vocabulary, dtype=dtype), empty(512, dtype=torch.int64)
        often = dtype is BF16 and vocabulary == 262_144 and objective == Objective()

        def entropies(logits=logits, labels=labels, objective=objective, often=often):
            for gradient, entropy in ((True, False),) if often else ((False, False), (True, False), (True, True)):
                losses.cross_entropy_(logits, labels, objective, gradient, entropy)
            row = empty(512)
            for entropy in (None, row):
                losses.log_probs_backward_(logits, labels, row, entropy, row, entropy, objective)

        yield Case(f"cross-entropy of {vocabulary}", entropies, dtype, often)
        teacher, ours = empty(512, vocabulary, dtype=dtype), (objective, Objective())

        def divergences(logits=logits, teacher=teacher, ours=ours, often=often):
            for beta, gradient in ((0.5, True),) if often else ((0.5, True), (0.0, True), (1.0, True), (0.5, False)):
                divergence.divergence_(logits, teacher, ours, beta, gradient)

        yield Case(f"divergence of {vocabulary}", divergences, dtype, often)


def format_cases() -> Iterator[Case]:
    rows, columns = 1024, HIDDEN
    for dtype, blocksize, nested in apart(WIDTHS, (64, 32, 128, 256, 4096), (True, False)):
        often = dtype is BF16 and blocksize == 64 and nested

        def four(dtype=dtype, blocksize=blocksize, nested=nested):
            weight = weight4(rows, columns, blocksize, nested)
            blockwise4.dequantize_blockwise4(*weight, rows * columns, dtype)
            for transposed in (False, True):
                float8.float8_of_blockwise4(*weight, (rows, columns), empty(), transposed)
            blockwise4.quantize_blockwise4(empty(rows, columns, dtype=dtype), blocksize, "nf4")
            blockwise_cuda.quantize_blockwise4_cuda(empty(rows, columns, dtype=dtype), blocksize, "fp4")
            blockwise_cuda.approximate_reciprocal(empty(rows))

        yield Case(f"4-bit weights in blocks of {blocksize}", four, dtype, often)
    for dtype, bits, affine, width in apart(WIDTHS, (4, 2, 3, 5), (True, False), (columns, columns - 8)):
        blocks = rows * (-(-width // 32))
        often = (dtype, bits, affine, width) == (BF16, 4, True, columns)

        def planes(dtype=dtype, bits=bits, affine=affine, width=width, blocks=blocks):
            packed, scales = empty(blocks * bits, dtype=torch.int32), empty(blocks, dtype=torch.uint8)
            zeros = empty(blocks, dtype=torch.int8) if affine else None
            bitplane.dequantize_bitplane(packed, scales, zeros, empty(), empty(2**bits), rows, width, dtype)
            bitplane.quantize_bitplane(empty(blocks, 32, dtype=dtype), scales, zeros, empty(), empty(2**bits))

        yield Case(f"{bits} bits in planes", planes, dtype, often)
    yield from more_format_cases(rows, columns)


def more_format_cases(rows: int, columns: int) -> Iterator[Case]:
    for dtype in WIDTHS:
        often = dtype is BF16
        for bits, group in apart((4, 2, 3, 8), (64, 32, 128)) if often else ((4, 64),):

            def half_quadratic(dtype=dtype, bits=bits, group=group):
                scales = empty(rows * columns // group, dtype=FP16)
                packed = empty(rows * columns // 32 * bits, dtype=torch.int32)
                hqq.dequantize_hqq(packed, scales, scales, bits, group, rows, columns, dtype)

            yield Case(f"HQQ, {bits} bits", half_quadratic, dtype, often and (bits, group) == (4, 64))

        def microscaling(dtype=dtype):
            packed, scales = empty(rows, columns // 2, dtype=torch.uint8), empty(rows, columns // 16, dtype=torch.uint8)
            for factor, tile in ((empty(), (1, 16)), (None, (1, 32))):
                e2m1.dequantize_e2m1(packed, scales, factor, tile, columns, dtype)

        def words(dtype=dtype):
            scales, zeros = empty(columns // 128, rows, dtype=FP16), empty(columns // 128, rows // 8, dtype=torch.int32)
            int4.dequantize_int4(empty(columns // 8, rows, dtype=torch.int32), zeros, scales, None, False, 1, dtype)
            int4.dequantize_int4(empty(columns, rows // 8, dtype=torch.int32), zeros, scales, None, True, 0, dtype)

        def eight(dtype=dtype):
            codes, absmax, x = empty(rows, columns, dtype=torch.int8), empty(rows), empty(rows, columns, dtype=dtype)
            int8.dequantize_rows_int8(codes, absmax, dtype)
            for chosen in (None, empty(columns, dtype=torch.bool)):
                int8.quantize_rows_int8(x, chosen, 6.0)
            for bias in (None, empty(columns, dtype=dtype)):
                int8.scale_int8_product(empty(rows, columns, dtype=torch.int32), absmax, empty(columns), bias, dtype)

        def floats(dtype=dtype):
            codes = empty(rows, columns, dtype=E4M3)
            for scaling, scale in (("tensor", empty()), ("row", empty(rows)), ("tile", tiles(rows, columns))):
                float8.dequantize_float8(codes, scale, scaling, dtype)
            float8.transpose_float8(codes)
            for kind, factors in itertools.product((E4M3, E5M2), (None, empty(columns))):
                for settled in (False, True):
                    x = (empty(rows, columns, dtype=dtype),)
                    float8.cast_float8(empty(), x, factors, empty(), empty(), kind, settled)

        yield Case("NVFP4 and MXFP4", microscaling, dtype, often)
        yield Case("GPTQ and AWQ", words, dtype, often)
        yield Case("INT8", eight, dtype, often)
        yield Case("FP8", floats, dtype, often)


def tiles(rows: int, columns: int) -> Tensor:
    return empty(-(-rows // TILE), -(-columns // TILE))


def decoder_stack(batch: int, dtype: torch.dtype, size: int, eight: bool) -> tuple[Tensor, Stack]:
    """A small layer on the CPU: its kernel's launcher reads values."""
    heads, key_heads, width, inner, slots = 8, 2, 512, 1024, 64

    def projections(rows: list[int], columns: int) -> Projections:
        weights = [
            Weight4(torch.zeros(each * columns // 2, 1, dtype=torch.uint8), torch.zeros(each * columns // 64), None, 64,
                    "nf4", each, None)
            for each in rows
        ]  # fmt: skip
        ups = [(16 * i, torch.zeros(each, 16, dtype=dtype)) for i, each in enumerate(rows)]
        return Projections(weights, torch.zeros(16 * len(rows), columns, dtype=dtype), ups, None)

    caches = [torch.zeros(batch, key_heads, slots, size).to(E4M3 if eight else dtype) for _ in range(2)]
    norm, angles = torch.ones(width, dtype=dtype), torch.zeros(slots, size, dtype=dtype)
    layer = DecoderLayer(
        projections([heads * size, key_heads * size, key_heads * size], width), projections([width], heads * size),
        projections([inner, inner], width), projections([width], inner), norm, norm, None, None, *caches, None,
    )  # fmt: skip
    padding, slot_ = torch.zeros(batch, dtype=torch.int32), torch.tensor([20])
    return norm.expand(batch, width).contiguous(), Stack([layer], heads, 1e-5, 0.1, angles, angles, padding, slot_)


def decoder_cases() -> Iterator[Case]:
    for dtype, batch, size, eight in apart((FP16, BF16), (1, 8), (128, 64, 256), (False, True)):

        def decode(dtype=dtype, batch=batch, size=size, eight=eight):
            decode_layers.one_launch(*decoder_stack(batch, dtype, size, eight))

        often = (dtype, batch, size, eight) == (BF16, 1, 128, False)
        yield Case(f"decoder layers, heads of {size}", decode, dtype, often)


def product_cases() -> Iterator[Case]:
    rows, columns = 4096, HIDDEN
    for dtype, batch in itertools.product(DTYPES, (1, 4, 16, 64)):
        x, often = empty(batch, columns, dtype=dtype), dtype is FP16 and batch in (1, 64)

        def four(x=x, often=often):
            bias = empty(rows, dtype=x.dtype)
            for blocksize, nested in ((64, True),) if often else apart((64, 32, 128), (True, False)):
                blockwise4.linear_blockwise4(x, *weight4(rows, columns, blocksize, nested), rows, bias)

        def eight(x=x, often=often):
            codes = empty(rows, columns, dtype=torch.uint8)
            kinds = (("tensor", empty()), ("row", empty(rows)), ("tile", tiles(rows, columns)))
            for scaling, scale in kinds if x.dtype is BF16 else kinds[1:2]:
                float8.linear_float8(x, codes, scale, scaling, None)
            int8.linear_int8(x, empty(rows, columns, dtype=torch.int8), empty(rows), empty(rows, dtype=x.dtype))

        def planes(x=x):
            blocks = rows * columns // 32
            for bits in (2, 3, 4, 5):
                packed, scales = empty(blocks * bits, dtype=torch.int32), empty(blocks, dtype=torch.uint8)
                bitplane.linear_bitplane(x, packed, scales, empty(), empty(2**bits), rows, None)
            for bits, group in itertools.product((2, 3, 4, 8), (32, 64, 128)):
                packed, scales = empty(blocks * bits, dtype=torch.int32), empty(rows * columns // group, dtype=FP16)
                hqq.linear_hqq(x, packed, scales, scales, bits, group, rows, None)

        def low(x=x):
            linear.low_rank_rows(x, empty(16, columns, dtype=x.dtype), None)

        yield Case(f"4-bit products, {batch} rows", four, dtype, often)
        yield Case(f"8-bit products, {batch} rows", eight, dtype, often)
        yield Case(f"k-bit products, {batch} rows", planes, dtype)
        yield Case(f"adapters' products, {batch} rows", low, dtype)
    for dtype, rank, learn in itertools.product((FP16, BF16), (8, 16), (False, True)):
        x, b = empty(ROWS, HIDDEN, dtype=dtype), empty(HIDDEN, rank, dtype=dtype)
        low_rows = empty(ROWS, rank, dtype=dtype) if learn else None
        for kind in (None, E4M3, E5M2):

            def read(x=x, b=b, low_rows=low_rows, dtype=dtype, kind=kind):
                made = None if kind is None else slot(kind)
                lora_read.lora_read(x, (), (b,), (1.5,), low_rows, FP32, made, None)

            yield Case(f"adapters' gradients, rank {rank}", read, dtype)


def packed_experts(count: int, rows: int, columns: int, format_: Format | None = None) -> StackedWeight:
    """In NF4 where no format is given."""
    format_ = format_ or Blockwise4("nf4", 64, True)
    specs = format_.part_specs((count, rows, columns))
    parts = {name: empty(*size, dtype=dtype) for name, (size, dtype) in specs.items()}
    return StackedWeight(parts, (count, rows, columns), format_)


def expert_cases() -> Iterator[Case]:
    """Qwen3-30B-A3B's products, from a row an expert to 512."""
    count, top_k, rank, sides = 128, 8, 16, (2048, 1536)
    for dtype, tokens in apart((FP32, BF16), (8192, 1024, 512, 256, 8, 1)):  # each another tile

        def products(dtype=dtype, tokens=tokens, sides=sides):
            routing = experts.route(empty(tokens, top_k, dtype=torch.int64), count)
            packed = packed_experts(count, *sides), packed_experts(count, *sides, from_spec("stack:mxfp4"))
            slots, stacks = tokens * top_k, (*packed, StackedWeight.plain(empty(count, *sides, dtype=dtype)))
            for stack, transposed in itertools.product(stacks, (False, True)):
                depth, width = sides if transposed else sides[::-1]
                x, u = empty(tokens, depth, dtype=dtype), empty(slots, rank, dtype=dtype)
                shape = (count, rank, width) if transposed else (count, width, rank)
                low = LowRank(u, empty(*shape, dtype=dtype), 1.0)
                experts.grouped_product(x, stack, routing, True, transposed, low, None)
            for transposed in (False, True):  # with an adapter's own factors
                shape = (count, sides[0], rank) if transposed else (count, rank, sides[1])
                stack = StackedWeight.plain(empty(*shape, dtype=dtype))
                x = empty(slots, sides[0] if transposed else sides[1], dtype=dtype)
                experts.grouped_product(x, stack, routing, False, transposed)
            experts.grouped_outer(empty(tokens, sides[1], dtype=dtype), u, routing, True, 1.0, FP32)
            experts.combine(empty(slots, sides[0], dtype=dtype), routing, empty(tokens, top_k))

        yield Case("experts", products, dtype, dtype is BF16 and tokens == 8192)
    for dtype in WIDTHS:

        def token(dtype=dtype):
            x, weight = empty(1, sides[0], dtype=dtype), empty(count, sides[0], dtype=dtype)
            _, scores, index = experts.top_experts(x, weight, top_k, True, dtype)
            stacks = packed_experts(count, sides[1], sides[0]), packed_experts(count, sides[0], sides[1] // 2)
            experts.expert_rows(x, *stacks, Unit("silu"), index, scores)

        yield Case("experts of a token", token, dtype)
    for dtype, unit in apart(WIDTHS, (Unit("silu"), Unit("gelu_tanh"), Unit("silu", True, 7.0, 1.702, 1.0))):

        def units(dtype=dtype, unit=unit):
            c, z, slots = empty(ROWS, 1536, dtype=dtype), empty(ROWS, 768, dtype=dtype), empty(ROWS)
            experts.expert_unit(c, unit)
            experts.expert_unit_backward_(z, c, unit, slots, empty(ROWS, dtype=torch.int32))

        yield Case(f"experts' unit, {unit.activation}", units, dtype)


def optimizer_cases() -> Iterator[Case]:
    """Every rule, AdamW with every storage, and bf16 weights with every rounding."""
    size = 1 << 20
    kinds = [(rule, "fp32", "nearest", FP32) for rule in RULES]
    kinds += [("adamw", storage, "nearest", FP32) for storage in STORAGES if storage != "fp32"]
    kinds += [("ademamix", "dynamic8", "nearest", FP32), ("rmsprop", "dynamic8", "nearest", FP32)]
    kinds += [("lion", "companded8", "nearest", FP32)]
    kinds += [("adamw", "dynamic8", rounding, BF16) for rounding in ROUNDINGS]
    for rule, storage, rounding, dtype in kinds:

        def step(rule=rule, storage=storage, rounding=rounding, dtype=dtype):
            coefficients, steps, one = empty(1, len(Coefficients._fields)), empty(1), empty()
            settings, groups = empty(1, len(SETTINGS), dtype=torch.float64), empty(1, dtype=torch.int32)
            optimizer.prepare_step(settings, groups, steps, coefficients, rule, one, one)
            stored = STORAGES[storage]
            states = [stored.zeros(size, signed, steps.device) for signed in RULES[rule].signed]
            corrections = {"correction8": torch.int8, "correction16": torch.int16}
            correction = [empty(size, dtype=corrections[rounding])] if rounding in corrections else []
            weights, gradients = [empty(size, dtype=dtype)], [empty(size, dtype=dtype)]
            rows = torch.zeros(1, dtype=torch.int32)
            parameters = Parameters(rule, storage, rounding, rows, weights, gradients, [states], correction)
            optimizer.gradient_norm(coefficients, [parameters], 1.0)
            for trust in (name for name, row in TRUSTS.items() if rule in row.rules):
                optimizer.scale_by_trust(coefficients, [parameters], trust)
            optimizer.update_parameters(coefficients, steps, parameters, one)

        often = (rule, storage, rounding) in (("adamw", "dynamic8", "nearest"), ("adamw", "fp32", "nearest"))
        yield Case(f"{rule}, state in {storage}, {rounding} rounding", step, dtype, often)


def muon_cases() -> Iterator[Case]:
    """Weights of both widths, and momentum in fp32 and in 8 bits."""
    for dtype, bits in apart(WIDTHS, (32, 8)):

        def step(dtype=dtype, bits=bits):
            weights, gradients = [empty(1024, 3072, dtype=dtype)], [empty(1024, 3072, dtype=dtype)]
            momentum = (empty(1024, 3072, dtype=torch.int8), empty(1536)) if bits == 8 else (empty(1024, 3072), None)
            rows, one = torch.zeros(1, dtype=torch.int32), empty()
            parameters = Parameters("muon", f"{bits} bits", "nearest", rows, weights, gradients, [[momentum]])
            directions = empty(1, 1024, 3072, dtype=BF16)
            muon.directions(directions, parameters, 0.95, True, one, one)
            muon.apply_directions(directions, parameters, one, 0.1, 0.2, one)

        yield Case(f"Muon, momentum in {bits} bits", step, dtype, bits == 32)


MAKERS = (
    lora_cases, product_cases, format_cases, attention_cases, loss_cases, rope_cases, norm_cases, decoder_cases,
    glu_cases, training_attention_cases, recurrent_cases, scan_cases, rollout_cases, expert_cases, optimizer_cases,
    muon_cases,
)  # fmt: skip


def all_cases() -> list[Case]:
    return [case for make in MAKERS for case in make()]
