"""Other tools' keys for methods of training: Axolotl's `rl`, LLaMA-Factory's `stage` and `pref_loss`."""

from __future__ import annotations

from typing import Any

from .methods import DEFAULTS, LOSS_TYPES

# LLaMA-Factory's pref_loss under `stage: dpo`, by method; the others are losses of dpo.
OWN_METHODS = ("orpo", "simpo")
STAGES = {"rm": "reward"}
CHOOSING = ("rl", "reward_model", "stage", "pref_loss", "pref_ftx")


def method_keys(key: str, values: dict[str, Any]) -> dict[str, Any] | None:
    """Our keys for one of `CHOOSING`; none where it says nothing beside the others, None where it has no equivalent.

    Args:
        values: all keys of the file.
    """
    value, loss = values[key], values.get("pref_loss", "sigmoid")
    if key == "reward_model":
        return _method("reward")
    if key == "rl":
        return {"method": "dpo", "loss_type": "ipo"} if value == "ipo" else _method(value)
    if key == "stage":
        preferred = loss if loss in OWN_METHODS else "dpo"
        return {} if value == "sft" else _method(preferred if value == "dpo" else STAGES.get(value, value))
    if values.get("stage") != "dpo":  # where LLaMA-Factory does not read them
        return {}
    likelihood = float(values.get("pref_ftx") or 0)
    if loss in OWN_METHODS:
        return None if key == "pref_ftx" else {}
    if loss not in LOSS_TYPES["dpo"]:
        return None
    return {"loss_type": [loss, "sft"], "loss_weights": [1.0, likelihood]} if likelihood else {"loss_type": loss}


def _method(name: Any) -> dict[str, Any] | None:
    return {"method": name} if name in DEFAULTS else None
