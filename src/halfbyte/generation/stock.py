"""transformers' own forward, for models without a forward of halfbyte's.

Inputs are prepared by the model's own methods, as in transformers' `generate`: some models drop their mask or cache, or
change positions between steps. Rows share a batch unless padding would change their answers.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from ..modeling.adapters import compute_autocast, no_input_casts
from ..modeling.layer import causal_lm_of, given_cache
from ..parallel.shard.model import sharded
from ..utils.errors import ModelError
from ..utils.notices import notice
from .adapters import adapter_layers, adapter_set
from .decoder import context_length
from .row_groups import Groups, RowGroups, WatchPrompt

PROBE_TOKENS = 16
PROBE_STEPS = 2
ROUNDING = 1e-3  # largest difference between logits, of the largest logit, that sums in another order explain
ROUNDING_16_BITS = 0.03
_pads_change_answers: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def stock_engine(model: Any, adapters: Sequence[str | None], end: int) -> RowGroups:
    """Return an engine that runs transformers' forward.

    Args:
        adapters: the adapter of each row; None for the base.
        end: the batch's padded prompts and new tokens end at or before this position.
    """
    causal = causal_lm_of(model)
    if not isinstance(causal, GenerationMixin):
        raise ModelError(
            f"{type(causal).__name__} is not a GenerationMixin of transformers, which prepares the inputs of each step",
            "load a class of transformers for causal language models",
        )

    def split(tokens: Tensor, padding: Tensor) -> Groups:
        lengths = (tokens.shape[1] - padding).tolist()
        uneven = len(set(lengths)) > 1
        alone = uneven and (_crosses_switch(causal, lengths, end) or _pads_matter(model, adapters[0], tokens, padding))
        keys = [(adapter, length if alone else 0) for adapter, length in zip(adapters, lengths, strict=True)]
        members: dict[Any, list[int]] = {}
        for row, key in enumerate(keys):
            members.setdefault(key, []).append(row)
        return [(rows, StockRows(model, adapter)) for (adapter, _), rows in members.items()]

    return RowGroups(split)


class StockRows:
    """An engine for rows with one adapter."""

    def __init__(self, model: Any, adapter: str | None):
        self.model, self.adapter = model, adapter
        self.causal, self.layers, self.sharded = causal_lm_of(model), adapter_layers(model), sharded(model)
        self.tokens = torch.empty(0)
        self.keywords: dict[str, Any] = {}
        self.states: list[tuple[dict[str, Any], str, Tensor]] = []

    def prefill(self, tokens: Tensor, padding: Tensor, watch: WatchPrompt | None = None) -> Tensor:
        self.tokens = tokens
        mask = (torch.arange(tokens.shape[1], device=tokens.device) >= padding.unsqueeze(1)).long()
        self.keywords = _generation_keywords(self.causal, tokens, mask)
        wanted = self.keywords.get("logits_to_keep")
        if watch is not None and wanted is not None:
            self.keywords["logits_to_keep"] = 0
        logits = self._forward(is_first_iteration=True)
        if watch is not None:
            watch(range(len(tokens)), 0, logits)
        if wanted is not None:
            self.keywords["logits_to_keep"] = wanted
        return self._last(logits)

    def step(self, tokens: Tensor) -> Tensor:
        self.tokens = torch.cat([self.tokens, tokens.unsqueeze(1)], dim=1)
        return self._last(self._forward(next_sequence_length=1 if self.keywords.get("use_cache") else None))

    def _last(self, logits: Tensor) -> Tensor:
        last = logits[:, -1].float()
        return last if self.sharded is None else self.sharded.broadcast_(last.contiguous())

    @torch.no_grad()  # inference mode does not decompose some ops on quantized weights (DoRA)
    def _forward(self, **step: Any) -> Tensor:
        """Return the logits [B, T, V] of the tokens that the cache does not hold, or of the last one."""
        model, causal = self.model, self.causal
        with adapter_set(model, self.layers, self.adapter), no_input_casts(model), compute_autocast(model):
            inputs = causal.prepare_inputs_for_generation(self.tokens, **step, **self.keywords)
            cache = given_cache(self.keywords)
            if cache and not given_cache(inputs) and step.get("next_sequence_length"):
                # The model dropped its cache, e.g. at a switch of RoPE. transformers 5.17 then passes one token.
                keywords = {key: value for key, value in self.keywords.items() if key not in cache}
                inputs = causal.prepare_inputs_for_generation(self.tokens, **keywords)
            for attributes, name, state in self.states:
                attributes[name] = state
            if (positions := inputs.get("position_ids")) is not None:  # finished rows may run past the last one
                inputs["position_ids"] = positions.clamp(max=(context_length(model) or positions.shape[-1]) - 1)
            outputs = causal(**inputs, return_dict=True)
            if getattr(causal, "_is_stateful", False):
                self.states = _states_in_modules(causal)
        self.keywords = causal._update_model_kwargs_for_generation(outputs, self.keywords)
        return outputs.logits


def _states_in_modules(causal: Any) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return the tensors that modules hold as attributes, e.g. RecurrentGemma's states; other rows overwrite them."""
    attributes = map(vars, causal.modules())
    return [(own, name, value) for own in attributes for name, value in own.items() if isinstance(value, Tensor)]


