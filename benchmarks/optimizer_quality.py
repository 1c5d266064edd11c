"""Held-out loss after the same training with different optimizers, of the whole model and of LoRA adapters.

    python -m benchmarks.optimizer_quality MODEL TEXT [--steps 500] [--only "lora adamw" ...] [--json FILE]

TEXT is read, split and held out as in `benchmarks.quality`. All rows have the same batches in the same order, the same
initial adapters, and a rate that decays linearly to 0. Weights and products are in fp32, except for the rows with bf16
weights, which are to be compared with each other. FILE is written after every row. Peers that are not installed are
left out.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import free_memory, parser_of, write_result
from benchmarks.lora_rules import LoRARite, adjust_as_lora_pro
from benchmarks.quality import IGNORE_INDEX, SEED, WHOLE, load, loss_sum, perplexity, split, windows
from halfbyte import load_tokenizer
from halfbyte.config import RunConfig
from halfbyte.modeling.adapters import add_adapter
from halfbyte.optim import make_optimizer
from halfbyte.optim.fused import AdamW
from halfbyte.optim.riemannian import lora_pairs

BATCH, RANK = 8, 16
RATES = {False: 2e-4, True: 1e-3}  # by whether adapters are trained
PROJECTED = {"optim_target_modules": "all-linear"}
GAP = 50  # steps between refreshes of a subspace
Make = Callable[[nn.Module, float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Run:
    """One row.

    Attributes:
        keys: of the run's configuration, for halfbyte's own optimizers.
        lora: whether adapters are trained in place of all weights.
        dtype: of the trained weights.
        rate: factor of the learning rate. GaLore multiplies its updates by 0.25.
        make: (model, rate) → the optimizer, in place of the configuration's.
        package: that the row needs.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    dtype: str = "float32"
    rate: float = 1.0
    make: Make | None = None
    package: str = "torch"


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _master(storage: str, rounding: str) -> Make:
    return lambda model, rate: AdamW(_trained(model), rate, weight_decay=0.0, storage=storage, rounding=rounding)


def _torch_adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_trained(model), rate, weight_decay=0.0)


