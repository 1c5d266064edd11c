"""Policy optimization: rewards that fail, prompts that leave no room."""

from hostile import Case, later
from rows_config import both
from rows_data import data

GRPO = "method=grpo num_generations=2 per_device_train_batch_size=2 max_completion_length=4"
PROMPTS = data('{"prompt": "a small model"}\n{"prompt": "nine rows"}\n{"prompt": "each of them"}\n')
RAN = ("out", "out/*")


def policy(name: str, keys: str, **wishes) -> Case:
    """Refused by `check` and by `train` alike."""
    return Case(name, both(f"{GRPO} {keys}"), files=PROMPTS, **wishes)


def reward(name: str, body: str, says, keys: str = "", **wishes) -> Case:
    """A function of the user's, which training calls."""
    return Case(name, f"train run.yaml {GRPO} reward_funcs=r.py:f {keys}", says=says, files={**PROMPTS, "r.py": body},
                **({"seconds": 6, "fix": "mend the function"} | wishes))  # fmt: skip


ROWS = [
    Case("+ grpo without rewards", both("method=grpo"), says="needs reward_funcs", fix="rewarded", files=PROMPTS),
    policy("+ one reward, and its name misspelt", "reward_funcs=repetiton", says="repetiton", fix="repetition"),
    policy("+ a reward from the network", "reward_funcs=https://example.com/r.py:f", says="URL", fix="download"),
    policy("+ weights for other rewards", "reward_funcs=repetition 'reward_weights=[1, 2]'", says="reward_weights"),
    policy("+ groups that do not come out", "reward_funcs=repetition num_generations=3", says="num_generations"),
    policy(
        "+ answers longer than rows",
        "reward_funcs=repetition max_completion_length=100000",
        says="no room for an answer",
        fix="max_completion_length",
    ),
    reward("+ a reward that is no Python", "def f(:\n", ("r.py", "SyntaxError")),
    reward("+ a reward of words", "def f(completions, **_):\n    return ['good'] * len(completions)\n", "gave a str"),
    *later(
        reward("+ a reward too few", "def f(completions, **_):\n    return [1.0]\n", "1 rewards for 2"),
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
