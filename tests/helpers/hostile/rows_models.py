"""Models: config.json, weights, tokenizers, templates, adapters to continue from."""

import json
import pickle

import torch

from tests.helpers.hostile.cases import Case, cut, edited, gone, mode, tensors
from tests.helpers.hostile.rows_config import both

CONFIG, WEIGHTS = "model/config.json", "model/model.safetensors"
NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


class Pwned:
    def __reduce__(self):
        import os

        return os.system, ("touch PWNED",)


def nan(name: str):
    return tensors(lambda content: content[name].fill_(float("nan")))


def misshapen(content: dict) -> None:
    content[QUERY] = torch.zeros(3, 5)


def template(text: str) -> dict:
    return {"chat.jinja": text}


MAP = {"auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}, "model_type": "mine"}
INDEX = json.dumps({"metadata": {}, "weight_map": {NORM: "../other/model.safetensors"}})

ROWS = [
    Case(
        "29 a pickle that runs a program",
        both(),
        says="pytorch_model.bin",
        files={WEIGHTS: gone, "model/pytorch_model.bin": pickle.dumps(Pwned())},
    ),
    Case("30 a number as text", both(), says=("config.json", "hidden_size"), files={CONFIG: edited(hidden_size="64")}),
    Case("34 wider than memory", both(), says="config.json", files={CONFIG: edited(hidden_size=10**9)}),
    Case("30 config.json is cut", both(), says="config.json", files={CONFIG: cut()}),
    Case(
        "30 config.json without a type",
        both(),
        says=("config.json", "model_type"),
        files={CONFIG: edited("model_type")},
    ),
    Case(
        "31 a template that counts twice",
        both("chat_template_path=chat.jinja"),
        says="template",
        fix="chat_template_path",
        files=template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        seconds=4,  # its limit is of the processor's time, in a process of its own
    ),
    Case(
        "31 a template of 10 GB",
        both("chat_template_path=chat.jinja"),
        says="template",
        fix="chat_template_path",
        files=template("{{ 'x' * 10000000000 }}"),
    ),
    Case(
        "31 a template that is no template",
        both("chat_template_path=chat.jinja"),
        says="template",
        fix="chat_template_path",
        files=template("{% for %}"),
    ),
    Case(
        "31 a template that reaches out",
        both("chat_template_path=chat.jinja"),
        says="template",
        fix="chat_template_path",
        files=template("{{ ''.__class__.__mro__ }}"),
    ),
    Case(
        "32 code without leave",
        both(),
        fix="trust_remote_code",
        files={CONFIG: edited(**MAP), "model/mine.py": "open('PWNED', 'w')\n"},
    ),
    Case("33 a tensor missing", both(), says=QUERY, files={WEIGHTS: tensors(lambda content: content.pop(QUERY))}),
    Case("33 a tensor of another shape", both(), says=QUERY, files={WEIGHTS: tensors(misshapen)}),
    Case("33 a tensor of NaN", "train run.yaml", says=QUERY, files={WEIGHTS: nan(QUERY)}),
    Case(
        "34 a file for a model",
        both("model_name_or_path=data.jsonl"),
        says="data.jsonl",
        never=("did you mean data.jsonl",),
    ),
    Case(
        "36 an index that points outside",
        both(),
        says="../other/model.safetensors",
        files={WEIGHTS: gone, "model/model.safetensors.index.json": INDEX},
    ),
    Case("82 no weights", both(), says="model", files={WEIGHTS: gone}),
    Case("82 weights cut short", both(), says="model.safetensors", files={WEIGHTS: cut()}),
    Case("58 weights that may not be read", both(), says="model.safetensors", files={WEIGHTS: mode(0)}),
    Case("86 no adapter there", both("adapter_path=nope"), says=("adapter_path", "nope")),
    Case(
        "86 an adapter cut short",
        both("adapter_path=run/adapter"),
        says="adapter_model.safetensors",
        given=("run",),
        files={"run/adapter/adapter_model.safetensors": cut()},
    ),
    Case(
        "+ no tokenizer",
        both(),
        says="tokenizer",
        files={"model/tokenizer.json": gone, "model/tokenizer_config.json": gone},
    ),
    Case("+ a tokenizer cut short", both(), says="tokenizer.json", files={"model/tokenizer.json": cut()}),
    Case("24 a model of a hub that is away", both("model_name_or_path=Qwen/Qwen3-8B"), says="Qwen/Qwen3-8B"),
]
