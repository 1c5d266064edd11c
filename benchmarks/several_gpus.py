"""A training step on several GPUs of one host, compared with one GPU in the same run. All weights are random.

    torchrun --nproc-per-node 2 -m benchmarks.several_gpus PART… [--json FILE]

Compare ratios: each part times one GPU alone while the others block, all GPUs without communication, and all together.

    data      `data` parallel: 8B 4×2048; 0.6B 2×2048 and 2×512 as CUDA graphs
    tensor    `tensor` parallel: 8B 4×2048
    gathers   `shard`: 8B 4×2048; every layer gathered in each pass, every other layer kept gathered, or all

Rates. With T₁ the ms of one GPU alone, Tᵢ of GPU i without communication and T the slowest GPU's of all n together:

    of_alone     T₁ / T          share of n times one GPU's rate that n GPUs have with n times its rows
    of_apart     max(Tᵢ) / T     share of n times the rate of the slowest of n independent processes at once
    of_rates     n / (T · Σ 1/Tᵢ)    share of the summed rates of these n processes
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import (
    free_memory,
    parser_of,
    peak_gib,
    require_gpu,
    reset_peak,
    synchronize,
    timing_event,
    write_result,
)
from benchmarks.step_model import WARMUP, build, random_batch, timed
from halfbyte.config import Parallel
from halfbyte.mesh.mesh import SINGLE_PROCESS, Mesh, present_mesh
from halfbyte.mesh.reduction import clip_gradients, sum_gradients
from halfbyte.modeling.cast_cache import cast_replacements
from halfbyte.parallel.shard.model import has_static_gradients, shard_model, sharded
from halfbyte.parallel.shard.optimizer import shard_optimizer
from halfbyte.train.stepper import GraphedStepper, Stepper

GIB = 2**30
EIGHT = "llama-3.1-8b"
ROWS, TOKENS = 4, 2048  # sequences of a batch and their tokens, in all parts but `data`
DATA = ((EIGHT, 4, 2048, False), ("qwen3-0.6b", 2, 2048, True), ("qwen3-0.6b", 2, 512, True))


class Results:
    """The main process's results, written after each addition."""

    def __init__(self, mesh: Mesh, path: Path | None):
        self.mesh, self.path = mesh, path
        self.found: dict[str, Any] = {"gpus": mesh.size}

    def add(self, part: str, **numbers: Any) -> None:
        if not self.mesh.is_main:
            return
        self.found.setdefault(part, []).append(numbers)
        print(part, json.dumps({key: value for key, value in numbers.items() if key != "losses"}), flush=True)
        write_result(self.path, self.found)


def alone(mesh: Mesh) -> Mesh:
    """Return the mesh of one process on this rank's device."""
    return replace(SINGLE_PROCESS, local=mesh.local, device_type=mesh.device_type)


class Training:
    """A model and the training loop's own step on one batch, with or without the other ranks."""

    def __init__(self, mesh: Mesh, name: str, rows: int, length: int, graphs: bool):
        import halfbyte

        self.mesh, self.model = mesh, build(name, mesh.device_type)
        halfbyte.patch(self.model)
        self.batch = random_batch(name, rows, length, mesh.device_type)
        self.trained = self.trained_parameters()
        self.stepper: Stepper = GraphedStepper(self.trained) if graphs else Stepper()
        self.optimizer = torch.optim.AdamW(self.trained, lr=2e-4, weight_decay=0.0, fused=True)
        self.count = torch.full((), float(rows * (length - 1) * mesh.size), device=mesh.device_type)

    def trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def forward(self, batch: Any, count: Tensor) -> tuple[Tensor, Tensor]:
        from halfbyte.modeling.head import causal_lm_loss

        loss_sum = causal_lm_loss(self.model, batch)[0]
        return loss_sum / count, loss_sum.detach()[None]

    def forward_backward(self) -> Tensor:
        """Run the batch as the training loop does; return its sums [1]."""
        if not self.stepper.is_eager:
            return self.stepper.forward_backward(self.forward, [self.batch], self.count, may_capture=True)
        loss, sums = self.forward(self.batch, self.count)
        loss.backward()
        return sums

    def step(self, together: bool) -> Tensor:
        sums = self.forward_backward()
        if together:
            sums = sum_gradients(self.mesh, self.trained, sums)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        for parameter in self.trained:
            parameter.grad = None
        return sums[0] / self.count

    def time(
        self, mesh: Mesh, tokens: int, together: bool = True, steps: int = 10, warmup: int = WARMUP
    ) -> dict[str, Any]:
        """Time every rank's step; `ms` is the slowest rank's."""
        mesh.barrier()
        run = timed(lambda: self.step(together), tokens, steps, warmup=warmup, device=mesh.device_type)
        every = mesh.gather(run["ms"])
        held = torch.cuda.memory_allocated() if mesh.device_type == "cuda" else 0
        return run | {"ms": max(every), "every_ms": every, "held_gib": held / GIB}

    def close(self) -> None:
        self.stepper.close()
        self.__dict__.clear()
        free_memory()


