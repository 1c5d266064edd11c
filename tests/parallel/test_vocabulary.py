"""Head and embedding sharded by vocabulary equal those of one process."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.autograd.losses import linear_cross_entropy, linear_log_probs
from halfbyte.generation import generate
from halfbyte.mesh.mesh import Mesh
from halfbyte.mesh.sharded_vocabulary import Vocabulary
from halfbyte.modeling.head import causal_lm_loss, shard_vocabulary, token_log_probs, vocabulary_unsupported_reason
from halfbyte.ops import IGNORE_INDEX
from halfbyte.utils.errors import HalfbyteError, ModelError
from tests.helpers.patch_models import batch, tiny

pytestmark = pytest.mark.dist

WIDTH = 24
CAPPED = {"softcap": 3.0, "scale": 0.5}


def example(vocabulary, tokens, seed, dtype=torch.float32):
    """Return a head, and for each rank hidden states and labels, a third of them ignored."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, WIDTH, generator=random, dtype=dtype)
    hidden = [torch.randn(n, WIDTH, generator=random, dtype=dtype) for n in tokens]
    labels = [torch.randint(vocabulary, (n,), generator=random) for n in tokens]
    for each in labels:
        each[1::3] = IGNORE_INDEX
    return weight, hidden, labels


def divided(mesh, axes, vocabulary, weight):
    over = Vocabulary.over(mesh, axes, vocabulary)
    return over, over.local_rows(weight)


def loss_and_gradient(mesh, axes, vocabulary, tokens, dtype, how):
    over, weight = divided(mesh, axes, vocabulary, example(vocabulary, tokens, 0, dtype)[0])
    _, hidden, labels = example(vocabulary, tokens, 0, dtype)
    own = mesh.coordinate(*(axis for axis in axes if axis != "tensor"))
    hidden = hidden[own].requires_grad_()
    loss = over.cross_entropy(hidden, weight, labels[own], **how)
    (loss / 7).backward()
    with torch.no_grad():
        assert over.cross_entropy(hidden, weight, labels[own], **how) == loss
        log_probs, likeliest = over.log_probs_and_argmax(hidden, weight, labels[own], **how)
        products = over.logits(hidden, weight)
    again = hidden.detach().requires_grad_()
    weighed = over.log_probs(again, weight, labels[own], temperature=0.7, **how)
    (weighed * weights_of(labels[own])).sum().backward()
    found = weighed.detach(), again.grad
    return own, len(weight), loss.detach(), hidden.grad, log_probs, likeliest, products, found


def weights_of(labels):
    """Return a different factor for each token's log-probability."""
    return torch.linspace(-1.0, 2.0, len(labels))


def assert_as_one(results, vocabulary, tokens, how, dtype=torch.float32):
    weight, hidden, labels = example(vocabulary, tokens, 0, dtype)
    assert sum(result[1] for result in results) == vocabulary
    for own, _, loss, grad, log_probs, likeliest, products, weighed in results:
        x, y = hidden[own].clone().requires_grad_(), labels[own]
        expected = linear_cross_entropy(x, weight, y, shift=False, **how)
        (expected / 7).backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad, x.grad, rtol=1e-5, atol=1e-5 * x.grad.abs().max().item() if len(x) else 0)
        with torch.no_grad():
            torch.testing.assert_close(log_probs, linear_log_probs(x, weight, y, **how)[0], rtol=1e-5, atol=1e-5)
            logits = x @ weight.T
        torch.testing.assert_close(products, logits, rtol=1e-5, atol=1e-5)
        x.grad = None
        one = linear_log_probs(x, weight, y, temperature=0.7, **how)[0]
        (one * weights_of(y)).sum().backward()
        torch.testing.assert_close(weighed[0], one.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weighed[1], x.grad, rtol=1e-5, atol=2e-5)
        trained = y != IGNORE_INDEX
        assert torch.equal(likeliest[trained], (logits.argmax(-1) == y)[trained])


@pytest.mark.parametrize("how", [{}, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("tokens", [(40, 40), (37, 5), (0, 9), (1, 0), (0, 0)], ids=str)
def test_ranks_with_different_tokens_equal_one_process(two, tokens, how):
    for vocabulary in (101, 32, 3):
        results = two.run(loss_and_gradient, ("shard",), vocabulary, tokens, torch.float32, how, layout={"shard": 2})
        assert_as_one(results, vocabulary, tokens, how)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"shard": 4}, {"shard": 2, "tensor": 2}, {"shard": 2, "context": 2}], ids=str)
