"""Mapping between a checkpoint's weights and a GGUF file's tensors, in both directions: names, row orders, experts.

The gguf library has the names of most tensors; experts and models with a vision tower have rules of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS, TENSOR_NAMES, get_tensor_name_map
from torch import Tensor

from ..formats import Format
from ..formats.base import entry_name
from ..modeling.architectures import auto_class, quantizable
from ..modeling.families import Experts, Family, Gguf, family_of_config
from ..reading.gguf import DAMAGED
from ..tensor import QuantizedTensor
from ..utils.errors import CheckpointError, ModelError
from ..utils.notices import notice
from .file import GgufFile
from .formats import EXACT, exact_format, exact_parts
from .graph import experts_of, rope_of
from .hyperparameters import ROPE_TENSORS, rope_tensors

EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(\w+)\.weight")
STACKED_EXPERTS = re.compile(r"(.*\.)experts\.(gate_up_proj|down_proj)(_bias)?")
BESIDE_TEXT = re.compile(
    r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|connector|audio_tower|embed_vision|embed_audio)\."
)
KINDS = (".weight", ".bias")
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
UNQUANTIZED = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d")  # matrices that stay in floats
CONVOLUTIONS = ("ssm_conv1d.weight", "shortconv.conv.weight")
NEXT_TOKEN = re.compile(r"(?:^|.*\.)mtp\.(?:layers\.(\d+)\.(.*)|(\w+)\.weight)")  # Qwen's multi-token prediction layers
# Tensors that such layers share, and decoder layers do not have: Qwen's name → GLM's, which files use.
NEXT_TOKEN_SHARED = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm",
}  # fmt: skip
NEXT_TOKEN_ADDED = re.compile(
    r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm|shared_head\.head|embed_tokens)\.weight"
)
BLOCK = re.compile(r"blk\.(\d+)\.(.*)")
DERIVED = ("rotary_emb.inv_freq", "masked_bias")  # buffers in old checkpoints
NO_BIAS = ("ssm_dt.bias", "exp_probs_b.bias")  # not biases of a linear layer, despite the name
OPTIONAL = {
    MODEL_TENSOR.OUTPUT, MODEL_TENSOR.ROPE_FREQS, MODEL_TENSOR.ROPE_FACTORS_LONG, MODEL_TENSOR.ROPE_FACTORS_SHORT,
    MODEL_TENSOR.ATTN_ROT_EMBD, MODEL_TENSOR.FFN_GATE_UP_EXP, MODEL_TENSOR.DENSE_2_OUT,
}  # fmt: skip
# Fused linear → the tensors that a graph has instead of it.
UNFUSED = {
    "qkv_proj": {MODEL_TENSOR.ATTN_Q, MODEL_TENSOR.ATTN_K, MODEL_TENSOR.ATTN_V},
    "gate_up_proj": {MODEL_TENSOR.FFN_GATE},
}
NEXT_TOKENS = {tensor for tensor in MODEL_TENSOR if tensor.name.startswith("NEXTN_")}  # ignored by transformers
# Tensors of a hybrid's attention layers, and of its Gated DeltaNet layers.
ATTENTION = {
    MODEL_TENSOR.ATTN_Q, MODEL_TENSOR.ATTN_Q_NORM, MODEL_TENSOR.ATTN_K, MODEL_TENSOR.ATTN_K_NORM, MODEL_TENSOR.ATTN_V,
    MODEL_TENSOR.ATTN_OUT,
}  # fmt: skip
MIXER = {
    MODEL_TENSOR.ATTN_QKV, MODEL_TENSOR.ATTN_GATE, MODEL_TENSOR.SSM_A, MODEL_TENSOR.SSM_CONV1D, MODEL_TENSOR.SSM_DT,
    MODEL_TENSOR.SSM_NORM, MODEL_TENSOR.SSM_BETA, MODEL_TENSOR.SSM_ALPHA, MODEL_TENSOR.SSM_OUT, MODEL_TENSOR.SSM_IN,
    MODEL_TENSOR.SSM_BETA_ALPHA,
}  # fmt: skip
SUFFIXES = {  # default: .weight
    MODEL_TENSOR.SSM_A: "", MODEL_TENSOR.SSM_DT: ".bias", MODEL_TENSOR.FFN_EXP_PROBS_B: ".bias",
}  # fmt: skip
DENSE = {MODEL_TENSOR.FFN_GATE, MODEL_TENSOR.FFN_UP, MODEL_TENSOR.FFN_DOWN}
SPARSE = {
    MODEL_TENSOR.FFN_GATE_INP, MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP, MODEL_TENSOR.FFN_DOWN_EXP,
}  # fmt: skip
SHARED = {
    MODEL_TENSOR.FFN_GATE_SHEXP, MODEL_TENSOR.FFN_UP_SHEXP, MODEL_TENSOR.FFN_DOWN_SHEXP, MODEL_TENSOR.FFN_EXP_PROBS_B,
}  # fmt: skip
SHORT_CONV = {MODEL_TENSOR.SHORTCONV_CONV, MODEL_TENSOR.SHORTCONV_INPROJ, MODEL_TENSOR.SHORTCONV_OUTPROJ}
UNSHARED = {MODEL_TENSOR.ATTN_K, MODEL_TENSOR.ATTN_K_NORM, MODEL_TENSOR.ATTN_V}  # some layers have another's, or none
EXPERT_NORMS = {MODEL_TENSOR.FFN_PRE_NORM_2, MODEL_TENSOR.FFN_POST_NORM_1, MODEL_TENSOR.FFN_POST_NORM_2}
PER_LAYER = {tensor for tensor in MODEL_TENSOR if tensor.name.startswith("PER_LAYER_")}
PER_HEAD = ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")  # one row or value for each value head
AFTER_KEYS = ("attn_qkv", "ssm_conv1d")  # rows of queries and keys come before the values' rows
DECAY = "ssm_a"


# --- names and orders of rows -----------------------------------------------------------------------------------------


class Stacks:
    """Cache of the last stacked expert weight, so that it is read once and not once per expert."""

    def __init__(self) -> None:
        self._held: tuple[Weight, Tensor] | None = None

    def read(self, weight: Weight) -> Tensor:
        if self._held is None or self._held[0] is not weight:
            self._held = None
            self._held = weight, weight.read()
        return self._held[1]


class Layout:
    """Names and row orders of one model's tensors in a GGUF file.

    Args:
        config: transformers (text) config.
        family: its family.
        next_token_layers: number of layers for multi-token prediction after the decoder layers.
    """

    def __init__(self, config: Any, family: Family, next_token_layers: int = 0):
        self.config, self.family = config, family
        self.graph = next(graph for graph, name in MODEL_ARCH_NAMES.items() if name == family.gguf.arch)
        self._names = get_tensor_name_map(self.graph, config.num_hidden_layers + next_token_layers)
        self.delta_net = DeltaNet.of(config, family.gguf) if family.gguf.attention_every else None
        self.stacks = Stacks()

    def name(self, key: str) -> str:
        """Return the file's name of a checkpoint tensor; experts have `experts_name`.

        Raises:
            ModelError: the architecture has no such tensor.
        """
        plain = key.replace("language_model.model.", "model.")
        plain = re.sub(r"^model\.(language_model|text_model)\.", "model.", plain)
        plain = plain.removeprefix("language_model.").replace(".dt_bias", ".dt_proj.bias")
        plain = plain.replace(".e_score_correction_bias", ".e_score_correction.bias")
        plain = re.sub(r"\.(sinks|layer_scalar)$", r".\1.weight", plain)
        if match := NEXT_TOKEN_ADDED.fullmatch(plain):
            return f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}.weight"
        name = self._names.get_name(plain, try_suffixes=KINDS)
        arch, fix = self.family.gguf.arch, "use this model with transformers"
        if name is None:
            raise ModelError(f"{key} has no place in llama.cpp's {arch} architecture", fix)
        if name.endswith(".bias") and not self.family.gguf.bias and not name.endswith(NO_BIAS):
            raise ModelError(f"{key}: llama.cpp's {arch} architecture has no biases", fix)
        return name

    def holds_sum(self, name: str) -> bool:
        """Return whether the file stores 1 + weight, for norms that multiply by 1 + weight."""
        return self.family.norm_offset and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")

    def heads(self, name: str) -> int:
        """Number of heads whose rows the file stores in another order; 0 for an equal order."""
        graph = self.family.gguf
        if not (graph.permute or graph.halves) or not (".attn_q." in name or ".attn_k." in name):
            return 0
        return int(self.config.num_attention_heads if ".attn_q." in name else self.config.num_key_value_heads)

    def in_file(self, name: str, value: Tensor) -> Tensor:
        """Convert a checkpoint tensor's values to the file's."""
        if heads := self.heads(name):
            return self._rotated_rows(value, heads, halved if self.family.gguf.halves else interleaved)
        if self.delta_net:
            value = self.delta_net.in_file(role_of(name), value)
        return value.float() + 1 if self.holds_sum(name) else value

    def in_model(self, name: str, value: Tensor) -> Tensor:
        """Convert a file tensor's values to the checkpoint's: the inverse of `in_file`."""
        if heads := self.heads(name):
            return self._rotated_rows(value, heads, interleaved if self.family.gguf.halves else halved)
        if self.delta_net:
            value = self.delta_net.in_model(role_of(name), value)
        return value - 1 if self.holds_sum(name) else value

    def _rotated_rows(self, value: Tensor, heads: int, reorder: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Reorder the rows of each head that RoPE rotates; `permute` is for graphs that rotate all."""
        size = value.shape[0] // heads
        share = rope_of(self.config).get("partial_rotary_factor", 1.0) if self.family.gguf.halves else 1.0
        if (rotated := int(size * share)) == size:
            return reorder(value, heads)
        out = value.clone().view(heads, size, *value.shape[1:])
        out[:, :rotated] = reorder(out[:, :rotated].flatten(0, 1), heads).view_as(out[:, :rotated])
        return out.view_as(value)

    def computed(self, name: str) -> bool:
        """Return whether `in_file` changes values (in fp32), and does not only permute them."""
        return self.holds_sum(name) or role_of(name) == DECAY

    def columns_in_file(self, name: str, x: Tensor) -> Tensor:
        """Permute a matrix's input, [..., columns], to the file's column order."""
        return self.in_file(name, x) if self.has_permuted_columns(name) else x

    def rows_in_file(self, name: str, y: Tensor) -> Tensor:
        """Permute a matrix's output, [rows, ...], to the file's row order."""
        return y if self.has_permuted_columns(name) else self.in_file(name, y)

    def has_permuted_columns(self, name: str) -> bool:
        """Return whether the file permutes a tensor's columns, which splits quantized blocks."""
        return bool(self.delta_net and role_of(name) == "ssm_out" and self.delta_net.moves("ssm_out"))


