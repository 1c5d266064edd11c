"""OpenAI's request bodies and their validation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ..data.images import DATA_URL
from ..data.images import ROLES as IMAGE_ROLES
from ..generation.sampling import REPETITION_PENALTIES
from ..reading import parse_json
from ..utils.errors import DataError
from ..utils.text import brief
from .errors import RequestError

# Fields about cost and speed, which never change an answer.
IGNORED_FIELDS = {"audio", "prediction", "prompt_cache_options", "service_tier"}  # audio comes with modalities
# Unsupported fields, and the values that request nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),  # present in messages returned by OpenAI
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
}


def _no_effect(key: str, value: Any, body: dict[str, Any]) -> bool:
    """Return whether the answer is the same without this field."""
    if key in IGNORED_FIELDS:
        return True
    if key in ("tools", "functions") and body.get("tool_choice" if key == "tools" else "function_call") == "none":
        return True
    return any(
        (isinstance(value, bool), value) == (isinstance(neutral, bool), neutral) for neutral in NEUTRAL.get(key, ())
    )


def _content(value: Any) -> Any:
    """Return the content of a message: a string, or with images a list of text parts and `{"type", "image"}` parts.

    OpenAI's `image_url` parts hold a `data:` URL; its `detail` may be auto or high, since images are not scaled down
    further than the model's processor does.
    """
    if not isinstance(value, list):
        return value
    parts = [_part(part) for part in value]
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind != "image_url":
        raise ValueError(
            'only text and images are supported: a string, or parts {"type": "text", "text": "..."} and'
            ' {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        )
    image_url = part.get("image_url")
    url, detail = (image_url.get("url"), image_url.get("detail")) if isinstance(image_url, dict) else (image_url, None)
    if not isinstance(url, str):
        raise ValueError('an image_url part has no text as its url: {"image_url": {"url": "data:..."}}')
    if not DATA_URL.match(url):
        raise ValueError(f"this server downloads no images; send a data: URL with base64, not {brief(url)}")
    if detail not in (None, "auto", "high"):
        raise ValueError(f"detail {brief(detail)}: this server supports auto and high; scale the image down instead")
    return {"type": "image", "image": url}


def _biases(value: Any) -> Any:
    """Parse logit_bias (token id → number added to its logit); a bias of 0 is dropped."""
    if not isinstance(value, dict):
        return value
    biases = {key: bias for key, bias in value.items() if bias != 0 or isinstance(bias, bool)}
    wrong = next((key for key in biases if not (isinstance(key, str) and key.isascii() and key.isdigit())), None)
    if wrong is not None:
        raise ValueError(f"{brief(wrong)} is not a token id")
    return {int(key[:20]): float(bias) if type(bias) is int else bias for key, bias in biases.items()}


def _prompts(value: Any) -> Any:
    """Return OpenAI's four kinds of prompt as a list: a text, token ids, several texts, several lists of ids."""
    several = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    texts = all(isinstance(prompt, str) and prompt for prompt in several)
    ids = all(isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt) for prompt in several)
    if not (texts or ids):
        raise ValueError("give a text, a list of texts, token ids, or a list of lists of token ids; none of them empty")
    return several


