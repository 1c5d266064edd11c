"""Compare the Triton decoders of every format, through each product that takes them, with the torch references."""

import functools

import pytest
import torch

from halfbyte.formats import Stack, from_spec
from halfbyte.ops import experts as ops
from halfbyte.ops.experts import StackedWeight, Unit
from tests.helpers.parity import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    assert_as_close_as_torch,
    exact,
    mark,
    poisoned,  # noqa: F401
    random,
)

pytest.importorskip("triton")
from halfbyte.kernels.triton import decoders, few_rows, grouped
from halfbyte.kernels.triton import experts as kernels

pytestmark = mark

EXPERTS = 3
SPECS = [
    "blockwise4:nf4:64:nested", "blockwise4:fp4:32:plain", "nvfp4:1d:plain", "nvfp4:2d:plain", "mxfp4", "kbit:2:affine",
    "kbit:3:bnf", "kbit:4:fitted", "kbit:5:nf", "hqq:8:128", "hqq:4:64", "hqq:3:32:float16", "hqq:2:64",
    "gptq:64:float16:runs", "gptq_v2:24:bfloat16:runs", "gptq:12:float16:runs", "gptq:64:float16:ordered",
    "gptq:64:float16:indexed", "int8", "fp8:row", "fp8:tensor", "fp8:tile",
]  # fmt: skip
specs = pytest.mark.parametrize("spec", SPECS)
HALVES = [dtype for dtype in DTYPES if dtype is not torch.float32]


@functools.lru_cache(2)
def stack_of(spec, rows, columns):
    """Experts [rows, columns] with different scales, in the stacked format."""
    torch.manual_seed(0)
    format_, shape = from_spec(spec).stacked(), (EXPERTS, rows, columns)
    if spec.startswith("gptq"):
        parts = int4_parts(format_.part_specs(shape), format_.matrix_format.group_size)
    else:
        parts = format_.quantize(torch.randn(shape) * torch.tensor([1.0, 0.1, 3.0]).view(-1, 1, 1))
    return StackedWeight({name: part.to(DEVICE) for name, part in parts.items()}, shape, format_)


