"""Adagrad of bitsandbytes, with 8- or 32-bit state."""

from __future__ import annotations

from typing import Any

from .optimizer import Optimizer1State, refuse


class Adagrad(Optimizer1State):
    """Adagrad; `optim_bits` chooses the state.

    Raises:
        ValueError: `lr_decay` or `initial_accumulator_value` is not 0.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
    ):
        if initial_accumulator_value != 0.0:
            raise ValueError("initial_accumulator_value must be 0")
        if lr_decay != 0.0:
            raise ValueError("lr_decay must be 0")
        super().__init__("adagrad", params, lr, (0.0, 0.0), eps, weight_decay, optim_bits, args, min_8bit_size)


class Adagrad8bit(Adagrad):
    """Adagrad with 8-bit state.

    Raises:
        ValueError: `optim_bits` is not 8, or as in `Adagrad`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        optim_bits: int = 8,
        args: Any = None,
        min_8bit_size: int = 4096,
    ):
        if optim_bits != 8:
            raise ValueError("Adagrad8bit always has 8-bit state; leave optim_bits at its default of 8")
        super().__init__(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, 8, args, min_8bit_size)


class Adagrad32bit(Adagrad):
    """Adagrad with fp32 state.

    Raises:
        ValueError: `optim_bits` is not 32, or as in `Adagrad`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
    ):
        refuse(type(self).__name__, optim_bits=optim_bits != 32)
        super().__init__(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, 32, args, min_8bit_size)
