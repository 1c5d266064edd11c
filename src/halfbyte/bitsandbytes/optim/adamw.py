"""AdamW of bitsandbytes: the classes of `adam` with a default weight decay of 0.01."""

from .adam import Adam


class AdamW(Adam):
    """AdamW; `optim_bits` chooses the state."""

    decay = 1e-2


class AdamW8bit(AdamW):
    """AdamW with 8-bit state."""

    bits = 8


class AdamW32bit(AdamW):
    """AdamW with fp32 state."""

    bits = 32


class PagedAdamW(AdamW):
    """AdamW with state in host memory."""

    paged = True


class PagedAdamW8bit(AdamW8bit):
    """AdamW with 8-bit state in host memory."""

    paged = True


class PagedAdamW32bit(AdamW32bit):
    """AdamW with fp32 state in host memory."""

    paged = True
