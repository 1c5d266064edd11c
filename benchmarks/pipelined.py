"""A step of the 8B in pipeline stages, compared with data parallel over the same rows.

    torchrun --nproc-per-node 2 -m benchmarks.pipelined [SCHEDULE:CHUNKS…] [--json FILE]

For each schedule, with and without recomputing ahead of the gradient: ms of a step; the idle share of the GPUs, from
CUDA events around everything that stages compute; the same from the simulation with the measured seconds of the stages;
and losses. Layers are checkpointed, weights random.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import free_memory, parser_of
from benchmarks.several_gpus import Results
from benchmarks.step_model import build, random_batch, timed
from halfbyte.config import Parallel
from halfbyte.methods import METHODS
from halfbyte.modeling.cast_cache import clear_cast_cache
from halfbyte.modeling.head import Head, set_verified_head
from halfbyte.modeling.layer import causal_lm_of, decoder_layers
from halfbyte.modeling.patch import patch
from halfbyte.optim import trained_parameters
from halfbyte.parallel.mesh import Mesh, present_mesh
from halfbyte.parallel.pipeline.model import LocalStages, layer_seconds
from halfbyte.parallel.pipeline.partition import partition_layers, stage_seconds
from halfbyte.parallel.pipeline.runtime import Pipeline
from halfbyte.parallel.pipeline.schedules import Schedule, Seconds, simulate
from halfbyte.parallel.pipeline.stepper import PipelinedStepper
from halfbyte.parallel.reduction import clip_gradients, sum_gradients
from halfbyte.train.stepper import Stepper

MODEL, SFT = "llama-3.1-8b", METHODS["sft"]
SCHEDULES = ("1f1b:1", "interleaved:2", "zb-v:2")
STEPS, WATCHED = 6, 5


class Clock:
    """Records the ms of every forward and backward of a stage, by kind and stage."""

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
    """The model before it is cut into stages; `restore` reassembles it."""

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
    """Measure and simulate one schedule."""
    model, device = whole.model, batches[0]["input_ids"].device
    seconds, head = layer_seconds(model, recomputed=True)
    parts = partition_layers(schedule, seconds, head)
    of_stages = stage_seconds(parts, seconds, head)
    width = whole.causal_lm.config.hidden_size
    line = Pipeline(mesh, schedule, of_stages, width=width, dtype=torch.bfloat16, device=device, ahead=ahead)
    set_verified_head(model, Head())
    stages = LocalStages(model, parts, line.own)
    around = partial(torch.autocast, device.type, torch.bfloat16)

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
    """Disable garbage collection during the timed steps: it would stall the other ranks."""
    gc.collect()
    gc.freeze()
    mesh.barrier()


def _watched(mesh: Mesh, line: Pipeline, stepper: Stepper, batches: list[dict[str, Tensor]], count: Tensor) -> Any:
    """Return the idle share of the median step, by events and by the simulation with the same seconds."""
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
    """Time a data-parallel step over the same rows."""
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


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("schedules", nargs="*", default=SCHEDULES, metavar="SCHEDULE:CHUNKS")
    made.add_argument("--batches", type=int, default=8)
    made.add_argument("--length", type=int, default=2048)
    made.add_argument("--model", default=MODEL)
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with present_mesh(kind="cuda") as mesh:
        mesh, results = mesh.with_layout(Parallel(pipeline=mesh.size)), Results(mesh, given.json)
        model = build(given.model, "cuda")
        patch(model, "checkpoint")
        tokens = random_batch(given.model, given.batches, given.length, "cuda")
        batches = [{name: row[None] for name, row in zip(tokens, rows, strict=True)}
                   for rows in zip(*tokens.values(), strict=True)]  # fmt: skip
        start = {name: parameter.detach().clone() for name, parameter in trained_parameters(model).items()}
        data = data_parallel(mesh, model, batches)
        results.add("data", model=given.model, batches=given.batches, length=given.length, **data)
        whole = Whole(model)
        clear_cast_cache(whole.causal_lm.model)
        for which, ahead in itertools.product(given.schedules, (0, len(whole.layers))):
            with torch.no_grad():
                for key, parameter in trained_parameters(model).items():
                    parameter.copy_(start[key])
                    parameter.grad = None
            name, _, chunks = which.partition(":")
            found = one(mesh, whole, Schedule(name, mesh.size, int(chunks)), ahead, batches)
            results.add("pipeline", of_data=data["step_ms"] / found["step_ms"], **found)
            gc.unfreeze()
            free_memory()


if __name__ == "__main__":
    main()