def int4_parts(part_specs, group_size):
    parts = {}
    for name, (size, dtype) in part_specs.items():
        if name == "order":
            orders = torch.stack([torch.randperm(size[-1]) for _ in range(EXPERTS)])
            parts[name] = torch.stack([orders, orders.argsort(1)], dim=1).int()
        elif name == "g_idx":
            parts[name] = torch.randint(0, size[-1] // group_size, size, dtype=dtype)
        elif dtype is torch.int32:
            parts[name] = torch.randint(-(2**31), 2**31 - 1, size, dtype=dtype)
        else:
            parts[name] = (torch.rand(size) * 0.1).to(dtype)
    return parts


def matrix_of(stack):
    """The first expert as a weight of a linear."""
    format_, parts = stack.format.expert(stack.parts, stack.shape, 0)
    return format_, parts, stack.values(torch.float32)[0]


def dtype_of(spec):
    return HALVES[SPECS.index(spec) % len(HALVES)]


@specs
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
def test_grouped_product(spec, transposed):
    """Rows that end within a tile, and tokens of experts without rows."""
    dtype, stack = dtype_of(spec), stack_of(spec, 40, 192)
    assert decoders.stack_obstacle(stack) is None
    index = torch.tensor([[0, 2], [2, 0], [2, 0], [0, 2]], device=DEVICE)
    routing = kernels.route(index, EXPERTS)
    x = random(4, 40 if transposed else 192, dtype=dtype)
    values = StackedWeight.plain(stack.values(dtype))
    mine = grouped.grouped_product(x, stack, routing, True, transposed)
    torchs = ops.grouped_product.reference(x, values, routing, True, transposed)
    on_cpu = ops.Routing(*(part.cpu() for part in routing[:4]), *routing[4:])
    truth = StackedWeight.plain(exact(values.parts["values"]))
    assert_as_close_as_torch(mine, torchs, ops.grouped_product.reference(exact(x), truth, on_cpu, True, transposed))


@specs
def test_gemv_and_gemm(spec):
    """N that ends within a tile, K that ends within a step, and an empty part of K."""
    dtype, (format_, parts, values) = dtype_of(spec), matrix_of(stack_of(spec, 40, 192))
    packed = decoders.packed_stack(StackedWeight(parts, (1, 40, 192), format_))
    if "order" in parts:
        pytest.skip("a linear permutes x instead")
    bias = random(40, dtype=dtype)
    for batch, run in ((1, few_rows.gemv), (2, few_rows.gemv), (5, few_rows.gemm)):
        x = random(batch, 192, dtype=dtype)
        blocks = few_rows.GemvBlocks(8, 16, 1) if run is few_rows.gemv else few_rows.GemmBlocks(64, 64, 4, 1, 4)
        truth = exact(x) @ exact(values).T + exact(bias)
        found = run(x, packed, 40, bias, blocks)
        assert (exact(found) - truth).norm() <= 1.5 * torch.finfo(dtype).eps * truth.norm()


@specs
@pytest.mark.parametrize(
    "unit", [Unit("silu"), Unit("silu", True, 7.0, 1.702, 1.0)], ids=lambda unit: f"{'inter' * unit.interleaved}leaved"
)
def test_expert_rows(spec, unit):
    dtype = dtype_of(spec)
    first, second = stack_of(spec, 2 * 192, 192), stack_of(spec, 40, 192)
    index, routed = torch.tensor([[0, 2], [1, 0]], device=DEVICE), random(2, 2).abs()
    x = random(2, 192, dtype=dtype, scale=0.1)
    assert few_rows.expert_rows_obstacle(x, first, second, unit, index, routed) is None
    found = few_rows.expert_rows(x, first, second, unit, index, routed)
    plain = [StackedWeight.plain(exact(stack.values(torch.float32))) for stack in (first, second)]
    truth = ops.expert_rows.reference(exact(x), *plain, unit, index.cpu(), exact(routed))
    assert (found.shape, found.dtype) == ((2, 40), dtype)
    assert (exact(found) - truth).norm() <= 3 * torch.finfo(dtype).eps * truth.norm()


@specs
def test_linears_select_a_kernel(spec):
    """Linears of few rows where no CUDA kernel takes them, as on AMD's GPUs."""
    if spec == "kbit:2:affine" or spec == "hqq:3:32:float16" or spec.startswith("fp8") or spec == "int8":
        pytest.skip("dequantized first, or multiplied by `gemv8`")
    format_, parts, values = matrix_of(stack_of(spec, 40, 192))
    taken = [name for name in vars(few_rows) if name in ("blockwise4", "bitplane", "hqq", "int4", "e2m1")]
    assert len(taken) == 5
    for batch in (1, 3):
        x = random(batch, 192, dtype=HALVES[0])
        found = linear_by_triton(format_, x, parts, (40, 192))
        truth = exact(x) @ exact(values).T
        assert (exact(found) - truth).norm() <= 1.5 * torch.finfo(x.dtype).eps * truth.norm()


def linear_by_triton(format_, x, parts, shape):
    stored = list(parts.values())
    match format_.name:
        case "blockwise4":
            nested = format_.nested_parts(parts)
            options = format_.blocksize, format_.quant_type, shape[0], None
            return few_rows.blockwise4(x, parts["packed"], parts["absmax"], nested, *options)
        case "kbit":
            tables = parts["factor"], format_.levels(parts)
            return few_rows.bitplane(x, parts["packed"], parts["scales"], *tables, shape[0], None)
        case "hqq":
            return few_rows.hqq(x, *stored, format_.bits, format_.group, shape[0], None)
        case "nvfp4":
            return few_rows.e2m1(x, *stored, format_.tile, None)
        case "mxfp4":
            return few_rows.e2m1(x, *stored, None, (1, 32), None)
    index = parts.get("g_idx"), parts.get("order")
    return few_rows.int4(x, *stored[:3], *index, format_.zero_shift, None)


def test_stacks_that_are_decoded_first():
    obstacle = decoders.stack_obstacle
    assert "not quantized" in obstacle(StackedWeight.plain(random(1, 8, 8)))
    for spec, columns in (("int8", 20), ("blockwise4:nf4:64:nested", 96)):
        format_ = from_spec(spec).stacked()
        specs_ = format_.part_specs((2, 64, columns))
        parts = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in specs_.items()}
        assert obstacle(StackedWeight(parts, (2, 64, columns), format_)), spec


@pytest.mark.skipif(INTERPRETED, reason="large")
@pytest.mark.parametrize("spec", [spec for spec in SPECS if ":24:" not in spec and ":12:" not in spec])
def test_shapes_of_a_model(spec):
    """Experts of 768 and 2,048 channels, one token and 33."""
    first, second = stack_of(spec, 1536, 2048), stack_of(spec, 2048, 768)
    for tokens in (1, 33):
        x = random(tokens, 2048, dtype=torch.bfloat16, scale=0.1)
        index = torch.tensor([[0, 2]], device=DEVICE).expand(tokens, 2).contiguous()
        routed = random(tokens, 2).abs()
        found = ops.expert_rows(x, first, second, Unit("silu"), index, routed)
        plain = [StackedWeight.plain(stack.values(torch.bfloat16)) for stack in (first, second)]
        expected = ops.expert_rows.reference(x, *plain, Unit("silu"), index, routed)
        assert (found.double() - expected.double()).norm() <= 0.02 * expected.double().norm()


def test_formats_are_stacks():
    """A stack's format is the matrix's, except for NF4 and FP4, which are flat."""
    for spec in SPECS:
        format_ = from_spec(spec)
        stacked = format_.stacked()
        assert decoders.matrix_format(stacked) == format_
        assert isinstance(stacked, Stack) or format_.name == "blockwise4"
