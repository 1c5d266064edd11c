"""Benchmarks: `python -m benchmarks` lists the cases and runs one; each module is also a command of its own."""

from halfbyte.utils.hardware import let_segments_grow

let_segments_grow()  # before anything imports torch.cuda, as the command line does
