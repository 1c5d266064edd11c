"""Training methods: their names, loss types and defaults, and the keys of preference training, named as in TRL.

Each key of a method is declared with `method_field`, which records the methods that have it; any other method refuses
it. A default that depends on the method is in `DEFAULTS`, and the field's own default is None.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from .section import Section

Weight = Annotated[float, Field(ge=0)]
PAIRED = ("dpo", "orpo", "simpo", "cpo")
WITH_REFERENCE = ("dpo", "kto")
COMPARING = (*PAIRED, "kto", "reward", "prm")  # methods that train on rated answers of the data
CLASSIFYING = ("sequence_classification", "token_classification")
RETRIEVING = ("embedding", "reranker")
TASKS = (*CLASSIFYING, *RETRIEVING)  # methods whose model scores or embeds texts and generates none
LOSS_TYPES: dict[str, tuple[str, ...]] = {
    "dpo": (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
        *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    ),
    "cpo": ("sigmoid", "hinge", "ipo"),
    "kto": ("kto", "apo_zero_unpaired"),
    "grpo": ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "embedding": ("multiple_negatives_ranking", "cosent", "cosine_similarity"),
    "reranker": ("binary_cross_entropy", "ranknet", "listnet"),
}
# Loss types of other tools that are a method here, or an option of one.
LOSS_METHODS = {"simpo": "method: simpo", "orpo": "method: orpo", "alphapo": "method: simpo with alpha"}
# DPO losses of the difference of two rewards. Only they are defined for divergences other than the reverse KL.
DIFFERENCE_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
# PEFT's task types of models that generate no text: labels of the score head of a reward model (0: no head), and the
# class of transformers that loads them.
SCORES = {
    "SEQ_CLS": (1, "AutoModelForSequenceClassification"),
    "TOKEN_CLS": (2, "AutoModelForTokenClassification"),
    "FEATURE_EXTRACTION": (0, "AutoModel"),
}
DEFAULTS: dict[str, dict[str, Any]] = {  # as in TRL
    "dpo": {"beta": 0.1, "loss_type": "sigmoid"},
    "orpo": {"beta": 0.1},
    "simpo": {"beta": 0.1, "cpo_alpha": 0.0},
    "cpo": {"beta": 0.1, "loss_type": "sigmoid", "cpo_alpha": 1.0},
    "kto": {"beta": 0.1, "loss_type": "kto"},
    "reward": {},
    "prm": {},
    "grpo": {"beta": 0.0, "loss_type": "dapo", "num_generations": 8},
    "rloo": {"beta": 0.05, "num_generations": 2},
    "gkd": {"beta": 1.0},  # as in TRL's DistillationTrainer
    "sequence_classification": {},
    "token_classification": {},
    "embedding": {"loss_type": "multiple_negatives_ranking"},
    "reranker": {"loss_type": "binary_cross_entropy"},
}
# Learning rates with an adapter (True) and for full fine-tuning (False). Full fine-tuning uses TRL's default, adapters
# ten times as much ("LoRA Without Regret", 2025). TRL's default for reward models is meant for adapters already.
SCORING = {True: 1e-4, False: 1e-5}
RATES = dict.fromkeys(("reward", "prm", *TASKS), SCORING)
RATE = {True: 1e-5, False: 1e-6}
WITH_DEFAULTS = frozenset({"learning_rate"}.union(*DEFAULTS.values()))


def defaults_of(method: str, *, adapter: bool = True) -> dict[str, Any]:
    """Return the defaults, by key, of the keys whose default depends on `method`.

    Args:
        adapter: whether an adapter is trained instead of the full model.
    """
    if method not in DEFAULTS:
        return {}
    return {**DEFAULTS[method], "learning_rate": RATES.get(method, RATE)[adapter]}


def methods_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the methods that have a key; empty if all methods have it."""
    extra = field.json_schema_extra
    return tuple(extra["methods"]) if isinstance(extra, dict) else ()  # type: ignore[arg-type]


def method_field(methods: tuple[str, ...], default: Any, description: str, **bounds: Any) -> Any:
    """Declare a key that only `methods` have; its description begins with their names."""
    full = f"{', '.join(methods)}: {description}"
    return Field(default, description=full, json_schema_extra={"methods": list(methods)}, **bounds)


class PreferenceSection(Section):
    """Preference training"""

    beta: Weight | None = method_field(
        (*PAIRED, "kto", "grpo", "rloo", "gkd"),
        None,
        "weight of the divergence from the reference, or scale of the reward; gkd: interpolation from 0, KL(teacher,"
        " model), to 1, KL(model, teacher); default: by method",
    )
    loss_type: str | list[str] | None = method_field(
        tuple(LOSS_TYPES),
        None,
        "loss by its name in TRL or sentence-transformers, for dpo also a list of losses with loss_weights; default: by"
        " method",
    )
    loss_weights: list[float] | None = method_field(("dpo",), None, "weight of each loss_type; default: 1 each")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = method_field(
        ("dpo", "cpo"),
        0.0,
        "assumed share of pairs with a wrong label (with dpo, for loss types robust, exo_pair and aot)",
    )
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = method_field(
        ("dpo",), "reverse_kl", "divergence from the reference"
    )
    f_alpha_divergence_coef: float = method_field(("dpo",), 0.5, "α of f_divergence_type: alpha_divergence")
    ld_alpha: Annotated[float, Field(ge=0, le=1)] | None = method_field(
        ("dpo",),
        None,
        "weight of the tokens by which an answer is longer than the other of its pair (LD-DPO); default: 1",
    )
    use_weighting: bool = method_field(("dpo",), False, "weight pairs by their probability under the policy (WPO)")
    discopop_tau: Annotated[float, Field(gt=0)] = method_field(("dpo",), 0.05, "temperature of loss_type: discopop")
    disable_dropout: bool = method_field(
        (*COMPARING, "grpo", "rloo", "gkd", *TASKS),
        True,
        "disable the base model's dropout, which would distort the comparison with the reference or with sampled"
        " answers; lora_dropout still applies",
    )
    precompute_ref_log_probs: Literal["auto"] | bool = method_field(
        WITH_REFERENCE,
        "auto",
        "compute the reference's log-probabilities once before training; false: compute them in each step",
    )
    simpo_gamma: Weight = method_field(("simpo",), 0.5, "target margin between the rewards of a pair")
    cpo_alpha: Weight | None = method_field(
        ("cpo", "simpo"), None, "weight of the NLL of the chosen answer; default: by method"
    )
    alpha: float = method_field(("cpo", "simpo"), 0.0, "α of AlphaPO's rewards (1 - p^-α)/α; 0: rewards are log p")
    desirable_weight: Weight = method_field(("kto",), 1.0, "weight of desirable answers")
    undesirable_weight: Weight = method_field(("kto",), 1.0, "weight of undesirable answers")
    center_rewards_coefficient: Weight | None = method_field(
        ("reward",), None, "weight of the squared sum of the rewards of a pair, which centers them at 0; default: 0"
    )
    step_separator: str = method_field(("prm",), "\n", "text after each step; its last token has the label of the step")
