"""Recipes in a patched model: losses, gradients, scaling histories, and refused requests."""

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.autograd.linear_nvfp4 import Nvfp4Recipe
from halfbyte.formats import FORMATS, named
from halfbyte.layers import QuantizedLinear
from halfbyte.modeling import projections
from halfbyte.ops.fp8_scaling import ScalingOptions
from halfbyte.utils.errors import ConfigError, ModelError
from tests.helpers.patch_models import batch, loss_and_gradients, tiny

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
STORED = [format_ for cls in FORMATS.values() for format_ in cls.examples()[:1]]
# Mean relative error of the gradients of random weights, all of which matter: each product adds its rounding, E5M2's of
# 6% and E2M1's of 20% or so.
LIMITS = {"fp8-hybrid": 0.25, "nvfp4": 0.7}


def quantized(format_, family="Llama", **lora):
    model = tiny(family, shape=SHAPE, **lora)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and "lora" not in name and name not in ("lm_head", "default"):
                setattr(module, name, QuantizedLinear.from_linear(child, format_))
    return model


def apart(gradients, expected):
    """Mean relative error of gradients."""
    assert gradients.keys() == expected.keys()
    errors = [float((gradients[name] - truth).norm() / truth.norm()) for name, truth in expected.items()]
    return sum(errors) / len(errors)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["fp8-hybrid", "nvfp4"])
@pytest.mark.parametrize("format_", STORED, ids=lambda format_: format_.spec)
def test_every_format_in_every_recipe(format_, recipe):
    """Two steps, the second with the scales of the first; the error is that of 8-bit or 4-bit rounding."""
    model, inputs = quantized(format_), batch()
    halfbyte.patch(model)
    expected = loss_and_gradients(model, inputs)
    report = halfbyte.patch(model, recipe=recipe)
    for _ in range(2):
        step = loss_and_gradients(model, inputs)
        assert step[0] == pytest.approx(expected[0], rel=0.05)
        assert step[0] != expected[0]
        assert apart(step[1], expected[1]) < LIMITS[recipe]
        if report.scaling is not None:
            report.scaling.roll()


def test_micro_batches_evaluation_and_recomputation_leave_the_history_of_one_large_batch():
    model, inputs = quantized(named("nf4")), batch()
    halves = [{name: value[rows] for name, value in inputs.items()} for rows in (slice(0, 1), slice(1, 3))]
    histories = []
    for activations in ("keep", "checkpoint", "tiled"):
        scaling = halfbyte.patch(model, activations, ScalingOptions(amax_history_len=4)).scaling
        loss_and_gradients(model, inputs)  # its own amaxes: nothing is rolled yet
        of_batch = scaling.history.clone()
        scaling.history.zero_()
        for half in halves:
            loss_and_gradients(model, half)
        forward = slice(0, None, 2)  # gradients are of other means
        torch.testing.assert_close(scaling.history[forward, 0], of_batch[forward, 0], rtol=0.05, atol=0)
        trained = scaling.history.clone()
        model.eval()
        loss_and_gradients(model, {"input_ids": inputs["input_ids"] * 0 + 5, "labels": inputs["labels"]})
        model.train()
        assert torch.equal(scaling.history, trained)
        assert not scaling.history[:, 1:].any()
        histories.append(of_batch)
    for history in histories[1:]:
        torch.testing.assert_close(history[::2], histories[0][::2], rtol=0.05, atol=0)


def test_compiled_models_are_refused():
    from halfbyte.autograd import lora

    with pytest.raises(ModelError, match=r"fp8-hybrid.*torch\.compile"):
        lora.refuse_compiled(projections.Fp8Gemms(None, None))


def test_a_gpu_without_fp8_units_says_which_recipe_to_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for device, message in (("cuda", r"NVIDIA A100.*8\.0"), ("xpu", "xpu")):
        with pytest.raises(ConfigError, match=message) as caught:
            projections.check_recipe(ScalingOptions(), torch.device(device))
        assert "recipe: bf16" in str(caught.value)
        projections.check_recipe(Nvfp4Recipe(), torch.device(device))


@pytest.mark.parametrize("spec", ["nf4", "fp8", "fp8-tensor"])
def test_what_is_written_in_fp8_is_what_would_be_cast(spec, monkeypatch):
    """Norms and gated units that write FP8, against tensors that are cast afterwards: with one scale, equal codes."""
    from halfbyte.autograd import lora_mlp

    monkeypatch.setattr(lora_mlp, "_in_one_pass", lambda x, first, second, a: len(a) == 3)
    model, inputs = quantized(named(spec)), batch()
    scaling = halfbyte.patch(model, recipe="fp8-hybrid").scaling
    loss_and_gradients(model, inputs)
    scaling.roll()
    results = []
    for settled in (scaling.settled, [False] * len(scaling.settled)):
        scaling.settled = settled
        results.append((loss_and_gradients(model, inputs), scaling.history.clone()))
        scaling.history[:, 0] = 0
    assert results[0][0][0] == pytest.approx(results[1][0][0], rel=1e-5)
    assert apart(results[0][0][1], results[1][0][1]) < 1e-4
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["nf4", "fp8", "fp8-tensor", "kbit4"])
def test_a_step_on_a_gpu_equals_the_emulation(spec):
    """Fused, settled and in bf16; the same numbers by 16-bit products of the same codes."""
    from halfbyte.autograd import linear_fp8

    model, inputs = quantized(named(spec)).to("cuda", torch.bfloat16), batch()
    inputs = {name: value.cuda() for name, value in inputs.items()}
    scaling = halfbyte.patch(model, recipe="fp8-hybrid").scaling
    loss_and_gradients(model, inputs)
    scaling.roll()
    fused = loss_and_gradients(model, inputs)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(linear_fp8, "fp8_product", linear_fp8.fp8_product.reference)
        expected = loss_and_gradients(model, inputs)
    halfbyte.unpatch(model)
    halfbyte.patch(model)
    exact = loss_and_gradients(model, inputs)[1]
    assert fused[0] == pytest.approx(expected[0], rel=0.02)
    # A last bit of bf16 decides which code a value gets, so the two differ by as much as FP8 itself changes; but the
    # tensor cores must not be further from 16-bit arithmetic than the emulation is.
    assert apart(fused[1], exact) < 1.25 * apart(expected[1], exact)
