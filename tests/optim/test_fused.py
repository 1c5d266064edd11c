"""Fused optimizers against torch's and bitsandbytes': values, state dicts in both directions, guards, resume."""

import copy
import math
import pickle
import threading
from concurrent import futures

import pytest
import torch
from torch import nn

from halfbyte.ops.optimizer_state import STORAGES
from halfbyte.optim import fused
from halfbyte.utils.errors import CheckpointError, ConfigError, TrainingError

SIZES = (1, 255, 256, 257, 4097, 5000)


def parameters(dtype=torch.float32, sizes=SIZES):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]


def groups_of(made):
    return [{"params": made[:2], "weight_decay": 0.0}, {"params": made[2:], "weight_decay": 0.1}]


def gradients(step, made):
    """Gradients of a step, which differ by orders of magnitude within a block."""
    generator = torch.Generator().manual_seed(step)
    for parameter in made:
        scale = torch.rand(parameter.shape, generator=generator).pow(3)
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype)


def trained(make, steps=50, made=None, first=0):
    made = parameters() if made is None else made
    optimizer = make(groups_of(made))
    for step in range(first, first + steps):
        gradients(step, made)
        optimizer.step()
    return made, optimizer


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda g: fused.AdamW(g, 1e-2), lambda g: torch.optim.AdamW(g, 1e-2, fused=True)),
        (lambda g: fused.SGD(g, 1e-2), lambda g: torch.optim.SGD(g, 1e-2, momentum=0.9)),
        (lambda g: fused.RMSprop(g, 1e-3), lambda g: torch.optim.RMSprop(g, 1e-3)),
        (lambda g: fused.Adagrad(g, 1e-2), lambda g: torch.optim.Adagrad(g, 1e-2)),
    ],
    ids=["adamw", "momentum", "rmsprop", "adagrad"],
)
def test_equals_torch_and_state_dicts_interchange(ours, theirs):
    mine, optimizer = trained(ours)
    torchs, other = trained(theirs)
    for a, b in zip(mine, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    # Each continues from the other's state.
    for make, state in ((theirs, optimizer.state_dict()), (ours, other.state_dict())):
        continued = [nn.Parameter(each.detach().clone()) for each in torchs]
        resumed = make(groups_of(continued))
        resumed.load_state_dict(copy.deepcopy(state))
        reference = [nn.Parameter(each.detach().clone()) for each in torchs]
        uninterrupted = theirs(groups_of(reference))
        uninterrupted.load_state_dict(copy.deepcopy(other.state_dict()))
        for step in range(50, 53):
            for made, one in ((continued, resumed), (reference, uninterrupted)):
                gradients(step, made)
                one.step()
        for a, b in zip(continued, reference, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class Formula(torch.optim.Optimizer):
    """In fp64: Lion (arXiv:2302.06675, algorithm 2), AdEMAMix (arXiv:2409.03137, algorithm 1 and section 3.1), LAMB
    (arXiv:1904.00962, algorithm 2), LARS (arXiv:1708.03888, with the rate behind the momentum)."""

    def __init__(self, groups, rule, lr, betas=(0.9, 0.999), alpha=None, t_alpha=None, t_beta3=None, eps=1e-8):
        super().__init__(groups, {"lr": lr})
        self.rule, self.betas, self.alpha, self.horizons, self.eps = rule, betas, alpha, (t_alpha, t_beta3), eps

    def schedule(self, t):
        """AdEMAMix's alpha and beta3 at step t."""
        (beta1, _, beta3), (t_alpha, t_beta3) = self.betas, self.horizons
        share = min(t / t_beta3, 1) if t_beta3 else 1
        low, high = math.log(beta1), math.log(beta3)
        grown = math.exp(low * high / ((1 - share) * high + share * low))
        return self.alpha * (min(t / t_alpha, 1) if t_alpha else 1), min(grown, beta3)

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                state, p, g, decay = self.state[weight], weight.detach(), weight.grad, group["weight_decay"]
                state["t"] = t = state.get("t", 0) + 1
                first, slow, second = (state.get(key, torch.zeros_like(p)) for key in ("first", "slow", "second"))
                beta1, beta2 = self.betas[:2]
                mean = beta1 * first + (1 - beta1) * g
                second = beta2 * second + (1 - beta2) * g * g
                root = (second / (1 - beta2**t)).sqrt() + self.eps
                if self.rule == "lion":
                    first, update = beta2 * first + (1 - beta2) * g, mean.sign() + decay * p
                elif self.rule == "ademamix":
                    alpha, beta3 = self.schedule(t)
                    first, slow = mean, beta3 * slow + (1 - beta3) * g
                    update = (first / (1 - beta1**t) + alpha * slow) / root + decay * p
                elif self.rule == "lamb":
                    first, update = mean, mean / (1 - beta1**t) / root + decay * p
                    update *= p.norm() / update.norm()
                else:
                    ratio = 1e-3 * p.norm() / (g.norm() + decay * p.norm())
                    update = first = beta1 * first + ratio * (g + decay * p)
                state |= {"first": first, "slow": slow, "second": second}
                p.sub_(group["lr"] * update)


SLOW = {"betas": (0.9, 0.999, 0.99), "alpha": 4.0}


@pytest.mark.parametrize(("ours", "theirs"), [
    (lambda g: fused.Lion(g, 1e-3), lambda g: Formula(g, "lion", 1e-3, (0.9, 0.99))),
    (lambda g: fused.AdEMAMix(g, 1e-3, **SLOW), lambda g: Formula(g, "ademamix", 1e-3, **SLOW)),
    (lambda g: fused.AdEMAMix(g, 1e-3, t_alpha=30, t_beta3=40, **SLOW),
     lambda g: Formula(g, "ademamix", 1e-3, t_alpha=30, t_beta3=40, **SLOW)),
    (lambda g: fused.LAMB(g, 1e-2), lambda g: Formula(g, "lamb", 1e-2, eps=1e-6)),
    (lambda g: fused.LARS(g, 1.0), lambda g: Formula(g, "lars", 1.0)),
], ids=["lion", "ademamix", "ademamix with schedules", "lamb", "lars"])  # fmt: skip
def test_equals_the_papers_formulas(ours, theirs):
    double = [nn.Parameter(each.detach().double()) for each in parameters()]
    mine, _ = trained(ours)
    expected, _ = trained(theirs, made=double)
    for a, b, start in zip(mine, expected, parameters(), strict=True):
        assert (a.double() - b).norm() < 1e-4 * (b - start).norm()


@pytest.mark.parametrize("rounding", ["correction8", "correction16"])
def test_master_weights_follow_fp32(rounding):
    """Steps below the resolution of bf16, 2^-7 at 1, add up as they do in fp32 weights; 24 bits resolve 2^-15."""
    rate = 1e-3 if rounding == "correction8" else 1e-4
    narrow = [nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))]
    wide = [nn.Parameter(torch.ones(5000))]
    pair = [(narrow, fused.AdamW(narrow, rate, rounding=rounding)), (wide, fused.AdamW(wide, rate))]
    for step in range(200):
        for made, optimizer in pair:
            gradients(step, made)
            for each in made:
                each.grad = each.grad.to(torch.bfloat16).to(each.dtype)
            optimizer.step()
    from halfbyte.ops.optimizer import full_weight

    state = pair[0][1].state[narrow[0]]
    full = full_weight(narrow[0].detach(), state["correction"])
    moved = (wide[0].detach() - 1).norm()
    assert moved > 0
    assert (full - wide[0].detach()).norm() / moved < (0.02 if rounding == "correction8" else 1e-3)


