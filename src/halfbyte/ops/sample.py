"""Sampling of one token per sequence, with its log-probability: the specification.

The token with the largest z + g is a sample from softmax(z) if the g are independent Gumbel numbers (Maddison et al.
2014, arXiv:1411.0030, section 2). With E exponential, g = −log E, and E = −log(1 − v) for v uniform in (0, 1).

v depends only on its coordinates: Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
section 3.3) of the counter (token ÷ 4, position, generation, prompt) with the seed as its key. So a completion does not
depend on other sequences, the batch size or the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op

ROUNDS, MASK = 10, 0xFFFFFFFF
MULTIPLIERS, WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
LARGEST = 1 - 2**-24  # largest v in fp32, so that E is finite


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words for each counter and key of 32-bit words, all int64 and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # int64 overflow keeps the bits of the unsigned product
        c0 = (high >> 32 & MASK) ^ c1 ^ k0
        c1 = high & MASK
        c2 = (low >> 32 & MASK) ^ c3 ^ k1
        c3 = low & MASK
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return c0, c1, c2, c3


def exponentials(positions: Tensor, seed: Tensor, tokens: int) -> Tensor:
    """E, fp32 [R, tokens]; arguments as in `draw_tokens`."""
    prompt, generation, position = (coordinates.unsqueeze(1) & MASK for coordinates in positions.unbind(1))
    quarter = torch.arange(-(-tokens // 4), device=positions.device).unsqueeze(0)
    words = philox((quarter, position, generation, prompt), (seed & MASK, seed >> 32 & MASK))
    spread = [word.expand(len(positions), quarter.shape[1]) for word in words]
    uniform = (torch.stack(spread, dim=2).flatten(1)[:, :tokens].float() + 0.5) * 2**-32
    return -torch.log1p(-uniform.clamp_(max=LARGEST))


@op("triton.sample", "native.sample")
def draw_tokens(
    logits: Tensor, positions: Tensor, seed: Tensor, temperature: float, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sample a token of each row, or take the likeliest at temperature 0, with its log softmax(logits / temperature).

    Args:
        logits: [R, V]; fp32, fp16 or bf16, upcast to fp32.
        positions: int64 [R, 3]: prompt, generation and position of each row; the low 32 bits of each are used.
        seed: int64 [1].
        temperature: divides the logits; 0 takes the likeliest token and returns log-probabilities at temperature 1.
        allowed: bool [R, V], the tokens that can be sampled, at least one in each row; None: all. Log-probabilities are
            always over all tokens.

    Returns:
        int64 [R], fp32 [R].
    """
    scores = logits.float() / temperature if temperature else logits.float()
    candidates = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    if temperature:
        candidates = candidates - exponentials(positions, seed, logits.shape[1]).log()
    tokens = candidates.argmax(-1)
    return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1) - scores.logsumexp(-1)
