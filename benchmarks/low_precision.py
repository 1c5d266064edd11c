"""Int8 and FP8 kernels and products at an 8B model's sizes: `python -m benchmarks.low_precision OUT [--tokens 8192]`.

Everything is timed from a CUDA graph over four sets of tensors. A kernel's fraction is of a large copy of the same run;
products stand beside the 16-bit F.linear of the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import copy_bandwidth, graph_us, write_result
from halfbyte.autograd.int8 import int8_linear
from halfbyte.autograd.linear_fp8 import Fp8Gemms, weight_codes
from halfbyte.autograd.lora import lora_linear
from halfbyte.formats import from_spec
from halfbyte.ops.float8 import E4M3, E5M2, cast_float8, quantize_float8, transpose_float8
from halfbyte.ops.fp8_scaling import DelayedScaling, ScalingOptions, Slot
from halfbyte.ops.int8 import quantize_rows_int8
from halfbyte.tensor import QuantizedTensor

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336)]  # N, K
SETS = 4
Call = Callable[[Tensor, Tensor], Any]  # of x [M, K] and a weight [N, K]


def kernels(rows: int, columns: int, tokens: int) -> Iterator[tuple[str, float, Call, str | None]]:
    """Name, bytes moved at least, the call, and the format its weight comes in."""
    weights, inputs = rows * columns, tokens * columns
    for spec in ("int8", "fp8:tensor", "fp8:row", "fp8:tile"):
        yield f"dequantize {spec}", 3 * weights, lambda x, w: w.dequantize(), spec
    yield "quantize x to int8", 3 * inputs, lambda x, w: quantize_rows_int8(x, None, 0.0), None
    scale, newest = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    yield "cast x to E4M3", 3 * inputs, lambda x, w: cast_float8(scale, (x,), None, scale, newest, E4M3, True), None
    yield "transpose E4M3", 2 * weights, lambda x, w: transpose_float8(w.parts["codes"].view(E4M3)), "fp8:row"
    nf4, bf16 = "blockwise4:nf4:64:nested", torch.bfloat16
    yield "nf4 to E4M3", 1.5 * weights, lambda x, w: weight_codes(w, scale, bf16), nf4
    turned = torch.empty(columns, rows, dtype=E4M3, device="cuda")
    yield "nf4 to E4M3, transposed", 1.5 * weights, lambda x, w: weight_codes(w, scale, bf16, turned), nf4
    yield "quantize W to E4M3", 3 * weights, lambda x, w: quantize_float8(w, "row"), None


def products() -> Iterator[tuple[str, Call, str | None]]:
    state = DelayedScaling([E4M3, E5M2], ScalingOptions(), device="cuda")
    state.scale.fill_(50.0)
    state.settled = [True, True]
    recipes: dict[int, Fp8Gemms] = {}  # one a weight, since each keeps that one's scale

    def fp8(x: Tensor, w: Tensor) -> Tensor:
        recipe = recipes.setdefault(id(w), Fp8Gemms(Slot(state, 0), Slot(state, 1)))
        return lora_linear(x, w, recipe=recipe)

    yield "bf16", F.linear, None
    for spec in ("fp8:tensor", "fp8:row", "fp8:tile", "blockwise4:nf4:64:nested"):
        yield f"fp8 of {spec}", fp8, spec
    for threshold in (0.0, 6.0):
        yield f"int8, threshold {threshold}", lambda x, w, t=threshold: int8_linear(x, w, None, t), "int8"


def sets(rows: int, columns: int, tokens: int, spec: str | None, grad: bool) -> list[tuple[Tensor, Tensor]]:
    """Inputs and weights, the weights in a format where one is given."""
    found = []
    for _ in range(SETS):
        weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
        found.append((x, weight if spec is None else QuantizedTensor.quantize(weight, from_spec(spec))))
    return found


def both_ways(call: Call, x: Tensor, weight: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(call(x, weight), x, grad)


def measure(rows: int, columns: int, tokens: int, copy: float) -> Iterator[dict[str, Any]]:
    shape = {"rows": rows, "columns": columns, "tokens": tokens}
    for name, moved, call, spec in kernels(rows, columns, tokens):
        pairs = sets(rows, columns, tokens, spec, False)
        us = graph_us([lambda x=x, w=w, call=call: call(x, w) for x, w in pairs])
        yield shape | {"what": name, "us": us, "fraction_of_copy": moved / us / 1e6 / copy}
    grad = torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16)
    for name, call, spec in products():
        pairs = sets(rows, columns, tokens, spec, True)
        with torch.no_grad():
            forward = graph_us([lambda x=x, w=w, call=call: call(x, w) for x, w in pairs])
        both = graph_us([lambda x=x, w=w, call=call: both_ways(call, x, w, grad) for x, w in pairs])
        yield shape | {"what": f"product {name}", "us_forward": forward, "us_forward_and_dx": both}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("out", nargs="?")
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    copy = copy_bandwidth()
    rows = []
    for shape in SHAPES:
        for row in measure(*shape, arguments.tokens, copy):
            print(
                {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True
            )
            rows.append(row)
    write_result(arguments.out, {"copy_tb_per_s": copy, "rows": rows})


if __name__ == "__main__":
    main()
