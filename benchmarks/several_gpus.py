"""A training step on several GPUs of one host, compared with one GPU in the same run. All weights are random.

    torchrun --nproc-per-node 2 -m benchmarks.several_gpus PART… [--json FILE]

Compare ratios: each part times one GPU alone while the others block, all GPUs without communication, and all together.

    data      `data` parallel: 8B 4×2048; 0.6B 2×2048 and 2×512 as CUDA graphs
    tensor    `tensor` parallel: 8B 4×2048
    gathers   `shard`: 8B 4×2048; every layer gathered in each pass, every other layer kept gathered, or all
    ways      `shard`: how bytes move: NCCL with all or four channels, or reads from the owner's memory (handles);
              8B 4×2048 launched from Python, 2×512 as a CUDA graph
    seventy   `shard`: 70B 1×2048 on GPUs filled up except for --card-gib, as the plan for that memory divides it
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import step_model
from benchmarks.harness import event_us, free_memory, parser_of, provenance
from benchmarks.step_model import build, empty_model, fill, random_batch, run_config, timed
from halfbyte.config import Parallel
from halfbyte.memory.allocators import FIRST_KERNELS, memory_cap
from halfbyte.modeling.cast_cache import cast_replacements
from halfbyte.parallel.launch.bandwidth import all_gather_bandwidth
from halfbyte.parallel.mesh import SINGLE_PROCESS, Mesh, present_mesh
from halfbyte.parallel.reduction import clip_gradients, sum_gradients
from halfbyte.parallel.shard.model import has_static_gradients, shard_model, sharded
from halfbyte.parallel.shard.optimizer import shard_optimizer
from halfbyte.train.stepper import GraphedStepper, Stepper
from halfbyte.utils.hardware import fixed_segments, free_cached_memory

GIB = 2**30
EIGHT, SEVENTY = "llama-3.1-8b", "llama-3.1-70b"
DATA = ((EIGHT, 4, 2048, False), ("qwen3-0.6b", 2, 2048, True), ("qwen3-0.6b", 2, 512, True))
step_model.MODELS[SEVENTY] = ("Llama", step_model.MODELS[EIGHT][1] | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
})  # fmt: skip


class Results:
    """The main process's results, written after each addition."""

    def __init__(self, mesh: Mesh, path: str | None):
        self.mesh, self.path = mesh, path
        self.found: dict[str, Any] = {"gpus": mesh.size}

    def add(self, part: str, **numbers: Any) -> None:
        if not self.mesh.is_main:
            return
        self.found.setdefault(part, []).append(numbers)
        print(part, json.dumps({key: value for key, value in numbers.items() if key != "losses"}), flush=True)
        if self.path:
            Path(self.path).write_text(json.dumps({**provenance(), **self.found}, indent=1) + "\n")


class Training:
    """A model and the training loop's own step on one batch, with or without the other ranks."""

    def __init__(self, mesh: Mesh, name: str, rows: int, length: int, graphs: bool, model: Any = None):
        import halfbyte
        from halfbyte.modeling.head import causal_lm_loss

        self.mesh, self.model = mesh, model or build(name, "cuda")
        if model is None:
            halfbyte.patch(self.model)
        self.batch = random_batch(name, rows, length, "cuda")

        def sums(batch: Any) -> dict[str, Tensor]:
            return {"loss": causal_lm_loss(self.model, batch)[0]}

        self.trained = self.trained_parameters()
        self.stepper: Stepper = GraphedStepper(sums, self.trained) if graphs else Stepper(sums)
        self.optimizer = torch.optim.AdamW(self.trained, lr=2e-4, weight_decay=0.0, fused=True)
        self.count = torch.full((), float(rows * (length - 1) * mesh.size), device="cuda")

    def trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def step(self, together: bool) -> Tensor:
        sums = self.stepper([self.batch], self.count, may_capture=True)
        if together:
            sums = sum_gradients(self.mesh, self.trained, sums)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        for parameter in self.trained:
            parameter.grad = None
        return sums[0] / self.count

    def time(self, mesh: Mesh, tokens: int, together: bool = True, steps: int = 10) -> dict[str, Any]:
        """Time the slowest rank's step."""
        mesh.barrier()
        run = timed(lambda: self.step(together), tokens, steps)
        return run | {"ms": mesh.max(run["ms"]), "held_gib": torch.cuda.memory_allocated() / GIB}

    def close(self) -> None:
        self.stepper.close()
        self.__dict__.clear()
        free_memory()


