"""Kernels in Triton, for NVIDIA, AMD and Intel GPUs."""
