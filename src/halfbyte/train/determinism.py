"""Whether two runs with one seed have equal bytes on a GPU, and how a run asks for that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from halfbyte.autograd.attention import DIFFERS
from halfbyte.config import RunConfig
from halfbyte.modeling.patch import PatchReport
from halfbyte.utils.errors import TrainingError
from halfbyte.utils.notices import notices_so_far

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # torch wants it said that cuBLAS has one of a fixed size, as it gives it anyway


@contextlib.contextmanager
def repeatable(config: RunConfig, device: torch.device) -> Iterator[None]:
    """With `deterministic: true` on a GPU, torch's repeatable algorithms for everything inside.

    torch would also fill new tensors, so that a read of what nobody wrote repeats: a quarter of a small step's time.

    Raises:
        TrainingError: an operation has no repeatable algorithm.
    """
    if not config.deterministic or device.type == "cpu":
        yield
        return
    os.environ.setdefault(WORKSPACE, ":4096:8")
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if WORKSPACE in str(error):
            fix = f"start a new process, or set {WORKSPACE}=:4096:8 before this one uses the GPU"
            raise TrainingError(f"deterministic: {reason}", fix) from error
        if "deterministic" in reason:
            raise TrainingError(f"deterministic: {reason}", "set deterministic: false") from error
        raise
    finally:
        torch.set_deterministic_debug_mode(before[0])
        memory.fill_uninitialized_memory = before[1]


def verdict(config: RunConfig, device: torch.device, report: PatchReport | None) -> dict[str, Any]:
    """Whether another run with this seed on this machine has equal bytes, and why, for checks.json.

    Args:
        report: of `patch`; None where the model ran transformers' own forwards.
    """
    if device.type == "cpu":
        return {"equal": True, "why": "a CPU's sums have one order"}
    if config.deterministic:
        return {"equal": True, "why": "deterministic: true"}
    if DIFFERS in notices_so_far():
        return {"equal": False, "why": f"{notices_so_far()[DIFFERS]}; deterministic: true repeats them"}
    if report is None or not report.fused:
        return {"equal": False, "why": "transformers' own forwards ran; deterministic: true repeats them"}
    if any(what == "experts" for what, _ in report.unfused):
        why = "transformers' function adds experts' results in any order"
        return {"equal": False, "why": f"{why}; deterministic: true repeats them"}
    return {"equal": True, "why": "every sum of this run has one order"}
