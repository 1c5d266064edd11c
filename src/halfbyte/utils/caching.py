"""Caches with the lifetime of their objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def cached_method(method: Method) -> Method:
    """Decorate a method of positional, hashable arguments to compute each result once per object.

    The object holds the results, so both are freed together; `functools.cache` would keep every object alive.
    """
    attribute = f"_results_of_{method.__name__}"

    @functools.wraps(method)
    def cached(self: Any, *arguments: Hashable) -> Any:
        results: dict[tuple[Hashable, ...], Any] = vars(self).setdefault(attribute, {})
        if arguments not in results:
            results[arguments] = method(self, *arguments)
        return results[arguments]

    return cast(Method, cached)
