"""Tensor parallelism: the processes of a group share the rows and columns of each layer's linears."""
