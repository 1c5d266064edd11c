"""One QLoRA training step on one CUDA device, compared with its floor and with other libraries.

    python -m benchmarks.step --model llama-3.1-8b --batch 4 --length 2048 [--graph] [--peers unsloth]
    python -m benchmarks.step --model llama-3.1-8b --length 16384 --documents 24 [--graph]

NF4 with nested scales, rank 16 on the seven linears, fused AdamW, random weights and tokens. The floor is the time that
no implementation can avoid: every GEMM (forward, and the gradient of its input) and the attention, each timed at its
shape in a CUDA graph and summed; checkpointing counts the forward of the layers twice. Peers run the same step in their
own processes (`benchmarks.step_peers`).

--documents packs uneven documents into one row of --length tokens. Their lengths are log-normal (σ = 0.8) with a fixed
seed. The floor then has the attention of each document at its own length.

--checkpointing is transformers' for halfbyte and each peer's own for the peer. --policy replaces it for halfbyte
(`halfbyte.plan.policy`); --memory-limit-gib, --recipe, --storage and --adapters also apply to halfbyte only. The floor
stays in bf16. Several formats, or several adapters (`--adapters lora use_dora=true lora_dropout=0.05`: keys of a run),
are compared in one process.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import free_memory, graph_us, parser_of, require_gpu, run_peer, write_result
from benchmarks.step_model import MODELS, STEPS, build, levels, model_config, random_batch, timed

SETS = 3  # sets of operands in a graph, which together exceed the L2 cache
SIGMA = 0.8


def floor(
    name: str, rows: int, length: int, checkpointing: bool, documents: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the ms of each GEMM shape, the head and the attention of a step, and their sum.

    documents: lengths of the packed documents, whose attention is timed separately.
    """
    config = model_config(name)
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    linears = Counter([(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)])
    linears.update([(inner, hidden), (inner, hidden), (hidden, inner)])  # q and o of one shape count twice, too
    forward = backward = flops = 0.0
    parts = {}
    for (outputs, inputs), count in linears.items():
        there, back = gemm_ms(rows * length, outputs, inputs)
        parts[f"{outputs}x{inputs}"] = {"count": count * layers, "forward_ms": there, "input_gradient_ms": back}
        forward, backward = forward + count * layers * there, backward + count * layers * back
        flops += 4 * rows * length * outputs * inputs * count * layers
    alone = [attention_ms(1, size, config) for size in documents] if documents else [attention_ms(rows, length, config)]
    there, back = (sum(times) for times in zip(*alone, strict=True))
    parts["attention"] = {"count": layers, "forward_ms": there, "backward_ms": back}
    forward, backward = forward + layers * there, backward + layers * back
    pairs = sum(size**2 for size in documents or [length] * rows)
    flops += 7 * pairs * queries * layers  # causal: half of 4·T²·D forward, 2.5 times that backward
    there, back = gemm_ms(rows * length, config.vocab_size, hidden)
    parts["head"] = {"count": 1, "forward_ms": there, "input_gradient_ms": back}
    flops += 4 * rows * length * config.vocab_size * hidden
    total = forward * (2 if checkpointing else 1) + backward + there + back
    return {"ms": total, "tflop": flops / 1e12, "parts": parts}


def gemm_ms(tokens: int, outputs: int, inputs: int) -> tuple[float, float]:
    """Return the ms of x·Wᵀ and of dy·W."""

    def random(*shape: int) -> list[Tensor]:
        return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]

    xs, grads, weights = random(tokens, inputs), random(tokens, outputs), random(outputs, inputs)
    there = [lambda x=x, w=w: F.linear(x, w) for x, w in zip(xs, weights, strict=True)]
    back = [lambda g=g, w=w: g @ w for g, w in zip(grads, weights, strict=True)]
    return graph_us(there) / 1e3, graph_us(back) / 1e3


def attention_ms(rows: int, length: int, config: Any) -> tuple[float, float]:
    """Return the ms of causal attention, forward and backward, in the models' layout; cuDNN's kernel if it applies."""

    def random(heads: int) -> Tensor:
        made = torch.randn(rows, length, heads, config.head_dim, device="cuda", dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_()

    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    sets = [tuple(random(count) for count in heads) for _ in range(SETS)]
    grad = random(heads[0]).detach()

    def attend(inputs: tuple[Tensor, ...], train: bool) -> None:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=heads[0] != heads[1])
        if train:
            torch.autograd.grad(out, inputs, grad)

    there, both = (graph_us([lambda s=s, t=t: attend(s, t) for s in sets]) / 1e3 for t in (False, True))
    return there, both - there


