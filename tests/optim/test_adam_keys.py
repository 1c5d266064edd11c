"""`adam_beta1`, `adam_beta2` and `adam_epsilon` reach every optimizer that reads them; the others refuse them."""

import pytest
import torch

from halfbyte.optim import ADAM_KEYS, OPTIMIZERS, make_optimizer
from tests.helpers import optimizer_packages
from tests.helpers.optimizer_settings import OptimizerSettings
from tests.helpers.tiny_runs import run_config

VALUES = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-2}


def weights_after_two_steps(name, **keys):
    torch.manual_seed(0)
    layer, inputs = torch.nn.Linear(64, 64), torch.randn(2, 8, 64)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    made = make_optimizer(model, OptimizerSettings(optim=name, **keys))
    for batch in inputs:
        layer(batch).square().mean().backward()
        made.step()
        for parameter in layer.parameters():
            parameter.grad = None
    return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])


@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.adam_keys])
def test_the_keys_reach_the_optimizer(name, monkeypatch):
    if OPTIMIZERS[name].package:
        optimizer_packages.install(monkeypatch)
        make_optimizer(torch.nn.Linear(64, 64), OptimizerSettings(optim=name, **VALUES))
        arguments = optimizer_packages.MADE[-1][1]
        assert (arguments["betas"], arguments["eps"]) == ((0.8, 0.95), 1e-2)
        return
    usual = weights_after_two_steps(name)
    for key in OPTIMIZERS[name].adam_keys:
        assert not torch.equal(weights_after_two_steps(name, **{key: VALUES[key]}), usual), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_does_not_read_a_key_refuses_it(name, tmp_path):
    fixed = {"max_grad_norm": 0.0} if OPTIMIZERS[name].updates == "backward" else {}
    for key in ADAM_KEYS:
        if key in OPTIMIZERS[name].adam_keys:
            run_config(tmp_path, optim=name, **fixed | {key: VALUES[key]})
        else:
            with pytest.raises(ValueError, match=key):
                run_config(tmp_path, optim=name, **fixed | {key: VALUES[key]})
