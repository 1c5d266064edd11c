"""Who takes part in a run."""

from .mesh import ALONE, AXES, ROWS, TOKENS, Mesh, present_mesh
from .reduce import clip_gradients, sum_gradients

__all__ = ["ALONE", "AXES", "ROWS", "TOKENS", "Mesh", "clip_gradients", "present_mesh", "sum_gradients"]
