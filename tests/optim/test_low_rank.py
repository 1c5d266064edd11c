"""GaLore, Q-GaLore and APOLLO: the papers' formulas, subspaces, refreshes, skipped steps, and state."""

import copy
import math

import pytest
import torch
from torch import nn

from halfbyte.ops.low_rank import gaussian
from halfbyte.optim import OPTIMIZERS
from halfbyte.optim.low_rank import LowRank, LowRankOptimizer
from halfbyte.utils.errors import CheckpointError, TrainingError
from tests.helpers.optimizer_settings import OptimizerSettings

RATE, DECAY, BETAS, EPS = 0.03, 0.1, (0.9, 0.99), 1e-8
SHAPES = [(7, 13), (13, 7), (9, 9)]


def adamw(groups):
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)


def fused(groups):
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, fused=True)


def make(shapes, options, inner=adamw, dtype=torch.float64, plain=(), **keys):
    """An optimizer of matrices that are projected, and of `plain` shapes that are not."""
    torch.manual_seed(1)
    matrices = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    others = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in plain]
    groups = [{"params": others, "weight_decay": DECAY}] if others else []
    groups.append({"params": matrices, "weight_decay": DECAY, "low_rank": options})
    return LowRankOptimizer(groups, inner, lr=RATE, seed=3, **keys), matrices, others


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = drawn.to(parameter.dtype)


class Adam:
    """The moments of the papers' Algorithms: M̂ / (√V̂ + ε)."""

    def __init__(self):
        self.first = self.second = 0.0
        self.step = 0

    def __call__(self, gradient):
        self.step += 1
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * gradient**2
        corrected = self.second / (1 - BETAS[1] ** self.step)
        return self.first / (1 - BETAS[0] ** self.step) / (corrected.sqrt() + EPS)


GALORE = {"rank": 3, "update_proj_gap": 2, "scale": 0.4}
APOLLO = {"rank": 2, "update_proj_gap": 3, "scale": 5.0, "random": True}
FORMULAS = {
    **{side: LowRank(**GALORE, proj_type=side) for side in ("std", "reverse_std", "left", "right", "full")},
    "apollo": LowRank(**APOLLO, scaling="channel"),
    "mini": LowRank(**APOLLO | {"rank": 1}, scaling="tensor"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMULAS)
def test_matrices_of_a_stack_follow_the_papers_algorithms(name, shape, tensor_rate):
    """Algorithm 2 of arXiv:2403.03507 and algorithm 1 of arXiv:2412.05270 in fp64, with the optimizer's bases.

    Three matrices are in two groups with their own rates; one has no gradient in some steps.
    """
    options = FORMULAS[name]
    torch.manual_seed(1)
    matrices = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for _ in range(3)]
    rates, decays = [0.03, 0.03, 0.07], [0.1, 0.1, 0.0]
    groups = [
        {"params": members, "lr": torch.tensor(rate, dtype=torch.float64) if tensor_rate else rate,
         "weight_decay": decay, "low_rank": options}
        for members, rate, decay in ((matrices[:2], 0.03, 0.1), (matrices[2:], 0.07, 0.0))
    ]  # fmt: skip
    optimizer = LowRankOptimizer(groups, adamw, lr=RATE, seed=3)
    (stack,) = optimizer.units[0].stacks
    expected = [matrix.detach().clone() for matrix in matrices]
    moments = [Adam() for _ in matrices]
    norms, limited = [0.0] * 3, 0
    for step in range(6):
        set_gradients(matrices, step)
        gradients = [matrix.grad * (1 + step) for matrix in matrices]  # grow, so that APOLLO's limiter acts
        for number, matrix in enumerate(matrices):
            matrix.grad = None if number == 1 and step in (0, 3) else gradients[number].clone()
        optimizer.step()
        for number, (matrix, gradient, bases) in enumerate(zip(matrices, gradients, stack.bases(step), strict=True)):
            if matrix.grad is None:
                continue
            left, right = bases.get("left"), bases.get("right")
            low = gradient if left is None else left.T @ gradient
            low = low if right is None else low @ right
            normalized = moments[number](low)
            if options.scaling:
                dims = (0, 1) if options.scaling == "tensor" else (0,) if shape[0] < shape[1] else (1,)
                sizes = [t.pow(2).sum(dims, keepdim=True).sqrt() for t in (normalized, low)]
                scaled = gradient * sizes[0] / (sizes[1] + 1e-8)
                if norms[number] and scaled.norm() > 1.01 * norms[number]:
                    scaled = scaled * 1.01 * norms[number] / scaled.norm()
                    limited += 1
                norms[number] = scaled.norm()
                update = math.sqrt(5.0) * scaled
            else:
                update = normalized if left is None else left @ normalized
                update = 0.4 * (update if right is None else update @ right.T)
            expected[number] = (1 - rates[number] * decays[number]) * expected[number] - rates[number] * update
            torch.testing.assert_close(matrix.detach(), expected[number], rtol=1e-7, atol=1e-9)
    shorter, longer = ("left", "right") if shape[0] < shape[1] else ("right", "left")
    sides = {"reverse_std": {longer}, "left": {"left"}, "right": {"right"}, "full": {"left", "right"}}
    assert bases.keys() == sides.get(name, {shorter})
    assert 0 < limited < 18 if options.scaling else not limited


