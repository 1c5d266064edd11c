"""Muon against torch.optim.Muon and an SVD: values over 50 steps, batches, splits, 8 bits, skipped steps and resume."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from halfbyte.adapters.lora import add_adapter
from halfbyte.ops.muon import dequantize_momentum, quantize_momentum, symmetric_product
from halfbyte.optim import OPTIMIZERS, muon
from halfbyte.optim.muon import Muon
from halfbyte.train.guards import skip_if_not_finite
from halfbyte.utils.errors import CheckpointError, ConfigError, ModelError, TrainingError
from halfbyte.utils.notices import notices_so_far, reset_notices
from tests.helpers.tiny_runs import run_config, tiny_llama

KEYS = {"lr": 3e-2, "weight_decay": 0.2, "momentum": 0.9}


def parameters(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def take_steps(optimizer, given, steps, seed=1):
    """Steps with random gradients, which are the same for the same seed, shapes and order."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in given:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()


def both(shape, dtype, steps=50, **keys):
    """Weights after steps of this optimizer and of torch's, and the weights before."""
    keys = KEYS | {"adjust_lr_fn": "match_rms_adamw"} | keys
    before = parameters(shape, dtype=dtype)
    found = []
    for make in (Muon, torch.optim.Muon):
        given = parameters(shape, dtype=dtype)
        take_steps(make(given, **keys), given, steps)
        found.append(given[0].detach())
    return *found, before[0].detach()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [(33, 17), (17, 33), (64, 64), (1, 5), (257, 31)])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torch_over_50_steps(shape, adjust_lr_fn, nesterov, monkeypatch):
    """torch iterates in bf16 on every device; the two round the norm and the products differently."""
    monkeypatch.setattr(muon, "product_dtype", lambda tensor: torch.bfloat16)
    mine, theirs, before = both(shape, torch.float32, adjust_lr_fn=adjust_lr_fn, nesterov=nesterov)
    assert (mine - theirs).norm() < 0.01 * (theirs - before).norm()


def reference_step(weight, momentum, gradient, lr=3e-2, weight_decay=0.2, mu=0.9):
    """A step in fp64, with the polynomials applied to the singular values."""
    momentum = mu * momentum + (1 - mu) * gradient
    u, s, v = torch.linalg.svd((1 - mu) * gradient + mu * momentum, full_matrices=False)
    s = s / s.norm()
    a, b, c = muon.NEWTON_SCHULZ
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    scale = 0.2 * max(weight.shape) ** 0.5
    return weight * (1 - lr * weight_decay) - lr * scale * (u * s) @ v, momentum


@pytest.mark.parametrize("shape", [(33, 17), (17, 33), (1, 5)])
def test_equals_the_polynomials_of_singular_values_in_fp64(shape):
    given = parameters(shape, dtype=torch.float64)
    optimizer = Muon(given, **KEYS)
    weight, momentum = given[0].detach().clone(), torch.zeros(shape, dtype=torch.float64)
    for seed in range(50):
        take_steps(optimizer, given, 1, seed)
        weight, momentum = reference_step(weight, momentum, given[0].grad)
    torch.testing.assert_close(given[0].detach(), weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 513, 40), (1, 640, 640)])
def test_symmetric_products(shape):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    product, rows = x @ x.mT, shape[1]
    added = product + 3 * torch.eye(rows, dtype=torch.float64)
    torch.testing.assert_close(symmetric_product(x), product)
    torch.testing.assert_close(symmetric_product(x.mT.contiguous().mT, None, 0.0, 0.5), 0.5 * product)
    found = symmetric_product(x, added, -2.0, 0.5)
    torch.testing.assert_close(found, 0.5 * product - 2 * added)
    if rows >= 512:  # the block that is copied
        found = symmetric_product(x)
        assert torch.equal(found[:, : rows // 2, rows // 2 :], found[:, rows // 2 :, : rows // 2].mT)


@pytest.mark.parametrize("bits", [8, 32])
def test_batches_equal_single_matrices(bits, monkeypatch):
    """Two shapes, a stack of experts, and matrices without a gradient, in batches of one, some and all matrices."""
    shapes = [(9, 7), (5, 12), (9, 7), (3, 5, 12), (9, 7), (3, 5, 12), (0, 7)]
    found = []
    for elements in (1, 130, 2**25):
        monkeypatch.setattr(muon, "BATCH_ELEMENTS", elements)
        given = parameters(*shapes)
        optimizer = Muon([*given, nn.Parameter(torch.ones(4, 4))], momentum_bits=bits, **KEYS)
        take_steps(optimizer, given, 5)
        found.append(given)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(12, 10), (3, 12, 10)])
