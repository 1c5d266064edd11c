"""Reward models of a run: preflight check, loading (on the trained model's weights if possible), and scoring."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from ..auxiliary.model import additional_adapter
from ..config.methods import SCORES
from ..config.schema import RunKeys
from ..data.chat import ChatTemplate
from ..data.encode import Encoder
from ..methods.answers import as_adapter, score
from ..modeling.compute_dtype import compute_autocast
from ..reading.boundary import answered
from ..utils.console import Console
from ..utils.errors import ModelError, attribute_to_key
from ..utils.streams import quiet_transformers
from ..utils.text import one_line
from .reward_models import RewardModelFiles, find_reward_models, key_of
from .score import Rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD = 0  # token id of padding; no score is read at its positions


def check_reward_model_compatibility(
    config: RunKeys, rewards: Rewards, model_config: Any, tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    """Check that the reward models of a run exist and have the vocabulary of the trained model; print their kind.

    Args:
        model_config: transformers' config of the trained model.

    Raises:
        HalfbyteError: a check fails.
    """
    for files in find_reward_models(config, rewards.specs):
        name = key_of(str(files.spec.options["path"]))
        with attribute_to_key(name):
            files.check(name, config, model_config, tokenizer, stored=files.adapter is not None)
        weights = "it shares the model's weights" if files.files is None else f"on {files.files.name}"
        output = "scores answers" if files.scores == "SEQ_CLS" else "scores steps; the reward is their product"
        console.print(one_line(f"{name} {output}; {weights}"), soft_wrap=True)


@contextlib.contextmanager
def loaded_reward_models(
    config: RunKeys,
    rewards: Rewards,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[None]:
    """Load the reward models of a run, and let `rewards` use them inside.

    Args:
        model: the trained model.
        dtype: compute dtype.

    Raises:
        HalfbyteError: one cannot be loaded.
    """
    with ExitStack() as stack:
        for number, files in enumerate(find_reward_models(config, rewards.specs)):
            loaded = stack.enter_context(_loaded_scorer(config, files, model, device, dtype, f"reward-{number}"))
            size = config.per_device_eval_batch_size or config.per_device_train_batch_size
            texts = TextScorer(*loaded, size, device, *answer_suffix(tokenizer))
            rewards.models[files.spec.name] = texts.score_answers
            if files.scores == "TOKEN_CLS":
                rewards.models[files.spec.name] = partial(texts.score_steps, tokenizer, files.separator)
        try:
            yield
        finally:
            rewards.models.clear()


Around = Callable[[], AbstractContextManager[Any]]
Scorer = Callable[[dict[str, Tensor]], Tensor]


@contextlib.contextmanager
def _loaded_scorer(
    config: RunKeys, files: RewardModelFiles, model: Any, device: torch.device, dtype: torch.dtype, name: str
) -> Iterator[tuple[Scorer, Around]]:
    """Yield the function that scores a batch, and the context of its forward."""
    if files.adapter is None:
        yield partial(_classify, _load_classifier(files, device, dtype)), contextlib.nullcontext
        return
    if files.files is not None:
        reward_model = files.load(config, device, dtype)
        yield partial(score, reward_model), partial(compute_autocast, reward_model, dtype)
        return
    try:
        with additional_adapter(config, model, files.adapter, name):
            _freeze(model, name)
            yield partial(score, model), partial(_as_reward_model, model, name, dtype)
    finally:
        with contextlib.suppress(AttributeError):  # another reward model may have deleted the shared head
            del model.get_base_model().score


def _freeze(model: Any, name: str) -> None:
    """Freeze an adapter and its head; PEFT enables gradients of the modules that an adapter saves in full."""
    for key, parameter in model.named_parameters():
        if f".{name}." in key or ".score." in key:
            parameter.requires_grad_(False)


@contextlib.contextmanager
def _as_reward_model(model: Any, name: str, dtype: torch.dtype) -> Iterator[None]:
    with as_adapter(model, name), compute_autocast(model, dtype):
        yield
    _freeze(model, name)


def _load_classifier(files: RewardModelFiles, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a classification model with transformers, in the run's dtype."""
    assert files.files is not None
    location = files.files.origin
    problem, fix = f"cannot load {files.files.name}", "check the reward model's files"
    with answered(problem, fix, ModelError), quiet_transformers():
        return (
            getattr(transformers, SCORES[files.scores][1])
            .from_pretrained(
                location.name,
                revision=location.revision,
                trust_remote_code=location.trust_remote_code,
                dtype=dtype,
                device_map={"": device},
            )
            .eval()
        )


