"""Compare the gated unit with its low-rank products with the reference: Triton, and CUDA on a GPU and emulated."""

import pytest
import torch

from halfbyte.dispatch import Unavailable
from halfbyte.formats.float8 import E4M3
from halfbyte.ops import lora_glu as ops
from halfbyte.ops.glu import ACTIVATIONS
from halfbyte.utils import notices
from halfbyte.utils.errors import ModelError
from tests.helpers.kernel_backends import DEVICES, MARKS, loaded
from tests.helpers.lora_glu_cases import assert_cast, assert_close_to, case, moved, run_backward, run_forward, slot_of
from tests.helpers.parity import INTERPRETED, poisoned  # noqa: F401

pytest.importorskip("triton")
from halfbyte.kernels.cuda import lora_glu as cuda
from halfbyte.kernels.triton import lora_glu as triton

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
RUN = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Unit *unit) {
    launch(blocks, threads, bytes, [&] { bytes ? lora_glu(*unit) : finish(*unit); });
}
"""
# Rows, width, ranks of gate, up and down: less than a tile; an end inside a tile; unequal ranks; several parts.
SMALL = [(13, 37, (1, 2, 3)), (70, 200, (16, 16, 16)), (65, 129, (8, 20, 4))]
LARGE = [(1100, 1032, (16, 16, 16)), (300, 14336, (32, 32, 32)), (257, 640, (64, 64, 64))]
LARGE += [(261, 14336, (16, 8, 16)), (2000, 72, (8, 16, 8))]
# Sizes on emulated warps, with warps and stages: an end inside a step and a tile; parts of one step and of several;
# strips whose last one is mostly outside.
EMULATED = [
    ((37, 136, (16, 16, 16)), BF16, "silu", (4, 2)),
    ((50, 40, (8, 16, 8)), FP16, "gelu_tanh", (4, 3)),
    ((19, 200, (16, 8, 16)), FP16, "silu", (5, 2)),
]


def suits_cuda(size, dtype, activation):
    _, width, ranks = size
    fits = width % cuda.LANE_COLUMNS == 0 and set(ranks) <= set(cuda.RANKS)
    return fits and activation in cuda.ACTIVATIONS and dtype is not FP32


def all_cases(activations=ACTIVATIONS, emulated=EMULATED, small=SMALL):
    """backend, size, dtype, activation, and the block shapes of emulated cases."""
    found = [pytest.param("emulated", *each, marks=MARKS["emulated"], id=f"emulated-{each}") for each in emulated]
    for backend, sizes, dtypes in (
        ("gpu", SMALL + LARGE, (FP32, FP16, BF16)), ("hopper", SMALL + LARGE, (FP16, BF16)),
        ("interpret", small, (FP32, FP16)),
    ):  # fmt: skip
        for size in sizes:
            for dtype in dtypes:
                for activation in activations:
                    if backend != "hopper" or suits_cuda(size, dtype, activation):
                        name = f"{backend}-{size}-{dtype}-{activation}".replace("torch.", "")
                        found.append(
                            pytest.param(backend, size, dtype, activation, None, marks=MARKS[backend], id=name)
                        )
    return pytest.mark.parametrize(("backend", "size", "dtype", "activation", "blocks"), found)


def on(*backends):
    return pytest.mark.parametrize("backend", [pytest.param(each, marks=MARKS[each]) for each in backends])


@pytest.fixture
def kernels(backend, monkeypatch, request):
    """The op's functions, in Triton's or CUDA's kernels."""
    if backend in ("gpu", "interpret"):
        return triton
    blocks = getattr(request.node, "callspec", None) and request.node.callspec.params.get("blocks")
    if backend == "emulated":
        warps, stages = blocks or (4, 2)
        for name in ("FORWARD", "BACKWARD"):
            monkeypatch.setattr(cuda, name, cuda.Blocks(warps, 1, stages))
    loaded(cuda, backend, monkeypatch, RUN)
    functions = {"lora_glu": cuda.forward, "lora_glu_float8": cuda.forward, "lora_glu_backward_": cuda.backward_}
    return type("Cuda", (), functions | {"lora_glu_backward_float8": cuda.backward_float8})


def arguments_of(size, dtype, backend, dropout=0.0):
    device = DEVICES[backend]
    if backend == "gpu" and not triton.in_one_pass(torch.empty(0, dtype=dtype, device=device), max(size[2])):
        pytest.skip("its factors do not fit into shared memory")
    return case(size, dtype, device, dropout)


@all_cases(("silu",), EMULATED[:1], SMALL[1:])
def test_dropout_of_the_down_projection(kernels, backend, size, dtype, activation, blocks):
    """The masks are those of the reference: one other element would be a larger error."""
    arguments = arguments_of(size, dtype, backend, dropout=0.3)
    before = moved(arguments, torch.clone)
    mine = run_forward(kernels.lora_glu, arguments, activation)
    assert_close_to(ops.lora_glu.reference, run_forward, mine, before, activation)
    mine = run_backward(kernels.lora_glu_backward_, arguments, activation)
    assert_close_to(ops.lora_glu_backward_.reference, run_backward, mine, before, activation)


