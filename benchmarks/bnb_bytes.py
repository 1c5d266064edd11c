"""Count bytes and values of the drop-in that differ from bitsandbytes' over random tensors.

    python -m benchmarks.bnb_bytes [--tensors 10000] [--device cpu] [--values 0] [--json FILE]

Each tensor has a random size, scale, dtype, block size, 4-bit type, code and storage type, also zeros, equal values and
outliers. A byte that differs is a tie if its value lies within 1e-5 of the block's largest magnitude of the middle of
two values of the code. FILE is written after every 1,000 tensors.

`--values N` quantizes at least N normal values for each 4-bit type, dtype, and nested or not, in blocks of 64, and
compares bytes, scales and nested scales in tensors of 2^24 values. `--dump FILE.pt` keeps the first blocks that differ:
the values, both packages' codes, and the scales.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import parser_of, write_result
from halfbyte.bitsandbytes import functional as ours

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STORAGES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
TIE = 1e-5
CHUNK = 2**24  # values of a tensor of `--values`
DUMPED = 20  # blocks in a dump
Counts = dict[str, dict[str, int]]  # row → figure → number
CODES = {
    "dynamic": lambda: ours.create_dynamic_map(),
    "dynamic unsigned": lambda: ours.create_dynamic_map(signed=False),
    "linear": lambda: ours.create_linear_map(),
    "fp8": lambda: ours.create_fp8_map(),
    "normal": lambda: ours.create_normal_map(),
}


def random_tensor(draw: random.Random, device: str) -> Tensor:
    """A tensor of 1 to 20,000 elements."""
    n = int(draw.choice((draw.randint(1, 300), draw.randint(300, 20000))))
    generator = torch.Generator().manual_seed(draw.getrandbits(48))
    x = torch.randn(n, generator=generator) * 10 ** draw.uniform(-4, 2)
    kind = draw.randrange(6)
    if kind == 0:
        x[n // 3 : n // 2] = 0
    elif kind == 1:
        x[draw.randrange(n)] *= 1000
    elif kind == 2:
        x = x[0].expand(n).clone()
    return x.clamp(-60000, 60000).to(draw.choice(DTYPES)).to(device)  # finite in float16


def ties(x: Tensor, absmax: Tensor, block: int, code: Tensor, differ: Tensor) -> int:
    """How many of the elements where `differ` lie in the middle of two values of the code."""
    scaled = x.float() / absmax.float().repeat_interleave(block)[: x.numel()]
    middles = (code.sort().values[1:] + code.sort().values[:-1]) / 2
    distance = (scaled[differ].unsqueeze(1) - middles).abs().amin(1)
    return int((distance <= TIE).sum())


def compare(counts: Counts, name: str, mine: Tensor, theirs: Tensor, tied: int | None = None) -> None:
    """Add one pair of results to the counts; bitsandbytes' CPU library returns two elements as a column."""
    row = counts[name]
    row["tensors"] += 1
    row["elements"] += mine.numel()
    row["differ"] += int((mine.flatten() != theirs.flatten()).sum())
    if tied is not None:
        row["of them ties"] += tied


def four_bits(counts: Counts, x: Tensor, draw: random.Random) -> None:
    import bitsandbytes.functional as real

    kind, block, storage = draw.choice(("nf4", "fp4")), draw.choice((32, *BLOCKS)), draw.choice(STORAGES)
    if len(x) % 16:  # the packed bytes do not fill whole elements of a wider storage
        storage = torch.uint8
    nested = draw.random() < 0.5
    options = {"blocksize": block, "compress_statistics": nested, "quant_type": kind, "quant_storage": storage}
    packed, state = ours.quantize_4bit(x, **options)
    their_packed, their_state = real.quantize_4bit(x, **options)
    mine, theirs = (
        torch.stack([each >> 4, each & 15], 1).view(-1)[: len(x)]
        for each in (packed.view(torch.uint8).view(-1), their_packed.view(torch.uint8).view(-1))
    )
    plain = ours.quantize_4bit(x, **(options | {"compress_statistics": False}))[1].absmax
    code = their_state.code.to(x.device)
    compare(counts, f"4-bit codes, {kind}", mine, theirs, ties(x, plain, block, code, mine != theirs))
    compare(counts, "4-bit absmax, nested" if nested else "4-bit absmax", state.absmax, their_state.absmax)
    if nested:
        compare(counts, "4-bit absmax of absmax", state.state2.absmax, their_state.state2.absmax)
    mine = ours.dequantize_4bit(their_packed, ours.QuantState.from_dict(their_state.as_dict(), x.device))
    compare(counts, "4-bit values", mine, real.dequantize_4bit(their_packed, their_state))


