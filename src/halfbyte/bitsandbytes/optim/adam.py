"""Adam of bitsandbytes, with 8- or 32-bit state, resident or paged."""

from __future__ import annotations

from typing import Any

from .optimizer import Optimizer2State


class Adam(Optimizer2State):
    """Adam (weight decay is decoupled, as in bitsandbytes); `optim_bits` chooses the state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        super().__init__(
            "adam", params, lr, betas, eps, weight_decay, optim_bits, args, min_8bit_size, is_paged=is_paged
        )


class Adam8bit(Adam):
    """Adam with 8-bit state.

    Raises:
        ValueError: `amsgrad` is set, or `optim_bits` is not left at its default.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        if amsgrad:
            raise ValueError("Adam8bit does not support amsgrad=True")
        if optim_bits != 32:
            raise ValueError("Adam8bit always has 8-bit state; leave optim_bits at its default of 32")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, 8, args, min_8bit_size, is_paged)


class Adam32bit(Adam):
    """Adam with fp32 state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, 32, args, min_8bit_size, is_paged)


class PagedAdam(Adam):
    """Adam with state in host memory."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options | {"is_paged": True})


class PagedAdam8bit(Adam8bit):
    """Adam with 8-bit state in host memory."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options | {"is_paged": True})


class PagedAdam32bit(Adam32bit):
    """Adam with fp32 state in host memory."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options | {"is_paged": True})
