"""Update rules for LoRA that are measured by `benchmarks.optimizer_quality`, in plain torch.

W gains scale·B A, with A of [r, n] and B of [m, r]. Pairs are those of `halfbyte.optim.riemannian.lora_pairs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Pair = tuple[nn.Parameter, nn.Parameter]
DAMPING = 1e-8


def stacks(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Pairs of one shape each, for batched products."""
    by_shape: dict[tuple[torch.Size, torch.Size], list[Pair]] = {}
    for down, up in pairs:
        by_shape.setdefault((down.shape, up.shape), []).append((down, up))
    yield from by_shape.values()


def gradients(factors: Sequence[nn.Parameter]) -> Tensor:
    """The gradients of factors of one shape, stacked."""
    return torch.stack([factor.grad for factor in factors if factor.grad is not None])


@torch.no_grad()
def adjust_as_lora_pro(pairs: Sequence[Pair], scale: float = 1.0) -> None:
    """Replace the gradients of each pair, in place, by those of LoRA-Pro (Wang et al. 2024, arXiv:2407.18242).

    With them, scale·(B ∇A + ∇B A) is the matrix nearest to the gradient of W among all changes of B A (theorem 2.1).
    The free matrix X keeps them nearest to the original gradients (theorem 2.3).
    """
    for same in stacks(pairs):
        downs, ups = zip(*same, strict=True)
        a, b, of_a, of_b = torch.stack(downs), torch.stack(ups), gradients(downs), gradients(ups)
        damping = DAMPING * torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
        left, right = b.mT @ b + damping, a @ a.mT + damping
        solved = torch.linalg.solve(left, of_a) / scale**2
        free = _sylvester(left, right, -solved @ a.mT)
        outside = of_b - b @ torch.linalg.solve(left, b.mT @ of_b)
        new_b = torch.linalg.solve(right, outside, left=False) / scale**2 - b @ free
        for factor, new in zip((*downs, *ups), (*(solved + free @ a), *new_b), strict=True):
            factor.grad.copy_(new)


def _sylvester(left: Tensor, right: Tensor, result: Tensor) -> Tensor:
    """X of left X + X right = result, for symmetric positive matrices."""
    values, vectors = torch.linalg.eigh(left)
    others, basis = torch.linalg.eigh(right)
    quotient = vectors.mT @ result @ basis / (values[..., :, None] + others[..., None, :])
    return vectors @ quotient @ basis.mT


class LoRARite(Optimizer):
    """LoRA-RITE (Yen et al. 2024, arXiv:2410.20625, algorithm 1), with moving averages as in its experiments.

    The steps of B A do not depend on how it is factored. Second moments are divided by the number of rows, so that the
    learning rate has the meaning of Adam's. A factor whose partner is zero waits.
    """

    def __init__(self, pairs: Sequence[Pair], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-12):
        super().__init__([factor for pair in pairs for factor in pair], {"lr": lr})
        self.pairs, self.betas, self.eps = pairs, betas, eps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for same in stacks(self.pairs):
            downs, ups = zip(*same, strict=True)
            a, b = torch.stack(downs).mT, torch.stack(ups)
            changes = *self._change(ups[0], gradients(ups), a), *self._change(downs[0], gradients(downs).mT, b).mT
            for factor, change in zip((*ups, *downs), changes, strict=True):
                factor.sub_(self.param_groups[0]["lr"] * change)

    def _change(self, name: nn.Parameter, gradient: Tensor, partner: Tensor) -> Tensor:
        """The direction of factors [k, d, r] with partners [k, e, r]; their state is kept at `name`."""
        basis, magnitude = torch.linalg.qr(partner)
        inverse = torch.linalg.pinv(magnitude)  # zero for a partner of zeros
        unmagnified = gradient @ inverse
        second = unmagnified.mT @ unmagnified / gradient.shape[1]
        state, (beta1, beta2) = self.state[name], self.betas
        if not state:
            state |= {"steps": 0, "first": torch.zeros_like(unmagnified), "second": torch.zeros_like(second),
                      "escaped": second.new_zeros(len(second), 1), "basis": basis}  # fmt: skip
        state["steps"] += 1
        turn = basis.mT @ state["basis"]
        turned = turn @ state["second"] @ turn.mT
        lost = (torch.linalg.eigvalsh(state["second"]) - torch.linalg.eigvalsh(turned)).abs().amax(1, keepdim=True)
        state["escaped"] = beta2 * (state["escaped"] + lost)
        state["second"] = beta2 * turned + (1 - beta2) * second
        unbiased = 1 - beta2 ** state["steps"]
        values, vectors = torch.linalg.eigh(state["second"] / unbiased)
        roots = (values.clamp(min=0) + state["escaped"] / unbiased + self.eps).rsqrt()
        whitened = unmagnified @ (vectors * roots[:, None]) @ vectors.mT
        state["first"] = beta1 * state["first"] @ turn.mT + (1 - beta1) * whitened
        state["basis"] = basis
        return state["first"] / (1 - beta1 ** state["steps"]) @ inverse.mT
