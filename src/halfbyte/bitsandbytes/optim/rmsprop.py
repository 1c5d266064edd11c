"""RMSprop of bitsandbytes, with 8- or 32-bit state."""

from __future__ import annotations

from typing import Any

from .optimizer import Optimizer1State, refuse


class RMSprop(Optimizer1State):
    """RMSprop; `optim_bits` chooses the state.

    Raises:
        NotImplementedError: `alpha` is 0, or `centered` is set.
        ValueError: `momentum` is not 0: bitsandbytes ignores it.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
    ):
        if alpha == 0:
            raise NotImplementedError("RMSprop with alpha=0.0 is not supported")
        if centered:
            raise NotImplementedError("Centered RMSprop is not supported")
        refuse(type(self).__name__, momentum=momentum != 0)
        super().__init__("rmsprop", params, lr, (alpha, momentum), eps, weight_decay, optim_bits, args, min_8bit_size)


class RMSprop8bit(RMSprop, bits=8):
    """RMSprop with 8-bit state."""


class RMSprop32bit(RMSprop, bits=32):
    """RMSprop with fp32 state."""
