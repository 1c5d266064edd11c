"""Several GPUs of one host against one of them, each in the same run; as many as there are.

    torchrun --nproc-per-node 2 -m benchmarks.several_gpus PART… [--json FILE]

Weights are random and made here. Ratios count, since all of a part runs in one go: one GPU alone while the others wait,
all at once without a word to each other, all together. PARTs:

    link        rate of all-reduce and all-gather, and what CUDA and NCCL take of a GPU beside torch's allocator
    tensor      a step with products divided: 8B 4×2048
    data        a step of `data` parallel: 8B 4×2048; 0.6B 2×2048 and 2×512 as CUDA graphs
    peers       the first and the last of these beside Hugging Face's modules with PEFT, bitsandbytes and
                DistributedDataParallel (where bitsandbytes is installed)
    context     a step of one row of 65,536 tokens cut along them, whole and packed: eight of the 8B's layers,
                checkpointed (of all 32, four steps of one GPU take over a minute)
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import event_us, provenance
from benchmarks.step_model import MODELS, build, random_batch, timed
from halfbyte.config import Parallel
from halfbyte.parallel.context.exchange import ContextGroup
from halfbyte.parallel.context.model import context_shard
from halfbyte.parallel.mesh import SINGLE_PROCESS, Mesh, present_mesh
from halfbyte.parallel.reduction import clip_gradients, sum_gradients
from halfbyte.train.stepper import GraphedStepper, Stepper

MIB = 2**20
DATA = (("llama-3.1-8b", 4, 2048, False), ("qwen3-0.6b", 2, 2048, True), ("qwen3-0.6b", 2, 512, True))


class Results:
    """What was found so far, written whenever there is more; the main process's."""

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


# --- link ------------------------------------------------------------------------------------------------------------


def used_bytes() -> int:
    """Of this process's GPU, by all that use it."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def link(mesh: Mesh, results: Results) -> None:
    beside = {"before": used_bytes() - torch.cuda.memory_reserved()}
    group = mesh.group("data")
    for size in (4, 168, 1024):  # MiB; adapters of an 8B in fp32 are 168
        tensor = torch.randn(size * MIB // 4, device="cuda")
        gathered = torch.empty(tensor.numel() * mesh.size, device="cuda")
        reduce = event_us([lambda t=tensor: dist.all_reduce(t, group=group)], 10)
        gather = event_us([lambda t=tensor, g=gathered: dist.all_gather_into_tensor(g, t, group=group)], 10)
        bus = 2 * (mesh.size - 1) / mesh.size * tensor.nbytes / reduce / 1e3
        arriving = (mesh.size - 1) * tensor.nbytes / gather / 1e3
        results.add("link", mib=size, all_reduce_us=reduce, bus_gb_s=bus, all_gather_us=gather, gather_gb_s=arriving)
        del tensor, gathered
    number = torch.ones(1, dtype=torch.float64)
    host = [_seconds(lambda: mesh.sum(number)) for _ in range(50)]
    gc.collect()
    torch.cuda.empty_cache()
    beside["after"] = used_bytes() - torch.cuda.memory_reserved()
    results.add(
        "link", beside_torch_mib={name: size / MIB for name, size in beside.items()}, host_sum_us=min(host) * 1e6
    )
    if mesh.is_main:
        print(subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout)


def _seconds(call: Callable[[], Any]) -> float:
    import time

    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# --- data ------------------------------------------------------------------------------------------------------------


class Training:
    """A model and the loop's own step on one batch, with or without the others."""

    def __init__(self, mesh: Mesh, name: str, rows: int, length: int, graphs: bool):
        import halfbyte
        from halfbyte.modeling.head import causal_lm_loss

        self.mesh, self.model = mesh, build(name, "cuda")
        halfbyte.patch(self.model)
        self.batch = random_batch(name, rows, length, "cuda")
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

        def sums(batch: Any) -> dict[str, Tensor]:
            return {"loss": causal_lm_loss(self.model, batch)[0]}

        self.stepper: Stepper = GraphedStepper(sums, self.trained, lambda: True) if graphs else Stepper(sums)
        self.optimizer = torch.optim.AdamW(self.trained, lr=2e-4, weight_decay=0.0, fused=True)
        self.count = torch.full((), float(rows * (length - 1) * mesh.size), device="cuda")

    def step(self, together: bool) -> Tensor:
        sums = self.stepper([self.batch], self.count)
        if together:
            sums = sum_gradients(self.mesh, self.trained, sums)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        for parameter in self.trained:
            parameter.grad = None
        return sums[0] / self.count


