"""A step of a model in stages, on as many GPUs as there are, against data parallel over the same rows.

    torchrun --nproc-per-node 2 --max-restarts 8 -m benchmarks.pipelined --json FILE [SCHEDULE:CHUNKS…]
    torchrun --nproc-per-node 2 -m benchmarks.pipelined --seventy --json FILE

For each schedule, with and without recomputing ahead of the gradient: milliseconds of a step; the share of it in which
GPUs wait, read from CUDA events around all that stages compute; the same from the simulation, with the seconds that the
stages were measured to take; and losses. Layers are checkpointed. Weights are random and made here.

`--seventy`: a 70B as two stages, four micro-batches of 1×2048 a step, on GPUs that are filled up but for 24 GiB.

A schedule that takes longer than `--limit` seconds ends its processes; torchrun starts them again, for what is left.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.several_gpus import Results
from benchmarks.sharded import SMALL, Filled, planned
from benchmarks.step_model import build, empty_model, fill, random_batch, run_config, timed
from halfbyte.config import Parallel
from halfbyte.formats import named
from halfbyte.layers import QuantizedLinear
from halfbyte.methods import METHODS
from halfbyte.modeling.adapters import add_adapter
from halfbyte.modeling.cast_cache import clear_cast_cache
from halfbyte.modeling.head import Head, set_verified_head
from halfbyte.modeling.layer import causal_lm_of, decoder_layers
from halfbyte.modeling.patch import patch
from halfbyte.optim import trained_parameters
from halfbyte.parallel.mesh import Mesh, present_mesh
from halfbyte.parallel.pipeline.model import LocalStages, layer_seconds, remote_filter
from halfbyte.parallel.pipeline.partition import partition_layers, stage_seconds
from halfbyte.parallel.pipeline.runtime import Pipeline
from halfbyte.parallel.pipeline.schedules import Schedule, Seconds, simulate
from halfbyte.parallel.pipeline.stepper import PipelinedStepper
from halfbyte.parallel.reduction import clip_gradients, sum_gradients
from halfbyte.train.stepper import Stepper

MODEL, SFT = "llama-3.1-8b", METHODS["sft"]
KINDS = ("1f1b:1", "interleaved:2", "interleaved:4", "zb-1p:2", "zb-v:2")
STEPS, WATCHED = 6, 5


class Clock:
    """Milliseconds of what stages compute, by kind and stage."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, int, Any, Any]] = []

    @contextlib.contextmanager
    def __call__(self, kind: str, stage: int) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self.spans.append((kind, stage, begin, end))

    def read(self) -> dict[tuple[str, int], list[float]]:
        torch.cuda.synchronize()
        found: dict[tuple[str, int], list[float]] = {}
        for kind, stage, begin, end in self.spans:
            found.setdefault((kind, stage), []).append(begin.elapsed_time(end))
        self.spans.clear()
        return found


class Whole:
    """The model before it is cut, to be put together again."""

    def __init__(self, model: Any):
        self.model, self.causal_lm = model, causal_lm_of(model)
        self.layers = decoder_layers(model)[1]
        self.ends = self.causal_lm.get_input_embeddings(), self.causal_lm.get_output_embeddings()

    def restore(self) -> None:
        self.causal_lm.model.layers = self.layers
        self.causal_lm.model.embed_tokens, self.causal_lm.lm_head = self.ends
        clear_cast_cache(self.causal_lm.model)


def step_of(mesh: Mesh, model: Any, stepper: Stepper, batches: list[dict[str, Tensor]], count: Tensor) -> Any:
    trained = list(trained_parameters(model).values())
    optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0, fused=True)

    def step() -> Tensor:
        sums = sum_gradients(mesh, trained, stepper(batches, count))
        clip_gradients(mesh, trained, 1.0)
        optimizer.step()
        for parameter in trained:
            parameter.grad = None
        return sums[0] / count

    return step


