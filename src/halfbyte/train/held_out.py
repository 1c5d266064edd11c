"""The numbers of a method over the held-out rows, batch by batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

import torch

from halfbyte.hardware import free_cached_memory, is_out_of_memory
from halfbyte.methods.base import Batch

from .ahead import with_numbers
from .metrics import TOKENS, Window
from .rows import batches, counts_of
from .snapshot import random_states

if TYPE_CHECKING:
    from .loop import TrainingLoop


def held_out_numbers(loop: TrainingLoop) -> dict[str, float]:
    """What the method of `loop` makes of its held-out rows.

    Raises:
        TrainingError: the loss is NaN or Inf, or there is nothing to take it over.
    """
    assert loop.held_out is not None
    found, random = Window.of(loop.method.numbers.trained), random_states()
    loop.model.eval()
    size = loop.args.per_device_eval_batch_size
    share = batches(loop.held_out, size, loop.collate, loop.mesh, pinned=loop.device.type != "cpu")
    with _beside_graphs(loop), torch.no_grad():
        shared = loop.ahead.of_all(map(loop.own, share))
        late = iter(loop.unless_late(share, random, evaluates=True))
        while together := list(islice(late, loop.stepper.together)):
            counted = [counts_of([batch]) for batch in together]
            ready: list[Batch] = [with_numbers(loop.own(batch), shared) for batch in together]
            for own, sums in zip(counted, _sums(loop, ready), strict=True):
                found.add({name: float(value) for name, value in sums.items()}, own, 0.0)
    found = found.over(loop.mesh)
    counts = {name: count for name, count in found.counts.items() if name != TOKENS}
    loop.stops.check_held_out(loop.state.global_step, found.sums["loss"], counts[loop.loss_count])
    return loop.method.evaluation(found.means(loop.method.numbers.trained), counts)


@contextlib.contextmanager
def _beside_graphs(loop: TrainingLoop) -> Iterator[None]:
    """Around what is launched while graphs are held: what the allocator caches is of one stream, theirs or the
    current one, and no use to the other."""
    if loop.stepper.holds_graphs:
        free_cached_memory(loop.device)
    try:
        yield
    finally:
        if loop.stepper.holds_graphs:
            free_cached_memory(loop.device)


def _sums(loop: TrainingLoop, together: list[Batch]) -> list[Mapping[str, torch.Tensor]]:
    """The sums of each batch; where there is no room beside CUDA graphs, the graphs go."""
    try:
        return loop.stepper.evaluate(together)
    except RuntimeError as error:
        if not (loop.stepper.holds_graphs and loop.stepper.alike.is_alone and is_out_of_memory(error)):
            raise
    loop.stepper.give_up()  # out of the handler, whose error keeps what the forward has made
    return _sums(loop, together)
