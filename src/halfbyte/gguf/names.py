"""Where a weight of a checkpoint lies in a GGUF file: its name there, and the order of its rows, both ways.

The gguf library knows the names of most tensors; experts, and models with a vision tower, have rules of their own.
"""

from __future__ import annotations

import re
from typing import Any

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from torch import Tensor

from ..errors import ModelError
from ..families import Experts, Family

EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(\w+)\.weight")
STACKED_EXPERTS = re.compile(r"(.*\.)experts\.(gate_up_proj|down_proj)")
BESIDE_TEXT = re.compile(r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\.")
KINDS = (".weight", ".bias")


def architecture(family: Family) -> MODEL_ARCH:
    """The gguf library's number of a family's graph."""
    return next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == family.gguf.arch)


def names_of(family: Family, layers: int) -> TensorNameMap:
    """The gguf library's names of the tensors of a model with so many layers."""
    return get_tensor_name_map(architecture(family), layers)


def gguf_name(key: str, names: TensorNameMap, family: Family) -> str:
    """The name in the file of a checkpoint's tensor, an expert's apart.

    Raises:
        ModelError: there is none.
    """
    plain = key.replace("language_model.model.", "model.").replace("model.language_model.", "model.")
    name = names.get_name(plain.removeprefix("language_model."), try_suffixes=KINDS)
    arch, fix = family.gguf.arch, "use this model with transformers"
    if name is None:
        raise ModelError(f"{key} has no place in llama.cpp's {arch} architecture", fix)
    if name.endswith(".bias") and not family.gguf.bias:
        raise ModelError(f"{key}: llama.cpp's {arch} architecture has no biases", fix)
    return name


def layer_of(key: str) -> int:
    """The number of the decoder layer that a tensor of the checkpoint is in."""
    return int(re.findall(r"\.layers\.(\d+)\.", key)[0])


def experts_name(layer: int | str, part: str) -> str:
    """The name of all experts' gate, up or down projections in the file."""
    return f"blk.{layer}.ffn_{part}_exps.weight"


def parts_of(experts: Experts) -> dict[str, str]:
    """A checkpoint's name of an expert's linear → what the file calls it."""
    return {experts.gate: "gate", experts.up: "up", experts.down: "down"}


def shape_in_file(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor there: a gate of one row is a vector."""
    return shape[-1:] if name.endswith("ffn_gate_inp_shexp.weight") else shape


def holds_sum(name: str, family: Family) -> bool:
    """Whether the file holds 1 + weight: of norms that multiply by that."""
    return family.norm_offset and name.endswith("norm.weight")


def turned_heads(name: str, config: Any, family: Family) -> int:
    """How many heads a tensor's rows are of, where the file has them in another order; else 0."""
    if not family.gguf.permute or not (".attn_q." in name or ".attn_k." in name):
        return 0
    return int(config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads)


def as_in_file(name: str, value: Tensor, config: Any, family: Family) -> Tensor:
    """A checkpoint's values as the architecture wants them."""
    heads = turned_heads(name, config, family)
    if heads:
        return interleaved(value, heads)
    return value.float() + 1 if holds_sum(name, family) else value


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads · size, …] of each head from (all first halves, all second halves) of the pairs that RoPE turns, as
    transformers has them, to pair after pair."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def halved(rows: Tensor, heads: int) -> Tensor:
    """Undoes `interleaved`."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
