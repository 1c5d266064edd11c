"""`halfbyte preview --rollouts`: answers to a few prompts and what each reward function makes of them, before a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text

from ..config import RunConfig
from ..config.policy import DISTILLING
from ..runs.inputs import check_inputs
from ..utils.console import Console
from ..utils.errors import UsageError
from ..utils.text import visible
from .imports import quick_imports

BEFORE = {"global_step": 0, "max_steps": 0, "num_train_epochs": 0, "epoch": 0.0}  # a run begins


def preview_rollouts(config: RunConfig, count: int, answers: int) -> None:
    """Print `answers` to each of the first `count` prompts, sampled as in training, with their rewards.

    Raises:
        UsageError: the method of the run samples no answers.
    """
    check_inputs(config)
    with quick_imports():
        from ..auxiliary.reward_model import check_reward_model_compatibility, loaded_reward_models
        from ..loading.find import find_model
        from ..loading.load import load_model, load_tokenizer
        from ..methods import method_of
        from ..methods.grpo import PolicyOptimization
        from ..modeling.adapters import add_adapter, compute_autocast, compute_dtype_of
        from ..rl.distillation import DistilledGenerations
        from ..rl.preflight import rewards_of
        from ..rl.rollouts import Generations
        from ..rl.served import check_server
        from ..rl.setup import answer_stop_tokens
        from ..runs.metrics import MetricsFile
        from ..utils.hardware import chosen_device

    method = method_of(config)
    if not isinstance(method, PolicyOptimization):
        raise UsageError(f"--rollouts: method: {config.method} samples no answers", "leave it out, or set method: grpo")
    files = find_model(config.origin)
    tokenizer = load_tokenizer(files.place, chat_template_path=config.chat_template_path)
    data = method.ready(config, tokenizer)
    rewards = rewards_of(config, data)
    check_server(config, data, tokenizer, Console(quiet=True))
    try:
        rewards.check()
        check_reward_model_compatibility(config, rewards, files.config, tokenizer, Console(quiet=True))
        how: dict[str, Any] = {"device": config.device, "attn_implementation": config.attn_implementation}
        model = load_model(files, config.storage, dtype=config.precision.compute, **how)
        model = add_adapter(model, config.adapter) if config.adapter else model  # new, it adds nothing
        device, dtype = chosen_device(config.device), compute_dtype_of(model)
        where: dict[str, Any] = {
            "device": device,
            "computing": partial(compute_autocast, model, dtype),
            "stops": answer_stop_tokens(tokenizer, model, data),
            "file": MetricsFile(Path(os.devnull)),
        }
        kind = DistilledGenerations if config.method in DISTILLING else Generations
        generations = kind(config, method, model, tokenizer, data.train, rewards, **where)
        shown = list(range(min(count, len(data.train))))
        with closing(generations), loaded_reward_models(config, rewards, model, tokenizer, device, dtype):
            found = generations.answer(shown, [data.train[at] for at in shown], answers, 0, BEFORE)
        console = Console(soft_wrap=True)
        for line in _lines(found, answers, tokenizer):
            console.print(line)
    finally:
        rewards.close()


def _lines(found: Any, answers: int, tokenizer: Any) -> Iterator[Text]:
    """A prompt once, each of its answers with its rewards, and the groups' means."""
    for at, text in enumerate(found.texts):
        if at % answers == 0:
            prompt = str(tokenizer.decode(found.prompts[at]["prompt_ids"]))
            yield Text(f"\n{f'── prompt {at // answers + 1} ':─<100}", style="cyan")
            yield Text(visible(prompt), style="dim")
        completion = found.completions[at]
        values = [f"{name} {_shown(rewards[at])}" for name, rewards in found.scored.rewards.items()]
        ended = "" if completion.ended else ", cut off"
        said = " · ".join([f"answer {at % answers + 1}: {len(completion.ids)} tokens{ended}", *values])
        yield Text(f"{f'── {said} ':─<100}", style="cyan")
        yield Text(visible(text), style="green")
    if not found.scored.rewards:
        return
    yield Text("")
    for name in found.scored.rewards:
        mean, spread = (found.numbers.get(f"rewards/{name}/{kind}") for kind in ("mean", "std"))
        yield Text(f"{name}: mean {_shown(mean)}, spread {_shown(spread)}")
    yield Text(f"groups without spread, which teach nothing: {found.numbers.get('frac_reward_zero_std', 0):.0%}")


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
