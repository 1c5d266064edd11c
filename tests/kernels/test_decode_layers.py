"""Compare all decoder layers of a token in one call with the specification, in C and in CUDA."""

import pytest
import torch

from halfbyte.dispatch import Unavailable
from halfbyte.kernels import device
from halfbyte.ops.decode import one_launch
from halfbyte.utils import notices
from tests.helpers import decode_cases
from tests.helpers.kernel_backends import backends, cases, loaded

pytest.importorskip("triton")
from halfbyte.kernels.cuda import Image, decode_layers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = "blockwise4:nf4:64:plain"
GPTQ = "gptq:128:float16:runs"
RUN = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Step *s) {
    launch(blocks, threads, bytes, [&] { decode(*s); }, true);
}
"""
LARGE = {"width": 2048, "inner": 5632, "heads": 16, "key_heads": 4, "size": 128, "slots": 512, "slot": 400}


def run_of(hidden, made):
    run = one_launch(hidden, made)
    assert run is not None
    return run


@pytest.fixture
def native():
    try:
        from halfbyte.kernels.native import decode4
    except Unavailable as error:
        pytest.skip(str(error))
    return decode4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "given",
    [
        {"batch": 1},
        {"batch": 6, "lora": True, "masked": True},
        {"batch": 2, "lora": True},
        {"batch": 3, "lora": True, "masked": True, "bias": True},
        {"batch": 4, "qk_norm": True, "window": 7, "spec": PLAIN},
        {"batch": 1, "size": 32, "heads": 6, "key_heads": 1, "slots": 33, "slot": 32, "width": 192},
        {"batch": 6, "dtype": BF16, "lora": True, "masked": True, "bias": True, "qk_norm": True},
        {"batch": 1, "dtype": BF16, "size": 32, "heads": 6, "key_heads": 1, "slots": 33, "slot": 32, "window": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 3])
def test_on_a_cpu(native, given, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        decode_cases.check(run_of, *decode_cases.stack(**({"dtype": FP32} | given)))
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def runner(monkeypatch):
    """Make the function that runs a stack on emulated warps, on three multiprocessors, in blocks of a given shape."""
    loaded(decode_layers, "emulated", monkeypatch, RUN)

    def of(blocks):
        def run_of(hidden, stack):
            shape = decode_layers.Blocks(*blocks)
            assert decode_layers.misfit(hidden, stack) is None
            stacked = decode_layers.Stacked(hidden, stack, shape)
            built = stacked.kernel()
            return lambda x: stacked(built, x)

        return run_of

    return of


@pytest.mark.slow
@pytest.mark.sampled(6)
@cases(
    ("blocks", "batch", "dtype", "keys"),
    emulated=[
        ((2, 3), 1, BF16, {"lora": True}),
        ((3, 2), 1, BF16, {"lora": True, "layers": 1, "spec": GPTQ, "ordered": True}),
        ((2, 2), 1, FP16, {"bias": True, "qk_norm": True, "spec": PLAIN, "layers": 1}),
        ((2, 2), 3, FP16, {"lora": True, "masked": True, "bias": True, "spec": PLAIN}),
        ((2, 2), 8, BF16, {"lora": True, "qk_norm": True, "window": 7, "layers": 1, "fp8": True}),
        ((2, 2), 1, BF16, {"spec": "kbit:3:bof:searched"}),
        ((2, 3), 2, FP16, {"spec": "kbit:2:bnf", "layers": 1}),
        ((2, 2), 1, FP16, {"spec": "kbit:5:bnf", "layers": 1}),
        ((3, 2), 5, BF16, {"spec": "kbit:4:bnf", "layers": 1}),
        ((2, 2), 1, FP16, {"spec": "hqq:4:64", "layers": 1}),
        ((2, 2), 2, FP16, {"spec": "hqq:3:64", "layers": 1}),
        ((2, 2), 1, BF16, {"spec": "nvfp4:1d:plain"}),
        ((2, 3), 4, FP16, {"spec": "mxfp4", "layers": 1}),
        ((2, 3), 3, FP16, {"spec": GPTQ, "layers": 1, "lora": True}),
        ((2, 2), 1, BF16, {"spec": "blockwise4:fp4:128:nested", "layers": 1}),
    ],
)
def test_layers(runner, backend, blocks, batch, dtype, keys):
    decode_cases.check(runner(blocks), *decode_cases.stack(batch, dtype, **keys))


@backends("emulated")
def test_inputs_that_do_not_fit(runner, monkeypatch, backend):
    """Blocks then synchronize at barriers, as with more rows. A team has three chunks of slots."""
    monkeypatch.setattr(decode_layers.Stacked, "fits_in", lambda *_: False)
    decode_cases.check(runner((1, 2)), *decode_cases.stack(1, FP16, layers=1, lora=True))


@pytest.mark.slow
@backends("emulated")
def test_steps_follow_each_other(runner, backend):
    """Counters are reset after a step, and the cache has the keys of the step before."""
    hidden, made = decode_cases.stack(2, FP16, layers=1)
    ours, theirs = decode_cases.copied(made), decode_cases.copied(made)
    run = runner((2, 2))(hidden, ours)
    for _ in range(2):
        found = run(hidden)
        expected = decode_cases.decode_layers(hidden, theirs)
        assert (found - expected).norm() <= 5e-3 * expected.norm()
        made.slot.add_(1)


@pytest.mark.parametrize("refuses", [False, True])
def test_without_cooperative_launch_layers_are_separate_kernels(refuses, monkeypatch):
    from benchmarks.kernel_cases import decoder_stack

    class Loaded:
        def __init__(self, image, name, shared_bytes=None):
            pass

        def check_together(self, blocks, threads):
            assert (blocks, threads % 32) == (132, 0)
            if refuses:
                raise Unavailable("the device runs 0 of 132 blocks at once")

    notices.reset_notices()
    monkeypatch.setattr(device, "_assumed", device.KNOWN["h100"])
    monkeypatch.setattr(decode_layers, "cubin", lambda *_: Image(b"", 0, 0))
    monkeypatch.setattr(decode_layers, "Kernel", Loaded)
    decode_layers._kernel.cache_clear(), decode_layers._image.cache_clear()
    found = one_launch.on("cuda")(*decoder_stack(1, BF16, 128, False))
    decode_layers._kernel.cache_clear(), decode_layers._image.cache_clear()
    assert (found is None) == refuses
    assert list(notices.notices_so_far()) == (["kernel-cuda.decode_layers.compile_layers"] if refuses else [])


@cases(("batch", "lora"), hopper=[(batch, lora) for batch in (1, 2, 5, 8) for lora in (False, True)])
def test_batches(backend, batch, lora):
    made = decode_cases.stack(batch, BF16, "cuda", lora=lora, masked=lora and batch > 1, **LARGE)
    decode_cases.check(run_of, *made)


@cases(
    "keys",
    hopper=[
        {"qk_norm": True, "window": 100},
        {"fp8": True},
        {"bias": True, "spec": PLAIN},
        {"width": 4096, "inner": 14336, "heads": 32, "key_heads": 8, "lora": True},
        {"slots": 2048, "slot": 1900},
        {"width": 1024, "inner": 3072, "heads": 16, "key_heads": 8, "size": 64},
    ],
)
def test_shapes(backend, keys):
    for batch, dtype in ((1, BF16), (3, FP16)):
        decode_cases.check(run_of, *decode_cases.stack(batch, dtype, "cuda", **(LARGE | keys)))


@cases(
    ("batch", "keys"),
    hopper=[
        (1, {"spec": "kbit:3:bof:searched"}),
        (8, {"spec": "kbit:3:bof:searched", "lora": True}),
        (1, {"spec": GPTQ, "ordered": True, "lora": True}),
        (4, {"spec": GPTQ}),
        (1, {"spec": "nvfp4:2d:plain", "lora": True}),
        (3, {"spec": "mxfp4"}),
        (1, {"spec": "hqq:4:64"}),
    ],
)
def test_formats(backend, batch, keys):
    decode_cases.check(run_of, *decode_cases.stack(batch, FP16 if batch == 1 else BF16, "cuda", **(LARGE | keys)))


@cases("batch", hopper=[1, 8])
def test_captured_steps_follow_each_other_and_are_reproducible(backend, batch):
    hidden, made = decode_cases.stack(batch, BF16, "cuda", lora=True, layers=4, **LARGE)
    run = run_of(hidden, made)
    results = [run(hidden).clone() for _ in range(200)]
    assert all(torch.equal(result, results[0]) for result in results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(hidden)
    for _ in range(3):
        made.slot.add_(1)
        graph.replay()
        captured = found.clone()
        assert torch.equal(run(hidden), captured)


@backends("hopper")
def test_engine_uses_it(backend):
    """A Llama-shaped model in NF4 with adapters: captured steps equal the engine's own forward."""
    from benchmarks.step_model import build
    from halfbyte.generation.engine import StaticEngine

    model = build("tiny", "cuda").eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    prompt = torch.randint(3, 1000, (3, 20), device="cuda")
    padding = torch.tensor([0, 5, 19], device="cuda")
    logits = {}
    for one in (True, False):
        with torch.inference_mode():
            engine = StaticEngine(model, ["default", None, "default"], 64, None)
        assert engine.one_launch is not None
        if not one:
            engine.one_launch = None
        engine.prefill(prompt, padding)
        logits[one] = [engine.step(torch.tensor([7 + i, 8, 9], device="cuda")).clone() for i in range(4)]
    for ours, theirs in zip(logits[True], logits[False], strict=True):
        assert (ours - theirs).norm() <= 0.03 * theirs.norm()