class Training:
    """A model, its optimizer and one batch."""

    def __init__(
        self,
        name: str,
        rows: int,
        length: int,
        device: str,
        *,
        checkpointing: bool = False,
        activations: Sequence[str] | None = None,
        recipe: str = "bf16",
        storage: str = "nf4",
        accumulation: int = 1,
        adapter: Mapping[str, Any] | None = None,
    ):
        import halfbyte
        from halfbyte.modeling.head import causal_lm_loss
        from halfbyte.modeling.step_norms import DoraNorms

        self.loss = causal_lm_loss
        self.accumulation = accumulation
        self.model = build(name, device, storage, **adapter or {})
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.report = halfbyte.patch(self.model, activations, recipe)
        self.dora_norms = DoraNorms(self.model, torch.bfloat16)
        self.batch = random_batch(name, rows, length, device)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.initial = [parameter.detach().clone() for parameter in self.trained]
        self.restart()

    def restart(self) -> None:
        """Reset the adapters and the optimizer."""
        with torch.no_grad():
            torch._foreach_copy_(self.trained, self.initial)
        capturable = self.trained[0].is_cuda
        self.optimizer = torch.optim.AdamW(self.trained, lr=2e-4, weight_decay=0.0, fused=True, capturable=capturable)

    def step(self, batch: Any) -> Tensor:
        with self.dora_norms.computed():
            for _ in range(self.accumulation):
                loss_sum, tokens = self.loss(self.model, batch)
                loss = loss_sum / (tokens * self.accumulation)
                loss.backward()
        self.optimizer.step()
        if self.report.scaling is not None:
            self.report.scaling.roll()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach() * self.accumulation


def ours(given: argparse.Namespace, documents: list[int] | None) -> dict[str, dict[str, Any]]:
    """Time halfbyte's step of each storage and adapter, launched from Python and, with --graph, as a CUDA graph."""
    if given.memory_limit_gib:
        capacity = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.memory_limit_gib * 2**30 / capacity)
    shape = given.model, given.batch, given.length
    given.activations = levels(*shape, given.policy, given.memory_limit_gib) if given.policy else None
    results = {}
    for storage, adapter in itertools.product(given.storage, given.adapters):
        name = ", ".join(word for word in ("halfbyte", *variant_words(given, storage, adapter)) if word)
        results |= {f"{name}{way}": run for way, run in variant(given, documents, storage, adapter).items()}
        free_memory()
    return results


def variant_words(given: argparse.Namespace, storage: str, adapter: dict[str, Any]) -> tuple[str, str]:
    """Return the storage and the adapter's keys, as words of a run's name, if the benchmark compares several."""
    keys = " ".join(f"{key}={value}" for key, value in adapter.items())
    return storage if len(given.storage) > 1 else "", keys if len(given.adapters) > 1 else ""


