"""Tiny models: a model's architecture with few and narrow layers of every kind, on the CPU and without weights.

Properties that depend on the architecture alone, such as whether packed documents see each other, are tested on a tiny
model in seconds. Configs use similar names for sizes, so one table covers nearly all of transformers. A config that
does not fit the table fails to build or to run, with an error.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch

from ..utils.errors import ConfigError, first_line
from ..utils.notices import notice, remark
from .architectures import auto_class

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers",
          "encoder_layers", "num_encoder_layers", "num_blocks", "depth")  # fmt: skip
INDICES = ("layer_ids", "layer_indices", "attn_idxs", "moe_layers", "only_layers")  # lists of layer indices
LAYERS_PER_KIND, MAX_LAYERS = 2, 8

# Size → the config keys that get it. Smaller values, and 0, are left unchanged.
SIZES: dict[int, str] = {
    256: "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size pronunciation_vocab_size "
    "shape_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base "
    "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions",
    64: "hidden_size d_model n_embd embedding_size embedding_dim emb_dim word_embed_proj_dim lru_width "
    "index_topk input_embedding_size output_embedding_size backbone_hidden_size pronunciation_embed_dim "
    "shape_embed_dim router_hidden_size image_size",
    96: "intermediate_size ffn_hidden_size decoder_ffn_dim encoder_ffn_dim ffn_dim d_inner dff dim_ff "
    "feed_forward_size moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
    "shared_intermediate_size intermediate_size_mlp expert_ffn_hidden_size dense_intermediate_size "
    "moe_shared_expert_intermediate_size",
    128: "mamba_intermediate_size mamba_d_ssm",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts linear_num_heads linear_num_value_heads index_n_heads indexer_n_heads zero_expert_num "
    "swa_num_attention_heads num_query_groups num_channels n_mamba_heads mamba_n_heads mamba_num_heads",
    2: "num_key_value_heads num_kv_heads linear_num_key_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "swa_num_key_value_heads n_shared_experts num_shared_experts moe_num_shared_experts mamba_n_groups n_groups "
    "attn_layer_period num_hashes num_codebooks",
    32: "qk_head_dim",
    16: "head_dim qk_rope_head_dim d_head dim_head attention_head_size kv_channels qk_nope_head_dim v_head_dim "
    "linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim indexer_head_dim swa_head_dim "
    "kv_lora_rank q_lora_rank mamba_d_state state_size ssm_state_size laurel_rank hidden_size_per_layer_input "
    "time_step_rank mamba_dt_rank adapter_rank query_pre_attn_scalar",
    8: "rotary_dim chunk_size mamba_chunk_size block_size local_attn_chunk_length "
    "lsh_attn_chunk_length sliding_window attention_window_size window_size local_attention "
    "sliding_window_size attention_chunk_size",
    1: "n_group topk_group num_expert_group attn_layer_offset first_k_dense_replace num_dense_layers "
    "num_nextn_predict_layers num_kv_shared_layers mamba_ngroups",
}  # fmt: skip
# (number of heads, width of a head, ratio of all heads' width to the hidden size)
INNER = (("mamba_n_heads", "mamba_d_head", "mamba_expand"), ("num_heads", "head_dim", "expand"),
         ("n_mamba_heads", "mamba_headdim", "mamba_expand"))  # fmt: skip
TINY = {name: size for size, names in SIZES.items() for name in names.split()}


def tiny_config(config: Any) -> Any:
    """Return a copy of a transformers config with a few narrow layers of each kind, and a small vocabulary.

    Raises:
        Exception: the config's class rejects the sizes.
    """
    small = copy.deepcopy(config)
    for section in _parts(small):
        _shrink(section)
    return small


def tiny_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Build a random float32 model of `tiny_config(config)` on the CPU, in evaluation mode, and run it once.

    Raises:
        Exception: the model's class rejects the sizes.
    """
    small = tiny_config(config)
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    rng = torch.random.get_rng_state()
    options = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        model = auto_class(small).from_config(small, dtype=torch.float32, **options).eval()
        with torch.no_grad():
            model(input_ids=torch.arange(10, 20)[None], use_cache=False)
        return model
    finally:
        torch.random.set_rng_state(rng)


