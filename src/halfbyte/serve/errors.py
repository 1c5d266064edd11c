"""Errors in OpenAI's format. Imports no torch, like `guard` and `protocol`, which the board shares."""

from __future__ import annotations


class RequestError(Exception):
    """A request that is refused or aborted.

    Args:
        status: HTTP status.
        message: the problem, with its numbers.
        param: the invalid field.
        code: OpenAI's error code, if there is one.
        error_type: OpenAI's error type.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        error_type: str = "invalid_request_error",
    ):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": code}}
