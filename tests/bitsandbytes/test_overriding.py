"""override(): the real package on halfbyte's kernels and multi-tensor steps, and the way back."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import halfbyte.bitsandbytes as own
from halfbyte.bitsandbytes import _ops, overriding
from halfbyte.optim.state_dicts import WRAPPED
from halfbyte.utils.errors import ModelError

real = pytest.importorskip("bitsandbytes")

ADEMAMIX32 = ("AdEMAMix32bit", "PagedAdEMAMix32bit")  # bitsandbytes allocates one first moment of two
SKIPPED = ("GlobalOptimManager", "PytorchLARS", *ADEMAMIX32)
NAMES = [name for name in own.optim.__all__ if name not in SKIPPED]
SIZES = ((70, 70), (9,), (100, 80))


@pytest.fixture
def overridden():
    own.override()
    yield
    own.uninstall()


@pytest.fixture(autouse=True)
def _restored():
    yield
    assert own.mode() == "none"
    real.optim.GlobalOptimManager.get_instance().initialize()


def trained(module, name, steps=3, optimizer=None):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size)) for size in SIZES]
    if optimizer is not None:
        weights = optimizer.param_groups[0]["params"]
    options = {"momentum": 0.9} if name.startswith(("SGD", "LARS")) else {}
    optimizer = optimizer or getattr(module.optim, name)(weights, lr=1e-2, **options)
    for step in range(steps):
        for number, weight in enumerate(weights):
            torch.manual_seed(10 * step + number)
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    return [weight.detach() for weight in weights], optimizer


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES)
def test_real_optimizers_step_as_halfbytes(overridden, name):
    weights, optimizer = trained(real, name)
    expected, other = trained(own, name)
    for a, b in zip(weights, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    mine, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
    for number, state in mine.items():
        assert state["step"] == theirs[number]["step"] == 3
        for key, value in state[WRAPPED].items():
            assert value.dtype == theirs[number][WRAPPED][key].dtype, key
            if value.dtype == torch.uint8:
                assert torch.equal(value, theirs[number][WRAPPED][key]), key


@pytest.mark.parametrize("name", ADEMAMIX32)
def test_states_of_another_size_are_refused(overridden, name):
    with pytest.raises(ValueError):
        trained(real, name)


@pytest.mark.parametrize("fails", ["impl", "step"])
def test_a_failure_leaves_the_real_package_as_it_was(monkeypatch, fails):
    step = real.optim.optimizer.Optimizer8bit.step

    def fail():
        raise RuntimeError

    def some_kernels():
        yield from kernels[:5]
        fail()

    kernels = [*overriding.kernels()]
    with monkeypatch.context() as patched:
        if fails == "impl":
            patched.setattr(overriding, "kernels", some_kernels)
        else:
            replace = overriding._replace_step
            calls = iter([fail])
            patched.setattr(overriding, "_replace_step", lambda *a: (replace(*a), next(calls, bool)()))
        with pytest.raises(RuntimeError):
            own.override()
    assert own.mode() == "none"
    assert real.optim.optimizer.Optimizer8bit.step is step
    own.uninstall()
    own.override()
    weights, _ = trained(real, "AdamW")
    assert overriding.is_active()
    own.uninstall()
    assert all(map(torch.equal, weights, trained(own, "AdamW")[0]))


def test_overrides_of_the_real_manager_hold(overridden):
    manager, weights = real.optim.GlobalOptimManager.get_instance(), [nn.Parameter(torch.randn(80, 80))]
    manager.override_config(weights[0], "optim_bits", 8)
    optimizer = real.optim.Adam(weights)
    weights[0].grad = torch.randn(80, 80)
    optimizer.step()
    assert optimizer.state[weights[0]]["state1"].dtype == torch.uint8


def test_kernels_are_replaced_and_restored():
    product = torch.randint(-(10**6), 10**6, (5, 7), dtype=torch.int32)
    arguments = product, torch.rand(5), torch.rand(7), torch.float32
    before = torch.ops.bitsandbytes.int8_mm_dequant(*arguments)
    expected = torch.ops.halfbyte_bnb.int8_mm_dequant(*arguments)
    assert not torch.equal(before, expected)  # bitsandbytes rounds 1/127² to 6.200124e-5
    own.override()
    found = torch.ops.bitsandbytes.int8_mm_dequant(*arguments)
    own.uninstall()
    assert torch.equal(found, expected)
    assert torch.equal(torch.ops.bitsandbytes.int8_mm_dequant(*arguments), before)


def test_every_operator_of_the_real_package_has_a_kernel():
    names = {name.partition(".")[0] for name, _ in _ops.kernels()}
    upstream = {each.split("::")[1].partition(".")[0] for each in torch._C._dispatch_get_all_op_names()
                if each.startswith("bitsandbytes::")}  # fmt: skip
    assert names == upstream


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_layers_and_gradients_under_override(quant_type):
    torch.manual_seed(0)
    layer = real.nn.Linear4bit(64, 48, quant_type=quant_type).to("cpu")
    x, grad = torch.randn(5, 64, requires_grad=True), torch.randn(5, 48)

    def run():
        x.grad = None
        y = layer(x)
        y.backward(grad)
        return y.detach(), x.grad

    expected = run()
    own.override()
    found = run()
    own.uninstall()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_without_the_real_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError):
        own.override()


@pytest.mark.slow
def test_refused_under_install():
    program = """
import halfbyte.bitsandbytes as own
from halfbyte.utils.errors import ModelError
own.install()
assert own.mode() == "install"
try:
    own.override()
except ModelError:
    own.uninstall()
    assert own.mode() == "none"
else:
    raise SystemExit("overridden")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
