"""Stacks of experts: for every format, quantized one matrix at a time, with each matrix a view of the stack."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.formats import Blockwise4, Stack, from_spec, recognize
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import CheckpointError, ModelError
from tests.helpers.format_contract import EXAMPLES, same, weight_of

pytestmark = pytest.mark.sampled(3)  # of the formats; all in test-all

SHAPES = [(3, 64, 64), (1, 32, 192), (5, 128, 320)]  # in the last one, blocks of 256 scales span experts
ODD = [(2, 33, 70), (3, 17, 129)]
BITSANDBYTES = [Blockwise4("nf4"), Blockwise4("nf4", nested=True), Blockwise4("fp4", 128, True)]


def joined(format, shape, dtype=torch.float32):
    return QuantizedTensor.quantize_stack(iter(weight_of(shape, dtype)), format, shape)


def shapes_of(format):
    whole = [
        shape for shape in SHAPES if not isinstance(format, Blockwise4) or shape[1] * shape[2] % format.blocksize == 0
    ]
    return whole if isinstance(format, Blockwise4) else [*whole, *ODD]


def test_each_expert_is_quantized_by_itself(format):
    for shape in shapes_of(format):
        stack, weights = joined(format, shape), weight_of(shape)
        assert stack.shape == shape
        assert {name: (tuple(part.shape), part.dtype) for name, part in stack.parts.items()} == (
            stack.format.part_specs(shape)
        )
        values = stack.dequantize()
        for at, weight in enumerate(weights):
            assert torch.equal(stack[at].dequantize(), values[at]), (shape, at)
            if not getattr(format, "nested", False):
                alone = QuantizedTensor.quantize(weight, format)
                same(stack[at], alone)
        assert torch.equal(stack[-1].dequantize(), values[-1])
        same(QuantizedTensor.quantize(weights, stack.format), stack)


@pytest.mark.parametrize(
    "spec",
    [
        *("gptq:32:float16:runs", "gptq:32:float16:listed", "gptq:32:float16:ordered", "gptq:32:float16:indexed"),
        *(
            "awq:32:float16:runs",
            "gptq_v2:32:float16:ordered",
            "pack_quantized:32:bfloat16:runs",
            "hqq:3:64:ordered",
            "aqlm:1x16:8:float16",
        ),
    ],
)
def test_stacks_that_are_only_read_are_saved_and_loaded(spec):
    """Experts of GPTQ files with act-order, and of AQLM files, have parts that no quantizer makes."""
    stack = Stack(from_spec(spec))
    shape = (3, 64, 128)
    parts = {
        name: torch.arange(size[-1]).expand(size).to(dtype) if name == "order" else torch.zeros(size, dtype=dtype)
        for name, (size, dtype) in stack.part_specs(shape).items()
    }
    state = stack.to_state(parts, shape, torch.float16)
    assert state.keys() <= Stack.state_suffixes()
    format_, loaded, loaded_shape, _ = Stack.from_state(state, "experts")
    assert (format_, loaded_shape) == (stack, shape)
    assert all(torch.equal(loaded[name], part) for name, part in parts.items())


def test_an_expert_is_a_view(format):
    shape = (3, 128, 128)  # 256 blocks of 64: nested scale blocks align with experts
    if getattr(format, "blocksize", 64) > 64:
        pytest.skip("its nested scales cross experts of this size")
    stack = joined(format, shape)
    own = {part.untyped_storage().data_ptr() for part in stack.parts.values()}
    for part in stack[1].parts.values():
        assert part.untyped_storage().data_ptr() in own
    assert stack[1].format == format or not format.nested


@pytest.mark.parametrize("format", BITSANDBYTES, ids=lambda format: format.spec)
def test_bytes_are_bitsandbytes_of_the_whole(format):
    from bitsandbytes.functional import quantize_4bit

    for shape in SHAPES[:1] + SHAPES[2:]:
        weights = weight_of(shape, torch.bfloat16)
        packed, state = quantize_4bit(
            weights, blocksize=format.blocksize, quant_type=format.quant_type, compress_statistics=format.nested
        )
        stack = joined(format, shape, torch.bfloat16)
        assert torch.equal(stack.packed, packed)
        assert torch.equal(stack.absmax, state.absmax)
        if format.nested:
            assert torch.equal(stack.nested_absmax, state.state2.absmax)


def test_product_with_an_expert(format):
    shape = (2, 64, 128)
    stack, x = joined(format, shape), torch.randn(5, 128, requires_grad=True)
    y = F.linear(x, stack[torch.tensor(1)])  # as in transformers' loops over experts
    expected = x @ stack.dequantize()[1].T
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in (y, expected)))


def test_state_round_trip(format):
    stack = joined(format, (3, 64, 64), torch.bfloat16)
    shape = tuple(stack.shape)
    state = stack.format.to_state(stack.parts, shape, stack.dtype)
    cls = recognize(state, prefer=Blockwise4)
    assert cls is type(stack.format)
    same(QuantizedTensor(*cls.from_state(state, "mlp.experts.down_proj")), stack)
    for suffix in state:
        if suffix == "quant_map":
            continue
        with pytest.raises(CheckpointError, match=r"mlp\.experts\.down_proj"):
            cls.from_state({key: value for key, value in state.items() if key != suffix}, "mlp.experts.down_proj")


def test_spec(format):
    stacked = format.stacked()
    assert from_spec(stacked.spec) == stacked
    assert isinstance(stacked, Stack) or stacked is format


def test_non_stacks_are_refused(format):
    weight = weight_of((3, 64, 64))
    weight[2, 5, 7] = float("nan")
    with pytest.raises(ModelError, match=r"expert 2:.*NaN"):
        QuantizedTensor.quantize_stack(weight, format, (3, 64, 64))
    with pytest.raises(IndexError, match="expert 3 of a stack of 3"):
        joined(format, (3, 64, 64)).select(0, 3)


def test_blocks_that_would_cross_experts_are_refused():
    with pytest.raises(ModelError, match=r"\(2, 3, 37\)"):
        joined(Blockwise4(), (2, 3, 37))


def test_every_example_has_stacks():
    assert len(EXAMPLES) > 15
    assert all(example.stacked().part_specs((2, 64, 64)) for example in EXAMPLES)
