"""linear_loss against the loss of full logits: values, gradients, memory, compile, checkpointing, wrong input."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfbyte.formats import from_spec
from halfbyte.functional import linear_loss
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError

ROWS, WIDTH, WORDS = 13, 7, 19  # odd, and no multiple of the chunks below


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)


def squared_error(logits, values):
    return (logits - values).square().sum(-1)


def divergence(logits, teacher):
    return F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)


def focal(logits, labels, gamma):
    loss = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-loss)) ** gamma * loss


def value_head(values, returns, weights):
    return weights * F.huber_loss(values[:, 0], returns, reduction="none", delta=0.5)


LOSSES = {
    "cross_entropy": (WORDS, cross_entropy),
    "squared_error": (WORDS, squared_error),
    "divergence": (WORDS, divergence),
    "focal": (WORDS, focal),
    "value_head": (1, value_head),
}


def example(name, shape=(ROWS,), dtype=torch.float64, width=WIDTH):
    """Hidden states, weight, bias, loss function and targets of one of `LOSSES`; all floats require gradients."""
    words, loss_fn = LOSSES[name]
    generator = torch.Generator().manual_seed(len(name))

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(words, shape, generator=generator)
    if name == "cross_entropy":
        labels[..., 3] = -100
    targets = {
        "cross_entropy": lambda: [labels],
        "squared_error": lambda: [normal(*shape, words)],
        "divergence": lambda: [normal(*shape, words)],
        "focal": lambda: [labels, normal(*shape).detach().abs().add(1).requires_grad_()],
        "value_head": lambda: [normal(*shape), normal(*shape)],
    }[name]()
    return normal(*shape, width), normal(words, width), normal(words), loss_fn, targets


def full(hidden, weight, bias, loss_fn, targets, reduction):
    shape = hidden.shape[:-1]
    targets = [target.reshape(-1, *target.shape[len(shape) :]) for target in targets]
    loss = loss_fn(F.linear(hidden, weight, bias).flatten(0, -2), *targets)
    return {"sum": loss.sum, "mean": loss.mean, "none": lambda: loss.view(shape)}[reduction]()


def assert_equal_gradients(mine, theirs, inputs, **tolerance):
    upstream = torch.linspace(0.3, 1.7, theirs.numel(), dtype=theirs.dtype).view(theirs.shape)
    torch.testing.assert_close(mine, theirs.to(mine.dtype), **tolerance)
    got = torch.autograd.grad(mine, inputs, upstream.to(mine.dtype))
    expected = torch.autograd.grad(theirs, inputs, upstream)
    for ours, reference in zip(got, expected, strict=True):
        assert reference.any()
        torch.testing.assert_close(ours, reference, **tolerance)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [1, 5, None])
def test_equals_the_loss_of_full_logits_in_fp64(name, reduction, chunk):
    hidden, weight, bias, loss_fn, targets = example(name)
    mine = linear_loss(hidden, weight, loss_fn, *targets, bias=bias, reduction=reduction, chunk=chunk)
    theirs = full(hidden, weight, bias, loss_fn, targets, reduction)
    inputs = [hidden, weight, bias, *(target for target in targets if target.requires_grad)]
    assert_equal_gradients(mine, theirs, inputs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("which", ["hidden", "weight", "bias", "target"])
def test_each_gradient_alone(which, reduction):
    hidden, weight, bias, loss_fn, targets = example("squared_error", (2, 5))
    named = {"hidden": hidden, "weight": weight, "bias": bias, "target": targets[0]}
    for name, tensor in named.items():
        tensor.requires_grad_(name == which)
    mine = linear_loss(hidden, weight, loss_fn, *targets, bias=bias, reduction=reduction, chunk=3)
    theirs = full(hidden, weight, bias, loss_fn, targets, reduction)
    assert mine.shape == theirs.shape
    assert_equal_gradients(mine, theirs, [named[which]], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trained_bias", [False, True])
def test_quantized_weight(reduction, trained_bias):
    hidden, weight, bias, loss_fn, targets = example("divergence", (3, 5), torch.float32, width=64)
    bias.requires_grad_(trained_bias)
    stored = QuantizedTensor.quantize(weight.detach(), from_spec("blockwise4:nf4:64:nested"))
    for held in (stored, torch.nn.Parameter(stored, requires_grad=False)):
        mine = linear_loss(hidden, held, loss_fn, *targets, bias=bias, reduction=reduction, chunk=4)
        theirs = full(hidden, stored.dequantize(), bias, loss_fn, targets, reduction)
        inputs = [hidden, *targets, *([bias] if trained_bias else [])]
        assert_equal_gradients(mine, theirs, inputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_autocast_computes_like_a_linear(reduction):
    hidden, weight, bias, loss_fn, targets = example("cross_entropy", dtype=torch.float32)
    seen = []

    def watched(logits, labels):
        seen.append((logits.dtype, torch.is_autocast_enabled("cpu")))
        return loss_fn(logits.float(), labels)

    with torch.autocast("cpu", torch.bfloat16):
        mine = linear_loss(hidden, weight, watched, *targets, bias=bias, reduction=reduction, chunk=5)
    assert mine.dtype == torch.float32
    inputs = [hidden, weight, bias]
    rounded = [tensor.detach().bfloat16().double().requires_grad_() for tensor in inputs]
    theirs = full(*rounded, loss_fn, targets, reduction)
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-2, atol=1e-2)
    upstream = torch.linspace(0.3, 1.7, theirs.numel()).view(theirs.shape)
    got, expected = torch.autograd.grad(mine, inputs, upstream), torch.autograd.grad(theirs, rounded, upstream.double())
    for ours, reference in zip(got, expected, strict=True):  # bf16 has 8 bits
        assert (ours - reference).norm() < 2**-7 * reference.norm()
    assert set(seen) == {(torch.bfloat16, True)}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reduction, reentrant):
    hidden, weight, bias, loss_fn, targets = example("squared_error")

    def loss_of(hidden, target):
        return linear_loss(hidden.tanh(), weight, loss_fn, target, bias=bias, reduction=reduction, chunk=5)

    mine = checkpoint(loss_of, hidden, *targets, use_reentrant=reentrant)
    theirs = full(hidden.tanh(), weight, bias, loss_fn, targets, reduction)
    for loss in (mine, theirs):
        loss.sum().backward()
    gradients = [tensor.grad for tensor in (hidden, weight, bias, *targets)]
    for tensor in (hidden, weight, bias, *targets):
        tensor.grad = None
    full(hidden.tanh(), weight, bias, loss_fn, targets, reduction).sum().backward()
    for both, tensor in zip(gradients, (hidden, weight, bias, *targets), strict=True):
        torch.testing.assert_close(both, 2 * tensor.grad)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("weight_is", ["trained", "frozen", "quantized"])
def test_compiles_without_a_graph_break(reduction, weight_is):
    hidden, weight, bias, loss_fn, targets = example("divergence", (3, 5), torch.float32, width=64)
    temperature = torch.tensor(1.5)  # a tensor that the loss function reads from its closure
    if weight_is != "trained":
        weight, bias = weight.detach(), bias.detach()
    dense = weight
    if weight_is == "quantized":
        weight = QuantizedTensor.quantize(weight, from_spec("blockwise4:nf4:64:nested"))
        dense = weight.dequantize()

    def softer(logits, teacher):
        return loss_fn(logits / temperature, teacher)

    def step(hidden, weight, bias, target):
        return linear_loss(hidden * 2, weight, softer, target, bias=bias, reduction=reduction, chunk=4)

    mine = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, weight, bias, *targets)
    theirs = full(hidden * 2, dense, bias, softer, targets, reduction)
    inputs = [hidden, *targets, *([weight, bias] if weight_is == "trained" else [])]
    assert_equal_gradients(mine, theirs, inputs, rtol=1e-4, atol=1e-5)


class Largest(TorchDispatchMode):
    """Record the most elements of any tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        sizes = [tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trained", [False, True])
def test_no_operation_makes_more_than_a_chunk_of_logits(reduction, trained):
    rows, width, words, chunk = 400, 8, 900, 16
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(words, width, requires_grad=trained)
    labels = torch.randint(words, (rows,))
    saved = []
    with (
        Largest() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda x: x),
    ):
        loss = linear_loss(hidden, weight, cross_entropy, labels, reduction=reduction, chunk=chunk)
        # Those of the loss function too: they are released with their chunk, and none is larger than it.
        assert max(saved) <= chunk * (words + 15)
        loss.sum().backward()
    assert hidden.grad.any()
    assert largest.elements <= chunk * (words + 15)  # a buffer's rows are padded to a multiple of 16


