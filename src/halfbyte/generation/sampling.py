"""Sampling of the next token from its logits, and the tokens that end an answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..utils.errors import ConfigError
from ..utils.notices import notice
from ..utils.text import brief

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .grammar import GrammarRows

REPETITION_PENALTIES = 0.01, 100.0  # least and most
MIN_TEMPERATURE = 1e-6  # used for lower temperatures; tiny divisors underflow in fp32
# Keys of generation_config.json that halfbyte reads or replaces, or that change no answer.
READ_KEYS = frozenset({
    "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "max_new_tokens",
    "num_return_sequences", "transformers_version", "trust_remote_code", "use_cache", "cache_implementation",
    "cache_config", "max_cache_len", "return_legacy_cache", "prefill_chunk_size", "compile_config", "disable_compile",
    "continuous_batching_config", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "low_memory", "remove_invalid_values", "renormalize_logits", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit",
    "assistant_ensemble_weight", "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "speculation_type", "use_mtp",
})  # fmt: skip
NEUTRAL = {  # values of other keys with which they change nothing; None and False are neutral for all
    "min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "penalty_alpha": 0, "num_beams": 1, "repetition_penalty": 1, "encoder_repetition_penalty": 1, "guidance_scale": 1,
}  # fmt: skip
BEAM_KEYS = frozenset({"early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"})
SAMPLED_KEYS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # of `Sampling`, with neutral values
OTHER_SAMPLED_KEYS = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": 0}


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: divides the logits; 0 takes the most likely token and ignores the other settings.
        top_k: draw among this many of the most likely tokens; 0 for all.
        top_p: draw among the most likely tokens whose probabilities reach this sum (Holtzman et al. 2019,
            arXiv:1904.09751, section 3.1), including the token that reaches it.
        min_p: draw among tokens at least this times as likely as the most likely one (Nguyen et al. 2024,
            arXiv:2407.01082, section 3); 0 for all.
        seed: of the draws; None uses torch's global generator.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p"):
            if not isinstance(value := getattr(self, name), int | float):
                raise ConfigError(f"{name} is {brief(value)}", "give a number")
        for name, wrong, fix in (
            ("temperature", not 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k < 0, "0 or more"),
            ("top_p", not 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", not 0 <= self.min_p <= 1, "from 0 to 1"),
        ):
            if wrong:
                raise ConfigError(f"{name} is {getattr(self, name)}", f"use a value {fix}")

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Return the random generator for `draw`, or None for torch's global one."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return a token for each row of logits [B, V], int64 [B]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = self.probabilities(logits)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return probabilities fp32 [B, V], zero for tokens that cannot be drawn."""
        scores, candidates = self._scaled(logits), self.candidates(logits)
        return (scores if candidates is None else scores.masked_fill(~candidates, -torch.inf)).softmax(-1)

    def candidates(self, logits: Tensor) -> Tensor | None:
        """Return a mask bool [B, V] of the tokens that can be drawn (at least one per row), or None for all."""
        narrow = 0 < self.top_k < logits.shape[-1]
        if self.temperature == 0 or not (narrow or self.top_p < 1 or self.min_p > 0):
            return None
        scores = self._scaled(logits)
        if narrow:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[:, -1:], -torch.inf)
        probabilities = scores.softmax(-1)
        is_candidate = probabilities >= self.min_p * probabilities.amax(-1, keepdim=True)
        if self.top_p < 1:
            ordered, order = probabilities.sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p
            is_candidate &= ~torch.zeros_like(beyond).scatter(1, order, beyond)
        return is_candidate if not narrow else is_candidate & (scores > -torch.inf)

    def _scaled(self, logits: Tensor) -> Tensor:
        """Return logits over the temperature, fp32 [B, V], with a maximum of 0."""
        logits = logits.float()
        return (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, MIN_TEMPERATURE)


@dataclass(frozen=True)
class Penalties:
    """Changes to the logits before a token is drawn: transformers' repetition penalty, then those of OpenAI's API.

    Args:
        frequency: subtracted from a token's logit for each occurrence in the answer.
        presence: subtracted once if the answer contains the token.
        bias: token id → number added to its logit.
        repetition: divides the logits above 0 of the tokens in the prompt or the answer, and multiplies those below
            (Keskar et al. 2019, arXiv:1909.05858, section 4.1); 1 changes nothing.

    Raises:
        ConfigError: `repetition` is out of range.
    """

    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    repetition: float = 1.0

    def __post_init__(self) -> None:
        lowest, highest = REPETITION_PENALTIES
        if not (isinstance(self.repetition, int | float) and lowest <= self.repetition <= highest):
            raise ConfigError(
                f"repetition_penalty is {brief(self.repetition)}", f"use a value from {lowest} to {highest}"
            )

    def __bool__(self) -> bool:
        return bool(self.frequency or self.presence or self.bias or self.repetition != 1)

    def applied(self, logits: Tensor, counts: Tensor, prompted: Tensor | None = None) -> Tensor:
        """Return penalized logits fp32 [B, V].

        Args:
            logits: [B, V].
            counts: fp32 [B, V], of each token in the row's answer.
            prompted: bool [B, V], of the tokens in the row's prompt; None: none.
        """
        logits = logits.float()
        if self.repetition != 1:
            seen = counts > 0 if prompted is None else prompted | (counts > 0)
            repeated = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits = torch.where(seen, repeated, logits)
        penalized = logits - self.frequency * counts - self.presence * (counts > 0)
        if self.bias:
            penalized[:, list(self.bias)] += torch.tensor(list(self.bias.values()), device=logits.device)
        return penalized


