"""Who takes part in a run."""

from .context.exchange import Context
from .mesh import ALONE, AXES, ROWS, SLICES, TOKENS, Mesh, present_mesh
from .reduction import clip_gradients, sum_gradients

__all__ = [
    "ALONE",
    "AXES",
    "ROWS",
    "SLICES",
    "TOKENS",
    "Context",
    "Mesh",
    "clip_gradients",
    "present_mesh",
    "sum_gradients",
]
