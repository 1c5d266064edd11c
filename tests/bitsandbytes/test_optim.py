"""Optimizers of the drop-in: bitsandbytes' names of state, layouts, overrides, and saved state of the real package."""

import copy
import gc

import pytest
import torch
from torch import nn

import halfbyte.bitsandbytes as bnb
from halfbyte.optim.fused import WRAPPED
from halfbyte.utils.errors import CheckpointError, TrainingError

NAMES = [
    name
    for name in bnb.optim.__all__
    if name not in ("GlobalOptimManager", "PytorchLARS") and not name.startswith("Paged")
]


@pytest.fixture(autouse=True)
def manager():
    bnb.optim.GlobalOptimManager.get_instance().initialize()
    yield bnb.optim.GlobalOptimManager.get_instance()
    bnb.optim.GlobalOptimManager.get_instance().initialize()


def made(name, module, parameters):
    needs_momentum = name.startswith(("SGD", "LARS"))
    return getattr(module.optim, name)(parameters, lr=1e-2, **({"momentum": 0.9} if needs_momentum else {}))


def trained(name, module, steps=3, weights=None, state=None):
    torch.manual_seed(0)
    parameters = weights or [nn.Parameter(torch.randn(70, 70)), nn.Parameter(torch.randn(9))]
    optimizer = made(name, module, parameters)
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    for step in range(steps):
        torch.manual_seed(step + 1)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("name", NAMES)
def test_saved_state_has_the_layout_of_bitsandbytes(name):
    real = pytest.importorskip("bitsandbytes")
    _, ours = trained(name, bnb)
    try:
        _, theirs = trained(name, real)
    except (ValueError, RuntimeError, NotImplementedError, IndexError, AssertionError):
        pytest.skip("bitsandbytes' CPU backend does not have this optimizer")
    mine, other = ours.state_dict(), theirs.state_dict()
    for number, state in other["state"].items():
        found = mine["state"][number]
        assert int(found["step"]) == int(state["step"])
        expected = {key: value for key, value in state.get(WRAPPED, state).items() if isinstance(value, torch.Tensor)}
        for key, value in expected.items():
            assert (found[WRAPPED][key].shape, found[WRAPPED][key].dtype) == (value.shape, value.dtype), key
    # and each continues from the other's state
    trained(name, bnb, steps=1, state=other)
    trained(name, real, steps=1, state=mine)


@pytest.mark.parametrize("name", NAMES)
def test_resume_is_bit_equal(name):
    weights, optimizer = trained(name, bnb)
    saved = optimizer.state_dict()
    again = [nn.Parameter(weight.detach().clone()) for weight in weights]
    trained(name, bnb, steps=1, weights=again, state=saved)
    torch.manual_seed(1)
    for weight in weights:
        weight.grad = torch.randn(weight.shape)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))


@pytest.mark.parametrize("name", ["AdamW8bit", "AdEMAMix8bit", "LAMB", "PagedLion32bit"])
def test_a_copy_steps_alone(name):
    weights, optimizer = trained(name, bnb)
    before = [weight.detach().clone() for weight in weights]
    other = copy.deepcopy(optimizer)
    (group,) = other.param_groups
    for optimizer_of, members in ((other, group["params"]), (optimizer, weights)):
        assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))
        torch.manual_seed(5)
        for weight in members:
            weight.grad = torch.randn(weight.shape)
        optimizer_of.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, group["params"], strict=True))


def test_state_answers_bitsandbytes_names():
    (weight, small), optimizer = trained("AdEMAMix8bit", bnb)
    state = optimizer.state[weight]
    assert state["state1"].shape == (2, 70, 70)
    assert state["state1"].dtype == torch.uint8
    assert state["absmax1"].shape == (2, 20)
    assert state["qmap2"].shape == (256,)
    assert optimizer.state[small]["state2"].dtype == torch.float32
    for key in ("state3", "absmax3", "other"):
        assert key not in state
        with pytest.raises(KeyError):
            state[key]
    assert "absmax2" in state
    assert "absmax1" not in optimizer.state[small]


