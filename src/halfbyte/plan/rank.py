"""Per-rank memory and communication volume, one formula per component.

`shard`, `tensor`, `pipeline` and `context` are the degrees of the axes, 1 for an unused axis. Bytes per rank:

    frozen layers       bytes of the rank's decoder layers ÷ tensor (a model with the rank's heads, `rank_config`)
                        ÷ shards (shard · context where shard > 1, context where the layout is `Sliced`), parameter by
                        parameter, rounded up to 16 bytes
    embedding, head     vocabulary rows ÷ (shard · tensor); tied tables once, or on the first and the last stage
    gathered            `IN_FLIGHT` unsharded layers, and the layers that stay gathered, on top of the rank's shards
    trained             parameters of the rank's layers. Divided by `trained.slices`: optimizer state, fp32 master
                        weights of parameters that only GEMMs read (their compute-dtype copy is full), and gradients
                        that are reduced during backward
    activations         of micro-batches with 1/context of the tokens. A pipeline rank saves them for all micro-batches
                        in flight; their number comes from its schedule (`parallel.pipeline.schedules`)
    head                hidden states of all ranks that share a sharded vocabulary, and their gradients
    gradient reduction  a flat bucket of `mesh.reduction`, two where it is scattered; activations are freed by then
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
from ..parallel.pipeline.model import PipelinePartition
from ..parallel.pipeline.partition import stage_seconds
from ..parallel.pipeline.schedules import Seconds, simulate
from ..tensor import ALIGNMENT
from .costs import KEEPS_STREAM, Gathers, LayerCost

IN_FLIGHT = 2  # unsharded layers: the one that computes, and the one that is gathered
KEEPS_ATTENTION = ("keep", "recompute", "recompute_mlp")  # levels that save attention's output


@dataclass(frozen=True)
class Stage:
    """The decoder layers of one pipeline rank; all of them without a pipeline.

    Attributes:
        layers: their indices.
        in_flight: most micro-batches whose activations are saved at once, averaged over the rank's layers in an
            interleaved schedule.
        has_embedding, has_head: whether this rank holds the embedding, and the head.
    """

    layers: tuple[int, ...]
    in_flight: float = 1.0
    has_embedding: bool = True
    has_head: bool = True

    @property
    def depth(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class Pipeline:
    """Partition of a model over pipeline ranks.

    Attributes:
        stages: one for each pipeline rank.
        idle: share of the time that a rank idles in the pipeline's bubble.
    """

    stages: tuple[Stage, ...]
    idle: float = 0.0


def pipeline_of(
    cut: PipelinePartition | None, layers: Sequence[Seconds], head: Seconds, window: int, *, ahead: bool = False
) -> Pipeline:
    """Simulate the pipeline schedule of a partition; without one (None), a single rank holds all layers.

    Args:
        layers: seconds of each decoder layer.
        head: seconds of the head and the loss.
        window: micro-batches of a step.
        ahead: whether stages recompute activations before the gradient arrives.
    """
    if cut is None:
        return Pipeline((Stage(tuple(range(len(layers)))),))
    schedule = cut.schedule
    seconds = stage_seconds(cut.stage_layers, layers, head)
    simulated = simulate(schedule.actions(window), seconds, ahead=ahead)
    stages = []
    for process in range(schedule.ranks):
        stage_numbers = schedule.stages_of(process)
        indices = tuple(index for stage in stage_numbers for index in cut.stage_layers[stage])
        in_flight = simulated.in_flight[process] / schedule.chunks
        has_head = schedule.stages - 1 in stage_numbers
        stages.append(Stage(indices, in_flight, has_embedding=0 in stage_numbers, has_head=has_head))
    return Pipeline(tuple(stages), simulated.idle)


@dataclass(frozen=True)
class Frozen:
    """Unsharded bytes of a model's frozen weights, by component.

    Attributes:
        blocks: bytes of each decoder layer's parameters; empty if the model has no list of decoder layers.
        embedding, head: bytes of the tables; 0 for a head tied to the embedding.
        replicated: final norm, vision towers, buffers.
        tied: whether the head is the embedding.
    """

    blocks: tuple[tuple[int, ...], ...]
    embedding: int
    head: int
    replicated: int
    tied: bool

    @classmethod
    def of(cls, model: nn.Module, layers: Iterable[nn.Module], total: int) -> Frozen:
        """Count the frozen weights of a model.

        Args:
            model: the causal LM, with or without an adapter.
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
        """Unsharded bytes of a decoder layer."""
        return sum(self.blocks[index])

    def share(self, stage: Stage, layout: Parallel) -> int:
        """Resident bytes on a rank of `stage`."""
        blocks = sum(self.slice(index, layout) for index in stage.layers) if self.blocks else 0
        return blocks + _shard_bytes(self._ends(stage), layout.shard * layout.tensor) + self.replicated

    def slice(self, index: int, layout: Parallel) -> int:
        """Bytes of a rank's shard of a decoder layer."""
        return sum(_shard_bytes(size, layout.slices) for size in self.blocks[index])

    def loaded(self, stage: Stage, layout: Parallel) -> int:
        """Bytes on a rank of `stage` while the model is loaded, before embedding and head are sharded."""
        ends = self._ends(stage)
        return self.share(stage, layout) + ends - _shard_bytes(ends, layout.shard * layout.tensor)

    def _ends(self, stage: Stage) -> int:
        """Unsharded bytes of the tables that `stage` holds."""
        return self.embedding * (stage.has_embedding or (self.tied and stage.has_head)) + self.head * stage.has_head

    def largest(self, stage: Stage) -> int:
        """Unsharded bytes of the stage's largest layer."""
        return max((self.block(index) for index in stage.layers), default=0) if self.blocks else 0

    def gathers(self, layout: Parallel, stage: Stage, link: float) -> Gathers | None:
        """All-gathers of the stage's layers; None if they are not sharded."""
        return Gathers(layout.slices, self.largest(stage), link) if layout.slices > 1 and any(self.blocks) else None


