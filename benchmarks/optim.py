"""Optimizer steps of this package and of its peers in one process, as a share of a copy of the bytes that they move.

    python -m benchmarks.optim [--sections lora ...] [--elements 1e9] [--only REGEX] [--json FILE]

- `1b`: one fp32 parameter with an fp32 gradient.
- `1b-bf16`: one bf16 parameter with a bf16 gradient, and a master weight of 24 or 32 bits.
- `lora`: the 450 adapter matrices of an 8B model in fp32 (29 M elements), gradients clipped to norm 1, called from
  Python and in a CUDA graph.
- `muon`: the 196 matrices of Qwen3-0.6B in bf16 and fp32. Products are the matmuls of 5 Newton-Schulz iterations
  (XXᵀ, AA and BX, 4m²n + 2m³ FLOPs each for m ≤ n, symmetric ones counted in full); their own time is that of torch.bmm
  of the same batches in the same run.
- `low_rank`: GaLore and APOLLO at rank 128 over the 112 linear matrices of a Llama of 1 B parameters (hidden size 2048,
  16 layers) in bf16. `plain` rows are the papers' algorithms, matrix by matrix with torch.linalg.svd. A refresh is that
  of all matrices; SVDs are timed once per shape and multiplied, and packages are timed on one layer and multiplied.

Bytes of the first three sections are those that a step must read and write: gradient, weight, correction and state. The
result is written after each figure. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import copy_bandwidth, event_us, free_memory, graph_us, parser_of, write_result
from halfbyte.ops.low_rank import refresh_basis
from halfbyte.ops.optimizer_state import STORAGES
from halfbyte.optim.fused import AdamW
from halfbyte.optim.low_rank import FIRST_SWEEPS, OVERSAMPLED, LowRank, LowRankOptimizer
from halfbyte.optim.muon import NEWTON_SCHULZ, Muon

PEERS = ("bitsandbytes", "torchao", "flashoptim", "galore_torch", "apollo_torch")
Shape = tuple[int, int]
Row = tuple[str, dict[str, Any]]
QWEN3_06B = [(2048, 1024), *[(1024, 1024)] * 2, (1024, 2048), *[(3072, 1024)] * 2, (1024, 3072)] * 28
LLAMA_1B_LAYERS = 16
LLAMA_1B_LAYER = [(2048, 2048), *[(512, 2048)] * 2, (2048, 2048), *[(8192, 2048)] * 2, (2048, 8192)]
STATES = 2  # of AdamW
SECTIONS = ("lora", "1b", "1b-bf16", "muon", "low_rank")


def one(elements: int, dtype: torch.dtype) -> list[nn.Parameter]:
    parameter = nn.Parameter(torch.randn(elements, device="cuda").to(dtype))
    parameter.grad = torch.randn(elements, device="cuda").mul_(1e-3).to(dtype)
    return [parameter]


def adapters() -> list[nn.Parameter]:
    """The LoRA matrices of 32 layers of an 8B model at rank 16, and two more: 450 of 29 M elements or so."""
    hidden, inner, rank = 4096, 14336, 11
    sides = [
        (hidden, hidden),
        (hidden, 1024),
        (hidden, 1024),
        (hidden, hidden),
        (hidden, inner),
        (hidden, inner),
        (inner, hidden),
    ]
    shapes = [shape for columns, rows in sides for shape in ((rank, columns), (rows, rank))] * 32 + [(rank, hidden)] * 2
    found = [nn.Parameter(torch.randn(*shape, device="cuda")) for shape in shapes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def step_bytes(parameters: list[nn.Parameter], state: float, correction: int = 0) -> float:
    """Bytes of a step: the gradient once, weight, correction and state of `state` bytes per element twice."""
    elements = sum(parameter.numel() for parameter in parameters)
    return elements * (3 * parameters[0].element_size() + 2 * (correction + state))


def ours(storage: str, rounding: str = "nearest") -> Callable[[list[nn.Parameter]], Callable[[], Any]]:
    return lambda parameters: AdamW(parameters, 1e-3, storage=storage, rounding=rounding).step


def peers(bf16: bool) -> Iterator[tuple[str, float, int, Callable[[list[nn.Parameter]], Callable[[], Any]]]]:
    """Name, bytes of state per element, bytes of correction, and parameters → a step."""
    if not bf16:
        yield "torch fused 32-bit", 8, 0, lambda p: torch.optim.AdamW(p, 1e-3, fused=True).step
    if installed("bitsandbytes") and not bf16:
        import bitsandbytes as bnb

        yield "bitsandbytes 8-bit", 2 + 8 / 256, 0, lambda p: bnb.optim.AdamW8bit(p, 1e-3).step
        yield "bitsandbytes paged 8-bit", 2 + 8 / 256, 0, lambda p: bnb.optim.PagedAdamW8bit(p, 1e-3).step
    if installed("torchao"):
        from torchao.optim import AdamW8bit

        yield "torchao 8-bit", 2 + 8 / 256, 0, lambda p: AdamW8bit(p, 1e-3, bf16_stochastic_round=bf16).step
    if installed("flashoptim") and bf16:
        from flashoptim import FlashAdamW

        yield "flashoptim 24-bit", 2 + 4 / 32, 1, lambda p: FlashAdamW(p, 1e-3, master_weight_bits=24).step


def installed(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def one_parameter(elements: int, dtype: torch.dtype, keep: re.Pattern[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    bf16 = dtype == torch.bfloat16
    roundings = ("correction8", "correction16", "stochastic") if bf16 else ("nearest",)
    rows = [
        (
            f"halfbyte {storage} {rounding}",
            STATES * STORAGES[storage].nbytes(2**20) / 2**20,
            size,
            ours(storage, rounding),
        )
        for storage in STORAGES
        for rounding, size in zip(roundings, (1, 2, 0) if bf16 else (0,), strict=True)
    ]
    for name, state, correction, make in [*rows, *peers(bf16)]:
        if not keep.search(name):
            continue
        try:
            parameters = one(elements, dtype)
            before = torch.cuda.memory_allocated()
            step = make(parameters)
            step()
            held = (torch.cuda.memory_allocated() - before) / elements
            moved = step_bytes(parameters, state, correction)
            us = event_us([step], 8, 2)
            yield name, {"ms": us / 1e3, "TB/s": moved / us / 1e6, "bytes": moved, "state bytes per element": held}
        except Exception as error:  # a peer's, which other rows do not need
            yield name, {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        parameters = step = None  # type: ignore[assignment]
        free_memory()


def lora(keep: re.Pattern[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    def clipped(parameters: list[nn.Parameter], optimizer: Any) -> Callable[[], Any]:
        def step() -> Tensor:
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            return norm

        return step

    def own(storage: str) -> Callable[[list[nn.Parameter]], Callable[[], Any]]:
        def make(parameters: list[nn.Parameter]) -> Callable[[], Any]:
            optimizer = AdamW(parameters, 1e-3, storage=storage)

            def step() -> None:
                optimizer.clip(1.0)
                optimizer.step()

            return step

        return make

    rows: list[tuple[str, bool, Callable[[list[nn.Parameter]], Callable[[], Any]]]] = [
        *((f"halfbyte {storage}", True, own(storage)) for storage in STORAGES),
        ("torch fused 32-bit", True, lambda p: clipped(p, torch.optim.AdamW(p, 1e-3, fused=True, capturable=True))),
    ]
    if installed("bitsandbytes"):
        import bitsandbytes as bnb

        rows.append(("bitsandbytes 8-bit", False, lambda p: clipped(p, bnb.optim.AdamW8bit(p, 1e-3))))
    for name, captured, make in rows:
        if not keep.search(name):
            continue
        parameters = adapters()
        step = make(parameters)
        row = {"called ms": event_us([step], 20, 4) / 1e3}
        if captured:
            row["graph ms"] = graph_us([step]) / 1e3
        yield name, row
        parameters = step = None  # type: ignore[assignment]
        free_memory()


def milliseconds(call: Callable[[], Any], device: str, repeats: int = 8) -> float:
    """Median time of a call from Python, after two others."""
    if device == "cuda":
        return event_us([call], repeats, 2) / 1e3
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def seconds_once(call: Callable[[], Any], device: str) -> float:
    """Time of one call, until its results are there."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def matrices(shapes: Sequence[Shape], dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """Parameters with gradients, both normal."""
    found = [nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


# --- Muon ------------------------------------------------------------------------------------------------------------


def newton_schulz_flops(shapes: Sequence[Shape], steps: int = 5) -> float:
    """FLOPs of the products of all matrices, symmetric ones in full."""
    sides = [(min(shape), max(shape)) for shape in shapes]
    return steps * sum(4.0 * m * m * n + 2.0 * m**3 for m, n in sides)


def product_ms(shapes: Sequence[Shape], device: str, steps: int = 5) -> float:
    """Time of these products by torch.bmm in bf16, one batch per shape."""
    total = 0.0
    for shape in dict.fromkeys(shapes):
        m, n = min(shape), max(shape)
        x = torch.randn(shapes.count(shape), m, n, device=device).mul_((m * n) ** -0.5).bfloat16()
        square = torch.bmm(x, x.mT)
        for left, right in ((x, x.mT), (square, square), (square, x)):
            total += steps * milliseconds(lambda left=left, right=right: torch.bmm(left, right), device)
    return total


def muon(shapes: Sequence[Shape], device: str, keep: re.Pattern[str]) -> Iterator[Row]:
    flops = newton_schulz_flops(shapes)
    products = product_ms(list(shapes), device)
    yield "products by torch.bmm", {"ms": products, "TFLOP/s": flops / products / 1e9}
    free_memory()
    options = {"lr": 1e-3, "weight_decay": 0.1, "ns_coefficients": NEWTON_SCHULZ}
    rows: dict[str, Callable[[list[nn.Parameter]], Any]] = {
        "torch.optim.Muon": lambda p: torch.optim.Muon(p, adjust_lr_fn="match_rms_adamw", **options),
        "halfbyte muon": lambda p: Muon(p, capturable=True, **options),
        "halfbyte muon_8bit": lambda p: Muon(p, capturable=True, momentum_bits=8, **options),
    }
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        theirs = None
        for row, make in rows.items():
            if not keep.search(row):
                continue
            parameters = matrices(shapes, dtype, device)
            step = make(parameters).step
            ms = milliseconds(step, device)
            figures = {"ms": ms, "TFLOP/s": flops / ms / 1e9, "share of the products' rate": products / ms}
            if row.startswith("torch"):
                theirs = ms
            else:
                figures |= {"times faster than torch": theirs / ms} if theirs else {}
                figures |= {"graph ms": graph_us([step]) / 1e3} if device == "cuda" else {}
            yield f"{row}, {name} weights", figures
            parameters = step = None  # type: ignore[assignment]
            free_memory()


# --- GaLore and APOLLO -----------------------------------------------------------------------------------------------


class PlainGaLore:
    """Algorithm 2 of arXiv:2403.03507 for matrices [m, n], one after another, the shorter side projected."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, rank: int, scale: float = 0.25):
        self.parameters, self.lr, self.rank, self.scale, self.steps = parameters, lr, rank, scale, 0
        self.bases: list[Tensor] = []
        self.moments: list[tuple[Tensor, Tensor]] = []

    def start(self, bases: list[Tensor]) -> None:
        """Take bases [shorter side, rank], and moments of zeros."""
        self.bases = bases
        shapes = [(self.rank, max(parameter.shape)) for parameter in self.parameters]
        zeros = [torch.zeros(shape, device=basis.device) for shape, basis in zip(shapes, bases, strict=True)]
        self.moments = [(each, each.clone()) for each in zeros]

    def refresh(self, gradient: Tensor) -> Tensor:
        """Basis of one matrix by an SVD."""
        wide = gradient if gradient.shape[0] <= gradient.shape[1] else gradient.mT
        return torch.linalg.svd(wide.float(), full_matrices=False).U[:, : self.rank]

    def normalized(self, projected: Tensor, moments: tuple[Tensor, Tensor]) -> Tensor:
        first, second = moments
        first.lerp_(projected, 0.1)
        second.lerp_(projected.square(), 0.001)
        corrected = (second / (1 - 0.999**self.steps)).sqrt_().add_(1e-8)
        return first / (1 - 0.9**self.steps) / corrected

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for parameter, basis, moments in zip(self.parameters, self.bases, self.moments, strict=True):
            assert parameter.grad is not None
            tall = parameter.shape[0] > parameter.shape[1]
            gradient = parameter.grad.mT if tall else parameter.grad
            update = self.update(gradient.float(), basis, moments)
            parameter.add_((update.mT if tall else update).to(parameter.dtype), alpha=-self.lr)

    def update(self, gradient: Tensor, basis: Tensor, moments: tuple[Tensor, Tensor]) -> Tensor:
        return self.scale * (basis @ self.normalized(basis.T @ gradient, moments))


