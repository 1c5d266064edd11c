"""Greedy answers of tiny models with two adapters: halfbyte's against PEFT's and transformers' own `generate`.

python -m tests.helpers.answers [NAME ...]     prints the answers that differ, for every causal LM of transformers
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GenerationConfig
from transformers.pytorch_utils import Conv1D

from halfbyte.generation import Rollouts, Sampling, forget, generate
from halfbyte.generation.text import continue_texts
from halfbyte.modeling.architectures import all_linear
from halfbyte.utils.errors import HalfbyteError
from tests.helpers.all_families import NAMES, build

PROMPTS = [[11, 22, 33], [*range(40, 59)], [12, 23, 34]]
NEW = 6


def modules_named(model: Any, *suffixes: str) -> list[str]:
    """Last parts of the names of modules with parameters whose class, in lower case, ends with one of the suffixes."""
    found = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if name and type(module).__name__.lower().endswith(suffixes) and any(True for _ in module.parameters())
    }
    return sorted(found)


def linears_of(model: Any) -> list[str]:
    """Names of the linears that adapters go on."""
    try:
        return all_linear(model)
    except HalfbyteError:  # GPT-2's Conv1D, subclasses of nn.Linear
        kinds, head = (nn.Linear, Conv1D), model.get_output_embeddings()
        return [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head]


def config_of(kind: str, model: Any) -> LoraConfig | None:
    """Return the adapter of a kind, or None if the model has nothing to put it on."""
    embedding = model.get_input_embeddings()
    embed = next(name for name, module in model.named_modules() if module is embedding).rpartition(".")[2]
    linears = linears_of(model)
    if kind == "linears":
        return LoraConfig(r=2, target_modules=linears)
    if kind == "embedding":
        return LoraConfig(r=2, target_modules=[*linears[:1], embed])
    if kind == "tokens":
        return LoraConfig(r=2, target_modules=linears[:1], trainable_token_indices=[*range(20, 60)])
    saved = {
        "norms": lambda: modules_named(model, "norm"),
        "saved embedding": lambda: [embed],
        "routers and convolutions": lambda: [
            name
            for name in modules_named(model, "router", "gate", "conv1d")
            if not any(linear.endswith(f".{name}") for linear in linears[:1])
        ],
    }[kind]()
    return LoraConfig(r=2, target_modules=linears[:1], modules_to_save=saved) if saved else None


KINDS = "none", "linears", "norms", "embedding", "saved embedding", "tokens", "routers and convolutions"


def adapted(kind: str, base: Any) -> Any:
    """Return the model with two random adapters, "first" and "second", of which the first is active; or None."""
    base.generation_config = GenerationConfig()  # e.g. BART's forces a token, which halfbyte reports and leaves out
    if kind == "none":
        return base
    config = config_of(kind, base)
    if config is None:
        return None
    model = get_peft_model(base, config, adapter_name="first")
    model.add_adapter("second", config)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name or "trainable_tokens_delta" in name:
            change = torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data + 0.3 * change
    return model.eval()


def expected(model: Any, adapter: str | None, prompt: list[int]) -> list[int]:
    """PEFT's and transformers' own answer."""
    before = getattr(model, "active_adapter", None)
    if adapter is not None:
        model.set_adapter(adapter)
    off = model.disable_adapter() if before is not None and adapter is None else contextlib.nullcontext()
    ids = torch.tensor([prompt])
    keys = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with off:
        tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **keys)[0, len(prompt) :].tolist()
    if adapter is not None:
        model.set_adapter(before)
    return tokens


class Words:
    """A tokenizer whose texts are the numbers of their tokens."""

    @staticmethod
    def decode(ids: list[int], **_: Any) -> str:
        return "".join(f" {token}" for token in ids)


def served(model: Any, prompts: list[list[int]], adapter: str | None) -> list[list[int]]:
    """The answers of the server's code."""
    keys: Any = {"max_new_tokens": NEW, "sampling": Sampling(), "ends": [], "adapter": adapter}
    texts = [""] * len(prompts)
    for piece in continue_texts(model, Words, prompts, **keys):
        texts[piece.row] += piece.text
    return [[*map(int, text.split())] for text in texts]


def rollouts(model: Any, prompts: list[list[int]], adapter: str | None) -> list[list[int]]:
    keys: Any = {"max_new_tokens": NEW, "sampling": Sampling(), "stops": [], "adapter": adapter}
    return [completion.ids for completion in Rollouts(model, rows=4).generate(prompts, **keys)]


def comparisons(model: Any) -> Iterator[tuple[str, bool | str]]:
    """Yield what is compared, and whether it is equal, or the text of a refusal."""
    names = [None] if getattr(model, "peft_config", None) is None else [None, "first", "second"]
    right = {name: [expected(model, name, prompt) for prompt in PROMPTS] for name in names}
    keys: Any = {"max_new_tokens": NEW, "stops": []}
    calls: dict[str, Any] = {}
    for name in names:
        calls[f"alone, {name}"] = lambda name=name: (
            [generate(model, [prompt], adapter=name, **keys)[0] for prompt in PROMPTS],
            right[name],
        )
        calls[f"batch, {name}"] = lambda name=name: (generate(model, PROMPTS, adapter=name, **keys), right[name])
        calls[f"rollouts, {name}"] = lambda name=name: (rollouts(model, PROMPTS, name), right[name])
        calls[f"served, {name}"] = lambda name=name: (served(model, PROMPTS, name), right[name])
    if len(names) > 1:
        rows = ["second", None, "first"]
        each = [right[name][row] for row, name in enumerate(rows)]
        calls["an adapter a row"] = lambda: (generate(model, PROMPTS, adapter=rows, **keys), each)
    for what, call in calls.items():
        try:
            found, wanted = call()
        except HalfbyteError as error:
            yield what, str(error)
        else:
            yield what, found == wanted
    forget(model)


def main(names: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    equal: Counter[str] = Counter()
    without_reference: list[str] = []
    for name in names:
        for kind in KINDS:
            try:
                model = adapted(kind, build(name))
                results = [] if model is None else list(comparisons(model))
            except Exception as error:  # does not build, or transformers or PEFT fail
                without_reference.append(f"{name}, {kind}: {type(error).__name__}: {error}"[:200].splitlines()[0])
                continue
            for what, result in results:
                equal[name] += result is True
                if result is not True:
                    verdict = "WRONG" if result is False else f"refused ({result})"
                    print(f"{name}, {kind}: {what}: {verdict}"[:300], flush=True)
        print(f"{name}: {equal[name]} equal", flush=True)
    print(*without_reference, sep="\n")
    architectures = sum(count > 0 for count in equal.values())
    print(f"{equal.total()} equal, {architectures} architectures; {len(without_reference)} without a reference")


if __name__ == "__main__":
    main(sys.argv[1:] or NAMES)
