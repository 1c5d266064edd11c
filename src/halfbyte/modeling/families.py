"""What tells the model families apart: one row each, no code. Everything else asks the row.

Families share one decoder block: norm, attention, norm, gated MLP (or experts), with the residual stream around both
halves. A row says where a family departs from Llama. The names of submodules are Hugging Face's. Of models that also
take images, the row is that of their text part, and `tower` describes what stands before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..ops.glu import Activation

# transformers' names of activations, and those of `halfbyte.ops.glu`.
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
SILU = ("silu", "swish")
GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu")  # Gemma 1's config says gelu and means the tanh form


@dataclass(frozen=True)
class Norms:
    """Names of a layer's norms; "": there is none.

    Args:
        before_attention, before_mlp: what attention and MLP read.
        after_attention, after_mlp: of their results, before these join the residual stream.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
BEHIND = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP.

    Args:
        count: the config's key for how many a layer has.
        block: what checkpoints call the mixture.
        gate, up, down: what they call the linears of an expert.
        mixture: the mixture's class, where its name is an MLP's.
        interleaved: rows of gate and up take turns, matrices lie [K, N] in 16-bit checkpoints, and there are biases.
    """

    count: str = "num_experts"
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    mixture: str = ""
    interleaved: bool = False


@dataclass(frozen=True)
class Mixer:
    """What some layers have in attention's place: linears of one input, a recurrence that transformers computes, a norm
    of each head times a gate, and a linear for the output.

    Args:
        kind: what its class is called behind the family's name.
        name: in the layer; the others are names in it.
    """

    kind: str
    name: str
    inputs: tuple[str, ...]
    output: str
    norm: str


@dataclass(frozen=True)
class Gguf:
    """llama.cpp's graph of a family (src/models/*.cpp there), and what that takes for granted.

    Args:
        arch: its name; "": there is none that computes the same.
        text_alone: transformers has a causal LM of the text part alone, which a file can be read as.
        permute: RoPE turns neighbouring pairs, where transformers turns halves: rows of q and k are reordered.
        bias: linears may have biases.
        bias_keys: the config's key that says so → the linear of a layer which shows it; and of other keys the tensor.
        activations: of the MLP, in transformers' names.
        window_every: layers with a sliding window: all but every n-th, so none with 1; 0: the graph has no window.
        wide_layers: with this many layers attention is scaled by hidden size over heads, with others by the head's size
            (`query_pre_attn_scalar`); 0: always by the head's size.
        keys: the file's keys that only some families have → the config's.
        optional: those of `keys` that a file may lack.
        fixed: the config's keys that have one value in the graph.
        partial_rope: RoPE may turn a part of a head (`partial_rotary_factor`).
        original_context: the config holds the context before its scaling (`original_max_position_embeddings`).
        grouped: there may be fewer heads of keys than of queries.
        unrotated_every: layers without RoPE: every n-th (`no_rope_layers`); 0: the config says nothing of them.
        attention_every: layers with attention: every n-th, the others have a Gated DeltaNet; 0: all.
        tiled_heads: key heads of a Gated DeltaNet are repeated as a whole, where transformers repeats each by itself:
            value heads are reordered.
        without: keys of all files that this family's config lacks.
        sections: of RoPE, how many pairs turn with time, height and width, where the config leaves it to the module.
        constants: the file's keys that have one value in the family.
        yarn: parameters of that scaling which a file does not say.
        dense_first: the config's key for how many layers have an MLP before those with experts.
    """

    arch: str = ""
    text_alone: bool = True
    permute: bool = False
    bias: bool = False
    bias_keys: Mapping[str, str] = field(default_factory=dict)
    activations: tuple[str, ...] = SILU
    window_every: int = 0
    wide_layers: int = 0
    keys: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    partial_rope: bool = False
    original_context: bool = False
    grouped: bool = True
    unrotated_every: int = 0
    attention_every: int = 0
    tiled_heads: bool = False
    without: tuple[str, ...] = ()
    sections: tuple[int, ...] = ()
    constants: Mapping[str, int] = field(default_factory=dict)
    yarn: Mapping[str, object] = field(default_factory=dict)
    dense_first: str = ""


@dataclass(frozen=True)
class Tower:
    """A vision tower and its projector, as llama.cpp's graph reads them (tools/mtmd): no tensor fewer and no other.

    Args:
        projector: what llama.cpp calls it.
        model_types: of the vision config.
        activations: of the tower's MLP, in transformers' names → the flag in the file, if it has one.
        outside: tensors beside the layers.
        biased, plain: parts of a layer with a bias, and those without.
        unused: regular expression of names in the checkpoint of tensors that the language model gets nothing from.
        names: of tensors in the checkpoint that the gguf library does not know, or as another family's → in the file.
        layers, heads: the vision config's keys.
        epsilon: of the norms, where the model's code fixes it; None: the config has it.
        image_size: the side of the images that llama.cpp plans memory for, where any size goes; None: the config's.
        projected: the vision config's key for the width that comes out; "": the language model's.
        required: key of the config → the values that the graph computes.
        unwindowed: the vision config's key of the layers whose attention has no window, every n-th; "": all.
        pooled: the config's key for the tokens that an image is pooled to; "": it is not.
        feature_layers: the config's key for the layers that features are taken after; "": the last.
        notice: what users of llama.cpp should know.
    """

    projector: str
    model_types: tuple[str, ...]
    activations: Mapping[str, str]
    outside: frozenset[str]
    biased: tuple[str, ...]
    plain: tuple[str, ...] = ()
    unused: str = r"$^"
    names: Mapping[str, str] = field(default_factory=dict)
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    epsilon: float | None = None
    image_size: int | None = None
    projected: str = ""
    required: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    unwindowed: str = ""
    pooled: str = ""
    feature_layers: str = ""
    notice: str = ""


@dataclass(frozen=True, eq=False)
class Family:
    """One row.

    Args:
        name: prefix of the class names, as in LlamaDecoderLayer.
        package: folder under `transformers.models`, and the model_type of whole models.
        model_type: of the text part's config; "": `package`.
        module: that the classes are in; "": transformers' of `package`.
        patched: `halfbyte.patch` binds the fused forwards.
        norms: of a layer.
        norm_offset: RMSNorm multiplies by 1 + weight.
        layer_norm: norms subtract the mean (LayerNorm).
        parallel: attention and MLP read the same norm of the residual stream, and both join it.
        qk_norm: q and k are normalised before RoPE, each head of its own, or all heads as one vector; "shared": each
            head by one norm without a weight.
        query_multiplier: the config's key for what q is multiplied by; "": none.
        rope_pairs: which values of a head RoPE turns together: i and i + R/2, or neighbours; cos and sin come for the
            first half of them and again for the second, or "repeated" for neighbours, too, or "once".
        unrotated: where it is written which layers have no RoPE: in the module (use_rope), in the config, where their
            base is 0 (layer_rope_theta), or those have none that have no window ("window"), or "all".
        scaled_queries: q is multiplied by 1 + β·log(1 + ⌊position / context⌋), as Llama 4's are.
        fused: linears that stand for several: qkv_proj, gate_up_proj.
        gated_mlp: the MLP is gated; else its activation, which may have weights, is of one linear.
        residual_dropout: dropout on what joins the residual stream: modules of the layer, or a number of each half.
        residual_scale: the config's key for what the results of attention and MLP are multiplied by; "": none.
        embedding_scale: the config's key for what embeddings are multiplied by outside of their module; "": none.
        window: where an attention layer's sliding window is written: in the config, or in the module, by layer.
        softcap: attention scores are capped (attn_logit_softcapping).
        sinks: each head of attention has a learned score that every token gives beside its keys' (`sinks`).
        rope_by_layer: RoPE has parameters for each type of layer.
        activation: the config's key for the MLP's activation.
        mlp: the MLP's class, where its name does not begin with the family's.
        images_see_themselves: tokens of one image attend to each other both ways (token_type_ids), not causally.
        shares_keys: an attention layer may take keys and values from an earlier one, or both from one linear; values
            are normalised, each head by a norm without a weight.
        own_layer: transformers' forward of a layer runs, around parts that are fused: it has more than two halves, or
            a state; `norms` and `mixer` say nothing of it.
        gated_attention: what o_proj reads is multiplied by the sigmoid of a gate, which each head of q_proj has behind
            its queries ("q_proj"), or a linear of its own ("gate_proj").
        mixer: of layers without attention.
        experts: a mixture in place of the MLP.
        tower: what stands before the text part in models of `package` that take images.
        gguf: llama.cpp's graph.
    """

    name: str
    package: str
    model_type: str = ""
    module: str = ""
    patched: bool = True
    norms: Norms = Norms()
    norm_offset: bool = False
    layer_norm: bool = False
    parallel: bool = False
    qk_norm: Literal["head", "all", "shared"] | None = None
    query_multiplier: str = ""
    rope_pairs: Literal["halves", "neighbours", "repeated", "once"] = "halves"
    unrotated: Literal["use_rope", "layer_rope_theta", "window", "all"] | None = None
    scaled_queries: bool = False
    fused: tuple[str, ...] = ()
    gated_mlp: bool = True
    residual_dropout: Literal["layer", "half"] | None = None
    residual_scale: str = ""
    embedding_scale: str = ""
    window: Literal["config", "module"] | None = None
    softcap: bool = False
    sinks: bool = False
    rope_by_layer: bool = False
    activation: str = "hidden_act"
    mlp: str | None = None
    images_see_themselves: bool = False
    shares_keys: bool = False
    own_layer: bool = False
    gated_attention: Literal["q_proj", "gate_proj"] | None = None
    mixer: Mixer | None = None
    experts: Experts | None = None
    tower: Tower | None = None
    gguf: Gguf = Gguf()

    def __post_init__(self) -> None:
        filled = {"model_type": self.package,
                  "module": f"transformers.models.{self.package}.modeling_{self.package}"}  # fmt: skip
        for key, value in filled.items():
            object.__setattr__(self, key, getattr(self, key) or value)


CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
WINDOW = {"attention.sliding_window": "sliding_window"}
MOE = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
SHARED_MOE = {**MOE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
SCALES = {
    "attention.scale": "attention_multiplier", "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
EVERY_LAYER = {"mlp_only_layers": [], "decoder_sparse_step": 1}  # has experts
BLOCK = ("ln1", "ln2", "attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down")
PROJECTOR = ("mm.0.weight", "mm.0.bias", "mm.2.weight", "mm.2.bias")
TANH = {"gelu_pytorch_tanh": "use_gelu", "gelu": "use_gelu"}  # llama.cpp has the tanh form alone

SIGLIP = Tower(
    "gemma3", ("siglip_vision_model",), TANH,
    frozenset({"v.patch_embd.weight", "v.patch_embd.bias", "v.position_embd.weight", "v.post_ln.weight",
               "v.post_ln.bias", "mm.input_projection.weight", "mm.soft_emb_norm.weight"}),
    BLOCK,
    unused=r"vision_model\.head\.|\.position_ids$",
    names={"multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight"},
    pooled="mm_tokens_per_image",
)  # fmt: skip
QWEN_VISION = Tower(
    "qwen2.5vl_merger", ("qwen2_5_vl", "qwen2_5_vl_vision"), {"silu": "use_silu"},
    frozenset({"v.patch_embd.weight", "v.patch_embd.weight.1", "v.post_ln.weight", *PROJECTOR}),
    (*BLOCK[2:], "ffn_gate"), BLOCK[:2],
    layers="depth", heads="num_heads", epsilon=1e-6, image_size=560, projected="out_hidden_size",
    required={"vision_config.window_size": (112,), "vision_config.spatial_merge_size": (2,),
              "vision_config.temporal_patch_size": (2,)},
    unwindowed="fullatt_block_indexes",
)  # fmt: skip
# model_type → the tower of models whose text part is of any family.
TOWERS = {
    "llava": Tower(
        "mlp", ("clip_vision_model",), TANH | {"quick_gelu": ""},
        frozenset({"v.class_embd", "v.patch_embd.weight", "v.position_embd.weight", "v.pre_ln.weight", "v.pre_ln.bias",
                   *PROJECTOR}),
        BLOCK,
        unused=r"vision_model\.post_layernorm\.|\.position_ids$",  # features come from before it
        names={"multi_modal_projector.linear_1": "mm.0", "multi_modal_projector.linear_2": "mm.2"},
        required={"projector_hidden_act": ("gelu", "gelu_pytorch_tanh"),
                  "vision_feature_select_strategy": ("default",)},
        feature_layers="vision_feature_layer",
        notice="llama.cpp of 2025 and 2026 moves the patches of LLaVA's images by one and loses the first (its issue"
        " 25814); the file is as it should be",
    ),
}  # fmt: skip

DELTA_NET_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
}  # fmt: skip
DELTA_NET = Mixer("GatedDeltaNet", "linear_attn", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "out_proj",
                  "norm")  # fmt: skip
# A GGUF file is read as the first row of its architecture, of those with experts where it has them.
FAMILIES = [
    Family("Llama", "llama", gguf=Gguf(
        "llama", permute=True, bias=True, bias_keys={"attention_bias": "attn_q", "mlp_bias": "ffn_down"})),
    Family("Mistral", "mistral", window="config", gguf=Gguf("llama", permute=True)),
    Family("Mixtral", "mixtral", window="config",
           experts=Experts("num_local_experts", "block_sparse_moe", gate="w1", up="w3", down="w2"),
           gguf=Gguf("llama", permute=True, keys={"expert_count": "num_local_experts",
                                                  "expert_used_count": "num_experts_per_tok"})),
    Family("Qwen2", "qwen2", window="module", gguf=Gguf("qwen2", bias=True)),
    Family("Qwen2_5_VL", "qwen2_5_vl", "qwen2_5_vl_text", window="module", mlp="Qwen2MLP", tower=QWEN_VISION,
           gguf=Gguf("qwen2vl", text_alone=False, bias=True)),
    Family("Qwen3", "qwen3", window="module", qk_norm="head", gguf=Gguf("qwen3")),
    Family("Qwen2Moe", "qwen2_moe", window="module", experts=Experts(), gguf=Gguf(
        "qwen2moe", bias=True, fixed={"norm_topk_prob": False, **EVERY_LAYER},
        keys=SHARED_MOE)),
    Family("Qwen3Moe", "qwen3_moe", window="module", qk_norm="head", experts=Experts(),
           gguf=Gguf("qwen3moe", keys=MOE, fixed={"norm_topk_prob": True, **EVERY_LAYER})),
    Family("Gemma", "gemma", norm_offset=True, gguf=Gguf("gemma", activations=GELU)),
    Family("Gemma2", "gemma2", norm_offset=True, norms=SANDWICH, window="module", softcap=True,
           activation="hidden_activation", gguf=Gguf(
               "gemma2", activations=GELU, window_every=2, wide_layers=46, keys=WINDOW | CAPS, optional=tuple(CAPS))),
    Family("Gemma3", "gemma3", "gemma3_text", norm_offset=True, norms=SANDWICH, window="module", qk_norm="head",
           rope_by_layer=True, activation="hidden_activation", images_see_themselves=True, tower=SIGLIP, gguf=Gguf(
               "gemma3", activations=GELU, window_every=6, wide_layers=62, keys=WINDOW | CAPS, optional=tuple(CAPS))),
    Family("Gemma3n", "gemma3n", "gemma3n_text", window="module", qk_norm="head", rope_by_layer=True,
           activation="hidden_activation", shares_keys=True, own_layer=True),
    Family("Gemma4", "gemma4", "gemma4_text", window="module", qk_norm="head", rope_by_layer=True,
           activation="hidden_activation", shares_keys=True, own_layer=True),
    Family("Phi3", "phi3", fused=("qkv_proj", "gate_up_proj"), residual_dropout="layer", window="config",
           gguf=Gguf("phi3", keys=WINDOW, optional=tuple(WINDOW), partial_rope=True, original_context=True)),
    Family("Ministral", "ministral", window="module"),
    Family("Ministral3", "ministral3", window="config", scaled_queries=True),
    Family("SmolLM3", "smollm3", window="module", unrotated="use_rope", gguf=Gguf(
        "smollm3", permute=True, unrotated_every=4, fixed={"use_sliding_window": False})),
    Family("Olmo2", "olmo2", norms=BEHIND, qk_norm="all", gguf=Gguf("olmo2")),
    Family("Olmo3", "olmo3", norms=BEHIND, qk_norm="all", window="module", rope_by_layer=True,
           gguf=Gguf("olmo2", window_every=4, keys=WINDOW)),
    Family("SeedOss", "seed_oss", residual_dropout="half",
           gguf=Gguf("seed_oss", bias=True,
                     bias_keys={"attention_bias": "attn_q", "attention_out_bias": "attn_output"})),
    Family("Exaone4", "exaone4", norms=BEHIND, qk_norm="head", window="module", unrotated="window",
           gguf=Gguf("exaone4", window_every=1, fixed={"sliding_window": None})),  # the 32B's windows are not exported
    Family("Cohere2", "cohere2", layer_norm=True, norms=Norms(before_mlp="input_layernorm"), parallel=True,
           window="module", rope_pairs="repeated", unrotated="window",
           gguf=Gguf("cohere2", window_every=4, keys=WINDOW | {"logit_scale": "logit_scale"})),
    Family("Granite", "granite", residual_scale="residual_multiplier", embedding_scale="embedding_multiplier",
           gguf=Gguf("granite", permute=True, keys=SCALES)),
    Family("Ernie4_5", "ernie4_5", rope_pairs="neighbours", gguf=Gguf("ernie4_5")),
    Family("Glm", "glm", fused=("gate_up_proj",), rope_pairs="neighbours"),
    Family("Glm4", "glm4", fused=("gate_up_proj",), rope_pairs="neighbours",
           norms=Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
           gguf=Gguf("glm4", bias=True, bias_keys={"attention_bias": "attn_q"}, partial_rope=True)),
    Family("Apertus", "apertus", norms=Norms("attention_layernorm", before_mlp="feedforward_layernorm"),
           qk_norm="head", gated_mlp=False),
    Family("Arcee", "arcee", gated_mlp=False, gguf=Gguf("arcee", permute=True, activations=("relu2",))),
    Family("MuseGlimmerText", "muse_glimmer", "muse_glimmer_text", norms=SANDWICH, norm_offset=True, window="module",
           qk_norm="shared", query_multiplier="qk_scale_factor", unrotated="layer_rope_theta",
           gated_attention="gate_proj", activation="hidden_activation", gguf=Gguf(text_alone=False)),
    Family("Glm4Moe", "glm4_moe", qk_norm="head", experts=Experts("n_routed_experts"), gguf=Gguf(
        "glm4moe", bias=True, bias_keys={"attention_bias": "attn_q", "use_qk_norm": "attn_q_norm.weight"},
        partial_rope=True, dense_first="first_k_dense_replace",
        fixed={"norm_topk_prob": True, "n_group": 1, "topk_group": 1},
        constants={"expert_gating_func": 2, "expert_weights_norm": True}, keys={
            "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
            "expert_weights_scale": "routed_scaling_factor", "leading_dense_block_count": "first_k_dense_replace"})),
    Family("GraniteMoe", "granitemoe", residual_scale="residual_multiplier", embedding_scale="embedding_multiplier",
           experts=Experts("num_local_experts", "block_sparse_moe")),
    Family("Olmoe", "olmoe", qk_norm="all", window="config", experts=Experts(), gguf=Gguf(
        "olmoe", grouped=False, keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        fixed={"norm_topk_prob": False, "clip_qkv": None})),
    Family("Phimoe", "phimoe", layer_norm=True, experts=Experts("num_local_experts")),
    Family("Ernie4_5_Moe", "ernie4_5_moe", rope_pairs="neighbours", experts=Experts("moe_num_experts")),
    Family("MiniMaxM2", "minimax_m2", qk_norm="all",
           experts=Experts("num_local_experts", "block_sparse_moe", gate="w1", up="w3", down="w2"), gguf=Gguf(
               "minimax-m2", partial_rope=True, constants={"expert_gating_func": 2}, keys={
                   "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
                   "expert_feed_forward_length": "intermediate_size"})),
    Family("GptOss", "gpt_oss", window="module", sinks=True, rope_pairs="once",
           experts=Experts("num_local_experts", mixture="GptOssMLP", interleaved=True),
           gguf=Gguf("gpt-oss", bias=True, window_every=2, yarn={"truncate": False}, keys=WINDOW | {
               "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
               "expert_feed_forward_length": "intermediate_size"})),
    Family("Qwen3_5", "qwen3_5", "qwen3_5_text", norm_offset=True, qk_norm="head", gated_attention="q_proj",
           mixer=DELTA_NET, gguf=Gguf("qwen35", keys=DELTA_NET_KEYS, partial_rope=True, attention_every=4,
                                      tiled_heads=True, sections=(11, 11, 10))),
    Family("Qwen3_5Moe", "qwen3_5_moe", "qwen3_5_moe_text", norm_offset=True, qk_norm="head", gated_attention="q_proj",
           mixer=DELTA_NET, experts=Experts(), gguf=Gguf(
               "qwen35moe", partial_rope=True, attention_every=4, tiled_heads=True, sections=(11, 11, 10),
               without=("feed_forward_length",), keys=DELTA_NET_KEYS | SHARED_MOE)),
    Family("Qwen3Next", "qwen3_next", norm_offset=True, qk_norm="head", gated_attention="q_proj",
           mixer=replace(DELTA_NET, inputs=("in_proj_qkvz", "in_proj_ba")), experts=Experts(), gguf=Gguf(
               "qwen3next", partial_rope=True, attention_every=4, keys=DELTA_NET_KEYS | SHARED_MOE,
               fixed={"norm_topk_prob": True, **EVERY_LAYER})),
    Family("Bamba", "bamba", own_layer=True),
    Family("GraniteMoeHybrid", "granitemoehybrid", own_layer=True, experts=Experts("num_local_experts"),
           residual_scale="residual_multiplier", embedding_scale="embedding_multiplier"),
    Family("Jamba", "jamba", own_layer=True, unrotated="all", experts=Experts()),
    Family("NemotronH", "nemotron_h", own_layer=True, unrotated="all", gated_mlp=False, activation="mlp_hidden_act",
           experts=Experts("n_routed_experts")),
]  # fmt: skip


def register(family: Family) -> None:
    """Make a family known, like those of the table."""
    FAMILIES.append(family)


def family_of(cls: type) -> tuple[Family, str] | None:
    """The family a module's class belongs to, and the rest of its name: LlamaRMSNorm → (Llama's row, "RMSNorm").

    Only classes of the family's own module count: one derived from them may compute something else. Those that FSDP2
    puts in front of a module's own are looked through. "Text" behind the family's name is left out.
    """
    cls = next(each for each in cls.__mro__ if not each.__module__.startswith("torch.distributed.fsdp"))
    for family in FAMILIES:
        if family.patched and cls.__module__ == family.module:
            if family.experts is not None and cls.__name__ == family.experts.mixture:
                return family, "Mixture"
            kind = cls.__name__.removeprefix(family.name).removeprefix("Text")
            return family, "MLP" if cls.__name__ == family.mlp else kind
    return None


def of_config(text_config: Any) -> Family | None:
    """The family of a transformers config, of the text part of models that take images."""
    return next((family for family in FAMILIES if family.model_type == text_config.model_type), None)


def towers() -> dict[str, Tower]:
    """model_type of whole models → their vision tower."""
    return {family.package: family.tower for family in FAMILIES if family.tower} | TOWERS


def tower_of(config: Any) -> Tower | None:
    """The vision tower of a whole model's config; None: it has none, or one that the table does not know."""
    return towers().get(config.model_type)


def scale_of(key: str, config: Any) -> float:
    """The value of a row's `residual_scale` or `embedding_scale`."""
    return float(getattr(config, key)) if key else 1.0
