"""Calls of every op, over the shapes, dtypes, ranks and sizes that dispatch tells apart, on tensors without data.

What a call launches is up to dispatch; `benchmarks.kernel_matrix` writes it down and compiles it.
"""

from __future__ import annotations

import importlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halfbyte.autograd.attention import AMPERE, HOPPER, WIDEST
from halfbyte.dispatch import Op
from halfbyte.formats import Blockwise4, Format, from_spec
from halfbyte.formats.float8 import E4M3, E5M2, TILE
from halfbyte.kernels.device import device_of
from halfbyte.kernels.selection import empty, slot, weight4
from halfbyte.ops.attention import Scores
from halfbyte.ops.cross_entropy import Objective
from halfbyte.ops.decode import DecoderLayer, PackedLinear, Projections, Stack
from halfbyte.ops.dropout import Dropout
from halfbyte.ops.experts import LowRank, StackedWeight, Unit
from halfbyte.ops.glu import ACTIVATIONS
from halfbyte.ops.lora_glu import Factors
from halfbyte.ops.optimizer import ROUNDINGS, RULES, SETTINGS, TRUSTS, Coefficients, Parameters
from halfbyte.ops.optimizer_state import STORAGES
from halfbyte.ops.paged_attention import Shared
from halfbyte.ops.paged_attention4 import Cache4


def on_gpu(name: str) -> SimpleNamespace:
    """The ops of this module, such as "ops.glu", as GPUs run them."""
    module = importlib.import_module(f"halfbyte.{name}")
    return SimpleNamespace(**{key: op.on("cuda") for key, op in vars(module).items() if isinstance(op, Op)})


bitplane, blockwise4, e2m1 = map(on_gpu, ("formats.bitplane", "formats.blockwise4", "formats.e2m1"))
float8_weights, hqq, int4, int8 = map(on_gpu, ("formats.float8", "formats.hqq", "formats.int4", "formats.int8"))
attention, blockwise_cuda, causal_conv = map(on_gpu, ("ops.attention", "ops.blockwise_cuda", "ops.causal_conv"))
chunk_scan, losses, delta_net = map(on_gpu, ("ops.chunk_scan", "ops.cross_entropy", "ops.delta_net"))
delta_rule = on_gpu("ops.delta_rule")
decode, divergence, experts, float8 = map(on_gpu, ("ops.decode", "ops.divergence", "ops.experts", "ops.float8"))
glu, lora_glu, muon, norms = map(on_gpu, ("ops.glu", "ops.lora_glu", "ops.muon", "ops.norms"))
dora, dropout = map(on_gpu, ("ops.dora", "ops.dropout"))
optimizer, paged_attention = map(on_gpu, ("ops.optimizer", "ops.paged_attention"))
paged_attention4, rope, sample = map(on_gpu, ("ops.paged_attention4", "ops.rope", "ops.sample"))

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FP32, FP16, BF16)
WIDTHS = (FP32, BF16)  # of what moves bytes alone: fp16 is as wide as bf16, and easier
RANK_ENDS = (4, 16, 32, 64)
HEADS = (64, 80, 96, 128, 192, 256)
HIDDEN, INNER, ROWS = 4096, 14336, 8192
STORED = 1024, HIDDEN  # rows and columns of a weight that is only stored


@dataclass(frozen=True)
class Case:
    """A call of an op.

    Args:
        name: of its class, for people.
        call: what makes its tensors and runs it.
        everyday: whether `make test` compiles it too.
    """

    name: str
    call: Callable[[], Any]
    everyday: bool


# Group → its cases. A group has all cases that launch its kernels: a kernel's row is what they take.
CASES: dict[str, list[Case]] = defaultdict(list)


def cases(group: str, name: str, arguments: Iterable[tuple], everyday: Collection[tuple] = ()) -> Callable[[Any], Any]:
    """Add a case to `group` for each tuple of arguments of the decorated function.

    Args:
        name: of their class, formatted with the arguments.
        everyday: those arguments that `make test` compiles too.
    """

    def add(call: Any) -> Any:
        for values in arguments:
            CASES[group].append(Case(name.format(*values), partial(call, *values), values in everyday))
        return call

    return add


def all_cases() -> list[Case]:
    return [case for group in CASES.values() for case in group]


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


LORA = [(dtype, rank, "silu") for dtype, rank in itertools.product(DTYPES, RANK_ENDS)]
LORA += [(BF16, 16, activation) for activation in ACTIVATIONS if activation != "silu"]


