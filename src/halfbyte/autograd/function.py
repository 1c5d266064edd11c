"""An `autograd.Function` whose calls cost the host little: small kernels are issued faster than Python can follow.

`torch.autograd.Function.apply` looks for functorch's wrappers in Python, and `once_differentiable` enters a context, in
every call: 4 µs each on a 2.5 GHz core, where the rest of a call is 20 to 25.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class OnceFunction(torch.autograd.Function):
    """As torch's, for a `backward` that torch cannot differentiate again: trying to is an error.

    functorch's transforms (vmap, grad, jvp) are an error too, as they are for any Function without `setup_context`.
    """

    def __init_subclass__(cls) -> None:
        # What torch's own apply ends with.
        cls.apply = super(torch.autograd.Function, cls).apply  # type: ignore[method-assign, misc]
        plain, guarded = cls.backward, once_differentiable(cls.backward)

        def backward(ctx: Any, *grads: Any) -> Any:
            # With create_graph the engine leaves gradients enabled: results must then refuse to be differentiated.
            return guarded(ctx, *grads) if torch.is_grad_enabled() else plain(ctx, *grads)

        cls.backward = staticmethod(backward)  # type: ignore[method-assign]
