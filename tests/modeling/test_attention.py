"""Mask-free attention: arguments of the kernels, and equality with transformers' SDPA and its dense mask.

The kernels themselves need a CUDA device; here a loop over documents stands in for variable-length attention.
"""

import copy
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers

import halfbyte
from halfbyte.autograd import attention as causal
from halfbyte.autograd import tiled_attention
from halfbyte.modeling import attention
from halfbyte.modeling.patch import patch_attention
from halfbyte.utils.notices import notices_so_far
from tests.helpers.patch_models import assert_same, batch, loop_over_documents, loss_and_gradients, of_stock, tiny

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with a process's first product; torch asks for it


@pytest.fixture
def on_cpu(monkeypatch):
    """The path of a CUDA device on a CPU: float32 allowed, a loop in place of the kernel; records its bounds."""
    calls = []

    def varlen(*args, **options):
        calls.append(args[3])
        return loop_over_documents(*args, **options)

    monkeypatch.setattr(causal, "DTYPES", (torch.float32,))
    monkeypatch.setattr(causal, "_varlen", lambda: (varlen, frozenset({"enable_gqa"})))
    attention.register()
    return calls


@pytest.fixture
def flash3(on_cpu, monkeypatch):
    """Stand in for FlashAttention 3's module (hopper/flash_attn_interface.py), and record its calls.

    Computes document by document in float32, with scores capped.
    """
    calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
    ):  # fmt: skip
        calls.append({"bounds": cu_seqlens_q, "window": window_size, "softcap": softcap, "causal": causal})
        options = {"window_size": window_size, "scale": softmax_scale, "softcap": softcap}
        return loop_over_documents(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, enable_gqa=True, **options
        )

    module = ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec("flash_attn_interface", None)
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(causal, "capability", lambda device: (9, 0))
    causal.flash3.cache_clear()
    yield calls
    causal.flash3.cache_clear()


def patched(model, name=attention.ATTENTION_NAME):
    halfbyte.patch(model)
    model.config._attn_implementation = name
    return model


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "Gemma3Text", "Phi3"])
def test_no_mask_equals_the_dense_mask(on_cpu, monkeypatch, family, packed):
    model, inputs = tiny(family), batch(packed)
    expected = loss_and_gradients(model, inputs)
    monkeypatch.setattr(attention, "sdpa_attention_forward", None)  # nothing falls back
    assert_same(loss_and_gradients(patched(model), inputs), expected)
    windows = family in ("Mistral", "Gemma3Text")
    assert bool(on_cpu) == (packed or windows)
    assert len({id(bounds) for bounds in on_cpu[-2:]}) <= 1  # once a batch, not once a layer


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "Gemma3Text"])
def test_flash_attention_3_is_used_where_installed(flash3, on_cpu, family, packed):
    model, inputs = tiny(family), batch(packed)
    expected = loss_and_gradients(model, inputs)
    name = attention.SCORES_NAME if family == "Gemma2" else attention.ATTENTION_NAME
    assert_same(loss_and_gradients(patched(model, name), inputs), expected)
    assert not on_cpu
    windows = family != "Llama"
    assert len(flash3) == (2 if packed or family in ("Mistral", "Gemma2") else int(windows))
    assert {call["softcap"] for call in flash3} <= {2.0 if family == "Gemma2" else 0.0}
    assert all(call["causal"] for call in flash3)
    assert any(call["window"] == (7, 0) for call in flash3) == windows
    assert len({id(call["bounds"]) for call in flash3}) <= 1  # once a batch, not once a layer


@pytest.mark.parametrize("packed", [False, True])
def test_capped_scores_without_flash_attention_3_are_computed_in_tiles(on_cpu, monkeypatch, packed):
    """18 tokens in tiles of 16 queries, including a layer with a window of 8."""
    monkeypatch.setattr(tiled_attention, "CACHED_BYTES", 1)
    model, inputs = tiny("Gemma2"), batch(packed)
    expected = loss_and_gradients(model, inputs)
    modeling = sys.modules[type(model.get_base_model()).__module__]
    monkeypatch.setattr(modeling, "eager_attention_forward", None)
    patched(model, attention.SCORES_NAME)
    assert_same(loss_and_gradients(model, inputs), expected)
    assert not on_cpu
    if packed:  # as the collator for graphs gives them: bounds that repeat at the end, a power of two
        keywords = attention.document_bounds(inputs["position_ids"])
        bounds = torch.nn.functional.pad(keywords["cu_seq_lens_q"], (0, 5), value=inputs["input_ids"].numel())
        named = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 32, "max_length_k": 32}
        assert_same(loss_and_gradients(model, inputs | named), expected)


