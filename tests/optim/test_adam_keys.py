"""`adam_beta1`, `adam_beta2` and `adam_epsilon` reach every optimizer that reads them; the others refuse them."""

import pytest
import torch

from halfbyte.optim import ADAM_KEYS, OPTIMIZERS, make_optimizer
from tests.helpers import optimizer_packages
from tests.helpers.optimizer_settings import OptimizerSettings
from tests.helpers.tiny_runs import run_config

VALUES = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5}


def numbers(made):
    """All settings of an optimizer, of its groups and of the optimizers inside."""
    found = [*made.defaults.items(), *(item for group in made.param_groups for item in group.items())]
    for inner in vars(made).values():
        if isinstance(inner, torch.optim.Optimizer):
            found += numbers(inner)
    return found


@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.adam_keys])
def test_the_keys_reach_the_optimizer(name, monkeypatch):
    optimizer_packages.install(monkeypatch)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    made = make_optimizer(layer, OptimizerSettings(optim=name, **VALUES))
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    if OPTIMIZERS[name].updates == "all":
        made.step()
    given = numbers(made)
    if OPTIMIZERS[name].updates != "all":  # the inner optimizers are made later
        return
    assert any(key == "betas" and tuple(value)[:2] == (0.8, 0.95) for key, value in given)
    if "adam_epsilon" in OPTIMIZERS[name].adam_keys:
        assert ("eps", 1e-5) in [(key, value) for key, value in given if key == "eps"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_does_not_read_a_key_refuses_it(name, tmp_path):
    fixed = {"max_grad_norm": 0.0} if OPTIMIZERS[name].updates == "backward" else {}
    for key in ADAM_KEYS:
        if key in OPTIMIZERS[name].adam_keys:
            run_config(tmp_path, optim=name, **fixed | {key: VALUES[key]})
        else:
            with pytest.raises(ValueError, match=key):
                run_config(tmp_path, optim=name, **fixed | {key: VALUES[key]})
