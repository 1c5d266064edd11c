"""Shared fixtures: where the real data lies, tiny models, and the seed."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHARED = Path(os.environ.get("HALFBYTE_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real weights, tokenizers and datasets; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no real data at {SHARED} (set HALFBYTE_SHARED)")
    return SHARED


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
