"""Optimizer updates of the drop-in against bitsandbytes' CPU backend, one parameter at a time and in a batch."""

import pytest
import torch

from halfbyte.bitsandbytes import functional as F
from halfbyte.bitsandbytes.updates import RULE_OF, UpdateBatch, collected

ONE_STATE = ("lion", "momentum", "rmsprop", "adagrad", "lars")
SIZES = (1, 255, 256, 257, 4097)
NUMBERS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "gnorm_scale": 0.7}
ADEMAMIX = {"beta3": 0.999, "alpha": 3.0}


@pytest.fixture(scope="module")
def real():
    return pytest.importorskip("bitsandbytes.functional")


def parameter(n, dtype, step):
    generator = torch.Generator().manual_seed(n + step)
    return torch.randn(n, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)


def fp32_states(name, n):
    return [torch.zeros(2, n) if name == "ademamix" else torch.zeros(n), None if name in ONE_STATE else torch.zeros(n)]


def step_32bit(module, name, p, g, states, step, **options):
    numbers = NUMBERS | (ADEMAMIX if name == "ademamix" else {}) | options
    beta1, eps = numbers.pop("beta1"), numbers.pop("eps")
    module.optimizer_update_32bit(name, g, p, states[0], beta1, eps, step, 1e-2, states[1], **numbers)


