"""Mamba-2's scan on one GPU: halfbyte's kernels against transformers' torch function, forward and backward.

    python -m benchmarks.chunk_scan [--json FILE]

Shapes are of Falcon-H1-1.5B and Granite 4 (rows × tokens, heads, groups, N, P), bf16. The roofline has two sides: the
bytes of x, b, c, y and their gradients at a device copy's bandwidth, and the multiply-adds of the chunked form at the
measured rate of a bf16 matmul. Beside it, the peak memory of a step of a tiny Falcon-H1 (four layers, 128 heads × 256
states, 256 tokens) with and without `halfbyte.patch`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

import halfbyte
from benchmarks.harness import copy_bandwidth, event_us, free_memory, graph_us, parser_of, write_result
from halfbyte.autograd.recurrent import chunk_scan
from halfbyte.ops import chunk_scan as ops

SHAPES = {
    "falcon-h1-1.5b 1x4096": (1, 4096, 48, 1, 256, 64),
    "granite-4-tiny 4x2048": (4, 2048, 48, 1, 128, 64),
}
CHUNK = 256  # of transformers' function


def inputs(rows: int, tokens: int, heads: int, groups: int, size: int, width: int) -> dict[str, Tensor]:
    """Random arguments, x and b views into one projection as in the models."""
    mixed = torch.randn(rows, tokens, heads * width + 2 * groups * size, device="cuda", dtype=torch.bfloat16)
    x, b, c = mixed.split([heads * width, groups * size, groups * size], -1)
    step = torch.rand(rows, tokens, heads, device="cuda") * 0.1
    named = {"x": x.unflatten(-1, (heads, width)), "step": step, "b": b.unflatten(-1, (groups, size)),
             "c": c.unflatten(-1, (groups, size))}  # fmt: skip
    return {name: tensor.detach().requires_grad_() for name, tensor in named.items()}


def both_passes(function: Callable[..., Tensor], tensors: dict[str, Tensor], grad: Tensor) -> list[Tensor]:
    y = function(**tensors)
    return [y, *torch.autograd.grad(y, list(tensors.values()), grad.to(y.dtype))]


def matmul_rate() -> float:
    """Multiply-adds per second of a bf16 matmul of 8192³."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 8192**3 / (event_us([lambda: a @ a], 10, 3) / 1e6)


def scan(shape: tuple[int, ...]) -> dict[str, Any]:
    rows, tokens, heads, groups, size, width = shape
    rates, skip = -torch.rand(heads, device="cuda") * 8, torch.ones(heads, device="cuda")
    begins = (torch.arange(rows, dtype=torch.int32, device="cuda") * tokens).unsqueeze(1).expand(rows, tokens)
    begins = begins.contiguous()

    def ours(x: Tensor, step: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return chunk_scan(x, step, rates * step, b, c, skip, begins)[0]

    def theirs(x: Tensor, step: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return mamba2_chunk_scan(x, step, rates, b, c, CHUNK, D=skip)

    tensors = inputs(*shape)
    grad = torch.randn_like(tensors["x"])
    row: dict[str, Any] = {}
    x, step, b, c = (tensor.detach() for tensor in tensors.values())
    decay = rates * step
    factors = ops.chunk_factors(step, decay, begins)
    states, _ = ops.chunk_states(x, factors, b)
    after = ops.chunk_state_gradients(grad, factors, c)
    given = x, factors, b, c, skip, begins, states
    parts = {
        "factors": lambda: ops.chunk_factors(step, decay, begins),
        "states": lambda: ops.chunk_states(x, factors, b),
        "outputs": lambda: ops.chunk_outputs(*given),
        "state_gradients": lambda: ops.chunk_state_gradients(grad, factors, c),
        "gradients": lambda: ops.chunk_gradients(grad, *given, after),
    }
    row["parts_us"] = {name: graph_us([call]) for name, call in parts.items()}
    wide = {name: tensor.detach().float().requires_grad_() for name, tensor in tensors.items()}
    exact = both_passes(ours, wide, grad)
    for name, function in (("halfbyte", ours), ("transformers", theirs)):
        free_memory()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            results = both_passes(function, tensors, grad)
        except torch.OutOfMemoryError:
            row[f"{name}_us"] = None
            continue
        row[f"{name}_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        row[f"{name}_error"] = [
            float((mine.float() - true).norm() / true.norm()) for mine, true in zip(results, exact, strict=True)
        ]
        del results
        row[f"{name}_us"] = event_us([lambda f=function: both_passes(f, tensors, grad)], 10, 3)
    moved = rows * tokens * 2 * (5 * heads * width + 6 * groups * size)
    state, pair = size * width, ops.CHUNK * (width + size / heads * groups)
    products = rows * tokens * heads * (7 * state + 3 * ops.CHUNK * width + 2 * pair)
    row["bytes_us"] = moved / copy_bandwidth() / 1e6
    row["products_us"] = products / matmul_rate() * 1e6
    row["of_copy"] = row["bytes_us"] / row["halfbyte_us"]
    row["of_roofline"] = max(row["bytes_us"], row["products_us"]) / row["halfbyte_us"]
    return row


def tiny_step(patched: bool) -> float | None:
    """Peak GiB of a training step of a tiny Falcon-H1 above its weights; None: out of memory."""
    config = transformers.FalconH1Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1024, mamba_d_ssm=1024, mamba_n_heads=128, mamba_d_head=8, mamba_d_state=256,
    )  # fmt: skip
    model = transformers.FalconH1ForCausalLM(config).to("cuda", torch.bfloat16).train()
    if patched:
        halfbyte.patch(model)
    ids = torch.randint(0, 1024, (1, 256), device="cuda")
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with contextlib.suppress(torch.OutOfMemoryError):
        model(input_ids=ids, labels=ids).loss.backward()
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    return None


def parser() -> argparse.ArgumentParser:
    return parser_of(__doc__)


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    result: dict[str, Any] = {"tiny_gib": {"patched": tiny_step(True), "stock": tiny_step(False)}, "shapes": {}}
    print(result, flush=True)
    for name, shape in SHAPES.items():
        free_memory()
        result["shapes"][name] = scan(shape)
        print(name, result["shapes"][name], flush=True)
    write_result(given.json, result)


if __name__ == "__main__":
    main()
