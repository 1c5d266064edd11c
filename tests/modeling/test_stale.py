"""No stale weights: after a step of any optimizer, every way to run a patched model uses the new weights.

The patched model takes the step. A stock twin without caches gets the patched model's weights, and both evaluate,
generate and compute log-probabilities. Weights are bfloat16, adapters float32, as in a run. Steps are so large that
stale results differ by far more than rounding.
"""

import pytest
import torch

import halfbyte
from halfbyte.generation.engine import engine_for
from halfbyte.modeling.compute_dtype import compute_autocast, no_input_casts
from halfbyte.modeling.head import causal_lm_loss, token_log_probs
from halfbyte.optim import OPTIMIZERS
from halfbyte.train.graph import GraphedBackward
from tests.helpers.marks import slow_except
from tests.helpers.optimizer_settings import OptimizerSettings
from tests.helpers.patch_models import assert_same, batch, loss_and_gradients, quantize, tiny

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
TORCH_OPTIMIZERS = [name for name, row in OPTIMIZERS.items() if row.package is None]
STEPS = 2
SEEN = 8  # a step moves numbers by more than this multiple of bfloat16 rounding
FORMS = ["keep", "recompute", "recompute_mlp", "checkpoint", "tiled", "offload", "offload_kept", "transformers"]


def pair():
    """A model to patch and train, and its stock twin."""
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        model = quantize(tiny("Llama", shape={"hidden_size": 64, "intermediate_size": 96}).to(torch.bfloat16))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
        made.append(model.to(DEVICE))
    return made


def patched(model, form: str):
    if form == "transformers":
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    halfbyte.patch(model, None if form == "transformers" else form)
    return model


def optimizer(name: str, model) -> torch.optim.Optimizer:
    """The one that `train` makes of `optim: name`."""
    # such that a step is seen: 0.02 of Muon moves weights by 1/5 of AdamW's, and that of LAMB by 2% of their norm
    rate = {"sgd": 2.0, "lars": 2.0, "lamb": 0.3, "muon": 0.5, "muon_8bit": 0.5}.get(name, 0.02)
    options = {"scale": 1.0} if OPTIMIZERS[name].takes_targets else {}
    options |= {"trust_coefficient": 0.3} if name == "lars" else {}
    settings = OptimizerSettings(optim=name, optim_args=options, learning_rate=rate, weight_decay=0.01)
    return OPTIMIZERS[name].make(model, settings)


def on_device(inputs: dict) -> dict:
    return {key: value.to(DEVICE) for key, value in inputs.items()}


