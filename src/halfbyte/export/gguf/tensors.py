"""Which tensors a GGUF file has, and what each is made of: names, orders of rows, experts stacked, norms shifted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gguf import MODEL_ARCH, MODEL_TENSOR, MODEL_TENSORS, TENSOR_NAMES, TensorNameMap, get_tensor_name_map
from torch import Tensor

from halfbyte.errors import CheckpointError, ModelError

from .families import Family
from .metadata import experts_of, rope_tensors

EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(\w+)\.weight")
FUSED_EXPERTS = re.compile(r"(.*\.)experts\.(gate_up_proj|down_proj)")
EXPERT_PARTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}
BESIDE_TEXT = re.compile(r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\.")
DERIVED = ("rotary_emb.inv_freq", "masked_bias")  # buffers in old checkpoints
OPTIONAL = {
    MODEL_TENSOR.OUTPUT, MODEL_TENSOR.ROPE_FREQS, MODEL_TENSOR.ROPE_FACTORS_LONG, MODEL_TENSOR.ROPE_FACTORS_SHORT,
    MODEL_TENSOR.ATTN_ROT_EMBD,
}  # fmt: skip
SPLIT_QKV = {MODEL_TENSOR.ATTN_Q, MODEL_TENSOR.ATTN_K, MODEL_TENSOR.ATTN_V}
DENSE = {MODEL_TENSOR.FFN_GATE, MODEL_TENSOR.FFN_UP, MODEL_TENSOR.FFN_DOWN}
SPARSE = {
    MODEL_TENSOR.FFN_GATE_INP, MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP, MODEL_TENSOR.FFN_DOWN_EXP,
}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """A tensor of the model: its shape, and a function that reads it, on any device."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass
class Planned:
    """A tensor of the file. `parts` are read one after another and stacked: [columns] or [rows, columns] as one, or one
    [rows, columns] for each expert."""

    name: str
    shape: tuple[int, ...]
    parts: list[Callable[[], Tensor]] = field(default_factory=list)

    @property
    def is_matrix(self) -> bool:
        """Whether it is quantized: everything but norms, biases, frequencies and routers."""
        return len(self.shape) > 1 and "ffn_gate_inp" not in self.name and self.name.endswith(".weight")

    def pieces(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield part()


def plan(weights: Mapping[str, Weight], config: Any, family: Family) -> list[Planned]:
    """The tensors of the file, in the order of the weights.

    Args:
        weights: of the checkpoint, by their names there.
        config: (text) config of transformers.

    Raises:
        ModelError: a weight that the architecture has no place for.
        CheckpointError: one that it needs is missing.
    """
    names = get_tensor_name_map(family.arch, config.num_hidden_layers)
    planned = {name: Planned(name, tuple(made.shape), [made.clone]) for name, made in rope_tensors(config).items()}
    for key, weight in weights.items():
        if BESIDE_TEXT.search(key) or key.endswith(DERIVED):
            continue
        if key.endswith("lm_head.weight") and config.tie_word_embeddings:
            continue  # llama.cpp takes the embedding
        for name, shape, part in _placed(key, weight, names, config, family):
            entry = planned.setdefault(name, Planned(name, shape))
            entry.parts.append(part)
    for entry in planned.values():
        if len(entry.parts) > 1:
            entry.shape = (len(entry.parts), *entry.shape)
    _check_complete(planned, config, family)
    return list(planned.values())


def gguf_name(key: str, names: TensorNameMap, family: Family) -> str:
    """The name in the file of a checkpoint's tensor.

    Raises:
        ModelError: there is none.
    """
    plain = key.replace("language_model.model.", "model.").replace("model.language_model.", "model.")
    plain = plain.removeprefix("language_model.")
    found = names.get_type_and_name(plain, try_suffixes=(".weight", ".bias"))
    arch = family.arch.name.lower()
    if found is None:
        raise ModelError(f"{key} has no place in llama.cpp's {arch} architecture", "serve the model with transformers")
    _, name = found
    if name.endswith(".bias") and not family.bias:
        raise ModelError(f"{key}: llama.cpp's {arch} architecture has no biases", "serve the model with transformers")
    return str(name)


Placed = tuple[str, tuple[int, ...], Callable[[], Tensor]]


def _placed(key: str, weight: Weight, names: TensorNameMap, config: Any, family: Family) -> Iterator[Placed]:
    """What of the file a weight of the checkpoint becomes: (name, shape of the part, how to make it)."""
    if match := EXPERT.fullmatch(key):
        layer = layer_of(key)
        yield f"blk.{layer}.ffn_{EXPERT_PARTS[match[3]]}_exps.weight", weight.shape, weight.read
    elif match := FUSED_EXPERTS.fullmatch(key):
        yield from _fused_experts(layer_of(key), match[2], weight)
    else:
        name = gguf_name(key, names, family)
        shape = weight.shape[-1:] if name.endswith("ffn_gate_inp_shexp.weight") else weight.shape
        yield name, shape, lambda: transformed(name, weight.read(), config, family).view(shape)


def layer_of(key: str) -> int:
    """The number of the decoder layer that a tensor of the checkpoint is in."""
    return int(re.findall(r"\.layers\.(\d+)\.", key)[0])


def _fused_experts(layer: int, kind: str, weight: Weight) -> Iterator[Placed]:
    """Experts that the checkpoint has stacked: [experts, rows, columns], gate above up."""
    experts, rows, columns = weight.shape
    if kind == "down_proj":
        for expert in range(experts):
            yield f"blk.{layer}.ffn_down_exps.weight", (rows, columns), partial(_expert, weight, expert, slice(None))
        return
    half = rows // 2
    for half_name, start in (("gate", 0), ("up", half)):
        for expert in range(experts):
            name = f"blk.{layer}.ffn_{half_name}_exps.weight"
            yield name, (half, columns), partial(_expert, weight, expert, slice(start, start + half))


def _expert(weight: Weight, expert: int, rows: slice) -> Tensor:
    return weight.read()[expert, rows]


def transformed(name: str, value: Tensor, config: Any, family: Family) -> Tensor:
    """A checkpoint's values as the architecture wants them."""
    if family.permute and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return interleaved(value, heads)
    if family.norm_offset and name.endswith("norm.weight"):
        return value.float() + 1
    return value


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads · size, …] of each head from (all first halves, all second halves) of the pairs that RoPE turns, as
    transformers has them, to pair after pair."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _check_complete(planned: Mapping[str, Planned], config: Any, family: Family) -> None:
    experts = experts_of(config)
    needed = set(MODEL_TENSORS[family.arch]) - OPTIONAL - (DENSE if experts else SPARSE)
    if family.arch == MODEL_ARCH.PHI3:
        needed -= SPLIT_QKV
    needed -= {MODEL_TENSOR.FFN_GATE} if family.arch == MODEL_ARCH.PHI3 else set()
    for tensor in sorted(needed, key=lambda tensor: TENSOR_NAMES[tensor]):
        template = TENSOR_NAMES[tensor]
        for layer in range(config.num_hidden_layers if "{bid}" in template else 1):
            name = template.format(bid=layer) + ".weight"
            if name not in planned:
                raise CheckpointError(
                    f"the checkpoint lacks the tensor that becomes {name} in the file", "re-download the checkpoint"
                )
            stacked = planned[name].parts
            if name.endswith("_exps.weight") and len(stacked) != experts:
                raise CheckpointError(f"{name}: {len(stacked)} experts in the checkpoint, {experts} in config.json")
    if not config.tie_word_embeddings and "output.weight" not in planned and family.arch in HEADED:
        raise CheckpointError("the checkpoint lacks lm_head.weight", "re-download the checkpoint")


HEADED = {arch for arch, tensors in MODEL_TENSORS.items() if MODEL_TENSOR.OUTPUT in tensors}
