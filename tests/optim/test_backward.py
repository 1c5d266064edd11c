"""Updates in the backward: the weights of one step after it, freed gradients, parts that are broken or incomplete."""

import copy
import math

import pytest
import torch
from torch import nn

from halfbyte.optim import fused, offload
from halfbyte.optim.groups import backward_gradient_bytes, backward_parts
from halfbyte.utils.errors import TrainingError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONS = {"storage": "dynamic8", "min_quantized": 100, "weight_decay": 0.1}


class Model(nn.Module):
    """Layers between a table and a head, which may share one weight."""

    def __init__(self, tied=False, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(33, 17)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(17, 29), nn.Tanh(), nn.Linear(29, 17)) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(17)
        self.head = nn.Linear(17, 33, bias=False)
        self.unused = nn.Parameter(torch.ones(5))
        if tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids, skip=False):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + (layer[0](hidden)[..., :17] if skip else layer(hidden))
        return self.head(self.norm(hidden)).float().square().mean()


def steps(model, optimizer, count, start=0, **keys):
    norms = []
    for number in range(start, start + count):
        torch.manual_seed(number)
        ids = torch.randint(33, (3, 11)).to(next(model.parameters()).device)
        model(ids, **keys).backward()
        if optimizer.backward is None:
            norms.append(optimizer.clip(math.inf).item())
        optimizer.step()
        if optimizer.backward is not None:
            norms.append(optimizer.gradient_norm().item())
            assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.zero_grad()
    return norms


@pytest.fixture(params=[1, 2**28], ids=["many windows", "one window"])
def window(request, monkeypatch):
    monkeypatch.setattr(offload, "WINDOW", request.param)
    monkeypatch.setattr(offload, "CUT", 512)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_norms_equal_those_of_one_step(window, device, offloaded, tied, dtype):
    options = OPTIONS | ({"rounding": "correction8"} if dtype == torch.bfloat16 else {})
    runs = []
    for in_backward in (False, True):
        model = Model(tied).to(device, dtype)
        optimizer = fused.AdamW(model.parameters(), 1e-2, **options, offload=in_backward and offloaded)
        if in_backward:
            optimizer.update_in_backward(backward_parts(model))
        norms = steps(model, optimizer, 4)
        saved = copy.deepcopy(optimizer.state_dict())
        resumed = fused.AdamW(model.parameters(), 1e-2, **options, offload=in_backward and offloaded)
        if in_backward:
            optimizer.backward.close()
            resumed.update_in_backward(backward_parts(model))
        resumed.load_state_dict(saved)
        norms += steps(model, resumed, 3, start=4)
        runs.append((norms, model.state_dict(), saved["state"]))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-5)
    assert all(map(torch.equal, runs[0][1].values(), runs[1][1].values()))
    assert runs[0][2].keys() == runs[1][2].keys()


@pytest.mark.parametrize("way", ["in backward", "offloaded", "without a gradient"])
def test_stochastic_rounding_draws_by_parameter_and_element(monkeypatch, way):
    """Parts, windows and missing gradients change no weight, and equal layers are rounded by different noise."""
    monkeypatch.setattr(offload, "WINDOW", 1)
    monkeypatch.setattr(offload, "CUT", 512)
    runs = []
    for other in (False, True):
        torch.manual_seed(0)
        start = torch.randn(3000).bfloat16()
        unused, *layers = [nn.Parameter(start.clone()) for _ in range(4)]
        offloaded = other and way == "offloaded"
        groups = [{"params": [unused]}, {"params": layers}]
        optimizer = fused.AdamW(groups, 1e-3, rounding="stochastic", offload=offloaded)
        if other and way == "in backward":
            optimizer.update_in_backward([[layer] for layer in (*reversed(layers), unused)])
        for _ in range(2):
            sum(layer.float().sum() for layer in layers).backward()
            if not other and way == "without a gradient":
                unused.grad = torch.ones_like(unused)
            optimizer.step()
            optimizer.zero_grad()
        runs.append(layers)
        assert all((layers[0] != layer).any() for layer in layers[1:])
    assert all(map(torch.equal, *runs))


def everything(model, optimizer):
    """Name → copies of a parameter and its state."""
    states = [(name, weight, optimizer.state.get(weight, {})) for name, weight in model.named_parameters()]
    return {
        name: [weight.detach().clone(), *(each.clone() for each in state.values() if isinstance(each, torch.Tensor))]
        for name, weight, state in states
    }


def unequal(one, other):
    """Names of parameters that differ, or whose state does."""
    assert one.keys() == other.keys()
    return {name for name in one if not all(map(torch.equal, one[name], other[name]))}


