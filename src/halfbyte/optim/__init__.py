"""The table of optimizers: constructor, state size and capabilities, read by config, plan and training.

To add an optimizer, add a row: `OPTIMIZERS["nadam"] = Optimizer(make=..., state_bytes=...)`.
"""

from .groups import Settings, parameter_groups, target_matrices, trained_parameters
from .options import STORAGE_OF_BITS, Option, option_values, parse_options
from .schedules import FOLLOW_METRIC, SCHEDULES, continue_over, make_schedule, next_rate
from .table import ADAM_KEYS, OPTIMIZERS, Optimizer, make_optimizer, memory_choices, optimizer_row, state_key

__all__ = [
    "ADAM_KEYS",
    "FOLLOW_METRIC",
    "OPTIMIZERS",
    "SCHEDULES",
    "STORAGE_OF_BITS",
    "Optimizer",
    "Option",
    "Settings",
    "continue_over",
    "make_optimizer",
    "make_schedule",
    "memory_choices",
    "next_rate",
    "optimizer_row",
    "option_values",
    "parameter_groups",
    "parse_options",
    "state_key",
    "target_matrices",
    "trained_parameters",
]  # fmt: skip
