"""A model cut into the stages of a pipeline: transformers' own backbone runs, with the layers of one stage in it.

Other stages' layers are replaced by modules that hand on what they get. The one before a stage's first layer gives what
has come from the stage before, and the one after its last keeps what the stage gives. So rotary embeddings, masks and
document bounds are made in each stage by transformers' code, from the micro-batch that all stages read; scaled
embeddings and layers of several kinds need no rule here; and names of modules stay those of the whole model. Whether an
architecture survives that is tried once on a tiny model of it (`check_stages`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures import beside_text
from ..errors import ModelError
from ..parallel.schedules import Seconds
from .copies import fresh_copies
from .head import backbone_inputs, causal_lm_loss, described_head, take_head
from .layer import causal_lm_of, decoder_layers
from .patched import is_bound
from .tiny import tiny_model

Batch = Mapping[str, Any]
WITHOUT = "leave `pipeline` out of `parallel`"


class Elsewhere(nn.Module):
    """In the place of a decoder layer of another stage: gives what it gets, and says of itself what the layer said."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float)}
        self.__dict__ |= {name: value for name, value in plain.items() if not name.startswith("_")}

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class Door(Elsewhere):
    """Where hidden states come in from the stage before, or leave for the next."""

    def __init__(self, layer: nn.Module, enters: bool):
        super().__init__(layer)
        self.enters = enters
        self.hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.enters:
            assert self.hidden is not None
            return self.hidden
        self.hidden = hidden_states
        return hidden_states.detach()  # what comes after is not looked at


class NoEmbedding(nn.Module):
    """In the place of the embedding in later stages: hidden states of the right shape, which nothing looks at."""

    hidden: Tensor | None = None

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.hidden is not None
        return self.hidden.detach()


class Stages:
    """The stages of this process; other layers are taken out of the model.

    Args:
        model: a causal LM of transformers, or a `peft.PeftModel` around one, with its adapters on all layers; those of
            other stages may lie on the meta device.
        parts: the layers of every stage, in order.
        own: which of them are here.

    Raises:
        ModelError: the model cannot be cut.
    """

    def __init__(self, model: nn.Module, parts: Sequence[range], own: Sequence[int]):
        self.model, self.parts, self.causal_lm = model, list(parts), causal_lm_of(model)
        check_trained(model)
        name, layers = decoder_layers(model)
        owner, _, self.name = name.rpartition(".")
        self.holder = self.causal_lm.get_submodule(owner)
        here = {index for stage in own for index in parts[stage]}
        self.all = nn.ModuleList(each if i in here else Elsewhere(each) for i, each in enumerate(layers))
        self.embedding_holder, self.embedding_name = _place_of(self.causal_lm, self.causal_lm.get_input_embeddings())
        self.embedding = self.causal_lm.get_input_embeddings() if 0 in own else NoEmbedding()
        head = self.causal_lm.get_output_embeddings()
        if len(parts) - 1 not in own:
            setattr(*_place_of(self.causal_lm, head), nn.Identity())
        self.lists = {stage: self._list(stage, layers) for stage in own}
        self._put(self.all, self.embedding)

    @property
    def last(self) -> int:
        return len(self.parts) - 1

    def _list(self, stage: int, layers: nn.ModuleList) -> nn.ModuleList:
        """The model's layers as one stage sees them."""
        part, seen = self.parts[stage], []
        for index, layer in enumerate(layers):
            if index in part:
                seen.append(self.all[index])
            elif index == part.start - 1 or (index == part.stop and stage < self.last):
                seen.append(Door(layer, enters=index < part.start))
            else:
                seen.append(Elsewhere(layer))
        return nn.ModuleList(seen)

    def _put(self, layers: nn.ModuleList, embedding: nn.Module) -> None:
        setattr(self.holder, self.name, layers)
        setattr(self.embedding_holder, self.embedding_name, embedding)

    def forward(self, stage: int, batch: Batch, x: Tensor | None) -> Tensor:
        """What a stage gives, not the last.

        Args:
            x: what the stage before gave [B, T, H]; None in the first.

        Returns:
            [B, T, H].
        """
        with self.alone(stage, x) as leaves:
            self.causal_lm.base_model(**backbone_inputs(self.model, batch), use_cache=False)
            return leaves()

    @contextlib.contextmanager
    def alone(self, stage: int, x: Tensor | None) -> Iterator[Callable[[], Tensor]]:
        """Inside, the model consists of one stage, and its hidden states begin with x; gives what reads their end."""
        self._copy_factors()
        layers, part = self.lists[stage], self.parts[stage]
        doors: list[Any] = []
        embedding: Any = self.embedding
        if stage > 0:
            embedding = NoEmbedding()
            doors += [embedding, layers[part.start - 1]]
            for door in doors:
                door.hidden = x
        if stage < self.last:
            doors.append(layers[part.stop])
        self._put(layers, embedding)
        try:
            yield lambda: doors[-1].hidden
        finally:
            self._put(self.all, self.embedding)
            for door in doors:
                door.hidden = None

    def _copy_factors(self) -> None:
        """Before the first forward: those of all stages get their copies, which a stage alone would make of its own."""
        backbone = self.causal_lm.base_model
        if is_bound(backbone):
            with fresh_copies(backbone):
                pass