def test_matrices_of_a_split_weight_step_like_separate_matrices(shape):
    sizes = [6, 3, 3]
    (weight,) = parameters(shape)
    matrices = [nn.Parameter(m.detach().clone()) for m in weight.split(sizes, dim=-2)]
    optimizers = Muon([weight], splits={weight: sizes}, **KEYS), Muon(matrices, **KEYS)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        weight.grad = torch.randn(shape, generator=generator)
        for matrix, gradient in zip(matrices, weight.grad.split(sizes, dim=-2), strict=True):
            matrix.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.cat([m.detach() for m in matrices], -2), rtol=1e-5, atol=1e-5)
    unsplit = parameters(shape)
    take_steps(Muon(unsplit, **KEYS), unsplit, 5)
    assert (unsplit[0] - weight).abs().max() > 1e-2


@pytest.mark.parametrize("numel", [1, 3, 2047, 2048, 2049, 5000])
def test_momentum_in_8_bits(numel):
    values = torch.randn(2, numel) * torch.logspace(-8, 2, numel)
    values[1] = 0
    codes, scales = quantize_momentum(values)
    assert codes.dtype == torch.int8
    assert codes.shape == values.shape
    assert scales.shape == (2, -(-numel // 2048))
    found = dequantize_momentum(codes, scales)
    for at in range(0, numel, 2048):
        block, largest = slice(at, at + 2048), values[0, at : at + 2048].abs().max()
        assert (found[0, block] - values[0, block]).abs().max() <= largest / 127 * 0.5001
        torch.testing.assert_close(found[0, block].abs().max(), largest)
    assert not found[1].any()


def test_other_parameters_step_by_the_auxiliary_optimizer():
    shapes = [(9, 7), (7,), (11, 7), ()]
    given, expected = parameters(*shapes), parameters(*shapes)
    groups = [{"params": given[:2]}, {"params": given[2:], "use_muon": False, "lr": 0.1, "weight_decay": 0.0}]
    optimizer = Muon(groups, auxiliary=partial(torch.optim.AdamW, betas=(0.8, 0.9), fused=True), **KEYS)
    adamw = torch.optim.AdamW(
        [{"params": [expected[1]]}, {"params": expected[2:], "lr": 0.1, "weight_decay": 0.0}],
        lr=KEYS["lr"],
        weight_decay=KEYS["weight_decay"],
        betas=(0.8, 0.9),
        fused=True,
    )
    alone = Muon(expected[:1], **KEYS)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (optimizer, adamw, alone)]
    for seed in range(4):
        take_steps(optimizer, given, 1, seed)
        for parameter, other in zip(given, expected, strict=True):
            other.grad = parameter.grad.clone()
        adamw.step()
        alone.step()
        for schedule in schedules:
            schedule.step()
    for parameter, other in zip(given, expected, strict=True):
        assert torch.equal(parameter, other)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in given)


def mixed(bits=32, **keys):
    """Parameters of all kinds and their optimizer."""
    given = parameters((9, 7), (7,), (3, 5, 12), (65, 33), (11, 7))
    groups = [{"params": given[:4]}, {"params": given[4:], "use_muon": False}]
    return given, Muon(groups, momentum_bits=bits, splits={given[0]: [4, 5]}, **(KEYS | keys))


def copied(optimizer):
    return copy.deepcopy(optimizer.state_dict())


def assert_equal_states(one, other):
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        assert state.keys() == other["state"][number].keys()
        assert all(torch.equal(value, other["state"][number][key]) for key, value in state.items())


@pytest.mark.parametrize("bits", [8, 32])
def test_a_skipped_step_changes_nothing(bits):
    given, optimizer = mixed(bits)
    take_steps(optimizer, given, 2)
    weights, state = [parameter.detach().clone() for parameter in given], copied(optimizer)
    skip_if_not_finite(optimizer, torch.tensor([1.0, float("nan")]))
    for parameter in given:
        parameter.grad.fill_(float("nan"))
    optimizer.step()
    assert all(map(torch.equal, given, weights))
    assert_equal_states(copied(optimizer), state)
    skip_if_not_finite(optimizer, torch.tensor([1.0]))
    take_steps(optimizer, given, 1)
    others, untouched = mixed(bits)
    take_steps(untouched, others, 2)
    take_steps(untouched, others, 1)
    assert all(map(torch.equal, given, others))


