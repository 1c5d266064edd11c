"""The processes of a run: a mesh, its collectives, and a folder for each axis of parallelism."""
