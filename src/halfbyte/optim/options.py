"""Options of an optimizer: the names, types, defaults and limits that its row declares for `optim_args`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Value = bool | int | float | str
TRUE, FALSE = ("true", "yes"), ("false", "no")


@dataclass(frozen=True)
class Option:
    """One key of `optim_args`.

    Attributes:
        default: value of the option if it is not given; its type is the option's type. None: an optional integer.
        optional: `default` gives the type only; an option that is not given is None.
        choices: allowed values; empty: any.
        above, minimum, maximum: limits of a number; `above` excludes its bound.
    """

    default: Value | None
    choices: tuple[Value, ...] = ()
    above: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    optional: bool = False

    def accepts(self, value: Any) -> bool:
        """Return whether `value` has the option's type and is within its limits."""
        if isinstance(self.default, bool) or isinstance(value, bool):
            return isinstance(self.default, bool) and isinstance(value, bool)
        if self.choices:
            return value in self.choices
        if not isinstance(value, int | float if isinstance(self.default, float) else int):
            return False
        above = self.above is None or value > self.above
        return (
            above
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
        )

    def allowed(self) -> str:
        """Return the allowed values in words."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.choices:
            return " or ".join(map(str, self.choices))
        limits = (("above", self.above), ("from", self.minimum), ("to", self.maximum))
        number = "a number" if isinstance(self.default, float) else "a whole number"
        return " ".join([number, *(f"{word} {limit:g}" for word, limit in limits if limit is not None)])


def parse_options(text: str) -> dict[str, Value]:
    """Parse transformers' `key=value, key=value`; numbers, true and false become values, anything else stays text.

    Raises:
        ValueError: an entry is not `key=value`.
    """
    options: dict[str, Value] = {}
    for entry in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = (p.strip() for p in entry.partition("="))
        if not (key and equals and value):
            raise ValueError(entry)
        options[key] = _scalar(value)
    return options


def _scalar(text: str) -> Value:
    if text.lower() in (*TRUE, *FALSE):
        return text.lower() in TRUE
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text


def option_values(declared: Mapping[str, Option], options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the value of every declared option, with numbers as floats where the default is one."""
    values: dict[str, Any] = {}
    for name, option in declared.items():
        value = (options or {}).get(name, None if option.optional else option.default)
        values[name] = float(value) if isinstance(option.default, float) and value is not None else value
    return values


# --- options of the rows, by the names and with the defaults of transformers, q-galore-torch and LLaMA-Factory -------

SGD_OPTIONS = {"momentum": Option(0.0, minimum=0), "dampening": Option(0.0), "nesterov": Option(False)}
ADAGRAD_OPTIONS = {"lr_decay": Option(0.0, minimum=0), "eps": Option(1e-10, minimum=0)}
RMSPROP_OPTIONS = {
    "momentum": Option(0.0, minimum=0), "alpha": Option(0.99, minimum=0), "eps": Option(1e-8, minimum=0),
    "centered": Option(False),
}  # fmt: skip
LAMB_OPTIONS = {"eps": Option(1e-6, minimum=0)}
LARS_OPTIONS = {"momentum": Option(0.9, minimum=0, maximum=1), "trust_coefficient": Option(1e-3, above=0)}
ADEMAMIX_OPTIONS = {
    "beta3": Option(0.9999, minimum=0, maximum=1), "alpha": Option(5.0), "eps": Option(1e-8, minimum=0),
    "t_alpha": Option(None, minimum=1), "t_beta3": Option(None, minimum=1),
}  # fmt: skip
PROJECTION_OPTIONS = {
    "rank": Option(128, minimum=1),
    "update_proj_gap": Option(200, minimum=1),
    "scale": Option(0.25, above=0),
    "proj_type": Option("std", ("std", "reverse_std", "right", "left", "full")),
}
Q_GALORE_OPTIONS = PROJECTION_OPTIONS | {
    "quant_n_bit": Option(4, choices=(4, 8)),
    "quant_group_size": Option(256, minimum=1),
    "cos_threshold": Option(0.4, minimum=-1, maximum=1),
    "gamma_proj": Option(2.0, minimum=1),
    "queue_size": Option(5, minimum=1),
}
APOLLO_OPTIONS = {
    "rank": Option(128, minimum=1),
    "update_proj_gap": Option(200, minimum=1),
    "scale": Option(1.0, above=0),
    "proj": Option("random", ("random", "svd")),
    "proj_type": Option("std", ("std", "reverse_std", "right", "left")),
    "scale_type": Option("channel", ("channel", "tensor")),
}
APOLLO_MINI_OPTIONS = APOLLO_OPTIONS | {
    "rank": Option(1, minimum=1), "scale": Option(128.0, above=0),
    "scale_type": Option("tensor", ("channel", "tensor")),
}  # fmt: skip
LOW_RANK_NAMES = {"scale_type": "scaling", "quant_n_bit": "bits", "quant_group_size": "group"}
BADAM_OPTIONS = {
    "badam_mode": Option("layer", ("layer", "ratio")),
    "badam_switch_mode": Option("ascending", ("ascending", "descending", "random", "fixed")),
    "badam_switch_interval": Option(50, minimum=1),
    "badam_start_block": Option(None, minimum=0),
    "badam_update_ratio": Option(0.05, above=0, maximum=1),
    "badam_mask_mode": Option("adjacent", ("adjacent", "scatter")),
}
SCHEDULE_FREE_OPTIONS = {"weight_lr_power": Option(2.0, minimum=0), "r": Option(0.0, minimum=0)}
TORCHAO_OPTIONS = {"block_size": Option(256, minimum=1), "bf16_stochastic_round": Option(False)}
GROKADAMW_OPTIONS = {
    "alpha_init": Option(0.98, minimum=0, maximum=1), "lamb": Option(2.0), "gamma": Option(0.1),
    "grokking_signal_decay_rate": Option(0.1), "gradient_clipping": Option(1.0, minimum=0),
}  # fmt: skip
STABLE_ADAMW_OPTIONS = {
    "decouple_lr": Option(False), "max_lr": Option(1.0, above=0, optional=True),
    "kahan_sum": Option(True, optional=True),
}  # fmt: skip
ANY_PRECISION_OPTIONS = {"use_kahan_summation": Option(False)} | {
    key: Option(default, ("float32", "bfloat16", "float16"))
    for key, default in (
        ("momentum_dtype", "float32"), ("variance_dtype", "float32"), ("compensation_buffer_dtype", "bfloat16")
    )
}  # fmt: skip

# Storages of the state that the rule of each class of `fused` takes; see `ops.optimizer.RULES`.
BASIC = ("fp32", "bf16", "dynamic8")
STORAGES = {
    "AdamW": (*BASIC, "companded8"), "LAMB": (*BASIC, "companded8"), "Lion": (*BASIC, "companded8"),
    "LARS": (*BASIC, "companded8"), "AdEMAMix": BASIC, "RMSprop": BASIC,
}  # fmt: skip
STORAGE_OF_BITS = {8: "dynamic8", 16: "bf16", 32: "fp32"}  # storage by `optim_bits`
SLICED = {"fp32": 1, "weight": 1, "bf16": 1, "dynamic8": 256, "companded8": 256}  # storage → where `shard` may cut


def fused_options(name: str, storage: str) -> dict[str, Option]:
    """Return the options that all rows of `fused` have, with the default `storage` of the state."""
    choices = (*(() if storage in STORAGES[name] else (storage,)), *STORAGES[name])
    roundings = ("nearest", "stochastic", "correction8", "correction16")
    return {"storage": Option(storage, choices), "rounding": Option("nearest", roundings)}
