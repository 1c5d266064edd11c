"""Pipeline stages of a model: transformers' own backbone runs with the layers of one stage in it.

Layers of other stages are replaced by identity modules. The one before a stage's first layer returns the hidden states
received from the previous stage; the one after its last layer stores the stage's output. So transformers' code makes
rotary embeddings, masks and document bounds in each stage, from the micro-batch that all stages read. Scaled embeddings
and mixed kinds of layers need no special case, and module names are those of the full model. `check_stages` tests on a
tiny model whether an architecture supports this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...batch import Batch
from ...config.layouts import WITHOUT_PIPELINE
from ...modeling.architectures import non_text_modules
from ...modeling.cast_cache import use_cast_cache
from ...modeling.head import Head, backbone_inputs, causal_lm_loss, set_verified_head, verified_head
from ...modeling.layer import causal_lm_of, decoder_layers
from ...modeling.patch_record import is_bound
from ...modeling.tiny_model import tiny_model
from ...utils.errors import ModelError
from .partition import choose_schedule, stage_seconds
from .schedules import Schedule, Seconds

ADAPTER_PREFIX = "base_model.model."  # of module names in a saved adapter


@dataclass(frozen=True)
class PipelinePartition:
    """Partition of a model into stages, known before its weights are read.

    Attributes:
        stage_layers: the layers of every stage.
        seconds: of every stage.
        head: the verified head, or why there is none.
    """

    schedule: Schedule
    stage_layers: tuple[range, ...]
    seconds: tuple[Seconds, ...]
    head: Head | str

    def local_stages(self, model: nn.Module, rank: int) -> LocalStages:
        """Take the stages of `rank` out of its model."""
        set_verified_head(model, self.head)
        return LocalStages(model, self.stage_layers, self.schedule.stages_of(rank))

    def remote_filter(self, model: nn.Module, rank: int) -> Callable[[str], bool]:
        """Return a predicate on names: whether a parameter or module belongs to stages of other ranks only.

        Args:
            model: may be on the meta device.
            rank: along the pipeline.
        """
        return remote_filter(model, self.stage_layers, self.schedule.stages_of(rank))


def remote_filter(model: nn.Module, stage_layers: Sequence[range], stages: Sequence[int]) -> Callable[[str], bool]:
    """Return a predicate on names of a causal LM: whether a parameter or module belongs to no stage of `stages`."""
    name, layers = decoder_layers(model)
    causal_lm = causal_lm_of(model)
    local = {index for stage in stages for index in stage_layers[stage]}
    last = len(stage_layers) - 1
    ends = []
    if 0 not in stages and not (last in stages and is_tied(causal_lm)):
        ends.append(_embedding_of(causal_lm))
    if last not in stages:
        ends.append(_head_of(causal_lm))
    prefixes = [f"{name}.{index}." for index in range(len(layers)) if index not in local]
    prefixes += [f"{name}." for name, module in causal_lm.named_modules() if any(module is end for end in ends)]
    return lambda name: f"{name}.".startswith(tuple(prefixes))


def partition_model(
    model: nn.Module, name: str, ranks: int, batches: int, recomputed: bool, trust_remote_code: bool = False
) -> PipelinePartition:
    """Partition a causal LM, which may be on the meta device, for a number of ranks; see `choose_schedule`.

    Args:
        name: the key `pipeline_schedule`.
        batches: micro-batches per step.
        recomputed: whether layers are recomputed in backward.

    Raises:
        ConfigError: it has fewer layers than ranks, or the schedule does not support this number of micro-batches.
        ModelError: see `check_stages`.
    """
    layers, head = layer_seconds(model, recomputed)
    schedule, stage_layers = choose_schedule(name, ranks, layers, head, batches)
    verified = check_stages(model, trust_remote_code, head_alone=not stage_layers[-1])
    return PipelinePartition(schedule, tuple(stage_layers), tuple(stage_seconds(stage_layers, layers, head)), verified)


class RemoteLayer(nn.Module):
    """Identity placeholder for a layer of another stage, with the layer's plain attributes.

    Args:
        keep: whether to hold the layer, since it is of another stage of this rank: FSDP2 looks for its modules in the
            model's first forward.
    """

    def __init__(self, layer: nn.Module, keep: bool):
        super().__init__()
        self.layer = layer if keep else None
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float)}
        self.__dict__ |= {name: value for name, value in plain.items() if not name.startswith("_")}

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class StageBoundary(RemoteLayer):
    """Placeholder where hidden states are received from the previous stage, or stored for the next one."""

    def __init__(self, layer: nn.Module, keep: bool, enters: bool):
        super().__init__(layer, keep)
        self.enters = enters
        self.hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.enters:
            assert self.hidden is not None
            return self.hidden
        self.hidden = hidden_states
        return hidden_states.detach()  # later results are discarded


class LastLayerBoundary(RemoteLayer):
    """The model's last layer, if the next stage is the head only: computes the layer and stores its output.

    There is no later layer that a `StageBoundary` could replace.
    """

    def __init__(self, layer: nn.Module):
        super().__init__(layer, keep=True)
        self.hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.layer is not None
        hidden: Tensor = self.layer(hidden_states, *args, **kwargs)
        self.hidden = hidden
        return hidden.detach()  # later results are discarded


class NoEmbedding(nn.Module):
    """Placeholder for the embedding in later stages: returns hidden states of the right shape, which are discarded."""

    hidden: Tensor | None = None

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.hidden is not None
        return self.hidden.detach()


class NoHead(nn.Identity):
    """Placeholder for the head in all stages but the last."""


class LocalStages:
    """The stages of this rank; the other layers are removed from the model.

    Args:
        model: a causal LM of transformers, or a `peft.PeftModel` around one, with its adapters on all layers; those of
            other ranks may be on the meta device.
        stage_layers: the layers of every stage, in order.
        own: indices of this rank's stages.

    Attributes:
        names: of the parameters that the full model trains, in order.
        dtype: of the hidden states between stages.

    Raises:
        ModelError: the model does not support stages.
    """

    def __init__(self, model: nn.Module, stage_layers: Sequence[range], stages: Sequence[int]):
        self.model: Any = model
        self.stage_layers = list(stage_layers)
        self.causal_lm = causal_lm_of(model)
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.dtype = next(iter(_embedding_of(self.causal_lm).parameters())).dtype
        self._remote = remote_filter(model, stage_layers, stages)
        name, layers = decoder_layers(model)
        owner, _, self.layers_name = name.rpartition(".")
        self.layers_owner = self.causal_lm.get_submodule(owner)
        local = {index for stage in stages for index in stage_layers[stage]}
        self.layers = nn.ModuleList(
            layer if index in local else RemoteLayer(layer, False) for index, layer in enumerate(layers)
        )
        self.embedding_owner, self.embedding_name = _owner_of(self.causal_lm, _embedding_of(self.causal_lm))
        self.embedding = _embedding_of(self.causal_lm) if 0 in stages else NoEmbedding()
        head = _head_of(self.causal_lm)
        if len(stage_layers) - 1 not in stages:
            setattr(*_owner_of(self.causal_lm, head), NoHead())
        self._lists = {stage: self._list(stage, layers, local) for stage in stages}
        self._install(self.layers, self.embedding)

    @property
    def last(self) -> int:
        return len(self.stage_layers) - 1

    def _list(self, stage: int, layers: nn.ModuleList, local: set[int]) -> nn.ModuleList:
        """Return the list of decoder layers for one stage."""
        layer_range = self.stage_layers[stage]
        seen: list[nn.Module] = []
        for index, layer in enumerate(layers):
            is_boundary = stage < self.last and index == self._boundary_after(layer_range)
            if index in layer_range:
                seen.append(LastLayerBoundary(self.layers[index]) if is_boundary else self.layers[index])
            elif is_boundary or index == layer_range.start - 1:
                seen.append(StageBoundary(layer, index in local, enters=index < layer_range.start))
            else:
                seen.append(RemoteLayer(layer, index in local))
        return nn.ModuleList(seen)

    def _boundary_after(self, layer_range: range) -> int:
        """Return the index where the stage's output is stored: after its layers, or in the model's last layer."""
        return min(layer_range.stop, len(self.layers) - 1)

    def _install(self, layers: nn.ModuleList, embedding: nn.Module) -> None:
        setattr(self.layers_owner, self.layers_name, layers)
        setattr(self.embedding_owner, self.embedding_name, embedding)

    def is_remote(self, name: str) -> bool:
        """Return whether a tensor of a saved adapter belongs to another rank's stages."""
        return self._remote(name.removeprefix(ADAPTER_PREFIX))

    def forward(self, stage: int, batch: Batch, x: Tensor | None) -> Tensor:
        """Compute a stage other than the last.

        Args:
            x: output of the previous stage [B, T, H]; None in the first.

        Returns:
            [B, T, H].
        """
        with self.installed(stage, x) as output:
            self.causal_lm.base_model(**backbone_inputs(self.model, batch), use_cache=False)
            return output()

    @contextlib.contextmanager
    def installed(self, stage: int, x: Tensor | None) -> Iterator[Callable[[], Tensor]]:
        """Within the context, the model is one stage with input `x`; yields a function that returns its output."""
        # Cast the adapters of all stages before the first forward, which would cache those of its stage only.
        backbone = self.causal_lm.base_model
        if is_bound(backbone):
            with use_cast_cache(backbone):
                pass
        layers = self._lists[stage]
        layer_range = self.stage_layers[stage]
        boundaries: list[Any] = []
        embedding: Any = self.embedding
        if stage > 0:
            embedding = NoEmbedding()
            boundaries += [embedding, layers[layer_range.start - 1]]
            for boundary in boundaries:
                boundary.hidden = x
        if stage < self.last:
            boundaries.append(layers[self._boundary_after(layer_range)])
        self._install(layers, embedding)
        try:
            yield lambda: boundaries[-1].hidden
        finally:
            self._install(self.layers, self.embedding)
            for boundary in boundaries:
                boundary.hidden = None


