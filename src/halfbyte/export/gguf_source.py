"""What is exported: a model folder, a hub id, or a run, whose adapter is merged weight by weight while it is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from halfbyte.config import Origin, resolve
from halfbyte.gguf.graph import checked_family
from halfbyte.gguf.tensors import Weight
from halfbyte.gguf.vision import Vision, vision_of
from halfbyte.loading.find import read_model_config
from halfbyte.modeling.families import Family
from halfbyte.runs.saved import find, saved_config, trained_tokenizer
from halfbyte.runs.stop_tokens import data_report, declared_stop_tokens, joined_stop_tokens, known_stop_tokens
from halfbyte.utils.hardware import chosen_device

from ..loading.checkpoint import BaseCheckpoint
from .adapter import AdapterLayers
from .weights import MergedWeights, Target


@dataclass(frozen=True)
class Source:
    """A model ready to be written.

    Attributes:
        name: what the model is called in the file.
        weights: by their names in the checkpoint, adapter merged.
        config: (text) config of transformers, as the weights are.
        family: its row.
        tokenizer: the one trained with.
        end_ids: tokens that end an answer, those that were trained first.
        device: where to compute.
        merged: onto which base the adapter was merged; empty without one.
        vision: what the model has beside its language model.
        trusted: whether Python code that comes with the model may be run.
    """

    name: str
    weights: dict[str, Weight]
    config: Any
    family: Family
    tokenizer: Any
    end_ids: list[int]
    device: torch.device
    merged: str = ""
    vision: Vision | None = None
    trusted: bool = False


def open_source(run_or_model: str, device: str | None = None, trust_remote_code: bool = False) -> Source:
    """Recognise and look over a run, an adapter, a merged model or any other; reads no weights.

    Raises:
        CheckpointError, ConfigError, ModelError: nothing that can be exported.
    """
    place = find(run_or_model)
    config = saved_config(place, [f"trust_remote_code={trust_remote_code}"])
    run = resolve(config)
    whole, model_config = read_model_config(run.origin), text_config(run.origin)
    family = checked_family(model_config)
    base = BaseCheckpoint(run.origin)
    name = run.origin.name.rstrip("/").split("/")[-1]
    target = chosen_device(device or config.device)
    turned = bool(family.experts and family.experts.interleaved)  # but for codes, which lie [N, K]
    merged, weights = (
        "",
        {each.name: Weight(each.shape, partial(base.read, each), turned and not each.parts) for each in base.weights},
    )
    if place.adapter:
        both = MergedWeights(run, base, AdapterLayers(run, place.adapter, target))
        goal: Target = "dequantized" if run.storage.quantized or base.quantized else "original"
        outputs = [output for shard in both.shards.values() for output in shard]
        weights = {
            each.entry.name: Weight(each.entry.shape, partial(both.tensor, each, goal), turned) for each in outputs
        }
        model_config.tie_word_embeddings = model_config.tie_word_embeddings and not both.untied
        merged, name = goal, Path(run_or_model).resolve().name
    tokenizer, vision = trained_tokenizer(place.adapter, config), vision_of(whole, base.folder, list(weights))
    learned = known_stop_tokens(data_report(place.run_dir), tokenizer)
    end_ids = joined_stop_tokens(learned, declared_stop_tokens(base.folder), [tokenizer.eos_token_id])
    return Source(
        name, weights, model_config, family, tokenizer, end_ids, target, merged, vision, run.origin.trust_remote_code
    )


def text_config(origin: Origin) -> Any:
    """The language model's config of transformers, which says in every model whether the head is tied."""
    whole = read_model_config(origin)
    text = whole.get_text_config()
    text.tie_word_embeddings = whole.tie_word_embeddings
    return text
