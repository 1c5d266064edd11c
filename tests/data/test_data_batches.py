"""Planned batches: collators make no larger ones, and there are few widths."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from halfbyte.config import RunConfig
from halfbyte.data.batch_shapes import Shape
from halfbyte.data.batches import batches_of_lengths
from halfbyte.data.collate import make_collator, width_of
from halfbyte.utils import notices

NOTHING = np.zeros(0, dtype=np.int64)
TOKENIZER = SimpleNamespace(pad_token_id=0)


def run_config(**keys) -> RunConfig:
    return RunConfig(**{"model_name_or_path": "m", "dataset": "d", "max_length": 4096} | keys)


def test_widths_are_few_with_little_padding():
    widths = {width_of(length) for length in range(1, 4097)}
    assert len(widths) == 16
    assert all(width_of(length) <= max(1.25 * length, length + 127) for length in range(1, 100_000, 7))
    assert all(width_of(width) == width for width in widths)
    assert all(width_of(length, widths=8) <= max(1.125 * length, length + 127) for length in range(1, 100_000, 7))
    assert len({width_of(length, widths=8) for length in range(2049, 4097)}) == 8
    assert [width_of(1025, most) for most in (None, 1100, 4096)] == [1280, 1152, 1280]
    assert [width_of(length, length) for length in (512, 2048, 3000, 3072)] == [512, 2048, 3072, 3072]  # packed rows


@pytest.mark.sampled(5)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("keys", [{}, {"padding_free": True}, {"packing": True}, {"per_device_train_batch_size": 100}])
def test_no_batch_is_larger_than_planned(keys, device):
    config = run_config(**{"per_device_train_batch_size": 3} | keys)
    draw = np.random.default_rng(1)
    lengths = draw.integers(64, 4097, 26)
    batches = batches_of_lengths(config, lengths, lengths[:5], rounded=device == "cuda")
    collate = make_collator(config, TOKENIZER, torch.device(device))
    seen = set()
    for _ in range(40):
        order = draw.permutation(len(lengths))
        for begin in range(0, len(lengths), config.per_device_train_batch_size):
            picked = lengths[order[begin : begin + config.per_device_train_batch_size]]
            rows = [{"input_ids": [1] * int(n), "labels": [1] * int(n)} for n in picked]
            seen.add(tuple(collate(rows)["input_ids"].shape))
    largest = max(seen, key=lambda shape: shape[0] * shape[1])
    assert largest[0] * largest[1] <= batches.largest.tokens
    if not config.padding_free:  # a sum of the longest rows is rare
        assert Shape(*largest) == batches.largest
        others = [rows * width for rows, width in seen if (rows, width) != largest]
        assert max(others, default=0) <= batches.second.tokens
    assert batches.usual.tokens <= batches.largest.tokens
    assert batches.evaluation.tokens <= batches.largest.tokens


def test_a_batch_has_no_more_rows_than_the_data():
    batches = batches_of_lengths(
        run_config(per_device_train_batch_size=100_000), np.full(60, 50), NOTHING, rounded=False
    )
    assert batches.largest == batches.usual == Shape(60, 50)
    assert batches.second.tokens == batches.evaluation.tokens == 0
    assert "60 rows" in notices.notices_so_far()["batch-rows"]
