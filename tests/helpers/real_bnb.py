"""The real bitsandbytes as a truth that does not depend on the processor.

Its CPU library has faults on processors with AVX-512 (docs/bitsandbytes.md). 4-bit weights are dequantized wrongly
where rows are not a multiple of the block. With AVX512-BF16, evaluation repacks weights and rounds to bf16, and there
is no gradient afterwards. `settle` probes the library once per process; where it is wrong, the package runs its own
torch code.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SHAPES = ((96, 160), (48, 80), (64, 96), (33, 64))  # rows of whole blocks of 64, and others


@functools.cache
def settle() -> torch.library.Library | None:
    """Keep the real package from repacking weights; replace its 4-bit dequantization on the CPU if that is wrong.

    Returns:
        the registration of the replacement, or None if the library is right.
    """
    import bitsandbytes.nn.modules

    bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
    if dequantizes_rightly():
        return None
    library = torch.library.Library("bitsandbytes", "IMPL")
    library.impl("dequantize_4bit", _dequantize, "CPU", allow_override=True)
    assert dequantizes_rightly()
    return library


def dequantizes_rightly() -> bool:
    """Return whether 4-bit weights of several shapes, blocks, types and dtypes become codes times scales."""
    import bitsandbytes.functional as F

    generator = torch.Generator().manual_seed(0)
    cases = itertools.product(SHAPES, (32, 64, 4096), ("nf4", "fp4"), (torch.float32, torch.bfloat16, torch.float16))
    for shape, blocksize, quant_type, dtype in cases:
        weight = torch.randn(shape, generator=generator).to(dtype)
        packed, state = F.quantize_4bit(weight, blocksize=blocksize, quant_type=quant_type)
        codes = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[: weight.numel()].int()
        scales = state.absmax.repeat_interleave(blocksize)[: weight.numel()]
        if not torch.equal(F.dequantize_4bit(packed, state), (state.code[codes] * scales).to(dtype).view(shape)):
            return False
    return True


def _dequantize(
    codes: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Call the torch code that bitsandbytes runs for odd shapes and for devices without a library."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.backends.utils import _get_4bit_code

    arguments: Any = (codes.view(torch.uint8).reshape(-1), absmax.float(), _get_4bit_code(quant_type, codes.device))
    compute = inspect.unwrap(_dequantize_4bit_compute)  # without torch.compile, which compiles again for each shape
    return compute(*arguments, blocksize, shape, dtype)
