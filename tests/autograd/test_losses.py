"""linear_cross_entropy as a differentiable function: gradients, compile and saved tensors."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.autograd.losses import linear_cross_entropy, linear_generalized_jsd, linear_log_probs
from halfbyte.ops import losses
from halfbyte.ops.linear_head import NO_ADAPTER, HeadAdapter, Needed, head_logits
from halfbyte.utils.errors import ModelError


def example(batch=3, length=11, width=17, vocabulary=41, dtype=torch.float32):
    hidden = torch.randn(batch, length, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (batch, length))
    labels[torch.rand(batch, length) < 0.3] = -100
    return hidden, weight, labels


def reference(hidden, weight, labels, softcap=None, scale=1.0, shift=True, reduction="sum"):
    logits = (hidden @ weight.T).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 0.5)])
def test_loss_and_gradients(shift, reduction, softcap, scale):
    hidden, weight, labels = example()
    keys = {"softcap": softcap, "scale": scale, "shift": shift, "reduction": reduction}
    mine, theirs = linear_cross_entropy(hidden, weight, labels, **keys), reference(hidden, weight, labels, **keys)
    torch.testing.assert_close(mine, theirs)
    for got, expected in zip(
        torch.autograd.grad(mine * 0.37, (hidden, weight)),
        torch.autograd.grad(theirs * 0.37, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def memory_of_nan():
    """New tensors hold NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_uninitialised_memory_does_not_reach_gradients(dtype):
    """oneDNN may read a matrix in bf16 beyond its last column; the buffer of logits is padded there."""
    hidden, weight, labels = example(vocabulary=101, width=32, dtype=dtype)
    loss = linear_cross_entropy(hidden, weight.detach(), labels)
    assert torch.autograd.grad(loss, hidden)[0].isfinite().all()


def test_frozen_head_saves_only_the_gradient_of_hidden():
    hidden, weight, labels = example(4, 64, 32, 5000)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda x: x):
        loss = linear_cross_entropy(hidden, weight.detach(), labels)
    assert sum(saved) == hidden.numel()
    loss.backward()
    assert hidden.grad.any()
    assert weight.grad is None


def full_log_probs(hidden, weight, labels, softcap=None, scale=1.0, temperature=1.0):
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = torch.log_softmax(logits / temperature, -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    chosen = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen * (labels != -100), entropy * (labels != -100)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("keys", [{}, {"softcap": 3.0, "scale": 0.5, "temperature": 0.7}, {"temperature": 1.3}])
@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("entropy", ["no", "detached", "trained"])
def test_log_probs(keys, trained_head, entropy):
    hidden, weight, labels = example()
    weight = weight if trained_head else weight.detach()
    mine, my_entropy = linear_log_probs(
        hidden, weight, labels, **keys, entropy=entropy == "detached", entropy_grad=entropy == "trained"
    )
    theirs, their_entropy = full_log_probs(hidden, weight, labels, **keys)
    torch.testing.assert_close(mine, theirs)
    weights = torch.randn_like(mine)  # one upstream gradient per token
    loss, expected = (mine * weights).sum(), (theirs * weights).sum()
    if entropy == "no":
        assert my_entropy is None
    else:
        torch.testing.assert_close(my_entropy, their_entropy)
        assert my_entropy.requires_grad == (entropy == "trained")
    if entropy == "trained":
        loss, expected = loss + (my_entropy * weights.sin()).sum(), expected + (their_entropy * weights.sin()).sum()
    inputs = (hidden, weight) if trained_head else (hidden,)
    for got, want in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_entropy_alone_is_differentiable():
    hidden, weight, labels = example()
    mine = linear_log_probs(hidden, weight, labels, entropy_grad=True)[1]
    theirs = full_log_probs(hidden, weight, labels)[1]
    for got, want in zip(
        torch.autograd.grad(mine.sum(), (hidden, weight)),
        torch.autograd.grad(theirs.sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_log_probs_save_only_tensors_of_hidden_width():
    hidden, weight, labels = example(4, 64, 32, 5000)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda x: x):
        linear_log_probs(hidden, weight.detach(), labels, entropy=True)
    assert sum(saved) == hidden.numel()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothing_and_z_loss(smoothing):
    hidden, weight, labels = example()
    mine = linear_cross_entropy(hidden, weight, labels, label_smoothing=smoothing, z_loss=0.01, shift=False)
    logits = hidden @ weight.T
    theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing, reduction="sum")
    theirs = theirs + 0.01 * (torch.logsumexp(logits, -1).square() * (labels != -100)).sum()
    torch.testing.assert_close(mine, theirs)
    for got, want in zip(
        torch.autograd.grad(mine, (hidden, weight)), torch.autograd.grad(theirs, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"softcap": -1.0}])
