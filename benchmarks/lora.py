"""A projection with its LoRA adapter at the shapes of an 8B model, forward and backward, in one run on a GPU.

python -m benchmarks.lora [--json FILE] [--variants before,after,fold,fold_copy] [--tokens 8192] [--rank 16]

Beside the plain GEMMs (x·Wᵀ and dy·W of a bf16 weight that is already there), dequantization alone, `lora_linear` as a
step runs it, PEFT on bitsandbytes, and ways to add the low-rank term, without autograd around them:

    before     write s·u·Bᵀ, then accumulate x·Wᵀ onto it (β = 1): what `autograd.lora` does
    after      y = x·Wᵀ, then accumulate s·u·Bᵀ onto it
    fold       one product of [x, s·u] and [W, B]; backward takes [dx, v] from dy·[W, s·B] likewise. x is assumed to be
               in the left part of the wide buffer already, where the norm before it would have to write it
    fold_copy  the same, with the copy of x into the wide buffer

A folded weight needs a dequantization that leaves gaps between rows. Here the values are dequantized into memory of
their own, which costs the same, and the product reads a wide weight that was filled before the clock started.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import event_us, graph_us, write_result
from halfbyte.autograd.lora import LoRA, lora_linear, product
from halfbyte.formats import Blockwise4
from halfbyte.tensor import QuantizedTensor

SHAPES = {"q, o": (4096, 4096), "k, v": (1024, 4096), "gate, up": (14336, 4096), "down": (4096, 14336)}
SETS = 3  # of tensors, which together exceed the L2 cache
DTYPE, SCALING = torch.bfloat16, 2.0
ALIGN = 64  # columns: rows of a wide buffer start at multiples of 128 bytes


@dataclass
class Case:
    """One projection's tensors. x [M, K], dy [M, N], packed W [N, K], a [r, K], b [N, r], and the folded buffers."""

    x: Tensor
    dy: Tensor
    weight: QuantizedTensor
    a: Tensor
    b: Tensor
    wide_x: Tensor | None = None  # [M, K + r rounded up], x in the left part
    wide_weight: Tensor | None = None  # [N, K + r rounded up], W in the left part

    @classmethod
    def random(cls, tokens: int, rows: int, columns: int, rank: int, device: str) -> Case:
        random = partial(torch.randn, dtype=DTYPE, device=device)
        weight = QuantizedTensor.quantize(random(rows, columns) / columns**0.5, Blockwise4("nf4", 64, True))
        a, b = random(rank, columns) / columns**0.5, random(rows, rank) / 10
        return cls(random(tokens, columns), random(tokens, rows), weight, a, b)

    def widen(self) -> None:
        """Make the wide buffers; their right parts are zero where r is no multiple of `ALIGN`."""
        extra = -(-self.a.shape[0] // ALIGN) * ALIGN
        self.wide_x = nn.functional.pad(self.x, (0, extra))
        self.wide_weight = nn.functional.pad(self.weight.dequantize(DTYPE), (0, extra))


# --- ways to add the low-rank term: forward gives y and u, backward dx, dA and dB ------------------------------------


def before(case: Case) -> tuple[Tensor, Tensor]:
    u = product(case.x, case.a.t())
    y = product(u, case.b.t(), SCALING)
    return y.addmm_(case.x, case.weight.dequantize(DTYPE).t()), u


def after(case: Case) -> tuple[Tensor, Tensor]:
    u = product(case.x, case.a.t())
    y = product(case.x, case.weight.dequantize(DTYPE).t())
    return y.addmm_(u, case.b.t(), alpha=SCALING), u


def fold(case: Case) -> tuple[Tensor, Tensor]:
    columns, rank = case.x.shape[1], case.a.shape[0]
    u = case.wide_x[:, columns : columns + rank]
    product(case.wide_x[:, :columns], case.a.t(), SCALING, out=u)
    return product(case.wide_x, _wide_weight(case, 1.0).t()), u


def fold_copy(case: Case) -> tuple[Tensor, Tensor]:
    case.wide_x[:, : case.x.shape[1]] = case.x
    return fold(case)


def before_backward(case: Case, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v = product(case.dy, case.b, SCALING)
    dx = product(v, case.a).addmm_(case.dy, case.weight.dequantize(DTYPE))
    return dx, product(v.t(), case.x), product(case.dy.t(), u, SCALING)


def after_backward(case: Case, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v = product(case.dy, case.b, SCALING)
    dx = product(case.dy, case.weight.dequantize(DTYPE)).addmm_(v, case.a)
    return dx, product(v.t(), case.x), product(case.dy.t(), u, SCALING)


def fold_backward(case: Case, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    columns, rank = case.x.shape[1], case.a.shape[0]
    wide = product(case.dy, _wide_weight(case, SCALING))
    v = wide[:, columns : columns + rank]
    dx = wide[:, :columns].addmm_(v, case.a)
    return dx, product(v.t(), case.x), product(case.dy.t(), u)


def _wide_weight(case: Case, scale: float) -> Tensor:
    columns, rank = case.x.shape[1], case.a.shape[0]
    case.weight.dequantize(DTYPE)
    torch.mul(case.b, scale, out=case.wide_weight[:, columns : columns + rank])
    return case.wide_weight


VARIANTS: dict[str, tuple[Callable, Callable]] = {
    "before": (before, before_backward),
    "after": (after, after_backward),
    "fold": (fold, fold_backward),
    "fold_copy": (fold_copy, fold_backward),
}


def check(case: Case, names: list[str]) -> None:
    """Every variant computes the same: relative errors against fp32."""
    x, dy, a, b, weight = (t.float() for t in (case.x, case.dy, case.a, case.b, case.weight.dequantize(DTYPE)))
    u, v = x @ a.t(), SCALING * dy @ b
    truth = (x @ weight.t() + SCALING * u @ b.t(), dy @ weight + v @ a, v.t() @ x, SCALING * dy.t() @ u)
    for name in names:
        forward, backward = VARIANTS[name]
        y, saved = forward(case)
        for what, found, exact in zip(("y", "dx", "dA", "dB"), (y, *backward(case, saved)), truth, strict=True):
            error = ((found.float() - exact).norm() / exact.norm()).item()
            if error > 0.01:
                raise SystemExit(f"{name}: {what} is off by {error:.1%}; nothing was timed")


# --- implementations with autograd -----------------------------------------------------------------------------------


def ours(case: Case) -> Callable[[], Any]:
    x, a, b = (tensor.detach().requires_grad_() for tensor in (case.x, case.a, case.b))
    step = lambda: torch.autograd.grad(lora_linear(x, case.weight, None, LoRA(a, b, SCALING)), (x, a, b), case.dy)  # noqa: E731
    return step


def peft_on_bitsandbytes(case: Case) -> Callable[[], Any]:
    import bitsandbytes as bnb
    from peft import LoraConfig, inject_adapter_in_model

    rows, columns = case.weight.shape
    rank = case.a.shape[0]
    layer = bnb.nn.Linear4bit(columns, rows, bias=False, compute_dtype=DTYPE, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(case.weight.dequantize(DTYPE).cpu(), requires_grad=False, quant_type="nf4")
    config = LoraConfig(r=rank, lora_alpha=int(SCALING * rank), target_modules=["0"])
    module = inject_adapter_in_model(config, nn.Sequential(layer.to(case.x.device)))
    factors = module[0].lora_A["default"].weight, module[0].lora_B["default"].weight
    for factor, value in zip(factors, (case.a, case.b), strict=True):
        factor.data = value.clone()
    x = case.x.detach().requires_grad_()
    return lambda: torch.autograd.grad(module(x), (x, *factors), case.dy)


# --- timing ----------------------------------------------------------------------------------------------------------


def both(calls: list[Callable[[], Any]]) -> dict[str, float]:
    return {"graph_us": graph_us(calls), "called_us": event_us(calls)}


def run_shape(cases: list[Case], variants: list[str]) -> dict[str, Any]:
    """µs of everything for one shape; `x_gemms` is a time in a graph over that of the two GEMMs alone."""
    weights = [case.weight.dequantize(DTYPE) for case in cases]
    pairs = list(zip(cases, weights, strict=True))
    rows: dict[str, dict[str, float]] = {
        "gemm forward": both([lambda c=c, w=w: c.x @ w.t() for c, w in pairs]),
        "gemm backward": both([lambda c=c, w=w: c.dy @ w for c, w in pairs]),
        "dequantize": both([lambda c=c: c.weight.dequantize(DTYPE) for c in cases]),
    }
    del weights, pairs
    if any(name.startswith("fold") for name in variants):
        for case in cases:
            case.widen()
    check(cases[0], variants)
    for name in variants:
        forward, backward = VARIANTS[name]
        saved = [forward(case)[1] for case in cases]
        rows[f"{name} forward"] = both([partial(forward, case) for case in cases])
        rows[f"{name} backward"] = both([partial(backward, c, u) for c, u in zip(cases, saved, strict=True)])
    rows["lora_linear"] = both([ours(case) for case in cases])
    rows["peft on bitsandbytes"] = both([peft_on_bitsandbytes(case) for case in cases])
    floors = {kind: rows[f"gemm {kind}"]["graph_us"] for kind in ("forward", "backward")}
    for name, row in rows.items():
        row["x_gemms"] = row["graph_us"] / floors.get(name.split()[-1], sum(floors.values()))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"some of {', '.join(VARIANTS)}")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    given = parser.parse_args()
    variants = given.variants.split(",")
    if unknown := set(variants) - VARIANTS.keys():
        parser.error(f"--variants: no {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    result: dict[str, Any] = {"tokens": given.tokens, "rank": given.rank, "dtype": str(DTYPE), "shapes": {}}
    for name, (rows, columns) in SHAPES.items():
        cases = [Case.random(given.tokens, rows, columns, given.rank, "cuda") for _ in range(SETS)]
        print(f"{name}: [{rows}, {columns}], {given.tokens} tokens, r={given.rank}")
        result["shapes"][f"{rows}x{columns}"] = shape = run_shape(cases, variants)
        for label, row in shape.items():
            print(f"  {label:22}{row['graph_us']:9.1f} µs{row['x_gemms']:7.3f}×  as called {row['called_us']:9.1f} µs")
        del cases
        torch.cuda.empty_cache()
    write_result(given.json, result)


if __name__ == "__main__":
    main()
