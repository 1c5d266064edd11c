"""Check bit-plane kernels (k-bit and HQQ) bit for bit against the reference, past 2^31 values and in CUDA graphs."""

import pytest
import torch

from halfbyte.dispatch import Unavailable
from halfbyte.formats import HQQ as HQQFormat
from halfbyte.formats import KBit, from_spec
from halfbyte.formats.bitplane import dequantize_bitplane, kbit_codebook
from tests.helpers.kernel_backends import backends, cases

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KBIT = ("kbit:2:nf", "kbit:2:affine", "kbit:3:bnf", "kbit:4:fitted", "kbit:5:nf")
HQQ = ("hqq:8:128", "hqq:8:32:range:float16", "hqq:4:64", "hqq:3:32", "hqq:2:64")
# One value; whole blocks; padded rows whose last block has one value, or one value too few.
SHAPES = ((1, 1), (3, 64), (5, 33), (9, 127), (2, 256))


def weight_of(shape, dtype=torch.float32, device="cpu"):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 0.03
    weight.view(-1)[::13] = 0
    weight[:, 32:64] = 0  # a whole block of zeros
    return weight.to(dtype).to(device)


def moved(parts, device):
    return {name: part.to(device) for name, part in parts.items()}


def kbit_arguments(format, parts):
    """Arguments that `quantize_bitplane` and `dequantize_bitplane` share: scales, zeros, factor, codebook."""
    return parts["scales"], parts.get("zeros"), parts["factor"], format.levels(parts)


def check_dequantize(specs, dtypes, shapes=SHAPES, device="cpu", kernel=None, hqq_kernel=None):
    """Check that the values equal the reference's bit for bit. Kernels default to the ops, which dispatch."""
    from halfbyte.formats.bitplane import dequantize_bitplane
    from halfbyte.formats.hqq import dequantize_hqq

    for spec in specs:
        format = from_spec(spec)
        for shape in shapes:
            parts = format.quantize(weight_of(shape))
            theirs = moved(parts, device)
            for dtype in dtypes:
                if spec.startswith("kbit"):
                    op, by, tail = dequantize_bitplane, kernel, (*shape, dtype)
                    one, other = ((p["packed"], *kbit_arguments(format, p), *tail) for p in (parts, theirs))
                else:
                    op, by, tail = dequantize_hqq, hqq_kernel, (format.bits, format.group, *shape, dtype)
                    one, other = ((*p.values(), *tail) for p in (parts, theirs))
                found = (by or op)(*other)
                assert (found.shape, found.dtype) == (shape, dtype)
                assert torch.equal(found.cpu(), op.reference(*one)), (spec, shape, dtype)


def check_quantize(specs, dtypes, shapes=SHAPES, device="cpu", kernel=None):
    """Check that the planes equal the reference's bit for bit, for the same scales."""
    from halfbyte.formats.bitplane import padded_blocks, quantize_bitplane

    for spec in specs:
        format = from_spec(spec)
        for shape in shapes:
            for dtype in dtypes:
                weight = weight_of(shape, dtype)
                parts, blocks = format.quantize(weight), padded_blocks(weight, 32)
                expected = quantize_bitplane.reference(blocks, *kbit_arguments(format, parts))
                found = (kernel or quantize_bitplane)(blocks.to(device), *kbit_arguments(format, moved(parts, device)))
                assert torch.equal(found.cpu(), expected), (spec, shape, dtype)


LARGER = (*SHAPES, (130, 33), (67, 1024))


@pytest.fixture
def by(backend):
    """Arguments of `check_dequantize` and `check_quantize` for a backend: device and kernels; on a GPU, the ops."""
    if backend == "gpu":
        return {"device": "cuda"}, {"device": "cuda"}
    if backend == "interpret":
        from halfbyte.kernels.triton import bitplane, dequantize

        return {"kernel": dequantize.bitplane, "hqq_kernel": dequantize.hqq}, {"kernel": bitplane.quantize}
    try:
        from halfbyte.kernels.native import bitplane as planes
    except Unavailable as error:
        pytest.skip(str(error))
    return {"kernel": planes.dequantize, "hqq_kernel": planes.dequantize_groups}, {"kernel": planes.quantize}


@cases(
    ("spec", "dtypes", "shapes"),
    cpu=[(spec, DTYPES, LARGER) for spec in (*KBIT, *HQQ)],
    gpu=[(spec, DTYPES, (*LARGER, (1024, 4096), (33, 4097))) for spec in (*KBIT, *HQQ)],
    interpret=[
        *[(spec, DTYPES[:2], SHAPES) for spec in KBIT],
        *[(spec, DTYPES[1:2], SHAPES) for spec in HQQ],
        *[(spec, DTYPES[1:2], ((5, 1024), (130, 33))) for spec in ("kbit:5:nf", "hqq:8:128")],
    ],
)
def test_dequantize(by, backend, spec, dtypes, shapes):
    check_dequantize([spec], dtypes, shapes, **by[0])


