"""Elementwise kernels at the sizes of an 8B model's step, compared with torch.compile and Liger in the same process.

    python -m benchmarks.elementwise [--tokens 8192] [--json FILE]

Each kernel runs forward and backward through its public function and is timed in three ways: over eight sets of tensors
in one CUDA graph, so that neither launches nor the L2 cache count; as called from Python, by the device's clock; and as
the host's time per call without waiting for the device. Bytes are the least that the kernel must read and write, and
the fraction is of a large device copy in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config

from benchmarks.harness import copy_bandwidth, milliseconds, parser_of, require_gpu, write_result
from halfbyte.autograd.lora_mlp import glu
from halfbyte.autograd.norms import add_rms_norm, layer_norm, rms_norm
from halfbyte.autograd.rope import qk_norm_rope, rope
from halfbyte.ops.rope import rotate

HIDDEN, MLP, Q_HEADS, K_HEADS, HEAD_SIZE = 4096, 14336, 32, 8, 128
SETS = 8  # sets of tensors, and calls in a graph
REPLAYS = 9
HOST_CALLS = 200  # forward calls in a row; a backward pass over 32 of them
DTYPE = torch.bfloat16

Inputs = list[Tensor]


@dataclass
class Case:
    """One kernel: its inputs, the 16-bit values it must move, and its implementations."""

    name: str
    inputs: Callable[[], Inputs]
    trained: int  # number of leading inputs that get gradients
    forward_values: int
    backward_values: int
    ours: Callable[..., Any]
    stock: Callable[..., Any] | None
    liger: Callable[..., Any] | None


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device="cuda")


def heads(tokens: int, count: int) -> Tensor:
    return random(1, tokens, count, HEAD_SIZE).transpose(1, 2)


def angles(tokens: int) -> Inputs:
    angle = torch.arange(tokens, device="cuda").view(1, -1, 1) / 10_000 ** torch.linspace(0, 1, HEAD_SIZE // 2).cuda()
    angle = torch.cat([angle, angle], dim=-1)
    return [angle.cos().to(DTYPE), angle.sin().to(DTYPE)]


def stock_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    exact = x.float()
    return weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def stock_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return stock_rms_norm(total, weight), total


def stock_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q, cos, sin), rotate(k, cos, sin)


def stock_qk_norm_rope(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor):
    return stock_rope(stock_rms_norm(q, q_weight), stock_rms_norm(k, k_weight), cos, sin)


def liger_version() -> str | None:
    """Return the version of Liger, or None if it is not installed."""
    return metadata.version("liger-kernel") if importlib.util.find_spec("liger_kernel") else None


def liger() -> dict[str, Callable[..., Any]]:
    """Return Liger's functions by case name, empty if Liger is not installed."""
    if liger_version() is None:
        return {}
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return {
        "rms_norm": lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False),
        "layer_norm": lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, 1e-5),
        "rope": LigerRopeFunction.apply,
        "swiglu": LigerSiLUMulFunction.apply,
        "geglu_tanh": LigerGELUMulFunction.apply,
    }


