"""Tiny runs of every family, method, format and option, with models, tokenizer and rows made on the fly.

`Place(folder)` writes what runs read, `cases()` lists them, and `Place.keys(case, output)` is a run's configuration;
tiny_matrix.py runs them all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.families import families

VOCABULARY = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "initializer_range": 0.2,
}  # fmt: skip
NAMES = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Gemma3nText", "Gemma4Text", "Phi3", "SmolLM3",
    "Olmo2", "Olmo3", "SeedOss", "Exaone4", "Cohere2", "Granite", "Ernie4_5", "Glm4", "Apertus", "Arcee", "Mixtral",
    "Qwen3Moe", "Glm4Moe", "GraniteMoe", "Olmoe", "GptOss", "Qwen3_5Text", "Qwen3Next", "Bamba", "NemotronH",
)  # fmt: skip
_ALL = families(width=64, mlp=128, expert=64, vocabulary=VOCABULARY)
FAMILIES: dict[str, dict[str, Any]] = {name: _ALL[name] for name in NAMES} | {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "FalconH1": {key: _ALL["Bamba"][key] for key in _ALL["Bamba"] if key.startswith("mamba")} | {"mamba_d_ssm": 128},
    "Helium": {},
}

POLICY = {"max_completion_length": 8, "num_generations": 2, "reward_funcs": [{"regex": "[aeiou]"}]}
METHODS: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {},
    "kto": {},
    "orpo": {},
    "cpo": {},
    "simpo": {},
    "reward": {},
    "grpo": POLICY,
    "rloo": POLICY,
    "gkd": {"max_completion_length": 8, "teacher_model_name_or_path": "{teacher}"},
}
DATA = {"sft": "chats", "kto": "labelled", "grpo": "prompts", "rloo": "prompts", "gkd": "prompts"}  # others: pairs

FORMATS: dict[str, dict[str, Any]] = {
    "16bit": {"load_in_4bit": False},
    "nf4-plain": {"bnb_4bit_use_double_quant": False},
    "nf4-32": {"bnb_4bit_blocksize": 32},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "mixed": {"quantization": {"*.mlp.*": "hqq3", "*": "nf4"}},
    "first in 16 bits": {"skip_quant_first_layers": 1},
} | {
    name: {"quantization": name}
    for name in (
        "nf4", "kbit2", "kbit3", "kbit4", "kbit5", "fp8", "fp8-tensor", "fp8-tile", "hqq8", "hqq4", "hqq3", "hqq2",
        "int8", "nvfp4", "nvfp4-1d", "mxfp4",
    )
}  # fmt: skip

OPTIONS: tuple[dict[str, Any], ...] = (
    {"packing": True},
    {"padding_free": True},
    {"gradient_accumulation_steps": 2, "eval_split_size": 2, "eval_steps": 2},
    {"use_kernels": False},
    {"attn_implementation": "eager"},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"dtype": "float32"},
    {"recipe": "fp8-hybrid"},
    {"recipe": "nvfp4"},
    {"qat_scheme": "int4", "load_in_4bit": False},
    {"qat_scheme": "nvfp4", "load_in_4bit": False},
    {"use_peft": False, "load_in_4bit": False},
    {"use_peft": False, "load_in_4bit": False, "dtype": "float32", "optim": "adafactor"},
    {"lora_dropout": 0.1},
    {"lora_dropout": 0.1, "use_dora": True},
    {"lora_fa": True, "lora_dropout": 0.1},
    {"exclude_modules": ["q_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": ["q_proj", "lm_head"]},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens", "lm_head"], "adapter_dtype": "float32"},
    {"use_rslora": True, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 4}},
    {"use_dora": True},
    {"use_dora": True, "quantization": "int8"},
    {"init_lora_weights": "gaussian", "adapter_dtype": "bfloat16", "dtype": "bfloat16"},
    {"adapter_dtype": "bfloat16", "method": "reward"},
    {"overlong": "drop", "max_length": 48},
    {"assistant_only_loss": False},
    {"optim": "adamw_torch"},
    {"optim": "adamw_8bit"},
    {"lr_scheduler_type": "linear", "weight_decay": 0.1, "max_grad_norm": 0},
    {"neftune_noise_alpha": 5.0},
    {"sample_prompts": 2, "sample_max_new_tokens": 4},
    {"deterministic": True},
    {"activation_checkpointing": "keep"},
    {"activation_checkpointing": "recompute"},
    {"activation_checkpointing": "recompute_mlp"},
    {"activation_checkpointing": "checkpoint"},
    {"activation_checkpointing": "offload_kept"},
    {"activation_checkpointing": "offload"},
    {"activation_checkpointing": "tiled"},
    {"method": "dpo", "precompute_ref_log_probs": False, "padding_free": True},
    {"method": "dpo", "loss_type": "ipo", "packing": True},
    {"method": "grpo", "beta": 0.04, "kv_cache": "fp8", "top_k": 5, "temperature": 0.8},
    {"method": "grpo", "loss_type": "bnpo", "num_iterations": 2, "mask_truncated_completions": True},
    {"method": "grpo", "rollout_weights": "packed", "use_dora": True},
    {"method": "gkd", "beta": 0.1, "temperature": 0.7, "packing": True},
)


@dataclass(frozen=True)
class Case:
    """One tiny run.

    Attributes:
        name: of its line in the results.
        family: a key of `FAMILIES`.
        keys: of its configuration beside the common ones; "{teacher}" stands for a model's folder.
    """

    name: str
    family: str = "Llama"
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return str(self.keys.get("method", "sft"))


def cases() -> Iterator[Case]:
    """All families with all methods, then formats and options of one family."""
    for family in FAMILIES:
        for method in METHODS:
            yield Case(f"{family} {method}", family, {"method": method})
    for name, keys in FORMATS.items():
        yield Case(f"format {name}", keys=keys)
    for keys in OPTIONS:
        yield Case("option " + ", ".join(f"{key}={value}" for key, value in keys.items()), keys=keys)


@dataclass(frozen=True)
class Place:
    """A folder with rows, and with the models that runs have asked for."""

    folder: Path
    device: str = "cpu"

    def keys(self, case: Case, output: Path) -> dict[str, Any]:
        """The configuration of a run, for `halfbyte.config.load_config(None, …)`; its model is written where it is not
        there."""
        data = self.folder / f"{DATA.get(case.method, 'pairs')}.jsonl"
        common = {
            "model_name_or_path": str(self.model(case.family)), "dataset": str(data), "output_dir": str(output),
            "device": self.device, "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "r": 4,
            "max_length": 96, "sample_prompts": 0, "eval_split_size": 0, "seed": 3, "warmup_steps": 0,
        }  # fmt: skip
        keys = common | METHODS[case.method] | case.keys
        if keys.get("teacher_model_name_or_path") == "{teacher}":
            keys["teacher_model_name_or_path"] = str(self.model(case.family, seed=1))
        return keys

    def write_rows(self) -> None:
        """Rows of every kind, of uneven lengths."""
        made: dict[str, list[dict[str, Any]]] = {"chats": [], "pairs": [], "labelled": [], "prompts": []}
        for n in range(16):
            asked, good, bad = _words(n, 4 + n % 5), _words(3 * n + 1, 2 + n % 7), _words(5 * n + 2, 1 + n % 4)
            turns = [{"role": "user", "content": asked}]
            answers = [[{"role": "assistant", "content": text}] for text in (good, bad)]
            made["chats"].append({"messages": turns + answers[0]})
            made["pairs"].append({"prompt": turns, "chosen": answers[0], "rejected": answers[1]})
            made["labelled"].append({"prompt": turns, "completion": answers[n % 2], "label": n % 2 == 0})
            made["prompts"].append({"prompt": turns})
        for name, rows in made.items():
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def model(self, family: str, seed: int = 0) -> Path:
        """Folder of a random tiny model with its tokenizer, written by the first process that asks for it."""
        folder = self.folder / f"{family}-{seed}"
        if not folder.is_dir():
            made = Path(tempfile.mkdtemp(dir=self.folder))
            write_model(made, family, seed)
            try:
                os.rename(made, folder)
            except OSError:  # another process was first
                shutil.rmtree(made)
        return folder


def write_model(folder: Path, family: str, seed: int = 0, **keys: Any) -> None:
    """A random tiny model of a family, and a tokenizer, in `folder`."""
    import torch
    import transformers

    tokenizer = make_tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, f"{family}Config")(**SIZES | ids | FAMILIES[family] | keys)
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (
    "the", "small", "bears", "count", "seven", "green", "apples", "near", "an", "old", "river", "while", "quick",
    "brown", "foxes", "jump", "over", "lazy", "dogs",
)  # fmt: skip


def _words(start: int, count: int) -> str:
    return " ".join(WORDS[(start + n * (start % 3 + 1)) % len(WORDS)] for n in range(count))


def make_tokenizer() -> Any:
    """A byte-level BPE of some 300 tokens with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], chat_template=TEMPLATE
    )
