"""Where each weight of a model lies in a GGUF file and what it is there: names, order of rows, experts; both ways.

The gguf library knows the names of most tensors; experts, and models with a vision tower, have rules of their own.
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
from ..modeling.families import Experts, Family, family_of_config
from ..reading.gguf import DAMAGED
from ..tensor import QuantizedTensor
from ..utils.errors import CheckpointError, ModelError
from .delta_net import DECAY, DeltaNet
from .file import GgufFile
from .graph import experts_of
from .hyperparameters import ROPE_TENSORS, rope_tensors
from .to_formats import KEPT, kept_format, kept_parts

EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(\w+)\.weight")
STACKED_EXPERTS = re.compile(r"(.*\.)experts\.(gate_up_proj|down_proj)(_bias)?")
BESIDE_TEXT = re.compile(r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\.")
KINDS = (".weight", ".bias")
WHOLE = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d")  # matrices that are not quantized
NEXT_TOKEN = re.compile(r"(^|\.)mtp\.")  # layers that guess further tokens, which transformers leaves out
DERIVED = ("rotary_emb.inv_freq", "masked_bias")  # buffers in old checkpoints
NO_BIAS = ("ssm_dt.bias", "exp_probs_b.bias")  # of no linear, though they are called so
OPTIONAL = {
    MODEL_TENSOR.OUTPUT, MODEL_TENSOR.ROPE_FREQS, MODEL_TENSOR.ROPE_FACTORS_LONG, MODEL_TENSOR.ROPE_FACTORS_SHORT,
    MODEL_TENSOR.ATTN_ROT_EMBD, MODEL_TENSOR.FFN_GATE_UP_EXP,
}  # fmt: skip
# What a graph has either of: linears by themselves, or those that stand for several.
APART = {
    "qkv_proj": {MODEL_TENSOR.ATTN_Q, MODEL_TENSOR.ATTN_K, MODEL_TENSOR.ATTN_V},
    "gate_up_proj": {MODEL_TENSOR.FFN_GATE},
}
NEXT_TOKENS = {tensor for tensor in MODEL_TENSOR if tensor.name.startswith("NEXTN_")}  # no transformers model has them
# What only layers with attention have, and what only those with a Gated DeltaNet.
ATTENTION = {
    MODEL_TENSOR.ATTN_Q, MODEL_TENSOR.ATTN_Q_NORM, MODEL_TENSOR.ATTN_K, MODEL_TENSOR.ATTN_K_NORM, MODEL_TENSOR.ATTN_V,
    MODEL_TENSOR.ATTN_OUT,
}  # fmt: skip
MIXER = {
    MODEL_TENSOR.ATTN_QKV, MODEL_TENSOR.ATTN_GATE, MODEL_TENSOR.SSM_A, MODEL_TENSOR.SSM_CONV1D, MODEL_TENSOR.SSM_DT,
    MODEL_TENSOR.SSM_NORM, MODEL_TENSOR.SSM_BETA, MODEL_TENSOR.SSM_ALPHA, MODEL_TENSOR.SSM_OUT, MODEL_TENSOR.SSM_IN,
    MODEL_TENSOR.SSM_BETA_ALPHA,
}  # fmt: skip
SUFFIXES = {  # of others: .weight
    MODEL_TENSOR.SSM_A: "", MODEL_TENSOR.SSM_DT: ".bias", MODEL_TENSOR.FFN_EXP_PROBS_B: ".bias",
}  # fmt: skip
DENSE = {MODEL_TENSOR.FFN_GATE, MODEL_TENSOR.FFN_UP, MODEL_TENSOR.FFN_DOWN}
SPARSE = {
    MODEL_TENSOR.FFN_GATE_INP, MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP, MODEL_TENSOR.FFN_DOWN_EXP,
}  # fmt: skip
SHARED = {
    MODEL_TENSOR.FFN_GATE_SHEXP, MODEL_TENSOR.FFN_UP_SHEXP, MODEL_TENSOR.FFN_DOWN_SHEXP, MODEL_TENSOR.FFN_EXP_PROBS_B,
}  # fmt: skip


# --- names and orders of rows -----------------------------------------------------------------------------------------


class Stacks:
    """The experts of a layer are read once, not once for each of them: what was read last stays."""

    def __init__(self) -> None:
        self._held: tuple[Weight, Tensor] | None = None

    def read(self, weight: Weight) -> Tensor:
        if self._held is None or self._held[0] is not weight:
            self._held = None
            self._held = weight, weight.read()
        return self._held[1]


class Layout:
    """What a model's tensors are called in a file, and how their values lie there.

    Args:
        config: (text) config of transformers.
        family: its row.
    """

    def __init__(self, config: Any, family: Family):
        self.config, self.family = config, family
        self.graph = next(graph for graph, name in MODEL_ARCH_NAMES.items() if name == family.gguf.arch)
        self._names = get_tensor_name_map(self.graph, config.num_hidden_layers)
        self.delta_net = DeltaNet.of(config, family.gguf) if family.gguf.attention_every else None
        self.stacks = Stacks()

    def name(self, key: str) -> str:
        """The name in the file of a checkpoint's tensor, an expert's apart.

        Raises:
            ModelError: there is none.
        """
        plain = key.replace("language_model.model.", "model.").replace("model.language_model.", "model.")
        plain = plain.removeprefix("language_model.").replace(".dt_bias", ".dt_proj.bias")
        plain = plain.replace(".e_score_correction_bias", ".e_score_correction.bias")
        plain = re.sub(r"\.sinks$", ".sinks.weight", plain)
        name = self._names.get_name(plain, try_suffixes=KINDS)
        arch, fix = self.family.gguf.arch, "use this model with transformers"
        if name is None:
            raise ModelError(f"{key} has no place in llama.cpp's {arch} architecture", fix)
        if name.endswith(".bias") and not self.family.gguf.bias and not name.endswith(NO_BIAS):
            raise ModelError(f"{key}: llama.cpp's {arch} architecture has no biases", fix)
        return name

    def holds_sum(self, name: str) -> bool:
        """Whether the file holds 1 + weight: of norms that multiply by that."""
        return self.family.norm_offset and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")

    def heads(self, name: str) -> int:
        """How many heads a tensor's rows are of, where the file has them in another order; else 0."""
        if not self.family.gguf.permute or not (".attn_q." in name or ".attn_k." in name):
            return 0
        return int(self.config.num_attention_heads if ".attn_q." in name else self.config.num_key_value_heads)

    def in_file(self, name: str, value: Tensor) -> Tensor:
        """A checkpoint's values as the graph wants them."""
        if heads := self.heads(name):
            return interleaved(value, heads)
        if self.delta_net:
            value = self.delta_net.in_file(part_of(name), value)
        return value.float() + 1 if self.holds_sum(name) else value

    def in_model(self, name: str, value: Tensor) -> Tensor:
        """Undoes `in_file`."""
        if heads := self.heads(name):
            return halved(value, heads)
        if self.delta_net:
            value = self.delta_net.in_model(part_of(name), value)
        return value - 1 if self.holds_sum(name) else value

    def computed(self, name: str) -> bool:
        """Whether `in_file` computes with a tensor's values, in fp32, and does not only move them."""
        return self.holds_sum(name) or part_of(name) == DECAY

    def columns_in_file(self, name: str, x: Tensor) -> Tensor:
        """What meets a matrix, [..., its columns], in the order that its columns have in the file."""
        return self.in_file(name, x) if self.has_columns_moved(name) else x

    def rows_in_file(self, name: str, y: Tensor) -> Tensor:
        """What has a matrix's rows, [rows, ...], in the order that they have in the file."""
        return y if self.has_columns_moved(name) else self.in_file(name, y)

    def has_columns_moved(self, name: str) -> bool:
        """Whether the file has a tensor's columns in another order, so that quantized blocks are no longer whole."""
        return bool(self.delta_net and part_of(name) == "ssm_out" and self.delta_net.moves("ssm_out"))


