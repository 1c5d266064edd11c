"""Continuous batching: which rows run, and which pages hold their tokens. Runs on the host, without tensors.

Rows join and leave between steps (iteration-level scheduling: Yu et al. 2022, "Orca", section 3.1). A row takes a page
when its next token needs one, and shares pages with rows that start with the same tokens (Kwon et al. 2023,
arXiv:2309.06180, section 4.4). When pages run out, the youngest row is preempted: it returns to the queue and is
prefilled again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..ops.paged_attention import PAGE

RESERVED_SEATS = 2  # in addition to the rows' seats: seat 0 for padding, and one for a cached prompt
JOIN_DIVISOR = 16  # rows join once 1/16 of the seats is empty, since each prefill is a forward of its own


def page_count(tokens: int) -> int:
    """Return the number of pages that `tokens` tokens take."""
    return -(-tokens // PAGE)


class Pages:
    """Reference-counted pages of a cache. Padding rows write to page 0, which is never assigned.

    Args:
        count: number of pages, including page 0.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._readers = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reader."""
        assert count <= self.free, "callers check `free` first"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._readers[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a reader to each page."""
        for page in pages:
            self._readers[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a reader from each page; a page without readers becomes free."""
        for page in pages:
            self._readers[page] -= 1
            assert self._readers[page] >= 0, "a page has more releases than readers"
            if not self._readers[page]:
                self._free.append(page)


@dataclass(eq=False)
class Document:
    """Tokens to prefill: a prompt shared by its rows, or all tokens of a preempted row.

    Attributes:
        seat: index of its recurrent state, in models that have one.
        logits: [V] after the last token, once prefilled.
    """

    tokens: Sequence[int]
    pages: list[int]
    seat: int
    logits: Tensor | None = None


@dataclass(eq=False)
class Group:
    """The rows of one prompt.

    Attributes:
        key: identifies the prompt in the sampling noise.
        waiting: number of rows that have not started.
        document: the prefilled prompt, cached until all rows have started.
        shift: of the positions of tokens after a prompt with images, see `images.ImagePrompt`.
    """

    key: int
    prompt: Sequence[int]
    waiting: int
    document: Document | None = None
    shift: int = 0


@dataclass(eq=False)
class Row:
    """A completion in progress.

    Attributes:
        generation: its index among the completions of its prompt.
        max_tokens: maximum number of tokens.
        ids, log_probs: of the tokens that the host has read.
        ended: whether the last token is a stop token.
        pages: of its tokens; shared pages come first.
        seat: index of its recurrent state; 0: none.
        length: number of tokens in its pages.
        drawn: number of tokens drawn, including those the host has not read yet.
    """

    group: Group
    generation: int
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended: bool = False
    pages: list[int] = field(default_factory=list)
    seat: int = 0
    length: int = 0
    drawn: int = 0

    @property
    def finished(self) -> bool:
        return self.ended or len(self.ids) == self.max_tokens

    @property
    def is_active(self) -> bool:
        """Whether the row takes part in the next step, as far as the host has read."""
        return not self.finished and self.drawn < self.max_tokens

    def add(self, token: int, log_prob: float, stops: set[int]) -> None:
        """Append a token that the host has read."""
        self.ids.append(token)
        self.log_probs.append(log_prob)
        self.ended = token in stops


@dataclass
class Admission:
    """Rows that join the batch, and the work needed before the next step.

    Attributes:
        documents: to prefill, in this order.
        starts: rows, each with the document that it continues.
        copies: (from, to) pages: a prompt's partly filled last page, copied for a row that appends to it.
        states: (from, to) seats: a prompt's recurrent state, copied for a row that continues it.
    """

    documents: list[Document]
    starts: list[tuple[Row, Document]]
    copies: list[tuple[int, int]]
    states: list[tuple[int, int]]


class Schedule:
    """The queue of rows and the rows that are running.

    Args:
        rows: in the order in which they start; rows of a group are adjacent.
        pages: enough for any single row.
        seats: maximum number of running rows; see `RESERVED_SEATS`.
    """

    def __init__(self, rows: Sequence[Row], pages: Pages, seats: int):
        self.waiting = deque(rows)
        self.pages = pages
        self.seats = seats
        self._empty = list(range(seats + RESERVED_SEATS - 1, 0, -1))
        self.seated: list[Row] = []  # oldest first

    def admit(self, budget: int) -> Admission:
        """Start waiting rows while there are seats and pages; prefill at most about `budget` tokens.

        While rows are running, others start only in groups: see `JOIN_DIVISOR`.
        """
        admission, empty = Admission([], [], [], []), self.seats - len(self.seated)
        if self.seated and empty < min(len(self.waiting), self.seats // JOIN_DIVISOR):
            return admission
        while self.waiting and len(self.seated) < self.seats:
            row = self.waiting[0]
            document = None if row.ids else row.group.document
            if document is None:
                tokens = [*row.group.prompt, *row.ids]
                read = sum(len(document.tokens) for document in admission.documents)
                if (admission.documents and read + len(tokens) > budget) or not self._has_room(page_count(len(tokens))):
                    break
                document = Document(tokens, self.pages.take(page_count(len(tokens))), self._empty.pop())
                admission.documents.append(document)
                if not row.ids:
                    row.group.document = document
            elif not self._has_room(1):
                break
            self._seat(row, document, admission)
        return admission

    def _has_room(self, count: int) -> bool:
        """Return whether `count` pages plus headroom are free; the headroom prevents immediate preemption."""
        if self.seated:
            return self.pages.free >= count + 1 + len(self.seated) // 8
        while self.pages.free < count and self._drop_prompt():
            pass
        assert self.pages.free >= count, "the pages hold any single row"
        return True

    def _seat(self, row: Row, document: Document, admission: Admission) -> None:
        """Start the first row of the queue; `document` holds its tokens so far."""
        self.waiting.popleft()
        group, shared = row.group, document is row.group.document
        group.waiting -= not row.ids
        if shared and group.waiting and self._empty and (self.pages.free or not len(document.tokens) % PAGE):
            row.seat = self._empty.pop()
            admission.states.append((document.seat, row.seat))
            full = len(document.tokens) // PAGE
            self.pages.share(document.pages[:full])
            row.pages = document.pages[:full]
            if len(document.tokens) % PAGE:
                row.pages += self.pages.take(1)
                admission.copies.append((document.pages[full], row.pages[full]))
        else:  # the last row of the prompt, or no page is free for a copy: the row takes over the document's pages
            row.pages, row.seat = document.pages, document.seat
            if shared:
                group.document = None
        row.length, row.drawn = len(document.tokens), len(row.ids) + 1
        self.seated.append(row)
        admission.starts.append((row, document))

    def reserve(self, settled: bool) -> bool:
        """Take a page for each row whose next token needs one.

        Args:
            settled: whether the host has read all drawn tokens; rows are preempted only then.

        Returns:
            False if pages are short and `settled` is false; call again once all tokens are read.
        """
        for row in list(self.seated):
            if not row.pages or not row.is_active or row.length < len(row.pages) * PAGE:
                continue  # preempted, or no new page needed
            while row.pages and not self.pages.free:
                if self._drop_prompt():
                    continue
                if not settled:
                    return False
                self.preempt(self.seated[-1])
            if row.pages:
                row.pages += self.pages.take(1)
        return True

    def _drop_prompt(self) -> bool:
        """Release a cached prompt of waiting rows, to be prefilled again later. Returns False if there is none."""
        group = next((row.group for row in reversed(self.waiting) if row.group.document is not None), None)
        if group is None or group.document is None:
            return False
        self.pages.release(group.document.pages)
        self._empty.append(group.document.seat)
        group.document = None
        return True

    def preempt(self, row: Row) -> None:
        """Return a running row to the front of the queue, to be prefilled again later."""
        self._release(row)
        row.length = 0
        row.drawn = len(row.ids)
        self.waiting.appendleft(row)

    def _release(self, row: Row) -> None:
        self.seated.remove(row)
        self.pages.release(row.pages)
        self._empty.append(row.seat)
        row.pages, row.seat = [], 0

    def advance(self) -> list[Row]:
        """Return the rows of the next step, and count its token in their `length` and `drawn`."""
        rows = [row for row in self.seated if row.is_active]
        for row in rows:
            row.length += 1
            row.drawn += 1
        return rows

    def add(self, row: Row, token: int, log_prob: float, stops: set[int]) -> None:
        """Append a token that the host has read; a finished row leaves the batch."""
        row.add(token, log_prob, stops)
        if row.finished:
            self._release(row)