def test_invalid_options(wrong):
    with pytest.raises(ModelError, match=f"{next(iter(wrong))}"):
        linear_log_probs(*example(), **wrong)
    with pytest.raises(ModelError, match="label_smoothing is 1"):
        linear_cross_entropy(*example(), label_smoothing=1.0)


def test_nothing_trained_and_no_grad():
    hidden, weight, labels = example()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), reduction="mean")
    assert loss == 0
    assert not torch.autograd.grad(loss, hidden)[0].any()
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad


def test_autocast_computes_like_a_linear():
    hidden, weight, labels = example()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = linear_cross_entropy(hidden, weight, labels)
        theirs = reference(hidden, weight, labels)
    torch.testing.assert_close(mine, theirs)
    assert torch.autograd.grad(mine, hidden)[0].dtype == torch.float32


def adapted(batch=3, length=11, width=17, vocabulary=41, rank=5):
    """Inputs of a head in fp64, with all terms of an adapter; each requires a gradient."""
    hidden, weight, labels = example(batch, length, width, vocabulary, torch.float64)
    options = {"dtype": torch.float64, "requires_grad": True}
    inputs, factor = torch.randn(batch, length, rank, **options), torch.randn(vocabulary, rank, **options)
    columns, token_rows = torch.randn(vocabulary, **options), torch.randn(3, width, **options)
    return hidden, weight, labels, HeadAdapter(inputs, factor, columns, token_rows, torch.tensor([7, 40, 0]))


def full_logits(hidden, weight, adapter, softcap, scale):
    """The specification's logits [N, V]."""
    flat = adapter._replace(inputs=None if adapter.inputs is None else adapter.inputs.flatten(0, -2))
    logits = head_logits(hidden.flatten(0, -2), weight, flat) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def parts_of(adapter, names):
    """The adapter with these of its terms only."""
    return HeadAdapter(**{name: getattr(adapter, name) for name in names})


LORA, DORA, ROWS = ("inputs", "factor"), ("inputs", "factor", "columns"), ("token_rows", "tokens")
TERMS = {"lora": LORA, "dora": DORA, "rows": ROWS, "all": (*DORA, *ROWS)}


def assert_gradients(mine, expected, tensors):
    for got, wanted in zip(torch.autograd.grad(mine, tensors), torch.autograd.grad(expected, tensors), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 0.5)])
@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("terms", TERMS)
def test_terms_of_an_adapter(terms, accelerated, softcap, scale, monkeypatch):
    """Loss, log-probabilities and entropies, and their gradients, with every term; in chunks, with ignored rows."""
    hidden, weight, labels, adapter = adapted()
    adapter = parts_of(adapter, TERMS[terms])
    monkeypatch.setattr(losses, "chunk_rows", lambda *_: 5)
    monkeypatch.setattr(losses, "_is_cpu", lambda tensor: not accelerated)
    logits = full_logits(hidden, weight, adapter, softcap, scale)
    tensors = [hidden, weight, *(tensor for tensor in adapter[:-1] if tensor is not None)]
    options = {"adapter": adapter, "softcap": softcap, "scale": scale}
    mine = linear_cross_entropy(hidden, weight, labels, shift=False, label_smoothing=0.1, **options)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(mine, expected)
    assert_gradients(mine * 0.7, expected * 0.7, tensors)
    for frozen in (False, True):
        if frozen:  # gradients of rows only: the forward computes them
            adapter = HeadAdapter(adapter.inputs, *(None if x is None else x.detach() for x in adapter[1:]))
            options["adapter"], weight = adapter, weight.detach()
            tensors = [hidden, *([] if adapter.inputs is None else [adapter.inputs])]
        logits = full_logits(hidden, weight, adapter, softcap, scale)
        got, entropy = linear_log_probs(hidden, weight, labels, entropy=True, entropy_grad=not frozen, **options)
        distribution = torch.distributions.Categorical(logits=logits)
        trained = labels != -100
        wanted = distribution.log_prob(labels.flatten().clamp(min=0)).view(labels.shape) * trained
        wanted_entropy = distribution.entropy().view(labels.shape) * trained
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(entropy, wanted_entropy if not frozen else wanted_entropy.detach())
        upstream = torch.randn_like(got)
        mine, expected = (got * upstream).sum(), (wanted * upstream).sum()
        if not frozen:
            mine, expected = mine + entropy.square().sum(), expected + wanted_entropy.square().sum()
        assert_gradients(mine, expected, tensors)


