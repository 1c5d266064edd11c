"""What tells the model families apart that `halfbyte.patch` knows: one row each, no code.

They share one block: norm, attention, norm, gated MLP, with the residual stream around both halves. A row says where a
family departs from Llama. The names of submodules are Hugging Face's. Of models that also take images, the row is
that of their text part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..ops.glu import Activation


@dataclass(frozen=True)
class Family:
    """One row.

    Args:
        name: prefix of the class names, as in LlamaDecoderLayer.
        package: folder under `transformers.models`.
        norm_offset: RMSNorm multiplies by 1 + weight.
        sandwich: norms follow attention and MLP too, before their results join the residual stream.
        qk_norm: q and k are normalised over each head before RoPE.
        fused: q, k and v are one linear (qkv_proj), and gate and up another (gate_up_proj).
        residual_dropout: dropout on what joins the residual stream.
        window: where an attention layer's sliding window is written: in the config, or in the module, by layer.
        rope_by_layer: RoPE's frequencies depend on the layer's type (layer_types).
        softcap: attention scores are capped (attn_logit_softcapping).
        activation: the config's key for the MLP's activation.
        mlp: the MLP's class, where its name does not begin with the family's.
        images_see_themselves: tokens of one image attend to each other both ways (token_type_ids), not causally.
    """

    name: str
    package: str
    norm_offset: bool = False
    sandwich: bool = False
    qk_norm: bool = False
    fused: bool = False
    residual_dropout: bool = False
    window: Literal["config", "module"] | None = None
    rope_by_layer: bool = False
    softcap: bool = False
    activation: str = "hidden_act"
    mlp: str | None = None
    images_see_themselves: bool = False


FAMILIES = (
    Family("Llama", "llama"),
    Family("Mistral", "mistral", window="config"),
    Family("Mixtral", "mixtral", window="config"),
    Family("Qwen2", "qwen2", window="module"),
    Family("Qwen2_5_VL", "qwen2_5_vl", window="module", mlp="Qwen2MLP"),
    Family("Qwen3", "qwen3", window="module", qk_norm=True),
    Family("Qwen3Moe", "qwen3_moe", window="module", qk_norm=True),
    Family("Gemma", "gemma", norm_offset=True),
    Family("Gemma2", "gemma2", norm_offset=True, sandwich=True, window="module", softcap=True,
           activation="hidden_activation"),
    Family("Gemma3", "gemma3", norm_offset=True, sandwich=True, window="module", rope_by_layer=True,
           qk_norm=True, activation="hidden_activation", images_see_themselves=True),
    Family("Phi3", "phi3", fused=True, residual_dropout=True, window="config"),
)  # fmt: skip

# transformers' names of activations, and those of `halfbyte.ops.glu`.
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def family_of(cls: type) -> tuple[Family, str] | None:
    """The family a module's class belongs to, and the rest of its name: LlamaRMSNorm → (Llama's row, "RMSNorm").

    Only transformers' own classes count: one derived from them may compute something else.
    """
    for family in FAMILIES:
        if cls.__module__ == f"transformers.models.{family.package}.modeling_{family.package}":
            return family, "MLP" if cls.__name__ == family.mlp else cls.__name__.removeprefix(family.name)
    return None
