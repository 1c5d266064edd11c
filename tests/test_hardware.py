"""What is prepared before torch is there."""

import os

import pytest
import torch

from halfbyte.hardware import GROWING, compute_dtype, let_segments_grow, segments_grow


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_the_allocator_is_set_up_unless_the_user_did(monkeypatch, given, expected):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ) | given)
    let_segments_grow()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
    assert segments_grow() == (expected == GROWING)


def test_the_dtype_is_that_of_the_device_that_is_asked_for(monkeypatch):
    """A T4 beside an A100, the second of which is the current one."""
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device=1: [(7, 5), (8, 0)][torch.device(device).index]
    )
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    found = [compute_dtype(torch.device("cuda", index)) for index in (0, 1)]
    assert [each.dtype for each in found] == [torch.float16, torch.bfloat16]
    assert found[0].reason == "cuda:0 has no bf16 units"