def _classify(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return a classification model's scores at `ends`, fp32 [N, labels]; the head runs at these positions only."""
    inputs = {name: value for name, value in batch.items() if name != "ends"}
    hidden = getattr(model, model.base_model_prefix)(**inputs, use_cache=False).last_hidden_state
    head = model.score if hasattr(model, "score") else model.classifier
    return head(hidden.flatten(0, 1)[batch["ends"]]).float()


def answer_suffix(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, tuple[int, ...]]:
    """Return the token that ends an answer in the chat template, and the tokens that the template adds after it."""
    if not tokenizer.chat_template:
        return tokenizer.eos_token_id, ()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    plain = Encoder(tokenizer, ChatTemplate(tokenizer), max_length=2**20)
    row = plain({"document": [json.dumps({"messages": turns})], "location": [""]})
    ids, ends = [int(token) for token in row["input_ids"][0]], row["ends"][0]
    if not ends or ends[-1] < 0:
        return None, ()
    last = len(ids) - 1 - ids[::-1].index(ends[-1])
    return int(ends[-1]), tuple(ids[last + 1 :])


@dataclass(frozen=True)
class TextScorer:
    """Scores texts with a reward model.

    Attributes:
        scorer: a batch with `ends` → fp32 [N, labels].
        around: context of a forward.
        size: texts per batch.
        end: the token that ends an answer in the chat template.
        suffix: tokens that the template adds after it; `method: reward` trains the score at the last of them.
    """

    scorer: Scorer
    around: Around
    size: int
    device: torch.device
    end: int | None = None
    suffix: tuple[int, ...] = ()

    def score_answers(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[float | None]:
        """Return the score of each prompt with its answer, at the token at which `method: reward` trains it.

        That is the last token of the conversation. A finished answer is followed by the tokens that the chat template
        adds, such as the line break after ChatML's <|im_end|>. A truncated answer is scored at its last token.
        """
        texts = [
            [*prompt, *answer, *(self.suffix if answer and answer[-1] == self.end else ())]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return [float(scores[0, 0]) for scores in self._scored(texts, [[len(text) - 1] for text in texts])]

    def score_steps(
        self,
        tokenizer: PreTrainedTokenizerBase,
        separator: str,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
    ) -> list[float | None]:
        """Return the probability that all steps of each answer are right; None for an answer without steps.

        It is the product over the steps (arXiv:2305.20050, section 2.6). Each step is scored at its last token, and
        tokenized as in `method: prm`.
        """
        texts, ends = [], []
        for prompt, answer in zip(prompts, answers, strict=True):
            decoded = str(tokenizer.decode(list(answer), skip_special_tokens=True))
            steps = [step for step in decoded.split(separator) if step.strip()]
            text, step_ends = list(prompt), []
            for ids in tokenizer([separator, *steps], add_special_tokens=False, verbose=False)["input_ids"][1:]:
                text += [*ids, *tokenizer(separator, add_special_tokens=False)["input_ids"]]
                step_ends.append(len(text) - 1)
            texts.append(text)
            ends.append(step_ends)
        scores = self._scored(texts, ends)
        return [float(step_scores.softmax(-1)[:, 1].prod()) if len(step_scores) else None for step_scores in scores]

    @torch.no_grad()
    def _scored(self, texts: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return each text's scores at its `ends`, fp32 [len(ends), labels], on the CPU."""
        by_index: dict[int, Tensor] = {}
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))  # little padding
        for begin in range(0, len(order), self.size):
            indices = order[begin : begin + self.size]
            width = len(texts[indices[0]])
            ids = torch.full((len(indices), width), PAD)
            for row, index in enumerate(indices):
                ids[row, : len(texts[index])] = torch.tensor(texts[index])
            # padding is on the right, which causal attention of the text does not read
            positions = [row * width + end for row, index in enumerate(indices) for end in ends[index]]
            if not positions:
                continue
            batch = {"input_ids": ids, "ends": torch.tensor(positions)}
            with self.around():
                scores = self.scorer({name: value.to(self.device) for name, value in batch.items()}).cpu()
            by_text = scores.split([len(ends[index]) for index in indices])
            by_index |= zip(indices, by_text, strict=True)
        empty = torch.empty(0, 2)
        return [by_index.get(index, empty) for index in range(len(texts))]
