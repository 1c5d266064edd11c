"""The model "halfbyte" of EleutherAI's lm-evaluation-harness; `halfbyte.lm_eval` shows how to use it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.chat import prompt_text
from ..generation import Sampling
from ..generation.decoder import context_length
from ..generation.sampling import stop_tokens, turn_end
from ..generation.text import continue_texts
from ..modeling.compute_dtype import compute_autocast, no_input_casts
from ..modeling.head import token_log_probs
from ..ops import IGNORE_INDEX
from ..runs.saved import load_saved
from ..utils.errors import ConfigError, ModelError
from ..utils.notices import notice
from ..utils.text import brief

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as missing:
    raise ConfigError(f"lm-evaluation-harness cannot be imported: {missing}", "pip install lm_eval") from missing

COMMANDS_DEVICE = "cuda:0"  # default of the command's --device
DEFAULT_CONTEXT = 2048  # if the model's config sets no bound
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the harness accepts all of these
DEFAULT_LENGTH = 256
Number = TypeVar("Number", int, float)
Pair = tuple[list[int], list[int]]  # context, continuation
Score = tuple[float, bool]  # log-probability in nats, whether greedy decoding gives the continuation


@register_model("halfbyte")
class HalfbyteLM(TemplateLM):
    """A run, an adapter or a model, loaded as by `halfbyte chat`.

    Args:
        pretrained: a run's output_dir, an adapter, or a model.
        batch_size: texts per forward.
        max_length: tokens of context and continuation; default: the model's positions.
        device: as in a run's configuration; "cuda:0", the command's default, is ignored without CUDA.
        max_batch_size: passed by the harness for automatic batch sizes, which are not supported.
        overrides: keys of the run's configuration, e.g. load_in_4bit=True.

    Raises:
        ConfigError: the batch size is not a number.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 8,
        max_length: int | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        **overrides: Any,
    ):
        super().__init__()
        if max_batch_size is not None or not str(batch_size).isdigit() or int(batch_size) < 1:
            sizes = batch_size if max_batch_size is None else f"{batch_size} up to {max_batch_size}"
            raise ConfigError(f"batch_size is {sizes}", "use a number")
        if device == COMMANDS_DEVICE and not torch.cuda.is_available():
            notice("lm-eval-device", f"{device}, the default of lm_eval, is not available: halfbyte chooses the device")
        elif device is not None:
            overrides["device"] = device
        self.saved = load_saved(pretrained, [f"{key}={json.dumps(value)}" for key, value in overrides.items()])
        self.tokenizer = self.saved.tokenizer
        model: Any = self.saved.model
        self.model = model
        self.batch_size = int(batch_size)
        if max_length is not None and _number(int, "max_length", max_length) < 2:
            raise ConfigError(f"max_length is {max_length}", "use 2 or more, or leave it out")
        self.max_length = int(max_length or context_length(model) or DEFAULT_CONTEXT)
        self._device = next(model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """First token of a text without context: BOS, or EOS if there is no BOS.

        Raises:
            ModelError: the tokenizer has neither.
        """
        for token in (self.tokenizer.bos_token_id, self.eot_token_id):
            if token is not None:
                return token
        raise ModelError("the tokenizer has neither BOS nor EOS to start a text with", "set one in its config")

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return prompt_text(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids, with BOS unless the text already has it, e.g. from a chat template."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]

    def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any) -> list[Score]:
        scores = self._scores([(context, continuation) for _, context, continuation in requests])
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        pairs: list[Pair] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                pairs.append(make_disjoint_window(window))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (log_prob, _) in zip(owners, self._scores(pairs), strict=True):
            sums[owner] += log_prob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    @torch.no_grad()
    def _scores(self, pairs: Sequence[Pair]) -> list[Score]:
        """Return the score of each continuation; batches hold texts of similar length, the longest first."""
        order = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
        scores: dict[int, Score] = {}
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            rows = [self._row(*pairs[index]) for index in batch]
            # Attention is causal, so right padding needs no mask.
            ids = pad_sequence([row[0] for row in rows], batch_first=True).to(self._device)
            labels = pad_sequence([row[1] for row in rows], batch_first=True, padding_value=IGNORE_INDEX)
            with no_input_casts(self.model), compute_autocast(self.model):
                log_probs, greedy = token_log_probs(self.model, {"input_ids": ids}, labels.to(self._device))
            lengths = [len(pairs[index][1]) for index in batch]
            of_texts = zip(batch, log_probs.cpu().split(lengths), greedy.cpu().split(lengths), strict=True)
            scores |= {index: (float(values.double().sum()), bool(same.all())) for index, values, same in of_texts}
        return [scores[index] for index in range(len(pairs))]

    def _row(self, context: list[int], continuation: list[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels; a context that is too long is cut at its start."""
        if len(continuation) > self.max_length:
            raise ModelError(
                f"a continuation of {len(continuation)} tokens exceeds max_length {self.max_length}",
                "raise max_length, where the model allows it",
            )
        tokens = torch.tensor((context + continuation)[-(self.max_length + 1) :])
        labels = tokens[1:].clone()
        labels[: len(labels) - len(continuation)] = IGNORE_INDEX
        return tokens[:-1], labels

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True)].append(index)
        answers = [""] * len(requests)
        for options, members in groups.items():
            members.sort(key=lambda index: -len(requests[index].args[0]))
            for first in range(0, len(members), self.batch_size):
                batch = members[first : first + self.batch_size]
                batch_answers = self._continue([requests[index].args[0] for index in batch], json.loads(options))
                for index, answer in zip(batch, batch_answers, strict=True):
                    answers[index] = answer
                    self.cache_hook.add_partial("generate_until", requests[index].args, answer)
        return answers

    def _continue(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        """Return the answers to a batch of contexts; `options` are the task's generation options.

        Raises:
            ConfigError: an unknown option, or no room for a prompt.
        """
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else until
        if not isinstance(until, list) or not all(isinstance(stop, str) for stop in until):
            raise ConfigError(f"generation option until is {brief(until)}", "give texts")
        lengths = [_number(int, name, options.pop(name)) for name in LENGTHS if name in options]
        new = lengths[0] if lengths else DEFAULT_LENGTH
        sampled = options.pop("do_sample", None)
        temperature = 0.0 if sampled is False else options.pop("temperature", 1.0 if sampled else 0.0)
        options.pop("temperature", None)
        sampling = Sampling(
            _number(float, "temperature", temperature),
            _number(int, "top_k", options.pop("top_k", 0)),
            _number(float, "top_p", options.pop("top_p", 1.0)),
        )
        if options:
            raise ConfigError(f"generation option {next(iter(options))} is unknown", "leave it out of --gen_kwargs")
        if new >= self.max_length:
            raise ConfigError(
                f"{new} new tokens leave no room for a prompt within {self.max_length}", "lower max_gen_toks"
            )
        template = self.tokenizer.chat_template
        answers = [""] * len(contexts)
        for piece in continue_texts(
            self.model,
            self.tokenizer,
            [self.tok_encode(context)[-(self.max_length - new) :] or [self.prefix_token_id] for context in contexts],
            max_new_tokens=new,
            sampling=sampling,
            ends=stop_tokens(self.tokenizer, self.model, turn_end(self.tokenizer) if template else []),
            stops=[stop for stop in until if stop],
        ):
            answers[piece.row] += piece.text
        return answers


def _number(number_type: Callable[[Any], Number], name: str, value: Any) -> Number:
    """Return an option's value, which the harness may pass as text.

    Raises:
        ConfigError: the value is not a number.
    """
    try:
        return number_type(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} is {brief(value)}", "give a number") from error
