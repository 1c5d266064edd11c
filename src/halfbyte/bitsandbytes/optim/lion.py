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


class Lion8bit(Lion):
    """Lion with 8-bit state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: Any = (0.9, 0.99),
        weight_decay: float = 0.0,
        args: Any = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        super().__init__(params, lr, betas, weight_decay, 8, args, min_8bit_size, is_paged)


class Lion32bit(Lion):
    """Lion with fp32 state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: Any = (0.9, 0.99),
        weight_decay: float = 0.0,
        args: Any = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        super().__init__(params, lr, betas, weight_decay, 32, args, min_8bit_size, is_paged)


class PagedLion(Lion):
    """Lion with state in host memory."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options | {"is_paged": True})


class PagedLion8bit(Lion8bit):
    """Lion with 8-bit state in host memory."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options | {"is_paged": True})


class PagedLion32bit(Lion32bit):
    """Lion with fp32 state in host memory."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options | {"is_paged": True})
