"""Results that an object holds."""

import gc
import weakref

from halfbyte.utils.caching import cached_method


class Counter:
    def __init__(self):
        self.calls = []

    @cached_method
    def double(self, number):
        self.calls.append(number)
        return 2 * number


def test_each_object_computes_each_result_once():
    first, second = Counter(), Counter()
    assert [first.double(3), first.double(4), first.double(3), second.double(3)] == [6, 8, 6, 6]
    assert (first.calls, second.calls) == ([3, 4], [3])


def test_an_object_is_freed_with_its_results():
    counter = Counter()
    counter.double(3)
    reference = weakref.ref(counter)
    gc.disable()
    try:
        del counter
        assert reference() is None
    finally:
        gc.enable()
