"""BAdam: blocks and their order, equality with AdamW on the active block, state, and resuming."""

import pytest
import torch
from torch import nn

from halfbyte.optim import OPTIMIZERS, trained_parameters
from halfbyte.optim.badam import BAdam, Blocks
from halfbyte.utils.errors import CheckpointError, ConfigError, TrainingError
from tests.helpers.optimizer_settings import OptimizerSettings

RATE, DECAY = 0.03, 0.1


class Model(nn.Module):
    """An embedding, three layers of a weight and a bias, and a norm."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for _ in range(3))
        self.norm = nn.LayerNorm(6, dtype=dtype)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.norm(x)


def inner(groups):
    return torch.optim.AdamW(groups, lr=RATE, fused=True)


def make(model, seed=0, **options):
    trained = trained_parameters(model)
    groups = [{"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": DECAY},
              {"params": [p for p in trained.values() if p.ndim == 1], "weight_decay": 0.0}]  # fmt: skip
    return BAdam(groups, trained, inner, lr=RATE, blocks=Blocks(**options), seed=seed)


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(11, (4,), generator=generator)
    model.zero_grad()
    (model(ids).float() * torch.randn(4, 6, generator=generator)).sum().backward()


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, [0, 0, 1, 1, 2, 2, 0]),
        ({"switch_mode": "descending"}, [2, 2, 1, 1, 0, 0, 2]),
        ({"start_block": 1}, [1, 1, 2, 2, 0, 0, 1]),
        ({"switch_mode": "descending", "start_block": 0}, [0, 0, 2, 2, 1, 1, 0]),
        ({"switch_mode": "fixed", "start_block": 2}, [2] * 7),
    ],
)
def test_only_the_active_layer_changes_and_has_gradients_and_state(options, order):
    model = Model()
    optimizer = make(model, switch_interval=2, **options)
    for step, active in enumerate(order):
        assert optimizer.active == active
        backward(model, step)
        before = weights(model)
        held = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        optimizer.step()
        changed = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
        assert held == changed == {f"layers.{active}.weight", f"layers.{active}.bias"}
        if optimizer.active == active:
            assert len(optimizer.state_dict()["state"]) == 2


def test_a_random_order_visits_every_block_once_a_pass():
    orders = set()
    for seed in range(8):
        blocks = Blocks(switch_mode="random")
        order = [blocks.block_at(turn, 5, seed) for turn in range(10)]
        assert sorted(order[:5]) == sorted(order[5:]) == [*range(5)]
        orders.add(tuple(order))
    assert len(orders) > 1
    assert Blocks(switch_mode="random", start_block=3).block_at(0, 5, 1) == 3


def test_a_block_is_stepped_as_by_a_new_adamw():
    """Algorithm 1: each time that a block becomes active, its moments start at zero."""
    model, twin = Model(), Model()
    optimizer = make(model, switch_interval=3)
    for block in (0, 1, 2, 0):
        layer = twin.layers[block]
        alone = torch.optim.AdamW([{"params": [layer.weight], "weight_decay": DECAY},
                                   {"params": [layer.bias], "weight_decay": 0.0}], lr=RATE, fused=True)  # fmt: skip
        for step in range(3):
            backward(model, step)
            backward(twin, step)
            rate = RATE / (1 + step)  # as a schedule sets it
            for group in (*optimizer.param_groups, *alone.param_groups):
                group["lr"] = rate
            optimizer.step()
            alone.step()
    for name, value in weights(twin).items():
        assert torch.equal(model.get_parameter(name), value), name


def test_narrow_weights_have_master_weights_in_fp32():
    """Updates below bf16's resolution add up while the block is active."""
    model = Model(torch.bfloat16)
    optimizer = make(model, switch_interval=100)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    before = weights(model)["layers.0.weight"]
    for step in range(40):
        backward(model, step % 2)
        optimizer.step()
    moved = (model.layers[0].weight - before).abs().max()
    assert moved > 1e-3
    (state,) = [each for each in optimizer.state_dict()["state"].values() if each["master"].ndim == 2]
    assert state["master"].dtype == torch.float32
    assert torch.equal(state["master"].bfloat16(), model.layers[0].weight)