def test_adapters_of_both_heads_of_a_distillation():
    hidden, weight, _, adapter = adapted(1)
    teacher_hidden, teacher_weight, _, teacher_adapter = adapted(1)
    options = {"adapter": adapter, "teacher_adapter": teacher_adapter}
    inputs = hidden[0], weight, teacher_hidden[0], teacher_weight
    mine, entropy = linear_generalized_jsd(*inputs, beta=0.0, head=(0.5, 2.0), **options)
    student = torch.log_softmax(full_logits(hidden, weight, adapter, 2.0, 0.5), -1)
    teacher = torch.log_softmax(full_logits(teacher_hidden, teacher_weight, teacher_adapter, None, 1.0), -1).detach()
    expected = F.kl_div(student, teacher, log_target=True, reduction="sum")
    torch.testing.assert_close(mine, expected)
    torch.testing.assert_close(entropy, -(student.exp() * student).sum())
    assert_gradients(mine, expected, [hidden, weight, *adapter[:-1]])


def test_ignored_rows_may_hold_nan(monkeypatch):
    hidden, weight, labels, adapter = adapted()
    monkeypatch.setattr(losses, "_is_cpu", lambda tensor: False)
    with torch.no_grad():
        hidden[labels == -100] = torch.nan
        adapter.inputs[labels == -100] = torch.nan
    loss = linear_cross_entropy(hidden, weight, labels, adapter=adapter, shift=False)
    for gradient in torch.autograd.grad(loss, [hidden, weight, *adapter[:-1]]):
        assert gradient.isfinite().all()


def test_a_gradient_of_an_fp32_factor_is_summed_in_fp32(monkeypatch):
    monkeypatch.setattr(losses, "chunk_rows", lambda *_: 8)
    hidden, weight, labels, adapter = adapted(2, 64)
    adapter = parts_of(adapter, LORA)
    exact = linear_cross_entropy(hidden, weight, labels, adapter=adapter)
    (expected,) = torch.autograd.grad(exact, adapter.factor)
    low = [tensor.detach().bfloat16() for tensor in (hidden, weight, adapter.inputs)]
    factor = adapter.factor.detach().float().requires_grad_()
    loss = linear_cross_entropy(low[0], low[1], labels, adapter=HeadAdapter(low[2], factor))
    (gradient,) = torch.autograd.grad(loss, factor)
    assert gradient.dtype is torch.float32
    assert not torch.equal(gradient.bfloat16().float(), gradient)
    assert (gradient.double() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("term", [*HeadAdapter._fields])
def test_misshapen_adapters_are_refused(term):
    hidden, weight, labels, adapter = adapted()
    wrong = getattr(adapter, term)[..., :-1]
    with pytest.raises(ModelError, match="adapter"):
        linear_cross_entropy(hidden, weight, labels, adapter=adapter._replace(**{term: wrong}))


@pytest.mark.slow
@pytest.mark.parametrize("trained_head", [False, True])
def test_compiles_without_a_graph_break(trained_head):
    hidden, weight, labels = example()
    weight = weight if trained_head else weight.detach()
    inputs = (hidden, weight) if trained_head else (hidden,)

    def step(hidden, weight, labels):
        return linear_cross_entropy(hidden * 2, weight, labels, softcap=5.0, reduction="mean")

    expected = step(hidden, weight, labels)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, weight, labels)
    torch.testing.assert_close(got, expected)
    for mine, eager in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(mine, eager)


