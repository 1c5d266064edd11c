"""Triton twins of ops and formats, imported when a tensor of their device first arrives."""
