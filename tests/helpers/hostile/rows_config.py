"""Keys, values and files of configurations."""

from tests.helpers.hostile.cases import Case, fifo, later, mode, some
from tests.helpers.hostile.inputs import RUN

BOTH = ("check run.yaml", "train run.yaml")
LONG = "a" * 300
RED = '"a\\e[31mred\\nnew"'
# Eight levels of nine: 43 million entries.
BOMB = "x0: &x0 [a,a,a,a,a,a,a,a,a]\n" + "".join(
    f"x{at}: &x{at} [{','.join([f'*x{at - 1}'] * 9)}]\n" for at in range(1, 8)
)


def both(more: str = "") -> tuple[str, ...]:
    """The same for `check` and `train`."""
    return tuple(f"{command} {more}" for command in BOTH)


def config(**keys: str) -> dict[str, str]:
    """`files` with another run.yaml: the usual one with these keys, whose values are YAML."""
    kept = [line for line in RUN.splitlines() if line.partition(":")[0] not in keys]
    return {"run.yaml": "\n".join([*kept, *(f"{key}: {value}" for key, value in keys.items())]) + "\n"}


ROWS = [
    Case("+ a good run is ready", "check run.yaml", code=0, says="ready"),
    *later(Case("+ a good run runs", "train run.yaml", code=0, after=("out", "out/*"))),
    # What YAML's parser raises.
    Case("1 a bell in the file", both(), says="run.yaml", files=config(output_dir="a\x07b")),
    Case("1 NUL in the file", both(), says="run.yaml", files=config(output_dir="a\0b")),
    Case("1 an escape in an override", ["check", "run.yaml", "output_dir=a\x1b[31mb"], says="output_dir"),
    Case("1 bytes that are no UTF-8", both(), says="run.yaml", files={"run.yaml": b"output_dir: \xff\xfe\n"}),
    Case("2 a number of 5000 digits", both(), says="run.yaml", files=config(seed="9" * 5000)),
    Case("2 a tag that does not fit", both(), says="run.yaml", files=config(seed="!!int foo")),
    Case("2 a date that is none", both(), says="run.yaml", files=config(seed="!!timestamp 2024-13-45")),
    Case("+ a date that is one", both(), says="seed", files=config(seed="2024-11-05")),
    Case("+ a python tag", both(), says="run.yaml", files=config(seed="!!python/object/apply:os.system [touch PWNED]")),
    Case("+ nested 10,000 deep", both(), says="run.yaml", files=config(dataset="[" * 10000)),
    Case("11 a bomb of aliases", both(), says="values", files={"run.yaml": BOMB + RUN}),
    Case("11 a bomb in a known key", both(), says="values", files={"run.yaml": f"{BOMB}{RUN}target_modules: *x7\n"}),
    Case("+ a file of one list", both(), says="run.yaml", files={"run.yaml": "- a\n- b\n"}),
    Case("+ an empty file", both(), says="run.yaml", fix="halfbyte init", files={"run.yaml": ""}),
    Case("+ a model without a name", both("'model_name_or_path=\" \"'"), says="model_name_or_path"),
    Case("+ the same key twice", both(), says="seed", files={"run.yaml": RUN + "seed: 1\nseed: 2\n"}),
    Case("+ a folder for a file", ("check model", "train model"), says="model", code=(1, 2)),
    Case("+ a pipe for a file", both(), says="run.yaml", files={"run.yaml": fifo}),
    Case("+ a file that may not be read", both(), says="run.yaml", files={"run.yaml": mode(0)}),
    Case("16 a bracket left open", both("target_modules=[q_proj"), says="target_modules", never=("while parsing",)),
    # Values.
    Case("4 seed below zero", both("seed=-1"), says="seed"),
    Case("4 seed past 32 bits", both("seed=99999999999999999999"), says="seed"),
    Case("+ no ways to divide a run", both("'parallel={data: 0}'"), says="parallel"),
    Case("+ an axis that nobody knows", both("'parallel={rows: 2}'"), says="parallel"),
    Case("+ a mesh of nothing", both("'parallel={}'"), says="parallel"),
    Case("+ a mesh for one device", both("'parallel={data: 2}' device=cuda:1"), says=("device: cuda:1", "data: 2")),
    Case("+ a million processes", "train run.yaml 'parallel={data: 1000000}' device=cpu", says="1,000,000 processes"),
    *some(
        Case(f"+ ways of a run: {ways}", both(f"'parallel={ways}'"), says="parallel")
        for ways in ("{data: 1.5}", "{shard: -2}", "{data: two}", "[data, 2]", "2", "null", "{data: 2, data: 2}")
    ),
    Case("+ more stages than layers", "check run.yaml 'parallel={pipeline: 3}'", says="3 pipeline"),
    *some(
        Case(
            f"+ stages of two by {name}",
            f"check run.yaml 'parallel={{pipeline: 2}}' pipeline_schedule={name}",
            says=says,
            fix=fix,
        )
        for name, says, fix in (
            ("zb-v", "2 decoder layers for 2 processes", "1f1b"),
            ("gpipe", "pipeline_schedule", ""),
        )
    ),
    *later(
        Case(
            "+ --gpus",
            "check run.yaml --gpus 2 --gpu-memory 80 device=null",
            code=0,
            says=("{data: 2}", "{tensor: 2}"),
            seconds=8,
        )
    ),
    *some(
        Case(f"+ check {more}", f"check run.yaml {more}", code=2, says=says)
        for more, says in (
            ("--gpus 1000000000 --gpu-memory 80", "--gpus"),
            ("--gpus 2 --gpu-memory inf", "--gpu-memory"),
            ("--gpus two --gpu-memory 80", "--gpus"),
            ("--gpus 2 --gpu-memory nan", "--gpu-memory"),
            ("--gpus 0", "--gpus"),
        )
    ),
    Case("+ --gpus and another mesh", "check run.yaml --gpus 4 --gpu-memory 80 'parallel={data: 3}'", says="--gpus"),
    Case("5 an unknown tracker", both("report_to=nonsense"), says=("report_to", "nonsense")),
    Case("5 a tracker that is not installed", both("report_to=wandb"), says=("report_to", "wandb")),
    Case(
        "6 attention that is not installed",
        both("attn_implementation=flash_attention_2"),
        says=("attn_implementation", "flash_attention_2"),
    ),
    Case("6 attention that nobody knows", both("attn_implementation=foo"), says=("attn_implementation", "foo")),
    Case("7 output_dir is empty", "train run.yaml output_dir=", says="output_dir"),
    Case("7 output_dir is an empty text", "train run.yaml", says="output_dir", files=config(output_dir='""')),
    Case("8 output_dir of 300 characters", f"train run.yaml output_dir={LONG}", says="output_dir"),
    Case("8 output_dir below a file", "train run.yaml output_dir=run.yaml/x", says=("output_dir", "run.yaml")),
    Case("8 NUL in output_dir", "train run.yaml", says="output_dir", files=config(output_dir='"a\\0b"')),
    Case("8 a model of 5000 characters", both(f"model_name_or_path=./{'m' * 5000}"), says="too long"),
    Case("8 a dataset of 5000 characters", both(f"dataset=./{'d' * 5000}"), says="too long"),
    Case("8 a template of 5000 characters", both(f"chat_template_path={'t' * 5000}"), says="too long"),
    Case(
        "9 markup in output_dir",
        ["train", "run.yaml", "output_dir='[bold]x[/nope]'"],
        code=0,
        says="[bold]x[/nope]",
        after=("?bold?x?", "?bold?x?/nope?", "?bold?x?/nope?/*"),
    ),
    Case("9 colours in output_dir", "check run.yaml", code=0, files=config(output_dir=RED), says="ready"),
    Case(
        "9 colours in output_dir that is written",
        "train run.yaml",
        slow=True,
        code=0,
        files=config(output_dir=RED),
        says=r"saved: a\x1b[31mred\nnew/adapter",
        after=("a?[[]31mred?new", "a?[[]31mred?new/*"),
    ),
    *some(
        Case(f"10 a batch of {rows:,}", f"check run.yaml per_device_train_batch_size={rows}", code=0, says="ready")
        for rows in (10_000_000, 100_000)
    ),
    Case("12 less memory than nothing", both("memory_limit_gib=0.001"), fix="memory_limit_gib"),
    Case("13 a device that is not here", both("device=cuda"), says="device"),
    Case("13 a dtype that does not run here", both("dtype=float16"), says="dtype"),
    Case("14 a device that nobody knows", both("device=tpu"), says=("device", "cpu")),
    Case(
        "15 quantization: a file that is not there",
        both("quantization=nofile.yaml"),
        says=("quantization", "nofile.yaml"),
        never=("halfbyte init",),
    ),
    Case(
        "15 quantization: a file of something else",
        both("quantization=run.yaml"),
        says=("quantization", "run.yaml"),
        never=("must be text",),
    ),
    Case("17 another tool's random_state", "check run.yaml random_state=7", code=(1, 0), says="seed"),
    *later(
        Case("17 another tool's checkpointing", "check run.yaml use_gradient_checkpointing=true", code=(1, 0)),
        Case("17 bias: none asks for nothing", "check run.yaml bias=none", code=0),
    ),
    Case(
        "18 a rank for a module that is not there",
        both("'rank_pattern={nothing: 4}'"),
        says=("rank_pattern", "nothing"),
        fix=("q_proj", "up_proj", "v_proj"),
    ),
    Case(
        "58 output_dir in a folder that may not be written",
        "train run.yaml output_dir=shut/out",
        says="output_dir",
        files={"shut": None, "shut/": mode(0o555)},
    ),
    Case(
        "58 output_dir that may not be written",
        "train run.yaml output_dir=shut",
        says="output_dir",
        files={"shut": None, "shut/": mode(0o555)},
    ),
    Case("82 the run is there already", "train run.yaml output_dir=run", says="run", given=("run",)),
]
