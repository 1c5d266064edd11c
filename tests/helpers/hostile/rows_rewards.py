"""Policy optimization: rewards that fail, prompts that leave no room."""

from tests.helpers.hostile.cases import Case, edited, gone, later, mode
from tests.helpers.hostile.rows_config import both
from tests.helpers.hostile.rows_data import data

GRPO = "method=grpo num_generations=2 per_device_train_batch_size=2 max_completion_length=4"
PROMPTS = data('{"prompt": "a small model"}\n{"prompt": "nine rows"}\n{"prompt": "each of them"}\n')
RAN = ("out", "out/*")
SERVED = "reward_funcs=repetition rollout=vllm vllm_server_base_url"


def policy(name: str, keys: str, **wishes) -> Case:
    """Refused by `check` and by `train` alike."""
    return Case(name, both(f"{GRPO} {keys}"), files=PROMPTS | wishes.pop("files", {}), **wishes)


def imported(name: str, entry: str, body: str, **wishes) -> Case:
    """Refused by `check` and by `train` as they import or look at the function."""
    return policy(name, f"reward_funcs={entry}", files={"r.py": body} | wishes.pop("files", {}), **wishes)


def reward(name: str, body: str, says, keys: str = "", **wishes) -> Case:
    """A function of the user's, which training calls."""
    return Case(name, f"train run.yaml {GRPO} reward_funcs=r.py:f {keys}", says=says, files={**PROMPTS, "r.py": body},
                **({"seconds": 6, "fix": "correct the function"} | wishes))  # fmt: skip


ROWS = [
    Case("+ grpo without rewards", both("method=grpo"), says="reward_funcs", fix="FUNCTION", files=PROMPTS),
    policy("+ one reward, and its name misspelt", "reward_funcs=repetiton", says="repetiton", fix="repetition"),
    policy("+ a reward from the network", "reward_funcs=https://example.com/r.py:f", says="URL", fix="download"),
    policy("+ groups that do not come out", "reward_funcs=repetition num_generations=3", says="num_generations"),
    policy("+ a prompt as long as a row", "reward_funcs=repetition max_length=6", says=("prompt", "no room")),
    policy("+ a loss of pairs", "reward_funcs=repetition loss_type=sigmoid", says="sigmoid", fix="method: dpo"),
    policy(
        "+ a reference that cannot be taken off",
        "reward_funcs=repetition beta=0.1 use_peft=false load_in_4bit=false",
        says="beta",
        fix="beta: 0",
    ),
    policy("+ a reward of a column that is not there", "reward_funcs=exact", says=("exact", "further columns")),
    policy("+ a reward model that scores nothing", "'reward_funcs={model: model}'", says="no score head", fix="prm"),
    policy("+ a file without function", "reward_funcs=r.py", says="", fix="r.py:FUNCTION"),
    policy(
        "+ pages for less than an answer",
        "reward_funcs=repetition rollout_memory_gib=1e-9",
        says="rollout_memory_gib",
        fix="kv_cache",
    ),
    policy("+ a server that is no address", f"{SERVED}=localhost:8000", says="", fix="http://"),
    policy("+ a server that is away", f"{SERVED}=http://127.0.0.1:9", says="", fix="--max-lora-rank"),
    policy("+ a server's cache", f"{SERVED}=http://a kv_cache=fp8", says="kv_cache", fix="remove it"),
    reward("+ a file without that function", "def g(**_):\n    return []\n", ("r.py", "f")),
    reward("+ a reward without end in size", "def f(completions, **_):\n    return [float('inf')] * 2\n", "inf"),
    reward("+ a reward that is no Python", "def f(:\n", ("r.py", "SyntaxError")),
    reward(
        "+ a reward that always fails",
        "def f(**_): return 1 / 0\n",
        ("f", "ZeroDivisionError"),
        fix="reward_timeout_s",
        after=RAN,
    ),
    imported(
        "+ rewards that are never read",
        "r.py:f",
        "while True: pass\n",
        says="r.py",
        fix="within",
        seconds=70,
        slow=True,
    ),
    imported(
        "+ rewards that chatter",
        "r.py:g",
        "print('x' * 10_000_000)\ndef f(**_): return []\n",
        says=("r.py", "g"),
        seconds=4,
    ),
    imported(
        "+ rewards that take prompts alone",
        "r.py:f",
        "def f(prompts): return [1.0] * len(prompts)\n",
        says="r.py",
        fix="**",
        seconds=4,
    ),
    imported("+ rewards that import nothing", "r.py:f", "import nowhere\n", says=("r.py", "nowhere"), seconds=4),
    imported(
        "+ a column named as an argument",
        "exact",
        "",
        says="completions",
        files=data('{"prompt": "a", "solution": "b", "completions": "c"}\n' * 3),
    ),
    imported(
        "+ solutions of nothing", "exact", "", says="solution", files=data('{"prompt": "a", "solution": null}\n' * 3)
    ),
    imported(
        "+ held-out prompts without solutions",
        "exact eval_dataset=e.jsonl",
        "",
        says="solution",
        files=data('{"prompt": "a", "solution": "b"}\n' * 3) | {"e.jsonl": '{"prompt": "a"}\n' * 3},
    ),
    imported(
        "+ rewards of everybody",
        "r.py:f",
        "",
        says="r.py",
        fix="chmod",
        seconds=4,
        files={"r.py": lambda path: (path.write_text("def f(**_): pass\n"), mode(0o666)(path))},
    ),
    policy(
        "+ a judge whose adapter is text",
        "'reward_funcs={model: judge}'",
        says=("reward_funcs", "judge/adapter_config.json"),
        files={"judge/adapter_config.json": "what"},
    ),
    policy("+ answers on two devices", "reward_funcs=repetition 'parallel={data: 2}'", says="parallel"),
    policy("+ rewards that weigh nothing", "reward_funcs=repetition 'reward_weights=[0]'", says="reward_weights"),
    policy(
        "+ an end that the model cannot write",
        "reward_funcs=repetition",
        files={"model/tokenizer_config.json": edited(eos_token="<nowhere>"), "model/chat_template.jinja": gone},
    ),
    Case(
        "+ completions in a folder",
        f"train run.yaml {GRPO} reward_funcs=repetition",
        says="completions.jsonl",
        files={**PROMPTS, "out/completions.jsonl/x": "x"},
        seconds=6,
    ),
    reward("+ a reward of words", "def f(completions, **_):\n    return ['good'] * len(completions)\n", "gave a str"),
    *later(
        reward("+ a reward that leaves", "import os\ndef f(**_):\n    os._exit(3)\n", "exited with 3", after=RAN),
        reward(
            "+ a reward without end",
            "def f(**_):\n    while True: pass\n",
            "took too long",
            "reward_timeout_s=1",
            fix="reward_timeout_s",
            after=RAN,
        ),
    ),
]
