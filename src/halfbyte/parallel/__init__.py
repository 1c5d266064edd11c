"""Who takes part in a run."""

from .agreement import check_agreement, check_shared
from .mesh import ALONE, AXES, ROWS, TOKENS, Mesh, present_mesh
from .reduce import clip_gradients, sum_gradients

__all__ = [
    "ALONE",
    "AXES",
    "ROWS",
    "TOKENS",
    "Mesh",
    "check_agreement",
    "check_shared",
    "clip_gradients",
    "present_mesh",
    "sum_gradients",
]
