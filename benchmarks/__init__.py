"""Measurements: each module is a command (`python -m benchmarks.NAME`) that prints a table and can write JSON."""

from halfbyte.utils.hardware import let_segments_grow

let_segments_grow()  # as the command line does
