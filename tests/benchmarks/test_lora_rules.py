"""benchmarks.lora_rules: what the papers prove of the two rules."""

import pytest
import torch
from torch import nn

from benchmarks.lora_rules import LoRARite, adjust_as_lora_pro

M, N, R = 23, 17, 5


def factors(scale: float = 1.0) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.randn(R, N).double()), nn.Parameter(scale * torch.randn(M, R).double())


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_lora_pro_projects_the_gradient_of_the_weight(scale):
    down, up = factors()
    gradient = torch.randn(M, N).double()
    down.grad, up.grad = scale * up.detach().T @ gradient, scale * gradient @ down.detach().T
    adjust_as_lora_pro([(down, up)], scale)
    a, b = torch.linalg.qr(down.detach().T)[0], torch.linalg.qr(up.detach())[0]
    left, right = b @ b.T, a @ a.T
    projected = left @ gradient + gradient @ right - left @ gradient @ right
    torch.testing.assert_close(scale * (up @ down.grad + up.grad @ down), projected, atol=1e-6, rtol=1e-6)


def test_lora_pro_chooses_the_gradients_nearest_to_the_original():
    down, up = factors()
    down.grad, up.grad = torch.randn(R, N).double(), torch.randn(M, R).double()
    down.grad = up.detach().T @ (gradient := torch.randn(M, N).double())
    up.grad = gradient @ down.detach().T
    before = down.grad.clone(), up.grad.clone()
    adjust_as_lora_pro([(down, up)])
    along = up.T @ (up.grad - before[1]) - (down.grad - before[0]) @ down.T  # zero where the distance is least in X
    torch.testing.assert_close(along, torch.zeros(R, R).double(), atol=1e-5, rtol=0)


def test_lora_rite_does_not_depend_on_the_factors():
    target, mixed = torch.randn(M, N).double(), torch.randn(R, R).double()
    down, up = factors()
    same = nn.Parameter(torch.linalg.solve(mixed, down.detach())), nn.Parameter(up.detach() @ mixed)
    products = []
    for pair in ((down, up), same):
        optimizer = LoRARite([pair], lr=1e-2)
        for _ in range(5):
            (pair[1] @ pair[0] - target).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        products.append((pair[1] @ pair[0]).detach())
    torch.testing.assert_close(products[0], products[1], atol=1e-8, rtol=1e-8)


def test_lora_rite_learns_from_zero():
    torch.manual_seed(0)
    target = torch.randn(M, R).double() @ torch.randn(R, N).double()
    pair = factors(scale=0.0)
    optimizer = LoRARite([pair], lr=5e-2)
    losses = []
    for _ in range(300):
        loss = (pair[1] @ pair[0] - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.05 * losses[0]
