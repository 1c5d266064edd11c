"""What each initialisation of LoRA costs at 2, 3 and 4 bits: distance from the 16-bit model and loss, before and after.

    python -m benchmarks.initialisations MODEL TEXT [--tokens 8192] [--steps 40] [--batch 4] [--row 256]
        [--formats kbit2 kbit3 nf4] [--only pissa ...] [--seeds 11 12] [--shard 0/4] [--device cuda] [--json FILE]

TEXT as in `benchmarks.quality`: evenly spaced windows of about --tokens tokens are held out, and the others train.
Every row has the same rank and schedule, and rows of one seed the same windows in the same order; matmuls are in
float32, on a GPU in TF32. The format "16bit" is the base as it is. FILE is written after every row, and its rows are
not measured again; --shard measures every n-th row, so that n processes share a GPU. docs/adapters.md has a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfbyte
from benchmarks.harness import parser_of, provenance, write_result
from benchmarks.quality import ROW, loss_sum, split, windows
from halfbyte import load_model, load_tokenizer
from halfbyte.adapters.initial import AdapterInitialiser
from halfbyte.adapters.lora import add_adapter
from halfbyte.config import RunConfig
from halfbyte.loading.find import find_model
from halfbyte.loading.observe import observe_gradients, observe_inputs
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.ops import IGNORE_INDEX
from halfbyte.train.graph import ShapeGraphs

RANK = 16
SIXTEEN_BITS = "16bit"
KEYS: dict[str, dict[str, Any]] = {
    "true": {"init_lora_weights": True},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_niter_4": {"init_lora_weights": "pissa_niter_4"},
    "olora": {"init_lora_weights": "olora"},
    "loftq": {"init_lora_weights": "loftq"},
    "loftq, 5 iterations": {"init_lora_weights": "loftq", "loftq_config": {"loftq_iter": 5}},
    "qera": {"init_lora_weights": "qera"},
    "loftq, weighted, 5 iterations": {
        "init_lora_weights": "loftq",
        "loftq_config": {"loftq_iter": 5, "weighted": True},
    },
    "corda": {"init_lora_weights": "corda"},
    "eva": {"init_lora_weights": "eva"},
    "lora_ga": {"init_lora_weights": "lora_ga"},
}


class Reference(NamedTuple):
    """The 16-bit model, held-out windows [n, T] and its log-probabilities for them [tokens, V]."""

    model: nn.Module
    rows: Tensor
    log_probs: Tensor


@torch.no_grad()
def log_probs(model: Any, rows: Tensor) -> Tensor:
    """Return log-probabilities at the tokens of `rows` that are no padding, fp32 on the CPU."""
    parts = []
    for chunk in rows.split(4):
        logits = model(input_ids=chunk.clamp(min=0).to(model.device), use_cache=False).logits
        parts.append(logits[(chunk != IGNORE_INDEX).to(logits.device)].float().log_softmax(-1).cpu())
    return torch.cat(parts)


def mean_loss(log_probs: Tensor, rows: Tensor) -> float:
    """Return the loss of the `log_probs` of `rows`, whose padding is on the right."""
    following = F.pad(rows[:, 1:], (0, 1), value=IGNORE_INDEX)[rows != IGNORE_INDEX]
    return float(F.nll_loss(log_probs, following, ignore_index=IGNORE_INDEX))


@torch.no_grad()
def output_error(model: Any, reference: Reference) -> float:
    """Return ‖y' - y‖ / ‖y‖, averaged over the adapted linears of `model` (PEFT's, not patched).

    y is the output of the 16-bit linear, and y' that of the quantized one with its adapter for the same inputs: those
    of the held-out windows in the 16-bit model.
    """
    base = model.base_model.model
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "lora_A")}
    squares = {name: torch.zeros(2) for name in adapted}
    mask = torch.empty(0)

    def compare(name: str, inputs: Tensor, output: Tensor) -> None:
        difference = adapted[name](inputs) - output
        squares[name] += torch.stack([values[mask].square().sum() for values in (difference, output)]).cpu()

    hooks = [
        reference.model.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: compare(name, inputs[0], output)
        )
        for name in adapted
    ]
    for chunk in reference.rows.split(4):
        mask = (chunk != IGNORE_INDEX).to(model.device)
        reference.model(input_ids=chunk.clamp(min=0).to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return float(torch.stack([(error / norm).sqrt() for error, norm in squares.values()]).mean())


@torch.no_grad()
def held_out_loss(model: Any, rows: Tensor) -> float:
    sums = [loss_sum(model, chunk) for chunk in rows.split(4)]
    return sum(float(loss) for loss, _ in sums) / sum(int(count) for _, count in sums)


def build(path: str, keys: dict[str, Any], format: str, observed: Tensor, seed: int, device: str) -> tuple[Any, float]:
    """Return the model with its adapter before the first step, and the seconds that loading and initialising took.

    Args:
        observed: rows that initialisations read, int64 [n, T].
    """
    began = time.perf_counter()
    storage = {"load_in_4bit": False} if format == SIXTEEN_BITS else {"quantization": format}
    config = RunConfig(
        model_name_or_path=path, dataset="-", r=RANK, lora_alpha=RANK, dtype="float32", **storage, **keys
    )
    adapter = config.adapter
    assert adapter is not None
    files = find_model(config.origin)
    initial = AdapterInitialiser(adapter, seed)
    where: Any = {"device": torch.device(device), "dtype": torch.float32}
    batches = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        for ids in observed.clamp(min=0).to(device).split(8)
    ]
    if initial.reads == "inputs":
        documents = [row[row != IGNORE_INDEX].tolist() for row in observed]
        observe_inputs(initial, files, config.storage, documents, **where)
    elif initial.reads == "gradients":
        observe_gradients(initial, files, config.storage, batches, **where)
    initial.batches = batches if initial.reads == "stored" else ()
    given = None if initial.reads == "nothing" else initial
    model = load_model(files, config.storage, initial=given, **where)
    torch.manual_seed(seed)
    return add_adapter(model, config, initial=given).eval(), time.perf_counter() - began


def train(model: Any, rows: Tensor, steps: int, batch: int, rate: float) -> None:
    """Train the adapter for `steps` of AdamW with a linearly decaying rate, on a GPU as CUDA graphs."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    on_gpu = trained[0].is_cuda
    learning_rate = torch.tensor(rate, device=trained[0].device)  # a tensor, which graphs read in every step
    optimizer = torch.optim.AdamW(trained, learning_rate, weight_decay=0.0, fused=on_gpu, capturable=on_gpu)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss, count = causal_lm_loss(model, batch)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    graphed = ShapeGraphs(step, optimizer.zero_grad) if on_gpu else step
    for index in range(steps):
        learning_rate.fill_(rate * (1 - index / steps))
        labels = rows[torch.arange(index * batch, (index + 1) * batch) % len(rows)].to(model.device)
        graphed({"input_ids": labels.clamp(min=0), "labels": labels})
    model.eval()


