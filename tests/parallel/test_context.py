"""Context parallelism: losses, gradients and files on several ranks equal those of one process."""

import json
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import transformers

from halfbyte.autograd import attention as causal
from halfbyte.config import Parallel, Sliced
from halfbyte.config import layouts as support
from halfbyte.data.collate import PackedCollator
from halfbyte.mesh.mesh import Mesh
from halfbyte.mesh.reduction import sum_gradients
from halfbyte.modeling import attention
from halfbyte.modeling import tiny_model as tiny_models
from halfbyte.modeling.embedding_noise import noisy_embeddings
from halfbyte.modeling.head import backbone_inputs, causal_lm_loss
from halfbyte.modeling.layer import causal_lm_of
from halfbyte.modeling.patch import patch
from halfbyte.parallel.context import check_context_parallel, context_parallel, context_shard
from halfbyte.train import planning
from halfbyte.train.preflight import prepare_run
from halfbyte.utils.errors import ConfigError
from tests.helpers.patch_models import loop_over_documents, tiny
from tests.helpers.rank_runs import Left, configured, run, trains, write_place

pytestmark = pytest.mark.dist

LENGTH = 26  # of a row, which two ranks divide and four do not; windows are of 8
DOCUMENTS = (5, LENGTH - 5), (15, 3, 1, LENGTH - 19)  # of two rows


