"""Lion of bitsandbytes, with 8- or 32-bit state, resident or paged."""

from __future__ import annotations

from typing import Any

from .optimizer import Optimizer1State


class Lion(Optimizer1State):
    """Lion; `optim_bits` chooses the state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: Any = (0.9, 0.99),
        weight_decay: float = 0.0,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        super().__init__(
            "lion", params, lr, betas, 0.0, weight_decay, optim_bits, args, min_8bit_size, is_paged=is_paged
        )


class Lion8bit(Lion, bits=8):
    """Lion with 8-bit state."""


class Lion32bit(Lion, bits=32):
    """Lion with fp32 state."""


class PagedLion(Lion, paged=True):
    """Lion with state in host memory."""


class PagedLion8bit(Lion8bit, paged=True):
    """Lion with 8-bit state in host memory."""


class PagedLion32bit(Lion32bit, paged=True):
    """Lion with fp32 state in host memory."""
