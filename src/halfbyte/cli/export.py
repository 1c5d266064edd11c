"""`halfbyte export`."""

from __future__ import annotations

from pathlib import Path

from ..console import Console
from ..errors import ConfigError, UsageError
from ..runs.saved import look_up
from ..words import one_line
from .imports import quick_imports


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
