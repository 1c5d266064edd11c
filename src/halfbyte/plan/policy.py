"""The bytes and times of a decoder layer at each level of `memory.levels`, and the fastest mix within a budget.

Bytes are counted from the fused forwards of `models.blocks`, tensor by tensor. A step's peak is the highest of its
moments: each layer's forward, the loss, each layer's backward, over what is stored at that moment. Times are arithmetic
over rates measured on an H200; other devices have other rates in about the same proportions, which is what a choice
between levels depends on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ..config import Level
from ..memory.levels import LEVELS, OFFLOADED, TILE_ROWS
from .scores import NO_SCORES, ScoreBytes

SPREAD: Level = "offload_kept"
SPACINGS = (2, 3, 4, 6)

# Rates of an H200 (docs/log.md), per second; LORA: a product with its adapter over one without.
GEMM_FLOPS = {"bf16": 700e12, "fp8-hybrid": 1250e12, "nvfp4": 700e12}
ATTENTION_FLOPS, COPY_BYTES, DEQUANTIZED_BYTES, LINK_BYTES = 400e12, 4.0e12, 3.1e12, 50e9
LORA = 1.16
# A layer of a step as Python launches it outside of a CUDA graph, and what levels launch more. Hosts differ:
# Qwen3-0.6B's 28 layers take 90 to 190 ms.
LAUNCHES = 5e-3
MORE_LAUNCHES = {"keep": 1.0, "recompute": 1.1, "recompute_mlp": 1.3, "checkpoint": 1.5}
OFFLOAD_LAUNCHES = 1.2

# What tells the fused families apart in memory, by transformers' model_type; `models.families` has the rest.
FUSED: dict[str, tuple[str, ...]] = {
    "llama": (),
    "mistral": (),
    "qwen2": (),
    "qwen3": ("qk_norm",),
    "gemma": (),
    "gemma2": ("sandwich",),
    "gemma3_text": ("sandwich", "qk_norm"),
    "phi3": ("fused",),
}


@dataclass(frozen=True)
class LayerShape:
    """A decoder layer and its micro-batch.

    Args:
        tokens: rows · length.
        length: tokens that attend to one another.
        hidden, inner: widths of the residual stream and of the MLP.
        queries, keys: width of all query heads, and of all key heads.
        heads: query heads.
        rank: of each adapter.
        dropout: whether the adapters drop inputs.
        itemsize: bytes of an activation.
        scores: what attention scores take, where there are any.
        traits: of its family, from `FUSED`.
        recipe: what its products are computed in.
    """

    tokens: int
    length: int
    hidden: int
    inner: int
    queries: int
    keys: int
    heads: int
    rank: int
    dropout: bool = False
    itemsize: int = 2
    scores: ScoreBytes = NO_SCORES
    traits: tuple[str, ...] = ()
    recipe: str = "bf16"

    @classmethod
    def of(cls, text_config: Any, *, rows: int, length: int, **keys: Any) -> LayerShape:
        """From a transformers config of a text model whose model_type is in `FUSED`; `keys`: the run's fields."""
        heads = text_config.num_attention_heads
        width = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
        return cls(
            tokens=rows * length,
            length=length,
            hidden=text_config.hidden_size,
            inner=text_config.intermediate_size,
            queries=heads * width,
            keys=text_config.num_key_value_heads * width,
            heads=heads,
            traits=FUSED[text_config.model_type],
            **keys,
        )

    # --- bytes -------------------------------------------------------------------------------------------------------

    def evaluated(self) -> int:
        """Bytes at the highest moment of a forward without gradients: an MLP, or attention's inputs and result."""
        attention = self.tokens * 2 * (self.queries + self.keys) * self.itemsize
        return max(self.forward("checkpoint"), 3 * self.stream + attention + self._scratch)

    @property
    def stream(self) -> int:
        """One tensor [tokens, hidden]: a layer's input."""
        return self.tokens * self.hidden * self.itemsize

    @property
    def _scratch(self) -> int:
        """The largest weight, dequantized."""
        return self.hidden * self.inner * self.itemsize

    def _attention(self) -> int:
        """What the attention half keeps, the layer's input among it."""
        fused, h, q, k, r = "fused" in self.traits, self.hidden, self.queries, self.keys, self.rank
        adapters = 1 if fused else 3
        values = 2 * h + 2 * (q + k) + (adapters + 1) * r  # input, normed, q k v, output; x·Aᵀ
        values += (q + k) * ("qk_norm" in self.traits) + h * ("sandwich" in self.traits)
        numbers = 4 + 4 * self.heads + 4 * ("sandwich" in self.traits)  # fp32: the norms' rstd, attention's logsumexp
        factors = r * ((adapters + 1) * h + 2 * q + 2 * k)
        masks = (adapters * h + q) * self.dropout
        return self.tokens * (values * self.itemsize + numbers + masks) + factors * self.itemsize + self.scores.kept

    def _mlp(self, tokens: int) -> int:
        """What the MLP half keeps, the stream that it normalises among it."""
        fused, h, i, r = "fused" in self.traits, self.hidden, self.inner, self.rank
        adapters = 1 if fused else 2
        values = 2 * h + (3 if fused else 2) * i + (adapters + 1) * r + h * ("sandwich" in self.traits)
        numbers = 4 + 4 * ("sandwich" in self.traits)
        factors = r * (adapters * h + 2 * i + i + h)
        masks = (adapters * h + i) * self.dropout
        return tokens * (values * self.itemsize + numbers + masks) + factors * self.itemsize

    def saved(self, level: Level) -> int:
        """Bytes that wait on the device between a layer's forward and its backward."""
        return {
            "keep": self._attention() + self._mlp(self.tokens),
            "recompute": self._attention() + self._mlp(self.tokens) - 2 * self.stream,
            "recompute_mlp": self._attention(),  # the stream after attention in place of the first normed input
            "checkpoint": self.stream,
        }.get(level, 0)

    def on_host(self, level: Level) -> int:
        """Bytes that wait in the host's memory."""
        return self.saved(OFFLOADED[level]) if level in OFFLOADED else 0

    def _in_hand(self, level: Level) -> int:
        """Bytes of those that are on the device beside what is on its way: gate and up at most, or the stream."""
        if level == SPREAD:
            return 2 * self.tokens * self.inner * self.itemsize
        return self.stream if level in OFFLOADED else 0

    def forward(self, level: Level) -> int:
        """Bytes beyond what is saved and what is on its way to the host, at the highest moment of a forward."""
        return max(self._forward(level), self.scores.scratch + self._computed_scores(level))

    def _computed_scores(self, level: Level) -> int:
        """Scores that a forward computes and a level does not save."""
        return 0 if level in ("keep", "recompute", "recompute_mlp") else self.scores.kept

    def _forward(self, level: Level) -> int:
        stream, inner = self.stream, self.tokens * self.inner * self.itemsize
        attention = self.tokens * 2 * (self.queries + self.keys) * self.itemsize
        if level == "tiled":  # the input, and either attention or the sum and the result
            return stream + max(2 * stream + attention, 2 * stream + self._tile()) + self._scratch
        if level in OFFLOADED:
            return self._forward(OFFLOADED[level]) + self._in_hand(level)
        if level in ("keep", "recompute"):
            return inner + 2 * stream + self._scratch + (2 * stream if level == "recompute" else 0)
        return 3 * inner + (3 if level == "recompute_mlp" else 4) * stream + self._scratch

    def backward(self, level: Level) -> int:
        """Bytes beyond what is saved and what is on its way back, at the highest moment of a backward."""
        stream, inner = self.stream, self.tokens * self.inner * self.itemsize
        # dh or scores, the gradient that came and the one that goes
        flowing = max(inner, self.scores.scratch) + 3 * stream + self._scratch
        attention = 3 * stream + self._attention_gradients() + self._scratch
        if level == "tiled":  # its input; then the MLP's tiles, or attention
            return self._attention() + max(4 * stream + self._tile() + self._scratch, attention)
        if level in OFFLOADED:
            return self.backward(OFFLOADED[level]) + self._in_hand(level)
        if level in ("keep", "recompute"):
            return flowing + (stream if level == "recompute" else 0)
        if level == "recompute_mlp":  # with a last product that is left out, not its place
            return max(flowing + self._mlp(self.tokens), attention)
        return self._attention() + max(flowing + self._mlp(self.tokens), attention)

    def _attention_gradients(self) -> int:
        """dout, fp32 sums of dq, dq, dk and dv; and dk and dv of every query head, where several share a key."""
        shared = 2 * self.queries if self.keys < self.queries else 0
        return self.tokens * (4 * self.queries + shared + 2 * self.keys) * self.itemsize

    def _tile(self) -> int:
        tokens = min(TILE_ROWS, self.tokens)
        return self._mlp(tokens) + tokens * (self.inner + 3 * self.hidden) * self.itemsize

    # --- time --------------------------------------------------------------------------------------------------------

    def seconds(self, level: Level) -> float:
        """Time that a level adds to `keep`'s, copies to the host apart."""
        norm = 2 * self.stream / COPY_BYTES
        if level == "keep":
            return 0.0
        if level == "tiled":
            weights = 3 * self.hidden * self.inner * self.itemsize / DEQUANTIZED_BYTES
            return self.seconds("offload") + 2 * weights * (self.tokens // TILE_ROWS) + 4 * norm
        if level in OFFLOADED:
            return self.seconds(OFFLOADED[level]) + 2 * self.on_host(level) / COPY_BYTES
        if level == "recompute":
            return 2 * norm
        if level == "recompute_mlp":
            return self._mlp_again() + 2.5 * norm  # the first norm, and a sum that no kernel takes along
        return self._mlp_again() + self._attention_again()

    def waiting(self, levels: Sequence[Level]) -> float:
        """Time that copies to the host take longer than the layers' forward; backward leaves them more."""
        leaving = sum(count * self.on_host(level) for level, count in Counter(levels).items())
        return max(0.0, leaving / LINK_BYTES - len(levels) * self.forward_seconds)

    @property
    def forward_seconds(self) -> float:
        return self._attention_again() + self._mlp_again() + self._product(self.hidden * self.inner)

    def _product(self, weights: int) -> float:
        flops = 2 * self.tokens * weights * LORA / GEMM_FLOPS[self.recipe]
        return flops + weights * self.itemsize / DEQUANTIZED_BYTES

    def _mlp_again(self) -> float:
        elementwise = 3 * self.tokens * self.inner * self.itemsize + 2 * self.stream
        return self._product(2 * self.hidden * self.inner) + elementwise / COPY_BYTES

    def _attention_again(self) -> float:
        products = self._product(2 * self.hidden * (self.queries + self.keys))
        attention = 2 * self.tokens * self.length * self.queries / ATTENTION_FLOPS
        rotated = 2 * self.tokens * (self.queries + self.keys) * self.itemsize
        return products + attention + (rotated + 4 * self.stream) / COPY_BYTES


def peak(shape: LayerShape, levels: Sequence[Level], *, loss: int, gradients: int, accumulated: bool) -> int:
    """Bytes of the highest moment of a step, all gradients included.

    Args:
        levels: of each layer.
        loss: scratch of the head, beyond the last hidden state and its gradient.
        gradients: bytes of all gradients; they appear layer by layer in backward.
        accumulated: those of an earlier micro-batch are there from the start.
    """
    stored, highest, share = 0, 0, gradients / len(levels)
    there = float(gradients) if accumulated else 0.0
    moments = {level: (shape.saved(level), shape.forward(level), shape.backward(level)) for level in set(levels)}
    for level in levels:
        saved, forward, _ = moments[level]
        stored += saved
        highest = max(highest, stored + forward + int(there))
    highest = max(highest, stored + 3 * shape.stream + loss + int(there))
    for level in reversed(levels):
        saved, _, backward = moments[level]
        there = gradients if accumulated else there + share
        highest = max(highest, stored + backward + int(there))
        stored -= saved
    return highest + max(map(shape.on_host, moments))  # as much as one layer saves is on its way


def mixes(layers: int) -> Iterator[tuple[Level, ...]]:
    """Every split of the layers between two levels, the later ones keeping more: their memory is free again before
    the earlier ones need scratch to recompute. Each also with every n-th layer of `SPREAD`."""
    levels = [level for level in LEVELS if level != SPREAD]
    splits = [(level,) * layers for level in levels]
    for late, early in combinations(levels, 2):
        splits += [(early,) * count + (late,) * (layers - count) for count in range(1, layers)]
    for split in splits:
        yield split
        for every in SPACINGS:
            yield tuple(SPREAD if i % every == every - 1 else level for i, level in enumerate(split))


@dataclass(frozen=True)
class Choice:
    """What each layer keeps, and whether micro-batches run as CUDA graphs, which hold their activations in a pool."""

    levels: tuple[Level, ...]
    graphs: bool


def cost(shape: LayerShape, levels: Sequence[Level], graphs: bool = True) -> float:
    """Seconds that a step takes longer than one that keeps all, whose backward takes about as long as its forward.

    Args:
        graphs: whether steps that offload nothing are CUDA graphs; else Python launches them.
    """
    extra = sum(count * shape.seconds(level) for level, count in Counter(levels).items()) + shape.waiting(levels)
    if graphs and OFFLOADED.keys().isdisjoint(levels):
        return extra
    launches = sum(count * _launches(level) for level, count in Counter(levels).items())
    return max(extra, launches - 2 * len(levels) * shape.forward_seconds)


def _launches(level: Level) -> float:
    """Seconds that Python needs for a layer."""
    if level in OFFLOADED:
        return OFFLOAD_LAUNCHES * _launches(OFFLOADED[level])
    return LAUNCHES * MORE_LAUNCHES[level]


def choose(
    layers: int, budget: int, need: Callable[[Choice], int], *, usual: LayerShape, largest: LayerShape, host: int,
    graphs: bool = True,
) -> Choice:  # fmt: skip
    """The fastest choice that `need`s at most `budget` bytes and offloads at most `host`; failing that, the one that
    needs least.

    Args:
        usual: the micro-batch whose time counts.
        largest: the one whose offloads count.
        graphs: whether steps may be CUDA graphs.
    """
    on_host = {level: largest.on_host(level) for level in LEVELS}
    possible = [levels for levels in mixes(layers) if sum(map(on_host.__getitem__, levels)) <= host]
    choices = [Choice(levels, False) for levels in possible]
    if graphs:
        choices = [Choice(each, True) for each in possible if OFFLOADED.keys().isdisjoint(each)] + choices
    for choice in sorted(choices, key=lambda choice: cost(usual, choice.levels, choice.graphs)):
        if need(choice) <= budget:
            return choice
    return min(choices, key=need)


def in_words(levels: Sequence[Level]) -> str:
    """Such as "12 layers checkpoint, 20 layers keep"."""
    return ", ".join(f"{count} layers {level}" for level, count in Counter(levels).items())
