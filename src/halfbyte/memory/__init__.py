"""Memory of a run: activation levels, offload to the host and allocator limits."""