def test_saves_only_the_gradient_of_hidden_under_a_frozen_head():
    hidden, weight, _, loss_fn, targets = example("cross_entropy")
    for reduction in ("mean", "none"):
        loss = linear_loss(hidden, weight.detach(), loss_fn, *targets, reduction=reduction, chunk=5)
        node = loss.grad_fn
        while not hasattr(node, "saved_tensors"):
            node = node.next_functions[0][0]
        assert [tensor.shape for tensor in node.saved_tensors] == [hidden.shape]


def test_without_gradients():
    hidden, weight, bias, loss_fn, targets = example("focal")
    with torch.no_grad():
        loss = linear_loss(hidden, weight, loss_fn, *targets, bias=bias, chunk=5)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, full(hidden, weight, bias, loss_fn, targets, "mean").detach())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda logits, values: (logits - values).square(),  # [n, V]
        lambda logits, values: (logits - values).square().sum(-1, keepdim=True),  # [n, 1]
        lambda logits, values: (logits - values).square().sum(-1).detach(),
        lambda logits, values: logits.argmax(-1),
        lambda logits, values: 1.0,
        lambda logits, values: None,
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_results_that_are_no_losses(wrong, reduction):
    hidden, weight, _, _, targets = example("squared_error")
    with pytest.raises(ModelError):
        linear_loss(hidden, weight.detach(), wrong, *targets, reduction=reduction, chunk=5)


