"""Continuous batching without a model: whatever rows come, and however few pages there are, each row finds its own
tokens in its pages, and at the end no page is missing."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.generation.schedule import PAGE, Group, Pages, Row, Schedule, pages_of

LONGEST, MOST = 3 * PAGE, 2 * PAGE


class Cache:
    """What the device would hold: the token in each slot of each page; every step as late as a GPU's."""

    def __init__(self, schedule, pages, late):
        self.schedule, self.pages, self.late = schedule, pages, late
        self.slots = {}
        self.unread = []
        self.sent_back = 0
        self.read = Counter()

    def run(self, ends):
        """`ends` of a row: tokens after which it stops."""
        schedule, last = self.schedule, {}
        while schedule.waiting or schedule.seated:
            found = schedule.admit(2 * LONGEST)
            for document in found.documents:
                self.read[tuple(document.tokens)] += 1
                for at, token in enumerate(document.tokens):
                    self.slots[document.pages[at // PAGE], at % PAGE] = token
            for source, target in found.copies:
                self.slots |= {(target, at): self.slots.get((source, at)) for at in range(PAGE)}
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
        for row in schedule.seated:
            assert row.length <= len(row.pages) * PAGE
            known = [*row.group.prompt, *row.ids][: row.length]
            for at, token in enumerate(known):
                assert self.slots[row.pages[at // PAGE], at % PAGE] == token
            for page in row.pages[len(row.group.prompt) // PAGE :]:
                assert readers[page] == 1  # nobody writes to a page that somebody else reads


groups_of = st.lists(
    st.tuples(st.integers(1, LONGEST), st.lists(st.integers(1, MOST), min_size=1, max_size=5)), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=150)
@given(groups_of, st.integers(1, 9), st.integers(0, 12), st.integers(0, 2), st.integers(1, MOST))
def test_every_row_finds_its_tokens_and_no_page_leaks(shapes, seats, spare, late, most):
    rows, ends = [], {}
    for key, (length, lengths) in enumerate(shapes):
        group = Group(key, [(key, "prompt", at) for at in range(length)], len(lengths))
        for generation, wanted in enumerate(lengths):
            rows.append(Row(group, generation, most))
            ends[rows[-1]] = wanted
    longest = max(pages_of(len(row.group.prompt) + row.most) for row in rows)
    pages = Pages(longest + spare + 1)
    cache = Cache(Schedule(rows, pages, seats), pages, late)
    cache.run(ends)
    assert pages.free == pages.count - 1
    for row in rows:
        count = min(ends[row], most)
        begin = len(row.group.prompt)
        assert row.ids == [cache.token(row, begin + at) for at in range(count)]
        assert row.ended == (ends[row] <= most)


def test_a_prompt_is_read_once_for_all_rows_and_again_only_where_pages_are_short():
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