@torch.no_grad()
def answers(model, inputs: dict, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Evaluation, generation and log-probabilities of `model`, as numbers on the scale of a loss."""
    model.eval()
    ids = inputs["input_ids"]
    found = {}
    with no_input_casts(model), compute_autocast(model):
        loss, tokens = causal_lm_loss(model, inputs)
        found["evaluation"] = loss / tokens
        with torch.inference_mode():
            found["evaluation in inference mode"] = model(**inputs, use_cache=False).loss.clone()
        wanted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        found["log-probabilities"] = token_log_probs(model, {"input_ids": ids}, wanted)[0]
        first = model(input_ids=ids[:, :-3], use_cache=True)
        logits = [first.logits]
        for at in range(ids.shape[1] - 3, ids.shape[1]):  # as transformers' generate does, with tokens that are given
            keys = {"past_key_values": first.past_key_values, "use_cache": True}
            logits.append(model(input_ids=ids[:, at : at + 1], **keys).logits)
        found["a cache"] = torch.cat(logits, 1).float().log_softmax(-1)
        with engine_for(model, [adapter] * len(ids), 64, "auto") as engine:
            none = torch.zeros(len(ids), dtype=torch.int64, device=DEVICE)
            steps = [engine.prefill(ids[:, :-3], none).clone()]
            steps += [engine.step(ids[:, at]).clone() for at in range(ids.shape[1] - 3, ids.shape[1])]
        found["generation"] = torch.stack(steps).log_softmax(-1)
        layer = model.get_base_model().model.layers[0]
        x = torch.ones(1, 4, 64, dtype=torch.bfloat16, device=DEVICE)
        found["a part"] = layer.mlp(x).float()
    model.train()
    return {what: value.float().flatten() for what, value in found.items()}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).square().mean().sqrt())


def assert_fresh(model, stock, inputs: dict, before: dict, adapter: str = "default") -> dict:
    """Assert that `model` equals `stock` with current weights and differs from `before`; return its results."""
    stock.load_state_dict(model.state_dict())
    found, expected = answers(model, inputs, adapter), answers(stock, inputs, adapter)
    for what, value in expected.items():
        moved, off = distance(value, before[what]), distance(found[what], value)
        assert off < moved / SEEN, f"{what}: off by {off:.2e}, and the step moved it by {moved:.2e}"
    return expected


def train_and_compare(form: str, name: str) -> None:
    model, stock = pair()
    patched(model, form)
    stepper, inputs = optimizer(name, model), on_device(batch())
    before = answers(stock, inputs)
    for _ in range(STEPS):
        with no_input_casts(model), compute_autocast(model):
            loss_and_gradients(model, inputs)
        stepper.step()
        before = assert_fresh(model, stock, inputs, before)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", slow_except(OPTIMIZERS, {*TORCH_OPTIMIZERS, "adamw_8bit", "lion_8bit"}))
def test_after_a_step_of_every_optimizer(name):
    if (package := OPTIMIZERS[name].package) is not None:
        pytest.importorskip(package)
    train_and_compare("keep", name)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", slow_except(FORMS[1:], {"checkpoint", "offload", "transformers"}))
def test_after_a_step_of_every_form(form):
    train_and_compare(form, "adamw_torch_fused")


@pytest.mark.gpu
def test_after_replayed_steps():
    model, stock = pair()
    patched(model, "keep")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepper, inputs = torch.optim.AdamW(trained, lr=0.02, fused=True, capturable=True), on_device(batch())

    def step(inputs):
        with compute_autocast(model):
            loss, tokens = causal_lm_loss(model, inputs)
        (loss / tokens).backward()
        return loss.detach()

    graphed = GraphedBackward(step, trained)
    before = answers(stock, inputs)
    for _ in range(6):
        with no_input_casts(model):
            graphed(inputs)
        stepper.step()
        stepper.zero_grad()
        before = assert_fresh(model, stock, inputs, before)
    assert [captured is not None for captured in graphed._captured.values()] == [True]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["default", "other"])
def test_an_adapter_in_the_place_of_a_deleted_one(name):
    model, stock = pair()
    patched(model, "keep")
    inputs = on_device(batch())
    with no_input_casts(model), compute_autocast(model):
        loss_and_gradients(model, inputs)
    before = answers(stock, inputs)
    for each in (model, stock):
        config = each.peft_config["default"]
        if name == "default":
            each.delete_adapter("default")
        each.add_adapter(name, config, autocast_adapter_dtype=False)
        each.set_adapter(name)
        torch.manual_seed(9)
        for key, parameter in each.named_parameters():
            if f".{name}." in key:
                parameter.data = torch.randn_like(parameter, dtype=torch.float32) * 0.2
    before = assert_fresh(model, stock, inputs, before, name)
    with no_input_casts(model), compute_autocast(model):
        found = loss_and_gradients(model, inputs)
        expected = loss_and_gradients(stock, inputs)
    assert_same(found, expected, 0.1)  # of roundings; of a deleted adapter it would be 1


def test_generating_changes_nothing_of_what_is_trained():
    model = tiny("Mixtral").eval()  # of no family that halfbyte generates with
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for adapter in ("default", "active", None):
        halfbyte.generation.generate(model, [[5, 9]], max_new_tokens=2, stops=[], adapter=adapter)
        assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trained
        assert model.active_adapter == "other"
