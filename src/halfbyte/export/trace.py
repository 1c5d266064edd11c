"""How much of a run's training is in a file that was made from it, tensor by tensor, and what the file computes.

The update of a tensor is what training added to its base. A model file is compared with the bases that it can have
been merged onto (the trained one, or the checkpoint's), and counts for the nearer one. Factors are compared by their
product. The logits of the file are computed by the tool that it was written for where that is installed:
transformers, PEFT, or llama.cpp by the package cyllama; else by halfbyte.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from torch import Tensor

from ..adapter_kinds import PREFIX
from ..adapters.initial_factors import LowRank
from ..adapters.lora import saved_adapter_config
from ..config import RunConfig
from ..formats.retained_update import RetainedUpdate
from ..gguf.file import GgufFile
from ..loading.checkpoint import BaseCheckpoint
from ..loading.find import find_model
from ..loading.load import load_model
from ..reading import read_text
from ..reading.model_config import CONFIG, read_config
from ..reading.tensors import ADAPTER, ADAPTER_CONFIG, read_tensors
from ..runs.layout import RESOLVED_CONFIG
from ..runs.saved import find_trained, load_saved, saved_config
from ..utils.errors import CheckpointError
from ..utils.hardware import free_cached_memory
from ..utils.waiting import progress_bars
from .adapter import AdapterLayers
from .fidelity import distance
from .gguf_adapter import adapter_tensors
from .llamacpp import llamacpp_logits
from .logits import logits
from .served_adapter import ServedAdapter
from .target_base import TargetBase
from .verify import compute_stored, loader_of, reload, text_ids
from .weights import MergedWeights, Output, Target

READERS = {
    None: "transformers",
    "halfbyte": "halfbyte",
    "fp8": "transformers",
    "bitsandbytes": "transformers with bitsandbytes",
}
MODELFILE = re.compile(r"^(?:FROM|ADAPTER)\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class FileTrace:
    """How much of a run's training a file contains.

    Attributes:
        path: the file or folder.
        content: what it holds.
        tensors: trained tensor → its update in the file.
        missing: trained tensors that the file lacks.
        kl: KL from the trained model on the run's own text, nats per token; None if `reader` says why not.
        reader: the tool that computed the logits.
    """

    path: Path
    content: str
    tensors: Mapping[str, RetainedUpdate]
    missing: Sequence[str] = ()
    kl: float | None = None
    reader: str = ""

    @property
    def retained(self) -> RetainedUpdate:
        return RetainedUpdate.sum(self.tensors.values())

    def __str__(self) -> str:
        kl = "KL not measured: " if self.kl is None else f"KL {self.kl:.3g} nats per token from the trained model, by "
        lines = [f"{self.path} ({self.content}): {self.retained}; {kl}{self.reader}"]
        lines += [f"  {update.share:7.1%} ± {update.error:.1%}  {name}" for name, update in self.tensors.items()]
        lines += [f"  missing          {name}" for name in self.missing]
        return "\n".join(lines)


def trace(
    run_or_adapter_dir: Path | str,
    files: Sequence[Path | str],
    *,
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> list[FileTrace]:
    """Compare files that were made from a run with its adapter.

    Args:
        run_or_adapter_dir: a run's output_dir, one of its checkpoints, or an adapter saved by PEFT.
        files: merged models in any layout, GGUF files, adapters as folders or GGUF, Ollama's Modelfiles.
        trust_remote_code: run the Python code that comes with the base.
        console: for progress; default: none.

    Raises:
        CheckpointError: no adapter, or a file that is none of these.
        ConfigError: a file of another model.
    """
    paths = find_trained(Path(run_or_adapter_dir))
    if paths.adapter is None:
        raise CheckpointError(f"{run_or_adapter_dir} has no adapter to trace", "name a run that trained one")
    expanded = [content for file in files for content in _contents(Path(file))]
    overrides = [f"trust_remote_code={trust_remote_code}"]
    config = saved_config(paths, overrides)
    adapter = AdapterLayers(config, paths.adapter, torch.device("cpu"))
    if adapter.task is not None:
        wrong = f"{paths.adapter} has the task type {adapter.task}, and trace compares models that generate text"
        raise CheckpointError(wrong, "merge it: `halfbyte merge` compares outputs and weights with the trained model")
    with progress_bars("tracing", console) as progress:
        task = progress.add_task("tracing", total=len(expanded) + 1)
        saved = load_saved(str(run_or_adapter_dir), overrides)
        ids = text_ids(saved.tokenizer, paths.run_dir)
        live = logits(saved.model, ids)
        device: Any = saved.model.device
        tracer = _Tracer(config, paths.adapter, adapter, ids, live, device)
        del saved
        traces = []
        for path, inspect in expanded:
            progress.advance(task)
            traces.append(inspect(tracer, path))
    return traces


def _contents(path: Path) -> Iterator[tuple[Path, Callable[[_Tracer, Path], FileTrace]]]:
    """Yield the files to trace for a path, and how."""
    modelfiles = [path] if path.suffix == ".Modelfile" or path.name == "Modelfile" else [*path.glob("*Modelfile")]
    if path.suffix == ".gguf" and path.is_file():
        is_adapter = GgufFile(path).get("general.type", "model") == "adapter"
        yield path, _Tracer.gguf_adapter if is_adapter else _Tracer.model
    elif (path / ADAPTER_CONFIG).is_file():
        yield path, _Tracer.adapter_folder
    elif (path / CONFIG).is_file():
        yield path, _Tracer.model
    elif modelfiles and modelfiles[0].is_file():
        for name in MODELFILE.findall(read_text(modelfiles[0], CheckpointError, "export the model again")):
            yield from _contents(modelfiles[0].parent / name)
    else:
        wrong = f"{path}: neither a model's folder, an adapter's, a GGUF file nor an Ollama Modelfile"
        raise CheckpointError(wrong, "name what merge or export wrote")


@dataclass
class _Tracer:
    """A run to compare files with.

    Attributes:
        adapter_dir: folder of its adapter.
        ids: text of the run, int64 [rows, T].
        live: logits of the trained model on it.
        device: to load models on.
    """

    config: RunConfig
    adapter_dir: Path
    adapter: AdapterLayers
    ids: Tensor
    live: Tensor
    device: torch.device
    _weights: dict[str, MergedWeights] = field(default_factory=dict)

    @property
    def weights(self) -> MergedWeights:
        """The run's base and adapter."""
        if "run" not in self._weights:
            self._weights["run"] = MergedWeights(self.config, BaseCheckpoint(self.config.origin), self.adapter)
        return self._weights["run"]

    # --- models ------------------------------------------------------------------------------------------------------

    def model(self, path: Path) -> FileTrace:
        """Trace a merged model in a folder or a GGUF file."""
        stored = TargetBase(str(path), self.config, self.adapter)
        quantized = self.config.storage.quantized and not self.weights.base.quantized
        bases: tuple[Target, ...] = ("dequantized", "original") if quantized else ("original",)
        updates: dict[Target, dict[str, RetainedUpdate]] = {base: {} for base in bases}
        distances = dict.fromkeys(bases, 0.0)
        missing = []
        for output in self.weights.outputs:
            name = output.parameter
            if name not in self.adapter.changed:
                continue
            values = stored.stored(output)
            if values is None:
                missing.append(output.entry.name)
                continue
            for base in bases:
                without = self.weights.base_values(output, base)
                merged = self.adapter.merged(name, without.clone(), output.piece)
                distances[base] += float((values - merged).square().sum(dtype=torch.float64))
                updates[base] |= _by_expert(output, values, without, merged - without)
        nearest = min(bases, key=distances.__getitem__)
        kl, reader = self._model_kl(path)
        content = f"a model, merged onto the {nearest} base"
        return FileTrace(path, content, updates[nearest], missing, kl, reader)

    def _model_kl(self, path: Path) -> tuple[float, str]:
        if path.suffix != ".gguf":
            entry = read_config(path).get("quantization_config", {})
            loader, trusted = loader_of(entry), self.config.origin.trust_remote_code
            model = reload(path, loader, "float32" if not entry else "auto", self.device, trusted)
            compute_stored(model)
            return self._kl(model), READERS[loader]
        if find_spec("cyllama") is not None:
            computed = torch.stack([llamacpp_logits(path, row) for row in self.ids.tolist()])
            return distance(self.live, computed[..., : self.live.shape[-1]]).kl, "llama.cpp"
        model = load_model(str(path), load_in_4bit=False, dtype="float32", device=self.device)
        return self._kl(model), "halfbyte; llama.cpp needs the package cyllama"

    def _kl(self, model: Any) -> float:
        kl = distance(self.live, logits(model, self.ids)).kl
        del model
        gc.collect()
        free_cached_memory(self.device)
        return kl

    # --- adapters ----------------------------------------------------------------------------------------------------

    def adapter_folder(self, path: Path) -> FileTrace:
        """Trace an adapter in PEFT's layout, also one with the checkpoint's names of experts, for servers."""
        tensors = dict(read_tensors(path / ADAPTER))
        updates = self._factors_in(path, tensors)
        if not any(updates.values()):  # not only factors, or other names: compare the files' tensors as they are
            trained = dict(read_tensors(self.adapter_dir / ADAPTER))
            updates = {name: _same_tensor(tensors.get(name), tensor) for name, tensor in trained.items()}
        missing = [name for name, update in updates.items() if update is None]
        kl, reader = self._adapter_kl(path)
        retained = {name: update for name, update in updates.items() if update is not None}
        return FileTrace(path, "an adapter", retained, missing, kl, reader)

    def _factors_in(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, RetainedUpdate | None]:
        """Return module → its update in the file, or None; empty for an adapter that is not factors alone."""
        config: Any = saved_adapter_config(path)
        updates: dict[str, RetainedUpdate | None] = {}
        try:
            trained = ServedAdapter(self.adapter, self.config.origin, str(self.adapter_dir)).tensors()
        except CheckpointError:
            return updates
        for name, a in trained.items():
            if not name.endswith(".lora_A.weight"):
                continue
            module, partner = name.removesuffix(".lora_A.weight"), name.replace(".lora_A.", ".lora_B.")
            if name not in tensors or partner not in tensors:
                updates[module.removeprefix(PREFIX)] = None
                continue
            scaling = _scaling(config, module.removeprefix(PREFIX), len(tensors[name]))
            stored = LowRank(tensors[name].float(), scaling * tensors[partner].float())
            updates[module.removeprefix(PREFIX)] = _products(stored, LowRank(a, trained[partner]))
        return updates

    def _adapter_kl(self, path: Path) -> tuple[float, str]:
        if (path / RESOLVED_CONFIG).is_file():  # fitted to a base of its own
            return self._kl(load_saved(str(path)).model), "halfbyte on the base that it fits"
        base = load_model(find_model(self.config.origin), self.config.storage, dtype="float32", device=self.device)
        return self._kl(PeftModel.from_pretrained(base, str(path))), "PEFT on the run's base"

    def gguf_adapter(self, path: Path) -> FileTrace:
        """Trace an adapter for llama.cpp's --lora."""
        file = GgufFile(path)
        alpha, tensors = adapter_tensors(self.config, self.adapter)
        stored_alpha = float(file.get("adapter.lora.alpha", 0.0))
        updates: dict[str, RetainedUpdate] = {}
        missing = []
        for name in (key.removesuffix(".lora_a") for key in tensors if key.endswith(".lora_a")):
            sides = [f"{name}.lora_{side}" for side in "ab"]
            if any(side not in file.tensors for side in sides):
                missing.append(name)
                continue
            stored = [file.values(side, torch.float32) for side in sides]
            trained = [tensors[side].float() for side in sides]
            updates[name] = _products(_low_rank(stored, stored_alpha), _low_rank(trained, alpha))
        reader = "llama.cpp needs the GGUF file of the base as well; trace a merged one"
        return FileTrace(path, "an adapter for --lora", updates, missing, None, reader)