def test_grad_scaler_unscales_and_skips():
    given, optimizer = mixed()
    others, plain = mixed()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))  # creates the scale
    take_steps(plain, others, 1)
    for parameter, other in zip(given, others, strict=True):
        parameter.grad = other.grad * 1024
    scaler.step(optimizer)
    scaler.update()
    for parameter, other in zip(given, others, strict=True):
        torch.testing.assert_close(parameter, other)
        for key, value in plain.state[other].items():  # an orthogonalized update does not depend on the scale
            torch.testing.assert_close(optimizer.state[parameter][key], value)
    weights = [parameter.detach().clone() for parameter in given]
    given[0].grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512
    assert all(map(torch.equal, given, weights))


def test_weights_in_bf16_are_rounded_once():
    """The momentum is fp32, and decay and update of a weight are rounded together."""
    given, exact = parameters((9, 7), dtype=torch.bfloat16), parameters((9, 7), dtype=torch.bfloat16)
    exact = [nn.Parameter(parameter.detach().float()) for parameter in exact]
    gradient = torch.randn(9, 7).bfloat16()
    for parameter in (*given, *exact):
        parameter.grad = gradient.to(parameter.dtype)
    optimizer = Muon(given, **KEYS)
    optimizer.step()
    Muon(exact, **KEYS).step()
    assert torch.equal(given[0], exact[0].bfloat16())
    assert optimizer.state[given[0]]["momentum_buffer"].dtype == torch.float32


def test_state_of_torchs_muon(monkeypatch):
    monkeypatch.setattr(muon, "product_dtype", lambda tensor: torch.bfloat16)
    given, others = parameters((9, 7), (5, 12)), parameters((9, 7), (5, 12))
    theirs = torch.optim.Muon(given, **KEYS)
    take_steps(theirs, given, 3)
    mine = Muon(others)
    mine.load_state_dict(theirs.state_dict())
    for parameter, other in zip(given, others, strict=True):
        assert torch.equal(theirs.state[parameter]["momentum_buffer"], mine.state[other]["momentum_buffer"])
        other.data.copy_(parameter.data)
    before = [other.detach().clone() for other in others]
    take_steps(theirs, given, 1, seed=4)
    take_steps(mine, others, 1, seed=4)
    # With the options of the state, too; two roundings of the iteration in bf16 differ by 2% in a single step.
    for parameter, other, start in zip(given, others, before, strict=True):
        assert (parameter - other).norm() < 0.03 * (parameter - start).norm()


def other_state(kind):
    """A state dict that an optimizer of `mixed` with 32 bits must refuse."""
    given, optimizer = mixed(8)
    if kind.startswith("another rule"):
        optimizer = torch.optim.AdamW([{"params": [given[at] for at in part]} for part in ((0, 2, 3), (1,), (4,))])
    elif kind == "another shape":
        given = parameters((9, 8), (7,), (3, 5, 12), (65, 33), (11, 7))
        optimizer = Muon([{"params": given[:4]}, {"params": given[4:], "use_muon": False}])
    elif kind == "other groups":
        optimizer = Muon(given)
    take_steps(optimizer, given, 0 if kind.endswith("before a step") else 1)
    return optimizer.state_dict()


@pytest.mark.parametrize(
    "kind", ["8 bits", "another rule", "another rule before a step", "another shape", "other groups"]
)
def test_states_of_other_optimizers_are_refused(kind):
    given, optimizer = mixed()
    take_steps(optimizer, given, 1)
    before = copied(optimizer)
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(other_state(kind))
    assert_equal_states(copied(optimizer), before)


def test_wrong_options_and_parameters_are_refused():
    (matrix, vector) = parameters((6, 3), (3,))
    for keys in (
        {"method": "svd"}, {"adjust_lr_fn": "none"}, {"momentum_bits": 4}, {"ns_steps": 0}, {"momentum": -0.1},
        {"weight_decay": -1.0}, {"lr": -1.0}, {"lr": float("nan")}, {"lr": torch.ones(2)},
    ):  # fmt: skip
        with pytest.raises(ModelError):
            Muon([matrix], **keys)
    with pytest.raises(ModelError):
        Muon([{"params": [vector], "use_muon": True}])
    with pytest.raises(ModelError):
        Muon([nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))])
    for sizes in ([3, 2], [6, 0], []):
        with pytest.raises(ModelError):
            Muon([matrix], splits={matrix: sizes})
    for groups in ([{"params": [vector]}, {"params": [vector]}], [matrix, matrix], [vector, matrix, vector]):
        with pytest.raises(ConfigError):
            Muon(groups)


