"""The rows of a step as the device has them: tokens, lengths and tables; on a CUDA device, steps in graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..ops.paged_attention import BUNDLE, Shared
from ..ops.sample import draw_tokens
from ..utils.hardware import capture_stream
from .paged import LEAST_ROWS, PagedDecoder, to_device
from .sampling import LOWEST, Sampling
from .schedule import Row

GRAPHS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)  # rows of a captured step; others are filled up
# Columns of the book. As `bundles_of` gives them: a row's pages that its bundle has, and from BEGIN, one bundle to a
# line, a bundle's three numbers; last a row's table.
LENGTH, LIVE, PROMPT, GENERATION, SEAT, SOURCE, COMMON, BEGIN = range(8)
TABLE = BEGIN + 3
FEWEST = 4  # rows of a bundle: a launch has programs for as many bundles as there may be, and with fewer gains less
# Reads of pages that bundles save a layer, from which on there are any: each takes an H200 some 65 ns where a token has
# 8 heads of 128, and the launch for bundles, with what it hands on, 6 to 8 µs.
SAVED = 128

Drawn = tuple[Tensor, Tensor]  # tokens int64 [R] and their log-probabilities fp32 [R]


class Batch:
    """Args:
    decoder: with its pages made.
    rows: that may run at once.
    pages: that a row may have.
    """

    def __init__(self, decoder: PagedDecoder, rows: int, pages: int):
        self.decoder, self.device = decoder, decoder.device
        most = self._filled(rows)
        self.book = torch.zeros(most, TABLE + pages, dtype=torch.int32, device=self.device)
        self.tokens = torch.zeros(most, dtype=torch.int64, device=self.device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.rows: list[Row] = []  # as they are on the device
        self.known: tuple = ()  # what the book was written from
        self.begun: dict[Row, int] = {}  # rows that have joined since, and where their tokens are
        self.first_tokens: list[Tensor] = []
        self.shares = False  # whether there are bundles
        self.graphs: dict[tuple[int, bool, Sampling], tuple[torch.cuda.CUDAGraph, Drawn]] = {}
        self.seen: set[tuple[int, bool, Sampling]] = set()

    def _filled(self, rows: int) -> int:
        """The rows of a step that holds so many."""
        if self.device.type != "cuda":
            return max(rows, LEAST_ROWS) if self.device.type == "cpu" else rows
        return next((size for size in GRAPHS if size >= rows), rows)

    def begin(self, rows: Sequence[Row], logits: Tensor, sampling: Sampling) -> Drawn:
        """The first tokens of rows that join, or go on after they had to leave, from logits [R, V] behind theirs."""
        places = [[row.group.key, row.generation, row.length] for row in rows]
        drawn = draw(logits, to_device(places, self.device), self.seed, sampling)
        at = sum(map(len, self.first_tokens))
        self.begun |= {row: at + number for number, row in enumerate(rows)}
        self.first_tokens.append(drawn[0])
        return drawn

    def step(self, rows: Sequence[Row], sampling: Sampling) -> Drawn:
        """One more token of each row: what it had last is read, the next is drawn. May be overwritten by the next call.

        Lengths and pages of the rows are those after it.
        """
        size = self._filled(len(rows))
        self._write(rows, size)
        key = size, self.shares, sampling
        if self.device.type != "cuda" or key not in self.seen:
            self.seen.add(key)  # the first time nothing is captured: kernels are compiled and chosen
            columns = None if self.device.type == "cuda" else max(len(row.pages) for row in rows)
            tokens, log_probs = self._step(size, sampling, columns)
        else:
            if key not in self.graphs:
                graph = torch.cuda.CUDAGraph()
                pool = next((each.pool() for each, _ in self.graphs.values()), None)
                with torch.cuda.graph(graph, pool=pool, stream=capture_stream(self.device.index)):
                    out = self._step(size, sampling, None)
                self.graphs[key] = graph, out
            graph, (tokens, log_probs) = self.graphs[key]
            graph.replay()
        return tokens[: len(rows)], log_probs[: len(rows)]

    def _write(self, rows: Sequence[Row], size: int) -> None:
        """Bring the book up to date, if rows or their pages are others now; the device counts lengths itself."""
        known = tuple((row, len(row.pages)) for row in rows)
        if known == self.known and not self.begun:
            return
        before = {row: number for number, row in enumerate(self.rows)}
        before |= {row: len(self.tokens) + at for row, at in self.begun.items()}
        book = np.zeros((size, self.book.shape[1]), dtype=np.int32)
        for line, row in zip(book, rows, strict=False):
            key = np.int64(row.group.key).astype(np.int32)
            line[:COMMON] = row.length - 1, 1, key, row.generation, row.seat, before[row]
            line[TABLE : TABLE + len(row.pages)] = row.pages
        bundles, book[:, COMMON] = bundles_of(book[:, TABLE:])
        book[: len(bundles), BEGIN:TABLE] = bundles
        saved = ((bundles[:, 1] - 1) * bundles[:, 2]).sum()
        self.shares = self.device.type != "cpu" and saved > SAVED
        self.book[:size] = to_device(book, self.device)
        tokens = torch.cat([self.tokens, *self.first_tokens])
        self.tokens[:size] = tokens[self.book[:size, SOURCE].long()]
        self.rows, self.known, self.begun, self.first_tokens = list(rows), known, {}, []

    def _step(self, size: int, sampling: Sampling, columns: int | None) -> Drawn:
        """columns: of the tables that hold pages; None: all that there are."""
        tokens, book = self.tokens[:size], self.book[:size]
        bundles, common = book[: size // FEWEST, BEGIN:TABLE], book[:, COMMON]
        shared = Shared(bundles.contiguous(), common.contiguous()) if self.shares else None
        tables, seats = book[:, TABLE:][:, :columns], book[:, SEAT].long()
        logits = self.decoder.step(tokens, book[:, LENGTH], tables, shared, seats)
        book[:, LENGTH] += book[:, LIVE]
        places = torch.stack([book[:, PROMPT], book[:, GENERATION], book[:, LENGTH]], dim=1)
        drawn, log_probs = draw(logits.contiguous(), places.long(), self.seed, sampling)
        tokens.copy_(drawn)
        return drawn, log_probs


def bundles_of(tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that follow one another and begin with the same pages.

    Args:
        tables: int32 [R, M]: pages of each row; 0 where there is none.

    Returns:
        int32 [S, 3] and [R], as `Shared` has them, S ≤ R / FEWEST.
    """
    alike = (tables[1:] == tables[:-1]) & (tables[1:] > 0)
    alike = np.logical_and.accumulate(alike, axis=1).sum(axis=1)  # pages that a row and the one before it begin with
    rows, first = np.arange(len(tables)), np.r_[True, alike == 0]
    begins = np.flatnonzero((rows - np.maximum.accumulate(np.where(first, rows, 0))) % BUNDLE == 0)
    counts = np.diff(np.r_[begins, len(tables)])
    least = np.full(len(tables), tables.shape[1])
    least[:-1] = alike
    least[begins[1:] - 1] = tables.shape[1]  # a bundle's last row has nothing in common with what follows
    pages = np.where(counts >= FEWEST, np.minimum.reduceat(least, begins), 0)
    bundles = np.stack([begins, counts, pages], axis=1)[counts >= FEWEST]
    return bundles.astype(np.int32), np.repeat(pages, counts).astype(np.int32)


