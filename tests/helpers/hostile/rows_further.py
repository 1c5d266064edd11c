"""A second list that nobody had tried, after what the first one (`rows_mixed`) found was cured."""

from dataclasses import replace

from tests.helpers.hostile.cases import Case, Link, edited, mode, tensors
from tests.helpers.hostile.rows_config import both
from tests.helpers.hostile.rows_data import data
from tests.helpers.hostile.rows_mixed import mixture
from tests.helpers.hostile.rows_odd import either
from tests.helpers.hostile.rows_preference import labelled, lines, pair, stepwise
from tests.helpers.hostile.rows_rewards import GRPO, PROMPTS

RLOO = GRPO.replace("grpo", "rloo")
CHECK = "check run.yaml"
LEFT = ("out", "out/*")
PAIRS = lines(pair(), pair(prompt=[{"role": "user", "content": "nine rows"}]))


def keys(name: str, method: str, given: str, says="", files=PAIRS, **more) -> Case:
    return Case(name, f"{CHECK} method={method} {given}", says=says, files=files, **more)


def policy(name: str, given: str, says="", rows=PROMPTS, **more) -> Case:
    return Case(name, f"{CHECK} {GRPO} {given}", says=says, files=rows | more.pop("files", {}), **more)


def rewarded(name: str, entry: str, says="", body: str | None = None, **more) -> Case:
    files = PROMPTS | ({} if body is None else {"r.py": body}) | more.pop("files", {})
    return Case(name, [*CHECK.split(), *GRPO.split(), f"reward_funcs={entry}"], says=says, files=files,
                **({"seconds": 4} | more))  # fmt: skip


def mixed(name: str, given: str, says="", change=None, file="config.json", **more) -> Case:
    return Case(name, f"{CHECK} {given}".strip(), says=says, files=mixture(change, file), **more)


KEYS = [
    keys("+ beta past floats", "dpo", "beta=1e400", "beta"),
    keys("+ a loss that weighs everything", "dpo", "'loss_type=[sigmoid]' 'loss_weights=[.inf]'", "loss_weights"),
    policy("+ a reward that weighs everything", "reward_funcs=repetition 'reward_weights=[.inf]'", "reward_weights"),
    policy("+ epsilon without end", "reward_funcs=repetition epsilon=.inf", "epsilon"),
    keys("+ half of the labels wrong", "cpo", "label_smoothing=0.5", "label_smoothing"),
    keys("+ a margin that is none", "simpo", "simpo_gamma=.nan", "simpo_gamma"),
    keys("+ one loss in a list", "kto", "'loss_type=[kto]'", code=(0, 1),
         files=lines(labelled(), labelled(label=False))),
    keys("+ one loss twice", "dpo", "'loss_type=[sigmoid, sigmoid]'", code=(0, 1)),
    keys("+ generations of a reward model", "reward", "num_generations=2", "num_generations"),
    keys("+ half of a length", "dpo", "ld_alpha=.nan", "ld_alpha"),
    Case("+ a temperature past floats", "train run.yaml method=dpo loss_type=discopop discopop_tau=1e-38", code=(0, 1),
         files=PAIRS, after=LEFT),
    Case("+ a gate past floats",
         f"train run.yaml {GRPO} reward_funcs=repetition loss_type=sapo sapo_temperature_neg=1e-38", code=(0, 1),
         files=PROMPTS, after=LEFT, seconds=4),
    policy("+ answers as long as rows", "reward_funcs=repetition max_completion_length=128", "no room",
           fix="max_completion_length"),
    keys("+ odds of labels", "orpo", "", "data.jsonl", files=lines(labelled(), labelled(label=False))),
    keys("+ a margin of nothing", "reward", "", "data.jsonl:1", files=lines(pair(margin=None), pair(margin=1.0))),
    keys("+ a reference, maybe", "dpo", "precompute_ref_log_probs=maybe", "precompute_ref_log_probs"),
    policy("+ no iteration", "reward_funcs=repetition num_iterations=0", "num_iterations"),
    policy("+ a ten-thousandth of an epoch", "reward_funcs=repetition max_steps=-1 num_train_epochs=0.0001",
           code=(0, 1)),
    Case("+ clipped at infinity", f"{CHECK} {RLOO} reward_funcs=repetition 'reward_clip_range=[-.inf, .inf]'",
         code=(0, 1), files=PROMPTS),
    policy("+ sampling of all and of none", "reward_funcs=repetition top_p=0 top_k=-1", ("top_p", "top_k")),
]  # fmt: skip

