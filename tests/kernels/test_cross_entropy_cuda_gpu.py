"""The CUDA cross-entropy against its reference and beside its Triton twin, at vocabularies that models have."""

import pytest
import torch
from parity import poisoned  # noqa: F401

from halfbyte.ops import cross_entropy as reference
from halfbyte.ops.cross_entropy import Objective

pytest.importorskip("triton")
from halfbyte.kernels.cuda import cross_entropy as cross_entropy_cuda
from halfbyte.kernels.triton import cross_entropy as losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < cross_entropy_cuda.CAPABILITY,
        reason="needs a Hopper GPU",
    ),
]
SIZES = [(1, 128_256), (300, 128_256), (300, 151_665), (133, 151_936), (270, 32_000), (270, 50_257)]
OBJECTIVES = {
    "plain": Objective(),
    "smooth": Objective(scale=0.5, temperature=0.7, label_smoothing=0.1, z_loss=1e-3, ignore_index=-1),
}


def example(rows, vocabulary, dtype=torch.bfloat16, ignore_index=-100):
    """Rows as `ops.losses` makes them, which begin at multiples of 16 logits."""
    wide = torch.randn(rows, -(-vocabulary // 16) * 16, device="cuda").mul_(4).to(dtype)
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    labels[1::3] = ignore_index
    labels[0] = vocabulary - 1
    return wide[:, :vocabulary], labels


@pytest.fixture
def calls(monkeypatch):
    """The answers of the CUDA path: True where it ran."""
    answers, original = [], losses.try_gradient
    monkeypatch.setattr(losses, "try_gradient", lambda *given: answers.append(original(*given)) or answers[-1])
    return answers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize(
    "shape", [(1, 128_256), (300, 128_256), (300, 151_665), (133, 151_936), (270, 32_000), (270, 50_257)], ids=str
)
def test_losses_and_gradient(calls, shape, dtype, objective):
    logits, labels = example(*shape, dtype, objective.ignore_index)
    truth = logits.float()  # on a GPU the reference computes in fp32
    true = reference.cross_entropy_.reference(truth, labels, objective, True, True)
    got = losses.cross_entropy_(logits, labels, objective, True, True)
    assert calls == [True]
    for mine, exact in zip(got, true, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)
    assert (logits.float() - truth).norm() <= (torch.finfo(dtype).eps / 2 + 1e-5) * truth.norm()
    assert not logits[labels == objective.ignore_index].any()


def test_as_triton(calls, monkeypatch):
    """Masked words, rows that are ignored, labels outside: the same zeros and the same NaN."""
    logits, labels = example(400, 128_256)
    labels[:4] = torch.tensor([-100, 128_256, -1, 2**40])
    logits[0], logits[5] = torch.nan, -torch.inf
    logits[200:, 100:128_000] = -torch.inf
    labels[200:300] = 5
    copy = logits.clone()
    got = losses.cross_entropy_(logits, labels, Objective(), True, True)
    monkeypatch.setattr(losses, "try_gradient", lambda *given: False)
    expected = losses.cross_entropy_(copy, labels, Objective(), True, True)
    assert calls == [True]
    assert got.loss[[0, 1, 2, 3, 5]].isnan().tolist() == [False, True, True, True, True]
    for mine, other in zip(got, expected, strict=True):  # summed in another order, entropies differ by 5e-6
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(logits, copy, rtol=2**-7, atol=1e-7, equal_nan=True)


def test_what_stays_with_triton(calls):
    for logits, objective in (
        (example(3, 128_256)[0], Objective(softcap=30.0)),
        (example(3, 128_256)[0], Objective(scale=-1.0)),
        (example(3, 128_256, torch.float32)[0], Objective()),
        (example(3, 151_936)[0][:, 1:], Objective()),
        (example(3, 262_144)[0], Objective()),
    ):
        losses.cross_entropy_(logits, torch.zeros(3, dtype=torch.int64, device="cuda"), objective, True, False)
    assert calls == [False] * 5


def test_graph_capture_and_determinism(calls):
    logits, labels = example(512, 128_256)
    work = logits.clone()

    def step():
        return losses.cross_entropy_(work.copy_(logits), labels, Objective(), True, True)

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
    assert calls == [True, True]
