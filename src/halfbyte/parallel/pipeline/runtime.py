"""One process's share of a pipeline: it computes its stages in a schedule's order, and hands on what they give.

The order is torch's (`schedules`); running it is done here, because torch's own runtime takes one shape for the
micro-batches of all steps, where rows are as long as they are, runs the backward of a fused function twice where a
schedule splits it (pytorch#174017: `needs_input_grad` does not know partial backwards), and says what went wrong in a
stage as a RuntimeError. So a backward is never split: with adapters the gradients of weights are 3% of a forward.

All processes of a pipeline read the same rows, so each knows the shape of what it will receive, and document bounds
and positions need no sending.

Messages go one by one, each pair of processes with a communicator of its own, in the order of `programs`, which says
why that neither blocks nor loses time. In batches, as torch's own schedules send them, they would go through one queue
for all neighbours: a process would pass on late what it has, behind what it gets late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...autograd.checkpointing import pending_recomputes, run_ahead
from ...utils.errors import ModelError
from ..mesh import Mesh
from .schedules import Schedule
from .simulation import Action, Seconds, programs

Batch = Mapping[str, Any]
# (stage, micro-batch, what the stage before gave [B, T, H] or None in the first) → hidden states [B, T, H]; what the
# last stage gives is differentiated, 0-d
Forward = Callable[[int, Batch, Tensor | None], Tensor]


class Pipeline:
    """The stages of this process among those of the others along the axis `pipeline`.

    Args:
        seconds: of each stage of the model, in any unit; the same in all processes. They decide the order of messages.
        width: H of the hidden states between stages.
        dtype: of the hidden states.
        ahead: of a stage, how many of its layers that are recomputed may be so before the gradient is there.
        spare: bytes of the device for what those after the first save until then; None: as many as it takes.

    Attributes:
        watch: a context around all that a stage computes, given "F" (forward), "again" or "B" (the rest of backward)
            and the stage.
    """

    watch: Callable[[str, int], AbstractContextManager[Any]] = staticmethod(lambda kind, stage: nullcontext())

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
        self.mesh, self.schedule, self.seconds, self.ahead = mesh, schedule, tuple(seconds), ahead
        self.width, self.dtype, self.device, self.spare = width, dtype, device, spare
        self.saved = 0.0  # bytes of a recomputed layer and token, once known
        self.rank, self.group = mesh.coordinate("pipeline"), mesh.group("pipeline")
        self.process_of = [schedule.process_of(stage) for stage in range(schedule.stages)]

    @property
    def own(self) -> list[int]:
        """This process's stages, from the first."""
        return [stage for stage, rank in enumerate(self.process_of) if rank == self.rank]

    @property
    def last(self) -> int:
        return self.schedule.stages - 1

    @property
    def has_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.process_of[self.last] == self.rank

    def recompute_ahead(self, left: Sequence[Any], tokens: int) -> None:
        """Of what a stage's layers have left for backward, run what there is room for; backward begins with the last.

        Args:
            tokens: of the micro-batch.
        """
        count = min(self.ahead, len(left))
        if self.spare is not None:  # the first one's graph would be there in backward, too
            count = min(count, 1 + int(self.spare // (self.saved * tokens)) if self.saved else 1)
        for each in reversed(left[len(left) - count :]):
            before = self._allocated()
            run_ahead(each)
            self.saved = max(self.saved, (self._allocated() - before) / tokens)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.spare is not None and not self.saved else 0

    def step(self, batches: Sequence[Batch], forward: Forward) -> None:
        """Forward and backward of the micro-batches of a step, which all processes call with the same ones.

        Gradients are added to `.grad`.

        Args:
            batches: as many as the schedule takes.

        Raises:
            ModelError: hidden states of another dtype than `dtype` leave a stage.
        """
        orders = self.schedule.orders(len(batches))
        _Run(self, batches, forward).follow(programs(orders, self.seconds, ahead=self.ahead > 0)[self.rank])

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], forward: Forward) -> None:
        """The forwards alone, of any number of micro-batches."""
        orders = self.schedule.orders(self.schedule.at_least(len(batches)))
        forwards = tuple(
            tuple(action for action in order if action.kind == "F" and action.batch < len(batches)) for order in orders
        )
        _Run(self, batches, forward).follow(programs(forwards, self.seconds)[self.rank])


