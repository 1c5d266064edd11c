"""What may be asked: OpenAI's request bodies, checked, and errors in OpenAI's shape."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ..reading import parse_json
from ..utils.errors import DataError
from ..utils.text import brief

# Fields that this server has nothing for and that change no answer: what is sent about cost and speed.
WITHOUT_EFFECT = {"audio", "prediction", "prompt_cache_options", "service_tier"}  # audio: with modalities
# Others, and their values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),  # of a message that was an answer
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
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


def _neutral(key: str, value: Any, body: dict[str, Any]) -> bool:
    """Whether the answer is the same without this field."""
    if key in WITHOUT_EFFECT:
        return True
    if key in ("tools", "functions") and body.get("tool_choice" if key == "tools" else "function_call") == "none":
        return True
    return any((isinstance(value, bool), value) == (isinstance(ours, bool), ours) for ours in NEUTRAL.get(key, ()))


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


def _bounded(value: Any) -> Any:
    """llama.cpp's clients write -1 for no bound."""
    return None if type(value) is int and value == -1 else value


def _biases(value: Any) -> Any:
    """What is added to the logits of tokens, by their ids; a bias of 0 asks for nothing."""
    if not isinstance(value, dict):
        return value
    asked = {key: bias for key, bias in value.items() if bias != 0 or isinstance(bias, bool)}
    wrong = next((key for key in asked if not (isinstance(key, str) and key.isascii() and key.isdigit())), None)
    if wrong is not None:
        raise ValueError(f"{brief(wrong)} is no token's id")
    return {int(key[:20]): float(bias) if type(bias) is int else bias for key, bias in asked.items()}


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
        return {key: v for key, v in data.items() if v is not None and (key in known or not _neutral(key, v, data))}


class Function(Strict):
    name: str
    arguments: str = ""


class ToolCall(Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: Function

    def turn(self) -> dict[str, Any]:
        """As chat templates take it: arguments as an object, where OpenAI has them as JSON text.

        Raises:
            DataError: they are not JSON, or no object.
        """
        arguments = parse_json(self.function.arguments or "{}", f"the arguments of {self.function.name}", DataError)
        if not isinstance(arguments, dict):
            raise DataError(f"the arguments of {self.function.name} are {brief(arguments)}, not an object")
        return {**self.model_dump(), "function": {"name": self.function.name, "arguments": arguments}}


class Message(Strict):
    """A turn. Which roles a model knows is for its template to say; see `data.chat.ChatTemplate.adapt_messages`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal)):
            raise ValueError("content: Field required")
        return self

    def turn(self) -> dict[str, Any]:
        """As training gives it to chat templates.

        Raises:
            DataError: the arguments of a tool call are not JSON.
        """
        roles = {"developer": "system", "function": "tool"}
        said: dict[str, Any] = {"role": roles.get(self.role, self.role), "content": self.content or self.refusal or ""}
        said |= self.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
        return said | ({"tool_calls": [call.turn() for call in self.tool_calls]} if self.tool_calls else {})


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # OpenAI's padding against eavesdroppers; a stream has none here


Length = Annotated[int | None, BeforeValidator(_bounded)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class Request(Strict):
    """The fields that chats and completions share. With 0 tokens to generate, an answer counts those of the prompt."""

    model: str
    max_tokens: Length = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    n: int = Field(1, ge=1)
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_biases)] = Field(default={}, max_length=1024)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], BeforeValidator(_listed)] = Field(
        default=[], max_length=4
    )
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # What OpenAI's clients tell about the caller; nothing here depends on it.
    user: str = ""
    metadata: Metadata = Field(default={}, max_length=16)
    safety_identifier: str = ""
    prompt_cache_key: str = ""

    @property
    def new_tokens(self) -> int | None:
        """The most tokens asked for."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """See `generation.text.continue_texts`."""
        raise NotImplementedError

    @property
    def drawn(self) -> int:
        """Answers that are drawn for each prompt, of which the best `n` are given."""
        return self.n


class ChatRequest(Request):
    """A body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Length = Field(None, ge=0)
    store: bool = False
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _asks_for_both(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: it needs logprobs: true")
        return self

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(Request):
    """A body of /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    logprobs: Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        None, ge=0, le=5
    )
    best_of: int = Field(0, ge=0)
    echo: bool = False
    suffix: str = ""

    @model_validator(mode="after")
    def _can_be_ranked(self) -> CompletionRequest:
        if 0 < self.best_of < self.n:
            raise ValueError(f"best_of: {self.best_of} answers, of which n: {self.n} are asked for")
        if self.stream and self.best_of > self.n:
            raise ValueError("best_of: answers are ranked when all are whole, so they cannot be streamed")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise ValueError("suffix: it needs prompts that are texts")
        return self

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def drawn(self) -> int:
        return max(self.best_of, self.n)


class UpdateRequest(Strict):
    """A body of /v1/chat/completions/ID: what is stored with a chat."""

    metadata: Metadata = Field(default={}, max_length=16)


Kind = TypeVar("Kind", bound=Strict)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """The request in `body`.

    Raises:
        RequestError: 400, naming the first field at fault.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param, reason = _spelled(first["loc"]), first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = "this server does not have it"
        elif first["type"] == "value_error" and ": " in reason and " " not in reason.partition(": ")[0]:
            field, _, reason = reason.partition(": ")  # of a rule about several fields
            param = f"{param}.{field}" if param else field
        raise RequestError(400, f"{param or 'body'}: {reason}", param or None) from None


def _spelled(location: tuple[int | str, ...]) -> str:
    """messages[0].content"""
    spelled = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return spelled.removeprefix(".")[:200]
