"""The plan's memory and communication per rank equal what ranks hold and exchange."""

import contextlib
import io
import re

import pytest
import torch
from torch.distributed.tensor import DTensor

from halfbyte.cli.check import check_run
from halfbyte.config import Parallel
from halfbyte.memory import allocators
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.layer import causal_lm_of, decoder_layers
from halfbyte.parallel.pipeline.model import partition_model
from halfbyte.parallel.shard.model import residencies_of, shard_model, sharded
from halfbyte.parallel.shard.weights import BlockShard
from halfbyte.plan.rank import Frozen, Stage, pipeline_of
from halfbyte.tensor import QuantizedTensor
from halfbyte.train import planning
from halfbyte.train.preflight import prepare_run
from tests.helpers.patch_models import batch, quantize, tiny
from tests.helpers.rank_runs import configured, write_place

pytestmark = pytest.mark.dist

LAYERS = 4
WHOLE = Stage(tuple(range(LAYERS)))


def model_of(family):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "head_dim": 16}
    return quantize(tiny(family, shape=sizes))


def frozen_parameters(model):
    return [parameter for parameter in model.parameters() if not parameter.requires_grad]


def frozen_of(model):
    total = sum(each.nbytes for each in (*frozen_parameters(model), *model.buffers()))
    return Frozen.of(model, decoder_layers(model)[1], total)


def here(parameter):
    """Return the bytes of it that this rank holds."""
    local = parameter.data._local_tensor if isinstance(parameter.data, DTensor) else parameter.data
    if isinstance(local, BlockShard):
        return local.raw.nbytes
    parts = local.parts.values() if isinstance(local, QuantizedTensor) else [local]
    return sum(part.nbytes for part in parts if part.untyped_storage().nbytes())  # none while a block is in slices


def case_holds(mesh, family, kept):
    """Return this rank's bytes of frozen weights, and the bytes a micro-batch gathers after the resident layers."""
    model = model_of(family)
    shard_model(model, mesh, residencies_of(LAYERS, kept))
    held = sum(here(each) for each in (*frozen_parameters(model), *model.buffers()))
    counted = []
    for _ in range(2):
        before = sharded(model).stats.nbytes
        causal_lm_loss(model, batch())[0].backward()
        counted.append(sharded(model).stats.nbytes - before)
    return held, counted[1]


@pytest.mark.parametrize("family", ["Llama", pytest.param("Gemma2", marks=pytest.mark.slow)])
def test_bytes_of_a_rank_equal_the_plan(two, family):
    """Includes Gemma 2, whose head is tied."""
    frozen, layout = frozen_of(model_of(family)), Parallel(shard=2)
    planned = frozen.share(WHOLE, layout)
    for held, gathered in two.run(case_holds, family, (0, 2), layout={"shard": 2}):
        assert held == pytest.approx(planned, rel=0.02)
        assert gathered == pytest.approx(3 * frozen.largest(WHOLE), rel=0.03)  # two blocks twice, but for the last
    alone = frozen.share(WHOLE, Parallel())
    assert alone == sum(each.nbytes for each in frozen_parameters(model_of(family))) + frozen_buffers(family)
    assert 0.5 * alone < planned < 0.56 * alone


@pytest.mark.slow
def test_shards_along_context(four):
    """Ranks with different tokens of the same sequences hold different shards."""
    frozen, layout = frozen_of(model_of("Llama")), Parallel(shard=2, context=2)
    planned = frozen.share(WHOLE, layout)
    assert planned < 0.8 * frozen.share(WHOLE, Parallel(shard=2))
    for held, _ in four.run(case_holds, "Llama", (0, 2), layout={"shard": 2, "context": 2}):
        assert held == pytest.approx(planned, rel=0.02)


