"""QLoRA's share of LoRA's gain, as `benchmarks.qlora_40m` counts it."""

import json
from pathlib import Path

import pytest

from benchmarks.qlora_40m import share

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "qlora_40m_cpu.json"


def test_both_gains_are_counted_from_one_start():
    lora16 = {"eval_loss_before": 2.0, "eval_loss_after": 1.0}
    assert share({"eval_loss_before": 2.5, "eval_loss_after": 1.1}, lora16) == pytest.approx(0.9)


def test_the_kept_result_is_counted_so():
    kept = json.loads(RESULT.read_text())
    for name in ("glaive", "gsm8k"):
        assert kept[name]["gain_share"] == pytest.approx(share(kept[name]["qlora"], kept[name]["lora16"]))
