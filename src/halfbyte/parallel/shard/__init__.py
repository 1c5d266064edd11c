"""Sharding: each rank stores a shard of the frozen weights or of the optimizer state."""
