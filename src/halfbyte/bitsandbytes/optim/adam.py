"""Adam of bitsandbytes, with 8- or 32-bit state, resident or paged. AdamW has the same classes with another default."""

from __future__ import annotations

from typing import Any, ClassVar

from .optimizer import Optimizer2State, refuse


class Adam(Optimizer2State):
    """Adam; `optim_bits` chooses the state. Weight decay is decoupled, as in bitsandbytes.

    Raises:
        ValueError: `amsgrad` is set, or `optim_bits` is changed in a class with a number of bits in its name.
    """

    bits: ClassVar[int | None] = None  # of the state; None: `optim_bits`
    paged: ClassVar[bool] = False
    decay: ClassVar[float] = 0.0  # default of `weight_decay`

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        refuse(type(self).__name__, amsgrad=amsgrad, optim_bits=self.bits is not None and optim_bits != 32)
        bits = self.bits or optim_bits
        decay = self.decay if weight_decay is None else weight_decay
        paged = is_paged or self.paged
        super().__init__("adam", params, lr, betas, eps, decay, bits, args, min_8bit_size, is_paged=paged)


class Adam8bit(Adam):
    """Adam with 8-bit state."""

    bits = 8


class Adam32bit(Adam):
    """Adam with fp32 state."""

    bits = 32


class PagedAdam(Adam):
    """Adam with state in host memory."""

    paged = True


class PagedAdam8bit(Adam8bit):
    """Adam with 8-bit state in host memory."""

    paged = True


class PagedAdam32bit(Adam32bit):
    """Adam with fp32 state in host memory."""

    paged = True
