"""Storage of optimizer state: how the moments of a parameter are encoded between steps, as torch functions.

- fp32, bf16: one number per element.
- dynamic8: 8-bit codes of bitsandbytes' dynamic map, one fp32 scale per 256 elements (Dettmers et al. 2021,
  arXiv:2110.02861). The bytes are bitsandbytes', so that states interchange.
- companded8: 8-bit codes after a softsign (signed) or a square root (unsigned), one fp16 scale per 32 elements
  (FlashOptim, arXiv:2602.23349).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.codebooks import dynamic_map


@dataclass(frozen=True)
class Storage:
    """One way to store optimizer state.

    Attributes:
        name: as in `STORAGES`.
        block: elements per scale, in the order of memory; 0: no scales.
        dtype: of the codes. Signed companded codes are int8.
        scale_dtype: of the scales.
    """

    name: str
    dtype: torch.dtype
    block: int = 0
    scale_dtype: torch.dtype = torch.float32

    def codes_dtype(self, signed: bool) -> torch.dtype:
        return torch.int8 if self.name == "companded8" and signed else self.dtype

    def scales(self, elements: int) -> int:
        """Number of scales for a parameter of this many elements."""
        return -(-elements // self.block) if self.block else 0

    def nbytes(self, elements: int) -> int:
        """Bytes of one state of a parameter of this many elements."""
        return elements * self.dtype.itemsize + self.scales(elements) * self.scale_dtype.itemsize

    def zeros(self, elements: int, signed: bool, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the codes and scales of a state that is zero everywhere."""
        if not self.block:
            return torch.zeros(elements, dtype=self.dtype, device=device), None
        codes = torch.full((elements,), self._zero(signed), dtype=torch.uint8, device=device)
        scales = torch.zeros(self.scales(elements), dtype=self.scale_dtype, device=device)
        return codes.view(self.codes_dtype(signed)), scales

    def _zero(self, signed: bool) -> int:
        """Code of zero."""
        return 127 if self.name == "dynamic8" and signed else 0

    def encode(self, values: Tensor, signed: bool, positive: bool = False) -> tuple[Tensor, Tensor | None]:
        """Encode fp32 values [n]; returns codes and scales. NaN and Inf are undefined.

        Args:
            signed: whether the codes have a sign.
            positive: the values are second moments. One that is not zero gets the smallest code above zero at least,
                since the next update is divided by it.
        """
        if not self.block:
            return values.to(self.dtype), None
        if self.name == "companded8" and not signed:
            values = values.sqrt()
        blocks = F.pad(values, (0, -len(values) % self.block)).view(-1, self.block)
        scales = blocks.abs().amax(1).to(self.scale_dtype)
        # a scale may be zero; the fp16 scale of companded8 may be rounded below the largest value
        ratio = blocks / scales.float().masked_fill(scales == 0, 1.0)[:, None]
        codes = self._encode_ratio(ratio, signed)
        if positive:
            smallest = self._zero(signed) + 1
            raised = codes.view(torch.uint8).clamp(min=smallest)
            codes = torch.where(blocks > 0, raised, codes.view(torch.uint8)).view(codes.dtype)
        return codes.flatten()[: len(values)].clone(), scales

    def _encode_ratio(self, ratio: Tensor, signed: bool) -> Tensor:
        """Encode values divided by their block's scale."""
        if self.name == "companded8":
            if signed:
                ratio = ratio.clamp(-1, 1)
                return (127 * (2 * ratio / (1 + ratio.abs()))).round().to(torch.int8)
            return (255 * ratio.clamp(0, 1)).round().to(torch.uint8)
        table = dynamic_map(signed=signed).to(ratio.device)
        codes = torch.bucketize(ratio, middles(table))
        if signed:  # as bitsandbytes: no code changes the sign of its value
            codes = codes - ((table[codes] >= 0) & (ratio < 0)).long() + ((table[codes] < 0) & (ratio > 0)).long()
        return codes.to(torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor | None, signed: bool, elements: int) -> Tensor:
        """Decode to fp32 [elements]."""
        if scales is None:
            return codes.float()
        ratio = self.ratios(codes, signed)
        values = ratio * scales.float().repeat_interleave(self.block)[:elements]
        return values.square() if self.name == "companded8" and not signed else values

    def ratios(self, codes: Tensor, signed: bool) -> Tensor:
        """Decode codes for a scale of 1, without the square of companded8; fp32."""
        if self.name == "companded8":
            ratio = codes.float() / (127 if signed else 255)
            return ratio / (2 - ratio.abs()) if signed else ratio
        return dynamic_map(signed=signed).to(codes.device)[codes.long()]


STORAGES: dict[str, Storage] = {
    storage.name: storage
    for storage in (
        Storage("fp32", torch.float32),
        Storage("bf16", torch.bfloat16),
        Storage("dynamic8", torch.uint8, 256),
        Storage("companded8", torch.uint8, 32, torch.float16),
    )
}


def middles(table: Tensor) -> Tensor:
    """fp32 [n − 1]: a value above middles[i] gets a code above i."""
    return (table[:-1] + table[1:]) * 0.5
