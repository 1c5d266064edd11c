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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...modeling.architectures import non_text_modules
from ...modeling.cast_cache import use_cast_cache
from ...modeling.head import Head, backbone_inputs, causal_lm_loss, set_verified_head, verified_head
from ...modeling.layer import causal_lm_of, decoder_layers
from ...modeling.patch_record import is_bound
from ...modeling.tiny_model import tiny_model
from ...utils.errors import ModelError
from ..support import WITHOUT_PIPELINE
from .partition import chosen, stage_seconds
from .schedules import Schedule
from .simulation import Seconds

Batch = Mapping[str, Any]
WITHIN = "base_model.model."  # before the names of modules in a saved adapter


@dataclass(frozen=True)
class Cut:
    """Where a model is cut, known before its weights are read.

    Attributes:
        parts: the layers of every stage.
        seconds: of every stage.
        head: what the model does after its last layer.
    """

    schedule: Schedule
    parts: tuple[range, ...]
    seconds: tuple[Seconds, ...]
    head: Head | str

    def take(self, model: nn.Module, rank: int) -> Stages:
        """The stages of a process, out of its model."""
        set_verified_head(model, self.head)
        return Stages(model, self.parts, self.schedule.stages_of(rank))

    def elsewhere(self, model: nn.Module, rank: int) -> Callable[[str], bool]:
        """Whether a parameter or module of a causal LM, by its name, is of other stages than those of a process.

        Args:
            model: on the meta device, too.
            rank: of the process, along the pipeline.
        """
        return elsewhere(model, self.parts, self.schedule.stages_of(rank))


def elsewhere(model: nn.Module, parts: Sequence[range], own: Sequence[int]) -> Callable[[str], bool]:
    """Whether a parameter or module of a causal LM, by its name, is of other stages than `own`."""
    (name, layers), causal_lm, ends = decoder_layers(model), causal_lm_of(model), list[Any]()
    here, last = {index for stage in own for index in parts[stage]}, len(parts) - 1
    if 0 not in own and not (last in own and is_tied(causal_lm)):
        ends.append(_input(causal_lm))
    if last not in own:
        ends.append(_output(causal_lm))
    prefixes = [f"{name}.{index}." for index in range(len(layers)) if index not in here]
    prefixes += [f"{name}." for name, module in causal_lm.named_modules() if any(module is end for end in ends)]
    return lambda name: f"{name}.".startswith(tuple(prefixes))


def cut_model(
    model: nn.Module, name: str, ranks: int, batches: int, recomputed: bool, trust_remote_code: bool = False
) -> Cut:
    """Cut a causal LM, on the meta device too, for as many processes; see `cuts.chosen`.

    Args:
        name: the key `pipeline_schedule`.
        batches: micro-batches of a step.
        recomputed: whether layers run again for backward.

    Raises:
        ConfigError: it has fewer layers, or the schedule does not take so many micro-batches.
        ModelError: see `check_stages`.
    """
    layers, head = layer_seconds(model, recomputed)
    schedule, parts = chosen(name, ranks, layers, head, batches)
    found = check_stages(model, trust_remote_code, head_alone=not parts[-1])
    return Cut(schedule, tuple(parts), tuple(stage_seconds(parts, layers, head)), found)


class Elsewhere(nn.Module):
    """In the place of a decoder layer of another stage: gives what it gets, and says of itself what the layer said.

    Args:
        kept: whether the layer is of another stage of this process: who looks for modules, as FSDP2 does in a model's
            first forward, finds it.
    """

    def __init__(self, layer: nn.Module, kept: bool):
        super().__init__()
        self.layer = layer if kept else None
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float)}
        self.__dict__ |= {name: value for name, value in plain.items() if not name.startswith("_")}

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class Door(Elsewhere):
    """Where hidden states come in from the stage before, or leave for the next."""

    def __init__(self, layer: nn.Module, kept: bool, enters: bool):
        super().__init__(layer, kept)
        self.enters = enters
        self.hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.enters:
            assert self.hidden is not None
            return self.hidden
        self.hidden = hidden_states
        return hidden_states.detach()  # what comes after is not looked at


