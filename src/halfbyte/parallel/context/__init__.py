"""Context parallelism: each process of a group holds a slice of every sequence."""
