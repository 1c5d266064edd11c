"""On a CPU in bfloat16 logits are bit-equal with and without other prompts in the batch."""

import pytest
import torch

from halfbyte import generation
from halfbyte.dispatch import Unavailable
from halfbyte.formats.blockwise4 import linear_blockwise4
from halfbyte.formats.linear import linear_rows
from halfbyte.generation.engine import StaticEngine
from halfbyte.utils.hardware import compute_dtype
from tests.helpers.decoding import SHAPE
from tests.helpers.patch_models import quantize, tiny

LENGTHS = [1, 3, 31, 32, 33, 7, 70, 66, 2, 5, 5, 5, 40]  # of 13 rows: more than a GEMV of 4-bit weights takes at once


def compiler():
    try:
        from halfbyte.kernels.native import decode4  # noqa: F401
    except Unavailable:
        return False
    return True


def needs_bfloat16():
    if compute_dtype(torch.device("cpu")).dtype is not torch.bfloat16:
        pytest.skip("this CPU does not compute in bfloat16")


def logits_of(model, prompts):
    """fp32 [steps, B, V]."""
    seen = []
    steps = generation.stream(
        model, prompts, max_new_tokens=6, stops=[], watch=lambda logits, _: seen.append(logits + 0)
    )
    list(steps)
    return torch.stack(seen).float()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_logits_do_not_depend_on_the_batch(family, quantized, dtype):
    if dtype is torch.bfloat16:
        needs_bfloat16()
    torch.manual_seed(1)
    model = tiny(family, shape=SHAPE).eval()
    model = (quantize(model) if quantized else model).to(dtype)
    if quantized and family != "Gemma2" and compiler():
        assert StaticEngine(model, [None], 64, None).one_launch is not None
    prompts = [torch.randint(3, 90, (length,)).tolist() for length in LENGTHS]
    together = logits_of(model, prompts)
    for row, prompt in enumerate(prompts):  # a wrong order of sums shows in one row of ten
        alone = logits_of(model, [prompt])[:, 0]
        if dtype is torch.bfloat16:
            assert torch.equal(together[:, row], alone), row
        else:
            same = [each.argmax() == other.argmax() for each, other in zip(together[:, row], alone, strict=True)]
            steps = [*same, False].index(False)
            assert steps > 0
            torch.testing.assert_close(together[:steps, row], alone[:steps], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [128, 192, 1024])  # one step of a row's sum, a step and a part, and many
def test_4_bit_gemm_rows_do_not_depend_on_the_batch(columns):
    from halfbyte.formats import Blockwise4

    format_, weight = Blockwise4("nf4", 64, True), torch.randn(48, columns)
    parts = format_.quantize(weight)
    of_weight = parts["packed"], parts["absmax"], format_.nested_parts(parts), 64, "nf4", 48, torch.randn(48)
    x = torch.randn(16, columns)
    whole = linear_blockwise4(x, *of_weight)
    expected = x @ format_.dequantize(parts, (48, columns), torch.float32).T + of_weight[-1]
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-4)
    for rows in (1, 2, 4, 5, 13):
        assert torch.equal(linear_blockwise4(x[:rows], *of_weight), whole[:rows])
        assert torch.equal(linear_blockwise4(x[-rows:], *of_weight), whole[-rows:])


@pytest.mark.parametrize(("columns", "width"), [(64, 16), (64, 32), (8, 64), (1536, 512), (2048, 64)])
def test_16_bit_gemm_rows_do_not_depend_on_the_batch(columns, width):
    """torch itself has another order of sums for one row, and for several of a small product."""
    needs_bfloat16()
    x, weight = torch.randn(64, columns).bfloat16(), torch.randn(width, columns).bfloat16()
    bias, whole = torch.randn(width).bfloat16(), []
    for rows in (1, 2, 3, 4, 16, 33, 48, 64):
        parts = [linear_rows(part, weight, bias) for part in x.split(rows)]
        whole.append(torch.cat(parts))
    assert all(torch.equal(each, whole[-1]) for each in whole)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole[0].double(), expected, rtol=1e-2, atol=0.05)
