"""The table of adapters: LoRA, DoRA, other types of PEFT's, and kinds that `register_adapter` adds from outside.

PEFT builds and saves every adapter. A row says which of PEFT's types it is, which keys of a run it reads, and what
halfbyte can do with it beyond PEFT's own forward. A run chooses by the key `peft_type`; among rows of one type, by a
key that is true (`use_dora`). adapter_config.json has the type and that key, too, so the row of a saved
adapter is found in the same way.

The import loads neither torch nor PEFT, since configurations are read without them. Names of PEFT's LoRA factors are
here and in `layers.plain`.

Sources: LoRA (Hu et al. 2021, §4.1), rsLoRA (Kalajdzievski 2023), DoRA (Liu et al. 2024).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

# Names in PEFT's parameters
LORA_A = "lora_A"
LORA_B = "lora_B"
LORA_EMBEDDING = "lora_embedding_"
PREFIX = "base_model.model."  # of all names in an adapter's file

# Keys of a run and axes of `parallel` that only some kinds of adapters support.
FEATURES = ("target_parameters", "qat_scheme", "rollout", "shard", "tensor", "context", "pipeline")

Header = Mapping[str, Mapping[str, Any]]  # of a safetensors file: name → dtype, shape and offsets


class Factors(NamedTuple):
    """The update of a weight as scaling · B·A, with tensors a [r, K] and b [N, r]."""

    a: Any
    b: Any
    scaling: float


@dataclass(frozen=True)
class AdapterKind:
    """A row of the table.

    Attributes:
        name: in messages.
        peft_type: PEFT's type, e.g. LORA. PEFT must know it.
        options: returns the options of PEFT's config for a run's adapter section. Added for every kind: task_type,
            revision, target_modules, modules_to_save; and target_parameters where they are not refused.
        tensors: pattern of the adapter's tensors in its file; the group `module` is the adapted module, if it has one.
        switch: the boolean key that chooses this row among those of its type; "": the row if no switch is true.
        keys: keys of the adapter section that it reads. Any other one must have its default.
        reported: options of PEFT's config that are reported if a continued adapter has others, and on the model card.
        fused: whether halfbyte's fused forwards read its factors cast once a forward.
        reads_base: whether it is initialised from the base's weights. Its outputs may differ by rounding if reloaded.
        file_problem: returns why a tensor of a file contradicts its adapter_config.json, or None. Arguments: PEFT's
            config, the tensor's match of `tensors`, and the file's header.
        factors: returns the update of PEFT's layer as two matrices, or the name of a part that matrices cannot hold.
            GGUF adapters and inference servers need the matrices; without the function both refuse.
        init_key: option of PEFT's config that chooses the initialisation.
        inits_keeping_base: its values that leave the base's weights as they are; others need the base in 16 bits.
        unmerged: options that PEFT's merge of a layer does not cover: merging such an adapter is refused.
        unmergeable: why no such adapter can be merged, or "".
        merges_bias: whether PEFT's merge also changes the bias of a layer.
        adapts_norms: whether it adapts norms, by PEFT's default names of them; otherwise linears.
        refused: a name of `FEATURES` → why the adapter cannot be combined with it. Default: all.
    """

    name: str
    peft_type: str
    options: Callable[[Any], dict[str, Any]]
    tensors: re.Pattern[str]
    switch: str = ""
    keys: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()
    fused: bool = False
    reads_base: bool = False
    file_problem: Callable[[Any, re.Match[str], Header], str | None] | None = None
    factors: Callable[[Any], Factors | str] | None = None
    init_key: str = ""
    inits_keeping_base: tuple[Any, ...] = ()
    unmerged: tuple[str, ...] = ()
    unmergeable: str = ""
    merges_bias: bool = False
    adapts_norms: bool = False
    refused: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(FEATURES, "it is not supported"))

    @property
    def key(self) -> str:
        """The key that chooses the row."""
        return self.switch or "peft_type"

    @property
    def chosen(self) -> str:
        """The key that chooses the row, with its value."""
        return f"{self.switch}: true" if self.switch else f"peft_type: {self.peft_type.lower()}"

    @property
    def without(self) -> str:
        """How to choose another adapter."""
        return f"set {self.switch}: false" if self.switch else "set another peft_type"

    def keeps_base(self, config: Mapping[str, Any]) -> bool:
        """Return whether the initialisation in adapter_config.json left the base's weights as they are."""
        return not self.init_key or config.get(self.init_key, True) in self.inits_keeping_base


def register_adapter(row: AdapterKind) -> None:
    """Add a kind of adapter to the table."""
    ADAPTERS.append(row)


