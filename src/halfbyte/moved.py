"""Modules of version 0.1 that moved: importing one by its old name works for one more version, with a notice."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from .notices import notice

MOVED = {
    "adapters_qat": "qat.layers",
    "autograd.fake_quantize": "qat.fake_quantize",
    "checkpoint_files": "reading.tensors",
    "config_recipe": "config",
    "config_yaml": "config.yaml",
    "export.base": "models.stored",
    "export.gguf": "gguf",
    "export.gguf.adapter": "export.gguf_adapter",
    "export.gguf.export": "export.gguf_model",
    "export.gguf.types": "gguf.types",
    "formats.choice": "models.choice",
    "generation.kept": "generation.engine_cache",
    "layers_int8": "layers.int8",
    "layers_qat": "qat.layers",
    "memory.estimate": "plan.estimate",
    "memory.policy": "plan.policy",
    "models.checkpoint_files": "reading.tensors",
    "models.families": "families",
    "models.gguf": "gguf",
    "models.gguf.unpack": "gguf.unpack",
    "models.qat": "qat.model",
    "saved": "runs.saved",
    "serve.text": "generation.text",
    "train.lock": "runs.lock",
    "train.manifest": "runs.manifest",
}


class Moved(MetaPathFinder, Loader):
    """Finds what nobody else finds any more; asked last."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        old = name.removeprefix("halfbyte.")
        if old == name or old not in MOVED:
            return None
        return ModuleSpec(name, self, is_package=any(other.startswith(f"{old}.") for other in MOVED))

    def exec_module(self, module: ModuleType) -> None:
        new = f"halfbyte.{MOVED[module.__name__.removeprefix('halfbyte.')]}"
        notice(f"moved {module.__name__}", f"{module.__name__} is {new} now; the old name goes with the next version")
        found = import_module(new)
        module.__getattr__ = lambda name: getattr(found, name)  # type: ignore[method-assign]
        module.__doc__ = found.__doc__


def install() -> None:
    """Let imports of this process find the old names."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.append(Moved())
