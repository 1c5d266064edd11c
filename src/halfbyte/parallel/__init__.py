"""Who takes part in a run."""

from .mesh import ALONE, AXES, ROWS, TOKENS, Mesh, present_mesh

__all__ = ["ALONE", "AXES", "ROWS", "TOKENS", "Mesh", "present_mesh"]
