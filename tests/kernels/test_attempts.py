"""Kernels that may not compile here."""

from halfbyte import notices
from halfbyte.kernels.cuda import Attempts
from halfbyte.kernels.native import BuildError


def test_what_does_not_compile_is_said_once_and_not_tried_again():
    notices.forget()
    attempt, calls = Attempts("a-kernel", "something slower runs"), []

    def product(x, *, term):
        calls.append(x)
        if x > 1:
            raise BuildError("no NVRTC")
        return x + term

    assert [attempt(product, x, term=10) for x in (0, 1, 2, 1)] == [10, 11, None, None]
    assert calls == [0, 1, 2]
    assert attempt.refused
    assert notices.said()["a-kernel"] == "no NVRTC; something slower runs"
