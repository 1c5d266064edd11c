"""Factors of LoRA computed from one weight: PEFT's initialisations, and low-rank fits of a quantization error.

Sources: LoftQ (Li et al. 2023, Algorithm 1); QERA (Zhang et al. 2024, arXiv:2410.06040, Theorem 1).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from torch import Tensor, nn

from ..config import Adapter
from ..config.initialisations import CORDA_METHOD, all_options, option
from ..formats import Format
from ..modeling.transformers_versions import quiet_peft
from ..tensor import QuantizedTensor

EXACT = 512  # a smaller side up to which a decomposition is exact; above, it is randomized
OVERSAMPLING = 16
DAMPING, INVERSE_ERROR = 0.01, 0.05  # of CorDA, as in PEFT
POWER_ITERATIONS = 4  # errors of quantization have flat spectra, which need several
GRADIENT_DAMPING = 0.03  # of the mean diagonal, added to the gradients' moment


class LowRank(NamedTuple):
    """The matrix b·a, with tensors a [r, K] and b [N, r]."""

    a: Tensor
    b: Tensor

    def subtracted_from(self, weight: Tensor) -> Tensor:
        """Return `weight` [N, K] without this matrix, computed in fp32, in the weight's dtype."""
        return (weight.float() - self._product(weight.device)).to(weight.dtype)

    def added_to(self, weight: Tensor) -> Tensor:
        """Return `weight` [N, K] with this matrix, computed in fp32, in the weight's dtype."""
        return (weight.float() + self._product(weight.device)).to(weight.dtype)

    def _product(self, device: torch.device) -> Tensor:
        a, b = (factor.to(device, torch.float32) for factor in self)
        return b @ a


class LayerScale(NamedTuple):
    """Rank, `lora_alpha` and scaling of a layer's adapter."""

    rank: int
    alpha: float
    scaling: float