def layer_of(key: str) -> int:
    """Decoder layer index of a checkpoint tensor."""
    return int(re.findall(r"\.layers\.(\d+)\.", key)[0])


def role_of(name: str) -> str:
    """Role of a file tensor in its layer: "blk.3.ssm_out.weight" → "ssm_out"."""
    return name.split(".")[2] if name.startswith("blk.") else name


def experts_name(layer: int | str, role: str) -> str:
    """File name of the stacked gate, up or down projections of a layer's experts."""
    return f"blk.{layer}.ffn_{role}_exps.weight"


def roles_of(experts: Experts) -> dict[str, str]:
    """Checkpoint name of an expert's linear → its name in the file."""
    return {experts.gate: "gate", experts.up: "up", experts.down: "down"}


def shape_in_file(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in the file: a gate of one row is a vector, a depthwise convolution a matrix."""
    if name.endswith(CONVOLUTIONS):
        return shape[0], shape[-1]
    return shape[-1:] if name.endswith(("ffn_gate_inp_shexp.weight", "exp_probs_b.bias")) else shape


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows [heads · size, …] from transformers' RoPE order (first and second halves) to pairs."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def halved(rows: Tensor, heads: int) -> Tensor:
    """Undo `interleaved`."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


# --- Gated DeltaNet ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeltaNet:
    """Head order of Gated DeltaNet layers in llama.cpp's graph (src/models/qwen35.cpp there).

    Several value heads share a key head. In transformers they are adjacent. A graph that tiles the key heads expects
    the first value head of every key head, then the second of every one, and so on.

    Args:
        keys, values: number of key and value heads.
        key_size, value_size: head widths.
        tiled: whether the graph tiles the key heads; else it repeats each, as transformers does.
    """

    keys: int
    values: int
    key_size: int
    value_size: int
    tiled: bool

    @classmethod
    def of(cls, config: Any, graph: Gguf) -> DeltaNet:
        """Read the heads from a transformers (text) config."""
        return cls(
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            graph.tiled_heads,
        )

    def in_file(self, role: str, value: Tensor) -> Tensor:
        """Convert a checkpoint tensor's values to the file's; the decay becomes its negative rate, not its logarithm.

        Args:
            role: of the tensor, e.g. "ssm_out".
        """
        permuted = self._permuted(role, value, self.keys)
        return -permuted.float().exp() if role == DECAY else permuted

    def in_model(self, role: str, value: Tensor) -> Tensor:
        """Undo `in_file`; the decay's logarithm is rounded once more."""
        permuted = self._permuted(role, value, self.values // self.keys)
        return (-permuted).log() if role == DECAY else permuted

    def moves(self, role: str) -> bool:
        """Return whether the file permutes a tensor's rows or columns."""
        return self.tiled and self.keys < self.values and role in (*PER_HEAD, *AFTER_KEYS, "attn_gate", "ssm_out")

    def _permuted(self, role: str, value: Tensor, groups: int) -> Tensor:
        """Transpose the value heads from [groups, n] order to [n, groups]."""
        if not self.moves(role):
            return value
        if role == "ssm_out":
            return self._regrouped(value.T, groups, self.value_size).T.contiguous()
        first = 2 * self.keys * self.key_size if role in AFTER_KEYS else 0
        out = value.clone()
        out[first:] = self._regrouped(value[first:], groups, 1 if role in PER_HEAD else self.value_size)
        return out

    def _regrouped(self, rows: Tensor, groups: int, size: int) -> Tensor:
        return rows.reshape(groups, self.values // groups, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """A tensor of the model: its shape, and a function that reads it on any device.

    Args:
        transposed: whether stacked experts are stored [K, N].
    """

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    transposed: bool = False


@dataclass
class Planned:
    """A tensor to write.

    Its `readers` are called one after another and the results stacked: a single [columns] or [rows, columns], or one
    [rows, columns] per expert.
    """

    name: str
    shape: tuple[int, ...]
    readers: list[Callable[[], Tensor]] = field(default_factory=list)

    @property
    def is_matrix(self) -> bool:
        """Return whether it may be quantized: all but norms, biases, frequencies, routers and convolutions."""
        in_floats = role_of(self.name) in UNQUANTIZED or self.name.endswith(CONVOLUTIONS)
        return len(self.shape) > 1 and not in_floats and self.name.endswith(".weight")

    def pieces(self) -> Iterator[Tensor]:
        """Call the readers in order."""
        for read in self.readers:
            yield read()


def plan(weights: Mapping[str, Weight], config: Any, family: Family) -> list[Planned]:
    """Plan the tensors of the file, in the order of the weights.

    Args:
        weights: checkpoint name → weight.
        config: transformers (text) config.

    Raises:
        ModelError: a weight that the architecture does not have.
        CheckpointError: a missing weight.
    """
    weights = _with_next_token_layers(weights, config, family)
    layers = [layer_of(key) for key in weights if ".layers." in key and not BESIDE_TEXT.search(key)]
    added = max(layers, default=-1) + 1 - config.num_hidden_layers if family.gguf.next_token else 0
    layout = Layout(config, family, max(added, 0))
    rope = rope_tensors(config).items()
    planned = {name: Planned(name, tuple(tensor.shape), [tensor.clone]) for name, tensor in rope}
    for key, weight in weights.items():
        if BESIDE_TEXT.search(key) or key.endswith(DERIVED):
            continue
        if key.endswith("lm_head.weight") and config.tie_word_embeddings:
            continue  # llama.cpp uses the embedding
        for name, shape, read in _in_file(key, weight, layout):
            entry = planned.setdefault(name, Planned(name, shape))
            entry.readers.append(read)
    if config.tie_word_embeddings and family.gguf.head and EMBEDDING in planned:
        planned.setdefault(HEAD, replace(planned[EMBEDDING], name=HEAD))
    for entry in planned.values():
        if len(entry.readers) > 1:
            entry.shape = (len(entry.readers), *entry.shape)
    _check_complete(planned, layout)
    return list(planned.values())


def _with_next_token_layers(weights: Mapping[str, Weight], config: Any, family: Family) -> dict[str, Weight]:
    """Rename Qwen's multi-token prediction layers to layers after the decoder layers; drop them if no graph runs them.

    llama.cpp's converter does the same (conversion/qwen.py there).
    """
    renamed: dict[str, Weight] = {}
    first = config.num_hidden_layers
    count = len({match[1] for key in weights if (match := NEXT_TOKEN.fullmatch(key)) and match[1]})
    for key, weight in weights.items():
        match = NEXT_TOKEN.fullmatch(key)
        if match is None:
            renamed[key] = weight
        elif family.gguf.next_token and match[1]:
            renamed[f"model.layers.{first + int(match[1])}.{match[2]}"] = weight
        elif family.gguf.next_token and match[3] in NEXT_TOKEN_SHARED:
            for layer in range(first, first + count):
                renamed[f"model.layers.{layer}.{NEXT_TOKEN_SHARED[match[3]]}.weight"] = weight
    return renamed


def next_token_layers(planned: Sequence[Planned], config: Any) -> int:
    """Count the layers for multi-token prediction of a file."""
    blocks = [int(match[1]) for tensor in planned if (match := BLOCK.fullmatch(tensor.name))]
    return max(blocks, default=-1) + 1 - config.num_hidden_layers


Placed = tuple[str, tuple[int, ...], Callable[[], Tensor]]


def _in_file(key: str, weight: Weight, layout: Layout) -> Iterator[Placed]:
    """Yield the tensors of a file for a checkpoint weight: name, shape of one matrix, function that reads it."""
    roles = roles_of(layout.family.experts) if layout.family.experts else {}
    if (match := EXPERT.fullmatch(key)) and match[3] in roles:
        yield experts_name(layer_of(key), roles[match[3]]), weight.shape, weight.read
    elif roles and (match := STACKED_EXPERTS.fullmatch(key)):
        yield from _stacked_experts(layer_of(key), match[2], bool(match[3]), weight, layout)
    else:
        name = layout.name(key)
        shape = shape_in_file(name, weight.shape)
        yield name, shape, lambda: layout.in_file(name, weight.read()).view(shape)


def _stacked_experts(layer: int, linear: str, bias: bool, weight: Weight, layout: Layout) -> Iterator[Placed]:
    """Yield the matrices of stacked experts, [experts, rows, columns] with gate above up, or their biases."""
    assert layout.family.experts
    roles = ("down",) if linear == "down_proj" else ("gate", "up")
    for index, role in enumerate(roles):
        name = experts_name(layer, role)
        fused_rows = weight.shape[-1] if bias or weight.transposed else weight.shape[-2]
        size = fused_rows // len(roles)
        interleaved = layout.family.experts.interleaved
        rows = slice(index, None, len(roles)) if interleaved else slice(index * size, (index + 1) * size)
        if bias:
            shape = (weight.shape[0], size)
            yield name.replace(".weight", ".bias"), shape, partial(_biases, weight, rows)
            continue
        columns = weight.shape[-2] if weight.transposed else weight.shape[-1]
        for expert in range(weight.shape[0]):
            yield name, (size, columns), partial(_expert, weight, layout.stacks, expert, rows)


def _biases(weight: Weight, rows: slice) -> Tensor:
    return weight.read()[:, rows]


def _expert(weight: Weight, stacks: Stacks, expert: int, rows: slice) -> Tensor:
    matrix = stacks.read(weight)[expert]
    return (matrix.mT if weight.transposed else matrix)[rows].contiguous()


def _check_complete(planned: Mapping[str, Planned], layout: Layout) -> None:
    config, family = layout.config, layout.family
    tensors = set(MODEL_TENSORS[layout.graph])
    experts = experts_of(config, family)
    needed = tensors - OPTIONAL - NEXT_TOKENS - (set() if family.gguf.dense_first else DENSE if experts else SPARSE)
    normed = family.qk_norm and getattr(config, "use_qk_norm", True)
    needed -= set() if normed else {MODEL_TENSOR.ATTN_Q_NORM, MODEL_TENSOR.ATTN_K_NORM}
    needed -= UNSHARED | EXPERT_NORMS if family.gguf.layered else set()
    needed -= set() if getattr(config, "hidden_size_per_layer_input", 1) else PER_LAYER
    needed -= set().union(*(UNFUSED[name] for name in family.fused))
    needed -= set() if "qkv_proj" in family.fused or layout.delta_net else {MODEL_TENSOR.ATTN_QKV}
    if family.mixer and "in_proj_qkvz" in family.mixer.inputs:
        needed -= {MODEL_TENSOR.ATTN_QKV, MODEL_TENSOR.ATTN_GATE}  # the graph takes them as one linear
    needed -= set() if family.gated_mlp else UNFUSED["gate_up_proj"]
    for tensor in sorted(needed, key=lambda tensor: TENSOR_NAMES[tensor]):
        template = TENSOR_NAMES[tensor]
        for layer in range(config.num_hidden_layers if "{bid}" in template else 1):
            mixer = MIXER if layout.delta_net else SHORT_CONV if family.gguf.short_conv else set()
            if mixer and tensor in (mixer if config.layer_types[layer] == "full_attention" else ATTENTION):
                continue
            dense = family.gguf.dense_first and layer < getattr(config, family.gguf.dense_first)
            if family.gguf.dense_first and tensor in (SPARSE | SHARED if dense else DENSE):
                continue
            name = template.format(bid=layer) + SUFFIXES.get(tensor, ".weight")
            if name not in planned:
                raise CheckpointError(
                    f"the checkpoint lacks the tensor that becomes {name} in the file", "re-download the checkpoint"
                )
            count = len(planned[name].readers)
            if name.endswith("_exps.weight") and count != experts:
                wrong = f"{name}: {count} experts in the checkpoint, {experts} in config.json"
                raise CheckpointError(wrong, "re-download the checkpoint")
    _check_next_token_layers(planned, config)
    if not config.tie_word_embeddings and HEAD not in planned and MODEL_TENSOR.OUTPUT in tensors:
        raise CheckpointError("the checkpoint lacks lm_head.weight", "re-download the checkpoint")


def _check_next_token_layers(planned: Mapping[str, Planned], config: Any) -> None:
    """Check that multi-token prediction layers have the tensors of the last layer with attention, and their own."""
    layers: dict[int, set[str]] = {}
    for name in planned:
        if match := BLOCK.fullmatch(name):
            layers.setdefault(int(match[1]), set()).add(match[2])
    decoder = [roles for layer, roles in sorted(layers.items()) if layer < config.num_hidden_layers]
    with_attention = next((roles for roles in reversed(decoder) if "attn_q.weight" in roles), set[str]())
    needed = with_attention | {f"nextn.{part}.weight" for part in ("eh_proj", "enorm", "hnorm")}
    for layer in sorted(layers.keys() - range(config.num_hidden_layers)):
        if missing := sorted(needed - layers[layer]):
            raise CheckpointError(
                f"the checkpoint's layers for multi-token prediction lack the tensor that becomes blk.{layer}."
                f"{missing[0]} in the file",
                "re-download the checkpoint",
            )


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A weight of the imported checkpoint.

    Attributes:
        name, shape: in the checkpoint.
        read: reads it on the CPU, decoded, or as a `QuantizedTensor` of `format`.
        format: format that stores the file's values exactly; None for a decoded weight.
        type: description of the file's type, for a quantizable linear layer; else empty.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    format: Format | None = None
    type: str = ""

    def state(self) -> dict[str, Tensor]:
        """State dict entries of the weight: name → tensor."""
        value = self.read()
        if not isinstance(value, QuantizedTensor):
            return {self.name: value.contiguous()}
        state = value.format.to_state(value.parts, self.shape, value.dtype)
        return {entry_name(self.name, suffix): tensor.contiguous() for suffix, tensor in state.items()}

    def nbytes(self, dtype: torch.dtype) -> int:
        """Approximate bytes of `state`, with decoded values in `dtype`."""
        bits = self.format.bits_per_weight(self.shape) if self.format else 8 * dtype.itemsize
        return int(torch.Size(self.shape).numel() * bits / 8)


def entries(file: GgufFile, config: Any, keep: bool = False) -> list[Entry]:
    """List the weights of the imported checkpoint, in the model's order, without reading values.

    Args:
        config: transformers config of a supported family.
        keep: store linear layers in the file's type where a halfbyte format does so exactly.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        ModelError: a tensor that the model does not have.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    family = family_of_config(config)
    assert family is not None
    reader = _Reader(file, Layout(config, family))
    linears = {f"{name}.weight" for name in quantizable(model)}
    weights: list[Entry] = []
    used = set(ROPE_TENSORS)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for sources, entry in reader.placed(key, tuple(value.shape)):
            used.update(sources)
            weights.append(reader.linear(sources[0], entry, keep) if key in linears else entry)
    predicting = {
        name for name in file.tensors if (m := BLOCK.fullmatch(name)) and int(m[1]) >= config.num_hidden_layers
    }
    if predicting:
        notice(f"gguf-nextn-{file.path}", f"{file.path}: the import leaves out the multi-token prediction layers")
    extra = sorted(file.tensors.keys() - used - predicting)
    if extra:
        raise ModelError(
            f"{file.path}: {extra[0]} has no place in transformers' {config.model_type}", "use the original checkpoint"
        )
    return weights


@dataclass(frozen=True)
class _Reader:
    """Finds and reads the tensors of one GGUF file."""

    file: GgufFile
    layout: Layout

    def placed(self, key: str, shape: tuple[int, ...]) -> Iterator[tuple[Sequence[str], Entry]]:
        """Yield the checkpoint entries of a model parameter, each with the file's tensors that it is read from."""
        experts, dtype = self.layout.family.experts, self.layout.config.dtype
        if experts and (match := STACKED_EXPERTS.fullmatch(key)):
            if experts.interleaved:
                yield self._interleaved(key, match[2], shape)
                return
            count, rows, columns = shape
            linear_names = {role: name for name, role in roles_of(experts).items()}
            roles = ("down",) if match[2] == "down_proj" else ("gate", "up")
            for role in roles:
                source = experts_name(layer_of(key), role)
                matrix_shape = (rows // len(roles), columns)
                self._check(source, (count, *matrix_shape))
                for index in range(count):
                    name = f"{_in_block(match[1], experts)}experts.{index}.{linear_names[role]}.weight"
                    yield [source], Entry(name, matrix_shape, partial(self.file.values, source, dtype, index))
            return
        source = self.layout.name(key)
        self._check(source, shape_in_file(source, shape))
        name = _in_block(key, experts) if experts and ".mlp.gate." in key else key
        yield [source], Entry(name, shape, lambda: self._values(source).view(shape))

    def _interleaved(self, key: str, linear: str, shape: tuple[int, ...]) -> tuple[Sequence[str], Entry]:
        """Entry of a stack with interleaved gate and up, [E, K, N], or of its biases, [E, N]; separate in the file."""
        roles = ("down",) if linear == "down_proj" else ("gate", "up")
        bias = key.endswith("_bias")
        sources = [experts_name(layer_of(key), role) for role in roles]
        sources = [name.replace(".weight", ".bias") for name in sources] if bias else sources
        count, *columns, rows = shape
        for source in sources:
            self._check(source, (count, rows // len(roles), *columns))

        def read() -> Tensor:
            stacked = torch.stack([self.file.values(source, self.layout.config.dtype) for source in sources], 2)
            return stacked.flatten(1, 2).mT if columns else stacked.flatten(1, 2)

        return sources, Entry(key, shape, read)

    def linear(self, source: str, entry: Entry, keep: bool) -> Entry:
        """Entry of a linear layer, in the file's type if `keep` is set and a format stores it exactly."""
        file = self.file
        type_ = file.tensors[source].tensor_type
        permuted = self.layout.has_permuted_columns(source)
        format_ = exact_format(type_, entry.shape) if keep and not permuted else None
        if format_ is None and permuted:
            return replace(entry, type=f"{type_.name} with columns in another order")
        if format_ is None:
            rows = f" of {entry.shape[0]} rows" if keep and type_ in EXACT else ""  # the reason
            return replace(entry, type=type_.name + rows)

        def read() -> QuantizedTensor:
            blocks = file.blocks(source)
            try:
                stored = exact_parts(type_, self.layout.in_model(source, blocks))
            except CheckpointError as error:
                raise CheckpointError(f"{file.path}: {source} ({type_.name}): {error.message}", DAMAGED) from error
            return QuantizedTensor(format_, stored, entry.shape, self.layout.config.dtype)

        return replace(entry, read=read, format=format_, type=type_.name)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        stored_shape = self.file.shape(name)
        if stored_shape != shape:
            raise CheckpointError(f"{self.file.path}: {name} has shape {stored_shape}, expected {shape}", DAMAGED)

    def _values(self, source: str) -> Tensor:
        """Read a tensor's values in transformers' order."""
        dtype = self.layout.config.dtype
        value = self.file.values(source, torch.float32 if self.layout.computed(source) else dtype)
        return self.layout.in_model(source, value).to(dtype)


def _in_block(key: str, experts: Experts) -> str:
    """Convert a transformers parameter name of a mixture to the checkpoint's name."""
    return key.replace(".mlp.", f".{experts.block}.")