class _Run:
    """One step of a pipeline."""

    def __init__(self, pipeline: Pipeline, batches: Sequence[Batch], forward: Forward):
        self.pipeline, self.batches, self.forward = pipeline, batches, forward
        self.grad = torch.is_grad_enabled()
        self.here: dict[Action, tuple[Tensor, Any]] = {}  # what a stage takes, by "F" or "B", and what to wait for
        self.computed: dict[tuple[int, int], tuple[Tensor | None, Tensor, list[Any]]] = {}
        self.sending: list[tuple[Any, Tensor]] = []

    def follow(self, program: Sequence[Action]) -> None:
        does = {"F": self.compute, "B": self.differentiate, "I": self.differentiate}
        for action in program:
            kind, _, way = action.kind.partition(" ")
            if kind == "send":
                self.send(action._replace(kind=way))
            elif kind == "receive":
                self.receive(action._replace(kind=way))
            elif kind in does:  # "W": its part of the backward is done
                does[kind](action)
        for work, _ in self.sending:
            work.wait()

    # --- messages ----------------------------------------------------------------------------------------------------

    def receive(self, action: Action) -> None:
        """Begin to receive what a stage takes."""
        line, tokens = self.pipeline, self.batches[action.batch]["input_ids"]
        buffer = torch.empty(*tokens.shape, line.width, dtype=line.dtype, device=line.device)
        sender = line.process_of[action.stage + (-1 if action.kind == "F" else 1)]
        self.here[action] = buffer, dist.irecv(buffer, group=line.group, group_src=sender)

    def send(self, action: Action) -> None:
        """Begin to send what a stage has given, to where it is taken; what has been sent is let go."""
        line, target = self.pipeline, _taker(action)
        tensor, _ = self.here.pop(target)
        self.sending = [(work, sent) for work, sent in self.sending if not work.is_completed()]
        receiver = line.process_of[target.stage]
        self.sending.append((dist.isend(tensor, group=line.group, group_dst=receiver), tensor))

    def take(self, action: Action) -> Tensor:
        """What a stage takes, once it is here."""
        tensor, work = self.here.pop(action)
        if work is not None:
            work.wait()
        return tensor

    # --- computing ---------------------------------------------------------------------------------------------------

    def compute(self, action: Action) -> None:
        line, stage, number = self.pipeline, action.stage, action.batch
        x = None if stage == 0 else self.take(action).requires_grad_(self.grad)
        with line.watch("F", stage), pending_recomputes() as left:
            output = self.forward(stage, self.batches[number], x)
        if self.grad:
            self.computed[stage, number] = x, output, left
        if stage == line.last:
            return
        if output.dtype is not line.dtype:
            raise ModelError(
                f"parallel: hidden states leave layer by layer in {line.dtype}, and a stage of this model gives"
                f" {output.dtype}",
                "leave `pipeline` out of `parallel`",
            )
        self.here[_taker(action)] = output.detach().contiguous(), None

    def differentiate(self, action: Action) -> None:
        line, stage = self.pipeline, action.stage
        x, output, left = self.computed.pop((stage, action.batch))
        with line.watch("again", stage):
            line.recompute_ahead(left, self.batches[action.batch]["input_ids"].numel())
        gradient = None if stage == line.last else self.take(action._replace(kind="B"))
        with line.watch("B", stage):
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
        if x is not None:
            given = x.grad if x.grad is not None else torch.zeros_like(x)
            self.here[_taker(action)] = given.contiguous(), None


def _taker(action: Action) -> Action:
    """What the next stage, or for gradients the one before, does with what `action` gives."""
    if action.kind == "F":
        return action._replace(stage=action.stage + 1)
    return Action("B", action.stage - 1, action.batch)
