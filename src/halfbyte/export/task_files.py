"""Files of a classifier or an embedding model, for transformers and sentence-transformers.

A classifier has `id2label`, `label2id` and `problem_type` in config.json, and the class that loads it. An embedding
model has the folder layout of sentence-transformers, in the form that its versions since 2 read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config.methods import CLASSIFYING, TASKS
from ..config.schema import RunKeys
from ..methods import METHODS
from ..modeling.task_models import task_class
from ..utils.files import write_json

POOLING = {"last": "lasttoken", "mean": "mean_tokens"}  # of sentence-transformers
ALL_POOLINGS = (
    *("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens"),
    "lasttoken",
)
MODULE = "sentence_transformers.models."


def classifier_keys(run: RunKeys, task_type: str, model_config: Any, labels: int, pad: int | None) -> dict[str, Any]:
    """Return the keys of config.json that make a language model's config that of a classifier.

    Args:
        task_type: of the adapter, a key of `SCORES`.
        model_config: transformers' config of the language model.
        labels: number of outputs of the head.
        pad: id of the pad token, which transformers skips to find the last token.
    """
    names = run.labels if run.labels is not None and len(run.labels) == labels else None
    names = names or [f"LABEL_{number}" for number in range(labels)]
    keys: dict[str, Any] = {
        "architectures": [task_class(task_type, model_config).__name__],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "pad_token_id": pad,
    }
    if run.method in CLASSIFYING[:1]:
        keys["problem_type"] = run.problem_type
    if run.method == "reranker":  # sentence-transformers' CrossEncoder returns scores as they are trained
        activation = "Sigmoid" if run.loss_type == "binary_cross_entropy" else "Identity"
        keys["sentence_transformers"] = {"activation_fn": f"torch.nn.modules.{_module_of(activation)}.{activation}"}
    return keys


def _module_of(activation: str) -> str:
    return "activation" if activation == "Sigmoid" else "linear"


def write_task_files(folder: Path, run: RunKeys, model_config: Any, pad: int | None) -> None:
    """Write the files of a run's task beside its adapter: config.json of a classifier, or sentence-transformers' files.

    Methods without a task write none.

    Args: as of `classifier_keys`.
    """
    if run.method not in TASKS:
        return
    if run.method == "embedding":
        write_sentence_transformer(folder, run, model_config.get_text_config().hidden_size)
        return
    labels = len(run.labels) if run.labels is not None else 1
    task_type = str(METHODS[run.method].scores)
    config = {key: value for key, value in model_config.to_dict().items() if key != "quantization_config"}
    write_json(folder / "config.json", config | classifier_keys(run, task_type, model_config, labels, pad))


def write_sentence_transformer(folder: Path, run: RunKeys, width: int) -> None:
    """Write the files that make a model's or an adapter's folder one of sentence-transformers.

    Args:
        width: numbers of an embedding.
    """
    modules = ["Transformer", "Pooling", *(["Normalize"] if run.normalize_embeddings else [])]
    paths = ["", *(f"{index}_{name}" for index, name in enumerate(modules) if index)]
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"{MODULE}{name}"}
        for index, (name, path) in enumerate(zip(modules, paths, strict=True))
    ]
    for path in paths[1:]:
        (folder / path).mkdir()
    modes = {f"pooling_mode_{mode}": mode == POOLING[run.pooling] for mode in ALL_POOLINGS}
    write_json(folder / "modules.json", entries)
    write_json(folder / paths[1] / "config.json", {"word_embedding_dimension": width, **modes, "include_prompt": True})
    for path in paths[2:]:  # git, and so the hub, keeps no empty folders
        write_json(folder / path / "config.json", {})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": run.max_length, "do_lower_case": False})
    prompts = {"query": run.query_prompt, "document": run.document_prompt}
    entry = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", entry)
