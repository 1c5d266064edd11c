"""Mixtures of experts: damaged ones, and keys that do not fit them."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

from tests.helpers.hostile.cases import Case, edited, tensors
from tests.helpers.hostile.inputs import make_model
from tests.helpers.hostile.rows_config import both


@functools.cache
def _mixture() -> Path:
    """A folder with a mixture of four experts, and the tokenizer of the other models."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = Path(tempfile.mkdtemp()) / "mixture"
    make_model(str(folder))
    known = json.loads((folder / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    kept = {name: known[name] for name in (*names, "vocab_size", "eos_token_id", "pad_token_id")}
    of_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**kept, **of_experts, max_position_embeddings=256))
    model.save_pretrained(folder)
    return folder


def mixture(change=None, file: str = "config.json"):
    """In place of the model a mixture, one of whose files is changed."""

    def make(path: Path) -> None:
        shutil.rmtree(path)
        shutil.copytree(_mixture(), path)
        if change is not None:
            change(path / file)

    return {"model": make}


def weights(words: str, change):
    """A mixture whose first weight with these words in its name was changed: all weights, name."""

    def edit(content: dict) -> None:
        change(content, next(name for name in content if words in name))

    return mixture(tensors(edit), "model.safetensors")


def nan(content: dict, name: str) -> None:
    content[name].fill_(float("nan"))


FIRST = "experts.0.gate_proj"
ROWS = [
    Case("+ more experts a token than there are", both(), says="num_experts_per_tok",
         files=mixture(edited(num_experts_per_tok=9))),
    Case("+ an expert fewer", "check run.yaml", says="experts",
         files=mixture(edited(num_experts=3, num_local_experts=3))),
    Case("+ an expert that is missing", both(), says=FIRST,
         files=weights(FIRST, lambda content, name: content.pop(name))),
    Case("+ an expert of NaN", "train run.yaml", says="experts", seconds=4, files=weights(FIRST, nan)),
    Case("+ experts that nobody knows", both("target_parameters=[nothing]"), says=("target_parameters", "nothing"),
         files=mixture()),
    Case("+ experts trained whole", "check run.yaml modules_to_save=[mlp.experts]", code=(0, 1), files=mixture()),
    Case("+ a dense run's adapter on a mixture", both("adapter_path=run/adapter"), says="run/adapter", given=("run",),
         files=mixture()),
    Case("+ routers of a dense model", both("router_aux_loss_coef=0.01"), says="router_aux_loss_coef"),
    Case("+ routers balanced in stages", "train run.yaml router_aux_loss_coef=0.01 'parallel={pipeline: 2}'",
         says="router_aux_loss_coef with parallel: pipeline: 2", files=mixture()),
]  # fmt: skip
