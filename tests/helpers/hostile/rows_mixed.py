"""Cases that nobody had listed: keys of methods, rewards, experts, meshes, rollouts, steps, and the runs of all these.

They were written down before any of them was tried.
"""

import functools
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.helpers.hostile.cases import Case, cut, edited, fifo, gone, tensors
from tests.helpers.hostile.inputs import DATA, make_model
from tests.helpers.hostile.rows_config import both
from tests.helpers.hostile.rows_data import data
from tests.helpers.hostile.rows_odd import CONFIG, either, refused
from tests.helpers.hostile.rows_preference import dpo, kto, labelled, lines, pair, prm, stepwise
from tests.helpers.hostile.rows_rewards import GRPO, PROMPTS

RLOO = GRPO.replace("grpo", "rloo")
LEFT = ("out", "out/*")


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


def first_expert(change):
    """Weights of a mixture whose first expert's gate was changed: held, name."""

    def edit(held: dict) -> None:
        change(held, next(name for name in held if "experts.0.gate_proj" in name))

    return mixture(tensors(edit), "model.safetensors")


def asked(name: str, keys: str, method: str, **wishes) -> Case:
    return Case(name, both(f"{method} reward_funcs=repetition {keys}".strip()), files=PROMPTS, **wishes)


KEYS = [
    asked("+ temperature of nothing", "temperature=0", GRPO, says="temperature"),
    asked("+ a weight that is none", "'reward_weights=[.nan]'", GRPO, says="reward_weights"),
    asked("+ clipped the wrong way round", "'reward_clip_range=[1, 0]'", RLOO, says="reward_clip_range"),
    asked("+ clipped at nothing", "'reward_clip_range=[.nan, 1]'", RLOO, says="reward_clip_range"),
    asked("+ two-sided within one", "delta=1.0", GRPO, says="delta"),
    asked("+ generations of half a step", "steps_per_generation=3 gradient_accumulation_steps=2", GRPO,
          says="steps_per_generation"),
    asked("+ no held-out answers", "num_generations_eval=0", GRPO, says="num_generations_eval"),
    asked("+ entropy without end", "entropy_coef=.inf", GRPO, says="entropy_coef"),
    Case("+ no loss of several", dpo("loss_type=[]"), says="loss_type", files=lines(pair())),
    Case("+ losses that weigh nothing", dpo("'loss_type=[sigmoid]' 'loss_weights=[0]'"), says="loss_weights",
         files=lines(pair())),
    Case("+ KTO that weighs nothing", kto("desirable_weight=0 undesirable_weight=0"), says="desirable_weight",
         files=lines(labelled(), labelled(label=False), labelled(prompt="c"))),
    Case("+ KTO of one row a step", "train run.yaml method=kto per_device_train_batch_size=1",
         code=(0, 1), files=lines(labelled(), labelled(label=False)), after=LEFT),
    Case("+ steps that nothing separates", prm("step_separator=''"), says="step_separator", files=lines(stepwise())),
    Case("+ grpo of nothing held out", both(f"{GRPO} reward_funcs=repetition eval_split_size=3"),
         says="eval_split_size", files=PROMPTS),
]  # fmt: skip


def rewarded(name: str, entry: str, rows: str | None = None, **wishes) -> Case:
    """Refused by `check` and `train`, before anything is trained."""
    body = wishes.pop("body", None)
    files = (PROMPTS if rows is None else data(rows)) | ({} if body is None else {"r.py": body})
    return Case(name, both(f"{GRPO} 'reward_funcs={entry}'"), files=files | wishes.pop("files", {}), **wishes)


