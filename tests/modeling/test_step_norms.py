"""DoRA's row norms, computed once per optimizer step, against norms that each call computes."""

import copy
from types import SimpleNamespace

import pytest
import torch

import halfbyte
from halfbyte.autograd import dora, lora
from halfbyte.formats import named
from halfbyte.modeling import step_norms
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.step_norms import DoraNorms
from halfbyte.tensor import QuantizedTensor
from halfbyte.train.loop import Accumulation
from tests.helpers.patch_models import assert_same, batch, loss_and_gradients, quantize, tiny

SAME = 1e-6


@pytest.fixture
def counts(monkeypatch):
    """Number of linears whose norms calls (`calls`) and steps (`steps`) have computed."""
    counts = SimpleNamespace(calls=0, steps=0)

    def counted(name):
        def row_norms(weights, *args):
            setattr(counts, name, getattr(counts, name) + len(weights))
            return dora.row_norms(weights, *args)

        return row_norms

    monkeypatch.setattr(lora, "row_norms", counted("calls"))
    monkeypatch.setattr(step_norms, "row_norms", counted("steps"))
    return counts


def patched(level=None, **keys):
    model = quantize(tiny("Llama", use_dora=True, **keys))
    halfbyte.patch(model, level)
    return model, DoraNorms(model, torch.float32)


def change(model, data=False):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                (parameter.data if data else parameter).mul_(1.5)


@pytest.mark.parametrize("spec", ["nf4", "int8", None])
@pytest.mark.parametrize("autocast", [False, True])
def test_row_norms_are_those_of_the_merged_weights(spec, autocast):
    weights = [torch.randn(13, 64) for _ in range(3)]
    stored = [weight if spec is None else QuantizedTensor.quantize(weight, named(spec)) for weight in weights]
    a, b = [torch.randn(5, 64) for _ in weights], [torch.randn(13, 5) for _ in weights]
    values = [weight if spec is None else weight.dequantize(torch.float32) for weight in stored]
    squares = [value.square().sum(1) for value in values]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        norms = dora.row_norms(stored, a, b, squares, 0.7, torch.float32)
    expected = [(value + 0.7 * (y @ x)).norm(dim=1) for value, x, y in zip(values, a, b, strict=True)]
    # W·Aᵀ has the caller's dtype, which is bfloat16 under autocast; the rest is exact
    torch.testing.assert_close(norms, torch.stack(expected), rtol=1e-2 if autocast else 1e-5, atol=1e-5)


@pytest.mark.parametrize("level", ["keep", "recompute_mlp", "checkpoint", "tiled"])
def test_a_step_computes_the_norms_once(level, counts):
    model, norms = patched(level)
    inputs = batch()
    loss_and_gradients(model, inputs)  # the head's probe comes with the first forward
    expected = loss_and_gradients(model, inputs)
    assert counts.calls >= 14
    counts.calls = 0
    with norms.computed():
        for _ in range(2):
            assert_same(loss_and_gradients(model, inputs), expected, SAME)
    assert (counts.calls, counts.steps) == (0, 14)


def test_transformers_checkpointing_reads_the_norms_of_the_step(counts):
    model, norms = patched()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    loss_and_gradients(model, batch())
    counts.calls = 0
    with norms.computed():
        loss_and_gradients(model, batch())
    assert counts.calls == 0


@pytest.mark.parametrize("data", [False, True])
def test_the_next_step_has_the_norms_of_changed_factors(data):
    """Fused optimizers and replayed graphs change factors without raising their versions, as `.data` does."""
    model, norms = patched("checkpoint")
    inputs = batch()
    with norms.computed():
        loss_and_gradients(model, inputs)
    change(model, data)
    expected = loss_and_gradients(model, inputs)
    with norms.computed():
        assert_same(loss_and_gradients(model, inputs), expected, SAME)


def test_evaluation_and_loaded_factors_have_their_own_norms(counts):
    model, norms = patched()
    inputs, initial = batch(), copy.deepcopy(model.state_dict())
    before = loss_and_gradients(model, inputs)
    change(model)
    with norms.computed():
        assert loss_and_gradients(model, inputs)[0] != pytest.approx(before[0], rel=1e-4)
    model.load_state_dict(initial)
    model.eval()
    counts.calls = 0
    with torch.no_grad():
        loss, _ = causal_lm_loss(model, inputs)
    assert loss.item() == pytest.approx(before[0], rel=1e-6)
    assert counts.calls == 14


def test_factors_that_are_written_to_within_a_step_are_not_read_from_its_norms():
    model, norms = patched()
    inputs = batch()
    with norms.computed():
        change(model)
        result = loss_and_gradients(model, inputs)
    assert_same(result, loss_and_gradients(model, inputs), SAME)


def test_calls_in_another_dtype_compute_their_own(counts):
    model, norms = patched()
    norms.dtype = torch.bfloat16
    with norms.computed():
        loss_and_gradients(model, batch())
    assert counts.calls >= 14


def test_captured_graphs_read_the_norms_of_each_step():
    """A graph reads the addresses that it was captured with."""
    model, norms = patched()
    layer = model.base_model.model.model.layers[1].mlp.down_proj.lora_magnitude_vector["default"]
    with norms.computed():
        values = layer.step_norms.values
        captured = values.clone()
    change(model, data=True)
    assert not hasattr(layer, "step_norms")
    with norms.computed():
        assert layer.step_norms.values is values
        assert not torch.allclose(values, captured)


def test_large_models_are_computed_in_groups(monkeypatch, counts):
    model, norms = patched()
    inputs = batch()
    expected = loss_and_gradients(model, inputs)
    monkeypatch.setattr(step_norms, "LARGEST", 1)
    with norms.computed():
        assert_same(loss_and_gradients(model, inputs), expected, SAME)


@pytest.mark.parametrize("keys", [{"use_dora": False}, {}, {"target_modules": ["q_proj", "up_proj"]}], ids=str)
def test_only_fused_linears_with_dora_are_computed(keys, counts):
    model = tiny("Llama", **{"use_dora": True} | keys)
    with DoraNorms(model, torch.float32).computed():  # not patched: PEFT's forwards compute their own norms
        pass
    assert counts.steps == 0
    halfbyte.patch(model)
    with DoraNorms(model, torch.float32).computed():
        pass
    assert counts.steps == (2 * len(keys.get("target_modules", range(7))) if keys.get("use_dora", True) else 0)


def test_norms_are_not_readable_after_an_error():
    model, norms = patched()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj.lora_magnitude_vector["default"]
    with pytest.raises(RuntimeError), norms.computed():
        raise RuntimeError
    assert not hasattr(layer, "step_norms")


def test_micro_batches_of_the_training_loop_share_the_norms(counts):
    model, norms = patched("checkpoint")
    inputs = [batch(), batch(), batch()]
    loss_and_gradients(model, inputs[0])
    counts.calls = 0

    def forward(inputs, loss_count):
        loss, _ = causal_lm_loss(model, inputs)
        return loss / loss_count, loss.detach().reshape(1)

    stepper = SimpleNamespace(is_eager=True)
    loop = SimpleNamespace(dora_norms=norms, stepper=stepper, metric_count=1, device="cpu", forward=forward)
    Accumulation(loop, iter(inputs), torch.tensor(9.0)).run()
    assert (counts.calls, counts.steps) == (0, 14)
