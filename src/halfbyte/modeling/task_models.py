"""Models of tasks: transformers' classifiers that a trained head fits, and what a model computes for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..config.methods import SCORES
from ..utils.errors import ModelError
from .architectures import stored_task
from .layer import causal_lm_of


def check_language_model(config: Any, name: str) -> None:
    """Check that a model to train or to generate with is a language model.

    Raises:
        ModelError: it is a classifier, whose head training would replace.
    """
    if stored_task(getattr(config, "architectures", None)) is not None:
        raise ModelError(
            f"{name} is a {config.architectures[0]}, which has no head of tokens",
            "name the language model that it was made from; transformers loads and runs the classifier",
        )


def task_class(task_type: str, config: Any) -> Any:
    """Return transformers' class of a task for a family, which its auto class would choose; None without one."""
    import transformers

    mapping: Any = getattr(transformers, SCORES[task_type][1])._model_mapping
    return mapping.get(type(config), None)


def check_task_model(task_type: str, causal_lm: Any, method: str) -> None:
    """Check that transformers' class of a task computes what this family's backbone and head do.

    Args:
        causal_lm: the language model, on the meta device.

    Raises:
        ModelError: transformers has no such class, or one with another backbone or head; or the model is an encoder.
    """
    config, backbone = causal_lm.config, causal_lm.base_model
    fix = "use a decoder family such as Llama, Qwen, Mistral or Gemma"
    if getattr(config, "is_decoder", None) is False and not getattr(config, "is_causal", False):
        raise ModelError(f"method: {method}: {config.model_type} is an encoder, and halfbyte trains decoders", fix)
    if config.get_text_config() is not config:
        raise ModelError(f"method: {method}: {config.model_type} is a multimodal model", "use a text model")
    cls, name = task_class(task_type, config), SCORES[task_type][1]
    if cls is None:
        raise ModelError(f"method: {method}: transformers has no {name} for {config.model_type}", fix)
    with torch.device("meta"):
        model = cls(config)
    labels = SCORES[task_type][0]
    same_backbone = type(model.base_model) is type(backbone)
    same_head = not labels or isinstance(getattr(model, "score", None), nn.Linear)
    if not (same_backbone and same_head) or (labels and model.base_model_prefix != causal_lm.base_model_prefix):
        raise ModelError(f"method: {method}: {cls.__name__} has another head or backbone than halfbyte trains", fix)


def head_outputs(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the outputs of a model's head for each token of `ids` [B, T]: of `score`, or of the head of tokens."""
    base = causal_lm_of(model)
    if isinstance(getattr(base, "score", None), nn.Module):
        outputs: Tensor = base.score(base.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        return outputs
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def last_hidden_states(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the last hidden states [B, T, H] of a language model or of a backbone alone, with or without adapters."""
    hidden: Tensor = causal_lm_of(model).base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden
