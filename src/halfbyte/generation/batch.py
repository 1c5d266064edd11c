"""One decoding step for all active rows: their tokens, lengths and page tables on the device, with CUDA graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..ops.paged_attention import BUNDLE, Shared
from ..ops.sample import draw_tokens
from ..utils.hardware import capture_stream
from .paged import MIN_CPU_ROWS, PagedDecoder, to_device
from .sampling import MIN_TEMPERATURE, Sampling
from .schedule import Row

GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)  # captured batch sizes; smaller steps are padded
# Columns of the row table. COMMON and the three columns from BEGIN hold the results of `bundles_of`: a row's shared
# pages, and one bundle per line. The row's page table starts at TABLE.
LENGTH, LIVE, PROMPT, GENERATION, SEAT, SHIFT, SOURCE, COMMON, BEGIN = range(9)
TABLE = BEGIN + 3
MIN_BUNDLE_ROWS = 4  # smaller bundles save less than their programs in the launch cost
# Bundles are used when they save more page reads per layer than this. On an H200 a page read takes about 65 ns (8 heads
# of 128), and the extra launch with its hand-over 6 to 8 µs.
MIN_SAVED_READS = 128

Drawn = tuple[Tensor, Tensor]  # tokens int64 [R] and their log-probabilities fp32 [R]


class Batch:
    """The rows of the paged decoder's current step.

    Args:
        decoder: with its pages allocated.
        rows: maximum number of rows per step.
        pages: maximum number of pages per row.
    """

    def __init__(self, decoder: PagedDecoder, rows: int, pages: int):
        self.decoder, self.device = decoder, decoder.device
        max_rows = self._padded_size(rows)
        self.row_table = torch.zeros(max_rows, TABLE + pages, dtype=torch.int32, device=self.device)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=self.device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.rows: list[Row] = []  # rows of the last table written
        self.table_key: tuple = ()  # rows and page counts that the table was written from
        self.joined: dict[Row, int] = {}  # rows that joined since → index into first_tokens
        self.first_tokens: list[Tensor] = []
        self.has_bundles = False
        self.graphs: dict[tuple[int, bool, Sampling], tuple[torch.cuda.CUDAGraph, Drawn]] = {}
        self.seen: set[tuple[int, bool, Sampling]] = set()

    def _padded_size(self, rows: int) -> int:
        """Return the number of rows, padding included, of a step with `rows` active rows."""
        if self.device.type != "cuda":
            return max(rows, MIN_CPU_ROWS) if self.device.type == "cpu" else rows
        return next((size for size in GRAPH_ROWS if size >= rows), rows)

    def begin(self, rows: Sequence[Row], logits: Tensor, sampling: Sampling) -> Drawn:
        """Draw the first token of rows that join, or rejoin after preemption, from their prompts' logits [R, V]."""
        noise_keys = [[row.group.key, row.generation, row.length] for row in rows]
        drawn = draw(logits, to_device(noise_keys, self.device), self.seed, sampling)
        at = sum(map(len, self.first_tokens))
        self.joined |= {row: at + number for number, row in enumerate(rows)}
        self.first_tokens.append(drawn[0])
        return drawn

    def step(self, rows: Sequence[Row], sampling: Sampling) -> Drawn:
        """Feed each row's last token and draw its next one. The next call may overwrite the returned tensors.

        The rows' `length` and `pages` already include the new token.
        """
        size = self._padded_size(len(rows))
        self._write(rows, size)
        key = size, self.has_bundles, sampling
        if self.device.type != "cuda" or key not in self.seen:
            self.seen.add(key)  # run eagerly once, so that kernels are compiled and tuned
            columns = None if self.device.type == "cuda" else max(len(row.pages) for row in rows)
            tokens, log_probs = self._step(size, sampling, columns)
        else:
            if key not in self.graphs:
                graph = torch.cuda.CUDAGraph()
                pool = next((g.pool() for g, _ in self.graphs.values()), None)
                with torch.cuda.graph(graph, pool=pool, stream=capture_stream(self.device.index)):
                    out = self._step(size, sampling, None)
                self.graphs[key] = graph, out
            graph, (tokens, log_probs) = self.graphs[key]
            graph.replay()
        return tokens[: len(rows)], log_probs[: len(rows)]

    def _write(self, rows: Sequence[Row], size: int) -> None:
        """Update the row table if rows or their pages changed; otherwise the device advances the lengths itself."""
        table_key = tuple((row, len(row.pages)) for row in rows)
        if table_key == self.table_key and not self.joined:
            return
        token_index = {row: number for number, row in enumerate(self.rows)}
        token_index |= {row: len(self.tokens) + at for row, at in self.joined.items()}
        table = np.zeros((size, self.row_table.shape[1]), dtype=np.int32)
        for line, row in zip(table, rows, strict=False):
            key = np.int64(row.group.key).astype(np.int32)
            line[:COMMON] = (row.length - 1, 1, key, row.generation, row.seat, row.group.shift, token_index[row])
            line[TABLE : TABLE + len(row.pages)] = row.pages
        bundles, table[:, COMMON] = bundles_of(table[:, TABLE:])
        table[: len(bundles), BEGIN:TABLE] = bundles
        saved = ((bundles[:, 1] - 1) * bundles[:, 2]).sum()
        self.has_bundles = self.device.type != "cpu" and saved > MIN_SAVED_READS
        self.row_table[:size] = to_device(table, self.device)
        tokens = torch.cat([self.tokens, *self.first_tokens])
        self.tokens[:size] = tokens[self.row_table[:size, SOURCE].long()]
        self.rows = list(rows)
        self.table_key = table_key
        self.joined = {}
        self.first_tokens = []

    def _step(self, size: int, sampling: Sampling, columns: int | None) -> Drawn:
        """Run the decoder and draw tokens; `columns` limits the page tables' width (default: all columns)."""
        tokens, table = self.tokens[:size], self.row_table[:size]
        bundles, common = table[: size // MIN_BUNDLE_ROWS, BEGIN:TABLE], table[:, COMMON]
        shared = Shared(bundles.contiguous(), common.contiguous()) if self.has_bundles else None
        tables, seats = table[:, TABLE:][:, :columns], table[:, SEAT].long()
        logits = self.decoder.step(tokens, table[:, LENGTH], tables, shared, seats, table[:, SHIFT])
        table[:, LENGTH] += table[:, LIVE]
        noise_keys = torch.stack([table[:, PROMPT], table[:, GENERATION], table[:, LENGTH]], dim=1)
        drawn, log_probs = draw(logits.contiguous(), noise_keys.long(), self.seed, sampling)
        tokens.copy_(drawn)
        return drawn, log_probs


def bundles_of(tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find consecutive rows that start with the same pages (shared-prefix bundles).

    Args:
        tables: int32 [R, M], the pages of each row; 0 marks an unused entry.

    Returns:
        Bundles int32 [S, 3] with S ≤ R / MIN_BUNDLE_ROWS, and shared pages per row int32 [R], as in `Shared`.
    """
    shared = (tables[1:] == tables[:-1]) & (tables[1:] > 0)
    shared = np.logical_and.accumulate(shared, axis=1).sum(axis=1)  # pages shared by rows i and i + 1
    rows, first = np.arange(len(tables)), np.r_[True, shared == 0]
    begins = np.flatnonzero((rows - np.maximum.accumulate(np.where(first, rows, 0))) % BUNDLE == 0)
    counts = np.diff(np.r_[begins, len(tables)])
    common_pages = np.full(len(tables), tables.shape[1])
    common_pages[:-1] = shared
    common_pages[begins[1:] - 1] = tables.shape[1]  # a bundle's last row is not compared with the next bundle
    pages = np.where(counts >= MIN_BUNDLE_ROWS, np.minimum.reduceat(common_pages, begins), 0)
    bundles = np.stack([begins, counts, pages], axis=1)[counts >= MIN_BUNDLE_ROWS]
    return bundles.astype(np.int32), np.repeat(pages, counts).astype(np.int32)


def draw(logits: Tensor, noise_keys: Tensor, seed: Tensor, sampling: Sampling) -> Drawn:
    """Draw tokens by `ops.sample.draw_tokens` with the settings of `sampling`."""
    temperature = max(sampling.temperature, MIN_TEMPERATURE) if sampling.temperature else 0.0
    return draw_tokens(logits, noise_keys, seed, temperature, sampling.candidates(logits))


class Readback:
    """Queue of drawn tokens that are being copied to the host, each with the callback that processes it.

    On a GPU tokens are processed one step late, so the next step is launched before the copy has finished.
    """

    def __init__(self, device: torch.device):
        self.lag = int(device.type == "cuda")
        self._waiting: deque[tuple[Callable[[list[int], list[float]], None], Drawn, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, drawn: Drawn, use: Callable[[list[int], list[float]], None]) -> None:
        copied = None
        if drawn[0].is_cuda:
            hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in drawn]
            for host, tensor in zip(hosts, drawn, strict=True):
                host.copy_(tensor, non_blocking=True)
            drawn, copied = (hosts[0], hosts[1]), torch.cuda.Event()
            copied.record()
        self._waiting.append((use, drawn, copied))

    def settle(self, late: int = 0) -> None:
        """Process all queued tokens except the last `late` entries."""
        while len(self._waiting) > late:
            use, (tokens, log_probs), copied = self._waiting.popleft()
            if copied is not None:
                copied.synchronize()
            use(tokens.tolist(), log_probs.tolist())
