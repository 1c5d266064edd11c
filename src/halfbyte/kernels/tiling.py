"""Arithmetic of tiles and grids."""


def power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def ceil_div(size: int, block: int) -> int:
    return -(-size // block)