def eight_bit_states(name, n):
    first, blocks = ((2, n), (2, -(-n // 256))) if name == "ademamix" else ((n,), (-(-n // 256),))
    two = name not in ONE_STATE
    states = [torch.full(first, 127, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8) if two else None]
    maps = [F.create_dynamic_map(True), F.create_dynamic_map(False) if two else None]
    return states, maps, [torch.zeros(blocks), torch.zeros(-(-n // 256)) if two else None]


def step_8bit(module, name, p, g, states, step):
    codes, maps, scales = states
    more = ADEMAMIX if name == "ademamix" else {"beta3": 0.0, "alpha": 0.0}
    module.optimizer_update_8bit_blockwise(
        name, g, p, *codes, 0.9, 0.99, more["beta3"], more["alpha"], 1e-6, step, 1e-2, *maps, *scales,
        weight_decay=0.1, gnorm_scale=0.7,
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULE_OF)
def test_32bit_updates_equal_bitsandbytes(real, name, dtype):
    for n in SIZES:
        (own, _), (theirs, _) = parameter(n, dtype, 0), parameter(n, dtype, 0)
        mine, other = fp32_states(name, n), fp32_states(name, n)
        for step in (1, 2, 3):
            g = parameter(n, dtype, step)[1]
            step_32bit(F, name, own, g, mine, step)
            step_32bit(real, name, theirs, g, other, step)
        bound = {"rtol": 2e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-3}
        torch.testing.assert_close(own, theirs, **bound)
        for a, b in zip(mine, other, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, **bound)


def decoded(codes, qmap, scales):
    return qmap[codes.int()] * scales.repeat_interleave(256, dim=-1)[..., : codes.shape[-1]]


@pytest.mark.parametrize("name", [name for name in RULE_OF if name not in ("lamb", "lars")])
def test_first_8bit_update_equals_bitsandbytes(real, name):
    """From zero states, weights and scales are equal. No state is further from its fp32 value than bitsandbytes'.

    Its CPU library searches a table and misses the nearest code in 3% of the elements.
    """
    for n in SIZES:
        (own, g), (theirs, _) = parameter(n, torch.float32, 0), parameter(n, torch.float32, 0)
        mine, other, exact = eight_bit_states(name, n), eight_bit_states(name, n), fp32_states(name, n)
        step_32bit(F, name, own.clone(), g, exact, 1)
        step_8bit(F, name, own, g, mine, 1)
        step_8bit(real, name, theirs, g, other, 1)
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-6)
        for number, values in enumerate(exact):
            if values is not None:
                a, b = ([part[number] for part in parts] for parts in (mine, other))
                torch.testing.assert_close(a[2], b[2], rtol=1e-5, atol=0)
                errors = [(decoded(*each) - values).abs() for each in (a, b)]
                assert (errors[0] <= errors[1] + 1e-6 * a[2].max()).all()


@pytest.mark.parametrize("name", ["adam", "lion", "ademamix", "lamb"])
def test_a_batch_equals_single_updates(name):
    """Three steps, with gradients elsewhere in memory in each."""
    single, together, limit = {}, {}, 0.1 if name in ("adam", "lamb") else 0.0
    for n in SIZES:
        for kept in (single, together):
            kept[n] = parameter(n, torch.float32, 0)[0], fp32_states(name, n), eight_bit_states(name, n)
    batches = UpdateBatch(), UpdateBatch()
    for step in (1, 2, 3):
        gradients = {n: parameter(n, torch.float32, step)[1] for n in SIZES}
        for n, (p, states, quantized) in single.items():
            step_32bit(F, name, p, gradients[n], states, step, max_unorm=limit)
            step_8bit(F, name, p, gradients[n], quantized, step)
        for batch, run in zip(
            batches,
            (
                lambda p, states, _, g, s: step_32bit(F, name, p, g, states, s, max_unorm=limit),
                lambda p, _, quantized, g, s: step_8bit(F, name, p, g, quantized, s),
            ),
            strict=True,
        ):
            with collected() as updates:
                for n, kept in together.items():
                    run(*kept, gradients[n], step)
            assert len(updates) == len(SIZES)
            batch.run(updates)
    for n in SIZES:
        assert torch.equal(single[n][0], together[n][0])
        for a, b in zip(single[n][2][0], together[n][2][0], strict=True):
            assert a is None or torch.equal(a, b)


def test_paged_state_is_updated_in_host_memory():
    p, g = parameter(300, torch.float32, 0)
    other, plain = p.clone(), fp32_states("adam", 300)
    paged = [F.get_paged(300), F.get_paged(300)]
    assert paged[0].is_paged
    assert paged[0].page_deviceid == 0
    manager = F.GlobalPageManager.get_instance()
    manager.paged_tensors += paged
    manager.prefetch_all()
    manager.initialize()
    step_32bit(F, "adam", p, g, paged, 1)
    step_32bit(F, "adam", other, g, plain, 1)
    assert torch.equal(p, other)
    assert torch.equal(paged[0], plain[0])
    assert paged[0].abs().sum() > 0


def test_bad_arguments():
    p, g = parameter(300, torch.float32, 0)
    one, two, codes = fp32_states("lion", 300), fp32_states("adam", 300), eight_bit_states("adam", 300)
    linear = (codes[0], [F.create_linear_map(), codes[1][1]], codes[2])
    short = (codes[0], codes[1], [codes[2][0][:1], codes[2][1]])
    for wrong in (
        lambda: step_32bit(F, "adamw", p, g, two, 1),
        lambda: step_32bit(F, "adam", p, g, one, 1),
        lambda: step_32bit(F, "lion", p, g, two, 1),
        lambda: step_32bit(F, "adam", p, g.half(), two, 1),
        lambda: step_32bit(F, "adam", p, g[:7], two, 1),
        lambda: step_32bit(F, "adam", p, g, codes[0], 1),
        lambda: step_32bit(F, "adam", torch.randn(20, 15).t(), g, two, 1),
        lambda: step_8bit(F, "adam", p, g, linear, 1),
        lambda: step_8bit(F, "adam", p, g, short, 1),
        lambda: F.prefetch_tensor(p),
    ):
        with pytest.raises(ValueError):
            wrong()
    for name, states, options in (("adam", two, {"skip_zeros": True}), ("lion", one, {"max_unorm": 0.1})):
        with pytest.raises(NotImplementedError):
            step_32bit(F, name, p, g, states, 1, **options)
    with pytest.raises(RuntimeError):
        F.GlobalPageManager()
