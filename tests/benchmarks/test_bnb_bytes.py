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


def test_many_values_are_compared_and_different_blocks_dumped(tmp_path, monkeypatch):
    monkeypatch.setattr(bnb_bytes, "CHUNK", 20_000)
    options = [
        "--values",
        "30001",
        "--device",
        "cpu",
        "--json",
        str(tmp_path / "r.json"),
        "--dump",
        str(tmp_path / "d"),
    ]
    bnb_bytes.main(options)
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert len(rows) == 3 * 2 * (2 + 4)
    assert all(row["elements"] and not row["differ"] for row in rows.values())
    assert sum(row["elements"] for name, row in rows.items() if name.endswith("bytes")) == 12 * 15_001
    assert not (tmp_path / "d").exists()

    quantize = functional.quantize_4bit

    def wrong(x, **options):
        packed, state = quantize(x, **options)
        packed.view(-1)[3300] ^= 0x80
        return packed, state

    monkeypatch.setattr(functional, "quantize_4bit", wrong)
    bnb_bytes.main(options)
    first = torch.load(tmp_path / "d")[0]
    assert (first["part"], first["at"], first["block"]) == ("bytes", 3300, 103)
    assert first["ours"][4] == first["theirs"][4] ^ 0x80
    assert len(first["values"]) == 64
