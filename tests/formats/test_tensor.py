"""QuantizedTensor beyond the format contract: N-D weights, byte buffers, shards, meta tensors, modules."""

import weakref

import pytest
import torch
from torch import nn

from halfbyte.formats import Blockwise4
from halfbyte.layers import Linear4bit
from halfbyte.tensor import QuantizedShard, QuantizedTensor, part_offsets
from halfbyte.utils.errors import ModelError

NESTED = Blockwise4("nf4", 64, True)
SHAPES = [(1, 1), (7, 33), (64, 64), (3, 50, 31), (4, 128, 64)]


def tensor_of(shape, format=NESTED, dtype=torch.float32):
    return QuantizedTensor.quantize(torch.randn(shape).to(dtype), format)


def test_looks_like_an_ordinary_tensor():
    tensor = tensor_of((3, 50, 31), dtype=torch.bfloat16)
    assert (tensor.shape, tensor.dtype, tensor.ndim, tensor.numel()) == ((3, 50, 31), torch.bfloat16, 3, 4650)
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    assert not tensor.requires_grad
    assert repr(tensor) == (
        "QuantizedTensor(blockwise4:nf4:64:nested, shape=(3, 50, 31), dtype=torch.bfloat16, device=cpu)"
    )
    assert tensor.nbytes < tensor.numel()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", [NESTED, Blockwise4("fp4", 32, False)], ids=lambda format: format.spec)
def test_bytes_round_trip(format, shape, chunks):
    tensor = tensor_of(shape, format)
    raw = tensor.to_bytes(chunks)
    assert raw.shape[0] == chunks
    assert raw.dtype == torch.uint8
    again = QuantizedTensor.from_bytes(raw.reshape(-1), format, shape, tensor.dtype)
    for name, part in tensor.parts.items():
        assert torch.equal(again.parts[name], part)
    offsets, total = part_offsets(format, shape)
    assert all(offset % 16 == 0 for offset in offsets.values())
    assert tensor.nbytes <= total <= raw.numel() < total + chunks * 16


def test_parts_from_bytes_are_views():
    """FSDP2 refills the buffer in place; the parts must follow."""
    one, other = tensor_of((7, 33)), tensor_of((7, 33))
    raw = one.to_bytes().view(-1)
    view = QuantizedTensor.from_bytes(raw, NESTED, (7, 33), torch.float32)
    raw.copy_(other.to_bytes().view(-1))
    assert torch.equal(view.dequantize(), other.dequantize())


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_shards_gather_to_the_tensor(rows):
    tensor = tensor_of((rows, 33))
    shards = list(torch.chunk(tensor, 2))
    assert all(isinstance(shard, QuantizedShard) for shard in shards)
    assert len({shard.raw.numel() for shard in shards}) == 1
    inputs, metadata = zip(*(shard.fsdp_pre_all_gather(None, None, None, None, None) for shard in shards), strict=True)
    gathered = torch.cat([raw for (raw,) in inputs])
    whole, buffers = shards[0].fsdp_post_all_gather((gathered,), metadata[0], torch.float32)
    assert torch.equal(whole.dequantize(), tensor.dequantize())
    assert buffers[0].data_ptr() == gathered.data_ptr()


def test_shards_refuse_what_needs_values():
    shard = torch.chunk(tensor_of((8, 33)), 2)[0]
    with pytest.raises(ModelError):
        shard + 1


def test_sharding_another_dimension_is_refused():
    with pytest.raises(ModelError):
        torch.chunk(tensor_of((8, 33)), 2, dim=1)


def test_meta_tensors_have_no_memory():
    tensor = QuantizedTensor.quantize(torch.empty(1 << 16, 1 << 16, device="meta"), NESTED)
    assert tensor.device.type == "meta"
    assert tensor.nbytes == pytest.approx(2**32 * 4.127 / 8, rel=1e-3)


def test_module_moves():
    module = nn.Sequential(Linear4bit(70, 33), nn.LayerNorm(33))
    moved = module.to(torch.bfloat16)
    assert isinstance(moved[0].weight, QuantizedTensor)
    assert moved(torch.randn(2, 70, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert module.to("meta")[0].weight.parts["packed"].is_meta


def test_a_weight_cannot_require_a_gradient():
    """requires_grad=True on a frozen weight would be misleading."""
    module = Linear4bit(70, 33)
    with pytest.raises(ModelError, match="frozen"):
        module.requires_grad_(True)
    with pytest.raises(ModelError, match="frozen"):
        module.weight.requires_grad_()
    with pytest.raises(ModelError, match="frozen"):
        module.weight.requires_grad = True
    with pytest.raises(ModelError, match="frozen"):
        nn.Parameter(module.weight.data)
    assert not module.weight.requires_grad


def test_a_weight_is_freed_after_its_attributes_are_set():
    parameter = nn.Parameter(tensor_of((8, 64)), requires_grad=False)
    parameter.requires_grad = False
    parameter.data = tensor_of((8, 64))
    parameter.grad = None
    reference = weakref.ref(parameter)
    del parameter
    assert reference() is None


def test_memory_is_that_of_the_parts():
    """The values are not in memory, so no pointer to them may be exported."""
    one, other = tensor_of((8, 64)), tensor_of((8, 64))
    assert one.data_ptr() == one.detach().data_ptr() == one.packed.data_ptr()
    assert one.data_ptr() != other.data_ptr()
    with pytest.raises(ModelError):
        torch.utils.dlpack.from_dlpack(one)
    expected = one.dequantize()
    assert one.share_memory_() is one
    assert all(part.is_shared() for part in one.parts.values())
    assert torch.equal(one.dequantize(), expected)
    assert not one.is_pinned()