@pytest.mark.parametrize("mask_mode", ["adjacent", "scatter"])
def test_ratio_updates_a_share_of_every_parameter_and_all_elements_in_a_pass(mask_mode):
    model = Model()
    optimizer = make(model, mode="ratio", update_ratio=0.25, mask_mode=mask_mode, switch_interval=1)
    total = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in weights(model).items()}
    for step in range(4):
        backward(model, step)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = weights(model)
        optimizer.step()
        for name, value in weights(model).items():
            changed = value != before[name]
            assert not (changed & total[name]).any()
            assert changed.sum() <= -(-changed.numel() // 4)
            apart = changed.view(-1).nonzero().view(-1).diff()
            assert (apart == (1 if mask_mode == "adjacent" else 4)).all()
            total[name] |= changed
    assert all(mask.all() for mask in total.values())


def test_a_skipped_step_changes_nothing():
    model = Model()
    optimizer = make(model)
    backward(model, 0)
    optimizer.step()
    before = weights(model)
    backward(model, 1)
    model.layers[0].weight.grad[0, 0] = torch.nan
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"badam_mode": "ratio", "badam_update_ratio": 0.3},
                                     {"badam_mode": "ratio", "badam_mask_mode": "scatter"}])  # fmt: skip
def test_state_and_gradient_bytes_match_the_row(options, dtype):
    """2M + 16M/D of the paper's section 3.2: beyond bf16 weights 12 bytes an element of the block, gradients apart."""
    settings, row = OptimizerSettings(optim="badam", optim_args=options), OPTIMIZERS["badam"]
    model = Model(dtype)
    optimizer = row.make(model, settings)
    backward(model, 0)
    held = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    optimizer.step()
    states = optimizer.state_dict()["state"].values()
    measured = sum(value.nbytes for state in states for value in state.values() if value.dim())
    assert row.state_bytes(Model(dtype), settings) == measured
    assert row.gradient_bytes(Model(dtype), settings) == held
    if not options:
        assert measured == (8 if dtype == torch.float32 else 12) * (6 * 6 + 6)
    with torch.device("meta"):
        assert row.state_bytes(Model(dtype), settings) == measured


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda w: torch.ones(6, 5), lambda w: w.bfloat16()], ids=["shape", "dtype"])
def test_weights_that_change_their_kind_are_named(change):
    model = Model()
    optimizer = make(model)
    backward(model, 0)
    optimizer.step()
    weight = model.layers[0].weight
    weight.grad = None
    weight.data = change(weight.data)
    weight.grad = torch.ones_like(weight)
    before = model.layers[0].bias.detach().clone()
    with pytest.raises(TrainingError, match="parameter"):
        optimizer.step()
    assert torch.equal(model.layers[0].bias, before)


def test_blocks_that_cannot_be_made_are_refused():
    """A start block beyond the last, and parameters that a ratio cannot divide."""
    with pytest.raises(ConfigError, match="badam_start_block"):
        make(Model(), start_block=3)
    for parameter in (torch.randn(6, 4).t(), torch.ones(3), torch.ones(0)):
        trained = {"weight": nn.Parameter(parameter)}
        with pytest.raises(ConfigError):
            BAdam([{"params": [*trained.values()]}], trained, inner, lr=RATE, blocks=Blocks("ratio", update_ratio=0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("saved", "loader"), [
    ({}, {"mode": "ratio", "update_ratio": 0.5}), ({"mode": "ratio", "update_ratio": 0.5}, {}),
    ({"mode": "ratio", "update_ratio": 0.5}, {"mode": "ratio", "update_ratio": 0.25}), ({}, {"start_block": 1}),
])  # fmt: skip
def test_the_state_of_other_blocks_is_refused(saved, loader, dtype):
    model = Model(dtype)
    optimizer = make(model, **saved)
    backward(model, 0)
    optimizer.step()
    with pytest.raises(CheckpointError):
        make(Model(dtype), **loader).load_state_dict(optimizer.state_dict())
