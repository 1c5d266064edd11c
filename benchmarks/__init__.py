"""Measurements: each module is a command (`python -m benchmarks.NAME`) that prints a table and can write JSON."""

from halfbyte.utils.hardware import enable_expandable_segments

enable_expandable_segments()  # as the command line does
