"""Per-rank plans of the 8B and the 70B, and the layout that `auto` chooses."""

import itertools

import pytest
import torch
import transformers

from halfbyte.config import Parallel, RunConfig
from halfbyte.config.layouts import layouts, unsupported_layout
from halfbyte.data.batch_shapes import Batches
from halfbyte.mesh.mesh import Mesh
from halfbyte.parallel.tensor import apply_tensor_parallel
from halfbyte.plan.cards import H200, card_named, usable_bytes
from halfbyte.plan.costs import GATHER_SLOWDOWN, LATENCY, Gathers, LayerCost, extra_seconds, micro_seconds
from halfbyte.plan.estimate import GIB, estimate
from halfbyte.plan.meshes import Device, Meshes
from halfbyte.plan.policy import Choice, choose, evenly_spaced
from halfbyte.plan.rank import in_slices, rank_config
from halfbyte.plan.replay import LayerBytes
from halfbyte.plan.shapes import ModelShapes

LLAMA_8B = transformers.LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, tie_word_embeddings=False,
)  # fmt: skip
LLAMA_70B = transformers.LlamaConfig(
    vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, tie_word_embeddings=False,
)  # fmt: skip
KEYS = {"model_name_or_path": "m", "dataset": "d", "packing": True, "max_length": 2048, "device": "cuda"}
RTX_4090 = card_named("NVIDIA GeForce RTX 4090")


def run_of(**keys):
    return RunConfig(**KEYS | {"per_device_train_batch_size": 1} | keys)


