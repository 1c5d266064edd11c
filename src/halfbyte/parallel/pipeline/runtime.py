"""Pipeline runtime of one rank: computes its stages in the order of a schedule and exchanges hidden states.

The order is torch's (`schedules`), but torch's runtime is not used: it requires one shape for the micro-batches of all
steps, runs the backward of a fused function twice if a schedule splits it (pytorch#174017: `needs_input_grad` ignores
partial backwards), and turns a stage's exceptions into RuntimeErrors. So backwards are never split: with adapters the
gradients of weights are 3% of a forward.

All ranks of a pipeline read the same sequences, so each knows the shapes of its messages, and document bounds and
positions are not sent.

Messages are sent one by one, with a communicator per pair of ranks, in the order of `add_messages`, which explains why
this neither deadlocks nor loses time. Batched messages, as in torch's own runtime, would share one queue for all
neighbours, where a late receive delays a send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...autograd.checkpointing import pending_recomputes, run_ahead
from ...batch import Batch
from ...mesh.mesh import Mesh
from ...utils.errors import ModelError
from .schedules import Action, Schedule, Seconds, add_messages

# (stage, micro-batch, output of the previous stage [B, T, H] or None) → hidden states [B, T, H], or the 0-d loss
Forward = Callable[[int, Batch, Tensor | None], Tensor]


class Pipeline:
    """This rank's stages in the pipeline along the axis `pipeline`.

    Args:
        seconds: of each stage of the model, in any unit; equal on all ranks. They determine the order of messages.
        width: H of the hidden states between stages.
        dtype: of the hidden states.
        ahead: how many layers of a stage may be recomputed before the gradient arrives.
        spare: device bytes for the activations of such layers after the first; None: unlimited.

    Attributes:
        watch: context manager entered around a stage's work, given "F" (forward), "recompute" or "B" (the rest of
            backward), and the stage.
    """

    watch: Callable[[str, int], AbstractContextManager[Any]] = staticmethod(lambda operation, stage: nullcontext())

    def __init__(
        self,
        mesh: Mesh,
        schedule: Schedule,
        seconds: Sequence[Seconds],
        *,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        ahead: int = 1,
        spare: int | None = None,
    ):
        self.mesh = mesh
        self.schedule = schedule
        self.seconds = tuple(seconds)
        self.width = width
        self.dtype = dtype
        self.device = device
        self.ahead = ahead
        self.spare = spare
        self.saved = 0.0  # bytes per recomputed layer and token, measured at the first recomputation
        self.rank, self.group = mesh.coordinate("pipeline"), mesh.group("pipeline")
        self.rank_of = [schedule.rank_of(stage) for stage in range(schedule.stages)]

    @property
    def local_stages(self) -> list[int]:
        """This rank's stages, in order."""
        return [stage for stage, rank in enumerate(self.rank_of) if rank == self.rank]

    @property
    def last(self) -> int:
        return self.schedule.stages - 1

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.rank_of[self.last] == self.rank

    def recompute_ahead(self, pending: Sequence[Any], tokens: int) -> None:
        """Recompute `pending` layers of a stage, as far as spare memory allows; backward starts with the last layer.

        Args:
            tokens: of the micro-batch.
        """
        count = min(self.ahead, len(pending))
        if self.spare is not None:  # the first layer's activations exist in backward in any case
            count = min(count, 1 + int(self.spare // (self.saved * tokens)) if self.saved else 1)
        for layer in reversed(pending[len(pending) - count :]):
            allocated = self._allocated()
            run_ahead(layer)
            self.saved = max(self.saved, (self._allocated() - allocated) / tokens)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.spare is not None and not self.saved else 0

    def step(self, batches: Sequence[Batch], forward: Forward) -> None:
        """Run forward and backward of the micro-batches of a step; all ranks must call it with the same ones.

        Gradients accumulate in `.grad`.

        Args:
            batches: a number that the schedule supports.

        Raises:
            ModelError: a stage returns hidden states of another dtype than `dtype`.
        """
        actions = self.schedule.actions(len(batches))
        _Run(self, batches, forward).execute(add_messages(actions, self.seconds, ahead=self.ahead > 0)[self.rank])

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], forward: Forward) -> None:
        """Run forwards only, of any number of micro-batches."""
        actions = self.schedule.actions(self.schedule.next_accepted(len(batches)))
        forwards = tuple(
            tuple(action for action in order if action.operation == "F" and action.batch < len(batches))
            for order in actions
        )
        _Run(self, batches, forward).execute(add_messages(forwards, self.seconds)[self.rank])


