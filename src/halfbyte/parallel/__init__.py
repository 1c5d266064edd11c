"""Who takes part in a run."""

from .mesh import ALONE, Mesh, present_mesh

__all__ = ["ALONE", "Mesh", "present_mesh"]