class Exit(Elsewhere):
    """The model's last decoder layer in a stage whose next one has the head alone: there is no layer behind it whose
    place a `Door` could take, so this one computes the layer and keeps what leaves."""

    def __init__(self, layer: nn.Module):
        super().__init__(layer, kept=True)
        self.hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.layer is not None
        hidden: Tensor = self.layer(hidden_states, *args, **kwargs)
        self.hidden = hidden
        return hidden.detach()  # what comes after is not looked at


class NoEmbedding(nn.Module):
    """In the place of the embedding in later stages: hidden states of the right shape, which nothing looks at."""

    hidden: Tensor | None = None

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.hidden is not None
        return self.hidden.detach()


class NoHead(nn.Identity):
    """In the place of the head in all stages but the last."""


class Stages:
    """The stages of this process; other layers are taken out of the model.

    Args:
        model: a causal LM of transformers, or a `peft.PeftModel` around one, with its adapters on all layers; those of
            other stages may lie on the meta device.
        parts: the layers of every stage, in order.
        own: which of them are here.

    Attributes:
        names: of the parameters that the whole model trains, in order.
        dtype: of the hidden states between stages.

    Raises:
        ModelError: the model cannot be cut.
    """

    def __init__(self, model: nn.Module, parts: Sequence[range], own: Sequence[int]):
        self.model: Any = model
        self.parts, self.causal_lm = list(parts), causal_lm_of(model)
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.dtype = next(iter(_input(self.causal_lm).parameters())).dtype
        self._elsewhere = elsewhere(model, parts, own)
        name, layers = decoder_layers(model)
        owner, _, self.name = name.rpartition(".")
        self.holder = self.causal_lm.get_submodule(owner)
        here = {index for stage in own for index in parts[stage]}
        self.all = nn.ModuleList(each if i in here else Elsewhere(each, False) for i, each in enumerate(layers))
        self.embedding_holder, self.embedding_name = _place_of(self.causal_lm, _input(self.causal_lm))
        self.embedding = _input(self.causal_lm) if 0 in own else NoEmbedding()
        head = _output(self.causal_lm)
        if len(parts) - 1 not in own:
            setattr(*_place_of(self.causal_lm, head), NoHead())
        self.lists = {stage: self._list(stage, layers, here) for stage in own}
        self._put(self.all, self.embedding)

    @property
    def last(self) -> int:
        return len(self.parts) - 1

    def _list(self, stage: int, layers: nn.ModuleList, here: set[int]) -> nn.ModuleList:
        """The model's layers as one stage sees them."""
        part, seen = self.parts[stage], []
        for index, layer in enumerate(layers):
            leaves = stage < self.last and index == self._exit(part)
            if index in part:
                seen.append(Exit(self.all[index]) if leaves else self.all[index])
            elif leaves or index == part.start - 1:
                seen.append(Door(layer, index in here, enters=index < part.start))
            else:
                seen.append(Elsewhere(layer, index in here))
        return nn.ModuleList(seen)

    def _exit(self, part: range) -> int:
        """Where hidden states leave a stage that has the layers `part`: behind them, or in the model's last one."""
        return min(part.stop, len(self.all) - 1)

    def _put(self, layers: nn.ModuleList, embedding: nn.Module) -> None:
        setattr(self.holder, self.name, layers)
        setattr(self.embedding_holder, self.embedding_name, embedding)

    def elsewhere(self, name: str) -> bool:
        """Whether a tensor of a saved adapter is of another process's stage."""
        return self._elsewhere(name.removeprefix(WITHIN))

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
            doors.append(layers[self._exit(part)])
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
            with use_cast_cache(backbone):
                pass


