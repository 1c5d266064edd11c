"""Short commands: `halfbyte env`, `export`, `merge`, `mix` and `serve`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.table import Table

from ..config import SECTIONS, Origin, RunConfig
from ..config.policy import KvCache
from ..config.run_config import written_keys
from ..config.yaml import dump_mapping
from ..loading.find import find_model, preflight_model
from ..reading import read_text
from ..runs.inputs import check_datasets
from ..runs.layout import merged_folder
from ..runs.saved import BASES, find, find_adapter, find_trained, look_up, saved_config
from ..utils.console import Console
from ..utils.errors import CheckpointError, ConfigError, DataError, ModelError, UsageError
from ..utils.text import brief, one_line
from ..utils.versions import check_versions
from .startup import import_models, quick_imports

if TYPE_CHECKING:
    from ..loading.mixed_formats import Mixture

WIDE = 240  # columns of a table that is written to a file or a pipe
EVALUATION_ROWS = 8  # rows of a forward without gradients
# Fewest held-out tokens. With 2,048, noise made nf4 (+0.022 nats) win over a mixture (+0.008).
HELD_OUT = 8192


def print_environment() -> None:
    """Print versions and hardware, one line each."""
    from ..report.terminal import print_environment as show
    from ..utils.environment import environment

    show(Console(), environment())


def print_schema() -> None:
    """Print the JSON Schema (2020-12) of a run's configuration, without secrets."""
    schema = RunConfig.model_json_schema()
    schema["properties"] = {key: schema["properties"][key] for section in SECTIONS for key in written_keys(section)}
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A run of halfbyte"}
    print(json.dumps(document, indent=1, ensure_ascii=False))


def print_kernels(name: str | None) -> None:
    """Print the chosen kernel for each op and typical call on a device, and why others cannot run it.

    Args:
        name: a key of `halfbyte.kernels.device.KNOWN`; None: the device that a run on this machine would use.

    Raises:
        UsageError: the name is not known.
    """
    import torch

    from ..kernels.device import KNOWN, device_of
    from ..kernels.selection import choices
    from ..utils.hardware import chosen_device

    if name is not None and name not in KNOWN:
        raise UsageError(f"--device {name} is not known", f"choose from {', '.join(KNOWN)}")
    device = chosen_device(None)
    target = KNOWN[name or "cpu"] if name or device.type == "cpu" else device_of(torch.empty(0, device=device))
    table = Table(title=target.name, title_justify="left", box=None)
    for column in ("op", "call", "kernel", "why not others"):
        table.add_column(column, overflow="fold")
    for choice in choices(target):
        why = "; ".join(f"{kernel}: {reason}" for kernel, reason in choice.refusals.items())
        table.add_row(choice.op, choice.shapes, choice.kernel, why)
    Console(width=None if Console().is_terminal else WIDE).print(table)


def export_for_servers(
    source: str, adapter: str | None, out: Path | None, gguf_options: list[str], trust_remote_code: bool
) -> None:
    """Write the adapter of `source` in the layout of vLLM and SGLang, and print its path.

    Args:
        gguf_options: given options that only apply to GGUF.

    Raises:
        UsageError: an unknown layout, or options that exclude each other.
    """
    if adapter is None:
        raise UsageError("export needs a target", "give --gguf TYPE, or --adapter vllm")
    if adapter != "vllm":
        raise UsageError(
            f"--adapter {adapter}: there is no such layout", "give --adapter vllm, which SGLang reads as well"
        )
    if gguf_options:
        raise UsageError(f"{gguf_options[0]} with --adapter vllm: it applies to GGUF only", "give one of them")
    look_up(source, [f"trust_remote_code={trust_remote_code}"])
    with quick_imports():
        from ..export.served_adapter import export_served

    path = export_served(source, out, trust_remote_code=trust_remote_code)
    command = f"vllm serve BASE --enable-lora --lora-modules NAME={path} --generation-config {path}"
    Console(soft_wrap=True).print(one_line(f"adapter in {path}: {command}"))


