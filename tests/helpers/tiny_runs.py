"""A tiny model, hand-made rows with uneven numbers of trained tokens, and a training loop over them."""

from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from halfbyte.adapters.lora import add_adapter
from halfbyte.config import RunConfig
from halfbyte.data.collate import PaddedCollator
from halfbyte.data.rows import RowTable
from halfbyte.mesh.mesh import SINGLE_PROCESS
from halfbyte.methods import method_of
from halfbyte.modeling.patch import patch
from halfbyte.optim import trained_parameters
from halfbyte.runs.metrics import MetricsFile
from halfbyte.train.callbacks import training_arguments
from halfbyte.train.loop import TrainingLoop, seed_process
from halfbyte.train.stepper import GraphedStepper, Stepper
from halfbyte.utils.hardware import chosen_device

VOCABULARY = 64


def tiny_llama(**keys):
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY} | keys
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes))


def rows(count, seed=0):
    """Documents of 4 to 15 tokens of which a random part is trained: 1 to all but the first."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(4, 16, (), generator=generator))
        masked = int(torch.randint(1, length, (), generator=generator))
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
    return Dataset.from_list(made)


def collate(batch):
    width = max(len(row["input_ids"]) for row in batch)

    def padded(values, fill):
        return torch.tensor([row + [fill] * (width - len(row)) for row in values])

    ids, labels = ([row[name] for row in batch] for name in ("input_ids", "labels"))
    return {
        "input_ids": padded(ids, 0),
        "labels": padded(labels, -100),
        "attention_mask": padded([[1] * len(row) for row in ids], 0),
    }


def run_config(output_dir, **keys):
    keys = {"r": 4, "learning_rate": 1e-2, "warmup_steps": 0, "lora_dropout": 0.1, "seed": 7, "device": "cpu"} | keys
    return RunConfig(model_name_or_path="tiny", dataset="d", output_dir=str(output_dir), **keys)


def make_loop(config, train=None, held_out=None, model=None, graphs=None, recipe=None, scaler=None):
    """A loop as `halfbyte train` makes it: on a GPU the fused model in bfloat16, micro-batches as CUDA graphs."""
    set_seed(config.seed)
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    device, on_gpu = chosen_device(config.device), config.device != "cpu"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = model if model is not None else tiny_llama().to(device, dtype)
    model = add_adapter(model, config) if config.use_peft else model
    if on_gpu:
        patch(model)
    scaling = patch(model, recipe=recipe).scaling if recipe else None
    captures = on_gpu if graphs is None else graphs
    stepper = GraphedStepper(list(trained_parameters(model).values())) if captures else Stepper()
    train = train if train is not None else rows(12)
    seed_process(config, SINGLE_PROCESS)
    return TrainingLoop(
        config=config,
        method=method_of(config),
        identity=lambda: {"rows": len(train)},
        metrics=MetricsFile(Path(config.output_dir) / "metrics.jsonl"),
        compute_dtype=dtype,
        model=model,
        args=training_arguments(config, device, dtype, rows=len(train), evaluate=held_out is not None),
        device=device,
        rows=RowTable(train),
        held_out=held_out,
        collate=PaddedCollator(0, fused=True) if on_gpu else collate,
        stepper=stepper,
        grad_scaler=scaler,
        fp8_scales=scaling,
    )


def losses(loop):
    return [record["loss"] for record in loop.metrics.records() if record["kind"] == "train"]


def comparable(loop):
    """Everything recorded but times and memory."""
    measured = {"time", "seconds", "step_seconds", "tokens_per_second", "memory_bytes"}
    return [{k: v for k, v in record.items() if k not in measured} for record in loop.metrics.records()]
