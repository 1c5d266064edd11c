"""Rank processes that live for the test session, since importing torch and transformers dominates their cost.

    def case(mesh, more):          # in a test module, at its top: every rank calls it
        return mesh.sum(more)

    def test_sums(two):            # fixtures `two` and `four` (conftest.py)
        assert two.run(case, 3) == [6, 6]

`run` returns each rank's picklable result, by rank. If a rank raises, `run` raises AssertionError with the rank and its
traceback, and the next case starts new ranks: others may still block in a collective.
"""

import contextlib
import importlib.util
import os
import socket
import sys
import traceback
from multiprocessing import get_context

from halfbyte.config import Parallel

SECONDS = 120  # that a case may take


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Ranks:
    """`size` processes on devices of a kind, "cpu" (gloo) or "cuda" (NCCL), started when the first case comes."""

    def __init__(self, size, kind="cpu"):
        self.size, self.kind, self._pipes, self._processes = size, kind, [], []

    def run(self, case, *args, layout=None):
        """Call `case(mesh, *args)` on every rank.

        Args:
            layout: keyword numbers of `Parallel`, such as {"shard": 2}; default: all ranks along data.
        """
        if not self._processes:
            self._start()
        layout = Parallel(**(layout or {"data": self.size}))
        module = sys.modules[case.__module__]
        for pipe in self._pipes:
            pipe.send((module.__file__, case.__name__, args, layout))
        answers, failed = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                ok, answer = pipe.recv() if pipe.poll(5 if failed else SECONDS) else (False, "no answer in time")
            except EOFError:
                ok, answer = False, "the process is gone"
            answers.append(answer)
            if not ok:
                failed.append(f"rank {rank}: {answer}")
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return answers

    def _start(self):
        context = get_context("forkserver" if self.kind == "cpu" else "spawn")  # CUDA does not survive a fork
        if self.kind == "cpu":
            context.set_forkserver_preload(["torch", "transformers", "peft", "halfbyte.train.run"])
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, self.size, self.kind, port, theirs, sys.path), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self):
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(2)
            process.kill()
        self._pipes, self._processes = [], []


def _rank(rank, size, kind, port, pipe, path):
    sys.path[:] = path
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "HF_HUB_OFFLINE": "1"}
    import torch

    from halfbyte.mesh.mesh import present_mesh

    torch.set_num_threads(1)
    _cheapen()
    modules = {}
    with present_mesh(device_type=kind) as mesh:
        while (task := pipe.recv()) is not None:
            file, name, args, layout = task
            torch.manual_seed(0)
            try:
                if file not in modules:
                    modules[file] = _module(file)
                answer = True, getattr(modules[file], name)(mesh.with_layout(layout), *args)
            except BaseException:
                answer = False, traceback.format_exc()
            pipe.send(answer)
        os._exit(0)  # threads of torch's meshes may outlive the interpreter, which then aborts


def _cheapen():
    """Skip plots and fsync and cache plans, as tests/conftest.py does for tests of one process."""
    from halfbyte.plan.shapes import ModelShapes
    from halfbyte.report import plots
    from tests.helpers import cached_replays

    plots._svg, os.fsync = lambda *arguments: "<svg></svg>", lambda descriptor: None
    ModelShapes._replay = cached_replays.once


def _module(file):
    spec = importlib.util.spec_from_file_location(os.path.basename(file).removesuffix(".py"), file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