def masked_mean(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses.sum() / (labels >= 0).sum().clamp(min=1)


@pytest.mark.parametrize("mean", [F.cross_entropy, masked_mean])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("trained", [True, False])
def test_a_mean_of_a_chunk_is_refused(mean, reduction, trained):
    """Also where the first chunk has no labels, as in a prompt."""
    hidden, weight, _, _, [labels] = example("cross_entropy", (200,))
    labels[:100] = -100
    with torch.set_grad_enabled(trained), pytest.raises(ModelError):
        linear_loss(hidden, weight, mean, labels, reduction=reduction, chunk=80)


@pytest.mark.parametrize(
    "change",
    [
        {"reduction": "average"},
        {"chunk": 0},
        {"hidden": torch.zeros(ROWS, WIDTH + 1)},
        {"weight": torch.zeros(WIDTH)},
        {"bias": torch.zeros(WORDS + 1)},
        {"target": torch.zeros(ROWS - 1, WORDS)},
        {"target": 0.5},
    ],
)
def test_wrong_arguments(change):
    hidden, weight, _, loss_fn, targets = example("squared_error")
    keys = {"hidden": hidden, "weight": weight, "target": targets[0]} | change
    hidden, weight, target = (keys.pop(name) for name in ("hidden", "weight", "target"))
    with pytest.raises(ModelError):
        linear_loss(hidden, weight, loss_fn, target, **keys)


@pytest.mark.gpu
@pytest.mark.large(8)
def test_memory_on_a_gpu():
    """16,384 rows of 128,256 logits take at most 1/8 of their bf16 bytes."""
    rows, width, words = 16_384, 4_096, 128_256
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(words, width, device="cuda", dtype=torch.bfloat16) / width**0.5
    labels = torch.randint(words, (rows,), device="cuda")

    def loss_fn(logits, labels):
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    compiled = torch.compile(loss_fn, fullgraph=True, dynamic=False)
    for function, chunk in ((loss_fn, None), (compiled, 512)):
        for _ in range(2):  # the first compiles
            hidden.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            linear_loss(hidden, weight, function, labels, chunk=chunk).backward()
        assert torch.cuda.max_memory_allocated() - before <= rows * words * 2 / 8
