"""The CUDA cross-entropy against its reference: on emulated warps, and on a GPU at vocabularies that models have."""

import pytest
import torch
from backends import cases, loaded
from emulated import needs_compiler
from parity import poisoned  # noqa: F401

from halfbyte.ops import cross_entropy as reference
from halfbyte.ops.cross_entropy import Objective, cross_entropy_

pytest.importorskip("triton")
from halfbyte.kernels.cuda import cross_entropy as cuda
from halfbyte.kernels.device import HOPPER_SHARED_BYTES
from halfbyte.kernels.triton import cross_entropy as triton

RUN = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Task *t) {
    launch(blocks, threads, bytes, [&] { cross_entropy(*t); });
}
"""
SMALL = (64, 2, 3)  # 512 logits a chunk
OBJECTIVES = {
    "plain": Objective(),
    "smooth": Objective(scale=0.5, temperature=0.7, label_smoothing=0.1, z_loss=1e-3, ignore_index=-1),
}
SIZES = [(1, 128_256), (300, 128_256), (300, 151_665), (133, 151_936), (270, 32_000), (270, 50_257)]


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "blocks_for", lambda vocabulary, _: cuda.Blocks(*SMALL))
    return loaded(cuda, "emulated", monkeypatch, tmp_path, RUN)


def run(emulated, logits, labels, objective, need_entropy):
    return emulated.gradient(logits, labels, objective, True, need_entropy)


def with_gaps(rows, vocabulary, dtype):
    """Rows with gaps between them, which stay, and labels of every kind."""
    wide = (torch.randn(rows, -(-vocabulary // 16) * 16 + 16) * 4).to(dtype)
    labels = torch.randint(vocabulary, (rows,))
    labels[1::4] = -100
    labels[0] = vocabulary - 1
    return wide, wide[:, :vocabulary], labels


@needs_compiler
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
def test_on_emulated_warps(emulated, rows, vocabulary, dtype, objective, need_entropy):
    wide, logits, labels = with_gaps(rows, vocabulary, dtype)
    before, truth = wide.clone(), logits.double()
    true = reference.cross_entropy_.reference(truth, labels, objective, True, need_entropy)
    got = run(emulated, logits, labels, objective, need_entropy)
    for mine, exact in zip(got, true, strict=True):
        if exact is not None:
            torch.testing.assert_close(mine.double(), exact, rtol=3e-6, atol=3e-6)
    assert (logits.double() - truth).norm() <= torch.finfo(dtype).eps / 2 * truth.norm()
    assert not logits[1::4].any()
    assert torch.equal(wide[:, vocabulary:], before[:, vocabulary:])


@needs_compiler
def test_what_is_no_number_and_what_is_no_word(emulated):
    inf = torch.inf
    _, logits, labels = with_gaps(9, 2600, torch.bfloat16)
    labels[:] = torch.tensor([2600, -1, 2**40, -100, 3, 2595, 3, 3, 3])
    logits[3] = torch.nan  # ignored
    logits[4, 10:] = -inf
    logits[5, :2590] = -inf
    logits[6] = -inf
    logits[7, 5] = inf
    logits[8, 300] = torch.nan
    true = logits.double()
    expected = reference.cross_entropy_.reference(true, labels, Objective(), True, True)
    got = run(emulated, logits, labels, Objective(), True)
    assert got.loss.isnan().tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert [values[3].item() for values in got] == [0, 0, 0]
    for mine, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(mine[4:6].double(), exact[4:6], rtol=1e-5, atol=1e-6)
    assert logits[[0, 1, 2, 6, 7, 8]].isnan().all(1).tolist() == [True, True, True, True, True, True]
    assert not logits[3].any()
    torch.testing.assert_close(logits[4:6].double(), true[4:6], rtol=2**-8, atol=1e-7)


@needs_compiler
def test_logits_that_grow_move_the_origin(emulated):
    _, logits, labels = with_gaps(3, 2600, torch.bfloat16)
    logits += torch.arange(2600).to(torch.bfloat16) / 8
    true = logits.double()
    expected = reference.cross_entropy_.reference(true, labels, Objective(), True, False)
    got = run(emulated, logits, labels, Objective(), False)
    torch.testing.assert_close(got.loss.double(), expected.loss, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(logits.double(), true, rtol=2**-7, atol=1e-7)


@needs_compiler
def test_shared_memory_is_what_blocks_are_chosen_by(emulated):
    blocks = emulated.Blocks(*SMALL)
    assert emulated._kernel(-1, blocks, 2600, True, False, False).size == blocks.shared_bytes(2600)


def test_which_vocabularies_fit():
    sizes = (8192, 32_000, 50_257, 128_256, 151_665, 151_936, 200_064, 262_144)
    found = {size: cuda.blocks_for(size, HOPPER_SHARED_BYTES) for size in sizes}
    assert [size for size in sizes if found[size]] == [32_000, 50_257, 128_256, 151_665, 151_936]
    assert [size for size in sizes if cuda.blocks_for(size, 99 * 1024)] == [32_000, 50_257]
    for size, blocks in found.items():
        if blocks:
            assert blocks.chunks(size) >= blocks.ahead
            assert blocks.shared_bytes(size) <= HOPPER_SHARED_BYTES
            assert blocks.kept * blocks.threads * 8 <= size  # what is kept in registers is whole


def example(rows, vocabulary, dtype=torch.bfloat16, ignore_index=-100):
    """Rows as `ops.losses` makes them, which begin at multiples of 16 logits."""
    wide = torch.randn(rows, -(-vocabulary // 16) * 16, device="cuda").mul_(4).to(dtype)
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    labels[1::3] = ignore_index
    labels[0] = vocabulary - 1
    return wide[:, :vocabulary], labels


@cases(
    ("shape", "dtype", "kind"),
    hopper=[
        (shape, dtype, kind) for shape in SIZES for dtype in (torch.bfloat16, torch.float16) for kind in OBJECTIVES
    ],
)
def test_losses_and_gradient(backend, shape, dtype, kind):
    objective = OBJECTIVES[kind]
    logits, labels = example(*shape, dtype, objective.ignore_index)
    truth = logits.float()  # on a GPU the reference computes in fp32
    true = reference.cross_entropy_.reference(truth, labels, objective, True, True)
    assert cuda.obstacle(logits, labels, objective, True, True) is None
    got = cuda.gradient(logits, labels, objective, True, True)
    for mine, exact in zip(got, true, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)
    assert (logits.float() - truth).norm() <= (torch.finfo(dtype).eps / 2 + 1e-5) * truth.norm()
    assert not logits[labels == objective.ignore_index].any()


@cases("vocabulary", hopper=[128_256])
def test_as_triton(backend, vocabulary):
    """Masked words, rows that are ignored, labels outside: the same zeros and the same NaN."""
    logits, labels = example(400, vocabulary)
    labels[:4] = torch.tensor([-100, vocabulary, -1, 2**40])
    logits[0], logits[5] = torch.nan, -torch.inf
    logits[200:, 100:128_000] = -torch.inf
    labels[200:300] = 5
    copy = logits.clone()
    got = cuda.gradient(logits, labels, Objective(), True, True)
    expected = triton.cross_entropy_(copy, labels, Objective(), True, True)
    assert got.loss[[0, 1, 2, 3, 5]].isnan().tolist() == [False, True, True, True, True]
    for mine, other in zip(got, expected, strict=True):  # summed in another order, entropies differ by 5e-6
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(logits, copy, rtol=2**-7, atol=1e-7, equal_nan=True)


@cases("rows", hopper=[3])
def test_what_stays_with_triton(backend, rows):
    for logits, objective in (
        (example(rows, 128_256)[0], Objective(softcap=30.0)),
        (example(rows, 128_256)[0], Objective(scale=-1.0)),
        (example(rows, 128_256, torch.float32)[0], Objective()),
        (example(rows, 151_936)[0][:, 1:], Objective()),
        (example(rows, 262_144)[0], Objective()),
    ):
        labels = torch.zeros(rows, dtype=torch.int64, device="cuda")
        assert cuda.obstacle(logits, labels, objective, True, False)
        cross_entropy_(logits, labels, objective, True, False)


@cases("rows", hopper=[512])
def test_graph_capture_and_determinism(backend, rows):
    logits, labels = example(rows, 128_256)
    work = logits.clone()

    def step():
        return cuda.gradient(work.copy_(logits), labels, Objective(), True, True)

    expected, gradient = step(), work.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(work, gradient)
        assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))