def batch(packed=False, changed=()):
    """Return two sequences; the tokens of the documents in `changed`, numbered over both, differ."""
    tokens = torch.randint(1, 100, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    bounds = [bound for row in DOCUMENTS for bound in row]
    for document, piece in enumerate(tokens.view(-1).split(bounds)):
        piece += int(document in changed)
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    inputs["labels"][0, : LENGTH // 3] = -100
    if packed:
        inputs["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
        inputs["labels"][inputs["position_ids"] == 0] = -100
    return inputs


def padded():
    """Return a sequence of 26 tokens, and one of 17 with a mask."""
    inputs = batch()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name, fill in (("attention_mask", 0), ("labels", -100)):
        inputs[name][1, 17:] = fill
    return inputs


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def step(mesh, model, inputs):
    """Return the loss and gradients of all tokens, summed over the mesh; `inputs` are this rank's sequences."""
    model.zero_grad()
    with context_parallel(model, mesh):
        loss = causal_lm_loss(model, context_shard(inputs, mesh))[0]
    loss.backward()  # outside: what it computes again needs no state
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum_gradients(mesh, trained, loss.detach()[None]).item(), gradients_of(model)


def whole_step(model, inputs):
    model.zero_grad()
    loss = causal_lm_loss(model, inputs)[0]
    loss.backward()
    return loss.item(), gradients_of(model)


def farthest(found, expected):
    """Return the relative errors of the loss and of the worst gradient."""
    assert all(gradient.any() for gradient in expected[1].values())
    errors = [(found[1][name] - g).norm() / g.norm() for name, g in expected[1].items()]
    return abs(found[0] / expected[0] - 1), float(max(errors))


def assert_close(answers):
    for loss, gradient in answers:
        assert loss <= 1e-6
        assert gradient <= 1e-5


def compares(mesh, family, inputs, shape=None):
    torch.manual_seed(0)
    model = tiny(family, shape=shape)
    expected = whole_step(model, inputs)
    return farthest(step(mesh, model, inputs), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["whole", "packed"])
@pytest.mark.parametrize(
    "family", ["Llama", "Mistral", "Qwen3", "Gemma2", "Gemma3Text", "Qwen3Moe", "Qwen2_5_VL", "Gemma3"]
)
def test_two_ranks_equal_one_process(two, family, way):
    assert_close(two.run(compares, family, batch(way == "packed"), layout={"context": 2}))


def test_padded_rows_equal_one_process(two):
    assert_close(two.run(compares, "Mistral", padded(), layout={"context": 2}))


HEADS = {
    "as many": {},
    "fewer key heads": {"num_key_value_heads": 1},
    "key heads that do not divide": {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6},
    "heads that do not divide": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
def test_four_ranks_equal_one_process(four, heads):
    """26 tokens are padded to 28."""
    assert_close(four.run(compares, "Gemma2", batch(True), HEADS[heads], layout={"context": 4}))


# --- the fused step's attention: no mask, its metadata of whole rows -------------------------------------------------


def fused(mesh, family, packed, level):
    """Emulate the path of a CUDA device on a CPU, with a loop instead of the variable-length kernel."""
    torch.manual_seed(0)
    model = tiny(family)
    inputs, places = batch(), {}
    if packed:
        rows = [
            {"input_ids": row.tolist(), "labels": row.tolist(), "seq_lengths": list(lengths)}
            for row, lengths in zip(inputs["input_ids"], DOCUMENTS, strict=True)
        ]
        collated = PackedCollator(0)(rows)
        bounds = torch.tensor([0, 5, LENGTH, LENGTH + 15, LENGTH + 18, LENGTH + 19, 2 * LENGTH], dtype=torch.int32)
        places = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 32, "max_length_k": 32}
        inputs = {**collated, **places}
    expected = whole_step(model, {name: value for name, value in inputs.items() if name not in places})

    def varying(*args, **options):
        calls.append(args[3])
        longest = int(args[3].diff().max())
        return loop_over_documents(*args[:5], longest, longest, **options)

    calls = []
    patch(model, level)
    causal_lm_of(model).config._attn_implementation = attention.ATTENTION_NAME
    attention.register()
    with (
        mock.patch.object(causal, "DTYPES", (torch.float32,)),
        mock.patch.object(causal, "_varlen", return_value=(varying, frozenset({"enable_gqa"}))),
        mock.patch.object(attention, "sdpa_attention_forward", None),  # nothing falls back
    ):
        found = step(mesh, model, inputs)
    return *farthest(found, expected), len(calls)


@pytest.mark.parametrize("level", ["keep", "recompute_mlp", "checkpoint"])
@pytest.mark.parametrize("packed", [False, True])
def test_fused_attention_equals_one_process(two, packed, level):
    answers = two.run(fused, "Mistral" if level == "keep" else "Qwen3", packed, level, layout={"context": 2})
    assert_close(answer[:2] for answer in answers)


def perturbed(mesh, family, changed):
    """Return which of this rank's tokens have hidden states that depend on some documents, [2, t]."""
    torch.manual_seed(0)
    model = tiny(family).eval()
    found = []
    with context_parallel(model, mesh), torch.no_grad():
        for inputs in (batch(True), batch(True, changed)):
            cut = context_shard(inputs, mesh)
            states = causal_lm_of(model).base_model(**backbone_inputs(model, cut), use_cache=False).last_hidden_state
            found.append(states)
    return (found[0] != found[1]).any(-1)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_documents_are_isolated_across_ranks(four, family):
    """The second document of the first sequence is on all four ranks, the third of the second on one."""
    changed = (1, 4)
    found = torch.cat(four.run(perturbed, family, changed, layout={"context": 4}), 1)[:, :LENGTH]
    pieces = found.reshape(-1).split([length for row in DOCUMENTS for length in row])
    assert [bool(piece.all()) for piece in pieces] == [document in changed for document in range(len(pieces))]
    assert [bool(piece.any()) for piece in pieces] == [document in changed for document in range(len(pieces))]


# --- a slice ----------------------------------------------------------------------------------------------------------


def member(place, ways):
    return Mesh(place, Parallel(context=ways), groups={("context",): None})


def test_context_shard_of_a_batch():
    rows = torch.arange(1, 15).view(2, 7)
    inputs = {"input_ids": rows, "labels": rows, "counts": {"tokens": 14}, "weights": rows / 2}
    slices = [context_shard(inputs, member(place, 3)) for place in range(3)]
    first, _, last = slices
    assert last["input_ids"].tolist() == [[7, 0, 0], [14, 0, 0]]
    assert last["position_ids"].tolist() == [[6, 7, 8]] * 2
    assert first["shift_labels"].tolist() == [[2, 3, 4], [9, 10, 11]]  # the last of them is of the next slice
    assert last["shift_labels"].tolist() == [[-100] * 3] * 2
    assert last["weights"].tolist() == [[3.5, 0, 0], [7, 0, 0]]
    assert first["counts"] == {"tokens": 14}
    assert "labels" not in first
    assert context_shard(inputs, Mesh()) == inputs


def test_document_bounds_of_padded_sequences():
    """Two sequences of 7 tokens are padded to 9, each by a document; unused bounds at the end are empty documents."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    bounds = torch.tensor([0, 3, 7, 14, 14], dtype=torch.int32)
    places = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 8, "max_length_k": 8}
    cut = context_shard(
        {"input_ids": positions, "labels": positions, "position_ids": positions, **places}, member(1, 3)
    )
    assert cut["cu_seq_lens_q"].tolist() == cut["cu_seq_lens_k"].tolist() == [0, 3, 7, 9, 16, 18, 18]
    assert cut["cu_seq_lens_q"].dtype is torch.int32
    assert cut["position_ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    found = attention.document_bounds(cut["whole_position_ids"])
    assert found["cu_seq_lens_q"].tolist() == [0, 3, 7, 9, 16, 18]


# --- what cannot be cut -----------------------------------------------------------------------------------------------


def refusal(kind, keys, attention_name=None, known=(), degree=2):
    """Return the error for the default config of a kind; `known` adds types of layers taken for attention."""
    config = getattr(transformers, f"{kind}Config")(**keys)
    try:
        with mock.patch.object(support, "ATTENTION", {*support.ATTENTION, *known}):
            check_context_parallel(config, Parallel(context=degree), attention=attention_name)
    except ConfigError as error:
        return f"{error.message} -> {error.fix}"
    return ""


REFUSED = {
    "heads": ("Llama", {"num_attention_heads": 1}, None, r"\b1 attention heads"),
    "states": ("Qwen3Next", {}, None, r"linear_attention"),
    "no heads": ("Mamba", {}, None, r"mamba"),
    "router": ("Mixtral", {"output_router_logits": True}, None, r"router"),
    "attention": ("Llama", {}, "eager", r"eager.*attn_implementation: sdpa"),
    "a package": ("Llama", {}, "flash_attention_2", r"flash_attention_2.*: sdpa"),
    "own attention": ("Bloom", {}, None, r"eager.*context.*parallel"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_refused(case):
    *asked, message = REFUSED[case]
    assert re.search(message, refusal(*asked))


def test_probe_detects_a_recurrent_state():
    """Falcon H1's layers have attention and a recurrent state."""
    assert re.search(r"falcon_h1 cannot be ", refusal("FalconH1", {}, None, ["hybrid", "attention"]))


def test_probe_with_fewer_heads_than_ranks():
    """A tiny model has four heads; there may be more ranks."""
    with mock.patch.dict(tiny_models.TINY, {"num_attention_heads": 2}):
        assert refusal("Llama", {}, degree=4) == ""


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Qwen3Moe", "GPT2", "Cohere2", "DeepseekV3"])
def test_supported_models_are_accepted(kind):
    assert refusal(kind, {}) == ""


def test_checking_a_run_refuses_its_attention_in_one_process(place, tmp_path):
    config = configured(place, tmp_path / "out", parallel={"context": 2}, attn_implementation="eager")
    with pytest.raises(ConfigError, match="attn_implementation"):
        prepare_run(config, layout=Parallel(context=2), writes=False)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("context"), rows=15, intermediate_size=128)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_context_run_equals_one_process(place, two, tmp_path, packing):
    """Loss, weights, evaluations and answers are equal, and one process resumes from the ranks' checkpoint."""
    keys = {"packing": packing, "max_length": 40, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    keys |= {"save_steps": 2, "activation_checkpointing": packing}
    alone = run(None, place, tmp_path / "alone", **keys)
    found = run(two, place, tmp_path / "out", parallel={"context": 2}, **keys)
    found.same_as(alone, weights=3e-6)  # 1.1e-6 on an AMD EPYC, below 1e-6 on Intel: BLAS sums in another order
    checks = json.loads((found.folder / "checks.json").read_text())
    assert checks["divided"]["difference"] < 1e-5
    if not packing:
        for name in ("adapter", "checkpoint-3"):
            (found.folder / name).rename(found.folder / f"{name}.away")
        run(None, place, found.folder, resume=str(found.folder / "checkpoint-2"), **keys).same_as(alone)


def divides_all(mesh, place, output, keys):
    """Run with a plan that has no memory for unsharded frozen weights."""
    planned = planning.estimate

    def estimated(*given, **more):
        plan = planned(*given, **more)
        return replace(plan, layout=Sliced(**vars(plan.layout)))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planning, "estimate", estimated)
        trains(mesh, place, output, keys, None)


@pytest.mark.slow
def test_context_with_sharded_weights(place, two, tmp_path):
    """Frozen weights are sharded over the ranks that hold slices of each sequence."""
    keys = {"packing": True, "max_length": 40, "gradient_accumulation_steps": 2}
    two.run(divides_all, place, tmp_path / "out", keys | {"parallel": {"context": 2}})
    found = Left(tmp_path / "out")
    found.same_as(run(None, place, tmp_path / "alone", **keys))
    assert 0 < found.trained[0]["gather_share"] < 1


def noise(mesh, alpha, lengths):
    """Largest noise of this rank's last token's document."""
    torch.manual_seed(mesh.rank)
    model = tiny("Llama", adapter=False).train()
    ids = torch.randint(1, 100, (1, sum(lengths)))
    positions = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]} if len(lengths) > 1 else {}
    shard = context_shard({"input_ids": ids, "labels": ids} | positions, mesh)
    embeddings, noisy = model.get_input_embeddings(), []
    plain = embeddings(shard["input_ids"])
    with context_parallel(model, mesh), noisy_embeddings(model, alpha, mesh), torch.no_grad():
        embeddings.register_forward_hook(lambda module, args, output: noisy.append(output))
        model.base_model(**backbone_inputs(model, shard))
    return float((noisy[0] - plain)[0, -100:].abs().max()), plain.shape[-1]


@pytest.mark.parametrize("lengths", [(400,), (100, 300)])
def test_neftune_noise_scale_is_of_full_documents(two, lengths):
    for largest, width in two.run(noise, 5.0, lengths, layout={"context": 2}):
        assert largest == pytest.approx(5 / (lengths[-1] * width) ** 0.5, rel=1e-2)