def test_four_processes_equal_one(four, layout):
    axes, tokens = tuple(layout), (13, 40, 2, 9)
    results = four.run(loss_and_gradient, axes, 3203, tokens, torch.float32, CAPPED, layout=layout)
    assert sorted({result[0] for result in results}) == list(range(4 // layout.get("tensor", 1)))
    assert_as_one(results, 3203, tokens, CAPPED)


def looked_up(mesh, axes, tokens, dtype):
    random = torch.Generator().manual_seed(1)
    table = torch.randn(101, WIDTH, generator=random).to(dtype)
    over, rows = divided(mesh, axes, 101, table)
    own = mesh.coordinate("shard")
    ids = [torch.randint(101, (2, n), generator=random) for n in tokens][own]
    return torch.equal(over.embed(ids, lambda local: F.embedding(local, rows)), table[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embedding_is_exact(two, four, dtype):
    assert two.run(looked_up, ("shard",), (7, 3), dtype, layout={"shard": 2}) == [True] * 2
    assert two.run(looked_up, ("tensor",), (7,), dtype, layout={"tensor": 2}) == [True] * 2
    axes = ("shard", "tensor")
    assert four.run(looked_up, axes, (7, 0), dtype, layout={"shard": 2, "tensor": 2}) == [True] * 4


def with_label(mesh, label):
    over, weight = divided(mesh, ("shard",), 101, torch.randn(101, WIDTH))
    labels = torch.tensor([3, label if mesh.rank else 5])
    with pytest.raises(HalfbyteError, match=rf"label {label} .*101"):
        over.cross_entropy(torch.randn(2, WIDTH), weight, labels)


@pytest.mark.parametrize("label", [101, -1])
def test_label_outside_raises_on_all_ranks(two, label):
    two.run(with_label, label, layout={"shard": 2})


def trained(mesh):
    over, weight = divided(mesh, ("shard",), 101, torch.randn(101, WIDTH))
    with pytest.raises(ModelError):
        over.cross_entropy(torch.randn(2, WIDTH), weight.requires_grad_(), torch.tensor([3, 5]))


def test_a_trained_head_is_refused(two):
    two.run(trained, layout={"shard": 2})


# ---- models


def of_a_model(family, tied, rows, mesh=None, axes=()):
    """Return loss, adapter gradients and log-probabilities for `rows` of a batch, and answers for all (as in a run)."""
    torch.manual_seed(3)
    model = tiny(family, shape={"tie_word_embeddings": tied})
    whole = batch()
    inputs = {name: value[rows] for name, value in whole.items()}
    if mesh is not None:
        head = model.get_base_model().lm_head
        shard_vocabulary(model, mesh, axes)
        assert len(head.weight) < 101
        assert (head.weight is model.get_input_embeddings().weight) == tied
        assert "lm_head.weight" not in {name for name, p in model.named_parameters() if p.requires_grad}
    loss, tokens = causal_lm_loss(model, inputs)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        model.eval()
        log_probs, likeliest = token_log_probs(model, {"input_ids": inputs["input_ids"]}, inputs["labels"])
        logits = model(input_ids=inputs["input_ids"]).logits
    answers = generate(model, whole["input_ids"][:, :5].tolist(), max_new_tokens=4, stops=[])
    return loss.detach(), tokens, grads, log_probs, likeliest, logits, answers


def divided_model(mesh, family, tied, axes):
    rows = slice(mesh.coordinate("shard"), None, mesh.degree("shard"))
    loss, tokens, grads, *rest = of_a_model(family, tied, rows, mesh, axes)
    return (
        mesh.sum(loss, ("shard",)),
        mesh.sum(tokens, ("shard",)),
        {n: mesh.sum(g, ("shard",)) for n, g in grads.items()},
        *rest,
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("axis", ["shard", "tensor"])
@pytest.mark.parametrize(
    ("family", "tied"), [("Llama", False), ("Llama", True), ("Gemma2", True), ("Gemma3Text", True)]
)
def test_models_with_a_sharded_vocabulary_equal_one_process(two, family, tied, axis):
    ways = 2 if axis == "shard" else 1
    results = two.run(divided_model, family, tied, (axis,), layout={axis: 2})
    loss, tokens, grads, *_ = of_a_model(family, tied, slice(None))
    for rank, found in enumerate(results):
        torch.testing.assert_close(found[0], loss, rtol=1e-6, atol=0)
        assert found[1] == tokens
        for name, grad in grads.items():
            torch.testing.assert_close(found[2][name], grad, rtol=1e-5, atol=1e-5 * grad.abs().max().item(), msg=name)
        *_, log_probs, likeliest, logits, answers = of_a_model(family, tied, slice(rank % ways, None, ways))
        torch.testing.assert_close(found[3], log_probs, rtol=1e-5, atol=1e-5)
        assert torch.equal(found[4], likeliest)
        torch.testing.assert_close(found[5], logits, rtol=1e-4, atol=1e-5)
        assert found[6] == answers


def test_unsupported_heads_are_refused():
    """The reason names the head, and nothing is changed."""
    for trained in (["lm_head"], ["embed_tokens"]):
        assert "ModulesToSaveWrapper" in vocabulary_unsupported_reason(tiny("Llama", modules_to_save=trained))
    assert "its head has an adapter" in vocabulary_unsupported_reason(tiny("Llama", target_modules=["lm_head"]))
    model = tiny("Llama")
    assert vocabulary_unsupported_reason(model) is None
    model.get_base_model().lm_head.weight.requires_grad_()
    assert "trained" in vocabulary_unsupported_reason(model)
    before = dict(model.named_parameters())
    with pytest.raises(ModelError):
        shard_vocabulary(model, Mesh(), ("shard",))
    assert all(p is before[name] for name, p in model.named_parameters())
