"""Settings before torch is imported, and facts about devices."""

import contextlib
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch.torch_version import TorchVersion

from halfbyte.utils import hardware
from halfbyte.utils.hardware import (
    EXPANDABLE,
    compute_dtype,
    enable_expandable_segments,
    fixed_segments,
    free_bytes,
    has_expandable_segments,
    limit_primitive_caches,
    onednn_beats_mkl,
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_expandable_segments_unless_configured(monkeypatch, given, expected):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    with mock.patch.dict(os.environ, given):
        enable_expandable_segments()
        assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
        assert has_expandable_segments() == (expected == EXPANDABLE)


@pytest.mark.parametrize(
    ("given", "device", "changes"),
    [
        ("roundup_power2_divisions:4,expandable_segments:True", "cuda", ["False", "True"]),
        ("roundup_power2_divisions:4", "cuda", []),
        ("expandable_segments:True", "cpu", []),
    ],
)
def test_fixed_segments_keep_other_settings(monkeypatch, given, device, changes):
    """The other settings are passed again, since torch resets options that it does not get."""
    told = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    with contextlib.suppress(ZeroDivisionError), fixed_segments(torch.device(device)):
        assert len(told) == len(changes[:1])
        raise ZeroDivisionError
    assert told == [f"roundup_power2_divisions:4,expandable_segments:{each}" for each in changes]


@pytest.mark.parametrize(("version", "expected"), [("2.11.0+cpu", False), ("2.12.0", True), ("2.15.0a0", True)])
def test_float32_products_by_onednn_whose_rows_are_independent(monkeypatch, version, expected):
    """oneDNN of torch 2.11 sums a row in another order in a batch of another size."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(hardware, "_is_amd", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None, raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert onednn_beats_mkl.__wrapped__() == expected


def test_compute_dtype_is_of_the_given_device(monkeypatch):
    """A T4 and an A100, the current device."""
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device=1: [(7, 5), (8, 0)][torch.device(device).index]
    )
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # torch asks some of this of numbers alone
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    found = [compute_dtype(torch.device("cuda", index)) for index in (0, 1)]
    assert [each.dtype for each in found] == [torch.float16, torch.bfloat16]
    assert found[0].reason == "cuda:0 has no bf16 units"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compute_dtype(torch.device("cuda")).dtype == torch.bfloat16


LENGTHS = """
import psutil, torch
import torch.nn.functional as F
from halfbyte.utils.hardware import limit_primitive_caches

torch.set_num_threads(1)
limit_primitive_caches()

def products(length):
    q = torch.randn(2, 4, length, 64, dtype=torch.bfloat16, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

for length in range(64, 224, 4):
    products(length)
before = psutil.Process().memory_info().rss
for length in range(224, 304, 4):
    products(length)
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    compute_dtype(torch.device("cpu")).dtype != torch.bfloat16, reason="oneDNN compiles 16-bit products, here are none"
)
def test_primitive_caches_are_limited():
    """With full caches an attention keeps 4.4 MiB per length; the limit also applies after torch is imported."""
    kept = {key: value for key, value in os.environ.items() if "CACHE_CAPACITY" not in key}  # other tests have bound it
    command = [sys.executable, "-c", LENGTHS]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True, env=kept).stdout)
    assert grown <= 32 * 2**20


def test_user_settings_of_caches_are_kept():
    with mock.patch.dict(os.environ, {"LRU_CACHE_CAPACITY": "7"}, clear=True):
        limit_primitive_caches()
        assert os.environ == {"LRU_CACHE_CAPACITY": "7", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}


@pytest.mark.parametrize(("free", "share", "expected"), [(40, 1.0, 40), (90, 0.5, 20), (10, 0.5, 10)])
def test_free_bytes_respect_the_memory_fraction(monkeypatch, free, share, expected):
    """`memory_limit_gib` sets it; engines and graphs then see less than the device's free memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 100))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", {0: share}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # torch asks some of this of numbers alone
    assert free_bytes(torch.device("cuda")) == expected