def export_model(
    source: str,
    mix: str,
    out: Path | None,
    adapter_only: bool,
    importance: str | None,
    trust_remote_code: bool = False,
    min_update_kept: float | None = None,
) -> None:
    """Write `source` as GGUF and print the files.

    Raises:
        ConfigError: the gguf library is missing.
        UsageError: options that exclude each other.
    """
    look_up(source, [f"trust_remote_code={trust_remote_code}"])
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError("export --gguf needs the gguf library", "pip install 'halfbyte[gguf]'") from error
    console = Console(soft_wrap=True)
    if adapter_only:
        if importance:
            raise UsageError(
                "--importance applies to quantization, and an adapter is not quantized", "remove --importance"
            )
        from ..export.gguf_adapter import export_adapter

        path = export_adapter(source, mix, out, trust_remote_code=trust_remote_code)
        console.print(one_line(f"adapter in {path}: llama-cli --model BASE.gguf --lora {path}"))
        return
    with quick_imports():
        from ..export.gguf_model import export_gguf

    report = export_gguf(
        source,
        mix,
        out,
        importances=importance,
        min_update_kept=min_update_kept,
        trust_remote_code=trust_remote_code,
        console=console,
    )
    console.print(str(report))
    if report.mmproj:
        console.print(one_line(f"vision part in {report.mmproj}: llama-mtmd-cli --mmproj"))
    console.print(one_line(str(report.path)))
    console.print(one_line(f"{report.modelfile}: ollama create NAME -f {report.modelfile.name}"))


def merge_run(
    run: Path,
    out: Path | None,
    base: str,
    verify: bool,
    quantize: str | None = None,
    trust_remote_code: bool = False,
    min_update_kept: float | None = None,
) -> None:
    """Merge the adapter of `run` into `out`, and add the error of the result to the run's report.

    Args:
        quantize: a target format, or comma-separated PATTERN=FORMAT pairs; None: the run's `qat_scheme`, else 16 bits.

    Raises:
        UsageError: an unknown base or target.
    """
    if base not in BASES:
        raise UsageError(f"--base {base}: not one of {', '.join(BASES)}", "use auto")
    find_trained(run)
    with quick_imports():
        from ..export.merge import merge, report_failure_is_a_notice, slug
    from ..report.page import write_report

    console = Console(soft_wrap=True)
    folder = out or run / merged_folder(slug(quantize) if quantize else "")
    report = merge(
        run,
        folder,
        base=base,
        quantize=_target(quantize),
        verify=verify,
        min_update_kept=min_update_kept,
        trust_remote_code=trust_remote_code,
        console=console,
    )
    console.print(str(report))
    console.print(one_line(f"merged model in {report.out_dir}"))
    if report.run_dir and report.targets:
        with report_failure_is_a_notice(report.out_dir):
            console.print(one_line(f"report: {write_report(report.run_dir)}"))


def fit_run(
    run: Path,
    to: str,
    out: Path | None,
    rank: int | None,
    data: str | None,
    tokens: int,
    trust_remote_code: bool = False,
) -> None:
    """Fit the adapter of `run` to another base, and print how close it is to the trained model."""
    find_trained(run)
    if data:
        check_datasets(data)
    with quick_imports():
        from ..export.fit import fit

    console = Console(soft_wrap=True)
    trust = trust_remote_code
    report = fit(run, to, out, rank=rank, data=data, tokens=tokens, trust_remote_code=trust, console=console)
    console.print(str(report))
    console.print(one_line(f"adapter in {report.path}"))