def layer_of(key: str) -> int:
    """The number of the decoder layer that a tensor of the checkpoint is in."""
    return int(re.findall(r"\.layers\.(\d+)\.", key)[0])


def part_of(name: str) -> str:
    """What a tensor of the file is in its layer: "blk.3.ssm_out.weight" → "ssm_out"."""
    return name.split(".")[2] if name.startswith("blk.") else name


def experts_name(layer: int | str, part: str) -> str:
    """The name of all experts' gate, up or down projections in the file."""
    return f"blk.{layer}.ffn_{part}_exps.weight"


def parts_of(experts: Experts) -> dict[str, str]:
    """A checkpoint's name of an expert's linear → what the file calls it."""
    return {experts.gate: "gate", experts.up: "up", experts.down: "down"}


def shape_in_file(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor there: a gate of one row is a vector, a convolution of each channel a matrix."""
    if part_of(name) == "ssm_conv1d":
        return shape[0], shape[-1]
    return shape[-1:] if name.endswith(("ffn_gate_inp_shexp.weight", "exp_probs_b.bias")) else shape


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads · size, …] of each head from (all first halves, all second halves) of the pairs that RoPE turns, as
    transformers has them, to pair after pair."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def halved(rows: Tensor, heads: int) -> Tensor:
    """Undoes `interleaved`."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """A tensor of the model: its shape, and a function that reads it, on any device.

    Args:
        turned: of stacked experts, they lie [K, N].
    """

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    turned: bool = False


@dataclass
class Planned:
    """A tensor of the file. `parts` are read one after another and stacked: [columns] or [rows, columns] as one, or one
    [rows, columns] for each expert."""

    name: str
    shape: tuple[int, ...]
    parts: list[Callable[[], Tensor]] = field(default_factory=list)

    @property
    def is_matrix(self) -> bool:
        """Whether it is quantized: everything but norms, biases, frequencies, routers and convolutions."""
        return len(self.shape) > 1 and part_of(self.name) not in WHOLE and self.name.endswith(".weight")

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
    layout = Layout(config, family)
    planned = {name: Planned(name, tuple(made.shape), [made.clone]) for name, made in rope_tensors(config).items()}
    for key, weight in weights.items():
        if BESIDE_TEXT.search(key) or NEXT_TOKEN.search(key) or key.endswith(DERIVED):
            continue
        if key.endswith("lm_head.weight") and config.tie_word_embeddings:
            continue  # llama.cpp takes the embedding
        for name, shape, part in _placed(key, weight, layout):
            entry = planned.setdefault(name, Planned(name, shape))
            entry.parts.append(part)
    for entry in planned.values():
        if len(entry.parts) > 1:
            entry.shape = (len(entry.parts), *entry.shape)
    _check_complete(planned, layout)
    return list(planned.values())


Placed = tuple[str, tuple[int, ...], Callable[[], Tensor]]


def _placed(key: str, weight: Weight, layout: Layout) -> Iterator[Placed]:
    """What of the file a weight of the checkpoint becomes: (name, shape of the part, how to make it)."""
    parts = parts_of(layout.family.experts) if layout.family.experts else {}
    if (match := EXPERT.fullmatch(key)) and match[3] in parts:
        yield experts_name(layer_of(key), parts[match[3]]), weight.shape, weight.read
    elif parts and (match := STACKED_EXPERTS.fullmatch(key)):
        yield from _stacked_experts(layer_of(key), match[2], bool(match[3]), weight, layout)
    else:
        name = layout.name(key)
        shape = shape_in_file(name, weight.shape)
        yield name, shape, lambda: layout.in_file(name, weight.read()).view(shape)


def _stacked_experts(layer: int, kind: str, bias: bool, weight: Weight, layout: Layout) -> Iterator[Placed]:
    """Experts that the checkpoint has stacked: [experts, rows, columns], gate above up; or their biases."""
    assert layout.family.experts
    parts = ("down",) if kind == "down_proj" else ("gate", "up")
    for index, part in enumerate(parts):
        name, size = experts_name(layer, part), len(parts)
        if bias:
            count, rows = weight.shape
            own = _rows_of(index, size, rows, layout.family.experts)
            yield name.replace(".weight", ".bias"), (count, rows // size), partial(_biases, weight, own)
            continue
        count, *sides = weight.shape
        rows, columns = reversed(sides) if weight.turned else sides
        own = _rows_of(index, size, rows, layout.family.experts)
        for expert in range(count):
            yield name, (rows // size, columns), partial(_expert, weight, layout.stacks, expert, own)


def _rows_of(index: int, parts: int, rows: int, experts: Experts) -> slice:
    """Which rows of a stacked matrix are of one of its parts."""
    each = rows // parts
    return slice(index, None, parts) if experts.interleaved else slice(index * each, (index + 1) * each)


def _biases(weight: Weight, rows: slice) -> Tensor:
    return weight.read()[:, rows]


def _expert(weight: Weight, stacks: Stacks, expert: int, rows: slice) -> Tensor:
    matrix = stacks.read(weight)[expert]
    return (matrix.mT if weight.turned else matrix)[rows].contiguous()


def _check_complete(planned: Mapping[str, Planned], layout: Layout) -> None:
    config, family, tensors = layout.config, layout.family, set(MODEL_TENSORS[layout.graph])
    experts = experts_of(config, family)
    needed = tensors - OPTIONAL - NEXT_TOKENS - (set() if family.gguf.dense_first else DENSE if experts else SPARSE)
    needed -= set() if getattr(config, "use_qk_norm", True) else {MODEL_TENSOR.ATTN_Q_NORM, MODEL_TENSOR.ATTN_K_NORM}
    needed -= set().union(*(APART[name] for name in family.fused))
    needed -= set() if "qkv_proj" in family.fused or layout.delta_net else {MODEL_TENSOR.ATTN_QKV}
    if family.mixer and "in_proj_qkvz" in family.mixer.inputs:
        needed -= {MODEL_TENSOR.ATTN_QKV, MODEL_TENSOR.ATTN_GATE}  # the graph takes them as one linear
    needed -= set() if family.gated_mlp else APART["gate_up_proj"]
    for tensor in sorted(needed, key=lambda tensor: TENSOR_NAMES[tensor]):
        template = TENSOR_NAMES[tensor]
        for layer in range(config.num_hidden_layers if "{bid}" in template else 1):
            if layout.delta_net and tensor in (MIXER if config.layer_types[layer] == "full_attention" else ATTENTION):
                continue
            dense = family.gguf.dense_first and layer < getattr(config, family.gguf.dense_first)
            if family.gguf.dense_first and tensor in (SPARSE | SHARED if dense else DENSE):
                continue
            name = template.format(bid=layer) + SUFFIXES.get(tensor, ".weight")
            if name not in planned:
                raise CheckpointError(
                    f"the checkpoint lacks the tensor that becomes {name} in the file", "re-download the checkpoint"
                )
            stacked = planned[name].parts
            if name.endswith("_exps.weight") and len(stacked) != experts:
                wrong = f"{name}: {len(stacked)} experts in the checkpoint, {experts} in config.json"
                raise CheckpointError(wrong, "re-download the checkpoint")
    if not config.tie_word_embeddings and "output.weight" not in planned and MODEL_TENSOR.OUTPUT in tensors:
        raise CheckpointError("the checkpoint lacks lm_head.weight", "re-download the checkpoint")


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A weight of the checkpoint to be.

    Attributes:
        name, shape: there.
        read: reads it on the CPU, decoded, or as a `QuantizedTensor` of `format`.
        format: what holds the file's own values; None for a weight that is decoded.
        type: of a linear layer that may be quantized, the file's name of its type, in words; else empty.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    format: Format | None = None
    type: str = ""

    def state(self) -> dict[str, Tensor]:
        """Name → tensor, of the entries that store it."""
        value = self.read()
        if not isinstance(value, QuantizedTensor):
            return {self.name: value.contiguous()}
        state = value.format.to_state(value.parts, self.shape, value.dtype)
        return {entry_name(self.name, suffix): part.contiguous() for suffix, part in state.items()}

    def nbytes(self, dtype: torch.dtype) -> int:
        """About how many bytes `state` has, where values that are not kept are of `dtype`."""
        bits = self.format.bits_per_weight(self.shape) if self.format else 8 * dtype.itemsize
        return int(torch.Size(self.shape).numel() * bits / 8)


def entries(file: GgufFile, config: Any, keep: bool = False) -> list[Entry]:
    """Everything in the checkpoint that the file stands for, in the order of the model. No values are read.

    Args:
        config: of transformers, of a family of the table.
        keep: linear layers as the file has them, where a format of ours holds its values.

    Raises:
        CheckpointError: the file lacks a tensor, or has one of another shape.
        ModelError: it has one that the model has no place for.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    family = family_of_config(config)
    assert family is not None
    reader = _Reader(file, Layout(config, family))
    linears = {f"{name}.weight" for name in quantizable(model)}
    found: list[Entry] = []
    used = set(ROPE_TENSORS)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for sources, entry in reader.placed(key, tuple(value.shape)):
            used.update(sources)
            found.append(reader.linear(sources[0], entry, keep) if key in linears else entry)
    extra = sorted(file.tensors.keys() - used)
    if extra:
        raise ModelError(
            f"{file.path}: {extra[0]} has no place in transformers' {config.model_type}", "use the original checkpoint"
        )
    return found


@dataclass(frozen=True)
class _Reader:
    """Finds and reads the tensors of one file."""

    file: GgufFile
    layout: Layout

    def placed(self, key: str, shape: tuple[int, ...]) -> Iterator[tuple[Sequence[str], Entry]]:
        """What a parameter of the model becomes: (the file's tensors, entry of the checkpoint)."""
        experts, dtype = self.layout.family.experts, self.layout.config.dtype
        if experts and (match := STACKED_EXPERTS.fullmatch(key)):
            if experts.interleaved:
                yield self._interleaved(key, match[2], shape)
                return
            count, rows, columns = shape
            named = {part: name for name, part in parts_of(experts).items()}
            parts = ("down",) if match[2] == "down_proj" else ("gate", "up")
            for part in parts:
                source, own = experts_name(layer_of(key), part), (rows // len(parts), columns)
                self._check(source, (count, *own))
                for index in range(count):
                    name = f"{_in_block(match[1], experts)}experts.{index}.{named[part]}.weight"
                    yield [source], Entry(name, own, partial(self.file.values, source, dtype, index))
            return
        source = self.layout.name(key)
        self._check(source, shape_in_file(source, shape))
        name = _in_block(key, experts) if experts and ".mlp.gate." in key else key
        yield [source], Entry(name, shape, lambda: self._restored(source).view(shape))

    def _interleaved(self, key: str, kind: str, shape: tuple[int, ...]) -> tuple[Sequence[str], Entry]:
        """A stack whose gate and up are apart in the file, or its biases: [E, K, N] and [E, N]."""
        parts = ("down",) if kind == "down_proj" else ("gate", "up")
        bias = key.endswith("_bias")
        sources = [experts_name(layer_of(key), part) for part in parts]
        sources = [name.replace(".weight", ".bias") for name in sources] if bias else sources
        count, *columns, rows = shape
        for source in sources:
            self._check(source, (count, rows // len(parts), *columns))

        def read() -> Tensor:
            whole = torch.stack([self.file.values(source, self.layout.config.dtype) for source in sources], 2)
            return whole.flatten(1, 2).mT if columns else whole.flatten(1, 2)

        return sources, Entry(key, shape, read)

    def linear(self, source: str, entry: Entry, keep: bool) -> Entry:
        """A linear layer's entry, in the file's own type if that is kept."""
        file = self.file
        type_ = file.tensors[source].tensor_type
        moved = self.layout.has_columns_moved(source)
        format_ = kept_format(type_, entry.shape) if keep and not moved else None
        if format_ is None and moved:
            return replace(entry, type=f"{type_.name} with columns in another order")
        if format_ is None:
            rows = f" of {entry.shape[0]} rows" if keep and type_ in KEPT else ""  # it is they that do not fit
            return replace(entry, type=type_.name + rows)

        def read() -> QuantizedTensor:
            blocks = file.blocks(source)
            try:
                parts = kept_parts(type_, self.layout.in_model(source, blocks))
            except CheckpointError as error:
                raise CheckpointError(f"{file.path}: {source} ({type_.name}): {error.message}", DAMAGED) from error
            return QuantizedTensor(format_, parts, entry.shape, self.layout.config.dtype)

        return replace(entry, read=read, format=format_, type=type_.name)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.file.shape(name)
        if found != shape:
            raise CheckpointError(f"{self.file.path}: {name} has shape {found}, expected {shape}", DAMAGED)

    def _restored(self, source: str) -> Tensor:
        """A tensor's values as transformers wants them."""
        dtype = self.layout.config.dtype
        value = self.file.values(source, torch.float32 if self.layout.computed(source) else dtype)
        return self.layout.in_model(source, value).to(dtype)


def _in_block(key: str, experts: Experts) -> str:
    """A name in transformers' mixture as checkpoints have it."""
    return key.replace(".mlp.", f".{experts.block}.")
