"""Storage types of key-value caches: the values of the key `kv_cache`, their dtypes and bytes."""

from __future__ import annotations

import torch

from ..ops.paged_attention import PAGE
from ..ops.paged_attention4 import Cache4

FP8 = torch.float8_e4m3fn
INT4 = torch.quint4x2  # stands for `ops.paged_attention4`; no tensor has this dtype
CACHES: dict[str, torch.dtype | None] = {"auto": None, "fp8": FP8, "int4": INT4}  # None: the model's dtype


def page_bytes(heads: int, size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page of a layer with `heads` key heads of `size` values.

    Open pages of a 4-bit cache are not included; each takes the bytes of a page in the model's dtype.
    """
    if dtype is INT4:
        return sum(
            part.nbytes for part in Cache4.zeros(1, 0, heads, size, torch.float32, torch.device("meta")).of_pages
        )
    return 2 * PAGE * heads * size * dtype.itemsize
