"""Golden numbers of each format's examples: bytes that may never change, errors that may not grow.

`python -m tests.helpers.format_golden` prints the entries of golden.json; a new format commits its own.
"""

import hashlib
import json
from pathlib import Path

import torch

FILE = Path(__file__).parents[1] / "formats" / "golden.json"
GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {}
SHAPE = (67, 131)  # 8777 values: odd, and no multiple of any block


def golden_weight():
    """Values from integer arithmetic, independent of versions of random generators and libm.

    They are multiples of 2^-18 below 2^-3: fp32 sums of all block maxima are exact in any order, on any machine.
    """
    state, values = 12345, []
    for _ in range(SHAPE[0] * SHAPE[1]):
        total = 0
        for _ in range(4):  # a sum of four uniforms is close enough to a normal
            state = (1103515245 * state + 12345) % 2**31
            total += state >> 15
        values.append((total - 2 * 2**16) // 4 / 2**18)
    return torch.tensor(values, dtype=torch.float32).view(SHAPE)


def describe(format):
    """RMS error relative to the weights' RMS, and a hash of each part's bytes."""
    weight = golden_weight()
    parts = format.quantize(weight)
    error = format.dequantize(parts, SHAPE, torch.float32) - weight
    hashes = {
        name: hashlib.sha256(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, part in parts.items()
    }
    return {"rms_error": round(float(error.norm() / weight.norm()), 5), "parts": hashes}


if __name__ == "__main__":
    from halfbyte.formats import FORMATS

    entries = {}
    for cls in FORMATS.values():
        for example in cls.examples():
            # largest_error: the largest error the format allows, over the largest magnitude of the tensor.
            limit = GOLDEN.get(example.spec, {}).get("largest_error")
            entries[example.spec] = {"largest_error": limit, **describe(example)}
    print(json.dumps(entries, indent=2))
