"""A QLoRA run of an 8B compared with Hugging Face, PEFT and bitsandbytes: losses, step time and peak memory.

    python -m benchmarks.qlora_8b --data gsm8k.jsonl --tokenizer llama3/ --work DIR [--steps 20] [--json FILE]

Writes a random checkpoint of Llama-3.1-8B's shape and an adapter, trains through `halfbyte train` (NF4 with double
quantization, GSM8K packed 2×2048), then trains the peer from the same weights and adapter on the same batches in the
same order, each in its own process. The peer runs twice: as TRL sets it up (16-bit norms and residual stream), and
after PEFT's `prepare_model_for_kbit_training`, which makes everything that is not quantized float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import BatchSampler, RandomSampler

from benchmarks.harness import parser_of, require_gpu, write_result
from benchmarks.step_model import TARGETS, model_config

TEMPLATE = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end_of_text|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def write_checkpoint(shape: str, tokenizer: Path, folder: Path) -> None:
    """Write random bf16 weights in 4 GB shards, the Llama-3 tokenizer and a chat template with generation marks."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tok = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer / "tokenizer.json"), eos_token="<|end_of_text|>", bos_token="<|begin_of_text|>"
    )
    tok.chat_template = TEMPLATE
    tok.save_pretrained(folder)
    config = model_config(shape)
    config.update({"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": None})
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config)
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="4GB")


def write_adapter(base: Path, folder: Path) -> None:
    """Write the initial adapter that both trainers start from."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    peft = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM"))
    peft.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in peft.named_parameters():
        if "lora_A" in name:
            bound = 1 / parameter.shape[1] ** 0.5
            parameter.data = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        elif "lora_B" in name:
            parameter.data = torch.zeros(parameter.shape)
    peft.peft_config["default"].base_model_name_or_path = str(base)
    peft.save_pretrained(folder)


def run_config(work: Path, data: Path, steps: int) -> dict:
    return {
        "model_name_or_path": str(work / "base"), "dataset": str(data), "max_length": 2048, "packing": True,
        "per_device_train_batch_size": 2, "max_steps": steps, "learning_rate": 2e-4, "warmup_steps": 0,
        "lr_scheduler_type": "constant", "activation_checkpointing": True, "adapter_path": str(work / "adapter0"),
        "output_dir": str(work / "out"), "sample_prompts": 0, "seed": 7,
    }  # fmt: skip


def train_peer(config_file: Path, out: Path, upcast: bool) -> None:
    """Train the peer on the batches of the halfbyte run: stock modules, full logits, a plain loop."""
    from peft import PeftModel, prepare_model_for_kbit_training
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from halfbyte.config import load_config
    from halfbyte.data.collate import make_collator
    from halfbyte.data.prepare import prepare
    from halfbyte.loading.load import load_tokenizer

    config = load_config(config_file)
    tokenizer = load_tokenizer(config.model_name_or_path)
    data = prepare(config, tokenizer)
    order = json.loads((Path(config.output_dir) / "order.json").read_text())
    loader = DataLoader(data.train, batch_sampler=order, collate_fn=make_collator(config, tokenizer))
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        config.model_name_or_path, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": "cuda"}
    )
    if upcast:  # float32 norms, embeddings, head and residual stream
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.requires_grad_(False).gradient_checkpointing_enable({"use_reentrant": False})
    model = PeftModel.from_pretrained(model, config.adapter_path, is_trainable=True).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=0.0, fused=True)
    losses, seconds, counts = [], [], []
    torch.cuda.reset_peak_memory_stats()
    for batch in loader:
        began = time.perf_counter()
        inputs = {name: value.cuda() for name, value in batch.items()}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        counts.append(int((batch["labels"][:, 1:] != -100).sum()))
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated()
    result = {"losses": losses, "step_seconds": seconds, "peak_bytes": peak, "trained_tokens": counts}
    out.write_text(json.dumps(result))


def save_order(config_file: Path) -> None:
    """Write the row numbers of each batch of the run, in training order."""
    from halfbyte.config import load_config
    from halfbyte.data.prepare import prepare
    from halfbyte.loading.load import load_tokenizer

    config = load_config(config_file)
    rows = range(len(prepare(config, load_tokenizer(config.model_name_or_path)).train))
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(config.seed))  # like the training loop
    order = list(BatchSampler(sampler, config.per_device_train_batch_size, drop_last=False))[: config.max_steps]
    (Path(config.output_dir) / "order.json").write_text(json.dumps(order))


def compare(given: argparse.Namespace) -> None:
    """Print what the runs took and how their losses differ, and write the result."""
    records = [json.loads(line) for line in (given.work / "out" / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    memory = json.loads((given.work / "out" / "memory.json").read_text())
    runs = {
        "halfbyte": {
            "losses": [record["loss"] for record in train],
            "step_seconds": [record["step_seconds"] for record in train],
            "trained_tokens": [record["trained_tokens"] for record in train],
            "peak_bytes": memory["measured"]["peak_bytes"],
        }
    }
    for peer in ("peer", "peer-upcast"):
        runs[peer] = json.loads((given.work / f"{peer}.json").read_text())
        assert runs[peer]["trained_tokens"] == runs["halfbyte"]["trained_tokens"], "the runs saw different batches"
    summary = {}
    for name, run in runs.items():
        pairs = zip(runs["halfbyte"]["losses"], run["losses"], strict=True)
        summary[name] = {
            "peak_gib": run["peak_bytes"] / 2**30,
            "step_ms": 1e3 * statistics.median(run["step_seconds"]),
            "largest_relative_loss_difference": max(abs(ours / theirs - 1) for ours, theirs in pairs),
        }
    result = {
        "model": given.model,
        "steps": given.steps,
        "runs": summary,
        "predicted_gib": memory["predicted"]["total"] / 2**30,
        "after_load_gib": memory["measured"]["after_load_bytes"] / 2**30,
    }
    print(json.dumps(result, indent=1))
    write_result(given.json, result | {"losses": {name: run["losses"] for name, run in runs.items()}})


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--data", type=Path)
    made.add_argument("--tokenizer", type=Path)
    made.add_argument("--work", type=Path, default=Path("/tmp/qlora-8b"))
    made.add_argument("--model", choices=["llama-3.1-8b", "llama-3.2-1b"], default="llama-3.1-8b")
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--peer", choices=["peer", "peer-upcast"], help=argparse.SUPPRESS)
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    require_gpu()
    config_file = given.work / "run.yaml"
    if given.peer:
        save_order(config_file)
        return train_peer(config_file, given.work / f"{given.peer}.json", given.peer == "peer-upcast")
    if not (given.work / "base").exists():
        write_checkpoint(given.model, given.tokenizer, given.work / "base")
        write_adapter(given.work / "base", given.work / "adapter0")
    config_file.write_text(json.dumps(run_config(given.work, given.data.resolve(), given.steps)))  # JSON is YAML
    subprocess.run([sys.executable, "-m", "halfbyte", "train", str(config_file)], check=True)
    for peer in ("peer", "peer-upcast"):
        command = [sys.executable, "-m", "benchmarks.qlora_8b", "--peer", peer, "--work", str(given.work)]
        subprocess.run(command, check=True)
    compare(given)


if __name__ == "__main__":
    main()
