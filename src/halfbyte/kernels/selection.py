"""Which kernel runs each op on a device: evaluates the dispatch table for typical calls on meta tensors.

`halfbyte env --kernels` prints it, for the local device or for one of `device.KNOWN`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import pkgutil
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import formats, ops
from ..dispatch import Op
from ..formats.bitplane import linear_bitplane
from ..formats.blockwise4 import linear_blockwise4
from ..formats.e2m1 import linear_e2m1
from ..formats.float8 import E4M3, E5M2
from ..formats.linear import PackedProduct
from ..ops.cross_entropy import Objective
from ..ops.decode import DecoderLayer, PackedLinear, Projections, Stack
from ..ops.experts import Routing, StackedWeight, Unit
from ..ops.fp8_scaling import DelayedScaling, ScalingOptions, Slot
from ..ops.lora_glu import Factors
from ..ops.optimizer import RULES, Coefficients, Parameters
from ..ops.optimizer_state import STORAGES
from .device import AMPERE, Device, assumed

FP32 = torch.float32
FP16 = torch.float16
BF16 = torch.bfloat16
# linears of an 8B model, and rows of a training step
SIZE = 4096
INNER = 14336
ROWS = 8192
REFERENCE = "reference"
NAMES = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}


class Choice(NamedTuple):
    """The kernel that runs one call of an op.

    Args:
        shapes: description of the call; "" if the choice does not depend on it.
        kernel: its name, or `REFERENCE`.
        refusals: kernels with lower rank, and why they refuse the call.
    """

    op: str
    shapes: str
    kernel: str
    refusals: dict[str, str]


Example = tuple[str, tuple]  # description of the shapes, and arguments
Call = tuple[str, str, tuple]  # the op's name, then as in `Example`


def choices(device: Device) -> Iterator[Choice]:
    """Yield the kernel of every op on a device, which need not be present."""
    device_type = "cuda" if device.backend == "hip" else device.backend
    half = FP16 if device.backend == "cuda" and not device.at_least(AMPERE) else BF16
    with assumed(device):
        for name, op in all_ops().items():
            for shapes, arguments in examples(half).get(name, [("", ())]):
                reasons = (
                    op.choices(device_type, *arguments) if shapes else [(k.name, None) for k in op.kernels(device_type)]
                )
                index = next((i for i, (_, reason) in enumerate(reasons) if reason is None), len(reasons))
                kernel = reasons[index][0] if index < len(reasons) else REFERENCE
                yield Choice(name, shapes, kernel, {name: reason or "" for name, reason in reasons[:index]})


def all_ops() -> dict[str, Op]:
    """All ops by name; ops with examples come first."""
    folders = ((folder, module.name) for folder in (ops, formats) for module in pkgutil.iter_modules(folder.__path__))
    modules = [importlib.import_module(f"{folder.__name__}.{name}") for folder, name in folders]
    by_name = {op.reference.__name__: op for module in modules for op in vars(module).values() if isinstance(op, Op)}
    return dict(sorted(by_name.items(), key=lambda item: (item[0] not in examples(), item[0])))


def empty(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight4(rows: int, columns: int, blocksize: int, nested: bool) -> tuple:
    """Meta tensors and options of a 4-bit weight: packed, absmax, nested, blocksize, quant_type."""
    blocks = rows * columns // blocksize
    packed = empty(rows * columns // 2, 1, dtype=torch.uint8)
    if not nested:
        return packed, empty(blocks), None, blocksize, "nf4"
    return packed, empty(blocks, dtype=torch.uint8), (empty(blocks // 256), empty(256), empty()), blocksize, "nf4"


def slot(dtype: torch.dtype) -> Slot:
    return Slot(DelayedScaling([dtype], ScalingOptions(), device="meta"), 0)


def _few_rows(half: torch.dtype) -> Iterator[Call]:
    """Linears of quantized weights with M rows of x, as in decoding in `half`, the device's 16-bit dtype."""
    batches = [(rows, half, 64) for rows in (1, 2, 3, 8, 9, 16, 17, 64, 65)]
    for rows, dtype, blocksize in (*batches, (1, half, 128), (4, half, 32), (1, FP32, 64)):
        x = empty(rows, SIZE, dtype=dtype)
        arguments = x, *weight4(SIZE, SIZE, blocksize, True), SIZE, None
        yield "linear_blockwise4", f"M = {rows}, {NAMES[dtype]}, blocks of {blocksize}", arguments
    planes = empty(SIZE * SIZE // 8, dtype=torch.int32), empty(SIZE * SIZE // 32, dtype=torch.uint8)
    nf4 = PackedProduct(linear_blockwise4, (*weight4(SIZE, SIZE, 64, True), SIZE))
    kbit4 = PackedProduct(linear_bitplane, (*planes, empty(), empty(16), SIZE))
    codes, scales = empty(SIZE, SIZE // 2, dtype=torch.uint8), empty(SIZE, SIZE // 16, dtype=torch.uint8)
    nvfp4 = PackedProduct(linear_e2m1, (codes, scales, empty(), (1, 16)))
    for name, product, rows in (("NF4", nf4, 1), ("NF4", nf4, 16), ("kbit4", kbit4, 16), ("NVFP4", nvfp4, 16)):
        linears = [PackedLinear(product, SIZE, SIZE, None)] * 3
        shapes = f"M = {rows}, {NAMES[half]}, 3 weights in {name}"
        yield "packed_linears", shapes, (empty(rows, SIZE, dtype=half), linears, [None] * 3)
    for bits, rows in ((2, 1), (2, 16), (2, 17), (4, 1), (4, 8), (4, 9), (4, 64), (4, 65)):
        packed, scales = empty(SIZE * SIZE // 32 * bits, dtype=torch.int32), empty(SIZE * SIZE // 32, dtype=torch.uint8)
        arguments = empty(rows, SIZE, dtype=half), packed, scales, empty(), empty(2**bits), SIZE, None
        yield "linear_bitplane", f"M = {rows}, {NAMES[half]}, {bits} bits", arguments
    for rows, dtype in ((1, half), (16, half), (17, half), (65, half), (1, FP16)):
        packed, zeros = empty(SIZE * SIZE // 8, dtype=torch.int32), empty(SIZE * SIZE // 64, dtype=FP16)
        arguments = empty(rows, SIZE, dtype=dtype), packed, zeros.to(BF16), zeros, 4, 64, SIZE, None
        yield "linear_hqq", f"M = {rows}, {NAMES[dtype]}, 4 bits, groups of 64", arguments
    for rows, group in ((1, 128), (16, 128), (64, 128), (65, 128), (1, 32), (1, 8), (1, SIZE)):
        groups = SIZE // group
        words, scales = empty(SIZE // 8, SIZE, dtype=torch.int32), empty(groups, SIZE, dtype=FP16)
        zeros = empty(groups, SIZE // 8, dtype=torch.int32)
        arguments = empty(rows, SIZE, dtype=half), words, zeros, scales, None, None, 1, None
        yield "linear_int4", f"M = {rows}, {NAMES[half]}, groups of {group}", arguments
    for rows, block in ((1, 16), (16, 16), (65, 16), (1, 32)):
        packed, scales = empty(SIZE, SIZE // 2, dtype=torch.uint8), empty(SIZE, SIZE // block, dtype=torch.uint8)
        factor = empty() if block == 16 else None
        arguments = empty(rows, SIZE, dtype=half), packed, scales, factor, (1, block), None
        yield "linear_e2m1", f"M = {rows}, {NAMES[half]}, blocks of {block}", arguments
    for rows in (1, 2, 64, 65):
        x, absmax = empty(rows, SIZE, dtype=half), empty(SIZE)
        yield (
            "linear_float8",
            f"M = {rows}, {NAMES[half]}",
            (x, empty(SIZE, SIZE, dtype=torch.uint8), absmax, "row", None),
        )
        yield "linear_int8", f"M = {rows}, {NAMES[half]}", (x, empty(SIZE, SIZE, dtype=torch.int8), absmax, None)
    for rows, rank in ((1, 16), (64, 16), (65, 16), (1, 8)):
        factors = empty(rows, SIZE, dtype=half), empty(rank, SIZE, dtype=half)
        yield "low_rank_rows", f"M = {rows}, {NAMES[half]}, r = {rank}", (*factors, None)


def _decoding() -> Iterator[Call]:
    """All layers of a decoding step in one launch."""

    def projections(rows: tuple[int, ...], columns: int) -> Projections:
        weights = []
        for outputs in rows:
            packed, absmax, *_ = weight4(outputs, columns, 64, False)
            product = PackedProduct(linear_blockwise4, (packed, absmax, None, 64, "nf4", outputs))
            weights.append(PackedLinear(product, outputs, columns, None))
        return Projections(weights, None, [None] * len(rows), None)

    for batch, dtype in ((1, BF16), (8, BF16), (9, BF16), (1, FP32)):
        norm, angles = empty(SIZE, dtype=dtype), empty(1024, 128, dtype=dtype)
        cache = empty(batch, 8, 1024, 128, dtype=dtype)
        layer = DecoderLayer(
            projections((SIZE, 1024, 1024), SIZE), projections((SIZE,), SIZE), projections((INNER, INNER), SIZE),
            projections((SIZE,), INNER), norm, norm, None, None, cache, cache, None,
        )  # fmt: skip
        stack = Stack([layer], 32, 1e-5, 0.1, angles, angles, empty(batch, dtype=torch.int32), empty(1))
        yield "one_launch", f"{batch} rows, {NAMES[dtype]}, NF4", (empty(batch, SIZE, dtype=dtype), stack)


def _training() -> Iterator[Call]:
    """Ops of a training step."""
    for rows, affine in ((SIZE, False), (SIZE, True), (512, False)):
        blocks = rows * SIZE // 32
        zeros = empty(blocks, dtype=torch.int8) if affine else None
        tensors = empty(blocks * 4, dtype=torch.int32), empty(blocks, dtype=torch.uint8), zeros, empty(), empty(16)
        shapes = f"[{rows}, {SIZE}], 4 bits" + ", zeros" * affine
        yield "dequantize_bitplane", shapes, (*tensors, rows, SIZE, BF16)
    for blocksize, transposed in ((64, False), (64, True), (16, False)):
        shapes = f"[{SIZE}, {SIZE}], blocks of {blocksize}" + ", transposed" * transposed
        weight = weight4(SIZE, SIZE, blocksize, True)
        yield "float8_of_blockwise4", shapes, (*weight, (SIZE, SIZE), empty(), transposed)
    x, codes = empty(ROWS, SIZE, dtype=BF16), empty(ROWS, SIZE, dtype=E4M3)
    yield "cast_float8", f"[{ROWS}, {SIZE}]", (empty(), [x], None, empty(), empty(), E4M3)
    yield "rms_norm_float8", f"[{ROWS}, {SIZE}]", (x, x, empty(SIZE, dtype=BF16), 1e-6, False, slot(E4M3))
    for outputs, shapes, scale in ((SIZE, "M = 8192", empty()), (SIZE, "M = 8192, scales of rows", empty(SIZE)),
                                   (1001, "N = 1001", empty())):  # fmt: skip
        out = empty(ROWS, outputs, dtype=BF16)
        yield "fp8_product", shapes, (codes, empty(outputs, SIZE, dtype=E4M3), empty(), scale, out, True)
    e2m1, e4m3 = empty(ROWS, SIZE, dtype=torch.uint8), empty(ROWS, SIZE // 16, dtype=torch.uint8)
    for outputs in (SIZE, 1001):
        weight4_scales = empty(-(-outputs // 16), SIZE // 16, dtype=torch.uint8)
        operands = e2m1, empty(outputs, SIZE, dtype=torch.uint8), e4m3, weight4_scales, empty()
        yield "nvfp4_product", f"N = {outputs}", (*operands, BF16)
    for vocabulary, softcap in ((128_256, None), (50_257, None), (262_144, None), (128_256, 30.0)):
        logits, labels = empty(512, vocabulary, dtype=BF16), empty(512, dtype=torch.int64)
        shapes = f"V = {vocabulary}, bf16" + (", softcap" if softcap else "")
        yield "cross_entropy_", shapes, (logits, labels, Objective(softcap=softcap), True, False)
    yield "in_one_pass", "r = 16, bf16", (empty(0, dtype=BF16), 16)
    for rank, activation in ((16, "silu"), (32, "silu"), (16, "gelu")):
        b, a = empty(INNER, rank, dtype=BF16), empty(rank, INNER, dtype=BF16)
        gate, low = empty(ROWS, INNER, dtype=BF16), empty(ROWS, 2 * rank, dtype=BF16)
        factors, v_down = Factors(b, b, a, 1.5, 0.7), empty(ROWS, rank, dtype=BF16)
        forward = gate, gate, low, factors, activation
        backward = gate, gate, gate, low, v_down, factors, activation
        shapes = f"[{ROWS}, {INNER}], r = {rank}, {activation}"
        yield "lora_glu", shapes, forward
        yield "lora_glu_float8", shapes, (*forward, slot(E4M3))
        yield "lora_glu_backward_", shapes, backward
        yield "lora_glu_backward_float8", shapes, (*backward, slot(E5M2), None)
    for length in (2048, 16384):
        q, k = empty(1, 32, length, 128, dtype=BF16), empty(1, 8, length, 128, dtype=BF16)
        shapes = f"32/8 heads of 128, T = {length}"
        yield "rows_backward", shapes, (q, q, k, k, q, empty(1, 32, length, 1), 0.1)
    first, values = torch.zeros(1, dtype=torch.int32), empty(SIZE)
    for storage in STORAGES:
        state = [STORAGES[storage].zeros(SIZE, signed, values.device) for signed in RULES["adamw"].signed]
        parameters = Parameters("adamw", storage, "nearest", first, [values], [values], [state])
        coefficients = empty(1, len(Coefficients._fields))
        yield "update_parameters", f"AdamW, state in {storage}", (coefficients, empty(1), parameters, None)


def _experts() -> Iterator[Call]:
    """GEMMs of Qwen3-30B-A3B's experts: gate and up in NF4, and the MLP of one token in several formats."""
    experts, (rows, columns) = 128, (1536, 2048)

    def stack_of(name: str, outputs: int, inputs: int) -> StackedWeight:
        format_, shape = formats.named(name).stacked(), (experts, outputs, inputs)
        parts = {name: empty(*size, dtype=dtype) for name, (size, dtype) in format_.part_specs(shape).items()}
        return StackedWeight(parts, shape, format_)

    stack = stack_of("nf4", rows, columns)
    for per_expert, tile in ((1, 16), (32, 64), (512, 128)):
        slots = per_expert * experts
        order, tiles = empty(slots, dtype=torch.int32), empty(slots, 2, dtype=torch.int32)
        routing = Routing(order, order, empty(experts + 1, dtype=torch.int32), tiles, tile, 8)
        x, grad = empty(slots, columns, dtype=BF16), empty(slots, rows, dtype=BF16)
        yield "grouped_product", f"{per_expert} rows an expert, NF4", (x, stack, routing)
        yield "grouped_product", f"{per_expert} rows an expert, transposed", (grad, stack, routing, False, True)
    x = empty(1, columns, dtype=BF16)
    index = empty(1, 8, dtype=torch.int64)
    routed = empty(1, 8, dtype=BF16)
    for name in ("nf4", "kbit3", "gptq:128:float16:runs", "nvfp4", "mxfp4", "hqq4", "int8", "fp8"):
        first, second = stack_of(name, rows, columns), stack_of(name, columns, rows // 2)
        yield "expert_rows", f"1 token, 8 experts, {name}", (x, first, second, Unit("silu"), index, routed)


@functools.cache
def examples(half: torch.dtype = BF16) -> dict[str, list[Example]]:
    """Typical calls by the name of their op; decoding uses `half`."""
    table: dict[str, list[Example]] = {}
    for name, shapes, arguments in itertools.chain(_few_rows(half), _decoding(), _training(), _experts()):
        table.setdefault(name, []).append((shapes, arguments))
    return table
