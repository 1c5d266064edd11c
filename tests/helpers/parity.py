"""Helpers of the Triton parity tests: device, dtypes and tolerances.

The same tests run on a GPU and, with TRITON_INTERPRET=1, on a CPU in Triton's interpreter. The interpreter computes
bf16 wrongly and takes milliseconds a program, so it runs fp32, fp16 and small sizes.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]

# In the interpreter these tests need no GPU.
mark = pytest.mark.interpret if INTERPRETED else pytest.mark.gpu
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

if INTERPRETED:
    from triton.runtime import interpreter

    def patch_lang_tensor(tensor, scope, original=interpreter._patch_lang_tensor):
        """Triton 3.6 calls int() on an array of one element, which NumPy 2.4 refuses: a loop's bound needs .item()."""
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


@pytest.fixture(autouse=True)
def poisoned():
    """Fill tensors from torch.empty with NaN, so that elements which no kernel wrote are found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape, dtype=torch.float32, scale=1.0):
    """Draw on the CPU, so that every machine tests the same numbers."""
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


def exact(tensor):
    """Convert to fp64 on the CPU, for the references."""
    return tensor.detach().double().cpu() if tensor is not None else None


def assert_as_close_as_torch(mine, torchs, truth):
    """Check that the error of `mine` against fp64 is at most torch's in the same dtype, plus a small constant."""
    assert (mine.shape, mine.dtype) == (torchs.shape, torchs.dtype)
    scale = truth.norm() + 1e-30
    error, allowed = ((exact(tensor) - truth).norm() / scale for tensor in (mine, torchs))
    allowed = allowed + torch.finfo(mine.dtype).eps / 16 + 5e-7
    assert error <= allowed, f"relative error {error:.2e}, allowed {allowed:.2e}"


def assert_within_roundings(mine, truth, absolute, roundings):
    """Check that sums in `mine` differ from `truth` by at most the worst case of fp32 rounding, and one to its dtype.

    A term of a sum is rounded at most `roundings` times, in any order of summation, and fewer times with FMAs. The
    error is at most roundings·eps·Σ|terms|, and half of it with rounding to nearest (Higham 2002, Accuracy and
    Stability of Numerical Algorithms, §3.1 and §4.2). Tensor cores truncate instead (Fasi et al. 2021, PeerJ Computer
    Science 7:e330), so the bound is not halved.

    Args:
        truth: fp64, on the CPU.
        absolute: Σ|terms|, likewise.
        roundings: a number, or a tensor that broadcasts to `truth`.
    """
    bound = roundings * torch.finfo(torch.float32).eps * absolute
    if mine.dtype != torch.float32:
        info = torch.finfo(mine.dtype)
        bound = bound + info.eps / 2 * (truth.abs() + bound).clamp(min=info.smallest_normal)
    error = (exact(mine) - truth).abs()
    assert (error <= bound).all(), f"error {error.max():.2e}, beyond its bound by up to {(error - bound).max():.2e}"
