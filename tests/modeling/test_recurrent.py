"""Replacements for transformers' convolutions and scans, called directly; in models: test_packing."""

import functools
import importlib
import inspect
import itertools

import pytest
import torch
import transformers

from halfbyte.data.collate import PackedCollator
from halfbyte.modeling import recurrent
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.patch import patch, unpatch
from halfbyte.modeling.recurrent import REPLACEMENTS, Documents, document_forward, documents_from
from tests.helpers.all_families import build
from tests.helpers.patch_models import tiny

LENGTHS = [7, 1, 12, 3, 17]  # of two rows of 20


def told(lengths=LENGTHS, empty=0):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return {"cu_seq_lens_q": torch.cat([ends, ends[-1:].expand(empty)]).to(torch.int32)}


def file_of(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def over_documents(function, tensors, tokens):
    """`function` of the batch's `tensors` [B, T, ...], a document at a time, without any of these helpers."""
    rows, length = tensors[0].shape[0], tensors[0].shape[tokens]
    flat = [x.movedim(tokens, 1).reshape(rows * length, *x.movedim(tokens, 1).shape[2:]) for x in tensors]
    outputs = []
    for begin, size in zip(torch.tensor([0, *LENGTHS]).cumsum(0).tolist(), LENGTHS, strict=False):
        out = function(*(x[None, begin : begin + size].movedim(1, tokens) for x in flat))
        outputs.append((out[0] if isinstance(out, tuple) else out).movedim(tokens, 1)[0])
    joined = torch.cat(outputs)
    return joined.view(rows, length, *joined.shape[1:]).movedim(1, tokens)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_begins_anew_with_each_document(activation, biased):
    convolution = file_of("qwen3_5").causal_conv1d_fn
    x, weight = torch.randn(2, 6, 20, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    bias = torch.randn(6, requires_grad=True) if biased else None
    expected = over_documents(lambda document: convolution(document, weight, bias, activation=activation), [x], -1)
    documents = documents_from(told(), 2, 20)
    isolated = REPLACEMENTS["causal_conv1d_fn"](convolution, documents, x, weight, bias, activation=activation)
    torch.testing.assert_close(isolated, expected)
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    upstream = torch.randn_like(isolated)
    for left, right in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (isolated, expected)), strict=True):
        torch.testing.assert_close(left, right)


def scan_of(name):
    """transformers' function as it is called, its tensors of tokens, and their dimension."""
    torch.manual_seed(0)
    heads = lambda *sizes: torch.randn(2, 20, *sizes, requires_grad=True)  # noqa: E731
    if name == "torch_chunk_gated_delta_rule":
        function = file_of("qwen3_5").torch_chunk_gated_delta_rule
        tensors = [heads(4, 8), heads(4, 8), heads(4, 6), -heads(4).abs().detach(), heads(4).sigmoid()]
        names = ("query", "key", "value", "g", "beta")
        return function, lambda f, *x: f(*x[:3], **dict(zip(names[3:], x[3:], strict=True)),
                                    use_qk_l2norm_in_kernel=True), tensors, 1  # fmt: skip
    if name == "mamba2_chunk_scan":
        function, rates = file_of("bamba").mamba2_chunk_scan, -torch.rand(4)
        tensors = [heads(4, 6), heads(4), heads(2, 5), heads(2, 5)]
        return function, lambda f, x, dt, b, c: f(x, dt, rates, b, c, chunk_size=8, D=torch.ones(4),
                                             dt_softplus=True), tensors, 1  # fmt: skip
    function, rates = file_of("jamba").mamba_selective_scan, -torch.rand(6, 5)
    tensors = [torch.randn(2, size, 20, requires_grad=True) for size in (6, 6, 5, 5, 6)]
    return function, lambda f, x, dt, b, c, z: f(x, dt, rates, b, c, z=z, delta_softplus=True), tensors, -1


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "mamba2_chunk_scan", "mamba_selective_scan"])
def test_a_scan_begins_anew_with_each_document(name):
    scan, call, tensors, tokens = scan_of(name)
    documents = documents_from(told(), 2, 20)
    expected = over_documents(lambda *document: call(scan, *document), tensors, tokens)
    isolated = call(lambda *args, **kwargs: REPLACEMENTS[name](scan, documents, *args, **kwargs), *tensors)
    isolated = isolated[0] if isinstance(isolated, tuple) else isolated
    torch.testing.assert_close(isolated, expected, rtol=1e-4, atol=1e-5)
    assert (isolated - call(scan, *tensors)[0 if name.startswith("torch") else ...]).abs().max() > 0.1  # it would leak
    inputs, upstream = [x for x in tensors if x.requires_grad], torch.randn_like(isolated)
    for left, right in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (isolated, expected)), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"])
