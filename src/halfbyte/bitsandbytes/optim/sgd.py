"""SGD of bitsandbytes, with 8- or 32-bit state."""

from __future__ import annotations

from typing import Any

from .optimizer import Optimizer1State, refuse


class SGD(Optimizer1State):
    """SGD with momentum; `optim_bits` chooses the state.

    Raises:
        NotImplementedError: `momentum` is 0.
        ValueError: `dampening` or `nesterov` is set: bitsandbytes ignores them.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
    ):
        if momentum == 0:
            raise NotImplementedError("SGD without momentum is not supported")
        refuse(type(self).__name__, dampening=dampening != 0, nesterov=nesterov)
        super().__init__(
            "momentum", params, lr, (momentum, dampening), 0.0, weight_decay, optim_bits, args, min_8bit_size
        )


class SGD8bit(SGD, bits=8):
    """SGD with momentum and 8-bit state."""


class SGD32bit(SGD, bits=32):
    """SGD with momentum and fp32 state."""
