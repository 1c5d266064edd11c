"""Drawing a token of each row, and its log-probability: the specification.

The token with the largest z + g is drawn from softmax(z), if every g is a Gumbel number of its own (Maddison et al.
2014, arXiv:1411.0030, section 2). With E exponential, g = −log E, and E = −log(1 − v) of v uniform in (0, 1).

v is a function of where it is needed and of nothing else: Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers:
as easy as 1, 2, 3", section 3.3) of the counter (token ÷ 4, position, generation, prompt) under the seed as its key. So
no neighbour, no batch size and no device changes what a completion draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op

ROUNDS, MASK = 10, 0xFFFFFFFF
MULTIPLIERS, WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
LARGEST = 1 - 2**-24  # of v in fp32: E stays finite


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of 32 bits for each counter and key of such words, all int64 and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # they wrap: the words are those of unsigned ones
        c0, c1, c2, c3 = (high >> 32 & MASK) ^ c1 ^ k0, high & MASK, (low >> 32 & MASK) ^ c3 ^ k1, low & MASK
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return c0, c1, c2, c3


def exponentials(places: Tensor, seed: Tensor, tokens: int) -> Tensor:
    """E, fp32 [R, tokens]; arguments as `draw_tokens`."""
    prompt, generation, position = (place.unsqueeze(1) & MASK for place in places.unbind(1))
    quarter = torch.arange(-(-tokens // 4), device=places.device).unsqueeze(0)
    words = philox((quarter, position, generation, prompt), (seed & MASK, seed >> 32 & MASK))
    spread = [each.expand(len(places), quarter.shape[1]) for each in words]
    uniform = (torch.stack(spread, dim=2).flatten(1)[:, :tokens].float() + 0.5) * 2**-32
    return -torch.log1p(-uniform.clamp_(max=LARGEST))


@op("triton.sample", "native.sample")
def draw_tokens(
    logits: Tensor, places: Tensor, seed: Tensor, temperature: float, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A token of each row by its logits, or the likeliest at temperature 0; and its log softmax(logits / temperature).

    Args:
        logits: [R, V]; fp32, fp16 or bf16, computed with in fp32.
        places: int64 [R, 3]: prompt, generation and position of each row; of each the low 32 bits count.
        seed: int64 [1].
        temperature: divides the logits; 0 draws as 0 and gives log-probabilities as 1 does.
        kept: bool [R, V], the tokens that can be drawn, one or more in each row; None for all. Log-probabilities are
            over all tokens in either case.

    Returns:
        int64 [R], fp32 [R].
    """
    scores = logits.float() / temperature if temperature else logits.float()
    wanted = scores if kept is None else scores.masked_fill(~kept, -torch.inf)
    if temperature:
        wanted = wanted - exponentials(places, seed, logits.shape[1]).log()
    tokens = wanted.argmax(-1)
    return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1) - scores.logsumexp(-1)
