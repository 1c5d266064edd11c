"""Advantages equal those of TRL's trainers for the same rewards."""

import ast
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import nanstd

from halfbyte.methods.policy_losses import combined, group_relative, leave_one_out, without_spread

GROUP, NAN = 4, float("nan")
REWARDS = torch.tensor(
    [
        [1.0, 0.5], [0.0, NAN], [0.25, -1.0], [1.0, 0.0],
        [NAN, NAN], [NAN, 2.0], [0.5, 0.5], [3.0, NAN],
        [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0],
        [NAN, NAN], [NAN, NAN], [NAN, NAN], [2.0, 1.0],
    ]
)  # fmt: skip
WEIGHTS = torch.tensor([1.0, 0.3])


def of_trl(trainer, first: str, last: str, **state):
    """`advantages` as the lines of TRL's method between the statements that assign `first` and `last` compute them.

    They stand in the middle of a method that generates, too, so they are taken out of its source and run here.
    """
    source = textwrap.dedent(inspect.getsource(trainer._generate_and_score_completions))
    body = ast.parse(source).body[0].body

    def assigns(node, name):
        return any(isinstance(n, ast.Name) and n.id == name for t in getattr(node, "targets", []) for n in ast.walk(t))

    begin = next(i for i, node in enumerate(body) if assigns(node, first))
    end = max(i for i, node in enumerate(body) if assigns(node, last) and "nan_to_num" in ast.unparse(node))
    names = {"torch": torch, "nanstd": nanstd, "device": "cpu", "rewards_per_func": REWARDS.clone(), **state}
    exec(compile(ast.Module(body[begin : end + 1], []), "trl", "exec"), names)
    return names["advantages"]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_grpo_equals_trl(scale, aggregation):
    keys = {"reward_weights": WEIGHTS, "scale_rewards": scale, "multi_objective_aggregation": aggregation}
    theirs = SimpleNamespace(**keys, reward_funcs=[None, None])
    expected = of_trl(GRPOTrainer, "unscorable_mask", "advantages", self=theirs, num_generations=GROUP)
    ours = group_relative(REWARDS, WEIGHTS, GROUP, scale, aggregation)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert ours[4] == 0, "nobody has scored it"
    assert ours.abs().sum() > 1


@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_equals_trl(normalize):
    theirs = SimpleNamespace(reward_weights=WEIGHTS, reward_clip_range=None, beta=0.0, normalize_advantages=normalize)
    expected = of_trl(RLOOTrainer, "unscorable_mask", "advantages", self=theirs, num_generations=GROUP)
    ours = leave_one_out(combined(REWARDS, WEIGHTS), GROUP, normalize)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_group_with_equal_rewards_has_no_advantage():
    assert without_spread(combined(REWARDS, WEIGHTS), GROUP).tolist() == [False, False, True, False]
    assert group_relative(REWARDS, WEIGHTS, GROUP)[8:12].tolist() == [0.0] * 4
