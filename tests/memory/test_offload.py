"""Activation offload: values, order of copies and buffers with fake CUDA streams; on a GPU also memory."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

import halfbyte
from halfbyte.autograd.checkpointing import recompute
from halfbyte.memory import offload
from halfbyte.memory.offload import Offload
from halfbyte.memory.pinned import AfterCapture, HostMemory
from halfbyte.modeling.checkpointing import OFFLOADED


class StandIn:
    """Fake torch.cuda streams that run everything immediately."""

    def __init__(self, code: int = 0):
        self.capturing, self.registered, self.code = False, [], code
        self.pinned: dict[int, int] = {}  # registered buffers: address → bytes
        self.waited: list[object] = []  # events that the compute stream waited for

    def stream_of(self, _device=None):
        nothing = {"wait_stream": lambda _: None, "synchronize": lambda: None}
        return SimpleNamespace(**nothing, wait_event=self.waited.append, record_event=object)

    def register(self, pointer: int, size: int, _flags: int) -> int:
        self.registered.append((pointer, size))
        self.pinned[pointer] = size
        return self.code

    def unregister(self, pointer: int) -> int:
        del self.pinned[pointer]
        return 0

    def install(self, monkeypatch) -> None:
        runtime = SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)
        replaced = {
            "Stream": self.stream_of,
            "current_stream": self.stream_of,
            "stream": lambda _: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": lambda: None,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(offload, "SMALLEST", 1024)
        after = AfterCapture(lambda: self.capturing)
        monkeypatch.setattr(offload, "AFTER_CAPTURE", after)
        monkeypatch.setattr(offload, "HOST", HostMemory(lambda: runtime, lambda: None, after))


@pytest.fixture
def cuda(monkeypatch) -> StandIn:
    stand_in = StandIn()
    stand_in.install(monkeypatch)
    return stand_in


def layers(weights, x, store=None):
    for weight in weights:
        with contextlib.nullcontext() if store is None else store.hooks():
            x = recompute(lambda x, _, w=weight: (x, torch.tanh(x @ w)), x, [weight])
    return x.square().sum()


def test_gradients_and_buffers_over_steps(cuda):
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(5)]
    x = torch.randn(1, 32, 16, requires_grad=True)
    expected = torch.autograd.grad(layers(weights, x), [x, *weights])
    store = Offload(torch.device("cpu"))
    for _ in range(3):
        found = torch.autograd.grad(layers(weights, x, store), [x, *weights])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [size for _, size in cuda.registered] == [4 * x.nbytes] * 2  # made once
    assert store.pinned_bytes == sum(cuda.pinned.values()) == 8 * x.nbytes
    assert not store._outgoing
    assert all(slab.alive == slab.used == 0 for slab in store._host.slabs)


def test_pinned_memory_is_that_of_the_largest_batch(cuda):
    """300 steps of lengths 64 to 8,192 with four tensors of different widths per layer, as in attention offload."""
    store, generator = Offload(torch.device("cpu")), torch.Generator().manual_seed(3)
    lengths = torch.randint(64, 8193, (300,), generator=generator).tolist()
    widths, pinned = (8, 8, 2, 2), []
    memory = torch.empty(8192 * max(widths), dtype=torch.bfloat16)

    def step(length: int) -> None:
        layer = [memory[: length * width] for width in widths]
        packed = saved(store, *([tensor.clone() for tensor in layer] for _ in range(6)))
        while packed:
            store.unpack(packed.pop())

    for length in lengths:
        step(length)
        pinned.append(sum(cuda.pinned.values()))
    largest = 6 * sum(widths) * max(lengths) * 2
    assert pinned[49:] == [pinned[-1]] * 251  # flat
    assert largest <= pinned[-1] <= 2 * largest
    assert store.pinned_bytes == pinned[-1]
    assert len(cuda.registered) <= 12


def test_tensors_never_unpacked_are_freed_after_their_copy(cuda):
    """A partial `torch.autograd.grad`, or a caught out-of-memory error, leaves tensors that are never unpacked."""
    store = Offload(torch.device("cpu"))
    packed = saved(store, *([torch.randn(1, 32, 16)] for _ in range(4)))
    store.unpack(packed[3])
    fetched = packed[2].memory.last  # being copied back
    assert fetched.device is not None
    cuda.waited.clear()
    del packed[2]
    assert cuda.waited == [fetched.copied]
    assert fetched.device is None
    cuda.waited.clear()
    packed.clear()  # unpacked copies, and copies that were not fetched
    assert cuda.waited == []


def saved(store: Offload, *layers: list[torch.Tensor]) -> list:
    """The packed tensors of each layer."""
    packed = []
    for tensors in layers:
        with store.hooks():
            packed += [store.pack(tensor) for tensor in tensors]
    return packed


def away(packed: list) -> list[bool]:
    return [item.memory.device is None for item in packed]


def test_order_of_the_copies(cuda):
    store, tensors = Offload(torch.device("cpu")), [torch.randn(1, 32, 16) for _ in range(4)]
    packed = saved(store, *([tensor] for tensor in tensors))
    assert away(packed) == [True, True, True, False]  # the last one is still on the device
    assert torch.equal(store.unpack(packed[3]), tensors[3])
    assert away(packed) == [True, True, False, True]  # the one before is being fetched
    assert torch.equal(store.unpack(packed[2]), tensors[2])
    assert away(packed) == [True, False, True, True]
    assert torch.equal(store.unpack(packed[3]), tensors[3])  # a second backward fetches it again


def test_tensors_freed_during_prefetch(cuda, monkeypatch):
    store = Offload(torch.device("cpu"))
    layers = [[torch.randn(1, 32, 16) for _ in range(2)] for _ in range(3)]
    packed, fetch = saved(store, *layers), store._fetch

    def while_others_die(memory, compute):
        packed[:2] = []
        fetch(memory, compute)

    unpacked = packed[-1]
    monkeypatch.setattr(store, "_fetch", while_others_die)
    assert torch.equal(store.unpack(unpacked), layers[2][1])
    assert list(store._offloaded) == [4]  # only that layer's; the earlier ones were freed


def test_small_tensors_stay_and_unused_buffers_are_freed(cuda):
    store = Offload(torch.device("cpu"))
    assert isinstance(store.pack(torch.ones(3)), torch.Tensor)
    for _ in range(4):
        saved(store, [torch.randn(32, 16)])
    assert len(cuda.registered) <= 1


def test_a_capture_is_refused(cuda):
    cuda.capturing = True
    with pytest.raises(RuntimeError, match="CUDA graph"):
        Offload(torch.device("cpu")).pack(torch.randn(32, 16))


def noted(take, sizes: list[int]):
    def taking(size: int):
        sizes.append(size)
        return take(size)

    return taking


@pytest.mark.sampled(4)
@pytest.mark.parametrize("level", OFFLOADED)
def test_gradients_of_a_model_are_those_of_keep(monkeypatch, level):
    """Recomputed norms, saved q, k and v, and gate and up, which the backward overwrites."""
    from halfbyte.modeling.patch_record import Activations, record

    model = tiny_model()
    tokens = torch.randint(0, 512, (2, 48), generator=torch.Generator().manual_seed(1))
    expected = gradients(model, tokens, "keep")
    cuda = StandIn()
    cuda.install(monkeypatch)  # after imports that read torch.cuda's classes
    store, sent = Offload(torch.device("cpu")), []
    monkeypatch.setattr(store._host, "take", noted(store._host.take, sent))
    for layer in model.get_base_model().model.layers:
        record(layer).activations = Activations(level, store)
    for _ in range(2):
        found = gradients(model, tokens)
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    stream = 2 * 48 * SHAPE["hidden_size"] * 4
    assert sent.count(stream) >= 2 * SHAPE["num_hidden_layers"]
    assert (max(sent) > stream) == (level == "offload_kept")  # gate and up
    halfbyte.unpatch(model)
    del store  # while the fake streams are installed
    gc.collect()


# --- on a GPU --------------------------------------------------------------------------------------------------------

SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 2, "vocab_size": 512, "head_dim": 64, "max_position_embeddings": 8192}  # fmt: skip


def tiny_model(device: str = "cpu", dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> torch.nn.Module:
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(device, dtype)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", lora_dropout=dropout)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def gradients(model: torch.nn.Module, tokens: torch.Tensor, levels=None) -> dict[str, torch.Tensor]:
    """Gradients of one step; `levels`: levels that the model is patched with."""
    from halfbyte.modeling.head import causal_lm_loss

    if levels is not None:
        halfbyte.patch(model, levels)
    model.zero_grad()
    loss, count = causal_lm_loss(model, {"input_ids": tokens, "labels": tokens})
    (loss / count).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gpu_model() -> torch.nn.Module:
    return tiny_model("cuda", torch.bfloat16, dropout=0.1)


def gpu_step(model: torch.nn.Module, levels) -> tuple[int, int, dict[str, torch.Tensor]]:
    """(bytes alive after forward, peak, gradients) of a second step."""
    from halfbyte.modeling.head import causal_lm_loss

    halfbyte.patch(model, levels)
    tokens = torch.randint(0, 512, (2, 4096), generator=torch.Generator().manual_seed(1)).cuda()
    for _ in range(2):
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(5)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss, count = causal_lm_loss(model, {"input_ids": tokens, "labels": tokens})
        alive = torch.cuda.memory_allocated() - before
        (loss / count).backward()
    peak = torch.cuda.max_memory_allocated() - before
    return alive, peak, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "levels",
    [
        "offload",
        "offload_kept",
        "offload_attention",
        ["offload"] * 5 + ["recompute"] * 3,
        ["checkpoint", "offload"] * 4,
        ["offload_attention", "offload", "offload_kept", "keep"] * 2,
    ],
)
def test_gradients_on_a_gpu_are_those_of_keep(levels):
    """With dropout; equal up to the order of sums in attention's backward."""
    model = gpu_model()
    _, kept_peak, expected = gpu_step(model, "keep")
    _, peak, found = gpu_step(model, levels)
    assert peak < kept_peak
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 2e-2 * gradient.norm(), name


