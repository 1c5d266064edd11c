"""The model that a server answers with: its adapters by name, prompts from requests, and the limits on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..chat import Conversation
from ..data.chat import ChatTemplate
from ..generation import Sampling
from ..generation.decoder import context_length
from ..generation.engine_cache import forget
from ..generation.infill import infilled
from ..generation.sampling import Penalties
from ..generation.text import Piece, Scored, continue_texts
from ..modeling.adapters import check_adapter_files, load_adapter
from ..reading import look, read_text
from ..runs.saved import Saved, find, find_adapter, load_saved
from ..runs.stop_tokens import data_report, known_stop_tokens
from ..utils.errors import CheckpointError, DataError, UsageError
from ..utils.notices import notice
from ..utils.text import brief
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
        prompts: one a row, each as often as answers to it are drawn.
        max_new_tokens: of each row.
        prompt_tokens: of all prompts, each counted once.
        likeliest: see `generation.text.continue_texts`.
        answers: wanted of each prompt.
        drawn: answers of each prompt, of which the best are given, by `best`.
        echoed: the prompt's own text, for each row, where it stands before the answer.
        scored: see `generation.text.continue_texts`.
    """

    prompts: Sequence[Sequence[int]]
    max_new_tokens: Sequence[int]
    prompt_tokens: int
    sampling: Sampling
    penalties: Penalties
    stops: Sequence[str]
    adapter: str | None
    likeliest: int | None
    answers: int = 1
    drawn: int = 1
    echoed: Sequence[str] | None = None
    scored: Sequence[tuple[int, int]] | None = None

    @property
    def rows(self) -> int:
        """Answers that are given."""
        return len(self.prompts) // self.drawn * self.answers

    def best(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces of the answers that are given: of those drawn for a prompt the ones whose tokens have the highest
        mean log-probability, best first."""
        if self.drawn == self.answers:
            return list(pieces)
        own: list[list[Piece]] = [[] for _ in self.prompts]
        for piece in pieces:
            own[piece.row].append(piece)
        found: list[Piece] = []
        for first in range(0, len(own), self.drawn):
            ranked = sorted(own[first : first + self.drawn], key=_mean_log_prob, reverse=True)
            for place, answer in enumerate(ranked[: self.answers], first // self.drawn * self.answers):
                found += [piece._replace(row=place, scored=self._shown(piece)) for piece in answer]
        return found

    def _shown(self, piece: Piece) -> Scored | None:
        return None if self.likeliest is None else piece.scored


def _mean_log_prob(answer: Sequence[Piece]) -> float:
    """Of an answer's tokens, but for one that ends it and those of the prompt; an empty answer is the last."""
    own = [piece.scored.log_prob for piece in answer if piece.tokens and piece.scored is not None]
    known = [each for each in own if each is not None]
    return sum(known) / len(known) if known else -math.inf


class Served:
    """A loaded model and the names it answers to.

    Args:
        saved: the model; a PeftModel where there are adapters.
        names: the name in requests → PEFT's name of the adapter, None for the base.
    """

    def __init__(self, saved: Saved, names: Mapping[str, str | None], limits: Limits = Limits()):
        self.saved, self.names, self.limits = saved, dict(names), limits
        self.talk = Conversation(saved, Sampling())
        self.ends: dict[str, list[int]] = {}  # by adapter, beside those of the model that was loaded
        self.template = ChatTemplate(saved.tokenizer) if self.talk.style == "template" else None
        model: Any = saved.model
        self.context: int | None = context_length(model)
        self.vocabulary = model.get_input_embeddings().weight.shape[0]

    def prepare(self, request: Request) -> Work:
        """Tokens of the prompts, checked.

        Raises:
            RequestError: an unknown model, a prompt that cannot be read, or more than the limits or the context allow.
        """
        names = dict(self.names)  # from which another thread may take one meanwhile
        if request.model not in names:
            message = f"no model {brief(request.model)} here; there is {', '.join(names)}"
            raise RequestError(404, message, "model", "model_not_found")
        echo: dict[str, Any] = {}
        if isinstance(request, ChatRequest):
            field, prompts = "messages", [self._chat(request.messages)]
        else:
            assert isinstance(request, CompletionRequest)
            field, (prompts, own) = "prompt", self._plain(request)
            echo = self._echo(request, prompts, own) if request.echo else {}
        several = request.drawn
        if len(prompts) * several > self.limits.answers:
            asked = f"{several} answers to {len(prompts)} prompts" if several > 1 else f"{len(prompts)} prompts"
            name = field if several == 1 else "n" if several == request.n else "best_of"
            raise RequestError(400, f"{name}: {asked}; this server gives {self.limits.answers} at once", name)
        outside = next((token for token in request.logit_bias if token >= self.vocabulary), None)
        if outside is not None:
            raise RequestError(400, f"logit_bias: {self._no_token(outside)}", "logit_bias")
        rows = [prompt for prompt in prompts for _ in range(several)]
        return Work(
            rows,
            self._new_tokens(list(map(len, rows)), request, field, least=int(bool(echo.get("scored")))),
            sum(map(len, prompts)),
            Sampling(request.temperature, top_p=max(request.top_p, LEAST_TOP_P), seed=request.seed),
            Penalties(request.frequency_penalty, request.presence_penalty, request.logit_bias),
            request.stop,
            names[request.model],
            request.likeliest,
            request.n,
            several,
            **{name: [each for each in values for _ in range(several)] for name, values in echo.items()},
        )

    def answer(self, work: Work) -> Iterator[Piece]:
        """Pieces of the answers, as tokens come.

        Raises:
            RequestError: the adapter was taken off while the request waited for its turn.
        """
        if work.adapter not in (None, *self.names.values()):
            message = "the model of this request was unloaded while it waited for its turn"
            raise RequestError(404, message, "model", "model_not_found")
        for row, text in enumerate(work.echoed or ()):
            yield Piece(row, text, None, tokens=0)
        if any(work.max_new_tokens):
            yield from self._continued(work, work.max_new_tokens)
            return
        if work.scored is not None:  # a token is drawn, which nobody asked for
            new = self._continued(work, [1] * len(work.prompts))
            yield from (piece for piece in new if not piece.tokens)
        yield from (Piece(row, "", "length", tokens=0) for row in range(len(work.prompts)))

    def _continued(self, work: Work, max_new_tokens: Sequence[int]) -> Iterator[Piece]:
        ranked = work.drawn > work.answers
        return continue_texts(
            self.saved.model,
            self.saved.tokenizer,
            work.prompts,
            max_new_tokens=max_new_tokens,
            sampling=work.sampling,
            ends=sorted({*self.talk.stops, *self.ends.get(work.adapter or "", ())}),
            stops=work.stops,
            adapter=work.adapter,
            likeliest=0 if ranked and work.likeliest is None else work.likeliest,
            penalties=work.penalties,
            scored=work.scored,
        )

    def take_off(self, name: str) -> None:
        """Serve an adapter no longer, and free its memory; its files stay.

        Raises:
            RequestError: there is none of that name, or it is the model itself.
        """
        if name not in self.names:
            raise RequestError(404, f"no model {brief(name)} here", "model", "model_not_found")
        adapter = self.names[name]
        if adapter is None:
            raise RequestError(403, f"{name} is the model that this server was started with; stop the server", "model")
        del self.names[name]
        model: Any = self.saved.model
        forget(model)
        model.delete_adapter(adapter)

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

    def _plain(self, request: CompletionRequest) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """The tokens of each prompt, and which of them are its own, where others say what follows it."""
        prompts = request.prompt
        if len(prompts) > self.limits.answers:  # before they are tokenized
            message = f"{len(prompts)} prompts; this server takes {self.limits.answers} at once"
            raise RequestError(400, f"prompt: {message}", "prompt")
        tokenizer: Any = self.saved.tokenizer
        if request.suffix:
            try:
                return infilled(tokenizer, [str(one) for one in prompts], request.suffix)
            except DataError as error:
                raise RequestError(400, f"suffix: {error.message}", "suffix") from None
        found = [tokenizer(one, verbose=False)["input_ids"] if isinstance(one, str) else one for one in prompts]
        for ids in found:
            wrong = next((token for token in ids if not 0 <= token < self.vocabulary), None)
            if wrong is not None:
                raise RequestError(400, f"prompt: {self._no_token(wrong)}", "prompt")
        return found, [(0, len(ids)) for ids in found]

    def _no_token(self, token: int) -> str:
        return f"token {brief(token)} is outside the model's vocabulary of {self.vocabulary}"

    def _echo(
        self, request: CompletionRequest, prompts: list[list[int]], own: list[tuple[int, int]]
    ) -> dict[str, list[Any]]:
        """`echoed` and `scored` of `Work`, a value each prompt."""
        tokenizer: Any = self.saved.tokenizer
        each = zip(request.prompt, prompts, strict=True)
        texts = [one if isinstance(one, str) else str(tokenizer.decode(ids)) for one, ids in each]
        return {"echoed": texts} | ({} if request.likeliest is None else {"scored": own})

    def _new_tokens(self, lengths: Sequence[int], request: Request, field: str, least: int = 0) -> list[int]:
        """The most tokens that each row gets, for prompts of these lengths; there must be room for `least`."""
        asked, limits, longest = request.new_tokens, self.limits, max(lengths)
        if min(lengths) == 0:
            raise RequestError(400, f"{field}: a text without tokens", field)
        if longest > limits.prompt_tokens:
            message = f"{field}: {longest} tokens; this server takes {limits.prompt_tokens}"
            raise RequestError(400, message, field)
        if asked is not None and asked > limits.max_tokens:
            name = "max_tokens" if request.max_tokens == asked else "max_completion_tokens"
            raise RequestError(400, f"{name}: {asked}; this server generates {limits.max_tokens} at most", name)
        least = 1 if asked is None else max(asked, least)
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
    ends: dict[str, list[int]] = {}
    saved = load_saved(name, [f"trust_remote_code={trust_remote_code}"])
    names: dict[str, str | None] = {_name(name): "default" if saved.place.adapter else None}
    if saved.place.adapter:
        names.setdefault(_name(saved.config.model_name_or_path), None)
    for key, folder in found.items():
        if key in names:
            raise UsageError(f"--adapter {key}: the model has this name already", "choose another name")
        names[key] = f"adapter_{len(names)}"
        _attach(saved, folder, names[key])
        ends[str(names[key])] = known_stop_tokens(data_report(find(adapters[key]).run_dir), saved.tokenizer)
    saved.model.eval()
    served = Served(saved, names, limits)
    served.ends |= ends
    return served


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
