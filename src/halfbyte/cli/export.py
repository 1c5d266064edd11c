"""`halfbyte export`."""

from __future__ import annotations

from pathlib import Path

from ..runs.saved import look_up
from ..utils.console import Console
from ..utils.errors import ConfigError, UsageError
from ..utils.text import one_line
from .imports import quick_imports


def export_for_servers(
    source: str, adapter: str | None, out: Path | None, beside: list[str], trust_remote_code: bool
) -> None:
    """Write the adapter of `source` as servers read it and say where.

    Args:
        beside: options of GGUF that were given.

    Raises:
        UsageError: no such layout, or options that do not go together.
    """
    if adapter is None:
        raise UsageError("export asks what to write", "give --gguf TYPE, or --adapter vllm")
    if adapter != "vllm":
        raise UsageError(f"--adapter {adapter}: there is no such layout", "give --adapter vllm, which SGLang reads too")
    if beside:
        raise UsageError(f"{beside[0]} with --adapter vllm: one is of GGUF", "give one of them")
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
) -> None:
    """Write `source` as GGUF and say what was written.

    Raises:
        ConfigError: the gguf library is missing; UsageError: options that do not go together.
    """
    look_up(source, [f"trust_remote_code={trust_remote_code}"])
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError("export --gguf needs the gguf library", "pip install 'halfbyte[gguf]'") from error
    console = Console(soft_wrap=True)
    if adapter_only:
        if importance:
            raise UsageError("--importance weighs quantization, and an adapter is not quantized", "leave it out")
        from ..export.gguf_adapter import export_adapter

        path = export_adapter(source, mix, out, trust_remote_code=trust_remote_code)
        console.print(one_line(f"adapter in {path}: llama-cli --model BASE.gguf --lora {path}"))
        return
    with quick_imports():
        from ..export.gguf_model import export_gguf

    report = export_gguf(source, mix, out, importances=importance, trust_remote_code=trust_remote_code, console=console)
    console.print(str(report))
    if report.mmproj:
        console.print(one_line(f"vision part in {report.mmproj}: llama-mtmd-cli --mmproj"))
    console.print(one_line(str(report.path)))
    console.print(one_line(f"{report.modelfile}: ollama create NAME -f {report.modelfile.name}"))
