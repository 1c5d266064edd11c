"""Assignment of GGUF types to tensors by llama.cpp's mixes (q4_k_m, …).

The rules follow llama.cpp's quantize tool: value and down projections, the output and the first and last layers get
more bits, because their errors cost most. tests/export/test_gguf_llamacpp.py compares them with that tool.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, LlamaFileType

from ..utils.errors import ConfigError
from .quants import FLOATS, Type
from .tensors import Planned

# name → type of most tensors, llama.cpp's number for the mix
MIXES = {
    "f32": (Type.F32, LlamaFileType.ALL_F32),
    "f16": (Type.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (Type.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Type.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Type.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (Type.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q5_0": (Type.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "q5_1": (Type.Q5_1, LlamaFileType.MOSTLY_Q5_1),
    "q2_k": (Type.Q2_K, LlamaFileType.MOSTLY_Q2_K),
    "q3_k_s": (Type.Q3_K, LlamaFileType.MOSTLY_Q3_K_S),
    "q3_k_m": (Type.Q3_K, LlamaFileType.MOSTLY_Q3_K_M),
    "q3_k_l": (Type.Q3_K, LlamaFileType.MOSTLY_Q3_K_L),
    "q4_k_s": (Type.Q4_K, LlamaFileType.MOSTLY_Q4_K_S),
    "q4_k_m": (Type.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "q5_k_s": (Type.Q5_K, LlamaFileType.MOSTLY_Q5_K_S),
    "q5_k_m": (Type.Q5_K, LlamaFileType.MOSTLY_Q5_K_M),
    "q6_k": (Type.Q6_K, LlamaFileType.MOSTLY_Q6_K),
}
# Replacements for K-quants in rows that are no multiple of 256
SHORT_ROWS = {
    Type.Q2_K: Type.Q4_0,
    Type.Q3_K: Type.Q4_0,
    Type.Q4_K: Type.Q5_0,
    Type.Q5_K: Type.Q5_1,
    Type.Q6_K: Type.Q8_0,
}
ATTENTION_OUTPUT = {"q2_k": Type.Q3_K, "q3_k_m": Type.Q4_K, "q3_k_l": Type.Q5_K}
LAYERS_OF_70B = 80


def check_mix(name: str) -> str:
    """Normalize the name of a mix to a key of `MIXES`.

    Raises:
        ConfigError: there is no such mix.
    """
    spelled = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}.get(name.lower(), name.lower())
    if spelled not in MIXES:
        raise ConfigError(f"--gguf {name}: no such type", f"one of {', '.join(MIXES)}")
    return spelled


def choose(
    planned: Sequence[Planned], mix: str, *, layers: int, heads_per_kv: int, experts: int, important: bool
) -> dict[str, Type]:
    """Name → type of every tensor.

    Args:
        mix: a key of `MIXES`.
        heads_per_kv: query heads that share a key head.
        experts: experts per layer; 0 for a dense model.
        important: whether importances are given.
    """
    names = {tensor.name for tensor in planned}
    matches = (re.match(r"blk\.(\d+)\.attn_(v|qkv)\.weight", name) for name in names)
    value_layers = sorted({int(match[1]) for match in matches if match})
    rules = _Rules(mix, layers, value_layers, heads_per_kv, experts, important, "output.weight" in names)
    return {tensor.name: rules.type_of(tensor) for tensor in planned}


@dataclass(frozen=True)
class _Rules:
    """The rules for one model and one mix.

    Attributes:
        value_layers: layers with a value projection: not all of a hybrid's.
        has_head: whether the file has a head in addition to the embedding.
    """

    mix: str
    layers: int
    value_layers: list[int]
    heads_per_kv: int
    experts: int
    important: bool
    has_head: bool

    @property
    def base(self) -> Type:
        """Type of most tensors."""
        return MIXES[self.mix][0]

    def type_of(self, tensor: Planned) -> Type:
        """Type of one tensor."""
        if not tensor.is_matrix:
            return Type.F32
        if self.base in FLOATS:
            return self.base
        columns = tensor.shape[-1]
        chosen = self._by_role(tensor.name, columns)
        if columns % GGML_QUANT_SIZES[chosen][0]:
            chosen = SHORT_ROWS.get(chosen, Type.F16)
        return chosen if columns % GGML_QUANT_SIZES[chosen][0] == 0 else Type.F16

    def _by_role(self, name: str, columns: int) -> Type:
        """Type of a matrix before its row length counts."""
        if name == "output.weight" or (name == "token_embd.weight" and not self.has_head):
            if columns % GGML_QUANT_SIZES[self.base][0]:
                return Type.Q8_0
            return self.base if self.base == Type.Q8_0 else Type.Q6_K
        match = re.match(r"blk\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            return self.base
        layer, role = int(match[1]), match[2].removesuffix("_exps").removesuffix("_shexp")
        if role in ("attn_v", "attn_qkv"):  # a fused projection gets the value projection's type
            index = self.value_layers.index(layer)
            chosen = self.base
            if self.mix == "q2_k":
                chosen = Type.Q4_K if self.heads_per_kv >= 4 else Type.Q3_K
            elif self.mix == "q3_k_m":
                chosen = Type.Q5_K if index < 2 else Type.Q4_K
            elif self.mix == "q3_k_l" or (self.mix == "q4_k_s" and index < 4):
                chosen = Type.Q5_K
            elif self.mix in ("q4_k_m", "q5_k_m") and self._more_bits(index, len(self.value_layers)):
                chosen = Type.Q6_K
            if self.layers == LAYERS_OF_70B and self.heads_per_kv == 8 and chosen in (Type.Q3_K, Type.Q4_K):
                chosen = Type.Q5_K  # small, because eight query heads share it
            return Type.Q8_0 if self.experts == 8 else chosen
        if role == "attn_k" and self.experts == 8:
            return Type.Q8_0
        if role == "attn_output" and self.experts == 8:
            return Type.Q5_K if self.mix in ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m") else self.base
        if role == "attn_output":
            return ATTENTION_OUTPUT.get(self.mix, self.base)
        return self._down(layer) if role == "ffn_down" else self.base

    def _more_bits(self, index: int, count: int) -> bool:
        """Return whether layer `index` gets more bits: the first and last eighth, and every third in between."""
        eighth = count // 8
        return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2

    def _down(self, layer: int) -> Type:
        """Type of a layer's down projection."""
        first_eighth = layer < self.layers // 8
        if self.mix == "q2_k":
            return Type.Q3_K
        if self.mix == "q3_k_m":
            return Type.Q5_K if layer < self.layers // 16 else Type.Q4_K
        if self.mix == "q3_k_l" or (self.mix == "q4_k_s" and first_eighth):
            return Type.Q5_K
        if self.mix in ("q4_k_m", "q5_k_m") and self._more_bits(layer, self.layers):
            return Type.Q6_K
        if self.mix in ("q4_0", "q5_0") and self.important and first_eighth:
            return Type.Q4_1 if self.mix == "q4_0" else Type.Q5_1
        return self.base