def test_operator_is_well_formed():
    from halfbyte.autograd.losses import _linear_cross_entropy, _linear_log_probs

    hidden, weight, labels = example(1, 9, 8, 13)
    needed = Needed(hidden=True, weight=True)
    torch.library.opcheck(
        _linear_cross_entropy,
        (hidden[0].detach().requires_grad_(), weight, *NO_ADAPTER, labels[0], 1.0, 5.0, 0.1, 0.01, -100, needed),
    )
    hidden, weight, labels, (inputs, *terms) = adapted(1, 9, 8, 41, 3)
    tensors = hidden[0].detach().requires_grad_(), weight, inputs[0].detach().requires_grad_(), *terms, labels[0]
    needed = Needed(*[True] * 6)
    torch.library.opcheck(_linear_cross_entropy, (*tensors, 1.0, 5.0, 0.1, 0.01, -100, needed))
    torch.library.opcheck(_linear_log_probs, (*tensors, 1.0, None, 0.7, -100, True, Needed()))


@pytest.mark.gpu
def test_memory_over_the_inputs_on_a_gpu():
    """A chunk of logits and dX take at most 0.25 GiB, the limit of issue 3 at its size."""
    hidden = torch.randn(16_384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128_256, 4096, device="cuda", dtype=torch.bfloat16) / 64
    labels = torch.randint(128_256, (16_384,), device="cuda")
    for loss_of in (linear_cross_entropy, lambda *inputs: linear_log_probs(*inputs)[0].sum()):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(loss_of(hidden, weight, labels), hidden)
        assert torch.cuda.max_memory_allocated() - before <= 2**28


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("trained_head", [False, True])
def test_capture_and_compile_on_a_gpu(trained_head, adapter):
    """Eager without synchronization, a CUDA graph and inductor give the same results, with ignored labels."""
    hidden, weight, labels = example(2, 700, 256, 5003, torch.bfloat16)
    hidden, weight = (tensor.detach().cuda().requires_grad_() for tensor in (hidden, weight))
    labels = labels.cuda()
    inputs = (hidden, weight) if trained_head else (hidden,)
    head = weight if trained_head else weight.detach()
    terms = NO_ADAPTER
    if adapter:
        *trained, tokens = (tensor.detach().cuda() for tensor in adapted(2, 700, 256, 5003, 16)[-1])
        trained = [tensor.float().requires_grad_() for tensor in trained]
        terms, inputs = HeadAdapter(*trained, tokens), (*inputs, *trained)

    def step():
        loss = linear_cross_entropy(hidden, head, labels, adapter=terms, reduction="mean", softcap=30.0)
        log_probs, entropy = linear_log_probs(
            hidden, head, labels, adapter=terms, entropy_grad=trained_head, entropy=True
        )
        loss = loss + log_probs.exp().mean() + entropy.mean()
        return loss.detach(), *torch.autograd.grad(loss, inputs)

    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    for replayed, eager in zip(captured, expected, strict=True):
        torch.testing.assert_close(replayed, eager)

    def losses(hidden, weight, labels):
        log_probs, entropy = linear_log_probs(
            hidden, weight, labels, adapter=terms, entropy_grad=trained_head, entropy=True
        )
        loss = linear_cross_entropy(hidden, weight, labels, adapter=terms, reduction="mean", softcap=30.0)
        return loss + log_probs.exp().mean() + entropy.mean()

    loss = torch.compile(losses, fullgraph=True)(hidden, head, labels)
    # gradients of fp32 factors are sums of products rounded to bf16: the tolerance of bf16
    for compiled, eager in zip((loss.detach(), *torch.autograd.grad(loss, inputs)), expected, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1.6e-2, atol=1e-5)
