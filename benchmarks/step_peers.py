"""A peer's QLoRA step in its own process: `python -m benchmarks.step_peers PEER MODEL BATCH LENGTH`.

The shapes, quantization, rank, optimizer and tokens are those of `benchmarks.step`. Prints one line starting with
RESULT. `bitsandbytes` is Hugging Face's modules with PEFT after `prepare_model_for_kbit_training`. `installed` is the
same script with halfbyte answering `import bitsandbytes`, and `patched` adds `halfbyte.patch`. Unsloth must be imported
before transformers, so a process before it writes the checkpoint that it loads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def bitsandbytes_base(name: str, device: str = "cuda") -> Any:
    """Build Hugging Face's model with random weights in bitsandbytes' NF4."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit

    from benchmarks.step_model import empty_model, fill

    def quantize(linear: Any) -> Any:
        rows, columns = linear.weight.shape
        made = Linear4bit(columns, rows, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
        packed = Params4bit(linear.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True)
        made.weight = packed.to(device)
        return made

    torch.manual_seed(0)
    model = empty_model(name)
    fill(model, device, quantize)
    return model


def bitsandbytes_model(name: str, checkpointing: bool, prepared: bool = True) -> Any:
    """Add PEFT adapters to bitsandbytes' model, as their guides do.

    prepared: call `prepare_model_for_kbit_training`, which casts embedding, head and norms to fp32.
    """
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    from benchmarks.step_model import RANK, TARGETS

    model = bitsandbytes_base(name)
    model.is_loaded_in_4bit = True
    if prepared:
        model = prepare_model_for_kbit_training(model, checkpointing, {"use_reentrant": False})
    elif checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


def bitsandbytes(given: argparse.Namespace, is_patched: bool = False) -> dict[str, Any]:
    import torch

    from benchmarks.step_model import random_batch, timed

    model = bitsandbytes_model(given.model, given.checkpointing, not given.unprepared)
    if is_patched:
        import halfbyte

        print(halfbyte.patch(model))
    batch = random_batch(given.model, given.batch, given.length, "cuda")

    def loss_of() -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(**batch, use_cache=False).loss

    return timed(training_step(model, loss_of, given.paged), given.batch * given.length)


def installed(given: argparse.Namespace, is_patched: bool = False) -> dict[str, Any]:
    from halfbyte.bitsandbytes import install

    install()
    return bitsandbytes(given, is_patched)


def patched(given: argparse.Namespace) -> dict[str, Any]:
    return installed(given, is_patched=True)


def unsloth(given: argparse.Namespace) -> dict[str, Any]:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}
    folder = Path(tempfile.gettempdir()) / f"step-{given.model}"
    if not folder.exists():
        command = [sys.executable, "-m", "benchmarks.step_peers", "checkpoint", given.model, "0", "0"]
        subprocess.run(command, check=True)
    from unsloth import FastLanguageModel  # isort: skip (before anything that imports transformers)
    import torch

    from benchmarks.step_model import RANK, TARGETS, random_batch, timed

    mode = "unsloth" if given.checkpointing else False
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=given.length, dtype=torch.bfloat16, load_in_4bit=True, local_files_only=True,
        use_exact_model_name=True, use_gradient_checkpointing=mode,
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=RANK, lora_dropout=0.0, bias="none", target_modules=TARGETS,
        use_gradient_checkpointing=mode,
    )  # fmt: skip
    FastLanguageModel.for_training(model)
    batch = random_batch(given.model, given.batch, given.length, "cuda")
    return timed(training_step(model, lambda: model(**batch).loss), given.batch * given.length)


def training_step(model: Any, loss_of: Any, paged: bool = False) -> Any:
    """Return a function that runs one training step with fused AdamW and returns the loss.

    paged: use bitsandbytes' paged 8-bit AdamW instead.
    """
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if paged:
        from bitsandbytes.optim import PagedAdamW8bit

        optimizer: Any = PagedAdamW8bit(trained, lr=2e-4, weight_decay=0.0)
    else:
        optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0, fused=True)

    def step() -> Any:
        loss = loss_of()
        if loss.requires_grad:  # otherwise it has added its gradients
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def byte_tokenizer() -> Any:
    """Return a tokenizer of 256 bytes, a pair of line breaks, and four special tokens, which Unsloth requires.

    llama.cpp requires one merge, and its graph of Idefics 3 this one.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<bos>", "<eos>", "<pad>", "<unk>"]
    line_break = "\u010a"  # as ByteLevel writes it
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), 2 * line_break]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(line_break, line_break)], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def checkpoint(given: argparse.Namespace) -> None:
    """Write a random bf16 checkpoint and a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.step_model import model_config

    folder = Path(tempfile.gettempdir()) / f"step-{given.model}"
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(model_config(given.model), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("peer", choices=["bitsandbytes", "installed", "patched", "unsloth", "checkpoint"])
    made.add_argument("model")
    made.add_argument("batch", type=int)
    made.add_argument("length", type=int)
    made.add_argument("--checkpointing", action="store_true")
    made.add_argument("--paged", action="store_true", help="bitsandbytes' paged 8-bit AdamW (not Unsloth)")
    made.add_argument("--unprepared", action="store_true", help="without prepare_model_for_kbit_training")
    return made


def main() -> None:
    given = parser().parse_args()
    if given.peer == "checkpoint":
        return checkpoint(given)
    peers = {"bitsandbytes": bitsandbytes, "installed": installed, "patched": patched, "unsloth": unsloth}
    result = peers[given.peer](given)
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
