"""Riemannian preconditioning of LoRA's gradients (Zhang and Pilanci 2024, arXiv:2402.02347, section 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..adapter_kinds import LORA_A, LORA_B

DAMPING = 1e-2  # added to the diagonals, as in PEFT's `create_riemannian_optimizer`


def lora_pairs(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Factors A [r, n] and B [m, r] of each linear layer whose B is trained; embeddings are left out, as in PEFT."""
    parameters, pairs = dict(model.named_parameters()), []
    for name, down in parameters.items():
        up = parameters.get(name.replace(f".{LORA_A}.", f".{LORA_B}."))
        if up is not None and up is not down and down.ndim == up.ndim == 2 and up.requires_grad:
            pairs.append((down, up))
    return pairs


@torch.no_grad()
def precondition(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Replace the gradients of each pair, in place: ∇A by (BᵀB + δI)⁻¹∇A, and ∇B by ∇B(AAᵀ + δI)⁻¹.

    Computed in fp32, or in fp64 for such factors. A factor without a gradient is skipped. No value is read on the host.
    NaN and Inf in a gradient remain.
    """
    by_rank: dict[tuple[int, torch.dtype, torch.device], list[tuple[Tensor, Tensor, bool]]] = {}
    for down, up in pairs:
        dtype = torch.promote_types(down.dtype, torch.float32)
        a, b = down.detach().to(dtype), up.detach().to(dtype)
        equations = by_rank.setdefault((len(a), dtype, a.device), [])
        if down.grad is not None:
            equations.append((down.grad, b.T @ b, False))
        if up.grad is not None:
            equations.append((up.grad, a @ a.T, True))
    for (rank, dtype, device), entries in by_rank.items():
        if not entries:
            continue
        damping = DAMPING * torch.eye(rank, dtype=dtype, device=device)
        factors = torch.linalg.cholesky_ex(torch.stack([gram for _, gram, _ in entries]) + damping).L
        for (gradient, _, transposed), factor in zip(entries, factors, strict=True):
            right = gradient.to(dtype)
            solved = torch.cholesky_solve(right.T if transposed else right, factor)
            gradient.copy_(solved.T if transposed else solved)


def precondition_before(optimizer: Optimizer, model: nn.Module) -> None:
    """Precondition the gradients of the model's adapters at the start of each `optimizer.step()`, after clipping."""
    pairs = lora_pairs(model)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        precondition(pairs)

    optimizer.register_step_pre_hook(hook)