@contextlib.contextmanager
def seeded(seed: int, module: str, device: torch.device) -> Iterator[None]:
    """Use random numbers of a module, and restore the state of the generators."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed ^ zlib.crc32(module.encode()))
        yield


def by_peft(
    adapter: Adapter,
    weight: Tensor,
    layer: LayerScale,
    moment: Tensor | None = None,
    gradient: Tensor | None = None,
) -> LowRank:
    """Return the factors that PEFT computes from a weight [N, K].

    Args:
        moment: what PEFT's CorDA calls the covariance matrix of the inputs, fp32 [K, K].
        gradient: of the weight, fp32 [N, K], for LoRA-GA.
    """
    with quiet_peft():
        config = LoraConfig(
            r=layer.rank,
            lora_alpha=layer.alpha,  # type: ignore[arg-type] # PEFT annotates int and accepts a float
            use_rslora=adapter.use_rslora,
            init_lora_weights=adapter.init_lora_weights,  # type: ignore[arg-type]
            corda_config=None if moment is None else CordaConfig(corda_method=option(adapter, CORDA_METHOD)),
            lora_ga_config=None if gradient is None else LoraGAConfig(**all_options(adapter)),
        )
        rows, columns = weight.shape
        linear: Any = nn.Linear(columns, rows, bias=False, device="meta")
        # a copy, because OLoRA subtracts in place
        linear.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        if moment is not None:
            linear.eigens = corda_eigens(linear.weight.data, moment, layer.rank, option(adapter, CORDA_METHOD))
        if gradient is not None:
            linear._peft_loraga_grad = gradient.to(weight.device)
        lora: Any = LoraLinear(linear, "default", config, r=layer.rank, lora_alpha=config.lora_alpha)
    return LowRank(lora.lora_A["default"].weight.data, lora.lora_B["default"].weight.data)


def corda_eigens(weight: Tensor, moment: Tensor, rank: int, method: str) -> SimpleNamespace:
    """Return what PEFT's CorDA starts from: the SVD of weight · moment, its right vectors times the moment's inverse.

    PEFT's own function is in a module that needs a package which PEFT does not require.

    Args:
        weight: [N, K], fp32.
        moment: fp32 [K, K]; a share of its mean diagonal is added until its inverse is accurate.
        method: "ipm": the first `rank` singular vectors; "kpm": the last.

    Returns:
        S_WC [r], U_WC [N, r] and V_WC [K, r].
    """
    damping = DAMPING
    identity = torch.eye(len(moment), device=moment.device)
    while True:
        damped = moment + identity * moment.diagonal().mean() * damping
        inverse = torch.linalg.inv(damped)
        if torch.dist(damped @ inverse, identity) < INVERSE_ERROR:
            break
        damping *= 2
    u, s, vh = torch.linalg.svd(weight @ damped, full_matrices=False)
    v = (vh @ inverse).mT
    directions = slice(rank) if method == "ipm" else slice(len(s) - rank, None)
    return SimpleNamespace(S_WC=s[directions].clone(), U_WC=u[:, directions].clone(), V_WC=v[:, directions].clone())


def loftq(
    weight: Tensor, format: Format, layer: LayerScale, iterations: int, moment: Tensor | None = None
) -> tuple[LowRank, LowRank | None]:
    """Alternate quantizing the weight without the factors and fitting the factors to the error (LoftQ, Algorithm 1).

    With a moment the factors minimize the error of the layer's outputs instead of the weight's. One iteration of that
    is QERA.

    Args:
        weight: [N, K].
        moment: second moment of the layer's inputs, E[x·xᵀ], fp32 [K, K].

    Returns:
        The factors, and the scaled factors before the last fit, which the stored weight is quantized without; None
        after one iteration.
    """
    offset: LowRank | None = None
    for iteration in range(iterations):
        residual = weight if offset is None else offset.subtracted_from(weight)
        error = weight.float() - QuantizedTensor.quantize(residual, format).dequantize(torch.float32)
        fitted = best_low_rank(error, layer.rank) if moment is None else best_for_inputs(error, moment, layer.rank)
        if iteration + 1 < iterations:
            offset = fitted
    return LowRank(fitted.a / layer.scaling**0.5, fitted.b / layer.scaling**0.5), offset


def best_low_rank(matrix: Tensor, rank: int) -> LowRank:
    """Return the best approximation of a matrix [N, K], with the square roots of its singular values in each factor.

    Matrices whose smaller side is above `EXACT` get a randomized SVD (Halko et al. 2011, Algorithm 5.1).
    """
    if min(matrix.shape) <= max(EXACT, 2 * (rank + OVERSAMPLING)):
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    else:
        u, s, v = torch.svd_lowrank(matrix, q=rank + OVERSAMPLING, niter=POWER_ITERATIONS)
        vh = v.mT
    root = s[:rank].sqrt()
    return LowRank(root[:, None] * vh[:rank], u[:, :rank] * root)


def best_for_inputs(matrix: Tensor, moment: Tensor, rank: int) -> LowRank:
    """Return the matrix L of a rank that minimizes E‖(matrix − L)·x‖², which is U·Uᵀ·matrix.

    U are the first eigenvectors of matrix·moment·matrixᵀ: the left singular vectors of matrix·moment^½ in QERA's
    Theorem 1, whose inverse root cancels. So a moment of fewer tokens than channels needs no regularization.

    Args:
        matrix: [N, K], fp32.
        moment: E[x·xᵀ], fp32 [K, K].
    """
    if len(matrix) <= max(EXACT, 2 * (rank + OVERSAMPLING)):
        basis = torch.eye(len(matrix), device=matrix.device)
    else:
        basis = torch.randn(len(matrix), rank + OVERSAMPLING, device=matrix.device)
        for _ in range(POWER_ITERATIONS + 1):
            basis, _ = torch.linalg.qr(matrix @ (moment @ (matrix.mT @ basis)))
    projected = basis.mT @ matrix
    _, vectors = torch.linalg.eigh(projected @ moment @ projected.mT)  # eigenvalues ascend
    u = basis @ vectors[:, -rank:].flip(1)
    rows = u.mT @ matrix
    root = rows.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny).sqrt()
    return LowRank(rows / root[:, None], u * root)


def best_for_loss(matrix: Tensor, moment: Tensor, gradients: Tensor, rank: int) -> LowRank:
    """Return the matrix L of a rank that minimizes E‖G^½·(matrix − L)·x‖², with the moment G of the outputs' gradients.

    With G^½ in front of both it is `best_for_inputs`.

    Args:
        matrix: [N, K], fp32.
        moment: of the layer's inputs, fp32 [K, K].
        gradients: second moment of the gradients of the layer's outputs, fp32 [N, N].
    """
    scale = gradients.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    values, vectors = torch.linalg.eigh(gradients / scale)
    roots = (values.clamp(min=0) + GRADIENT_DAMPING).sqrt()
    weighted = vectors @ (roots[:, None] * (vectors.mT @ matrix))
    a, b = best_for_inputs(weighted, moment, rank)
    return LowRank(a, vectors @ (vectors.mT @ b / roots[:, None]))