@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        ("Llama", attention.ATTENTION_NAME, "FlashAttention 3"),
        ("Gemma2", attention.SCORES_NAME, ""),
    ],
)
def test_flash_attention_3_is_chosen_and_announced(flash3, monkeypatch, family, name, words):
    model = tiny(family, adapter=False).model
    loaded = model.config._attn_implementation
    monkeypatch.setattr(
        model, "parameters", lambda: iter([SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)])
    )
    assert words in attention.bind_attention(model)
    assert model.config._attn_implementation == name
    assert "FlashAttention 3" in notices_so_far()["attention-flash3"]
    attention.unbind_attention(model)
    assert model.config._attn_implementation == loaded


def test_a_flash_attention_3_that_does_not_load_is_not_used(flash3, monkeypatch):
    monkeypatch.delattr(sys.modules["flash_attn_interface"], "flash_attn_varlen_func")
    assert causal.flash3() is None
    assert "flash3" in notices_so_far()


def test_bounds_given_by_the_caller_are_used(on_cpu):
    model, inputs = tiny("Llama"), batch(packed=True)
    expected = loss_and_gradients(model, inputs)
    inputs |= attention.document_bounds(inputs["position_ids"])
    assert_same(loss_and_gradients(patched(model), inputs), expected)
    assert on_cpu[-1] is inputs["cu_seq_lens_q"]


@pytest.mark.parametrize(
    ("family", "name"),
    [("Llama", attention.ATTENTION_NAME), ("Gemma2", attention.SCORES_NAME)],
    ids=["llama", "capped"],
)
def test_padding_and_generation_keep_transformers_mask(on_cpu, flash3, family, name):
    model, inputs = tiny(family), batch()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, :5] = 0
    inputs["labels"][1, :6] = -100
    expected = loss_and_gradients(model, inputs)
    prompt = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    generated = model.eval().generate(**prompt, max_new_tokens=6, do_sample=False)
    patched(model, name)
    assert torch.equal(model.generate(**prompt, max_new_tokens=6, do_sample=False), generated)
    assert_same(loss_and_gradients(model.train(), inputs), expected)
    assert not on_cpu
    assert not flash3


def test_document_bounds_start_where_positions_restart():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    bounds = attention.document_bounds(positions)
    assert bounds["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 10]
    assert bounds["cu_seq_lens_q"].dtype == torch.int32
    assert bounds["max_length_k"] == 4
    assert attention.document_bounds(torch.arange(5).expand(2, 5)) is None


@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_cpu_binds_attention_only_for_custom_scores(family, monkeypatch):
    """18 tokens in tiles of 16 queries, with a windowed layer and isolated documents."""
    monkeypatch.setattr(tiled_attention, "CACHED_BYTES", 1)
    model = tiny(family)
    backbone = model.get_base_model().model
    for inputs in (batch(), batch(packed=True)):
        expected = loss_and_gradients(model, of_stock(model, inputs))
        assert "tiles" in patch_attention(model)
        eager = sys.modules[type(backbone).__module__].eager_attention_forward
        monkeypatch.setattr(sys.modules[type(backbone).__module__], "eager_attention_forward", None)
        assert_same(loss_and_gradients(model, inputs), expected)
        monkeypatch.setattr(sys.modules[type(backbone).__module__], "eager_attention_forward", eager)
        assert "forward" not in backbone.layers[0].__dict__
        halfbyte.unpatch(model)
        assert backbone.config._attn_implementation == "eager"
        assert "forward" not in backbone.__dict__
    assert patch_attention(tiny("Llama")) == ""


@pytest.mark.parametrize("kernel", [False, True])
def test_sinks_learn_and_reach_the_kernel(on_cpu, monkeypatch, kernel):
    """gpt-oss in 16 bits on a GPU takes the kernel, here its reference."""
    if kernel:
        monkeypatch.setattr(causal, "capability", lambda device: (9, 0))
        monkeypatch.setattr(attention, "tiled_attention", None)
    model = tiny("GptOss")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith("sinks"))
    for inputs in (batch(), batch(packed=True)):
        expected = loss_and_gradients(model, of_stock(model, inputs))
        assert sum(name.endswith("sinks") for name in expected[1]) == 2
        patched(model, attention.SCORES_NAME)
        assert_same(loss_and_gradients(model, inputs), expected)
        halfbyte.unpatch(model)
        model.config._attn_implementation = "eager"
    assert not on_cpu