def data(mesh: Mesh, results: Results) -> None:
    for name, rows, length, graphs in DATA:
        training, tokens, ms = Training(mesh, name, rows, length, graphs), rows * length, {}
        if mesh.is_main:
            ms["alone"] = timed(lambda t=training: t.step(False), tokens)["ms"]  # type: ignore[misc]
        for way, together in (("apart", False), ("together", True), ("apart again", False), ("together again", True)):
            run = training.time(mesh, tokens, together)
            ms[way] = run["ms"]
        apart, both = (min(ms[way], ms[f"{way} again"]) for way in ("apart", "together"))
        shape = {"model": name, "rows": rows, "length": length, "graphs": graphs}
        ratios = {"of_apart": apart / both, "of_alone": ms.get("alone", 0.0) / both}
        results.add("data", **shape, ms=ms, **ratios, peak_gib=run["peak_gib"], losses=run["losses"])
        training.close()


def tensor(mesh: Mesh, results: Results) -> None:
    """Time one GPU alone, then all. Also compares the first step's loss and gradient norm."""
    import halfbyte
    from halfbyte.parallel.tensor.model import apply_tensor_parallel

    rows, length, found = 4, 2048, dict[str, Any]()
    mesh = mesh.with_layout(Parallel(tensor=mesh.size))
    for way in ("alone", "together"):
        training = Training(mesh, EIGHT, rows, length, False)
        training.count = torch.full((), float(rows * (length - 1)), device="cuda")
        if way == "together":
            halfbyte.unpatch(training.model)
            apply_tensor_parallel(training.model, mesh)
            halfbyte.patch(training.model)
            training.trained = training.trained_parameters()
        if way == "together" or mesh.is_main:
            found[way] = _tensor_steps(training, mesh, way == "together")
        mesh.barrier()
        training.close()
    found["together"]["ms"] = mesh.max(found["together"]["ms"])
    if mesh.is_main:
        alone, together = found["alone"], found["together"]
        off = [abs(ours / theirs - 1) for theirs, ours in zip(alone["norms"], together["norms"], strict=True)]
        shape = {"model": EIGHT, "rows": rows, "length": length}
        results.add("tensor", **shape, **found, speedup=alone["ms"] / together["ms"], first_step_off=off)


def _tensor_steps(training: Training, mesh: Mesh, together: bool) -> dict[str, Any]:
    """Return loss and gradient norm of the initial weights, and the median ms of ten steps that do not update them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(14)]
    torch.cuda.reset_peak_memory_stats()
    norms: list[float] = []
    for event in events:
        event.record()
        sums = training.stepper([training.batch], training.count, may_capture=True)
        if together:
            sums = sum_gradients(mesh, training.trained, sums)
        norm = clip_gradients(mesh if together else SINGLE_PROCESS, training.trained, 1.0)
        norms = norms or [float(sums[0] / training.count), float(norm)]
        for parameter in training.trained:
            parameter.grad = None
    torch.cuda.synchronize()
    ms = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events[3:]))[5]
    return {"ms": ms, "norms": norms, "peak_gib": torch.cuda.max_memory_allocated() / GIB}


class Sharded(Training):
    """A model whose decoder layers are sharded, and the training loop's own step on one batch.

    stays: for each layer, "call" (gathered in each pass) or "always" (kept gathered).
    """

    def __init__(self, mesh: Mesh, name: str, rows: int, length: int, stays: Sequence[Any]):
        super().__init__(mesh, name, rows, length, False)
        shard_model(self.model, mesh, stays)
        self.shard_trained()

    def shard_trained(self) -> None:
        """Shard adapters and optimizer state like the training loop."""
        alike = sharded(self.model) is not None and has_static_gradients(self.model)
        narrow = partial(cast_replacements, self.model, torch.bfloat16)
        self.units = shard_optimizer(self.mesh, self.trained, elementwise=True, alike=alike, narrow=narrow)
        self.units.adopt(self.optimizer)
        free_memory()

    def step(self, together: bool) -> Tensor:
        sums = self.stepper([self.batch], self.count, may_capture=True)
        sums = self.units.reduce(sums) if together else sums
        self.units.clip(1.0)
        self.optimizer.step()
        self.units.after_step()
        return sums[0] / self.count

    def time(self, mesh: Mesh, tokens: int, together: bool = True, steps: int = 10) -> dict[str, Any]:
        run, share = super().time(mesh, tokens, together, steps), sharded(self.model)
        if share is not None:
            before = share.gathers.nbytes
            self.step(together)
            run["gathered_gb"] = (share.gathers.nbytes - before) / 1e9
        return run


def gathers(mesh: Mesh, results: Results) -> None:
    rows, length = 4, 2048
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


def by_nccl(share: Any, channels: int | None = None) -> None:
    """Gather by NCCL, with at most `channels` channels (multiprocessors)."""
    group = share.group
    if channels:
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = channels
        group = dist.new_group(backend="nccl", pg_options=options)
    for each in share.each:
        each.slices, each.group = None, group


def by_handles(share: Any) -> None:
    """Read shards from their owner's memory."""
    share.read_peers()
    if share.why:
        raise RuntimeError(share.why)


