"""The 4-bit kernels in Triton's interpreter, which needs no GPU.

TRITON_INTERPRET is read when a kernel is decorated, so these tests run in a process of their own, which the first test
starts. The interpreter takes 5-12 ms a program and is wrong in bf16: few programs, fp32 and fp16 only.
"""

import os
import subprocess
import sys

import pytest
import torch
from cases import check_dequantize, check_quantize

pytest.importorskip("triton")
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="run by test_in_a_process_of_its_own")
DTYPES = (torch.float32, torch.float16)


@pytest.mark.interpret
@pytest.mark.skipif(INTERPRETING, reason="already in the interpreter")
def test_in_a_process_of_its_own():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@interpreted
@pytest.mark.parametrize("blocksize", [32, 256])
def test_dequantize(blocksize):
    from halfbyte.kernels.triton.blockwise4 import dequantize

    check_dequantize(dequantize, DTYPES, [blocksize], counts=(1, 65, 1001))


@interpreted
def test_dequantize_more_than_one_program():
    from halfbyte.kernels.triton.blockwise4 import dequantize

    check_dequantize(dequantize, [torch.float16], [64], counts=(8193,))


@interpreted
@pytest.mark.parametrize("blocksize", [32, 256])
def test_quantize(blocksize):
    from halfbyte.kernels.triton.blockwise4 import quantize

    check_quantize(quantize, DTYPES, [blocksize], counts=(1, 65, 1001))


@interpreted
def test_quantize_more_than_one_program():
    from halfbyte.kernels.triton.blockwise4 import quantize

    check_quantize(quantize, [torch.float32], [4096, 64], counts=(8193,))


@interpreted
def test_what_is_not_finite_reaches_the_scale():
    from halfbyte.kernels.triton.blockwise4 import quantize

    for bad in (float("nan"), float("inf"), -float("inf")):
        weight = torch.ones(130)
        weight[100] = bad
        assert not torch.isfinite(quantize(weight, 64, "nf4")[1]).all()


@interpreted
def test_nothing_is_written_past_the_end():
    from halfbyte.kernels.triton.blockwise4 import dequantize, quantize

    packed, absmax = quantize(torch.ones(5), 64, "nf4")
    assert packed.shape == (3, 1)
    assert packed[-1].item() == 0xF7  # the odd tail's low nibble is zero
    assert torch.equal(dequantize(packed, absmax, None, 64, "nf4", 5, torch.float32), torch.ones(5))
