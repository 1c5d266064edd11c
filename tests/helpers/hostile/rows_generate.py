"""generate, chat, eval and serve: what they are given to load and to answer."""

import pickle

import torch

from tests.helpers.hostile.cases import Case, cut, edited, gone, tensors
from tests.helpers.hostile.rows_models import Pwned

ADAPTER, CONFIG = "run/adapter/adapter_model.safetensors", "run/adapter/adapter_config.json"
LOADERS = ("generate run prompts.jsonl", "chat run", "eval run data.jsonl", "serve run --port 0", "merge run m",
           "export run --gguf q8_0 --out x.gguf")  # fmt: skip


def loaded(name: str, files: dict, **more) -> Case:
    """All that load an adapter refuse it alike."""
    return Case(name, LOADERS, files=files, given=("run",), **more)


def first(change):
    """A change to the adapter's first tensor."""
    return tensors(lambda content: content.update({min(content): change(content[min(content)])}))


def prompts(content) -> dict:
    return {"prompts.jsonl": content}


def generate(name: str, content, **more) -> Case:
    return Case(name, "generate run prompts.jsonl --max-new-tokens 4", files=prompts(content), given=("run",), **more)


ROWS = [
    loaded(
        "49 an adapter that lacks a tensor", {ADAPTER: tensors(lambda content: content.pop(min(content)))}, says="lora_"
    ),
    loaded("50 an adapter cut short", {ADAPTER: cut()}, says="adapter_model.safetensors"),
    loaded("50 an adapter of another shape", {ADAPTER: first(lambda tensor: torch.zeros(7, 3))}, says="lora_"),
    loaded(
        "50 an adapter that is a pickle",
        {ADAPTER: gone, "run/adapter/adapter_model.bin": pickle.dumps(Pwned())},
        says="adapter_model",
    ),
    loaded("50 an adapter's config cut short", {CONFIG: cut()}, says="adapter_config.json"),
    loaded("+ an adapter of prefixes", {CONFIG: edited(peft_type="PREFIX_TUNING")}, says="PREFIX_TUNING", fix="LORA"),
    loaded("52 an adapter with NaN", {ADAPTER: first(lambda tensor: tensor * torch.nan)}, says="lora_"),
    Case(
        "54 chat is told bytes that are no UTF-8",
        "chat run --max-new-tokens 4",
        code=(0, 1),
        given=("run",),
        wishes={"stdin": b"\xff\xfe\n"},
    ),
    generate("55 a prompt that is too long", '{"prompt": "a"}\n{"prompt": "' + "a " * 500 + '"}\n', says="2"),
    generate("55 a prompt that is a number", '{"prompt": 1}\n', says="1"),
    generate("55 no prompt at all", "", says="prompts.jsonl"),
    Case("55 no file of prompts", "generate run nope.jsonl", says="nope.jsonl", given=("run",)),
    Case(
        "+ generate as the README does it",
        "generate run prompts.jsonl",
        code=0,
        says="prompt",
        given=("run",),
        seconds=8,
    ),
    Case(
        "56 a folder that is not there",
        (
            "generate nothere prompts.jsonl",
            "chat nothere",
            "eval nothere data.jsonl",
            "serve nothere --port 0",
            "export nothere --gguf q8_0",
        ),
        says="nothere",
    ),
    Case(
        "56 a misspelt folder asks no hub",
        "generate runn prompts.jsonl",
        says="runn",
        fix="run",
        given=("run",),
        environment={"HF_HUB_OFFLINE": None, "HF_ENDPOINT": "http://127.0.0.1:9"},
        wishes={"fresh": True},
        seconds=6,
    ),
]
