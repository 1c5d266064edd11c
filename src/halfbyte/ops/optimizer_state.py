"""Storage of optimizer state: how the moments of a parameter are encoded between steps, as torch functions.

- fp32, bf16: one number per element.
- dynamic8: 8-bit codes of bitsandbytes' dynamic map, one fp32 scale per 256 elements (Dettmers et al. 2021,
  arXiv:2110.02861). The bytes are bitsandbytes', so that states interchange.
- companded8: 8-bit codes after a softsign (signed) or a square root (unsigned), one fp16 scale per 32 elements
  (FlashOptim, arXiv:2602.23349).
- dynamic4: 4-bit codes, one fp32 scale per 128 elements; the unsigned map is linear without zero, since a second moment
  rounded to zero makes a huge update (Li et al. 2023, arXiv:2309.01507, section 4.1).
- e4m3: float8 E4M3 codes, one fp32 scale per 256 elements, at which the largest element is 448.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .codebooks import dynamic_map

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Storage:
    """One way to store optimizer state.

    Attributes:
        name: as in `STORAGES`.
        block: elements per scale, in the order of memory; 0: no scales.
        dtype: of the codes. Signed companded codes are int8.
        scale_dtype: of the scales.
        packed: elements per code. Element j of a block and element j + block/2 share a byte; the first one has the low
            four bits.
    """

    name: str
    dtype: torch.dtype
    block: int = 0
    scale_dtype: torch.dtype = torch.float32
    packed: int = 1

    def codes_dtype(self, signed: bool) -> torch.dtype:
        return torch.int8 if self.name == "companded8" and signed else self.dtype

    def codes(self, elements: int) -> int:
        """Number of codes for a parameter of this many elements."""
        return -(-elements // self.block) * (self.block // 2) if self.packed == 2 else elements

    def scales(self, elements: int) -> int:
        """Number of scales for a parameter of this many elements."""
        return -(-elements // self.block) if self.block else 0

    def nbytes(self, elements: int) -> int:
        """Bytes of one state of a parameter of this many elements."""
        return self.codes(elements) * self.dtype.itemsize + self.scales(elements) * self.scale_dtype.itemsize

    def zeros(self, elements: int, signed: bool, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the codes and scales of a state that is zero everywhere."""
        if not self.block:
            return torch.zeros(elements, dtype=self.dtype, device=device), None
        codes = torch.full((self.codes(elements),), self._zero(signed), dtype=torch.uint8, device=device)
        scales = torch.zeros(self.scales(elements), dtype=self.scale_dtype, device=device)
        return codes.view(self.codes_dtype(signed)), scales

    def _zero(self, signed: bool) -> int:
        """Code of zero. dynamic4 without a sign has none: its scale of zero decodes any code to zero."""
        if self.name == "dynamic8":
            return 127 if signed else 0
        return 0x77 if self.name == "dynamic4" and signed else 0

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
        scales = blocks.abs().amax(1)
        if self.name == "e4m3":
            scales = scales / E4M3_MAX
        scales = scales.to(self.scale_dtype)
        # a scale may be zero; the fp16 scale of companded8 may be rounded below the largest value
        ratio = blocks / scales.float().masked_fill(scales == 0, 1.0)[:, None]
        codes = self._encode_ratio(ratio, signed)
        if positive and self.packed == 1:
            smallest = self._zero(signed) + 1
            raised = codes.view(torch.uint8).clamp(min=smallest)
            codes = torch.where(blocks > 0, raised, codes.view(torch.uint8)).view(codes.dtype)
        if self.packed == 2:
            low, high = codes.view(len(codes), 2, self.block // 2).unbind(1)
            return (low | high << 4).flatten(), scales
        return codes.flatten()[: len(values)].clone(), scales

    def _encode_ratio(self, ratio: Tensor, signed: bool) -> Tensor:
        """Encode values divided by their block's scale."""
        if self.name == "e4m3":
            return ratio.clamp(-E4M3_MAX, E4M3_MAX).to(self.dtype)
        if self.name == "companded8":
            if signed:
                ratio = ratio.clamp(-1, 1)
                return (127 * (2 * ratio / (1 + ratio.abs()))).round().to(torch.int8)
            return (255 * ratio.clamp(0, 1)).round().to(torch.uint8)
        table = code_values(8 // self.packed, signed).to(ratio.device)
        codes = torch.bucketize(ratio, middles(table))
        if signed and self.name == "dynamic8":  # as bitsandbytes: no code changes the sign of its value
            codes = codes - ((table[codes] >= 0) & (ratio < 0)).long() + ((table[codes] < 0) & (ratio > 0)).long()
        return codes.to(torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor | None, signed: bool, elements: int) -> Tensor:
        """Decode to fp32 [elements]."""
        if scales is None:
            return codes.float()
        if self.packed == 2:
            pairs = codes.view(-1, self.block // 2)
            codes = torch.stack([pairs & 15, pairs >> 4], 1).flatten()[:elements]
        ratio = self.ratios(codes, signed)
        values = ratio * scales.float().repeat_interleave(self.block)[:elements]
        return values.square() if self.name == "companded8" and not signed else values

    def ratios(self, codes: Tensor, signed: bool) -> Tensor:
        """Decode codes for a scale of 1, without the square of companded8; fp32. Codes of dynamic4 are unpacked."""
        if self.name == "companded8":
            ratio = codes.float() / (127 if signed else 255)
            return ratio / (2 - ratio.abs()) if signed else ratio
        if self.name == "e4m3":
            return codes.float()
        return code_values(8 // self.packed, signed).to(codes.device)[codes.long()]


STORAGES: dict[str, Storage] = {
    each.name: each
    for each in (
        Storage("fp32", torch.float32),
        Storage("bf16", torch.bfloat16),
        Storage("dynamic8", torch.uint8, 256),
        Storage("companded8", torch.uint8, 32, torch.float16),
        Storage("dynamic4", torch.uint8, 128, packed=2),
        Storage("e4m3", torch.float8_e4m3fn, 256),
    )
}


@functools.cache
def code_values(bits: int, signed: bool) -> Tensor:
    """fp32 [2^bits], ascending: the values of the codes of dynamic8 and dynamic4."""
    if bits == 8:
        return dynamic_map(signed=signed)
    if not signed:
        return torch.arange(1, 17) / 16
    # sign, then a decade by the number of leading zeros, then a linear fraction, as the 8-bit map; plus 0 and 1
    means = []
    for decade in range(3):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        means.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 2))
    positive = torch.cat(means)
    return torch.cat([-positive.flip(0), torch.zeros(1), positive, torch.ones(1)])


def middles(table: Tensor) -> Tensor:
    """fp32 [n − 1]: a value above middles[i] gets a code above i."""
    return (table[:-1] + table[1:]) * 0.5
