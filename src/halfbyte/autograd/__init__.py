"""Differentiable functions with hand-derived backward passes around dispatched ops."""
