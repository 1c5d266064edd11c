"""What is prepared before torch is there."""

import os

import pytest

from halfbyte.hardware import GROWING, let_segments_grow, segments_grow


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
