"""On a CPU an answer does not depend on the prompts beside it: the same logits, to the bit in bfloat16."""

import pytest
import torch
from patch_models import quantize, tiny

from halfbyte import generation
from halfbyte.hardware import compute_dtype
from halfbyte.ops.gemv4 import linear_blockwise4

# As real models have them: elementwise functions of what is left over beyond a CPU's vectors round otherwise.
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LENGTHS = [1, 3, 31, 32, 33, 7, 70, 66, 2, 5, 5, 5, 40]  # of 13 rows: more than a GEMV of 4-bit weights takes at once


def logits_of(model, prompts):
    """fp32 [steps, B, V]."""
    seen = []
    steps = generation.stream(
        model, prompts, max_new_tokens=6, stops=[], watch=lambda logits, _: seen.append(logits + 0)
    )
    list(steps)
    return torch.stack(seen).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_a_rows_logits_are_those_it_has_alone(family, quantized, dtype):
    if dtype is torch.bfloat16 and compute_dtype(torch.device("cpu")).dtype is not dtype:
        pytest.skip("this CPU does not compute in bfloat16")
    torch.manual_seed(1)
    model = tiny(family, shape=SHAPE).eval()
    model = (quantize(model) if quantized else model).to(dtype)
    prompts = [torch.randint(3, 90, (length,)).tolist() for length in LENGTHS]
    together = logits_of(model, prompts)
    for row, prompt in enumerate(prompts):
        alone = logits_of(model, [prompt])[:, 0]
        if dtype is torch.bfloat16:
            assert torch.equal(together[:, row], alone), row
        else:
            same = [each.argmax() == other.argmax() for each, other in zip(together[:, row], alone, strict=True)]
            steps = [*same, False].index(False)
            assert steps > 0
            torch.testing.assert_close(together[:steps, row], alone[:steps], rtol=1e-4, atol=1e-4)


def test_4_bit_rows_are_multiplied_alike():
    from halfbyte.formats import Blockwise4

    format_, weight = Blockwise4("nf4", 64, True), torch.randn(48, 128)
    parts = format_.quantize(weight)
    of_weight = parts["packed"], parts["absmax"], format_.nested_parts(parts), 64, "nf4", 48, torch.randn(48)
    x = torch.randn(16, 128)
    whole = linear_blockwise4(x, *of_weight)
    expected = x @ format_.dequantize(parts, (48, 128), torch.float32).T + of_weight[-1]
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-4)
    for rows in (1, 2, 4, 5, 13):
        assert torch.equal(linear_blockwise4(x[:rows], *of_weight), whole[:rows])
        assert torch.equal(linear_blockwise4(x[-rows:], *of_weight), whole[-rows:])