def one(mesh: Mesh, whole: Whole, schedule: Schedule, ahead: int, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """A schedule's step, measured and simulated."""
    model, device = whole.model, batches[0]["input_ids"].device
    seconds, head = layer_seconds(model, recomputed=True)
    parts = partition_layers(schedule, seconds, head)
    of_stages = stage_seconds(parts, seconds, head)
    width = whole.causal_lm.config.hidden_size
    line = Pipeline(mesh, schedule, of_stages, width=width, dtype=torch.bfloat16, device=device, ahead=ahead)
    set_verified_head(model, Head())
    stages = LocalStages(model, parts, line.own)
    around = partial(torch.autocast, device.type, torch.bfloat16)  # as `modeling.adapters.compute_autocast`

    def sums(batch: Any) -> dict[str, Tensor]:
        with around():
            return SFT.sums(model, batch)

    stepper = PipelinedStepper(sums, ["loss"], SFT.blank, around, line, stages)
    count = torch.full((), float(len(batches) * (batches[0]["labels"].shape[1] - 1)), device=device)
    step = step_of(mesh, model, stepper, batches, count)
    _settle(mesh)
    found = timed(step, sum(batch["input_ids"].numel() for batch in batches), STEPS)
    measured = _watched(mesh, line, stepper, batches, count)
    sizes = [len(part) for part in parts]
    whole.restore()
    return {"schedule": schedule.name, "chunks": schedule.chunks, "ahead": ahead > 0, "layers": sizes, **measured,
            "step_ms": mesh.max(found["ms"]), "peak_gib": mesh.gather(found["peak_gib"]),
            "losses": found["losses"]}  # fmt: skip


def _settle(mesh: Mesh) -> None:
    """Nothing is collected in the steps to come: one process that does lets the others wait."""
    gc.collect()
    gc.freeze()
    mesh.barrier()


def _watched(mesh: Mesh, line: Pipeline, stepper: Stepper, batches: list[dict[str, Tensor]], count: Tensor) -> Any:
    """Idle share of the forwards and backwards of the step that took the median time of a few, by events and by the
    simulation with the same seconds."""
    line.watch = clock = Clock()
    steps = []
    for _ in range(WATCHED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        mesh.barrier()
        begin.record()
        stepper(batches, count)
        end.record()
        spans = clock.read()
        steps.append((mesh.max(begin.elapsed_time(end)), spans))
    del line.watch
    steps.sort(key=lambda step: step[0])
    took, spans = steps[WATCHED // 2]
    busy = sum(sum(each) for each in spans.values())
    every = {key: values for own in mesh.gather(spans) for key, values in own.items()}
    means = {key: sum(values) / len(values) for key, values in every.items()}
    seconds = []
    for stage in range(line.schedule.stages):
        recompute = means[("recompute", stage)] if line.ahead else 0.0
        seconds.append(Seconds(means[("F", stage)], recompute + means[("B", stage)], recompute))
    simulated = simulate(line.schedule.actions(len(batches)), seconds, ahead=line.ahead > 0)
    return {
        "idle": 1 - sum(mesh.gather(busy)) / (took * mesh.size),
        "simulated_idle": simulated.idle,
        "forwards_and_backwards_ms": took,
        "of_all_watched_ms": [step[0] for step in steps],
        "simulated_ms": simulated.seconds,
        "stage_ms": [[each.forward, each.backward - each.recompute, each.recompute] for each in seconds],
    }


def data_parallel(mesh: Mesh, model: Any, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """A step over the same rows, each process with its share of them."""
    rows, device = mesh.with_layout(Parallel(data=mesh.size)), batches[0]["input_ids"].device

    def sums(batch: Any) -> dict[str, Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            return SFT.sums(model, batch)

    own = batches[mesh.rank :: mesh.size]
    count = torch.full((), float(len(batches) * (batches[0]["labels"].shape[1] - 1)), device=device)
    step = step_of(rows, model, Stepper(sums), own, count)
    _settle(mesh)
    found = timed(step, sum(batch["input_ids"].numel() for batch in batches), STEPS)
    return {"step_ms": mesh.max(found["ms"]), "peak_gib": mesh.gather(found["peak_gib"]), "losses": found["losses"]}


def seventy(mesh: Mesh, results: Results) -> None:
    """A step of stages that no GPU could hold together; bytes after each phase."""
    name, level, filled = "llama-3.1-70b", "offload", Filled(SMALL)
    device, free = torch.device("cuda", mesh.local), mesh.gather(filled.phases())
    torch.distributed.all_reduce(torch.zeros(1, device=device), group=mesh.group("pipeline"))
    plan, model = planned(mesh, name, level, batches=4), empty_model(name)
    results.add("seventy", planned_gib=plan.total / 2**30, capacity_gib=plan.capacity_bytes / 2**30, free=free)
    seconds, head = layer_seconds(model, recomputed=True)
    schedule = Schedule("1f1b", mesh.size, 1)
    parts = partition_layers(schedule, seconds, head)
    own, format_ = schedule.stages_of(mesh.coordinate("pipeline")), named("nf4")
    torch.manual_seed(0)
    fill(model, "cuda", lambda linear: QuantizedLinear.from_linear(linear, format_), remote_filter(model, parts, own))
    model = add_adapter(model, run_config(name)).train()
    set_verified_head(model, Head())
    stages = LocalStages(model, parts, own)
    gc.collect()
    torch.cuda.empty_cache()
    patch(model, level)
    results.add("seventy", phase="built", layers=[len(part) for part in parts], gib=mesh.gather(filled.phases()))
    of_stages = stage_seconds(parts, seconds, head)
    how: dict[str, Any] = {"width": 8192, "dtype": torch.bfloat16, "device": device, "ahead": len(parts[0])}
    spare = max(plan.capacity_bytes - plan.total, 0)
    line, around = (
        Pipeline(mesh, schedule, of_stages, **how, spare=spare),
        partial(torch.autocast, "cuda", how["dtype"]),
    )

    def sums(batch: Any) -> dict[str, Tensor]:
        with around():
            return SFT.sums(model, batch)

    tokens = random_batch(name, 4, 2048, "cuda")
    batches = [{key: row[None] for key, row in zip(tokens, rows, strict=True)}
               for rows in zip(*tokens.values(), strict=True)]  # fmt: skip
    stepper = PipelinedStepper(sums, ["loss"], SFT.blank, around, line, stages)
    count = torch.full((), 4.0 * 2047, device=device)
    found = timed(step_of(mesh, model, stepper, batches, count), 4 * 2048, STEPS)
    phases = mesh.gather(filled.phases())
    results.add(
        "seventy", step_ms=mesh.max(found["ms"]), steps=len(found["losses"]), gib=phases, losses=found["losses"]
    )


def tried(mesh: Mesh, results: Results) -> list[tuple[str, int]]:
    """What was begun before a restart; what was found then is among `results` again."""
    if results.path and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and Path(results.path).exists():
        results.found |= json.loads(Path(results.path).read_text())
    return mesh.from_main([(each["schedule"], each["ahead"]) for each in results.found.get("begun", [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schedules", nargs="*", default=KINDS, metavar="SCHEDULE:CHUNKS")
    parser.add_argument("--json")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--seventy", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with present_mesh(kind="cuda") as mesh:
        mesh, results = mesh.with_layout(Parallel(pipeline=mesh.size)), Results(mesh, given.json)
        if given.seventy:
            return seventy(mesh, results)
        before = tried(mesh, results)
        model = build(given.model, "cuda")
        patch(model, "checkpoint")
        tokens = random_batch(given.model, given.batches, given.length, "cuda")
        batches = [{name: row[None] for name, row in zip(tokens, rows, strict=True)}
                   for rows in zip(*tokens.values(), strict=True)]  # fmt: skip
        start = {name: parameter.detach().clone() for name, parameter in trained_parameters(model).items()}
        if not before:
            shape = {"model": given.model, "batches": given.batches, "length": given.length}
            results.add("data", **shape, **data_parallel(mesh, model, batches))
        data_ms = mesh.from_main(results.found.get("data", [{}])[0].get("step_ms"))
        whole = Whole(model)
        clear_cast_cache(whole.causal_lm.model)
        for which, ahead in itertools.product(given.schedules, (0, len(whole.layers))):
            if (which, ahead) in before:
                continue
            faulthandler.dump_traceback_later(given.limit, exit=True)
            results.add("begun", schedule=which, ahead=ahead)
            with torch.no_grad():
                for key, parameter in trained_parameters(model).items():
                    parameter.copy_(start[key])
                    parameter.grad = None
            name, _, chunks = which.partition(":")
            found = one(mesh, whole, Schedule(name, mesh.size, int(chunks)), ahead, batches)
            results.add("pipeline", of_data=data_ms / found["step_ms"], **found)
            faulthandler.cancel_dump_traceback_later()
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
