"""An adapter as vLLM and SGLang read it: each expert's factors under the names of the base's checkpoint.

PEFT holds a stack's factors in two matrices, which servers do not read: they ask for experts.3.gate_proj.lora_A.weight
and the like. Gate and up of an expert have the A of both, and their rows of B. Servers have one rank and one alpha for
all: smaller ranks are filled up with zeros, other scalings (rsLoRA, patterns) are in B.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from halfbyte.config import resolve
from halfbyte.errors import CheckpointError, ConfigError
from halfbyte.files import new_directory
from halfbyte.layers.expert_adapters import by_expert
from halfbyte.models.stored import BaseCheckpoint
from halfbyte.reading.tensors import ADAPTER, ADAPTER_CONFIG
from halfbyte.runs.saved import find, saved_config

from .adapter import AdapterLayers

MERGE = "merge it, and serve the merged model"
NAME = "adapter-vllm"

Factors = tuple[str, Tensor, Tensor, float]  # module of the checkpoint, A [r, K], B [N, r], scaling


def export_served(run: Path | str, out: Path | str | None = None, *, trust_remote_code: bool = False) -> Path:
    """Write the adapter of `run` as a folder that vLLM and SGLang load: adapter_config.json and its tensors.

    Args:
        run: a run's output_dir or an adapter that PEFT saved.
        out: the folder; default: adapter-vllm in the run's folder.
        trust_remote_code: run the Python code that comes with the base.

    Raises:
        ConfigError: the folder exists.
        CheckpointError: no adapter, or one that servers cannot apply (DoRA, whole layers, experts without names).
    """
    place = find(str(run))
    if place.adapter is None:
        raise CheckpointError(f"{run} has no adapter", "serve the model itself")
    path = Path(out) if out is not None else Path(run) / NAME
    if path.exists():
        raise ConfigError(f"{path} exists already", "remove it, or name another folder with --out")
    config = saved_config(place, [f"trust_remote_code={trust_remote_code}"])
    origin = resolve(config)
    adapter = AdapterLayers(origin, place.adapter, torch.device("cpu"))
    if adapter.whole:
        raise CheckpointError(f"{place.adapter}: servers cannot replace {min(adapter.whole)}", MERGE)
    found = list(_factors(adapter, BaseCheckpoint(origin.origin), place.adapter))
    rank = max(a.shape[0] for _, a, _, _ in found)
    tensors = {}
    for module, a, b, scaling in found:
        missing = rank - a.shape[0]
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.nn.functional.pad(a, (0, 0, 0, missing)).contiguous()
        tensors[f"{name}.lora_B.weight"] = torch.nn.functional.pad(b * scaling, (0, missing)).contiguous()
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": origin.origin.name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,  # a scaling of 1
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module, *_ in found}),
    }
    with new_directory(path) as aside:
        save_file(tensors, aside / ADAPTER, metadata={"format": "pt"})
        (aside / ADAPTER_CONFIG).write_text(json.dumps(written, indent=2) + "\n")
    return path


@torch.no_grad()
def _factors(adapter: AdapterLayers, base: BaseCheckpoint, folder: Path) -> Iterator[Factors]:
    """Of each matrix that the adapter changes, as the checkpoint names it."""
    seen = set()
    for stored in base.weights:
        parameter, is_whole, piece = adapter.parameter_of(stored.name)
        module, layer = stored.name.removesuffix(".weight"), adapter.layers.get(parameter)
        if wrapper := adapter.experts.get(parameter):
            if piece is None:
                said = f"{folder}: servers have no names for the experts of {parameter}, whose checkpoint stacks them"
                raise CheckpointError(said, MERGE)
            a, b = by_expert(wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight, wrapper.num_experts)
            rows = piece.rows(b.shape[1])
            yield module, a[piece.expert].float(), b[piece.expert, rows].float(), wrapper.scaling["default"]
        elif layer is not None and is_whole:
            yield _plain(layer, module, parameter, folder)
        else:
            continue
        seen.add(parameter)
    if left := sorted(adapter.changed - seen):
        raise CheckpointError(
            f"{base.folder} lacks {left[0]}, which {folder} changes",
            f"correct base_model_name_or_path in {folder / ADAPTER_CONFIG}",
        )


def _plain(layer: Any, module: str, parameter: str, folder: Path) -> Factors:
    if not layer.lora_A or layer.use_dora.get("default"):
        what = "DoRA" if layer.lora_A else "an adapter of the embedding"
        raise CheckpointError(f"{folder}: {parameter}: servers cannot apply {what}", MERGE)
    a, b = (each["default"].weight.float() for each in (layer.lora_A, layer.lora_B))
    return module, a, b, layer.scaling["default"]
