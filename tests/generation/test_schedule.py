"""Continuous batching without a model: for any rows and any number of pages, each row finds its own tokens in its
pages, and no page is leaked."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.generation.batch import MIN_BUNDLE_ROWS, bundles_of
from halfbyte.generation.schedule import PAGE, RESERVED_SEATS, Group, Pages, Row, Schedule, page_count
from halfbyte.ops.paged_attention import BUNDLE

LONGEST, MOST = 3 * PAGE, 2 * PAGE


class Cache:
    """A model of the device: the token in each slot of each page; results arrive as late as a GPU's."""

    def __init__(self, schedule, pages, late):
        self.schedule, self.pages, self.late = schedule, pages, late
        self.slots = {}
        self.states = {}  # by seat: the tokens that formed the state
        self.unread = []
        self.sent_back = 0
        self.read = Counter()
        self.joined = []  # empty seats, and rows that took one, of each step

    def run(self, ends):
        """`ends` of a row: tokens after which it stops."""
        schedule, last = self.schedule, {}
        while schedule.waiting or schedule.seated:
            empty = schedule.seats - len(schedule.seated)
            found = schedule.admit(2 * LONGEST)
            self.joined.append((empty, len(found.starts)))
            for document in found.documents:
                self.read[tuple(document.tokens)] += 1
                self.states[document.seat] = list(document.tokens)
                for at, token in enumerate(document.tokens):
                    self.slots[document.pages[at // PAGE], at % PAGE] = token
            for source, target in found.copies:
                self.slots |= {(target, at): self.slots.get((source, at)) for at in range(PAGE)}
            for source, target in found.states:
                self.states[target] = list(self.states[source])
            for row, document in found.starts:
                assert row.length == len(document.tokens)
                last[row] = self.token(row, row.length)
                self.unread.append((row, last[row]))
            self.settle(ends, self.late)
            self.check()
            before = list(schedule.seated)
            if not schedule.reserve(settled=not self.unread):
                self.settle(ends, 0)
                assert schedule.reserve(settled=True)
            self.sent_back += sum(row not in schedule.seated and not row.finished for row in before)
            rows = schedule.advance()
            for row in rows:
                at = row.length - 1
                assert at // PAGE < len(row.pages)
                self.slots[row.pages[at // PAGE], at % PAGE] = last[row]
                self.states[row.seat].append(last[row])
                last[row] = self.token(row, row.length)
            stepped = [(row, last[row]) for row in rows]
            self.settle(ends, 0 if not self.late else len(self.unread))
            self.unread += stepped
            self.settle(ends, self.late if rows else 0)
            self.check()

    @staticmethod
    def token(row, position):
        """A row's token there: its own, so that a neighbour's would show."""
        return row.group.key, row.generation, position

    def settle(self, ends, late):
        while len(self.unread) > late:
            row, token = self.unread.pop(0)
            stops = {token} if len(row.ids) + 1 == ends[row] else set()
            if not row.finished:
                self.schedule.add(row, token, 0.0, stops)

    def check(self):
        schedule = self.schedule
        assert len(schedule.seated) <= schedule.seats
        readers = Counter(page for row in schedule.seated for page in row.pages)
        kept = {row.group: row.group.document for row in schedule.waiting if row.group.document is not None}
        readers.update(page for document in kept.values() for page in document.pages)
        assert 0 not in readers
        assert len(readers) + self.pages.free == self.pages.count - 1
        seats = [row.seat for row in schedule.seated] + [document.seat for document in kept.values()]
        assert len(set(seats)) == len(seats) <= schedule.seats + RESERVED_SEATS - 1
        assert all(0 < seat < schedule.seats + RESERVED_SEATS for seat in seats)
        for row in schedule.seated:
            assert row.length <= len(row.pages) * PAGE
            known = [*row.group.prompt, *row.ids][: row.length]
            assert self.states[row.seat][: len(known)] == known
            assert len(self.states[row.seat]) == row.length
            for at, token in enumerate(known):
                assert self.slots[row.pages[at // PAGE], at % PAGE] == token
            for page in row.pages[len(row.group.prompt) // PAGE :]:
                assert readers[page] == 1  # no row writes to a shared page
        self.check_bundles(schedule.seated)

    @staticmethod
    def check_bundles(rows):
        """Rows of a bundle start with the same pages and differ after them."""
        table = np.zeros((len(rows) + 2, 1 + max((len(row.pages) for row in rows), default=0)), dtype=np.int32)
        for line, row in zip(table, rows, strict=False):
            line[: len(row.pages)] = row.pages
        bundles, common = bundles_of(table)
        assert MIN_BUNDLE_ROWS * len(bundles) <= len(table)
        found = np.zeros_like(common)
        for begin, count, pages in bundles:
            assert MIN_BUNDLE_ROWS <= count <= BUNDLE
            assert pages > 0
            assert not found[begin : begin + count].any()
            found[begin : begin + count] = pages
            assert (table[begin : begin + count, :pages] == table[begin, :pages]).all()
            assert all(row.length >= pages * PAGE for row in rows[begin : begin + count])
        assert (found == common).all()


groups_of = st.lists(
    st.tuples(st.integers(1, LONGEST), st.lists(st.integers(1, MOST), min_size=1, max_size=6)), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=20)
@given(groups_of, st.integers(1, 9) | st.just(40), st.integers(0, 12), st.integers(0, 2), st.integers(1, MOST))
def test_rows_find_their_tokens_and_no_page_leaks(shapes, seats, spare, late, most):
    rows, ends = [], {}
    for key, (length, lengths) in enumerate(shapes):
        group = Group(key, [(key, "prompt", at) for at in range(length)], len(lengths))
        for generation, wanted in enumerate(lengths):
            rows.append(Row(group, generation, most))
            ends[rows[-1]] = wanted
    longest = max(page_count(len(row.group.prompt) + row.max_tokens) for row in rows)
    pages = Pages(longest + spare + 1)
    cache = Cache(Schedule(rows, pages, seats), pages, late)
    cache.run(ends)
    assert pages.free == pages.count - 1
    for row in rows:
        count = min(ends[row], most)
        begin = len(row.group.prompt)
        assert row.ids == [cache.token(row, begin + at) for at in range(count)]
        assert row.ended == (ends[row] <= most)


def test_rows_with_a_common_prefix_form_bundles():
    """Bundles have 4 to 16 rows; single rows, unshared pages and padding rows are in none."""
    table = np.zeros((35, 5), dtype=np.int32)
    table[:17, :3] = 3, 9, 0
    table[:17, 2] = 20 + np.arange(17)
    table[17:21] = (4, 5, 6, 50, 0), (4, 5, 6, 51, 52), (4, 5, 7, 53, 0), (4, 5, 7, 54, 55)
    table[21, :2] = 70, 71  # sent back between others of its group, and read again
    table[22:26] = [(4, 5, 60 + row, 0, 0) for row in range(4)]
    table[26:29] = [(8, 80 + row, 0, 0, 0) for row in range(3)]
    table[29:31, 0] = 90, 91
    bundles, common = bundles_of(table)
    assert bundles.tolist() == [[0, 16, 2], [17, 4, 2], [22, 4, 2]]
    assert common.tolist() == [2] * 16 + [0] + [2] * 4 + [0] + [2] * 4 + [0] * 9
    assert (bundles.dtype, common.dtype) == (np.int32, np.int32)
    assert [each.tolist() for each in bundles_of(table[:1])] == [[], [0]]


def test_a_prompt_is_prefilled_once_unless_pages_run_out():
    def run(count):
        group = Group(0, list(range(PAGE + 5)), 6)
        rows = [Row(group, generation, PAGE) for generation in range(6)]
        pages = Pages(count)
        cache = Cache(Schedule(rows, pages, 4), pages, 0)
        cache.run(dict.fromkeys(rows, PAGE))
        return cache

    plenty, few = run(40), run(7)
    assert plenty.read == {tuple(range(PAGE + 5)): 1}
    assert plenty.sent_back == 0
    assert few.sent_back > 0
    assert few.pages.free == 6