REWARDS = [
    rewarded("+ a reward without a file", ":f", says="reward_funcs"),
    rewarded("+ a folder of rewards", "r.py:f", files={"r.py": None}, says="r.py"),
    rewarded("+ a pipe of rewards", "r.py:f", files={"r.py": fifo}, says="r.py"),
    rewarded("+ rewards that leave as they are read", "r.py:f", body="raise SystemExit(3)\n", says="r.py", seconds=4),
    rewarded("+ rewards that are never read", "r.py:f",
             body="while True: pass\n", says="r.py", fix="within", seconds=70),
    rewarded("+ rewards that ask", "r.py:f", body="input()\n\ndef f(**_): return []\n", says="r.py", seconds=4),
    rewarded("+ rewards that chatter", "r.py:g", body="print('x' * 10_000_000)\ndef f(**_): return []\n",
             says=("r.py", "g"), seconds=4),
    rewarded("+ rewards that take prompts alone", "r.py:f", body="def f(prompts): return [1.0] * len(prompts)\n",
             says="r.py", fix="**", seconds=4),
    rewarded("+ grams of nothing", "{repetition: {ngram_size: 0}}", says="ngram_size"),
    rewarded("+ a cache longer than answers", "{soft_overlong: {max: 4, cache: -3}}", says="cache"),
    rewarded("+ lengths below zero", "{length: {max: -1}}", says="length"),
    rewarded("+ a pattern left open", '{regex: "("}', says="regex"),
    rewarded("+ solutions of nothing", "exact", '{"prompt": "a", "solution": null}\n' * 3, says="solution"),
    rewarded("+ a column named as an argument", "exact", '{"prompt": "a", "solution": "b", "completions": "c"}\n' * 3,
             says="completions"),
]  # fmt: skip

EXPERTS = [
    refused("+ more experts a token than there are", "num_experts_per_tok",
            files=mixture(edited(num_experts_per_tok=9))),
    refused("+ no expert a token", "num_experts_per_tok", files=mixture(edited(num_experts_per_tok=0))),
    refused("+ experts in words", "num_experts", files=mixture(edited(num_experts="four"))),
    refused("+ an expert that is missing", "experts.0.gate_proj",
            files=first_expert(lambda held, name: held.pop(name))),
    Case("+ an expert of NaN", "train run.yaml", says="experts", seconds=4,
         files=first_expert(lambda held, name: held[name].fill_(float("nan")))),
    refused("+ an expert of another shape", "experts.0.gate_proj",
            files=first_expert(lambda held, name: held.update({name: held[name][:32].clone()}))),
    refused("+ experts that nobody knows", ("target_parameters", "nothing"), "target_parameters=[nothing]",
            files=mixture()),
    refused("+ experts of a dense model", "target_parameters", "target_parameters=[mlp.experts.gate_up_proj]"),
    refused("+ experts in a format that there is not", "foo", "'quantization={\"*experts*\": foo}'", files=mixture()),
    either("+ DoRA on experts", "check run.yaml use_dora=true", files=mixture()),
    refused("+ experts' rank for what is none", "rank_pattern", "'rank_pattern={experts.what: 4}'", files=mixture()),
    Case("+ a dense run's adapter on a mixture", both("adapter_path=run/adapter"), says="run/adapter", given=("run",),
         files=mixture()),
    Case("+ a run where its adapter was meant", both("adapter_path=run"), says="adapter_path:",
         fix="name run/adapter", given=("run",)),
    Case("+ export of a mixture whose experts are cut", "export model --gguf f16 --out x.gguf",
         says="model.safetensors",
         files=mixture(cut(0.7), "model.safetensors")),
]  # fmt: skip

MESHES = [
    refused("+ an axis of two words", "parallel", "'parallel={data: two}'"),
    refused("+ an axis of nothing", "parallel", "'parallel={data: 0}'"),
    refused("+ a number for a mesh", "parallel", "parallel=2"),
    refused("+ heads cut in three", "parallel", "'parallel={tensor: 3}'", seconds=20),  # three processes import
    asked("+ answers on two devices", "'parallel={data: 2}'", GRPO, says="parallel"),
    Case("+ a score head in stages", both("method=reward 'parallel={pipeline: 2}'"), says=("parallel", "reward"),
         files=lines(pair())),
    refused("+ restarts below zero", "max_restarts", "max_restarts=-1"),
]  # fmt: skip

