"""Training runs on a GPU, without checkpoints: shapes of real models, random weights, rows of random lengths."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.step_model import MODELS, fill
from halfbyte.config import RunConfig, Storage
from halfbyte.formats import named
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.find import ModelFiles, load_model_config
from halfbyte.memory.offload import Offload
from halfbyte.train import preflight, run, setup
from halfbyte.train import sampler as training_rows

GIB = 2**30
SHAPES = {
    **MODELS,
    "llama-8b-4": ("Llama", MODELS["llama-3.1-8b"][1] | {"num_hidden_layers": 4}),
    "gemma2-2b-4": ("Gemma2", dict(
        hidden_size=2304, intermediate_size=9216, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, vocab_size=256000, query_pre_attn_scalar=256, sliding_window=4096, max_position_embeddings=8192,
        tie_word_embeddings=True,
    )),
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "limit6": {"model": "qwen3-0.6b", "lengths": (64, 4096), "rows": 4, "steps": 40, "memory_limit_gib": 6.0},
    "rows26": {"model": "qwen3-0.6b", "lengths": (4096, 4096), "rows": 64, "steps": 3, "memory_limit_gib": 7.5,
               "of": 26},
    "gemma2": {"model": "gemma2-2b-4", "lengths": (4096, 4096), "rows": 2, "steps": 4},
    "layers4": {"model": "llama-8b-4", "lengths": (64, 8192), "rows": 1, "steps": 60,
                "activation_checkpointing": "offload_attention"},
}  # fmt: skip
WORDS = [f"w{i}" for i in range(1000)]


def write_model(name: str, folder: Path) -> None:
    """Its config and a tokenizer of a thousand words."""
    family, keys = SHAPES[name]
    config = getattr(transformers, f"{family}Config")(**keys, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(folder)
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<s>", "</s>", "<pad>", *WORDS])}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def write_rows(path: Path, lengths: tuple[int, int], rows: int) -> None:
    """Texts without their end-of-text token."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            words = draw.choices(WORDS, k=draw.randint(*lengths) - 1)
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


def random_model(files: ModelFiles, storage: Storage, **keys: Any) -> Any:
    """Replaces `load_model`: creates random weights on the device and quantizes them layer by layer."""
    config = files.config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    format_ = named("nf4")
    fill(model, str(keys["device"]), lambda linear: QuantizedLinear.from_linear(linear, format_))
    for name, buffer in model.named_buffers():
        if buffer.is_meta:  # Gemma's scale of embeddings
            owner, _, leaf = name.rpartition(".")
            value = torch.tensor(config.hidden_size**0.5, dtype=buffer.dtype, device=keys["device"])
            model.get_submodule(owner)._buffers[leaf] = value
    return model


def measured(model: str, lengths: tuple[int, int], rows: int, steps: int, of: int = 0, **keys: Any) -> dict[str, Any]:
    """Train; return GiB that were planned, allocated, reserved and pinned."""
    stores: list[Offload] = []
    pinned: list[int] = []
    count, init = training_rows.CountingCollator.__call__, Offload.__init__

    def counting(self, batch):
        pinned.append(sum(store.pinned_bytes for store in stores))
        return count(self, batch)

    def noted(self, device):
        init(self, device)
        stores.append(self)

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_model(model, place / "model")
        write_rows(place / "data.jsonl", lengths, of or min(rows * steps, 4000))
        config = RunConfig(
            model_name_or_path=str(place / "model"), dataset=str(place / "data.jsonl"), output_dir=str(place / "out"),
            max_length=lengths[1], per_device_train_batch_size=rows, max_steps=steps, sample_prompts=0,
            save_steps=10_000, **{"device": "cuda"} | keys,
        )  # fmt: skip
        patched = {
            (setup, "load_model"): random_model,
            (preflight, "check_paths"): lambda *_: None,  # there are no weights
            (preflight, "find_model"): lambda origin: ModelFiles(origin.name, origin, load_model_config(origin)),
            (training_rows.CountingCollator, "__call__"): counting,
            (Offload, "__init__"): noted,
        }
        before = {where: getattr(*where) for where in patched}
        try:
            for (owner, name), value in patched.items():
                setattr(owner, name, value)
            torch.cuda.empty_cache()
            others = torch.cuda.memory_reserved()
            run.train(config)
        finally:
            for (owner, name), value in before.items():
                setattr(owner, name, value)
            stores.clear()
        memory = json.loads((place / "out/memory.json").read_text())
    predicted, found = memory["predicted"], memory["measured"]
    return {
        "planned": (predicted["total"] - predicted["graphs"]) / GIB,
        "allocated": (found["peak_bytes"] - found["base_bytes"]) / GIB,
        "reserved": (found.get("reserved_bytes", 0) - others) / GIB,
        "pinned_at_half": pinned[len(pinned) // 2] / GIB,
        "pinned": pinned[-1] / GIB,
    }
