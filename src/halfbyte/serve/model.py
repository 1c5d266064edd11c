"""The served model: adapters by name, prompts from requests, and limits on requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..adapters.lora import check_adapter_files, load_adapter
from ..data.chat import ChatTemplate
from ..data.formats import image_parts
from ..data.images import MOST_PIXELS, ImageSource, size_of
from ..generation import Grammar, Sampling
from ..generation.adapters import check_kinds
from ..generation.decoder import context_length
from ..generation.engine import forget
from ..generation.images import Columns
from ..generation.sampling import Penalties
from ..generation.text import Piece, continue_texts
from ..loading.load import read_chat_template
from ..modeling.rope_scaling import saved_rope
from ..reading import look
from ..runs.saved import Saved, find, find_adapter, load_saved, saved_config
from ..runs.stop_tokens import data_report, known_stop_tokens
from ..utils.errors import CheckpointError, ConfigError, DataError, ModelError, UsageError
from ..utils.notices import notice
from ..utils.text import brief
from .conversation import Conversation, Prompt, StoredImage
from .errors import RequestError
from .requests import ChatRequest, CompletionRequest, Message, Request, ResponseFormat

LEAST_TOP_P = 1e-9  # used for OpenAI's top_p: 0, which takes the most likely token


@dataclass(frozen=True)
class Limits:
    """Limits on a request.

    Attributes:
        body_bytes: size of the body, if the model reads text only.
        image_body_bytes: size of the body, if the model reads images.
        images: per request.
        image_pixels: of all images of a request, before they are scaled; checked before they are decoded.
        body_seconds: from the request's arrival to the end of its body.
        answers: prompts times `n` of one request, which form one batch.
        prompt_tokens: per prompt.
        max_tokens: new tokens per prompt; also the default, within the model's context.
        seconds: from the request's arrival to the last token of its answer.
        queue: requests that may be queued while one runs.
    """

    body_bytes: int = 2**20
    image_body_bytes: int = 2**25
    images: int = 16
    image_pixels: int = MOST_PIXELS
    body_seconds: float = 30.0
    answers: int = 16
    prompt_tokens: int = 8192
    max_tokens: int = 2048
    seconds: float = 300.0
    queue: int = 16


@dataclass(frozen=True)
class PreparedRequest:
    """A request that is ready to run.

    Attributes:
        prompts: one per row; each prompt is repeated `samples` times.
        max_new_tokens: per row.
        prompt_tokens: of all prompts, each counted once.
        likeliest, scored: see `generation.text.continue_texts`.
        answers: number to return for each prompt.
        samples: number to draw for each prompt; `best` selects among them.
        echoed: per row, the prompt's text to return before the answer; empty without echo.
        grammar: of the answers, without those texts; None for any text.
        images: the model's inputs for the images of all prompts; None: they have none.
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
    samples: int = 1
    echoed: Sequence[str] = ()
    scored: bool = False
    grammar: Grammar | None = None
    images: Columns | None = None

    @property
    def rows(self) -> int:
        """Number of answers to return."""
        return len(self.prompts) // self.samples * self.answers

    def best(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Select each prompt's answers with the highest mean log-probability per token, best first."""
        if self.samples == self.answers:
            return list(pieces)
        by_row: list[list[Piece]] = [[] for _ in self.prompts]
        for piece in pieces:
            by_row[piece.row].append(piece)
        selected: list[Piece] = []
        for first in range(0, len(by_row), self.samples):
            ranked = sorted(by_row[first : first + self.samples], key=_mean_log_prob, reverse=True)
            for row, answer in enumerate(ranked[: self.answers], first // self.samples * self.answers):
                for piece in answer:
                    scored = None if self.likeliest is None else piece.scored
                    selected.append(piece._replace(row=row, scored=scored))
        return selected


def _mean_log_prob(answer: Sequence[Piece]) -> float:
    """Return the mean over an answer's new tokens without an end token; -inf for an empty answer."""
    scores = [piece.scored for piece in answer if piece.tokens and piece.scored is not None]
    log_probs = [score.log_prob for score in scores if score.log_prob is not None]
    return sum(log_probs) / len(log_probs) if log_probs else -math.inf


class Served:
    """A loaded model and its names.

    Args:
        saved: the model; a PeftModel if there are adapters.
        names: name in requests → PEFT's adapter name, or None for the base.
        kv_cache: as in `generation.generate`.
    """

    def __init__(
        self, saved: Saved, names: Mapping[str, str | None], limits: Limits = Limits(), kv_cache: str = "auto"
    ):
        self.saved = saved
        self.kv_cache = kv_cache
        self.names = dict(names)
        self.limits = limits
        self.conversation = Conversation(saved, Sampling())
        self.ends: dict[str, list[int]] = {}  # per adapter, in addition to the loaded model's
        self.template = ChatTemplate(saved.tokenizer) if self.conversation.style == "template" else None
        model: Any = saved.model
        self.context: int | None = context_length(model)
        self.vocabulary = model.get_input_embeddings().weight.shape[0]

    def prepare(self, request: Request) -> PreparedRequest:
        """Validate a request and tokenize its prompts.

        Raises:
            RequestError: an unknown model, an invalid prompt, or more than the limits or the context allow.
        """
        names = dict(self.names)  # another thread may unload an adapter meanwhile
        if request.model not in names:
            message = f"no model {brief(request.model)}; available: {', '.join(names)}"
            raise RequestError(404, message, "model", "model_not_found")
        echoed: list[str] = []
        images = None
        if isinstance(request, ChatRequest):
            field, prompt = "messages", self._chat_prompt(request.messages, request.chat_template_kwargs)
            prompts, images = [prompt.ids], prompt.images
        else:
            assert isinstance(request, CompletionRequest)
            field, prompts = "prompt", self._completion_prompts(request)
            if request.echo:
                decode = self.saved.tokenizer.decode
                pairs = zip(request.prompt, prompts, strict=True)
                echoed = [prompt if isinstance(prompt, str) else str(decode(ids)) for prompt, ids in pairs]
        several = request.samples
        if len(prompts) * several > self.limits.answers:
            demand = f"{several} answers to {len(prompts)} prompts" if several > 1 else f"{len(prompts)} prompts"
            name = field if several == 1 else "n" if several == request.n else "best_of"
            raise RequestError(400, f"{name}: {demand}; this server gives {self.limits.answers} at once", name)
        outside = next((token for token in request.logit_bias if token >= self.vocabulary), None)
        if outside is not None:
            raise RequestError(400, f"logit_bias: {self._no_token(outside)}", "logit_bias")
        rows = [prompt for prompt in prompts for _ in range(several)]
        scored = bool(echoed) and request.likeliest is not None
        return PreparedRequest(
            rows,
            self._new_tokens(list(map(len, rows)), request, field, min_tokens=int(scored)),
            sum(map(len, prompts)),
            Sampling(
                request.temperature, request.top_k or 0, max(request.top_p, LEAST_TOP_P), request.seed, request.min_p
            ),
            Penalties(
                request.frequency_penalty, request.presence_penalty, request.logit_bias, request.repetition_penalty
            ),
            request.stop,
            names[request.model],
            request.likeliest,
            request.n,
            several,
            [text for text in echoed for _ in range(several)],
            scored,
            self._grammar(request.response_format, names[request.model]),
            images,
        )

    def _grammar(self, response_format: ResponseFormat, adapter: str | None) -> Grammar | None:
        """Return the grammar of a response format, or None for any text.

        Raises:
            RequestError: llguidance is not installed, or refuses the schema or the tokenizer.
        """
        if response_format.type == "text":
            return None
        schema = None if response_format.json_schema is None else response_format.json_schema.content
        try:
            return Grammar(self.saved.tokenizer, self._ends(adapter), schema)
        except ConfigError as error:
            raise RequestError(400, f"response_format: {error.message}; {error.fix}", "response_format") from None

    def _ends(self, adapter: str | None) -> list[int]:
        """Return the tokens that end an adapter's answers."""
        return sorted({*self.conversation.stops, *self.ends.get(adapter or "", ())})

    def answer(self, work: PreparedRequest) -> Iterator[Piece]:
        """Yield the pieces of the answers.

        Raises:
            RequestError: the adapter was unloaded while the request was queued.
        """
        if work.adapter not in (None, *self.names.values()):
            message = "the model of this request was unloaded while the request was queued"
            raise RequestError(404, message, "model", "model_not_found")
        for row, text in enumerate(work.echoed):
            yield Piece(row, text, None, tokens=0)
        if any(work.max_new_tokens):
            yield from self._continued(work, work.max_new_tokens)
            return
        if work.scored:  # scores need a forward; its drawn token is dropped
            new = self._continued(work, [1] * len(work.prompts))
            yield from (piece for piece in new if not piece.tokens)
        yield from (Piece(row, "", "length", tokens=0) for row in range(len(work.prompts)))

    def _continued(self, work: PreparedRequest, max_new_tokens: Sequence[int]) -> Iterator[Piece]:
        ranked = work.samples > work.answers
        return continue_texts(
            self.saved.model,
            self.saved.tokenizer,
            work.prompts,
            max_new_tokens=max_new_tokens,
            sampling=work.sampling,
            ends=self._ends(work.adapter),
            stops=work.stops,
            adapter=work.adapter,
            likeliest=0 if ranked and work.likeliest is None else work.likeliest,
            penalties=work.penalties,
            scored=work.scored,
            grammars=[work.grammar] * len(work.prompts),
            images=[work.images] * len(work.prompts),
            kv_cache=self.kv_cache,
        )

    def unload(self, name: str) -> None:
        """Unload an adapter and free its memory; its files remain.

        Raises:
            RequestError: the name is unknown, or is the base model's.
        """
        if name not in self.names:
            raise RequestError(404, f"no model {brief(name)}", "model", "model_not_found")
        adapter = self.names[name]
        if adapter is None:
            raise RequestError(403, f"{name} is the model that this server was started with; stop the server", "model")
        del self.names[name]
        model: Any = self.saved.model
        forget(model)
        model.delete_adapter(adapter)

    def _chat_prompt(self, messages: Sequence[Message], variables: Mapping[str, Any] = {}) -> Prompt:
        if variables and (unread := variables.keys() - (self.template.variables if self.template else set())):
            reason = f"the model's chat template does not read {brief(min(unread))}"
            raise RequestError(400, f"chat_template_kwargs: {reason}", "chat_template_kwargs")
        if self.template is None:
            if [message.role for message in messages] != ["user"]:
                reason = "this model has no chat template, so send one user message, or use /v1/completions"
                raise RequestError(400, f"messages: {reason}", "messages")
            if isinstance(content := messages[0].content, list):
                raise RequestError(400, "messages: images need a chat template, which this model lacks", "messages")
            return Prompt(self.conversation.prompt_ids(content or ""))
        try:
            turns, _ = self.template.adapt_messages([message.turn() for message in messages])
            images = self._images(turns)
            return self.conversation.with_images(self.conversation.render(turns, variables), images, "the request")
        except (ConfigError, DataError, ModelError) as error:
            raise RequestError(400, f"messages: {error.message.removeprefix('messages: ')}", "messages") from None

    def _images(self, turns: Sequence[dict[str, Any]]) -> list[StoredImage]:
        """Return the images of turns as they are stored, and remove them from the turns' parts.

        Raises:
            DataError: the model reads text only, an image is damaged, or there are more than the limits allow.
        """
        parts = [part for turn in turns for part in image_parts(turn)]
        if not parts:
            return []
        self.conversation.check_reads_images()
        if len(parts) > self.limits.images:
            wrong = f"{len(parts)} images; this server takes {self.limits.images} in a request"
            raise DataError(wrong, "send fewer images")
        source, images = ImageSource(None, allow_urls=False), list[StoredImage]()
        for number, part in enumerate(parts, 1):
            images.append(source.stored(part.pop("image"), "", f"image {number}"))
        pixels = sum(width * height for width, height in map(size_of, images))
        if pixels > self.limits.image_pixels:
            wrong = f"its images have {pixels:,} pixels; this server takes {self.limits.image_pixels:,}"
            raise DataError(wrong, "scale them down: models read far fewer pixels")
        return images

    @property
    def body_bytes(self) -> int:
        """Largest body of a request."""
        return self.limits.image_body_bytes if self.conversation.reads_images else self.limits.body_bytes

    def _completion_prompts(self, request: CompletionRequest) -> list[list[int]]:
        """Return the token ids of each prompt."""
        prompts = request.prompt
        if len(prompts) > self.limits.answers:  # checked before tokenizing
            message = f"{len(prompts)} prompts; this server takes {self.limits.answers} at once"
            raise RequestError(400, f"prompt: {message}", "prompt")
        tokenizer: Any = self.saved.tokenizer
        prompt_ids = [
            tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt for prompt in prompts
        ]
        for ids in prompt_ids:
            wrong = next((token for token in ids if not 0 <= token < self.vocabulary), None)
            if wrong is not None:
                raise RequestError(400, f"prompt: {self._no_token(wrong)}", "prompt")
        return prompt_ids

    def _no_token(self, token: int) -> str:
        return f"token {brief(token)} is outside the model's vocabulary of {self.vocabulary}"

    def _new_tokens(self, lengths: Sequence[int], request: Request, field: str, min_tokens: int = 0) -> list[int]:
        """Return the maximum new tokens of each row for prompts of these lengths; `min_tokens` must fit."""
        max_new_tokens, limits = request.new_tokens, self.limits
        longest = max(lengths)
        if min(lengths) == 0:
            raise RequestError(400, f"{field}: the text has no tokens", field)
        if longest > limits.prompt_tokens:
            message = f"{field}: {longest} tokens; this server takes {limits.prompt_tokens}"
            raise RequestError(400, message, field)
        if max_new_tokens is not None and max_new_tokens > limits.max_tokens:
            name = "max_tokens" if request.max_tokens == max_new_tokens else "max_completion_tokens"
            raise RequestError(
                400, f"{name}: {max_new_tokens}; this server generates {limits.max_tokens} at most", name
            )
        min_tokens = 1 if max_new_tokens is None else max(max_new_tokens, min_tokens)
        if self.context is not None and longest + min_tokens > self.context:
            message = (
                f"the model's context is {self.context} tokens, and you asked for {longest + min_tokens}"
                f" ({longest} in {field}, {'at least 1' if max_new_tokens is None else max_new_tokens} to generate)"
            )
            raise RequestError(400, message, field, "context_length_exceeded")
        limit = limits.max_tokens if max_new_tokens is None else max_new_tokens
        return [limit if self.context is None else min(limit, self.context - length) for length in lengths]


def load(
    name: str,
    adapters: Mapping[str, str],
    limits: Limits = Limits(),
    trust_remote_code: bool = False,
    kv_cache: str = "auto",
) -> Served:
    """Load a run or a model, and further adapters of the same base.

    Args:
        name: a run's output_dir, an adapter, or a model. A run is served by its folder's name with its adapter, and by
            its base's name without.
        adapters: name in requests → folder of an adapter or a run.
        trust_remote_code: run the Python code that comes with the model; the run's own configuration does not count.
        kv_cache: as in `generation.generate`.

    Raises:
        CheckpointError: a folder has no adapter, or a damaged one, or one of another model.
        ModelError: halfbyte cannot generate with an adapter.
        UsageError: a name is used twice.
    """
    folders = {key: _adapter(path) for key, path in adapters.items()}
    ends: dict[str, list[int]] = {}
    saved = load_saved(name, [f"trust_remote_code={trust_remote_code}"])
    names: dict[str, str | None] = {_name(name): "default" if saved.paths.adapter else None}
    has_own_base = saved.initial is not None and bool(saved.initial.modules)
    if has_own_base and folders:
        wrong = f"--adapter {next(iter(folders))}: the base of {name} is stored without initial factors of its adapter"
        raise UsageError(wrong, "serve the base model, and name both adapters with --adapter")
    if saved.paths.adapter and not has_own_base:
        names.setdefault(_name(saved.config.model_name_or_path), None)
    if folders and saved.config.storage.merge_aware:
        wrong = f"--adapter {next(iter(folders))}: {name} was trained with merge_aware, and its weights are merged"
        raise UsageError(wrong, "serve the base model for other adapters")
    for key, folder in folders.items():
        if key in names:
            raise UsageError(f"--adapter {key}: the model has this name already", "choose another name")
        names[key] = f"adapter_{len(names)}"
        template = folder / "chat_template.jinja"
        if look(template, CheckpointError) and read_chat_template(template) != saved.tokenizer.chat_template:
            notice(f"serve {folder}", f"{folder} was trained with another chat template; the server uses its own")
        if saved.config.rope_scaling and saved_rope(folder) is None:
            wrong = f"--adapter {key}: the base of {name} has rope_scaling, and this adapter was trained without"
            raise UsageError(wrong, "serve it with its own base")
        adapter_name: Any = names[key]
        saved.model = load_adapter(saved.model, folder, saved.config.model_name_or_path, adapter_name)
        ends[str(names[key])] = known_stop_tokens(data_report(find(adapters[key]).run_dir), saved.tokenizer)
    check_kinds(saved.model, list(names.values()))
    saved.model.eval()
    served = Served(saved, names, limits, kv_cache)
    served.ends |= ends
    return served


def _name(path: str) -> str:
    return Path(path).resolve().name if Path(path).is_dir() else path


def _adapter(path: str) -> Path:
    folder = find_adapter(path)
    check_adapter_files(folder)
    if (paths := find(path)).resolved and saved_config(paths).storage.merge_aware:
        raise UsageError(
            f"--adapter: {path} was trained with merge_aware, to be merged", "merge it, and serve the result"
        )
    return folder
