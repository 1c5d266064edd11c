"""Table of model families: one row each, without code. All other modules read the row.

Families share one decoder block: norm, attention, norm, gated MLP (or experts), with the residual stream around both
halves. A row lists a family's differences from Llama. Submodules have Hugging Face's names. For models that also take
images, the row describes the text part, and `tower` the vision tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..ops.glu import Activation

# transformers' activation names → names in `halfbyte.ops.glu`.
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
SILU = ("silu", "swish")
GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu")  # Gemma 1's config has "gelu" and uses the tanh form


@dataclass(frozen=True)
class Norms:
    """Names of a layer's norms; "" if there is none.

    Args:
        before_attention, before_mlp: norms of the inputs of attention and MLP.
        after_attention, after_mlp: norms of their outputs, before these join the residual stream.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
POST_NORMS = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP.

    Args:
        count: the config's key for the number of experts of a layer.
        block: name of the mixture in checkpoints.
        gate, up, down: names of an expert's linears in checkpoints.
        mixture: class name of the mixture, if it looks like an MLP's.
        interleaved: rows of gate and up alternate, matrices are [K, N] in 16-bit checkpoints, and there are biases.
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
    """A token mixer in place of attention: input linears, transformers' recurrence, a gated norm, an output linear.

    Args:
        kind: suffix of the class name, after the family's name.
        name: attribute of the layer; the other fields are attributes of the mixer.
    """

    kind: str
    name: str
    inputs: tuple[str, ...]
    output: str
    norm: str


@dataclass(frozen=True)
class Gguf:
    """llama.cpp's graph of a family (src/models/*.cpp there), and the graph's assumptions.

    Args:
        arch: name of the architecture; "": none computes the same.
        text_alone: transformers has a causal LM for the text part alone, so a file can be loaded as one.
        permute: RoPE rotates neighbouring pairs; transformers rotates halves, so rows of q and k are reordered.
        halves: RoPE rotates neighbouring pairs and the graph halves, so the rotated rows of q and k are reordered.
        bias: linears may have biases.
        bias_keys: the config's key for a bias → a linear of the layer that shows it; other keys → a tensor.
        activations: supported MLP activations, by transformers' names.
        window_every: every n-th layer has no sliding window, so 1 means no layer has one; 0: the graph has no window.
        wide_layers: models with this number of layers scale attention by hidden size / heads, others by the head width
            (`query_pre_attn_scalar`); 0: always by the head width.
        keys: file keys that only some families have → the config's keys.
        optional: those of `keys` that a file may omit.
        fixed: config keys that have one fixed value in the graph.
        partial_rope: RoPE may rotate a part of a head (`partial_rotary_factor`).
        rope_factors: RoPE types with a factor for each frequency, which the graph reads as tensors.
        window_base: layers with a window have a RoPE base of their own.
        square: the heads' widths sum to the hidden size.
        head: the graph needs output.weight, also for tied embeddings.
        original_context: the config holds the context length before scaling (`original_max_position_embeddings`).
        grouped: key heads may be fewer than query heads.
        unrotated_every: every n-th layer has no RoPE (`no_rope_layers`); 0: the config has no such key.
        attention_every: every n-th layer has attention, the others a Gated DeltaNet; 0: all have attention.
        tiled_heads: key heads of a Gated DeltaNet are repeated as a block (transformers: each one by itself), so value
            heads are reordered.
        without: keys of all files that this family's config lacks.
        sections: RoPE pairs that rotate with time, height and width, if the config does not list them.
        constants: file keys that have one value in the family.
        yarn: YaRN parameters that a file does not store.
        dense_first: the config's key for the number of leading layers with a dense MLP.
        layered: head widths, key heads and MLP widths may differ between layers, and layers may share keys and values.
        short_conv: layers without attention have a short convolution, and the width of the MLP is made of several keys.
        norm: the config's key for the epsilon of RMSNorm.
        tempered: queries are scaled by their position (`Family.scaled_queries`), and YaRN has no factor on cos and sin.
        read: further config keys that the writer reads, or that change no text's logits.
        next_token: the graph runs multi-token prediction layers, stored after the decoder layers.
    """

    arch: str = ""
    text_alone: bool = True
    permute: bool = False
    halves: bool = False
    bias: bool = False
    bias_keys: Mapping[str, str] = field(default_factory=dict)
    activations: tuple[str, ...] = SILU
    window_every: int = 0
    wide_layers: int = 0
    keys: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    partial_rope: bool = False
    rope_factors: tuple[str, ...] = ()
    window_base: bool = False
    square: bool = False
    head: bool = False
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
    layered: bool = False
    tempered: bool = False
    short_conv: bool = False
    norm: str = "rms_norm_eps"
    read: tuple[str, ...] = ()
    next_token: bool = False

    @property
    def imported(self) -> bool:
        """Whether a file can be loaded as a language model."""
        return bool(self.arch) and self.text_alone and not (self.layered or self.tempered or self.short_conv)


