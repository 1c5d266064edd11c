"""Every gradient of the fused LoRA functions against PEFT's own modules on the same (dequantized) weights."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from halfbyte.autograd import lora_mlp as lora_mlp_module
from halfbyte.autograd.lora import LoRA, lora_linear, lora_qkv
from halfbyte.autograd.lora_mlp import lora_mlp
from halfbyte.formats import Blockwise4
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError
from tests.helpers.peft_modules import MLP, QKV, assert_steps_close, model, seeds_for, step

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")

EXACT = {"atol": 1e-10, "rtol": 1e-10}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def compare(module, x, tolerance=EXACT, **keys):
    seeds = seeds_for(module, x)
    mine, theirs = (step(module, function, x, seeds, **keys) for function in (module.fused, module))
    assert_steps_close(mine, theirs, **tolerance)


@pytest.fixture
def x():
    return torch.randn(2, 5, 24, dtype=torch.float64)


@pytest.mark.parametrize("r", [1, 4, 17, 64])
def test_ranks(r, x):
    compare(model(r), x)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations(activation, x):
    compare(model(activation=activation), x)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_low_rank_gemms_fused_with_the_unit(activation, x, monkeypatch):
    """The path of accelerators, with the reference instead of the kernel."""
    monkeypatch.setattr(lora_mlp_module, "_in_one_pass", lambda *_: True)
    compare(model(ranks={"gate": 2, "up": 5, "down": 3}, activation=activation, bias=True), x)


@pytest.mark.parametrize(
    "targets", [("q", "down"), ("v", "up"), ("k", "gate"), ("q", "v", "gate", "up"), ("down",), ("k",)]
)
def test_projections_without_an_adapter(targets, x):
    compare(model(targets=targets), x)


def test_biases(x):
    compare(model(bias=True), x)
    trained = model(bias=True, targets=("q", "gate", "down"))
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_("bias" in name or "lora" in name)
    compare(trained, x)


@pytest.mark.parametrize("shape", [(24,), (1, 24), (33, 24), (2, 3, 5, 24), (0, 24), (2, 0, 24)], ids=str)
def test_leading_dimensions(shape):
    compare(model(bias=True), torch.randn(shape, dtype=torch.float64))


def test_strided_inputs():
    compare(model(), torch.randn(24, 5, 2, dtype=torch.float64).permute(2, 1, 0))
    compare(model(), torch.randn(2, 5, 48, dtype=torch.float64)[..., ::2])
    compare(model(), torch.randn(1, 1, 24, dtype=torch.float64).expand(2, 5, 24))


def test_input_that_needs_no_gradient(x):
    compare(model(), x, x_grad=False)


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
def test_one_factor_frozen(frozen, x):
    module = model()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora" in name and frozen not in name)
    compare(module, x)


def test_only_the_input_is_trained(x):
    compare(model().requires_grad_(False), x)


def test_results_may_be_changed_in_place(x):
    """RoPE modifies q and k in place; autograd must allow this."""
    module = model()
    q, k, v, y = module.fused(x.requires_grad_())
    (q.view(2, 5, 3, 8).transpose(1, 2).mul_(2).sum() + k.add_(1).sum() + v.sum() + y.mul_(3).sum()).backward()
    grad, x.grad = x.grad, None
    q, k, v, y = module(x)
    (2 * q.sum() + k.sum() + v.sum() + 3 * y.sum()).backward()
    torch.testing.assert_close(grad, x.grad, **EXACT)


@pytest.mark.parametrize("shape", [(64, 96), (24, 37)], ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_quantized_weights(shape, nested):
    module = model(8, dtype=torch.float32, hidden=shape[0], inner=shape[1])
    packed = {}
    for name in (*QKV, *MLP):
        base = getattr(module, name).base_layer
        packed[name] = QuantizedTensor.quantize(base.weight, Blockwise4("nf4", 64, nested))
        base.weight.data = packed[name].dequantize()
    x = torch.randn(3, 7, shape[0])
    seeds = seeds_for(module, x)
    mine = step(module, lambda x: module.fused(x, packed), x, seeds)
    assert_steps_close(mine, step(module, module, x, seeds), **CLOSE)


def test_activation_checkpointing(x):
    module = model()
    seeds = seeds_for(module, x)
    recomputed = step(module, lambda x: checkpoint(module.fused, x, use_reentrant=False), x, seeds)
    assert_steps_close(recomputed, step(module, module.fused, x, seeds), atol=0, rtol=0)


# --- dtypes ----------------------------------------------------------------------------------------------------------


def error(found, truth):
    return ((found.double() - truth.double()).norm() / truth.double().norm()).item()


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_no_worse_than_peft(adapters, weights):
    """Relative errors against fp64 with parameters rounded to bf16."""
    module = model(8, dtype=torch.bfloat16, hidden=64, inner=96).to(torch.float64)
    x = torch.randn(4, 33, 64).bfloat16().double()
    seeds = [seed.bfloat16() for seed in seeds_for(module, x)]
    truth = step(module, module, x, [seed.double() for seed in seeds])
    mixed = copy.deepcopy(module)
    for name, parameter in mixed.named_parameters():
        parameter.data = parameter.data.to(adapters if "lora" in name else weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = step(mixed, mixed.fused, x.float(), seeds)
        theirs = step(mixed, mixed, x.float(), seeds)
    for name, grad in mine[2].items():
        assert grad.dtype == adapters
        assert error(grad, truth[2][name]) <= error(theirs[2][name], truth[2][name]) + 2e-3, name
    for found, peft, exact in zip((*mine[0], mine[1]), (*theirs[0], theirs[1]), (*truth[0], truth[1]), strict=True):
        assert found.dtype == peft.dtype
        assert error(found, exact) <= error(peft, exact) + 5e-4


# --- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [(*QKV, *MLP), ("q", "v", "up", "down")], ids=len)
def test_dropout_draws_what_peft_draws(targets):
    """With the same generator state; both draw seeds for q, k, v and then gate, up, down."""
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    module = model(dropout=0.3, targets=targets)
    seeds = seeds_for(module, x)
    torch.manual_seed(3)
    mine = step(module, lambda x: module.fused(x, dropout=0.3), x, seeds)
    torch.manual_seed(3)
    assert_steps_close(mine, step(module, module, x, seeds), **EXACT)


def test_dropout_under_checkpointing(x):
    module = model()
    seeds = seeds_for(module, x)
    steps = []
    for run in (lambda f, x: checkpoint(f, x, use_reentrant=False), lambda f, x: f(x)):
        torch.manual_seed(5)
        steps.append(step(module, lambda x, run=run: run(lambda x: module.fused(x, dropout=0.5), x), x, seeds))
    assert_steps_close(*steps, atol=0, rtol=0)


# --- saved tensors ----------------------------------------------------------------------------------------------------


def saved_by(function, *arguments):
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        outputs = function(*arguments)
    return outputs, seen


def test_saves_the_input_once_and_low_rank_tensors():
    """M=50 rows, R=12 over q, k and v: saves x, u, A, B only; no weight, no second copy of x."""
    module, x = model(r=4), torch.randn(50, 24, dtype=torch.float64, requires_grad=True)
    weights, biases, loras = zip(*(module.adapter(name) for name in QKV), strict=True)
    _, seen = saved_by(lora_qkv, x, weights, biases, loras)
    assert [tuple(tensor.shape) for tensor in seen] == [(50, 24), (12, 24), (50, 12), (24, 4), (7, 4), (11, 4)]
    assert seen[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_with_frozen_a_the_input_is_not_saved(dropout):
    """LoRA-FA: gradients are PEFT's; q, k, v and the MLP save no tensor of the input's size but gate and up."""
    module, x = model(r=4, dropout=dropout), torch.randn(50, 24, dtype=torch.float64)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    seeds, steps, saved = seeds_for(module, x), [], []
    for function in (lambda x: module.fused(x, dropout=dropout), module):
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            steps.append(step(module, function, x, seeds))
        large = sorted(tuple(tensor.shape) for tensor in saved if tensor.numel() >= x.numel())
        assert len(steps) > 1 or large == [(50, 37), (50, 37)]
    assert_steps_close(*steps, **EXACT)


def test_dropout_saves_no_mask():
    module, x, seen = model(r=4, dropout=0.3), torch.randn(50, 24, dtype=torch.float64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        module.fused(x.requires_grad_(), dropout=0.3)
    assert sorted(tuple(t.shape) for t in seen if t.numel() >= x.numel()) == [(50, 24)] * 2 + [(50, 37)] * 2


def test_the_mlp_saves_gate_and_up_but_no_product():
    module, x = model(r=4), torch.randn(50, 24, dtype=torch.float64, requires_grad=True)
    weights, biases, loras = zip(*(module.adapter(name) for name in MLP), strict=True)
    _, seen = saved_by(lambda x: lora_mlp(x, *weights, biases, loras), x)
    large = [tuple(tensor.shape) for tensor in seen if tensor.numel() >= 50 * 24]
    assert large == [(50, 24), (50, 37), (50, 37)]


def test_a_second_backward_is_refused(x):
    loss = model().fused(x.requires_grad_())[3].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_adapter_changed_before_backward_raises(x):
    module = model()
    weight, bias, lora = module.adapter("q")
    loss = lora_linear(x, weight, bias, lora).sum()
    with torch.no_grad():
        lora.b.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- bad input -------------------------------------------------------------------------------------------------------


def example(**changes):
    given = {"x": torch.randn(3, 8), "weight": torch.randn(4, 8), "bias": torch.randn(4),
             "lora": LoRA(torch.randn(2, 8), torch.randn(4, 2), 1.0)}  # fmt: skip
    return given | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(3, 9)}, r"weight 0.*\[4, 8\].*x is \[3, 9\]"),
        ({"x": torch.ones(3, 8, dtype=torch.int64)}, "torch.int64"),
        ({"bias": torch.randn(5)}, r"bias 0.*\[5\]"),
        ({"weight": torch.randn(4, 8, requires_grad=True)}, "weight 0"),
        ({"lora": LoRA(torch.randn(2, 9), torch.randn(4, 2), 1.0)}, r"A \[2, 9\], B \[4, 2\]"),
        ({"lora": LoRA(torch.randn(2, 8), torch.randn(4, 3), 1.0)}, r"A \[2, 8\], B \[4, 3\]"),
    ],
)
def test_errors_name_the_argument(changes, message):
    with pytest.raises(ModelError, match=message):
        lora_linear(**example(**changes))


def test_errors_of_the_mlp():
    x, gate, down = torch.randn(3, 8), torch.randn(6, 8), torch.randn(8, 6)
    with pytest.raises(ModelError, match="'relu'"):
        lora_mlp(x, gate, gate, down, activation="relu")
    with pytest.raises(ModelError, match=r"lora_mlp.*weight 0.*\[8, 5\]"):
        lora_mlp(x, gate, gate, down[:, :5])
    with pytest.raises(ModelError, match=r"\[3, 5\].*gate is \[3, 6\]"):
        lora_mlp(x, gate, gate[:5], down)
    with pytest.raises(ModelError, match="1 weights, 2"):
        lora_qkv(x, (gate,), (None, None), (None,))