WAYS: dict[str, Callable[[Any], None]] = {
    "NCCL": by_nccl, "NCCL, 4 channels": partial(by_nccl, channels=4), "handles": by_handles,
}  # fmt: skip
LONG, SHORT = "4x2048", "2x512 as a graph"


class BothShapes(Training):
    """One model and two batches: 4×2048 launched from Python, 2×512 as a CUDA graph."""

    def __init__(self, mesh: Mesh):
        super().__init__(mesh, EIGHT, 4, 2048, False)
        self.eager = self.stepper
        self.batches = {LONG: self.batch, SHORT: random_batch(EIGHT, 2, 512, "cuda")}

    def times(self, mesh: Mesh, together: bool = True, shapes: Sequence[str] = (LONG, SHORT)) -> dict[str, float]:
        found = {}
        for shape in shapes:
            self.batch, graphed = self.batches[shape], shape == SHORT
            self.stepper = GraphedStepper(self.eager.sums, self.trained) if graphed else self.eager
            run = self.time(mesh, self.batch["input_ids"].numel(), together, 10 if graphed else 3)
            found[shape] = run["ms"]
            self.stepper.close()
        return found


def ways(mesh: Mesh, results: Results) -> None:
    sliced, training = mesh.with_layout(Parallel(shard=mesh.size)), BothShapes(mesh)
    alone = training.times(mesh, together=False, shapes=[SHORT])[SHORT]
    data_ms = training.times(mesh)
    results.add("ways", way="data", ms=data_ms, of_alone=data_ms[SHORT] / alone)
    shard_model(training.model, sliced, ["call"] * len(training.model.get_base_model().model.layers))
    free_memory()
    share = sharded(training.model)
    assert share is not None
    keep(share, range(len(share.blocks)))
    kept = training.times(sliced)
    results.add("ways", way="all kept", ms=kept, of_alone=kept[SHORT] / alone)
    keep(share, ())
    for way, use in WAYS.items():
        try:
            use(share)
            reason = ""
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
        if any(reasons := sliced.gather(reason)):
            results.add("ways", way=way, failed=reasons)
            continue
        gathered, ms = one_gather(share, sliced), training.times(sliced)
        of_data = {shape: data_ms[shape] / ms[shape] for shape in ms}
        results.add("ways", way=way, **gathered, ms=ms, of_data=of_data, of_alone=ms[SHORT] / alone)


def keep(share: Any, chosen: Collection[int]) -> None:
    """Keep the blocks of these indices gathered, and no others."""
    for at, block in enumerate(share.blocks):
        block.set_reshard_after_forward(at not in chosen, recurse=False)
        block.set_reshard_after_backward(at not in chosen, recurse=False)
        block.reshard()


def one_gather(share: Any, mesh: Mesh) -> dict[str, Any]:
    """Time the gather of one block and NCCL's all-gather of as many bytes, and compare their results."""
    gather = share.each[1]
    token = torch.empty(16 * mesh.size, dtype=torch.uint8, device="cuda")
    us = event_us([lambda: gather(token, token, None)], 20)
    found, slices = gather.whole.clone(), gather.slices
    gather.slices = None
    gather(token, token, None)
    equal = torch.equal(found, gather.whole)
    gather.slices = slices
    own = torch.empty(gather.raw.numel(), dtype=torch.uint8, device="cuda")
    nccl = event_us([lambda: dist.all_gather_into_tensor(found, own, group=share.group)], 20)
    gather.whole.untyped_storage().resize_(0)
    mesh.barrier()
    return {"us": mesh.max(us), "nccl_us": nccl, "of_nccl": nccl / us, "equal": equal}