class _Run:
    """One step of a pipeline."""

    def __init__(self, pipeline: Pipeline, batches: Sequence[Batch], forward: Forward):
        self.pipeline = pipeline
        self.batches = batches
        self.forward = forward
        self.grad = torch.is_grad_enabled()
        self.inputs: dict[Action, tuple[Tensor, Any]] = {}  # inputs of actions, with their receives
        self.computed: dict[tuple[int, int], tuple[Tensor | None, Tensor, list[Any]]] = {}
        self.sending: list[tuple[Any, Tensor]] = []

    def execute(self, program: Sequence[Action]) -> None:
        methods = {"F": self.compute, "B": self.backward, "I": self.backward}
        for action in program:
            verb, _, direction = action.operation.partition(" ")
            if verb == "send":
                self.send(action._replace(operation=direction))
            elif verb == "receive":
                self.receive(action._replace(operation=direction))
            elif verb in methods:  # "W" is part of the backward here
                methods[verb](action)
        for work, _ in self.sending:
            work.wait()

    # --- messages ----------------------------------------------------------------------------------------------------

    def receive(self, action: Action) -> None:
        """Start to receive the input of an action."""
        pipeline, tokens = self.pipeline, self.batches[action.batch]["input_ids"]
        buffer = torch.empty(*tokens.shape, pipeline.width, dtype=pipeline.dtype, device=pipeline.device)
        sender = pipeline.rank_of[action.stage + (-1 if action.operation == "F" else 1)]
        self.inputs[action] = buffer, dist.irecv(buffer, group=pipeline.group, group_src=sender)

    def send(self, action: Action) -> None:
        """Start to send an action's result to its consumer; release completed sends."""
        pipeline, target = self.pipeline, _consumer(action)
        tensor, _ = self.inputs.pop(target)
        self.sending = [(work, sent) for work, sent in self.sending if not work.is_completed()]
        receiver = pipeline.rank_of[target.stage]
        self.sending.append((dist.isend(tensor, group=pipeline.group, group_dst=receiver), tensor))

    def take(self, action: Action) -> Tensor:
        """Return the input of an action, after its receive."""
        tensor, work = self.inputs.pop(action)
        if work is not None:
            work.wait()
        return tensor

    # --- computing ---------------------------------------------------------------------------------------------------

    def compute(self, action: Action) -> None:
        pipeline = self.pipeline
        stage, number = action.stage, action.batch
        x = None if stage == 0 else self.take(action).requires_grad_(self.grad)
        with pipeline.watch("F", stage), pending_recomputes() as pending:
            output = self.forward(stage, self.batches[number], x)
        if self.grad:
            self.computed[stage, number] = x, output, pending
        if stage == pipeline.last:
            return
        if output.dtype is not pipeline.dtype:
            raise ModelError(
                f"parallel: hidden states between stages are {pipeline.dtype}, and a stage of this model returns"
                f" {output.dtype}",
                "leave `pipeline` out of `parallel`",
            )
        self.inputs[_consumer(action)] = output.detach().contiguous(), None

    def backward(self, action: Action) -> None:
        pipeline, stage = self.pipeline, action.stage
        x, output, pending = self.computed.pop((stage, action.batch))
        with pipeline.watch("recompute", stage):
            pipeline.recompute_ahead(pending, self.batches[action.batch]["input_ids"].numel())
        gradient = None if stage == pipeline.last else self.take(action._replace(operation="B"))
        with pipeline.watch("B", stage):
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
        if x is not None:
            gradient = x.grad if x.grad is not None else torch.zeros_like(x)
            self.inputs[_consumer(action)] = gradient.contiguous(), None


def _consumer(action: Action) -> Action:
    """Return the action of the next stage, or for gradients of the previous one, that reads the result of `action`."""
    if action.operation == "F":
        return action._replace(stage=action.stage + 1)
    return Action("B", action.stage - 1, action.batch)
