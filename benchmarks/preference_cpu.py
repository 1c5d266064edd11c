"""CPU seconds of one step of preference training beside TRL's, in turn in one process: for a machine with other work.

    OMP_NUM_THREADS=1 python -m benchmarks.preference_cpu --data dpo_en_demo.json --model FOLDER
        [--method dpo|kto|reward] [--tokens 700] [--repeats 3] [--json FILE]

Two rows of about so many tokens, LoRA r=16 on the seven linears in float32, no checkpointing, the reference computed in
the step on both sides. `benchmarks.preference` compares whole runs, by the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import cpu_name, write_result
from benchmarks.preference import Settings, _adapted, _rows, configured

NEAREST = (0, 5)  # of the rows by how far they are from the tokens asked for, which two


def ours(config: Any, tokenizer: Any, wanted: int) -> tuple[Callable[[], None], list[int], int]:
    """A step, the rows that it takes, and their tokens."""
    from halfbyte.layers.plain import multiply_by_onednn
    from halfbyte.loading.load import load_model
    from halfbyte.methods import method_of
    from halfbyte.modeling.adapters import add_adapter, compute_autocast, no_input_casts
    from halfbyte.train.stepper import LookAhead

    method, run = method_of(config), config
    base = load_model(config.model_name_or_path, run.storage, dtype=torch.float32, device="cpu")
    model = add_adapter(base, run.adapter, scores=method.scores)
    multiply_by_onednn(model)
    rows = method.ready(config, tokenizer, base.config).train
    order = sorted(range(len(rows)), key=lambda index: abs(len(rows[index]["input_ids"]) - wanted))
    taken = [order[place] for place in NEAREST]
    batch = method.collator(config, tokenizer, torch.device("cpu"))([rows[index] for index in taken])
    ahead = LookAhead(method, model, torch.float32)

    def step() -> None:
        model.train()
        (own,) = ahead.add_numbers([batch], method.counts(batch))
        with no_input_casts(model, torch.float32), compute_autocast(model, torch.float32):
            method.sums(model, own)["loss"].backward()
        model.zero_grad()

    return step, taken, method.tokens([rows[index] for index in taken])


def peer(given: Settings, config: Any, tokenizer: Any, taken: list[int], work: Path) -> Callable[[], None]:
    """TRL's loss and backward of the same rows."""
    import trl

    trainer_type, config_type = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
    }[given.method]

    class Prepared(trainer_type):  # type: ignore[misc, valid-type]
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

    arguments = config_type(
        output_dir=str(work), per_device_train_batch_size=2, max_length=given.length, max_steps=1, bf16=False,
        report_to=[], gradient_checkpointing=False, use_cpu=True, save_strategy="no",
    )  # fmt: skip
    rows, _ = _rows(given, config, tokenizer)
    trainer = Prepared(_adapted(given, config), args=arguments, train_dataset=rows, processing_class=tokenizer)
    inputs = trainer.data_collator([rows[index] for index in taken])

    def step() -> None:
        trainer.model.train()
        trainer.compute_loss(trainer.model, inputs).backward()
        trainer.model.zero_grad()

    return step


def main() -> None:
    from halfbyte.loading.load import load_tokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", choices=["dpo", "kto", "reward"], default="dpo")
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("/tmp/preference-cpu"))
    parser.add_argument("--json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    given = Settings(asked.method, asked.data, asked.model, 1, 2, 2048, 50, 1)
    config, tokenizer = configured(given, asked.work), load_tokenizer(given.model)
    step, taken, tokens = ours(config, tokenizer, asked.tokens)
    steps = {"ours": step, "trl": peer(given, config, tokenizer, taken, asked.work)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(asked.repeats + 1):
        for name, run in steps.items():
            began = time.process_time()
            run()
            if repeat:
                seconds[name].append(time.process_time() - began)
    ratio = statistics.median(theirs / own for own, theirs in zip(*seconds.values(), strict=True))
    result = {"device": cpu_name(), "method": asked.method, "tokens": tokens, "cpu_seconds": seconds, "speed": ratio}
    print(result)
    write_result(asked.json, result)


if __name__ == "__main__":
    main()
