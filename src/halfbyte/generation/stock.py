"""transformers' own forward, for models without a forward of halfbyte's.

Inputs are prepared by the model's own methods, as in transformers' `generate`: some models drop their mask or cache, or
change positions between steps. Rows share a batch unless padding would change their answers.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from ..modeling.compute_dtype import compute_autocast, no_input_casts
from ..modeling.layer import causal_lm_of
from ..modeling.transformers_versions import given_cache
from ..parallel.shard.model import sharded
from ..utils.errors import ModelError
from ..utils.notices import notice
from .adapters import adapter_layers, adapter_set
from .decoder import context_length
from .images import Columns, PromptImages
from .row_groups import Groups, RowGroups, WatchPrompt

PROBE_TOKENS = 2  # few, since recurrent states forget
PROBE_PADDING = 16
PROBE_STEPS = 2
ROUNDING = 1e-3  # largest difference between logits, of the largest logit, that sums in another order explain
ROUNDING_16_BITS = 0.03
Batching = Literal["padded", "equal", "single"]  # which rows of a model may share a batch: any, of one length, none
LIMITS = {
    "equal": "padding changes the answers of {}: only rows of equal length are computed together, which is slower",
    "single": "rows of a batch change each other's answers in {}: they are computed one by one, which is slower",
}
_batching: weakref.WeakKeyDictionary[Any, Batching] = weakref.WeakKeyDictionary()


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

    def split(tokens: Tensor, padding: Tensor, images: Collection[int]) -> Groups:
        lengths = (tokens.shape[1] - padding).tolist()
        batching = _batching_of(model, adapters[0], tokens, padding) if len(lengths) > 1 else "padded"
        by_length = batching == "equal" or _crosses_switch(causal, lengths, end)
        numbers = range(len(lengths)) if batching == "single" else lengths if by_length else [0] * len(lengths)
        alone = [row if row in images else None for row in range(len(lengths))]  # its pixels have no row
        keys = list(zip(adapters, numbers, alone, strict=True))
        members: dict[Any, list[int]] = {}
        for row, key in enumerate(keys):
            members.setdefault(key, []).append(row)
        return [(rows, StockRows(model, adapter)) for (adapter, *_), rows in members.items()]

    return RowGroups(split)


class StockRows:
    """An engine for rows with one adapter; a row with images is alone."""

    def __init__(self, model: Any, adapter: str | None):
        self.model, self.adapter = model, adapter
        self.causal = causal_lm_of(model)
        self.layers = adapter_layers(model)
        self.sharded = sharded(model)
        self.tokens = torch.empty(0)
        self.keywords: dict[str, Any] = {}
        self.states: list[tuple[dict[str, Any], str, Tensor]] = []

    def prefill(
        self, tokens: Tensor, padding: Tensor, watch: WatchPrompt | None = None, images: Mapping[int, PromptImages] = {}
    ) -> Tensor:
        self.tokens = tokens
        self.states = []
        for attributes, name, _ in _states_in_modules(self.causal):  # of an earlier batch
            attributes[name] = None
        mask = (torch.arange(tokens.shape[1], device=tokens.device) >= padding.unsqueeze(1)).long()
        columns = {name: value.to(tokens.device) for row in images.values() for name, value in row.columns.items()}
        with self._computing():  # may run the vision tower
            self.keywords = _generation_keywords(self.causal, tokens, mask, columns)
        logits_to_keep = self.keywords.get("logits_to_keep")
        if watch is not None and logits_to_keep is not None:
            self.keywords["logits_to_keep"] = 0
        logits = self._forward(is_first_iteration=True)
        if watch is not None:
            watch(range(len(tokens)), 0, logits)
        if logits_to_keep is not None:
            self.keywords["logits_to_keep"] = logits_to_keep
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
        causal = self.causal
        with self._computing():
            inputs = causal.prepare_inputs_for_generation(self.tokens, **step, **self.keywords)
            cache = given_cache(self.keywords)
            if cache and not given_cache(inputs) and step.get("next_sequence_length"):
                # The model dropped its cache, e.g. at a switch of RoPE: pass all tokens, not the last one.
                keywords = {key: value for key, value in self.keywords.items() if key not in cache}
                inputs = causal.prepare_inputs_for_generation(self.tokens, **keywords)
            for attributes, name, state in self.states:
                attributes[name] = state
            if (positions := inputs.get("position_ids")) is not None:  # finished rows may run past the last one
                inputs["position_ids"] = positions.clamp(max=(context_length(self.model) or positions.shape[-1]) - 1)
            outputs = causal(**inputs, return_dict=True)
            self.states = _states_in_modules(causal)
        self.keywords = causal._update_model_kwargs_for_generation(outputs, self.keywords, is_encoder_decoder=False)
        return outputs.logits

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Run the model with the rows' adapter, in the dtype that halfbyte computes in."""
        model = self.model
        with adapter_set(model, self.layers, self.adapter), no_input_casts(model), compute_autocast(model):
            yield