def test_stochastic_rounding_keeps_the_mean():
    made = [nn.Parameter(torch.ones(200_000, dtype=torch.bfloat16))]
    optimizer = fused.SGD(made, 1.0, momentum=0.0, rounding="stochastic")
    made[0].grad = torch.full_like(made[0], 1e-3)  # a quarter of the distance to the next bf16 below 1
    optimizer.step()
    step = float(made[0].grad[0])
    assert set(made[0].unique().tolist()) == {1.0, 1.0 - 2**-8}
    sigma = 2**-8 / 2 / math.sqrt(200_000)
    assert abs(made[0].double().mean().item() - (1 - step)) < 5 * sigma


@pytest.mark.parametrize("storage", STORAGES)
def test_a_broken_step_changes_nothing(storage):
    made, optimizer = trained(lambda g: fused.AdamW(g, 1e-2, storage=storage), steps=2)
    weights, state = [each.detach().clone() for each in made], copy.deepcopy(optimizer.state_dict())
    made[0].grad = torch.full_like(made[0], math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(made, weights, strict=True))
    for number, before in state["state"].items():
        after = optimizer.state_dict()["state"][number]
        assert str(after) == str(before)


def test_clips_and_unscales_as_torch():
    mine, theirs = parameters(), parameters()
    pair = (mine, fused.AdamW(groups_of(mine), 1e-2)), (theirs, torch.optim.AdamW(groups_of(theirs), 1e-2))
    for step in range(5):
        norms = []
        for made, optimizer in pair:
            gradients(step, made)
            if isinstance(optimizer, fused.FusedOptimizer):
                norms.append(optimizer.clip(0.5))
            else:
                norms.append(nn.utils.clip_grad_norm_(made, 0.5))
            optimizer.step()
        torch.testing.assert_close(*norms)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    gradients(9, mine)
    gradients(9, theirs)
    for each in mine:
        each.grad *= 1024
    pair[0][1].grad_scale = torch.tensor(1024.0)
    for _, optimizer in pair:
        optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def remove(made, optimizer):
    made[0].grad = None


