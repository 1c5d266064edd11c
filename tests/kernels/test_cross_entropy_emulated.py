"""The CUDA cross-entropy without a GPU: its own code, compiled for the CPU against emulated warps."""

import pytest
import torch
from emulated import emulate, needs_compiler

from halfbyte.ops import cross_entropy as reference
from halfbyte.ops.cross_entropy import Objective, RowLosses

pytest.importorskip("triton")  # whose launcher's arithmetic it shares
pytestmark = needs_compiler
RUN = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Task *t) {
    launch(blocks, threads, bytes, [&] { cross_entropy(*t); });
}
"""
SMALL = (64, 2, 3)  # 512 logits a chunk


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    from halfbyte.kernels.cuda import cross_entropy as cross_entropy_cuda

    monkeypatch.setattr(cross_entropy_cuda, "blocks_for", lambda vocabulary, _: cross_entropy_cuda.Blocks(*SMALL))
    monkeypatch.setattr(cross_entropy_cuda, "takes", lambda *arguments: True)
    return emulate(cross_entropy_cuda, monkeypatch, tmp_path, RUN)


def run(cuda, logits, labels, objective, need_entropy):
    n = len(logits)
    losses = RowLosses(*[torch.full((n,), torch.nan) for _ in range(2 + need_entropy)], *[None] * (not need_entropy))
    assert cuda.try_gradient(logits, labels, objective, logits.stride(0), losses)
    return losses


def example(rows, vocabulary, dtype):
    """Rows with gaps between them, which stay, and labels of every kind."""
    wide = (torch.randn(rows, -(-vocabulary // 16) * 16 + 16) * 4).to(dtype)
    labels = torch.randint(vocabulary, (rows,))
    labels[1::4] = -100
    labels[0] = vocabulary - 1
    return wide, wide[:, :vocabulary], labels


@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype", "objective", "need_entropy"),
    [
        (
            8,
            2561,
            torch.bfloat16,
            Objective(),
            False,
        ),  # the fewest chunks; 3, 3 and 2 rows for three blocks
        (2, 5000, torch.float16, Objective(0.5, None, 0.7), False),  # a block has nothing
        (7, 4608, torch.float16, Objective(2.0, None, 1.0, 0.1, 1e-3), True),  # whole chunks
        (10, 4099, torch.bfloat16, Objective(z_loss=1e-2), True),
    ],
    ids=str,
)
def test_losses_and_gradient(cuda, rows, vocabulary, dtype, objective, need_entropy):
    wide, logits, labels = example(rows, vocabulary, dtype)
    before, truth = wide.clone(), logits.double()
    true = reference.cross_entropy_.reference(truth, labels, objective, True, need_entropy)
    got = run(cuda, logits, labels, objective, need_entropy)
    for mine, exact in zip(got, true, strict=True):
        if exact is not None:
            torch.testing.assert_close(mine.double(), exact, rtol=3e-6, atol=3e-6)
    assert (logits.double() - truth).norm() <= torch.finfo(dtype).eps / 2 * truth.norm()
    assert not logits[1::4].any()
    assert torch.equal(wide[:, vocabulary:], before[:, vocabulary:])


def test_what_is_no_number_and_what_is_no_word(cuda):
    inf = torch.inf
    _, logits, labels = example(9, 2600, torch.bfloat16)
    labels[:] = torch.tensor([2600, -1, 2**40, -100, 3, 2595, 3, 3, 3])
    logits[3] = torch.nan  # ignored
    logits[4, 10:] = -inf
    logits[5, :2590] = -inf
    logits[6] = -inf
    logits[7, 5] = inf
    logits[8, 300] = torch.nan
    true = logits.double()
    expected = reference.cross_entropy_.reference(true, labels, Objective(), True, True)
    got = run(cuda, logits, labels, Objective(), True)
    assert got.loss.isnan().tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert [values[3].item() for values in got] == [0, 0, 0]
    for mine, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(mine[4:6].double(), exact[4:6], rtol=1e-5, atol=1e-6)
    assert logits[[0, 1, 2, 6, 7, 8]].isnan().all(1).tolist() == [True, True, True, True, True, True]
    assert not logits[3].any()
    torch.testing.assert_close(logits[4:6].double(), true[4:6], rtol=2**-8, atol=1e-7)


def test_logits_that_grow_move_the_origin(cuda):
    _, logits, labels = example(3, 2600, torch.bfloat16)
    logits += torch.arange(2600).to(torch.bfloat16) / 8
    true = logits.double()
    expected = reference.cross_entropy_.reference(true, labels, Objective(), True, False)
    got = run(cuda, logits, labels, Objective(), False)
    torch.testing.assert_close(got.loss.double(), expected.loss, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(logits.double(), true, rtol=2**-7, atol=1e-7)


def test_shared_memory_is_what_blocks_are_chosen_by(cuda):
    blocks = cuda.Blocks(*SMALL)
    assert cuda._kernel(-1, blocks, 2600, True, False, False).size == blocks.shared_bytes(2600)


def test_which_vocabularies_fit():
    from halfbyte.kernels.cuda.cross_entropy import blocks_for
    from halfbyte.kernels.device import HOPPER_SHARED_BYTES

    sizes = (8192, 32_000, 50_257, 128_256, 151_665, 151_936, 200_064, 262_144)
    found = {size: blocks_for(size, HOPPER_SHARED_BYTES) for size in sizes}
    assert [size for size in sizes if found[size]] == [32_000, 50_257, 128_256, 151_665, 151_936]
    assert [size for size in sizes if blocks_for(size, 99 * 1024)] == [32_000, 50_257]
    for size, blocks in found.items():
        if blocks:
            assert blocks.chunks(size) >= blocks.ahead
            assert blocks.shared_bytes(size) <= HOPPER_SHARED_BYTES
            assert blocks.kept * blocks.threads * 8 <= size  # what is kept in registers is whole
