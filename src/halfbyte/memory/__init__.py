"""Memory of a run: offload to the host and allocator limits."""
