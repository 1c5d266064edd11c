"""Frozen float32 linears under adapters, multiplied by oneDNN: values and gradients equal torch's."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from halfbyte.layers import plain
from halfbyte.layers.plain import FrozenLinear, PlainLinear, multiply_by_onednn, read_linear


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(96, 700), nn.Linear(700, 96, bias=False), nn.Linear(96, 50)

    def forward(self, x):
        return self.head(self.down(torch.relu(self.up(x))))


@pytest.fixture
def net(monkeypatch):
    monkeypatch.setattr(plain, "onednn_beats_mkl", lambda: True)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    return get_peft_model(Net(), config)


def test_equals_torch(net):
    x = torch.randn(3, 37, 96, requires_grad=True)

    def results():
        y = net(x)
        y.square().sum().backward()
        gradients = [y.detach(), x.grad, *(p.grad for p in net.parameters() if p.requires_grad)]
        net.zero_grad()
        x.grad = None
        return gradients

    expected, names = results(), list(net.state_dict())
    assert multiply_by_onednn(net) == 2
    assert multiply_by_onednn(net) == 0
    assert list(net.state_dict()) == names
    for frozen, stock in zip(results(), expected, strict=True):
        torch.testing.assert_close(frozen, stock, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected[0], rtol=1e-4, atol=1e-4)
    base = net.base_model.model
    assert isinstance(base.up.base_layer, FrozenLinear)
    assert isinstance(read_linear(base.up), PlainLinear)
    assert type(base.head) is nn.Linear


def test_trained_and_16_bit_linears_do_not_change(net):
    net.base_model.model.up.base_layer.weight.requires_grad_(True)
    net.base_model.model.down.base_layer.to(torch.bfloat16)
    assert multiply_by_onednn(net) == 0


def test_unfrozen_weight_gets_its_gradient(net):
    multiply_by_onednn(net)
    weight = net.base_model.model.up.base_layer.weight.requires_grad_(True)
    net(torch.randn(2, 96)).sum().backward()
    assert weight.grad is not None
