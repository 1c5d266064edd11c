"""Perplexity of a model stored in each format, on held-out text.

    python -m benchmarks.quality MODEL TEXT.jsonl [--length 1024] [--device cuda] [--json FILE]

TEXT has one JSON object a line with a `text`. Documents are joined by EOS and cut into windows of `length` tokens;
every window's tokens but its first are predicted. Products run in float32 unless --dtype says otherwise, so that only
the storage differs between rows.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

from benchmarks.common import write_result
from halfbyte import load_model, load_tokenizer
from halfbyte.layers import QuantizedLinear
from halfbyte.models.head import causal_lm_loss

STORED = {
    "16-bit": {"load_in_4bit": False},
    "nf4": {"quant_type": "nf4", "double_quant": False},
    "nf4 + double quantization": {"quant_type": "nf4", "double_quant": True},
    "fp4": {"quant_type": "fp4", "double_quant": False},
}


def windows(tokenizer, file: Path, length: int) -> torch.Tensor:
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    ids = [
        i for text in texts for i in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


@torch.no_grad()
def perplexity(model, rows: torch.Tensor, batch: int = 8) -> float:
    total, tokens = 0.0, 0
    for chunk in rows.split(batch):
        chunk = chunk.to(model.device)
        loss, count = causal_lm_loss(model, {"input_ids": chunk, "labels": chunk})
        total, tokens = total + float(loss), tokens + int(count)
    return math.exp(total / tokens)


def weight_error(model, reference: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Bits per weight of the quantized layers, and their signal-to-noise ratio in dB."""
    stored = signal = noise = weights = 0.0
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            exact = reference[f"{name}.weight"].to(module.weight.device).float()
            stored, weights = stored + 8 * module.weight.nbytes, weights + exact.numel()
            signal += float(exact.square().sum())
            noise += float((module.weight.dequantize().float() - exact).square().sum())
    return (stored / weights, 10 * math.log10(signal / noise)) if weights else (16.0, math.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json")
    given = parser.parse_args()
    rows = windows(load_tokenizer(given.model), given.text, given.length)
    table: dict[str, dict[str, float]] = {}
    reference: dict[str, torch.Tensor] = {}
    print(
        f"{rows.numel():,} tokens in windows of {given.length}\n"
        "| stored as | bits/weight | SQNR dB | perplexity |\n|-|-|-|-|"
    )
    for name, options in STORED.items():
        model = load_model(given.model, dtype=given.dtype, device=given.device, **options)
        reference = reference or {key: value.detach().cpu() for key, value in model.state_dict().items()}
        bits, sqnr = weight_error(model, reference)
        table[name] = {"bits_per_weight": bits, "sqnr_db": sqnr, "perplexity": perplexity(model, rows)}
        print(f"| {name} | {bits:.3f} | {sqnr:.2f} | {table[name]['perplexity']:.3f} |", flush=True)
    write_result(given.json, {"model": Path(given.model).name, "tokens": rows.numel(), "stored_as": table})


if __name__ == "__main__":
    main()
