"""The C twin of `one_launch` against the specification."""

import dataclasses

import decode_cases
import pytest
import torch

from halfbyte.ops.decode_layers import one_launch

FP32 = torch.float32


@pytest.fixture(autouse=True)
def _compiler():
    from halfbyte.dispatch import Unavailable

    try:
        from halfbyte.kernels.native import decode_layers as decode_layers_cpu  # noqa: F401
    except Unavailable as error:
        pytest.skip(str(error))


def run_of(hidden, made):
    run = one_launch(hidden, made)
    assert run is not None
    return run


@pytest.mark.parametrize(
    "given",
    [
        {"batch": 1},
        {"batch": 2, "lora": True},
        {"batch": 3, "lora": True, "masked": True, "bias": True},
        {"batch": 4, "qk_norm": True, "window": 7, "nested": False},
        {"batch": 1, "size": 32, "heads": 6, "key_heads": 1, "slots": 33, "slot": 32, "width": 192},
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_step(given, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        decode_cases.check(run_of, *decode_cases.stack(dtype=FP32, **given))
    finally:
        torch.set_num_threads(before)


def test_what_it_leaves_to_torch():
    hidden, made = decode_cases.stack(1, FP32)
    assert one_launch(hidden.bfloat16(), made) is None
    assert one_launch(hidden.expand(5, -1), made) is None
    assert one_launch(hidden, dataclasses.replace(made, cos=made.cos.bfloat16())) is None
    assert one_launch(*decode_cases.stack(1, FP32, fp8=True)) is None
