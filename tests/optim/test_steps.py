"""Every optimizer of the table over many steps: resume at random steps is bit-equal, memory does not grow."""

import gc
import io
import random
import sys

import pytest
import torch
from torch import nn

from halfbyte.optim import OPTIMIZERS, make_optimizer
from halfbyte.optim.fused import FusedOptimizer
from tests.helpers.optimizer_settings import OptimizerSettings

NAMES = [name for name, row in OPTIMIZERS.items() if row.package is None]
FUSED = [name for name in NAMES if "storage" in OPTIMIZERS[name].options]
LOW_RANK = {"rank": 3, "update_proj_gap": 3}
BADAM = {"badam_switch_interval": 2, "badam_switch_mode": "random"}
DRAWS = 20  # of storage, rounding, place and step, for optimizers of `optim.fused`


class Model(nn.Module):
    """Weights of more and of fewer elements than `min_quantized`, at odd sizes, in layers and outside of them."""

    def __init__(self, dtype, width=71):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 59, dtype=dtype)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(59, width, dtype=dtype), nn.Tanh(), nn.Linear(width, 59, dtype=dtype))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(59, dtype=dtype)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.norm(hidden).float()


def take_steps(model, optimizer, steps, clip=None):
    """Steps with a learning rate that changes; layer 1 has no gradients in every third step."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        frozen = [p for p in model.layers[1].parameters() if step % 3 == 2 and p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        hidden = model(torch.randint(13, (5,), generator=generator))
        (hidden * torch.randn(hidden.shape, generator=generator)).sum().backward()
        for parameter in frozen:
            parameter.requires_grad_(True)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        if clip is not None:
            optimizer.clip(clip)
        optimizer.step()
        optimizer.zero_grad()


def drawn(name, seed):
    """Settings of a run, its dtype, its steps and the step at which it is resumed."""
    draw = random.Random(f"{name}/{seed}")
    row, keys, arguments = OPTIMIZERS[name], {}, {}
    dtype = draw.choice([torch.float32, torch.bfloat16])
    if name in FUSED:
        arguments["storage"] = draw.choice(row.options["storage"].choices)
        if dtype == torch.bfloat16:
            arguments["rounding"] = draw.choice(row.options["rounding"].choices)
        keys["optim_offload"] = row.offloaded is not None and draw.random() < 0.4
        keys["optim_in_backward"] = draw.random() < 0.4
    elif "badam" in name:
        arguments = BADAM | {"badam_mode": draw.choice(["layer", "ratio"]), "badam_update_ratio": 0.5}
    elif row.takes_targets:
        arguments = {key: LOW_RANK[key] for key in row.options.keys() & LOW_RANK.keys()}
    settings = OptimizerSettings(optim=name, optim_args=arguments, weight_decay=0.1, **keys)
    steps = draw.randrange(2, 9)
    return settings, dtype, steps, draw.randrange(1, steps)


@pytest.mark.parametrize(
    ("name", "seed"), [*((name, 0) for name in NAMES), *((FUSED[n * 7 % len(FUSED)], n + 1) for n in range(DRAWS))]
)
def test_resume_at_a_random_step_is_bit_equal(name, seed):
    settings, dtype, steps, resumed = drawn(name, seed)
    one = Model(dtype)
    optimizer = make_optimizer(one, settings)
    is_clipped = isinstance(optimizer, FusedOptimizer) and optimizer.backward is None
    clip = 0.5 if is_clipped and seed % 2 else None
    take_steps(one, optimizer, range(resumed), clip)
    file = io.BytesIO()
    torch.save({"weights": one.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    two = Model(dtype)
    two.load_state_dict(saved["weights"])
    other = make_optimizer(two, settings)
    other.load_state_dict(saved["optimizer"])
    take_steps(one, optimizer, range(resumed, steps), clip)
    take_steps(two, other, range(resumed, steps), clip)
    for (key, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert_equal(optimizer.state_dict()["state"], other.state_dict()["state"])
    moved = [key for key, value in Model(dtype).state_dict().items() if not torch.equal(value, one.state_dict()[key])]
    assert moved


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            assert_equal(value, other[key])
        elif isinstance(value, torch.Tensor):
            assert value.dtype == other[key].dtype
            assert torch.equal(value.float(), other[key].float()), key
        else:
            assert value == other[key], key


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keys"), [
    ("adamw", {"optim_in_backward": True}),
    ("galore_adamw_layerwise", {"optim_args": {"rank": 2, "update_proj_gap": 50}}),
    *((name, {}) for name in ("adamw", "paged_adamw_8bit", "muon")),
])  # fmt: skip
def test_memory_does_not_grow_in_1000_steps(name, keys):
    """Blocks of Python's allocator and tensors after 200 and after 1,000 steps; a leak has one a step at least: 800.

    Caches and free lists of the process add up to 206. Norms of gradients that the backward has freed are not read, and
    are not kept either.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    settings = OptimizerSettings(optim=name, **keys)
    optimizer, data = make_optimizer(model, settings), torch.randn(2, 5)
    counts = []
    for step in range(1000):
        model(data).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (199, 999):
            gc.collect()
            counts.append((sys.getallocatedblocks(), sum(isinstance(each, torch.Tensor) for each in gc.get_objects())))
    (blocks, tensors), (later_blocks, later_tensors) = counts
    assert later_blocks - blocks < 400
    assert later_tensors == tensors