def test_mamba2s_scan_over_full_rows(family):
    """Loss, gradients and cached generation of a patched model equal transformers' own."""
    model = build(family).train()
    ids = torch.randint(10, 200, (2, 70))  # more than one chunk

    def step():
        model.zero_grad()
        loss = causal_lm_loss(model, {"input_ids": ids, "labels": ids})[0]
        loss.backward()
        return float(loss), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    def answer():
        return model.eval().generate(ids[:1, :66], max_new_tokens=4, do_sample=False, eos_token_id=None).tolist()

    expected, expected_answer = step(), answer()
    report = patch(model.train())
    assert report.fused["Mamba-2 scan"] > 0
    loss, gradients = step()
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert gradients.keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (gradients[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name
    assert answer() == expected_answer
    unpatch(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_layers_of_one_batch_read_the_device_once():
    kwargs = told()
    assert documents_from(kwargs, 2, 20).layout is documents_from(kwargs, 2, 20).layout
    kwargs["cu_seq_lens_q"].copy_(told([3, 17, 1, 2, 17])["cu_seq_lens_q"])  # a graph's inputs are written in place
    assert documents_from(kwargs, 2, 20).layout.starts == (0, 3, 20, 21, 23, 40)


@pytest.mark.parametrize(
    "layer",
    ["qwen3_5.Qwen3_5GatedDeltaNet", "qwen3_next.Qwen3NextGatedDeltaNet", "kimi_linear.KimiLinearDeltaAttention",
     "granitemoehybrid.GraniteMoeHybridMambaLayer", "nemotron_h.NemotronHMamba2Mixer", "lfm2.Lfm2ShortConv",
     "jamba.JambaMambaMixer"],
)  # fmt: skip
def test_transformers_calls_these_functions_by_name(layer):
    """Another name in another version: the probe would find a leak, and every document would be unpacked."""
    package, name = layer.split(".")
    cls = getattr(file_of(package), name)
    called = recurrent._replaced_calls(cls)
    assert "causal_conv1d_fn" in called
    assert len(called) > 1 or name == "Lfm2ShortConv"
    forward = document_forward(cls, Documents(torch.tensor([0, 3, 9]), 9))
    assert list(inspect.signature(forward).parameters) == list(inspect.signature(cls.forward).parameters)
    assert document_forward(cls, None).__code__ is forward.__code__


@pytest.mark.parametrize("packed", [False, True])
def test_the_delta_rule_is_ours_where_no_kernel_computes_it(monkeypatch, packed):
    """The path of CPUs, and of flash-linear-attention 0.6 on Hopper with Triton 3.6, whose backward raises."""
    module = file_of("qwen3_5")
    layer = module.Qwen3_5GatedDeltaNet(transformers.Qwen3_5TextConfig(hidden_size=32, linear_num_key_heads=2,
                                                                       linear_num_value_heads=4), 0)  # fmt: skip
    documents = documents_from(told(), 2, 20) if packed else None
    x = torch.randn(2, 20, 32)
    transformers_own = module.torch_chunk_gated_delta_rule
    with monkeypatch.context() as patch:
        patch.setattr(recurrent, "_gated_delta_rule", lambda rule, *x, **keys: inspect.unwrap(rule)(*x, **keys))
        expected = document_forward(type(layer), documents)(layer, x)

    @functools.wraps(inspect.unwrap(transformers_own))
    def refusing(*args, **kwargs):
        raise RuntimeError("see #640")

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", refusing)
    replaced = document_forward(type(layer), documents)(layer, x)
    torch.testing.assert_close(replaced, expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(recurrent, "_uses_fla", lambda x: True)
    with pytest.raises(RuntimeError, match="640"):
        document_forward(type(layer), documents)(layer, x)


@pytest.mark.parametrize("heads", [2, 4])
def test_a_rule_with_states_is_transformers_own(heads):
    """States of a cache are passed in and returned, with fewer heads of keys than of values, too."""
    if heads < 4 and transformers.__version__ < "5.23":
        pytest.skip("this transformers repeats keys before it calls its rule")
    rule = file_of("qwen3_5").torch_chunk_gated_delta_rule
    query, key, value = torch.randn(2, 9, heads, 8), torch.randn(2, 9, heads, 8), torch.randn(2, 9, 4, 8)
    options = {"g": -torch.rand(2, 9, 4), "beta": torch.rand(2, 9, 4), "use_qk_l2norm_in_kernel": True}
    _, state = recurrent._gated_delta_rule(rule, query, key, value, **options, output_final_state=True)
    assert state.shape == (2, 4, 8, 8)
    twice = {name: tensor.repeat(1, 2, 1) if torch.is_tensor(tensor) else tensor for name, tensor in options.items()}
    full, none = recurrent._gated_delta_rule(rule, *(x.repeat(1, 2, 1, 1) for x in (query, key, value)), **twice)
    assert none is None
    behind, _ = recurrent._gated_delta_rule(rule, query, key, value, **options, initial_state=state)
    torch.testing.assert_close(full[:, 9:], behind, rtol=1e-4, atol=1e-5)


def of_documents(lengths, device):
    """A batch of two rows with documents of these lengths, as the run collates it."""
    pairs = zip(torch.randint(1, 101, (2, 160)).tolist(), lengths, strict=True)
    rows = [{"input_ids": row, "labels": row, "seq_lengths": list(sizes)} for row, sizes in pairs]
    collated = PackedCollator(0, fused=True)(rows)
    return {key: x.to(device) if torch.is_tensor(x) else x for key, x in collated.items()}


def of_each_document(step, batch, trained):
    """The sums of the loss and of the gradients over the batch's documents, each in a row of its own."""
    loss, gradients = 0.0, [torch.zeros_like(parameter) for parameter in trained]
    for begin, end in itertools.pairwise(batch["cu_seq_lens_q"].unique().tolist()):
        document = {key: batch[key].flatten()[begin:end][None] for key in ("input_ids", "labels")}
        if (document["labels"] >= 0).any():
            loss += float(step(document))
            gradients = [total + parameter.grad for total, parameter in zip(gradients, trained, strict=True)]
    return loss, gradients


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["Qwen3_5Text", "Qwen3Next"])
def test_packed_rows(name, device):
    """Loss and gradients of each document alone; on a GPU from a graph that was captured with documents elsewhere. In
    float32 transformers makes a mask there, and waits."""
    dtype, near = (torch.bfloat16, 0.05) if device == "cuda" else (torch.float32, 1e-3)
    model = tiny(name).to(device, dtype)
    patch(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step(batch):
        loss, _ = causal_lm_loss(model, batch)
        for parameter in trained:
            parameter.grad = None
        loss.backward()
        return loss

    first, second = (of_documents(tensor, device) for tensor in (((70, 90), (1, 29, 130)), ((150, 10), (33, 64, 63))))
    inputs = {key: x.clone() if torch.is_tensor(x) else x for key, x in first.items()}
    if device == "cuda":
        for _ in range(2):
            step(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(inputs)
        held = [parameter.grad for parameter in trained]
    for batch in (second, first):
        if device == "cuda":
            for key, x in batch.items():
                if torch.is_tensor(x):
                    inputs[key].copy_(x)
            graph.replay()
        else:
            loss = step(batch)
            held = [parameter.grad for parameter in trained]
        packed = float(loss), [tensor.clone() for tensor in held]
        expected, gradients = of_each_document(step, batch, trained)
        assert packed[0] == pytest.approx(expected, rel=near / 5)
        for mine, expected_gradient in zip(packed[1], gradients, strict=True):
            assert (mine - expected_gradient).norm() <= near * expected_gradient.norm() + near / 50
