"""The ranks of a run and the few collectives of Python values that the rest of the package uses.

On a mesh of one process the collectives are the identity and need no process group.
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
from .peer_memory import release_peer_memory
from .ranks import MAX_PROCESSES, check_device, launcher_int, rendezvous
from .timeouts import BACKEND_TIMEOUT, mark_done, wait_for_collective, wait_until_done

T = TypeVar("T")
ONE = Parallel()
AXES = ("pipeline", "data", "shard", "context", "tensor")  # from slow to fast links: tensor neighbours share a host
DATA_AXES = ("data", "shard")  # ranks along these axes train on different sequences
SHARD_AXES = ("shard", "context")  # ranks along these axes hold different shards of frozen weights
TOKEN_AXES = (*DATA_AXES, "context")  # ranks along these axes compute different tokens
COLLECTIVE_AXES = ("shard", "context", "tensor")  # axes along which forwards and backwards contain collectives


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run, one per device, and this rank's coordinates.

    Attributes:
        rank: this process, from 0.
        layout: degree of each axis.
        local: rank within the host, which is also the device index.
        device_type: device type, "cpu" or "cuda".
        groups: axes → process group of the ranks that differ from this one along those axes only. Exchange tensors
            through these groups only: NCCL takes several hundred MB of a GPU for each group with large messages.
    """

    rank: int = 0
    layout: Parallel = ONE
    local: int = 0
    device_type: str = "cpu"
    groups: dict[tuple[str, ...], Any] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.layout.size

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    @property
    def is_model_parallel(self) -> bool:
        """Whether a forward needs other ranks, which hold parts of the model or of each sequence."""
        return self.size > self.degree("data")

    @property
    def shares_collectives(self) -> bool:
        """Whether forwards and backwards contain collectives with other ranks; a pipeline's messages do not count."""
        return self.degree(*COLLECTIVE_AXES) > 1

    def degree(self, *axes: str) -> int:
        """Return the number of ranks that differ along `axes` only."""
        return Parallel(**{axis: getattr(self.layout, axis) for axis in axes}).size

    def coordinate(self, *axes: str) -> int:
        """Return this rank's index among the ranks that differ along `axes` only."""
        coordinate, rank = 0, self.rank
        coordinates = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self.layout, axis))
        for axis in (axis for axis in AXES if axis in axes):
            coordinate = coordinate * getattr(self.layout, axis) + coordinates[axis]
        return coordinate

    def active(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return those of `axes` with a degree above 1, in the order of `AXES`."""
        return tuple(axis for axis in _in_order(axes) if getattr(self.layout, axis) > 1)

    def group(self, *axes: str) -> Any:
        """Return the process group along `axes`, or None if its degree is 1."""
        return self.groups[_in_order(axes)] if self.degree(*axes) > 1 else None

    def device(self, chosen: torch.device) -> torch.device:
        """Return this rank's device of the `chosen` type."""
        return torch.device(chosen.type, self.local) if self.size > 1 and chosen.type != "cpu" else chosen

    def sum(self, value: T, axes: tuple[str, ...] = DATA_AXES) -> T:
        """Sum along `axes` a number, each number of a mapping, or a tensor (in place, on its device)."""
        return self._reduce(value, dist.ReduceOp.SUM, axes)

    def max(self, value: T, axes: tuple[str, ...] = AXES) -> T:
        """Return the maximum along `axes` of numbers or, elementwise and in place, of a tensor."""
        return self._reduce(value, dist.ReduceOp.MAX, axes)

    def any(self, flag: bool, axes: tuple[str, ...] = COLLECTIVE_AXES) -> bool:
        """Return whether `flag` is true on any rank along `axes`."""
        return bool(self.max(int(flag), axes))

    def _reduce(self, value: T, operation: Any, axes: tuple[str, ...]) -> T:
        group = self.group(*axes)
        if group is None:
            return value
        if isinstance(value, Tensor):
            dist.all_reduce(value, operation, group=group)
            return value
        named = value if isinstance(value, dict) else {"": value}
        numbers = torch.tensor([*named.values()], dtype=torch.float64)
        wait_for_collective(dist.all_reduce(numbers, operation, group=group, async_op=True), group)
        pairs = zip(named.items(), numbers.tolist(), strict=True)
        reduced = {name: type(original)(number) for (name, original), number in pairs}
        return reduced if isinstance(value, dict) else reduced[""]  # type: ignore[return-value]

    def gather_ints(self, numbers: Sequence[int], axes: tuple[str, ...] = AXES) -> list[list[int]]:
        """Return each rank's integers, equally many on every rank, exchanged on the host."""
        group = self.group(*axes)
        if group is None:
            return [list(numbers)]
        local = torch.tensor(numbers, dtype=torch.int64)
        gathered = [torch.empty_like(local) for _ in range(self.degree(*axes))]
        wait_for_collective(dist.all_gather(gathered, local, group=group, async_op=True), group)
        return [numbers.tolist() for numbers in gathered]

    def local_first(self, make: Callable[[], T]) -> T:
        """Call `make` on each host's local rank 0 first, then on the other ranks, which hit its cache."""
        if self.size == 1:
            return make()
        values: list[T] = []
        hosts, number = self.sum(int(self.local == 0), AXES), next(_call_numbers)
        if self.local == 0:
            try:
                values.append(make())
            finally:  # also if `make` raises: the other ranks call it too and raise the same error
                mark_done(number)
        wait_until_done(number, hosts)
        return values[0] if values else make()

    def all_equal(self, value: Any) -> bool:
        """Return whether all ranks pass the same value, compared by `repr`."""
        return len(set(self.gather(hashlib.sha256(repr(value).encode()).digest()))) == 1

    def most_on_a_host(self) -> int:
        """Return the number of ranks on the host with the most of them."""
        return self.max(launcher_int("LOCAL_WORLD_SIZE", 1, MAX_PROCESSES, self.local + 1))

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of ranks; values must be picklable."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            self.barrier()
            dist.all_gather_object(values, value)
        return values

    def from_main(self, value: T) -> T:
        """Return the main rank's value, which must be picklable."""
        if self.size == 1:
            return value
        values = [value]
        self.barrier()
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def barrier(self) -> None:
        """Block until all ranks have called it."""
        if self.size > 1:
            self.max(0)

    def with_layout(self, layout: Parallel) -> Mesh:
        """Arrange the same ranks along other axes; every rank must call it with the same `layout`.

        Raises:
            ConfigError: the layout has another number of ranks.
        """
        if layout.size != self.size:
            raise ConfigError(
                f"parallel: {layout} needs {layout.size} processes, and {self.size} were started",
                f"start {layout.size} (`halfbyte train` does, or torchrun), or let `parallel` multiply to {self.size}",
            )
        if self.size == 1:
            return replace(self, layout=layout)
        return replace(self, layout=layout, groups=_groups(tuple(getattr(layout, axis) for axis in AXES)))


SINGLE_PROCESS = Mesh()
_call_numbers = itertools.count()  # numbers of the calls of `local_first`, equal on all ranks


def _in_order(axes: Iterable[str]) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if axis in axes)


