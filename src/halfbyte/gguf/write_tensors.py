"""Which tensors a GGUF file has, and what each is made of: names, orders of rows, experts stacked, norms shifted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gguf import MODEL_TENSOR, MODEL_TENSORS, TENSOR_NAMES, TensorNameMap
from torch import Tensor

from ..errors import CheckpointError
from ..families import Family
from .graph import experts_of
from .hyperparameters import rope_tensors
from .names import (
    BESIDE_TEXT,
    EXPERT,
    STACKED_EXPERTS,
    architecture,
    as_in_file,
    experts_name,
    gguf_name,
    layer_of,
    names_of,
    parts_of,
    shape_in_file,
)

DERIVED = ("rotary_emb.inv_freq", "masked_bias")  # buffers in old checkpoints
OPTIONAL = {
    MODEL_TENSOR.OUTPUT, MODEL_TENSOR.ROPE_FREQS, MODEL_TENSOR.ROPE_FACTORS_LONG, MODEL_TENSOR.ROPE_FACTORS_SHORT,
    MODEL_TENSOR.ATTN_ROT_EMBD,
}  # fmt: skip
NOT_FUSED = {MODEL_TENSOR.ATTN_Q, MODEL_TENSOR.ATTN_K, MODEL_TENSOR.ATTN_V, MODEL_TENSOR.FFN_GATE}
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
    names = names_of(family, config.num_hidden_layers)
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


Placed = tuple[str, tuple[int, ...], Callable[[], Tensor]]


def _placed(key: str, weight: Weight, names: TensorNameMap, config: Any, family: Family) -> Iterator[Placed]:
    """What of the file a weight of the checkpoint becomes: (name, shape of the part, how to make it)."""
    parts = parts_of(family.experts) if family.experts else {}
    if (match := EXPERT.fullmatch(key)) and match[3] in parts:
        yield experts_name(layer_of(key), parts[match[3]]), weight.shape, weight.read
    elif parts and (match := STACKED_EXPERTS.fullmatch(key)):
        yield from _stacked_experts(layer_of(key), match[2], weight)
    else:
        name = gguf_name(key, names, family)
        shape = shape_in_file(name, weight.shape)
        yield name, shape, lambda: as_in_file(name, weight.read(), config, family).view(shape)


def _stacked_experts(layer: int, kind: str, weight: Weight) -> Iterator[Placed]:
    """Experts that the checkpoint has stacked: [experts, rows, columns], gate above up."""
    experts, rows, columns = weight.shape
    parts = ("down",) if kind == "down_proj" else ("gate", "up")
    rows //= len(parts)
    for index, part in enumerate(parts):
        own = slice(index * rows, (index + 1) * rows)
        for expert in range(experts):
            yield experts_name(layer, part), (rows, columns), partial(_expert, weight, expert, own)


def _expert(weight: Weight, expert: int, rows: slice) -> Tensor:
    return weight.read()[expert, rows]


def _check_complete(planned: Mapping[str, Planned], config: Any, family: Family) -> None:
    experts, tensors = experts_of(config, family), set(MODEL_TENSORS[architecture(family)])
    needed = tensors - OPTIONAL - (DENSE if experts else SPARSE) - (NOT_FUSED if family.fused else set())
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
    if not config.tie_word_embeddings and "output.weight" not in planned and MODEL_TENSOR.OUTPUT in tensors:
        raise CheckpointError("the checkpoint lacks lm_head.weight", "re-download the checkpoint")