class Strict(BaseModel):
    """A model without unknown fields or type conversion; null counts as unset."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        return {key: v for key, v in data.items() if v is not None and (key in fields or not _no_effect(key, v, data))}


class Function(Strict):
    name: str
    arguments: str = ""


class ToolCall(Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: Function

    def turn(self) -> dict[str, Any]:
        """Return the call as chat templates expect it: arguments as an object instead of JSON text.

        Raises:
            DataError: the arguments are not JSON, or not an object.
        """
        arguments = parse_json(self.function.arguments or "{}", f"the arguments of {self.function.name}", DataError)
        if not isinstance(arguments, dict):
            raise DataError(f"the arguments of {self.function.name} are {brief(arguments)}, not an object")
        return {**self.model_dump(), "function": {"name": self.function.name, "arguments": arguments}}


class Message(Strict):
    """A message. The chat template decides which roles it supports; see `data.chat.ChatTemplate.adapt_messages`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[dict[str, Any]] | None, BeforeValidator(_content)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal)):
            raise ValueError("content: Field required")
        if isinstance(self.content, list) and self.role not in IMAGE_ROLES:
            raise ValueError(f"content: images belong to messages of role {' or '.join(IMAGE_ROLES)}")
        return self

    def turn(self) -> dict[str, Any]:
        """Return the message as training passes it to chat templates.

        Raises:
            DataError: the arguments of a tool call are not JSON.
        """
        roles = {"developer": "system", "function": "tool"}
        role, content = roles.get(self.role, self.role), self.content or self.refusal or ""
        fields: dict[str, Any] = {"role": role, "content": content}
        fields |= self.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
        return fields | ({"tool_calls": [call.turn() for call in self.tool_calls]} if self.tool_calls else {})


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # OpenAI's padding of streams; accepted without effect


class JsonSchema(Strict):
    """OpenAI's `json_schema`. Answers always follow the schema, with and without `strict`."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    content: dict[str, Any] = Field(alias="schema")  # pydantic's models have another `schema`
    description: str = ""
    strict: bool = False


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema: Field required")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError(f"json_schema: it needs type: json_schema, and type is {self.type}")
        return self


# Clients of llama.cpp and vLLM send -1 for no limit.
Length = Annotated[int | None, BeforeValidator(lambda value: None if type(value) is int and value == -1 else value)]
StopSequence = Annotated[str, Field(min_length=1, max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class Request(Strict):
    """Fields of both chats and completions. With 0 tokens to generate, the response only counts the prompt's tokens."""

    model: str
    max_tokens: Length = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: Length = Field(None, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    response_format: ResponseFormat = ResponseFormat(type="text")
    n: int = Field(1, ge=1)
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_biases)] = Field(default={}, max_length=1024)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[StopSequence], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = (
        Field(default=[], max_length=4)
    )
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # Metadata about the caller, accepted without effect.
    user: str = ""
    metadata: Metadata = Field(default={}, max_length=16)
    safety_identifier: str = ""
    prompt_cache_key: str = ""

    @property
    def new_tokens(self) -> int | None:
        """Maximum number of new tokens requested."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """Number of most likely tokens to report; see `generation.text.continue_texts`."""
        raise NotImplementedError

    @property
    def samples(self) -> int:
        """Answers to draw for each prompt, of which the best `n` are returned."""
        return self.n


class ChatRequest(Request):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_tokens: Length = Field(None, ge=0)
    store: bool = False  # accepted without effect: no chat is stored
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
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
    """The body of /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    logprobs: Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        None, ge=0, le=5
    )
    best_of: int = Field(0, ge=0)
    echo: bool = False

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if 0 < self.best_of < self.n:
            raise ValueError(f"best_of: {self.best_of} is less than n: {self.n}")
        if self.stream and self.best_of > self.n:
            raise ValueError("best_of: answers are ranked when all are complete, so they cannot be streamed")
        return self

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def samples(self) -> int:
        return max(self.best_of, self.n)


Parsed = TypeVar("Parsed", bound=Strict)


def parse(request_type: type[Parsed], body: bytes) -> Parsed:
    """Parse `body` as a request.

    Raises:
        RequestError: 400, naming the first invalid field.
    """
    try:
        return request_type.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])
        param = path.removeprefix(".")[:200]  # such as "messages[0].content"
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = "this server does not support it"
        elif first["type"] == "value_error" and ": " in reason and " " not in reason.partition(": ")[0]:
            field, _, reason = reason.partition(": ")  # set by validators of several fields
            param = f"{param}.{field}" if param else field
        raise RequestError(400, f"{param or 'body'}: {reason}", param or None) from None
