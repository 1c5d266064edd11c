"""Completions from a vLLM server, over HTTP; vLLM itself is not imported.

Prompts go to `/v1/completions` as token ids, one request each, and ids and log-probabilities come back. An adapter is
loaded from a folder that the server sees. Two things of vLLM's decide how (in 0.33, and before):

- `load_inplace` stays with the adapter that was loaded with it, and has its files read again in every step of the
  engine (vllm#33791). So a former adapter is unloaded first, and in place is only replaced what would not go.
- Cached prefixes are found by an adapter's name, so one of the same name would read those of its predecessor
  (vllm#42125). So each adapter has a `cache_salt` of its own.
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

from ..reading import why
from ..reading.json import parse_json
from ..utils.errors import ConfigError
from ..utils.text import brief
from .rollouts import Completion
from .sampling import Sampling

KEY = "vllm_server_base_url"
TOGETHER = 64  # requests under way at once; the server has a queue of its own
MOST = 2**30  # bytes of an answer
QUICK = 30.0  # seconds for what takes no drawing
OLD = "start a newer one: vLLM 0.10.2 was the first to answer with token ids"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank may be
T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """What a server says of itself.

    Attributes:
        name: of its base model.
        root: where it has that from.
        longest: tokens of a prompt with its completion, at most; None where it does not say.
        version: of vLLM; empty where it does not say.
    """

    name: str
    root: str
    longest: int | None
    version: str


class VllmServer:
    """A server, which is asked by several threads at once.

    The key of a server that wants one is read from VLLM_API_KEY, as vLLM does.

    Args:
        base_url: without /v1.
        model: what it should serve, which errors name.
        rank: of the adapter.
        timeout: seconds for an answer.
    """

    def __init__(self, base_url: str, model: str, rank: int, timeout: float):
        self.url, self.timeout, self.rank = base_url.rstrip("/"), timeout, rank
        self.start = (
            f"start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve {model} --enable-lora"
            f" --max-lora-rank {next((each for each in RANKS if each >= rank), rank)}"
        )
        self._salt = ""

    # --- what it is --------------------------------------------------------------------------------------------------

    def look_over(self) -> Served:
        """What it serves.

        Raises:
            ConfigError: it does not answer, or not as vLLM would.
        """
        status, found = self._ask("/v1/models", seconds=QUICK)
        if status in (401, 403):
            raise self._wrong("wants a key", "set VLLM_API_KEY to the one that it was started with (--api-key)")
        cards = found.get("data") if status == 200 and isinstance(found, dict) else None
        bases = [card for card in cards or [] if isinstance(card, dict) and not card.get("parent") and card.get("id")]
        if not bases:
            raise self._wrong(f"is no vLLM: /v1/models answers {status} {_said(found)}", self.start)
        with contextlib.suppress(ConfigError):
            status, version = self._ask("/version", seconds=QUICK)
        name, longest = str(bases[0]["id"]), bases[0].get("max_model_len")
        version = version.get("version") if status == 200 and isinstance(version, dict) else ""
        longest = longest if isinstance(longest, int) else None
        return Served(name, str(bases[0].get("root") or name), longest, str(version or ""))

    def text_of(self, served: Served, ids: Sequence[int]) -> str | None:
        """How its tokenizer reads these ids; None where it does not say."""
        status, found = self._ask("/detokenize", {"model": served.name, "tokens": list(ids)}, QUICK)
        text = found.get("prompt") if status == 200 and isinstance(found, dict) else None
        return text if isinstance(text, str) else None

    def counts_temperature(self, served: Served, prompt: Sequence[int]) -> bool:
        """Whether its log-probabilities are at the temperature (`--logprobs-mode processed_logprobs`), not at 1."""
        likeliest = []
        for temperature in (1.0, 4.0):
            body = self._body(served.name, prompt, 1, 1, Sampling(temperature), [], 0) | {"logprobs": 1}
            choice = self._choices(body, 1)[0]
            self._completion(choice, prompt, [])
            try:
                (known,) = choice["logprobs"]["top_logprobs"]
                likeliest.append(max(float(value) for value in known.values()))
            except (KeyError, TypeError, ValueError) as error:
                raise self._wrong(f"gives no log-probabilities: {_said(choice)}", OLD) from error
        return abs(likeliest[0] - likeliest[1]) > 1e-6

    # --- adapters ----------------------------------------------------------------------------------------------------

    def load(self, name: str, folder: Path) -> None:
        """Have the adapter in `folder` answer to `name`, in the place of a former one.

        Raises:
            ConfigError: the server cannot, and why.
        """
        self.unload(name)
        body: dict[str, Any] = {"lora_name": name, "lora_path": str(folder)}
        status, found = self._ask("/v1/load_lora_adapter", body)
        if status == 400 and "already" in _said(found):
            status, found = self._ask("/v1/load_lora_adapter", body | {"load_inplace": True})
        self._salt = uuid.uuid4().hex
        if status == 200:
            return
        said, fix = _said(found), self.start
        if status in (404, 405) and name not in said and str(folder) not in said:
            said = "it takes no adapters while it runs"
        elif "already" in said:
            said, fix = (
                f"it keeps a former adapter ({said})",
                "start a newer one, which replaces adapters in place, or start it again",
            )
        elif "max_lora_rank" not in said and (str(folder) in said or "No such file" in said):
            fix = f"run it where {folder} is, or put output_dir on a disk that both see"
        raise self._wrong(f"does not load the adapter: {said}", fix)

    def unload(self, name: str) -> None:
        """Have `name` answer no longer, if it does."""
        self._ask("/v1/unload_lora_adapter", {"lora_name": name}, QUICK)

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
        """As `Rollouts.generate`; what is drawn depends on the seed and a prompt's key, and on the server's rounding.

        Log-probabilities are those that the server computes, see `counts_temperature`.

        Raises:
            ConfigError: the server is away, refuses, takes longer than `timeout`, or answers something else.
        """

        def ask(at: int) -> list[Completion]:
            seed = int.from_bytes(hashlib.sha256(f"{sampling.seed} {keys[at]}".encode()).digest()[:6], "big")
            body = self._body(model, prompts[at], n, max_new_tokens, sampling, stops, seed)
            found = [self._completion(choice, prompts[at], stops) for choice in self._choices(body, n)]
            if (longest := max(len(each.ids) for each in found)) > max_new_tokens:
                raise self._wrong(f"answers with {longest} tokens where {max_new_tokens} are the most", OLD)
            return found

        return [each for some in _together(ask, len(prompts)) for each in some]

    def _body(
        self, model: str, prompt: Sequence[int], n: int, most: int, sampling: Sampling, stops: Sequence[int], seed: int
    ) -> dict[str, Any]:
        """All that decides the distribution is said: else what the model's generation_config.json has would count."""
        body: dict[str, Any] = {"model": model, "prompt": list(prompt), "n": n, "max_tokens": most, "seed": seed}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        body |= {"min_p": sampling.min_p, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        body |= {"stop_token_ids": list(stops), "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
        return body | ({"cache_salt": self._salt} if self._salt else {})

    def _choices(self, body: dict[str, Any], n: int) -> list[dict[str, Any]]:
        status, found = self._ask("/v1/completions", body)
        if status != 200:
            raise self._wrong(f"does not answer prompts: {_said(found)}", self.start)
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or len(choices) != n or not all(isinstance(each, dict) for each in choices):
            raise self._wrong(f"answers {_said(found)} where {n} completions were asked for", self.start)
        return choices

    def _completion(self, choice: dict[str, Any], prompt: Sequence[int], stops: Sequence[int]) -> Completion:
        ids: Any = choice.get("token_ids")
        given: Any = choice.get("prompt_token_ids")
        logs: Any = (choice.get("logprobs") or {}).get("token_logprobs")
        ended = choice.get("finish_reason")
        if not _are(ids, int) or not _are(given, int):
            raise self._wrong("answers without token ids", OLD)
        if given != list(prompt):
            raise self._wrong(f"has read {len(given)} tokens of a prompt of {len(prompt)}, or others", self.start)
        known = _are(logs, float, int) and all(map(math.isfinite, logs))
        if not known or len(logs) != len(ids) or not ids:
            raise self._wrong(f"gives no log-probability for each token: {_said(choice)}", OLD)
        if ended not in ("stop", "length") or (ended == "stop" and ids[-1] not in stops):
            raise self._wrong(f"ends an answer for another reason: {ended} at token {ids[-1]}", self.start)
        return Completion(ids, torch.tensor(logs, dtype=torch.float32), ended == "stop")

    # --- HTTP --------------------------------------------------------------------------------------------------------

    def _ask(self, path: str, body: Any = None, seconds: float | None = None) -> tuple[int, Any]:
        """The status and what was answered: of JSON its values, else the text."""
        request = urllib.request.Request(self.url + path, method="GET" if body is None else "POST")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        if key := os.environ.get("VLLM_API_KEY"):
            if not (key.isascii() and key.isprintable()):
                raise ConfigError("VLLM_API_KEY has characters that no header may have", "set it to the server's key")
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        seconds = self.timeout if seconds is None else min(seconds, self.timeout)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                status, raw = answer.status, answer.read(MOST + 1)
        except urllib.error.HTTPError as error:
            with error:
                status, raw = error.code, error.read(MOST)
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a name that is none
            reason = getattr(error, "reason", error)  # of a URLError
            if isinstance(reason, TimeoutError):
                fix = "raise vllm_server_timeout, lower max_completion_length, or give the server less beside this"
                raise self._wrong(f"takes longer than {seconds:g} s for {path}", fix) from error
            said = why(reason) if isinstance(reason, OSError) else str(reason) or type(error).__name__
            raise self._wrong(f"does not answer: {said}", self.start) from error
        if len(raw) > MOST:
            raise self._wrong(f"answers with over {MOST:,} bytes", self.start)
        try:
            return status, parse_json(raw, self.url)
        except ConfigError:
            return status, raw.decode(errors="replace")

    def _wrong(self, what: str, fix: str) -> ConfigError:
        return ConfigError(f"{KEY}: {self.url} {what}", fix)


def _said(found: Any) -> str:
    """The message of an error as vLLM answers, or what else there is."""
    if isinstance(found, dict):
        error = found.get("error", found)
        found = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
    return brief(found) if not isinstance(found, str) else found[:400].strip()


def _are(values: Any, *kinds: type) -> bool:
    return isinstance(values, list) and all(type(each) in kinds for each in values)


def _together(work: Callable[[int], T], count: int) -> list[T]:
    """`work` of 0 to `count` - 1, some at once, in threads that nobody waits for once one has failed."""
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

    for _ in range(min(count, TOGETHER)):
        threading.Thread(target=run, daemon=True).start()
    found: dict[int, T] = {}
    while len(found) < count:
        at, value, error = done.get()
        if error is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            raise error
        found[at] = value
    return [found[at] for at in range(count)]