@cases("lora", "gated unit with LoRA of rank {1} in FP8", [(BF16, rank, "silu", True) for rank in (16, 32, 64)])
@cases("lora", "gated unit with LoRA of rank {1}", LORA, [(FP16, 64, "silu")])
def lora_call(
    dtype: torch.dtype, rank: int, activation: str, float8: bool = False, width: int = INNER, masks: Any = None
) -> None:
    """Both ways, where the unit is taken in one pass.

    Ranks beside 8 and 16 differ in what is masked alone, so those of a padded rank are compiled at its ends.
    """
    gate, low, v_down = (empty(ROWS, size, dtype=dtype) for size in (width, 2 * rank, rank))
    if not lora_glu.in_one_pass(gate, rank):
        return
    b, a = empty(width, rank, dtype=dtype), empty(rank, width, dtype=dtype)
    factors = Factors(b, b, a, 1.5, 0.7, masks)
    if float8:
        lora_glu.lora_glu_float8(gate, gate, low, factors, activation, slot(E4M3))
        for columns in (None, empty(2 * width)):
            arguments = (gate, gate, gate, low, v_down, factors, activation, slot(E5M2), columns)
            lora_glu.lora_glu_backward_float8(*arguments)
    else:
        lora_glu.lora_glu(gate, gate, low, factors, activation)
        lora_glu.lora_glu_backward_(gate, gate, gate, low, v_down, factors, activation)


def masks_of(count: int) -> Any:
    return Dropout(0.05, empty(count, dtype=torch.int64))


@cases("lora", "gated unit with LoRA of rank {1} and dropout", [(BF16, 16), (BF16, 64)])
def dropped_unit(dtype, rank):
    lora_call(dtype, rank, "silu", masks=masks_of(1))


DROPPED = apart(WIDTHS, (4, 16, 64), (3, 1))


@cases("lora", "dropout and its low-rank GEMMs, {2} adapters of rank {1}", DROPPED, [(BF16, 16, 3)])
def dropped_adapters(dtype, rank, count):
    x, v, a = (empty(*shape, dtype=dtype) for shape in ((ROWS, HIDDEN), (ROWS, count * rank), (count * rank, HIDDEN)))
    factors, masks = a.split(rank), masks_of(count)
    for rows in (None, empty(ROWS, dtype=torch.int32)):
        dropout.drop(x, masks, rows)
    dropout.dropped_products(x, factors, masks)
    for read, dx, accumulate in ((x, x, False), (x, x, True), (None, x, False), (x, None, False)):
        dropout.dropped_gradients(v, factors, masks, read, dx, accumulate)


NORMS = apart(WIDTHS, (HIDDEN, 128, 16384))
OFTEN_NORMS = [(BF16, HIDDEN)]


@cases("norms", "RMSNorm of {1}", OFTEN_NORMS, OFTEN_NORMS)
def everyday_rms_norm(dtype, width):
    x, weight, rstd = empty(2, 512, width, dtype=dtype), empty(width, dtype=dtype), empty(2, 512)
    norms.rms_norm_float8(x, x, weight, 1e-6, False, slot(E4M3))
    norms.rms_norm(x, x, weight, 1e-6, False)
    norms.rms_norm_backward(x, x, weight, rstd, False, x, True)


@cases("norms", "RMSNorm of {1}", NORMS)
def rms_norm(dtype, width):
    x, weight, rstd = empty(2, 512, width, dtype=dtype), empty(width, dtype=dtype), empty(2, 512)
    for residual, offset in ((x, False), (None, True)):
        norms.rms_norm(x, residual, weight, 1e-6, offset)
        norms.rms_norm_float8(x, residual, weight, 1e-6, offset, slot(E4M3))
        for need_weight in (False, True):
            norms.rms_norm_backward(x, x, weight, rstd, offset, residual, need_weight)


@cases("norms", "LayerNorm of {1}", NORMS, OFTEN_NORMS)
def layer_norm(dtype, width):
    x, weight, rstd = empty(2, 512, width, dtype=dtype), empty(width, dtype=dtype), empty(2, 512)
    norms.layer_norm(x, weight, weight, 1e-6)
    for need_weight in (False, True):
        norms.layer_norm_backward(x, x, weight, rstd, rstd, need_weight)


@cases("norms", "partial sums", NORMS, OFTEN_NORMS)
def partial_sums(dtype, width):
    norms.sum_rows(empty(264, width), dtype)


ROPE = apart(WIDTHS, (128, 64, 96, 256), ((32, 8), (8, 1)))
OFTEN_HEADS = [(BF16, 128, (32, 8))]


@cases("rope", "RoPE, heads of {1}", ROPE, OFTEN_HEADS)
def turned_heads(dtype, size, heads):
    q, k, angles = *(empty(2, count, 512, size, dtype=dtype) for count in heads), empty(1, 512, size, dtype=dtype)
    rope.rope_(q, k, angles, angles, False)
    rope.rope_(q, k, angles, angles, True)


