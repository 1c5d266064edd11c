"""Parallelism of a model: how the model, its batches and its state are divided over ranks."""
