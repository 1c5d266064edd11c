"""Compare the Triton cross-entropy with its reference at irregular sizes, on a GPU and in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.ops import ELSEWHERE
from halfbyte.ops import cross_entropy as reference
from halfbyte.ops.cross_entropy import Objective
from tests.helpers.parity import DEVICE, INTERPRETED, assert_as_close_as_torch, dtypes, exact, mark, poisoned, random  # noqa: F401

pytest.importorskip("triton")
from halfbyte.kernels.triton import cross_entropy as kernels

pytestmark = mark

SIZES = [(3, 2), (5, 7), (4, 515)]
if not INTERPRETED:
    SIZES = [(1, 2), (5, 7), (37, 515), (130, 8192), (65, 32_003), (70, 128_256), (9, 262_144)]
OBJECTIVES = {
    "plain": Objective(),
    "softcap": Objective(scale=0.5, softcap=3.0, temperature=0.7),
    "everything": Objective(scale=-1.5, softcap=5.0, label_smoothing=0.1, z_loss=1e-3),
    "smooth": Objective(temperature=2.0, label_smoothing=0.2, ignore_index=-1),
}
objectives = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


def example(rows, vocabulary, dtype, ignore_index=-100):
    labels = torch.randint(vocabulary, (rows,))
    labels[1::3] = ignore_index
    return random(rows, vocabulary, dtype=dtype, scale=4.0), labels.to(DEVICE)


def stock(logits, labels, objective, upstream=None):
    """Losses and the gradient of their sum, computed by torch in fp32 from logits in their dtype."""
    logits = logits.detach().clone().requires_grad_()
    z = logits.float() * objective.scale
    if objective.softcap is not None:
        z = objective.softcap * torch.tanh(z / objective.softcap)
    z = z / objective.temperature
    smoothing, ignore = objective.label_smoothing, objective.ignore_index
    loss = F.cross_entropy(z, labels, label_smoothing=smoothing, ignore_index=ignore, reduction="none")
    loss = loss + objective.z_loss * torch.logsumexp(z, -1).square() * (labels != ignore)
    gradient = torch.autograd.grad(loss, logits, torch.ones_like(loss) if upstream is None else upstream)[0]
    return loss.detach(), gradient


@dtypes
@objectives
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_losses_and_gradient(shape, dtype, objective):
    logits, labels = example(*shape, dtype, objective.ignore_index)
    truth_gradient = exact(logits)
    truth = reference.cross_entropy_.reference(truth_gradient, labels.cpu(), objective, True, True)
    torch_gradient = stock(logits, labels, objective)[1]
    got = kernels.cross_entropy_(logits, labels, objective, True, True)
    assert_as_close_as_torch(logits, torch_gradient, truth_gradient)
    for mine, true in zip(got, truth, strict=True):
        torch.testing.assert_close(exact(mine), true, rtol=3e-6, atol=3e-6)
    assert not logits[labels == objective.ignore_index].any()


@dtypes
@objectives
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradient_from_saved_statistics(dtype, objective, with_entropy):
    objective = objective._replace(label_smoothing=0.0, z_loss=0.0)
    logits, labels = example(*SIZES[2], dtype, objective.ignore_index)
    true_logits = exact(logits)
    upstream = random(len(logits))
    torch_gradient = stock(logits, labels, objective, -upstream)[1]
    grad_entropy = random(len(logits)) if with_entropy else None
    saved = kernels.cross_entropy_(logits, labels, objective, False, True)
    true_saved = reference.cross_entropy_.reference(true_logits, labels.cpu(), objective, False, True)
    assert torch.equal(exact(logits), true_logits)  # without a gradient they are not overwritten
    arguments = (exact(upstream), exact(grad_entropy))
    reference.log_probs_backward_.reference(true_logits, labels.cpu(), *true_saved[1:], *arguments, objective)
    kernels.log_probs_backward_(logits, labels, *saved[1:], upstream, grad_entropy, objective)
    if with_entropy:  # torch computes no entropy
        assert (exact(logits) - true_logits).norm() <= (2 * torch.finfo(dtype).eps + 2e-6) * true_logits.norm()
    else:
        assert_as_close_as_torch(logits, torch_gradient, true_logits)


@dtypes
@objectives
def test_gradient_of_a_slice_whose_label_is_in_another(dtype, objective):
    objective = objective._replace(label_smoothing=0.0, z_loss=0.0)
    logits, labels = example(*SIZES[2], dtype, objective.ignore_index)
    labels[::2] = ELSEWHERE
    labels[1] = SIZES[2][1]  # outside every slice
    truth, logsumexp, upstream = exact(logits), random(len(logits), scale=3.0) + 9, random(len(logits))
    arguments = (exact(upstream), None, objective)
    reference.log_probs_backward_.reference(truth, labels.cpu(), exact(logsumexp), None, *arguments)
    kernels.log_probs_backward_(logits, labels, logsumexp, None, upstream, None, objective)
    assert truth[1].isnan().all()
    assert truth[0].isfinite().all()
    tolerance = 2 * torch.finfo(dtype).eps + 2e-6
    torch.testing.assert_close(exact(logits), truth, rtol=tolerance, atol=tolerance / 8, equal_nan=True)


def test_rows_with_gaps_and_columns():
    """Rows with any stride are overwritten in place; other layouts through a copy."""
    for wide in (random(4, 40), random(40, 4).T):
        labels = torch.tensor([0, 22, -100, 7], device=DEVICE)
        part = wide[:, 3:26]
        expected, untouched = part.clone(), wide.clone()
        want = kernels.cross_entropy_(expected, labels, Objective(), True, False)
        got = kernels.cross_entropy_(part, labels, Objective(), True, False)
        assert torch.equal(part, expected)
        assert torch.equal(got.loss, want.loss)
        assert torch.equal(wide[:, :3], untouched[:, :3])
        assert torch.equal(wide[:, 26:], untouched[:, 26:])


@dtypes
@pytest.mark.parametrize("vocabulary", [515, 17_001, 7] + [50_257, 151_665] * (not INTERPRETED))
def test_rows_aligned_to_eight_logits(vocabulary, dtype):
    """An odd vocabulary in padded rows, as `ops.losses` makes them: equal results, and the padding is not written."""
    labels = torch.tensor([0, vocabulary - 1, -100, 3, 5], device=DEVICE)
    rows, behind = random(5, vocabulary, dtype=dtype, scale=4.0), -(-vocabulary // 16) * 16 - vocabulary
    wide = F.pad(rows, (0, behind), value=torch.nan)
    part = wide[:, :vocabulary]
    assert kernels._spacing(part, part.stride(0))[1]
    assert not kernels._spacing(rows, vocabulary)[1]
    got = kernels.cross_entropy_(part, labels, Objective(z_loss=1e-3), True, True)
    want = kernels.cross_entropy_(rows, labels, Objective(z_loss=1e-3), True, True)
    assert torch.equal(part, rows)
    for found, expected in zip(got, want, strict=True):  # alignment of the loads decides which thread adds what
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert wide[:, vocabulary:].isnan().all()


def test_labels_outside_and_ignored_rows():
    """The loss is NaN if a label is not in the vocabulary, and zero if a row is ignored, whatever it holds."""
    logits, _ = example(6, 300, torch.float32)
    labels = torch.tensor([300, -1, 2**40, -(2**40), -100, 299], device=DEVICE)
    logits[4] = torch.nan
    got = kernels.cross_entropy_(logits, labels, Objective(), True, True)
    assert got.loss.isnan().tolist() == [True] * 4 + [False] * 2
    assert logits[:4].isnan().all()
    assert logits[5].isfinite().all()
    assert not logits[4].any()
    assert [values[4].item() for values in got] == [0, 0, 0]


def test_infinite_logits():
    """Masked tokens have probability 0; a row of only -inf, or with +inf, gives NaN as in torch."""
    inf = torch.inf
    logits = random(4, 600)
    logits[0, :590] = -inf  # whole loads are masked
    logits[1, 10:] = -inf
    logits[2] = -inf
    logits[3, 5] = inf
    labels = torch.tensor([595, 3, 3, 3], device=DEVICE)
    torch_loss, torch_gradient = stock(logits, labels, Objective())
    true = reference.cross_entropy_.reference(exact(logits), labels.cpu(), Objective(), False, True)
    got = kernels.cross_entropy_(logits, labels, Objective(), True, True)
    torch.testing.assert_close(got.loss[:2], torch_loss[:2])
    torch.testing.assert_close(exact(got.entropy)[:2], true.entropy[:2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits[:2], torch_gradient[:2], rtol=1e-5, atol=1e-7)
    assert got.loss[2:].isfinite().any() == torch_loss[2:].isfinite().any()
    assert logits[2].isnan().all()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 9999.0, 0.0]], device=DEVICE)
    label = torch.tensor([2], device=DEVICE)
    torch_loss, torch_gradient = stock(logits, label, Objective())
    got = kernels.cross_entropy_(logits, label, Objective(), True, False)
    torch.testing.assert_close(got.loss, torch_loss, rtol=1e-3, atol=1e-3)  # fp32 represents 1e4 to 1e-3
    torch.testing.assert_close(logits, torch_gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(INTERPRETED, reason="no graphs in the interpreter")
def test_graph_capture_and_determinism():
    logits, labels = example(300, 50_257, torch.bfloat16)
    work = logits.clone()

    def step():
        return kernels.cross_entropy_(work.copy_(logits), labels, Objective(), True, True)

    expected, gradient = step(), work.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # it writes what the default stream reads
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(work, gradient)
        assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))


@pytest.mark.large(6)
@pytest.mark.skipif(INTERPRETED, reason="gigabytes")
def test_more_than_2_31_elements():
    rows = 2**31 // 128_256 + 3
    logits = torch.empty(rows, 128_256, dtype=torch.bfloat16, device=DEVICE).fill_(0.5)
    logits[-3:] = random(3, 128_256, dtype=torch.bfloat16)
    last, labels = logits[-3:].clone(), torch.arange(rows, device=DEVICE)
    got = kernels.cross_entropy_(logits, labels, Objective(), True, False)
    small = kernels.cross_entropy_(last, labels[-3:], Objective(), True, False)
    assert torch.equal(got.loss[-3:], small.loss)
    assert torch.equal(logits[-3:], last)
