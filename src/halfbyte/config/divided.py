"""Other tools' keys that divide a run among GPUs: together they come to one value of `parallel`."""

from __future__ import annotations

from typing import Any

WAYS = {
    # accelerate and transformers (ParallelismConfig), Axolotl, LLaMA-Factory and Unsloth
    "dp_replicate_size": "data",
    "data_parallel_size": "data",
    "dp_shard_size": "shard",
    "tp_size": "tensor",
    "tensor_parallel_size": "tensor",
    "pp_size": "pipeline",
    "pipeline_parallel_size": "pipeline",
    "cp_size": "context",
    "sp_size": "context",
    "context_parallel_size": "context",
    "sequence_parallel_size": "context",
    "sequence_parallel_degree": "context",
}
SEVERAL = "parallelism_config"  # transformers' section of such keys


def divided(values: dict[str, Any]) -> tuple[dict[str, int], str]:
    """The ways along each axis that `values` ask for, and what is wrong with them (empty: nothing).

    Raises:
        ValueError, TypeError: one is no number, or the section no mapping.
    """
    asked = [(key, values[key]) for key in WAYS if values.get(key) is not None]
    asked += [(key, ways) for key, ways in dict(values.get(SEVERAL) or {}).items() if ways is not None]
    found: dict[str, tuple[str, int]] = {}
    for key, ways in asked:
        if key not in WAYS:
            return {}, f"{SEVERAL} has {key}"
        if isinstance(ways, bool) or int(ways) != ways or ways < 1:
            return {}, f"{key} must be a whole number above 0"
        before, number = found.setdefault(WAYS[key], (key, ways))
        if number != ways:
            return {}, f"{before}: {number} and {key}: {ways} both divide along {WAYS[key]}"
    return {axis: number for axis, (_, number) in found.items() if number > 1}, ""
