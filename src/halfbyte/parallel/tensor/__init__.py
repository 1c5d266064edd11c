"""Tensor parallelism: linears of decoder layers, head and embedding sharded over ranks with the same tokens."""