def _states_in_modules(causal: Any) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return the states that modules hold as attributes, which other batches overwrite.

    RecurrentGemma holds its layers' states there, and models with M-RoPE the shift of later tokens' positions.
    """
    modules = causal.modules() if getattr(causal, "_is_stateful", False) else (causal.base_model,)
    return [
        (module.__dict__, name, value)
        for module in modules
        for name, value in module.__dict__.items()
        if ("state" in name or name == "rope_deltas") and isinstance(value, Tensor)
    ]


def _generation_keywords(causal: Any, tokens: Tensor, mask: Tensor, images: Columns) -> dict[str, Any]:
    """Return the keywords that transformers' `generate` passes to its decoding loop: cache, mask, images, ..."""
    keywords: dict[str, Any] = {}

    def capture(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **decoding: Any,
    ) -> Tensor:
        keywords.update(decoding)
        return input_ids

    masks = {"attention_mask": mask} if "attention_mask" in inspect.signature(causal.forward).parameters else {}
    models_config = causal.generation_config
    causal.generation_config = GenerationConfig()  # `generate` would fill in the model's beams, penalties and caches
    try:
        plain = GenerationConfig(max_new_tokens=1, use_cache=True)
        GenerationMixin.generate(causal, tokens, generation_config=plain, custom_generate=capture, **masks, **images)
    finally:
        causal.generation_config = models_config
    return keywords


def _crosses_switch(causal: Any, lengths: Sequence[int], end: int) -> bool:
    """Return whether rows are, or may come to be, on both sides of a length at which RoPE changes (longrope)."""
    parameters = getattr(causal.config.get_text_config(), "rope_parameters", None) or {}
    ropes = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    switches = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    return any(min(lengths) <= switch < end for switch in switches)


def _batching_of(model: Any, adapter: str | None, tokens: Tensor, padding: Tensor) -> Batching:
    """Return which rows may share a batch; a model is probed once."""
    causal = causal_lm_of(model)
    if causal not in _batching:
        if _answers_as_alone(model, adapter, tokens, padding, PROBE_PADDING):
            _batching[causal] = "padded"
        else:
            _batching[causal] = "equal" if _answers_as_alone(model, adapter, tokens, padding, 0) else "single"
            name = type(causal).__name__
            notice(f"generation: batches of {name}", LIMITS[_batching[causal]].format(name))
    return _batching[causal]


def _answers_as_alone(model: Any, adapter: str | None, tokens: Tensor, padding: Tensor, pads: int) -> bool:
    """Compare the logits of the first tokens of the longest prompt, alone and in a batch with others, padded."""
    longest = int(padding.argmin())
    prompt = tokens[longest : longest + 1, int(padding[longest]) :]
    row = prompt[:, :PROBE_TOKENS]
    both_padding = row.new_tensor([pads, 0])
    padded = torch.cat([row.new_zeros(1, pads), row], 1)
    neighbour = prompt.flip(1).repeat(1, padded.shape[1])[:, : padded.shape[1]]
    alone, batched = StockRows(model, adapter), StockRows(model, adapter)
    pairs = [(alone.prefill(row, both_padding[1:]), batched.prefill(torch.cat([padded, neighbour]), both_padding))]
    for at in range(PROBE_STEPS):
        token = row[:, at % row.shape[1]]
        pairs.append((alone.step(token), batched.step(torch.cat([token, neighbour[:, at]]))))
    differences = ((single[0] - batch[0]).abs().max() / single[0].abs().max() for single, batch in pairs)
    largest = max(map(float, differences))
    exact = next(model.parameters()).dtype in (torch.float32, torch.float64)
    return largest <= (ROUNDING if exact else ROUNDING_16_BITS)
