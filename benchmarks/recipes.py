"""The loss after a short QLoRA run, in each recipe from the same start on the same data.

    python -m benchmarks.recipes MODEL DATASET [--steps 300] [--recipes bf16,fp8-hybrid,nvfp4] [--quantization nf4]
        [--length 512] [--batch 8] [--rate 2e-4] [--device cuda] [--json FILE]

MODEL is a folder with a checkpoint, DATASET what `dataset:` takes. The final loss is the mean of the last tenth of the
steps, and the held-out loss that of 64 rows. The bar: fp8-hybrid within 0.5% of bf16.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import write_result


def run(given: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """Train once; losses of all steps, final and held-out loss."""
    from halfbyte.config import RunConfig
    from halfbyte.runs.metrics import MetricsFile
    from halfbyte.train.run import train

    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            model_name_or_path=given.model, dataset=given.dataset, output_dir=f"{folder}/run", recipe=recipe,
            quantization=given.quantization, max_steps=given.steps, per_device_train_batch_size=given.batch,
            max_length=given.length, learning_rate=given.rate, packing=True, eval_split_size=64, sample_prompts=0,
            device=given.device, save_steps=given.steps,
        )  # fmt: skip
        result = train(config)
        records = MetricsFile(Path(result.output_dir) / "metrics.jsonl").records()
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    last = losses[-max(len(losses) // 10, 1) :]
    held_out = [record["loss"] for record in records if record["kind"] == "eval"]
    return {"losses": losses, "final": sum(last) / len(last), "held_out": held_out[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("dataset")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--recipes", default="bf16,fp8-hybrid,nvfp4")
    parser.add_argument("--quantization", default="nf4")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    given = parser.parse_args()
    runs = {}
    for recipe in given.recipes.split(","):
        runs[recipe] = run(given, recipe)
        first = next(iter(runs.values()))
        line = "  ".join(
            f"{what} {runs[recipe][what]:.5f} ({runs[recipe][what] / first[what] - 1:+.3%})"
            for what in ("final", "held_out")
        )
        print(f"{recipe:12} {line}", flush=True)
    write_result(given.json, {key: value for key, value in vars(given).items() if key != "json"} | {"runs": runs})


if __name__ == "__main__":
    main()