class PlainApollo(PlainGaLore):
    """Algorithm 1 of arXiv:2412.05270 with channel-wise scaling; `bases` are Gaussian."""

    def start(self, bases: list[Tensor]) -> None:
        super().start(bases)
        self.norms: dict[int, Tensor] = {}

    def update(self, gradient: Tensor, basis: Tensor, moments: tuple[Tensor, Tensor]) -> Tensor:
        projected = basis.T @ gradient
        scaled = gradient * (self.normalized(projected, moments).norm(dim=0) / (projected.norm(dim=0) + 1e-8))
        norm, key = scaled.norm(), id(basis)
        if key in self.norms:
            limited = (1.01 * self.norms[key] / (norm + 1e-8)).clamp(max=1.0)
            scaled, norm = scaled * limited, norm * limited
        self.norms[key] = norm
        return scaled


def svd_seconds(shapes: Sequence[Shape], device: str) -> float:
    """Time of an SVD of each matrix: one per shape, times the matrices of that shape."""
    total = 0.0
    sides = [(min(shape), max(shape)) for shape in shapes]
    for side in dict.fromkeys(sides):
        matrix = torch.randn(side, device=device)
        total += sides.count(side) * seconds_once(
            lambda matrix=matrix: torch.linalg.svd(matrix, full_matrices=False), device
        )
    return total