REWARDS = [
    rewarded("+ a reward of nothing", "{}", "reward_funcs"),
    rewarded("+ a pattern of a list", "{regex: [a]}", "pattern of regex"),
    rewarded("+ rewards in a text file", "r.txt:f", "reward_funcs", files={"r.txt": "x"}),
    rewarded("+ rewards of a part", "r.py:f.g", "reward_funcs", body="def f(**_): pass\n"),
    rewarded("+ a reward called lambda", "r.py:lambda", "r.py", body="def f(**_): pass\n"),
    rewarded("+ a reward that is a name", "r.py:__name__", "r.py", body="def f(**_): pass\n"),
    rewarded("+ rewards of other bytes", "r.py:f", "r.py", files={"r.py": b"\xff\xfe\x00"}),
    rewarded("+ rewards that import nothing", "r.py:f", ("r.py", "nowhere"), body="import nowhere\n"),
    rewarded("+ rewards that may not be read", "r.py:f", "r.py", files={"r.py": lambda path: (
        path.write_text("def f(**_): pass\n"), mode(0)(path))}),
    rewarded("+ rewards in a circle", "r.py:f", "r.py", files={"r.py": Link("r.py")}),
    rewarded("+ rewards of everybody", "r.py:f", "r.py", fix="chmod", files={"r.py": lambda path: (
        path.write_text("def f(**_): pass\n"), mode(0o666)(path))}),
    Case("+ a reward that always fails", f"train run.yaml {GRPO} reward_funcs=r.py:f", says=("f", "ZeroDivisionError"),
         fix="reward_timeout_s", files={**PROMPTS, "r.py": "def f(**_): return 1 / 0\n"}, seconds=6, after=LEFT),
    Case("+ a reward that never says anything", f"train run.yaml {GRPO} reward_funcs=r.py:f", code=(0, 1),
         files={**PROMPTS, "r.py": "def f(completions, **_): return [None] * len(completions)\n"}, seconds=6,
         after=LEFT),
    Case("+ a reward that is a mapping", f"train run.yaml {GRPO} reward_funcs=r.py:f", says="gave", fix="correct",
         files={**PROMPTS, "r.py": "def f(completions, **_): return {'a': 1}\n"}, seconds=6),
    rewarded("+ lengths past counting", "{length: 1000000000000000000000000000000}", code=(0, 1)),
    rewarded("+ a format that nobody knows", "{format: xml}", "format"),
    rewarded("+ grams by their number", "{repetition: 3}", "repetition", fix="ngram_size"),
    rewarded("+ solutions of numbers", "exact", code=0, files=data('{"prompt": "a", "solution": 3}\n' * 3)),
    rewarded("+ a reward of five thousand letters", "r" * 5000, "reward_funcs"),
]  # fmt: skip

EXPERTS = [
    mixed("+ experts of no width", "", "moe_intermediate_size", edited(moe_intermediate_size=0)),
    mixed("+ experts of a word's width", "", "moe_intermediate_size", edited(moe_intermediate_size="wide")),
    mixed("+ a mixture every no layers", "", "decoder_sparse_step", edited(decoder_sparse_step=0)),
    mixed("+ a router that is missing", "", "mlp.gate", tensors(
        lambda held: held.pop(next(name for name in held if "mlp.gate.weight" in name))), "model.safetensors"),
    Case("+ a router of NaN", "train run.yaml", says="gate", seconds=4, files=mixture(tensors(
        lambda held: next(held[name] for name in held if "mlp.gate.weight" in name).fill_(float("nan"))),
        "model.safetensors")),
    mixed("+ weights that are normed, maybe", "", "", edited(norm_topk_prob="maybe"), code=(0, 1)),
    mixed("+ an adapter on routers", "target_modules=[gate]", code=(0, 1)),
    mixed("+ dense layers that there are not", "", "", edited(mlp_only_layers=[5]), code=(0, 1)),
    mixed("+ dense layers in words", "", "mlp_only_layers", edited(mlp_only_layers="first")),
    mixed("+ a loss of routers without end", "", "", edited(router_aux_loss_coef="high"), code=(0, 1)),
    Case("+ a mixture answers", "generate model prompts.jsonl --max-new-tokens 2", code=0, files=mixture()),
    Case("+ a mixture in GGUF", "export model --gguf f16 --out x.gguf", code=(0, 1), files=mixture(), after=("x.gguf",),
         seconds=4),
]  # fmt: skip

