"""Parallelism of a model: which runs each axis supports, and how the model, its batches and its state are divided."""
