"""Families × formats × options: each trains for 30 steps, evaluates and equals plain PEFT, or is refused with a reason.

On a GPU all rows; on a CPU three, so that what decides here is itself tested where there is no GPU.
"""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import PeftModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from halfbyte.adapters.expert_adapters import attach_adapter_forwards
from halfbyte.config import load_config
from halfbyte.data.prepare import prepare
from halfbyte.formats import names
from halfbyte.loading.find import find_model
from halfbyte.loading.load import load_model, load_tokenizer
from halfbyte.modeling import families
from halfbyte.modeling.architectures import auto_class
from halfbyte.qat.model import quantize_trained, round_merged
from halfbyte.train.run import train
from halfbyte.utils.errors import HalfbyteError
from tests.helpers.run_inputs import VOCABULARY, write_model, write_rows

STEPS = 30
SAME = 0.01  # relative; 16-bit forwards of other kernels, averaged over some 600 tokens
SAME_RECIPE = 0.05  # evaluated at lower precision than plain PEFT

TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 1,
    "eos_token_id": 0,
    "bos_token_id": None,
}
HEAD = {"head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
PER_LAYER = HEAD | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
DENSE = {row.model_type for row in families.FAMILIES if row.patched and not row.experts and not row.tower}
DENSE |= {"gemma3_text"}
DENSE &= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()  # a model without images alone
FAMILIES = {
    "llama": HEAD,
    "mistral": HEAD | {"sliding_window": 64},
    "qwen2": {},
    "qwen3": HEAD,
    "gemma": HEAD,
    "gemma2": HEAD | {"sliding_window": 64, "query_pre_attn_scalar": 16},
    "gemma3n_text": PER_LAYER
    | {"activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8, "intermediate_size": [128] * 4},
    "gemma4_text": PER_LAYER | {"global_head_dim": 32, "use_double_wide_mlp": True},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
    | {"attn_layer_indices": [1]},
    "gemma3_text": HEAD | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"partial_rotary_factor": 0.5, "resid_pdrop": 0.0},
    "mixtral": HEAD | EXPERTS,
    "qwen3_moe": HEAD | EXPERTS,
    "gpt2": {"n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "gptj": {"n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "gpt_neox": {},
    "gpt_oss": HEAD | EXPERTS | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "phi": {},
    "stablelm": {},
    "starcoder2": {},
    "olmo2": {},
    "granite": {},
    "cohere": {},
    "smollm3": {},
    "glm4": HEAD,
    "glm": HEAD,
    "apertus": HEAD,
    "arcee": HEAD,
    "cohere2": HEAD | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5": HEAD,
    "exaone4": HEAD | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "ministral": HEAD | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "ministral3": HEAD,
    "olmo3": HEAD | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5_text": HEAD | LINEAR,
    "seed_oss": HEAD,
    "llama4_text": HEAD | EXPERTS | {"intermediate_size_mlp": 128, "attention_chunk_size": 256},
    "mamba": {"state_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
    "qwen3_next": HEAD | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 64},
}
SIXTEEN = {"load_in_4bit": False}
OPTIONS = {
    "packing": {"packing": True},
    "padding_free": {"padding_free": True},
    "accumulation": {"gradient_accumulation_steps": 3},
    "dropout": {"lora_dropout": 0.1},
    "rank 3": {"r": 3},
    "rank 96": {"r": 96},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "two targets": {"target_modules": ["q_proj", "v_proj"]},
    "bf16 adapters": {"adapter_dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "stock": {"use_kernels": False},
    "checkpointed": {"activation_checkpointing": True},
    "recompute": {"activation_checkpointing": "recompute"},
    "recompute_mlp": {"activation_checkpointing": "recompute_mlp"},
    "offload": {"activation_checkpointing": "offload"},
    "offload_kept": {"activation_checkpointing": "offload_kept"},
    "tiled": {"activation_checkpointing": "tiled"},
    "fp8-hybrid": {"recipe": "fp8-hybrid"},
    "nvfp4 recipe": {"recipe": "nvfp4"},
    "qat": SIXTEEN | {"qat_scheme": "int4"},
    "whole": SIXTEEN | {"use_peft": False, "learning_rate": 1e-3},
    "head too": {"modules_to_save": ["lm_head"]},
    "neftune": {"neftune_noise_alpha": 5.0},
    "adafactor": {"optim": "adafactor"},
    "eager": {"attn_implementation": "eager"},
    "flex": {"attn_implementation": "flex_attention"},
    "flash": {"attn_implementation": "flash_attention_2"},
}


def table() -> dict[str, tuple[str, dict]]:
    """Name → family and keys: every family twice, every format in two families, every option in three."""
    rows = {}
    for family in FAMILIES:
        rows[f"{family}-nf4-packed"] = family, {"packing": True, "lora_dropout": 0.1}
        rows[f"{family}-16bit"] = family, SIXTEEN | {"gradient_accumulation_steps": 2}
    for format in names():
        for family in ("llama", "gemma2"):
            rows[f"{family}-{format}"] = family, {"quantization": format}
    for option, keys in OPTIONS.items():
        for family in ("qwen3", "gemma3_text", "gpt_neox"):
            rows[f"{family}-{option}"] = family, keys
    return rows


TABLE = table()
REFUSABLE = ("flash", "flex", "head too")  # what a fused family may be refused; another family may be refused anything
ON_A_CPU = ("llama-nf4-packed", "gpt_neox-16bit", "qwen3-whole", "qwen3_next-nf4-packed")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A function from a family to the folder of a tiny model of it; and rows, some longer than its window."""
    folder = tmp_path_factory.mktemp("breadth")
    write_rows(folder / "rows.jsonl", [24, 90, 150, 60, 200, 33, 120, 75] * 6)

    def make(family):
        if not (folder / family).exists():
            torch.manual_seed(1)
            config = transformers.AutoConfig.for_model(family, **TINY | FAMILIES[family])
            model = auto_class(config).from_config(config, dtype=torch.float32)
            write_model(folder / family, model)
        return folder / family

    return make, folder / "rows.jsonl"


def keys_of(row, models, output, device):
    family, keys = TABLE[row]
    make, rows = models
    return {
        "model_name_or_path": str(make(family)), "dataset": str(rows), "output_dir": str(output), "device": device,
        "max_steps": STEPS, "eval_split_size": 8, "eval_steps": 15, "per_device_train_batch_size": 2, "r": 8,
        "learning_rate": 5e-3, "max_length": 256, "sample_prompts": 1, "sample_max_new_tokens": 4, "logging_steps": 10,
    } | keys  # fmt: skip


def documents(config, tokenizer):
    """The held-out documents, each (ids, labels) [1, T]."""
    for row in prepare(config, tokenizer).eval:
        begin = 0
        for length in row.get("seq_lengths") or [len(row["input_ids"])]:
            part = slice(begin, begin + length)
            yield torch.tensor([row["input_ids"][part]]), torch.tensor([row["labels"][part]])
            begin += length


@torch.no_grad()
def plain_loss(config, output, device):
    """Return the held-out loss of the saved adapter by transformers and PEFT: one document at a time, full logits."""
    load = partial(load_model, dtype=config.dtype, device=device, attn_implementation=config.attn_implementation)
    if config.use_peft:
        model = load(find_model(config.origin), config.storage)
        model = PeftModel.from_pretrained(model, str(output / "adapter"))
        attach_adapter_forwards(model)  # PEFT itself would add the sum of factors to the stack, which is quantized
        if config.qat_scheme:
            round_merged(model)
            quantize_trained(model)
    else:
        model = load(str(output / "model"), config.storage)
    model.eval()
    loss_sum, count = 0.0, 0
    for ids, labels in documents(config, load_tokenizer(config.model_name_or_path)):
        ids, labels = ids.to(device), labels.to(device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        loss_sum += float(F.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum"))
        count += int((labels[0, 1:] != -100).sum())
    return loss_sum / count


def check(row, models, output, device):
    """Train `row`, or skip the test with the message of the refusal."""
    try:
        config = load_config(None, keys_of(row, models, output, device))
        train(config)
    except HalfbyteError as refusal:
        if TABLE[row][0] in DENSE and not row.endswith(REFUSABLE):
            raise
        pytest.skip(f"refused: {refusal}".replace("\n", " "))
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    held_out = [record["loss"] for record in records if record["kind"] == "eval"]
    trained = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(trained) == STEPS // 10
    assert all(map(math.isfinite, held_out + trained))
    assert held_out[-1] < held_out[0]
    tolerance = SAME if config.recipe == "bf16" else SAME_RECIPE
    assert plain_loss(config, output, device) == pytest.approx(held_out[-1], rel=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("row", TABLE)
def test_on_a_gpu(row, models, tmp_path):
    check(row, models, tmp_path / "out", "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("row", ON_A_CPU)
def test_on_a_cpu(row, models, tmp_path):
    check(row, models, tmp_path / "out", "cpu")


def test_every_fused_family_is_in_the_table():
    assert FAMILIES.keys() >= DENSE
