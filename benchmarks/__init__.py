"""Benchmarks: `python -m benchmarks` lists the cases and runs one; each module is also a command of its own."""

from halfbyte.utils.hardware import enable_expandable_segments

enable_expandable_segments()  # before anything imports torch.cuda, as the command line does
