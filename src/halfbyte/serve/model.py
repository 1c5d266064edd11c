"""The model that a server answers with: its adapters by name, prompts from requests, and the limits on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ..adapters import check_adapter_files, load_adapter
from ..chat import Conversation
from ..errors import ConfigError
from ..generation import Sampling
from ..generation.engine import context_length
from ..generation.text import Piece, continue_texts
from ..notices import notice
from ..runs.saved import Saved, find_adapter, load_saved
from .requests import ChatRequest, CompletionRequest, Message, Request, RequestError


@dataclass(frozen=True)
class Limits:
    """What a request may cost.

    Attributes:
        body_bytes: of a request's body.
        prompts: of one completion request; they are answered in one batch.
        prompt_tokens: of each prompt.
        max_tokens: new tokens of each prompt; also the default, as far as the model's context has room.
        seconds: from the request's arrival to the last token of its answer.
        queue: requests that may wait while one is answered.
    """

    body_bytes: int = 2**20
    prompts: int = 16
    prompt_tokens: int = 8192
    max_tokens: int = 2048
    seconds: float = 300.0
    queue: int = 16


@dataclass(frozen=True)
class Work:
    """A request ready to run."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    sampling: Sampling
    stops: Sequence[str]
    adapter: str | None

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class Served:
    """A loaded model and the names it answers to.

    Args:
        saved: the model; a PeftModel where there are adapters.
        names: the name in requests → PEFT's name of the adapter, None for the base.
    """

    def __init__(self, saved: Saved, names: Mapping[str, str | None], limits: Limits = Limits()):
        self.saved, self.names, self.limits = saved, dict(names), limits
        self.talk = Conversation(saved, Sampling())
        model: Any = saved.model
        self.context: int | None = context_length(model)
        self.vocabulary = model.get_input_embeddings().weight.shape[0]

    def prepare(self, request: Request) -> Work:
        """Tokens of the prompts, checked.

        Raises:
            RequestError: an unknown model, a prompt that cannot be read, or more than the limits or the context allow.
        """
        if request.model not in self.names:
            message = f"no model {request.model!r} here; there is {', '.join(self.names)}"
            raise RequestError(404, message, "model", "model_not_found")
        if isinstance(request, ChatRequest):
            field, prompts = "messages", [self._chat(request.messages)]
        else:
            assert isinstance(request, CompletionRequest)
            field, prompts = "prompt", self._plain(request.prompt)
        return Work(
            prompts,
            self._new_tokens(max(map(len, prompts)), request, field),
            Sampling(request.temperature, top_p=request.top_p, seed=request.seed),
            request.stop,
            self.names[request.model],
        )

    def answer(self, work: Work) -> Iterator[Piece]:
        """Pieces of the answers, as tokens come."""
        return continue_texts(
            self.saved.model,
            self.saved.tokenizer,
            work.prompts,
            max_new_tokens=work.max_new_tokens,
            sampling=work.sampling,
            ends=self.talk.stops,
            stops=work.stops,
            adapter=work.adapter,
        )

    def _chat(self, messages: Sequence[Message]) -> list[int]:
        tokenizer: Any = self.saved.tokenizer
        if self.talk.style != "template":
            if [message.role for message in messages] != ["user"]:
                reason = "this model has no chat template, so it takes one user message; see also /v1/completions"
                raise RequestError(400, f"messages: {reason}", "messages")
            return self.talk.prompt_ids(messages[0].content)
        turns = [message.model_dump() for message in messages]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise RequestError(400, f"messages: the model's chat template says: {error}", "messages") from None
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def _plain(self, prompts: list[str] | list[list[int]]) -> list[list[int]]:
        if len(prompts) > self.limits.prompts:
            message = f"{len(prompts)} prompts; this server takes {self.limits.prompts} at once"
            raise RequestError(400, f"prompt: {message}", "prompt")
        tokenizer: Any = self.saved.tokenizer
        found = [tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in prompts]
        for ids in found:
            if not ids:
                raise RequestError(400, "prompt: a text without tokens", "prompt")
            wrong = next((token for token in ids if not 0 <= token < self.vocabulary), None)
            if wrong is not None:
                message = f"token {wrong} is outside the model's vocabulary of {self.vocabulary}"
                raise RequestError(400, f"prompt: {message}", "prompt")
        return found

    def _new_tokens(self, longest: int, request: Request, field: str) -> int:
        asked, limits = request.new_tokens, self.limits
        if self.context is not None and longest + (asked or 1) > self.context:
            message = (
                f"the model's context is {self.context} tokens, and you asked for {longest + (asked or 1)}"
                f" ({longest} in {field}, {asked or 'at least 1'} to generate)"
            )
            raise RequestError(400, message, field, "context_length_exceeded")
        if longest > limits.prompt_tokens:
            message = f"{field}: {longest} tokens; this server takes {limits.prompt_tokens}"
            raise RequestError(400, message, field)
        if asked is not None and asked > limits.max_tokens:
            name = "max_tokens" if request.max_tokens == asked else "max_completion_tokens"
            raise RequestError(400, f"{name}: {asked}; this server generates {limits.max_tokens} at most", name)
        room = limits.max_tokens if self.context is None else self.context - longest
        return asked or min(limits.max_tokens, room)


def load(name: str, adapters: Mapping[str, str], limits: Limits = Limits(), trust_remote_code: bool = False) -> Served:
    """Load a run or a model, and further adapters of the same base.

    Args:
        name: a run's output_dir, an adapter, or a model. A run answers to its folder's name with its adapter, and to
            its base's name without.
        adapters: name in requests → folder of an adapter or a run.
        trust_remote_code: run the Python code that comes with the model; a run's own configuration does not count.

    Raises:
        CheckpointError: no adapter in a folder, a damaged one, or one made for another model.
        ConfigError: a name used twice.
    """
    found = {key: _adapter(path) for key, path in adapters.items()}
    saved = load_saved(name, [f"trust_remote_code={trust_remote_code}"])
    names: dict[str, str | None] = {_name(name): "default" if saved.place.adapter else None}
    if saved.place.adapter:
        names.setdefault(_name(saved.config.model_name_or_path), None)
    for key, folder in found.items():
        if key in names:
            raise ConfigError(f"--adapter {key}: the model has this name already", "choose another name")
        names[key] = f"adapter_{len(names)}"
        _attach(saved, folder, names[key])
    saved.model.eval()
    return Served(saved, names, limits)


def _name(place: str) -> str:
    return Path(place).resolve().name if Path(place).is_dir() else place


def _adapter(path: str) -> Path:
    folder = find_adapter(path)
    check_adapter_files(folder)
    return folder


def _attach(saved: Saved, folder: Path, name: Any) -> None:
    template = folder / "chat_template.jinja"
    if template.is_file() and template.read_text(encoding="utf-8") != saved.tokenizer.chat_template:
        notice(f"serve {folder}", f"{folder} was trained with another chat template; the server's own is used for it")
    saved.model = load_adapter(saved.model, folder, saved.config.model_name_or_path, name)