MESHES = [
    either("+ a mesh of one word", "check run.yaml parallel=data"),
    Case("+ a list for a mesh", both("'parallel=[2]'"), says="parallel"),
    either("+ an empty mesh", "check run.yaml parallel={}"),
    Case("+ less than one process", f"{CHECK} 'parallel={{shard: -1}}'", says="parallel"),
    either("+ a schedule of no stages", "check run.yaml pipeline_schedule=zb-v"),
]

ROLLOUTS = [
    policy("+ held-out prompts without solutions", "reward_funcs=exact eval_dataset=e.jsonl", "solution",
           rows=data('{"prompt": "a", "solution": "b"}\n' * 3), files={"e.jsonl": '{"prompt": "a"}\n' * 3}),
    policy("+ answers to answers", "reward_funcs=repetition", code=(0, 1), rows=lines(
        *[{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 3)),
    policy("+ decoded weights that are not packed",
           "reward_funcs=repetition rollout_weights=unpacked load_in_4bit=false", code=(0, 1)),
    Case("+ no rollouts", f"preview run.yaml {GRPO} reward_funcs=repetition --rollouts 0", code=(0, 1, 2),
         files=PROMPTS),
    Case("+ rollouts in words", f"preview run.yaml {GRPO} reward_funcs=repetition --rollouts many", code=(1, 2),
         says="rollouts", files=PROMPTS),
    Case("+ rollouts of pairs", "preview run.yaml method=dpo --rollouts 2", says="rollouts", code=2, files=PAIRS),
    Case("+ completions in a folder", f"train run.yaml {GRPO} reward_funcs=repetition", says="completions.jsonl",
         files={**PROMPTS, "out/completions.jsonl/x": "x"}, seconds=6),
]  # fmt: skip

STEPS = [
    keys("+ labels in labels", "prm", "", "data.jsonl:2", files=lines(stepwise(), stepwise(labels=[[True], [False]]))),
    keys("+ a step of null", "prm", "", "data.jsonl:2", files=lines(stepwise(), stepwise(completions=[None, "c"]))),
    keys("+ an answer in place of a list", "dpo", "", code=(0, 1), files=lines(pair(chosen=pair()["chosen"][0]))),
    keys("+ a label that is a word", "kto", "", "data.jsonl:2", files=lines(labelled(), labelled(label="yes"))),
    keys("+ a pair of one", "dpo", "", "data.jsonl:2",
         files=lines(pair(), {"prompt": pair()["prompt"], "chosen": "a"})),
    Case("+ a score head goes on as a model", ("train run.yaml method=dpo adapter_path=scored/adapter",
                                               "train run.yaml method=prm adapter_path=scored/adapter"),
         says="scored/adapter", fix="method: reward",
         first="train run.yaml method=reward output_dir=scored", files=PAIRS),
    Case("+ a model goes on as a score head", f"{CHECK} method=reward adapter_path=run/adapter",
         says="run/adapter", fix="method: sft",
         given=("run",), files=PAIRS),
    Case("+ a reward model judged by text", "eval scored data.jsonl", code=(0, 1), first=(
        "train run.yaml method=reward output_dir=scored"), files=PAIRS),
]  # fmt: skip

SHOWN = ("adapter on routers", "as a model", "as a score head", "completions in a folder", "in a circle",
         "of everybody", "a mapping", "every no layers", "router of NaN", "import nothing", "twice")  # fmt: skip
EVERY = [*KEYS, *REWARDS, *EXPERTS, *MESHES, *ROLLOUTS, *STEPS]
ROWS = [case if any(words in case.name for words in SHOWN) else replace(case, slow=True) for case in EVERY]