@pytest.mark.parametrize("bits", [8, 32])
def test_matrices_that_change_are_named_or_stepped(bits):
    """Another shape is refused; other memory and another dtype are stepped with the same momentum."""
    given = parameters((6, 4), (6, 4))
    optimizer = Muon(given, 0.1, momentum_bits=bits)
    take_steps(optimizer, given, 1)
    former = given[0].data
    given[0].data = former.clone()
    take_steps(optimizer, given, 1)
    assert not torch.equal(given[0], former)
    given[1].grad = None
    given[1].data = given[1].data.bfloat16()
    take_steps(optimizer, given, 1)
    given[0].grad = None
    given[0].data = torch.ones(4, 6)
    before = given[1].detach().clone()
    with pytest.raises(TrainingError, match="parameter 0"):
        take_steps(optimizer, given, 1)
    assert torch.equal(given[1], before)


def test_rows_of_the_table_route_parameters_and_warn(tmp_path):
    """Embeddings, heads and norms go to AdamW; whole fine-tuning gives a notice and adapters give none."""
    model = tiny_llama()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, peft in (("muon", True), ("muon_8bit", False)):
        reset_notices()
        config = run_config(tmp_path, optim=name, use_peft=peft, load_in_4bit=False)
        trained = add_adapter(tiny_llama(), config) if peft else model
        optimizer = OPTIMIZERS[name].make(trained, config)
        assert ("muon-whole" in notices_so_far()) is not peft
        assert {group["momentum_bits"] for group in optimizer.param_groups if group["use_muon"]} == {
            8 if name == "muon_8bit" else 32
        }
    rest = {names[id(p)] for group in optimizer.param_groups if not group["use_muon"] for p in group["params"]}
    own = {names[id(p)] for group in optimizer.param_groups if group["use_muon"] for p in group["params"]}
    assert rest == {name for name in names.values() if "norm" in name or "embed" in name or "lm_head" in name}
    assert own == set(names.values()) - rest
    reset_notices()


class Fused(nn.Module):
    """A layer with fused projections, as Phi-3 and the expert stacks of transformers store them."""

    def __init__(self):
        super().__init__()
        self.config = type("Config", (), {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 12})()
        self.qkv_proj = nn.Linear(12, 4 * 3 + 2 * 2 * 3, bias=False)
        self.gate_up_proj = nn.Linear(12, 10)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.zeros(3, 8, 12))
        self.transposed = nn.Module()
        self.transposed.gate_up_proj = nn.Parameter(torch.zeros(3, 12, 8))


def test_fused_projections_are_split(tmp_path):
    model = Fused()
    optimizer = OPTIMIZERS["muon"].make(model, run_config(tmp_path, optim="muon"))
    assert optimizer._splits == {
        model.qkv_proj.weight: [12, 6, 6],
        model.gate_up_proj.weight: [5, 5],
        model.experts.gate_up_proj: [4, 4],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 32])
def test_a_graph_replays_the_step(bits):
    """A captured step with `found_inf` and a learning rate on the device equals a called one, without a host sync."""
    shapes = [(96, 40), (40,), (96, 40), (33, 70)]
    lr = torch.tensor(KEYS["lr"], device="cuda")
    runs = []
    for _ in range(2):
        given = [nn.Parameter(parameter.detach().cuda()) for parameter in parameters(*shapes)]
        for parameter in given:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = Muon(given, **(KEYS | {"lr": lr}), momentum_bits=bits, capturable=True)
        optimizer.found_inf = torch.ones((), device="cuda")
        optimizer.step()  # allocates the state and changes nothing
        runs.append((given, optimizer))
    graph, (given, optimizer), (others, called) = torch.cuda.CUDAGraph(), *runs
    with torch.cuda.graph(graph):
        optimizer.step()
    torch.cuda.synchronize()
    for step in range(4):
        for parameter, other in zip(given, others, strict=True):
            other.grad.copy_(torch.randn_like(parameter))
            parameter.grad.copy_(other.grad)
        for each in (optimizer, called):
            each.found_inf.fill_(step == 2)
        graph.replay()
        torch.cuda.set_sync_debug_mode("error")
        called.step()
        torch.cuda.set_sync_debug_mode("default")
    for parameter, other in zip(given, others, strict=True):
        torch.testing.assert_close(parameter, other)
