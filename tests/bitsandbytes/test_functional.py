"""Functions of the drop-in against bitsandbytes' CPU library: bytes, values, errors."""

import ctypes

import bitsandbytes.functional as real
import pytest
import torch

from halfbyte.bitsandbytes import functional as F
from halfbyte.utils.errors import ModelError

ODD = (1, 2, 63, 64, 65, 255, 256, 257, 4097, 70001)


def sample(n: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator) * torch.rand(n, generator=generator).mul(4).exp()
    x[n // 3 : n // 2] = 0
    return x.to(dtype)


def assert_same_state(mine: F.QuantState, theirs: real.QuantState) -> None:
    assert vars(mine).keys() == vars(theirs).keys()
    for key, value in vars(theirs).items():
        if key == "state2":
            assert (mine.state2 is None) == (value is None)
            if value is not None:
                assert_same_state(mine.state2, value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(getattr(mine, key), value)
        else:
            assert getattr(mine, key) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantize_4bit_has_the_bytes_of_bitsandbytes(dtype, quant_type, nested):
    for n in ODD:
        for blocksize in (32, 64, 4096):
            x = sample(n, dtype)
            options = dict(blocksize=blocksize, compress_statistics=nested, quant_type=quant_type)
            packed, state = F.quantize_4bit(x, **options)
            theirs, their_state = real.quantize_4bit(x, **options)
            assert torch.equal(packed, theirs)
            assert_same_state(state, their_state)
            codes = torch.stack([theirs >> 4, theirs & 15], dim=1).view(-1)[:n].int()
            scales = state.scales().repeat_interleave(blocksize)[:n]
            assert torch.equal(F.dequantize_4bit(packed, state), (their_state.code[codes] * scales).to(dtype))


@pytest.mark.parametrize("storage", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
def test_quant_storage_views_the_same_bytes(storage):
    x = sample(4096, torch.float32).view(64, 64)
    packed, state = F.quantize_4bit(x, quant_storage=storage)
    theirs, their_state = real.quantize_4bit(x, quant_storage=storage)
    assert packed.dtype == storage
    assert packed.shape == theirs.shape
    assert torch.equal(packed.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(F.dequantize_4bit(packed, state), real.dequantize_4bit(theirs, their_state))
    assert torch.equal(F.dequantize_4bit(packed.t(), state), F.dequantize_4bit(packed, state).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
def test_quantize_blockwise_has_the_bytes_of_bitsandbytes(dtype, nested):
    for code in (
        None,
        real.create_dynamic_map(signed=False),
        real.create_linear_map(),
        real.create_fp8_map(True, 4, 3),
    ):
        for n in ODD:
            for blocksize in (64, 256, 4096):
                x = sample(n, dtype)
                codes, state = F.quantize_blockwise(x, code=code, blocksize=blocksize, nested=nested)
                theirs, their_state = real.quantize_blockwise(x, code=code, blocksize=blocksize, nested=nested)
                assert torch.equal(codes, theirs)
                assert_same_state(state, their_state)
                assert torch.equal(F.dequantize_blockwise(codes, state), real.dequantize_blockwise(theirs, their_state))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("linear", a) for a in ((True, 8, True), (True, 4, True), (False, 8, True), (True, 8, False), (False, 4, True))]
    + [("fp8", a) for a in ((True, 5, 2, 8), (False, 4, 4, 8), (True, 2, 1, 4), (True, 3, 2, 6))]
    + [("dynamic", a) for a in ((True, 7, 8), (False, 7, 8), (True, 4, 4), (True, 2, 2), (True, 3, 8))],
)
def test_maps_are_bit_equal(name, arguments):
    mine, theirs = getattr(F, f"create_{name}_map")(*arguments), getattr(real, f"create_{name}_map")(*arguments)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_int8_vectorwise_quant_has_the_codes_of_bitsandbytes(dtype, threshold):
    x = sample(37 * 65, dtype).view(37, 65)
    for mine, theirs in zip(
        F.int8_vectorwise_quant(x, threshold), real.int8_vectorwise_quant(x, threshold), strict=True
    ):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    codes, scales, _ = F.int8_vectorwise_quant(x)
    assert torch.equal(F.int8_vectorwise_dequant(codes, scales), real.int8_vectorwise_dequant(codes, scales))


@pytest.mark.parametrize("width", [20, 1040, 4001])
def test_int8_products_are_exact(width):
    a = torch.randint(-128, 128, (3, 5, width), dtype=torch.int8)
    b = torch.randint(-128, 128, (7, width), dtype=torch.int8)
    exact = a.long() @ b.long().t()
    assert torch.equal(F.int8_linear_matmul(a, b).long(), exact)
    with pytest.warns(FutureWarning):
        assert torch.equal(F.igemm(a, b, transposed_B=True).long(), exact)
    with pytest.warns(FutureWarning):
        batched = F.batched_igemm(a, a, transposed_B=True)
    assert torch.equal(batched.long(), a.long() @ a.long().mT)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_states_interchange_with_bitsandbytes(nested, packed):
    x = sample(33 * 64, torch.bfloat16).view(33, 64)
    codes, state = F.quantize_4bit(x, compress_statistics=nested, quant_type="nf4")
    _, theirs = real.quantize_4bit(x, compress_statistics=nested, quant_type="nf4")
    mine_as_dict, theirs_as_dict = state.as_dict(packed=packed), theirs.as_dict(packed=packed)
    assert mine_as_dict.keys() == theirs_as_dict.keys()
    for key, value in theirs_as_dict.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(mine_as_dict[key], value), key
    assert F.QuantState.from_dict(theirs_as_dict, device="cpu") == state
    assert torch.equal(real.dequantize_4bit(codes, real.QuantState.from_dict(mine_as_dict, device=torch.device("cpu"))),
                       F.dequantize_4bit(codes, state))  # fmt: skip
    for index in range(4):
        assert str(state[index]) == str(theirs[index])
    assert state != F.quantize_4bit(x * 2, compress_statistics=nested, quant_type="nf4")[1]
    assert state != 3


def test_zero_elements_and_non_contiguous_tensors():
    packed, state = F.quantize_4bit(torch.empty(0, 8))
    assert packed.shape == (0, 1)
    assert F.dequantize_4bit(packed, state).shape == (0, 8)
    x = sample(96 * 64, torch.float32).view(96, 64)[:, ::2]
    assert torch.equal(F.quantize_4bit(x)[0], F.quantize_4bit(x.contiguous())[0])
    assert torch.equal(F.quantize_blockwise(x)[0], F.quantize_blockwise(x.contiguous())[0])


def test_bad_arguments():
    x = torch.randn(64, 64)
    packed, state = F.quantize_4bit(x)
    for wrong in (
        lambda: F.quantize_4bit(x.double()),
        lambda: F.quantize_4bit(x, quant_type="nf3"),
        lambda: F.quantize_4bit(x, blocksize=48),
        lambda: F.quantize_blockwise(x.long()),
        lambda: F.dequantize_4bit(packed),
        lambda: F.dequantize_4bit(packed[:7], state),
        lambda: F.dequantize_blockwise(packed),
        lambda: F.gemv_4bit(x, packed),
        lambda: F.QuantState.from_dict({}, "cpu"),
        lambda: F.QuantState.from_dict({"quant_state.bitsandbytes__int8": torch.zeros(2)}, "cpu"),
        lambda: F.elementwise_func("sqrt", x, None, 0),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.warns(FutureWarning), pytest.raises(TypeError):
        F.check_matmul(x, x, None, False, False)
    with pytest.warns(FutureWarning), pytest.raises(ValueError):
        F.check_matmul(x.char(), x.char()[:3], None, False, False)
    with pytest.raises(ModelError):
        F.create_fp8_map(True, 4, 4, 8)


@pytest.mark.parametrize(
    ("short", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_symbols_run_on_pointers(short, dtype, kind):
    x = sample(48 * 64, dtype).view(48, 64)
    packed, state = F.quantize_4bit(x, quant_type=kind)
    out, nothing = torch.empty(48, 64, dtype=dtype), ctypes.c_void_p(0)
    pointers = [F.get_ptr(tensor) for tensor in (packed, state.absmax, out)]
    F.lib[f"cdequantize_blockwise_{short}_{kind}"](None, *pointers, ctypes.c_int(64), ctypes.c_int(48 * 64), nothing)
    assert torch.equal(out, F.dequantize_4bit(packed, state))
    row, y, numbers = sample(64, dtype), torch.empty(48, dtype=dtype), [ctypes.c_int32(i) for i in (48, 32, 48, 64)]
    addresses = [F.get_ptr(tensor) for tensor in (row, packed, state.absmax, state.code, y)]
    sizes = [ctypes.c_int32(i) for i in (48, 1, 64)]
    F.lib[f"cgemm_4bit_inference_naive_{short}"](*sizes, *addresses, *numbers, nothing)
    torch.testing.assert_close(y, torch.nn.functional.linear(row, F.dequantize_4bit(packed, state)))


def test_unknown_symbols_and_null_pointers_raise():
    with pytest.raises(RuntimeError):
        _ = F.lib.cquantize_blockwise_fp32_nf4
    with pytest.raises(ModelError):
        F.lib.cdequantize_blockwise_fp32_nf4(None, None, None, None, 64, 64, None)
