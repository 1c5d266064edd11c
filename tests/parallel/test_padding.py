"""Ranks agree on warm-up, capture, replay and release of CUDA graphs, on a stand-in for CUDA's graphs."""

import copy
import itertools

import pytest
import torch

import halfbyte
from halfbyte.batch import COUNTS, SYNCED_SHAPE
from halfbyte.data.collate import PackedCollator, PaddedCollator
from halfbyte.mesh.mesh import SINGLE_PROCESS
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.parallel.padding import pad_to_longest
from halfbyte.parallel.shard.model import shard_model
from halfbyte.train import stepper
from halfbyte.train.graph import WARMUP
from tests.helpers.graph_stand_in import StandIn
from tests.helpers.patch_models import quantize, tiny
from tests.helpers.steps import run_step

pytestmark = pytest.mark.dist

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
LENGTHS = [(5, 9), (40,), (5, 4, 7, 3), (150, 30)]  # of the documents of a window's micro-batches
WINDOWS = WARMUP + 3  # the wider micro-batches' graph ends the others', which are captured again


def micro_batch(lengths, packed):
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = [torch.randint(2, 40, (length,), generator=generator).tolist() for length in lengths]
    if not packed:
        return PaddedCollator(1, rounded=True)([{"input_ids": row, "labels": row} for row in ids])
    row = [token for document in ids for token in document]
    packed = PackedCollator(1, fused=True, max_length=256)
    return packed([{"input_ids": row, "labels": row, "seq_lengths": list(lengths)}])


def case_agrees(mesh, packed):
    """Return this rank's micro-batches of a step before and after padding."""
    own = [micro_batch(lengths, packed) | {COUNTS: {}} for lengths in LENGTHS[mesh.coordinate("shard") :: 2]]
    return list(zip(own, pad_to_longest(mesh, own), strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_micro_batches_are_padded_to_the_longest(two, packed):
    results = two.run(case_agrees, packed, layout={"shard": 2})
    for (_, first), (_, other) in zip(*results, strict=True):
        assert first[SYNCED_SHAPE] == other[SYNCED_SHAPE]
        for name in first.keys() - {COUNTS}:
            mine, theirs = (
                each[name].shape[-1] if torch.is_tensor(each[name]) else each[name] for each in (first, other)
            )
            assert mine == theirs, name
    for before, after in (pair for found in results for pair in found):
        width = before["input_ids"].shape[1]
        for name in ("input_ids", "labels"):
            assert torch.equal(after[name][:, :width], before[name])
        assert bool((after["labels"][:, width:] == -100).all())
        if not packed:
            assert not after["attention_mask"][:, width:].any()
            continue
        begins = after["cu_seq_lens_q"].unique().tolist()
        assert begins[-1] == after["input_ids"].numel()
        positions = [place for a, b in itertools.pairwise(begins) for place in range(b - a)]
        assert after["position_ids"].flatten().tolist() == positions
        assert max(positions) < after["max_length_q"]


def test_unpadded_batches_share_the_synced_shape(two):
    """Batches of an unknown kind are not padded; a difference on any rank makes another shape."""
    first, other = two.run(case_others, layout={"shard": 2})
    assert first == other
    assert len(set(first)) == 2


def case_others(mesh):
    sizes = [(2, 2), (2, 3), (2, 3)]
    own = [{"pairs": torch.zeros(pair[mesh.coordinate("shard")])} for pair in sizes]
    agreed = pad_to_longest(mesh, own)
    assert [each["pairs"].shape for each in agreed] == [each["pairs"].shape for each in own]
    return [each[SYNCED_SHAPE] for each in agreed]


def model_of():
    torch.manual_seed(0)
    return quantize(tiny("Llama", shape=SIZES))


def trains(model, make, mesh=SINGLE_PROCESS):
    """Return losses and gradients of each SGD step, and the synced shapes that have a graph at the end."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    halfbyte.patch(model)
    steps, record = make(trained), []

    def sums_of(batch):
        return {"loss": causal_lm_loss(model, batch)[0]}

    window = [micro_batch(lengths, True) for lengths in LENGTHS]
    count = sum((each["labels"][:, 1:] != -100).sum() for each in window).float()
    for _ in range(WINDOWS):
        own = copy.deepcopy(window[mesh.coordinate("shard") :: mesh.degree("shard")])
        sums = mesh.sum(run_step(steps, sums_of, steps.pad_across_ranks(own), count, may_capture=True))
        record.append((sums, [mesh.sum(parameter.grad.clone()) for parameter in trained]))
        for parameter, gradient in zip(trained, record[-1][1], strict=True):
            parameter.data.sub_(0.1 * gradient)
            parameter.grad = None
    graphs = steps.graphs._captured if isinstance(steps, stepper.GraphedStepper) else {}
    return record, {dict(shapes)[SYNCED_SHAPE] for shapes, found in graphs.items() if found is not None}


def case_trains(mesh, free):
    model = model_of()
    shard_model(model, mesh)
    with pytest.MonkeyPatch.context() as patched:
        stand_in = StandIn(free=free[mesh.coordinate("shard")]).install(patched)
        patched.setattr(stepper, "GraphedBackward", stand_in.backwards)

        def graphed(trained):
            return stepper.GraphedStepper(trained, mesh)

        return trains(model, graphed, mesh)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("free", [(10, 10), (10, 9)])
def test_graphs_are_captured_on_all_ranks_or_none(two, free):
    """Each of two warm shapes has a graph, unless one rank lacks memory for it."""
    results = two.run(case_trains, free, layout={"shard": 2})
    expected, _ = trains(model_of(), lambda trained: stepper.Stepper())
    for record, captured in results:
        assert len(captured) == (2 if free == (10, 10) else 0)
        assert captured == results[0][1]
        for (loss, gradients), (its, theirs) in zip(record, expected, strict=True):
            assert loss.item() == pytest.approx(its.item(), rel=1e-6)
            for mine, other in zip(gradients, theirs, strict=True):
                assert (mine - other).norm() <= 1e-5 * other.norm()
