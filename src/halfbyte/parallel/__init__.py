"""Who takes part in a run."""

from .mesh import ALONE, AXES, ROWS, TOKENS, Mesh, present_mesh
from .reduce import sum_gradients

__all__ = ["ALONE", "AXES", "ROWS", "TOKENS", "Mesh", "present_mesh", "sum_gradients"]
