"""Memory of a run: activation levels, offload to the host, sharded optimizer state and allocator limits."""
