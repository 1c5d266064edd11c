"""The format contract: tests for every registered format, run for each of its `examples()`.

Rules that no format's own code takes part in run for three of them (`any_format`; conftest.py).
A new format needs nothing here but its golden entry, which `python -m tests.helpers.format_golden` prints.
Compiling and checkpointing are in test_contract_compile.py, slices of weights in parallel/test_shard_formats.py.
"""

import copy
import io
import itertools
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from halfbyte.formats import from_spec
from halfbyte.formats.base import entry_name
from halfbyte.layers import quantized_parameter
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils import notices
from halfbyte.utils.errors import CheckpointError, ModelError
from tests.helpers.format_contract import SHAPES, SHORT, linear, plain, quantized, same, weight_of
from tests.helpers.format_golden import GOLDEN, describe

pytestmark = pytest.mark.sampled(3)  # of the formats; all in test-all

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


# ---- values and bytes


def test_round_trip(format):
    golden = GOLDEN[format.spec]
    for shape, dtype in itertools.product([*SHAPES, *SHORT], DTYPES):
        case, weight = (shape, dtype), weight_of(shape, dtype)
        tensor = QuantizedTensor.quantize(weight, format)
        values = tensor.dequantize()
        assert (values.shape, values.dtype) == (weight.shape, dtype), case
        error = values.float() - weight.float()
        assert error.norm() <= 1.75 * golden["rms_error"] * weight.float().norm(), case
        if shape not in SHORT:  # its largest value is small, which increases the relative error
            assert error.abs().max() <= golden["largest_error"] * weight.float().abs().max(), case
        for other in DTYPES:  # rounded once from fp32
            assert torch.equal(tensor.dequantize(other), tensor.dequantize(torch.float32).to(other)), (case, other)


def test_parts_are_those_listed(format):
    for shape in [*SHAPES, *SHORT]:
        tensor = quantized(format, shape)
        found = {name: (tuple(part.shape), part.dtype) for name, part in tensor.parts.items()}
        assert found == format.part_specs(shape), shape
        assert list(found) == list(format.part_specs(shape)), shape
        assert tensor.nbytes * 8 == pytest.approx(format.bits_per_weight(shape) * weight_of(shape).numel()), shape
        meta = QuantizedTensor.quantize(weight_of(shape).to("meta"), format)
        assert {name: (tuple(part.shape), part.dtype) for name, part in meta.parts.items()} == found, shape


def test_golden_bytes(format):
    """Changed bytes would make existing files unreadable; such a change needs a new format."""
    assert describe(format) == {key: GOLDEN[format.spec][key] for key in ("rms_error", "parts")}


def test_spec_names_the_format(format):
    assert from_spec(format.spec) == format
    assert hash(from_spec(format.spec)) == hash(format)
    assert from_spec(format.spec) is from_spec(format.spec)
    assert pickle.loads(pickle.dumps(format)) == copy.deepcopy(format) == format


def test_quantizing_does_not_depend_on_memory_layout(format):
    weight = weight_of((66, 34))
    same(QuantizedTensor.quantize(weight.t(), format), QuantizedTensor.quantize(weight.t().contiguous(), format))


def test_a_weight_that_is_not_finite_is_refused(format):
    for bad, at in itertools.product([float("nan"), float("inf"), -float("inf")], [0, 3000, -1]):
        weight = weight_of((65, 129))
        weight.view(-1)[at] = bad
        with pytest.raises(ModelError, match="NaN"):  # pytest shows `bad` and `at` where none is raised
            QuantizedTensor.quantize(weight, format)


def test_integer_weights_are_refused(format):
    with pytest.raises(ModelError, match=r"torch\.int32"):
        QuantizedTensor.quantize(torch.ones(8, 8, dtype=torch.int32), format)


def test_zeros_stay_zero(format):
    tensor = QuantizedTensor.quantize(torch.zeros(33, 65), format)
    assert torch.equal(tensor.dequantize(), torch.zeros(33, 65))