def test_apollos_projection_is_gaussian_with_variance_of_one_over_the_rank():
    optimizer, (matrix,), _ = make([(7, 13)], FORMULAS["apollo"])
    (bases,) = optimizer.units[0].stacks[0].bases(4)
    assert torch.equal(bases["left"], gaussian(7, 2, matrix, 3, 0, False, 4 // 3) / math.sqrt(2))


def test_refreshes_are_spread_over_steps():
    """After the first step at most ⌈matrices / gap⌉ matrices refresh in a step, each one once per gap."""
    optimizer, matrices, _ = make([(6, 5)] * 7, LowRank(rank=2, update_proj_gap=4))
    refreshed = []
    last = None
    for step in range(13):
        set_gradients(matrices, step)
        optimizer.step()
        now = [optimizer.units[0].matrices[id(matrix)].state["next"] for matrix in matrices]
        refreshed.append([last is None or now[at] != last[at] for at in range(7)])
        last = now
    assert all(refreshed[0])
    assert [sum(row) for row in refreshed[1:5]] == [1, 2, 2, 2]
    assert all(sum(each[at] for each in refreshed[first : first + 4]) == 1 for at in range(7) for first in (1, 5, 9))


def test_q_galore_refreshes_less_often_while_the_basis_stays_similar():
    options = LowRank(rank=2, update_proj_gap=2, bits=4, queue_size=2, cos_threshold=0.9, gamma_proj=2.0)
    gaps = {}
    for name in ("same", "random"):
        optimizer, (matrix,), _ = make([(12, 9)], options, dtype=torch.float32)
        for step in range(12):
            set_gradients([matrix], step if name == "random" else 0)
            optimizer.step()
        gaps[name] = optimizer.units[0].matrices[id(matrix)].state["gap"]
    assert gaps["same"] > 2
    assert gaps["random"] == 2


@pytest.mark.parametrize(
    "options",
    [LowRank(rank=2, update_proj_gap=1), LowRank(rank=2, update_proj_gap=2, random=True, scaling="channel", scale=1.0)],
)
def test_a_skipped_step_changes_nothing(options):
    """`found_inf` = 1 leaves weights, moments, bases and norms; another step follows as if there had been none."""
    optimizer, matrices, others = make([(7, 5), (5, 7)], options, fused, torch.float32, plain=[(4,)])
    for step in range(3):
        set_gradients([*matrices, *others], step)
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
    before, state = [each.detach().clone() for each in (*matrices, *others)], copy.deepcopy(optimizer.state_dict())
    set_gradients([*matrices, *others], 9)
    matrices[0].grad[0, 0], others[0].grad[1] = math.nan, math.inf
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for old, new in zip(before, (*matrices, *others), strict=True):
        assert torch.equal(old, new)
    after = optimizer.state_dict()["state"]
    assert set(flat_tensors(after)) == set(flat_tensors(state["state"]))
    for name, value in flat_tensors(state["state"]).items():
        assert torch.equal(value, flat_tensors(after)[name]), name


def flat_tensors(state, prefix=""):
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= flat_tensors(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
    return found


def test_grad_scale_is_divided_out():
    one, (a,), (x,) = make([(7, 5)], LowRank(rank=2), fused, torch.float32, plain=[(4,)])
    two, (b,), (y,) = make([(7, 5)], LowRank(rank=2), fused, torch.float32, plain=[(4,)])
    for step in range(3):
        set_gradients([a, x], step)
        set_gradients([b, y], step)
        for parameter in (a, x):
            parameter.grad *= 1024
        one.grad_scale, one.found_inf = torch.tensor(1024.0), torch.zeros(())
        one.step()
        two.step()
    assert torch.equal(a, b)
    assert torch.equal(x, y)


ALL_OPTIONS = {
    "galore": LowRank(rank=3, update_proj_gap=3),
    "both sides": LowRank(rank=3, update_proj_gap=2, proj_type="full"),
    "q_galore": LowRank(rank=3, update_proj_gap=2, bits=4, queue_size=1, cos_threshold=0.1),
    "apollo": LowRank(rank=3, update_proj_gap=3, random=True, scaling="channel", scale=1.0),
    "apollo, svd": LowRank(rank=3, update_proj_gap=3, scaling="channel", scale=1.0),
    "apollo_mini": LowRank(rank=1, update_proj_gap=3, random=True, scaling="tensor", scale=128.0),
}


def test_the_state_of_another_optimizer_is_refused():
    optimizer, _, _ = make([(7, 9)], LowRank(rank=2))
    other = torch.optim.AdamW([nn.Parameter(torch.ones(7, 9))])
    smaller, _, _ = make([(7, 9)], LowRank(rank=2), plain=[(3,)])
    for state in (other.state_dict(), smaller.state_dict(), {}):
        with pytest.raises(CheckpointError):
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("options", [ALL_OPTIONS["galore"], ALL_OPTIONS["apollo"]], ids=["galore", "apollo"])
def test_layerwise_equals_one_step_for_all_and_frees_gradients(options):
    """Each parameter is stepped in the backward; the refresh schedule differs, so the gap exceeds the steps."""
    options = LowRank(**{**vars(options), "update_proj_gap": 100})
    one, (a, b), (x,) = make([(7, 5), (5, 6)], options, fused, torch.float32, plain=[(6,)])
    two, (c, d), (y,) = make([(7, 5), (5, 6)], options, fused, torch.float32, plain=[(6,)], layerwise=True)
    data = torch.randn(3, 7, generator=torch.Generator().manual_seed(8))
    for _ in range(4):
        (data @ a @ b + x).square().sum().backward()
        norm = torch.stack([each.grad.square().sum() for each in (a, b, x)]).sum().sqrt()
        one.step()
        one.zero_grad()
        (data @ c @ d + y).square().sum().backward()
        assert c.grad is d.grad is y.grad is None
        torch.testing.assert_close(two.gradient_norm(), norm)
        two.step()
    for own, other in ((a, c), (b, d), (x, y)):
        assert torch.equal(own, other)


@pytest.mark.parametrize("stepped", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("broken", [0, 1, 2, 3])
def test_no_layerwise_parameter_is_updated_from_the_first_broken_gradient_on(broken, stepped):
    """The gradient of `d` is complete first, then those of `c`, `b` and `a`."""
    shapes = [(7, 5), (5, 6), (6, 4)]
    optimizer, (a, b, c), (d,) = make(shapes, LowRank(rank=2), fused, torch.float32, plain=[(4,)], layerwise=True)
    data, order = torch.randn(3, 7, generator=torch.Generator().manual_seed(8)), (d, c, b, a)

    def backward():
        (((data @ a).tanh() @ b).tanh() @ c + d).square().sum().backward()

    if stepped:
        backward()
        optimizer.step()
    before = [each.detach().clone() for each in order]
    hook = order[broken].register_hook(lambda gradient: gradient * math.inf)
    backward()
    assert not math.isfinite(optimizer.gradient_norm())
    assert optimizer.first_broken() is order[broken]
    optimizer.step()
    assert [torch.equal(*pair) for pair in zip(order, before, strict=True)] == [False] * broken + [True] * (4 - broken)
    hook.remove()
    before = [each.detach().clone() for each in order]
    backward()
    assert optimizer.first_broken() is None
    assert not any(torch.equal(*pair) for pair in zip(order, before, strict=True))


def test_only_matrices_are_projected_and_sparse_gradients_are_refused():
    with pytest.raises(TrainingError):
        make([(3, 4, 5)], LowRank())
    optimizer, (matrix,), _ = make([(6, 4)], LowRank(rank=2))
    matrix.grad = torch.ones_like(matrix).to_sparse()
    with pytest.raises(TrainingError):
        optimizer.step()


class Model(nn.Module):
    """Large and small linear layers in two dtypes, an embedding, experts, norms and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.up = nn.Linear(64, 300, dtype=torch.bfloat16)
        self.down = nn.Linear(300, 96, bias=False)
        self.tiny = nn.Linear(5, 3, bias=False)
        self.norm = nn.LayerNorm(300)
        self.experts = nn.Parameter(torch.ones(3, 40, 50))
        self.frozen = nn.Linear(40, 50).requires_grad_(False)


LOW_RANK = [name for name, row in OPTIMIZERS.items() if row.takes_targets]


@pytest.mark.parametrize("targets", [None, ["down"]])
@pytest.mark.parametrize("name", LOW_RANK)
def test_state_bytes_match_the_row_and_need_no_memory(name, targets):
    if OPTIMIZERS[name].package is not None:
        pytest.importorskip(OPTIMIZERS[name].package)
    options = {"rank": 16} | ({"quant_n_bit": 8} if targets and "quant_n_bit" in OPTIMIZERS[name].options else {})
    settings = OptimizerSettings(optim=name, optim_args=options, optim_target_modules=targets)
    model = Model()
    optimizer = OPTIMIZERS[name].make(model, settings)
    sum(parameter.float().sum() for parameter in model.parameters() if parameter.requires_grad).backward()
    optimizer.step()
    found = flat_tensors(optimizer.state_dict()["state"])
    measured = sum(value.nbytes for key, value in found.items() if value.dim() and "qmap" not in key)
    assert OPTIMIZERS[name].state_bytes(model, settings) == measured
    with torch.device("meta"):
        assert OPTIMIZERS[name].state_bytes(Model(), settings) == measured
    for unit in optimizer.units:
        for matrix in unit.matrices.values():
            assert matrix.virtual.untyped_storage().nbytes() <= 4


@pytest.mark.parametrize(("targets", "chosen"), [
    ("all-linear", {"up", "down", "tiny"}), ("all_linear", {"up", "down", "tiny"}), (["down", "ti"], {"down", "tiny"}),
    (".*n.*", {"down", "tiny"}), (["u.", "frozen"], {"up"}),
])  # fmt: skip
def test_targets_select_trained_linear_layers(targets, chosen):
    model = Model()
    settings = OptimizerSettings(optim="galore_adamw", optim_target_modules=targets)
    optimizer = OPTIMIZERS["galore_adamw"].make(model, settings)
    projected = {id(matrix.weight) for unit in optimizer.units for matrix in unit.matrices.values()}
    assert {
        name for name, module in model.named_children() if id(getattr(module, "weight", None)) in projected
    } == chosen


# --- bad input -------------------------------------------------------------------------------------------------------

OTHER_OPTIONS = ALL_OPTIONS | {
    "rank": LowRank(rank=2),
    "side": LowRank(rank=3, proj_type="reverse_std"),
    "8 bits": LowRank(rank=3, bits=8),
    "groups": LowRank(rank=3, bits=4, group=4),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("saved", ["galore", "q_galore", "apollo", "apollo, svd"])
@pytest.mark.parametrize("loader", OTHER_OPTIONS)
def test_the_state_of_other_options_is_refused_and_changes_nothing(saved, loader):
    one, matrices, _ = make([(7, 9)], ALL_OPTIONS[saved], fused, torch.float32)
    set_gradients(matrices, 0)
    one.step()
    state = copy.deepcopy(one.state_dict())
    state["param_groups"][0]["lr"] = 9.0
    two, _, _ = make([(7, 9)], OTHER_OPTIONS[loader], fused, torch.float32)
    if loader == saved:
        two.load_state_dict(state)
        assert two.param_groups[0]["lr"] == 9.0
        return
    with pytest.raises(CheckpointError):
        two.load_state_dict(state)
    assert two.param_groups[0]["lr"] == RATE
    assert two.steps == 0
    assert not two.state_dict()["state"]


def test_a_second_layerwise_backward_is_refused():
    optimizer, (matrix,), _ = make([(7, 9)], LowRank(rank=2), fused, torch.float32, layerwise=True)
    matrix.square().sum().backward()
    with pytest.raises(TrainingError):
        matrix.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = matrix.detach().clone()
    matrix.square().sum().backward()
    assert not torch.equal(matrix, before)
