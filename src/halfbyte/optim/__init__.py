"""Optimizers: one row each says how it is made and what it costs; config, plan and training ask the row.

To add one, add a row: `OPTIMIZERS["nadam"] = Optimizer(make=..., state_bytes=...)`.
"""

from .groups import parameter_groups, trained_parameters
from .table import OPTIMIZERS, Optimizer, Settings

__all__ = ["OPTIMIZERS", "Optimizer", "Settings", "parameter_groups", "trained_parameters"]