@cases("rope", "q/k norm and RoPE, heads of {1}", ROPE, OFTEN_HEADS)
def normed_heads(dtype, size, heads):
    q, k, angles = *(empty(2, count, 512, size, dtype=dtype) for count in heads), empty(1, 512, size, dtype=dtype)
    weight = empty(size, dtype=dtype)
    for offset in (False,) if (dtype, size, heads) in OFTEN_HEADS or size != 128 else (False, True):
        rope.qk_norm_rope(q, k, weight, weight, angles, angles, 1e-6, offset)
        for need_weight in (False, True):
            rope.qk_norm_rope_backward_(q, k, q, k, weight, weight, angles, angles, 1e-6, offset, need_weight)


@cases("dora", "sums of products over rows, scaled rows", apart(WIDTHS), [(BF16,)])
def magnitudes(dtype):
    matrix = empty(ROWS, HIDDEN, dtype=dtype)
    dora.column_dots(matrix, matrix)
    dora.scale_rows(matrix, empty(ROWS, dtype=FP32), matrix)


@cases("dora", "rows times numbers", apart(WIDTHS), [(BF16,)])
def scaled_rows(dtype):
    matrix = empty(ROWS, HIDDEN, dtype=dtype)
    dora.scale_rows(matrix, empty(ROWS, dtype=FP32), matrix)


@cases("glu", "gated unit, {1}", apart(WIDTHS, ("silu", *ACTIVATIONS)), [(BF16, "silu")])
def gated_unit(dtype, activation):
    gate = empty(1024, INNER, dtype=dtype)
    glu.glu(gate, gate, activation)
    for need_output in (False, True):
        glu.glu_backward_(gate, gate, gate, activation, need_output)


def sinks_of(dtype: torch.dtype, window: int | None) -> list[Tensor | None]:
    """None; and those of 32 heads, beside a window, which heads with sinks have."""
    return [None, empty(32, dtype=dtype)] if window else [None]


PLAIN = list(itertools.product(DTYPES, HEADS))
EIGHT_BITS = [(dtype, size, E4M3) for dtype, size in PLAIN]
CAPPED = [(dtype, 256, dtype, *limits) for dtype in (FP16, BF16) for limits in ((512, None), (None, 30.0))]


@cases("decoding", "decoding, heads of {1} in an 8-bit cache", EIGHT_BITS)
@cases("decoding", "decoding, heads of {1}", [*PLAIN, *CAPPED], [(FP16, 256), (FP32, 128)])
def attend_call(dtype, size, cache=None, window=None, softcap=None):
    """On a cache of the same dtype where none is given."""
    cache = cache or dtype
    q, keys = empty(2, 32, 1, size, dtype=dtype), empty(2, 8, 1024, size, dtype=cache)
    first, last = empty(2, dtype=torch.int32), empty(1, dtype=torch.int64)
    for sinks in sinks_of(dtype, window):
        decode.decode_attention(q, keys, keys, first, last, 0.1, window, softcap, sinks)
    new = empty(2, 8, 1, size, dtype=dtype)
    if cache is dtype:
        decode.store_both_(new, new, keys, keys, last)


