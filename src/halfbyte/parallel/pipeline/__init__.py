"""Pipeline parallelism: each rank holds stages of consecutive decoder layers."""
