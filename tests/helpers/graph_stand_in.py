"""CUDA graphs without a GPU: what decides about them runs, and steps are computed as Python launches them."""

import contextlib
from types import SimpleNamespace

import torch

from halfbyte.mesh.mesh import SINGLE_PROCESS
from halfbyte.train import graph


class StandIn:
    """torch.cuda as far as graphs use it. A capture computes nothing that stays; a replay is the step again.

    Args:
        room: rows that a step may have beside graphs; None: any.
        free: bytes of the device, of which a step takes 10.

    Attributes:
        capture_fits: whether a capture finds room.
        left: tensors that captures have left in the pool.
        refused: rows of shapes that cannot be captured.
    """

    def __init__(self, room=None, free=10):
        self.room, self.free, self.pools, self.capture_fits = room, free, 0, True
        self.left, self.refused = 0, set()
        self.graphs = self.gradients = None  # the `GraphedBackward` under test, and its gradients

    def install(self, monkeypatch):
        stream = SimpleNamespace(wait_stream=lambda _: None, device=SimpleNamespace(index=0))
        replaced = {
            "current_device": lambda: 0,
            "current_stream": lambda: stream,
            "stream": lambda _: contextlib.nullcontext(),
            "graph_pool_handle": self.pool,
            "memory_reserved": lambda _: 0,
            "memory_allocated": lambda _: 5,
            "max_memory_allocated": lambda _: 15,
            "mem_get_info": lambda _: (self.free, 100),
            "get_per_process_memory_fraction": lambda _: 1.0,
            "synchronize": lambda _: None,
            "get_rng_state": lambda _: torch.get_rng_state(),
            "set_rng_state": lambda state, _: torch.set_rng_state(state),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        monkeypatch.setattr(graph, "capture_stream", lambda _: stream)
        monkeypatch.setattr(graph, "pool_segments", self.segments)
        monkeypatch.setattr(graph, "free_cached_memory", lambda _: None)
        monkeypatch.setattr(graph, "_reset_after_failed_capture", lambda *_: None)
        monkeypatch.setattr(graph, "_Captured", self.captured)
        monkeypatch.setattr(graph, "PENDING_BYTES", 1)  # every gradient is added at once
        return self

    def pool(self):
        self.pools += 1
        return self.pools

    def segments(self, _pool):
        live = self.left + sum(captured is not None for captured in self.graphs._captured.values())
        return [{"blocks": [{"state": "active_allocated"}] * live + [{"state": "inactive"}]}]

    def backwards(self, step, trained, mesh=SINGLE_PROCESS):
        """A `GraphedBackward` for which a last gradient finds no room where there is little."""

        def in_little_room(batch):
            result = step(batch)
            if self.room is not None and made.holds_graphs and len(batch["x"]) > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return result

        made = graph.GraphedBackward(in_little_room, trained, mesh)
        self.graphs, self.gradients = made, made.gradients
        return made

    def captured(self, step, batch, _stream, pool):
        if not self.capture_fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if self.refused and len(batch["x"]) in self.refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        before, random = [buffer.clone() for buffer in self.gradients.buffers], torch.get_rng_state()
        step(batch)
        for buffer, values in zip(self.gradients.buffers, before, strict=True):
            buffer.copy_(values)
        torch.set_rng_state(random)

        def replay(batch):
            self.gradients.written = set()
            return step(batch)

        return SimpleNamespace(written=set(), replay=replay, pool=pool)
