"""Who takes part in a run."""

from .agreement import check_agreement, check_shared
from .context import Context, bounds_of_longer, slice_of
from .mesh import ALONE, AXES, ROWS, SLICES, TOKENS, Mesh, present_mesh
from .reduce import clip_gradients, sum_gradients

__all__ = [
    "ALONE",
    "AXES",
    "ROWS",
    "SLICES",
    "TOKENS",
    "Context",
    "Mesh",
    "bounds_of_longer",
    "check_agreement",
    "check_shared",
    "clip_gradients",
    "present_mesh",
    "slice_of",
    "sum_gradients",
]
