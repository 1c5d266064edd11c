"""Keys, values and files of configurations."""

from tests.helpers.hostile.cases import Case, fifo, later, mode
from tests.helpers.hostile.inputs import RUN

BOTH = ("check run.yaml", "train run.yaml")
LONG = "a" * 300
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
    Case("1 an escape in an override", ["check", "run.yaml", "output_dir=a\x1b[31mb"], says="output_dir"),
    Case("1 bytes that are no UTF-8", both(), says="run.yaml", files={"run.yaml": b"output_dir: \xff\xfe\n"}),
    Case("2 a number of 5000 digits", both(), says="run.yaml", files=config(seed="9" * 5000)),
    Case("+ nested 10,000 deep", both(), says="run.yaml", files=config(dataset="[" * 10000)),
    Case("11 a bomb of aliases", both(), says="values", files={"run.yaml": BOMB + RUN}),
    Case("+ a file of one list", both(), says="run.yaml", files={"run.yaml": "- a\n- b\n"}),
    Case("+ an empty file", both(), says="run.yaml", fix="halfbyte init", files={"run.yaml": ""}),
    Case("+ the same key twice", both(), says="seed", files={"run.yaml": RUN + "seed: 1\nseed: 2\n"}),
    Case("+ a folder for a file", ("check model", "train model"), says="model", code=(1, 2)),
    Case("+ a pipe for a file", both(), says="run.yaml", files={"run.yaml": fifo}),
    Case("+ a file that may not be read", both(), says="run.yaml", files={"run.yaml": mode(0)}),
    Case("16 a bracket left open", both("target_modules=[q_proj"), says="target_modules", never=("while parsing",)),
    # Values.
    Case("+ a mesh for one device", both("'parallel={data: 2}' device=cuda:1"), says=("device: cuda:1", "data: 2")),
    Case("+ a million processes", "train run.yaml 'parallel={data: 1000000}' device=cpu", says="1,000,000 processes"),
    Case("+ more stages than layers", "check run.yaml 'parallel={pipeline: 3}'", says="3 pipeline"),
    Case("+ --gpus and another mesh", "check run.yaml --gpus 4 --gpu-memory 80 'parallel={data: 3}'", says="--gpus"),
    Case("5 an unknown tracker", both("report_to=nonsense"), says=("report_to", "nonsense")),
    Case(
        "6 attention that is not installed",
        both("attn_implementation=flash_attention_2"),
        says=("attn_implementation", "flash_attention_2"),
    ),
    Case("7 output_dir is empty", "train run.yaml output_dir=", says="output_dir"),
    Case("8 output_dir of 300 characters", f"train run.yaml output_dir={LONG}", says="output_dir"),
    Case("8 output_dir below a file", "train run.yaml output_dir=run.yaml/x", says=("output_dir", "run.yaml")),
    Case(
        "9 markup in output_dir",
        ["train", "run.yaml", "output_dir='[bold]x[/nope]'"],
        code=0,
        says="[bold]x[/nope]",
        after=("?bold?x?", "?bold?x?/nope?", "?bold?x?/nope?/*"),
    ),
    Case("10 a batch of 10,000,000", "check run.yaml per_device_train_batch_size=10000000", code=0, says="ready"),
    Case("12 less memory than nothing", both("memory_limit_gib=0.001"), fix="memory_limit_gib"),
    Case("13 a device that is not here", both("device=cuda"), says="device"),
    Case(
        "15 quantization: a file of something else",
        both("quantization=run.yaml"),
        says=("quantization", "run.yaml"),
        never=("must be text",),
    ),
    Case("17 another tool's random_state", "check run.yaml random_state=7", code=(1, 0), says="seed"),
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
    Case("82 the run is there already", "train run.yaml output_dir=run", says="run", given=("run",)),
]