def cases(tokens: int) -> Iterator[Case]:
    """Yield all cases. Values moved exclude weights, cos, sin and row statistics, which are below 2%."""
    n, m, h = tokens * HIDDEN, tokens * MLP, tokens * (Q_HEADS + K_HEADS) * HEAD_SIZE
    peers = liger()

    def case(name, inputs, trained, forward_values, backward_values, ours, stock):
        return Case(name, inputs, trained, forward_values, backward_values, ours, stock, peers.get(name))

    def rows(count: int, vectors: int) -> Callable[[], Inputs]:
        return lambda: [random(tokens, HIDDEN) for _ in range(count)] + [random(HIDDEN) for _ in range(vectors)]

    def q_and_k(vectors: int) -> Callable[[], Inputs]:
        weights = [random(HEAD_SIZE) for _ in range(vectors)]
        return lambda: [heads(tokens, Q_HEADS), heads(tokens, K_HEADS), *weights, *angles(tokens)]

    def gate_and_up() -> Inputs:
        return [random(tokens, MLP), random(tokens, MLP)]

    yield case("rms_norm", rows(1, 1), 1, 2 * n, 3 * n, rms_norm, stock_rms_norm)
    yield case("rms_norm_dw", rows(1, 1), 2, 2 * n, 3 * n, rms_norm, None)
    yield case("add_rms_norm", rows(2, 1), 2, 4 * n, 4 * n, add_rms_norm, stock_add_rms_norm)
    yield case("layer_norm", rows(1, 2), 1, 2 * n, 3 * n, layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b))
    yield case("rope", q_and_k(0), 2, 2 * h, 2 * h, rope, stock_rope)
    yield case("qk_norm_rope", q_and_k(2), 2, 2 * h, 3 * h, qk_norm_rope, stock_qk_norm_rope)
    yield case("qk_norm_rope_dw", q_and_k(2), 4, 2 * h, 3 * h, qk_norm_rope, None)
    yield case("swiglu", gate_and_up, 2, 3 * m, 5 * m, glu, lambda g, u: F.silu(g) * u)
    for name, activation, approximate in (("geglu", "gelu", "none"), ("geglu_tanh", "gelu_tanh", "tanh")):
        yield case(
            name, gate_and_up, 2, 3 * m, 5 * m,
            lambda g, u, a=activation: glu(g, u, a), lambda g, u, a=approximate: F.gelu(g, approximate=a) * u,
        )  # fmt: skip


def in_graph(calls: list[Callable[[], Any]], restore: Callable[[], None], stream: torch.cuda.Stream) -> float:
    """Return the µs per call of a graph of all `calls`; `restore` undoes in-place changes before each replay."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    times = []
    for _ in range(REPLAYS):
        restore()
        times.append(milliseconds(graph.replay) * 1e3 / len(calls))
    del kept
    return statistics.median(times[1:])


class Bench:
    """One implementation of a case on its sets of tensors; `restore` undoes the changes of in-place kernels."""

    def __init__(self, case: Case, function: Callable[..., Any]):
        self.function, self.trained = function, case.trained
        self.sets = [case.inputs() for _ in range(SETS)]
        self.masters = [[tensor.clone() for tensor in inputs[: self.trained]] for inputs in self.sets]
        for inputs in self.sets:
            for tensor in inputs[: self.trained]:
                tensor.requires_grad_()
        self.seeds = [[torch.randn_like(result) for result in self.outputs(inputs)] for inputs in self.sets]

    def restore(self) -> None:
        for inputs, masters, seeds in zip(self.sets, self.masters, self.seeds, strict=True):
            for tensor, master in zip(inputs, masters, strict=False):
                tensor.data.copy_(master)
            for seed in seeds:
                seed.normal_()

    def outputs(self, inputs: Inputs) -> list[Tensor]:
        result = self.function(*inputs)
        return list(result) if isinstance(result, tuple) else [result]

    def forward_calls(self) -> list[Callable[[], Any]]:
        return [lambda inputs=inputs: self.outputs(inputs) for inputs in self.sets]

    def backward_calls(self) -> list[Callable[[], Any]]:
        """Run the forwards and return their backwards, each to be called once."""

        def call(results: list[Tensor], inputs: Inputs, seeds: list[Tensor]) -> tuple[Tensor, ...]:
            return torch.autograd.grad(results, inputs[: self.trained], seeds, retain_graph=True)

        each = [(self.outputs(inputs), inputs, seeds) for inputs, seeds in zip(self.sets, self.seeds, strict=True)]
        return [lambda arguments=arguments: call(*arguments) for arguments in each]

    def host_us(self) -> dict[str, float]:
        """Return the median host µs of a call, forward and backward, without synchronization."""
        forward, backward = [], []
        for i in range(HOST_CALLS):
            inputs = self.sets[i % SETS]
            start = time.perf_counter()
            result = self.function(*inputs)
            forward.append(time.perf_counter() - start)
        del result
        for _ in range(REPLAYS):
            torch.cuda.synchronize()
            results, leaves = [], []
            # New tensors over the same memory, because a backward may overwrite its forward's inputs.
            aliases = [[tensor.data for tensor in inputs] for inputs in self.sets * 4]
            for inputs in aliases:
                leaves += [tensor.requires_grad_() for tensor in inputs[: self.trained]]
                results += self.outputs(inputs)
            seeds = [seed for seeds in self.seeds * 4 for seed in seeds]
            torch.cuda.synchronize()
            start = time.perf_counter()
            kept = torch.autograd.grad(results, leaves, seeds)
            backward.append((time.perf_counter() - start) / len(aliases))
            del kept, results, leaves
        return {"forward": statistics.median(forward) * 1e6, "backward": statistics.median(backward[1:]) * 1e6}


def measure(case: Case, function: Callable[..., Any]) -> dict[str, dict[str, float]]:
    """Time one implementation in µs: forward and backward, in a graph, as called, and on the host."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        bench = Bench(case, function)
        for _ in range(3):  # the first compiles, the second finds its memory in the allocator
            called = {"forward": called_us(bench.forward_calls()), "backward": called_us(bench.backward_calls())}
        host = bench.host_us()
        bench.restore()
        graph = {"forward": in_graph(bench.forward_calls(), bench.restore, stream)}
        graph["backward"] = in_graph(bench.backward_calls(), bench.restore, stream)
    return {
        direction: {"graph_us": graph[direction], "called_us": called[direction], "host_us": host[direction]}
        for direction in ("forward", "backward")
    }