def _bitsandbytes(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(_trained(model), rate, weight_decay=0.0)
    return made


def _projected(model: nn.Module, **keys: Any) -> list[dict[str, Any]]:
    """Parameter groups as both packages read them: the linear weights, the head's too, with `keys`; and the others."""
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    held = {id(weight) for weight in linear}
    others = [parameter for parameter in _trained(model) if id(parameter) not in held]
    return [{"params": others}, {"params": linear, "rank": 128, "update_proj_gap": GAP, "proj_type": "std", **keys}]


def _galore_torch(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    from galore_torch import GaLoreAdamW

    made: torch.optim.Optimizer = GaLoreAdamW(_projected(model, scale=0.25), rate, weight_decay=0.0)
    return made


def _apollo_torch(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    from apollo_torch import APOLLOAdamW

    keys = {"scale": 1.0, "proj": "random", "scale_type": "channel"}
    made: torch.optim.Optimizer = APOLLOAdamW(_projected(model, **keys), rate, weight_decay=0.0)
    return made


def _lora_pro(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    made = _torch_adamw(model, rate)
    pairs = lora_pairs(model)
    made.register_step_pre_hook(lambda optimizer, args, kwargs: adjust_as_lora_pro(pairs))
    return made


def _lora_rite(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return LoRARite(lora_pairs(model), rate)


RUNS: dict[str, Run] = {
    "adamw": Run({"optim": "adamw"}),
    "torch AdamW": Run(make=_torch_adamw),
    "adamw_8bit": Run({"optim": "adamw_8bit"}),
    "paged_adamw_8bit": Run({"optim": "paged_adamw_8bit"}),
    "bitsandbytes AdamW8bit": Run(make=_bitsandbytes, package="bitsandbytes"),
    "bf16, 32-bit master, fp32 state": Run(dtype="bfloat16", make=_master("fp32", "correction16")),
    "bf16, 24-bit master, companded8": Run(dtype="bfloat16", make=_master("companded8", "correction8")),
    "muon": Run({"optim": "muon"}),
    "muon_8bit": Run({"optim": "muon_8bit"}),
    "galore_adamw": Run({"optim": "galore_adamw", "optim_args": f"update_proj_gap={GAP}", **PROJECTED}, rate=4.0),
    "galore_torch": Run(make=_galore_torch, package="galore_torch", rate=4.0),
    "apollo_adamw": Run({"optim": "apollo_adamw", "optim_args": f"update_proj_gap={GAP}", **PROJECTED}),
    "apollo_torch": Run(make=_apollo_torch, package="apollo_torch"),
    "apollo_mini": Run({"optim": "apollo_mini", "optim_args": f"update_proj_gap={GAP}", **PROJECTED}),
    "lora adamw": Run({"optim": "adamw"}, lora=True),
    "lora torch AdamW": Run(lora=True, make=_torch_adamw),
    "lora adamw_8bit": Run({"optim": "adamw_8bit"}, lora=True),
    "lora paged_adamw_8bit": Run({"optim": "paged_adamw_8bit"}, lora=True),
    "lora bitsandbytes AdamW8bit": Run(lora=True, make=_bitsandbytes, package="bitsandbytes"),
    "lora muon": Run({"optim": "muon"}, lora=True),
    "lora muon_8bit": Run({"optim": "muon_8bit"}, lora=True),
    "lora+ 16": Run({"optim": "adamw", "loraplus_lr_ratio": 16.0}, lora=True, rate=0.25),
    "lora riemannian": Run({"optim": "adamw", "lora_preconditioner": "riemannian"}, lora=True),
    "lora pro": Run(lora=True, make=_lora_pro),
    "lora rite": Run(lora=True, make=_lora_rite),
    "lora rite, rate / 10": Run(lora=True, make=_lora_rite, rate=0.1),
}


def prepared(path: str, run: Run, device: str) -> tuple[Any, torch.optim.Optimizer, float]:
    """The model to train, its optimizer and the learning rate at the start."""
    torch.manual_seed(SEED)
    rate = RATES[run.lora] * run.rate
    config = RunConfig(
        model_name_or_path="-", dataset="-", r=RANK, lora_alpha=RANK, adapter_dtype="float32", use_peft=run.lora,
        load_in_4bit=False, learning_rate=rate, weight_decay=0.0, seed=SEED, **run.keys,
    )  # fmt: skip
    model = load(path, WHOLE, run.dtype, device)
    model = (add_adapter(model, config) if run.lora else model.requires_grad_(True)).train()
    return model, make_optimizer(model, config) if run.make is None else run.make(model, rate), rate


def train(model: Any, optimizer: torch.optim.Optimizer, rows: Tensor, steps: int) -> float:
    """Train for `steps` steps; returns the seconds of all but the first two, per step."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    start = 0.0
    for step in range(steps):
        if step == min(2, steps - 1):
            start = now(model)
        loss, count = loss_sum(model, rows[torch.arange(step * BATCH, (step + 1) * BATCH) % len(rows)])
        (loss / count).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return (now(model) - start) / max(steps - 2, 1)


def now(model: Any) -> float:
    """Seconds on a clock, when the device has finished."""
    if model.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def measure(given: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row's name and figures; losses are of held-out text, in nats per token."""
    held, rows = split(windows(load_tokenizer(given.model), given.text, given.length), given.tokens)
    print(f"{int((held != IGNORE_INDEX).sum()):,} held-out tokens, {len(rows)} rows to train on", flush=True)
    before: dict[str, float] = {}
    for name in given.only:
        run = RUNS[name]
        if find_spec(run.package) is None:
            continue
        model, optimizer, rate = prepared(given.model, run, given.device)
        if run.dtype not in before:  # new adapters do not change the model
            before[run.dtype] = math.log(perplexity(model.eval(), held))
        took = train(model.train(), optimizer, rows, given.steps)
        after = math.log(perplexity(model.eval(), held))
        yield name, {
            "loss before": before[run.dtype], "loss after": after, "gain": before[run.dtype] - after,
            "ms per step": took * 1e3, "learning rate": rate,
        }  # fmt: skip
        del model, optimizer
        free_memory()


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("model")
    made.add_argument("text", type=Path)
    made.add_argument("--steps", type=int, default=500)
    made.add_argument("--tokens", type=int, default=65536, help="held-out tokens")
    made.add_argument("--length", type=int, default=512, help="tokens of a window, a multiple of 256")
    made.add_argument(
        "--only", nargs="+", choices=RUNS, default=[*RUNS], metavar="NAME", help="measure only these rows"
    )
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    result: dict[str, Any] = {
        "model": Path(given.model).name, "text": given.text.name, "tokens": given.tokens, "length": given.length,
        "on": given.device, "steps": given.steps, "batch": BATCH, "rank": RANK, "runs": {},
    }  # fmt: skip
    for name, figures in measure(given):
        result["runs"][name] = figures
        print(name, {key: round(value, 5) for key, value in figures.items()}, flush=True)
        write_result(given.json, result)


if __name__ == "__main__":
    main()
