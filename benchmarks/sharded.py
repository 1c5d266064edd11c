"""Frozen weights in slices on several GPUs of one host, against whole ones, in the same run.

    torchrun --nproc-per-node 2 -m benchmarks.sharded PART… [--json FILE]

Weights are random and made here. PARTs:

    gathers     8B 4×2048, each block gathered twice a micro-batch, half of the blocks kept, all of them, and slices in
                the host's memory; beside it data parallel, and NCCL's all-gather of as many bytes
    graphs      8B 2×512 as a CUDA graph: one GPU's, data parallel, and slices
    ways        how bytes come: by NCCL of more or fewer channels, or read from their owner's memory; 8B 4×2048 as
                Python launches it, 2×512 as a CUDA graph, beside data parallel and all blocks kept; and what the host
                does in a step
    seventy     70B 1×2048 in slices on GPUs that are filled up but for 24 GiB, as the plan for those divides it: bytes
                after each phase; and on one GPU, whole
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import step_model
from benchmarks.common import event_us
from benchmarks.several_gpus import Results, Training, used_bytes
from benchmarks.step_model import empty_model, fill, random_batch, run_config, timed
from halfbyte.config import Parallel
from halfbyte.memory.allocators import FIRST_KERNELS, memory_cap
from halfbyte.modeling.cast_cache import cast_replacements
from halfbyte.parallel.launch.bandwidth import all_gather_bandwidth
from halfbyte.parallel.mesh import SINGLE_PROCESS, Mesh, present_mesh
from halfbyte.parallel.shard.model import has_static_gradients, shard_model, sharded
from halfbyte.parallel.shard.optimizer import shard_optimizer
from halfbyte.train.stepper import GraphedStepper
from halfbyte.utils.hardware import fixed_segments, free_cached_memory

GIB = 2**30
SMALL = 24.0  # GiB of a card
SEVENTY = dict(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, tie_word_embeddings=False,
)  # fmt: skip
step_model.MODELS["llama-3.1-70b"] = ("Llama", SEVENTY)


class Sharded(Training):
    """A sharded model with given residencies of its blocks, and the training loop's step on one batch."""

    def __init__(
        self, mesh: Mesh, name: str, rows: int, length: int, graphs: bool, stays: Sequence[Any], on_host: bool = False
    ):
        super().__init__(mesh, name, rows, length, graphs)
        shard_model(self.model, mesh, stays, on_host=on_host)
        self.step_slices()

    def step_slices(self) -> None:
        """Have the optimizer step what the loop's would."""
        static_gradients = sharded(self.model) is not None and has_static_gradients(self.model)
        narrow = partial(cast_replacements, self.model, torch.bfloat16)
        self.units = shard_optimizer(
            self.mesh, self.trained, elementwise=True, static_gradients=static_gradients, narrow=narrow
        )
        self.units.adopt(self.optimizer)
        gc.collect()
        torch.cuda.empty_cache()

    def step(self, together: bool) -> Tensor:
        sums = self.stepper([self.batch], self.count)
        sums = self.units.reduce(sums) if together else sums
        self.units.clip(1.0)
        self.optimizer.step()
        self.units.after_step()
        return sums[0] / self.count

    def gathered(self) -> tuple[int, int]:
        share = sharded(self.model)
        return (0, 0) if share is None else (share.stats.count, share.stats.nbytes)


def measured(training: Any, mesh: Mesh, tokens: int, together: bool = True, steps: int = 10) -> dict[str, Any]:
    """Time of a step, the slowest GPU's; what was gathered in one of them; what the GPU holds."""
    mesh.barrier()
    run = timed(lambda: training.step(together), tokens, steps)
    run["ms"] = mesh.max(run["ms"])
    if isinstance(training, Sharded):
        before = training.gathered()
        training.step(together)
        after = training.gathered()
        run["gathers"], run["gathered_gb"] = after[0] - before[0], (after[1] - before[1]) / 1e9
    torch.cuda.synchronize()
    run["held_gib"] = torch.cuda.memory_allocated() / GIB
    run["used_gib"] = used_bytes() / GIB
    return run