@pytest.mark.gpu
def test_offload_frees_gpu_memory():
    """The freed memory is that of all layers except the last one and the copies in flight."""
    model = gpu_model()
    layers = SHAPE["num_hidden_layers"]
    for level, on_device in OFFLOADED.items():
        kept, _, _ = gpu_step(model, on_device)
        alive, _, _ = gpu_step(model, level)
        assert alive <= kept * 2.5 / layers, level


@pytest.mark.gpu
def test_tiles_on_a_gpu():
    """8,192 tokens are one tile by default; smaller tiles give several, comparable without dropout."""
    from halfbyte.modeling import checkpointing

    model = gpu_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    _, _, expected = gpu_step(model, "keep")
    rows, checkpointing.TILE_ROWS = checkpointing.TILE_ROWS, 1000
    try:
        _, _, found = gpu_step(model, "tiled")
    finally:
        checkpointing.TILE_ROWS = rows
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 2e-2 * gradient.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize(("level", "captured"), [("recompute", True), ("checkpoint", True), ("offload", False)])
def test_levels_in_a_cuda_graph(level, captured):
    """CUDA graphs capture recomputation; offload raises a reasoned error in a capture and runs eagerly."""
    from halfbyte.modeling.head import causal_lm_loss
    from halfbyte.train.graph import ShapeGraphs
    from halfbyte.utils import notices

    notices.reset_notices()
    model = gpu_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    halfbyte.patch(model, level)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True, capturable=True)

    def step(batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss, count = causal_lm_loss(model, batch)
        loss = loss / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    graphed = ShapeGraphs(step, optimizer.zero_grad)
    tokens = torch.randint(0, 512, (2, 1024), device="cuda")
    losses = [graphed({"input_ids": tokens, "labels": tokens}).item() for _ in range(8)]
    assert losses[-1] < losses[0]
    assert any(graph is not None for graph in graphed._captured.values()) == captured
    assert captured or "cuda-graph" in notices.notices_so_far()