def adapter_types() -> list[str]:
    """Return the values of `peft_type`, in lower case."""
    return list(dict.fromkeys(row.peft_type.lower() for row in ADAPTERS))


def find_adapter_kind(config: Any) -> AdapterKind | None:
    """Return the row that a configuration chooses, or None if PEFT's type is not in the table.

    Args:
        config: a run's keys, PEFT's config, or either as a mapping.
    """
    keys = config if isinstance(config, Mapping) else vars(config)
    peft_type = adapter_type_of(keys)
    rows = [row for row in ADAPTERS if row.peft_type == peft_type]
    switched = [row for row in rows if row.switch and keys.get(row.switch)]
    return next(iter(switched or [row for row in rows if not row.switch]), None)


def adapter_kind(config: Any) -> AdapterKind:
    """Return the row that a checked configuration chooses."""
    row = find_adapter_kind(config)
    assert row is not None, "the configuration was checked"
    return row


def adapter_type_of(keys: Mapping[str, Any]) -> str:
    """Return PEFT's type in upper case. Configurations without one are LoRA's."""
    peft_type = keys.get("peft_type") or "LORA"
    return str(getattr(peft_type, "value", peft_type)).upper()


# --- LoRA and DoRA ---------------------------------------------------------------------------------------------------


def factor_of(name: str) -> Literal["A", "B", "embedding"] | None:
    """Return which factor of LoRA a parameter of this name is; "embedding": either factor of
    the adapter of an embedding."""
    if LORA_EMBEDDING in name:
        return "embedding"
    return "B" if LORA_B in name else "A" if LORA_A in name else None


def _as_int(alpha: float) -> float:
    """Write 16.0 as 16 in adapter_config.json, as other tools do; PEFT annotates int and accepts a float."""
    return int(alpha) if float(alpha).is_integer() else alpha


def _lora_file_problem(config: Any, match: re.Match[str], header: Header) -> str | None:
    key = match.string
    factor = match["factor"]
    if factor == "magnitude_vector":
        return None if config.use_dora else "use_dora is false"
    side = factor[-1]
    partner = f"{key[: match.end('factor') - 1]}{'AB'[side == 'A']}{key[match.end('factor') :]}"
    if partner not in header:
        return f"{partner} is missing"
    from peft.utils.other import get_pattern_key

    module = match["module"].removeprefix(PREFIX)
    rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), module), config.r)
    saved = header[key]["shape"][side == "B"]
    if saved % rank or (saved != rank and not config.target_parameters):  # stacked experts have E · r
        return f"it has a rank of {saved}, not {rank}"
    return None