def replace(made, optimizer):
    made[1].grad = torch.ones_like(made[1])


def accumulate_anew(made, optimizer):
    optimizer.zero_grad(set_to_none=False)
    for each in made:
        each.grad.add_(torch.ones_like(each))


def zero_one(made, optimizer):
    made[1].grad.zero_()


def add_a_group(made, optimizer):
    added = nn.Parameter(torch.zeros(7))
    added.grad = torch.ones(7)
    optimizer.add_param_group({"params": [added]})
    made.append(added)


def double_before_steps(made, optimizer):
    def double(*_):
        for each in made:
            each.grad.mul_(2)

    optimizer.register_step_pre_hook(double)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", [remove, replace, accumulate_anew, zero_one, add_a_group, double_before_steps])
def test_gradients_that_changed_after_a_clip_leave_the_others_clipped(change, compiled):
    results = []
    for make, clip in (
        (lambda p: fused.SGD(p, 1.0, momentum=0.0), lambda made, optimizer: optimizer.clip(0.5)),
        (lambda p: torch.optim.SGD(p, 1.0), lambda made, _: nn.utils.clip_grad_norm_(made, 0.5)),
    ):
        made = parameters()
        optimizer = make(made)
        for step in range(2):  # the factor of the first step does not reach the second one
            gradients(step, made)
            if step == 0 and change is double_before_steps:
                change(made, optimizer)
            clip(made, optimizer)
            if step == 0 and change is not double_before_steps:
                change(made, optimizer)
            eager = not compiled or change is double_before_steps or not isinstance(optimizer, fused.SGD)
            (optimizer.step if eager else torch.compile(optimizer.step, backend="eager"))()
        results.append(made)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_parameters_without_gradient_are_skipped_and_may_come_later():
    mine, theirs = parameters(), parameters()
    pair = (mine, fused.AdamW(mine, 1e-2)), (theirs, torch.optim.AdamW(theirs, 1e-2))
    for step in range(4):
        for made, optimizer in pair:
            gradients(step, made)
            made[step].grad = None
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_strided_and_empty_parameters():
    made = [nn.Parameter(torch.randn(30, 70).t()), nn.Parameter(torch.empty(0)), nn.Parameter(torch.randn(3, 4))]
    other = [nn.Parameter(each.detach().clone()) for each in made]
    pair = (made, fused.AdamW(made, 1e-2)), (other, torch.optim.AdamW(other, 1e-2))
    for step in range(3):
        for some, optimizer in pair:
            gradients(step, some)
            some[2].grad = some[2].grad.t().contiguous().t()
            optimizer.step()
    for a, b in zip(made, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_positive_second_moments_are_never_rounded_to_zero():
    values = torch.tensor([1.0, 1e-12, 0.0] + [1e-20] * 500)
    for name in ("dynamic8", "companded8"):
        for signed in (False, True) if name == "dynamic8" else (False,):
            storage = STORAGES[name]
            decoded = storage.decode(*storage.encode(values, signed, positive=True), signed, len(values))
            assert (decoded[values > 0] > 0).sum() >= 256 if name != "companded8" else decoded[1] > 0
            assert decoded[2] == 0


@pytest.mark.parametrize("storage", STORAGES)
def test_storage_decodes_what_it_encodes(storage):
    torch.manual_seed(0)
    chosen = STORAGES[storage]
    for n in (1, 31, 127, 256, 300):
        for signed in (True, False):
            values = torch.randn(n) if signed else torch.randn(n).square()
            values[:: chosen.block or 1] = 10.0  # the signed maps have 1, but not -1
            codes, scales = chosen.encode(values, signed)
            assert codes.numel() == n
            assert (0 if scales is None else scales.numel()) == chosen.scales(n)
            once = chosen.decode(codes, scales, signed, n)
            again = chosen.decode(*chosen.encode(once, signed), signed, n)
            torch.testing.assert_close(again, once, rtol=2e-3, atol=0)
            zero = chosen.decode(*chosen.zeros(n, signed, values.device), signed, n)
            assert not zero.any()


TRUSTED = {
    "lamb": lambda g, **options: fused.LAMB(g, 1e-2, **options),
    "lars": lambda g, **options: fused.LARS(g, 1.0, **options),
}


@pytest.mark.parametrize("name", TRUSTED)
def test_trust_ratios_see_clipped_and_unscaled_gradients(name):
    mine, theirs = parameters(), parameters()
    pair = (mine, TRUSTED[name](groups_of(mine))), (theirs, TRUSTED[name](groups_of(theirs)))
    pair[0][1].grad_scale = torch.tensor(1024.0)
    for step in range(5):
        for made, optimizer in pair:
            gradients(step, made)
            if optimizer is pair[0][1]:
                for each in made:
                    each.grad *= 1024
                optimizer.clip(512.0)
            else:
                nn.utils.clip_grad_norm_(made, 0.5)
            optimizer.step()
    for a, b, start in zip(mine, theirs, parameters(), strict=True):
        torch.testing.assert_close(a - start, b - start, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("name", TRUSTED)
def test_trust_ratios_of_zero_norms_are_one(name):
    """A weight of zeros, as LoRA's B, starts; a gradient of zeros leaves no NaN; a broken step changes nothing."""
    made = [nn.Parameter(torch.zeros(300)), nn.Parameter(torch.ones(300)), nn.Parameter(torch.zeros(0))]
    optimizer = TRUSTED[name](made, weight_decay=0.0)
    for each, value in zip(made, (1.0, 0.0, 0.0), strict=True):
        each.grad = torch.full_like(each, value)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert not made[0].any()
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    rate = 1e-2 if name == "lamb" else 1.0
    torch.testing.assert_close(made[0], torch.full((300,), -rate), rtol=1e-5, atol=0)
    assert torch.equal(made[1], torch.ones(300))


# --- bad input: parameters that change, options, state dicts of other optimizers, copies ------------------------------


def stepped(make=fused.AdamW, size=5000, dtype=torch.float32, shape=None, **options):
    weight = nn.Parameter(torch.linspace(-1, 1, size).to(dtype).view(shape or size))
    optimizer = make([weight], **options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return weight, optimizer


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(
    ("dtype", "options", "change"),
    [
        (torch.float32, {}, lambda w: w[:50].clone()),
        (torch.float32, {}, lambda w: w[:50]),
        (torch.float32, {}, lambda w: torch.cat([w, w])),
        (torch.float32, {"shape": (50, 100)}, lambda w: w.t().contiguous()),
        pytest.param(torch.float32, {}, lambda w: w.cuda(), marks=pytest.mark.gpu),
        (torch.float32, {"storage": "dynamic8"}, lambda w: w[:300].clone()),
        (torch.float32, {"storage": "weight"}, lambda w: w.bfloat16()),
        (torch.bfloat16, {"storage": "weight"}, lambda w: w.float()),
        (torch.float32, {"rounding": "correction8"}, lambda w: w.bfloat16()),
    ],
    ids=["smaller", "view", "larger", "transposed", "device", "fewer blocks", "narrower", "wider", "no correction"],
)
def test_parameters_that_outgrow_their_state_are_named(dtype, options, change, clipped):
    weight, optimizer = stepped(dtype=dtype, **options)
    weight.grad = None
    weight.data = change(weight.data)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(TrainingError, match="parameter 0 of parameter group 0"):
        optimizer.clip(1.0) if clipped else optimizer.step()


def test_weights_in_other_memory_are_stepped():
    pair = [parameters() for _ in range(2)]
    steps = [fused.AdamW(made, 1e-2) for made in pair]
    for step in range(4):
        for made, optimizer in zip(pair, steps, strict=True):
            gradients(step, made)
            optimizer.step()
        for weight in pair[1]:
            weight.data = weight.data.clone()
    for a, b in zip(*pair, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda p: fused.RMSprop(p, storage="companded8"), "storage"),
        (lambda p: fused.AdamW(p, storage="int3"), "storage"),
        (lambda p: fused.AdamW(p, rounding="up"), "rounding"),
        (lambda p: fused.LAMB(p, offload=True), "offload"),
        (lambda p: fused.AdamW(p, maximize=True), "maximize"),
        (lambda p: fused.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: fused.AdamW([{"params": p, "maximize": True}]), "maximize"),
        (lambda p: fused.SGD(p, nesterov=True), "nesterov"),
        (lambda p: fused.RMSprop(p, momentum=0.9), "momentum"),
        (lambda p: fused.Adagrad(p, lr_decay=0.1), "lr_decay"),
        (lambda p: fused.AdamW(p, wieght_decay=0.1), "wieght_decay"),
        (lambda p: fused.AdamW(p, -1.0), "lr"),
        (lambda p: fused.AdamW(p, float("nan")), "lr"),
        (lambda p: fused.AdamW(p, torch.ones(2)), "lr"),
        (lambda p: fused.AdamW(p, betas=(0.9, 1.0)), r"betas\[1\]"),
        (lambda p: fused.AdamW(p, betas=(0.9, 0.99, 0.9)), "betas"),
        (lambda p: fused.AdEMAMix(p, betas=(0.9, 0.99)), "betas"),
        (lambda p: fused.AdEMAMix(p, betas=(0.9, 0.99, 0.0), t_beta3=5), "t_beta3"),
        (lambda p: fused.AdamW(p, eps=-1e-8), "eps"),
        (lambda p: fused.SGD(p, momentum=-0.1), "momentum"),
        (lambda p: fused.Lion([{"params": p, "weight_decay": -1.0}]), "weight_decay"),
        (lambda p: fused.AdamW([*p, p[0]]), "parameter 6 of parameter group 0"),
        (lambda p: fused.AdamW([{"params": p}, {"params": p[2:]}]), "parameter 0 of parameter group 1"),
    ],
)
def test_wrong_options_and_parameters_in_two_places_are_named(make, key):
    with pytest.raises(ConfigError, match=key):
        make(parameters())


@pytest.mark.parametrize("rates", [[0.1, 0.0], [torch.tensor(0.1), 0.0], [torch.tensor([0.1]), torch.tensor(0.2), 0.0]])
def test_a_learning_rate_may_become_a_tensor_or_a_float(rates):
    weight = nn.Parameter(torch.zeros(5))
    optimizer = fused.SGD([weight], momentum=0.0)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.ones(5)
        optimizer.step()
    torch.testing.assert_close(weight.data, torch.full((5,), -sum(float(rate) for rate in rates)))


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (fused.AdamW, fused.Lion),
        (fused.AdEMAMix, fused.AdamW),
        (lambda p: fused.Lion(p, storage="dynamic8"), lambda p: fused.RMSprop(p, storage="dynamic8")),
        (torch.optim.AdamW, fused.Lion),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), fused.AdamW),
        (lambda p: torch.optim.AdamW(p, maximize=True), fused.AdamW),
        (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True), fused.SGD),
        (lambda p: torch.optim.RMSprop(p, centered=True), fused.RMSprop),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), fused.RMSprop),
        (lambda p: torch.optim.Muon(p, momentum=0.9), fused.SGD),
        (lambda p: fused.AdamW(p, storage="companded8"), lambda p: fused.AdamW(p, storage="dynamic8")),
        (fused.AdamW, lambda p: fused.AdamW([{"params": p}, {"params": []}])),
    ],
    ids=["adamw in lion", "ademamix in adamw", "lion in rmsprop", "torch's adamw in lion", "amsgrad", "maximize",
         "nesterov", "centered", "momentum of rmsprop", "muon in sgd", "another storage", "other groups"],
)  # fmt: skip
def test_states_of_other_rules_and_options_are_refused(saver, loader):
    weight = nn.Parameter(torch.ones(70, 80))
    saved = saver([weight])
    weight.grad = torch.ones_like(weight)
    saved.step()
    optimizer = loader([weight])
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(saved.state_dict())


