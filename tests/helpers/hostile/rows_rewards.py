"""Policy optimization: rewards that fail, prompts that leave no room."""

from tests.helpers.hostile.cases import Case, later
from tests.helpers.hostile.rows_config import both
from tests.helpers.hostile.rows_data import data

GRPO = "method=grpo num_generations=2 per_device_train_batch_size=2 max_completion_length=4"
PROMPTS = data('{"prompt": "a small model"}\n{"prompt": "nine rows"}\n{"prompt": "each of them"}\n')
RAN = ("out", "out/*")
SERVED = "reward_funcs=repetition rollout=vllm vllm_server_base_url"


def policy(name: str, keys: str, **wishes) -> Case:
    """Refused by `check` and by `train` alike."""
    return Case(name, both(f"{GRPO} {keys}"), files=PROMPTS, **wishes)


def reward(name: str, body: str, says, keys: str = "", **wishes) -> Case:
    """A function of the user's, which training calls."""
    return Case(name, f"train run.yaml {GRPO} reward_funcs=r.py:f {keys}", says=says, files={**PROMPTS, "r.py": body},
                **({"seconds": 6, "fix": "correct the function"} | wishes))  # fmt: skip


ROWS = [
    Case("+ grpo without rewards", both("method=grpo"), says="reward_funcs", fix="FUNCTION", files=PROMPTS),
    policy("+ one reward, and its name misspelt", "reward_funcs=repetiton", says="repetiton", fix="repetition"),
    policy("+ a reward from the network", "reward_funcs=https://example.com/r.py:f", says="URL", fix="download"),
    policy("+ weights for other rewards", "reward_funcs=repetition 'reward_weights=[1, 2]'", says="reward_weights"),
    policy("+ groups that do not come out", "reward_funcs=repetition num_generations=3", says="num_generations"),
    policy(
        "+ answers longer than rows",
        "reward_funcs=repetition max_completion_length=100000",
        says="",
        fix="max_completion_length",
    ),
    policy("+ one answer to a prompt", "reward_funcs=repetition num_generations=1", says="num_generations"),
    policy("+ a prompt as long as a row", "reward_funcs=repetition max_length=6", says=("prompt", "no room")),
    policy("+ a loss of pairs", "reward_funcs=repetition loss_type=sigmoid", says="sigmoid", fix="method: dpo"),
    policy(
        "+ a reference that cannot be taken off",
        "reward_funcs=repetition beta=0.1 use_peft=false load_in_4bit=false",
        says="beta",
        fix="beta: 0",
    ),
    policy("+ a reward of a column that is not there", "reward_funcs=exact", says=("exact", "further columns")),
    policy("+ a reward from a hub", "reward_funcs=someone/rewards", says="someone/rewards", fix=""),
    policy("+ a reward model that is not there", "'reward_funcs={model: no/such/judge}'", says="no/such/judge"),
    policy("+ a reward model that scores nothing", "'reward_funcs={model: model}'", says="no score head", fix="prm"),
    policy(
        "+ a reward model of an adapter without head",
        "'reward_funcs={model: run}'",
        says="",
        fix="method: reward",
        given=("run",),
    ),
    policy("+ a file without function", "reward_funcs=r.py", says="", fix="r.py:FUNCTION"),
    policy(
        "+ pages for less than an answer",
        "reward_funcs=repetition rollout_memory_gib=1e-9",
        says="rollout_memory_gib",
        fix="kv_cache",
    ),
    policy(
        "+ bounds the wrong way around",
        "reward_funcs=repetition importance_sampling_clip_min=5",
        says="importance_sampling_clip_min",
    ),
    policy(
        "+ sequences' ratios for a loss that multiplies tokens'",
        "reward_funcs=repetition loss_type=vespo importance_sampling_mode=sequence_mask",
        says="importance_sampling_mode",
        fix="token_truncate",
    ),
    Case("+ dynamic sampling of pairs", both("method=dpo dynamic_sampling=true"), says="dynamic_sampling", fix="grpo"),
    policy("+ an engine of its own", "reward_funcs=repetition use_vllm=true", says="use_vllm", fix="rollout: vllm"),
    policy("+ a server that nobody asks", "reward_funcs=repetition vllm_server_base_url=http://a", says="rollout"),
    policy("+ a server that is no address", f"{SERVED}=localhost:8000", says="", fix="http://"),
    policy("+ a server that is away", f"{SERVED}=http://127.0.0.1:9", says="", fix="--max-lora-rank"),
    policy(
        "+ a server without a name",
        f"{SERVED}=http://no-such-host.invalid:8000",
        says="",
        fix="vllm serve",
    ),
    policy("+ a server's cache", f"{SERVED}=http://a kv_cache=fp8", says="kv_cache", fix="remove it"),
    policy("+ a server, and a full model", f"{SERVED}=http://a use_peft=false load_in_4bit=false", says="use_peft"),
    reward("+ a file without that function", "def g(**_):\n    return []\n", ("r.py", "f")),
    reward("+ a reward without end in size", "def f(completions, **_):\n    return [float('inf')] * 2\n", "inf"),
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