@dataclass(frozen=True)
class Tower:
    """A vision tower and its projector as llama.cpp's graph reads them (tools/mtmd), with exactly these tensors.

    Args:
        projector: llama.cpp's name.
        model_types: model_type values of the vision config; checkpoints keep the names of older transformers.
        activations: the tower's MLP activation, by transformers' name → the flag in the file, or "".
        outside: tensors outside of the layers.
        biased, plain: parts of a layer with a bias, and without.
        optional: tensors, and parts of a layer with their suffix, that only some models have.
        unused: regular expression for checkpoint tensors that do not affect the language model.
        names: checkpoint names that the gguf library does not map, or maps for another family → names in the file;
            "{bid}" in both is a layer.
        permuted: rows of q and k in the file alternate between the two halves that RoPE rotates together.
        line_break: token of the language model after each row of patches, whose embedding the file holds; "": none.
        layers, heads: the vision config's keys.
        epsilon: epsilon of the norms, if the model's code fixes it; None: the config has it.
        norm: the vision config's key for it.
        activation: the vision config's key for the MLP's activation.
        image_size: image side that llama.cpp reserves memory for, if the model takes any size; None: the config's.
        projected: the vision config's key for the output width; "": the language model's hidden size.
        required: config key → the values that the graph supports.
        keys: the file's key → the config's, for whole numbers; a ratio below one is inverted.
        processor_keys: the file's key → the image processor's, for whole numbers that it may have.
        unwindowed: the vision config's key for the layers without windowed attention, every n-th; "": all layers.
        pooled: the config's key for the number of tokens that an image is pooled to; "": no pooling.
        feature_layers: the config's key for the layers whose outputs are the features; "": the last layer.
        deepstack: the vision config's key for the layers whose outputs are added in the language model's first layers;
            "": there are none.
        positions: the vision config's key for the number of learned positions, of which llama.cpp derives the image
            side; "": `image_size`.
        image_tokens: fewest and most tokens to which llama.cpp scales an image, whatever the processor's limits on
            pixels are; (0, 0): the processor has none.
        limited_frames: whether these limits count the pixels of all frames of a patch.
        causal_widths: hidden sizes of language models that read images causally in the graph, which lets the others'
            image tokens attend in both directions; empty: the config has no such choice.
        notice: note for users of llama.cpp.
    """

    projector: str
    model_types: tuple[str, ...]
    activations: Mapping[str, str]
    outside: frozenset[str]
    biased: tuple[str, ...]
    plain: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    unused: str = r"$^"
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    line_break: str = ""
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    epsilon: float | None = None
    norm: str = "layer_norm_eps"
    activation: str = "hidden_act"
    image_size: int | None = None
    projected: str = ""
    required: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    processor_keys: Mapping[str, str] = field(default_factory=dict)
    unwindowed: str = ""
    pooled: str = ""
    feature_layers: str = ""
    deepstack: str = ""
    positions: str = ""
    image_tokens: tuple[int, int] = (0, 0)
    limited_frames: bool = False
    causal_widths: tuple[int, ...] = ()
    notice: str = ""


