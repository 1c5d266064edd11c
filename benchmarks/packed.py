"""A QLoRA step on uneven documents packed into one row, against the floor that has no padding; on one CUDA device.

    python -m benchmarks.packed [--model llama-3.1-8b] [--documents 24] [--tokens 16384] [--graph]
        [--policy LEVEL|auto|LEVEL:N,...] [--memory-limit-gib N] [--attention [ragged ...]] [--json FILE]

The documents' lengths are log-normal (σ = 0.8), from one seed, and fill the row. The floor is that of
`benchmarks.step`: each GEMM at the row's tokens, and cuDNN's causal attention on each document alone at its own length,
every one timed alone in a CUDA graph. One step more is watched: it may make no tensor of the size of a dense mask.

--attention times the candidates for packed rows instead, forward and backward, at the model's heads and with the bounds
that the collator gives a batch, each checked against the documents one by one.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common import graph_us, write_result
from benchmarks.step import SETS, Training, check_losses, floor, show
from benchmarks.step_model import MODELS, STEPS, levels, model_config, timed

SIGMA = 0.8
ERROR = 0.02  # relative, of bf16 outputs and gradients; where documents saw each other it would be of the order of 1


def document_lengths(documents: int, tokens: int) -> list[int]:
    """`documents` uneven lengths, at least one token each, whose sum is `tokens`."""
    shares = torch.randn(documents, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(SIGMA).exp()
    lengths = [1 + int(share) for share in shares / shares.sum() * (tokens - documents)]
    lengths[0] += tokens - sum(lengths)
    return lengths


def packed_batch(name: str, lengths: list[int], device: str) -> dict[str, Any]:
    """One row of documents of random tokens, as `halfbyte train` collates it."""
    from halfbyte.data.collate import PackedCollator

    vocabulary = model_config(name).vocab_size
    tokens = torch.randint(3, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(1)).tolist()
    row = {"input_ids": tokens, "labels": tokens, "seq_lengths": lengths}
    batch = PackedCollator(pad_token_id=2, fused=True)([row])
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


class MaskWatch(TorchDispatchMode):
    """Collects, as words, what operations make that is as large as a mask of `length` × `length`.

    That is a tensor of any dtype with two dimensions of `length`, or a bool of as many elements, with memory behind it.
    """

    def __init__(self, length: int):
        super().__init__()
        self.length = length
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if type(tensor) is Tensor and self._is_mask(tensor):
                self.found.append(f"{func} made {tensor.dtype} {list(tensor.shape)}")
        return made

    def _is_mask(self, tensor: Tensor) -> bool:
        area = self.length**2
        if tensor.untyped_storage().nbytes() < area * tensor.element_size():
            return False
        return sum(size == self.length for size in tensor.shape) >= 2 or tensor.dtype == torch.bool


def ours(given: argparse.Namespace, lengths: list[int]) -> dict[str, dict[str, Any]]:
    """Our step on the packed row, launched from Python and, with --graph, as a CUDA graph from the same start."""
    tokens = sum(lengths)
    if given.memory_limit_gib:
        capacity = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.memory_limit_gib * 2**30 / capacity)
    activations = levels(given.model, 1, tokens, given.policy, given.memory_limit_gib) if given.policy else None
    training = Training(given.model, 1, tokens, "cuda", activations=activations)
    training.batch = packed_batch(given.model, lengths, "cuda")
    print(training.report)
    with MaskWatch(tokens) as watch:
        training.step(training.batch)
    if watch.found:
        raise SystemExit("a dense mask was made: " + "; ".join(watch.found))
    training.restart()
    results = {"halfbyte": timed(lambda: training.step(training.batch), tokens, STEPS)}
    if given.graph:
        from halfbyte.train.graph import GraphedStep

        training.restart()
        gc.collect()
        torch.cuda.empty_cache()
        graphed = GraphedStep(training.step, training.optimizer)
        results["halfbyte, graph"] = timed(lambda: graphed(training.batch), tokens, STEPS)
        check_losses(results["halfbyte"]["losses"], results["halfbyte, graph"]["losses"])
    return results


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def one_by_one(lengths: list[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """cuDNN on each document: q [T, Hq, D], k and v [T, Hk, D] → [T, Hq, D]. A call a document, lengths on the host."""
    parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        outputs = [
            F.scaled_dot_product_attention(*(x[None].transpose(1, 2) for x in part), is_causal=True, enable_gqa=True)
            for part in parts
        ]
    return torch.cat([out[0].transpose(0, 1) for out in outputs])


def ragged(bounds: Tensor, longest: int, *inputs: Tensor) -> Tensor:
    """cuDNN's kernel for ragged rows, by the operator below torch's own `varlen_attn`; autograd knows its backward."""
    places = bounds, bounds, longest, longest
    return torch.ops.aten._cudnn_attention_forward(*inputs, None, *places, True, 0.0, True, False)[0]


def flex(bounds: Tensor, tokens: int) -> Attend:
    """FlexAttention, compiled; its block mask, which is what a batch would make once, is made here."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document = torch.searchsorted(bounds[1:], torch.arange(tokens, device="cuda", dtype=bounds.dtype), right=True)

    def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[query] == document[key]) & (query >= key)

    mask = torch.compile(create_block_mask)(sees, None, None, tokens, tokens, device="cuda")
    compiled = torch.compile(flex_attention)

    def attend(*inputs: Tensor) -> Tensor:
        query, key, value = (x[None].transpose(1, 2) for x in inputs)
        return compiled(query, key, value, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attend


def candidates(lengths: list[int], batch: dict[str, Any]) -> dict[str, Callable[[], Attend]]:
    """Name → what makes it, which may fail."""
    from halfbyte.autograd import attention

    bounds, longest, tokens = batch["cu_seq_lens_q"], batch["max_length_q"], sum(lengths)
    ours = partial(attention.varlen_attention, bounds=bounds, longest=longest)
    return {
        "cuDNN, one by one": lambda: partial(one_by_one, lengths),
        "halfbyte's": lambda: ours,
        "cuDNN, ragged": lambda: partial(ragged, bounds, longest),
        "flex": lambda: flex(bounds, tokens),
    }


def compare_attention(name: str, lengths: list[int], chosen: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Candidate → ms forward, and forward and backward, in a graph; error against one by one; or why it failed.

    chosen: parts of the candidates' names; none: all.
    """
    config = model_config(name)
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    shapes = [(sum(lengths), count, config.head_dim) for count in heads]
    torch.manual_seed(0)
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    sets = [[make(shape).requires_grad_() for shape in shapes] for _ in range(SETS)]
    grad = make(shapes[0])
    truth = _with_gradients(partial(one_by_one, lengths), sets[0], grad)
    results: dict[str, dict[str, Any]] = {}
    for label, made in candidates(lengths, packed_batch(name, lengths, "cuda")).items():
        if chosen and not any(part in label for part in chosen):
            continue
        try:
            attend = made()
            found = _with_gradients(attend, sets[0], grad)
            error = max(map(_relative_error, found, truth))
            there = graph_us([partial(attend, *inputs) for inputs in sets]) / 1e3
            both = graph_us([partial(_with_gradients, attend, inputs, grad) for inputs in sets]) / 1e3
        except Exception as failed:
            results[label] = {"error": f"{type(failed).__name__}: {failed}"[:600]}
        else:
            results[label] = {"forward_ms": there, "both_ms": both, "relative_error": error, "right": error <= ERROR}
        print(f"  {label:18} {results[label]}", flush=True)
    return results


def _relative_error(found: Tensor, truth: Tensor) -> float:
    return float((found.float() - truth.float()).norm() / truth.float().norm())


def _with_gradients(attend: Attend, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--policy", help="what the layers keep: a level, auto, or such as offload:20,keep:12")
    parser.add_argument("--memory-limit-gib", type=float, help="of the process, and of its plan")
    parser.add_argument("--graph", action="store_true", help="also as a CUDA graph")
    parser.add_argument(
        "--attention", nargs="*", metavar="NAME", help="time the candidates for packed attention instead: all, or these"
    )
    parser.add_argument("--json")
    given = parser.parse_args()
    lengths = document_lengths(given.documents, given.tokens)
    print(f"{given.documents} documents of {min(lengths)} to {max(lengths)} tokens: {lengths}")
    result = {"model": given.model, "tokens": given.tokens, "documents": lengths}
    if given.attention is not None:
        write_result(given.json, {**result, "attention": compare_attention(given.model, lengths, given.attention)})
        return
    least = floor(given.model, 1, given.tokens, checkpointing=False, documents=lengths)
    gc.collect()
    torch.cuda.empty_cache()
    runs = ours(given, lengths)
    kept = given.policy or "activations kept"
    show(f"{given.model}, {given.documents} documents in {given.tokens} tokens, {kept}", least, runs)
    limits = {"policy": given.policy, "memory_limit_gib": given.memory_limit_gib}
    write_result(given.json, {**result, **limits, "floor": least, "runs": runs})


if __name__ == "__main__":
    main()