def data(mesh: Mesh, results: Results) -> None:
    """Tokens a second of all GPUs: of one alone, without and with each other."""
    for name, rows, length, graphs in DATA:
        training, tokens, ms = Training(mesh, name, rows, length, graphs), rows * length, {}
        if mesh.is_main:
            ms["alone"] = timed(lambda t=training: t.step(False), tokens)["ms"]  # type: ignore[misc]
        mesh.barrier()
        for way, together in (("apart", False), ("together", True), ("apart again", False), ("together again", True)):
            mesh.barrier()
            run = timed(lambda t=training, w=together: t.step(w), tokens)  # type: ignore[misc]
            ms[way] = mesh.max(run["ms"])
        apart, both = (min(ms[way], ms[f"{way} again"]) for way in ("apart", "together"))
        shape = {"model": name, "rows": rows, "length": length, "graphs": graphs}
        ratios = {"of_apart": apart / both, "of_alone": ms.get("alone", 0.0) / both}
        results.add("data", **shape, ms=ms, **ratios, peak_gib=run["peak_gib"], losses=run["losses"])
        training.stepper.close()
        del training
        gc.collect()
        torch.cuda.empty_cache()


# --- peers -----------------------------------------------------------------------------------------------------------


def peers(mesh: Mesh, results: Results) -> None:
    """A step of all GPUs together, ours and a peer's."""
    for name, rows, length, graphs in (DATA[0], DATA[-1]):
        training, tokens = Training(mesh, name, rows, length, graphs), rows * length
        mesh.barrier()
        ours = mesh.max(timed(lambda t=training: t.step(True), tokens)["ms"])  # type: ignore[misc]
        training.stepper.close()
        del training
        gc.collect()
        torch.cuda.empty_cache()
        mesh.barrier()
        if mesh.is_main:
            theirs, said = _of_peer(mesh, name, rows, length)
            shape = {"model": name, "rows": rows, "length": length, "graphs": graphs}
            results.add("peers", **shape, ours_ms=ours, theirs_ms=theirs, times=theirs and theirs / ours, said=said)
        mesh.barrier()


def _of_peer(mesh: Mesh, name: str, rows: int, length: int) -> tuple[float | None, str]:
    """Milliseconds of a step in processes of its own; where it fails, what it said."""
    begin = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(mesh.size)]
    shape = [name, str(rows), str(length)]
    command = [sys.executable, *begin, "-m", "benchmarks.step_peers", "bitsandbytes", *shape]
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "GROUP_", "ROLE_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(launcher)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    found = [json.loads(line.removeprefix("RESULT")) for line in ran.stdout.splitlines() if line.startswith("RESULT")]
    return (found[0]["ms"], "") if found else (None, ran.stderr[-1500:])


# --- context ----------------------------------------------------------------------------------------------------------

MODELS["llama-3.1-8b, 8 layers"] = ("Llama", {**MODELS["llama-3.1-8b"][1], "num_hidden_layers": 8})
LONG = 65536  # tokens of a row
DOCUMENT = 500, 8000  # tokens of a packed document


def long_row(name: str, packed: bool) -> dict[str, Any]:
    """As the fused step's collators make it."""
    from halfbyte.data.collate import PackedCollator

    if not packed:
        return random_batch(name, 1, LONG, "cuda")
    ids = random_batch(name, 1, LONG, "cpu")["input_ids"][0].tolist()
    generator, lengths = torch.Generator().manual_seed(2), list[int]()
    while (left := LONG - sum(lengths)) > 0:
        lengths.append(min(left, int(torch.randint(*DOCUMENT, (), generator=generator))))
    row = PackedCollator(0, fused=True, max_length=LONG)([{"input_ids": ids, "labels": ids, "seq_lengths": lengths}])
    return {name: value.to("cuda") if isinstance(value, Tensor) else value for name, value in row.items()}


def context(mesh: Mesh, results: Results) -> None:
    """One row on one GPU while the others wait, then cut among all: T₁ ÷ n·T; the first step's loss and gradients."""
    import halfbyte
    from halfbyte.parallel.context.model import context_parallel

    name, mesh = "llama-3.1-8b, 8 layers", mesh.with_layout(Parallel(context=mesh.size))
    training = Training(mesh, name, 1, LONG, False)
    halfbyte.patch(training.model, "checkpoint")
    for packed in (False, True):
        row, found = long_row(name, packed), dict[str, Any]()
        training.count = (row["labels"][:, 1:] != -100).sum().float()
        training.batch = row
        if mesh.is_main:
            found["alone"] = _few_steps(training, mesh, together=False)
        mesh.barrier()
        training.batch = context_shard(row, mesh)
        with context_parallel(training.model, mesh):
            found["together"] = _few_steps(training, mesh, together=True)
        ms = {way: mesh.max(each["ms"]) if way == "together" else each["ms"] for way, each in found.items()}
        peaks = {way: each["peak_gib"] for way, each in found.items()}
        pairs = zip(found.get("alone", {}).get("norms", ()), found["together"]["norms"], strict=False)
        far = [abs(own / theirs - 1) for theirs, own in pairs]
        shape = {"model": name, "rows": 1, "length": LONG, "packed": packed}
        efficiency = ms.get("alone", 0.0) / mesh.size / ms["together"]
        results.add("context", **shape, ms=ms, efficiency=efficiency, peak_gib=peaks, first_step_off=far)
    _exchanges(mesh, results)


