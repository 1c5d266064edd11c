"""Exporting a model as GGUF: weights are read, merged, quantized and written one by one, then the file is read back.

The file appears under its name once it is complete and checked.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGUFWriter
from rich.console import Console
from torch import Tensor

from ..config import Origin
from ..formats.retained_update import RetainedUpdate
from ..gguf.file import GgufFile
from ..gguf.general import add_general
from ..gguf.graph import checked_family, experts_of
from ..gguf.hyperparameters import add_hyperparameters, written_keys
from ..gguf.imatrix import matrix_path, read_importances
from ..gguf.mixes import MIXES, check_mix, choose
from ..gguf.quants import FLOATS
from ..gguf.tensors import BESIDE_TEXT, HEAD, Layout, Planned, Weight, next_token_layers, plan
from ..gguf.tokenizer import add_tokenizer
from ..gguf.vision import CLIP, Vision, add_vision, plan_vision, vision_keys, vision_of, vision_types
from ..gguf.writer import NewGguf, write_gguf
from ..loading.checkpoint import BaseCheckpoint
from ..loading.find import read_model_config
from ..loading.tokenizers import trained_tokenizer
from ..modeling.config_facts import max_layer_sizes
from ..modeling.families import Family
from ..reading.model_config import read_generation_config
from ..runs.saved import find, saved_config
from ..runs.stop_tokens import data_report, declared_stop_tokens, joined_stop_tokens, known_stop_tokens
from ..utils.errors import ConfigError
from ..utils.files import check_space, new_file, write_text
from ..utils.hardware import chosen_device
from ..utils.notices import notice
from ..utils.waiting import progress_bars
from .adapter import AdapterLayers, generating_layers
from .fidelity import is_lost, required_share
from .importance import collect
from .modelfile import modelfile, rendered_chats
from .weights import MergedWeights, Target

METADATA, TOKEN = 1 << 20, 64  # estimated bytes of all keys, and of a token's score, type and merges


@dataclass(frozen=True)
class ExportReport:
    """Result of `export_gguf`.

    Attributes:
        path: the file.
        mix: its types, by llama.cpp's name.
        nbytes: size of the file.
        parameters: number of weights.
        types: type → number of tensors.
        errors: type → largest relative error of a tensor's sample after reading back: RMS of the difference over RMS.
        merged: base that the adapter was merged onto; empty without one.
        modelfile: the Ollama Modelfile next to the file.
        mmproj: the file of the vision part, if the model has one.
        seconds: of the export.
        kept: the update retained in the file; None without an adapter.
    """

    path: Path
    mix: str
    nbytes: int
    parameters: int
    types: Mapping[str, int]
    errors: Mapping[str, float]
    merged: str
    modelfile: Path
    seconds: float
    mmproj: Path | None = None
    kept: RetainedUpdate | None = None

    def __str__(self) -> str:
        bits = 8 * self.nbytes / self.parameters
        types = ", ".join(f"{count} {name}" for name, count in self.types.items())
        merged = f"adapter merged onto the {self.merged} base: {self.kept}\n" if self.merged else ""
        errors = ", ".join(f"{name} {error:.2g}" for name, error in self.errors.items())
        return (
            f"{merged}{self.mix}: {self.parameters:,} weights in {self.nbytes / 2**20:,.1f} MiB, {bits:.2f} bits each"
            f" ({types})\nread back: every byte as written; largest relative error {errors}"
        )


def export_gguf(
    run_or_model: Path | str,
    mix: str = "q4_k_m",
    out: Path | str | None = None,
    *,
    importances: Path | str | None = None,
    min_update_kept: float | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> ExportReport:
    """Write a model as GGUF, with an Ollama Modelfile and, for vision models, mmproj-….gguf next to it.

    Args:
        run_or_model: a run's output_dir or an adapter (merged onto the base it was trained on), a model's folder, or a
            hub id.
        mix: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, or one of llama.cpp's mixes q2_k … q6_k.
        out: the file; default: NAME-MIX.gguf in the run's or model's folder.
        importances: weights for the quantization error: an importance matrix of llama.cpp's imatrix tool (….gguf), or
            calibration text (a dataset's file, folder or hub id) to compute one from, which is saved as
            NAME.imatrix.gguf.
        min_update_kept: share of the update that the file must retain; None: a loss is reported. Adapters of stacks of
            experts are not counted.
        device: to quantize on; default: the run's, or the first accelerator.
        trust_remote_code: run the Python code that comes with the model; the run's own configuration does not count.
        console: for progress; default: none.

    Raises:
        ConfigError: no such mix, the file exists, or it loses the update.
        ModelError: llama.cpp does not support the architecture, a tensor or the tokenizer.
        CheckpointError: a damaged checkpoint, or a file that reads back differently.
        TrainingError: no space. In every case nothing is left under `out`.
    """
    started = time.perf_counter()
    mix = check_mix(mix)
    source = open_source(str(run_or_model), device, trust_remote_code)
    path = output_path(run_or_model, out, f"{source.name}-{mix}.gguf")
    files = [_text_file(source, path, mix, importances is not None)]
    if source.vision:
        mmproj = output_path(path.parent, path.with_name(f"mmproj-{path.name}"), "")
        files.append(_vision_file(source.vision, source, mmproj, mix))
    check_space(
        path,
        sum(file.nbytes + METADATA + TOKEN * file.tokens for file in files),
        "free some space, name a file on another disk (--out), or choose a smaller type",
    )
    matrix = _importances(importances, run_or_model, mix, path, source, files[0].planned, console)
    ollama = path.with_suffix(".Modelfile")
    ollama_text = modelfile(
        [file.path.name for file in files], source.tokenizer, source.end_ids, source.config.max_position_embeddings
    )
    errors: list[dict[str, float]] = []  # of the language model, and of the vision part if there is one
    ollama_existed = ollama.exists()
    try:
        with progress_bars("writing", console) as progress, ExitStack() as stack:
            asides = [stack.enter_context(new_file(file.path)) for file in files]
            for file, aside in zip(files, asides, strict=True):
                advance = partial(progress.advance, progress.add_task("writing", total=file.numel))
                errors.append(write_gguf(file, aside, matrix, source.device, advance))
            retained = _retained(source, asides[0])
            block, size = GGML_QUANT_SIZES[MIXES[mix][0]]
            needed = required_share(8 * size / block, min_update_kept)
            if retained is not None and is_lost(retained, needed):
                lost = f"--gguf {mix}: {retained}"
                if min_update_kept is not None:
                    raise ConfigError(f"{lost}, and {needed:.0%} is required", "choose a type with more bits")
                notice("gguf-update-lost", f"{lost}: train longer, or serve the adapter unmerged (--adapter-only)")
            write_text(ollama, ollama_text)
    except BaseException:
        if not ollama_existed:
            ollama.unlink(missing_ok=True)
        raise
    return ExportReport(
        path,
        mix,
        nbytes=path.stat().st_size,
        parameters=files[0].numel,
        types=dict(Counter(type_.name for type_ in files[0].types.values()).most_common()),
        errors=errors[0],
        merged=source.merged,
        modelfile=ollama,
        seconds=time.perf_counter() - started,
        mmproj=files[1].path if source.vision else None,
        kept=retained,
    )


@torch.no_grad()
def _retained(source: Source, path: Path) -> RetainedUpdate | None:
    """Return the update retained in a written file; None without an adapter.

    Stacks of experts are not counted, nor is the vision part, whose matrices have at least 16 bits.
    """
    if source.trained is None:
        return None
    file = GgufFile(path)
    layout = Layout(source.config, source.family)
    updates = []
    goal: Target = "dequantized" if source.merged == "dequantized" else "original"
    for output in source.trained.outputs:
        if output.parameter not in source.trained.adapter.changed or not source.trained.is_whole(output):
            continue
        if BESIDE_TEXT.search(output.entry.name):
            continue
        if len(output.entry.shape) > 2 or (output.entry.name.endswith("lm_head.weight") and HEAD not in file.tensors):
            continue
        name = layout.name(output.entry.name)
        stored = layout.in_model(name, file.values(name, torch.float32).view(output.entry.shape))
        base = source.trained.base_values(output, goal)
        update = source.trained.adapter.merged(output.parameter, base.clone()) - base
        updates.append(RetainedUpdate.of(stored.to(base), base, update))
    return RetainedUpdate.sum(updates)


# --- the exported model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A model ready to be exported.

    Attributes:
        name: of the model in the file.
        weights: by their names in the checkpoint, adapter merged.
        config: transformers' text config, matching the weights.
        family: its row in `families`.
        tokenizer: of the training run.
        end_ids: tokens that end an answer, trained ones first.
        device: to compute on.
        merged: base that the adapter was merged onto; empty without one.
        vision: the vision part, if there is one.
        trusted: whether Python code that comes with the model may run.
        generation: contents of the base's generation_config.json.
        trained: the base and the adapter, if there is one.
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
    generation: Mapping[str, Any] = field(default_factory=dict)
    trained: MergedWeights | None = None


def open_source(run_or_model: str, device: str | None = None, trust_remote_code: bool = False) -> Source:
    """Open a run, an adapter or a model and check that it can be exported; reads no weights.

    Raises:
        CheckpointError, ConfigError, ModelError: it cannot be exported.
    """
    saved = find(run_or_model)
    config = saved_config(saved, [f"trust_remote_code={trust_remote_code}"])
    model_config = text_config(config.origin)
    family = checked_family(model_config)
    base = BaseCheckpoint(config.origin)
    name = config.origin.name.rstrip("/").split("/")[-1]
    target = chosen_device(device or config.device)
    transposed = bool(family.experts and family.experts.interleaved)  # codes are [N, K] in any case
    merged, merged_weights = "", None
    weights = {
        stored.name: Weight(stored.shape, partial(base.read, stored), transposed and not stored.entries)
        for stored in base.weights
    }
    if saved.adapter:
        merged_weights = MergedWeights(config, base, generating_layers(AdapterLayers(config, saved.adapter, target)))
        goal: Target = "dequantized" if config.storage.quantized or base.quantized else "original"
        weights = {
            output.entry.name: Weight(output.entry.shape, partial(merged_weights.tensor, output, goal), transposed)
            for output in merged_weights.outputs
        }
        model_config.tie_word_embeddings = model_config.tie_word_embeddings and not merged_weights.untied
        model_config.vocab_size = merged_weights.adapter.rows or model_config.vocab_size
        merged = goal
        name = Path(run_or_model).resolve().name
    tokenizer = trained_tokenizer(saved.adapter, config)
    learned = known_stop_tokens(data_report(saved.run_dir), tokenizer)
    return Source(
        name,
        weights,
        model_config,
        family,
        tokenizer,
        end_ids=joined_stop_tokens(learned, declared_stop_tokens(base.folder), [tokenizer.eos_token_id]),
        device=target,
        merged=merged,
        vision=vision_of(
            read_model_config(config.origin),
            base.folder,
            list(weights),
            (config.image_min_pixels, config.image_max_pixels),
        ),
        trusted=config.origin.trust_remote_code,
        generation=read_generation_config(base.folder),
        trained=merged_weights,
    )


def text_config(origin: Origin) -> Any:
    """Return the language model's config with `tie_word_embeddings` always set."""
    config = read_model_config(origin)
    text = config.get_text_config()
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


# --- checks before writing -------------------------------------------------------------------------------------------


def output_path(source: Path | str, out: Path | str | None, name: str) -> Path:
    """Return `out`, or `name` in the source's folder (the working directory for a hub id).

    Raises:
        ConfigError: the path exists.
    """
    path = Path(out) if out else (Path(source) if Path(source).is_dir() else Path()) / name
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already; export does not overwrite", "name another file, or remove this one")
    return path


def _importances(
    importances: Path | str | None,
    run_or_model: Path | str,
    mix: str,
    path: Path,
    source: Source,
    planned: list[Planned],
    console: Console | None,
) -> dict[str, Tensor]:
    """Return tensor name → importances, read from a matrix, or computed on calibration text and saved.

    Raises:
        ConfigError: nothing is quantized, or the file to save to exists.
    """
    if importances is None:
        return {}
    if MIXES[mix][0] in FLOATS:
        raise ConfigError(f"--importance weighs quantization, and {mix} is not quantized", "leave it out")
    matrix = matrix_path(importances)
    if matrix is None:
        matrix = path.with_name(f"{source.name}.imatrix.gguf")
        if matrix.exists():
            raise ConfigError(f"{matrix} exists already", f"use it (--importance {matrix})")
        names = {tensor.name for tensor in planned if tensor.is_matrix}
        with progress_bars("measuring importances", console) as progress:
            task = progress.add_task("importances", total=None)
            collect(
                str(run_or_model), str(importances), matrix, names, source.family, source.device, source.trusted,
                lambda done, total: progress.update(task, completed=done, total=total),
            )  # fmt: skip
    return read_importances(matrix)


# --- writing ---------------------------------------------------------------------------------------------------------


def _text_file(source: Source, path: Path, mix: str, important: bool) -> NewGguf:
    """Return the language model's file; `important`: importances are given."""
    config, family = source.config, source.family
    planned = plan(source.weights, config, family)
    predicting = next_token_layers(planned, config)
    heads_per_kv = config.num_attention_heads // max_layer_sizes(config).key_heads
    shape = {"layers": config.num_hidden_layers, "heads_per_kv": heads_per_kv, "experts": experts_of(config, family)}

    def add_keys(writer: GGUFWriter) -> None:
        writer.add_type("model")
        writer.add_name(source.name)
        writer.add_file_type(MIXES[mix][1])
        writer.add_quantization_version(GGML_QUANT_VERSION)
        add_general(writer, config, source.generation)
        add_hyperparameters(writer, config, family, predicting)
        if source.vision and source.vision.deepstack:
            writer.add_num_deepstack_layers(len(source.vision.deepstack))
        add_tokenizer(writer, source.tokenizer, config.vocab_size, source.end_ids, rendered_chats(source.tokenizer))

    types = choose(planned, mix, **shape, important=important)
    keys = written_keys(config, family, predicting)
    return NewGguf(path, family.gguf.arch, add_keys, planned, types, keys, config.vocab_size)


def _vision_file(vision: Vision, source: Source, path: Path, mix: str) -> NewGguf:
    """Return the vision part's file."""
    planned = plan_vision(source.weights, vision, source.tokenizer)

    def add_keys(writer: GGUFWriter) -> None:
        writer.add_name(source.name)
        writer.add_quantization_version(GGML_QUANT_VERSION)
        add_vision(writer, vision)

    return NewGguf(path, CLIP, add_keys, planned, vision_types(planned, MIXES[mix][0]), vision_keys(vision))
