"""QLoRA training steps of a whole mixture on one CUDA device, as the memory plan has them, beside what they take.

    python -m benchmarks.mixture_step [--model qwen3-30b-a3b] [--cases kept,graph,...] [--floor] [--json FILE]

Random weights in NF4 with nested scales: linears quantized one by one, the stacks of one layer quantized and given to
the others with their experts in another order, so that 16 bits of them exist for one layer alone. Adapters of rank 16
on everything (attention and experts), but where a case says otherwise; fused AdamW, 8-bit where memory is
held small and bitsandbytes is installed.
The floor is `benchmarks.step`'s, with `F.grouped_mm` on 16-bit weights and even rows in the MLP's place.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfbyte
from benchmarks.common import graph_us, write_result
from benchmarks.step import SETS, attention_ms, gemm_ms
from benchmarks.step_model import (
    MODELS,
    empty_model,
    fill,
    model_config,
    random_batch,
    random_weight,
    run_config,
    timed,
)
from halfbyte.formats import named
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.expert_stacks import prepare_stacks
from halfbyte.memory.expert_offload import offload_experts
from halfbyte.modeling.adapters import add_adapter, compute_autocast, no_input_casts
from halfbyte.modeling.architectures import expert_stacks
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.optim import OPTIMIZERS
from halfbyte.plan.estimate import estimate
from halfbyte.plan.memory_plan import GIB, MemoryPlan
from halfbyte.tensor import QuantizedTensor
from halfbyte.train.graph import GraphedStep

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KERNELS, NAME = 48, 150  # of a profile: lines, and characters of a kernel's name
EIGHT_BIT = "adamw_bnb_8bit" if importlib.util.find_spec("bitsandbytes") else "adamw_torch_fused"


@dataclass(frozen=True)
class Case:
    """A step, as the plan has it within a limit.

    Attributes:
        limit: GiB of the device that it is planned within; None: all are there.
        level: what layers keep; auto: the fastest that fits.
        experts: whether experts have adapters.
        adapter_dtype: of what is trained.
    """

    rows: int
    length: int
    limit: float | None = None
    level: str = "auto"
    experts: bool = True
    graph: bool = False
    recipe: str = "bf16"
    optim: str = "adamw_torch_fused"
    adapter_dtype: str = "float32"

    def keys(self) -> dict[str, Any]:
        """Of the run that it stands for."""
        targets = {} if self.experts else {"target_modules": ATTENTION, "target_parameters": []}
        return {
            "target_modules": "all-linear", "per_device_train_batch_size": self.rows, "max_length": self.length,
            "activation_checkpointing": self.level, "memory_limit_gib": self.limit, "optim": self.optim,
            "adapter_dtype": self.adapter_dtype, "packing": False, "recipe": self.recipe, **targets,
        }  # fmt: skip


CASES = {  # those whose experts leave the device come last: they do not come back
    "kept": Case(4, 2048, level="keep", graph=True),
    "47 GiB": Case(4, 2048, 47),
    "28.5 GiB": Case(4, 2048, 28.5),
    "attention": Case(4, 2048, 18.5, experts=False),
    "fp8": Case(4, 2048, level="keep", recipe="fp8-hybrid"),
    "graph": Case(1, 2048, level="keep", graph=True),
    "resident": Case(8, 2048, level="keep", optim=EIGHT_BIT),
    "12 GiB": Case(8, 2048, 12, optim=EIGHT_BIT),
    "9.5 GiB": Case(8, 2048, 9.5, optim=EIGHT_BIT, adapter_dtype="bfloat16"),
}


def build(name: str, device: str, storage: str = "nf4") -> Any:
    """The model without adapters, on the device; `storage` as in `step_model.build`, of its experts."""
    torch.manual_seed(0)
    model: Any = empty_model(name)
    format_ = named(storage)
    stacks = prepare_stacks(model, dict.fromkeys(expert_stacks(model), format_))
    made: dict[str, QuantizedTensor] = {}
    for at, (path, module) in enumerate(stacks.items()):
        leaf = path.rpartition(".")[2]
        shape = getattr(module, leaf).shape
        if leaf not in made:
            experts = (random_weight(shape[1:], device) for _ in range(shape[0]))
            made[leaf] = QuantizedTensor.join(experts, format_, tuple(shape))
        rolled = made[leaf].map(lambda part, at=at: part.roll(at * len(part) // 8, 0) if part.dim() else part.clone())
        setattr(module, leaf, nn.Parameter(rolled, requires_grad=False))
    fill(model, device, lambda linear: QuantizedLinear.from_linear(linear, named("nf4")))
    return model.train()


def floor(name: str, rows: int, length: int) -> dict[str, Any]:
    """Times in ms of the products and the attention of a step that keeps everything, and their sum."""
    config = model_config(name)
    tokens, hidden, layers = rows * length, config.hidden_size, config.num_hidden_layers
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    linears = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    parts = {part: gemm_ms(tokens, *sides) for part, sides in linears.items()}
    slots, inner = tokens * config.num_experts_per_tok, config.moe_intermediate_size
    parts["gate/up"] = grouped_ms(slots, config.num_experts, 2 * inner, hidden)
    parts["down"] = grouped_ms(slots, config.num_experts, hidden, inner)
    parts["attention"] = attention_ms(rows, length, config)
    head = gemm_ms(tokens, config.vocab_size, hidden)
    total = layers * sum(there + back for there, back in parts.values()) + sum(head)
    return {"ms": total, "layers": layers, "parts": parts | {"head": head}}


def grouped_ms(slots: int, experts: int, outputs: int, inputs: int) -> tuple[float, float]:
    """As `gemm_ms`, of experts with as many rows each."""

    def random(*shape: int) -> list[Tensor]:
        return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]

    offsets = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (slots // experts)
    xs, grads, weights = random(slots, inputs), random(slots, outputs), random(experts, outputs, inputs)
    there = [lambda x=x, w=w: F.grouped_mm(x, w.mT, offs=offsets) for x, w in zip(xs, weights, strict=True)]
    back = [lambda g=g, w=w: F.grouped_mm(g, w, offs=offsets) for g, w in zip(grads, weights, strict=True)]
    return graph_us(there) / 1e3, graph_us(back) / 1e3


def planned(name: str, case: Case) -> MemoryPlan:
    """What the run that a case stands for is planned to take, on an empty H200."""
    config = run_config(name, **case.keys())
    return estimate(config, model_config(name), device="cuda", capacity_bytes=139 * GIB)


def measured(model: Any, name: str, case: Case, plan: MemoryPlan, profile: bool = False) -> dict[str, Any]:
    """The step of a case on the model, which gets adapters for it and loses them again."""
    if plan.offloaded:
        offload_experts(model.model.layers, plan.offloaded, torch.device("cuda"))
    with torch.device("cuda"):
        adapted = add_adapter(model, run_config(name, **case.keys())).train()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    report = halfbyte.patch(adapted, plan.levels, case.recipe)
    options: dict[str, Any] = {"capturable": True} if case.graph else {}
    if case.optim == "adamw_torch_fused":
        optimizer: Any = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0, fused=True, **options)
    else:
        optimizer = OPTIMIZERS[case.optim].make(adapted, run_config(name, **case.keys()))
    batch = random_batch(name, case.rows, case.length, "cuda")

    def step(batch: Any) -> Tensor:
        with compute_autocast(adapted, torch.bfloat16):
            total, tokens = causal_lm_loss(adapted, batch)
        loss = total / tokens
        loss.backward()
        optimizer.step()
        if report.scaling is not None:
            report.scaling.roll()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    tokens, steps = case.rows * case.length, 3 if plan.offloaded else 5
    try:
        with no_input_casts(adapted, torch.bfloat16):
            if profile:
                _print_kernels(lambda: step(batch))
            if not case.graph:
                return timed(lambda: step(batch), tokens, steps)
            graphed = GraphedStep(step, optimizer)
            found = timed(lambda: graphed(batch), tokens, 10)
            return found | {"host_ms": _host_ms(lambda: graphed(batch))}
    finally:
        halfbyte.unpatch(adapted)
        adapted.unload()


def _print_kernels(step: Any) -> None:
    """Milliseconds, calls and name of the kernels of a step, the longest first."""
    step()  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda each: -each.self_device_time_total)
    print(f"{sum(each.self_device_time_total for each in kernels) / 1e3:8.2f} ms of kernels")
    for each in kernels[:KERNELS]:
        print(f"{each.self_device_time_total / 1e3:8.2f} {each.count:5} {each.key[:NAME]}", flush=True)


def _host_ms(step: Any) -> float:
    """What the host needs to launch a step: its time until the call returns, while the device still works."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    taken = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e3 * taken


