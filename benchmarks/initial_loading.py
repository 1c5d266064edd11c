"""Seconds and GPU memory of loading a model while its adapter is initialised from the 16-bit weights.

    python -m benchmarks.initial_loading [--model llama-3.1-8b] [--layers 8] [--storage nf4] [--json FILE]

A checkpoint with random weights is written to --work, and read once before the first measure. `seconds` includes the
adapter; `moments_seconds` is the pass over the 16-bit layers that `qera` and weighted `loftq` need, of 65,536 tokens.
`--layers` decoder layers are measured instead of the model's number: embedding and head are loaded in every case.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import free_memory, parser_of, peak_gib, provenance, reset_peak, synchronize, write_result
from benchmarks.initialisations import KEYS, RANK
from benchmarks.step_model import MODELS, TARGETS, empty_model

NAMES = ("true", "pissa_niter_4", "loftq", "loftq, 5 iterations", "qera", "loftq, weighted, 5 iterations")
DOCUMENTS = (256, 256)  # rows and tokens that moments are taken of


def write_checkpoint(name: str, folder: Path, device: str) -> None:
    """Write a model with random weights in bf16."""
    torch.manual_seed(0)
    model = empty_model(name).to_empty(device=device).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size="2GB")


def measure(folder: Path, name: str, options: argparse.Namespace) -> dict[str, float]:
    """Load the model with an adapter, as `halfbyte train` does."""
    from halfbyte import load_model
    from halfbyte.adapters.initial import AdapterInitialiser
    from halfbyte.adapters.lora import add_adapter
    from halfbyte.config import RunConfig
    from halfbyte.loading.find import find_model
    from halfbyte.loading.observe import observe_inputs

    config = RunConfig(
        model_name_or_path=str(folder), dataset="-", r=RANK, lora_alpha=RANK, target_modules=TARGETS,
        quantization=options.storage, dtype="bfloat16", **KEYS[name],
    )  # fmt: skip
    assert config.adapter is not None
    files, initial = find_model(config.origin), AdapterInitialiser(config.adapter, 0)
    where: Any = {"device": torch.device(options.device), "dtype": torch.bfloat16}
    free_memory()
    reset_peak(options.device)
    result = {}
    began = time.perf_counter()
    if initial.reads == "inputs":
        documents = torch.randint(3, 1000, DOCUMENTS).tolist()
        observe_inputs(initial, files, config.storage, documents, **where)
        synchronize(options.device)
        result["moments_seconds"] = time.perf_counter() - began
        result |= {f"moments_{key}": value for key, value in peak_gib(options.device).items()}
        reset_peak(options.device)
        began = time.perf_counter()
    given = None if initial.reads == "nothing" else initial
    model = add_adapter(load_model(files, config.storage, initial=given, **where), config, initial=given)
    synchronize(options.device)
    result |= {"seconds": time.perf_counter() - began, **peak_gib(options.device)}
    if options.device == "cuda":
        result["loaded_gib"] = torch.cuda.memory_allocated() / 2**30
    del model
    return result


def parser() -> argparse.ArgumentParser:
    arguments = parser_of(__doc__)
    arguments.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    arguments.add_argument("--layers", type=int, help="decoder layers instead of the model's number")
    arguments.add_argument("--storage", default="nf4", help="format of the frozen weights")
    arguments.add_argument("--only", nargs="+", default=list(NAMES))
    arguments.add_argument("--work", type=Path, default=Path("/tmp/initial-loading"))
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    options = parser().parse_args(words)
    if options.layers:
        MODELS[options.model][1]["num_hidden_layers"] = options.layers
    folder = options.work / f"{options.model}-{MODELS[options.model][1]['num_hidden_layers']}"
    if not (folder / "config.json").exists():
        write_checkpoint(options.model, folder, options.device)
    facts = {"model": options.model, "layers": options.layers, "storage": options.storage, "rank": RANK}
    result: dict[str, Any] = facts | {"tokens": DOCUMENTS[0] * DOCUMENTS[1], "runs": {}}
    measure(folder, "true", options)  # reads the files into memory and compiles kernels
    for name in options.only:
        result["runs"][name] = run = measure(folder, name, options)
        print(f"{name:32}", "  ".join(f"{key} {value:.2f}" for key, value in run.items()), flush=True)
        write_result(options.json, result | provenance())


if __name__ == "__main__":
    main(sys.argv[1:])
