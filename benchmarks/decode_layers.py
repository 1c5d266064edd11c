"""One token's way through the decoder layers of an 8B Llama in one launch, without model, embedding and head.

python -m benchmarks.decode_layers [--batches 1,8] [--sweep] [--json FILE]

Random bytes stand for NF4 weights with nested scales. The fraction is of the time that reading them takes at the
bandwidth of a device copy. `small` has next to no weights: what barriers and latencies cost. `--sweep` times every
block shape.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.common import copy_bandwidth, event_us, write_result
from halfbyte.kernels.cuda import decode_layers
from halfbyte.kernels.cuda.gemv4 import Blocks
from halfbyte.kernels.device import HOPPER_SHARED_BYTES
from halfbyte.ops.codebooks import dynamic_map
from halfbyte.ops.decode_layers import DecoderLayer, Projections, Stack, Weight4

RANK, SLOTS, SLOT = 16, 320, 200
LARGE = {"count": 32, "width": 4096, "inner": 14336, "heads": 32, "key_heads": 8}
SMALL = {"count": 32, "width": 256, "inner": 256, "heads": 32, "key_heads": 8}
DEVICE, DTYPE, SIZE = "cuda", torch.bfloat16, 128


def weight(rows: int, columns: int, code: Tensor) -> Weight4:
    blocks = rows * columns // 64
    packed = torch.randint(0, 256, (rows * columns // 2,), dtype=torch.uint8, device=DEVICE)
    absmax = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device=DEVICE)
    second = torch.full((-(-blocks // 256),), 0.01, device=DEVICE)
    return Weight4(packed, absmax, (second, code, torch.tensor(0.02, device=DEVICE)), 64, "nf4", rows, None)


def projections(rows: list[int], columns: int, code: Tensor) -> Projections:
    down = torch.randn(RANK * len(rows), columns, dtype=DTYPE, device=DEVICE) * 0.01
    ups = [(RANK * i, torch.zeros(each, RANK, dtype=DTYPE, device=DEVICE)) for i, each in enumerate(rows)]
    return Projections([weight(each, columns, code) for each in rows], down, ups, None)


def layer_of(batch: int, width: int, inner: int, heads: int, key_heads: int) -> DecoderLayer:
    code = dynamic_map(torch.device(DEVICE))
    ones = torch.ones(width, dtype=DTYPE, device=DEVICE)
    cache = [torch.randn(batch, key_heads, SLOTS, SIZE, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    return DecoderLayer(
        projections([heads * SIZE, key_heads * SIZE, key_heads * SIZE], width, code),
        projections([width], heads * SIZE, code),
        projections([inner, inner], width, code),
        projections([width], inner, code),
        ones, ones, None, None, *cache, None,
    )  # fmt: skip


def stack(layers: list[DecoderLayer], batch: int, heads: int) -> Stack:
    angles = torch.rand(SLOTS, SIZE, device=DEVICE)
    padding, slot = torch.zeros(batch, dtype=torch.int32, device=DEVICE), torch.tensor([SLOT], device=DEVICE)
    return Stack(layers, heads, 1e-5, SIZE**-0.5, angles.cos().to(DTYPE), angles.sin().to(DTYPE), padding, slot)


def plain(layer: DecoderLayer) -> DecoderLayer:
    """Without adapters."""
    names = ("qkv", "out", "gate_up", "down")
    linears = {name: getattr(layer, name) for name in names}
    bare = {name: Projections(each.weights, None, [None] * len(each.weights), None) for name, each in linears.items()}
    return replace(layer, **bare)


def for_batch(layers: list[DecoderLayer], batch: int) -> list[DecoderLayer]:
    """The same weights with caches of another batch."""
    heads = layers[0].keys.shape[1]
    shape = batch, heads, SLOTS, SIZE
    return [
        replace(layer, **{name: torch.randn(shape, dtype=DTYPE, device=DEVICE) for name in ("keys", "values")})
        for layer in layers
    ]


def step_us(made: Stack, batch: int, width: int, blocks: Blocks) -> float | None:
    """µs of the launch in a graph; None where its shared memory does not fit."""
    hidden = torch.randn(batch, width, dtype=DTYPE, device=DEVICE)
    stacked = decode_layers.Stacked(hidden, made, blocks)
    shared = stacked.shared_bytes()
    if shared > HOPPER_SHARED_BYTES:
        return None
    kernel = decode_layers._kernel(0, shared, tuple(stacked.constants().items()))
    stacked(kernel, hidden)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stacked(kernel, hidden)
    return event_us([graph.replay], 20, 3)


def shapes(batch: int, sweep: bool) -> list[Blocks]:
    """What the kernel would take, or all that are worth a try."""
    if not sweep:
        return [decode_layers.blocks_for(batch)]
    wide = [Blocks(rt, 1, wk, stages) for rt in (1, 2) for wk in (8, 10, 11) for stages in (2, 3, 4, 5)]
    return [each for each in wide if 20 <= each.wk * each.rt * (each.stages - 1) <= 36]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json")
    given = parser.parse_args()
    copy = copy_bandwidth()
    result: dict = {"copy_TBps": copy, "rows": []}
    print(f"copy {copy:.2f} TB/s")
    for name, shape in (("8B", LARGE), ("small", SMALL)):
        dims = {key: value for key, value in shape.items() if key != "count"}
        layers = [layer_of(1, **dims) for _ in range(shape["count"])]
        linears = [each for layer in layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        moved = sum(each.packed.numel() * (1 + 1 / 32) for linear in linears for each in linear.weights)
        for batch in map(int, given.batches.split(",")):
            adapted = for_batch(layers, batch)
            for blocks in shapes(batch, given.sweep and name == "8B"):
                times = [
                    step_us(stack(these, batch, shape["heads"]), batch, shape["width"], blocks)
                    for these in ([plain(layer) for layer in adapted], adapted)
                ]
                if times[0] is None or times[1] is None:
                    continue
                base, lora = times
                fraction = moved / base / 1e6 / copy
                print(f"{name} batch {batch:2} {tuple(blocks)}: {base:7.1f} µs ({fraction:.0%} of copy), with adapters "
                      f"{lora:7.1f} ({lora / base - 1:+.1%})", flush=True)  # fmt: skip
                row = {"shape": name, "batch": batch, "blocks": blocks, "us": base, "lora_us": lora}
                result["rows"].append(row | {"of_copy": fraction})
    write_result(given.json, result)


if __name__ == "__main__":
    main()
