"""Other tools' keys for methods of training: Axolotl's `rl`, LLaMA-Factory's `stage` and `pref_loss`."""

from __future__ import annotations

from typing import Any

from .methods import DEFAULTS, LOSS_TYPES

# LLaMA-Factory's pref_loss under `stage: dpo`, by method; the others are losses of dpo.
OWN_METHODS = ("orpo", "simpo")
STAGES = {"rm": "reward"}
TRL = "trl"  # Axolotl's section of keys for policy optimization
OURS = (
    *("beta", "loss_type", "num_generations", "max_completion_length", "temperature", "top_p", "top_k"),
    *("num_iterations", "epsilon", "epsilon_high", "delta", "mask_truncated_completions", "reward_weights"),
)
# Of an engine of its own, which is not there, or of what is shown.
BESIDE = ("log_completions", "num_completions_to_print", "use_liger_loss")
SCORING = {"reward_model": "reward", "process_reward_model": "prm"}  # Axolotl's
CHOOSING = ("rl", *SCORING, "stage", "pref_loss", "pref_ftx")


def method_keys(key: str, values: dict[str, Any]) -> dict[str, Any] | None:
    """Our keys for one of `CHOOSING`; none where it says nothing beside the others, None where it has no equivalent.

    Args:
        values: all keys of the file.
    """
    value, loss = values[key], values.get("pref_loss", "sigmoid")
    if key in SCORING:
        return _method(SCORING[key])
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


def policy_keys(section: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Our keys for Axolotl's section `trl`, and the key in it that has no equivalent (empty: none).

    Raises:
        AttributeError, TypeError: it is no such section.
    """
    given = {key: value for key, value in section.items() if value not in (None, False, [], {})}
    found = {key: value for key, value in given.items() if key in OURS}
    if "scale_rewards" in section:
        found["scale_rewards"] = {True: "group", False: "none"}.get(section["scale_rewards"], section["scale_rewards"])
    if "reward_funcs" in given:
        found["reward_funcs"] = [_in_a_file(name) for name in given["reward_funcs"]]
    served = asks_server(given)
    if served:
        found |= {"rollout": "vllm", "vllm_server_base_url": server_address(given)}
        found |= {key: given[key] for key in ("vllm_server_timeout",) if key in given}
    engine = [key for key in given if key.startswith("vllm_")] if served or not given.get("use_vllm") else []
    others = given.keys() - found.keys() - {*BESIDE, *engine, *(["use_vllm"] if served else [])}
    return found, min(others, default="")


def asks_server(values: dict[str, Any]) -> bool:
    """Whether TRL would ask a vLLM server; its other mode, and its default, is an engine in its own process."""
    return bool(values.get("use_vllm")) and values.get("vllm_mode") == "server"


def server_address(values: dict[str, Any]) -> str:
    """Where TRL looks for that server."""
    host, port = values.get("vllm_server_host") or "localhost", values.get("vllm_server_port") or 8000
    return values.get("vllm_server_base_url") or f"http://{'localhost' if host == '0.0.0.0' else host}:{port}"


def _in_a_file(name: str) -> str:
    """Axolotl's `package.module.function` as a file and a function in it."""
    module, _, function = name.rpartition(".")
    return f"{module.replace('.', '/')}.py:{function}" if module else name
