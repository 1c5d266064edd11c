"""LAMB of bitsandbytes, with 8- or 32-bit state."""

from __future__ import annotations

from typing import Any, ClassVar

from .optimizer import Optimizer2State, refuse


class LAMB(Optimizer2State):
    """LAMB as in bitsandbytes: Adam whose update is clipped to `max_unorm` times the weight's norm.

    `optim_bits` chooses the state; 8-bit updates are not clipped.

    Raises:
        ValueError: `amsgrad`, or `bias_correction` or `adam_w_mode` not set: bitsandbytes ignores them.
    """

    clips: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        max_unorm: float = 1.0,
    ):
        if not self.clips and max_unorm != 1.0:
            raise ValueError("LAMB8bit does not clip updates; leave max_unorm at its default of 1.0")
        name = type(self).__name__
        refuse(name, bias_correction=not bias_correction, amsgrad=amsgrad, adam_w_mode=not adam_w_mode)
        super().__init__("lamb", params, lr, betas, eps, weight_decay, optim_bits, args, min_8bit_size, max_unorm)


class LAMB8bit(LAMB, bits=8):
    """LAMB with 8-bit state.

    Raises:
        ValueError: `max_unorm` is not 1, or as in `LAMB`.
    """

    clips = False


class LAMB32bit(LAMB, bits=32):
    """LAMB with fp32 state."""
