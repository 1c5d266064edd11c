"""cuDNN's deterministic attention backward for rows of one document, called through nvidia-cudnn-frontend.

torch calls the same library without the deterministic option. On Hopper cuDNN then writes ds of every head, T × T
16-bit numbers, and multiplies it by the keys in a separate pass, so rows and heads are processed in parts of at most
`SCRATCH` bytes. If the queries of one key head need more (over 8,192 tokens with four of them), Triton's kernels run.

Measured on an H200 (cuDNN 9.19, bf16, heads of 128), in µs, without parts, with torch's call in brackets: 4×2048 of
32/8 heads 933 (868), 4×2048 of 16/8 509 (475), 2×512 of 16/8 47 (45), 1×8192 of 32/8 3204 (2837). Triton's two passes
(`attention`): 1373, 727, 76, 4332.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import Unavailable
from ...ops.attention import SCRATCH, cudnn, parts_of_rows, rows_backward
from ..device import device_of

HOPPER, WIDEST = 9, 128  # major compute capability; largest head

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


class _Plan(NamedTuple):
    graph: Any
    tensors: tuple[Any, ...]  # cuDNN tensors: dout, query, key, value, out, logsumexp and the three results
    scratch: int  # bytes


@functools.cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return cudnn().create_handle()


@functools.lru_cache(maxsize=256)
def _plan(device: torch.device, dtype: torch.dtype, scale: float, layouts: tuple[Layout, ...]) -> _Plan | str:
    """Plan for operands and results of these layouts, or the reason why cuDNN has none."""
    library = cudnn()
    data_types = {torch.bfloat16: library.data_type.BFLOAT16, torch.float16: library.data_type.HALF}
    data_type, single = data_types[dtype], library.data_type.FLOAT
    try:
        handle = _handle(device)
        graph = library.pygraph(
            io_data_type=data_type, intermediate_data_type=single, compute_data_type=single, handle=handle
        )
        numbers = [data_type] * 5 + [single]
        operands = [
            graph.tensor(dim=list(shape), stride=list(strides), data_type=number)
            for (shape, strides), number in zip(layouts[:6], numbers, strict=True)
        ]
        dout, query, key, value, out, logsumexp = operands
        gradients = graph.sdpa_backward(
            q=query, k=key, v=value, o=out, dO=dout, stats=logsumexp,
            attn_scale=scale, use_causal_mask=True, use_deterministic_algorithm=True,
        )  # fmt: skip
        for result, (shape, strides) in zip(gradients, layouts[6:], strict=True):
            result.set_output(True).set_dim(list(shape)).set_stride(list(strides)).set_data_type(data_type)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([library.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        return _Plan(graph, (*operands, *gradients), graph.get_workspace_size())
    except (
        RuntimeError,
        AttributeError,
        TypeError,
        library.cudnnGraphNotSupportedError,
    ) as error:  # the last two: another version of the package
        if torch.cuda.is_current_stream_capturing():
            raise  # may be caused by the capture and says nothing about the shapes
        return (str(error).splitlines() or [type(error).__name__])[0]


def _parts(query: Tensor, key: Tensor) -> tuple[int, int] | None:
    return parts_of_rows(query, key, SCRATCH)


def obstacle(dout: Tensor, query: Tensor, key: Tensor, *_: Any) -> str | None:
    if device_of(query).capability[0] != HOPPER or query.shape[-1] > WIDEST:
        return "needs Hopper, and heads of up to 128"
    if cudnn() is None:
        return "needs nvidia-cudnn-frontend"
    return None if _parts(query, key) else f"a head's ds is more than {SCRATCH >> 20} MiB"


@rows_backward.kernel("cuda", unless=obstacle)
def backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    operands = dout, query, key, value, out, logsumexp
    dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, value))
    rows, keys = _parts(query, key) or (1, 1)
    for row in range(0, query.shape[0], rows):
        for head in range(0, key.shape[1], keys):
            tensors = [_cut(x, row, rows, head, keys, key.shape[1]) for x in (*operands, dq, dk, dv)]
            plan = _plan(query.device, query.dtype, scale, tuple((tuple(x.shape), x.stride()) for x in tensors))
            if isinstance(plan, str):
                raise Unavailable(f"cuDNN has no repeatable backward for these rows: {plan}")
            _execute(plan, tensors)
    return dq, dk, dv


def _cut(x: Tensor, row: int, rows: int, head: int, keys: int, all_keys: int) -> Tensor:
    """Slice [B, H, ...] to these rows and key heads."""
    group = x.shape[1] // all_keys
    return x.narrow(0, row, rows).narrow(1, head * group, keys * group)


def _execute(plan: _Plan, tensors: list[Tensor]) -> None:
    device = tensors[0].device
    handle = _handle(device)
    cudnn().set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
    scratch = torch.empty(max(1, plan.scratch), dtype=torch.uint8, device=device)
    plan.graph.execute(dict(zip(plan.tensors, tensors, strict=True)), scratch, handle=handle)