def run(name: str, cases: Iterator[str], least: dict[str, Any] | None, profile: bool, file: str | None) -> None:
    """Each case, said and written as it ends; one that fails does not keep the others from running."""
    began = time.perf_counter()
    model, results = build(name, "cuda"), {}
    held = sum(parameter.nbytes for parameter in model.parameters()) / GIB
    print(f"{name}: {held:.2f} GiB of weights, built in {time.perf_counter() - began:.0f} s", flush=True)
    for at in cases:
        case = CASES[at]
        try:
            plan = planned(name, case)
            print(f"  {at:10} {plan.total / GIB:.2f} GiB planned: {plan.reason}", flush=True)
            found = measured(model, name, case, plan, profile and not results)
        except Exception as error:
            traceback.print_exc()
            results[at] = {"error": str(error)[-600:]}
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        parts = {part: size / GIB for part, size in plan.predicted().items()}
        found["planned"] = {"gib": parts, "reason": plan.reason, "seconds": plan.seconds}
        results[at] = asdict(case) | found
        share = f", {least['ms'] / found['ms']:.2f} of the floor" if least and case.rows * case.length == 8192 else ""
        peak, losses = f"{found['peak_gib']:.2f} GiB (planned {plan.total / GIB:.2f})", found["losses"]
        speed = f"{found['ms']:.1f} ms{share}, {found['tokens_per_second'] / 1e3:.2f}k tok/s"
        host = f"{found['host_ms']:.1f} ms of host" if "host_ms" in found else ""
        rest = f"losses {losses[0]:.3f} → {losses[-1]:.3f} {host}; {time.perf_counter() - began:.0f} s so far"
        print(f"  {at:10} {speed}, {peak}, first {found['first_step_seconds']:.1f} s, {rest}", flush=True)
        write_result(file, {"model": name, "floor": least, "cases": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--floor", action="store_true", help="time its parts first")
    parser.add_argument("--profile", action="store_true", help="print the first case's longest kernels")
    parser.add_argument("--layers", type=int, help="of the model; fewer than it has, for a profile")
    parser.add_argument("--json")
    given = parser.parse_args()
    if given.layers:
        MODELS[given.model][1]["num_hidden_layers"] = given.layers
    least = floor(given.model, 4, 2048) if given.floor else None
    if least:
        print(f"floor {least['ms']:.1f} ms: {least['parts']}", flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    run(given.model, iter(given.cases.split(",")), least, given.profile, given.json)


if __name__ == "__main__":
    main()
