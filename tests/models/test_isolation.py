"""Packed documents do not see each other, in any causal LM of transformers: as the batch is, by bounds, or unpacked."""