def test_a_cpu_keeps_transformers_attention():
    model = tiny("Llama")
    assert halfbyte.patch(model).attention == "transformers' sdpa: on cpu"
    assert model.config._attn_implementation == "sdpa"


@pytest.fixture
def turing(monkeypatch):
    """A T4 in place of the CPU."""
    monkeypatch.setattr(causal, "capability", lambda device: (7, 5))
    attention.register()


def test_before_ampere_masks_are_transformers_and_keys_are_repeated(turing, on_cpu, monkeypatch):
    called = []

    def attend(query, key, value, *args, original=torch.nn.functional.scaled_dot_product_attention, **options):
        called.append((key.shape[1] == query.shape[1], options.get("enable_gqa", False), options["attn_mask"] is None))
        return original(query, key, value, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    for packed in (False, True):
        model, inputs = tiny("Llama"), batch(packed)
        expected = loss_and_gradients(model, inputs)
        called.clear()
        assert_same(loss_and_gradients(patched(model), inputs), expected)
        assert called == [(True, False, not packed)] * 2
    assert not on_cpu
    assert "8.0 (Ampere)" in " ".join(notices_so_far().values())


CUDA = torch.device("cuda")
OSS = {"model_type": "gpt_oss", "_attn_implementation": "eager"}


@pytest.mark.parametrize(
    ("keys", "device", "dtype", "rows", "name", "scores", "mask"),
    [
        ({}, CUDA, torch.bfloat16, {}, "cuDNN", False, False),
        ({}, CUDA, torch.bfloat16, {"packed": True}, "variable lengths", False, False),
        ({"sliding_window": 8}, CUDA, torch.bfloat16, {}, "variable lengths", False, False),
        ({}, CUDA, torch.bfloat16, {"padded": True}, "transformers' sdpa", False, True),
        ({}, CUDA, torch.float32, {}, "transformers' sdpa", False, False),
        ({}, CUDA, torch.float32, {"packed": True}, "transformers' sdpa", False, True),
        ({"attention_dropout": 0.1}, CUDA, torch.bfloat16, {}, "transformers' sdpa", False, False),
        ({"attn_logit_softcapping": 50.0}, CUDA, torch.bfloat16, {}, "halfbyte's kernel", False, False),
        ({"attn_logit_softcapping": 50.0}, CUDA, torch.float32, {}, "tiles of queries", False, False),
        ({"attn_logit_softcapping": 50.0}, torch.device("cpu"), torch.float32, {}, "tiles of queries", False, False),
        ({"attn_logit_softcapping": 50.0}, CUDA, torch.float32, {"padded": True}, "transformers' eager", True, True),
        (OSS, CUDA, torch.bfloat16, {"packed": True}, "halfbyte's kernel", False, False),
        (OSS, CUDA, torch.float32, {}, "tiles of queries", False, False),
        (OSS | {"attention_dropout": 0.1}, CUDA, torch.bfloat16, {}, "transformers' eager", True, True),
        (OSS, torch.device("cpu"), torch.bfloat16, {"padded": True}, "transformers' eager", True, True),
        ({"_attn_implementation": "eager"}, CUDA, torch.bfloat16, {}, "transformers' eager", True, True),
        ({"use_bidirectional_attention": True}, CUDA, torch.float32, {}, "transformers' sdpa", True, False),
        ({}, torch.device("cpu"), torch.float32, {}, "transformers' sdpa", False, False),
    ],
)  # fmt: skip
def test_implementation_names_the_attention(keys, device, dtype, rows, name, scores, mask):
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=64, **keys)
    if "attn_logit_softcapping" in keys:
        config._attn_implementation = "eager"
    chosen = attention.implementation(config, device, dtype, **rows)
    assert bool(chosen.tiles) == (chosen.name == "tiles of queries")
    assert (chosen.name, chosen.scores, chosen.mask) == (name, scores, mask)
    assert bool(chosen.obstacle) == name.startswith("transformers'")


