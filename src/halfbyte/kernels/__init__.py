"""Kernels of ops in Triton, in CUDA, and in C for CPUs; imported when a tensor of their device first arrives."""
