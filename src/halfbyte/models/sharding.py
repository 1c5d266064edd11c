"""A model's frozen layers, of which each process keeps a slice: `parallel.shard` for the layers of transformers' models.

Its place is after quantizing, adapters and activation levels; `patch` may come before or after. Embedding, final norm and
head are read beside the layers, and stay whole here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from ..errors import ModelError
from ..parallel import Mesh
from .layer import causal_lm_of, decoder_layers

if TYPE_CHECKING:
    from ..parallel.shard import Sharded, Stay

_sharded: WeakKeyDictionary[nn.Module, Sharded] = WeakKeyDictionary()


def shard_model(model: nn.Module, mesh: Mesh, stays: Stay | Sequence[Stay] = "call", *, on_host: bool = False) -> None:
    """Leave of the frozen weights of `model`'s decoder layers this process's slice; nothing where the mesh has no shards.

    Args:
        model: a causal LM of transformers, quantized or not, or a `peft.PeftModel` around one.
        stays: how long layers stay whole (`parallel.shard.Stay`), one for all or one each.
        on_host: as in `shard_blocks`.

    Raises:
        ModelError: it has no list of decoder layers, or `stays` is not of as many.
    """
    if mesh.ways("shard") == 1:
        return
    from ..parallel.shard import shard_blocks  # half a second of torch

    name, layers = decoder_layers(model)
    each: list[Stay] = [stays] * len(layers) if isinstance(stays, str) else list(stays)
    if len(each) != len(layers):
        raise ModelError(f"{len(each)} stays for {len(layers)} layers", "give one, or one a layer")
    causal_lm = causal_lm_of(model)
    root = causal_lm.get_submodule(name.rpartition(".")[0])
    _sharded[causal_lm] = shard_blocks(root, list(layers), mesh, each, on_host=on_host)


def sharded(model: nn.Module) -> Sharded | None:
    """What `shard_model` made of `model`; None: its weights are whole."""
    return _sharded.get(causal_lm_of(model))
