"""Optimizers of the drop-in: bitsandbytes' names of state, layouts, overrides, and saved state of the real package."""

import copy
import gc
import inspect

import pytest
import torch
from torch import nn

import halfbyte.bitsandbytes as bnb
from halfbyte.optim.state_dicts import WRAPPED

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


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(3)
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


NUMBERS = {
    "lr": 0.0, "weight_decay": 0.5, "betas": (0.5, 0.6), "eps": 1.0, "max_unorm": 1e-3, "optim_bits": 8,
    "min_8bit_size": 5000,
}  # fmt: skip


def overridden(optimizer_of, options, by, steps=3):
    """Weights after steps, of which the first parameter has options of its own."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    torch.manual_seed(0)
    module = nn.Linear(70, 70)
    parameters = [module.weight, module.bias]
    if by == "group":
        parameters = [{"params": [module.weight], **options}, {"params": [module.bias]}]
    optimizer = optimizer_of(parameters, lr=1e-2)
    if by == "tensor":
        manager.override_config(module.weight, key_value_dict=options)
    elif by == "place":
        manager.override_config(module.weight, key_value_dict=options)
        manager.register_parameters(parameters)
        manager.pid2config.clear()
    elif by == "module":
        manager.register_module_override(module, "weight", options)
    for step in range(steps):
        torch.manual_seed(step + 1)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()], optimizer


@pytest.mark.sampled(6)
@pytest.mark.parametrize("by", ["tensor", "place", "module"])
@pytest.mark.parametrize("key", ["lr", "weight_decay", "betas", "eps"])
@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "PagedAdamW"])
def test_an_override_equals_a_group_of_its_own(name, key, by):
    optimizer_of, options = getattr(bnb.optim, name), {key: NUMBERS[key]}
    plain, _ = overridden(optimizer_of, {}, "tensor")
    expected, _ = overridden(optimizer_of, options, "group")
    found, _ = overridden(optimizer_of, options, by)
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[0], plain[0])


def test_embeddings_have_fp32_state():
    embedding = bnb.nn.StableEmbedding(100, 64)
    optimizer = bnb.optim.Adam8bit(embedding.parameters())
    embedding(torch.arange(100)).square().sum().backward()
    optimizer.step()
    assert {optimizer.state[weight]["state1"].dtype for weight in embedding.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam8bit", {"amsgrad": True}), ("AdamW8bit", {"optim_bits": 8}), ("LAMB8bit", {"max_unorm": 0.5}),
        ("Adagrad8bit", {"optim_bits": 32}), ("Adam", {"lr": -1.0}), ("Adam", {"betas": (1.0, 0.9)}),
        # accepted and ignored by bitsandbytes
        ("AdamW32bit", {"optim_bits": 8}), ("Adagrad32bit", {"optim_bits": 8}),
        ("LAMB", {"bias_correction": False}), ("LAMB", {"adam_w_mode": False}), ("LAMB32bit", {"amsgrad": True}),
        ("LARS", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("SGD8bit", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}), ("RMSprop", {"momentum": 0.9}),
    ],
)  # fmt: skip
def test_bad_and_ignored_arguments_are_refused(name, options):
    with pytest.raises(ValueError):
        getattr(bnb.optim, name)([nn.Parameter(torch.zeros(3))], **options)


@pytest.mark.parametrize("name", ["Lion", "SGD", "RMSprop", "LAMB", "LARS", "AdEMAMix"])
def test_a_class_of_fixed_bits_has_the_signature_without_them(name):
    plain, fixed = (inspect.signature(getattr(bnb.optim, name + suffix)) for suffix in ("", "8bit"))
    assert [*fixed.parameters] == [key for key in plain.parameters if key != "optim_bits"]
    arguments = [[nn.Parameter(torch.zeros(3))], 0.1, *([0.9] if "momentum" in list(plain.parameters)[2:3] else [])]
    assert getattr(bnb.optim, name + "8bit")(*arguments).optim_bits == 8
    with pytest.raises(TypeError):
        getattr(bnb.optim, name + "8bit")(*arguments, optim_bits=8)


@pytest.mark.parametrize(
    ("base", "name", "options"),
    [
        ("Optimizer2State", "adam", {"skip_zeros": True}), ("Optimizer1State", "momentum", {"skip_zeros": True}),
        ("Optimizer2State", "adam", {"optim_bits": 16}), ("Optimizer1State", "lion", {"max_unorm": 0.5}),
        ("Optimizer2State", "ademamix", {"max_unorm": 0.5, "betas": (0.9, 0.99, 0.999)}),
    ],
)  # fmt: skip
def test_options_that_no_kernel_has_are_refused(base, name, options):
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    with pytest.raises(NotImplementedError):
        getattr(bnb.optim.optimizer, base)(name, [weight], **options).step()
