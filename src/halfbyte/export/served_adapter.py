"""An adapter in the layout of vLLM and SGLang: each expert's factors under the names of the base's checkpoint.

PEFT stores a stack's factors in two matrices; servers expect a pair for experts.3.gate_proj and so on. Gate and up of
an expert share A and have their own rows of B. Servers have a single rank and alpha: smaller ranks are padded with
zeros, and other scalings (rsLoRA, patterns) are multiplied into B.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from ..adapter_kinds import LORA
from ..adapters.expert_adapters import expert_factors
from ..config import Origin
from ..loading.checkpoint import BaseCheckpoint
from ..loading.find import read_model_config
from ..loading.tokenizers import trained_tokenizer
from ..modeling.rope_scaling import write_overrides
from ..reading.model_config import GENERATION
from ..reading.tensors import ADAPTER, ADAPTER_CONFIG, OVERRIDES
from ..runs.saved import find, saved_config
from ..runs.stop_tokens import data_report, generation_keys
from ..utils.errors import CheckpointError, ConfigError
from ..utils.files import new_directory
from ..utils.notices import notice
from .adapter import AdapterLayers, check_unmerged

MERGE = "merge it, and serve the merged model"
NAME = "adapter-vllm"

Factors = tuple[str, Tensor, Tensor, float]  # module of the checkpoint, A [r, K], B [N, r], scaling


def export_served(run: Path | str, out: Path | str | None = None, *, trust_remote_code: bool = False) -> Path:
    """Write the adapter of `run` as a folder that vLLM and SGLang load: adapter_config.json and its tensors.

    Servers stop at the tokens of the base's generation_config.json, so the folder has one with all end tokens, for
    `vllm serve --generation-config`.

    Args:
        run: a run's output_dir or an adapter saved by PEFT.
        out: the folder; default: adapter-vllm in the run's folder.
        trust_remote_code: run the Python code that comes with the base.

    Raises:
        ConfigError: the folder exists.
        CheckpointError: no adapter, or one that servers cannot apply (DoRA, full layers, experts without names).
    """
    saved = find(str(run))
    if saved.adapter is None:
        raise CheckpointError(f"{run} has no adapter", "serve the model itself")
    path = Path(out) if out is not None else Path(run) / NAME
    if path.exists():
        raise ConfigError(f"{path} exists already", "remove it, or name another folder with --out")
    config = saved_config(saved, [f"trust_remote_code={trust_remote_code}"])
    check_unmerged(config)
    adapter = AdapterLayers(config, saved.adapter, torch.device("cpu"))
    served = ServedAdapter(adapter, config.origin, str(saved.adapter))
    tokenizer, report = trained_tokenizer(saved.adapter, config), data_report(saved.run_dir)
    keys = generation_keys(served.base, tokenizer, report)
    if config.rope_scaling:
        overrides = f"""--hf-overrides "$(cat {path / OVERRIDES})\""""
        notice("served-rope", f"this adapter was trained with rope_scaling: start the server with {overrides}")
    return served.write(served.tensors(), path, keys)


class ServedAdapter:
    """An adapter in a server's layout; its values may change between calls of `tensors`.

    Args:
        origin: its base.
        name: for error messages.

    Raises:
        CheckpointError: servers cannot apply it.
    """

    def __init__(self, adapter: AdapterLayers, origin: Origin, name: str):
        if adapter.task is not None:
            raise CheckpointError(f"{name}: servers load no adapters of task type {adapter.task}", MERGE)
        if adapter.replaced:
            raise CheckpointError(f"{name}: servers cannot replace {min(adapter.replaced)}", MERGE)
        if adapter.routers:
            raise CheckpointError(f"{name}: servers do not support adapters on routers ({min(adapter.routers)})", MERGE)
        self.adapter = adapter
        self.origin = origin.name
        self._scaled = read_model_config(origin) if origin.rope_scaling else None
        self.name = name
        base = BaseCheckpoint(origin)
        self.base = base.folder
        self._parameters = [(stored.name, *adapter.parameter_of(stored.name)) for stored in base.weights]
        stored = {name for _, name, full, piece in self._parameters if full or (piece and name in adapter.experts)}
        if absent := sorted(adapter.changed - stored):
            raise CheckpointError(
                f"{base.folder} lacks {absent[0]}, which {name} changes",
                f"correct base_model_name_or_path in {name}/{ADAPTER_CONFIG}",
            )
        self.rank = max(a.shape[0] for _, a, _, _ in self._factors())

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Return the current factors, fp32 on the CPU: A [r, K] and B [N, r] of each matrix."""
        factors: dict[str, Tensor] = {}
        for module, a, b, scaling in self._factors():
            padding, prefix = self.rank - a.shape[0], f"base_model.model.{module}"
            factors[f"{prefix}.lora_A.weight"] = functional.pad(a, (0, 0, 0, padding)).cpu().contiguous()
            factors[f"{prefix}.lora_B.weight"] = functional.pad(b * scaling, (0, padding)).cpu().contiguous()
        return factors

    @torch.no_grad()
    def _factors(self) -> Iterator[Factors]:
        """Yield the factors of each matrix that the adapter changes, by the checkpoint's names."""
        layers, experts = self.adapter.layers, self.adapter.experts
        for stored, parameter, is_whole, piece in self._parameters:
            module, layer = stored.removesuffix(".weight"), layers.get(parameter)
            if wrapper := experts.get(parameter):
                if piece is None:
                    message = f"servers cannot address experts of {parameter}, which the checkpoint stacks"
                    raise CheckpointError(f"{self.name}: {message}", MERGE)
                a, b = expert_factors(wrapper)
                rows = piece.rows(b.shape[1])
                yield module, a[piece.expert].float(), b[piece.expert, rows].float(), wrapper.scaling["default"]
            elif layer is not None and is_whole:
                factors = self.adapter.factors(layer)
                if isinstance(factors, str):
                    raise CheckpointError(f"{self.name}: {parameter}: servers cannot apply {factors}", MERGE)
                yield module, *factors

    def write(self, tensors: dict[str, Tensor], path: Path, generation: dict[str, Any] | None = None) -> Path:
        """Write `tensors` to the folder `path`, replacing it.

        Args:
            generation: contents of generation_config.json; None: no such file.
        """
        modules = {name.rpartition(".lora_")[0] for name in tensors}
        written = {
            "peft_type": LORA.peft_type,
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.origin,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": self.rank,  # a scaling of 1
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        }
        with new_directory(path) as aside:
            save_file(tensors, aside / ADAPTER, metadata={"format": "pt"})
            (aside / ADAPTER_CONFIG).write_text(json.dumps(written, indent=2) + "\n")
            if self._scaled is not None:
                write_overrides(aside, self._scaled)
            if generation is not None:
                (aside / GENERATION).write_text(json.dumps(generation, indent=2) + "\n")
        return path
