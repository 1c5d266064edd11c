"""What a decoder layer keeps for backward: the levels' names. `plan.policy` says what each costs.

Every step down keeps less and computes more:

    keep               all that backward reads
    recompute          not the normalised inputs of attention and MLP: one elementwise pass makes each again
    recompute_mlp      of the MLP, only its input: gate and up are multiplied again
    checkpoint         only the layer's input: all is computed again but the last product (`autograd.recompute`)

What recompute, recompute_mlp and checkpoint keep may wait in pinned host memory (`memory.offload`), and nothing on the
device: offload_kept, offload_attention and offload. The first two are as many bytes as a link carries in three layers'
forward and in one's, so layers of offload_kept are spread among others. The last step down from there is

    tiled              as offload, and the MLP runs over `TILE_ROWS` tokens at a time, so nothing as wide exists whole
"""

from __future__ import annotations

from typing import get_args

from ..config import Level

LEVELS: tuple[Level, ...] = get_args(Level)
OFFLOADED: dict[str, Level] = {  # level → what is on the host then, and not on the device
    "offload_kept": "recompute",
    "offload_attention": "recompute_mlp",
    "offload": "checkpoint",
    "tiled": "checkpoint",
}
TILE_ROWS = 8192
