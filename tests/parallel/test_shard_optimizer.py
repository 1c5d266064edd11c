"""ZeRO-1: stepping shards of parameters is bit-equal to one process, with the files of one process."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from halfbyte.mesh.mesh import SINGLE_PROCESS
from halfbyte.optim import OPTIMIZERS, fused, parse_options
from halfbyte.parallel.shard import optimizer as shard_optimizers
from halfbyte.parallel.shard.optimizer import ReplicatedOptimizer, ShardedOptimizer, shard_optimizer
from halfbyte.utils.errors import CheckpointError
from tests.helpers.optimizer_settings import OptimizerSettings

pytestmark = pytest.mark.dist

SHAPES = [(8, 16), (5, 7), (3,), (1,), (2, 3, 5)]  # divisible, odd, and fewer elements than there are ranks
SETTINGS = {"learning_rate": 0.1, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95}
ELEMENTWISE = [name for name, row in OPTIMIZERS.items() if row.elementwise and name not in ("lamb", "lars")]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.randn(4))  # whose decay differs, so that there are two groups
        self.weights = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
        self.unused = nn.Parameter(torch.randn(6))


def gradients(step, rank):
    """Return small integers, whose sums are exact in any order; one rank has none for the first parameter."""
    torch.manual_seed(10 * step + rank)
    found = [torch.randint(-4, 5, shape).float() for shape in [(4,), *SHAPES]]
    return [None if rank == 1 and at == 0 else each for at, each in enumerate(found)]


def run(mesh, ranks, name, steps, state=None, model=None, settings=None, max_norm=1.0):
    """Run `steps` of an optimizer; returns parameters, norms, and the optimizer state on the main rank."""
    model = copy.deepcopy(model) or Model()  # what ranks are sent lies in memory that they share
    parameters = list(model.parameters())
    named = [model.bias, *model.weights]
    optimizer = OPTIMIZERS[name].make(model, OptimizerSettings(**SETTINGS, **(settings or {})))
    units = shard_optimizer(mesh, parameters, block=OPTIMIZERS[name].block)
    units.adopt(optimizer)
    if state is not None:
        optimizer.load_state_dict(units.local_state(copy.deepcopy(state)))
    sums, norms = [], []
    for step in steps:
        for rank in ranks if mesh.size == 1 else [mesh.rank]:
            for parameter, gradient in zip(named, gradients(step, rank), strict=True):
                if gradient is not None:
                    gradient = gradient.to(parameter.dtype)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        own = torch.tensor([float(rank) for rank in (ranks if mesh.size == 1 else [mesh.rank])]).sum().reshape(1)
        sums.append(float(units.reduce(own)))
        norms.append(float(units.clip(max_norm)))
        optimizer.step()
        units.after_step()
        assert all(parameter.grad is None for parameter in parameters)
    found = {key: value.detach().clone() for key, value in model.named_parameters()}
    kept = sum(value.numel() for each in optimizer.state.values() for value in each.values() if value.dim())
    return found, sums, norms, units.full_state(optimizer), kept, type(units)


def assert_equal_state(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert found["state"][number].keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(found["state"][number][key], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer(two, name):
    expected = run(SINGLE_PROCESS, [0, 1], name, range(3))
    assert expected[5] is ReplicatedOptimizer
    results = two.run(run, [0, 1], name, range(3), layout={"shard": 2})
    assert sum(result[4] for result in results) == expected[4]  # each rank keeps the state of its slices
    for parameters, sums, norms, _, kept, kind in results:
        assert kind is ShardedOptimizer
        assert (sums, norms) == (expected[1], pytest.approx(expected[2], rel=1e-6))
        assert abs(kept - expected[4] / 2) <= len(SHAPES) + 1
        for key, value in expected[0].items():
            torch.testing.assert_close(parameters[key], value, rtol=1e-6, atol=1e-7)
    assert_equal_state(results[0][3], expected[3])


def load_exchanged(mesh, state):
    model = Model()
    optimizer = OPTIMIZERS["adamw"].make(model, OptimizerSettings(**SETTINGS))
    units = shard_optimizer(mesh, list(model.parameters()), block=1)
    units.adopt(optimizer)
    for values in state["state"].values():
        values["exp_avg"] = values["exp_avg"].flatten()
    try:
        optimizer.load_state_dict(units.local_state(state))
    except CheckpointError:
        return "refused"


def test_state_of_another_shape_is_refused(two):
    state = run(SINGLE_PROCESS, [0], "adamw", range(1))[3]
    assert two.run(load_exchanged, state, layout={"shard": 2}) == ["refused"] * 2


@pytest.mark.parametrize("layout", [{"shard": 4}, {"data": 2, "shard": 2}])
def test_state_of_one_process_continues_on_four(four, layout):
    ranks, name = [0, 1, 2, 3], "adamw_torch"
    values, _, _, state, *_ = run(SINGLE_PROCESS, ranks, name, range(2))
    model = Model()
    model.load_state_dict(values)
    expected = run(SINGLE_PROCESS, ranks, name, range(2, 4), state, model)
    results = four.run(run, ranks, name, range(2, 4), state, model, layout=layout)
    for parameters, sums, norms, *_ in results:
        assert (sums, norms) == (expected[1], pytest.approx(expected[2], rel=1e-6))
        for key, value in expected[0].items():
            torch.testing.assert_close(parameters[key], value, rtol=1e-6, atol=1e-7)
    assert_equal_state(results[0][3], expected[3])


def kind(mesh, elementwise):
    return type(shard_optimizer(mesh, list(Model().parameters()), block=int(elementwise))) is ShardedOptimizer


def test_unsharded_optimizers(two):
    assert two.run(kind, False, layout={"shard": 2}) == [False, False]
    assert two.run(kind, True, layout={"data": 2}) == [False, False]


def backwards(mesh, ranks, at_once, unused):
    """Return the slices' gradients after two micro-batches, and how many full ones were left before the end."""
    model = Model()
    parameters = [each for each in model.parameters() if unused or each is not model.unused]
    units = ShardedOptimizer(mesh, parameters, at_once=at_once)
    for rank in ranks:
        for micro in range(2):
            sum((rank + micro + 1) * each.sum() for each in parameters if each is not model.unused).backward()
    left = sum(parameter.grad is not None for parameter in parameters)
    units.reduce(torch.zeros(1))
    return [None if part.grad is None else part.grad.clone() for part in units.slices], left


