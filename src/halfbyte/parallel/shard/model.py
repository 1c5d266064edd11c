"""A model's frozen layers, of which each process keeps a slice: `parallel.shard.weights` for decoder layers of transformers.

Its place is after quantizing and adapters; activation levels and `patch` may come before or after. Embedding and head,
which are read beside the layers, are never gathered: each process has its rows of the vocabulary (`shard_vocabulary`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from ...modeling.head import shard_vocabulary, vocabulary_unsupported_reason
from ...modeling.layer import LayerView, causal_lm_of, decoder_layers, layer_view
from ...utils.errors import ModelError
from ...utils.notices import notice
from ..mesh import Mesh

if TYPE_CHECKING:
    from .weights import Sharded, Stay

_sharded: WeakKeyDictionary[nn.Module, Sharded] = WeakKeyDictionary()


def shard_model(
    model: nn.Module,
    mesh: Mesh,
    stays: Sequence[Stay] | None = None,
    *,
    kept: Collection[int] = (),
    on_host: Collection[int] = (),
) -> None:
    """Leave of the frozen weights of `model`'s decoder layers this process's slice; all where the mesh has no shards.
    Where nothing in them is frozen, nothing is sliced.

    Args:
        model: a causal LM of transformers, quantized or not, or a `peft.PeftModel` around one.
        stays: how long each layer stays whole; default: `stays_of` those that are `kept`.
        kept: numbers of the layers that stay for good.
        on_host: numbers of the layers whose slices are in the host's memory.

    Raises:
        ModelError: it has no list of decoder layers, or `stays` is not of as many.
    """
    if mesh.layout.slices == 1:
        return
    from .weights import shard_blocks  # half a second of torch

    name, every = decoder_layers(model)
    stays = stays_of(len(every), kept) if stays is None else stays
    if len(stays) != len(every):
        raise ModelError(f"{len(stays)} stays for {len(every)} layers", "give one a layer")
    numbers = [at for at, layer in enumerate(every) if next(layer.parameters(), None) is not None]  # of no other stage
    layers, stays = [every[at] for at in numbers], [stays[at] for at in numbers]
    hosted = {place for place, at in enumerate(numbers) if at in on_host}
    if all(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
        return  # of what is trained, `parallel.shard.trained` slices what can be
    _divide_vocabulary(model, mesh)  # first: the slices of layers need room beside whole ones
    causal_lm = causal_lm_of(model)
    root = causal_lm.get_submodule(name.rpartition(".")[0])
    share = _sharded[causal_lm] = shard_blocks(root, layers, mesh, stays, on_host=hosted)
    if share.why:
        notice(
            "gathers",
            f"layers are gathered by a collective, which is slower than reading the others' memory: {share.why}",
        )


def _divide_vocabulary(model: nn.Module, mesh: Mesh) -> None:
    axes = mesh.active(("shard", "tensor"))
    if axes and (why := vocabulary_unsupported_reason(model)):
        notice("vocabulary", f"head and embedding stay whole on each GPU: {why}")
    elif axes:
        shard_vocabulary(model, mesh, axes)


def stays_of(layers: int, kept: Collection[int]) -> list[Stay]:
    """How long as many layers stay whole, where those numbered `kept` stay for good: the others for a call, but for the
    last, of which backward asks first."""
    each: list[Stay] = ["always" if at in kept else "call" for at in range(layers)]
    if each[-1] == "call":
        each[-1] = "backward"
    return each


def sharded(model: nn.Module) -> Sharded | None:
    """What `shard_model` made of `model`; None: its weights are whole."""
    return _sharded.get(causal_lm_of(model))


def trains_alike(model: nn.Module) -> bool:
    """Whether each backward gives all trained parameters a gradient, whatever the tokens: no experts choose."""
    views = [layer_view(layer) for layer in decoder_layers(model)[1]]
    return all(isinstance(view, LayerView) and view.mlp is not None for view in views)
