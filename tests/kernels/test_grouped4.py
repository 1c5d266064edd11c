"""Check a mixture's products from 4-bit codes on Hopper's tensor cores: the CUDA source, emulated or on a GPU."""

import pytest
import torch

from halfbyte.formats import from_spec
from halfbyte.ops import experts as ops
from halfbyte.ops.experts import LowRank, StackedWeight
from tests.helpers.kernel_backends import DEVICES, cases, loaded

pytest.importorskip("triton")
from halfbyte.kernels.cuda import experts4, gemm4

BF16, FP16 = torch.bfloat16, torch.float16
RUN = """
extern "C" void run_add_grouped(u32 blocks, u32 threads, u32 bytes, const float4 **partials, const Grouped *grouped,
                                u32 *columns, u32 *product) {
    launch(blocks, threads, bytes, [&] { add_grouped(*partials, *grouped, *columns, *product); });
}
extern "C" void run_grouped4(u32 blocks, u32 threads, u32 bytes, Weight *w, const Grouped *grouped, const u16 **x,
                             float4 **partials) {
    launch(blocks, threads, bytes, [&] { grouped4(*w, *grouped, *x, *partials); });
}
"""


def routed(index, experts, rows):
    """Routing as the kernels' `route` makes it, with the table of tiles."""
    found = ops.route.reference(index, experts)
    bounds = found.offsets.tolist()
    tiles = [[e, first] for e in range(experts) for first in range(bounds[e], bounds[e + 1], rows)]
    entries = min(index.numel(), index.numel() // rows + experts)
    tiles += [[experts, 0]] * (entries - len(tiles))
    return found._replace(tiles=torch.tensor(tiles, dtype=torch.int32, device=index.device), tile_rows=rows)


# Tokens, experts, k, (N, K), rows of a tile and blocks. Cases: experts with no row, one row, a tile and a part of
# another; N that ends within a tile; one, two or more blocks a tile; fewer pairs of K tiles than blocks.
EMULATED = [
    (9, 5, 2, (70, 512), 16, (2, 3), BF16, True, 8, True),
    (40, 3, 2, (130, 256), 32, (2, 3), FP16, False, 24, False),
    (70, 3, 1, (150, 768), 64, (2, 3), BF16, True, 0, True),
    (150, 2, 1, (140, 512), 128, (2, 3), BF16, False, 16, True),
    (20, 3, 2, (260, 1280), 16, (4, 4), FP16, True, 8, False),
    (1, 4, 1, (64, 256), 16, (2, 4), BF16, True, 0, True),
]
ON_GPU = [
    (tokens, 16, 4, (1000, 2048), rows, blocks, dtype, nested, 16, gather)
    for tokens in (1, 70, 900)
    for rows, blocks in ((16, (4, 4)), (16, (2, 4)), (32, (4, 4)), (64, (4, 3)), (64, (2, 3)), (128, (2, 3)))
    for dtype, nested, gather in ((BF16, True, True), (FP16, False, False))
]


@pytest.mark.sampled(6)
@cases(
    ("tokens", "experts", "top_k", "shape", "rows", "blocks", "dtype", "nested", "rank", "gather"),
    emulated=EMULATED, hopper=ON_GPU,
)  # fmt: skip
def test_products(monkeypatch, backend, tokens, experts, top_k, shape, rows, blocks, dtype, nested, rank, gather):
    loaded(experts4, backend, monkeypatch, {"grouped4": RUN})
    torch.manual_seed(tokens)
    device, slots = DEVICES[backend], tokens * top_k
    routing = routed(torch.rand(tokens, experts, device=device).topk(top_k).indices, experts, rows)
    format_ = from_spec(f"blockwise4:nf4:64:{'nested' if nested else 'plain'}")
    stack = StackedWeight(format_.quantize(torch.randn(experts, *shape, device=device)), (experts, *shape), format_)

    def random(*size):
        return torch.randn(*size, device=device).to(dtype)

    x, bias = random(tokens if gather else slots, shape[1]), random(experts, shape[0])
    low = LowRank(random(slots, rank), random(experts, shape[0], rank), 0.7) if rank else None
    assert experts4.small_obstacle(x, stack, routing, gather, False, low, bias) is None or backend == "emulated"
    mine = experts4.grouped_small(x, stack, routing, gather, False, low, bias, blocks=gemm4.Blocks(*blocks))
    exact = None if low is None else LowRank(low.u.double(), low.factor.double(), 0.7)
    values = StackedWeight.plain(stack.values(torch.float32).double())
    truth = ops.grouped_product.reference(x.double(), values, routing, gather, False, exact, bias.double())
    # The table's values, scaled sums and the result are rounded; the rounding of values dominates.
    assert (mine.double() - truth).norm() <= 1.5 * torch.finfo(dtype).eps * truth.norm()
    largest = truth.abs().max()
    assert (mine.double() - truth).abs().max() <= 4 * torch.finfo(dtype).eps * largest
