"""What of a run one process of a mesh holds and exchanges: the formulas, each beside what it counts.

In these, `shard`, `tensor`, `pipeline` and `context` are the ways of that axis; a mesh of one has 1 everywhere.

    frozen blocks       bytes of the stage's decoder layers ÷ tensor (a model of a rank's heads, `rank_config`) ÷ shard,
                        parameter by parameter, rounded up to 16 bytes
    embedding, head     rows of the vocabulary ÷ (shard · tensor); tied ones once, or on the first and the last stage
    gathered            `IN_FLIGHT` blocks whole, and those that stay whole beside their share
    trained             masters, gradients and optimizer state of the stage's layers
    activations         of micro-batches of 1/context of the tokens; a stage keeps those of the micro-batches that wait
                        for their backward: as many as there are stages from here on, in 1F1B
    exchanged           the flat buffer in which gradients are summed; hidden states of all processes that share a
                        vocabulary, and their gradient
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..config import Parallel
from ..models.layer import causal_lm_of
from ..tensor import ALIGNMENT
from .policy import Gathers

ONE = Parallel()
IN_FLIGHT = 2  # blocks: the one that computes, and the one that comes
BUCKET = 256 * 2**20  # bytes of gradients that are summed at a time


@dataclass(frozen=True)
class Stage:
    """Consecutive decoder layers of one process.

    Attributes:
        first, end: of the layers, `end` not among them.
        in_flight: micro-batches whose activations wait for their backward at most.
        begins, ends: whether the embedding, and the head, are here.
    """

    first: int
    end: int
    in_flight: int = 1
    begins: bool = True
    ends: bool = True

    @property
    def depth(self) -> int:
        return self.end - self.first


def stages(layout: Parallel, depth: int, window: int, head: float = 0.0) -> list[Stage]:
    """Of a pipeline, cut where each computes about as long.

    Args:
        depth: decoder layers.
        window: micro-batches of a step.
        head: what head and loss take, in layers.
    """
    count = layout.pipeline
    each, bounds = (depth + head) / count, [0]
    for stage in range(1, count):
        bounds.append(min(max(round(each * stage), bounds[-1] + 1), depth - (count - stage)))
    bounds.append(depth)
    return [
        Stage(bounds[i], bounds[i + 1], min(count - i, window), begins=i == 0, ends=i == count - 1)
        for i in range(count)
    ]


@dataclass(frozen=True)
class Frozen:
    """Bytes of a model's frozen weights, by where they are.

    Attributes:
        blocks: of each decoder layer, parameter by parameter; none where no list of them is found.
        embedding, head: 0 for a head that is the embedding.
        rest: norms beside the layers, towers, buffers.
    """

    blocks: tuple[tuple[int, ...], ...]
    embedding: int
    head: int
    rest: int
    tied: bool

    @classmethod
    def of(cls, model: nn.Module, layers: Iterable[nn.Module], total: int) -> Frozen:
        """
        Args:
            model: the causal LM, adapted or not.
            layers: its decoder layers.
            total: bytes of all its frozen weights and buffers.
        """
        blocks = tuple(tuple(p.nbytes for p in layer.parameters() if not p.requires_grad) for layer in layers)
        causal_lm = causal_lm_of(model)
        ends = [causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()]
        tables = [[p for p in end.parameters() if not p.requires_grad] if end is not None else [] for end in ends]
        tied = any(a is b for a in tables[0] for b in tables[1])
        embedding, head = (sum(p.nbytes for p in table) for table in tables)
        head = 0 if tied else head
        return cls(blocks, embedding, head, total - sum(map(sum, blocks)) - embedding - head, tied)

    def block(self, index: int) -> int:
        """Bytes of a decoder layer, whole."""
        return sum(self.blocks[index])

    def share(self, stage: Stage, layout: Parallel) -> int:
        """Bytes that stay on a process of `stage`."""
        parameters = (size for block in self.blocks[stage.first : stage.end] for size in block)
        blocks = sum(_divided(size, layout.shard) for size in parameters)
        ways = layout.shard * layout.tensor
        ends = self.embedding * (stage.begins or (self.tied and stage.ends)) + self.head * stage.ends
        return blocks + _divided(ends, ways) + self.rest

    def largest(self, stage: Stage) -> int:
        """Bytes of the stage's largest layer, whole."""
        return max((self.block(index) for index in range(stage.first, stage.end)), default=0)

    def gathers(self, layout: Parallel, stage: Stage, link: float) -> Gathers | None:
        """Of the stage's layers; None where each process holds them whole."""
        return Gathers(layout.shard, self.largest(stage), link) if layout.shard > 1 and self.blocks else None


def _divided(size: int, ways: int) -> int:
    return size if ways == 1 else -(-size // (ways * ALIGNMENT)) * ALIGNMENT


def gathered_bytes(frozen: Frozen, stage: Stage, stays: int) -> int:
    """Bytes beside a process's share while it computes: blocks on their way, and those that stay whole."""
    moved = min(stage.depth - stays, IN_FLIGHT)
    return (stays + moved) * frozen.largest(stage)


def exchanged_bytes(layout: Parallel, trained: int, hidden: int) -> int:
    """Bytes of buffers that processes exchange through.

    Args:
        trained: bytes of a process's gradients.
        hidden: bytes of a micro-batch's hidden states.
    """
    buffer = min(trained, BUCKET) if layout.size > layout.pipeline else 0
    others = layout.shard - 1  # whose hidden states come to this process's rows of the vocabulary
    return buffer + 2 * others * hidden


def rank_config(model_config: Any, layout: Parallel) -> Any:
    """The transformers config of what one process of `tensor` computes: its heads, and its share of each MLP."""
    ways = layout.tensor
    if ways == 1:
        return model_config
    changed = copy.deepcopy(model_config)
    text = changed.get_text_config()
    heads = text.num_attention_heads
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    text.num_attention_heads = heads // ways
    text.num_key_value_heads = max(1, (getattr(text, "num_key_value_heads", None) or heads) // ways)
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, getattr(text, name) // ways)
    return changed