def check_positions(config: Any, length: int, *, trust_remote_code: bool = False, name: str = "the model") -> None:
    """Check that a model of transformers' `config` can run rows of `length` tokens.

    If `length` exceeds the trained context, a tiny model of the same architecture shows whether positions are bounded;
    if they are not, the excess is logged, naming the model as `name`.

    Raises:
        ConfigError: the model has no positions beyond its context.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(context, int) or length <= context:
        return
    message = f"max_length: rows have up to {length} tokens, but {name} was made for {context}"
    if _has_position_limit(config, trust_remote_code):
        raise ConfigError(f"{message}: it has no further positions", f"set max_length: {context}")
    rotates = getattr(config.get_text_config(), "rope_parameters", None)
    notice(f"positions of {name}", message + (": set rope_scaling: yarn to extend its context" if rotates else ""))


def _has_position_limit(config: Any, trust_remote_code: bool) -> bool:
    """Return whether a model rejects rows longer than `max_position_embeddings`."""
    small = tiny_config(config)
    context = small.get_text_config().max_position_embeddings
    try:
        model = tiny_model(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # the model's code may reject sizes that it was not made for
        remark("positions-untried", f"a limit of positions was not tried on a tiny model: {first_line(error)}")
        return False
    try:
        with torch.no_grad():
            model(input_ids=torch.ones(1, context + 1, dtype=torch.int64), use_cache=False)
    except (IndexError, RuntimeError, ValueError):
        return True
    return False


def _parts(config: Any) -> list[Any]:
    """Return the config and the configs nested in it."""
    from transformers import PretrainedConfig

    inner = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return [config, *(section for child in inner for section in _parts(child))]


def _shrink(config: Any) -> None:
    fields = dict(vars(config))
    same_heads = fields.get("num_key_value_heads") == fields.get("num_attention_heads")
    for name, value in fields.items():
        if name in TINY and isinstance(value, int) and not isinstance(value, bool) and value > TINY[name]:
            setattr(config, name, TINY[name])
        elif name in TINY and isinstance(value, list) and all(isinstance(n, int) for n in value):  # per layer
            setattr(config, name, [min(n, TINY[name]) for n in value])
    if same_heads and fields.get("num_attention_heads"):
        config.num_key_value_heads = config.num_attention_heads
    if "head_dim" in fields and fields["head_dim"] is None:
        config.head_dim = TINY["head_dim"]
    for heads, size, expand in INNER:
        if heads in fields and size in fields and isinstance(fields.get(expand), int):
            setattr(config, size, getattr(config, expand) * config.hidden_size // getattr(config, heads))
    if fields.get("attention_hidden_size"):  # keep its ratio to the hidden size
        config.attention_hidden_size = fields["attention_hidden_size"] // fields["hidden_size"] * config.hidden_size
        if "attention_head_dim" in fields:
            config.attention_head_dim = config.attention_hidden_size // config.num_attention_heads
    _select_layers(config, dict(vars(config)))
    vocabulary = getattr(config, "vocab_size", None) or TINY["vocab_size"]
    for index, (name, value) in enumerate(fields.items()):
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= vocabulary:
            setattr(config, name, vocabulary - 1 - index % 32)


def _select_layers(config: Any, fields: dict[str, Any]) -> None:
    """Keep the first two layers of each kind; kinds come from the lists with one entry per layer."""
    for name in LAYERS:
        count = fields.get(name)
        if not isinstance(count, int) or count < 1:
            continue
        lists = {key: list(value) for key, value in fields.items()
                 if isinstance(value, list | tuple) and len(value) == count}  # fmt: skip
        selected: list[int] = []
        counts: Counter[tuple[str, ...]] = Counter()
        for index in range(count):
            layer_kind = tuple(str(value[index]) for value in lists.values())
            counts[layer_kind] += 1
            if counts[layer_kind] <= LAYERS_PER_KIND and len(selected) < MAX_LAYERS:
                selected.append(index)
        setattr(config, name, len(selected))
        for key, value in lists.items():
            setattr(config, key, [value[index] for index in selected])
        for key, value in fields.items():
            if key.endswith(INDICES) and isinstance(value, list) and key not in lists:
                setattr(config, key, [selected.index(index) for index in value if index in selected])