def _groups(sizes: tuple[int, ...]) -> dict[tuple[str, ...], Any]:
    """Create a process group for every set of axes with a degree above 1; sets with the same ranks share a group."""
    ranks = torch.arange(dist.get_world_size()).view(sizes)
    wide = [i for i, size in enumerate(sizes) if size > 1]
    groups: dict[tuple[int, ...], Any] = {}
    for count in range(1, len(wide) + 1):
        for along in itertools.combinations(wide, count):
            fixed = [i for i in range(len(sizes)) if i not in along]
            rows = ranks.permute(*fixed, *along).reshape(-1, torch.Size(sizes[i] for i in along).numel())
            if len(rows) == 1:
                groups[along] = dist.group.WORLD
            else:
                groups[along] = dist.new_subgroups_by_enumeration(rows.tolist())[0]
    every = [_in_order(axes) for count in range(1, len(AXES) + 1) for axes in itertools.combinations(AXES, count)]
    return {axes: groups.get(tuple(i for i in wide if AXES[i] in axes)) for axes in every}


@contextlib.contextmanager
def present_mesh(parallel: Parallel | None = None, device_type: str = "cpu") -> Iterator[Mesh]:
    """Join the processes that the launcher started, for the duration of the context.

    Args:
        parallel: layout of the mesh; default: data parallelism.
        device_type: device type, "cpu" or "cuda".

    Raises:
        ConfigError: `parallel` has another number of ranks, or the launcher's environment is incomplete.
    """
    size = launcher_int("WORLD_SIZE", 1, MAX_PROCESSES, 1)
    local = launcher_int("LOCAL_RANK", 0, size - 1, 0)
    if size == 1:
        yield SINGLE_PROCESS.with_layout(parallel or ONE)
        return
    if device_type == "cuda":
        check_device(local)
        torch.cuda.set_device(local)
    joined_before = dist.is_initialized()
    if not joined_before:  # no `device_id`: it would make every group allocate GPU memory, used or not
        with rendezvous(size):
            backend = "cpu:gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, timeout=BACKEND_TIMEOUT)
    mesh = Mesh(dist.get_rank(), Parallel(data=size), local, device_type, _groups((1, size, 1, 1, 1)))
    yield mesh.with_layout(parallel) if parallel else mesh
    release_peer_memory(mesh.barrier)
    if not joined_before:  # not after an exception: destroying the group would block on the other ranks
        dist.destroy_process_group()
