"""Checkpoints that other tools quantized: values equal the published formulas, and saving restores the bytes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfbyte.formats import (
    FORMATS,
    Aqlm,
    Awq,
    Float8,
    Gptq,
    GptqV2,
    HqqLibrary,
    Mxfp4,
    Nvfp4,
    PackQuantized,
    PackQuantizedZeros,
    Torchao,
    from_spec,
)
from halfbyte.layers import QuantizedLinear, quantized_parameter
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import CheckpointError
from halfbyte.utils.notices import notices_so_far
from tests.helpers.imported_tensors import (
    CHECKPOINTS,
    GROUPS,
    IDS,
    K,
    N,
    awq,
    gpt_oss,
    gptq,
    gptq_listed,
    gptq_uneven,
    loaded,
    modelopt,
    mxfp4,
    packed,
)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


checkpoints = pytest.mark.parametrize(("cls", "make"), CHECKPOINTS, ids=IDS)


# ---- the published formulas, read element by element


def test_inputs_of_equal_groups_are_sorted():
    layouts = {"ordered": gptq(), "listed": gptq_listed(), "indexed": gptq_uneven(), "runs": gptq(indexed=False)}
    for layout, state in layouts.items():
        assert loaded(Gptq, state).format.groups == layout


def nibble(word, at):
    return (int(word) >> (4 * at)) & 15


@pytest.mark.parametrize(("cls", "plus"), [(Gptq, 1), (GptqV2, 0)], ids=["v1", "v2"])
@pytest.mark.parametrize("indexed", [False, True], ids=["runs", "desc_act"])
def test_gptq_values(cls, plus, indexed):
    state = gptq(indexed)
    qweight, qzeros, scales = (state[f"../{key}"].numpy() for key in ("qweight", "qzeros", "scales"))
    expected = np.empty((N, K), dtype=np.float16)
    for k in range(K):
        group = int(state["../g_idx"][k]) if indexed else k // (K // GROUPS)
        for n in range(N):
            zero = (nibble(qzeros[group, n // 8], n % 8) + plus) & 15
            expected[n, k] = scales[group, n] * np.float16(nibble(qweight[k // 8, n], k % 8) - zero)
    tensor = loaded(cls, state)
    assert tensor.dtype == torch.float16
    assert np.array_equal(tensor.dequantize().numpy(), expected)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_pack_quantized_values(zeros, indexed):
    state = packed(zeros, indexed)
    codes, scales = state["../weight_packed"], state["../weight_scale"]
    expected = torch.empty(N, K, dtype=torch.bfloat16)
    for n in range(N):
        for k in range(K):
            group = int(state["../weight_g_idx"][k]) if indexed else k // (K // GROUPS)
            zero = nibble(state["../weight_zero_point"][n // 8, group], n % 8) - 8 if zeros else 0
            expected[n, k] = scales[n, group] * (nibble(codes[n, k // 8], k % 8) - 8 - zero)
    tensor = loaded(PackQuantizedZeros if zeros else PackQuantized, state)
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor.dequantize(), expected)
    assert from_spec(tensor.format.spec) == tensor.format


def test_awq_values():
    state = awq()
    qweight, qzeros, scales = (state[f"../{key}"].numpy() for key in ("qweight", "qzeros", "scales"))
    expected = np.empty((N, K), dtype=np.float16)
    for k in range(K):
        group = k // (K // GROUPS)
        for word in range(N // 8):
            for at, neighbour in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                n = 8 * word + neighbour
                code, zero = nibble(qweight[k, word], at), nibble(qzeros[group, word], at)
                expected[n, k] = scales[group, n] * np.float16(code - zero)
    assert np.array_equal(loaded(Awq, state).dequantize().numpy(), expected)


def e4m3(byte):
    exponent, mantissa = byte >> 3, byte & 7
    return np.float32(mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_modelopt_values():
    state = modelopt()
    packed, scales = state[""].numpy(), state["../weight_scale"].view(torch.uint8).numpy()
    factor = np.float32(state["../weight_scale_2"].item())
    expected = np.empty((N, K), dtype=np.float32)
    for n in range(N):
        for k in range(K):
            code = nibble(packed[n, k // 2], k % 2)
            expected[n, k] = E2M1[code] * (e4m3(int(scales[n, k // 16])) * factor)
    tensor = loaded(Nvfp4, state)
    assert tensor.dtype == torch.bfloat16
    assert np.array_equal(tensor.dequantize(torch.float32).numpy(), expected)


@pytest.mark.parametrize("make", [mxfp4, gpt_oss])
def test_mxfp4_values(make):
    state = make()
    codes, scales = (value.numpy() for value in state.values())
    shape = (N, K) if make is mxfp4 else (3, N, K)
    expected = np.empty(shape, dtype=np.float32)
    codes, scales = codes.reshape(*shape[:-1], K // 2), scales.reshape(*shape[:-1], K // 32)
    for at in np.ndindex(shape):
        *row, k = at
        expected[at] = np.ldexp(E2M1[nibble(codes[(*row, k // 2)], k % 2)], int(scales[(*row, k // 32)]) - 127)
    tensor = loaded(Mxfp4, state)
    assert tuple(tensor.shape) == shape
    assert np.array_equal(tensor.dequantize(torch.float32).numpy(), expected)
    assert torch.equal(tensor.dequantize().float(), tensor.dequantize(torch.float32))  # exact in bf16


# ---- behaviour of all formats


@checkpoints
def test_the_same_entries_are_written_back(cls, make):
    state = make()
    tensor = loaded(cls, state)
    written = tensor.format.to_state(tensor.parts, tuple(tensor.shape), tensor.dtype)
    assert written.keys() == state.keys()
    for key, value in state.items():
        assert written[key].dtype == value.dtype
        assert torch.equal(written[key].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))


@checkpoints
def test_parts_and_spec(cls, make):
    tensor = loaded(cls, make())
    assert from_spec(tensor.format.spec) == tensor.format
    found = {name: (tuple(part.shape), part.dtype) for name, part in tensor.parts.items()}
    assert found == tensor.format.part_specs(tuple(tensor.shape))
    moved = QuantizedTensor.from_bytes(tensor.to_bytes().view(-1), tensor.format, tuple(tensor.shape), tensor.dtype)
    assert torch.equal(moved.dequantize(), tensor.dequantize())
    assert 4 < tensor.format.bits_per_weight((4096, 4096)) < 8


@checkpoints
def test_a_state_dict_loads_and_trains(cls, make):
    state, bias = make(), torch.randn(N)
    layer = QuantizedLinear.unfilled(nn.Linear(K, N))
    layer.weight = quantized_parameter(loaded(cls, make()), cls())
    module = nn.ModuleDict({"q": layer})
    entries = {f"q.{key.removeprefix('../') or 'weight'}": value for key, value in state.items()}
    result = module.load_state_dict(entries | {"q.bias": bias}, strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert module.state_dict().keys() == entries.keys() | {"q.bias"}
    weight, x = loaded(cls, state).dequantize(torch.float32), torch.randn(5, K, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, F.linear(x, weight, bias))
    y.sum().backward()
    torch.testing.assert_close(x.grad[0], weight.sum(0))


def damages(cls, make):
    """(what, entry, damaged value or None for missing)."""
    for key, value in make().items():
        if key not in ("../g_idx", "../weight_g_idx"):
            yield "missing", key, None
        # A GPTQ file without g_idx does not record its inputs, so only the model's shape reveals a short qweight.
        if value.dim() and (key != "../qweight" or cls is Awq or "../g_idx" in make()):
            yield "short", key, value[:-1].contiguous()
        if value.dim() > 1:
            yield "flat", key, value.reshape(-1)
        yield "dtype", key, value.view(torch.uint8).to(torch.int64) if value.dim() else value.double()


CASES = [(cls, make, *damage) for cls, make in [*CHECKPOINTS, (Mxfp4, gpt_oss)] for damage in damages(cls, make)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("cls", "make", "what", "key", "value"), CASES)
def test_damaged_entries_are_named(cls, make, what, key, value):
    state = make() | {key: value}
    if value is None:
        del state[key]
    with pytest.raises(CheckpointError, match=r"layer\."):
        cls.from_state(state, "layer.weight")


def poisoned(state, key, value):
    """The same state with the first number of an entry replaced."""
    entry = state[key].clone()
    entry.view(-1)[:1] = torch.tensor([value]).to(entry.dtype)
    return state | {key: entry}


@pytest.mark.parametrize(
    ("cls", "state", "label"),
    [
        (Nvfp4, lambda: poisoned(modelopt(), "../weight_scale", float("nan")), r"layer\.weight_scale.*1 scales"),
        (Nvfp4, lambda: poisoned(modelopt(), "../weight_scale", -0.5), r"layer\.weight_scale.*1 scales"),
        (Nvfp4, lambda: poisoned(modelopt(), "../weight_scale_2", float("nan")), r"layer\.weight_scale_2.*nan"),
        (Nvfp4, lambda: poisoned(modelopt(), "../weight_scale_2", float("inf")), r"layer\.weight_scale_2.*inf"),
        (Nvfp4, lambda: poisoned(modelopt(), "../weight_scale_2", -1.0), r"layer\.weight_scale_2.*-1"),
        (Mxfp4, lambda: poisoned(mxfp4(), "../weight_scale", 255), r"layer\.weight_scale.*1 scales"),
        (Mxfp4, lambda: poisoned(gpt_oss(), "_scales", 255), r"layer\.weight_scales.*1 scales"),
        (Gptq, lambda: poisoned(gptq(), "../scales", float("nan")), r"layer\.scales.*1 scales"),
        (Awq, lambda: poisoned(awq(), "../scales", float("inf")), r"layer\.scales.*1 scales"),
        (Gptq, lambda: poisoned(gptq(), "../g_idx", GROUPS), r"layer\.g_idx"),
        (Gptq, lambda: poisoned(gptq(), "../g_idx", -1), r"layer\.g_idx"),
        (PackQuantized, lambda: poisoned(packed(), "../weight_scale", float("nan")), r"layer\.weight_scale.*1 scales"),
        (PackQuantized, lambda: poisoned(packed(), "../weight_shape", N - 1), r"layer\.weight_shape.*\[23, 64\]"),
        (PackQuantized, lambda: poisoned(packed(indexed=True), "../weight_g_idx", GROUPS), r"layer\.weight_g_idx"),
    ],
)
def test_corrupted_scales_are_named(cls, state, label):
    with pytest.raises(CheckpointError, match=label):
        cls.from_state(state(), "layer.weight")


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_corrupted_scales_of_our_own_files_are_named(byte):
    weight = torch.randn(48, 40)
    for format in (Nvfp4(), Mxfp4()):
        state = format.to_state(format.quantize(weight), (48, 40), torch.float32)
        state["scale"].view(-1)[2] = byte if isinstance(format, Nvfp4) else 0xFF
        with pytest.raises(CheckpointError, match=r"layer\.weight\.scale.*1 scales"):
            type(format).from_state(state, "layer.weight")


def test_unused_activation_scale_is_reported():
    assert Nvfp4.from_state(modelopt() | {"../input_scale": torch.tensor(0.1)}, "q")[0] == Nvfp4(tiles=False)
    assert "input_scale" in notices_so_far()["nvfp4-input-scale"]


def compressed(form="pack-quantized", **scheme):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None} | scheme
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def mixed(*layouts):
    """Groups with these layouts."""
    weights = {"pack-quantized": {"num_bits": 8}, "nvfp4-pack-quantized": NVFP4_WEIGHTS}
    groups = {f"group_{i}": {"format": layout, "weights": weights[layout]} for i, layout in enumerate(layouts)}
    return compressed() | {"config_groups": groups}


FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MXFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
CONFIGS = [
    (mixed("pack-quantized", "pack-quantized"), PackQuantized),
    (compressed("float-quantized", weights=FP8_WEIGHTS, input_activations={"num_bits": 8}), Float8),
    (compressed("nvfp4-pack-quantized", weights=NVFP4_WEIGHTS), Nvfp4),
    (compressed("mxfp4-pack-quantized", weights=MXFP4_WEIGHTS), Mxfp4),
    ({"quant_method": "gptq", "bits": 3, "group_size": -1}, Gptq),
    ({"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}, GptqV2),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3, "group_size": 64}}}, HqqLibrary),
    ({"quant_method": "aqlm", "num_codebooks": 2, "nbits_per_codebook": 8}, Aqlm),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, Torchao),
    (compressed(), PackQuantized),
    (compressed(weights={"num_bits": 4, "symmetric": False}), PackQuantizedZeros),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, Gptq),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}, Gptq),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, GptqV2),
    ({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, Awq),
    ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, Awq),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, Nvfp4),
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, Mxfp4),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, None),
    ({"quant_method": "bitsandbytes"}, None),
]


@pytest.mark.parametrize(("entry", "cls"), CONFIGS)
def test_quantization_config_is_recognised(entry, cls):
    found = [one for one in FORMATS.values() if one.from_quantization_config(entry) is not None]
    assert found == ([cls] if cls else [])


@pytest.mark.parametrize(
    ("cls", "entry", "said"),
    [
        (Gptq, {"quant_method": "gptq", "bits": 5}, "5-bit"),
        (GptqV2, {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 7}, "7-bit"),
        (Gptq, {"quant_method": "gptq", "bits": 3, "checkpoint_format": "gptq_p"}, "'gptq_p'"),
        (Gptq, {"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin'"),
        (Awq, {"quant_method": "awq", "version": "gemv"}, "'gemv'"),
        (Awq, {"quant_method": "awq", "bits": 3}, "3-bit"),
        (PackQuantized, compressed("int-quantized"), "'int-quantized'"),
        (PackQuantized, compressed("float-quantized"), "weights.num_bits 4"),
        (PackQuantized, compressed(weights={"num_bits": 7, "type": "int"}), "weights.num_bits 7"),
        (PackQuantized, compressed(weights={"num_bits": 4, "type": "float"}), "weights.type 'float'"),
        (PackQuantized, compressed(weights={"num_bits": 4, "strategy": "tensor"}), "weights.strategy 'tensor'"),
        (PackQuantized, compressed(input_activations={"num_bits": 8}), "input_activations"),
        (PackQuantized, compressed() | {"config_groups": {}}, "config_groups"),
        (PackQuantized, mixed("pack-quantized", "nvfp4-pack-quantized"), "mixes layouts"),
        (Aqlm, {"quant_method": "aqlm", "out_group_size": 2}, "out_group_size 2"),
        (PackQuantized, compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ],
)
def test_other_layouts_are_refused_by_name(cls, entry, said):
    with pytest.raises(CheckpointError, match=said):
        cls.from_quantization_config(entry)
