"""Sharding of a model's frozen decoder layers (`parallel.shard.weights`), for causal LMs of transformers.

It comes after quantization and adapters, and before or after activation levels and `patch`. Head and embedding are read
outside of layers and never gathered: each rank has its rows of the vocabulary (`shard_vocabulary`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from ...mesh.mesh import Mesh
from ...modeling.head import shard_vocabulary, vocabulary_unsupported_reason
from ...modeling.layer import LayerView, causal_lm_of, decoder_layers, layer_view
from ...utils.errors import ModelError
from ...utils.notices import notice

if TYPE_CHECKING:
    from .weights import Residency, ShardedBlocks

_sharded: WeakKeyDictionary[nn.Module, ShardedBlocks] = WeakKeyDictionary()


def shard_model(
    model: nn.Module,
    mesh: Mesh,
    residencies: Sequence[Residency] | None = None,
    *,
    resident: Collection[int] = (),
    on_host: Collection[int] = (),
) -> None:
    """Shard the frozen weights of `model`'s decoder layers, if the mesh has shards and anything in them is frozen.

    Args:
        model: a causal LM of transformers, quantized or not, or a `peft.PeftModel` around one.
        residencies: how long each layer stays unsharded; default: `residencies_of` the `resident` ones.
        resident: indices of the layers that are never resharded.
        on_host: indices of the layers whose shards are in host memory.

    Raises:
        ModelError: it has no list of decoder layers, or another number of them than `residencies`.
    """
    if mesh.layout.slices == 1:
        return
    from .weights import shard_blocks  # imports FSDP2, half a second

    name, every = decoder_layers(model)
    residencies = residencies_of(len(every), resident) if residencies is None else residencies
    if len(residencies) != len(every):
        raise ModelError(f"{len(residencies)} residencies for {len(every)} layers", "pass one per layer")
    numbers = [
        at for at, layer in enumerate(every) if next(layer.parameters(), None) is not None
    ]  # others are in other pipeline stages
    layers, residencies = [every[at] for at in numbers], [residencies[at] for at in numbers]
    hosted = {index for index, at in enumerate(numbers) if at in on_host}
    if all(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
        return  # `parallel.shard.optimizer` shards the optimizer state of trained parameters
    axes = mesh.active(("shard", "tensor"))
    if axes and (why := vocabulary_unsupported_reason(model)):
        notice("vocabulary", f"head and embedding are replicated on each GPU: {why}")
    elif axes:  # before the layers, whose sharding needs memory for shards and full layers
        shard_vocabulary(model, mesh, axes)
    causal_lm = causal_lm_of(model)
    root = causal_lm.get_submodule(name.rpartition(".")[0])
    share = _sharded[causal_lm] = shard_blocks(root, layers, mesh, residencies, on_host=hosted)
    if share.fallback_reason:
        notice(
            "gathers",
            f"layers are gathered by NCCL, which is slower than reading peer memory: {share.fallback_reason}",
        )


def residencies_of(layers: int, resident: Collection[int]) -> list[Residency]:
    """Return "always" for `resident` layers, else "call", or "backward" for the last layer, where backward starts."""
    residencies: list[Residency] = ["always" if at in resident else "call" for at in range(layers)]
    if residencies[-1] == "call":
        residencies[-1] = "backward"
    return residencies


def sharded(model: nn.Module) -> ShardedBlocks | None:
    """Return the sharded blocks of `model`, or None if it is not sharded."""
    return _sharded.get(causal_lm_of(model))


def has_static_gradients(model: nn.Module) -> bool:
    """Return whether every backward gives all trained parameters a gradient; with routed experts it may not."""
    views = [layer_view(layer) for layer in decoder_layers(model)[1]]
    return all(isinstance(view, LayerView) and view.mlp is not None for view in views)