def refresh_seconds(shapes: Sequence[Shape], rank: int, device: str) -> tuple[float, float]:
    """Time of the first bases of all matrices, a batch per shape, and of later ones, one matrix after another."""
    first = later = 0.0
    sides = [(min(shape), max(shape)) for shape in shapes]
    for side in dict.fromkeys(sides):
        most = min(sides.count(side), max(2**26 // math.prod(side), 1))
        gradients = torch.randn(most, *side, device=device)
        start = torch.randn(most, side[0], min(rank + OVERSAMPLED, *side), device=device)
        refresh_basis(gradients[:1], start[:1], rank, 1)  # loads the solvers
        took = seconds_once(lambda g=gradients, s=start: refresh_basis(g, s, rank, FIRST_SWEEPS), device)
        first += took * sides.count(side) / most
        basis = start[:1, :, :rank]
        refresh_basis(gradients[:1], basis, rank, 1, align=True)
        one = seconds_once(lambda g=gradients, b=basis: refresh_basis(g[:1], b, rank, 1, align=True), device)
        later += one * sides.count(side)
    return first, later


def low_rank(
    layer: Sequence[Shape], layers: int, rank: int, device: str, keep: re.Pattern[str], lr: float = 1e-3
) -> Iterator[Row]:
    """Rows of the section for `layers` layers of matrices of these shapes."""
    shapes = [*layer] * layers
    elements = sum(map(math.prod, shapes))
    svd = svd_seconds(shapes, device)
    yield "SVD of all matrices", {"s": svd}
    first, later = refresh_seconds(shapes, rank, device)
    yield "first bases of all matrices", {"s": first, "times faster than the SVDs": svd / first}
    yield "later bases of all matrices", {"s": later, "times faster than the SVDs": svd / later}

    def own(storage: str, options: LowRank) -> Callable[[list[nn.Parameter]], Any]:
        def inner(groups: list[dict[str, Any]]) -> AdamW:
            return AdamW(groups, lr, storage=storage)

        return lambda p: LowRankOptimizer([{"params": p, "low_rank": options}], inner, lr=lr)

    def plain(kind: type[PlainGaLore]) -> Callable[[list[nn.Parameter]], Any]:
        def make(parameters: list[nn.Parameter]) -> PlainGaLore:
            made = kind(parameters, lr, rank)
            made.start([torch.randn(min(p.shape), rank, device=device) / rank**0.5 for p in parameters])
            return made

        return make

    gap = 10**6  # no refresh in the timed steps
    galore = LowRank(rank, gap)
    apollo = LowRank(rank, gap, scale=1.0, scaling="channel", random=True)
    rows: dict[str, tuple[int, Callable[[list[nn.Parameter]], Any]]] = {
        "halfbyte galore_adamw": (layers, own("weight", galore)),
        "halfbyte galore_adamw_8bit": (layers, own("dynamic8", galore)),
        "halfbyte apollo_adamw": (layers, own("weight", apollo)),
        "halfbyte apollo_mini": (layers, own("weight", LowRank(1, gap, 128.0, scaling="tensor", random=True))),
        "plain GaLore": (layers, plain(PlainGaLore)),
        "plain APOLLO": (layers, plain(PlainApollo)),
    }
    if installed("galore_torch"):
        from galore_torch import GaLoreAdamW

        keys = {"rank": rank, "update_proj_gap": gap, "scale": 0.25, "proj_type": "std"}
        rows["galore_torch"] = 1, lambda p: GaLoreAdamW([{"params": p, **keys}], lr)
    if installed("apollo_torch"):
        from apollo_torch import APOLLOAdamW

        apollo_keys = {"rank": rank, "proj": "random", "scale_type": "channel", "scale": 1.0, "update_proj_gap": gap,
                       "proj_type": "std"}  # fmt: skip
        rows["apollo_torch"] = 1, lambda p: APOLLOAdamW([{"params": p, **apollo_keys}], lr)
    for name, (count, make) in rows.items():
        if not keep.search(name):
            continue
        try:
            parameters = matrices([*layer] * count, torch.bfloat16, device)
            optimizer = make(parameters)
            figures = {"first step s": seconds_once(optimizer.step, device) * layers / count}
            figures["ms"] = milliseconds(optimizer.step, device) * layers / count
            if hasattr(optimizer, "state_dict"):
                state = optimizer.state_dict()["state"]
                figures["state bytes per element"] = tensor_bytes(state) * layers / count / elements
            yield name, figures
        except Exception as error:  # a peer's, which other rows do not need
            if name.startswith("halfbyte"):
                raise
            yield name, {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        parameters = optimizer = state = None  # type: ignore[assignment]
        free_memory()


def tensor_bytes(state: Any) -> int:
    """Bytes of all tensors in nested mappings, and of a projector's in its attributes."""
    if isinstance(state, Tensor):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else vars(state).values() if hasattr(state, "__dict__") else ()
    return sum(map(tensor_bytes, values))


def sections(arguments: argparse.Namespace, device: str = "cuda") -> dict[str, Callable[[], Iterator[Row]]]:
    """Name → its rows, measured as they are taken."""
    keep, elements = re.compile(arguments.only), int(arguments.elements)
    return {
        "lora": lambda: lora(keep),
        "1b": lambda: one_parameter(elements, torch.float32, keep),
        "1b-bf16": lambda: one_parameter(elements, torch.bfloat16, keep),
        "muon": lambda: muon(QWEN3_06B, device, keep),
        "low_rank": lambda: low_rank(LLAMA_1B_LAYER, LLAMA_1B_LAYERS, 128, device, keep),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in PEERS if installed(name) and name != "flashoptim"}
    result: dict[str, Any] = {"copy TB/s": copy_bandwidth(), "peers": versions, "elements": int(arguments.elements)}
    free_memory()
    for part, rows in sections(arguments).items():
        if part not in arguments.sections:
            continue
        result[part] = {}
        for name, row in rows():
            if "TB/s" in row:
                row["share of a copy"] = row["TB/s"] / result["copy TB/s"]
            result[part][name] = row
            print(
                part,
                name,
                {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()},
                flush=True,
            )
            write_result(arguments.json, result)
    return result


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections to run")
    made.add_argument("--elements", type=float, default=1e9)
    made.add_argument("--only", default="", help="regular expression of rows")
    return made


def main(words: Sequence[str] | None = None) -> None:
    run(parser().parse_args(words))


if __name__ == "__main__":
    main()
