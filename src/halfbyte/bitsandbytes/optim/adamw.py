"""AdamW of bitsandbytes, with 8- or 32-bit state, resident or paged."""

from __future__ import annotations

from typing import Any

from .optimizer import Optimizer2State


class AdamW(Optimizer2State):
    """AdamW; `optim_bits` chooses the state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        super().__init__(
            "adam", params, lr, betas, eps, weight_decay, optim_bits, args, min_8bit_size, is_paged=is_paged
        )


class AdamW8bit(AdamW):
    """AdamW with 8-bit state.

    Raises:
        ValueError: `amsgrad` is set, or `optim_bits` is not left at its default.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        if amsgrad:
            raise ValueError("AdamW8bit does not support amsgrad=True")
        if optim_bits != 32:
            raise ValueError("AdamW8bit always has 8-bit state; leave optim_bits at its default of 32")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, 8, args, min_8bit_size, is_paged)


class AdamW32bit(AdamW):
    """AdamW with fp32 state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, 32, args, min_8bit_size, is_paged)


class PagedAdamW(AdamW):
    """AdamW with state in host memory."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options | {"is_paged": True})


class PagedAdamW8bit(AdamW8bit):
    """AdamW with 8-bit state in host memory."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options | {"is_paged": True})


class PagedAdamW32bit(AdamW32bit):
    """AdamW with fp32 state in host memory."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options | {"is_paged": True})