def trace_files(run: Path, files: Sequence[Path], trust_remote_code: bool = False) -> None:
    """Print how much of the training of `run` is in each file, tensor by tensor.

    Raises:
        CheckpointError: a file lacks a trained tensor.
    """
    find_trained(run)
    with quick_imports():
        from ..export.trace import trace

    console = Console(soft_wrap=True)
    traces = trace(run, files, trust_remote_code=trust_remote_code, console=console)
    for file in traces:
        console.print(str(file))
    if lacking := next((file for file in traces if file.missing), None):
        wrong = f"{lacking.path} lacks {len(lacking.missing)} trained tensors, such as {lacking.missing[0]}"
        raise CheckpointError(wrong, "merge or export the run again")


def _target(quantize: str | None) -> str | dict[str, str] | None:
    """Convert the option `--quantize` to an argument of `merge`: a format, or a mapping of patterns in order."""
    if quantize is None or "=" not in quantize:
        return quantize
    pairs = [pair.partition("=") for pair in quantize.split(",")]
    if wrong := next((pattern for pattern, _, format_ in pairs if not pattern or not format_), None):
        raise UsageError(f"--quantize {quantize}: {wrong!r} has no format", "write PATTERN=FORMAT,PATTERN=FORMAT")
    return {pattern: format_ for pattern, _, format_ in pairs}


