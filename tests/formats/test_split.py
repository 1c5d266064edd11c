"""The format contract of `Format.split`: n shards bit-equal to the matrix, or an error that names the format."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.formats import from_spec
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError
from tests.helpers.format_contract import EXAMPLES, quantized, weight_of
from tests.helpers.imported_tensors import CHECKPOINTS, IDS, loaded

UNITS = [1, 2, 3, 5, 8, 16, 24, 32, 64, 80, 96, 128]


def assert_whole(tensor, dim, n):
    """Shards have the parts that their format lists, share no memory with the matrix, and have its values."""
    format, parts = tensor.format.split(tensor.parts, tuple(tensor.shape), dim, n)
    sides = tuple(size // n if each == dim else size for each, size in enumerate(tensor.shape))
    split = [QuantizedTensor(format, each, sides, tensor.dtype) for each in parts]
    for each in split:
        specs = {name: (tuple(part.shape), part.dtype) for name, part in each.parts.items()}
        assert specs == format.part_specs(sides)
        assert list(specs) == list(format.part_specs(sides))
        for part in each.parts.values():
            assert part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.nbytes
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(torch.cat([each.dequantize(dtype) for each in split], dim), tensor.dequantize(dtype))
    assert torch.equal(tensor.split_for(dim, n)[-1].dequantize(), split[-1].dequantize())
    meta = {name: part.to("meta") for name, part in tensor.parts.items()}
    again, shapes = tensor.format.split(meta, tuple(tensor.shape), dim, n)
    assert again == format
    for one, other in zip(parts, shapes, strict=True):
        assert {k: (v.shape, v.dtype) for k, v in one.items()} == {k: (v.shape, v.dtype) for k, v in other.items()}
    return format


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(EXAMPLES), st.sampled_from(UNITS), st.integers(1, 70), st.integers(1, 4), st.integers(0, 1))
def test_split_is_bit_equal_or_refused(format, unit, other, n, dim):
    shape = (unit * n, other) if dim == 0 else (other, unit * n)
    tensor = quantized(format, shape)
    try:
        assert_whole(tensor, dim, n)
    except ModelError as error:
        said = str(error)
        assert format.spec in said
        assert f"{shape}" in said
        assert unit % 128 or (format.name == "blockwise4" and other % 2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("n", [2, 3])
def test_parts_that_are_multiples_of_every_block(format, n, dim):
    found = assert_whole(quantized(format, (128 * n, 1024 * n)), dim, n)
    if format.spec.endswith(":nested"):
        assert found.nested == (dim == 0)  # each shard has full blocks of 256 scales
    else:
        assert found == format


@pytest.mark.parametrize(("cls", "make"), CHECKPOINTS, ids=IDS)
def test_imported_weights(cls, make):
    tensor = loaded(cls, make())
    assert_whole(tensor, 0, 3)
    for n in (2, 4, 8):  # 32, 16 and 8 columns each
        if cls.name in {2: (), 4: ("mxfp4",), 8: ("mxfp4", "nvfp4")}[n]:
            with pytest.raises(ModelError):
                tensor.split_for(1, n)
        else:
            assert_whole(tensor, 1, n)


@pytest.mark.parametrize(
    ("spec", "shape", "dim", "n", "said"),
    [
        ("fp8:tile", (384, 256), 0, 2, "128"),
        ("kbit:4:bnf", (64, 96), 1, 2, "32"),
        ("mxfp4", (64, 96), 1, 2, "32"),
        ("nvfp4:1d:plain", (64, 48), 1, 2, "16"),
        ("hqq:4:64", (64, 96), 1, 2, "32"),
        ("blockwise4:nf4:64:nested", (64, 96), 1, 2, "32"),
        ("blockwise4:nf4:64:nested", (3, 21), 0, 3, "32"),
        ("int8", (5, 64), 0, 2, "5 rows.*split 2"),
        ("int8", (5, 64), 1, 3, "64 columns.*split 3"),
        ("int8", (2, 4, 64), 0, 2, r"shape \(2, 4, 64\)"),
    ],
)
def test_refusals(spec, shape, dim, n, said):
    tensor = QuantizedTensor.quantize(weight_of(shape), from_spec(spec))
    with pytest.raises(ModelError, match=said):
        tensor.format.split(tensor.parts, shape, dim, n)
