"""Tiny random models of every family that export knows, with a tokenizer that llama.cpp takes."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SIZES = {
    "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15, "pad_token_id": 0,
    "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
THETA = {"rope_theta": 10000.0}
ORIGINAL = THETA | {"original_max_position_embeddings": 64}
LLAMA3 = ORIGINAL | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = THETA | {
    "original_max_position_embeddings": 256,
    "rope_type": "longrope",
    "short_factor": [1.1] * 8,
    "long_factor": [2.0] * 8,
}
WINDOW = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}
# Gated DeltaNets with two value heads a key head, then attention: a quarter of a head is turned.
HYBRID = {
    "num_hidden_layers": 8, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": THETA | {"partial_rotary_factor": 0.25, "rope_type": "default", "mrope_section": [3, 3, 2],
                        "mrope_interleaved": True},
}  # fmt: skip

# name → transformers' class, keys of its config beyond SIZES
MODELS = {
    "llama": ("Llama", {}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope, biases": (
        "Llama", {"attention_bias": True, "rope_parameters": THETA | {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": ORIGINAL | {"rope_type": "yarn", "factor": 4.0}}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 80, "norm_topk_prob": False}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", WINDOW),
    "gemma3": ("Gemma3Text", WINDOW | {"num_hidden_layers": 7}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3, longrope": ("Phi3", {"sliding_window": None, "rope_parameters": LONG,
                                "max_position_embeddings": 1024, "original_max_position_embeddings": 256}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 5, "sliding_window": 16}),
    "seed_oss": ("SeedOss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": False}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 16, "logit_scale": 0.5}),
    "granite": ("Granite", {"residual_multiplier": 0.3, "embedding_multiplier": 5.0, "logits_scaling": 3.0,
                            "attention_multiplier": 0.2}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "use_bias": False}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True,
                      "rope_parameters": THETA | {"partial_rotary_factor": 0.5, "rope_type": "default"}}),
    "arcee": ("Arcee", {"head_dim": 16}),
    "qwen3_5": ("Qwen3_5Text", HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeText", HYBRID | EXPERTS | {"shared_expert_intermediate_size": 80}),
    "qwen3_next": ("Qwen3Next", HYBRID | EXPERTS | {
        "shared_expert_intermediate_size": 80, "norm_topk_prob": True,
        "rope_parameters": THETA | {"partial_rotary_factor": 0.25, "rope_type": "default"}}),
    "qwen3_5, a value head a key head": ("Qwen3_5Text", HYBRID | {"linear_num_value_heads": 2}),
    "glm4_moe": ("Glm4Moe", {
        "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "head_dim": 16, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.7, "n_group": 1,
        "topk_group": 1, "use_qk_norm": True, "attention_bias": True,
        "rope_parameters": THETA | {"partial_rotary_factor": 0.5, "rope_type": "default"}}),
    "minimax_m2": ("MiniMaxM2", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
        "rope_parameters": THETA | {"partial_rotary_factor": 0.5, "rope_type": "default"}}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16,
                           "rope_parameters": THETA | {"rope_type": "default"}}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
}  # fmt: skip


def byte_tokenizer():
    """A token per byte and one merge: llama.cpp wants at least one."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary | {"Ġt": 256}, merges=[("Ġ", "t")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", bos_token="<s>")


def save_model(folder, name, **keys):
    """Save the model `name` of MODELS into `folder` and return it, fp32."""
    torch.manual_seed(1)
    family, own = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**(SIZES | own | keys))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # norms start at one and biases at zero: make them matter
        parameter.data += 0.03 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # selects experts without weighting them
            buffer += 0.3 * torch.randn_like(buffer)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model
