"""The processes of a run: the mesh of their ranks, its collectives, and autograd functions that communicate."""
