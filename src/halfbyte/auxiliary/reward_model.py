"""Reward models as rewards: on the weights that train, where their adapter is on those, else beside them."""

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

from halfbyte.auxiliary.find import check_vocabulary, digest_of_model
from halfbyte.config import RunConfig
from halfbyte.config.methods import SCORES
from halfbyte.data.chat import ChatTemplate
from halfbyte.data.encode import Encoder
from halfbyte.loading.load import check_stored, load_model
from halfbyte.methods.answers import as_adapter, score
from halfbyte.modeling.adapters import check_adapter_files, compute_autocast, load_adapter
from halfbyte.reading.boundary import answered
from halfbyte.rl.rewards.reward_models import RewardModelFiles, find_reward_models, key_of
from halfbyte.rl.rewards.score import RewardModel, Rewards
from halfbyte.utils.console import Console
from halfbyte.utils.errors import ModelError, attribute_to_key
from halfbyte.utils.streams import quiet_transformers

from ..utils.text import one_line
from .teacher import tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD = 0  # of texts in a batch, whose positions nobody asks for


def check_judges(
    config: RunConfig, rewards: Rewards, model_config: Any, tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    """Whether the reward models of a run are there and read the tokens of the model that trains; said.

    Args:
        model_config: transformers', of that model.

    Raises:
        HalfbyteError: one is not, and why.
    """
    for found in find_reward_models(config, rewards.specs):
        name = key_of(str(found.spec.options["path"]))
        with attribute_to_key(name):
            if found.adapter is not None:
                check_adapter_files(found.adapter)
            if found.files is not None:
                if found.adapter is not None:
                    check_stored(found.files, config.storage)
                check_vocabulary(name, found.files, model_config, tokenizer.get_vocab(), tokens_of(found.files))
        where = "it shares the model's weights" if found.files is None else f"on {found.files.name}"
        what = "scores answers" if found.scores == "SEQ_CLS" else "scores steps, whose product counts"
        console.print(one_line(f"{name} {what}; {where}"), soft_wrap=True)


def judge_files(config: RunConfig, rewards: Rewards) -> dict[str, str]:
    """SHA-256 of the reward models of a run that have weights of their own, by their paths or hub ids; their adapters
    are among the files of `rewards`."""
    found = [each.files for each in find_reward_models(config, rewards.specs) if each.files is not None]
    return {name: digest for files in found for name, digest in digest_of_model(files).items()}


@contextlib.contextmanager
def judging(
    config: RunConfig,
    rewards: Rewards,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[None]:
    """Inside, the reward models among `rewards` answer.

    Args:
        model: that trains.
        dtype: of matrix products.

    Raises:
        HalfbyteError: one cannot be loaded.
    """
    with ExitStack() as stack:
        for number, found in enumerate(find_reward_models(config, rewards.specs)):
            asked = stack.enter_context(_asked(config, found, model, device, dtype, f"reward-{number}"))
            size = config.per_device_eval_batch_size or config.per_device_train_batch_size
            scores = Scores(*asked, size, device, *behind_answers(tokenizer))
            judge: RewardModel = scores.of_answers
            if found.scores == "TOKEN_CLS":
                judge = partial(scores.of_steps, tokenizer, found.separator)
            rewards.models[found.spec.name] = judge
        try:
            yield
        finally:
            rewards.models.clear()


Around = Callable[[], AbstractContextManager[Any]]
Scorer = Callable[[dict[str, Tensor]], Tensor]


@contextlib.contextmanager
def _asked(
    config: RunConfig, found: RewardModelFiles, model: Any, device: torch.device, dtype: torch.dtype, name: str
) -> Iterator[tuple[Scorer, Around]]:
    """What scores a batch, and what is around it."""
    if found.adapter is None:
        yield partial(_whole, _load_whole(found, device, dtype)), contextlib.nullcontext
        return
    if found.files is not None:
        how: dict[str, Any] = {"device": device, "attn_implementation": config.attn_implementation}
        base = load_model(found.files, config.storage, dtype=dtype, **how)
        other = load_adapter(base, found.adapter, found.files.name)
        yield partial(score, other), partial(compute_autocast, other, dtype)
        return
    load_adapter(model, found.adapter, config.model_name_or_path, name)
    _freeze(model, name)
    try:
        yield partial(score, model), partial(_as_judge, model, name, dtype)
    finally:
        model.delete_adapter(name)
        with contextlib.suppress(AttributeError):  # another judge had the same head
            del model.get_base_model().score


def _freeze(model: Any, name: str) -> None:
    """PEFT has what an adapter saves whole trained, whatever is said."""
    for key, parameter in model.named_parameters():
        if f".{name}." in key or ".score." in key:
            parameter.requires_grad_(False)


@contextlib.contextmanager
def _as_judge(model: Any, name: str, dtype: torch.dtype) -> Iterator[None]:
    with as_adapter(model, name), compute_autocast(model, dtype):
        yield
    _freeze(model, name)


def _load_whole(found: RewardModelFiles, device: torch.device, dtype: torch.dtype) -> Any:
    """A classification model as transformers loads it, in the run's dtype."""
    assert found.files is not None
    place = found.files.place
    said, fix = f"cannot load {found.files.name}", "check the reward model's files"
    with answered(said, fix, ModelError), quiet_transformers():
        return (
            getattr(transformers, SCORES[found.scores][1])
            .from_pretrained(
                place.name,
                revision=place.revision,
                trust_remote_code=place.trust_remote_code,
                dtype=dtype,
                device_map={"": device},
            )
            .eval()
        )


def _whole(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Scores at `ends` of a classification model, whose backbone and head are asked apart: fp32 [N, labels]."""
    inputs = {name: value for name, value in batch.items() if name != "ends"}
    hidden = getattr(model, model.base_model_prefix)(**inputs, use_cache=False).last_hidden_state
    head = model.score if hasattr(model, "score") else model.classifier
    return head(hidden.flatten(0, 1)[batch["ends"]]).float()


def behind_answers(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, tuple[int, ...]]:
    """Return the token that ends an answer by the chat template, and the tokens that the template writes behind it."""
    if not tokenizer.chat_template:
        return tokenizer.eos_token_id, ()
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    plain = Encoder(tokenizer, ChatTemplate(tokenizer), max_length=2**20)
    row = plain({"document": [json.dumps({"messages": asked})], "where": [""]})
    ids, ends = [int(token) for token in row["input_ids"][0]], row["ends"][0]
    if not ends or ends[-1] < 0:
        return None, ()
    last = len(ids) - 1 - ids[::-1].index(ends[-1])
    return int(ends[-1]), tuple(ids[last + 1 :])


@dataclass(frozen=True)
class Scores:
    """Asks a reward model about texts.

    Attributes:
        scorer: a batch with `ends` → fp32 [N, labels].
        around: its forwards.
        size: texts at once.
        end: the token that ends an answer by the chat template.
        behind: what the template writes behind it, which `method: reward` trained the score at the end of.
    """

    scorer: Scorer
    around: Around
    size: int
    device: torch.device
    end: int | None = None
    behind: tuple[int, ...] = ()

    def of_answers(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[float | None]:
        """Return the score of each prompt with its answer, at the token that `method: reward` learns it at.

        That is the last token of the whole conversation: behind an answer that has ended stands what the chat template
        writes there, such as the line break behind ChatML's <|im_end|>. An answer that was cut is scored at its end.
        """
        texts = [
            [*prompt, *answer, *(self.behind if answer and answer[-1] == self.end else ())]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return [float(found[0, 0]) for found in self._scored(texts, [[len(text) - 1] for text in texts])]

    def of_steps(
        self,
        tokenizer: PreTrainedTokenizerBase,
        separator: str,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
    ) -> list[float | None]:
        """The probability that every step of an answer is right: the product over its steps (arXiv:2305.20050, section
        2.6), each taken at its last token, tokenized as `method: prm` learns it. None of an answer without steps."""
        texts, ends = [], []
        for prompt, answer in zip(prompts, answers, strict=True):
            said = str(tokenizer.decode(list(answer), skip_special_tokens=True))
            steps = [step for step in said.split(separator) if step.strip()]
            text, places = list(prompt), []
            for ids in tokenizer([separator, *steps], add_special_tokens=False, verbose=False)["input_ids"][1:]:
                text += [*ids, *tokenizer(separator, add_special_tokens=False)["input_ids"]]
                places.append(len(text) - 1)
            texts.append(text)
            ends.append(places)
        found = self._scored(texts, ends)
        return [float(each.softmax(-1)[:, 1].prod()) if len(each) else None for each in found]

    @torch.no_grad()
    def _scored(self, texts: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> list[Tensor]:
        """fp32 [places, labels] of each text, on the CPU; like lengths together."""
        found: dict[int, Tensor] = {}
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        for begin in range(0, len(order), self.size):
            some = order[begin : begin + self.size]
            width = len(texts[some[0]])
            ids = torch.full((len(some), width), PAD)
            for row, index in enumerate(some):
                ids[row, : len(texts[index])] = torch.tensor(texts[index])
            # what fills a row up stands behind its text, where causal attention does not look
            places = [row * width + end for row, index in enumerate(some) for end in ends[index]]
            if not places:
                continue
            batch = {"input_ids": ids, "ends": torch.tensor(places)}
            with self.around():
                scores = self.scorer({name: value.to(self.device) for name, value in batch.items()}).cpu()
            parts = scores.split([len(ends[index]) for index in some])
            found |= zip(some, parts, strict=True)
        empty = torch.empty(0, 2)
        return [found.get(index, empty) for index in range(len(texts))]
