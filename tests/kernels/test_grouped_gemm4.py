"""Check a mixture's products with many rows from 4-bit codes, plain and transposed: the CUDA source."""

import pytest
import torch

from benchmarks.kernel_cases import packed_experts
from halfbyte.formats import from_spec
from halfbyte.ops import experts as ops
from halfbyte.ops.experts import LowRank, StackedWeight
from tests.helpers.kernel_backends import DEVICES, cases, loaded

pytest.importorskip("triton")
from halfbyte.kernels.cuda import experts4
from halfbyte.kernels.device import KNOWN, assumed

BF16, FP16 = torch.bfloat16, torch.float16
RUN = """
extern "C" void run_unnest(u32 blocks, u32 threads, u32 bytes, const u8 **absmax, const float **second,
                           const float **code, const float **offset, float **out, u32 *fours) {
    launch(blocks, threads, bytes, [&] { unnest(*absmax, *second, *code, *offset, *out, *fours); });
}
extern "C" void run_grouped_gemm4(u32 blocks, u32 threads, u32 bytes, const Products *products) {
    launch(blocks, threads, bytes, [&] { grouped_gemm4(*products); });
}
"""

# Tokens, experts, k, (N, K), tile. Cases: experts with no row, one row, a tile and a part of another; channels and sums
# that end within a tile; more tiles than blocks; fewer and more stages than K has.
EMULATED = [
    (40, 5, 2, (192, 128), (1, 8, 4, 3), False, BF16, True, 8, True),
    (40, 5, 2, (192, 128), (1, 8, 4, 3), True, BF16, True, 8, True),
    (70, 2, 1, (64, 320), (2, 8, 2, 2), False, FP16, False, 24, False),
    (70, 2, 1, (320, 64), (2, 8, 2, 2), True, FP16, False, 24, False),
    (300, 2, 1, (64, 128), (1, 16, 4, 4), False, BF16, True, 16, True),
    (150, 2, 1, (128, 192), (1, 16, 4, 4), True, BF16, True, 0, False),
]
ON_GPU = [
    (tokens, 16, 4, shape, tile, transposed, dtype, nested, 16, gather)
    for tokens in (150, 900)
    for shape in ((960, 2048), (2048, 768))
    for tile in ((2, 16, 2, 6), (1, 16, 4, 6))
    for transposed in (False, True)
    for dtype, nested, gather in ((BF16, True, True), (FP16, False, False))
]


@pytest.mark.sampled(6)
@cases(
    ("tokens", "experts", "top_k", "shape", "tile", "transposed", "dtype", "nested", "rank", "gather"),
    emulated=EMULATED, hopper=ON_GPU,
)  # fmt: skip
def test_products(monkeypatch, backend, tokens, experts, top_k, shape, tile, transposed, dtype, nested, rank, gather):
    loaded(experts4, backend, monkeypatch, {"grouped_gemm4": RUN})
    monkeypatch.setattr(experts4, "LARGE_FEWEST", 1)
    monkeypatch.setattr(experts4, "LARGE_FEWEST_TRANSPOSED", 1)
    torch.manual_seed(tokens)
    device, slots = DEVICES[backend], tokens * top_k
    weights = torch.rand(tokens, experts, device=device)
    weights[:, 1] = 0  # this expert has no rows, unless every expert is chosen
    routing = ops.route.reference(weights.topk(top_k).indices, experts)
    format_ = from_spec(f"blockwise4:nf4:64:{'nested' if nested else 'plain'}")
    stack = StackedWeight(format_.quantize(torch.randn(experts, *shape, device=device)), (experts, *shape), format_)
    depth, width = shape if transposed else shape[::-1]

    def random(*size):
        return torch.randn(*size, device=device).to(dtype)

    x, bias = random(tokens if gather else slots, depth), None if transposed else random(experts, width)
    factor = random(experts, rank, width) if transposed else random(experts, width, rank)
    low = LowRank(random(slots, rank), factor, 0.7) if rank else None
    assert experts4.large_obstacle(x, stack, routing, gather, transposed, low, bias) is None or backend == "emulated"
    mine = experts4.grouped_large(x, stack, routing, gather, transposed, low, bias, tile=experts4.Tile(*tile))
    exact = None if low is None else LowRank(low.u.double(), low.factor.double(), 0.7)
    values = StackedWeight.plain(stack.values(dtype).double())
    truth = ops.grouped_product.reference(
        x.double(), values, routing, gather, transposed, exact, None if bias is None else bias.double()
    )
    # The expected product is of dequantized weights, which are rounded; the other rounding is the result's.
    assert (mine.double() - truth).norm() <= 0.6 * torch.finfo(dtype).eps * truth.norm()
    assert ((mine.double() - truth).abs() <= torch.finfo(dtype).eps * (truth.abs() + truth.abs().mean())).all()


def test_choice_of_multiplying_codes():
    """The choice depends on the average of rows, the stack's shape and the device."""
    with assumed(KNOWN["h100"]):
        stack = packed_experts(16, 128, 192)
        part = stack.parts["packed"]

        def codes(stack, slots, dtype=BF16):
            return ops.multiplies_codes.on("cuda")(part, stack, slots, dtype)

        assert [codes(stack, 16 * rows) for rows in (64, 65, 320, 321)] == [True, True, True, False]
        assert not codes(stack, 16 * 100, torch.float32)
        assert not codes(packed_experts(16, 96, 192), 16 * 100)
    with assumed(KNOWN["a100"]):
        assert not codes(stack, 16 * 100)