def data(mesh: Mesh, results: Results) -> None:
    for name, rows, length, graphs in DATA:
        training, tokens, ms = Training(mesh, name, rows, length, graphs), rows * length, {}
        rates = []
        if mesh.is_main:
            ms["alone"] = training.time(alone(mesh), tokens, together=False)["ms"]
        for way, together in (("apart", False), ("together", True), ("apart again", False), ("together again", True)):
            run = training.time(mesh, tokens, together)
            ms[way] = run["ms"]
            if not together:
                rates.append(sum(1 / each for each in run["every_ms"]) / mesh.size)
        apart, both = (min(ms[way], ms[f"{way} again"]) for way in ("apart", "together"))
        shape = {"model": name, "rows": rows, "length": length, "graphs": graphs}
        ratios = {
            "of_apart": apart / both,
            "of_rates": 1 / (both * max(rates)),
            "of_alone": ms.get("alone", 0.0) / both,
        }
        results.add("data", **shape, ms=ms, **ratios, peak_gib=run["peak_gib"], losses=run["losses"])
        training.close()


def tensor(mesh: Mesh, results: Results) -> None:
    """Time one GPU alone, then all. Also compares the first step's loss and gradient norm."""
    import halfbyte
    from halfbyte.parallel.tensor import apply_tensor_parallel

    rows, length, found = ROWS, TOKENS, dict[str, Any]()
    mesh = mesh.with_layout(Parallel(tensor=mesh.size))
    for way in ("alone", "together"):
        training = Training(mesh, EIGHT, rows, length, False)
        training.count = torch.full((), float(rows * (length - 1)), device=mesh.device_type)
        if way == "together":
            halfbyte.unpatch(training.model)
            apply_tensor_parallel(training.model, mesh)
            halfbyte.patch(training.model)
            training.trained = training.trained_parameters()
        if way == "together" or mesh.is_main:
            found[way] = _repeated_step(training, mesh, way == "together")
        mesh.barrier()
        training.close()
    found["together"]["ms"] = mesh.max(found["together"]["ms"])
    if mesh.is_main:
        shape = {"model": EIGHT, "rows": rows, "length": length}
        speedup = found["alone"]["ms"] / found["together"]["ms"]
        norms = zip(found["alone"]["norms"], found["together"]["norms"], strict=True)
        off = [abs(together / alone_ - 1) for alone_, together in norms]
        results.add("tensor", **shape, **found, speedup=speedup, first_step_off=off)


def _repeated_step(training: Training, mesh: Mesh, together: bool, steps: int = 10, warmup: int = 3) -> dict[str, Any]:
    """Return loss and gradient norm of the initial weights, and the median ms of `steps` that do not update them.

    Of two steps in the middle, the median is the faster one.
    """
    events = [timing_event(mesh.device_type) for _ in range(warmup + steps + 1)]
    reset_peak(mesh.device_type)
    norms: list[float] = []
    for event in events:
        event.record()
        sums = training.forward_backward()
        if together:
            sums = sum_gradients(mesh, training.trained, sums)
        norm = clip_gradients(mesh if together else SINGLE_PROCESS, training.trained, 1.0)
        norms = norms or [float(sums[0] / training.count), float(norm)]
        for parameter in training.trained:
            parameter.grad = None
    synchronize(mesh.device_type)
    every = [a.elapsed_time(b) for a, b in itertools.pairwise(events[warmup:])]
    return {"ms": statistics.median_low(every), "steps_ms": every, "norms": norms, **peak_gib(mesh.device_type)}


class Sharded(Training):
    """A model whose decoder layers are sharded, and the training loop's own step on one batch.

    stays: for each layer, "call" (gathered in each pass) or "always" (kept gathered).
    """

    def __init__(self, mesh: Mesh, name: str, rows: int, length: int, stays: Sequence[Any]):
        super().__init__(mesh, name, rows, length, False)
        shard_model(self.model, mesh, stays)
        static = sharded(self.model) is not None and has_static_gradients(self.model)
        narrow = partial(cast_replacements, self.model, torch.bfloat16)
        self.units = shard_optimizer(self.mesh, self.trained, block=1, static_gradients=static, narrow=narrow)
        self.units.adopt(self.optimizer)
        free_memory()

    def step(self, together: bool) -> Tensor:
        sums = self.forward_backward()
        sums = self.units.reduce(sums) if together else sums
        self.units.clip(1.0)
        self.optimizer.step()
        self.units.after_step()
        return sums[0] / self.count

    def time(
        self, mesh: Mesh, tokens: int, together: bool = True, steps: int = 10, warmup: int = WARMUP
    ) -> dict[str, Any]:
        run, share = super().time(mesh, tokens, together, steps, warmup), sharded(self.model)
        if share is not None:
            before = share.stats.nbytes
            self.step(together)
            run["gathered_gb"] = (share.stats.nbytes - before) / 1e9
        return run


def gathers(mesh: Mesh, results: Results) -> None:
    rows, length = ROWS, TOKENS
    training = Training(mesh, EIGHT, rows, length, False)
    data_ms = training.time(mesh, rows * length)
    results.add("gathers", way="data", **data_ms)
    layers = len(training.model.get_base_model().model.layers)
    training.close()
    ways_to_stay = {"each call": ["call"] * layers, "half kept": ["call", "always"] * (layers // 2),
                    "all kept": ["always"] * layers}  # fmt: skip
    for way, stays in ways_to_stay.items():
        training = Sharded(mesh.with_layout(Parallel(shard=mesh.size)), EIGHT, rows, length, stays)
        run = training.time(training.mesh, rows * length)
        results.add("gathers", way=way, **run, of_data=data_ms["ms"] / run["ms"])
        training.close()


PARTS: dict[str, Callable[..., None]] = {"data": data, "tensor": tensor, "gathers": gathers}


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("parts", nargs="+", choices=PARTS)
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    require_gpu()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with present_mesh(device_type="cuda") as mesh:
        results = Results(mesh, given.json)
        for part in given.parts:
            PARTS[part](mesh, results)


if __name__ == "__main__":
    main()
