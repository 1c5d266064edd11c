"""Measurements: each module is a command (`python -m benchmarks.NAME`) that prints a table and can write JSON."""
