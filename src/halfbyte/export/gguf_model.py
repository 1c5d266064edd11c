"""A model as a GGUF file: its weights are read, merged, quantized and written one by one, then the file is read back.

The file appears under its name when it is whole
and checked.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from gguf import GGML_QUANT_VERSION, GGUFWriter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from halfbyte.gguf.graph import experts_of
from halfbyte.gguf.hyperparameters import add_hyperparameters, written_keys
from halfbyte.gguf.imatrix import matrix_path, read_importances
from halfbyte.gguf.mixes import MIXES, check_mix, choose
from halfbyte.gguf.quants import FLOATS
from halfbyte.gguf.tensors import Planned, plan
from halfbyte.gguf.tokenizer import add_tokenizer
from halfbyte.gguf.vision import CLIP, Vision, add_vision, plan_vision, vision_keys, vision_types
from halfbyte.gguf.writer import NewGguf, write_gguf
from halfbyte.utils.errors import ConfigError
from halfbyte.utils.files import check_space, new_file, write_text

from .gguf_source import Source, open_source
from .importance import collect
from .modelfile import modelfile

METADATA, TOKEN = 1 << 20, 64  # bytes: of all keys, and of a token with its score, type and merges


@dataclass(frozen=True)
class ExportReport:
    """What `export_gguf` wrote.

    Attributes:
        path: the file.
        mix: its types, as llama.cpp calls them.
        nbytes: its size.
        parameters: how many weights it holds.
        types: type → how many tensors have it.
        errors: type → the largest relative error of a tensor's sample, read back: RMS of the difference over RMS.
        merged: the base that the adapter was merged onto; empty without one.
        modelfile: the Ollama Modelfile beside it.
        mmproj: the file of the vision part beside it, if the model has one.
        seconds: of the whole export.
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

    def __str__(self) -> str:
        bits = 8 * self.nbytes / self.parameters
        types = ", ".join(f"{count} {name}" for name, count in self.types.items())
        merged = f"adapter merged onto the {self.merged} base\n" if self.merged else ""
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
    device: str | None = None,
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> ExportReport:
    """Write a model as GGUF, and an Ollama Modelfile beside it; the vision part, where there is one, as mmproj-….gguf.

    Args:
        run_or_model: a run's output_dir or an adapter (merged while it is written, onto what it was trained on), a
            model's folder, or a hub id.
        mix: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, or one of llama.cpp's mixes q2_k … q6_k.
        out: the file; default: NAME-MIX.gguf in the run's or model's folder.
        importances: weights of the quantization errors: an importance matrix as llama.cpp's imatrix tool writes it
            (….gguf), or calibration text (a dataset's file, folder or hub id), which the model is run on, and which
            leaves NAME.imatrix.gguf beside the file.
        device: where to quantize; default: the run's, or the first accelerator.
        trust_remote_code: run the Python code that comes with the model; a run's own configuration does not count.
        console: where progress is shown; default: nowhere.

    Raises:
        ConfigError: no such mix, or the file exists.
        ModelError: an architecture, tensor or tokenizer that llama.cpp has no place for.
        CheckpointError: a damaged checkpoint, or a file that does not read back as it was written.
        TrainingError: no space. In every case nothing is left under `out`.
    """
    started = time.perf_counter()
    mix = check_mix(mix)
    source = open_source(str(run_or_model), device, trust_remote_code)
    path = output_path(run_or_model, out, f"{source.name}-{mix}.gguf")
    files = [_text_file(source, path, mix, importances is not None)]
    if source.vision:
        beside = output_path(path.parent, path.with_name(f"mmproj-{path.name}"), "")
        files.append(_vision_file(source.vision, source, beside, mix))
    check_space(
        path,
        sum(file.nbytes + METADATA + TOKEN * file.tokens for file in files),
        "free some space, name a file on another disk (--out), or choose a smaller type",
    )
    weighed = _importances(importances, run_or_model, mix, path, source, files[0].planned, console)
    described = path.with_suffix(".Modelfile"), modelfile([file.path.name for file in files], source)
    errors = _write_files(files, described, source.device, weighed, console)
    return ExportReport(
        path,
        mix,
        path.stat().st_size,
        files[0].numel,
        dict(Counter(type_.name for type_ in files[0].types.values()).most_common()),
        errors,
        source.merged,
        described[0],
        time.perf_counter() - started,
        files[1].path if source.vision else None,
    )