class Sampler:
    """Draws one token per row and step.

    Args:
        prompts: token ids of each row, for a repetition penalty.
        grammars: limit the tokens that can be drawn; advanced by the caller.
    """

    def __init__(
        self,
        sampling: Sampling,
        penalties: Penalties | None,
        device: torch.device,
        prompts: Sequence[Sequence[int]] = (),
        grammars: GrammarRows | None = None,
    ):
        self.sampling = sampling
        self.penalties = penalties
        self.generator = sampling.generator(device)
        self.prompts = prompts
        self.grammars = grammars
        self.counts: Tensor | None = None  # fp32 [B, V], occurrences in each row's answer
        self.prompted: Tensor | None = None  # bool [B, V], whether a row's prompt has a token

    def __call__(self, logits: Tensor) -> Tensor:
        """Return tokens int64 [B] for logits [B, V]."""
        if self.penalties:
            if self.counts is None:
                self.counts = torch.zeros_like(logits, dtype=torch.float32)
                if self.penalties.repetition != 1 and self.prompts:
                    self.prompted = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
                    for row, prompt in zip(self.prompted, self.prompts, strict=True):
                        row[torch.tensor(prompt, device=logits.device)] = True
            logits = self.penalties.applied(logits, self.counts, self.prompted)
        if self.grammars is not None:
            logits = self.grammars.masked(logits)
        drawn = self.sampling.draw(logits, self.generator)
        if self.counts is not None:
            self.counts.scatter_add_(1, drawn.unsqueeze(1), self.counts.new_ones(len(drawn), 1))
        return drawn


def report_unread_keys(model: Any, sampling: Sampling, penalties: Penalties | None = None) -> None:
    """Log, once for each model, what its generation config asks for and generation with these settings does not do."""
    values = unread_keys(model, sampling)
    if penalties is not None and penalties.repetition != 1:
        values.pop("repetition_penalty", None)
    unread = ", ".join(f"{name}: {brief(value)}" for name, value in values.items())
    if unread:
        notice(
            f"unread generation_config: {unread}",
            f"the model's generation_config asks for {unread}, which halfbyte does not read: answers are generated"
            " without; temperature, top_k, top_p, min_p and the repetition penalty are arguments",
        )


def unread_keys(model: Any, sampling: Sampling) -> dict[str, Any]:
    """Return the keys of a model's generation config that are not read and would change answers of `sampling`."""
    config = getattr(model, "generation_config", None)
    values = {} if config is None else config.to_dict()
    samples = bool(values.pop("do_sample", False))
    several_beams = (values.get("num_beams") or 1) > 1
    unread = {"do_sample": True} if samples and sampling.temperature == 0 else {}
    for name, value in values.items():
        if value is None or value is False or value in ([], {}) or name in READ_KEYS or name[0] == "_":
            continue
        if name in SAMPLED_KEYS:
            chosen = getattr(sampling, name) not in (SAMPLED_KEYS[name], 0)
            applies = samples and not chosen and value != SAMPLED_KEYS[name]
        elif name in OTHER_SAMPLED_KEYS:
            applies = samples and value != OTHER_SAMPLED_KEYS[name]
        elif name in BEAM_KEYS:
            applies = several_beams
        else:
            applies = value != NEUTRAL.get(name)
        if applies:
            unread[name] = value
    return unread


def eos_tokens(model: Any) -> set[int]:
    """Return the EOS tokens of the model's generation config."""
    eos_token_id = model.generation_config.eos_token_id
    return set(eos_token_id) if isinstance(eos_token_id, list) else {eos_token_id} - {None}


def stop_tokens(tokenizer: PreTrainedTokenizerBase, model: Any, turn_ends: Sequence[str]) -> list[int]:
    """Return the tokenizer's EOS, the model's EOS tokens, and the special tokens `turn_ends`, as sorted ids."""
    ends = (tokenizer.convert_tokens_to_ids(token) for token in turn_ends)
    return sorted(token for token in {tokenizer.eos_token_id, *eos_tokens(model), *ends} if token is not None)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the special token that the chat template ends an answer with; empty if it ends with text.

    ChatML models end turns with <|im_end|> whatever their EOS is, so this renders a turn and reads its end.
    """
    from ..data.chat import prompt_text

    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "halfbyte"}]
    _, _, ending = prompt_text(tokenizer, turns, add_generation_prompt=False).rpartition("halfbyte")
    return [token for token in tokenizer.tokenize(ending)[:1] if token in tokenizer.all_special_tokens]