@pytest.fixture
def hopper(on_cpu, monkeypatch):
    """An H100 in place of the CPU; records the calls of the repeatable attention, which loops here."""
    calls = []

    def varying(query, key, value, bounds, longest, documents, scale, window):
        calls.append(documents)
        sides = (-1 if window is None else window - 1, 0)
        spans = bounds, bounds, longest, longest
        return loop_over_documents(query, key, value, *spans, window_size=sides, scale=scale, enable_gqa=True)

    def whole(query, key, value, scale):
        calls.append("whole")
        options = {"scale": scale, "is_causal": True, "enable_gqa": True}
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

    monkeypatch.setattr(causal, "capability", lambda device: (9, 0))
    monkeypatch.setattr(causal, "_VarlenAttention", SimpleNamespace(apply=varying))
    monkeypatch.setattr(causal, "_CudnnAttention", SimpleNamespace(apply=whole))
    return calls


def check_same_loss(family, inputs):
    model = tiny(family)
    expected = loss_and_gradients(model, inputs)
    assert_same(loss_and_gradients(patched(model), inputs), expected)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3Text"])
def test_packed_rows_are_repeatable_on_hopper_and_spans_are_computed_once(hopper, on_cpu, family):
    inputs = batch(packed=True)
    check_same_loss(family, inputs)
    assert len(hopper) >= 2
    assert not on_cpu
    assert len({id(documents[0]) for documents in hopper}) == 1
    bounds = attention.document_bounds(inputs["position_ids"])
    check_same_loss(family, inputs | bounds)  # those that a collator gives
    assert torch.equal(hopper[-1][0], hopper[0][0])


def test_full_rows_are_repeatable_if_cheap_or_requested(hopper, monkeypatch):
    query = torch.empty(1).expand(4, 32, 2048, 128)
    for installed in (None, object()):
        monkeypatch.setattr(causal, "cudnn", lambda installed=installed: installed)
        assert causal.has_repeatable_rows(query) == (installed is not None)
        assert not causal.has_repeatable_rows(query[:, :16])  # 34 µs a layer is above 1% of a small model's step
        assert causal.has_repeatable_rows(query[:, :16, :512]) == (installed is not None)
        assert not causal.has_repeatable_rows(torch.empty(1).expand(1, 32, 8192, 128))
    monkeypatch.setattr(causal, "cudnn", lambda: None)
    check_same_loss("Llama", batch())
    assert not hopper
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check_same_loss("Llama", batch())
    assert hopper == ["whole"] * 2


