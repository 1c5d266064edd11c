"""The processes that train together. Everything else asks these few verbs, and nothing else asks for ranks.

A mesh of one is a mesh: its verbs are the identity, and need no process group.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import Parallel
from ..utils.errors import ConfigError
from .launch.ranks import MOST, check_device, launched_as, meeting
from .peer_memory import let_go
from .timeouts import OWN_LIMITS, finish, say_done, wait_until_done

T = TypeVar("T")
ONE = Parallel()
AXES = ("pipeline", "data", "shard", "context", "tensor")  # neighbours on the last ones share the fastest links
ROWS = ("data", "shard")  # along these, processes take different rows
SLICES = ("shard", "context")  # along these, different slices of frozen bytes, where there are any
TOKENS = (*ROWS, "context")  # along these, different tokens


@dataclass(frozen=True)
class Mesh:
    """The processes of a run, one a device, and where this one stands among them.

    Attributes:
        rank: of this process, from 0.
        layout: along which axes there are how many.
        local: rank among the processes of this host, which is the number of its device.
        kind: of the devices they compute on, "cpu" or "cuda".
        groups: axes → the processes that differ from this one along those axes alone. Whoever exchanges tensors among
            them does it in this group: NCCL takes several hundred MB of a GPU for each group that moves large ones.
    """

    rank: int = 0
    layout: Parallel = ONE
    local: int = 0
    kind: str = "cpu"
    groups: dict[tuple[str, ...], Any] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.layout.size

    @property
    def is_main(self) -> bool:
        """Whether this process writes files, says notices and shows the run."""
        return self.rank == 0

    @property
    def computes_together(self) -> bool:
        """Whether a process cannot run the model alone: it has a part of it, or of each row."""
        return self.size > self.ways("data")

    def ways(self, *axes: str) -> int:
        """How many processes differ along `axes` alone."""
        return Parallel(**{axis: getattr(self.layout, axis) for axis in axes}).size

    def place(self, *axes: str) -> int:
        """Which of those this process is, from 0."""
        place, rank = 0, self.rank
        coordinates = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self.layout, axis))
        for axis in (axis for axis in AXES if axis in axes):
            place = place * getattr(self.layout, axis) + coordinates[axis]
        return place

    def wide(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of `axes` along which there are several processes, in order."""
        return tuple(axis for axis in _in_order(axes) if getattr(self.layout, axis) > 1)

    def group(self, *axes: str) -> Any:
        """The process group of those; None where this process is alone."""
        return self.groups[_in_order(axes)] if self.ways(*axes) > 1 else None

    def device(self, chosen: torch.device) -> torch.device:
        """This process's own, of the kind that the run is to use."""
        return torch.device(chosen.type, self.local) if self.size > 1 and chosen.type != "cpu" else chosen

    def sum(self, value: T, axes: tuple[str, ...] = ROWS) -> T:
        """The sum along `axes` of a number, of each number of a mapping, or of a tensor (in place), on its device."""
        return self._reduced(value, dist.ReduceOp.SUM, axes)

    def max(self, value: T, axes: tuple[str, ...] = AXES) -> T:
        """The largest along `axes` of numbers; of tensors (in place), element by element."""
        return self._reduced(value, dist.ReduceOp.MAX, axes)

    def _reduced(self, value: T, operation: Any, axes: tuple[str, ...]) -> T:
        group = self.group(*axes)
        if group is None:
            return value
        if isinstance(value, Tensor):
            dist.all_reduce(value, operation, group=group)
            return value
        named = value if isinstance(value, dict) else {"": value}
        numbers = torch.tensor([*named.values()], dtype=torch.float64)
        finish(dist.all_reduce(numbers, operation, group=group, async_op=True), group)
        found = {name: type(own)(number) for (name, own), number in zip(named.items(), numbers.tolist(), strict=True)}
        return found if isinstance(value, dict) else found[""]  # type: ignore[return-value]

    def every(self, numbers: Sequence[int], axes: tuple[str, ...] = AXES) -> list[list[int]]:
        """The numbers of each process along `axes`, as many in all; told from host to host."""
        group = self.group(*axes)
        if group is None:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.ways(*axes))]
        finish(dist.all_gather(found, own, group=group, async_op=True), group)
        return [each.tolist() for each in found]

    def first(self, make: Callable[[], T]) -> T:
        """What `make` gives, made by each host's first process before its others begin, which find what is cached."""
        if self.size == 1:
            return make()
        made: list[T] = []
        hosts, number = self.sum(int(self.local == 0), AXES), next(_numbers)
        if self.local == 0:
            try:
                made.append(make())
            finally:  # what `make` raises, it raises in the others too: they need not wait
                say_done(number)
        wait_until_done(number, hosts)
        return made[0] if made else make()

    def equal(self, value: Any) -> bool:
        """Whether all processes hold the same value, by its `repr`."""
        return len(set(self.gather(hashlib.sha256(repr(value).encode()).digest()))) == 1

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank; it can be pickled."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            self.wait()
            dist.all_gather_object(values, value)
        return values

    def from_main(self, value: T) -> T:
        """The main process's value, which can be pickled."""
        if self.size == 1:
            return value
        values = [value]
        self.wait()
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            self.max(0)

    def laid_out(self, layout: Parallel) -> Mesh:
        """The same processes along other axes; every process calls it with the same `layout`.

        Raises:
            ConfigError: it is of another number of processes.
        """
        if layout.size != self.size:
            raise ConfigError(
                f"parallel: {layout} takes {layout.size} processes, and {self.size} were started",
                f"start {layout.size} (`halfbyte train` does, or torchrun), or let `parallel` multiply to {self.size}",
            )
        if self.size == 1:
            return replace(self, layout=layout)
        return replace(self, layout=layout, groups=_groups(tuple(getattr(layout, axis) for axis in AXES)))


