"""The bit-plane kernels in Triton's interpreter, in a process of their own (see test_blockwise4_interpret.py)."""

import os
import subprocess
import sys

import pytest
import torch
from plane_cases import HQQ, KBIT, check_dequantize, check_quantize

pytest.importorskip("triton")
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="run by test_in_a_process_of_its_own")


@pytest.mark.interpret
@pytest.mark.skipif(INTERPRETING, reason="already in the interpreter")
def test_in_a_process_of_its_own():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@interpreted
@pytest.mark.parametrize("spec", KBIT)
def test_kbit(spec):
    from halfbyte.kernels.triton.bitplane import dequantize, quantize

    check_dequantize([spec], (torch.float32, torch.float16), kernel=dequantize)
    check_quantize([spec], [torch.float16], kernel=quantize)


@interpreted
@pytest.mark.parametrize("spec", HQQ)
def test_hqq(spec):
    from halfbyte.kernels.triton.hqq import dequantize

    check_dequantize([spec], [torch.float16], hqq_kernel=dequantize)


@interpreted
def test_more_than_one_program():
    from halfbyte.kernels.triton import bitplane, hqq

    for shape in ((5, 1024), (130, 33)):
        check_dequantize(["kbit:5:nf"], [torch.float16], [shape], kernel=bitplane.dequantize)
        check_dequantize(["hqq:8:128"], [torch.float16], [shape], hqq_kernel=hqq.dequantize)
        check_quantize(["kbit:5:nf"], [torch.float32], [shape], kernel=bitplane.quantize)


@interpreted
def test_every_scale():
    """All 256 scales, those below the normal range too."""
    from halfbyte.kernels.triton.bitplane import dequantize
    from halfbyte.ops.bitplane import dequantize_bitplane, kbit_codebook

    codebook = kbit_codebook("nf", 4, torch.device("cpu"))
    packed = torch.randint(-(2**31), 2**31, (256 * 4,), dtype=torch.int64).int()
    scales, factor = torch.arange(256, dtype=torch.uint8), torch.tensor(0.25)
    arguments = (packed, scales, None, factor, codebook, 256, 32, torch.float32)
    assert torch.equal(dequantize(*arguments), dequantize_bitplane.reference(*arguments))