@cases("rollouts", "decoding over pages, heads of {1} in an 8-bit cache", EIGHT_BITS)
@cases("rollouts", "decoding over pages, heads of {1}", [*PLAIN, *CAPPED], [(FP16, 256)])
def attend_pages(dtype, size, cache=None, window=None, softcap=None):
    """Two rows split their pages over programs, many do not, which takes no more of anything."""
    for rows in (2, 512) if size == 128 else (2,):
        q, keys = empty(rows, 32, size, dtype=dtype), empty(1024, 8, 64, size, dtype=cache or dtype)
        tables, lengths = empty(rows, 32, dtype=torch.int32), empty(rows, dtype=torch.int32)
        bundles = empty(rows // 2, 3, dtype=torch.int32)
        for shared, sinks in itertools.product((None, Shared(bundles, lengths)), sinks_of(dtype, window)):
            paged_attention.paged_attention(q, keys, keys, tables, lengths, 0.1, window, softcap, shared, sinks)


@cases("rollouts", "decoding over pages in 4 bits, heads of {1}", [*PLAIN, *CAPPED], [(FP16, 256), (BF16, 128)])
def attend_pages4(dtype, size, _=None, window=None, softcap=None):
    """As in `attend_pages`, with the new token's keys and values."""
    for rows in (2, 512) if size == 128 else (2,):
        q, k = empty(rows, 32, size, dtype=dtype), empty(rows, 8, size, dtype=dtype)
        cache = Cache4.zeros(1024, rows, 8, size, dtype, torch.device("meta"))
        tables, lengths = empty(rows, 32, dtype=torch.int32), empty(rows, dtype=torch.int32)
        bundles, places = empty(rows // 2, 3, dtype=torch.int32), empty(rows, dtype=torch.int64)
        paged_attention4.append4_(k, k, cache, places, places, places)
        for shared, sinks in itertools.product((None, Shared(bundles, lengths)), sinks_of(dtype, window)):
            scores = 0.1, window, softcap, shared, sinks
            paged_attention4.paged_attention4(q, cache, tables, lengths, places, *scores)


@cases("rollouts", "keys and values into pages, 8 bits", [(dtype, E4M3) for dtype in DTYPES], [(BF16, E4M3)])
@cases("rollouts", "keys and values into pages", [(dtype, dtype) for dtype in DTYPES], [(BF16, BF16)])
def store_pages(dtype, cache):
    q, k, angles = empty(4, 32, 1, 128, dtype=dtype), empty(4, 8, 1, 128, dtype=dtype), empty(4, 1, 128)
    keys, places = empty(64, 8, 64, 128, dtype=cache), empty(4, dtype=torch.int64)
    paged_attention.rope_store_paged_(q, k, k, angles, angles, keys, keys, places, places)
    paged_attention.store_paged(keys, keys, places, places, k[:, :, 0], k[:, :, 0])


@cases("rollouts", "sampling", itertools.product((1.0, 0.0), (False, True)), [(1.0, False)])
def sampling(temperature, filtered):
    logits, places = empty(4, 128_256), empty(4, 3, dtype=torch.int64)
    kept = empty(4, 128_256, dtype=torch.bool) if filtered else None
    sample.draw_tokens(logits, places, empty(1, dtype=torch.int64), temperature, kept)


@cases("recurrent", "a step of a gated delta net", [(dtype,) for dtype in DTYPES], [(BF16,)])
def delta_net_step(dtype):
    """Qwen3.5's and Qwen3-Next's heads."""
    seats, channels = empty(2, dtype=torch.int64), 2 * 16 * 128 + 32 * 128
    x, a = empty(2, channels, dtype=dtype), empty(2, 32, dtype=dtype)
    delta_net.conv_step_(x, empty(channels, 4, dtype=dtype), None, empty(4, channels, 3, dtype=dtype), seats)
    delta_net.delta_step_(x, a, a, empty(32), empty(32), empty(4, 32, 128, 128), seats, 16)


@cases("recurrent", "a convolution over documents", itertools.product(WIDTHS, (False, True)), [(BF16, True)])
def convolution(dtype, silu):
    x, begins = empty(ROWS, 8192, dtype=dtype), empty(ROWS, dtype=torch.int32)
    arguments = x, empty(8192, 4, dtype=dtype), None, begins, silu
    causal_conv.causal_conv(*arguments)
    causal_conv.causal_conv_backward(x, *arguments)


@cases("scan", "Mamba-2's scan, heads of {1}", itertools.product((FP16, BF16), (64, 128)), [(BF16, 64)])
def scan(dtype, width):
    """Heads and states of Falcon-H1, the widest ones of Mamba-2 models."""
    x, b = empty(1, ROWS, 4, width, dtype=dtype), empty(1, ROWS, 1, 256, dtype=dtype)
    step, begins, skip = empty(1, ROWS, 4), empty(1, ROWS, dtype=torch.int32), empty(4)
    factors = chunk_scan.chunk_factors(step, step, begins)
    states, _ = chunk_scan.chunk_states(x, factors, b)
    chunk_scan.chunk_outputs(x, factors, b, b, skip, begins, states)
    after = chunk_scan.chunk_state_gradients(x, factors, b)
    chunk_scan.chunk_gradients(x, x, factors, b, b, skip, begins, states, after)


@cases("delta", "gated delta rule, heads of {1}", itertools.product((BF16,), (128, 256)))
def gated_delta_rule(dtype, size):
    """Heads of Qwen3-Next and Qwen3.5, and the widest ones that kernels take."""
    query, value = empty(1, ROWS, 2, size, dtype=dtype), empty(1, ROWS, 4, size, dtype=dtype)
    gates, first = empty(1, ROWS, 4), empty(1, ROWS, dtype=torch.bool)
    for first_or_none in (first, None):
        rows = query, query, value, gates, gates, first_or_none
        delta_rule.delta_rule(*rows)
        delta_rule.delta_rule_backward(value, *rows)


@cases("attention", "attention in training, heads of {1}", itertools.product((FP16, BF16), HEADS), [(BF16, WIDEST)])
def training_attention(dtype, size):
    """`autograd.attention` takes the backward on Hopper alone, where it was measured; where answers share a prompt,
    from Ampere on; capped scores and sinks from there on, and on AMD's GPUs."""
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
    if (nvidia or device.backend == "hip") and size in ((64, 128, 192, 256) if dtype is BF16 else (256,)):
        for scores, own in ((Scores(0.1, 512, 50.0), None), (Scores(0.1, 512), sinks)):
            attention.attention(q, k, k, spans, scores, own)
            attention.attention_backward(*saved, scores)


OBJECTIVES = (Objective(), Objective(softcap=30.0), Objective(label_smoothing=0.1, z_loss=1e-4))
LOSSES = apart(WIDTHS, (262_144, 1000, 32_000), OBJECTIVES)
OFTEN_LOSSES = [(BF16, 262_144, Objective())]


@cases("losses", "cross-entropy of {1}", LOSSES, OFTEN_LOSSES)
def cross_entropies(dtype, vocabulary, objective):
    logits, labels, row = empty(512, vocabulary, dtype=dtype), empty(512, dtype=torch.int64), empty(512)
    often = (dtype, vocabulary, objective) in OFTEN_LOSSES
    for gradient, entropy in ((True, False),) if often else ((False, False), (True, False), (True, True)):
        losses.cross_entropy_(logits, labels, objective, gradient, entropy)
    for entropies in (None, row):
        losses.log_probs_backward_(logits, labels, row, entropies, row, entropies, objective)


@cases("losses", "divergence of {1}", LOSSES, OFTEN_LOSSES)
def divergences(dtype, vocabulary, objective):
    logits, teacher = empty(512, vocabulary, dtype=dtype), empty(512, vocabulary, dtype=dtype)
    often = (dtype, vocabulary, objective) in OFTEN_LOSSES
    for beta, gradient in ((0.5, True),) if often else ((0.5, True), (0.0, True), (1.0, True), (0.5, False)):
        divergence.divergence_(logits, teacher, (objective, Objective()), beta, gradient)


BLOCKS = apart(WIDTHS, (64, 32, 128, 256, 4096), (True, False))


@cases("formats", "4-bit weights in blocks of {1}", BLOCKS, [(BF16, 64, True)])
def four_bit_weights(dtype, blocksize, nested):
    rows, columns = STORED
    weight = weight4(rows, columns, blocksize, nested)
    blockwise4.dequantize_blockwise4(*weight, rows * columns, dtype)
    for transposed in (False, True):
        float8.float8_of_blockwise4(*weight, (rows, columns), empty(), transposed)
    blockwise4.quantize_blockwise4(empty(rows, columns, dtype=dtype), blocksize, "nf4")
    blockwise_cuda.quantize_blockwise4_cuda(empty(rows, columns, dtype=dtype), blocksize, "fp4")
    blockwise_cuda.approximate_reciprocal(empty(rows))


PLANES = apart(WIDTHS, (4, 2, 3, 5), (True, False), (HIDDEN, HIDDEN - 8))


@cases("formats", "{1} bits in planes", PLANES, [(BF16, 4, True, HIDDEN)])
def bit_planes(dtype, bits, affine, width):
    blocks = STORED[0] * (-(-width // 32))
    packed, scales = empty(blocks * bits, dtype=torch.int32), empty(blocks, dtype=torch.uint8)
    zeros = empty(blocks, dtype=torch.int8) if affine else None
    bitplane.dequantize_bitplane(packed, scales, zeros, empty(), empty(2**bits), STORED[0], width, dtype)
    bitplane.quantize_bitplane(empty(blocks, 32, dtype=dtype), scales, zeros, empty(), empty(2**bits))


HALF_QUADRATIC = [(FP32, 4, 64), *((BF16, *sizes) for sizes in apart((4, 2, 3, 8), (64, 32, 128)))]
EACH_WIDTH = [(dtype,) for dtype in WIDTHS]


@cases("formats", "HQQ, {1} bits", HALF_QUADRATIC, [(BF16, 4, 64)])
def half_quadratic(dtype, bits, group):
    rows, columns = STORED
    scales = empty(rows * columns // group, dtype=FP16)
    packed = empty(rows * columns // 32 * bits, dtype=torch.int32)
    hqq.dequantize_hqq(packed, scales, scales, bits, group, rows, columns, dtype)


@cases("formats", "NVFP4 and MXFP4", EACH_WIDTH, [(BF16,)])
def microscaling(dtype):
    rows, columns = STORED
    packed, scales = empty(rows, columns // 2, dtype=torch.uint8), empty(rows, columns // 16, dtype=torch.uint8)
    for factor, tile in ((empty(), (1, 16)), (None, (1, 32))):
        e2m1.dequantize_e2m1(packed, scales, factor, tile, columns, dtype)


@cases("formats", "GPTQ and AWQ", EACH_WIDTH, [(BF16,)])
def four_bit_words(dtype):
    rows, columns = STORED
    scales, zeros = empty(columns // 128, rows, dtype=FP16), empty(columns // 128, rows // 8, dtype=torch.int32)
    int4.dequantize_int4(empty(columns // 8, rows, dtype=torch.int32), zeros, scales, None, None, 1, dtype)


@cases("formats", "INT8", EACH_WIDTH, [(BF16,)])
def eight_bit_integers(dtype):
    rows, columns = STORED
    codes, absmax, x = empty(rows, columns, dtype=torch.int8), empty(rows), empty(rows, columns, dtype=dtype)
    int8.dequantize_rows_int8(codes, absmax, dtype)
    for chosen in (None, empty(columns, dtype=torch.bool)):
        int8.quantize_rows_int8(x, chosen, 6.0)
    for bias in (None, empty(columns, dtype=dtype)):
        int8.scale_int8_product(empty(rows, columns, dtype=torch.int32), absmax, empty(columns), bias, dtype)


@cases("formats", "FP8", EACH_WIDTH, [(BF16,)])
def eight_bit_floats(dtype):
    rows, columns = STORED
    codes = empty(rows, columns, dtype=E4M3)
    for scaling, scale in (("tensor", empty()), ("row", empty(rows)), ("tile", tiles(rows, columns))):
        float8_weights.dequantize_float8(codes, scale, scaling, dtype)
    float8.transpose_float8(codes)
    x = (empty(rows, columns, dtype=dtype),)
    for kind, factors, settled in itertools.product((E4M3, E5M2), (None, empty(columns)), (False, True)):
        float8.cast_float8(empty(), x, factors, empty(), empty(), kind, settled)


def tiles(rows: int, columns: int) -> Tensor:
    return empty(-(-rows // TILE), -(-columns // TILE))


def decoder_stack(
    batch: int, dtype: torch.dtype, size: int, eight: bool, spec: str = "blockwise4:nf4:64:plain"
) -> tuple[Tensor, Stack]:
    """A small layer on the CPU: its kernel's launcher reads values."""
    heads, key_heads, width, inner, slots, format_ = 8, 2, 512, 1024, 64, from_spec(spec)

    def projections(rows: list[int], columns: int) -> Projections:
        weights = []
        for each in rows:
            specs = format_.part_specs((each, columns)).items()
            parts = {name: torch.zeros(shape, dtype=part_dtype) for name, (shape, part_dtype) in specs}
            weights.append(PackedLinear(format_.product(parts, (each, columns)), each, columns, None))
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


LAYER_FORMATS = (
    "blockwise4:nf4:64:nested",
    "kbit:3:bof:searched",
    "hqq:4:64",
    "gptq:128:float16:runs",
    "nvfp4:2d:plain",
)
STACKS = apart((FP16, BF16), (1, 8), (128, 64, 256), (False, True), LAYER_FORMATS)


@cases("decoder", "decoder layers, heads of {2}, {4}", STACKS, [(BF16, 1, 128, False, LAYER_FORMATS[0])])
def decoder_layers(dtype, batch, size, eight, spec):
    decode.one_launch(*decoder_stack(batch, dtype, size, eight, spec))


PRODUCTS = list(itertools.product(DTYPES, (1, 4, 16, 64)))
OFTEN_PRODUCTS = [(FP16, 1), (FP16, 64)]


@cases("products", "4-bit products, {1} rows", PRODUCTS, OFTEN_PRODUCTS)
def four_bit_products(dtype, batch):
    x, bias = empty(batch, HIDDEN, dtype=dtype), empty(4096, dtype=dtype)
    often = (dtype, batch) in OFTEN_PRODUCTS
    for blocksize, nested in ((64, True),) if often else apart((64, 32, 128, 256, 512), (True, False)):
        blockwise4.linear_blockwise4(x, *weight4(4096, HIDDEN, blocksize, nested), 4096, bias)


@cases("products", "8-bit products, {1} rows", PRODUCTS, OFTEN_PRODUCTS)
def eight_bit_products(dtype, batch):
    rows, columns, x = 4096, HIDDEN, empty(batch, HIDDEN, dtype=dtype)
    codes = empty(rows, columns, dtype=torch.uint8)
    kinds = (("tensor", empty()), ("row", empty(rows)), ("tile", tiles(rows, columns)))
    for scaling, scale in kinds if dtype is BF16 else kinds[1:2]:
        float8_weights.linear_float8(x, codes, scale, scaling, None)
    int8.linear_int8(x, empty(rows, columns, dtype=torch.int8), empty(rows), empty(rows, dtype=dtype))


@cases("products", "k-bit products, {1} rows", PRODUCTS)
def plane_products(dtype, batch):
    rows, columns, x = 4096, HIDDEN, empty(batch, HIDDEN, dtype=dtype)
    blocks = rows * columns // 32
    every = dtype is BF16 and batch in (1, 64)  # of other dtypes and batches one each: decoders do not depend on them
    for bits in (2, 3, 4, 5) if every else (4,):
        packed, scales = empty(blocks * bits, dtype=torch.int32), empty(blocks, dtype=torch.uint8)
        bitplane.linear_bitplane(x, packed, scales, empty(), empty(2**bits), rows, None)
    for bits, group in apart((2, 3, 4, 8), (64, 32, 128)) if every else ((4, 64),):
        packed, zeros = empty(blocks * bits, dtype=torch.int32), empty(rows * columns // group, dtype=FP16)
        hqq.linear_hqq(x, packed, zeros.to(BF16), zeros, bits, group, rows, None)


@cases("products", "products with int4, NVFP4 and MXFP4, {1} rows", PRODUCTS)
def word_products(dtype, batch):
    rows, columns, x = 4096, HIDDEN, empty(batch, HIDDEN, dtype=dtype)
    every = dtype is BF16 and batch in (1, 64)
    for group in (128, 8, 32, 64, 256) if every else (128,):
        scales, zeros = empty(columns // group, rows, dtype=FP16), empty(columns // group, rows // 8, dtype=torch.int32)
        int4.linear_int4(x, empty(columns // 8, rows, dtype=torch.int32), zeros, scales, None, None, 1, None)
    packed = empty(rows, columns // 2, dtype=torch.uint8)
    for factor, tile in ((empty(), (1, 16)), (None, (1, 32)), (empty(), (16, 16)))[: 3 if every else 2]:
        scales = empty(rows // tile[0], columns // tile[1], dtype=torch.uint8)
        e2m1.linear_e2m1(x, packed, scales, factor, tile, None)


@cases("products", "adapters' products, {1} rows", PRODUCTS)
def adapter_products(dtype, batch):
    decode.low_rank_rows(empty(batch, HIDDEN, dtype=dtype), empty(16, HIDDEN, dtype=dtype), None)


def packed_experts(count: int, rows: int, columns: int, format_: Format | None = None) -> StackedWeight:
    """In NF4 where no format is given."""
    format_ = format_ or Blockwise4("nf4", 64, True)
    specs = format_.part_specs((count, rows, columns))
    parts = {name: empty(*size, dtype=dtype) for name, (size, dtype) in specs.items()}
    return StackedWeight(parts, (count, rows, columns), format_)


EXPERTS, TOP_K, SIDES = 128, 8, (2048, 1536)  # of Qwen3-30B-A3B


def expert_formats(every: bool) -> list[Format | None]:
    """Formats of stacked experts: one for each decoder with `every`, else NF4, MXFP4 and FP8."""
    more = ["kbit:3:bnf", "kbit:5:bnf", "hqq:8:64", "gptq:128:float16:runs", "nvfp4:2d:plain", "int8", "fp8:tile"]
    return [None, *(from_spec(f"stack:{spec}") for spec in ("mxfp4", "fp8:row", *(more if every else ())))]


TOKENS = apart((FP32, BF16), (8192, 1024, 512, 256, 8, 1))  # from 512 rows an expert to one, each another tile


@cases("experts", "experts", TOKENS, [(BF16, 8192)])
def expert_products(dtype, tokens):
    rank, slots = 16, tokens * TOP_K
    routing = experts.route(empty(tokens, TOP_K, dtype=torch.int64), EXPERTS)
    packed = [packed_experts(EXPERTS, *SIDES, format_) for format_ in expert_formats(tokens == 1)]
    stacks = *packed, StackedWeight.plain(empty(EXPERTS, *SIDES, dtype=dtype))
    for stack, transposed in itertools.product(stacks, (False, True)):
        depth, width = SIDES if transposed else SIDES[::-1]
        x, u = empty(tokens, depth, dtype=dtype), empty(slots, rank, dtype=dtype)
        shape = (EXPERTS, rank, width) if transposed else (EXPERTS, width, rank)
        experts.grouped_product(
            x, stack, routing, True, transposed, LowRank(u, empty(*shape, dtype=dtype), 1.0), None
        )  # fmt: skip
    for transposed in (False, True):  # with an adapter's own factors
        shape = (EXPERTS, SIDES[0], rank) if transposed else (EXPERTS, rank, SIDES[1])
        x = empty(slots, SIDES[transposed ^ 1], dtype=dtype)
        experts.grouped_product(x, StackedWeight.plain(empty(*shape, dtype=dtype)), routing, False, transposed)
    experts.grouped_outer(empty(tokens, SIDES[1], dtype=dtype), u, routing, True, 1.0, FP32)
    experts.combine(empty(slots, SIDES[0], dtype=dtype), routing, empty(tokens, TOP_K))


@cases("experts", "experts of a token", EACH_WIDTH)
def experts_of_a_token(dtype):
    x, weight = empty(1, SIDES[0], dtype=dtype), empty(EXPERTS, SIDES[0], dtype=dtype)
    _, scores, index = experts.top_experts(x, weight, TOP_K, True, dtype)
    for format_ in expert_formats(dtype is BF16):
        stacks = (packed_experts(EXPERTS, *size, format_) for size in (SIDES[::-1], (SIDES[0], SIDES[1] // 2)))
        experts.expert_rows(x, *stacks, Unit("silu"), index, scores)


UNITS = (Unit("silu"), Unit("gelu_tanh"), Unit("silu", True, 7.0, 1.702, 1.0))


@cases("experts", "experts' unit, {1.activation}", apart(WIDTHS, UNITS))
def expert_units(dtype, unit):
    c, z, slots = empty(ROWS, 1536, dtype=dtype), empty(ROWS, 768, dtype=dtype), empty(ROWS)
    experts.expert_unit(c, unit)
    experts.expert_unit_backward_(z, c, unit, slots, empty(ROWS, dtype=torch.int32))


# Every rule, AdamW with every storage, and bf16 weights with every rounding.
STEPS = [
    *((rule, "fp32", "nearest", FP32) for rule in RULES),
    *(("adamw", storage, "nearest", FP32) for storage in STORAGES if storage != "fp32"),
    ("ademamix", "dynamic8", "nearest", FP32), ("rmsprop", "dynamic8", "nearest", FP32),
    ("lion", "companded8", "nearest", FP32),
    *(("adamw", "dynamic8", rounding, BF16) for rounding in ROUNDINGS),
]  # fmt: skip
OFTEN_STEPS = [("adamw", storage, "nearest", dtype) for storage in ("dynamic8", "fp32") for dtype in WIDTHS]


@cases("optimizers", "{0}, state in {1}, {2} rounding", STEPS, OFTEN_STEPS)
def optimizer_step(rule, storage, rounding, dtype):
    size, coefficients, steps, one = 1 << 20, empty(1, len(Coefficients._fields)), empty(1), empty()
    settings, groups = empty(1, len(SETTINGS), dtype=torch.float64), empty(1, dtype=torch.int32)
    optimizer.prepare_step(settings, groups, steps, coefficients, rule, one, one)
    states = [STORAGES[storage].zeros(size, signed, steps.device) for signed in RULES[rule].signed]
    corrections = {"correction8": torch.int8, "correction16": torch.int16}
    correction = [empty(size, dtype=corrections[rounding])] if rounding in corrections else []
    weights, gradients = [empty(size, dtype=dtype)], [empty(size, dtype=dtype)]
    rows = torch.zeros(1, dtype=torch.int32)
    parameters = Parameters(rule, storage, rounding, rows, weights, gradients, [states], correction)
    optimizer.gradient_norm(coefficients, [parameters], 1.0)
    for trust in (name for name, row in TRUSTS.items() if rule in row.rules):
        optimizer.scale_by_trust(coefficients, [parameters], trust)
    optimizer.update_parameters(coefficients, steps, parameters, one)


@cases("muon", "Muon, momentum in {1} bits", apart(WIDTHS, (32, 8)), [(FP32, 32), (BF16, 32)])
def muon_step(dtype, bits):
    weights, gradients = [empty(1024, 3072, dtype=dtype)], [empty(1024, 3072, dtype=dtype)]
    momentum = (empty(1024, 3072, dtype=torch.int8), empty(1536)) if bits == 8 else (empty(1024, 3072), None)
    rows, one = torch.zeros(1, dtype=torch.int32), empty()
    parameters = Parameters("muon", f"{bits} bits", "nearest", rows, weights, gradients, [[momentum]])
    directions = empty(1, 1024, 3072, dtype=BF16)
    muon.directions(directions, parameters, 0.95, True, one, one)
    muon.apply_directions(directions, parameters, one, 0.1, 0.2, one)
