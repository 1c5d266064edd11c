"""How close an adapter's first product is to fp64's."""

import torch


def check(function, batch, columns, rank, dtype, masked, device="cpu"):
    """Rounded once, from sums in fp32; rows that leave out an adapter are zero there."""
    x, a = (torch.randn(n, columns).to(dtype).to(device) for n in (batch, rank))
    mask = (torch.arange(rank) // 8 % 2 == torch.arange(batch).unsqueeze(1) % 2).to(dtype).to(device)
    found = function(x, a, mask if masked else None)
    exact = x.double() @ a.double().t() * (mask.double() if masked else 1)
    assert (found.shape, found.dtype) == ((batch, rank), dtype)
    assert (found.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm(), (batch, columns, rank, dtype)
    if masked:
        assert bool((found[mask == 0] == 0).all())
