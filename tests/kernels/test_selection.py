"""Check which kernel dispatch selects on which device, and that it queries no other."""

import pytest
import torch
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.dispatch import Op, Unavailable, op
from halfbyte.formats import Blockwise4
from halfbyte.formats.blockwise4 import linear_blockwise4
from halfbyte.formats.linear import PackedProduct
from halfbyte.kernels.device import KNOWN, assumed
from halfbyte.ops.decode import PackedLinear, packed_linears
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils import notices
from tests.helpers.linear_cases import arguments

pytest.importorskip("triton")
from halfbyte.kernels import selection
from halfbyte.kernels.selection import REFERENCE, choices, empty, weight4


def picks(name):
    """op → [kernel for each of its examples]."""
    found = {}
    for choice in choices(KNOWN[name]):
        found.setdefault(choice.op, []).append(choice.kernel)
    return found


ROW, SMALL, WGMMA = "cuda.gemv4_row.gemv", "cuda.gemv4.gemm", "cuda.gemm4.gemm"
TRITON = "triton.few_rows"
PLANES, FEW = "cuda.linear_planes", "cuda.few_rows.few_rows"
EIGHT = ["gemv", "gemm", "gemm", None]
HOPPER = {
    # M = 1, 2, 3, 8, 9, 16, 17, 64, 65; then 1 with blocks of 128, 4 of 32, 1 in fp32
    "linear_blockwise4": [
        ROW, ROW, SMALL, SMALL, *[WGMMA] * 4, REFERENCE, ROW, f"{FEW}_blockwise4", f"{TRITON}.blockwise4",
    ],
    # 2 bits: M = 1, 16, 17; 4 bits: 1, 8, 9, 64, 65
    "linear_bitplane": [
        f"{PLANES}.gemv_bitplane", f"{PLANES}.gemm16_bitplane", f"{FEW}_bitplane",
        f"{PLANES}.gemv_bitplane", f"{PLANES}.gemm16_bitplane", *[f"{PLANES}.gemm64_bitplane"] * 2, REFERENCE,
    ],
    # M = 1, 16, 17, 65; then 1 in fp16
    "linear_hqq": [*[f"{PLANES}.gemm16_hqq"] * 2, f"{PLANES}.gemm64_hqq", REFERENCE, f"{FEW}_hqq"],
    # M = 1, 16, 64, 65; then 1 with groups of 32, 8 and 4096
    "linear_int4": [*[f"{FEW}_int4"] * 3, REFERENCE, *[f"{FEW}_int4"] * 3],
    # M = 1, 16, 65; then 1 with blocks of 32
    "linear_e2m1": [*[f"{FEW}_e2m1"] * 2, REFERENCE, f"{FEW}_e2m1"],
    "linear_float8": [f"triton.gemv8.float8_{each}" if each else REFERENCE for each in EIGHT],
    "linear_int8": [f"triton.gemv8.int8_{each}" if each else REFERENCE for each in EIGHT],
    "low_rank_rows": [*["cuda.low_rank.gemm"] * 2, REFERENCE, REFERENCE],
    "one_launch": [*["cuda.decode_layers.compile_layers"] * 2, REFERENCE, REFERENCE],
    # NF4: M = 1, 16; kbit4: 16; NVFP4: 16
    "packed_linears": [
        "cuda.gemv4_row.several", "cuda.gemm4.several", "cuda.linear_planes.gemm64_several", "cuda.few_rows.several",
    ],
    "float8_of_blockwise4": [*["cuda.float8.of_blockwise4"] * 2, "triton.blockwise4.float8"],
    "lora_glu": ["cuda.lora_glu.forward", *["triton.lora_glu.lora_glu"] * 2],
    # 1, 32 and 512 rows an expert, forward and transposed
    "grouped_product": [
        *["cuda.experts4.grouped_small", "triton.grouped.grouped_product"] * 2,
        *["cuda.experts4.grouped_large"] * 2,
    ],
}  # fmt: skip
ADA = {
    "linear_blockwise4": [*[f"{FEW}_blockwise4"] * 8, REFERENCE, *[f"{FEW}_blockwise4"] * 2, f"{TRITON}.blockwise4"],
    "linear_bitplane": [*[f"{FEW}_bitplane"] * 7, REFERENCE],
    "linear_hqq": [*[f"{FEW}_hqq"] * 3, REFERENCE, f"{FEW}_hqq"],
    "linear_int4": HOPPER["linear_int4"],
    "linear_e2m1": HOPPER["linear_e2m1"],
    "linear_float8": HOPPER["linear_float8"],
    "low_rank_rows": [REFERENCE] * 4,
    "one_launch": [REFERENCE] * 4,
    "cross_entropy_": ["triton.cross_entropy.cross_entropy_"] * 4,
    "float8_of_blockwise4": ["triton.blockwise4.float8"] * 3,
    "lora_glu": ["triton.lora_glu.lora_glu"] * 3,
}
AMPERE = ADA | {
    "linear_float8": [*[f"{TRITON}.float8"] * 3, REFERENCE],
    "cast_float8": [REFERENCE],
    "float8_of_blockwise4": [REFERENCE] * 3,
}
AMD = AMPERE | {
    "linear_blockwise4": [*[f"{TRITON}.blockwise4"] * 8, REFERENCE, *[f"{TRITON}.blockwise4"] * 3],
    "linear_bitplane": [*[f"{TRITON}.bitplane"] * 7, REFERENCE],
    "linear_hqq": [*[f"{TRITON}.hqq"] * 3, REFERENCE, f"{TRITON}.hqq"],
    "linear_int4": [*[f"{TRITON}.int4"] * 3, REFERENCE, *[f"{TRITON}.int4"] * 3],
    "linear_e2m1": [*[f"{TRITON}.e2m1"] * 2, REFERENCE, f"{TRITON}.e2m1"],
}
TURING = {name: ADA[name] for name in ("linear_bitplane", "linear_hqq", "linear_int4", "linear_e2m1")}
TURING["linear_blockwise4"] = [*ADA["linear_blockwise4"][:7], f"{TRITON}.blockwise4", *ADA["linear_blockwise4"][8:]]
BLACKWELL = HOPPER | {
    "linear_blockwise4": [
        ROW,
        ROW,
        *[SMALL] * 4,
        *[f"{FEW}_blockwise4"] * 2,
        REFERENCE,
        ROW,
        f"{FEW}_blockwise4",
        f"{TRITON}.blockwise4",
    ],
    "grouped_product": ["triton.grouped.grouped_product"] * 6,
}
BLACKWELL.pop("linear_bitplane"), BLACKWELL.pop("linear_hqq")
BLACKWELL["packed_linears"] = ["cuda.gemv4_row.several", *["cuda.few_rows.several"] * 3]
AVX2 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
GEMV = "native.few_rows.blockwise4" if AVX2 else "native.decode4.gemv"
CPU = {
    "linear_blockwise4": [GEMV] * 6 + [REFERENCE] * 3 + [GEMV] * 3,
    "dequantize_blockwise4": ["native.blockwise4.dequantize"],
    "lora_glu": [REFERENCE] * 3,
    "rms_norm": [REFERENCE],
}