@pytest.mark.sampled(8)
@all_cases()
def test_forward(kernels, backend, size, dtype, activation, blocks):
    arguments = arguments_of(size, dtype, backend)
    before = moved(arguments, torch.clone)
    mine = run_forward(kernels.lora_glu, arguments, activation)
    assert_close_to(ops.lora_glu.reference, run_forward, mine, before, activation)


@pytest.mark.sampled(8)
@all_cases()
def test_backward(kernels, backend, size, dtype, activation, blocks):
    arguments = arguments_of(size, dtype, backend)
    before, versions = moved(arguments, torch.clone), (arguments[1]._version, arguments[2]._version)
    mine = run_backward(kernels.lora_glu_backward_, arguments, activation)
    assert_close_to(ops.lora_glu_backward_.reference, run_backward, mine, before, activation)
    assert (arguments[1]._version, arguments[2]._version) > versions


@on("gpu", "interpret", "hopper")
def test_errors_name_the_argument(kernels, backend):
    grad, gate, up, low, v_down, factors = arguments_of((6, 24, (4, 4, 4)), FP32, backend)
    with pytest.raises(ModelError):
        kernels.lora_glu(gate, up, low[:, 1:], factors, "silu")
    with pytest.raises(ModelError, match="b_up"):
        kernels.lora_glu(gate, up, low, factors._replace(b_up=factors.b_up.half()), "silu")
    with pytest.raises(ModelError, match="v_down"):
        kernels.lora_glu_backward_(grad, gate, up, low, v_down[1:], factors, "silu")


@on("gpu", "hopper")
def test_every_run_gives_the_same_bits(kernels, backend):
    arguments = arguments_of((1100, 1032, (16, 16, 16)), BF16, backend)
    runs = [run_backward(kernels.lora_glu_backward_, moved(arguments, torch.clone), "silu") for _ in range(3)]
    assert all(torch.equal(*pair) for run in runs[1:] for pair in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("scale", [16.0, 300.0])  # the second saturates
@all_cases(("silu",), EMULATED[:1], SMALL[1:2])
def test_forward_in_float8(kernels, backend, size, dtype, activation, blocks, scale):
    arguments = arguments_of(size, dtype, backend)
    hidden, u_down = run_forward(kernels.lora_glu, arguments, activation)
    slot = slot_of(E4M3, scale, DEVICES[backend])
    codes, low_down = run_forward(kernels.lora_glu_float8, arguments, activation, slot)
    assert codes.dtype is E4M3
    assert torch.equal(low_down, u_down)
    assert_cast(codes, slot, hidden, INTERPRETED)


@on("emulated", "hopper")
def test_nan_amax_counts_as_infinite(kernels, backend):
    arguments = case((5, 40, (8, 8, 8)), BF16, DEVICES[backend])
    slot = slot_of(E4M3, 16.0, DEVICES[backend])
    arguments[1][3, 7] = float("nan")
    run_forward(kernels.lora_glu_float8, arguments, "silu", slot)
    assert slot.newest == float("inf")


@on("emulated")
def test_without_nvrtc_the_next_kernel_runs(kernels, backend, monkeypatch):
    """The next kernel is the reference here: Triton has none on a CPU."""
    arguments = case((5, 40, (8, 8, 8)), BF16, "cpu")

    def no_nvrtc(*_):
        raise Unavailable("no NVRTC")

    monkeypatch.setattr(cuda, "cubin", no_nvrtc)
    asked = []
    for op in (ops.lora_glu, ops.lora_glu_backward_):
        rows = [
            row if row.name.startswith("cuda") else row._replace(function=refused(asked)) for row in op.kernels("cuda")
        ]
        monkeypatch.setattr(op, "_added", {"cuda": rows})
    notices.reset_notices()
    mine = run_forward(ops.lora_glu.on("cuda"), arguments, "silu")
    assert all(map(torch.equal, mine, run_forward(ops.lora_glu.reference, arguments, "silu")))
    run_backward(ops.lora_glu_backward_.on("cuda"), arguments, "silu")
    assert notices.notices_so_far()["kernel-cuda.lora_glu.forward"].startswith("cuda.lora_glu.forward: no NVRTC; ")
    assert notices.notices_so_far()["kernel-cuda.lora_glu.backward_"].startswith("cuda.lora_glu.backward_: no NVRTC; ")
    assert asked == ["triton"] * 2


def refused(asked):
    def function(*_):
        asked.append("triton")
        raise Unavailable("no GPU")

    return function