def mix_formats(
    name: str, dataset: str, bits: float, formats: str | None, tokens: int
) -> tuple[Mixture, dict[str, float]]:
    """Measure formats in every layer of a model, and choose one per layer within a budget.

    Every second row of the text is held out. On these rows the mixture is compared with each single format that fits.

    Args:
        formats: comma-separated names; None: all formats.
        dataset: calibration text, read as for training.
        bits: mean bits per weight of the quantized layers, scales included.
        tokens: number of tokens to measure on, and to hold out (at least `HELD_OUT`).

    Returns:
        the best choice, and the mean loss per held-out token of "mixture" and of each compared format, by name.

    Raises:
        HalfbyteError: the model, the text or a format cannot be used, or the budget or the text is too small.
    """
    checkpoint = find(name)
    if checkpoint.adapter or not checkpoint.base:
        raise ConfigError(f"{name} is a run or an adapter", "name the 16-bit base model")
    preflight_model(Origin(checkpoint.base))
    check_datasets(dataset)
    import_models()
    from ..data.collate import make_collator
    from ..data.prepare import CALIBRATION_ROW, collated_rows, packed_rows
    from ..loading.load import load_model, load_tokenizer
    from ..loading.mixed_formats import best, measure
    from ..modeling.packing import isolate_for_run

    candidates = _candidates(formats)
    config = saved_config(checkpoint, [f"max_length={CALIBRATION_ROW}", "packing=true", "load_in_4bit=false"], dataset)
    files = find_model(config.origin)
    model = load_model(
        files,
        config.storage,
        dtype=config.precision.compute,
        device=config.device,
        attn_implementation=config.attn_implementation,
    )
    tokenizer = load_tokenizer(files.origin, chat_template_path=config.chat_template_path)
    collate = make_collator(config, tokenizer)
    rows = packed_rows(config, tokenizer, 2 * max(tokens, HELD_OUT))
    if len(rows) < 2:
        raise DataError(
            f"{dataset} has less than two rows of {CALIBRATION_ROW} tokens, and one of them is held out",
            "give more text",
        )
    isolate_for_run(model, config, collate, rows)
    options = measure(
        model, candidates, collated_rows(rows[::2][: max(1, tokens // CALIBRATION_ROW)], collate, model.device)
    )
    return best(
        model, candidates, options, bits, list(collated_rows(rows[1::2], collate, model.device, EVALUATION_ROWS))
    )


def _candidates(formats: str | None) -> dict[str, Any]:
    """Return the formats by name."""
    from .. import formats as registry

    names = sorted(registry.names()) if formats is None else [name.strip() for name in formats.split(",")]
    try:
        return {name: registry.named(name) for name in names}
    except ModelError as error:
        raise UsageError(f"--formats {formats}: {error.message}", error.fix) from error


def explain(mixture: Mixture, losses: Mapping[str, float]) -> str:
    """Describe the layers and bytes of each format, and compare the mixture with each single format."""
    formats = sorted({option.format for option in mixture.layers.values()})
    lines = []
    for name in formats:
        chosen = [option for option in mixture.layers.values() if option.format == name]
        lines.append(f"{name}: {len(chosen)} layers, {sum(option.nbytes for option in chosen) / 2**20:.1f} MiB")
    lines.append(f"{mixture.bits:.3f} bits per weight")
    compared = ", ".join(f"{name} {losses[name]:.4f}" for name in sorted(losses, key=lambda name: losses[name]))
    lines.append(f"loss on held-out text: {compared}")
    if len(formats) == 1:
        lines.append(f"{formats[0]} in every layer is no worse than the mixture, so it is used alone")
    else:
        lines.append("the mixture is better than each single format that fits")
    return "\n".join(lines)


def as_yaml(mixture: Mixture) -> str:
    """Return the mapping for the key `quantization`, one layer per line."""
    return dump_mapping(mixture.patterns())


def serve_model(
    name: str,
    host: str,
    port: int,
    adapters: Sequence[str],
    hosts: Sequence[str] = (),
    api_key: str | None = None,
    trust_remote_code: bool = False,
    kv_cache: str = "auto",
    **limits: Any,
) -> None:
    """Serve until a signal.

    Args:
        adapters: entries "name=path".
        hosts: host names of this server for clients, in addition to the names of this machine and `host`.
        api_key: key that clients must send; required if other machines can reach `host`.
        trust_remote_code: run the Python code that comes with the model, whatever a run's own configuration says.
        kv_cache: as in `generation.generate`.
        limits: fields of `serve.model.Limits`.

    Raises:
        ConfigError: starlette or uvicorn is missing, or an adapter is not name=path.
        UsageError: an adapter's name is given twice, or `kv_cache` is unknown.
    """
    if kv_cache not in get_args(KvCache):
        raise UsageError(f"--kv-cache is {brief(kv_cache)}", f"use one of {', '.join(get_args(KvCache))}")
    named = [*map(_named, adapters)]
    folders = dict(named)
    if twice := next((name for name, count in Counter(name for name, _ in named).items() if count > 1), None):
        raise UsageError(f"--adapter: the name {twice} is given twice", "choose another name")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}", "pip install 'halfbyte[serve]'") from error
    check_versions("serve")
    for folder in folders.values():
        find_adapter(folder)
    look_up(name, [f"trust_remote_code={trust_remote_code}"])
    import_models()
    from ..serve.model import Limits
    from ..serve.run import serve

    serve(name, host, port, folders, Limits(**limits), hosts, api_key, trust_remote_code, kv_cache)


def key_of(key: str | None, file: Path | None) -> str | None:
    """Return the API key that is given, or the one in a file, without the line break at its end.

    Raises:
        UsageError: both are given.
        ConfigError: the file cannot be read, or other users can read it.
    """
    if file is None:
        return key
    if key is not None:
        raise UsageError("--api-key-file with --api-key or HALFBYTE_API_KEY", "give one of them")
    key = read_text(file, ConfigError, "name a file with the key", largest=4096).strip()
    if file.stat().st_mode & 0o077:
        raise ConfigError(f"--api-key-file {file}: other users can access it", f"chmod 600 {file}")
    return key


def show_board(folders: Sequence[Path], host: str, port: int, read_only: bool, allowed: Sequence[Path]) -> None:
    """Show runs in a browser until a signal; see `board.run.serve_board`.

    Raises:
        ConfigError: starlette or uvicorn is missing.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"the board needs {error.name}", "pip install 'halfbyte[board]'") from error
    check_versions("board")
    from ..board.run import serve_board

    serve_board(folders, host, port, read_only, allowed)


def _named(adapter: str) -> tuple[str, str]:
    name, equals, path = adapter.partition("=")
    if not (name and equals and path):
        raise UsageError(f"--adapter {adapter} is not name=path", "e.g. --adapter poet=runs/poet")
    return name, path