ROLLOUTS = [
    asked("+ pages of nothing", "rollout_memory_gib=0", GRPO, says="rollout_memory_gib"),
    asked("+ a cache of four bits", "kv_cache=fp4", GRPO, says="kv_cache"),
    Case("+ prompts that are answered already", "check run.yaml method=grpo reward_funcs=repetition", code=(0, 1),
         files=data(DATA)),
    Case("+ prompts without a letter", f"check run.yaml {GRPO} reward_funcs=repetition", code=(0, 1),
         files=data('{"prompt": ""}\n' * 3)),
    Case("+ answers that nothing ends", both(f"{GRPO} reward_funcs=repetition"), says="EOS", fix="eos_token", files={
        **PROMPTS, "model/tokenizer_config.json": edited("eos_token"), "model/chat_template.jinja": gone,
        CONFIG: edited("eos_token_id"), "model/generation_config.json": edited("eos_token_id")}),
]  # fmt: skip

ROLLOUTS += [  # found beside them
    Case("+ an end that the model cannot write", both(f"{GRPO} reward_funcs=repetition"),
         files={**PROMPTS, "model/tokenizer_config.json": edited(eos_token="<nowhere>"),
                "model/chat_template.jinja": gone}),
    Case("+ a reference that is not what is trained", dpo("init_lora_weights=false"), says="init_lora_weights",
         fix="true", files=lines(pair())),
    asked("+ rewards that weigh nothing", "'reward_weights=[0]'", GRPO, says="reward_weights"),
]  # fmt: skip

STEPS = [
    Case("+ fewer labels than steps", prm(), says="data.jsonl:2", files=lines(stepwise(), stepwise(labels=[True]))),
    Case("+ steps in one text", prm(), says="data.jsonl:2", files=lines(stepwise(), stepwise(completions="b c"))),
    Case("+ labels in words", prm(), says="data.jsonl:2", files=lines(stepwise(), stepwise(labels=["yes", "no"]))),
    Case("+ a step of nothing", prm(), code=(0, 1), files=lines(stepwise(), stepwise(completions=["", "c"]))),
    Case("+ no steps at all", prm(), says="data.jsonl:2", files=lines(stepwise(), stepwise(completions=[], labels=[]))),
    Case("+ steps of a number", prm(), says="data.jsonl:2", files=lines(stepwise(), stepwise(completions=[1, 2]))),
    Case("+ a label that is missing", kto(), says="data.jsonl:2",
         files=lines(labelled(), {"prompt": "a", "completion": "b"})),
    Case("+ a chosen that is null", dpo(), says="data.jsonl:2", files=lines(pair(), pair(chosen=None))),
    Case("+ a prompt that is a number", dpo(), says="data.jsonl:2", files=lines(pair(), pair(prompt=3))),
]  # fmt: skip

OF_SCORES = [
    Case("+ answers of a reward model",
         ("generate scored prompts.jsonl", "chat scored", "serve scored --port 0",
          "export scored --gguf f16 --out x.gguf"),
         says="reward", first="train run.yaml method=reward output_dir=scored", files=lines(pair())),
]  # fmt: skip

SHOWN = ("weigh nothing", "prompts alone", "chatter", "grams of nothing", "solutions of nothing", "two devices",
         "named as an argument", "than there are", "expert that is missing", "expert of NaN", "cannot write",
         "not what is trained", "of a reward model")  # fmt: skip
EVERY = [*KEYS, *REWARDS, *EXPERTS, *MESHES, *ROLLOUTS, *STEPS, *OF_SCORES]
ROWS = [case if any(words in case.name for words in SHOWN) else replace(case, slow=True) for case in EVERY]
