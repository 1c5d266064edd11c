"""The parts of a Muon step over a list of matrices of one shape, as torch functions.

`directions` updates the momenta and writes the matrices to orthogonalize, and `apply_directions` moves the weights
along the orthogonalized ones. Each is one launch on a GPU. Between them, `optim.muon.orthogonalize` runs batched
matmuls, of which two in three have a symmetric result (`symmetric_product`). Nothing is read on the host, so a CUDA
graph can hold the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op
from .optimizer import Parameters

BLOCK = 2048  # elements of an 8-bit momentum with one fp32 scale
HALVED_FROM = 512  # rows from which a CPU computes half of a symmetric product


def quantize_momentum(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize tensors to 8 bits, linearly in blocks of `BLOCK` elements (arXiv:2509.23106, section 3).

    Args:
        values: [B, *], fp32; blocks do not cross the B tensors.

    Returns:
        int8 of the same shape, and scales fp32 [B, ⌈numel/BLOCK⌉]: the largest magnitude of each block, over 127.
    """
    flat = values.flatten(1)
    padded = torch.nn.functional.pad(flat, (0, -flat.shape[1] % BLOCK)).view(len(flat), -1, BLOCK)
    scales = padded.abs().amax(-1) / 127
    codes = (padded / scales.clamp(min=torch.finfo(scales.dtype).tiny).unsqueeze(-1)).round_()
    return codes.to(torch.int8).flatten(1)[:, : flat.shape[1]].reshape(values.shape), scales


def dequantize_momentum(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values, fp32 [B, *], of codes int8 [B, *] and scales from `quantize_momentum`."""
    numel = codes[0].numel()
    factors = scales.repeat_interleave(BLOCK, dim=1)[:, :numel]
    return (codes.flatten(1) * factors).view(codes.shape)


def symmetric_product(x: Tensor, added: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Return alpha·XXᵀ + beta·S [B, m, m].

    On a CPU, products with at least `HALVED_FROM` rows are computed without one of two equal blocks. From 512 rows on,
    that takes 0.73 to 0.83 of a full matmul's time, and with 320 rows 1.08 (one core of an AMD EPYC, November 2026).

    Args:
        x: X [B, m, n]: contiguous, or transposed from contiguous [B, n, m].
        added: S [B, m, m], symmetric, contiguous; None: 0.
    """
    rows, half = x.shape[1], x.shape[1] // 2
    if x.device.type != "cpu" or rows < HALVED_FROM:
        product = torch.bmm(x, x.mT) if added is None else torch.baddbmm(added, x, x.mT, beta=beta, alpha=alpha)
        return product.mul_(alpha) if added is None and alpha != 1 else product
    upper, lower = x[:, :half], x[:, half:]
    product = x.new_empty(len(x), rows, rows)
    product[:, :half, :half] = torch.bmm(upper, upper.mT)
    product[:, half:, half:] = torch.bmm(lower, lower.mT)
    product[:, :half, half:] = across = torch.bmm(upper, lower.mT)
    product[:, half:, :half] = across.mT
    product = product.mul_(alpha) if alpha != 1 else product
    return product if added is None else product.add_(added, alpha=beta)


@op("triton.muon")
def directions(
    out: Tensor,
    parameters: Parameters,
    momentum: float,
    nesterov: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update the momenta M ← momentum·M + (1 - momentum)·G, and write the directions to orthogonalize.

    Args:
        out: [n, *shape], contiguous: M, or with `nesterov` momentum·M + (1 - momentum)·G; overwritten.
        parameters: n parameters of one shape, dtype and device, and their gradients. The only state of each is its
            momentum, in fp32 (fp64 for fp64 weights), or int8 with scales (`quantize_momentum`).
        momentum: weight of the last momentum.
        nesterov: whether the gradient is added to the momentum once more.
        grad_scale: fp32, one element: divides the gradients; None: 1.
        found_inf: fp32, one element: if it is not 0, no momentum changes and `out` is undefined; None: 0.
    """
    exact = torch.promote_types(parameters.weights[0].dtype, torch.float32)
    gradient = torch.stack(parameters.gradients).to(exact)
    if grad_scale is not None:
        gradient = gradient / grad_scale
    held = [list(tensors) for tensors in zip(*(state[0] for state in parameters.states), strict=True)]
    in_8_bits = held[1][0] is not None
    momenta = [torch.stack(tensors) for tensors in (held if in_8_bits else held[:1])]
    mean = dequantize_momentum(*momenta) if in_8_bits else momenta[0]
    mean = mean.to(exact).lerp(gradient, 1 - momentum)
    new_momenta = quantize_momentum(mean.float()) if in_8_bits else (mean,)
    for tensors, old, new in zip(held, momenta, new_momenta, strict=False):
        chosen = new if found_inf is None else torch.where(found_inf.reshape(()) != 0, old, new)
        torch._foreach_copy_(tensors, chosen.unbind())
    out.copy_(gradient.lerp_(mean, momentum) if nesterov else mean)


@op("triton.muon")
def apply_directions(
    directions: Tensor,
    parameters: Parameters,
    lr: Tensor,
    weight_decay: float,
    scale: float,
    found_inf: Tensor | None = None,
) -> None:
    """Update the weights: W ← (1 - lr·weight_decay)·W - lr·scale·O, rounded once.

    Args:
        directions: [n, *shape], contiguous: the orthogonalized directions O.
        parameters: the n parameters.
        lr: fp32, or fp64 for fp64 weights; one element.
        weight_decay: decoupled weight decay.
        scale: factor of the learning rate, from the matrix's shape.
        found_inf: fp32, one element: if it is not 0, no weight changes; None: 0.
    """
    exact = torch.promote_types(parameters.weights[0].dtype, torch.float32)
    lr = lr.reshape(())
    weights = torch.stack(parameters.weights).to(exact)
    updated = (weights * (1 - lr * weight_decay)).sub_(directions.to(exact) * (lr * scale))
    if found_inf is not None:
        updated = torch.where(found_inf.reshape(()) != 0, weights, updated)
    torch._foreach_copy_(parameters.weights, updated.unbind())
