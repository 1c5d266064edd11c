"""The model that a server answers with: its adapters by name, prompts from requests, and the limits on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..adapters import check_adapter_files, load_adapter
from ..chat import Conversation
from ..data.chat import ChatTemplate
from ..errors import CheckpointError, DataError, UsageError
from ..generation import Sampling
from ..generation.decoder import context_length
from ..generation.text import Piece, continue_texts
from ..notices import notice
from ..reading import look, read_text
from ..runs.saved import Saved, find_adapter, load_saved
from ..words import brief
from .requests import ChatRequest, CompletionRequest, Message, Request, RequestError

LEAST_TOP_P = 1e-9  # OpenAI's 0: the likeliest token alone


@dataclass(frozen=True)
class Limits:
    """What a request may cost.

    Attributes:
        body_bytes: of a request's body.
        body_seconds: from the request's arrival to the end of its body.
        answers: of one request, prompts times `n`; they are given in one batch.
        prompt_tokens: of each prompt.
        max_tokens: new tokens of each prompt; also the default, as far as the model's context has room.
        seconds: from the request's arrival to the last token of its answer.
        queue: requests that may wait while one is answered.
    """

    body_bytes: int = 2**20
    body_seconds: float = 30.0
    answers: int = 16
    prompt_tokens: int = 8192
    max_tokens: int = 2048
    seconds: float = 300.0
    queue: int = 16


@dataclass(frozen=True)
class Work:
    """A request ready to run.

    Attributes:
        prompts: one a row, each as often as answers to it are wanted.
        max_new_tokens: of each row.
        prompt_tokens: of all prompts, each counted once.
        likeliest: see `generation.text.continue_texts`.
    """

    prompts: Sequence[Sequence[int]]
    max_new_tokens: Sequence[int]
    prompt_tokens: int
    sampling: Sampling
    stops: Sequence[str]
    adapter: str | None
    likeliest: int | None


class Served:
    """A loaded model and the names it answers to.

    Args:
        saved: the model; a PeftModel where there are adapters.
        names: the name in requests → PEFT's name of the adapter, None for the base.
    """

    def __init__(self, saved: Saved, names: Mapping[str, str | None], limits: Limits = Limits()):
        self.saved, self.names, self.limits = saved, dict(names), limits
        self.talk = Conversation(saved, Sampling())
        self.template = ChatTemplate(saved.tokenizer) if self.talk.style == "template" else None
        model: Any = saved.model
        self.context: int | None = context_length(model)
        self.vocabulary = model.get_input_embeddings().weight.shape[0]

    def prepare(self, request: Request) -> Work:
        """Tokens of the prompts, checked.

        Raises:
            RequestError: an unknown model, a prompt that cannot be read, or more than the limits or the context allow.
        """
        if request.model not in self.names:
            message = f"no model {brief(request.model)} here; there is {', '.join(self.names)}"
            raise RequestError(404, message, "model", "model_not_found")
        if isinstance(request, ChatRequest):
            field, prompts = "messages", [self._chat(request.messages)]
        else:
            assert isinstance(request, CompletionRequest)
            field, prompts = "prompt", self._plain(request.prompt)
        if len(prompts) * request.n > self.limits.answers:
            asked = f"{request.n} answers to {len(prompts)} prompts" if request.n > 1 else f"{len(prompts)} prompts"
            name = "n" if request.n > 1 else field
            raise RequestError(400, f"{name}: {asked}; this server gives {self.limits.answers} at once", name)
        rows = [prompt for prompt in prompts for _ in range(request.n)]
        return Work(
            rows,
            self._new_tokens(list(map(len, rows)), request, field),
            sum(map(len, prompts)),
            Sampling(request.temperature, top_p=max(request.top_p, LEAST_TOP_P), seed=request.seed),
            request.stop,
            self.names[request.model],
            request.likeliest,
        )

    def answer(self, work: Work) -> Iterator[Piece]:
        """Pieces of the answers, as tokens come."""
        if not any(work.max_new_tokens):
            return (Piece(row, "", "length", tokens=0) for row in range(len(work.prompts)))
        return continue_texts(
            self.saved.model,
            self.saved.tokenizer,
            work.prompts,
            max_new_tokens=work.max_new_tokens,
            sampling=work.sampling,
            ends=self.talk.stops,
            stops=work.stops,
            adapter=work.adapter,
            likeliest=work.likeliest,
        )

    def _chat(self, messages: Sequence[Message]) -> list[int]:
        tokenizer: Any = self.saved.tokenizer
        if self.template is None:
            if [message.role for message in messages] != ["user"]:
                reason = "this model has no chat template, so it takes one user message; see also /v1/completions"
                raise RequestError(400, f"messages: {reason}", "messages")
            return self.talk.prompt_ids(messages[0].content or "")
        try:
            turns, _ = self.template.understood([message.turn() for message in messages])
            text = self.talk.render(turns)
        except DataError as error:
            raise RequestError(400, f"messages: {error.message}", "messages") from None
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _plain(self, prompts: list[str] | list[list[int]]) -> list[list[int]]:
        if len(prompts) > self.limits.answers:  # before they are tokenized
            message = f"{len(prompts)} prompts; this server takes {self.limits.answers} at once"
            raise RequestError(400, f"prompt: {message}", "prompt")
        tokenizer: Any = self.saved.tokenizer
        found = [tokenizer(one, verbose=False)["input_ids"] if isinstance(one, str) else one for one in prompts]
        for ids in found:
            wrong = next((token for token in ids if not 0 <= token < self.vocabulary), None)
            if wrong is not None:
                message = f"token {brief(wrong)} is outside the model's vocabulary of {self.vocabulary}"
                raise RequestError(400, f"prompt: {message}", "prompt")
        return found

    def _new_tokens(self, lengths: Sequence[int], request: Request, field: str) -> list[int]:
        """The most tokens that each row gets, for prompts of these lengths."""
        asked, limits, longest = request.new_tokens, self.limits, max(lengths)
        if min(lengths) == 0:
            raise RequestError(400, f"{field}: a text without tokens", field)
        if longest > limits.prompt_tokens:
            message = f"{field}: {longest} tokens; this server takes {limits.prompt_tokens}"
            raise RequestError(400, message, field)
        if asked is not None and asked > limits.max_tokens:
            name = "max_tokens" if request.max_tokens == asked else "max_completion_tokens"
            raise RequestError(400, f"{name}: {asked}; this server generates {limits.max_tokens} at most", name)
        least = 1 if asked is None else asked
        if self.context is not None and longest + least > self.context:
            message = (
                f"the model's context is {self.context} tokens, and you asked for {longest + least}"
                f" ({longest} in {field}, {'at least 1' if asked is None else asked} to generate)"
            )
            raise RequestError(400, message, field, "context_length_exceeded")
        most = limits.max_tokens if asked is None else asked
        return [most if self.context is None else min(most, self.context - length) for length in lengths]


def load(name: str, adapters: Mapping[str, str], limits: Limits = Limits(), trust_remote_code: bool = False) -> Served:
    """Load a run or a model, and further adapters of the same base.

    Args:
        name: a run's output_dir, an adapter, or a model. A run answers to its folder's name with its adapter, and to
            its base's name without.
        adapters: name in requests → folder of an adapter or a run.
        trust_remote_code: run the Python code that comes with the model; a run's own configuration does not count.

    Raises:
        CheckpointError: no adapter in a folder, a damaged one, or one made for another model.
        UsageError: a name used twice.
    """
    found = {key: _adapter(path) for key, path in adapters.items()}
    saved = load_saved(name, [f"trust_remote_code={trust_remote_code}"])
    names: dict[str, str | None] = {_name(name): "default" if saved.place.adapter else None}
    if saved.place.adapter:
        names.setdefault(_name(saved.config.model_name_or_path), None)
    for key, folder in found.items():
        if key in names:
            raise UsageError(f"--adapter {key}: the model has this name already", "choose another name")
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
    path = folder / "chat_template.jinja"
    own = read_text(path, CheckpointError, "save the adapter again") if look(path, CheckpointError) else None
    if own is not None and own != saved.tokenizer.chat_template:
        notice(f"serve {folder}", f"{folder} was trained with another chat template; the server's own is used for it")
    saved.model = load_adapter(saved.model, folder, saved.config.model_name_or_path, name)