def build_sharded(name: str, mesh: Mesh) -> Any:
    """Build what `step_model.build` builds, layer by layer and sharded, like loading does."""
    from halfbyte.formats import named
    from halfbyte.layers import QuantizedLinear
    from halfbyte.modeling.adapters import add_adapter
    from halfbyte.parallel.shard.placement import Placement
    from halfbyte.tensor import QuantizedTensor

    torch.manual_seed(0)
    model, format_, placement = empty_model(name), named("nf4"), Placement(("shard",))

    def piece(linear: nn.Linear) -> nn.Module:
        stored = QuantizedLinear.from_linear(linear, format_)
        if mesh.degree("shard") == 1:
            return stored
        weight = stored.weight.data
        own = placement.cut(weight, mesh.degree("shard"))[mesh.coordinate("shard")].clone()
        parameter: Any = nn.Parameter(own, requires_grad=False)
        empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        parameter.template = QuantizedTensor.quantize(empty, format_)
        del stored.weight
        stored.weight = parameter
        return stored

    fill(model, "cuda", piece)
    return add_adapter(model, run_config(name)).train()


class FilledGpu:
    """Allocates memory until only `gib` GiB of the GPU are free, like on a smaller card. 0: allocates nothing."""

    def __init__(self, gib: float):
        total, device = torch.cuda.mem_get_info()[1], torch.device("cuda", torch.cuda.current_device())
        with fixed_segments(device):
            taken = int(total - gib * GIB) // 2**21 * 2**21 if gib else 0
            self.ballast = torch.empty(taken, dtype=torch.uint8, device=device)

    def memory(self) -> dict[str, float]:
        """Return the GiB that torch has allocated and reserved, now and at most, and that other libraries use."""
        taken, (free, total) = self.ballast.nbytes, torch.cuda.mem_get_info()
        torch.cuda.synchronize()
        found = {
            "allocated": torch.cuda.memory_allocated() - taken,
            "reserved": torch.cuda.memory_reserved() - taken,
            "beside": total - free - torch.cuda.memory_reserved(),
            "used": total - free - taken,
            "most_allocated": torch.cuda.max_memory_allocated() - taken,
            "most_reserved": torch.cuda.max_memory_reserved() - taken,
        }
        return {name: round(size / GIB, 3) for name, size in found.items()}


class Seventy(Sharded):
    """The 70B with offloaded or checkpointed activations."""

    def __init__(self, mesh: Mesh, level: str, on_host: Collection[int], log: Callable[[str], Any]):
        import halfbyte

        model = build_sharded(SEVENTY, mesh)
        log("built")
        halfbyte.patch(model, level)
        shard_model(model, mesh, on_host=on_host)
        log("sharded")
        Training.__init__(self, mesh, SEVENTY, 1, 2048, False, model)
        self.shard_trained()


def seventy(mesh: Mesh, results: Results, card_gib: float) -> None:
    from halfbyte.plan.estimate import estimate

    shard, device = mesh.with_layout(Parallel(shard=mesh.size)), torch.device("cuda", mesh.local)
    filled = FilledGpu(card_gib)

    def log(phase: str) -> None:
        results.add("seventy", phase=phase, gib=filled.memory())

    all_gather_bandwidth(shard, device)  # as a run does before it plans: NCCL's buffers are allocated
    free_cached_memory(device)
    log("connected")
    config = run_config(SEVENTY, per_device_train_batch_size=1, max_length=2048, activation_checkpointing="offload")
    free = -mesh.max(-torch.cuda.mem_get_info()[0])
    plan = mesh.from_main(
        estimate(config, step_model.model_config(SEVENTY), device="cuda", capacity_bytes=free, layout=shard.layout)
    )
    results.add("seventy", planned_gib=plan.total / GIB, capacity_gib=plan.capacity_bytes / GIB, hosted=plan.hosted)
    with memory_cap(device, plan.capacity_bytes - FIRST_KERNELS):  # like a run
        training = Seventy(shard, "offload", plan.hosted, log)
        run = training.time(shard, 2048)
        results.add("seventy", way="offload", every=shard.gather(filled.memory()), **run)
    training.close()
    del filled.ballast
    free_memory()
    if mesh.is_main:
        training = Seventy(SINGLE_PROCESS, "checkpoint", (), lambda phase: None)
        results.add("seventy", way="one GPU", **training.time(SINGLE_PROCESS, 2048, together=False, steps=6))
        training.close()
    mesh.barrier()


PARTS: dict[str, Callable[..., None]] = {
    "data": data, "tensor": tensor, "gathers": gathers, "ways": ways, "seventy": seventy,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("parts", nargs="+", choices=PARTS)
    made.add_argument("--card-gib", type=float, default=24.0, help="seventy: memory of the card; 0: all of this one")
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with present_mesh(kind="cuda") as mesh:
        results = Results(mesh, given.json)
        for part in given.parts:
            PARTS[part](mesh, results, *([given.card_gib] if part == "seventy" else []))


if __name__ == "__main__":
    main()