@pytest.mark.parametrize("planned", [False, True])
def test_only_rows_of_a_frequent_length_take_the_kernel_with_plans(hopper, monkeypatch, planned):
    monkeypatch.setattr(causal, "varlen_attention" if planned else "row_attention", None)
    rows, length = batch()["input_ids"].shape
    with attention.cudnn_lengths({length if planned else length + 1}):
        check_same_loss("Llama", batch())
    starts = [documents[0].unique().tolist() for documents in hopper]
    assert starts == ([] if planned else [[length * row for row in range(rows)]] * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_on_the_gpu_the_repeatable_backward_is_the_stock_models(packed, deterministic):
    shape = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny("Qwen3", shape=shape).to("cuda", torch.bfloat16)
    inputs = {key: value.cuda() for key, value in batch(packed).items()}
    truth = loss_and_gradients(copy.deepcopy(model).float(), inputs)
    stock = loss_and_gradients(model, inputs)
    halfbyte.patch(model)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        torch.use_deterministic_algorithms(deterministic, warn_only=False)
        fused, repeated = loss_and_gradients(model, inputs), loss_and_gradients(model, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    for name, exact in truth[1].items():
        error, stock_error = ((run[1][name].float() - exact).norm() / exact.norm() for run in (fused, stock))
        assert error <= 1.25 * stock_error + 0.02, name
        assert torch.equal(fused[1][name], repeated[1][name]), name


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "faked"), [(torch.float16, (7, 5)), (torch.float32, None)])
def test_gpu_grouped_keys_build_no_scores(monkeypatch, dtype, faked):
    if faked:
        monkeypatch.setattr(causal, "capability", lambda device: faked)
    shape = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1}
    model = tiny("Llama", shape=shape | {"max_position_embeddings": 4096}).to("cuda", dtype)
    halfbyte.patch(model)
    ids = torch.randint(3, 90, (1, 4096), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    model(input_ids=ids, labels=ids).loss.backward()
    scores = 4 * 4096**2 * dtype.itemsize  # of one layer; the other kernel keeps those of both, twice
    assert torch.cuda.max_memory_allocated() - allocated < scores


def test_training_makes_no_cache_unless_asked():
    model, inputs = tiny("Llama"), batch()
    halfbyte.patch(model)
    assert model(**inputs).past_key_values is None
    assert model(**inputs, use_cache=True).past_key_values is not None


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "Gemma2", "Gemma3Text", "Phi3", "GptOss"])
def test_on_the_gpu_loss_and_gradients_equal_the_stock_models(family, packed):
    shape = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "GptOss":  # each token takes all experts, so that rounding cannot send one elsewhere
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 4}
    model = tiny(family, shape=shape).to("cuda", torch.bfloat16)
    inputs = {key: value.cuda() for key, value in batch(packed).items()}
    wide = copy.deepcopy(model).float()
    truth = loss_and_gradients(wide, of_stock(wide, inputs))
    stock = loss_and_gradients(model, of_stock(model, inputs))
    report = halfbyte.patch(model)
    assert "halfbyte" in report.attention
    fused = loss_and_gradients(model, inputs)
    assert abs(fused[0] - truth[0]) <= abs(stock[0] - truth[0]) + 5e-3 * abs(truth[0])
    for name, exact in truth[1].items():  # bf16's own error is what ours is measured against
        error, stock_error = ((run[1][name].float() - exact).norm() / exact.norm() for run in (fused, stock))
        assert error <= 1.25 * stock_error + 0.02, name
    implementation = model.config._attn_implementation
    assert implementation == "eager" or transformers.AttentionInterface()[implementation] is not None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("packed", [False, True])
def test_heads_wider_than_flash_attention_supports(device, window, packed):
    """Gemma 4's global ones, with fewer heads of keys; gradients, too."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    heads = [torch.randn(2, count, 24, 512, device=device, dtype=dtype, requires_grad=True) for count in (4, 2, 2)]
    ends = [0, 5, 24, 31, 48] if packed else [0, 24, 48]
    bounds = torch.tensor(ends, dtype=torch.int32, device=device)
    mask = torch.empty(attention.NO_MASK, dtype=torch.bool, device=device)
    options = {"scaling": 0.04, "sliding_window": window, "cu_seq_lens_q": bounds, "max_length_q": 24}
    out, _ = attention.attend(torch.nn.Module(), *heads, mask, **options)
    wide = [x.detach().float().cpu().requires_grad_() for x in heads]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in wide)
    spans = bounds.cpu(), bounds.cpu(), int(bounds.diff().max()), int(bounds.diff().max())
    sides = (-1 if window is None else window - 1, 0)
    expected = loop_over_documents(q, k, v, *spans, window_size=sides, scale=0.04, enable_gqa=True).view(2, 24, 4, 512)
    tolerance = 1e-5 if device == "cpu" else 0.02
    assert (out.float().cpu() - expected).norm() < tolerance * expected.norm()
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(out, heads, upstream.to(device, dtype))
    for left, right in zip(gradients, torch.autograd.grad(expected, wide, upstream), strict=True):
        assert (left.float().cpu() - right).norm() < tolerance * right.norm()