def _generation_keywords(causal: Any, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
    """Return the keywords with which transformers' `generate` begins its loop: cache, mask, positions, ..."""
    keywords: dict[str, Any] = {}

    def capture(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **more: Any,
    ) -> Tensor:
        keywords.update(more)
        return input_ids

    masks = {"attention_mask": mask} if "attention_mask" in inspect.signature(causal.forward).parameters else {}
    own = causal.generation_config
    causal.generation_config = GenerationConfig()  # `generate` would fill in the model's beams, penalties and caches
    try:
        plain = GenerationConfig(max_new_tokens=1, use_cache=True)
        GenerationMixin.generate(causal, tokens, generation_config=plain, custom_generate=capture, **masks)
    finally:
        causal.generation_config = own
    return keywords


def _crosses_switch(causal: Any, lengths: Sequence[int], end: int) -> bool:
    """Return whether rows are, or may come to be, on both sides of a length at which RoPE changes (longrope)."""
    parameters = getattr(causal.config.get_text_config(), "rope_parameters", None) or {}
    ropes = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    switches = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    return any(min(lengths) <= switch < end for switch in switches)


def _pads_matter(model: Any, adapter: str | None, tokens: Tensor, padding: Tensor) -> bool:
    """Return whether a row's logits change if it is padded on the left; a model is probed once."""
    causal = causal_lm_of(model)
    if causal not in _pads_change_answers:
        _pads_change_answers[causal] = changes = _probe_padding(model, adapter, tokens, padding)
        if changes:
            notice(
                f"generation: padding of {type(causal).__name__}",
                f"padding changes the answers of {type(causal).__name__}: rows of equal length are computed together,"
                " other lengths one after the other",
            )
    return _pads_change_answers[causal]


def _probe_padding(model: Any, adapter: str | None, tokens: Tensor, padding: Tensor) -> bool:
    """Compare the logits of some tokens of the longest prompt alone and in a batch, padded to twice the length."""
    longest = int(padding.argmin())
    row = tokens[longest : longest + 1, int(padding[longest]) :][:, :PROBE_TOKENS]
    padded = torch.cat([torch.cat([torch.zeros_like(row), row], 1), torch.cat([row, row], 1)])
    alone, batched = StockRows(model, adapter), StockRows(model, adapter)
    pads = torch.tensor([row.shape[1], 0], device=row.device)
    pairs = [(alone.prefill(row, pads[1:]), batched.prefill(padded, pads))]
    for at in range(PROBE_STEPS):
        token = row[:, at % row.shape[1]]
        pairs.append((alone.step(token), batched.step(token.expand(2))))
    largest = max(float((one[0] - both[0]).abs().max() / one[0].abs().max()) for one, both in pairs)
    exact = next(model.parameters()).dtype in (torch.float32, torch.float64)
    return not largest <= (ROUNDING if exact else ROUNDING_16_BITS)
