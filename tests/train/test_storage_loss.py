"""Formats under 4 bits: a run records their loss on its own rows, next to the loss in 16 bits."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from halfbyte.config import load_config
from halfbyte.loading.load import load_model
from halfbyte.train import storage_loss as module
from halfbyte.train.preflight import prepare_run
from halfbyte.utils import notices
from tests.helpers.sft_runs import keys, run


def measured(place, output, **changed):
    return prepare_run(load_config(None, keys(place, output, **changed)), writes=False)


@torch.no_grad()
def mean_loss(model, rows):
    total = tokens = 0
    for row in rows:
        ids = torch.tensor([row["input_ids"][: module.TOKENS]])
        total += float(F.cross_entropy(model(input_ids=ids).logits[0, :-1].float(), ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
    return total / tokens, tokens


@pytest.mark.parametrize("quantization", ["kbit3", {"*.down_proj": "hqq3", "*.q_proj": "16bit", "*": "nf4"}])
def test_both_losses_are_those_of_loaded_models(place, tmp_path, quantization):
    prepared = measured(place, tmp_path / "out", quantization=quantization)
    rows = prepared.data.train.select(range(module.ROWS))
    model = str(place / "model")
    stored, tokens = mean_loss(load_model(model, quantization=quantization, dtype="float32", device="cpu"), rows)
    original, _ = mean_loss(load_model(model, load_in_4bit=False, dtype="float32", device="cpu"), rows)
    found = prepared.storage_loss
    assert math.isclose(found.stored, stored, rel_tol=1e-5)
    assert math.isclose(found.original, original, rel_tol=1e-5)
    assert found.stored != found.original
    assert (found.rows, found.tokens) == (module.ROWS, tokens)


@pytest.mark.parametrize("changed", [{}, {"load_in_4bit": False}, {"quantization": "kbit4"}])
def test_four_bits_and_more_are_not_measured(place, tmp_path, changed):
    assert measured(place, tmp_path / "out", **changed).storage_loss is None


def test_bits_are_those_of_codes_without_their_scales(place, tmp_path):
    assert measured(place, tmp_path / "out", quantization="hqq:3:32").storage_loss is not None  # 4 bits with scales


def test_without_memory_for_16_bits_a_notice_says_so(place, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    assert measured(place, tmp_path / "out", quantization="kbit3").storage_loss is None
    assert "storage-loss" in notices.notices_so_far()


def test_a_run_records_it_and_computes_the_same(place, tmp_path, monkeypatch):
    run(place, tmp_path / "one", quantization="kbit3", max_steps=2)
    checks = json.loads((tmp_path / "one" / "checks.json").read_text())["storage_loss"]
    assert checks["formats"].startswith("kbit:3:")
    assert checks["stored"] > 0 < checks["original"]
    monkeypatch.setattr("halfbyte.train.preflight.storage_loss", lambda *_: None)
    run(place, tmp_path / "two", quantization="kbit3", max_steps=2)
    weights = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