def cut(state, *keys):
    for key in keys[:-1]:
        state = state[key]
    del state[keys[-1]]


@pytest.mark.parametrize("change", [
    lambda s: cut(s, "state"), lambda s: cut(s, "param_groups"), lambda s: cut(s, "state", 0, "step"),
    lambda s: cut(s, "state", 0, "exp_avg_sq"), lambda s: s["state"][0].update(exp_avg=None),
    lambda s: s["state"][0].update(exp_avg=torch.ones(3)), lambda s: s["state"][0].update(correction=torch.ones(3)),
])  # fmt: skip
def test_an_incomplete_state_is_refused_and_changes_nothing(change):
    weight, optimizer = stepped(lr=0.1, dtype=torch.bfloat16, rounding="correction8")
    state = copy.deepcopy(optimizer.state_dict())
    change(state)
    other = fused.AdamW([weight], lr=0.5, rounding="correction8")
    with pytest.raises(CheckpointError):
        other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.5
    assert not other.state


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
@pytest.mark.parametrize("options", [{}, {"storage": "dynamic8", "offload": True}], ids=["fp32", "offloaded"])
def test_a_copy_steps_alone(options, duplicate):
    made, optimizer = trained(lambda g: fused.AdamW(g, 1e-2, min_quantized=300, **options), steps=3)
    other = duplicate(optimizer)
    copies = [weight for group in other.param_groups for weight in group["params"]]
    before = [weight.detach().clone() for weight in made]
    for step in range(3, 5):
        gradients(step, copies)
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(made, before, strict=True))
    for step in range(3, 5):
        gradients(step, made)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(made, copies, strict=True))


def test_optimizers_step_in_threads():
    """Steps in threads of their own give the weights of steps in one thread."""
    starts = [parameters() for _ in range(4)]  # made here, since torch has one generator for all threads
    barrier = threading.Barrier(4)

    def run(made):
        barrier.wait()
        return trained(lambda g: fused.AdamW(g, 1e-2, storage="dynamic8", min_quantized=300), steps=20, made=made)[0]

    with futures.ThreadPoolExecutor(4) as pool:
        found = [*pool.map(run, starts)]
    expected, _ = trained(lambda g: fused.AdamW(g, 1e-2, storage="dynamic8", min_quantized=300), steps=20)
    for made in found:
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
