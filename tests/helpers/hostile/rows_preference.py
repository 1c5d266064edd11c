"""Preference training: rows that are no pairs, labels that are none, and keys of other methods."""

import json

from tests.helpers.hostile.cases import Case
from tests.helpers.hostile.rows_config import both
from tests.helpers.hostile.rows_data import data

GOOD, BAD = ({"role": "assistant", "content": word} for word in ("small", "nine"))
ASKED = [{"role": "user", "content": "a small model"}]


def lines(*rows: dict) -> dict:
    return data("".join(json.dumps(row) + "\n" for row in rows))


def pair(**columns) -> dict:
    return {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD], **columns}


def labelled(**columns) -> dict:
    return {"prompt": "a", "completion": "b", "label": True, **columns}


def dpo(more: str = "") -> tuple[str, ...]:
    return both(f"method=dpo {more}".strip())


def stepwise(**columns) -> dict:
    return {"prompt": "a", "completions": ["b", "c"], "labels": [True, False], **columns}


def prm(more: str = "") -> tuple[str, ...]:
    return both(f"method=prm {more}".strip())


def kto(more: str = "") -> tuple[str, ...]:
    return both(f"method=kto {more}".strip())


SCORED = "train run.yaml method=reward output_dir=scored"
ROWS = [
    Case("+ pairs are ready", "check run.yaml method=dpo", code=0, says="ready", files=lines(pair())),
    Case(
        "+ equal pairs",
        dpo(),
        fix="column_mapping",
        files=lines(pair(rejected=[GOOD])),
    ),
    Case(
        "+ roles swapped",
        dpo(),
        says=("data.jsonl:2", "role user"),
        files=lines(pair(), pair(prompt=[*ASKED, GOOD, *ASKED], chosen=ASKED, rejected=ASKED)),
    ),
    Case(
        "+ answers to two prompts",
        dpo(),
        files=lines({"chosen": [*ASKED, GOOD], "rejected": [{"role": "user", "content": "nine"}, BAD]}),
    ),
    Case(
        "+ no rejected answer",
        dpo(),
        says=("data.jsonl:2", "rejected"),
        files=lines(pair(), {"prompt": ASKED, "chosen": [GOOD]}),
    ),
    Case("+ an answer of null", dpo(), says=("data.jsonl:1", "'rejected'"), files=lines(pair(rejected=None))),
    Case("+ prompts longer than rows", dpo("max_length=8"), says="are dropped", fix="max_length", files=lines(pair())),
    Case("+ examples that are pairs", both(), says="preference pairs", fix="method: dpo", files=lines(pair())),
    Case(
        "+ a column misspelt",
        dpo(),
        says="'rejected'",
        files=lines({"prompt": "a", "chosen": "b", "rejectd": "c"}),
    ),
    Case("+ a column that there is not", dpo("'column_mapping={chosen: best}'"), says="best", files=lines(pair())),
    Case("+ a method that nobody knows", both("method=dop"), says="dop", fix="dpo"),
    Case(
        "+ init without a method on pairs",
        "init model data.jsonl",
        says="preference pairs",
        fix="--method dpo",
        files=lines(pair()),
    ),
    # Answers with a label.
    Case(
        "+ labels are ready",
        "check run.yaml method=kto",
        code=0,
        says="1 desirable",
        files=lines(labelled(), labelled(label=False, completion="c")),
    ),
    Case(
        "+ a label as text",
        kto(),
        says=("data.jsonl:1", "'label'", '"true"'),
        fix="without quotes",
        files=lines(labelled(label="true")),
    ),
    Case("+ all labels alike", kto(), fix="method: sft", files=lines(labelled(label=False))),
    # Margins of reward models.
    Case(
        "+ a margin of NaN",
        both("method=reward"),
        says=("data.jsonl:1", "'margin'", "nan"),
        files=data(json.dumps(pair(margin=float("nan"))) + "\n"),
    ),
    Case(
        "+ a file without margins",
        both("method=reward 'dataset=[data.jsonl, b.jsonl]'"),
        says="b.jsonl",
        files={**lines(pair(margin=2)), "b.jsonl": json.dumps(pair()) + "\n"},
    ),
    # Steps with labels.
    Case("+ steps are ready", "check run.yaml method=prm", code=0, says="2 steps", files=lines(stepwise())),
    Case(
        "+ fewer labels than steps",
        prm(),
        says=("data.jsonl:1", "1 labels"),
        files=lines(stepwise(labels=[True])),
    ),
    Case("+ only right steps", prm(), files=lines(stepwise(labels=[True, True]))),
    Case(
        "+ a whole model that scores steps",
        prm("use_peft=false load_in_4bit=false"),
        says="use_peft",
        files=lines(stepwise()),
    ),
    Case(
        "+ a score head goes on as a model",
        "train run.yaml method=dpo adapter_path=scored/adapter",
        says="scored/adapter",
        fix="method: reward",
        first=SCORED,
        files=lines(pair()),
    ),
    Case(
        "+ a model goes on as a score head",
        "check run.yaml method=reward adapter_path=run/adapter",
        says="run/adapter",
        fix="method: sft",
        given=("run",),
        files=lines(pair()),
    ),
    Case(
        "+ answers of a reward model",
        ("generate scored prompts.jsonl", "chat scored", "serve scored --port 0"),
        says="scores texts",
        first=SCORED,
        files=lines(pair()),
    ),
    Case("+ a reward model as GGUF", "export scored --gguf f16", says="SEQ_CLS", first=SCORED, files=lines(pair())),
    Case(
        "+ a reference that is not what is trained",
        dpo("init_lora_weights=false"),
        says="init_lora_weights",
        fix="true",
        files=lines(pair()),
    ),
]
