"""Completions from a vLLM server over HTTP; vLLM itself is not imported.

Prompts are sent to `/v1/completions` as token ids, one request each; ids and log-probabilities come back. An adapter is
loaded from a folder that the server can read. Two behaviours of vLLM (up to 0.33) shape the client:

- `load_inplace` is remembered for the adapter, whose files are then read again in every engine step (vllm#33791). The
  client therefore unloads the previous adapter first, and replaces in place only an adapter that cannot be unloaded.
- The prefix cache identifies an adapter by its name, so a new adapter of the same name would reuse stale prefixes
  (vllm#42125). Each loaded adapter therefore has its own `cache_salt`.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import math
import os
import queue
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..reading.json import parse_json
from ..utils.errors import ConfigError, explain_os_error
from ..utils.text import brief
from .rollouts import Completion
from .sampling import Sampling

KEY = "vllm_server_base_url"
MAX_CONCURRENT_REQUESTS = 64  # the server queues requests itself
MAX_ANSWER_BYTES = 2**30  # of one response
SHORT_TIMEOUT = 30.0  # seconds for requests without generation
OLD_SERVER = "start a newer one: vLLM 0.10.2 was the first to answer with token ids"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
T = TypeVar("T")


@dataclass(frozen=True)
class ServerInfo:
    """A server's description of itself.

    Attributes:
        name: of its base model.
        root: path or id that the base model was loaded from.
        longest: maximum tokens of a prompt and its completion; None if not reported.
        version: of vLLM; empty if not reported.
    """

    name: str
    root: str
    longest: int | None
    version: str


class VllmServer:
    """Client of a vLLM server; sends concurrent requests from several threads.

    The server's API key, if it requires one, is read from VLLM_API_KEY, as vLLM does.

    Args:
        base_url: without /v1.
        model: that the server should have, for error messages.
        rank: of the adapter.
        timeout: seconds for a response.
    """

    def __init__(self, base_url: str, model: str, rank: int, timeout: float):
        self.url = base_url.rstrip("/")
        self.timeout = timeout
        self.start = (
            f"start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve {model} --enable-lora"
            f" --max-lora-rank {next((limit for limit in LORA_RANKS if limit >= rank), rank)}"
        )
        self._salt = ""

    # --- server info -------------------------------------------------------------------------------------------------

    def look_over(self) -> ServerInfo:
        """Return the server's model and version.

        Raises:
            ConfigError: the server does not respond, or not as vLLM does.
        """
        status, reply = self._ask("/v1/models", seconds=SHORT_TIMEOUT)
        if status in (401, 403):
            raise self._wrong("requires an API key", "set VLLM_API_KEY to the key it was started with (--api-key)")
        cards = reply.get("data") if status == 200 and isinstance(reply, dict) else None
        bases = [card for card in cards or [] if isinstance(card, dict) and not card.get("parent") and card.get("id")]
        if not bases:
            raise self._wrong(f"is not a vLLM server: /v1/models gives {status} {_error_text(reply)}", self.start)
        with contextlib.suppress(ConfigError):
            status, version = self._ask("/version", seconds=SHORT_TIMEOUT)
        name, longest = str(bases[0]["id"]), bases[0].get("max_model_len")
        version = version.get("version") if status == 200 and isinstance(version, dict) else ""
        longest = longest if isinstance(longest, int) else None
        return ServerInfo(name, str(bases[0].get("root") or name), longest, str(version or ""))

    def text_of(self, served: ServerInfo, ids: Sequence[int]) -> str | None:
        """Return the server's decoding of these ids, or None if it does not offer that."""
        status, reply = self._ask("/detokenize", {"model": served.name, "tokens": list(ids)}, SHORT_TIMEOUT)
        text = reply.get("prompt") if status == 200 and isinstance(reply, dict) else None
        return text if isinstance(text, str) else None

    def counts_temperature(self, served: ServerInfo, prompt: Sequence[int]) -> bool:
        """Return whether log-probabilities include the temperature (`--logprobs-mode processed_logprobs`)."""
        likeliest = []
        for temperature in (1.0, 4.0):
            body = self._body(served.name, prompt, 1, 1, Sampling(temperature), [], 0) | {"logprobs": 1}
            choice = self._choices(body, 1)[0]
            self._completion(choice, prompt, [])
            try:
                (log_probs,) = choice["logprobs"]["top_logprobs"]
                likeliest.append(max(float(value) for value in log_probs.values()))
            except (KeyError, TypeError, ValueError) as error:
                raise self._wrong(f"returns no log-probabilities: {_error_text(choice)}", OLD_SERVER) from error
        return abs(likeliest[0] - likeliest[1]) > 1e-6

    # --- adapters ----------------------------------------------------------------------------------------------------

    def load(self, name: str, folder: Path) -> None:
        """Load the adapter in `folder` under `name`, replacing a previous one.

        Raises:
            ConfigError: the server cannot load it.
        """
        self.unload(name)
        body: dict[str, Any] = {"lora_name": name, "lora_path": str(folder)}
        status, reply = self._ask("/v1/load_lora_adapter", body)
        if status == 400 and "already" in _error_text(reply):
            status, reply = self._ask("/v1/load_lora_adapter", body | {"load_inplace": True})
        self._salt = uuid.uuid4().hex
        if status == 200:
            return
        error, fix = _error_text(reply), self.start
        if status in (404, 405) and name not in error and str(folder) not in error:
            error = "it was started without runtime adapter loading"
        elif "already" in error:
            error, fix = (
                f"it does not replace a previous adapter ({error})",
                "start a newer version, which replaces adapters in place, or restart it",
            )
        elif "max_lora_rank" not in error and (str(folder) in error or "No such file" in error):
            fix = f"run it where it can read {folder}, or put output_dir on a shared disk"
        raise self._wrong(f"does not load the adapter: {error}", fix)

    def unload(self, name: str) -> None:
        """Unload the adapter `name` if it is loaded."""
        self._ask("/v1/unload_lora_adapter", {"lora_name": name}, SHORT_TIMEOUT)

    # --- completions -------------------------------------------------------------------------------------------------

    def complete(
        self,
        model: str,
        prompts: Sequence[Sequence[int]],
        n: int,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stops: Sequence[int],
        keys: Sequence[int],
    ) -> list[Completion]:
        """Return completions as `Rollouts.generate`; draws depend on the seed, prompt key and the server's rounding.

        Log-probabilities are the server's, see `counts_temperature`.

        Raises:
            ConfigError: the server is unreachable, refuses, exceeds `timeout`, or gives an unexpected response.
        """

        def ask(at: int) -> list[Completion]:
            seed = int.from_bytes(hashlib.sha256(f"{sampling.seed} {keys[at]}".encode()).digest()[:6], "big")
            body = self._body(model, prompts[at], n, max_new_tokens, sampling, stops, seed)
            completions = [self._completion(choice, prompts[at], stops) for choice in self._choices(body, n)]
            if (longest := max(len(completion.ids) for completion in completions)) > max_new_tokens:
                raise self._wrong(f"returns {longest} tokens, more than the {max_new_tokens} requested", OLD_SERVER)
            return completions

        return [completion for answers in _run_concurrently(ask, len(prompts)) for completion in answers]

    def _body(
        self,
        model: str,
        prompt: Sequence[int],
        n: int,
        max_new_tokens: int,
        sampling: Sampling,
        stops: Sequence[int],
        seed: int,
    ) -> dict[str, Any]:
        """Build a request that sets every sampling field, overriding the model's generation_config.json."""
        body: dict[str, Any] = {"model": model, "prompt": list(prompt), "n": n}
        body |= {"max_tokens": max_new_tokens, "seed": seed}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        body |= {"min_p": sampling.min_p, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        body |= {"stop_token_ids": list(stops), "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
        return body | ({"cache_salt": self._salt} if self._salt else {})

    def _choices(self, body: dict[str, Any], n: int) -> list[dict[str, Any]]:
        status, reply = self._ask("/v1/completions", body)
        if status != 200:
            raise self._wrong(f"does not answer prompts: {_error_text(reply)}", self.start)
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if (
            not isinstance(choices, list)
            or len(choices) != n
            or not all(isinstance(choice, dict) for choice in choices)
        ):
            raise self._wrong(f"returns {_error_text(reply)} instead of {n} completions", self.start)
        return choices

    def _completion(self, choice: dict[str, Any], prompt: Sequence[int], stops: Sequence[int]) -> Completion:
        ids: Any = choice.get("token_ids")
        prompt_ids: Any = choice.get("prompt_token_ids")
        logs: Any = (choice.get("logprobs") or {}).get("token_logprobs")
        ended = choice.get("finish_reason")
        if not _is_list_of(ids, int) or not _is_list_of(prompt_ids, int):
            raise self._wrong("returns no token ids", OLD_SERVER)
        if prompt_ids != list(prompt):
            problem = f"read {len(prompt_ids)} tokens, or different ones, for a prompt of {len(prompt)}"
            raise self._wrong(problem, self.start)
        has_log_probs = _is_list_of(logs, float, int) and all(map(math.isfinite, logs))
        if not has_log_probs or len(logs) != len(ids) or not ids:
            raise self._wrong(f"does not return a log-probability for each token: {_error_text(choice)}", OLD_SERVER)
        if ended not in ("stop", "length") or (ended == "stop" and ids[-1] not in stops):
            raise self._wrong(f"ended an answer for an unexpected reason: {ended} at token {ids[-1]}", self.start)
        return Completion(ids, torch.tensor(logs, dtype=torch.float32), ended == "stop")

    # --- HTTP --------------------------------------------------------------------------------------------------------

    def _ask(self, path: str, body: Any = None, seconds: float | None = None) -> tuple[int, Any]:
        """Send a request; return the status and the response, parsed if it is JSON, else as text."""
        request = urllib.request.Request(self.url + path, method="GET" if body is None else "POST")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        if key := os.environ.get("VLLM_API_KEY"):
            if not (key.isascii() and key.isprintable()):
                raise ConfigError("VLLM_API_KEY has characters that no header allows", "set it to the server's key")
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        seconds = self.timeout if seconds is None else min(seconds, self.timeout)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                status, raw = answer.status, answer.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                status, raw = error.code, error.read(MAX_ANSWER_BYTES)
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: an invalid host name
            reason = getattr(error, "reason", error)  # set on URLError
            if isinstance(reason, TimeoutError):
                fix = "raise vllm_server_timeout, lower max_completion_length, or reduce the server's other load"
                raise self._wrong(f"takes longer than {seconds:g} s for {path}", fix) from error
            cause = explain_os_error(reason) if isinstance(reason, OSError) else str(reason) or type(error).__name__
            raise self._wrong(f"does not answer: {cause}", self.start) from error
        if len(raw) > MAX_ANSWER_BYTES:
            raise self._wrong(f"returns over {MAX_ANSWER_BYTES:,} bytes", self.start)
        try:
            return status, parse_json(raw, self.url)
        except ConfigError:
            return status, raw.decode(errors="replace")

    def _wrong(self, problem: str, fix: str) -> ConfigError:
        return ConfigError(f"{KEY}: {self.url} {problem}", fix)


def _error_text(reply: Any) -> str:
    """Return the message of a vLLM error response, or an excerpt of another response."""
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        reply = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
    return brief(reply) if not isinstance(reply, str) else reply[:400].strip()


def _is_list_of(values: Any, *types: type) -> bool:
    return isinstance(values, list) and all(type(value) in types for value in values)


def _run_concurrently(work: Callable[[int], T], count: int) -> list[T]:
    """Return `work` of 0 to `count` - 1, from daemon threads; the first error is raised without joining the others."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
    for at in range(count):
        waiting.put(at)

    def run() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                at = waiting.get_nowait()
                try:
                    done.put((at, work(at), None))
                except BaseException as error:
                    done.put((at, None, error))
                    return

    for _ in range(min(count, MAX_CONCURRENT_REQUESTS)):
        threading.Thread(target=run, daemon=True).start()
    results: dict[int, T] = {}
    while len(results) < count:
        at, value, error = done.get()
        if error is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            raise error
        results[at] = value
    return [results[at] for at in range(count)]