def _shard_bytes(size: int, degree: int) -> int:
    """Bytes of one of `degree` shards, aligned."""
    return size if degree == 1 else -(-size // (degree * ALIGNMENT)) * ALIGNMENT


def gathered_bytes(block: int, stage: Stage, stays: int) -> int:
    """Bytes of a rank's unsharded layers while it computes: layers in flight and `stays` that stay gathered."""
    return block * min(stays + IN_FLIGHT, stage.depth + 1)  # where all stay, one is still in flight at first


def in_context(layer: LayerCost, degree: int) -> LayerCost:
    """Cost of a layer under context parallelism of degree `degree`, from a layer replayed on one shard's tokens.

    Tokens attend to all shards' tokens. Attention runs on a share of the heads after an all-to-all, so q, k and v take
    the same bytes. Levels that save attention's output save it before and after the all-to-all back. Send buffers are
    workspace.
    """
    if degree == 1:
        return layer
    output, sent = (layer.tokens * width * layer.itemsize for width in (layer.queries, layer.queries + 2 * layer.keys))
    replayed = {
        level: replace(
            layer_bytes,
            saved=layer_bytes.saved + output * (level in KEEPS_ATTENTION),
            forward=layer_bytes.forward + sent,
            backward=layer_bytes.backward + sent,
        )
        for level, layer_bytes in layer.replayed.items()
    }
    return replace(layer, length=layer.length * degree, replayed=replayed)


def in_slices(layer: LayerCost, degree: int) -> LayerCost:
    """Cost of a layer under tensor parallelism of degree `degree`.

    Levels that save only the layer's input save a shard of it on each rank; the full input exists while the layer
    computes.
    """
    elsewhere = layer.stream - layer.stream // degree
    replayed = {
        level: replace(
            layer_bytes,
            saved=layer_bytes.saved - elsewhere,
            forward=layer_bytes.forward + elsewhere,
            backward=layer_bytes.backward + elsewhere,
        )
        for level, layer_bytes in layer.replayed.items()
        if level in KEEPS_STREAM
    }
    return replace(layer, replayed={**layer.replayed, **replayed})


def rank_config(model_config: Any, layout: Parallel) -> Any:
    """The transformers config of one tensor-parallel rank: its heads, and its share of each MLP."""
    degree = layout.tensor
    if degree == 1:
        return model_config
    changed = copy.deepcopy(model_config)
    text = changed.get_text_config()
    sizes = max_layer_sizes(text)
    if not vars(text).get("head_dim"):
        text.head_dim = sizes.head_dim
    text.num_attention_heads = sizes.heads // degree
    text.num_key_value_heads = max(1, sizes.key_heads // degree)
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if isinstance(size := getattr(text, name, None), int):
            setattr(text, name, size // degree)
        elif isinstance(size, list):
            setattr(text, name, [n // degree for n in size])
    return changed