def ranks_own(mesh, at_once, unused, together):
    shard_optimizers.TOGETHER = together
    return backwards(mesh, [mesh.rank], at_once, unused)


@pytest.mark.parametrize("together", [1, 64, 2**25])
def test_gradients_reduced_in_backward(two, together):
    """One bucket, several, or all; buckets after a missing gradient are reduced at the end of the step."""
    layout = {"shard": 2}
    for rank, (found, left) in enumerate(two.run(ranks_own, True, False, together, layout=layout)):
        assert left == 0
        expected, whole = two.run(ranks_own, False, False, together, layout=layout)[rank]
        assert whole == len(found)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
        assert found[0].tolist() == [8.0] * 2  # (1 + 2) + (2 + 3)
    for found, left in two.run(ranks_own, True, True, together, layout=layout):
        assert left > 0
        assert found[1] is None
        assert (found[0].tolist(), found[2].tolist()) == ([8.0] * 2, [8.0] * 64)


TRUSTED = ["lamb", "lars", "lamb storage=dynamic8", "lars storage=dynamic8", "lamb storage=companded8",
           "lars storage=companded8", "lamb storage=bf16", "lars storage=bf16"]  # fmt: skip
BLOCKWISE = [name for name, row in OPTIMIZERS.items() if row.block > 1]
BLOCKWISE += ["adamw storage=companded8", "lion_8bit storage=companded8"]
LARGE = [(64, 80), (5000,), (4096,), (300,), (1,)]  # 20 blocks; blocks that two and four ranks cannot share evenly


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape) for shape in LARGE)


