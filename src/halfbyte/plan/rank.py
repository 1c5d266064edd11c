"""What of a run one process of a mesh holds and exchanges: the formulas, each beside what it counts.

In these, `shard`, `tensor`, `pipeline` and `context` are the ways of that axis; a mesh of one has 1 everywhere.

    frozen blocks       bytes of the process's decoder layers ÷ tensor (a model of a rank's heads, `rank_config`)
                        ÷ slices (shard · context where shard > 1, context where the layout is `Sliced`), parameter by
                        parameter, rounded up to 16 bytes
    embedding, head     rows of the vocabulary ÷ (shard · tensor); tied ones once, or on the first and the last stage
    gathered            `IN_FLIGHT` blocks whole, and those that stay whole beside their share
    trained             of the process's layers; ÷ `trained.slices`: the optimizer's state, the digits of what products
                        alone read, which is whole as they read it, and gradients that are reduced as they come
    activations         of micro-batches of 1/context of the tokens. A stage keeps those of the micro-batches that wait
                        for their backward: as many as its schedule says (`parallel.pipeline.schedules`)
    head                hidden states of all processes that share a vocabulary with other rows, and their gradients
    gradients' sum      a flat buffer of `parallel.reduction`, two where it goes into slices; activations are gone by then
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..config import Parallel
from ..modeling.config_facts import max_layer_sizes
from ..modeling.layer import causal_lm_of
from ..parallel.pipeline.model import Cut
from ..parallel.pipeline.partition import stage_seconds
from ..parallel.pipeline.simulation import Seconds, simulate
from ..tensor import ALIGNMENT
from .policy import Gathers, LayerCost

ONE = Parallel()
IN_FLIGHT = 2  # blocks: the one that computes, and the one that comes
KEEPS_STREAM = ("checkpoint", "tiled")  # alone
KEEPS_ATTENTION = ("keep", "recompute", "recompute_mlp")


@dataclass(frozen=True)
class Stage:
    """The decoder layers of one process: all, or those of its place in a pipeline.

    Attributes:
        layers: their indices.
        in_flight: micro-batches whose activations wait for their backward at most; in an interleaved schedule not all
            of them in all layers.
        begins, ends: whether the embedding, and the head, are here.
    """

    layers: tuple[int, ...]
    in_flight: float = 1.0
    begins: bool = True
    ends: bool = True

    @property
    def depth(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class Line:
    """How a model stands along a pipeline.

    Attributes:
        stages: of each process.
        idle: share of the time in which a process waits for others.
    """

    stages: tuple[Stage, ...]
    idle: float = 0.0


def line(cut: Cut | None, layers: Sequence[Seconds], head: Seconds, window: int, *, ahead: bool = False) -> Line:
    """The processes of a pipeline as the model is cut; one that has all, where it is not.

    Args:
        layers: what each takes.
        window: micro-batches of a step.
        ahead: whether stages recompute before the gradient is there.
    """
    if cut is None:
        return Line((Stage(tuple(range(len(layers)))),))
    schedule = cut.schedule
    seconds = stage_seconds(cut.parts, layers, head)
    simulated = simulate(schedule.orders(window), seconds, ahead=ahead)
    stages = []
    for process in range(schedule.ranks):
        own = schedule.stages_of(process)
        indices = tuple(index for stage in own for index in cut.parts[stage])
        held = simulated.held[process] / schedule.chunks
        stages.append(Stage(indices, held, begins=0 in own, ends=schedule.stages - 1 in own))
    return Line(tuple(stages), simulated.idle)


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
        blocks = sum(self.slice(index, layout) for index in stage.layers) if self.blocks else 0
        return blocks + _divided(self._ends(stage), layout.shard * layout.tensor) + self.rest

    def slice(self, index: int, layout: Parallel) -> int:
        """Bytes of a decoder layer that stay on a process."""
        return sum(_divided(size, layout.slices) for size in self.blocks[index])

    def loaded(self, stage: Stage, layout: Parallel) -> int:
        """Bytes on a process of `stage` before embedding and head are divided."""
        return self.share(stage, layout) + self._ends(stage) - _divided(self._ends(stage), layout.shard * layout.tensor)

    def _ends(self, stage: Stage) -> int:
        return self.embedding * (stage.begins or (self.tied and stage.ends)) + self.head * stage.ends

    def largest(self, stage: Stage) -> int:
        """Bytes of the stage's largest layer, whole."""
        return max((self.block(index) for index in stage.layers), default=0) if self.blocks else 0

    def gathers(self, layout: Parallel, stage: Stage, link: float) -> Gathers | None:
        """Of the stage's layers; None where each process holds them whole."""
        return Gathers(layout.slices, self.largest(stage), link) if layout.slices > 1 and any(self.blocks) else None


def _divided(size: int, ways: int) -> int:
    return size if ways == 1 else -(-size // (ways * ALIGNMENT)) * ALIGNMENT


def gathered_bytes(block: int, stage: Stage, stays: int) -> int:
    """Bytes beside a process's share while it computes: blocks on their way, and those that stay whole."""
    return block * min(stays + IN_FLIGHT, stage.depth + 1)  # also where all stay, one is on its way at first


def in_context(layer: LayerCost, ways: int) -> LayerCost:
    """A layer whose rows are cut along their tokens, of one that was replayed on a slice of them.

    Tokens attend to those of all slices. Heads take the tokens' place in attention, so q, k and v are as many bytes;
    what attention gives is kept twice where it is kept, before and after it goes back; what is sent is scratch.
    """
    if ways == 1:
        return layer
    result, sent = (layer.tokens * width * layer.itemsize for width in (layer.queries, layer.queries + 2 * layer.keys))
    replayed = {
        level: replace(
            found,
            saved=found.saved + result * (level in KEEPS_ATTENTION),
            forward=found.forward + sent,
            backward=found.backward + sent,
        )
        for level, found in layer.replayed.items()
    }
    return replace(layer, length=layer.length * ways, replayed=replayed)


def in_slices(layer: LayerCost, ways: int) -> LayerCost:
    """A layer of which each of `tensor` processes keeps a slice of the stream, where it keeps nothing else; whole, the
    stream is there while the layer computes."""
    elsewhere = layer.stream - layer.stream // ways
    replayed = {
        level: replace(
            found,
            saved=found.saved - elsewhere,
            forward=found.forward + elsewhere,
            backward=found.backward + elsewhere,
        )
        for level, found in layer.replayed.items()
        if level in KEEPS_STREAM
    }
    return replace(layer, replayed={**layer.replayed, **replayed})


def rank_config(model_config: Any, layout: Parallel) -> Any:
    """The transformers config of what one process of `tensor` computes: its heads, and its share of each MLP."""
    ways = layout.tensor
    if ways == 1:
        return model_config
    changed = copy.deepcopy(model_config)
    text = changed.get_text_config()
    sizes = max_layer_sizes(text)
    if not vars(text).get("head_dim"):
        text.head_dim = sizes.head_dim
    text.num_attention_heads = sizes.heads // ways
    text.num_key_value_heads = max(1, sizes.key_heads // ways)
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if isinstance(size := getattr(text, name, None), int):
            setattr(text, name, size // ways)
        elif isinstance(size, list):
            setattr(text, name, [each // ways for each in size])
    return changed
