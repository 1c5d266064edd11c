"""Kernels in Triton, for NVIDIA's, AMD's and Intel's GPUs."""
