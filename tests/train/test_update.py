"""The end of a step as a CUDA graph: equal to the eager one, captured only on tensors that stay; and what is not."""

import copy
import json
import math

import pytest
import torch
from torch import nn

from halfbyte.optim.fused import AdamW
from halfbyte.train import graph
from halfbyte.train.stepper import Stepper
from halfbyte.utils import notices
from halfbyte.utils.errors import TrainingError
from tests.helpers.graph_stand_in import StandIn
from tests.helpers.tiny_runs import comparable, losses, make_loop, rows, run_config


class Optimizer:
    """A `FusedOptimizer` as far as its graph needs one."""

    def __init__(self):
        self.param_groups, self.tensors = [{"params": [nn.Parameter(torch.ones(2))]}], 1

    def prepare_replay(self):
        return self.tensors


def test_a_graph_is_dropped_when_tensors_are_others(monkeypatch):
    stand_in, optimizer, captured = StandIn().install(monkeypatch), Optimizer(), []

    class Captured:
        def __init__(self, step, batch, stream, pool):
            captured.append(optimizer.tensors)
            self.step = step

        def replay(self, batch):
            return self.step(batch)

    monkeypatch.setattr(graph, "_Captured", Captured)
    update = stand_in.graphs = graph.GraphedOptimizer(lambda numbers: numbers * 2, optimizer)

    def call(count, may_capture=True):
        for value in range(count):
            assert update(torch.tensor([float(value)]), may_capture).item() == 2 * value

    call(graph.WARMUP + 2)
    assert captured == [1]
    assert update.holds_graphs
    optimizer.tensors = 2
    call(graph.WARMUP)
    assert captured == [1]
    assert not update.holds_graphs
    call(2)
    assert captured == [1, 2]
    optimizer.tensors = None  # a tensor is not contiguous
    call(graph.WARMUP + 2)
    assert captured == [1, 2]
    optimizer.tensors = 3
    call(graph.WARMUP + 2, may_capture=False)
    assert captured == [1, 2]


def test_prepare_replay_numbers_the_tensors_of_a_step():
    weights = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))]
    optimizer = AdamW(weights, lr=0.1)

    def gradients(*wanted):
        for weight in weights:
            weight.grad = torch.ones_like(weight) if any(weight is each for each in wanted) else None

    gradients(*weights)
    first = optimizer.prepare_replay()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    assert optimizer.prepare_replay() == first
    assert optimizer.all_parameters.devices[0].settings[0, 0] == 0.05
    gradients(weights[0])
    second = optimizer.prepare_replay()
    assert second != first
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.prepare_replay() not in (first, second)
    weights[0].grad = torch.ones(2, 3).t()
    assert optimizer.prepare_replay() is None


# --- on a GPU --------------------------------------------------------------------------------------------------------

RUNS = {
    "one micro-batch": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "no clipping": {"max_grad_norm": 0},
    "8 bits": {"optim": "adamw_8bit"},
    "muon": {"optim": "muon"},  # is not captured
}


@pytest.mark.gpu
@pytest.mark.parametrize("keys", RUNS.values(), ids=RUNS)
def test_runs_equal_those_whose_optimizer_is_eager(tmp_path, monkeypatch, keys):
    keys = {"device": "cuda", "max_steps": 14, "eval_steps": 5, "max_grad_norm": 0.3, "warmup_steps": 4} | keys
    found, replayed = {}, []
    replay = graph.GraphedOptimizer._replay
    monkeypatch.setattr(graph.GraphedOptimizer, "_replay", lambda *given: replayed.append(1) or replay(*given))
    for name in ("graph", "eager"):
        if name == "eager":
            monkeypatch.setattr(graph.GraphedOptimizer, "_is_due", lambda *_: False)
        loop = make_loop(run_config(tmp_path / name, **keys), rows(20), rows(4, seed=9))
        loop.train()
        found[name] = comparable(loop), [weight.detach().clone() for weight in loop.trained]
    assert len(replayed) == (0 if keys.get("optim") == "muon" else 14 - graph.WARMUP)
    assert ("optimizer-graph" in notices.notices_so_far()) == (keys.get("optim") == "muon")
    assert json.dumps(found["graph"][0]) == json.dumps(found["eager"][0])
    assert all(map(torch.equal, found["graph"][1], found["eager"][1]))


@pytest.mark.gpu
def test_a_broken_step_in_a_graph_changes_nothing(tmp_path):
    loop = make_loop(run_config(tmp_path, device="cuda", max_steps=12, save_steps=100), rows(20))
    before, forward_backward = {}, loop.stepper.forward_backward

    def broken(*arguments):
        sums = forward_backward(*arguments)
        if loop.state.global_step == 9:
            assert loop.stepper.optimizer_graph.holds_graphs
            before["weights"] = [weight.detach().clone() for weight in loop.trained]
            loop.trained[3].grad[1] = math.nan
        return sums

    loop.stepper.forward_backward = broken
    with pytest.raises(TrainingError):
        loop.train()
    assert len(losses(loop)) == 9
    assert all(map(torch.equal, before["weights"], loop.trained))


@pytest.mark.gpu
def test_steps_without_graphs_have_no_notice(tmp_path):
    loop = make_loop(run_config(tmp_path, device="cuda", max_steps=5), rows(8), graphs=False)
    assert type(loop.stepper) is Stepper
    loop.train()
    assert "optimizer-graph" not in notices.notices_so_far()
