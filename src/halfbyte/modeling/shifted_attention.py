"""Shifted sparse attention of LongLoRA (S²-Attn; Chen et al. 2023, arXiv:2309.12307, section 3.2) while a model trains.

A token attends within its group of G tokens. For the second half of the heads, groups begin half a group later, so that
information crosses the borders of the others. Groups are counted within documents and end with them, which is a choice
of attention bounds alone: two calls of attention over half of the heads each. No mask is made, and memory is linear in
the length. As in the paper's code, the first and the last shifted group of a document are the shorter ones; the formula
with rolled tokens (its algorithm 1) would let the first tokens see the last ones. Evaluation and inference attend to
everything.

`shifted_attention` selects the function for a model's forwards in training mode; checkpointed layers, recomputed in the
backward, use it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv

from ..autograd import attention as causal
from ..autograd.tiled_attention import tiled_attention
from ..ops.attention import Scores, group_begins, group_bounds
from ..utils.errors import ModelError, first_line
from ..utils.notices import notice
from .attention import MAX_HEAD_DIM, NO_MASK
from .config_facts import has_custom_scores
from .layer import causal_lm_of, decoder_layers
from .tiny_model import tiny_model

KEY, NAME = "shift_attn", "halfbyte_shifted"
WITHOUT = f"remove {KEY}"
PROBE_GROUP, PROBE_TOKENS = 4, 18


@contextlib.contextmanager
def shifted_attention(model: nn.Module, group: int | None) -> Iterator[None]:
    """Within the context, `model` attends in shifted groups in training mode.

    Args:
        model: a causal LM of transformers, plain or inside a `peft.PeftModel`, patched or not.
        group: tokens of a group, an even number; None: attention is as the model's.
    """
    if group is None:
        yield
        return
    backbone = causal_lm_of(model).base_model
    config = getattr(backbone, "language_model", backbone).config
    loaded, name = config._attn_implementation, f"{NAME}_{group}"
    AttentionInterface.register(name, _in_groups(group))
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)

    def choose(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        config._attn_implementation = name if module.training else loaded
        if module.training:  # transformers then makes no mask, and does not search for documents
            device = next(module.parameters()).device
            kwargs |= {"attention_mask": torch.empty(NO_MASK, dtype=torch.bool, device=device), "use_cache": False}
        return args, kwargs

    hook = backbone.register_forward_pre_hook(choose, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        config._attn_implementation = loaded


def _in_groups(group: int) -> Callable[..., tuple[Tensor, None]]:
    """Return the attention function of groups of `group` tokens, as transformers' AttentionInterface calls it."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        family = type(module).__name__
        _check_window(family, options.get("sliding_window"), group)
        if options.get("softcap") is not None or options.get("s_aux") is not None or options.get("dropout"):
            raise ModelError(f"{KEY}: {family} caps its scores, or has sinks or dropout", WITHOUT)
        position_ids: Tensor | None = options.get("position_ids")
        if position_ids is None or position_ids.dim() != 2 or value.shape[-1] != query.shape[-1]:
            raise ModelError(f"{KEY}: {family} does not give attention its positions and heads of one width", WITHOUT)
        rows, heads, length, size = query.shape
        if key.shape[1] > 1 and (-(-heads // 2)) % (heads // key.shape[1]):  # half of the heads splits a group of GQA
            key, value = (repeat_kv(x, heads // x.shape[1]) for x in (key, value))
        positions = position_ids.expand(rows, -1)
        halves = [x.tensor_split([-(-x.shape[1] // 2)], 1) if x.shape[1] > 1 else (x, x) for x in (query, key, value)]
        scale = size**-0.5 if options.get("scaling") is None else options["scaling"]
        fused = query.is_cuda and query.dtype in causal.DTYPES and size <= MAX_HEAD_DIM
        outputs = []
        for q, k, v, shift in zip(*halves, (0, group // 2), strict=True):
            begins = group_begins(positions, group, shift)
            if fused:
                documents = options.get("cu_seq_lens_q")
                bounds = group_bounds(begins, group, rows * length if documents is None else documents.numel() - 1)
                q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
                outputs.append(causal.varlen_attention(q, k, v, bounds, group, scale).unflatten(0, (rows, length)))
            else:
                outputs.append(tiled_attention(q, k, v, Scores(scale), None, begins, group).transpose(1, 2))
        return torch.cat(outputs, 2), None

    return attend


def check_shifted_attention(model_config: Any, group: int | None, *, trust_remote_code: bool = False) -> None:
    """Check, on a tiny model of the same kinds of layers, that all of them can attend in shifted groups.

    Raises:
        ModelError: a layer has no standard attention, or a window of less than a group.
    """
    if group is None:
        return
    text = model_config.get_text_config()
    if has_custom_scores(text) or getattr(text, "attention_dropout", None):
        raise ModelError(f"{KEY}: {text.model_type} models cap their scores, or have sinks or dropout", WITHOUT)
    try:
        model = tiny_model(model_config, trust_remote_code=trust_remote_code).train()
    except Exception as error:  # the model's code may reject sizes that it was not made for; its first step checks it
        notice("shift_attn-untried", f"{KEY} was not tried on a tiny model, which fails: {first_line(error)}")
        return
    calls: list[Any] = []
    with shifted_attention(model, PROBE_GROUP), torch.no_grad():
        name, layers = f"{NAME}_{PROBE_GROUP}", len(decoder_layers(model)[1])
        attend = _in_groups(PROBE_GROUP)

        def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            calls.append(kwargs.get("sliding_window"))
            return attend(module, *args, **kwargs)

        AttentionInterface.register(name, recorded)
        model(input_ids=torch.arange(10, 10 + PROBE_TOKENS)[None])
    if len(calls) != layers:
        wrong = f"{KEY}: of {layers} layers of a small {text.model_type} model, {len(calls)} have standard attention"
        raise ModelError(wrong, WITHOUT)
    window = getattr(text, "sliding_window", None)
    if any(call is not None for call in calls):
        _check_window(text.model_type, window, group)


def _check_window(model: str, window: int | None, group: int) -> None:
    """Raise a ModelError if a model's window of tokens is smaller than a group."""
    if window is not None and window < group:
        fix = f"set {KEY}_group_size to {window} or less, or {WITHOUT}"
        raise ModelError(f"{KEY}: {model} attends to {window} tokens, less than a group of {group}", fix)
