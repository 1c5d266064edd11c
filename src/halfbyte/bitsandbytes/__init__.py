"""bitsandbytes 0.50.2's interface over halfbyte's ops, without a compiled binary.

Three ways to switch it on, none by itself: `import halfbyte.bitsandbytes as bnb`; `halfbyte.bitsandbytes.install()`,
after which `import bitsandbytes` finds this package; and `python -m halfbyte.bitsandbytes SCRIPT` or `-m MODULE` for
code that cannot be edited. `halfbyte.bitsandbytes.override()` is for those who keep the real package: it replaces the
kernels in place. `docs/bitsandbytes.md` lists the differences.
"""

from __future__ import annotations

from . import _ops, functional, nn, optim, utils
from .autograd._functions import MatmulLtState, matmul, matmul_4bit
from .installation import install, mode, override, real_package_is_present, uninstall

__all__ = [
    "MatmulLtState", "features", "functional", "install", "matmul", "matmul_4bit", "mode", "nn", "optim", "override",
    "supported_torch_devices", "uninstall", "utils",
]  # fmt: skip

__version__ = "0.50.2+halfbyte"
features = {"multi_backend"}
supported_torch_devices = {"cpu", "cuda", "xpu", "hpu", "npu", "mps"}

if not real_package_is_present():
    _ops.register()
