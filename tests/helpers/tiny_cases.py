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

VOCABULARY = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "initializer_range": 0.2,
}  # fmt: skip
TWO_KINDS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
PER_LAYER = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
SCALED = {"residual_multiplier": 0.3, "embedding_multiplier": 5.0, "logits_scaling": 3.0, "attention_multiplier": 0.2}
SHARED = {"num_experts": 4, "shared_expert_intermediate_size": 64}

FAMILIES: dict[str, dict[str, Any]] = {  # name of the config class in transformers → keys beside SIZES
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma2": TWO_KINDS | {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0},
    "Gemma3Text": TWO_KINDS,
    "Gemma3nText": PER_LAYER
    | {"activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8, "intermediate_size": [128] * 4},
    "Gemma4Text": PER_LAYER | {"global_head_dim": 32, "use_double_wide_mlp": True},
    "Phi3": {"resid_pdrop": 0.0, "partial_rotary_factor": 0.5},
    "SmolLM3": {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 8},
    "Olmo2": {},
    "Olmo3": TWO_KINDS,
    "SeedOss": {"residual_dropout": 0.0, "attention_dropout": 0.0},
    "Exaone4": TWO_KINDS,
    "Cohere2": TWO_KINDS | {"logit_scale": 0.5},
    "Granite": SCALED,
    "Ernie4_5": {"use_bias": True},
    "Glm4": {},
    "Apertus": {},
    "Arcee": {},
    "Helium": {},
    "Mixtral": {"num_local_experts": 4, "sliding_window": 8},
    "Qwen3Moe": MIXTURE | {"num_experts": 4},
    "Glm4Moe": MIXTURE
    | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True},
    "GraniteMoe": SCALED | MIXTURE | {"num_local_experts": 4},
    "Olmoe": MIXTURE | {"num_experts": 4},
    "GptOss": MIXTURE | {"num_local_experts": 4, "sliding_window": 8},
    "Qwen3_5Text": DELTA,
    "Qwen3Next": DELTA | MIXTURE | SHARED,
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "FalconH1": MAMBA | {"mamba_d_ssm": 128},
    "NemotronH": MIXTURE
    | {
        "layers_block_type": ["mamba", "attention", "mlp", "moe"], "num_hidden_layers": 4, "mamba_num_heads": 4,
        "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "n_routed_experts": 4, "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 64,
    },
}  # fmt: skip

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
