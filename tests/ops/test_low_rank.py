"""Bases of projections: leading singular vectors, drift, dependent columns, stacks of matrices, storage."""

import math

import pytest
import torch

from halfbyte.ops import low_rank
from halfbyte.ops.low_rank import dequantize_basis, gaussian, quantize_basis, refresh_basis


@pytest.fixture(params=[True, False], ids=["fp64", "without fp64"])
def has_fp64(request, monkeypatch):
    monkeypatch.setattr(low_rank, "_has_fp64", lambda device: request.param)


@pytest.mark.usefixtures("has_fp64")
@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (33, 33)])
def test_a_first_refresh_finds_the_leading_singular_vectors(shape):
    torch.manual_seed(2)
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    values = 0.7 ** torch.arange(min(shape), dtype=torch.float64)
    matrix = u @ torch.diag(values) @ v
    basis = refresh_basis(matrix, gaussian(shape[0], 13, matrix, 1), 5, 3)
    torch.testing.assert_close(basis.T @ basis, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
    assert ((basis.T @ u[:, :5]).diagonal().abs() > 0.999).all()  # ordered by singular value
    best = values[:5].square().sum()
    assert (basis.T @ matrix).square().sum() > 0.9999 * best


@pytest.mark.usefixtures("has_fp64")
def test_a_refresh_from_the_last_basis_follows_a_gradient_that_drifts():
    """One sweep a refresh captures nearly the energy of an SVD, and signs follow the last basis."""
    torch.manual_seed(4)
    signal, noise = torch.randn(50, 4) @ torch.randn(4, 70), torch.randn(50, 70)
    basis = refresh_basis(signal, gaussian(50, 12, signal, 2), 4, 3)
    for number in range(1, 6):
        drifted = signal + 0.1 * number * noise
        new = refresh_basis(drifted, basis, 4, 1, align=True)
        best = torch.linalg.svdvals(drifted)[:4].square().sum()
        assert (new.T @ drifted).square().sum() > 0.99 * best
        assert ((new * basis).sum(0) >= 0).all()
        basis = new


@pytest.mark.usefixtures("has_fp64")
def test_a_gradient_of_lower_rank_than_the_basis_still_gives_an_orthonormal_basis():
    for matrix in (torch.zeros(8, 6), torch.outer(torch.arange(8.0), torch.ones(6))):
        basis = refresh_basis(matrix, gaussian(8, 6, matrix, 5), 4, 3)
        torch.testing.assert_close(basis.T @ basis, torch.eye(4), rtol=0, atol=1e-5)


@pytest.mark.parametrize("align", [False, True])
def test_bases_of_a_stack_equal_those_of_its_matrices(align):
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(3, 17, 29, dtype=torch.float64, generator=generator)
    gradients[1] *= 1e-9
    start = torch.randn(3, 17, 5 if align else 9, dtype=torch.float64, generator=generator)
    found = refresh_basis(gradients, start, 5, 2, align)
    for gradient, own, basis in zip(gradients, start, found, strict=True):
        torch.testing.assert_close(refresh_basis(gradient, own, 5, 2, align), basis, rtol=0, atol=1e-8)
        torch.testing.assert_close(basis.T @ basis, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (16, 16), (33, 9)])
def test_a_stored_basis_is_off_by_half_a_step_at_most(bits, shape):
    torch.manual_seed(5)
    basis = torch.randn(shape)
    stored = quantize_basis(basis, bits, 64)
    back = dequantize_basis(stored, bits, 64, shape)
    groups = torch.arange(basis.numel()) // 64
    assert stored["codes"].numel() == math.ceil(basis.numel() * bits / 8)
    assert ((back - basis).abs().view(-1) <= 0.5001 * stored["scales"][0][groups] + 1e-6).all()
    assert stored["scales"][0].max() <= 10 / (2**bits - 1)