def frozen_buffers(family):
    return sum(buffer.nbytes for buffer in model_of(family).buffers())


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_planned_stages_equal_the_partition(name):
    """Every layer is on one rank, and the ranks' bytes add up to the model's, with a tied embedding twice."""
    model = model_of("Gemma2")
    cut = partition_model(model, name, 2, 4, recomputed=True)
    found = pipeline_of(cut, list(cut.seconds[:1]) * LAYERS, cut.seconds[-1], 4)
    assert pipeline_of(cut, list(cut.seconds[:1]) * LAYERS, cut.seconds[-1], 4, ahead=True).idle < found.idle
    assert sorted(index for stage in found.stages for index in stage.layers) == list(range(LAYERS))
    assert [stage.has_embedding for stage in found.stages] == [True, False]
    assert [stage.has_head for stage in found.stages] == [False, True]
    frozen = frozen_of(model)
    together = sum(frozen.share(stage, Parallel(pipeline=2)) for stage in found.stages)
    assert together == frozen.share(WHOLE, Parallel()) + frozen.embedding + frozen.replicated
    assert found.stages[0].in_flight >= found.stages[1].in_flight >= 1
    named = [(name, each) for name, each in causal_lm_of(model).named_parameters() if not each.requires_grad]
    for process, stage in enumerate(found.stages):
        elsewhere = cut.remote_filter(model, process)
        own = sum(each.nbytes for name, each in named if not elsewhere(name))
        assert frozen.share(stage, Parallel(pipeline=2)) == pytest.approx(own, rel=0.02)


def case_prepares(mesh, place, output, limit):
    """Return the layout that auto chose, and every rank's plan."""
    config = configured(place, output, memory_limit_gib=limit, activation_checkpointing=True)
    run = prepare_run(config, mesh=mesh)
    return run.mesh.layout, run.plan


@pytest.mark.slow
def test_auto_layout_equals_the_plan(two, tmp_path):
    """The vocabulary is most of the model, and half of it fits."""
    place = write_place(tmp_path, vocab_size=120_000)
    roomy = two.run(case_prepares, place, tmp_path / "a", None)
    assert [layout for layout, _ in roomy] == [Parallel(data=2)] * 2
    needed = roomy[0][1].total
    tight = two.run(case_prepares, place, tmp_path / "b", (needed - 10 * 2**20) / 2**30)
    assert tight[0] == tight[1]
    layout, plan = tight[0]
    assert layout in (Parallel(shard=2), Parallel(pipeline=2))
    assert plan.layout == layout
    assert plan.fits
    assert plan.total < needed - 10 * 2**20


def case_checks(mesh, place, output, keys):
    """Return the output of `halfbyte check` in launched ranks."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        check_run(configured(place, output, **keys))
    return " ".join(said.getvalue().split())


@pytest.mark.slow
def test_check_plans_the_launched_layout(two, tmp_path, capsys, caplog):
    """The plan is equal in launched ranks, where it is printed once, and in a process that would launch them."""
    place, keys = write_place(tmp_path), {"parallel": {"shard": 2}}
    first, second = two.run(case_checks, place, tmp_path / "out", keys)
    assert second == ""
    check_run(configured(place, tmp_path / "out", **keys))
    here = " ".join(capsys.readouterr().out.split())
    for said in (first, here):
        assert "2, as parallel: {shard: 2}" in said
        assert "ready: `halfbyte train` can start" in said
    weights = [re.search(r"weights ([\d.]+ \w+)", said).group(1) for said in (first, here)]
    assert weights[0] == weights[1]
    check_run(configured(place, tmp_path / "out", optim="adafactor", **keys))
    assert "optim:" in caplog.text
    capsys.readouterr()
    check_run(configured(place, tmp_path / "out"))
    assert f"weights {weights[0]}" not in " ".join(capsys.readouterr().out.split())


def host_numbers(mesh, ranks_on_host):
    """Return the ranks that share a host and the free bytes of the fullest host, as preflight checks them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(allocators, "available_bytes", lambda: 1000 - mesh.rank)
        if ranks_on_host is not None:
            patched.setenv("LOCAL_WORLD_SIZE", str(ranks_on_host))
        return planning.ranks_on_host(mesh, mesh.layout), planning.free_host_bytes(mesh)


def test_ranks_of_a_host_share_its_memory(two):
    assert two.run(host_numbers, None) == [(2, 999)] * 2
    assert two.run(host_numbers, 1) == [(1, 999)] * 2  # one on each of two hosts
