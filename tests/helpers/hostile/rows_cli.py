"""The command line itself: options, encodings, closed streams, the environment."""

from tests.helpers.hostile.cases import Case
from tests.helpers.hostile.rows_config import both

SHOWN = ("check run.yaml", "preview run.yaml")

ROWS = [
    Case("19 an unknown option", "env --nope", code=2, says="--nope"),
    Case("19 an unknown command", "trian run.yaml", code=2, says="trian", fix="train"),
    Case("19 an argument missing", "check", code=2, says="RUN.YAML"),
    Case(
        "19 an option below its least",
        "generate model prompts.jsonl --max-new-tokens 0",
        code=2,
        says="--max-new-tokens",
    ),
    Case("57 --resum", "train run.yaml --resum", code=(2, 1), says="--resum", fix="--resume"),
    Case("+ a misspelt key", both("learning_rat=1"), says="learning_rat", fix="learning_rate"),
    Case("+ a key without a name", "check run.yaml =3", code=2, says="=3", fix="KEY=VALUE"),
    Case("+ a misspelt file", ("check runn.yaml", "train runn.yaml"), says="runn.yaml", fix="run.yaml"),
    Case("74 stdout in ASCII", SHOWN, code=0, environment={"PYTHONIOENCODING": "ascii"}),
    Case("75 nobody reads", ("check run.yaml", "--help", "preview run.yaml"), code=(141, 0), wishes={"broken": [1]}),
    Case("20 nobody else speaks", "check run.yaml", code=0, says="ready", wishes={"fresh": True}, seconds=20),
    Case(
        "78 a compiler that fails without a word",
        "train run.yaml",
        code=0,
        after=("out", "out/*"),
        seconds=6,
        environment={"CC": "/bin/false", "HALFBYTE_CACHE": "/dev/null/none"},
    ),
    Case("+ no home, no cache", "check run.yaml", code=0, environment={"HOME": None, "HALFBYTE_CACHE": None}),
    Case("+ a terminal of 20 columns", "check run.yaml", code=0, wishes={"columns": 20}),
]
