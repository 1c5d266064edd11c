"""Constants of `bitsandbytes.consts`."""

from __future__ import annotations

import platform
from pathlib import Path

DYNAMIC_LIBRARY_SUFFIX = {"Darwin": ".dylib", "Linux": ".so", "Windows": ".dll"}.get(platform.system(), ".so")
PACKAGE_DIR = Path(__file__).parent
PACKAGE_GITHUB_URL = "https://github.com/bitsandbytes-foundation/bitsandbytes"
NONPYTORCH_DOC_URL = "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/docs/source/installation.mdx"