BROKEN = {  # weight with a broken gradient → beginnings of the names of parameters that the backward updates before it
    "head.weight": (),
    "layers.2.2.weight": ("head", "norm"),
    "layers.1.0.bias": ("head", "norm", "layers.2"),
    "layers.0.0.weight": ("head", "norm", "layers.2", "layers.1"),
    "embed.weight": ("head", "norm", "layers"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("broken", BROKEN)
def test_no_part_is_updated_from_the_first_broken_gradient_on(device, offloaded, value, broken):
    runs = []
    for is_broken in (False, True):
        model = Model(layers=3).to(device)
        optimizer = fused.AdamW(model.parameters(), 1e-2, **OPTIONS, offload=offloaded)
        optimizer.update_in_backward(backward_parts(model))
        steps(model, optimizer, 2)
        before = everything(model, optimizer)
        assert optimizer.first_broken() is None
        weight = model.get_parameter(broken)
        hook = weight.register_hook(lambda gradient, by=value if is_broken else 1.0: gradient * by)
        (norm,) = steps(model, optimizer, 1, start=2)
        assert math.isfinite(norm) is not is_broken
        assert optimizer.first_broken() is (weight if is_broken else None)
        after = everything(model, optimizer)
        hook.remove()
        (norm,) = steps(model, optimizer, 1, start=3)  # the flag is of one step
        assert math.isfinite(norm)
        assert optimizer.first_broken() is None
        assert unequal(after, everything(model, optimizer)) == before.keys() - {"unused"}
        runs.append(after)
    early = {name for name in before if name.startswith(BROKEN[broken])}
    assert unequal(before, runs[1]) == early
    assert not unequal({name: runs[0][name] for name in early}, {name: runs[1][name] for name in early})


def test_a_flag_set_before_the_backward_stops_all_parts():
    model = Model()
    optimizer = in_backward(model)
    steps(model, optimizer, 1)
    before = everything(model, optimizer)
    optimizer.found_inf = torch.ones(())
    assert math.isfinite(*steps(model, optimizer, 1, start=1))
    assert not unequal(before, everything(model, optimizer))
    assert optimizer.first_broken() is None
    optimizer.found_inf = torch.zeros(())
    steps(model, optimizer, 1, start=1)
    assert unequal(before, everything(model, optimizer)) == before.keys() - {"unused"}


def test_an_incomplete_part_is_updated_at_the_end():
    model = Model()
    optimizer = fused.AdamW(model.parameters(), 1e-2)
    optimizer.update_in_backward(backward_parts(model))
    before = copy.deepcopy(model.state_dict())
    steps(model, optimizer, 2, skip=True)  # the second linears of the layers get no gradient
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert "layers.1.0.weight" in changed
    assert "layers.1.2.weight" not in changed


def test_parameters_are_divided_by_layer_from_the_last():
    model = Model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = [[names[id(parameter)] for parameter in part] for part in backward_parts(model)]
    single = [part[0] for part in parts if len(part) == 1]
    assert single == ["head.weight", "norm.bias", "norm.weight", "embed.weight", "unused"]
    assert [part[0] for part in parts if len(part) == 4] == ["layers.1.0.weight", "layers.0.0.weight"]
    assert backward_gradient_bytes(model) == 4 * (2 * 17 * 29 + 17 + 29)
    assert backward_gradient_bytes(Model(tied=True)) == 4 * (2 * 17 * 29 + 17 + 29 + 33 * 17)


def in_backward(model, rate=1e-2):
    optimizer = fused.AdamW(model.parameters(), rate, **OPTIONS)
    optimizer.update_in_backward(backward_parts(model))
    return optimizer


@pytest.mark.parametrize("skip", [False, True], ids=["complete", "incomplete"])
def test_a_second_backward_is_refused(skip):
    """Gradients accumulate over backwards, and the weights have changed since the first one."""
    model = Model()
    optimizer = in_backward(model)
    loss = model(torch.arange(6)[None], skip=skip)
    loss.backward(retain_graph=True)
    with pytest.raises(TrainingError):
        model(torch.arange(6)[None], skip=skip).backward()
    optimizer.step()


def test_what_the_backward_cannot_do_is_refused():
    """Lists of other parameters, clipping to the norm of all gradients, loss scales, and added groups."""
    model = Model()
    optimizer = in_backward(model)
    with pytest.raises(TrainingError):
        optimizer.update_in_backward(backward_parts(model)[1:])
    with pytest.raises(TrainingError):
        optimizer.clip(1.0)
    with pytest.raises(TrainingError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.arange(6)[None])).backward()
    with pytest.raises(TrainingError):
        scaler.step(optimizer)


def test_a_layer_may_be_frozen_and_trained_again():
    """Without its gradients, a layer and its state do not change, and step counts of parameters differ."""
    model = Model()
    optimizer = in_backward(model)
    steps(model, optimizer, 1)
    model.layers[0].requires_grad_(False)
    before = copy.deepcopy(model.layers[0].state_dict())
    steps(model, optimizer, 2, start=1)
    assert all(torch.equal(value, before[name]) for name, value in model.layers[0].state_dict().items())
    model.layers[0].requires_grad_(True)
    steps(model, optimizer, 1, start=3)
    assert optimizer.state[model.layers[0][0].weight]["step"].item() == 2
    assert optimizer.state[model.layers[1][0].weight]["step"].item() == 4