def _place_of(model: nn.Module, wanted: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds `wanted`, and its name there."""
    for module in model.modules():
        for name, child in module.named_children():
            if child is wanted:
                return module, name
    raise ModelError(f"{type(model).__name__} does not hold its own embedding and head", WITHOUT)


def check_trained(model: nn.Module) -> None:
    """Refuse what stages cannot train.

    Raises:
        ModelError: the embedding is trained and is the head, too, in another stage.
    """
    causal_lm = causal_lm_of(model)
    embedding, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    tied = {id(parameter) for parameter in embedding.parameters()} & {id(parameter) for parameter in head.parameters()}
    if any(id(p) in tied and p.requires_grad for p in model.parameters()):
        raise ModelError("parallel: the embedding is trained and is the head too, which another stage has",
                         f"leave it out of modules_to_save, or {WITHOUT}")  # fmt: skip


def layer_seconds(model: nn.Module, recomputed: bool) -> tuple[list[Seconds], Seconds]:
    """How long decoder layers take, and head and loss, where no plan says it: by their weights.

    Args:
        recomputed: whether layers run again for backward.

    Returns:
        In units of the products of one weight with a token: of each layer, and of the head, whose gradient is made in
        the forward.
    """
    _, layers = decoder_layers(model)
    sizes = [float(sum(p.numel() for p in layer.parameters() if not p.requires_grad) or 1) for layer in layers]
    head = float(sum(p.numel() for p in causal_lm_of(model).get_output_embeddings().parameters()))
    found = [Seconds(size, (2 if recomputed else 1) * size, size if recomputed else 0.0) for size in sizes]
    return found, Seconds(2 * head, 0.0)


@torch.no_grad()
def check_stages(model: nn.Module, trust_remote_code: bool = False) -> None:
    """Try on a tiny model of the same architecture whether two stages compute what it does, and what its head does.

    Raises:
        ModelError: they do not, or the model has a vision tower.
    """
    causal_lm = causal_lm_of(model)
    name = type(causal_lm).__name__
    if beside_text(causal_lm):
        raise ModelError(f"parallel: {name} has a vision tower, and only language models are cut into stages", WITHOUT)
    if isinstance(reason := described_head(model), str):
        raise ModelError(f"parallel: the loss is computed from full logits ({reason}), not in stages", WITHOUT)
    try:
        tiny = tiny_model(causal_lm.config, trust_remote_code=trust_remote_code).requires_grad_(False)
        ids = torch.arange(10, 26).view(2, 8)
        batch = {"input_ids": ids, "labels": ids}
        expected, _ = causal_lm_loss(tiny, batch)
        take_head(causal_lm, tiny)
        depth = len(decoder_layers(tiny)[1])
        stages = Stages(tiny, [range(depth // 2), range(depth // 2, depth)], [0, 1])
        hidden = stages.forward(0, batch, None)
        with stages.alone(1, hidden):
            found, _ = causal_lm_loss(tiny, batch)
    except Exception as error:  # of the model's own code, which a part may be too little for
        raise ModelError(f"parallel: {name} cannot be cut into stages: {error}", WITHOUT) from error
    if not torch.allclose(found, expected, rtol=1e-5):
        raise ModelError(f"parallel: two stages of a tiny {name} have the loss {found:.6g}, the whole {expected:.6g}",
                         WITHOUT)  # fmt: skip
