"""Device, dtypes and tolerances of the Triton kernels' parity tests.

The same tests run on a GPU and, with TRITON_INTERPRET=1, on a CPU in Triton's interpreter. The interpreter's bf16 is
wrong, and a program takes it milliseconds, so it gets fp32, fp16 and small sizes.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]

# In the interpreter these tests are not the GPU's, and run wherever it starts them.
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
    """Fill what torch.empty returns with NaN, so that an element no kernel wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape, dtype=torch.float32, scale=1.0):
    """Drawn on the CPU: every machine tests the same numbers."""
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


def exact(tensor):
    """fp64 on the CPU: what the references compute the truth from."""
    return tensor.detach().double().cpu() if tensor is not None else None


def assert_as_close_as_torch(mine, torchs, truth):
    """Against fp64, `mine` errs no more than torch does in the same dtype, plus a constant far below 16 bits."""
    assert (mine.shape, mine.dtype) == (torchs.shape, torchs.dtype)
    scale = truth.norm() + 1e-30
    error, allowed = ((exact(tensor) - truth).norm() / scale for tensor in (mine, torchs))
    allowed = allowed + torch.finfo(mine.dtype).eps / 16 + 5e-7
    assert error <= allowed, f"relative error {error:.2e}, allowed {allowed:.2e}"


def assert_within_roundings(mine, truth, absolute, roundings):
    """Each sum of `mine` lies no farther from `truth` than fp32's roundings, and then that to its dtype, can take it.

    A term of a sum goes through at most `roundings` of them, whatever the order of the sum, and fewer where products
    and sums are contracted: together they err by at most roundings·eps·Σ|terms|, a product and a sum by half as much
    where they round to nearest (Higham 2002, Accuracy and Stability of Numerical Algorithms, §3.1 and §4.2). Tensor
    cores cut off instead (Fasi et al. 2021, PeerJ Computer Science 7:e330), hence the whole.

    Args:
        truth: fp64, of the CPU.
        absolute: Σ|terms|, likewise.
        roundings: a number, or a tensor of them that broadcasts to `truth`.
    """
    bound = roundings * torch.finfo(torch.float32).eps * absolute
    if mine.dtype != torch.float32:
        info = torch.finfo(mine.dtype)
        bound = bound + info.eps / 2 * (truth.abs() + bound).clamp(min=info.smallest_normal)
    error = (exact(mine) - truth).abs()
    assert (error <= bound).all(), f"error {error.max():.2e}, beyond its bound by up to {(error - bound).max():.2e}"
