"""A model's products divided over processes (`parallel.tensor.layers`): which linears of it, and what cannot be divided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ...config.combinations import DIVIDE_ROWS, undivided_sizes
from ...layers.plain import read_linear
from ...modeling.head import shard_vocabulary, vocabulary_unsupported_reason
from ...modeling.layer import Block, LayerView, decoder_layers, layer_view
from ...tensor import QuantizedTensor
from ...utils.errors import ModelError
from ...utils.notices import notice
from .. import Mesh
from .layers import AXIS, cut, cut_columns, cut_rows, sum_around


def divide_products(model: nn.Module, mesh: Mesh) -> None:
    """Leave this process its heads and channels of every decoder layer, and its rows of the vocabulary; all where the
    mesh does not divide products. Nothing is changed where a layer cannot be divided.

    Args:
        model: with its adapters, not sharded or patched yet; `shard_model` divides the vocabulary of one that will be.

    Raises:
        ModelError: what cannot be divided, by name.
    """
    if mesh.ways(AXIS) == 1:
        return
    check_products(model, mesh.ways(AXIS))
    for view in _views(model):
        for half, block in _blocks(view):
            for linear in block.inputs:
                _cut(linear, 0, mesh)
            _cut(block.output, 1, mesh)
            sum_around(half, mesh)
    if mesh.ways("shard") > 1:
        return
    if why := vocabulary_unsupported_reason(model):
        notice("vocabulary", f"head and embedding stay whole on each GPU: {why}")
    else:
        shard_vocabulary(model, mesh, (AXIS,))


def check_products(model: nn.Module, ways: int) -> None:
    """Whether the products of `model`, with its adapters, are divided so many ways; it may be on the meta device.

    Raises:
        ModelError: what cannot be divided, by name.
    """
    obstacle = _odd_layer(model, ways) or _odd_adapter(model)
    if obstacle:
        raise ModelError(f"parallel: {{tensor: {ways}}}: {obstacle}", DIVIDE_ROWS)
    for view in _views(model):
        for _, block in _blocks(view):
            for name, linear in block.linears.items():
                weight, dim = _base(linear).weight.data, int(linear is block.output)
                whole = weight.shape[dim] == (_base(linear).in_features if dim else _base(linear).out_features)
                if isinstance(weight, QuantizedTensor) and whole:
                    _check_split(weight, dim, ways, name)


def _check_split(weight: QuantizedTensor, dim: int, ways: int, name: str) -> None:
    parts = {name: part.to("meta") for name, part in weight.parts.items()}
    try:
        weight.format.split(parts, tuple(weight.shape), dim, ways)
    except ModelError as error:
        raise ModelError(f"parallel: {{tensor: {ways}}}: {name}: {error.message}", error.fix) from error


def _odd_layer(model: nn.Module, ways: int) -> str | None:
    """What of the decoder layers is not divided so many ways."""
    for layer in decoder_layers(model)[1]:
        view = layer_view(layer)
        if isinstance(view, str):
            return view
        name = view.family.name
        if view.family.fused:
            several = "q, k and v" if "qkv_proj" in view.family.fused else "gate and up"
            return f"{several} of {name} are one linear, whose rows do not divide by heads or channels"
        if view.mlp is None:
            return f"nothing divides the experts of {name}"
        if view.attention is None or view.family.gated_attention:
            return f"nothing divides the {type(view.attention_half.inner).__name__} of {name}"
        attention, size = view.attention, view.attention.head_dim
        heads, key_heads = (_rows(linear) // size for linear in attention.inputs[:2])
        if wrong := undivided_sizes(ways, heads, key_heads, _rows(view.mlp.inputs[0])):
            return wrong
        if attention.dropout:
            return "each process would drop other scores (attention_dropout)"
        if getattr(view.attention_half.inner, "residual_dropout", 0):
            return "each process would drop other values (residual_dropout)"
        if attention.norms is not None and any(norm.weight.numel() != size for norm in attention.norms):
            return f"{name} normalises q and k over all heads"
    return None


def divided_along(model: nn.Module) -> dict[str, int]:
    """Parameter of a model without adapters → which dimension of it is divided; those that are not are left out."""
    dims: dict[Any, int] = {}
    for view in _views(model):
        for _, block in _blocks(view):
            dims |= {linear: int(linear is block.output) for linear in block.linears.values()}
    found = {}
    for name, module in model.named_modules():
        if (dim := dims.get(module)) is not None:
            found[f"{name}.weight"] = dim
            if dim == 0 and module.bias is not None:
                found[f"{name}.bias"] = 0
    return found


def _views(model: nn.Module) -> Iterator[LayerView]:
    for layer in decoder_layers(model)[1]:
        view = layer_view(layer)
        assert isinstance(view, LayerView)
        yield view


def _blocks(view: LayerView) -> Iterator[tuple[nn.Module, Block]]:
    """The modules of a layer that hold products, as they are read."""
    assert view.attention is not None  # or `_odd_layer` had said so
    yield view.attention_half.inner, view.attention
    if view.mlp is not None:
        yield view.mlp_half.inner, view.mlp


def _base(linear: Any) -> nn.Linear:
    return getattr(linear, "base_layer", linear)


def _rows(linear: Any) -> int:
    return _base(linear).out_features


def _odd_adapter(model: nn.Module) -> str | None:
    """What of the trained weights is no plain LoRA of the divided linears."""
    known = set()
    for view in _views(model):
        for half, block in _blocks(view):
            if half._forward_hooks or half._forward_pre_hooks or "forward" in half.__dict__:
                return f"something watches or replaces the forward of a {type(half).__name__}"
            for name, linear in block.linears.items():
                read = read_linear(linear)
                if isinstance(read, str):
                    return f"{name}: {read}"
                if any(dropout.p for dropout in getattr(linear, "lora_dropout", {}).values() if hasattr(dropout, "p")):
                    return f"{name}: each process would drop other inputs of the adapter (lora_dropout)"
                known |= {id(factor) for each in read.adapters for factor in (each.a, each.b)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            return f"{name} is trained, and no adapter of a divided linear"
    return None


def _cut(linear: Any, dim: int, mesh: Mesh) -> None:
    """A linear with its adapters, by rows (0) or columns (1)."""
    (cut_columns if dim else cut_rows)(_base(linear), mesh)
    if linear is _base(linear):
        return
    linear.in_features, linear.out_features = linear.base_layer.in_features, linear.base_layer.out_features
    for factor in (linear.lora_A if dim else linear.lora_B).values():
        cut(factor, "weight", dim, mesh)
