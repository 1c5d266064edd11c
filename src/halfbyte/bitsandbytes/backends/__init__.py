"""Names of bitsandbytes' backend modules, empty: halfbyte's ops choose their kernels by device themselves."""

from __future__ import annotations

import sys
import types

BACKENDS = ("cpu", "cuda", "default", "hpu", "mps", "triton", "xpu")

for _backend in BACKENDS:
    for _name in (f"{__name__}.{_backend}", f"{__name__}.{_backend}.ops"):
        _module = types.ModuleType(_name, "A name without content; see `halfbyte.bitsandbytes.backends`.")
        _module.__path__ = []
        sys.modules[_name] = _module
    _package = sys.modules[f"{__name__}.{_backend}"]
    _package.ops = sys.modules[f"{__name__}.{_backend}.ops"]  # type: ignore[attr-defined]
    globals()[_backend] = _package
