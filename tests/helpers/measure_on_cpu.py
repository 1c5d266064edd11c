"""A QLoRA step on the CPU in a process of its own; prints as JSON how far its memory grew.

    python -m tests.helpers.measure_on_cpu MODEL ROWS LENGTH CHECKPOINTED(0|1) [METHOD]

Growth is the highest resident size during two training steps over the resident size after all libraries are imported
and warm, before the model is read: the quantity that `plan.estimate` predicts for a CPU.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from halfbyte.config import RunConfig
from halfbyte.formats import Blockwise4
from halfbyte.layers import Linear4bit
from halfbyte.memory.allocators import return_large_blocks
from halfbyte.methods import method_of
from halfbyte.modeling.compute_dtype import compute_autocast


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def quantized(path: str, dtype: torch.dtype) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            model.set_submodule(name, Linear4bit.from_linear(module, Blockwise4("nf4", 64, True)))
    return model


def warm_up(dtype: torch.dtype) -> None:
    a = torch.randn(64, 64, dtype=dtype, requires_grad=True)
    torch.optim.AdamW([a], fused=True)
    (a @ a).sum().backward()


def batch_of(method: str, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Random sequences; the second half of each pair's is trained, and its reference computed in the step."""
    tokens = torch.randint(5, 1000, (rows, length))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    batch["attention_mask"][0, -1] = 0
    if method == "sft":
        return batch | {"labels": tokens}
    places = torch.arange(rows * length).view(rows, length)[:, length // 2 : -1]
    answer, place = (torch.arange(size) for size in places.shape)
    return batch | {
        "at": places.flatten(),
        "wanted": tokens.flatten()[places.flatten() + 1],
        "answer": answer.repeat_interleave(len(place)),
        "place": place.repeat(rows),
        "ends": places[:, -1] + 1,
        "real": torch.ones(rows // 2),
    }


def main(path: str, rows: int, length: int, checkpointed: bool, name: str, dtype: torch.dtype = torch.float32) -> None:
    torch.set_num_threads(1)
    return_large_blocks()
    warm_up(dtype)
    base = resident("VmRSS")
    model = get_peft_model(quantized(path, dtype), LoraConfig(r=16, target_modules="all-linear"))
    loaded = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    model.train()
    if checkpointed:
        model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    method = method_of(RunConfig(model_name_or_path=path, dataset="d", method=name))
    for _ in range(2):
        batch = batch_of(name, rows, length)
        with compute_autocast(model, dtype):
            loss = method.sums(model, batch)["loss"]
        (loss / 100).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps({"base": base, "loaded": loaded - base, "growth": resident("VmHWM") - base}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1", (*sys.argv[5:], "sft")[0])