def _owner_of(model: nn.Module, target: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that has `target` as a child, and its name there."""
    for module in model.modules():
        for name, child in module.named_children():
            if child is target:
                return module, name
    raise ModelError(f"{type(model).__name__} does not contain its embedding or head as a submodule", WITHOUT_PIPELINE)


def _embedding_of(causal_lm: Any) -> nn.Module:
    return causal_lm.get_input_embeddings()


def _head_of(causal_lm: Any) -> nn.Module:
    return causal_lm.get_output_embeddings()


def is_tied(causal_lm: Any) -> bool:
    """Return whether the head shares the embedding's weight."""
    ends = _embedding_of(causal_lm), _head_of(causal_lm)
    first, last = ({id(parameter) for parameter in end.parameters()} for end in ends)
    return bool(first & last) or bool(getattr(causal_lm.config.get_text_config(), "tie_word_embeddings", False))


def check_trained(model: nn.Module, cut: PipelinePartition) -> None:
    """Refuse adapters that stages cannot train; `model` is the full model.

    Raises:
        ModelError: the embedding is trained and tied to the head of another stage, or a rank has no trained parameter.
    """
    causal_lm = causal_lm_of(model)
    trained = {name: parameter for name, parameter in causal_lm.named_parameters() if parameter.requires_grad}
    ends = {id(p) for p in (*_embedding_of(causal_lm).parameters(), *_head_of(causal_lm).parameters())}
    if is_tied(causal_lm) and any(id(parameter) in ends for parameter in trained.values()):
        raise ModelError("parallel: the embedding is trained and tied to the head, which is in another stage",
                         f"leave it out of modules_to_save, or {WITHOUT_PIPELINE}")  # fmt: skip
    for rank in range(cut.schedule.ranks):
        if all(map(cut.remote_filter(model, rank), trained)):
            ranges = [cut.stage_layers[stage] for stage in cut.schedule.stages_of(rank)]
            layers = ", ".join(f"{r.start} to {r.stop - 1}" for r in ranges if r)
            raise ModelError(f"parallel: the process with layers {layers} has no trained parameter",
                             f"name linears of every layer in target_modules, or {WITHOUT_PIPELINE}")  # fmt: skip


def layer_seconds(model: nn.Module, recomputed: bool) -> tuple[list[Seconds], Seconds]:
    """Estimate the time of decoder layers and of head and loss by their weights, without a plan.

    Args:
        recomputed: whether layers are recomputed in backward.

    Returns:
        For each layer and for the head, in units of one multiplication per weight and token. The head computes its
        gradient in forward.
    """
    _, layers = decoder_layers(model)
    sizes = [float(sum(parameter.numel() for parameter in layer.parameters())) for layer in layers]
    head = float(sum(p.numel() for p in _head_of(causal_lm_of(model)).parameters()))
    seconds = [Seconds(size, (2 if recomputed else 1) * size, size if recomputed else 0.0) for size in sizes]
    return seconds, Seconds(2 * head, 0.0)


@torch.no_grad()
def check_stages(model: nn.Module, trust_remote_code: bool = False, head_alone: bool = False) -> Head | str:
    """Test on a tiny model of the same architecture that stages compute what the full model does.

    Args:
        head_alone: whether the last stage has no layer.

    Returns:
        Its head, as `modeling.head.verified_head` returns it.

    Raises:
        ModelError: they do not, or the model has a vision tower.
    """
    causal_lm = causal_lm_of(model)
    name = type(causal_lm).__name__
    if non_text_modules(causal_lm):
        raise ModelError(
            f"parallel: {name} has a vision tower; pipeline stages support language models only", WITHOUT_PIPELINE
        )
    try:
        tiny = tiny_model(causal_lm.config, trust_remote_code=trust_remote_code).requires_grad_(False)
        ids = torch.arange(10, 26).view(2, 8)
        batch = {"input_ids": ids, "labels": ids}
        expected, _ = causal_lm_loss(tiny, batch)
        head = verified_head(tiny, {"input_ids": ids})
        depth = len(decoder_layers(tiny)[1])
        stage_layers = [range(depth // 2), range(depth // 2, depth), *([range(depth, depth)] if head_alone else [])]
        stages, hidden = LocalStages(tiny, stage_layers, range(len(stage_layers))), None
        for stage in range(len(stage_layers) - 1):
            hidden = stages.forward(stage, batch, hidden)
        with stages.installed(len(stage_layers) - 1, hidden):
            loss, _ = causal_lm_loss(tiny, batch)
    except Exception as error:  # raised by the model's own code
        raise ModelError(f"parallel: {name} cannot be partitioned into stages: {error}", WITHOUT_PIPELINE) from error
    if not torch.allclose(loss, expected, rtol=1e-5):
        raise ModelError(f"parallel: {len(stage_layers)} stages of a tiny {name} have the loss {loss:.6g},"
                         f" the full model {expected:.6g}", WITHOUT_PIPELINE)  # fmt: skip
    return head