@dataclass(frozen=True, eq=False)
class Family:
    """A row of the table: names and differences of one family.

    Args:
        name: prefix of the class names, as in LlamaDecoderLayer.
        package: folder under `transformers.models`, and the model_type of complete models.
        model_type: model_type of the text part's config; "": `package`.
        module: Python module of the classes; "": transformers' module of `package`.
        patched: whether `halfbyte.patch` binds the fused forwards.
        norms: norms of a layer.
        norm_offset: RMSNorm multiplies by 1 + weight.
        layer_norm: norms subtract the mean (LayerNorm).
        parallel: attention and MLP read the same norm of the residual stream, and both are added to it.
        qk_norm: q and k are normalised before RoPE: per "head", over "all" heads as one vector, or "shared": per head
            by one norm without a weight.
        query_multiplier: the config's key for a factor of q; "": none.
        rope_pairs: values of a head that RoPE rotates together: "halves" (i and i + R/2) or "neighbours", with cos and
            sin for the first half repeated for the second. "repeated": neighbours, cos and sin repeated pairwise.
            "once": halves, cos and sin for the first half only.
        unrotated: location of the flag for layers without RoPE: the module ("use_rope"), a base of 0 in the config
            ("layer_rope_theta"), layers without a window ("window"), or "all" layers.
        scaled_queries: q is multiplied by 1 + β·log(1 + ⌊position / context⌋), as in Llama 4.
        fused: linears that combine several: qkv_proj, gate_up_proj.
        gated_mlp: the MLP is gated; otherwise its activation, which may have weights, has one input.
        residual_dropout: dropout before the residual addition: a module of the "layer", or a number of each "half".
        residual_scale: the config's key for a factor of the outputs of attention and MLP; "": none.
        embedding_scale: the config's key for a factor of the embeddings that their module does not apply; "": none.
        window: location of a layer's sliding window: the "config", or the "module", per layer.
        softcap: attention scores are capped (attn_logit_softcapping).
        sinks: the attention uses learned sinks.
        rope_by_layer: RoPE has parameters per layer type.
        activation: the config's key for the MLP's activation; "": it is SiLU.
        mlp: class name of the MLP, if it does not begin with the family's name.
        bidirectional_images: tokens of one image attend to each other in both directions (token_type_ids).
        shares_keys: an attention layer may reuse an earlier layer's keys and values, or compute both with one linear;
            values are normalised per head without a weight.
        own_layer: transformers' forward of a layer runs around fused submodules, since the layer has more than two
            halves, or a state; `norms` and `mixer` do not describe it.
        gated_attention: the input of o_proj is multiplied by the sigmoid of a gate, which follows the queries of each
            head in q_proj ("q_proj"), or has its own linear ("gate_proj").
        mixer: token mixer of layers without attention.
        experts: mixture in place of the MLP.
        tower: vision tower of models of `package` that take images.
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
    bidirectional_images: bool = False
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
EVERY_LAYER = {"mlp_only_layers": [], "decoder_sparse_step": 1}  # every layer has experts
BLOCK = ("ln1", "ln2", "attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down")
PROJECTOR = ("mm.0.weight", "mm.0.bias", "mm.2.weight", "mm.2.bias")
TANH = {"gelu_pytorch_tanh": "use_gelu", "gelu": "use_gelu"}  # llama.cpp has only the tanh form
TANH_NAMES = ("gelu", "gelu_pytorch_tanh")

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
    unwindowed="fullatt_block_indexes", image_tokens=(8, 4096),
)  # fmt: skip
MERGER = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}  # of Qwen3-VL, and names in the file
QWEN3_VISION = Tower(
    "qwen3vl_merger", ("qwen3_5", "qwen3_5_vision"), TANH,
    frozenset({"v.patch_embd.weight", "v.patch_embd.weight.1", "v.patch_embd.bias", "v.position_embd.weight",
               "v.post_ln.weight", "v.post_ln.bias", *PROJECTOR}),
    ("ln1", "ln2", "attn_qkv", "attn_out", "ffn_up", "ffn_down"),
    names={f"visual.merger.{name}": in_file for name, in_file in MERGER.items()},
    layers="depth", heads="num_heads", epsilon=1e-6, projected="out_hidden_size", positions="num_position_embeddings",
    required={"vision_config.spatial_merge_size": (2,), "vision_config.temporal_patch_size": (2,)},
    image_tokens=(8, 4096),
)  # fmt: skip
SHIFTED = (
    "llama.cpp of 2025 and 2026 shifts the positions of {}'s patches by one{} (its issue 25814); the file is correct"
)
MERGE = "clip.vision.spatial_merge_size"
PIXTRAL = Tower(
    "pixtral", ("pixtral",), {"silu": "use_silu"} | TANH,
    frozenset({"v.patch_embd.weight", "v.pre_ln.weight", "v.token_embd.img_break", "mm.1.weight",
               "mm.2.weight"}),
    (), (*BLOCK, "ffn_gate"),
    names={"multi_modal_projector.linear_1": "mm.1", "multi_modal_projector.linear_2": "mm.2"},
    optional=frozenset({"mm.1.bias", "mm.2.bias"}), permuted=True, line_break="[IMG_BREAK]", epsilon=1e-5,
    required={"projector_hidden_act": TANH_NAMES, "vision_feature_layer": (-1,),
              "vision_config.rope_parameters.rope_theta": (10000,)},
)  # fmt: skip
IDEFICS3 = Tower(
    "idefics3", ("idefics3_vision", "idefics3", "smolvlm_vision", "smolvlm"), TANH,
    frozenset({"v.patch_embd.weight", "v.patch_embd.bias", "v.position_embd.weight", "v.post_ln.weight",
               "v.post_ln.bias", "mm.model.fc.weight"}),
    BLOCK,
    unused=r"\.position_ids$", names={"connector.modality_projection.proj": "mm.model.fc"},
    keys={"clip.vision.projector.scale_factor": "scale_factor"},
    processor_keys={"clip.vision.preproc_image_size": "size.longest_edge"},
)  # fmt: skip
INTERN = "vision_tower.encoder.layer.{bid}."
INTERNVL = Tower(
    "internvl", ("internvl_vision",), TANH,
    frozenset({"v.class_embd", "v.patch_embd.weight", "v.patch_embd.bias", "v.position_embd.weight",
               *(f"mm.model.mlp.{number}{kind}" for number in (0, 1, 3) for kind in (".weight", ".bias"))}),
    ("ln1", "ln2", "attn_out", "ffn_up", "ffn_down"), ("attn_q", "attn_k", "attn_v", "ls1", "ls2"),
    optional=frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"}),
    names={"vision_tower.embeddings.cls_token": "v.class_embd",
           "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
           f"{INTERN}lambda_1": "v.blk.{bid}.ls1.weight", f"{INTERN}lambda_2": "v.blk.{bid}.ls2.weight",
           "multi_modal_projector.layer_norm": "mm.model.mlp.0", "multi_modal_projector.linear_1": "mm.model.mlp.1",
           "multi_modal_projector.linear_2": "mm.model.mlp.3"},
    required={"projector_hidden_act": TANH_NAMES, "vision_feature_layer": (-1,),
              "vision_feature_select_strategy": ("default",), "vision_config.norm_type": ("layer_norm",),
              "vision_config.use_qk_norm": (False,), "vision_config.use_mean_pooling": (True,)},
    keys={"clip.vision.projector.scale_factor": "downsample_ratio"},
    processor_keys={"clip.vision.preproc_min_tiles": "min_patches", "clip.vision.preproc_max_tiles": "max_patches"},
    notice=SHIFTED.format("InternVL", " position"),
)  # fmt: skip
LLAVA = Tower(
    "mlp", ("clip_vision_model",), TANH | {"quick_gelu": ""},
    frozenset({"v.class_embd", "v.patch_embd.weight", "v.position_embd.weight", "v.pre_ln.weight", "v.pre_ln.bias",
               *PROJECTOR}),
    BLOCK,
    unused=r"vision_model\.(post_layernorm|head)\.|\.position_ids$",  # features are taken before this norm
    names={"multi_modal_projector.linear_1": "mm.0", "multi_modal_projector.linear_2": "mm.2"},
    required={"projector_hidden_act": TANH_NAMES, "vision_feature_select_strategy": ("default",)},
    feature_layers="vision_feature_layer",
    notice=SHIFTED.format("LLaVA", " and drops the first"),
)  # fmt: skip
LLAVA_SIGLIP = replace(  # without class token
    LLAVA,
    model_types=("siglip_vision_model",),
    activations=TANH,
    outside=frozenset({"v.patch_embd.weight", "v.patch_embd.bias", "v.position_embd.weight", *PROJECTOR}),
    required={"projector_hidden_act": TANH_NAMES, "vision_feature_select_strategy": ("full",)},
    notice="",
)
GLM4V = Tower(
    "glm4v", ("glm4v_vision", "glm4v", "glm4v_moe_vision", "glm4v_moe"), {"silu": "use_silu"},
    frozenset({"v.patch_embd.weight", "v.patch_embd.weight.1", "v.patch_embd.bias", "v.position_embd.weight",
               "v.norm_embd.weight", "v.post_ln.weight", "mm.patch_merger.weight", "mm.patch_merger.bias",
               "mm.model.fc.weight", "mm.post_norm.weight", "mm.post_norm.bias", "mm.up.weight", "mm.gate.weight",
               "mm.down.weight"}),
    (), ("ln1", "ln2", "attn_qkv", "attn_out", "ffn_gate", "ffn_up", "ffn_down"),
    optional=frozenset({"attn_qkv.bias", "attn_out.bias"}),
    names={"visual.post_conv_layernorm": "v.norm_embd", "visual.downsample": "mm.patch_merger",
           "visual.merger.proj": "mm.model.fc", "visual.merger.post_projection_norm": "mm.post_norm",
           "visual.merger.gate_proj": "mm.gate", "visual.merger.up_proj": "mm.up",
           "visual.merger.down_proj": "mm.down", "visual.post_layernorm": "v.post_ln",
           "visual.embeddings.position_embedding": "v.position_embd"},
    layers="depth", heads="num_heads", norm="rms_norm_eps", projected="out_hidden_size",
    required={"vision_config.temporal_patch_size": (2,), "vision_config.spatial_merge_size": (2,),
              "vision_config.rope_parameters.rope_theta": (10000,)},
    image_tokens=(8, 4096), limited_frames=True,
)  # fmt: skip
LFM2_VISION = Tower(
    "lfm2", ("siglip2_vision_model",), TANH,
    frozenset({"v.patch_embd.weight", "v.patch_embd.bias", "v.position_embd.weight", "v.post_ln.weight",
               "v.post_ln.bias", "mm.1.weight", "mm.1.bias", "mm.2.weight", "mm.2.bias"}),
    BLOCK,
    optional=frozenset({"mm.input_norm.weight", "mm.input_norm.bias"}), unused=r"vision_model\.head\.",
    names={"multi_modal_projector.layer_norm": "mm.input_norm", "multi_modal_projector.linear_1": "mm.1",
           "multi_modal_projector.linear_2": "mm.2"},
    image_size=256, required={"projector_hidden_act": TANH_NAMES},
    keys={"clip.vision.projector.scale_factor": "downsample_factor"},
)  # fmt: skip
CLIPS = (".input_min", ".input_max", ".output_min", ".output_max")  # bounds of a Gemma 4 linear's inputs and outputs
GEMMA4_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GEMMA4_NORMS = {
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "ln1",
    "pre_feedforward_layernorm": "ln2", "post_attention_layernorm": "attn_post_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}  # fmt: skip
GEMMA4_LINEARS = {f"{part}.linear": name for part, name in GEMMA4_PARTS.items()}
GEMMA4_BOUNDS = {f"{part}{end}": f"{name}{end}" for part, name in GEMMA4_PARTS.items() for end in CLIPS}
GEMMA4_VISION = Tower(
    "gemma4v", ("gemma4_vision",), {"gelu_pytorch_tanh": "use_gelu"},
    frozenset({"v.patch_embd.weight", "v.position_embd.weight", "mm.input_projection.weight"}),
    (), (*GEMMA4_PARTS.values(), *GEMMA4_NORMS.values()),
    optional=frozenset({"v.std_bias", "v.std_scale", *GEMMA4_BOUNDS.values()}),
    unused=r"^(model\.)?(audio_tower|embed_audio)\.",
    names={"vision_tower.patch_embedder.input_proj": "v.patch_embd", "vision_tower.std_bias": "v.std_bias",
           "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
           "vision_tower.std_scale": "v.std_scale", "embed_vision.embedding_projection": "mm.input_projection",
           **{f"vision_tower.encoder.layers.{{bid}}.{part}": f"v.blk.{{bid}}.{name}"
              for part, name in (GEMMA4_LINEARS | GEMMA4_NORMS | GEMMA4_BOUNDS).items()}},
    activation="hidden_activation", norm="rms_norm_eps", image_size=224,
    required={"vision_config.rope_parameters.rope_theta": (100,), "vision_config.attention_bias": (False,)},
    keys={"clip.vision.projector.scale_factor": "vision_config.pooling_kernel_size"},
    causal_widths=(1536, 2560),
    notice="the file has no audio encoder: Gemma 4 reads text and images in llama.cpp",
)  # fmt: skip
# model_type → vision towers of models whose text part may be of any family.
TOWERS = {
    "llava": (LLAVA, LLAVA_SIGLIP, PIXTRAL),
    "mistral3": (replace(
        PIXTRAL,
        outside=PIXTRAL.outside | {"mm.input_norm.weight", "mm.patch_merger.weight"},
        names={**PIXTRAL.names, "multi_modal_projector.norm": "mm.input_norm",
               "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger"},
        required={**PIXTRAL.required, "text_config.rms_norm_eps": (1e-5,)},  # of the projector's norm
        keys={MERGE: "spatial_merge_size"},
    ),),
    "idefics3": (IDEFICS3,),
    "smolvlm": (IDEFICS3,),
    "internvl": (INTERNVL,),
    "glm46v": (GLM4V,),
    "lfm2_vl": (LFM2_VISION,),
}  # fmt: skip

DELTA_NET_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
}  # fmt: skip
DELTA_NET = Mixer("GatedDeltaNet", "linear_attn", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "out_proj",
                  "norm")  # fmt: skip
GLM_MOE = Gguf(
    "glm4moe", bias=True, bias_keys={"attention_bias": "attn_q"}, partial_rope=True,
    dense_first="first_k_dense_replace", fixed={"norm_topk_prob": True, "n_group": 1, "topk_group": 1},
    constants={"expert_gating_func": 2, "expert_weights_norm": True}, keys={
        "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor", "leading_dense_block_count": "first_k_dense_replace"},
)  # fmt: skip
FACTORS = ("llama3", "longrope")
# A GGUF file is loaded as the first row with its architecture, counting rows with experts only if the file has experts.
FAMILIES = [
    Family("Llama", "llama", gguf=Gguf(
        "llama", permute=True, bias=True, rope_factors=FACTORS,
        bias_keys={"attention_bias": "attn_q", "mlp_bias": "ffn_down"})),
    Family("Mistral", "mistral", window="config", gguf=Gguf("llama", permute=True, rope_factors=FACTORS)),
    Family("Mixtral", "mixtral", window="config",
           experts=Experts("num_local_experts", "block_sparse_moe", gate="w1", up="w3", down="w2"),
           gguf=Gguf("llama", permute=True, rope_factors=FACTORS, keys={
               "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"})),
    Family("Qwen2", "qwen2", window="module", gguf=Gguf("qwen2", bias=True, square=True)),
    Family("Qwen2_5_VL", "qwen2_5_vl", "qwen2_5_vl_text", window="module", mlp="Qwen2MLP", tower=QWEN_VISION,
           gguf=Gguf("qwen2vl", text_alone=False, bias=True, square=True)),
    Family("Qwen3", "qwen3", window="module", qk_norm="head", gguf=Gguf("qwen3")),
    Family("Qwen3VL", "qwen3_vl", "qwen3_vl_text", qk_norm="head",
           tower=replace(QWEN3_VISION, model_types=("qwen3_vl", "qwen3_vl_vision"),
                         deepstack="deepstack_visual_indexes"),
           gguf=Gguf("qwen3vl", text_alone=False)),
    Family("Qwen2Moe", "qwen2_moe", window="module", experts=Experts(), gguf=Gguf(
        "qwen2moe", bias=True, square=True, head=True, fixed={"norm_topk_prob": False, **EVERY_LAYER},
        keys=SHARED_MOE)),
    Family("Qwen3Moe", "qwen3_moe", window="module", qk_norm="head", experts=Experts(),
           gguf=Gguf("qwen3moe", keys=MOE, fixed={"norm_topk_prob": True, **EVERY_LAYER})),
    Family("Gemma", "gemma", norm_offset=True, gguf=Gguf("gemma", activations=GELU)),
    Family("Gemma2", "gemma2", norm_offset=True, norms=SANDWICH, window="module", softcap=True,
           activation="hidden_activation", gguf=Gguf(
               "gemma2", activations=GELU[:2], window_every=2, wide_layers=46, keys=WINDOW | CAPS)),
    Family("Gemma3", "gemma3", "gemma3_text", norm_offset=True, norms=SANDWICH, window="module", qk_norm="head",
           rope_by_layer=True, activation="hidden_activation", bidirectional_images=True, tower=SIGLIP, gguf=Gguf(
               "gemma3", activations=GELU[:2], window_every=6, window_base=True, wide_layers=62, keys=WINDOW | CAPS,
               optional=tuple(CAPS))),
    Family("Gemma3n", "gemma3n", "gemma3n_text", window="module", qk_norm="head", rope_by_layer=True,
           activation="hidden_activation", shares_keys=True, own_layer=True),
    Family("Gemma4", "gemma4", "gemma4_text", window="module", qk_norm="head", rope_by_layer=True,
           activation="hidden_activation", shares_keys=True, own_layer=True, tower=GEMMA4_VISION, gguf=Gguf(
               "gemma4", activations=GELU[:2], window_base=True, partial_rope=True, rope_factors=("proportional",),
               layered=True, optional=("final_logit_softcapping", "embedding_length_per_layer_input"),
               fixed={"enable_moe_block": False}, keys=WINDOW | {
                   "final_logit_softcapping": "final_logit_softcapping",
                   "attention.shared_kv_layers": "num_kv_shared_layers",
                   "embedding_length_per_layer_input": "hidden_size_per_layer_input"},
               read=("per_layer_config", "use_bidirectional_attention", "attention_k_eq_v", "use_double_wide_mlp",
                     "vocab_size_per_layer_input", "moe_intermediate_size", "top_k_experts"))),
    Family("Phi3", "phi3", fused=("qkv_proj", "gate_up_proj"), residual_dropout="layer", window="config",
           gguf=Gguf("phi3", keys=WINDOW, optional=tuple(WINDOW), partial_rope=True, rope_factors=("longrope",),
                     original_context=True, square=True)),
    Family("Ministral", "ministral", window="module"),
    Family("Ministral3", "ministral3", window="config", scaled_queries=True,
           gguf=Gguf("mistral3", permute=True, tempered=True)),
    Family("SmolLM3", "smollm3", window="module", unrotated="use_rope", gguf=Gguf(
        "smollm3", permute=True, unrotated_every=4, fixed={"use_sliding_window": False})),
    Family("Olmo2", "olmo2", norms=POST_NORMS, qk_norm="all", gguf=Gguf("olmo2", square=True, head=True)),
    Family("Olmo3", "olmo3", norms=POST_NORMS, qk_norm="all", window="module", rope_by_layer=True,
           gguf=Gguf("olmo2", window_every=4, keys=WINDOW, square=True, head=True)),
    Family("SeedOss", "seed_oss", residual_dropout="half",
           gguf=Gguf("seed_oss", bias=True, bias_keys={"attention_bias": "attn_q"},
                     fixed={"attention_out_bias": False, "mlp_bias": False})),
    Family("Exaone4", "exaone4", norms=POST_NORMS, qk_norm="head", window="module", unrotated="window",
           gguf=Gguf("exaone4", window_every=1, square=True, rope_factors=FACTORS[:1],
                     fixed={"sliding_window": None})),  # no export of the 32B's windows
    Family("Cohere2", "cohere2", layer_norm=True, norms=Norms(before_mlp="input_layernorm"), parallel=True,
           window="module", rope_pairs="repeated", unrotated="window",
           gguf=Gguf("cohere2", window_every=4, square=True, keys=WINDOW | {"logit_scale": "logit_scale"})),
    Family("Granite", "granite", residual_scale="residual_multiplier", embedding_scale="embedding_multiplier",
           gguf=Gguf("granite", permute=True, rope_factors=FACTORS, keys=SCALES)),
    Family("Ernie4_5", "ernie4_5", rope_pairs="neighbours", gguf=Gguf("ernie4_5")),
    Family("Glm", "glm", fused=("gate_up_proj",), rope_pairs="neighbours"),
    Family("Glm4", "glm4", fused=("gate_up_proj",), rope_pairs="neighbours",
           norms=Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
           gguf=Gguf("glm4", bias=True, bias_keys={"attention_bias": "attn_q"}, partial_rope=True)),
    Family("Glm4v", "glm4v", "glm4v_text", patched=False, fused=("gate_up_proj",), rope_pairs="repeated", tower=GLM4V,
           norms=Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
           gguf=Gguf("glm4", text_alone=False, bias=True, halves=True, partial_rope=True, sections=(8, 12, 12))),
    Family("Apertus", "apertus", norms=Norms("attention_layernorm", before_mlp="feedforward_layernorm"),
           qk_norm="head", gated_mlp=False),
    Family("Arcee", "arcee", gated_mlp=False, gguf=Gguf("arcee", permute=True, activations=("relu2",))),
    Family("MuseGlimmerText", "muse_glimmer", "muse_glimmer_text", norms=SANDWICH, norm_offset=True, window="module",
           qk_norm="shared", query_multiplier="qk_scale_factor", unrotated="layer_rope_theta",
           gated_attention="gate_proj", activation="hidden_activation", gguf=Gguf(text_alone=False)),
    Family("Glm4Moe", "glm4_moe", qk_norm="head", experts=Experts("n_routed_experts"), gguf=replace(
        GLM_MOE, next_token=True, bias_keys={"attention_bias": "attn_q", "use_qk_norm": "attn_q_norm.weight"})),
    Family("Glm4vMoe", "glm4v_moe", "glm4v_moe_text", patched=False, experts=Experts("n_routed_experts"), tower=GLM4V,
           gguf=replace(GLM_MOE, text_alone=False, sections=(8, 12, 12))),
    Family("GraniteMoe", "granitemoe", residual_scale="residual_multiplier", embedding_scale="embedding_multiplier",
           experts=Experts("num_local_experts", "block_sparse_moe")),
    Family("Olmoe", "olmoe", qk_norm="all", window="config", experts=Experts(), gguf=Gguf(
        "olmoe", grouped=False, square=True, head=True,
        keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        fixed={"norm_topk_prob": False, "clip_qkv": None})),
    Family("Phimoe", "phimoe", layer_norm=True, experts=Experts("num_local_experts")),
    Family("Ernie4_5_Moe", "ernie4_5_moe", rope_pairs="neighbours", experts=Experts("moe_num_experts")),
    Family("MiniMaxM2", "minimax_m2", qk_norm="all",
           experts=Experts("num_local_experts", "block_sparse_moe", gate="w1", up="w3", down="w2"), gguf=Gguf(
               "minimax-m2", partial_rope=True, head=True, constants={"expert_gating_func": 2}, keys={
                   "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
                   "expert_feed_forward_length": "intermediate_size"})),
    Family("GptOss", "gpt_oss", window="module", sinks=True, rope_pairs="once",
           experts=Experts("num_local_experts", mixture="GptOssMLP", interleaved=True),
           gguf=Gguf("gpt-oss", bias=True, head=True, window_every=2, yarn={"truncate": False},
                     fixed={"attention_bias": True, "swiglu_limit": 7.0}, keys=WINDOW | {
               "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
               "expert_feed_forward_length": "intermediate_size"})),
    Family("Qwen3_5", "qwen3_5", "qwen3_5_text", norm_offset=True, qk_norm="head", gated_attention="q_proj",
           mixer=DELTA_NET, tower=QWEN3_VISION,
           gguf=Gguf("qwen35", keys=DELTA_NET_KEYS, partial_rope=True, attention_every=4, tiled_heads=True,
                     sections=(11, 11, 10), next_token=True)),
    Family("Qwen3_5Moe", "qwen3_5_moe", "qwen3_5_moe_text", norm_offset=True, qk_norm="head", gated_attention="q_proj",
           mixer=DELTA_NET, experts=Experts(),
           tower=replace(QWEN3_VISION, model_types=("qwen3_5_moe", "qwen3_5_moe_vision")), gguf=Gguf(
               "qwen35moe", partial_rope=True, attention_every=4, tiled_heads=True, sections=(11, 11, 10),
               next_token=True, without=("feed_forward_length",), keys=DELTA_NET_KEYS | SHARED_MOE)),
    Family("Qwen3Next", "qwen3_next", norm_offset=True, qk_norm="head", gated_attention="q_proj",
           mixer=replace(DELTA_NET, inputs=("in_proj_qkvz", "in_proj_ba")), experts=Experts(), gguf=Gguf(
               "qwen3next", partial_rope=True, attention_every=4, keys=DELTA_NET_KEYS | SHARED_MOE,
               fixed={"norm_topk_prob": True, **EVERY_LAYER})),
    Family("Lfm2", "lfm2", patched=False, qk_norm="head", own_layer=True, activation="", gguf=Gguf(
        "lfm2", short_conv=True, norm="norm_eps", keys={"shortconv.l_cache": "conv_L_cache"},
        fixed={"conv_bias": False}, read=("norm_eps", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier",
                                          "block_multiple_of", "full_attn_idxs"))),
    Family("Bamba", "bamba", own_layer=True),
    Family("GraniteMoeHybrid", "granitemoehybrid", own_layer=True, experts=Experts("num_local_experts"),
           residual_scale="residual_multiplier", embedding_scale="embedding_multiplier"),
    Family("Jamba", "jamba", own_layer=True, unrotated="all", experts=Experts()),
    Family("NemotronH", "nemotron_h", own_layer=True, unrotated="all", gated_mlp=False, activation="mlp_hidden_act",
           experts=Experts("n_routed_experts")),
]  # fmt: skip

# model_type of a language model → why llama.cpp cannot run it.
NO_GRAPH = {
    "mllama_text_model": "Llama 3.2 Vision reads images by cross-attention, for which llama.cpp has no graph",
}


def register(family: Family) -> None:
    """Add a family to the table."""
    FAMILIES.append(family)


def family_of(cls: type) -> tuple[Family, str] | None:
    """Return a module class's family and the rest of its name: LlamaRMSNorm → (Llama's row, "RMSNorm").

    Only classes of the family's own module count, since a derived class may compute something else. FSDP2's wrapper
    classes are skipped, and so is "Text" after the family's name.
    """
    cls = next(base for base in cls.__mro__ if not base.__module__.startswith("torch.distributed.fsdp"))
    for family in FAMILIES:
        if family.patched and cls.__module__ == family.module:
            if family.experts is not None and cls.__name__ == family.experts.mixture:
                return family, "Mixture"
            role = cls.__name__.removeprefix(family.name).removeprefix("Text")
            return family, "MLP" if cls.__name__ == family.mlp else role
    return None


def family_of_config(text_config: Any) -> Family | None:
    """Return the family of a transformers config (of the text part, for models that take images), or None."""
    return next((family for family in FAMILIES if family.model_type == text_config.model_type), None)


def towers() -> dict[str, tuple[Tower, ...]]:
    """Return model_type of complete models → their kinds of vision tower."""
    return {family.package: (family.tower,) for family in FAMILIES if family.tower} | TOWERS


def tower_of(config: Any) -> Tower | None:
    """Return the vision tower of a complete model's config; None if it has none, or an unknown one."""
    rows = towers().get(config.model_type, ())
    return next((row for row in rows if config.vision_config.model_type in row.model_types), next(iter(rows), None))


def config_scale(key: str, config: Any) -> float:
    """Return the factor that a row's key (`residual_scale`, ...) names in the config; 1 if the key is ""."""
    return float(getattr(config, key)) if key else 1.0