def eight_bits(counts: Counts, x: Tensor, draw: random.Random) -> None:
    import bitsandbytes.functional as real

    name, block, nested = draw.choice([*CODES]), draw.choice(BLOCKS), draw.random() < 0.3
    code = CODES[name]().to(x.device)
    if "unsigned" in name:
        x = x.abs()
    options = {"code": code, "blocksize": block, "nested": nested}
    mine, state = ours.quantize_blockwise(x, **options)
    theirs, their_state = real.quantize_blockwise(x, **options)
    plain = ours.quantize_blockwise(x, code=code, blocksize=block)[1].absmax
    compare(counts, f"8-bit codes, {name}", mine, theirs, ties(x, plain, block, code, mine != theirs))
    compare(counts, "8-bit absmax, nested" if nested else "8-bit absmax", state.absmax, their_state.absmax)
    if not nested:
        mine = ours.dequantize_blockwise(theirs, absmax=their_state.absmax, code=code, blocksize=block)
        theirs = real.dequantize_blockwise(theirs, absmax=their_state.absmax, code=code, blocksize=block)
        compare(counts, "8-bit values", mine, theirs)


def int8_rows(counts: Counts, x: Tensor, draw: random.Random) -> None:
    import bitsandbytes.functional as real

    columns = draw.randint(1, min(len(x), 400))
    x = x[: len(x) // columns * columns].view(-1, columns).half()
    mine, stats, _ = ours.int8_vectorwise_quant(x)
    theirs, their_stats, _ = real.int8_vectorwise_quant(x)
    scaled = x.float() * (127 / stats.float()).unsqueeze(1)
    differ = mine != theirs
    tied = int((((scaled[differ] % 1) - 0.5).abs() <= 1e-3).sum())
    compare(counts, "int8 rows", mine, theirs, tied)
    compare(counts, "int8 scales", stats, their_stats)
    values = ours.int8_vectorwise_dequant(theirs, their_stats)
    compare(counts, "int8 values", values, real.int8_vectorwise_dequant(theirs, their_stats))


def many_values(count: int, device: str, dump: str | None) -> Counts:
    """Compare at least `count` values of each kind; on a GPU this takes some 2 GiB."""
    import bitsandbytes.functional as real

    counts: Counts = defaultdict(lambda: defaultdict(int))
    different: list[dict[str, Any]] = []
    sizes = [min(CHUNK, count - start) for start in range(0, count, CHUNK)]
    for (number, size), dtype, kind in itertools.product(enumerate(sizes), DTYPES, ("nf4", "fp4")):
        generator = torch.Generator(device).manual_seed(number)
        x = torch.randn(size, generator=generator, device=device).mul_(0.02 * (1 + number % 3)).to(dtype)
        for nested in (False, True):
            options = {"blocksize": 64, "compress_statistics": nested, "quant_type": kind}
            mine, state = ours.quantize_4bit(x, **options)
            theirs, expected = real.quantize_4bit(x, **options)
            name = f"{kind} {str(dtype).removeprefix('torch.')}{' nested' if nested else ''}"
            pairs = {"bytes": (mine, theirs), "scales": (state.absmax, expected.absmax)}
            if nested:
                pairs["nested scales"] = state.state2.absmax, expected.state2.absmax
                pairs["offset"] = state.offset.reshape(1), expected.offset.reshape(1)
            for part, (one, other) in pairs.items():
                compare(counts, f"{name}: {part}", one, other)
                if len(different) < DUMPED and not torch.equal(one, other):
                    different.append({"kind": name, "part": part} | first_difference(x, mine, theirs, one, other))
    if dump is not None and different:
        torch.save(different, dump)
        print(f"{len(different)} differing blocks are in {dump}")
    return counts


def first_difference(x: Tensor, mine: Tensor, theirs: Tensor, one: Tensor, other: Tensor) -> dict[str, Any]:
    """The first entry of `one` and `other` that differs, and the first block of 64 values that it belongs to."""
    at = int((one.flatten() != other.flatten()).nonzero()[0])
    block = at * -(-len(x) // 64) // one.numel()
    group = block // 256 * 256
    scales = ours.quantize_4bit(x, blocksize=64)[1].absmax[group : group + 256]
    values, codes = slice(block * 64, block * 64 + 64), slice(block * 32, block * 32 + 32)
    tensors = {"values": x[values], "ours": mine[codes], "theirs": theirs[codes], "scales of its 256 blocks": scales}
    tensors |= {"our entry": one.flatten()[at], "their entry": other.flatten()[at]}
    return {"at": at, "block": block} | {key: tensor.clone().cpu() for key, tensor in tensors.items()}


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--values", type=int, default=0, help="compare so many of each kind, and no random tensors")
    made.add_argument("--dump", help="file for the first blocks that differ")
    made.add_argument("--tensors", type=int, default=10_000)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    import bitsandbytes

    counts: Counts = defaultdict(lambda: defaultdict(int))
    result: dict[str, Any] = {"bitsandbytes": bitsandbytes.__version__, "on": given.device}
    draw = random.Random(0)
    if given.values:
        counts = many_values(given.values, given.device, given.dump)
        write_result(given.json, result | {"values": given.values, "rows": counts})
    for at in range(0 if given.values else given.tensors):
        x = random_tensor(draw, given.device)
        draw.choices((four_bits, eight_bits, int8_rows), (5, 4, 1))[0](counts, x, draw)
        if (at + 1) % 1000 == 0 or at + 1 == given.tensors:
            write_result(given.json, result | {"tensors": at + 1, "rows": counts})
            print(f"{at + 1} tensors", flush=True)
    for name, row in sorted(counts.items()):
        print(f"{name:28}", dict(row))


if __name__ == "__main__":
    main()
