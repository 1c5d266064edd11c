"""What each rank of test_contract_fsdp.py does, in a module of its own that a new process can import.

Row counts are odd, so that FSDP2's shards are uneven, and one weight has fewer rows than there are ranks.
"""

import copy
import os

import torch
import torch.distributed as dist
from contract import REPRESENTATIVES, linear
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from halfbyte.formats import from_spec
from halfbyte.tensor import QuantizedShard

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
    import peft  # seconds, which the process that only starts the ranks need not spend

    torch.manual_seed(0)
    lora = peft.LoraConfig(r=3, target_modules=["up", "down", "narrow"], init_lora_weights=False)
    return peft.get_peft_model(Net(format, dtype), lora, autocast_adapter_dtype=False)


def batch(step, dtype):
    """Rows of their own for each rank in fp32. In 16 bits both ranks get the same: where gradients of different rows
    cancel in their mean, what is left may be no more than the rounding of each."""
    rows = torch.randn(ROWS, 48, generator=torch.Generator().manual_seed(step)).to(dtype)
    return rows if dtype == torch.float32 else rows[: ROWS // RANKS].repeat(RANKS, 1)


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def two_steps(model, rows, dtype):
    """Outputs, then gradients and adapters after each of two steps of SGD on `rows` of the batch."""
    optimizer = torch.optim.SGD(trained(model).values(), lr=0.1)
    record = []
    for step in range(2):
        y = model(batch(step, dtype)[rows])
        y.float().pow(2).mean().backward()
        record.append({"y": y.detach()})
        record.append({name: whole(parameter.grad).clone() for name, parameter in trained(model).items()})
        optimizer.step()
        optimizer.zero_grad()
        record.append({name: whole(parameter.detach()).clone() for name, parameter in trained(model).items()})
    return record


def compare(format, rank, dtype, policy):
    expected = two_steps(build(format, dtype), slice(None), dtype)
    model = build(format, dtype)
    weights = {name: copy.deepcopy(p) for name, p in model.named_parameters() if "base_layer.weight" in name}
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.base_model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for name, parameter in model.named_parameters():
        if name in weights and weights[name].shape[0] >= RANKS:
            local = parameter.to_local()
            assert isinstance(local, QuantizedShard)
            # Half of the bytes each, up to 16 bytes of alignment a part.
            assert abs(2 * local.raw.numel() - weights[name].nbytes) <= 2 * 16 + 16 * len(weights[name].parts)
    share = ROWS // RANKS
    found = two_steps(model, slice(rank * share, (rank + 1) * share), dtype)
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
    for mine, reference in zip(found, expected, strict=True):
        for name, value in reference.items():
            value = value[rank * share : (rank + 1) * share] if name == "y" else value
            error = (mine[name] - value).norm() / value.norm()
            assert error <= tolerance, f"{name}: relative error {error:.2g}"


def rank_main(rank, port, specs):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        for format in map(from_spec, specs):
            for dtype in (torch.float32, torch.bfloat16) if format in REPRESENTATIVES else (torch.float32,):
                compare(format, rank, dtype, MixedPrecisionPolicy())
        dist.barrier()
    except BaseException:
        dist.destroy_process_group()
        raise
    os._exit(0)  # threads of torch's meshes may outlive the interpreter, which then aborts
