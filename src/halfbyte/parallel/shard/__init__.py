"""Sharding: each process stores a slice of the weights or of the optimizer state."""
