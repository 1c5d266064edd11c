"""Bad input for every registered format: errors are raised at load time and name the tensor."""

import itertools
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.formats import FORMATS, named
from halfbyte.formats.base import FLOATS
from halfbyte.formats.int4 import Int4
from halfbyte.loading.load import load_model
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import CheckpointError, ModelError
from tests.helpers.format_contract import EXAMPLES, weight_of

pytestmark = pytest.mark.sampled(3)  # of the formats; all in test-all

NAME = "model.layers.1.mlp.up_proj.weight"
IMPORTED = {
    "gptq",
    "gptq_v2",
    "awq",
    "pack_quantized",
    "pack_quantized_zeros",
    "aqlm",
    "hqq_library",
    "torchao",
}  # formats that are only read from checkpoints
SIGNED = {"zeros", "codebook", "nested_code", "nested_offset", ("hqq", "scales")}  # parts that may be negative
# Bytes that stand for NaN. Every byte of an E4M4 scale and of a nested scale is a number.
BYTES_OF_NAN = {"nvfp4": ("scale", (0x7F, 0xFF)), "mxfp4": ("scale", (0xFF,)), "fp8": ("codes", (0x7F, 0xFF))}


def test_every_format_is_covered():
    """Stacks are tested with every format of their matrices."""
    names = {type(example).name for example in EXAMPLES} | {type(example.stacked()).name for example in EXAMPLES}
    assert names | IMPORTED == set(FORMATS)


def test_a_weight_that_is_not_finite_is_named_while_loading(any_format, tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if NAME in tensors:
            tensors[NAME][-1, -1] = float("nan")  # Inf: test_contract.py
            save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{NAME}:.*NaN"):
        load_model(str(folder), quantization=any_format.spec, device="cpu", dtype="float32")


def damaged_parts(format, parts):
    """(part, parts with one wrong value) for every value that no quantizer writes."""
    for name, part in parts.items():
        wrong = [float("nan"), float("inf"), -float("inf")] if part.dtype in FLOATS else []
        signed = name in SIGNED or (format.name, name) in SIGNED
        wrong += [-1.0] if part.dtype in FLOATS and not signed else []
        with_nan, bytes_ = BYTES_OF_NAN.get(format.name, ("", ()))
        wrong += bytes_ if name == with_nan else ()
        for value in wrong:
            damaged = part.clone()
            damaged.view(-1)[-1] = value
            yield name, {**parts, name: damaged}


def test_corrupted_scales_are_found_on_load(format):
    dtypes = (torch.float32, torch.bfloat16)  # other tools' layouts store bf16
    shapes = ((65, 129), (64, 256))  # and only shapes without padding
    for shape, dtype in itertools.product(shapes, dtypes):
        tensor = QuantizedTensor.quantize(weight_of(shape, dtype), format)
        cases = list(damaged_parts(format, tensor.parts))
        assert cases
        for part, parts in cases:
            state = format.to_state(parts, shape, dtype)
            with pytest.raises(CheckpointError, match=r"layer\.(w|SCB)") as raised:
                type(format).from_state(state, "layer.w")
            assert raised.value.fix, part


def test_corrupted_scales_of_a_stack_are_found_on_load(format):
    shape = (2, 64, 256)
    tensor = QuantizedTensor.quantize_stack(weight_of(shape, torch.bfloat16), format, shape)
    cases = list(damaged_parts(format, tensor.parts))
    assert cases
    for part, parts in cases:
        state = tensor.format.to_state(parts, shape, torch.bfloat16)
        with pytest.raises(CheckpointError, match=r"experts\.down_proj") as raised:
            type(tensor.format).from_state(state, "experts.down_proj")
        assert raised.value.fix, part


@pytest.mark.parametrize("format", {type(one): one for one in EXAMPLES}.values(), ids=lambda format: format.spec)
def test_corrupted_scales_in_a_checkpoint_name_the_tensor(format, tiny_checkpoint, tmp_path):
    model = load_model(str(tiny_checkpoint()), quantization=format.spec, device="cpu", dtype="bfloat16")
    weight = model.get_parameter(NAME)
    _, parts = next(damaged_parts(format, weight.parts))
    model.get_submodule(NAME.removesuffix(".weight")).weight = torch.nn.Parameter(
        QuantizedTensor(weight.format, parts, tuple(weight.shape), weight.dtype), requires_grad=False
    )
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=NAME.removesuffix(".weight")):
        load_model(str(tmp_path / "model"), device="cpu", dtype="bfloat16")


@pytest.mark.parametrize("name", sorted(name for name in IMPORTED if issubclass(FORMATS[name], Int4)))
def test_shapes_and_scales_of_imported_formats(name):
    cls = FORMATS[name]
    with pytest.raises(ModelError, match=rf"{name} stores.*8.*\(12, 20\)"):
        cls().part_specs((12, 20))
    specs, shape = cls().part_specs((16, 128)), (16, 128)
    parts = {part: torch.zeros(size, dtype=dtype) for part, (size, dtype) in specs.items()}
    state, scales = cls().to_state(parts, shape, torch.float16), cls.entries["scales"]
    assert cls.from_state(state, "layer.weight")[2] == shape
    for bad in (float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match=rf"layer\.{scales.removeprefix('../')}.*NaN"):
            cls.from_state(state | {scales: torch.full_like(state[scales], bad)}, "layer.weight")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_unknown_option_is_an_error(name):
    with pytest.raises(ModelError, match=f"'{name}:no-such-option'"):
        named(f"{name}:no-such-option")
