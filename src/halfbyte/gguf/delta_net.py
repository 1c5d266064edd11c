"""Gated DeltaNet as llama.cpp's graphs have it (src/models/qwen35.cpp there): values and order of heads, both ways.

Several value heads share a key head. Transformers lets them follow one another; a graph that repeats all key heads as a
whole wants the file to have the first value head of every key head, then the second of every one, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..modeling.families import Gguf

PER_HEAD = ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")  # a row, or a value, for each value head
BEHIND_KEYS = ("attn_qkv", "ssm_conv1d")  # rows of queries and keys come before those of values
DECAY = "ssm_a"


@dataclass(frozen=True)
class DeltaNet:
    """The heads of one model's mixers.

    Args:
        keys, values: how many heads of each.
        key_size, value_size: of a head.
        tiled: the graph repeats all key heads as a whole; else each by itself, as transformers does.
    """

    keys: int
    values: int
    key_size: int
    value_size: int
    tiled: bool

    @classmethod
    def of(cls, config: Any, graph: Gguf) -> DeltaNet:
        """From a (text) config of transformers."""
        return cls(
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            graph.tiled_heads,
        )

    def in_file(self, part: str, value: Tensor) -> Tensor:
        """A checkpoint's values as the graph wants them: of the decay, its negative rate instead of its logarithm.

        Args:
            part: what the file calls the tensor, e.g. "ssm_out".
        """
        moved = self._moved(part, value, self.keys)
        return -moved.float().exp() if part == DECAY else moved

    def in_model(self, part: str, value: Tensor) -> Tensor:
        """Undoes `in_file`; the decay's logarithm is rounded once more."""
        moved = self._moved(part, value, self.values // self.keys)
        return (-moved).log() if part == DECAY else moved

    def moves(self, part: str) -> bool:
        """Whether the file has a tensor's rows or columns in another order."""
        return self.tiled and self.keys < self.values and part in (*PER_HEAD, *BEHIND_KEYS, "attn_gate", "ssm_out")

    def _moved(self, part: str, value: Tensor, groups: int) -> Tensor:
        """Value heads, `groups` times several, to several times `groups`."""
        if not self.moves(part):
            return value
        if part == "ssm_out":
            return self._regrouped(value.T, groups, self.value_size).T.contiguous()
        before = 2 * self.keys * self.key_size if part in BEHIND_KEYS else 0
        out = value.clone()
        out[before:] = self._regrouped(value[before:], groups, 1 if part in PER_HEAD else self.value_size)
        return out

    def _regrouped(self, rows: Tensor, groups: int, size: int) -> Tensor:
        return rows.reshape(groups, self.values // groups, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