def test_rows_of_a_table(format):
    tensor = quantized(format, (50, 37))
    rows = torch.tensor([49, 0, 7, 7, 31])
    assert torch.equal(F.embedding(rows, tensor), tensor.dequantize()[rows])
    assert torch.equal(F.embedding(rows.view(5, 1), tensor), tensor.dequantize()[rows.view(5, 1)])


# ---- checkpoints


def test_state_round_trip_through_a_file(format, tmp_path):
    for at, shape in enumerate([*SHAPES, *SHORT]):
        file, tensor = tmp_path / f"{at}.safetensors", quantized(format, shape, torch.bfloat16)
        state = tensor.format.to_state(tensor.parts, shape, tensor.dtype)
        keys = {suffix: entry_name("m.w", suffix) for suffix in state}
        save_file({keys[suffix]: value for suffix, value in state.items()}, file)
        loaded = load_file(file)
        entries = {suffix: loaded[key] for suffix, key in keys.items()}
        format_, parts, shape_, dtype = type(format).from_state(entries, "m.w")
        same(QuantizedTensor(format_, parts, shape_, dtype), tensor)


def damages(value):
    """Damaged versions of a checkpoint entry."""
    yield "missing", None
    yield "short", value.reshape(-1)[:-1].clone()
    yield "long", torch.cat([value.reshape(-1), value.reshape(-1)[:1]])
    yield "scalar", value.reshape(-1)[0].clone()
    yield "empty", value.reshape(-1)[:0].clone()
    yield "float16", value.half() if value.dtype != torch.float16 else value.double()
    yield "int16", value.to(torch.int16)


def test_damaged_entries_are_named(format):
    tensor = quantized(format, dtype=torch.bfloat16)  # dtype of layouts that do not record one
    state = tensor.format.to_state(tensor.parts, tuple(tensor.shape), tensor.dtype)
    for suffix, value in state.items():
        label = entry_name("layer.w", suffix)
        for what, damaged in damages(value):
            entries = {**state, suffix: damaged}
            if damaged is None:
                entries.pop(suffix)
            try:
                format_, parts, shape, dtype = type(format).from_state(entries, "layer.w")
            except CheckpointError as error:
                message = str(error)
            else:  # an optional entry, or one whose values do not change
                same(QuantizedTensor(format_, parts, shape, dtype), tensor)
                continue
            assert label in message or (what == "missing" and "layer." in message), f"{what} {suffix}: {message}"


def metadata_key(state):
    """The JSON entry, or None for layouts of other tools without one."""
    return next((key for key in state if "quant_state" in key), None) or pytest.skip("the layout has no metadata")


def test_unusable_metadata_is_named(format):
    tensor = quantized(format)
    state = tensor.format.to_state(tensor.parts, tuple(tensor.shape), tensor.dtype)
    key = metadata_key(state)
    for text in ("", "{", "null", "[]", "3", '"x"', "{}", "\x00\xff"):
        state[key] = torch.tensor(list(text.encode("latin-1")), dtype=torch.uint8)
        with pytest.raises(CheckpointError, match=r"layer\.w"):
            type(format).from_state(state, "layer.w")


def test_every_wrong_metadata_value_is_named(format):
    tensor = quantized(format)
    state = tensor.format.to_state(tensor.parts, tuple(tensor.shape), tensor.dtype)
    key = metadata_key(state)
    meta = json.loads(bytes(state[key].tolist()))
    for name, value in meta.items():
        for wrong in (None, "x", -1, [], [65, "y"], {}, 48, [64, 129], [-65, -129]):
            if wrong == value or (name == "nested_offset" and wrong in (-1, 48)):
                continue
            state[key] = torch.tensor(list(json.dumps({**meta, name: wrong}).encode()), dtype=torch.uint8)
            with pytest.raises(CheckpointError, match=r"layer\.w"):
                type(format).from_state(state, "layer.w")