def draw(logits: Tensor, places: Tensor, seed: Tensor, sampling: Sampling) -> Drawn:
    """`ops.sample.draw_tokens` as `sampling` says."""
    temperature = max(sampling.temperature, LOWEST) if sampling.temperature else 0.0
    return draw_tokens(logits, places, seed, temperature, sampling.kept(logits))


class Readback:
    """Tokens on their way to the host, each batch of them with what the host does with it then.

    On a GPU they are used a step late: the next step begins before these have been read.
    """

    def __init__(self, device: torch.device):
        self.late = int(device.type == "cuda")
        self._waiting: deque[tuple[Callable[[list[int], list[float]], None], Drawn, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, drawn: Drawn, use: Callable[[list[int], list[float]], None]) -> None:
        copied = None
        if drawn[0].is_cuda:
            hosts = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in drawn]
            for host, each in zip(hosts, drawn, strict=True):
                host.copy_(each, non_blocking=True)
            drawn, copied = (hosts[0], hosts[1]), torch.cuda.Event()
            copied.record()
        self._waiting.append((use, drawn, copied))

    def settle(self, late: int = 0) -> None:
        """Use all but the last `late`."""
        while len(self._waiting) > late:
            use, (tokens, log_probs), copied = self._waiting.popleft()
            if copied is not None:
                copied.synchronize()
            use(tokens.tolist(), log_probs.tolist())
