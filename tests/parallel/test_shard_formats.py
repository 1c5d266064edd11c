"""The format contract with shards: two ranks compute what one process does, in every format, adapters through PEFT.

Row counts are odd, so that shards are uneven, and one weight has fewer rows than ranks.
"""

import copy

import pytest
import torch
from torch import nn

from halfbyte.formats import from_spec
from halfbyte.parallel.shard.weights import ALIGNMENT, BlockShard, shard_blocks
from halfbyte.utils.errors import ModelError
from tests.helpers.format_contract import EXAMPLES, REPRESENTATIVES, linear

pytestmark = pytest.mark.dist

RANKS, ROWS = 2, 4


class Layer(nn.Module):
    def __init__(self, format, dtype):
        super().__init__()
        self.up = linear(format, 67, 48, dtype=dtype, seed=1)  # rows not divisible by two
        self.narrow = linear(format, 1, 67, bias=False, dtype=dtype, seed=2)  # fewer rows than ranks
        self.down = linear(format, 48, 67, dtype=dtype, seed=3)

    def forward(self, x):
        hidden = nn.functional.silu(self.up(x))
        return x + self.down(hidden * self.narrow(hidden))


class Net(nn.Module):
    def __init__(self, format, dtype):
        super().__init__()
        self.layers = nn.ModuleList(Layer(format, dtype) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build(format, dtype):
    import peft  # seconds, which collecting these tests need not take

    torch.manual_seed(0)
    lora = peft.LoraConfig(r=3, target_modules=["up", "down", "narrow"], init_lora_weights=False)
    return peft.get_peft_model(Net(format, dtype), lora, autocast_adapter_dtype=False)


def batch(step, dtype):
    """Return different rows for each rank in fp32, equal ones in 16 bits.

    In 16 bits gradients of different rows may cancel to less than the rounding of each.
    """
    rows = torch.randn(ROWS, 48, generator=torch.Generator().manual_seed(step)).to(dtype)
    return rows if dtype == torch.float32 else rows[: ROWS // RANKS].repeat(RANKS, 1)


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def two_steps(model, rows, dtype, mesh=None):
    """Return outputs, then gradients and adapters after each of two SGD steps on `rows` of the batch."""
    optimizer = torch.optim.SGD(trained(model).values(), lr=0.1)
    record = []
    for step in range(2):
        y = model(batch(step, dtype)[rows])
        (y.float().pow(2).sum() / (ROWS * 48)).backward()
        record.append({"y": y.detach()})
        if mesh is not None:
            for parameter in trained(model).values():
                mesh.sum(parameter.grad)
        record.append({name: parameter.grad.clone() for name, parameter in trained(model).items()})
        optimizer.step()
        optimizer.zero_grad()
        record.append({name: parameter.detach().clone() for name, parameter in trained(model).items()})
    return record


def compare(mesh, format, dtype):
    expected = two_steps(build(format, dtype), slice(None), dtype)
    model = build(format, dtype)
    weights = {name: copy.deepcopy(p) for name, p in model.named_parameters() if "base_layer.weight" in name}
    net = model.base_model.model
    shard_blocks(net, list(net.layers), mesh, ["call", "backward"])
    for at, layer in enumerate(net.layers):
        local = layer.frozen_bytes.to_local()
        assert isinstance(local, BlockShard)
        own = [weight for name, weight in weights.items() if f"layers.{at}." in name]
        packed = sum(weight.nbytes for weight in own if len(weight) >= RANKS)
        # Half of the bytes each, up to 16 bytes of alignment a part; biases and the weight of one row are beside them.
        beside = 4 * (67 + 48) + 2 * sum(
            weight.nbytes + 16 * len(weight.parts) + 16 for weight in own if len(weight) < 2
        )
        lines = (5 + RANKS) * ALIGNMENT  # each of five tensors begins at one, and so does each process's slice
        slack = lines + sum(2 * 16 + 16 * len(weight.parts) for weight in own)
        assert 0 <= 2 * local.raw.numel() - packed <= beside + slack
    share = slice(mesh.rank * ROWS // RANKS, (mesh.rank + 1) * ROWS // RANKS)
    found = two_steps(model, share, dtype, mesh)
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
    for mine, reference in zip(found, expected, strict=True):
        for name, value in reference.items():
            value = value[share] if name == "y" else value
            error = (mine[name] - value).norm() / value.norm()
            assert error <= tolerance, f"{format.spec} {name}: relative error {error:.2g}"


def compare_all(mesh, specs):
    for format in map(from_spec, specs):
        for dtype in (torch.float32, torch.bfloat16) if format in REPRESENTATIVES else (torch.float32,):
            compare(mesh, format, dtype)


@pytest.mark.slow
def test_every_format(two):
    two.run(compare_all, [example.spec for example in EXAMPLES], layout={"shard": 2})


def test_block_shard_operations_keep_the_slice():
    """FSDP2 splits, copies and views the nominal parameter; the bytes do not move."""
    raw = torch.arange(32, dtype=torch.uint8)
    shards = torch.chunk(BlockShard(raw, 2, torch.empty(64, dtype=torch.uint8)), 2)
    assert [shard.rows for shard in shards] == [1, 1]
    padded = shards[0].new_zeros((1, 1))
    padded.copy_(shards[0])
    assert padded.view(-1).raw is raw
    assert torch.equal(raw, torch.arange(32, dtype=torch.uint8))
    with pytest.raises(ModelError):
        shards[0] + 1
