"""benchmarks.bnb_bytes: no byte differs from bitsandbytes' CPU library, and a byte that does is counted."""

import json

import pytest
import torch
import torch._dynamo

from benchmarks import bnb_bytes
from halfbyte.bitsandbytes import functional


@pytest.fixture(autouse=True)
def _eager():
    """Keep bitsandbytes' CPU dequantization from compiling again for every size."""
    with torch._dynamo.config.patch(disable=True):
        yield


def counted(folder) -> dict[str, dict[str, int]]:
    bnb_bytes.main(["--tensors", "60", "--device", "cpu", "--json", str(folder / "r.json")])
    return json.loads((folder / "r.json").read_text())["rows"]


def test_no_byte_differs(tmp_path):
    rows = counted(tmp_path)
    assert {"4-bit codes, nf4", "4-bit values", "8-bit codes, dynamic", "int8 rows"} <= rows.keys()
    assert all(row["elements"] and not row["differ"] for row in rows.values())


def test_differences_are_counted(tmp_path, monkeypatch):
    quantize = functional.quantize_4bit

    def wrong(x, **options):
        packed, state = quantize(x, **options)
        packed.view(torch.uint8).view(-1)[0] ^= 0x80
        return packed, state

    monkeypatch.setattr(functional, "quantize_4bit", wrong)
    row = counted(tmp_path)["4-bit codes, nf4"]
    assert row["differ"] == row["tensors"]
    assert row["of them ties"] < row["differ"]