def _place_of(model: nn.Module, wanted: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds `wanted`, and its name there."""
    for module in model.modules():
        for name, child in module.named_children():
            if child is wanted:
                return module, name
    raise ModelError(f"{type(model).__name__} does not hold its own embedding and head", WITHOUT_PIPELINE)


def _input(causal_lm: Any) -> nn.Module:
    return causal_lm.get_input_embeddings()


def _output(causal_lm: Any) -> nn.Module:
    return causal_lm.get_output_embeddings()


def is_tied(causal_lm: Any) -> bool:
    """Whether the head's weight is the embedding's."""
    ends = _input(causal_lm), _output(causal_lm)
    first, last = ({id(parameter) for parameter in end.parameters()} for end in ends)
    return bool(first & last) or bool(getattr(causal_lm.config.get_text_config(), "tie_word_embeddings", False))


def check_trained(model: nn.Module, cut: Cut) -> None:
    """Refuse adapters that stages cannot train; `model` is whole.

    Raises:
        ModelError: the embedding is trained and is the head, too, in another stage; or a process has nothing to train.
    """
    causal_lm = causal_lm_of(model)
    trained = {name: parameter for name, parameter in causal_lm.named_parameters() if parameter.requires_grad}
    ends = {id(p) for p in (*_input(causal_lm).parameters(), *_output(causal_lm).parameters())}
    if is_tied(causal_lm) and any(id(parameter) in ends for parameter in trained.values()):
        raise ModelError("parallel: the embedding is trained and is the head too, which another stage has",
                         f"leave it out of modules_to_save, or {WITHOUT_PIPELINE}")  # fmt: skip
    for rank in range(cut.schedule.ranks):
        if all(map(cut.elsewhere(model, rank), trained)):
            own = [cut.parts[stage] for stage in cut.schedule.stages_of(rank)]
            layers = ", ".join(f"{part.start} to {part.stop - 1}" for part in own if part)
            raise ModelError(f"parallel: the process with layers {layers} has nothing to train",
                             f"let target_modules name linears of every layer, or {WITHOUT_PIPELINE}")  # fmt: skip


def layer_seconds(model: nn.Module, recomputed: bool) -> tuple[list[Seconds], Seconds]:
    """How long decoder layers take, and head and loss, where no plan says it: by their weights.

    Args:
        recomputed: whether layers run again for backward.

    Returns:
        In units of the products of one weight with a token: of each layer, and of the head, whose gradient is made in
        the forward.
    """
    _, layers = decoder_layers(model)
    sizes = [float(sum(parameter.numel() for parameter in layer.parameters())) for layer in layers]
    head = float(sum(p.numel() for p in _output(causal_lm_of(model)).parameters()))
    found = [Seconds(size, (2 if recomputed else 1) * size, size if recomputed else 0.0) for size in sizes]
    return found, Seconds(2 * head, 0.0)


@torch.no_grad()
def check_stages(model: nn.Module, trust_remote_code: bool = False, head_alone: bool = False) -> Head | str:
    """Try on a tiny model of the same architecture whether stages compute what it does.

    Args:
        head_alone: whether the last stage has no layer.

    Returns:
        Its head, as `modeling.head.verified_head` has it.

    Raises:
        ModelError: they do not, or the model has a vision tower.
    """
    causal_lm = causal_lm_of(model)
    name = type(causal_lm).__name__
    if non_text_modules(causal_lm):
        raise ModelError(
            f"parallel: {name} has a vision tower, and only language models are cut into stages", WITHOUT_PIPELINE
        )
    try:
        tiny = tiny_model(causal_lm.config, trust_remote_code=trust_remote_code).requires_grad_(False)
        ids = torch.arange(10, 26).view(2, 8)
        batch = {"input_ids": ids, "labels": ids}
        expected, _ = causal_lm_loss(tiny, batch)
        head = verified_head(tiny, {"input_ids": ids})
        depth = len(decoder_layers(tiny)[1])
        parts = [range(depth // 2), range(depth // 2, depth), *([range(depth, depth)] if head_alone else [])]
        stages, hidden = Stages(tiny, parts, range(len(parts))), None
        for stage in range(len(parts) - 1):
            hidden = stages.forward(stage, batch, hidden)
        with stages.alone(len(parts) - 1, hidden):
            found, _ = causal_lm_loss(tiny, batch)
    except Exception as error:  # of the model's own code, which a part may be too little for
        raise ModelError(f"parallel: {name} cannot be cut into stages: {error}", WITHOUT_PIPELINE) from error
    if not torch.allclose(found, expected, rtol=1e-5):
        raise ModelError(f"parallel: {len(parts)} stages of a tiny {name} have the loss {found:.6g},"
                         f" the whole {expected:.6g}", WITHOUT_PIPELINE)  # fmt: skip
    return head