def called_us(calls: list[Callable[[], Any]]) -> float:
    """Return the µs per call from Python, by the device's clock."""
    torch.cuda.synchronize()
    kept: list[Any] = []
    return milliseconds(lambda: kept.extend(call() for call in calls)) * 1e3 / len(calls)


def run(tokens: int, copy: float) -> list[dict[str, Any]]:
    """Measure and print all cases. Returns the rows of the result."""
    results = []
    for case in cases(tokens):
        functions = {"halfbyte": case.ours, "torch.compile": case.stock, "liger": case.liger}
        if case.stock is not None:
            functions["torch.compile"] = torch.compile(case.stock, fullgraph=True)
        for by, function in functions.items():
            if function is None:
                continue
            for direction, times in measure(case, function).items():
                size = 2 * (case.forward_values if direction == "forward" else case.backward_values)
                rate = size / times["graph_us"] / 1e6
                row = {"kernel": case.name, "direction": direction, "by": by, "bytes": size, **times}
                results.append(row | {"TBps": rate, "fraction_of_copy": rate / copy})
                print(f"{case.name} {direction} {by}: {rate:.2f} TB/s in a graph, {rate / copy:.0%} of a copy; called "
                      f"{times['called_us']:.1f} µs, host {times['host_us']:.1f} µs", flush=True)  # fmt: skip
            torch.cuda.empty_cache()
    return results


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--tokens", type=int, default=8192)
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    require_gpu()
    functorch_config.donated_buffer = False  # backward is captured and its forward's tensors must remain
    copy = copy_bandwidth()
    print(f"copy {copy:.2f} TB/s, {given.tokens} tokens, {DTYPE}, {torch.cuda.get_device_name()}")
    shape = {"tokens": given.tokens, "hidden": HIDDEN, "mlp": MLP, "heads": [Q_HEADS, K_HEADS, HEAD_SIZE]}
    result = {"copy_TBps": copy, "dtype": str(DTYPE), "shape": shape, "liger": liger_version()}
    write_result(given.json, result | {"kernels": run(given.tokens, copy)})


if __name__ == "__main__":
    main()
