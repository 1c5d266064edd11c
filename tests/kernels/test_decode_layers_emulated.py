"""The kernel of all decoder layers without a GPU: its own code, compiled for the CPU against emulated warps."""

import decode_cases
import pytest
import torch
from emulated import emulate, needs_compiler, on_hopper

pytest.importorskip("triton")  # whose launcher's arithmetic gemv4_cuda shares
pytestmark = needs_compiler

RUN = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Step *s, Weight *w) {
    launch(blocks, threads, bytes, [&] { decode(*s, *w); }, true);
}
"""


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """Makes what runs a stack here, on three multiprocessors, in blocks of a given shape."""
    from halfbyte.kernels.cuda import decode_layers

    emulate(decode_layers, monkeypatch, tmp_path, RUN)

    def of(blocks):
        def run_of(hidden, stack):
            shape = decode_layers.Blocks(*blocks)
            assert decode_layers.fits(hidden, stack, 16 * shape.rt)
            stacked = decode_layers.Stacked(hidden, stack, shape)
            built = decode_layers._kernel(-1, stacked.shared_bytes(), tuple(stacked.constants().items()))
            return lambda x: stacked(built, x)

        return run_of

    return of


@pytest.mark.parametrize(
    ("blocks", "batch", "dtype", "keys"),
    [
        ((1, 1, 2, 3), 1, torch.bfloat16, {"lora": True}),
        ((2, 1, 3, 2), 1, torch.bfloat16, {"lora": True, "layers": 1}),
        ((2, 1, 2, 2), 1, torch.float16, {"bias": True, "qk_norm": True, "nested": False, "layers": 1}),
        ((1, 1, 2, 2), 3, torch.float16, {"lora": True, "masked": True, "bias": True, "nested": False}),
        ((2, 1, 2, 2), 8, torch.bfloat16, {"lora": True, "qk_norm": True, "window": 7, "layers": 1, "fp8": True}),
    ],
    ids=str,
)
def test_layers(runner, blocks, batch, dtype, keys):
    decode_cases.check(runner(blocks), *decode_cases.stack(batch, dtype, **keys))


@pytest.mark.parametrize("keys", [{}, {"window": 7, "fp8": True}], ids=str)
def test_blocks_share_slots(runner, monkeypatch, keys):
    """Two blocks for each of four heads; with the window one of them has no slot."""
    from halfbyte.kernels.cuda import decode_layers

    on_hopper(monkeypatch, 8)
    hidden, made = decode_cases.stack(1, torch.bfloat16, layers=1, **keys)
    assert decode_layers.splits_of(made.heads, 8, 32, 32) == 2
    decode_cases.check(runner((1, 1, 2, 2)), hidden, made)


def test_inputs_that_do_not_fit(runner, monkeypatch):
    """Then blocks wait for each other at barriers, as they do with more rows. A team has three chunks of slots."""
    from halfbyte.kernels.cuda import decode_layers

    monkeypatch.setattr(decode_layers.Stacked, "fits_in", lambda *_: False)
    decode_cases.check(runner((1, 1, 1, 2)), *decode_cases.stack(1, torch.float16, layers=1, lora=True))


def test_steps_follow_each_other(runner):
    """The counters are as they were; the cache has the keys of the step before."""
    hidden, made = decode_cases.stack(2, torch.float16, layers=1)
    ours, theirs = decode_cases.copied(made), decode_cases.copied(made)
    run = runner((1, 1, 2, 2))(hidden, ours)
    for _ in range(2):
        found = run(hidden)
        expected = decode_cases.decode_layers(hidden, theirs)
        assert (found - expected).norm() <= 5e-3 * expected.norm()
        made.slot.add_(1)
