"""A layer of experts from NF4 with adapters, beside transformers' own on 16-bit weights without.

    python -m benchmarks.experts [--shape qwen3-30b-a3b] [--tokens 16,128,512,2048,8192] [--device cuda] [--json FILE]

Each line is one number of tokens, routed at random: microseconds of the products with gate and up, and with down, and
of the former's input gradient; of the layer's forward, and of forward and backward. Peers compute in the same dtype
(bf16; float32 on a CPU) from plain weights, frozen and without adapters: `F.grouped_mm` on rows already gathered, and
transformers' implementations. TFLOP/s are of the base products alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.common import event_us, write_result
from halfbyte.autograd.experts import ExpertWeights, experts, stack_of
from halfbyte.autograd.lora import LoRA
from halfbyte.formats import Blockwise4
from halfbyte.ops.experts import StackedWeight, Unit, grouped_product, route
from halfbyte.tensor import QuantizedTensor

RANK = 16


class Shape(NamedTuple):
    experts: int
    hidden: int
    inner: int
    top_k: int


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 2048, 768, 8),
    "mixtral-8x7b": Shape(8, 4096, 14336, 2),
    "llama-40m-8x": Shape(8, 512, 1536, 2),
}


class Layer:
    """Random weights of a shape, and what is timed on them."""

    def __init__(self, shape: Shape, device: str):
        torch.manual_seed(0)
        self.shape, self.device = shape, device
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        e, h, i, _ = shape
        first = torch.randn(e, 2 * i, h, device=device, dtype=self.dtype) / h**0.5
        second = torch.randn(e, h, i, device=device, dtype=self.dtype) / i**0.5
        self.packed = [QuantizedTensor.quantize(weight, Blockwise4("nf4", 64, True)) for weight in (first, second)]
        self.plain = [weight.dequantize(self.dtype) for weight in self.packed]
        factors = ((e, RANK, h), (e, 2 * i, RANK), (e, RANK, i), (e, h, RANK))
        self.factors = [(torch.randn(*size, device=device) / size[2] ** 0.5).requires_grad_() for size in factors]
        self.theirs = self._theirs()

    def _theirs(self) -> Any:
        e, h, i, _ = self.shape
        sizes = {"num_experts": e, "hidden_size": h, "moe_intermediate_size": i, "hidden_act": "silu"}
        with torch.device("meta"):
            module = Qwen3MoeExperts(SimpleNamespace(**sizes, _experts_implementation="eager"))
        for name, weight in zip(("gate_up_proj", "down_proj"), self.plain, strict=True):
            setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))
        return module

    def draw(self, tokens: int) -> None:
        e, h, _, k = self.shape
        self.index = torch.rand(tokens, e, device=self.device).topk(k).indices
        self.x = torch.randn(tokens, h, device=self.device, dtype=self.dtype, requires_grad=True)
        self.routed = torch.rand(tokens, k, device=self.device, dtype=self.dtype, requires_grad=True)
        self.grad = torch.randn_like(self.x)

    def ours(self) -> Tensor:
        a1, b1, a2, b2 = self.factors
        weights = ExpertWeights(*self.packed, Unit("silu"))
        return experts(self.x, self.index, self.routed, weights, LoRA(a1, b1, 1.0), LoRA(a2, b2, 1.0))

    def peer(self, implementation: str) -> Tensor:
        self.theirs.config._experts_implementation = implementation
        return self.theirs(self.x, self.index, self.routed)

    def both(self, forward: Callable[[], Tensor], leaves: list[Tensor]) -> None:
        torch.autograd.grad(forward(), leaves, self.grad)

    def time(self, call: Callable[[], Any], repeats: int = 10) -> float:
        """Median µs."""
        if self.device != "cpu":
            return event_us([call], repeats, 3)
        call()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)


def layer_times(layer: Layer) -> dict[str, float]:
    """Forward, and forward and backward, of ours and of each peer."""
    leaves = [layer.x, layer.routed]
    calls: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {"ours": (layer.ours, [*leaves, *layer.factors])}
    for name in ("eager", "grouped_mm") if layer.device == "cpu" else ("grouped_mm",):
        calls[name] = (lambda name=name: layer.peer(name), leaves)
    found = {}
    for name, (forward, wanted) in calls.items():
        with torch.no_grad():
            found[f"forward, {name}"] = layer.time(forward)
        found[f"both, {name}"] = layer.time(lambda forward=forward, wanted=wanted: layer.both(forward, wanted))
    return found


def product_times(layer: Layer) -> dict[str, float]:
    """Of each product from packed weights, and of `F.grouped_mm`."""
    routing = route(layer.index, layer.shape.experts)

    def packed(at: int) -> StackedWeight:
        """As a layer takes it: decoding first, where it does, is part of what is timed."""
        return stack_of(layer.packed[at], layer.dtype, layer.index.numel())

    plain_first, plain_second = layer.plain
    x = layer.x.detach()
    rows, offsets = x[routing.tokens], routing.offsets[1:].contiguous()
    hidden = torch.randn(rows.shape[0], layer.shape.inner, device=layer.device, dtype=layer.dtype)
    dc = torch.randn(rows.shape[0], 2 * layer.shape.inner, device=layer.device, dtype=layer.dtype)
    calls = {
        "gate/up": lambda: grouped_product(x, packed(0), routing, True),
        "gate/up, grouped_mm": lambda: F.grouped_mm(rows, plain_first.mT, offs=offsets),
        "down": lambda: grouped_product(hidden, packed(1), routing),
        "down, grouped_mm": lambda: F.grouped_mm(hidden, plain_second.mT, offs=offsets),
        "dX": lambda: grouped_product(dc, packed(0), routing, transposed=True),
        "dX, grouped_mm": lambda: F.grouped_mm(dc, plain_first, offs=offsets),
    }
    return {name: layer.time(call) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="16,128,512,2048,8192")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    given = parser.parse_args()
    layer, rows = Layer(SHAPES[given.shape], given.device), []
    for tokens in map(int, given.tokens.split(",")):
        layer.draw(tokens)
        slots = tokens * layer.shape.top_k
        found = product_times(layer) | layer_times(layer)
        rows.append({"tokens": tokens, "rows an expert": slots / layer.shape.experts} | found)
        print(f"{tokens} tokens, {slots / layer.shape.experts:g} rows an expert")
        flops = 2 * slots * layer.shape.hidden * layer.shape.inner
        parts = {"gate/up": 2, "down": 1, "dX": 2, "forward": 3, "both": 6}
        for name, us in found.items():
            rate = parts[name.split(",")[0]] * flops / us / 1e6
            print(f"    {name:22} {us:10.0f} µs {rate:8.2f} TFLOP/s", flush=True)
    if given.json:
        write_result(given.json, {"shape": given.shape, "rows": rows})


if __name__ == "__main__":
    main()