@cases(
    ("spec", "shapes"),
    cpu=[(spec, SHAPES) for spec in KBIT],
    gpu=[(spec, (*SHAPES, (1536, 2048))) for spec in KBIT],
    interpret=[(spec, SHAPES[1:3]) for spec in KBIT],
)
def test_stacked_matrices(by, backend, spec, shapes):
    """Each matrix has its own factor and codebook, like a stack of experts."""
    format, where = from_spec(spec), by[0]
    for shape in shapes:
        each = [format.quantize(weight_of(shape) * (1 + 3 * at)) for at in range(3)]
        alone = torch.stack([
            dequantize_bitplane.reference(parts["packed"], *kbit_arguments(format, parts), *shape, torch.float32)
            for parts in each
        ])  # fmt: skip
        own = {name: torch.stack([parts[name] for parts in each]) for name in each[0]}
        whole = {name: part if name in ("factor", "codebook") else part.view(-1) for name, part in own.items()}
        given = moved(whole, where.get("device", "cpu"))
        arguments = given["packed"], *kbit_arguments(format, given), 3 * shape[0], shape[1], torch.float32
        found = where.get("kernel", dequantize_bitplane)(*arguments)
        assert torch.equal(found.cpu().view_as(alone), alone), (spec, shape)


@cases(
    ("spec", "dtypes", "shapes"),
    cpu=[(spec, DTYPES, LARGER) for spec in KBIT],
    gpu=[(spec, DTYPES, (*LARGER, (1024, 4096), (33, 4097))) for spec in KBIT],
    interpret=[*[(spec, DTYPES[1:2], SHAPES) for spec in KBIT], ("kbit:5:nf", DTYPES[:1], ((5, 1024), (130, 33)))],
)
def test_quantize(by, backend, spec, dtypes, shapes):
    check_quantize([spec], dtypes, shapes, **by[1])


@backends("cpu")
@pytest.mark.parametrize("spec", ["kbit:3:nf", "kbit:2:affine", "hqq:4:128"])
def test_values_do_not_depend_on_threads(by, spec):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_dequantize([spec], [torch.bfloat16], [(131, 1057)], **by[0])
        if spec.startswith("kbit"):
            check_quantize([spec], [torch.bfloat16], [(131, 1057)], **by[1])
    finally:
        torch.set_num_threads(before)


@cases(("bits", "exponents", "dtypes"), cpu=[(5, (-120, -12, 0, 13, 122), DTYPES)], interpret=[(4, (-2,), DTYPES[:1])])
def test_every_scale_and_every_rounding(by, backend, bits, exponents, dtypes):
    """All 256 scale bytes, with factors that reach fp16's subnormals, its overflow, and fp32's extremes."""
    codebook = kbit_codebook("nf", bits, torch.device("cpu"))
    packed = torch.randint(-(2**31), 2**31, (256 * bits,), dtype=torch.int64).int()
    scales = torch.arange(256, dtype=torch.uint8)
    for exponent in exponents:
        for dtype in dtypes:
            arguments = (packed, scales, None, torch.tensor(2.0**exponent), codebook, 256, 32, dtype)
            assert torch.equal(by[0]["kernel"](*arguments), dequantize_bitplane.reference(*arguments))


@backends("cpu")
def test_non_contiguous_parts(by):
    for spec in ("kbit:4:fitted", "kbit:2:affine", "hqq:3:64"):
        format = from_spec(spec)
        parts = format.quantize(torch.randn(7, 96))
        strided = {name: torch.stack([part, part], -1)[..., 0] for name, part in parts.items()}
        found = format.dequantize(strided, (7, 96), torch.float32)
        assert torch.equal(found, format.dequantize(parts, (7, 96), torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [*KBIT, *HQQ])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_format_gives_the_same_bytes_as_on_a_cpu(spec, dtype):
    format = from_spec(spec)
    weight = weight_of((129, 515), dtype)
    expected, found = format.quantize(weight), format.quantize(weight.cuda())
    for name, part in expected.items():
        assert torch.equal(found[name].cpu(), part), name


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["kbit:4:nf", "hqq:4:64"])
def test_wide_ranges(spec):
    """Block scales from 1e-30 to 1e30: E4M4 flushes some to zero, and a factor rescales the rest."""
    exponent = torch.rand(1 << 12, 1, generator=torch.Generator().manual_seed(0)) * 60 - 30
    weight = torch.randn(1 << 12, 64, generator=torch.Generator().manual_seed(1)) * 10**exponent
    format = from_spec(spec)
    expected = format.quantize(weight)
    found = format.quantize(weight.cuda())
    for name, part in expected.items():
        assert torch.equal(found[name].cpu(), part), name
    values = format.dequantize(found, (1 << 12, 64), torch.float32).cpu()
    assert torch.equal(values, format.dequantize(expected, (1 << 12, 64), torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["kbit:5:nf", "kbit:2:affine", "hqq:3:64"])
def test_dequantizing_in_a_graph(spec):
    format, shape = from_spec(spec), (1024, 4096)
    parts = format.quantize(weight_of(shape, torch.bfloat16, "cuda"))
    expected = format.dequantize(parts, shape, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = format.dequantize(parts, shape, torch.bfloat16)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.large(40)
@pytest.mark.parametrize("format", [KBit(5, "nf"), HQQFormat(2)], ids=lambda format: format.spec)
def test_more_than_two_to_the_31_values(format):
    rows, width = (2**31 + 4096) // 1024, 1024
    weight = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    weight[[0, 2**21, rows - 1], :] = 0.5
    values = format.dequantize(format.quantize(weight), (rows, width), torch.bfloat16)
    assert torch.equal(values, weight)


@pytest.mark.gpu
def test_fitting_hqq_takes_less_than_one_extra_gibibyte():
    """The largest linear of a Llama-3.1-8B layer; `tests/formats/test_hqq.py` counts the operations."""
    weight, format = torch.randn(14336, 4096, dtype=torch.bfloat16, device="cuda") * 0.02, HQQFormat(4, 64)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    format.quantize(weight)
    assert torch.cuda.max_memory_allocated() - before < 2**30
