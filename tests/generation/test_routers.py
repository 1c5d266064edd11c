"""Routers with a fused op: it computes the same as the module."""

import pytest
import torch
from torch import nn

from halfbyte.generation.mlp import known_router
from tests.helpers.expert_models import mixture


def routers(model):
    return [module for module in model.modules() if type(module).__name__.endswith(("Router", "Gate"))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "Olmoe", "Qwen2Moe"])
def test_known_routers_equal_their_modules(name, dtype):
    found = routers(mixture(name).to(dtype))
    assert found
    for router in found:
        with torch.no_grad():
            router.weight.normal_()
            x = torch.randn(2, 5, router.weight.shape[1], dtype=dtype)
            mine, theirs = known_router(router, dtype)(x), router(x)
        for ours, own in zip(mine, theirs, strict=True):
            assert ours.dtype is own.dtype
            assert torch.equal(ours, own)


def test_other_routers_run_their_own_forward():
    """Other formulas, weights in another dtype, and a patched forward have no fused op."""
    router = routers(mixture("Qwen3Moe"))[0]
    assert known_router(router, torch.float32) is not None
    assert known_router(router, torch.bfloat16) is None
    assert known_router(nn.Linear(4, 4), torch.float32) is None
    keys = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    assert all(known_router(each, torch.float32) is None for each in routers(mixture("Glm4Moe", **keys)))
    router.forward = router.forward
    assert known_router(router, torch.float32) is None