def clean(training: Any) -> None:
    training.stepper.close()
    gc.collect()
    torch.cuda.empty_cache()


# --- gathers ---------------------------------------------------------------------------------------------------------


def ways_to_stay(layers: int) -> dict[str, list[str]]:
    return {
        "each call": ["call"] * layers,
        "half kept": ["call", "always"] * (layers // 2),
        "all kept": ["always"] * layers,
    }


def gathers(mesh: Mesh, results: Results) -> None:
    name, rows, length = "llama-3.1-8b", 4, 2048
    sliced, tokens = mesh.with_layout(Parallel(shard=mesh.size)), rows * length
    training: Any = Training(mesh, name, rows, length, False)
    data = measured(training, mesh, tokens)
    results.add("gathers", way="data", **data)
    layers = len(training.model.get_base_model().model.layers)
    clean(training)
    del training
    for way, stays in [*ways_to_stay(layers).items(), ("on the host", ["call"] * layers)]:
        training = Sharded(sliced, name, rows, length, False, stays, on_host=way == "on the host")
        run = measured(training, sliced, tokens)
        results.add("gathers", way=way, **run, of_data=data["ms"] / run["ms"], same_losses=run["losses"][:3])
        if way == "each call":
            rate(sliced, results, training)
        clean(training)
        del training


def rate(mesh: Mesh, results: Results, training: Sharded) -> None:
    """A block's gather, copies into place included, beside NCCL's all-gather of as many bytes."""
    share = sharded(training.model)
    assert share is not None
    block, before = share.blocks[1], share.stats.nbytes

    def gather() -> None:
        block.unshard()
        block.reshard()

    gather()
    size = share.stats.nbytes - before
    packed = sum(p.nbytes for p in quantized(block))
    out = torch.empty(size, dtype=torch.uint8, device="cuda")
    own = torch.empty(size // mesh.size, dtype=torch.uint8, device="cuda")
    plain = event_us([lambda: dist.all_gather_into_tensor(out, own, group=mesh.group("shard"))], 20)
    found = event_us([gather], 20)
    results.add(
        "rate", mib=size / 2**20, packed_mib=packed / 2**20, nccl_us=plain, ours_us=found, of_nccl=plain / found
    )


def quantized(block: Any) -> list[Any]:
    """The packed weights of a block, whole for as long as they are looked at."""
    from halfbyte.tensor import QuantizedTensor

    block.unshard()
    found = [p.data for p in block.parameters() if isinstance(p.data, QuantizedTensor)]
    block.reshard()
    return found


# --- graphs ----------------------------------------------------------------------------------------------------------


def graphs(mesh: Mesh, results: Results) -> None:
    name, rows, length = "llama-3.1-8b", 2, 512
    sliced, tokens = mesh.with_layout(Parallel(shard=mesh.size)), rows * length
    for graphed in (True, False):
        training: Any = Training(mesh, name, rows, length, graphed)
        alone = measured(training, mesh, tokens, together=False)
        results.add("graphs", way="one GPU's", graphs=graphed, **alone)
        data = measured(training, mesh, tokens)
        results.add("graphs", way="data", graphs=graphed, **data, of_one=data["ms"] / alone["ms"])
        layers = len(training.model.get_base_model().model.layers)
        clean(training)
        del training
        for way, stays in ways_to_stay(layers).items():
            training = Sharded(sliced, name, rows, length, graphed, stays)
            run = measured(training, sliced, tokens)
            held = graphed and training.stepper.holds_graphs
            results.add("graphs", way=way, graphs=graphed, captured=held, **run, of_one=run["ms"] / alone["ms"])
            clean(training)
            del training


# --- ways ------------------------------------------------------------------------------------------------------------


def with_channels(count: int) -> Callable[[Any], None]:
    """Gathers by NCCL, of no more channels (and so multiprocessors) than that."""

    def use(share: Any) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = count
        group = dist.new_group(backend="nccl", pg_options=options)
        for each in share.block_gathers:
            each.peer_shards, each.group = None, group

    return use


def by_nccl(share: Any) -> None:
    for each in share.block_gathers:
        each.peer_shards, each.group = None, share.group


def by_handles(share: Any) -> None:
    share.read_peers()
    if share.fallback_reason:
        raise RuntimeError(share.fallback_reason)


GRAPHED = "2x512 as a graph"
WAYS: dict[str, Callable[[Any], None]] = {
    "NCCL": by_nccl,
    "NCCL, 4 channels": with_channels(4),
    "handles": by_handles,
}


class Both(Training):
    """Two shapes of one model: as Python launches them, and as a CUDA graph."""

    def __init__(self, mesh: Mesh, name: str):
        super().__init__(mesh, name, 4, 2048, False)
        self.eager, self.batches = self.stepper, {
            "4x2048": self.batch, GRAPHED: random_batch(name, 2, 512, "cuda")
        }  # fmt: skip

    def times(self, mesh: Mesh, together: bool = True) -> dict[str, float]:
        found = {}
        for shape, batch in self.batches.items():
            graphed = shape == GRAPHED
            self.batch = batch
            self.stepper = GraphedStepper(self.eager.sums, self.trained, lambda: True) if graphed else self.eager
            steps = 10 if graphed else 3
            found[shape] = measured(self, mesh, batch["input_ids"].numel(), together, steps)["ms"]
            self.stepper.close()
        return found


def ways(mesh: Mesh, results: Results) -> None:
    sliced = mesh.with_layout(Parallel(shard=mesh.size))
    training = Both(mesh, "llama-3.1-8b")
    short = training.batches.pop("4x2048")
    alone = training.times(mesh, together=False)[GRAPHED]
    training.batches = {"4x2048": short, **training.batches}
    data = training.times(mesh)
    results.add("ways", way="data", ms=data, of_alone=data[GRAPHED] / alone)
    shard_model(training.model, sliced, ["call"] * len(training.model.get_base_model().model.layers))
    gc.collect()
    torch.cuda.empty_cache()
    share = sharded(training.model)
    assert share is not None
    keep(share, range(len(share.blocks)))
    kept = training.times(sliced)
    results.add("ways", way="all kept", ms=kept, of_alone=kept[GRAPHED] / alone)
    keep(share, ())
    worked = []
    for way, use in WAYS.items():
        try:
            use(share)
            told = ""
        except Exception as error:
            told = f"{type(error).__name__}: {error}"[:300]
        if any(sliced.gather(told)):
            results.add("ways", way=way, failed=sliced.gather(told))
            continue
        worked.append(way)
        gathered, facts = one_gather(share, sliced), training.times(sliced)
        spent = 2 * len(share.blocks) * gathered["us"] / 1e3
        results.add(
            "ways", way=way, **gathered, ms=facts, of_data={shape: data[shape] / ms for shape, ms in facts.items()},
            of_alone=facts[GRAPHED] / alone,
            hidden={shape: 1 - (ms - kept[shape]) / spent for shape, ms in facts.items()},
        )  # fmt: skip
    host(training, share, sliced, results, {"NCCL", worked[-1]})


def keep(share: Any, chosen: Collection[int]) -> None:
    """From now on the blocks of these numbers stay whole, and no others."""
    for at, block in enumerate(share.blocks):
        block.set_reshard_after_forward(at not in chosen, recurse=False)
        block.set_reshard_after_backward(at not in chosen, recurse=False)
        block.reshard()


def one_gather(share: Any, mesh: Mesh) -> dict[str, Any]:
    """Of a block: its time on the device beside NCCL's all-gather of as many bytes, FSDP2's on the host; whether its
    bytes are those that NCCL gathers."""
    gather, block = share.block_gathers[1], share.blocks[1]
    token = torch.empty(16 * mesh.size, dtype=torch.uint8, device="cuda")
    us = event_us([lambda: gather(token, token, None)], 20)
    found, slices = gather.full.clone(), gather.peer_shards
    gather.peer_shards = None
    gather(token, token, None)
    equal = torch.equal(found, gather.full)
    gather.peer_shards = slices
    own = torch.empty(gather.shard.numel(), dtype=torch.uint8, device="cuda")
    nccl = event_us([lambda: dist.all_gather_into_tensor(found, own, group=share.group)], 20)
    gather.full.untyped_storage().resize_(0)
    mesh.barrier()
    began = time.perf_counter()
    for _ in range(20):
        block.unshard()
        block.reshard()
    took = (time.perf_counter() - began) / 20 * 1e6
    torch.cuda.synchronize()
    return {"us": mesh.max(us), "nccl_us": nccl, "of_nccl": nccl / us, "host_us": took, "equal": equal}


def host(training: Both, share: Any, mesh: Mesh, results: Results, chosen_ways: Collection[str]) -> None:
    """A short step as Python launches it, which is as slow as the host: milliseconds, and what takes them."""
    layers = len(share.blocks)
    training.batch, training.stepper = training.batches[GRAPHED], training.eager
    for way in sorted(chosen_ways):
        WAYS[way](share)
        for name, chosen in (("each call", ()), ("half kept", range(0, layers, 2)), ("all kept", range(layers))):
            keep(share, chosen)
            ms = measured(training, mesh, 1024, steps=4)["ms"]
            results.add("host", way=way, kept=name, ms=ms, top=busiest(training) if name == "half kept" else {})
    keep(share, ())


def busiest(training: Training) -> dict[str, Any]:
    """What takes the host longest in a step: how often, milliseconds by itself."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        training.step(True)
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_cpu_time_total)[:20]
    return {row.key: [row.count, round(row.self_cpu_time_total / 1e3, 2)] for row in rows}


# --- seventy ---------------------------------------------------------------------------------------------------------


def build_sliced(name: str, mesh: Mesh, storage: str = "nf4", device: str = "cuda") -> Any:
    """What `step_model.build` makes, in pieces as loading makes them."""
    from halfbyte.formats import named
    from halfbyte.layers import QuantizedLinear
    from halfbyte.modeling.adapters import add_adapter
    from halfbyte.parallel.shard.placement import Placement
    from halfbyte.tensor import QuantizedTensor

    torch.manual_seed(0)
    model, format_, placement = empty_model(name), named(storage), Placement(("shard",))

    def piece(linear: nn.Linear) -> nn.Module:
        stored = QuantizedLinear.from_linear(linear, format_)
        if mesh.degree("shard") == 1:
            return stored
        weight = stored.weight.data
        own = placement.split(weight, mesh.degree("shard"))[mesh.coordinate("shard")].clone()
        parameter: Any = nn.Parameter(own, requires_grad=False)
        empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        parameter.template = QuantizedTensor.quantize(empty, format_)
        del stored.weight
        stored.weight = parameter
        return stored

    fill(model, device, piece)
    return add_adapter(model, run_config(name)).train()


class Filled:
    """A GPU that has no more room than one of `gib`: all else is taken.

    Args:
        gib: None: nothing is.
    """

    def __init__(self, gib: float | None):
        total, device = torch.cuda.mem_get_info()[1], torch.device("cuda", torch.cuda.current_device())
        with fixed_segments(device):
            taken = 0 if gib is None else int(total - gib * GIB) // 2**21 * 2**21
            self.ballast = torch.empty(taken, dtype=torch.uint8, device=device)

    def phases(self) -> dict[str, float]:
        """GiB that torch has allocated and reserved, what all else takes, and the largest of these so far."""
        taken = self.ballast.nbytes
        torch.cuda.synchronize()
        found = {
            "allocated": torch.cuda.memory_allocated() - taken,
            "reserved": torch.cuda.memory_reserved() - taken,
            "beside": used_bytes() - torch.cuda.memory_reserved(),
            "used": used_bytes() - taken,
            "most_allocated": torch.cuda.max_memory_allocated() - taken,
            "most_reserved": torch.cuda.max_memory_reserved() - taken,
        }
        return {name: round(size / GIB, 3) for name, size in found.items()}


def planned(mesh: Mesh, name: str, level: str, batches: int = 1) -> Any:
    """The plan for what is free now: of one row of 2,048 tokens a micro-batch, and so many of these a step."""
    from halfbyte.plan.estimate import estimate

    shape = {"per_device_train_batch_size": 1, "max_length": 2048, "gradient_accumulation_steps": batches}
    config = run_config(name, **shape, activation_checkpointing=level)
    free = -mesh.max(-torch.cuda.mem_get_info()[0])
    return mesh.from_main(
        estimate(config, step_model.model_config(name), device="cuda", capacity_bytes=free, layout=mesh.layout)
    )


class Seventy(Sharded):
    def __init__(self, mesh: Mesh, level: str, on_host: Collection[int] = (), say: Callable[[str], Any] = id):
        import halfbyte
        from halfbyte.modeling.head import causal_lm_loss
        from halfbyte.train.stepper import Stepper

        name = "llama-3.1-70b"
        self.mesh, self.model = mesh, build_sliced(name, mesh)
        say("built")
        halfbyte.patch(self.model, level)
        shard_model(self.model, mesh, on_host=on_host)
        say("sliced")
        self.batch = random_batch(name, 1, 2048, "cuda")
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

        def sums(batch: Any) -> dict[str, Tensor]:
            return {"loss": causal_lm_loss(self.model, batch)[0]}

        self.stepper = Stepper(sums)
        self.optimizer = torch.optim.AdamW(self.trained, lr=2e-4, weight_decay=0.0, fused=True)
        self.count = torch.full((), float(2047 * mesh.size), device="cuda")
        self.step_slices()


def seventy(mesh: Mesh, results: Results) -> None:
    sliced, level, device = mesh.with_layout(Parallel(shard=mesh.size)), "offload", torch.device("cuda", mesh.local)
    filled = Filled(SMALL)

    def say(phase: str) -> None:
        results.add("seventy", phase=phase, gib=filled.phases())

    say("filled")
    all_gather_bandwidth(sliced, device)  # as a run does before it plans: what NCCL takes is taken
    free_cached_memory(device)
    say("connected")
    plan = planned(sliced, "llama-3.1-70b", level)
    results.add("seventy", planned_gib=plan.total / GIB, capacity_gib=plan.capacity_bytes / GIB, hosted=plan.hosted)
    with memory_cap(device, plan.capacity_bytes - FIRST_KERNELS):  # as a run is
        training = Seventy(sliced, level, plan.hosted, say)
        results.add("seventy", collective=sharded(training.model).fallback_reason)  # type: ignore[union-attr]
        say("ready")
        training.step(True)
        say("first step")
        run = measured(training, sliced, 2048, steps=10)
        results.add("seventy", way=level, every=sliced.gather(filled.phases()), **run)
    clean(training)
    del training, filled.ballast
    gc.collect()
    torch.cuda.empty_cache()
    if mesh.is_main:
        training = Seventy(SINGLE_PROCESS, "checkpoint")
        results.add("seventy", way="one GPU", **measured(training, SINGLE_PROCESS, 2048, together=False, steps=6))
        clean(training)
        del training
    mesh.barrier()


PARTS = {"gathers": gathers, "graphs": graphs, "ways": ways, "seventy": seventy}


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
