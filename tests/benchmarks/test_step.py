"""benchmarks.step: the documents of a packed row, the sums of its floor, and its check for dense masks."""

import pytest
import torch

from benchmarks import step
from halfbyte.autograd import attention as causal
from halfbyte.modeling import attention
from tests.helpers.patch_models import loop_over_documents

LENGTHS = [40, 300, 300]


def test_lengths_are_uneven_deterministic_and_fill_the_row():
    lengths = step.document_lengths(24, 16384)
    assert len(lengths) == 24
    assert sum(lengths) == 16384
    assert max(lengths) > 5 * min(lengths) > 0
    assert lengths == step.document_lengths(24, 16384)
    assert step.document_lengths(5, 5) == [1] * 5


def test_batch_is_one_row_of_documents():
    batch = step.packed_batch("tiny", LENGTHS, "cpu")
    assert batch["input_ids"].shape == (1, 640)
    assert batch["cu_seq_lens_q"].unique().tolist() == [0, 40, 340, 640]
    assert (batch["labels"] == -100).nonzero()[:, 1].tolist() == [0, 40, 340]


@pytest.mark.parametrize("dense", [True, False])
def test_dense_mask_is_found(monkeypatch, dense):
    training = step.Training("tiny", 1, 640, "cpu")
    if not dense:
        monkeypatch.setattr(causal, "DTYPES", (torch.float32, torch.bfloat16))
        monkeypatch.setattr(causal, "_varlen", lambda: (short_loop, frozenset({"enable_gqa"})))
        attention.register()
        training.model.config._attn_implementation = attention.ATTENTION_NAME
    with step.MaskWatch(640) as watch:
        training.step(step.packed_batch("tiny", LENGTHS, "cpu"))
    assert any("torch.bool [1, 1, 640, 640]" in made for made in watch.found) == dense
    assert bool(watch.found) == dense


def short_loop(query, key, value, bounds, _, longest, __, **options):
    """Attend document by document, ignoring the padding of the bounds."""
    bounds = bounds.unique()
    longest = int(bounds.diff().max())
    return loop_over_documents(query, key, value, bounds, bounds, longest, longest, **options)


def test_floor_times_attention_per_document(monkeypatch):
    monkeypatch.setattr(step, "gemm_ms", lambda *shape: (1.0, 2.0))
    monkeypatch.setattr(step, "attention_ms", lambda rows, length, config: (rows * length, 10 * rows * length**2))
    found = step.floor("tiny", 1, 640, checkpointing=False, documents=LENGTHS)
    assert found["parts"]["attention"] == {"count": 2, "forward_ms": 640, "backward_ms": 10 * (40**2 + 2 * 300**2)}
    assert found["ms"] == 3 * (7 * 2 + 1) + 2 * (640 + 10 * (40**2 + 2 * 300**2))
    whole = step.floor("tiny", 4, 512, checkpointing=False)
    assert whole["parts"]["attention"]["forward_ms"] == 4 * 512
