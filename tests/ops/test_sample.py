"""Check the sampler: Philox's known answers, the distribution of draws, and independence of other rows."""

import pytest
import torch

from halfbyte.dispatch import Unavailable
from halfbyte.ops.sample import draw_tokens, philox


def implementations():
    try:
        from halfbyte.kernels.native.sample import draw
    except Unavailable:
        return [draw_tokens.reference]
    return [draw_tokens.reference, draw]


each = pytest.mark.parametrize("draw", implementations(), ids=lambda function: function.__module__.split(".")[1])
SEED = torch.tensor([-81985529216486896])


def places(rows, prompt=3, generation=1):
    return torch.stack([torch.full((rows,), prompt), torch.full((rows,), generation), torch.arange(rows)], dim=1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("00000000 00000000 00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_has_the_answers_of_its_authors(words, expected):
    """`kat_vectors` of Random123."""
    c0, c1, c2, c3, k0, k1 = (torch.tensor([int(word, 16)]) for word in words.split())
    found = philox((c0, c1, c2, c3), (k0, k1))
    assert [f"{int(word):08x}" for word in found] == expected.split()


@each
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("filtered", [False, True])
def test_tokens_follow_the_distribution(draw, temperature, filtered):
    """χ² over 10⁵ draws, 12 or 8 tokens; a correct sampler exceeds the bound once in 10⁵ runs."""
    logits = torch.tensor([2.0, 1.5, 1, 0.5, 0, 0, -0.5, -1, -1.5, -2, 1, 0.3])
    kept = torch.arange(12) % 3 != 1 if filtered else torch.ones(12, dtype=torch.bool)
    rows = 100_000
    tokens, log_probs = draw(
        logits.expand(rows, 12).contiguous(),
        places(rows),
        SEED,
        temperature,
        kept.expand(rows, 12) if filtered else None,
    )
    scores = logits / temperature
    expected = scores.masked_fill(~kept, -torch.inf).softmax(-1) * rows
    counts = torch.bincount(tokens, minlength=12).double()
    assert counts[~kept].sum() == 0
    chi2 = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi2 < (38.0 if filtered is False else 32.0)
    torch.testing.assert_close(log_probs, scores.log_softmax(-1)[tokens])  # over all tokens, filtered ones included


@each
def test_draw_depends_only_on_place_and_seed(draw):
    logits, where = torch.randn(64, 501), places(64)
    tokens, log_probs = draw(logits, where, SEED, 1.0, None)
    for row in (0, 17, 63):
        alone = draw(logits[row : row + 1], where[row : row + 1], SEED, 1.0, None)
        assert alone[0] == tokens[row]
        assert torch.equal(alone[1], log_probs[row : row + 1])
    order = torch.randperm(64)
    assert torch.equal(draw(logits[order], where[order], SEED, 1.0, None)[0], tokens[order])
    same = logits[:1].expand(64, 501)
    for other in (places(64, prompt=4), places(64, generation=2)):
        assert (draw(same, other, SEED, 1.0, None)[0] != draw(same, where, SEED, 1.0, None)[0]).float().mean() > 0.9
    assert len(set(draw(same, where, SEED, 1.0, None)[0].tolist())) > 30
    assert not torch.equal(draw(same, where, SEED + 2**32, 1.0, None)[0], draw(same, where, SEED, 1.0, None)[0])


@each
@pytest.mark.parametrize("vocabulary", [1, 63, 64, 1000, 4099])
def test_draw_equals_the_reference(draw, vocabulary):
    logits = torch.randn(40, vocabulary) * 4
    logits[3, :-1] = -torch.inf
    for temperature in (1.0, 0.3, 0.0):
        kept = torch.rand(40, vocabulary) > 0.5
        kept[:, -1] = True
        for mask in (None, kept):
            tokens, log_probs = draw(logits, places(40), SEED, temperature, mask)
            expected = draw_tokens.reference(logits, places(40), SEED, temperature, mask)
            assert torch.equal(tokens, expected[0])
            torch.testing.assert_close(log_probs, expected[1], rtol=1e-5, atol=2e-6)


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_computed_with_in_float32(draw, dtype):
    logits = (torch.randn(40, 501) * 4).to(dtype)
    found, expected = (draw(each, places(40), SEED, 0.7, None) for each in (logits, logits.float()))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@each
def test_nan_is_reported(draw):
    logits = torch.randn(4, 200)
    logits[2, 77] = torch.nan
    _, log_probs = draw(logits, places(4), SEED, 1.0, None)
    assert log_probs.isnan().tolist() == [False, False, True, False]
