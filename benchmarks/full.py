"""Full fine-tuning of a bf16 model with 24-bit master weights: state on the device, and state in host memory.

    python -m benchmarks.full [--model llama-3.1-8b] [--batch 4] [--length 2048] [--steps 30] [--json FILE]

Random weights and tokens, every layer recomputed, AdamW with 8-bit moments that updates each layer in the backward.
Both runs start from the same weights and see the same tokens, so their losses should be equal. --limit-gib caps the
memory of the run with state in host memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import free_memory, parser_of, write_result
from benchmarks.step_model import MODELS, empty_model, fill, model_config

WARMUP = 3


def train(given: argparse.Namespace, offload: bool) -> dict[str, Any]:
    """Train from fresh weights; returns losses, median ms of a step and peak GiB."""
    import halfbyte
    from halfbyte.modeling.head import causal_lm_loss
    from halfbyte.optim.fused import AdamW
    from halfbyte.optim.groups import backward_parts

    torch.manual_seed(0)
    model = empty_model(given.model)
    fill(model, "cuda", lambda linear: _with_weight(linear))
    model.requires_grad_(True).train()
    halfbyte.patch(model, ["checkpoint"] * model.config.num_hidden_layers)
    options = {"storage": given.storage, "rounding": "correction8", "offload": offload}
    optimizer = AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, **options)
    optimizer.update_in_backward(backward_parts(model))
    if offload and given.limit_gib:
        capacity = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.limit_gib * 2**30 / capacity)
    torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(1)
    vocabulary = model_config(given.model).vocab_size
    losses, seconds = [], []
    for _ in range(given.steps):
        ids = torch.randint(3, vocabulary, (given.batch, given.length), generator=generator).cuda()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss_sum, tokens = causal_lm_loss(model, {"input_ids": ids, "labels": ids})
        (loss_sum / tokens).backward()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss_sum / tokens))
    host = sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if value.device.type == "cpu"
    )
    return {
        "ms": 1e3 * statistics.median(seconds[WARMUP:]),
        "first_step_seconds": seconds[0],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "host_gib": host / 2**30,
        "losses": losses,
    }


def _with_weight(linear: Any) -> Any:
    """A plain linear layer with the weight, which `fill` takes from the one that it was given."""
    made = torch.nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    made.weight = linear.weight
    return made


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    made.add_argument("--batch", type=int, default=4)
    made.add_argument("--length", type=int, default=2048)
    made.add_argument("--steps", type=int, default=30)
    made.add_argument("--storage", default="dynamic8")
    made.add_argument("--limit-gib", type=float, default=24.0)
    made.add_argument("--deterministic", action="store_true", help="no kernels that add in any order")
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    torch.use_deterministic_algorithms(given.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    result: dict[str, Any] = {
        key: getattr(given, key) for key in ("model", "batch", "length", "storage", "limit_gib", "deterministic")
    }
    result["runs"] = {}
    for name, offload in (("on the device", False), ("in host memory", True)):
        free_memory()
        run = result["runs"][name] = train(given, offload)
        print(f"  {name:16} {run['ms']:8.1f} ms  {run['peak_gib']:6.2f} GiB  {run['host_gib']:6.2f} GiB of host memory")
        write_result(given.json, result)
    here, there = result["runs"].values()
    apart = max(abs(a - b) for a, b in zip(here["losses"], there["losses"], strict=True))
    print(f"  {there['ms'] / here['ms']:.3f} times the step; losses at most {apart:.1e} apart")


if __name__ == "__main__":
    main()