def test_module_state_dict_round_trip(format, tmp_path):
    source, target = linear(format, dtype=torch.bfloat16), linear(format, dtype=torch.bfloat16, seed=5)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    assert target.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True).missing_keys == []
    same(target.weight, source.weight)
    assert torch.equal(target.bias, source.bias)
    assert not target.weight.requires_grad


def test_module_takes_a_full_precision_state_dict(any_format):
    source, target = nn.Linear(70, 33), linear(any_format)
    target.load_state_dict(source.state_dict(), strict=True)
    same(target.weight, QuantizedTensor.quantize(source.weight.detach(), any_format))


def test_module_refuses_another_shape(format):
    with pytest.raises(CheckpointError, match=r"shape \(34, 70\)"):
        linear(format).load_state_dict(linear(format, rows=34).state_dict())


# ---- forward and backward


def run(layer, x, weights_of_sum):
    """Output, and gradients of input and bias under a fixed linear functional."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    (y.float() * weights_of_sum).sum().backward()
    grads = [x.grad] + ([layer.bias.grad] if layer.bias is not None else [])
    layer.zero_grad()
    return [y.detach(), *(grad.detach().clone() for grad in grads)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_equals_the_dequantized_one(any_format, dtype, bias):
    for size, batch in itertools.product([(1, 1), (33, 70), (5, 129)], [(3,), (2, 5), (1, 1, 7), ()]):
        layer = linear(any_format, *size, bias=bias, dtype=dtype)
        x, probe = torch.randn(*batch, size[1], dtype=dtype), torch.randn(*batch, size[0])
        for mine, theirs in zip(run(layer, x, probe), run(plain(layer), x, probe), strict=True):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, msg=lambda said, case=(size, batch): f"{case}: {said}")


def test_linear_under_autocast(any_format):
    layer = linear(any_format)
    x, probe = torch.randn(4, 70), torch.randn(4, 33)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        mine, theirs = run(layer, x, probe), run(plain(layer, torch.bfloat16), x, probe)
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def test_product_runs_in_the_input_dtype(format):
    layer, x = linear(format, dtype=torch.float32), torch.randn(4, 70, dtype=torch.bfloat16)
    expected = F.linear(x, layer.weight.dequantize(torch.bfloat16), layer.bias.bfloat16())
    assert torch.equal(layer(x), expected)


def test_nothing_of_the_weight_is_saved_in_eager_mode(any_format):
    layer, saved = linear(any_format), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(4, 70, requires_grad=True)).sum()
    assert not [t for t in saved if t.is_floating_point() and t.numel() == 33 * 70]


# ---- copies, moves, refusals


def saved_and_loaded(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
def test_copies(any_format, copier):
    for original in (quantized(any_format), nn.Parameter(quantized(any_format), requires_grad=False)):
        copied = copier(original)
        assert type(copied) is type(original)
        same(copied, original)
        assert copied.requires_grad is False
        assert all(part.data_ptr() != original.parts[name].data_ptr() for name, part in copied.parts.items())
    layer = linear(any_format)
    same(copier(layer).weight, layer.weight)


def test_to_dtype_keeps_the_bytes(any_format):
    layer = linear(any_format)
    before = copy.deepcopy(layer.weight)
    moved = layer.to(torch.bfloat16)
    assert moved.weight.dtype == torch.bfloat16
    assert moved.bias.dtype == torch.bfloat16
    assert isinstance(moved.weight, nn.Parameter)
    for name, part in moved.weight.parts.items():
        assert torch.equal(part, before.parts[name])
    assert torch.equal(moved.weight.dequantize(), before.dequantize(torch.bfloat16))


def test_to_device(any_format):
    tensor = quantized(any_format).to("meta")
    assert tensor.device.type == "meta"
    assert all(part.device.type == "meta" for part in tensor.parts.values())
    assert quantized(any_format).to("cpu").device.type == "cpu"


@pytest.mark.gpu
def test_to_cuda_and_back(format):
    tensor = quantized(format)
    moved = tensor.to("cuda")
    assert moved.device.type == "cuda"
    assert torch.equal(moved.dequantize().cpu(), tensor.dequantize())
    same(moved.cpu(), tensor)


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t.__setitem__(0, 1.0),
        lambda t: t.zero_(),
        lambda t: t.normal_(),
        lambda t: torch.add(t, 1, out=t),
        lambda t: t.T.add_(1),
        lambda t: t[:2][0].zero_(),
        lambda t: t.reshape(-1).scatter_add_(0, torch.tensor([1]), torch.ones(1)),
        lambda t: t.to(torch.int8),
    ],
)
def test_writes_that_would_be_lost_are_refused(any_format, operation):
    tensor = quantized(any_format)
    before = copy.deepcopy(tensor)
    with pytest.raises(ModelError):
        operation(tensor)
    same(tensor, before)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[0],
        lambda t: t[:2],
        lambda t: t.view(-1),
        lambda t: t.unsqueeze(0),
        lambda t: t[:, 3:7].T,
    ],
)
def test_views_are_those_of_the_dequantized_tensor(any_format, view):
    tensor = quantized(any_format)
    assert torch.equal(view(tensor), view(tensor.dequantize()))
    assert type(view(tensor) * 2) is type(view(tensor).clone()) is torch.Tensor
    x = torch.randn(view(tensor).shape, requires_grad=True)
    (view(tensor) * x).sum().backward()
    assert torch.equal(x.grad, view(tensor.dequantize()))


@pytest.mark.parametrize("update", [Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_])
def test_arithmetic_in_place_quantizes(any_format, update):
    tensor, values = quantized(any_format), weight_of((65, 129), seed=3) + 4
    expected = QuantizedTensor.quantize(update(tensor.dequantize(), values), any_format)
    address = tensor.data_ptr()
    assert update(tensor.data, values).data_ptr() == address
    same(tensor, expected)


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t * 2,
        lambda t: t @ torch.ones(129, 3),
        lambda t: F.linear(t, torch.ones(3, 129)),
        lambda t: t.sum(),
        lambda t: t.abs().max(),
        lambda t: t.norm(dim=1),
        lambda t: torch.isnan(t).any(),
        lambda t: torch.cat([t, t]),
        lambda t: torch.stack([t * 1, t]),
        lambda t: torch.zeros(65, 129).copy_(t),
        lambda t: torch.ones(65, 129).add_(t),
    ],
)
def test_reading_ops_equal_the_dequantized_tensor(any_format, operation):
    tensor = quantized(any_format)
    found = operation(tensor)
    assert type(found) is torch.Tensor
    assert torch.equal(found, operation(tensor.dequantize()))
    assert "quantized-read" in notices.notices_so_far() or found.shape == (65, 129)


def test_gradients_through_a_product_that_reads(any_format):
    """The backward transposes the saved operands of the matmul."""
    tensor, x = quantized(any_format), torch.randn(129, 3, requires_grad=True)
    (tensor @ x).pow(2).sum().backward()
    other = x.detach().clone().requires_grad_()
    (tensor.dequantize() @ other).pow(2).sum().backward()
    assert torch.equal(x.grad, other.grad)


def test_comparisons(any_format):
    one, other = quantized(any_format), quantized(any_format, seed=1)
    assert torch.equal(one, one.clone())
    assert torch.equal(one, one.dequantize())
    assert not torch.equal(one, other)
    assert not torch.equal(one, quantized(any_format, (65, 128)))
    assert torch.allclose(one, one.clone())
    assert not torch.allclose(one, other)


def test_copy_in_place(any_format):
    target, source = quantized(any_format, seed=1), quantized(any_format, seed=2)
    target.copy_(source)
    same(target, source)
    weight = weight_of((65, 129), seed=3)
    target.copy_(weight)
    same(target, QuantizedTensor.quantize(weight, any_format))


def test_assigned_data_is_quantized(any_format):
    """Like `copy_`, but to new memory: the old `data` does not change."""
    parameter = nn.Parameter(quantized(any_format, seed=1), requires_grad=False)
    before, values = parameter.data, weight_of((65, 129), seed=3)
    parameter.data = values
    same(parameter, QuantizedTensor.quantize(values, any_format))
    assert isinstance(parameter, nn.Parameter)
    same(before, quantized(any_format, seed=1))
    parameter.data = parameter.data + torch.ones(65, 129)
    expected = QuantizedTensor.quantize(values, any_format).dequantize() + 1
    same(parameter, QuantizedTensor.quantize(expected, any_format))
    parameter.data = before
    same(parameter, quantized(any_format, seed=1))
    assert parameter.data_ptr() == before.data_ptr() != 0
    with pytest.raises(ModelError, match=r"\(65, 128\)"):
        parameter.data = torch.zeros(65, 128)


def test_assigned_data_brings_its_dtype_and_format(any_format):
    tensor = quantized(any_format)
    tensor.data = weight_of((65, 129), torch.bfloat16)
    assert (tensor.dtype, tensor.dequantize().dtype) == (torch.bfloat16, torch.bfloat16)
    other = quantized(from_spec("blockwise4:fp4:32:plain"))
    tensor.data = other
    same(tensor, other)


@pytest.mark.gpu
def test_assigned_data_moves_to_another_device(any_format):
    tensor, values = quantized(any_format), weight_of((65, 129), seed=3)
    tensor.data = values.to("cuda")
    assert tensor.device.type == "cuda" == tensor.dequantize().device.type
    same(tensor, QuantizedTensor.quantize(values.to("cuda"), any_format))


def test_inference_mode_handles_moves_and_copies(any_format):
    expected, layer = quantized(any_format, (33, 70)), linear(any_format)
    with torch.inference_mode():
        same(layer.weight.detach(), expected)
        same(torch.detach(layer.weight).clone(), expected)
        assert torch.equal(layer.weight.transpose(0, 1).to(torch.float32), expected.dequantize(torch.float32).T)
        assert torch.equal(layer.weight[:2], expected.dequantize()[:2])
        same(layer.to("cpu").weight, expected)
        same(layer.cpu().weight.reshape(33, 70), expected)
        for key, value in linear(any_format).state_dict().items():
            assert torch.equal(layer.state_dict()[key], value), key
        same(layer.half().weight, expected.half())
        same(layer.bfloat16().weight, expected.bfloat16())
        same(layer.to(torch.float32).weight, expected)
        x = torch.randn(2, 70)
        output = layer(x)
    with torch.no_grad():  # gradients choose another kernel, whose sums round differently
        assert torch.equal(output, layer(x.clone()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_outputs_can_be_changed_in_place(format, bias):
    """Adds a trained tensor in place, as PEFT's adapters do, for all shapes, with and without input gradient."""
    layers = [linear(format, bias=bias), linear(format, 512, 512, bias=bias)]  # the larger one by oneDNN on some CPUs
    shapes, dtypes = [(), (3,), (2, 5), (0,), (1, 1, 1)], [*DTYPES, torch.float64]
    for layer, shape, dtype, needs in itertools.product(layers, shapes, dtypes, [True, False]):
        x = torch.randn(*shape, layer.in_features, dtype=dtype, requires_grad=needs)
        addend = torch.ones(layer.out_features, dtype=dtype, requires_grad=True)
        y = layer(x)
        expected = y.detach() + 1
        y += addend
        assert torch.equal(y, expected), (shape, dtype, needs)
        y.sum().backward()
        assert addend.grad[0] == expected.numel() / layer.out_features
        with torch.no_grad():
            z = layer(x)
        z += addend
        assert z.requires_grad


def test_quantized_parameter_keeps_a_quantized_weight(any_format):
    tensor = quantized(any_format)
    parameter = quantized_parameter(tensor, any_format)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, QuantizedTensor)
    assert not parameter.requires_grad
    same(parameter, tensor)
