"""Batches with images are collated ahead in threads: in order, few at a time, with errors that name their row."""

import threading
import time

import pytest
from PIL import Image

from halfbyte.config import load_config
from halfbyte.data.collate import make_collator
from halfbyte.data.prepare import prepare
from halfbyte.data.rows import PrefetchedBatches, RowTable
from halfbyte.loading.tokenizers import load_run_tokenizer
from halfbyte.utils.errors import DataError
from tests.helpers.image_models import save_image_model, write_image_rows


def micro_batches(count, read):
    """Rows of `count` batches; `read` gets the number of each batch that is taken."""
    for number in range(count):
        read.append(number)
        yield [{"number": number}]


def test_batches_are_in_order_and_few_are_ahead():
    read, running, most = [], [0], [0]
    lock = threading.Lock()

    def collate(rows):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02 if rows[0]["number"] % 3 else 0.06)  # later batches are ready before earlier ones
        with lock:
            running[0] -= 1
        return rows[0]

    for number, batch in enumerate(PrefetchedBatches(micro_batches(12, read), collate, threads=3)):
        assert batch["number"] == number
        assert len(read) <= number + 4
    assert number == 11
    assert most[0] == 3


def test_threads_end_with_an_iteration_that_ends_early():
    read = []
    batches = iter(PrefetchedBatches(micro_batches(100, read), lambda rows: rows[0], threads=2))
    assert next(batches) == {"number": 0}
    names = {thread.name for thread in threading.enumerate()}
    assert any(name.startswith("images") for name in names)
    batches.close()
    assert not any(thread.name.startswith("images") for thread in threading.enumerate())
    assert len(read) == 3


def test_a_batch_that_cannot_be_read_is_raised_in_its_place_with_its_row(tmp_path):
    save_image_model(tmp_path / "model", "qwen3_vl")
    write_image_rows(tmp_path)
    keys = {"model_name_or_path": str(tmp_path / "model"), "dataset": str(tmp_path / "data.jsonl"), "output_dir": "out",
            "max_length": 400, "device": "cpu", "dtype": "float32"}  # fmt: skip
    config = load_config(None, keys)
    tokenizer = load_run_tokenizer(config)
    rows, collate = prepare(config, tokenizer).train, make_collator(config, tokenizer)
    table = RowTable(rows)
    batches = list(table.load(3, collate, seed=None, skip=0, rank=0, ranks=1, pinned=False).loader)
    skipped = list(table.load(3, collate, seed=None, skip=1, rank=0, ranks=1, pinned=False).loader)
    for batch, other in zip(batches[1:], skipped, strict=True):
        assert batch.keys() == other.keys()
        assert all(batch[key].equal(other[key]) for key in batch)
    Image.new("RGB", (9, 9)).save(tmp_path / "pictures/5-1.png")
    again = iter(table.load(3, collate, seed=None, skip=0, rank=0, ranks=1, pinned=False).loader)
    assert next(again)["input_ids"].equal(batches[0]["input_ids"])
    with pytest.raises(DataError, match=r"data\.jsonl:6, turn 1, image 2.*5-1\.png"):
        next(again)
