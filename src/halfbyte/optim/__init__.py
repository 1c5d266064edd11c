"""The table of optimizers: constructor, state size and capabilities, read by config, plan and training.

To add an optimizer, add a row: `OPTIMIZERS["nadam"] = Optimizer(make=..., state_bytes=...)`.
"""

from .table import OPTIMIZERS, Optimizer, Settings, parameter_groups, trained_parameters

__all__ = ["OPTIMIZERS", "Optimizer", "Settings", "parameter_groups", "trained_parameters"]