def measure(given: Any, name: str, format: str, seed: int, reference: Reference, rows: Tensor) -> dict[str, float]:
    """Return KL from the 16-bit model (nats per token), loss and output error at step 0, and losses after training."""
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    observed = rows[-given.observed :]
    model, seconds = build(given.model, KEYS[name], format, observed, seed, given.device)
    quantized = log_probs(model, reference.rows)
    kl = float((reference.log_probs.exp() * (reference.log_probs - quantized)).sum(-1).mean())
    row = {"kl": kl, "loss": mean_loss(quantized, reference.rows)}
    row |= {"output_error": output_error(model, reference), "seconds": seconds}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    initial = [parameter.detach().clone() for parameter in trained]
    if given.steps:
        halfbyte.patch(model)
    for rate in given.rates if given.steps else ():
        train(model, rows[:, : given.row], given.steps, given.batch, rate)
        row[f"loss_after_{rate:g}"] = held_out_loss(model, reference.rows)
        with torch.no_grad():
            torch._foreach_copy_(trained, initial)
    return row


def parser() -> argparse.ArgumentParser:
    arguments = parser_of(__doc__)
    arguments.add_argument("model")
    arguments.add_argument("text", type=Path)
    arguments.add_argument("--tokens", type=int, default=8192)
    arguments.add_argument("--length", type=int, default=256)
    arguments.add_argument("--observed", type=int, default=128, help="rows of 256 tokens that initialisations read")
    arguments.add_argument("--steps", type=int, default=0)
    arguments.add_argument("--batch", type=int, default=4, help="rows in a step")
    arguments.add_argument("--row", type=int, default=ROW, help="trained tokens of a row; the rest is cut off")
    arguments.add_argument("--rates", type=float, nargs="+", default=[5e-4])
    arguments.add_argument("--formats", nargs="+", default=["kbit2", "kbit3", "nf4"])
    arguments.add_argument("--only", nargs="+", default=list(KEYS))
    arguments.add_argument("--seeds", type=int, nargs="+", default=[11])
    arguments.add_argument("--shard", default="0/1", metavar="I/N")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    torch.set_float32_matmul_precision("high")
    held, rows = split(windows(load_tokenizer(given.model), given.text, given.length), given.tokens)
    plain = load_model(given.model, load_in_4bit=False, dtype="float32", device=given.device)
    reference = Reference(plain, held, log_probs(plain, held))
    result: dict[str, Any] = {"model": Path(given.model).name, "text": given.text.name, "steps": given.steps}
    result |= {"batch": given.batch, "row": given.row, "observed": given.observed}
    result |= {"tokens": int((held != IGNORE_INDEX).sum()), "rank": RANK, "device": given.device}
    result["16-bit loss"] = mean_loss(reference.log_probs, held)
    result["rows"] = {}
    if given.json and given.json.is_file():
        result["rows"] = json.loads(given.json.read_text()).get("rows", {})
    shard, shards = map(int, given.shard.split("/"))
    for format, name, seed in list(itertools.product(given.formats, given.only, given.seeds))[shard::shards]:
        key = f"{name} · {format} · {seed}"
        if key not in result["rows"]:
            row = measure(given, name, format, seed, reference, rows)
            print(key, {number: round(value, 4) for number, value in row.items()}, flush=True)
            result["rows"][key] = row
            write_result(given.json, result | provenance())


if __name__ == "__main__":
    main(sys.argv[1:])