def _low_rank(factors: Sequence[Tensor], alpha: float) -> LowRank:
    a, b = factors
    return LowRank(a, alpha / len(a) * b)


def _by_expert(output: Output, values: Tensor, without: Tensor, update: Tensor) -> dict[str, RetainedUpdate]:
    """Return the update of a tensor, or of each expert of a stack."""
    name = output.entry.name
    if update.dim() < 3:
        return {name: RetainedUpdate.of(values, without, update)}
    experts = enumerate(zip(values, without, update, strict=True))
    return {f"{name}.{expert}": RetainedUpdate.of(*tensors) for expert, tensors in experts}


def _same_tensor(stored: Tensor | None, tensor: Tensor) -> RetainedUpdate | None:
    """Compare a tensor of an adapter's file as it is."""
    if stored is None or stored.shape != tensor.shape:
        return None
    return RetainedUpdate.of(stored.float(), torch.zeros(()), tensor.float())


def _products(stored: LowRank, trained: LowRank) -> RetainedUpdate:
    update = trained.b @ trained.a
    return RetainedUpdate.of(stored.b @ stored.a, torch.zeros(()), update)


def _scaling(config: Any, module: str, rank: int) -> float:
    from peft.utils.other import get_pattern_key

    alphas = config.alpha_pattern
    alpha = alphas.get(get_pattern_key(alphas.keys(), module), config.lora_alpha)
    return float(alpha / (rank**0.5 if config.use_rslora else rank))
