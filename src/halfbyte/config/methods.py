"""Keys that belong to some methods of training only, by TRL's names: which methods, their defaults there, their values.

A key of this module says in its field which methods have it (`methods_of`). Given with another method it is refused.
A default that differs from method to method stands in `DEFAULTS`, and the field's own is None.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from .section import Section

Weight = Annotated[float, Field(ge=0)]
PAIRED = ("dpo", "orpo", "simpo", "cpo")
WITH_REFERENCE = ("dpo", "kto")
COMPARING = (*PAIRED, "kto", "reward", "prm")  # answers that the data has
LOSS_TYPES: dict[str, tuple[str, ...]] = {
    "dpo": (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
        *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    ),
    "cpo": ("sigmoid", "hinge", "ipo"),
    "kto": ("kto", "apo_zero_unpaired"),
    "grpo": ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
}
# What a loss type is called where it is a method here, or an option of one.
LOSS_METHODS = {"simpo": "method: simpo", "orpo": "method: orpo", "alphapo": "method: simpo with alpha"}
# Losses of the difference of two rewards, which alone other divergences than the reverse KL are defined for.
OF_DIFFERENCES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
# PEFT's types of an adapter with a head that scores texts, or each token: labels of the head, and what loads it.
SCORES = {"SEQ_CLS": (1, "AutoModelForSequenceClassification"), "TOKEN_CLS": (2, "AutoModelForTokenClassification")}
DEFAULTS: dict[str, dict[str, Any]] = {  # TRL's
    "dpo": {"beta": 0.1, "loss_type": "sigmoid"},
    "orpo": {"beta": 0.1},
    "simpo": {"beta": 0.1, "cpo_alpha": 0.0},
    "cpo": {"beta": 0.1, "loss_type": "sigmoid", "cpo_alpha": 1.0},
    "kto": {"beta": 0.1, "loss_type": "kto"},
    "reward": {},
    "prm": {},
    "grpo": {"beta": 0.0, "loss_type": "dapo", "num_generations": 8},
    "rloo": {"beta": 0.05, "num_generations": 2},
    "gkd": {"beta": 1.0},  # of its DistillationTrainer
}
# The learning rate of a full model is TRL's; adapters learn with ten times that ("LoRA Without Regret", 2025), and
# TRL's for reward models is theirs already.
SCORING = {True: 1e-4, False: 1e-5}
RATES = {"reward": SCORING, "prm": SCORING}
RATE = {True: 1e-5, False: 1e-6}
WITH_DEFAULTS = frozenset({"learning_rate"}.union(*DEFAULTS.values()))


def defaults_of(method: str, *, adapter: bool = True) -> dict[str, Any]:
    """The defaults of `method`, key → value, for keys whose default it decides.

    Args:
        adapter: whether an adapter is trained, not the whole model.
    """
    if method not in DEFAULTS:
        return {}
    return {**DEFAULTS[method], "learning_rate": RATES.get(method, RATE)[adapter]}


def methods_of(field: FieldInfo) -> tuple[str, ...]:
    """The methods that a key is of; none: of all."""
    extra = field.json_schema_extra
    return tuple(extra["methods"]) if isinstance(extra, dict) else ()  # type: ignore[arg-type]


def of(methods: tuple[str, ...], default: Any, description: str, **bounds: Any) -> Any:
    """The field of a key that only `methods` have."""
    said = f"{', '.join(methods)}: {description}"
    return Field(default, description=said, json_schema_extra={"methods": list(methods)}, **bounds)


class PreferenceSection(Section):
    """Preference training"""

    beta: Weight | None = of(
        (*PAIRED, "kto", "grpo", "rloo", "gkd"),
        None,
        "how closely the reference is kept, or the reward's scale; gkd: from 0, KL(teacher, model), to 1, KL(model,"
        " teacher); default: by method",
    )
    loss_type: str | list[str] | None = of(
        tuple(LOSS_TYPES),
        None,
        "which loss, by TRL's name; of dpo several, weighed by loss_weights; default: by method",
    )
    loss_weights: list[float] | None = of(("dpo",), None, "a weight for each loss_type; default: 1 each")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = of(
        ("dpo", "cpo"), 0.0, "the share of pairs taken to be labelled the wrong way round (robust, exo_pair, aot; cpo)"
    )
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = of(
        ("dpo",), "reverse_kl", "the divergence from the reference"
    )
    f_alpha_divergence_coef: float = of(("dpo",), 0.5, "α of alpha_divergence")
    ld_alpha: Annotated[float, Field(ge=0, le=1)] | None = of(
        ("dpo",), None, "weight of an answer's tokens beyond the length of the shorter one (LD-DPO); default: 1"
    )
    use_weighting: bool = of(("dpo",), False, "weigh pairs by how likely the policy is to write them (WPO)")
    discopop_tau: Annotated[float, Field(gt=0)] = of(("dpo",), 0.05, "temperature of discopop")
    disable_dropout: bool = of(
        (*COMPARING, "grpo", "rloo", "gkd"),
        True,
        "turn the base model's dropout off, which a comparison with a reference or with sampled answers cannot have;"
        " lora_dropout stays",
    )
    precompute_ref_log_probs: Literal["auto"] | bool = of(
        WITH_REFERENCE,
        "auto",
        "compute the reference's log-probs once, before training, and keep them; false: each step",
    )
    simpo_gamma: Weight = of(("simpo",), 0.5, "margin between the rewards of a pair")
    cpo_alpha: Weight | None = of(("cpo", "simpo"), None, "weight of the chosen answer's NLL; default: by method")
    alpha: float = of(("cpo", "simpo"), 0.0, "AlphaPO's: rewards are (1 - p^-alpha)/alpha; 0: log p")
    desirable_weight: Weight = of(("kto",), 1.0, "weight of desirable answers")
    undesirable_weight: Weight = of(("kto",), 1.0, "weight of undesirable answers")
    center_rewards_coefficient: Weight | None = of(
        ("reward",), None, "weight of the squared sum of a pair's rewards, which keeps them around 0; default: 0"
    )
    step_separator: str = of(("prm",), "\n", "written behind each step; its last token carries the step's label")
