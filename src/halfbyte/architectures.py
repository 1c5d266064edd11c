"""Language models alone and beside a vision tower: which class of transformers they are, and which part is which."""

from __future__ import annotations

from typing import Any


def auto_class(config: Any) -> Any:
    """The Auto class of transformers that builds and loads a model of `config`: of causal LMs where it has one (a
    class of the model's own code included), else of models that take images and text."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    own_code = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    return (
        AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or own_code else AutoModelForImageTextToText
    )


def beside_text(model: Any) -> list[str]:
    """Names of what a multimodal model holds beside its language model: vision tower and projector; none in others."""
    backbone: Any = getattr(model, "base_model", None)
    text = getattr(backbone, "language_model", None)
    if text is None:
        return []
    prefix = model.base_model_prefix
    return [f"{prefix}.{name}" for name, child in backbone.named_children() if child is not text]