ALONE = Mesh()
_numbers = itertools.count()  # of the calls of `first`, which all processes make in one order


def _in_order(axes: Iterable[str]) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if axis in axes)


def _groups(sizes: tuple[int, ...]) -> dict[tuple[str, ...], Any]:
    """A process group for every set of axes along which there are several processes; sets that come to the same
    processes share theirs."""
    ranks = torch.arange(dist.get_world_size()).view(sizes)
    wide = [i for i, size in enumerate(sizes) if size > 1]
    made: dict[tuple[int, ...], Any] = {}
    for count in range(1, len(wide) + 1):
        for along in itertools.combinations(wide, count):
            rest = [i for i in range(len(sizes)) if i not in along]
            rows = ranks.permute(*rest, *along).reshape(-1, torch.Size(sizes[i] for i in along).numel())
            if len(rows) == 1:
                made[along] = dist.group.WORLD
            else:
                made[along] = dist.new_subgroups_by_enumeration(rows.tolist())[0]
    every = [_in_order(axes) for count in range(1, len(AXES) + 1) for axes in itertools.combinations(AXES, count)]
    return {axes: made.get(tuple(i for i in wide if AXES[i] in axes)) for axes in every}


@contextlib.contextmanager
def present_mesh(parallel: Parallel | None = None, kind: str = "cpu") -> Iterator[Mesh]:
    """The processes that the launcher has started, for as long as a run takes.

    Args:
        parallel: how they divide the run; None: by rows.
        kind: of the devices they compute on, "cpu" or "cuda".

    Raises:
        ConfigError: `parallel` is of another number of processes, or the launcher's environment is not whole.
    """
    size = launched_as("WORLD_SIZE", 1, MOST, 1)
    local = launched_as("LOCAL_RANK", 0, size - 1, 0)  # which transformers reads, too
    if size == 1:
        yield ALONE.laid_out(parallel or ONE)
        return
    if kind == "cuda":
        check_device(local)
        torch.cuda.set_device(local)
    joined_before = dist.is_initialized()
    if not joined_before:  # without `device_id`: with it every group would take its share of the GPU, used or not
        with meeting(size):
            dist.init_process_group("cpu:gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl", timeout=OWN_LIMITS)
    mesh = Mesh(dist.get_rank(), Parallel(data=size), local, kind, _groups((1, size, 1, 1, 1)))
    yield mesh.laid_out(parallel) if parallel else mesh
    let_go(mesh.wait)
    if not joined_before:  # what fails ends the process: the group would wait for the others
        dist.destroy_process_group()