@pytest.fixture(scope="module", autouse=True)
def _host():
    """A host of 200 GiB, and torch's default allocator with its margin."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            patched.delenv(name, raising=False)
        patched.setattr("halfbyte.memory.allocators.available_bytes", lambda: 200 * GIB)
        yield


@pytest.fixture(scope="module")
def shapes_8b():
    return ModelShapes(run_of(), LLAMA_8B, torch.device("cuda"))


@pytest.fixture(scope="module")
def shapes_70b():
    return ModelShapes(run_of(), LLAMA_70B, torch.device("cuda"))


def plan_of(shapes, layout, gib=139.0, card=H200, **keys):
    config = shapes.config.model_copy(update=keys)
    options = {"device": "cuda", "capacity_bytes": int(gib * GIB), "shapes": shapes, "card": card}
    return estimate(config, shapes.causal_lm.config, layout=layout, **options)


@pytest.mark.slow
def test_70b_on_two_small_cards_part_by_part(shapes_70b):
    """16.44 GiB of blocks, 0.82 of two of them, 1.96 of embedding and head; adapters 0.39 in 16 bits, half of their own
    0.77, of their gradients' 0.77 and of the optimizer's 1.54; scratch 0.44, recomputation 0.58."""
    plan = plan_of(shapes_70b, Parallel(shard=2), gib=25.2, card=RTX_4090, activation_checkpointing="offload")
    assert plan.weights / GIB == pytest.approx(16.44 + 1.96, abs=0.05)
    assert plan.gathered / GIB == pytest.approx(0.82, abs=0.01)
    assert plan.adapters / GIB == pytest.approx(0.39 + 0.77 / 2, abs=0.01)
    assert plan.gradients / GIB == pytest.approx(0.77 / 2 + 1 / 16, abs=0.01)
    assert plan.optimizer / GIB == pytest.approx(1.54 / 2, abs=0.01)
    assert (plan.activations + plan.logits) / GIB == pytest.approx(0.44 + 0.58, abs=0.35)
    assert plan.total < usable_bytes(24, gpus=2)
    assert plan.stays == plan.hosted == ()
    staged = plan_of(
        shapes_70b, Parallel(pipeline=2), gib=23.3, card=RTX_4090, activation_checkpointing="offload",
        gradient_accumulation_steps=4,
    )  # fmt: skip
    assert staged.optimizer / GIB == pytest.approx(1.54 / 2, abs=0.01)
    assert staged.total / GIB == pytest.approx(21, abs=0.7)
    assert staged.gathers == 0


@pytest.mark.slow
def test_8b_step_times_match_the_measurements():
    """benchmarks.step on an H200 at 4×2048: 467 ms at keep, 566 within 9.7 GiB."""
    for limit, measured in ((None, 0.467), (9.7, 0.566)):
        config = run_of(per_device_train_batch_size=4, activation_checkpointing="auto", memory_limit_gib=limit)
        plan = estimate(config, LLAMA_8B, device="cuda", capacity_bytes=139 * GIB)
        assert plan.seconds == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
def test_tensor_parallel_shards_keep_their_format(shapes_8b):
    """Column shards have scales that are not nested: 4.5 bits per weight of o and down instead of 4.127."""
    layout = Parallel(tensor=2)
    whole = ModelShapes(run_of(), LLAMA_8B, torch.device("cuda"))
    apply_tensor_parallel(whole.model, Mesh(layout=layout, groups={("tensor",): None}))
    planned = ModelShapes(run_of(), rank_config(LLAMA_8B, layout), torch.device("cuda"), 2)
    assert planned.frozen().block(0) == whole.frozen().block(0)
    assert 1.02 < planned.frozen().block(0) / (shapes_8b.frozen().block(0) / 2) < 1.04


def tight(shapes, layout, blocks=0.1, **keys):
    """The plan with memory for `blocks` gathered layers."""
    keys = {"activation_checkpointing": "checkpoint"} | keys
    least = plan_of(shapes, layout, 1, **keys)
    return plan_of(shapes, layout, (least.total + blocks * least.gathered / 2) / 0.96 / GIB, **keys)


@pytest.fixture
def no_graphs(monkeypatch):
    """Disable CUDA graphs, whose pool would need memory."""
    monkeypatch.setattr("halfbyte.plan.estimate.may_capture", lambda *_: False)


@pytest.mark.slow
@pytest.mark.usefixtures("no_graphs")
def test_gathered_bytes_and_seconds_of_the_8b(shapes_8b, monkeypatch):
    """Two gathers of 3.60 GB per micro-batch: 10.9 ms at 330 GB/s on two GPUs, hidden except for the first layer."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    plan = tight(shapes_8b, Parallel(shard=2))
    whole = 3.60e9 / 32
    assert plan.stays == ()
    assert plan.gathers == pytest.approx(63 * whole, rel=0.01)
    assert 64 * (Gathers(2, int(whole), 330e9).seconds - LATENCY) == pytest.approx(10.9e-3, rel=0.01)
    evenly_spaced = tight(shapes_8b, Parallel(shard=2), 400)
    assert evenly_spaced.gathers == 0
    each = Gathers(2, int(whole), 330e9).seconds
    assert plan.seconds - evenly_spaced.seconds == pytest.approx((1 + 62 * GATHER_SLOWDOWN[False]) * each, rel=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("no_graphs")
def test_free_memory_is_filled_with_gathered_layers(shapes_8b, monkeypatch):
    """Each saves two gathers and needs its bytes; if all fit, nothing is gathered."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    rooms = (0.5, 3.5, 16.5, 400)
    found = [tight(shapes_8b, Parallel(shard=2), room) for room in rooms]
    assert [len(plan.stays) for plan in found] == [0, 3, 16, 32]
    assert all(plan.total <= 0.96 * plan.capacity_bytes for plan in found)
    assert found[-1].gathers == 0
    moved = found[0].gathers / 63
    for plan, count in zip(found, (0, 3, 16, 32), strict=True):
        assert plan.gathered == pytest.approx(moved * min(count + 2, 33), rel=0.001)
        assert plan.gathers == pytest.approx(moved * max(0, 2 * (32 - count) - 1), rel=0.001)


def test_checkpoint_level_under_tensor_parallelism():
    """Each rank saves a shard of the layer's input; backward gathers it and all-reduces attention's output again."""
    stream = 8192 * 4096 * 2
    replayed = {"keep": LayerBytes(9 * stream, 1, 1), "checkpoint": LayerBytes(stream, 100, 200)}
    layer = LayerCost.of(LLAMA_8B, rows=1, length=8192, replayed=replayed)
    found = in_slices(layer, 4).replayed
    assert found["keep"] == replayed["keep"]
    less = stream * 3 // 4
    assert found["checkpoint"] == LayerBytes(stream - less, 100 + less, 200 + less)
    assert in_slices(layer, 1).replayed == replayed
    how = {"graphs": True, "gathers": None, "resident": 0}
    more = micro_seconds(layer, ["checkpoint"], Parallel(tensor=4), **how) - layer.extra_seconds("checkpoint")
    more -= micro_seconds(layer, ["keep"], Parallel(tensor=4), **how)
    assert more == pytest.approx(2 * LATENCY + 3 * less / H200.link)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("axis", "captured"), [("data", True), ("shard", True), ("tensor", False), ("pipeline", False)]
)
def test_cuda_graphs_are_used_with_data_and_shard_only(shapes_8b, axis, captured):
    """A batch shape outside of the graphs' pool gathers two layers of its own."""
    plan = plan_of(shapes_8b, Parallel(**{axis: 2}), gradient_accumulation_steps=2)
    assert plan.use_graphs == captured
    if axis == "shard":
        assert plan.graphs >= 2 * 3.60e9 / 32


@pytest.mark.slow
@pytest.mark.parametrize(
    "axis", ["data", "shard", pytest.param("tensor", marks=pytest.mark.slow), "pipeline", "context"]
)
def test_more_ranks_never_need_more_per_rank(shapes_8b, axis):
    """Excluding CUDA graphs, which only data parallelism has."""
    keys = {"activation_checkpointing": "checkpoint", "gradient_accumulation_steps": 8}
    totals = []
    for ways in (1, 2, 4, 8):
        config = run_of(**keys)
        options = {"device": "cuda", "capacity_bytes": GIB, "batches": Batches.uniform(1, 8192)}
        own = {"shapes": shapes_8b} if axis != "tensor" else {}
        plan = estimate(config, LLAMA_8B, layout=Parallel(**{axis: ways}), **options, **own)
        totals.append(plan.total - plan.graphs)
    assert all(later <= earlier for earlier, later in itertools.pairwise(totals)), totals
    assert (totals[-1] < 0.8 * totals[0]) == (axis != "data")


def test_levels_and_gathered_layers_are_chosen_together(layer_8b):
    """Compared with an exhaustive search over a few mixes and numbers of gathered layers."""
    gathers, layers = Gathers(2, 110 * 2**20, 5e9), 6
    sizes = {level: layer_8b.bytes(level).saved for level in layer_8b.replayed}

    def need(choice):
        return sum(sizes[level] for level in choice.levels) + choice.stays * gathers.block

    def time(choice):
        return extra_seconds(layer_8b, choice.levels, False) + gathers.exposed_seconds(
            layer_8b, choice.levels, choice.stays, False
        )

    options = {"usual": layer_8b, "largest": layer_8b, "host": 0, "graphs": False}
    for budget in (need(Choice(("checkpoint",) * layers, False)), 2 * GIB, 4 * GIB, 40 * GIB):
        found = choose(layers, budget, need, **options, gathers=gathers)
        assert need(found) <= budget
        best = min(
            time(choice)
            for late, early, count, stays in itertools.product(sizes, sizes, range(layers + 1), range(layers + 1))
            if "tiled" not in (late, early)
            and need(choice := Choice((early,) * count + (late,) * (layers - count), False, stays)) <= budget
        )
        assert time(found) <= best + 1e-9
    assert choose(layers, 40 * GIB, need, **options, gathers=gathers).stays == layers


def test_exposed_seconds_of_gathers(layer_8b):
    levels = ("keep",) * 8
    hidden = Gathers(2, 100, 1e12)
    for graphs, slowed in GATHER_SLOWDOWN.items():
        for stays, others in ((0, 14), (4, 6)):  # beside the first
            waits = (1 + others * slowed) * hidden.seconds
            assert hidden.exposed_seconds(layer_8b, levels, stays, graphs) == pytest.approx(waits)
        assert hidden.exposed_seconds(layer_8b, levels, 8, graphs) == 0
    slow = Gathers(2, int(100e9), 1e9)
    forward, backward = 8 * layer_8b.forward_seconds, 8 * layer_8b.backward_seconds
    for stays, gathers in ((0, 15), (4, 7)):
        waits = (gathers + 1) * slow.seconds - forward - backward
        beside = max(gathers * slow.seconds - waits, 0)
        assert slow.exposed_seconds(layer_8b, levels, stays, False) == pytest.approx(
            waits + GATHER_SLOWDOWN[False] * beside
        )


def test_blocks_that_stay_are_spread():
    assert evenly_spaced(8, 4) == (1, 3, 5, 7)
    assert evenly_spaced(8, 0) == ()
    assert evenly_spaced(5, 9) == tuple(range(5))
    assert all(len(evenly_spaced(31, count)) == count for count in range(32))


def meshes_of(shapes, gib, card, length=2048, **keys):
    config = shapes.config.model_copy(update={"max_length": length, **keys})
    device = Device(torch.device("cuda"), int(gib * GIB), card)
    return Meshes(config, shapes.causal_lm.config, device, lambda changed: Batches.uniform(1, length), shapes)


def test_auto_chooses_data_if_it_fits(shapes_8b):
    option, reason = meshes_of(shapes_8b, 23, RTX_4090).choose(2)
    assert option.layout == Parallel(data=2)
    assert "GPU" in reason


@pytest.mark.slow
def test_auto_shards_or_pipelines_by_link_speed(shapes_70b):
    """Short sequences on slow links expose gathers, so it pipelines; long ones on NVLink hide them, so it shards."""
    keys = {"gradient_accumulation_steps": 8, "length": 512}
    option, reason = meshes_of(shapes_70b, 30, card_named("NVIDIA A10").measured(link=5e9), **keys).choose(2)
    assert option.layout == Parallel(pipeline=2)
    assert option.config.gradient_accumulation_steps == 16  # a step keeps its rows
    assert "{shard: 2}" in reason
    option, reason = meshes_of(shapes_70b, 30, H200, **keys | {"length": 2048}).choose(2)
    assert option.layout == Parallel(shard=2)
    assert "{pipeline: 2}" in reason


@pytest.mark.slow
def test_unsupported_layouts_are_refused(shapes_8b):
    meshes = meshes_of(shapes_8b, 139, H200)
    refused = {str(option.layout): option.refused for option in meshes.options(3)}
    assert refused["{data: 3}"] == refused["{shard: 3}"] == ""
    assert "32" in refused["{tensor: 3}"]


def test_layouts():
    assert [str(layout) for layout in layouts(2)] == [
        "{data: 2}", "{shard: 2}", "{tensor: 2}", "{pipeline: 2}", "{context: 2}",
    ]  # fmt: skip
    assert all(layout.size == 8 for layout in layouts(8))
    assert Parallel(tensor=2, pipeline=2) not in [*layouts(4)]
    assert unsupported_layout(Parallel(context=2, pipeline=2)).key == "parallel"
    assert unsupported_layout(Parallel(data=2, shard=2, tensor=2, context=2)) is None


@pytest.mark.parametrize(
    ("name", "card"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA H200", "H200"),
     ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A100-PCIE-40GB", "A100-PCIE"), ("NVIDIA L40S", "L40S"),
     ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090"),
     ("Tesla T4", "T4"), ("NVIDIA A10", "A10"), ("NVIDIA A10G", None), ("NVIDIA GB10", None)],
)  # fmt: skip
def test_cards_by_name(name, card):
    found = card_named(name)
    assert (found and found.name) == card
