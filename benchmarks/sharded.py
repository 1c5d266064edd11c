"""Frozen weights in slices on several GPUs of one host, against whole ones, in the same run.

    torchrun --nproc-per-node 2 -m benchmarks.sharded PART… [--json FILE]

Weights are random and made here. PARTs:

    gathers     8B 4×2048, each block gathered twice a micro-batch, half of the blocks kept, all of them, and slices in
                the host's memory; beside it data parallel, and NCCL's all-gather of as many bytes
    graphs      8B 2×512 as a CUDA graph: one GPU's, data parallel, and slices
    seventy     70B 1×2048 in slices, of which no GPU ever has more than a layer whole; and on one GPU, whole
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import step_model
from benchmarks.common import event_us
from benchmarks.several_gpus import Results, Training, used_bytes
from benchmarks.step_model import empty_model, fill, random_batch, run_config, timed
from halfbyte.config import Parallel
from halfbyte.models.copies import in_their_place
from halfbyte.models.sharding import shard_model, sharded, trains_alike
from halfbyte.parallel import ALONE, Mesh, present_mesh
from halfbyte.parallel.trained import trained_units

GIB = 2**30
SEVENTY = dict(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, tie_word_embeddings=False,
)  # fmt: skip
step_model.MODELS["llama-3.1-70b"] = ("Llama", SEVENTY)


class Sharded(Training):
    """A model whose blocks stay whole as `stays` says (parallel.shard), and the loop's own step on one batch."""

    def __init__(
        self, mesh: Mesh, name: str, rows: int, length: int, graphs: bool, stays: Sequence[Any], on_host: bool = False
    ):
        super().__init__(mesh, name, rows, length, graphs)
        shard_model(self.model, mesh, stays, on_host=on_host)
        self.step_slices()

    def step_slices(self) -> None:
        """Have the optimizer step what the loop's would."""
        alike = sharded(self.model) is not None and trains_alike(self.model)
        narrow = partial(in_their_place, self.model, torch.bfloat16)
        self.units = trained_units(self.mesh, self.trained, elementwise=True, alike=alike, narrow=narrow)
        self.units.adopt(self.optimizer)
        gc.collect()
        torch.cuda.empty_cache()

    def step(self, together: bool) -> Tensor:
        sums = self.stepper([self.batch], self.count)
        sums = self.units.reduce(sums) if together else sums
        self.units.clip(1.0)
        self.optimizer.step()
        self.units.stepped()
        return sums[0] / self.count

    def gathered(self) -> tuple[int, int]:
        share = sharded(self.model)
        return (0, 0) if share is None else (share.gathers.count, share.gathers.nbytes)


def measured(training: Any, mesh: Mesh, tokens: int, together: bool = True, steps: int = 10) -> dict[str, Any]:
    """Time of a step, the slowest GPU's; what was gathered in one of them; what the GPU holds."""
    mesh.wait()
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
    sliced, tokens = mesh.laid_out(Parallel(shard=mesh.size)), rows * length
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
    block, before = share.blocks[1], share.gathers.nbytes

    def gather() -> None:
        block.unshard()
        block.reshard()

    gather()
    size = share.gathers.nbytes - before
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
    sliced, tokens = mesh.laid_out(Parallel(shard=mesh.size)), rows * length
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


# --- seventy ---------------------------------------------------------------------------------------------------------


def build_sliced(name: str, mesh: Mesh, storage: str = "nf4", device: str = "cuda") -> Any:
    """What `step_model.build` makes, in pieces as loading makes them."""
    from halfbyte.adapters import add_adapter
    from halfbyte.formats import named
    from halfbyte.layers import QuantizedLinear
    from halfbyte.parallel.placement import Placement
    from halfbyte.tensor import QuantizedTensor

    torch.manual_seed(0)
    model, format_, placement = empty_model(name), named(storage), Placement(("shard",))

    def piece(linear: nn.Linear) -> nn.Module:
        stored = QuantizedLinear.from_linear(linear, format_)
        if mesh.ways("shard") == 1:
            return stored
        weight = stored.weight.data
        own = placement.cut(weight, mesh.ways("shard"))[mesh.place("shard")].clone()
        parameter: Any = nn.Parameter(own, requires_grad=False)
        empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        parameter.template = QuantizedTensor.quantize(empty, format_)
        del stored.weight
        stored.weight = parameter
        return stored

    fill(model, device, piece)
    return add_adapter(model, run_config(name)).train()


class Seventy(Sharded):
    def __init__(self, mesh: Mesh, level: str):
        import halfbyte
        from halfbyte.models.head import causal_lm_loss
        from halfbyte.train.stepper import Stepper

        name = "llama-3.1-70b"
        self.mesh, self.model = mesh, build_sliced(name, mesh)
        halfbyte.patch(self.model, level)
        shard_model(self.model, mesh)
        self.batch = random_batch(name, 1, 2048, "cuda")
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

        def sums(batch: Any) -> dict[str, Tensor]:
            return {"loss": causal_lm_loss(self.model, batch)[0]}

        self.stepper = Stepper(sums)
        self.optimizer = torch.optim.AdamW(self.trained, lr=2e-4, weight_decay=0.0, fused=True)
        self.count = torch.full((), float(2047 * mesh.size), device="cuda")
        self.step_slices()


def seventy(mesh: Mesh, results: Results) -> None:
    sliced = mesh.laid_out(Parallel(shard=mesh.size))
    for level in ("offload", "checkpoint"):
        training = Seventy(sliced, level)
        run = measured(training, sliced, 2048, steps=6)
        results.add("seventy", way=level, **run)
        clean(training)
        del training
    if mesh.is_main:
        training = Seventy(ALONE, "checkpoint")
        results.add("seventy", way="one GPU", **measured(training, ALONE, 2048, together=False, steps=6))
        clean(training)
        del training
    mesh.wait()


PARTS = {"gathers": gathers, "graphs": graphs, "seventy": seventy}


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