def run_blockwise(mesh, ranks, name, steps, state=None, values=None, times=1):
    """Run `steps` of a block-wise optimizer; returns parameters and the full state on the main rank.

    Args:
        name: of the optimizer, then a space and its options.
        times: factor of the gradients.
    """
    model, (name, _, options) = Large(), name.partition(" ")
    config = OptimizerSettings(optim=name, optim_args=parse_options(options), **SETTINGS)
    if values is not None:
        model.load_state_dict(values)
    optimizer = OPTIMIZERS[name].make(model, config)
    units = shard_optimizer(mesh, list(model.parameters()), block=OPTIMIZERS[name].block_of(config))
    units.adopt(optimizer)
    if state is not None:
        optimizer.load_state_dict(units.local_state(copy.deepcopy(state)))
    for step in steps:
        torch.manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randint(-4, 5, parameter.shape).float() * times
            parameter.grad = gradient * len(ranks) if mesh.size == 1 else gradient
        units.reduce(torch.zeros(1))
        with CommDebugMode() as counted:
            optimizer.step()
        assert counted.get_total_counts() == (name in ("lamb", "lars") and mesh.degree("shard") > 1)
        units.after_step()
    return {key: value.detach().clone() for key, value in model.named_parameters()}, units.full_state(optimizer)


def assert_equal_nested(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_equal_nested(found[key], value)
        else:
            assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("name", BLOCKWISE)
def test_blocks_stay_whole_in_two_shards(two, name):
    values, state = run_blockwise(SINGLE_PROCESS, [0, 1], name, range(3))
    results = two.run(run_blockwise, [0, 1], name, range(3), layout={"shard": 2})
    for found, _ in results:
        assert_equal_nested(found, values)
    assert_equal_nested(results[0][1]["state"], state["state"])


@pytest.mark.parametrize("layout", [{"shard": 4}, {"data": 2, "shard": 2}])
def test_8_bit_state_continues_on_another_mesh(four, layout):
    values, state = run_blockwise(SINGLE_PROCESS, [0, 1, 2, 3], "adamw_8bit", range(2))
    expected, after = run_blockwise(SINGLE_PROCESS, [0, 1, 2, 3], "adamw_8bit", range(2, 4), state, values)
    results = four.run(run_blockwise, [0, 1, 2, 3], "adamw_8bit", range(2, 4), state, values, layout=layout)
    for found, _ in results:
        assert_equal_nested(found, expected)
    assert_equal_nested(results[0][1]["state"], after["state"])


def assert_close_nested(found, expected):
    """Weights and fp32 state to rounding of the trust ratios; at most one 8-bit code in 1,000 differs."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_close_nested(found[key], value)
        elif isinstance(value, torch.Tensor) and not value.is_floating_point():
            assert (found[key] != value).float().mean() <= 1e-3, key
        else:
            torch.testing.assert_close(torch.as_tensor(found[key]), torch.as_tensor(value), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", TRUSTED)
def test_trust_ratios_of_slices_are_those_of_full_parameters(two, name):
    values, state = run_blockwise(SINGLE_PROCESS, [0, 1], name, range(3))
    results = two.run(run_blockwise, [0, 1], name, range(3), layout={"shard": 2})
    for found, _ in results:
        assert_close_nested(found, values)
    assert_close_nested(results[0][1]["state"], state["state"])


def step_dtensors(mesh, name, placements):
    """Return three steps of full parameters, from DTensors with these placements on a mesh of two by two, or None."""
    torch.manual_seed(0)
    devices = None if mesh.size == 1 else init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def place(tensor, placed):
        if devices is None or placed is None:
            return tensor
        return distribute_tensor(tensor, devices, [Replicate() if at is None else Shard(at) for at in placed])

    parameters = [nn.Parameter(place(torch.randn(3, 5), placed)) for placed in placements]
    optimizer = getattr(fused, name)(parameters, weight_decay=0.1)
    for _ in range(3):
        for parameter, placed in zip(parameters, placements, strict=True):
            parameter.grad = place(torch.randn(3, 5), placed)
        optimizer.step()
    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for each in parameters]


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_trust_ratios_of_dtensors(four, name):
    """Divided unevenly, replicated along an axis of the mesh or along both, divided along both, and plain tensors."""
    placements = [(0, None), (None, 0), (None, None), (0, 1), (1, 0), None, (None, 1)]
    expected = step_dtensors(SINGLE_PROCESS, name, placements)
    for found in four.run(step_dtensors, name, placements):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
