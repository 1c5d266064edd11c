"""Adagrad of bitsandbytes, with 8- or 32-bit state."""

from __future__ import annotations

from typing import Any, ClassVar

from .optimizer import Optimizer1State, refuse


class Adagrad(Optimizer1State):
    """Adagrad; `optim_bits` (default: 32) chooses the state.

    Raises:
        ValueError: `lr_decay` or `initial_accumulator_value` is not 0, or `optim_bits` is changed in a class with a
            number of bits in its name.
    """

    bits: ClassVar[int | None] = None  # of the state; None: `optim_bits`

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        optim_bits: int | None = None,
        args: Any = None,
        min_8bit_size: int = 4096,
    ):
        if initial_accumulator_value != 0.0:
            raise ValueError("initial_accumulator_value must be 0")
        if lr_decay != 0.0:
            raise ValueError("lr_decay must be 0")
        refuse(type(self).__name__, optim_bits=self.bits is not None and optim_bits not in (None, self.bits))
        bits = self.bits or (32 if optim_bits is None else optim_bits)
        super().__init__("adagrad", params, lr, (0.0, 0.0), eps, weight_decay, bits, args, min_8bit_size)


class Adagrad8bit(Adagrad):
    """Adagrad with 8-bit state."""

    bits = 8


class Adagrad32bit(Adagrad):
    """Adagrad with fp32 state."""

    bits = 32
