"""Scale searches for blocks of weights: a grid of candidates, each refined by weighted least squares.

ggml's K-quants are defined by their decoder; each encoder may find scales its own way. The searches here follow ggml's
encoder (llama.cpp pull request 1684): a candidate scale gives the codes, the codes give their best scale in closed
form, and the candidate with the smallest weighted squared error wins. All functions work on the last dimension and take
any leading ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TINY = 1e-15  # a block whose largest weight is below this is stored as zeros
REFINEMENTS = 2  # rounds of Lloyd's iteration after the grid: codes of the best scale, then the best scale of the codes


@dataclass(frozen=True)
class Grid:
    """Grid of candidate scales that map the largest weight to levels + start + k·step, for k = 0 … count - 1."""

    start: float
    step: float
    count: int

    def offsets(self) -> list[float]:
        return [self.start + k * self.step for k in range(self.count)]


def inverse(value: Tensor) -> Tensor:
    """Return 1/value, and 0 where that is not finite."""
    return torch.nan_to_num(1 / value, nan=0.0, posinf=0.0, neginf=0.0)


def _columns(x: Tensor) -> Tensor:
    """Transpose blocks [..., n] to columns [n, blocks]: short sums are faster along the outer dimension."""
    return x.reshape(-1, x.shape[-1]).T.contiguous()


def fit_symmetric(x: Tensor, weight: Tensor, levels: int, refinements: int = REFINEMENTS) -> Tensor:
    """Find the scale s that makes s·q close to x, with q an integer in [-levels, levels - 1].

    Args:
        x: fp32 [..., n].
        weight: fp32 [..., n], weights of the squared errors.
        refinements: rounds of Lloyd's iteration after the grid.

    Returns:
        fp32 [..., 1]; negative if the largest weight is positive, so that it maps to -levels, the longer side.
    """
    leading = x.shape[:-1]
    x, weight = _columns(x), _columns(weight)
    largest = x.gather(0, x.abs().argmax(0, keepdim=True))
    per_level = -inverse(largest)
    best, scale = torch.zeros_like(largest), torch.zeros_like(largest)
    weighted = weight * x
    for offset in (*Grid(-0.9, 0.1, 19).offsets(), *[None] * refinements):
        inverse_scale = inverse(scale) if offset is None else per_level * (levels + offset)
        q = (x * inverse_scale).round_().clamp_(-levels, levels - 1)
        along = (weighted * q).sum(0, keepdim=True)
        norm = (q.square_().mul_(weight)).sum(0, keepdim=True)
        gain = torch.nan_to_num(along.square() / norm)  # how much of Σ w·x² the candidate explains
        better = gain > best
        best = torch.where(better, gain, best)
        scale = torch.where(better, along / norm, scale)
    return torch.where(largest.abs() < TINY, 0.0, scale).view(*leading, 1)


def fit_affine(x: Tensor, weight: Tensor, levels: int, grid: Grid) -> tuple[Tensor, Tensor]:
    """Find the scale s ≥ 0 and offset m ≥ 0 that make s·q - m close to x, with q an integer in [0, levels].

    Args:
        x: fp32 [..., n].
        weight: fp32 [..., n], weights of the squared errors.

    Returns:
        s and m, fp32 [..., 1].
    """
    leading = x.shape[:-1]
    x, weight = _columns(x), _columns(weight)
    low = x.amin(0, keepdim=True).clamp_(max=0)
    spread = x.amax(0, keepdim=True) - low
    per_level = inverse(spread)
    weighted = weight * x
    sum_w, sum_x = weight.sum(0, keepdim=True), weighted.sum(0, keepdim=True)
    scale = spread / levels
    offset = low
    best = torch.full_like(low, torch.inf)
    for shift in (*grid.offsets(), *[None] * REFINEMENTS):
        if shift is None:
            q = ((x - offset) * inverse(scale)).round_().clamp_(0, levels)
        else:
            q = ((x - low) * (per_level * (levels + shift))).round_().clamp_(0, levels)
        sum_qx = (weighted * q).sum(0, keepdim=True)
        wq = weight * q
        sum_q = wq.sum(0, keepdim=True)
        sum_qq = wq.mul_(q).sum(0, keepdim=True)
        determinant = sum_w * sum_qq - sum_q.square()
        s = (sum_w * sum_qx - sum_x * sum_q) / determinant
        m = (sum_qq * sum_x - sum_q * sum_qx) / determinant
        s = torch.where(m > 0, sum_qx / sum_qq, s)
        m = m.clamp_(max=0)
        # Σ w·(s·q + m - x)² without its constant part
        error = s * (s * sum_qq + 2 * (m * sum_q - sum_qx)) + m * (m * sum_w - 2 * sum_x)
        better = error < best  # False for a constant block (NaN): its initial scale stays
        best = torch.where(better, error, best)
        scale, offset = torch.where(better, s, scale), torch.where(better, m, offset)
    return scale.clamp_(min=0).view(*leading, 1), -offset.view(*leading, 1)


def fit_positive(x: Tensor, weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Find the scale s and the integers q in [0, levels] that make s·q close to x ≥ 0.

    Returns:
        s, fp32 [..., 1], and q, fp32 [..., n].
    """
    largest = x.amax(-1, keepdim=True)
    best = torch.full_like(largest, -1.0)
    scale = torch.zeros_like(largest)
    codes = torch.zeros_like(x)
    for offset in Grid(-0.4, 0.1, 9).offsets():
        q = (x * inverse(largest).mul(levels + offset)).round_().clamp_(0, levels)
        along, norm = (weight * x * q).sum(-1, keepdim=True), (weight * q * q).sum(-1, keepdim=True)
        gain = torch.nan_to_num(along.square() / norm)
        better = gain > best
        best, codes = torch.where(better, gain, best), torch.where(better, q, codes)
        scale = torch.where(better, torch.nan_to_num(along / norm), scale)
    return scale, codes
