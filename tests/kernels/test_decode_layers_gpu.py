"""The kernel of all decoder layers on a GPU: shapes as models have them, adapters, and what it leaves to others."""

import decode_cases
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper"
    ),
]
pytest.importorskip("triton")
LARGE = {"width": 2048, "inner": 5632, "heads": 16, "key_heads": 4, "size": 128, "slots": 512, "slot": 400}


@pytest.fixture
def layers():
    from halfbyte.kernels.cuda import decode_layers

    return decode_layers


def run_of(hidden, made):
    from halfbyte.ops.decode_layers import one_launch

    run = one_launch(hidden, made)
    assert run is not None
    return run


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
def test_batches(batch, lora):
    made = decode_cases.stack(batch, torch.bfloat16, "cuda", lora=lora, masked=lora and batch > 1, **LARGE)
    decode_cases.check(run_of, *made)


@pytest.mark.parametrize(
    "keys",
    [
        {"qk_norm": True, "window": 100},
        {"fp8": True},
        {"bias": True, "nested": False},
        {"width": 4096, "inner": 14336, "heads": 32, "key_heads": 8, "lora": True},
        {"slots": 2048, "slot": 1900},
        {"width": 1024, "inner": 3072, "heads": 16, "key_heads": 8, "size": 64},
    ],
    ids=lambda keys: ",".join(keys),
)
def test_shapes(keys):
    for batch, dtype in ((1, torch.bfloat16), (3, torch.float16)):
        decode_cases.check(run_of, *decode_cases.stack(batch, dtype, "cuda", **(LARGE | keys)))


@pytest.mark.parametrize("batch", [1, 8])
def test_captured_steps_follow_each_other_and_are_reproducible(batch):
    hidden, made = decode_cases.stack(batch, torch.bfloat16, "cuda", lora=True, layers=4, **LARGE)
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


def test_what_it_does_not_take(layers):
    hidden, made = decode_cases.stack(2, torch.bfloat16, "cuda", layers=1)
    assert layers.takes(hidden, made)
    assert not layers.takes(hidden.float(), made)
    assert not layers.takes(hidden.repeat(9, 1), made)
    wide = decode_cases.stack(2, torch.bfloat16, "cuda", layers=1, inner=520)
    assert not layers.takes(*wide)


def test_engine_uses_it():
    """A model of Llama's shape in NF4 with adapters: captured steps give what the engine's own forward gives."""
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
