"""What may be asked: OpenAI's request bodies, checked, and errors in OpenAI's shape."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

# Options that this server does not have, at the values that ask for nothing.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "response_format": {"type": "text"},
}


class RequestError(Exception):
    """A request that is refused or given up.

    Args:
        status: of HTTP.
        message: what is wrong, with the numbers.
        param: the field at fault.
        code: OpenAI's word for it, where there is one.
        kind: OpenAI's type of error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _neutral(key: str, value: Any) -> bool:
    ours = NEUTRAL.get(key)
    return ours is not None and (isinstance(value, bool), value) == (isinstance(ours, bool), ours)


def _content(value: Any) -> Any:
    """The text of a message: a string, or a list of OpenAI's text parts."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('only text is supported: a string, or parts {"type": "text", "text": "..."}')
    return "".join(part["text"] for part in value)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """OpenAI's four kinds of prompt as a list: a text, token ids, several texts, several lists of token ids."""
    several = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    texts = all(isinstance(one, str) and one for one in several)
    ids = all(isinstance(one, list) and one and all(type(item) is int for item in one) for one in several)
    if not (texts or ids):
        raise ValueError("give a text, a list of texts, token ids, or a list of lists of token ids; none of them empty")
    return several


class Strict(BaseModel):
    """No field unknown, no value converted; null counts as left out."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields
        return {key: v for key, v in data.items() if v is not None and (key in known or not _neutral(key, v))}


class Message(Strict):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]


class StreamOptions(Strict):
    include_usage: bool = False


class Request(Strict):
    """The fields that chats and completions share."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], BeforeValidator(_listed)] = Field(
        default=[], max_length=4
    )
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""  # OpenAI's name for the caller; not used

    @property
    def new_tokens(self) -> int | None:
        """The most tokens asked for."""
        return self.max_tokens


class ChatRequest(Request):
    """A body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Request):
    """A body of /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]


Kind = TypeVar("Kind", bound=Request)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """The request in `body`.

    Raises:
        RequestError: 400, naming the first field at fault.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = _spelled(first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = "this server does not have it"
        raise RequestError(400, f"{param or 'body'}: {reason}", param or None) from None


def _spelled(location: tuple[int | str, ...]) -> str:
    """messages[0].content"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
