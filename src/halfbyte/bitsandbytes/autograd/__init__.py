"""Matmuls of `bitsandbytes.autograd`."""
