"""The table of LoRA's initialisations: what each reads, what it does to the base, its options and its refusals.

Most are PEFT's, whose functions compute them. `adapters.initial` gives them each 16-bit weight while the model loads,
and stores the rest of the weight in the run's format.

Sources: PiSSA (Meng et al. 2024), OLoRA (Büyükakyüz 2024), LoftQ (Li et al. 2023, Algorithm 1), MiCA
(arXiv:2604.01694), QERA (Zhang et al. 2024, arXiv:2410.06040), CorDA (Yang et al. 2024), EVA (Paischer et al. 2024),
LoRA-GA (Wang et al. 2024), and for `orthogonal` PEFT's documentation of LoraConfig.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..optim.options import Option

Reading = Literal["nothing", "weights", "inputs", "gradients", "stored"]


@dataclass(frozen=True)
class Initialisation:
    """A row of the table.

    Attributes:
        name: value of `init_lora_weights`.
        reads: what it is computed from: "nothing" (PEFT draws the factors when it adds the adapter), the 16-bit
            "weights" of the base while they load; these and the "inputs" of its 16-bit layers on rows of the data, or
            the "gradients" of the stored base; or the inputs of the "stored" base alone.
        starts_at_zero: whether B·A is 0 before the first step.
        changes_base: whether the base is stored without the initial s·B·A.
        directions: number of singular vectors that it needs for each rank; of an [N, K] weight there are min(N, K).
        quantized_only: whether it compensates for quantization, and has no meaning in 16 bits.
        frozen: the factor that is not trained; "": both are.
        options_key: the key of its options; "": it has none.
        options: the options of that key.
    """

    name: str
    reads: Reading = "nothing"
    starts_at_zero: bool = True
    changes_base: bool = False
    directions: int = 0
    quantized_only: bool = False
    frozen: Literal["", "B"] = ""
    options_key: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)


LOFTQ_BITS = "loftq_bits"
LOFTQ_ITERATIONS = "loftq_iter"
LOFTQ_WEIGHTED = "weighted"
CORDA_METHOD = "corda_method"
EVA_RHO = "rho"
INITIALISATIONS = (
    Initialisation("true"),
    Initialisation("false", starts_at_zero=False),
    Initialisation("gaussian"),
    Initialisation("orthogonal"),
    Initialisation("pissa", "weights", starts_at_zero=False, changes_base=True, directions=1),
    Initialisation("olora", "weights", starts_at_zero=False, changes_base=True, directions=1),
    Initialisation("mica", "weights", directions=1, frozen="B"),
    Initialisation(
        "loftq",
        "weights",
        starts_at_zero=False,
        directions=1,
        quantized_only=True,
        options_key="loftq_config",
        options={
            LOFTQ_BITS: Option(None, minimum=1),
            LOFTQ_ITERATIONS: Option(1, minimum=1),
            LOFTQ_WEIGHTED: Option(False),
        },
    ),
    Initialisation("qera", "inputs", starts_at_zero=False, directions=1, quantized_only=True),
    Initialisation(
        "corda",
        "inputs",
        starts_at_zero=False,
        changes_base=True,
        directions=1,
        options_key="corda_config",
        options={CORDA_METHOD: Option("ipm", ("ipm", "kpm"))},
    ),
    Initialisation(
        "eva",
        "stored",
        options_key="eva_config",
        options={
            EVA_RHO: Option(2.0, minimum=1.0),
            "tau": Option(0.99, minimum=0.0, maximum=1.0),
            "use_label_mask": Option(True),
            "whiten": Option(False),
            "adjust_scaling_factors": Option(True),
        },
    ),
    Initialisation(
        "lora_ga",
        "gradients",
        starts_at_zero=False,
        changes_base=True,
        directions=2,
        options_key="lora_ga_config",
        options={
            "direction": Option("ArB2r", ("ArBr", "A2rBr", "ArB2r", "random")),
            "scale": Option("stable", ("stable", "weight_svd", "gd_scale", "unit")),
            "stable_gamma": Option(16, minimum=1),
        },
    ),
)
OPTION_KEYS = tuple(row.options_key for row in INITIALISATIONS if row.options_key)
_ITERATED = re.compile(r"pissa_niter_\d+")  # PiSSA by a randomized SVD


def initialisation_names() -> list[str]:
    """Return the values of `init_lora_weights` for messages."""
    names = [row.name for row in INITIALISATIONS]
    names.insert(names.index("pissa") + 1, "pissa_niter_N")
    return names


def find_initialisation(value: bool | str) -> Initialisation | None:
    """Return the row of a value of `init_lora_weights`, or None."""
    name = str(value).lower() if isinstance(value, bool) else value
    name = "pissa" if _ITERATED.fullmatch(name) else name
    return next((row for row in INITIALISATIONS if row.name == name), None)


def initialisation(config: Any) -> Initialisation:
    """Return the row that a checked configuration chooses.

    Args:
        config: a run's keys, or their adapter section.
    """
    row = find_initialisation(config.init_lora_weights)
    assert row is not None, "the configuration was checked"
    return row


def read_by(config: Any) -> Reading:
    """Return what the chosen initialisation is computed from; see `Initialisation.reads`."""
    row = initialisation(config)
    weighted = row.name == "loftq" and option(config, LOFTQ_WEIGHTED)
    return "inputs" if weighted else row.reads


def option(config: Any, name: str) -> Any:
    """Return the value of an option of the chosen initialisation, or its default."""
    return all_options(config)[name]


def all_options(config: Any) -> dict[str, Any]:
    """Return the options of the chosen initialisation, with defaults for those that are not given."""
    row = initialisation(config)
    options = getattr(config, row.options_key) if row.options_key else None
    return {name: option.default for name, option in row.options.items()} | (options or {})
