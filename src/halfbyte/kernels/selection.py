"""Which kernel runs each op on a device: evaluates the dispatch table for typical calls on meta tensors.

`halfbyte env --kernels` prints it, for the local device or for one of `device.KNOWN`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import formats, ops
from ..dispatch import Op
from ..formats import Blockwise4
from ..formats.float8 import E4M3, E5M2
from ..ops.cross_entropy import Objective
from ..ops.decode import DecoderLayer, Projections, Stack, Weight4
from ..ops.experts import Routing, StackedWeight
from ..ops.fp8_scaling import DelayedScaling, ScalingOptions, Slot
from ..ops.lora_glu import Factors
from ..ops.optimizer import RULES, Coefficients, Parameters
from ..ops.optimizer_state import STORAGES
from .device import Device, assumed

FP32 = torch.float32
FP16 = torch.float16
BF16 = torch.bfloat16
# linears of an 8B model, and rows of a training step
SIZE = 4096
INNER = 14336
ROWS = 8192
REFERENCE = "reference"


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


def choices(device: Device) -> Iterator[Choice]:
    """Yield the kernel of every op on a device, which need not be present."""
    device_type = "cuda" if device.backend == "hip" else device.backend
    with assumed(device):
        for name, op in all_ops().items():
            for shapes, arguments in EXAMPLES.get(name, _anything)():
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
    return dict(sorted(by_name.items(), key=lambda item: (item[0] not in EXAMPLES, item[0])))


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


def _anything() -> Iterator[Example]:
    yield "", ()


def _blockwise4() -> Iterator[Example]:
    batches = [(rows, BF16, 64) for rows in (1, 2, 3, 8, 9, 16, 17, 64, 65)]
    for rows, dtype, blocksize in (*batches, (1, BF16, 128), (4, BF16, 32), (1, FP32, 64)):
        words = f"M = {rows}, {_name(dtype)}, blocks of {blocksize}"
        yield words, (empty(rows, SIZE, dtype=dtype), *weight4(SIZE, SIZE, blocksize, True), SIZE, None)


def _bitplane() -> Iterator[Example]:
    for bits, rows in ((2, 1), (2, 16), (2, 17), (4, 1), (4, 8), (4, 9), (4, 64), (4, 65)):
        packed, scales = empty(SIZE * SIZE // 32 * bits, dtype=torch.int32), empty(SIZE * SIZE // 32, dtype=torch.uint8)
        x = empty(rows, SIZE, dtype=BF16)
        yield f"M = {rows}, bf16, {bits} bits", (x, packed, scales, empty(), empty(2**bits), SIZE, None)


def _hqq() -> Iterator[Example]:
    for rows, dtype in ((1, BF16), (16, BF16), (17, BF16), (65, BF16), (1, FP16)):
        packed, scales = empty(SIZE * SIZE // 8, dtype=torch.int32), empty(SIZE * SIZE // 64, dtype=FP16)
        x = empty(rows, SIZE, dtype=dtype)
        yield f"M = {rows}, {_name(dtype)}, 4 bits, groups of 64", (x, packed, scales, scales, 4, 64, SIZE, None)


def _float8() -> Iterator[Example]:
    for rows in (1, 2, 64, 65):
        codes = empty(SIZE, SIZE, dtype=torch.uint8)
        yield f"M = {rows}, bf16", (empty(rows, SIZE, dtype=BF16), codes, empty(SIZE), "row", None)


def _int8() -> Iterator[Example]:
    for rows in (1, 2, 64, 65):
        codes = empty(SIZE, SIZE, dtype=torch.int8)
        yield f"M = {rows}, bf16", (empty(rows, SIZE, dtype=BF16), codes, empty(SIZE), None)


def _low_rank() -> Iterator[Example]:
    for rows, rank in ((1, 16), (64, 16), (65, 16), (1, 8)):
        yield f"M = {rows}, bf16, r = {rank}", (empty(rows, SIZE, dtype=BF16), empty(rank, SIZE, dtype=BF16), None)


def _dequantize_bitplane() -> Iterator[Example]:
    for rows, affine in ((SIZE, False), (SIZE, True), (512, False)):
        blocks = rows * SIZE // 32
        zeros = empty(blocks, dtype=torch.int8) if affine else None
        tensors = empty(blocks * 4, dtype=torch.int32), empty(blocks, dtype=torch.uint8), zeros, empty(), empty(16)
        yield f"[{rows}, {SIZE}], 4 bits" + ", zeros" * affine, (*tensors, rows, SIZE, BF16)


def _float8_of_blockwise4() -> Iterator[Example]:
    for blocksize, transposed in ((64, False), (64, True), (16, False)):
        words = f"[{SIZE}, {SIZE}], blocks of {blocksize}" + ", transposed" * transposed
        yield words, (*weight4(SIZE, SIZE, blocksize, True), (SIZE, SIZE), empty(), transposed)


def _cast() -> Iterator[Example]:
    yield f"[{ROWS}, {SIZE}]", (empty(), [empty(ROWS, SIZE, dtype=BF16)], None, empty(), empty(), E4M3)


def _cross_entropy() -> Iterator[Example]:
    for vocabulary, objective, words in (
        (128_256, Objective(), ""), (50_257, Objective(), ""), (262_144, Objective(), ""),
        (128_256, Objective(softcap=30.0), ", softcap"),
    ):  # fmt: skip
        labels = empty(512, dtype=torch.int64)
        yield f"V = {vocabulary}, bf16{words}", (empty(512, vocabulary, dtype=BF16), labels, objective, True, False)


def _unit(rank: int) -> tuple[Tensor, Tensor, Factors]:
    b, a = empty(INNER, rank, dtype=BF16), empty(rank, INNER, dtype=BF16)
    return empty(ROWS, INNER, dtype=BF16), empty(ROWS, 2 * rank, dtype=BF16), Factors(b, b, a, 1.5, 0.7)


def _lora_glu(*options: Any) -> Iterator[Example]:
    for rank, activation in ((16, "silu"), (32, "silu"), (16, "gelu")):
        gate, low, factors = _unit(rank)
        yield f"[{ROWS}, {INNER}], r = {rank}, {activation}", (gate, gate, low, factors, activation, *options)


def _lora_glu_backward(*options: Any) -> Iterator[Example]:
    for words, (gate, _, low, factors, activation) in _lora_glu():
        v_down = empty(ROWS, factors.a_down.shape[0], dtype=BF16)
        yield words, (gate, gate, gate, low, v_down, factors, activation, *options)


def _in_one_pass() -> Iterator[Example]:
    yield "r = 16, bf16", (empty(0, dtype=BF16), 16)


def _rms_norm_float8() -> Iterator[Example]:
    x = empty(ROWS, SIZE, dtype=BF16)
    yield f"[{ROWS}, {SIZE}]", (x, x, empty(SIZE, dtype=BF16), 1e-6, False, slot(E4M3))


def _fp8_product() -> Iterator[Example]:
    a = empty(ROWS, SIZE, dtype=E4M3)
    b = empty(SIZE, SIZE, dtype=E4M3)
    out = empty(ROWS, SIZE, dtype=BF16)
    yield "M = 8192", (a, b, empty(), empty(), out, True)
    yield "M = 8192, scales of rows", (a, b, empty(), empty(SIZE), out, True)
    odd = empty(1001, SIZE, dtype=E4M3)
    yield "N = 1001", (a, odd, empty(), empty(), empty(ROWS, 1001, dtype=BF16), True)


def _update_parameters() -> Iterator[Example]:
    rows, values = torch.zeros(1, dtype=torch.int32), empty(SIZE)
    for storage in STORAGES:
        state = [STORAGES[storage].zeros(SIZE, signed, values.device) for signed in RULES["adamw"].signed]
        parameters = Parameters("adamw", storage, "nearest", rows, [values], [values], [state])
        yield f"AdamW, state in {storage}", (empty(1, len(Coefficients._fields)), empty(1), parameters, None)


def _rows_backward() -> Iterator[Example]:
    for length in (2048, 16384):
        q, k = empty(1, 32, length, 128, dtype=BF16), empty(1, 8, length, 128, dtype=BF16)
        yield f"32/8 heads of 128, T = {length}", (q, q, k, k, q, empty(1, 32, length, 1), 0.1)


def _one_launch() -> Iterator[Example]:
    def projections(rows: tuple[int, ...], columns: int) -> Projections:
        weights = []
        for outputs in rows:
            packed, absmax, *_ = weight4(outputs, columns, 64, False)
            weights.append(Weight4(packed, absmax, None, 64, "nf4", outputs, None))
        return Projections(weights, None, [None] * len(rows), None)

    for batch, dtype in ((1, BF16), (8, BF16), (9, BF16), (1, FP32)):
        norm, angles = empty(SIZE, dtype=dtype), empty(1024, 128, dtype=dtype)
        cache = empty(batch, 8, 1024, 128, dtype=dtype)
        layer = DecoderLayer(
            projections((SIZE, 1024, 1024), SIZE), projections((SIZE,), SIZE), projections((INNER, INNER), SIZE),
            projections((SIZE,), INNER), norm, norm, None, None, cache, cache, None,
        )  # fmt: skip
        stack = Stack([layer], 32, 1e-5, 0.1, angles, angles, empty(batch, dtype=torch.int32), empty(1))
        yield f"{batch} rows, {_name(dtype)}, NF4", (empty(batch, SIZE, dtype=dtype), stack)


def _grouped_product() -> Iterator[Example]:
    # Qwen3-30B-A3B's gate and up
    experts = 128
    rows = 1536
    columns = 2048
    top_k = 8
    format_ = Blockwise4("nf4", 64, True)
    specs = format_.part_specs((experts, rows, columns))
    tensors = {name: empty(*size, dtype=dtype) for name, (size, dtype) in specs.items()}
    stack = StackedWeight(tensors, (experts, rows, columns), format_)
    for rows_per_expert, tile in ((1, 16), (32, 64), (512, 128)):
        order, tiles = (
            empty(rows_per_expert * experts, dtype=torch.int32),
            empty(rows_per_expert * experts, 2, dtype=torch.int32),
        )
        routing = Routing(order, order, empty(experts + 1, dtype=torch.int32), tiles, tile, top_k)
        x, grad = (
            empty(rows_per_expert * experts, columns, dtype=BF16),
            empty(rows_per_expert * experts, rows, dtype=BF16),
        )
        yield f"{rows_per_expert} rows an expert, NF4", (x, stack, routing)
        yield f"{rows_per_expert} rows an expert, transposed", (grad, stack, routing, False, True)


def _name(dtype: torch.dtype) -> str:
    return {FP32: "fp32", FP16: "fp16", BF16: "bf16"}[dtype]


EXAMPLES: dict[str, Callable[[], Iterator[Example]]] = {
    "linear_blockwise4": _blockwise4,
    "linear_bitplane": _bitplane,
    "linear_hqq": _hqq,
    "linear_float8": _float8,
    "linear_int8": _int8,
    "low_rank_rows": _low_rank,
    "one_launch": _one_launch,
    "dequantize_bitplane": _dequantize_bitplane,
    "float8_of_blockwise4": _float8_of_blockwise4,
    "cast_float8": _cast,
    "cross_entropy_": _cross_entropy,
    "in_one_pass": _in_one_pass,
    "lora_glu": _lora_glu,
    "lora_glu_float8": lambda: _lora_glu(slot(E4M3)),
    "lora_glu_backward_": _lora_glu_backward,
    "lora_glu_backward_float8": lambda: _lora_glu_backward(slot(E5M2), None),
    "grouped_product": _grouped_product,
    "rms_norm_float8": _rms_norm_float8,
    "fp8_product": _fp8_product,
    "rows_backward": _rows_backward,
    "update_parameters": _update_parameters,
}
