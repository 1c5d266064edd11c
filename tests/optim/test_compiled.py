"""torch.compile(fullgraph=True) of optimizer steps: bit-equal to eager steps, one op, no recompilation."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

from halfbyte.ops.optimizer import RULES
from halfbyte.optim import fused
from halfbyte.utils.errors import TrainingError

NAMES = ("AdamW", "LAMB", "AdEMAMix", "Lion", "SGD", "LARS", "RMSprop", "Adagrad")
KINDS = [(name, storage) for name in NAMES for storage in RULES[getattr(fused, name).rule].storages]
SHAPES = [((5, 7), torch.float32), ((4099,), torch.float32), ((31, 17), torch.bfloat16), ((3,), torch.bfloat16)]
BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(*shape).to(dtype)) for shape, dtype in SHAPES]


def contents(optimizer):
    """Weights and states of an optimizer as bytes."""
    tensors = []
    for group in optimizer.param_groups:
        for weight in group["params"]:
            tensors.append(weight.detach())
            tensors += [each for each in optimizer.state[weight].values() if isinstance(each, torch.Tensor)]
    return [each.clone().contiguous().view(-1).view(torch.uint8) for each in tensors]


def assert_equal(mine, theirs):
    assert len(mine) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def compiled(function, backend):
    """The compiled function, which raises from its third call on if it would be compiled again."""
    calls, inner = [], torch.compile(function, fullgraph=True, backend=backend)

    def call():
        calls.append(None)
        with torch._dynamo.config.patch(error_on_recompile=len(calls) > 2):
            return inner()

    return call


def run(optimizer, step, count=4, rate=lambda number: 0.1 / (number + 1)):
    """Take steps with new gradients and another learning rate each; return what they return, as bytes."""
    found = []
    for number in range(count):
        torch.manual_seed(number)
        for group in optimizer.param_groups:
            group["lr"] = rate(number)
            for weight in group["params"]:
                weight.grad = torch.randn_like(weight)
        if (result := step()) is not None:
            found.append(result.detach().clone().view(1).view(torch.uint8))
        optimizer.zero_grad()
    return [*found, *contents(optimizer)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "storage"), KINDS)
def test_steps_of_every_rule_and_storage_equal_eager(name, storage):
    options = {"storage": storage, "rounding": "correction8", "weight_decay": 0.1}
    one, other = (getattr(fused, name)(parameters(), **options) for _ in range(2))
    assert_equal(run(one, compiled(one.step, "eager")), run(other, other.step))


@pytest.mark.slow
def test_inductor_updates_in_place():
    def clipped(optimizer):
        optimizer.clip(0.5)  # its result is not used, and must not be removed
        optimizer.step()

    one, other = (fused.AdamW(parameters(), storage="dynamic8") for _ in range(2))
    step, reads = compiled(lambda: clipped(one), "inductor"), []
    held = [torch.zeros_like(weight) for weight in one.param_groups[0]["params"]]  # gradients at fixed addresses
    for number in range(4):
        torch.manual_seed(number)
        for optimizer in (one, other):
            for weight, gradient in zip(optimizer.param_groups[0]["params"], held, strict=True):
                weight.grad = gradient
        for gradient in held:
            gradient.normal_()
        step()
        clipped(other)
        reads.append(one.all_parameters.version)
    assert_equal(contents(one), contents(other))
    assert reads[1:] == [reads[1]] * 3  # each step finds the tensors of the step before


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_reads_and_writes_weights_in_the_order_of_the_graph(backend):
    def surrounded(optimizer):
        first = optimizer.param_groups[0]["params"][0]
        with torch.no_grad():
            before = first.sum()
            first.mul_(0.5)
            optimizer.step()
            return torch.stack([before, first.sum()])

    results = []
    for compiles in (True, False):
        optimizer = fused.AdamW(parameters(), lr=0.1)
        step = torch.compile(surrounded, fullgraph=True, backend=backend) if compiles else surrounded
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad = torch.ones_like(weight)
        sums = [step(optimizer) for _ in range(2)]
        results.append([*(each.view(torch.uint8) for each in sums), *contents(optimizer)])
    assert_equal(*results)


def test_eager_and_compiled_calls_alternate():
    one, other = (fused.AdamW(parameters()) for _ in range(2))
    clips = [torch.compile(lambda: one.clip(0.5), fullgraph=True, backend="aot_eager"), lambda: one.clip(0.5)]
    steps = [torch.compile(one.step, fullgraph=True, backend="aot_eager"), one.step]
    for number in range(8):
        torch.manual_seed(number)
        for mine, theirs in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.clone()
        assert torch.equal(clips[number % 2](), other.clip(0.5))
        if number > 5:  # other gradients are not clipped
            for optimizer in (one, other):
                for weight in optimizer.param_groups[0]["params"]:
                    weight.grad = weight.grad + 1
        steps[number // 2 % 2]()
        other.step()
    assert_equal(contents(one), contents(other))


def test_scaled_and_broken_gradients():
    one, other = (fused.AdamW(parameters()) for _ in range(2))
    step = torch.compile(one.step, fullgraph=True, backend="aot_eager")
    for found in (0.0, 1.0, 0.0):
        for optimizer in (one, other):
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(64.0), torch.tensor(found)
        before = contents(one)
        run(one, step, 1)
        run(other, other.step, 1)
        assert_equal(contents(one), contents(other))
        assert torch.equal(contents(one)[0], before[0]) == bool(found)


def test_learning_rate_schedulers_work():
    results = []
    for compiles in (True, False):
        optimizer = fused.AdamW(parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)

        def whole(optimizer=optimizer):
            optimizer.step()

        step = compiled(whole, "eager") if compiles else whole
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for _ in range(4):
                for weight in optimizer.param_groups[0]["params"]:
                    weight.grad = torch.ones_like(weight)
                step()
                scheduler.step()
        results.append(contents(optimizer))
    assert_equal(*results)


def test_loaded_and_copied_optimizers():
    one = fused.AdamW(parameters(), storage="dynamic8")
    step = compiled(one.step, "eager")
    run(one, step, 2)
    other = copy.deepcopy(one)
    one.load_state_dict(copy.deepcopy(one.state_dict()))
    assert_equal(run(one, step, 2), run(other, other.step, 2))


def test_a_graph_of_a_freed_optimizer_is_refused():
    optimizer = fused.AdamW(parameters())
    number, weights = optimizer._number, optimizer.param_groups[0]["params"]
    del optimizer
    gc.collect()
    with pytest.raises(TrainingError):
        torch.ops.halfbyte.optimizer_step(number, weights, [None] * len(weights), None, None, None)
