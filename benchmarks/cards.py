"""Which model fits which card: the longest row that the memory plan accepts, by model and card.

    python -m benchmarks.cards [--json benchmarks/results/cards.json]

QLoRA in NF4 with double quantization, r = 16 on every linear, one packed row per step and
`activation_checkpointing: auto`. Only the plan runs, for each length of LENGTHS. The host has 64 GiB.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any
from unittest import mock

from benchmarks.harness import parser_of, write_result

GIB = 2**30
HOST = 64 * GIB
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CARDS = {"8 GB": 8, "12 GB": 12, "16 GB": 16, "24 GB": 24, "48 GB": 48, "80 GB": 80}
LLAMA = {"vocab_size": 128256, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072}
QWEN = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "tie_word_embeddings": False}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.2 1B": ("Llama", LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                                       "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True}),
    "Llama 3.2 3B": ("Llama", LLAMA | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                                       "num_attention_heads": 24, "tie_word_embeddings": True}),
    "Llama 3.1 8B": ("Llama", LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                                       "num_attention_heads": 32, "tie_word_embeddings": False}),
    "Qwen3 14B": ("Qwen3", QWEN | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
                                   "num_attention_heads": 40}),
    "Qwen3 32B": ("Qwen3", QWEN | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
                                   "num_attention_heads": 64}),
}  # fmt: skip
NOTE = (
    "512, 1,024, ... 131,072 were tried; an empty cell means that none fits. Each step has one packed sequence;"
    " weights are NF4, adapters have r = 16 on every linear. `activation_checkpointing: auto` offloads activations"
    " to 64 GiB of host memory if it must. The numbers are `halfbyte check`'s plans for a card with all but 0.7"
    " GiB free ([`cards.json`](benchmarks/results/cards.json)), verified against measured peaks on an H200. Speed"
    " on an H200: [benchmarks](docs/benchmarks.md)."
)


def plan(model: str, length: int, card: int) -> Any:
    """Return the memory plan of one row of `length` tokens on a card of `card` GiB."""
    import transformers

    from halfbyte.config import RunConfig
    from halfbyte.plan.cards import usable_bytes
    from halfbyte.plan.estimate import estimate

    family, keys = MODELS[model]
    config = RunConfig(
        model_name_or_path=model, dataset="data.jsonl", max_length=length, per_device_train_batch_size=1, packing=True,
        activation_checkpointing="auto",
    )  # fmt: skip
    with mock.patch("halfbyte.memory.allocators.available_bytes", return_value=HOST):
        return estimate(
            config, getattr(transformers, f"{family}Config")(**keys), device="cuda",
            capacity_bytes=usable_bytes(card),
        )  # fmt: skip


def longest(model: str, card: int, from_: int = 0) -> int:
    """Return the longest of LENGTHS that fits, or 0; `from_` is a length known to fit."""
    first, end = LENGTHS.index(from_) + 1 if from_ else 0, len(LENGTHS)
    while first < end:
        middle = (first + end) // 2
        first, end = (middle + 1, end) if plan(model, LENGTHS[middle], card).fits else (first, middle)
    return LENGTHS[first - 1] if first else 0


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    models: dict[str, Any] = {}
    for model in MODELS:
        found, best = {}, 0
        for card, size in CARDS.items():
            found[card] = best = longest(model, size, best)
            print(f"{model}, {card}: {best}", flush=True)
        models[model] = {"weights_gib": plan(model, LENGTHS[0], 80).weights / GIB, "longest": found}
    write_result(given.json, {"cards": list(CARDS), "models": models, "note": NOTE})


if __name__ == "__main__":
    main()
