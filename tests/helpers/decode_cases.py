"""Stacks of decoder layers for the tests of the decode kernels, and the tolerance of the comparison."""

import dataclasses

import torch

from halfbyte.formats import from_spec
from halfbyte.ops.decode import DecoderLayer, PackedLinear, Projections, Stack, decode_layers


def packed_linear(rows, columns, spec, order, bias, device):
    """A linear of random weights in this format; `order`: of its columns, for formats that store one."""
    format_ = from_spec(spec)
    parts = format_.quantize(torch.randn(rows, columns) * 0.05)
    parts = {name: part.to(device) for name, part in parts.items()}
    product = format_.product(parts, (rows, columns))
    return PackedLinear(product if order is None else product._replace(order=order), rows, columns, bias)


def projections(rows, columns, dtype, device, ranks, masked, bias, spec, ordered):
    """Linears with these numbers of rows; `ranks`: ranks of each linear's adapters."""
    weights, order = [], None
    if ordered:
        order = torch.randperm(columns)
        order = torch.stack([order, order.argsort()]).int().to(device)
    for each in rows:
        added = (torch.randn(each) * 0.1).to(dtype).to(device) if bias else None
        weights.append(packed_linear(each, columns, spec, order, added, device))
    if not any(ranks):
        return Projections(weights, None, [None] * len(rows), None)
    ups, begin = [], 0
    for each, rank in zip(rows, ranks, strict=True):
        ups.append((begin, (torch.randn(each, rank) * 0.05).to(dtype).to(device)) if rank else None)
        begin += rank
    down = torch.randn(begin, columns) * 0.05
    down = torch.nn.functional.pad(down, (0, 0, 0, -begin % 16)).to(dtype).to(device)
    mask = None if masked is None else (torch.rand(masked, len(down)) < 0.5).to(dtype).to(device)
    return Projections(weights, down, ups, mask)


def stack(
    batch, dtype, device="cpu", layers=2, width=256, inner=512, heads=4, key_heads=2, size=64, slots=32, slot=20,
    lora=False, masked=False, bias=False, qk_norm=False, window=None, spec="blockwise4:nf4:64:nested",
    ordered=False, fp8=False,
):  # fmt: skip
    """(hidden, stack): caches hold random numbers, and those before each row's padding must be ignored."""

    def numbers(*shape, scale=1.0, shift=0.0):
        return (torch.randn(shape) * scale + shift).to(dtype).to(device)

    def linears(rows, columns, ranks):
        ranks = ranks if lora else [0] * len(rows)
        return projections(rows, columns, dtype, device, ranks, batch if masked else None, bias, spec, ordered)

    def layer():
        queries, keys = heads * size, key_heads * size
        return DecoderLayer(
            linears([queries, keys, keys], width, [8, 0, 16]),
            linears([width], queries, [8]),
            linears([inner, inner], width, [16, 8]),
            linears([width], inner, [24]),
            numbers(width, scale=0.1, shift=1.0),
            numbers(width, scale=0.1, shift=1.0),
            numbers(size, scale=0.1, shift=1.0) if qk_norm else None,
            numbers(size, scale=0.1, shift=1.0) if qk_norm else None,
            numbers(batch, key_heads, slots, size).to(torch.float8_e4m3fn if fp8 else dtype),
            numbers(batch, key_heads, slots, size).to(torch.float8_e4m3fn if fp8 else dtype),
            window,
        )

    angles = torch.arange(slots)[:, None] * 10000 ** (-torch.arange(size // 2) / (size // 2))
    angles = torch.cat([angles, angles], 1)
    made = Stack(
        [layer() for _ in range(layers)], heads, 1e-5, size**-0.5, angles.cos().to(dtype).to(device),
        angles.sin().to(dtype).to(device), (torch.arange(batch, dtype=torch.int32) % 5).to(device),
        torch.tensor([slot], device=device),
    )  # fmt: skip
    return numbers(batch, width), made


def copied(made, dtype=None):
    """Copy the stack with its caches, converted to `dtype` if given."""

    def cast(tensor):
        return tensor if tensor is None or not tensor.is_floating_point() else tensor.to(dtype or tensor.dtype)

    layers = [
        dataclasses.replace(
            each, norm=cast(each.norm), post_norm=cast(each.post_norm), q_norm=cast(each.q_norm),
            k_norm=cast(each.k_norm), keys=cast(each.keys).clone(), values=cast(each.values).clone(),
        )
        for each in made.layers
    ]  # fmt: skip
    return dataclasses.replace(made, layers=layers, cos=cast(made.cos), sin=cast(made.sin))


def check(run_of, hidden, made):
    """Check that the kernel's error against fp32 is at most torch's in the same dtype, and that caches are equal.

    `run_of`: returns the function that runs a stack.
    """
    exact, same = copied(made, torch.float32), copied(made)
    expected = decode_layers(hidden.float(), exact)
    rounded = decode_layers(hidden, same)
    ours = copied(made)
    found = run_of(hidden, ours)(hidden)

    def error(result, reference):
        return float((result.float() - reference).norm() / reference.norm())

    assert error(found, expected) <= 1.25 * error(rounded, expected) + 1e-4
    for mine, theirs, true in zip(ours.layers, same.layers, exact.layers, strict=True):
        for name in ("keys", "values"):
            cache, reference = getattr(mine, name), getattr(true, name)
            assert error(cache.float(), reference) <= 1.25 * error(getattr(theirs, name), reference) + 1e-4
            if mine is ours.layers[0]:
                changed = cache.float() != getattr(made.layers[0], name).float()
                assert changed.any(3).any(1).any(0).nonzero().tolist() == [[int(made.slot)]]
