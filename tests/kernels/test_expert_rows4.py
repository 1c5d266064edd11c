"""Check the experts of a few tokens from 4-bit codes: the CUDA source, emulated or on a GPU."""

import pytest
import torch

from halfbyte.formats import from_spec
from halfbyte.ops.experts import StackedWeight, Unit
from halfbyte.ops.experts import expert_rows as op
from tests.helpers.kernel_backends import DEVICES, cases, loaded

pytest.importorskip("triton")
from halfbyte.kernels.cuda import experts4

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RUN = """
extern "C" void run_expert_rows4(u32 blocks, u32 threads, u32 bytes, Table4 *w, const Chosen *chosen) {
    launch(blocks, threads, bytes, [&] { expert_rows4(*w, *chosen); });
}
"""
# Tokens, experts, k, (K, I, H), groups of both kernels, and weights. Cases: units for some warps of a group, for all,
# and more; tiles for some groups, and more tiles than groups; an expert that two tokens share.
EMULATED = [
    (1, 5, 4, (512, 256, 64), ((2, 4, 3), (1, 3, 2)), BF16, BF16, True),
    (2, 3, 2, (256, 256, 160), ((1, 2, 2), (2, 2, 1)), FP16, FP32, False),
    (3, 4, 1, (1280, 512, 16), ((2, 2, 1), (1, 4, 4)), BF16, FP32, True),
]
ON_GPU = [
    (tokens, 16, 4, shape, groups, dtype, routed, nested)
    for tokens in (1, 4)
    for shape in ((2048, 768, 2048), (512, 256, 1040))
    for groups in (((2, 8, 3), (1, 12, 2)), ((1, 16, 2), (2, 8, 2)))
    for dtype, routed, nested in ((BF16, BF16, True), (FP16, FP32, False))
]


@pytest.mark.sampled(12)
@cases(
    ("tokens", "experts", "top_k", "sizes", "groups", "dtype", "routed", "nested"), emulated=EMULATED, hopper=ON_GPU
)  # fmt: skip
def test_experts(monkeypatch, backend, tokens, experts, top_k, sizes, groups, dtype, routed, nested):
    loaded(experts4, backend, monkeypatch, {"expert_rows4": RUN})
    torch.manual_seed(tokens)
    device, (hidden, inner, out) = DEVICES[backend], sizes
    index = torch.rand(tokens, experts, device=device).topk(top_k).indices
    format_ = from_spec(f"blockwise4:nf4:64:{'nested' if nested else 'plain'}")

    def stack(*shape):
        values = torch.randn(experts, *shape, device=device) / shape[1] ** 0.5
        return StackedWeight(format_.quantize(values), (experts, *shape), format_)

    first, second, unit = stack(2 * inner, hidden), stack(out, inner), Unit("silu")
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    weights = torch.rand(tokens, top_k, device=device).to(routed)
    assert experts4.mlp_obstacle(x, first, second, unit, index, weights) is None or backend == "emulated"
    mine = experts4.expert_rows(x, first, second, unit, index, weights, groups)
    exact = [StackedWeight.plain(each.values(FP32).double().cpu()) for each in (first, second)]
    truth = op.reference(x.double().cpu(), *exact, unit, index.cpu(), weights.double().cpu()).to(device)
    assert (mine.double() - truth).norm() <= 1.5 * torch.finfo(dtype).eps * truth.norm()
    assert (mine.double() - truth).abs().max() <= 4 * torch.finfo(dtype).eps * truth.abs().max()
