"""Which rows run, and which pages hold their tokens: continuous batching, on the host alone.

Rows join and leave between two steps (iteration-level scheduling: Yu et al. 2022, "Orca", section 3.1). A page is taken
when a row's next token begins it, and read by as many rows as begin with its tokens (Kwon et al. 2023,
arXiv:2309.06180, section 4.4). Where pages run out, the youngest row goes back to the queue, to be read again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..ops.paged_attention import PAGE

BESIDE = 2  # seats that are no row's: seat 0 is nobody's, as page 0, and one is for a prompt that is kept
JOINED = 16  # of so many seats one may stay empty until others are, since reading a prompt takes a forward of its own


def pages_of(tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-tokens // PAGE)


class Pages:
    """The pages of a cache. Page 0 is nobody's: rows that only fill a batch up write to it.

    Args:
        count: of pages, page 0 included.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._readers = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free pages, for one reader."""
        assert count <= self.free, "who takes pages looks first"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._readers[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One reader more of each."""
        for page in pages:
            self._readers[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reader less of each; those that nobody reads are free."""
        for page in pages:
            self._readers[page] -= 1
            assert self._readers[page] >= 0, "a page is released once by each of its readers"
            if not self._readers[page]:
                self._free.append(page)


@dataclass(eq=False)
class Document:
    """Tokens to read at once: a prompt for all rows that begin with it, or all tokens of a row that had to wait.

    Attributes:
        seat: where the state behind it is kept, of models that have one.
        logits: [V] behind the last token, once it is read.
    """

    tokens: Sequence[int]
    pages: list[int]
    seat: int
    logits: Tensor | None = None


@dataclass(eq=False)
class Group:
    """The rows of one prompt.

    Attributes:
        key: stands for the prompt in the noise of its draws.
        waiting: rows that have not begun yet; the prompt is kept for them.
        document: the prompt, as long as it is kept.
    """

    key: int
    prompt: Sequence[int]
    waiting: int
    document: Document | None = None


@dataclass(eq=False)
class Row:
    """A completion under way.

    Attributes:
        generation: its number among those of its prompt.
        most: tokens that it may have.
        ids, log_probs: of the tokens that the host has read.
        ended: whether the last of them is a stop token.
        pages: of its tokens, those that it shares first.
        seat: where its state is kept; 0: it has none.
        length: tokens in them.
        drawn: tokens drawn, those included that the host has not read yet.
    """

    group: Group
    generation: int
    most: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended: bool = False
    pages: list[int] = field(default_factory=list)
    seat: int = 0
    length: int = 0
    drawn: int = 0

    @property
    def finished(self) -> bool:
        return self.ended or len(self.ids) == self.most

    @property
    def goes_on(self) -> bool:
        """Whether it takes part in the next step, as far as the host knows."""
        return not self.finished and self.drawn < self.most

    def add(self, token: int, log_prob: float, stops: set[int]) -> None:
        """A token that the host has read."""
        self.ids.append(token)
        self.log_probs.append(log_prob)
        self.ended = token in stops


@dataclass
class Admission:
    """What joins the batch.

    Attributes:
        documents: to read, in this order.
        starts: rows, and the document that each goes on from.
        copies: (from, to): the last page of a prompt, part full, for a row that will fill it up.
        states: (from, to): seats, of a prompt and of a row that goes on from its state.
    """

    documents: list[Document]
    starts: list[tuple[Row, Document]]
    copies: list[tuple[int, int]]
    states: list[tuple[int, int]]


class Schedule:
    """Rows on their way through the batch.

    Args:
        rows: in the order in which they begin; rows of a group one after another.
        pages: enough for any one of the rows by itself.
        seats: rows that may run at once; see `BESIDE`.
    """

    def __init__(self, rows: Sequence[Row], pages: Pages, seats: int):
        self.waiting, self.pages, self.seats = deque(rows), pages, seats
        self._empty = list(range(seats + BESIDE - 1, 0, -1))
        self.seated: list[Row] = []  # oldest first

    def admit(self, budget: int) -> Admission:
        """Let rows join as long as there are seats and pages; read at most about `budget` tokens of documents.

        While others run, rows wait until several can join: see `JOINED`.
        """
        found, empty = Admission([], [], [], []), self.seats - len(self.seated)
        if self.seated and empty < min(len(self.waiting), self.seats // JOINED):
            return found
        while self.waiting and len(self.seated) < self.seats:
            row = self.waiting[0]
            document = None if row.ids else row.group.document
            if document is None:
                tokens = [*row.group.prompt, *row.ids]
                read = sum(len(each.tokens) for each in found.documents)
                if (found.documents and read + len(tokens) > budget) or not self._room(pages_of(len(tokens))):
                    break
                document = Document(tokens, self.pages.take(pages_of(len(tokens))), self._empty.pop())
                found.documents.append(document)
                if not row.ids:
                    row.group.document = document
            elif not self._room(1):
                break
            self._seat(row, document, found)
        return found

    def _room(self, wanted: int) -> bool:
        """Whether there are so many free pages, and some beside them, lest rows join only to leave."""
        if self.seated:
            return self.pages.free >= wanted + 1 + len(self.seated) // 8
        while self.pages.free < wanted and self._drop_prompt():
            pass
        assert self.pages.free >= wanted, "there are pages for any one row"
        return True

    def _seat(self, row: Row, document: Document, found: Admission) -> None:
        """A seat for the first row of the queue; its tokens so far are the document's."""
        self.waiting.popleft()
        group, shared = row.group, document is row.group.document
        group.waiting -= not row.ids
        if shared and group.waiting and self._empty and (self.pages.free or not len(document.tokens) % PAGE):
            row.seat = self._empty.pop()
            found.states.append((document.seat, row.seat))
            full = len(document.tokens) // PAGE
            self.pages.share(document.pages[:full])
            row.pages = document.pages[:full]
            if len(document.tokens) % PAGE:
                row.pages += self.pages.take(1)
                found.copies.append((document.pages[full], row.pages[full]))
        else:  # nobody else needs the pages, or there is none for a copy: it gets them all
            row.pages, row.seat = document.pages, document.seat
            if shared:
                group.document = None
        row.length, row.drawn = len(document.tokens), len(row.ids) + 1
        self.seated.append(row)
        found.starts.append((row, document))

    def reserve(self, settled: bool) -> bool:
        """A page for each row whose next token begins one.

        Args:
            settled: whether the host has read all tokens that were drawn; else no row is sent back.

        Returns:
            False if pages are short and nothing was settled; to be called again then.
        """
        for row in list(self.seated):
            if not row.pages or not row.goes_on or row.length < len(row.pages) * PAGE:
                continue  # it was sent back, or needs none
            while row.pages and not self.pages.free:
                if self._drop_prompt():
                    continue
                if not settled:
                    return False
                self._send_back(self.seated[-1])
            if row.pages:
                row.pages += self.pages.take(1)
        return True

    def _drop_prompt(self) -> bool:
        """Forget a prompt that is kept for rows to come: it will be read again. False if there is none."""
        group = next((row.group for row in reversed(self.waiting) if row.group.document is not None), None)
        if group is None or group.document is None:
            return False
        self.pages.release(group.document.pages)
        self._empty.append(group.document.seat)
        group.document = None
        return True

    def _send_back(self, row: Row) -> None:
        self._leave(row)
        row.length, row.drawn = 0, len(row.ids)
        self.waiting.appendleft(row)

    def _leave(self, row: Row) -> None:
        self.seated.remove(row)
        self.pages.release(row.pages)
        self._empty.append(row.seat)
        row.pages, row.seat = [], 0

    def advance(self) -> list[Row]:
        """The rows of the next step; each has one token more in its pages from now on, and one more drawn."""
        rows = [row for row in self.seated if row.goes_on]
        for row in rows:
            row.length += 1
            row.drawn += 1
        return rows

    def add(self, row: Row, token: int, log_prob: float, stops: set[int]) -> None:
        """A token that the host has read; a row that is finished by it leaves."""
        row.add(token, log_prob, stops)
        if row.finished:
            self._leave(row)