def _few_steps(training: Training, mesh: Mesh, together: bool) -> dict[str, Any]:
    """Loss and norm of the gradients of the first weights, then the median of three steps that leave them alone."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
    torch.cuda.reset_peak_memory_stats()
    for event in events:
        event.record()
        sums = training.stepper([training.batch], training.count)
        if together:
            sums = sum_gradients(mesh, training.trained, sums)
        norm = torch.nn.utils.clip_grad_norm_(training.trained, 1.0)
        for parameter in training.trained:
            parameter.grad = None
    torch.cuda.synchronize()
    ms = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events[1:]))[1]
    norms = [float(sums[0] / training.count), float(norm)]
    return {"ms": ms, "norms": norms, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def _exchanges(mesh: Mesh, results: Results) -> None:
    """Milliseconds that a layer of the 8B spends around attention: to whole rows and back."""
    among, length = ContextGroup(mesh.size, mesh.group("context")), LONG // mesh.size
    query, key, value = (
        torch.randn(1, length, heads, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for heads in (32, 8, 8)
    )
    out = torch.randn(1, LONG, 32 // mesh.size, 128, dtype=torch.bfloat16, device="cuda")
    there = event_us([lambda: among.to_heads(query, key, value)], 10)
    back = event_us([lambda: among.to_tokens(out, 32)], 10)
    results.add("context", exchanges_ms={"to_heads": there / 1e3, "to_tokens": back / 1e3})


# --- tensor ----------------------------------------------------------------------------------------------------------


def tensor(mesh: Mesh, results: Results) -> None:
    """A step of the 8B on one GPU while the others wait, then on all: T₁ ÷ T; the first step's loss and gradients."""
    import halfbyte
    from halfbyte.parallel.tensor.model import apply_tensor_parallel

    name, rows, length = "llama-3.1-8b", 4, 2048
    found: dict[str, Any] = {}
    mesh = mesh.with_layout(Parallel(tensor=mesh.size))
    for way in ("alone", "together"):
        training = Training(mesh, name, rows, length, False)
        training.count = torch.full((), float(rows * (length - 1)), device="cuda")
        if way == "together":
            halfbyte.unpatch(training.model)
            apply_tensor_parallel(training.model, mesh)
            halfbyte.patch(training.model)
            training.trained = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
        if way == "together" or mesh.is_main:
            found[way] = _divided_steps(training, mesh, way == "together")
        mesh.barrier()
        training.stepper.close()
        del training
        gc.collect()
        torch.cuda.empty_cache()
    found["together"]["ms"] = mesh.max(found["together"]["ms"])
    if mesh.is_main:
        pairs = zip(found["alone"]["norms"], found["together"]["norms"], strict=True)
        far = [abs(own / theirs - 1) for theirs, own in pairs]
        shape = {"model": name, "rows": rows, "length": length}
        results.add(
            "tensor", **shape, **found, speedup=found["alone"]["ms"] / found["together"]["ms"], first_step_off=far
        )
    _sums_of_streams(mesh, results, rows * length, 4096)


def _divided_steps(training: Training, mesh: Mesh, together: bool) -> dict[str, Any]:
    """Loss and norm of the gradients of the first weights, then the median of ten steps that leave them alone."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(14)]
    torch.cuda.reset_peak_memory_stats()
    norms: list[float] = []
    for event in events:
        event.record()
        sums = training.stepper([training.batch], training.count)
        if together:
            sums = sum_gradients(mesh, training.trained, sums)
        norm = clip_gradients(mesh if together else SINGLE_PROCESS, training.trained, 1.0)
        if not norms:
            norms = [float(sums[0] / training.count), float(norm)]
        for parameter in training.trained:
            parameter.grad = None
    torch.cuda.synchronize()
    ms = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events[3:]))[5]
    return {"ms": ms, "norms": norms, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def _sums_of_streams(mesh: Mesh, results: Results, tokens: int, width: int) -> None:
    """Milliseconds of the sums of a step of the 8B: four a layer."""
    stream = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
    one = event_us([lambda: dist.all_reduce(stream, group=mesh.group("tensor"))], 10)
    results.add("tensor", sums_ms=4 * 32 * one / 1e3)


PARTS = {"link": link, "data": data, "peers": peers, "tensor": tensor, "context": context}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--json")
    given = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with present_mesh(kind="cuda") as mesh:
        results = Results(mesh, given.json)
        for part in given.parts:
            PARTS[part](mesh, results)


if __name__ == "__main__":
    main()
