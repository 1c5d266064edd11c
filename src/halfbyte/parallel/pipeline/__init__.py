"""Pipeline parallelism: each process holds a stage, a run of consecutive decoder layers."""