def variant(
    given: argparse.Namespace, documents: list[int] | None, storage: str, adapter: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Time one storage and adapter: "" for the step launched from Python, and ", graph" from the same start."""
    training = Training(
        given.model,
        given.batch,
        given.length,
        "cuda",
        checkpointing=given.checkpointing and not given.policy,
        activations=given.activations,
        recipe=given.recipe,
        storage=storage,
        accumulation=given.accumulation,
        adapter=adapter,
    )
    print(training.report)
    if documents:
        training.batch = packed_batch(given.model, documents, "cuda")
    tokens = given.batch * given.length * given.accumulation
    results = {"": timed(lambda: training.step(training.batch), tokens, given.steps)}
    if given.graph:
        from halfbyte.train.graph import ShapeGraphs

        training.restart()
        free_memory()
        graphed = ShapeGraphs(training.step, training.optimizer.zero_grad)
        results[", graph"] = timed(lambda: graphed(training.batch), tokens, given.steps)
        check_losses(results[""]["losses"], results[", graph"]["losses"])
        graphed.drop()
    return results


def check_losses(eager: list[float], graphed: list[float]) -> None:
    """Exit unless the graph's losses fall and equal the eager ones up to rounding."""
    apart = max(abs(a / b - 1) for a, b in zip(eager, graphed, strict=True))
    print(f"losses {eager[0]:.5f} → {eager[-1]:.5f}; graphed → {graphed[-1]:.5f}, at most {apart:.1e} apart")
    if apart > 5e-3 or graphed[-1] >= graphed[0]:
        raise SystemExit(f"the graph trains differently: {graphed} instead of {eager}")


def peer(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run a peer in its own process. Returns its numbers, or its error."""
    command = ["benchmarks.step_peers", name, given.model, str(given.batch), str(given.length)]
    command += ["--checkpointing"] if given.checkpointing else []
    environment = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}  # a peer has its own
    if name == "unsloth" and given.peer_path:
        environment["PYTHONPATH"] = os.pathsep.join([given.peer_path, environment.get("PYTHONPATH", "")])
    return run_peer(command, environment)


def document_lengths(documents: int, tokens: int) -> list[int]:
    """Return `documents` uneven lengths of at least one token whose sum is `tokens`."""
    shares = torch.randn(documents, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(SIGMA).exp()
    lengths = [1 + int(share) for share in shares / shares.sum() * (tokens - documents)]
    lengths[0] += tokens - sum(lengths)
    return lengths


def packed_batch(name: str, lengths: list[int], device: str) -> dict[str, Any]:
    """Return one row of documents of random tokens, collated like `halfbyte train` does."""
    from halfbyte.data.collate import PackedCollator

    vocabulary = model_config(name).vocab_size
    tokens = torch.randint(3, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(1)).tolist()
    row = {"input_ids": tokens, "labels": tokens, "seq_lengths": lengths}
    batch = PackedCollator(pad_token_id=2, fused=True)([row])
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def keys_of(words: str) -> dict[str, Any]:
    """Return the keys of a run in KEY=VALUE,…, whose values are YAML; none for "lora"."""
    pairs = [word.partition("=") for word in words.split(",") if word != "lora"]
    return {key: yaml.safe_load(value) for key, _, value in pairs}


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    made.add_argument("--batch", type=int, default=4)
    made.add_argument("--length", type=int, default=2048)
    made.add_argument("--documents", type=int, help="pack so many documents into one row of --length tokens")
    made.add_argument("--accumulation", type=int, default=1, help="halfbyte's micro-batches in a step")
    made.add_argument("--checkpointing", action="store_true")
    made.add_argument("--policy", help="activation level of halfbyte, or auto")
    made.add_argument("--memory-limit-gib", type=float, help="limit of halfbyte's process and of its plan")
    made.add_argument("--recipe", default="bf16", help="arithmetic of halfbyte's GEMMs with frozen weights")
    made.add_argument("--storage", nargs="+", default=["nf4"], help="formats of halfbyte's frozen weights")
    made.add_argument("--adapters", nargs="+", type=keys_of, default=[{}], metavar="lora|KEY=VALUE,…")
    made.add_argument("--layers", type=int, help="decoder layers instead of the model's number")
    made.add_argument("--steps", type=int, default=STEPS, help="timed steps; 0: the first step only")
    made.add_argument("--no-floor", action="store_true")
    made.add_argument("--graph", action="store_true", help="also time a CUDA graph")
    made.add_argument("--peers", default="", help="unsloth,bitsandbytes")
    made.add_argument("--peer-path", help="folder with Unsloth, for its process only")
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    require_gpu()
    if given.layers:
        MODELS[given.model][1]["num_hidden_layers"] = given.layers
    documents = document_lengths(given.documents, given.length) if given.documents else None
    given.batch = 1 if documents else given.batch
    least = None
    if not given.no_floor:
        least = floor(given.model, given.batch, given.length, given.checkpointing, documents)
    free_memory()
    runs = ours(given, documents)
    free_memory()
    runs |= {name: peer(name, given) for name in given.peers.split(",") if name}
    kept = given.policy or ("checkpointed" if given.checkpointing else "activations saved")
    show(f"{given.model} {given.batch}×{given.length}, {kept}", least, runs)
    keys = [
        "model",
        "batch",
        "length",
        "accumulation",
        "checkpointing",
        "policy",
        "memory_limit_gib",
        "recipe",
        "adapters",
        "layers",
    ]
    result = {key: getattr(given, key) for key in keys} | {"storage": ",".join(given.storage)}
    if documents:
        result |= {"tokens": given.length, "documents": documents}
    write_result(given.json, {**result, "floor": least, "runs": runs})


def show(what: str, least: dict[str, Any] | None, runs: dict[str, dict[str, Any]]) -> None:
    """Print one line per run."""
    floor_ = f"floor {least['ms']:.1f} ms, {least['tflop']:.0f} TFLOP" if least else "no floor"
    print(f"{what}: {floor_}")
    for name, run in runs.items():
        if "error" in run:
            print(f"  {name:16} failed: {run['error']}")
            continue
        share = f"{least['ms'] / run['ms']:.3f} of the floor  " if least else ""
        speed, first = run["tokens_per_second"] / 1e3, run["first_step_seconds"]
        line = f"  {name:16} {run['ms']:8.1f} ms  {share}{speed:7.2f}k tok/s  {run['peak_gib']:5.1f} GiB"
        print(f"{line}  first step {first:.1f} s")


if __name__ == "__main__":
    main()