# --- before long work ------------------------------------------------------------------------------------------------


def output_path(source: Path | str, out: Path | str | None, name: str) -> Path:
    """Where to write: `out`, or `name` in the source's folder (the working directory for a hub id).

    Raises:
        ConfigError: something is there.
    """
    path = Path(out) if out else (Path(source) if Path(source).is_dir() else Path()) / name
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already; export does not overwrite", "name another file, or remove this one")
    return path


def _importances(
    given: Path | str | None, run_or_model: Path | str, mix: str, path: Path, source: Source, planned: list[Planned],
    console: Console | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Tensor name → importances, read from the file `given`, or collected on the text `given` and stored beside `path`.

    Raises:
        ConfigError: nothing is quantized, or there is a file where they are to be stored.
    """
    if given is None:
        return {}
    if MIXES[mix][0] in FLOATS:
        raise ConfigError(f"--importance weighs quantization, and {mix} is not quantized", "leave it out")
    matrix = matrix_path(given)
    if matrix is None:
        matrix = path.with_name(f"{source.name}.imatrix.gguf")
        if matrix.exists():
            raise ConfigError(f"{matrix} exists already; it would be made again", f"use it (--importance {matrix})")
        names = {each.name for each in planned if each.is_matrix}
        with _progress(console) as progress:
            task = progress.add_task("importances", total=None)
            collect(
                str(run_or_model), str(given), matrix, names, source.family, source.device, source.trusted,
                lambda done, total: progress.update(task, completed=done, total=total),
            )  # fmt: skip
    return read_importances(matrix)


# --- writing ---------------------------------------------------------------------------------------------------------


def _write_files(
    files: list[NewGguf],
    beside: tuple[Path, str],
    device: torch.device,
    importances: Mapping[str, Tensor],
    console: Console | None,
) -> dict[str, float]:
    """Write the language model, where there is one the vision part, and the text `beside`; they appear when all are
    checked, the language model last, so that where it is, everything is.

    Returns:
        As `check_file`, of the language model.
    """
    errors, was_there = [], beside[0].exists()
    try:
        with _progress(console) as progress, ExitStack() as stack:
            asides = [stack.enter_context(new_file(file.path)) for file in files]
            for file, aside in zip(files, asides, strict=True):
                advance = partial(progress.advance, progress.add_task("writing", total=file.numel))
                errors.append(write_gguf(file, aside, importances, device, advance))
            write_text(*beside)
    except BaseException:
        if not was_there:
            beside[0].unlink(missing_ok=True)
        raise
    return errors[0]


def _text_file(source: Source, path: Path, mix: str, important: bool) -> NewGguf:
    """The language model's file; `important`: there are importances."""
    config, family = source.config, source.family
    planned = plan(source.weights, config, family)
    heads_per_kv = config.num_attention_heads // config.num_key_value_heads
    shape = {"layers": config.num_hidden_layers, "heads_per_kv": heads_per_kv, "experts": experts_of(config, family)}

    def add_keys(writer: GGUFWriter) -> None:
        writer.add_type("model")
        writer.add_name(source.name)
        writer.add_file_type(MIXES[mix][1])
        writer.add_quantization_version(GGML_QUANT_VERSION)
        add_hyperparameters(writer, config, family)
        add_tokenizer(writer, source.tokenizer, config.vocab_size, source.end_ids)

    types = choose(planned, mix, **shape, important=important)
    return NewGguf(path, family.gguf.arch, add_keys, planned, types, written_keys(config, family), config.vocab_size)


def _vision_file(vision: Vision, source: Source, path: Path, mix: str) -> NewGguf:
    """The vision part's file."""
    planned = plan_vision(source.weights, vision)

    def add_keys(writer: GGUFWriter) -> None:
        writer.add_name(source.name)
        writer.add_quantization_version(GGML_QUANT_VERSION)
        add_vision(writer, vision)

    return NewGguf(path, CLIP, add_keys, planned, vision_types(planned, MIXES[mix][0]), vision_keys(vision))


def _progress(console: Console | None) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console or Console(quiet=True), transient=True)