@pytest.mark.parametrize(
    ("device", "expected"),
    [("h100", HOPPER), ("rtx4090", ADA), ("a100", AMPERE), ("t4", TURING), ("mi300", AMD), ("b200", BLACKWELL),
     ("cpu", CPU)],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_selected_kernels(device, expected):
    found = picks(device)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_each_kernel_of_an_op_has_its_own_rank(device_type):
    """Kernels of one rank would be tried in the order in which their modules are imported."""
    ranks = {name: [kernel.rank for kernel in op.kernels(device_type)] for name, op in selection.all_ops().items()}
    assert {name for name, numbers in ranks.items() if len(numbers) != len(set(numbers))} == set()


def test_the_table_has_every_op_and_every_kernel():
    """Every registered kernel is taken by some call on some device."""
    all_ops = selection.all_ops()
    ever = set()
    for name in KNOWN:
        found = picks(name)
        assert found.keys() == all_ops.keys()
        ever |= {kernel for kernels in found.values() for kernel in kernels}
    kernels = {kernel.name for op in all_ops.values() for kind in ("cpu", "cuda") for kernel in op.kernels(kind)}
    # The first needs an optional package. The second is for CPUs without AVX2.
    assert ever >= kernels - {"cuda.cudnn_attention.backward", "native.decode4.gemv"}


def test_reasons():
    """Alignment, sizes and adapters' terms: each kernel reports its first unmet requirement."""

    def reasons(x, weight=None, rows=64):
        with assumed(KNOWN["h100"]):
            weight = weight or weight4(64, 512, 64, True)
            return dict(linear_blockwise4.choices("cuda", x, *weight, rows, None))

    bf16 = torch.bfloat16
    term = empty(40, 12, dtype=bf16), empty(64, 12, dtype=bf16)
    assert reasons(empty(2, 512, dtype=bf16))[ROW] is None
    assert "16" in reasons(empty(1, 512, dtype=bf16), weight4(15, 512, 64, True), 15)[ROW]
    assert "256" in reasons(empty(2, 384, dtype=bf16), weight4(64, 384, 64, True))[ROW]
    assert "16 bits" in reasons(empty(2, 512))[ROW]
    assert "16 bytes" in reasons(torch.zeros(1030, dtype=bf16)[3:1027].view(2, 512))[ROW]
    assert reasons(empty(0, 512, dtype=bf16))[SMALL] == "takes 1 to 16 rows"
    assert reasons(empty(40, 512, dtype=bf16))[WGMMA] is None
    linear = PackedLinear(PackedProduct(linear_blockwise4, (*weight4(64, 512, 64, True), 64)), 64, 512, None)
    with assumed(KNOWN["h100"]):
        with_term = dict(packed_linears.choices("cuda", empty(40, 512, dtype=bf16), [linear], [term]))
    assert "ranks" in with_term["cuda.gemm4.several"]


def test_external_kernel_registration(monkeypatch):
    """Two lines register a kernel: dispatch takes it, logs its refusal once, runs the next one, and lists it."""
    monkeypatch.setattr(
        linear_blockwise4, "_added", {name: list(rows) for name, rows in linear_blockwise4._added.items()}
    )
    monkeypatch.setattr(linear_blockwise4, "_by_device", {})
    calls = []

    def unless(x, packed, absmax, nested, blocksize, *_):
        return None if blocksize == 32 else "takes blocks of 32"

    @linear_blockwise4.kernel("cpu", unless=unless, rank=-1)
    def mine(x, packed, absmax, nested, blocksize, quant_type, rows, bias):
        calls.append(x.shape[0])
        if x.shape[0] == 2:
            raise Unavailable("too many rows")
        return linear_blockwise4.reference(x, packed, absmax, nested, blocksize, quant_type, rows, bias)

    for blocksize, batch in ((64, 1), (32, 1), (32, 2), (32, 2)):
        weight = QuantizedTensor.quantize(torch.randn(48, 128), Blockwise4("nf4", blocksize, False))
        x = torch.randn(batch, 128)
        expected = torch.nn.functional.linear(x, weight.dequantize())
        with torch.no_grad():
            torch.testing.assert_close(torch.nn.functional.linear(x, weight), expected, rtol=1e-5, atol=1e-5)
    assert calls == [1, 2, 2]
    (text,) = notices.notices_so_far().values()
    assert text.startswith("tests.kernels.test_selection.mine: too many rows; ")
    found = linear_blockwise4.choices("cpu", torch.randn(1, 320), *arguments(8, 320), None)
    assert found[0] == ("tests.kernels.test_selection.mine", "takes blocks of 32")
    monkeypatch.undo()
    assert all(not kernel.name.endswith("mine") for kernel in linear_blockwise4.kernels("cpu"))


def test_dispatch_follows_ranks_and_reasons():
    @op()
    def double(x, times=1):
        return "reference"

    asked = []

    def small(x, times=1):
        asked.append(times)
        return None if times == 1 else "once"

    double.kernel("cpu", rank=2)(lambda x, times=1: "last")
    double.kernel("cpu", unless=small, rank=1)(lambda x, times=1: "small")
    x = torch.ones(2)
    assert [double(x), double(x, times=3), double(x.to("meta"))] == ["small", "last", "reference"]
    assert asked == [1, 3]
    assert double.on("cpu")(x.to("meta")) == "small"
    assert isinstance(double, Op)


def test_the_command_prints_the_table():
    shown = CliRunner().invoke(app, ["env", "--kernels", "--device", "h100"], env={"COLUMNS": "200"}).output
    assert "H100, H200" in shown
    assert ROW in shown
    assert "2 rows" in shown
    shown = CliRunner().invoke(app, ["env", "--kernels"], env={"COLUMNS": "200"}).output
    assert GEMV in shown or torch.cuda.is_available()
    refused = CliRunner().invoke(app, ["env", "--device", "h1000"])
    assert refused.exit_code != 0
