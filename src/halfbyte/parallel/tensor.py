"""Tensor parallelism of a model: which of its linears are sharded (`mesh.sharded_linears`), and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..config.layouts import Reason, unsupported_sizes, unsupported_tensor
from ..layers.plain import ColumnDropout, factor_holders, read_linear
from ..mesh.mesh import Mesh
from ..mesh.sharded_linears import AXIS, all_reduce_around, shard_columns, shard_parameter, shard_rows
from ..modeling.head import shard_vocabulary, vocabulary_unsupported_reason
from ..modeling.layer import Block, LayerView, decoder_layers, layer_view
from ..tensor import QuantizedTensor
from ..utils.errors import ModelError
from ..utils.notices import notice


def apply_tensor_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Shard heads and channels of every decoder layer and rows of the vocabulary, if the mesh has "tensor".

    The model is unchanged if a layer is refused.

    Args:
        model: with its adapters, before sharding and patching. With sharding, `shard_model` shards the vocabulary.

    Raises:
        ModelError: naming what cannot be sharded.
    """
    if mesh.degree(AXIS) == 1:
        return
    check_tensor_parallel(model, mesh.degree(AXIS))
    for view in _views(model):
        for half, block in _blocks(view):
            for linear in block.inputs:
                _shard_linear(linear, 0, mesh)
            _shard_linear(block.output, 1, mesh)
            all_reduce_around(half, mesh)
    if mesh.degree("shard") > 1:
        return
    if why := vocabulary_unsupported_reason(model):
        notice("vocabulary", f"head and embedding are replicated on each GPU: {why}")
    else:
        shard_vocabulary(model, mesh, (AXIS,))


def check_tensor_parallel(model: nn.Module, degree: int) -> None:
    """Check that the linears of `model`, with its adapters, can be sharded; it may be on the meta device.

    Raises:
        ModelError: naming what cannot be sharded.
    """
    reason = _unsupported_layer(model, degree)
    if reason is None and (problem := _adapter_problem(model)) is not None:
        reason = unsupported_tensor(degree, problem)
    if reason:
        raise ModelError(reason.problem, reason.fix)
    for view in _views(model):
        for _, block in _blocks(view):
            for name, linear in block.linears.items():
                weight, dim = _base(linear).weight.data, int(linear is block.output)
                unsharded = weight.shape[dim] == (_base(linear).in_features if dim else _base(linear).out_features)
                if isinstance(weight, QuantizedTensor) and unsharded:
                    tensors = {key: tensor.to("meta") for key, tensor in weight.parts.items()}
                    try:
                        weight.format.split(tensors, tuple(weight.shape), dim, degree)
                    except ModelError as error:
                        problem = f"parallel: {{tensor: {degree}}}: {name}: {error.message}"
                        raise ModelError(problem, error.fix) from error


def _unsupported_layer(model: nn.Module, degree: int) -> Reason | None:
    """Return why a decoder layer cannot be sharded."""
    for layer in decoder_layers(model)[1]:
        view = layer_view(layer)
        problem = view if isinstance(view, str) else _unsupported_kind(view)
        if problem is None:
            assert isinstance(view, LayerView)
            assert view.attention is not None
            assert view.mlp is not None
            heads, key_heads = (_rows(linear) // view.attention.head_dim for linear in view.attention.inputs[:2])
            if reason := unsupported_sizes(degree, heads, key_heads, _rows(view.mlp.inputs[0])):
                return reason
        else:
            return unsupported_tensor(degree, problem)
    return None


def _unsupported_kind(view: LayerView) -> str | None:
    """Return why a layer of this kind cannot be split, whatever its sizes."""
    name = view.family.name
    if view.family.fused:
        several = "q, k and v" if "qkv_proj" in view.family.fused else "gate and up"
        return f"{several} of {name} are one linear, whose rows cannot be split by heads or channels"
    if view.mlp is None:
        return f"the experts of {name} cannot be split"
    if view.attention is None or view.family.gated_attention:
        return f"the {type(view.attention_half.inner).__name__} of {name} cannot be split"
    attention = view.attention
    if attention.dropout:
        return "each process would drop different scores (attention_dropout)"
    if getattr(view.attention_half.inner, "residual_dropout", 0):
        return "each process would drop different values (residual_dropout)"
    if attention.norms is not None and any(norm.weight.numel() != attention.head_dim for norm in attention.norms):
        return f"{name} normalizes q and k over all heads"
    return None


def sharded_dims(model: nn.Module) -> dict[str, int]:
    """Map each sharded parameter of a model without adapters to its sharded dimension."""
    dims: dict[Any, int] = {}
    for view in _views(model):
        for _, block in _blocks(view):
            dims |= {linear: int(linear is block.output) for linear in block.linears.values()}
    by_name = {}
    for name, module in model.named_modules():
        if (dim := dims.get(module)) is not None:
            by_name[f"{name}.weight"] = dim
            if dim == 0 and module.bias is not None:
                by_name[f"{name}.bias"] = 0
    return by_name


def _views(model: nn.Module) -> Iterator[LayerView]:
    for layer in decoder_layers(model)[1]:
        view = layer_view(layer)
        assert isinstance(view, LayerView)
        yield view


def _blocks(view: LayerView) -> Iterator[tuple[nn.Module, Block]]:
    """Yield the attention and MLP modules of a layer with their linears."""
    assert view.attention is not None  # `_unsupported_layer` has checked
    yield view.attention_half.inner, view.attention
    if view.mlp is not None:
        yield view.mlp_half.inner, view.mlp


def _base(linear: Any) -> nn.Linear:
    return getattr(linear, "base_layer", linear)


def _rows(linear: Any) -> int:
    return _base(linear).out_features


def _adapter_problem(model: nn.Module) -> str | None:
    """Return why a trained parameter is not a plain LoRA factor of a split linear, or None."""
    factor_ids = set()
    for view in _views(model):
        for half, block in _blocks(view):
            if half._forward_hooks or half._forward_pre_hooks or "forward" in half.__dict__:
                return f"hooks or another patch replace the forward of a {type(half).__name__}"
            for name, linear in block.linears.items():
                read = read_linear(linear)
                if isinstance(read, str):
                    return f"{name}: {read}"
                if read.weight is not read.base.weight:
                    return f"{name}: its weight belongs to bitsandbytes"
                factor_ids |= {id(factor) for adapter in read.adapters for factor in (adapter.a, adapter.b)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in factor_ids:
            return f"{name} is trained and is not an adapter of a split linear"
    return None


def _shard_linear(linear: Any, dim: int, mesh: Mesh) -> None:
    """Shard a linear and its adapters by rows (dim 0) or columns (dim 1).

    Ranks along "tensor" draw equal random numbers, so inputs of linears sharded by rows are dropped alike.
    """
    (shard_columns if dim else shard_rows)(_base(linear), mesh)
    if linear is _base(linear):
        return
    linear.in_features, linear.out_features = linear.base_layer.in_features, linear.base_layer.out_features
    if dim:
        first_column = mesh.coordinate(AXIS) * linear.in_features
        for name, dropout in linear.lora_dropout.items():
            if isinstance(dropout, nn.Dropout):
                linear.lora_dropout[name] = ColumnDropout(dropout.p, first_column)
    down, up = factor_holders(linear)
    for factor in (down if dim else up).values():
        shard_parameter(factor, "weight", dim, mesh)
