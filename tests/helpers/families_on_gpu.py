"""Every causal LM of transformers, tiny, on a GPU in bfloat16 with the fused collator: who leaks, line by line.

python -m tests.helpers.families_on_gpu PART PARTS   prints the rows of one share of the families, as they come
"""

from __future__ import annotations

import sys

import torch
import transformers

from halfbyte.data.collate import PackedCollator
from halfbyte.modeling.packing import isolate_documents
from halfbyte.modeling.patch import patch
from halfbyte.utils.errors import ConfigError
from tests.helpers import all_families

ROW = 100  # with the fused collator a row of 128 tokens, for which every family has positions


def line_of(name: str) -> str:
    try:
        model = all_families.build(name).to("cuda", torch.bfloat16)
    except Exception as error:
        return f"{name} does not build: {type(error).__name__}"
    fused = "fused" if patch(model).fused else "plain"
    try:
        found = isolate_documents(
            model, PackedCollator(0, fused=True), key="packing", length=ROW, tokens=all_families.TOKENS
        )
    except ConfigError as error:
        return f"{name} refused {fused}: {error.message}"
    ways = {way: str(found) for way, found in found.tried.items()}
    taken = found.tried[found.method]
    sums = f"typical {taken.typical:.1e}, separate rows {taken.order_of_sums:.1e}" if taken.change else "equal in bits"
    alone = all_families.alone_error(model.to("cuda"))
    return f"{name} {found.method} {fused} ({sums}; alone {alone:.1e}) {ways if found.method != 'positions' else ''}"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    part, parts = map(int, sys.argv[1:3])
    for name in all_families.NAMES[part::parts]:
        try:
            print(line_of(name), flush=True)
        except Exception as error:  # the next family is as interesting
            print(f"{name} BUG {type(error).__name__}: {str(error)[:300]}", flush=True)
