"""Compare adapters' gradients and an FP8 cast in one pass with the reference."""

import pytest
import torch

from halfbyte.formats.float8 import E4M3, E5M2
from halfbyte.ops.lora_read import lora_read
from halfbyte.utils import notices
from tests.helpers.kernel_backends import DEVICES, backends, cases, loaded
from tests.helpers.lora_glu_cases import assert_cast, slot_of
from tests.helpers.parity import assert_as_close_as_torch, exact, poisoned  # noqa: F401

pytest.importorskip("triton")
from halfbyte.kernels.cuda import lora_read as kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RUN = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Read *read) {
    launch(blocks, threads, bytes, [&] { bytes ? lora_read(*read) : finish(*read); });
}
"""
# Rows, widths and ranks (0: no adapter): an end inside a step and a strip; parts of one step and of several.
SIZES = [(37, (136,), (16,)), (50, (40, 264, 72), (8, 0, 16)), (16, (512, 256), (16, 8))]


def case(size, dtype, device, transposed=False):
    """Tensors, factors, scalings and low for a size; the first tensor is a slice of a wider one."""
    rows, widths, ranks = size

    def random(*shape, scale=1.0):
        return (torch.randn(*shape) * scale).to(dtype).to(device)

    tensors = [random(rows, width + 16 * (i == 0))[:, :width] for i, width in enumerate(widths)]
    pairs = zip(widths, ranks, strict=True)
    factors = [random(width, rank, scale=width**-0.5) if rank else None for width, rank in pairs]
    if transposed:
        factors = [factor.t().contiguous().t() for factor in factors]
    scalings = [1.5, 0.7, 2.0][: sum(rank > 0 for rank in ranks)]
    return tensors, factors, scalings, random(rows, sum(ranks), scale=rows**-0.5)


def check(found, tensors, factors, scalings, low, slot, columns):
    """Check that the error of v and the gradients is at most torch's, and that codes equal the slot's cast."""

    def reference(change):
        x, *more = map(change, tensors)
        changed = [None if factor is None else change(factor) for factor in factors]
        given = None if low is None else change(low)
        return lora_read.reference(x, more, changed, scalings, given, torch.float32, None, None)

    torchs, truths = reference(lambda tensor: tensor.cpu()), reference(lambda tensor: exact(tensor.cpu()))
    assert len(found.gradients) == len(truths.gradients)
    for mine, other, truth in zip(
        (found.low, *found.gradients), (torchs.low, *torchs.gradients), (truths.low, *truths.gradients), strict=True
    ):
        assert mine.shape == truth.shape
        assert_as_close_as_torch(mine.cpu(), other, truth)
    if slot is None:
        assert found.codes is None
    else:
        both = torch.cat(list(tensors), dim=1).float()
        assert_cast(found.codes, slot, both if columns is None else both * columns)


LARGE = [(2000, (4096, 1024, 1024), (16, 16, 16)), (1111, (4096,), (16,)), (700, (1000, 14336), (0, 8))]


@pytest.fixture
def run(backend, monkeypatch):
    """Call the kernel without a fallback, and compare its results."""
    loaded(kernels, backend, monkeypatch, RUN)
    if backend == "emulated":
        monkeypatch.setattr(kernels, "BLOCKS", kernels.Blocks(4, 1, 2))
    notices.reset_notices()

    def call(tensors, factors, scalings, low, slot=None, columns=None):
        x, *more = tensors
        assert kernels.obstacle(x, more, factors, scalings, low) is None
        found = lora_read.on("cuda")(x, more, factors, scalings, low, FP32, slot, columns)
        check(found, tensors, factors, scalings, low, slot, columns)
        return found

    yield call
    assert not notices.notices_so_far()


@cases(
    ("size", "dtype"),
    emulated=[(size, dtype) for size in SIZES for dtype in (BF16, FP16)],
    hopper=[(size, dtype) for size in SIZES + LARGE for dtype in (BF16, FP16)],
)
def test_reads(run, backend, size, dtype):
    run(*case(size, dtype, DEVICES[backend]))


@cases(
    ("size", "columns"),
    emulated=[(SIZES[1], False), (SIZES[1], True)],
    hopper=[(size, columns) for size in SIZES + LARGE for columns in (False, True)],
)
def test_reads_and_casts(run, backend, size, columns):
    device = DEVICES[backend]
    factor = torch.rand(sum(size[1]), device=device) if columns else None
    run(*case(size, BF16, device), slot_of(E5M2, 100.0, device), factor)


@cases(
    ("size", "dtype", "scale"),
    emulated=[(SIZES[0], BF16, 16.0), (SIZES[0], BF16, 300.0)],  # the second saturates
    hopper=[(size, dtype, 16.0) for size in (SIZES[0], LARGE[1]) for dtype in (BF16, FP16)],
)
def test_an_input(run, backend, size, dtype, scale):
    """In the forward pass there are no gradients, and the factor is Aᵀ."""
    tensors, factors, scalings, _ = case(size, dtype, DEVICES[backend], transposed=True)
    run(tensors, factors, scalings, None, slot_of(E4M3, scale, DEVICES[backend]))


@backends("emulated")
def test_nan_amax_counts_as_infinite(run, backend):
    tensors, factors, scalings, low = case(SIZES[0], BF16, "cpu")
    tensors[0][3, 7] = float("nan")
    slot = slot_of(E5M2, 1.0, "cpu")
    kernels.read(tensors[0], [], factors, scalings, low, FP32, slot, None)
    assert slot.newest == float("inf")


@backends("hopper")
def test_every_run_gives_the_same_bits(run, backend):
    arguments = case(LARGE[0], BF16, "cuda")
    first, second = run(*arguments), run(*arguments)
    assert torch.equal(first.low, second.low)
    assert all(map(torch.equal, first.gradients, second.gradients))