def _lora_factors(layer: Any) -> Factors | str:
    if not layer.lora_A:  # an embedding has lora_embedding_A
        return "an adapter of the embedding"
    if layer.lora_bias["default"]:
        return "a bias of an adapter (lora_bias)"
    return Factors(layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"])


LORA = AdapterKind(
    name="LoRA",
    peft_type="LORA",
    options=lambda adapter: {
        "r": adapter.r,
        "lora_alpha": _as_int(adapter.lora_alpha),
        "lora_dropout": adapter.lora_dropout,
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
        "lora_bias": adapter.lora_bias,
        "rank_pattern": dict(adapter.rank_pattern),
        "alpha_pattern": {name: _as_int(alpha) for name, alpha in adapter.alpha_pattern.items()},
        "init_lora_weights": adapter.init_lora_weights,
        "ensure_weight_tying": adapter.ensure_weight_tying,
    },
    tensors=re.compile(r"(?P<module>.+)\.lora_(?P<factor>A|B|embedding_A|embedding_B|magnitude_vector)(?:\.weight)?"),
    keys=(
        *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"),
        *("init_lora_weights", "loftq_config", "corda_config", "eva_config", "lora_ga_config"),
        *("loraplus_lr_ratio", "loraplus_lr_embedding", "lora_preconditioner", "lora_fa", "lora_bias"),
        *("add_tokens", "add_special_tokens", "trainable_token_indices", "resize_token_embeddings_to_multiple_of"),
        "ensure_weight_tying",
    ),
    reported=("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "lora_bias"),
    fused=True,
    file_problem=_lora_file_problem,
    factors=_lora_factors,
    init_key="init_lora_weights",
    inits_keeping_base=(True, False, "gaussian", "orthogonal", "eva", "mica"),
    unmerged=("layer_replication", "alora_invocation_tokens", "arrow_config", "lora_bias"),
    refused={},
)
DORA = replace(
    LORA,
    name="DoRA",
    switch="use_dora",
    reads_base=True,
    factors=None,
    refused={
        "target_parameters": "PEFT does not support DoRA on parameters",
        "qat_scheme": "only LoRA without DoRA can be merged in every step",
        "rollout": "vLLM cannot apply it",
    },
)


# --- PEFT's other types ----------------------------------------------------------------------------------------------


def _peft_row(peft_type: str, name: str, defaults: Mapping[str, Any] | None = None, **properties: Any) -> AdapterKind:
    """Return the row of a type whose options are in `peft_config`, and whose modules run PEFT's own forward.

    Args:
        defaults: options of PEFT's that have no default which fits every model.
    """
    return AdapterKind(
        name=name,
        peft_type=peft_type,
        options=lambda adapter: {**(defaults or {}), **(adapter.peft_config or {})},
        tensors=re.compile(r"(?P<module>.+)\.\w+"),
        keys=("peft_config",),
        **properties,
    )


_ONE_DTYPE = "its forward needs a base and inputs of one dtype, which the check of a merge does not have"
ADAPTERS = [
    LORA,
    DORA,
    _peft_row("BEFT", "BEFT", unmergeable="it trains biases, which the base's linears may not have"),
    _peft_row("BOFT", "BOFT"),
    _peft_row("C3A", "C3A"),
    _peft_row("DEFT", "DEFT"),
    _peft_row("DELORA", "DeLoRA", reads_base=True),
    _peft_row("FOURIERFT", "FourierFT"),
    _peft_row("HIRA", "HiRA"),
    _peft_row("HRA", "HRA"),
    _peft_row("IA3", "(IA)³", {"feedforward_modules": []}, merges_bias=True),
    _peft_row("LILY", "Lily", unmergeable="PEFT has no merge of it"),
    _peft_row("LN_TUNING", "LayerNorm tuning", adapts_norms=True, unmergeable="it replaces norms", reads_base=True),
    _peft_row("LOHA", "LoHa"),
    _peft_row("LOKR", "LoKr"),
    _peft_row("MISS", "MiSS"),
    _peft_row("PEANUT", "PEANuT"),
    _peft_row("PSOFT", "PSOFT", reads_base=True),
    _peft_row("RANDLORA", "RandLoRA"),
    _peft_row("ROAD", "RoAd", merges_bias=True),
    _peft_row("SUPERTUNING", "Super-Tuning", reads_base=True, unmergeable=_ONE_DTYPE),
    _peft_row("TINYLORA", "TinyLoRA", reads_base=True),
    _peft_row("UNILORA", "Uni-LoRA"),
    _peft_row("VBLORA", "VB-LoRA"),
    _peft_row("VERA", "VeRA"),
    _peft_row("WAVEFT", "WaveFT"),
]

# PEFT's types that a run does not train → the reason, and what to do instead.
_VIRTUAL = "it puts virtual tokens before each row, and halfbyte's rows, positions and caches have none"
_OWN_LOOP = "train it with PEFT and transformers' Trainer on the model of halfbyte.load_model"
_READS_VALUES = "PEFT builds it from the values of the weights, which the memory plan does not have"
_NOT_RECOMPUTED = "its gradients differ where fused layers compute activations again in the backward"
UNTRAINED_TYPES = {
    **dict.fromkeys(("GRALORA", "OFT", "PVERA"), (_NOT_RECOMPUTED, _OWN_LOOP)),
    **dict.fromkeys(("ADAMSS", "FROD", "SHIRA"), (_READS_VALUES, _OWN_LOOP)),
    **dict.fromkeys(("CARTRIDGE", "CPT", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"), (_VIRTUAL, _OWN_LOOP)),
    **dict.fromkeys(("MULTITASK_PROMPT_TUNING", "POLY"), ("its forward needs a task id for each row", _OWN_LOOP)),
    "ADALORA": ("PEFT moves its ranks in a call after each step", "set init_lora_weights: eva, which moves them once"),
    "ADAPTION_PROMPT": ("it wraps attentions, whose forward halfbyte replaces", _OWN_LOOP),
    "GLORA": ("PEFT adapts linears of class nn.Linear only, not quantized ones", "set another peft_type"),
    "OSF": ("it multiplies factors in the base's dtype by trained ones in the adapter's", _OWN_LOOP),
    "SHADOW": ("it wraps decoder layers, and trains a second model with a loss of its own", _OWN_LOOP),
    "TRAINABLE_TOKENS": ("a run trains tokens in addition to LoRA", "set trainable_token_indices, and peft_type: lora"),
    "XLORA": ("it mixes adapters that are trained already", _OWN_LOOP),
}