@pytest.mark.parametrize("name", NAMES)
def test_single_updates_equal_a_step(name):
    """`init_state` and `update_step`, which subclasses with a step of their own call."""
    expected, _ = trained(name, bnb, steps=2)
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(70, 70)), nn.Parameter(torch.randn(9))]
    optimizer = made(name, bnb, weights)
    for step in range(2):
        torch.manual_seed(step + 1)
        for index, weight in enumerate(weights):
            weight.grad = torch.randn(weight.shape)
            assert ("state1" in optimizer.state[weight]) == (step > 0)
            if step == 0:
                optimizer.init_state(optimizer.param_groups[0], weight, 0, index)
            optimizer.update_step(optimizer.param_groups[0], weight, 0, index)
    for found, other in zip(weights, expected, strict=True):
        assert torch.equal(found, other)


def test_single_updates_need_a_state_of_their_size():
    weight = nn.Parameter(torch.randn(70, 70))
    optimizer = bnb.optim.Adam8bit([weight])
    group, weight.grad = optimizer.param_groups[0], torch.randn(70, 70)
    with pytest.raises(TrainingError):
        optimizer.update_step(group, weight, 0, 0)
    optimizer.init_state(group, weight, 0, 0)
    weight.data, weight.grad = torch.randn(70, 71), None
    weight.grad = torch.randn(70, 71)
    with pytest.raises(TrainingError):
        optimizer.update_step(group, weight, 0, 0)


def test_state_of_a_subclass_with_another_size_is_loaded_by_it_only():
    class Sliced(bnb.optim.Adam8bit):
        def step(self, closure=None):
            raise NotImplementedError

    whole, part = nn.Parameter(torch.randn(70, 70)), nn.Parameter(torch.randn(60, 70))
    _, saved = trained("Adam8bit", bnb, steps=1, weights=[part])
    optimizer = Sliced([whole])
    optimizer.load_state_dict(saved.state_dict() | {"param_groups": optimizer.state_dict()["param_groups"]})
    assert optimizer.state[whole]["state1"].numel() == 60 * 70
    with pytest.raises(CheckpointError):
        bnb.optim.Adam8bit([whole]).load_state_dict(saved.state_dict())


def test_overrides_belong_to_a_tensor(manager):
    first, second = torch.randn(70, 70), torch.randn(70, 70)
    manager.register_parameters([first, second])
    del first, second
    gc.collect()
    weights = [torch.randn(70, 70) for _ in range(2)]  # may have the numbers of the freed ones
    manager.override_config(weights[1], "optim_bits", 8)
    optimizer = bnb.optim.Adam(weights, lr=1e-3)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert [optimizer.state[weight]["state1"].dtype for weight in weights] == [torch.float32, torch.uint8]


def test_overrides_survive_a_move_by_place(manager):
    weights = [torch.randn(70, 70) for _ in range(2)]
    manager.override_config(weights[1], "optim_bits", 8)
    manager.register_parameters(weights)
    moved = [weight.clone() for weight in weights]
    optimizer = bnb.optim.Adam(moved, lr=1e-3)
    for weight in moved:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert [optimizer.state[weight]["state1"].dtype for weight in moved] == [torch.float32, torch.uint8]


def test_embeddings_have_fp32_state():
    embedding = bnb.nn.StableEmbedding(100, 64)
    optimizer = bnb.optim.Adam8bit(embedding.parameters())
    embedding(torch.arange(100)).square().sum().backward()
    optimizer.step()
    assert {optimizer.state[weight]["state1"].dtype for weight in embedding.parameters()} == {torch.float32}


def test_update_norms_are_clipped():
    """The step of LARS is at most lr · max_unorm · ‖p‖, and equals the reference in torch."""
    torch.manual_seed(0)
    start = torch.randn(50, 30)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    pair = [(ours, bnb.optim.LARS([ours], 0.1, 0.9)), (theirs, bnb.optim.PytorchLARS([theirs], 0.1, 0.9))]
    for step in range(5):
        for weight, optimizer in pair:
            torch.manual_seed(step)
            weight.grad = torch.randn(50, 30) * 100
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert (ours - start).norm() <= 5 * 0.1 * 0.02 * start.norm() * 1.01


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam8bit", {"amsgrad": True}), ("AdamW8bit", {"optim_bits": 8}), ("LAMB8bit", {"max_unorm": 0.5}),
        ("Adagrad8bit", {"optim_bits": 32}), ("Adam", {"lr": -1.0}), ("Adam", {"betas": (1.0, 0.9)}),
    ],
)  # fmt: skip
def test_bad_arguments_raise_as_in_bitsandbytes(name, options):
    with pytest.raises(ValueError):
        getattr(bnb.optim, name)([nn.Parameter(torch.zeros(3))], **options)
