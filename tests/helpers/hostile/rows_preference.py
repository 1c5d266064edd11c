"""Preference training: rows that are no pairs, labels that are none, and keys of other methods."""

import json

from tests.helpers.hostile.cases import Case
from tests.helpers.hostile.rows_config import both, config
from tests.helpers.hostile.rows_data import PAIR, data

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


DIALOGUE = "\n\nHuman: a small\n\nAssistant:"
ROWS = [
    Case("+ pairs are ready", "check run.yaml method=dpo", code=0, says="ready", files=lines(pair())),
    Case("+ pairs are shown", "preview run.yaml method=dpo", code=0, says="rejected: ", files=lines(pair())),
    Case(
        "+ one prompt in another's place",
        "check run.yaml method=dpo",
        code=0,
        says="2 pairs",
        files=lines(pair(), pair(prompt=[*ASKED, GOOD, *ASKED])),
    ),
    Case(
        "+ dialogues that are texts",
        "check run.yaml method=dpo",
        code=0,
        says="1 pairs",
        files=lines({"chosen": f"{DIALOGUE} model", "rejected": f"{DIALOGUE} reads"}),
    ),
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
    Case("+ texts that share nothing", dpo(), files=lines({"chosen": "yes", "rejected": "no"})),
    Case(
        "+ an answer by nobody",
        dpo(),
        says=("data.jsonl:1", "'rejected'", "role system"),
        files=lines(pair(rejected=[{"role": "system", "content": "b"}])),
    ),
    Case("+ an answered prompt", dpo(), files=lines(pair(prompt=[*ASKED, GOOD]))),
    Case("+ empty answers", dpo(), says="empty answer", files=lines({"prompt": "a", "chosen": "", "rejected": " "})),
    Case(
        "+ answers of 5 MB",
        "check run.yaml method=dpo max_length=64",
        code=0,
        says="ready",
        files=lines({"prompt": "a", "chosen": "b c " * 1_250_000, "rejected": "d"}),
    ),
    Case(
        "+ no rejected answer",
        dpo(),
        says=("data.jsonl:2", "rejected"),
        files=lines(pair(), {"prompt": ASKED, "chosen": [GOOD]}),
    ),
    Case("+ an answer of null", dpo(), says=("data.jsonl:1", "'rejected'"), files=lines(pair(rejected=None))),
    Case("+ an answer of no turns", dpo(), says=("data.jsonl:1", "'rejected'"), files=lines(pair(rejected=[]))),
    Case("+ an answer of numbers", dpo(), says=("data.jsonl:1", "rejected"), files=lines(pair(rejected=[1]))),
    Case("+ prompts longer than rows", dpo("max_length=8"), says="are dropped", fix="max_length", files=lines(pair())),
    Case("+ DPO on examples", dpo(), says="data.jsonl", fix="method: sft"),
    Case("+ DPO on labels", dpo(), fix="method: kto", files=lines(labelled())),
    Case("+ examples that are pairs", both(), says="preference pairs", fix="method: dpo", files=lines(pair())),
    Case(
        "+ pairs of v1 as examples",
        both(),
        says="preference pairs",
        fix="method: dpo",
        files=lines({"chosen_messages": [*ASKED, GOOD], "rejected_messages": [*ASKED, BAD]}),
    ),
    Case(
        "+ a column misspelt",
        dpo(),
        says="'rejected'",
        files=lines({"prompt": "a", "chosen": "b", "rejectd": "c"}),
    ),
    Case("+ a part that there is not", dpo("'column_mapping={choosen: prompt}'"), says="choosen", files=lines(pair())),
    Case("+ a column that there is not", dpo("'column_mapping={chosen: best}'"), says="best", files=lines(pair())),
    Case("+ a format for pairs", dpo("dataset_format=messages"), says="dataset_format", fix="column_mapping"),
    Case(
        "+ turns in brackets without end",
        dpo(),
        says="data.jsonl:1",
        files=data('{"prompt": "a", "chosen": ' + "[" * 100_000),
    ),
    Case("+ a method that nobody knows", both("method=dop"), says="dop", fix="dpo"),
    Case("+ a method of nothing", both("method="), says="method"),
    Case("+ a method that is a number", both("method=3"), says="method"),
    Case("+ beta for imitation", both("beta=0.1"), says=("beta", "method: sft"), fix="method: dpo"),
    Case("+ beta of zero", dpo("beta=0"), says="beta", fix="above 0"),
    Case("+ beta below zero", dpo("beta=-1"), says="beta"),
    Case("+ beta that is none", both("method=dpo"), says="beta", files=config(beta=".nan")),
    Case("+ a loss of another method", dpo("loss_type=simpo"), says="simpo", fix="method: simpo"),
    Case("+ a loss misspelt", dpo("loss_type=sigmod"), says="sigmod", fix="sigmoid"),
    Case(
        "+ a thousand losses",
        dpo(f"'loss_type=[{', '.join(['sigmoid'] * 1000)}, x]'"),
        says="loss_type",
        files=lines(pair()),
    ),
    Case("+ weights for other losses", dpo("'loss_weights=[1, 2]'"), says="loss_weights"),
    Case("+ a weight that is too large", dpo("'loss_weights=[1e300]'"), says="loss_weights"),
    Case("+ smoothing of a half", dpo("label_smoothing=0.5"), says="label_smoothing"),
    Case("+ margins of another method", both("method=dpo simpo_gamma=1"), says="simpo_gamma", fix="method: simpo"),
    Case("+ PPO of Axolotl", both("rl=ppo"), says="rl: 'ppo'", fix="dpo"),
    Case("+ a loss of LLaMA-Factory's that is gone", both("stage=dpo pref_loss=kto_pair"), says="kto_pair"),
    Case("+ init with examples", "init model data.jsonl --method dpo", fix="--method sft"),
    Case("+ init with a method that nobody knows", "init model data.jsonl --method dop", says="dop", fix="dpo"),
    Case(
        "+ init without a method on pairs",
        "init model data.jsonl",
        says="preference pairs",
        fix="--method dpo",
        files=lines(pair()),
    ),
    Case("+ preview of no pairs", "preview run.yaml method=dpo", files=data(PAIR)),
    # Answers with a label.
    Case(
        "+ labels are ready",
        "check run.yaml method=kto",
        code=0,
        says="1 desirable",
        files=lines(labelled(), labelled(label=False, completion="c")),
    ),
    Case("+ pairs for labels", "check run.yaml method=kto", code=0, says="2 answers", files=lines(pair())),
    Case(
        "+ a label as text",
        kto(),
        says=("data.jsonl:1", "'label'", '"true"'),
        fix="without quotes",
        files=lines(labelled(label="true")),
    ),
    Case("+ a label as a number", kto(), says=("data.jsonl:2", "'label'"), files=lines(labelled(), labelled(label=0))),
    Case("+ a label of null", kto(), says=("data.jsonl:2", "'label'"), files=lines(labelled(), labelled(label=None))),
    Case(
        "+ a row without label",
        kto(),
        says=("data.jsonl:2", "nothing"),
        files=lines(labelled(), {"prompt": "a", "completion": "b"}),
    ),
    Case("+ all labels alike", kto(), fix="method: sft", files=lines(labelled(label=False))),
    Case("+ KTO on examples", kto(), fix="method: sft"),
    Case(
        "+ KTO on steps",
        kto(),
        files=lines({"prompt": "a", "completions": ["b"], "labels": [True]}),
    ),
    Case(
        "+ a whole conversation without answer",
        kto(),
        says="data.jsonl:1",
        files=lines({"messages": ASKED, "label": True}),
    ),
    Case("+ several losses of KTO's", kto("'loss_type=[kto, kto]'"), fix="method: dpo"),
    # Margins of reward models.
    Case(
        "+ a margin of NaN",
        both("method=reward"),
        says=("data.jsonl:1", "'margin'", "nan"),
        files=data(json.dumps(pair(margin=float("nan"))) + "\n"),
    ),
    Case("+ a margin as text", both("method=reward"), says=("data.jsonl:1", "'margin'"), files=lines(pair(margin="2"))),
    Case(
        "+ a row without margin",
        both("method=reward"),
        says=("data.jsonl:2", "'margin'"),
        files=lines(pair(margin=2), pair()),
    ),
    Case(
        "+ a file without margins",
        both("method=reward 'dataset=[data.jsonl, b.jsonl]'"),
        says="b.jsonl",
        files={**lines(pair(margin=2)), "b.jsonl": json.dumps(pair()) + "\n"},
    ),
    # Steps with labels.
    Case("+ steps are ready", "check run.yaml method=prm", code=0, says="2 steps", files=lines(stepwise())),
    Case("+ steps are shown", "preview run.yaml method=prm", code=0, says="right: ", files=lines(stepwise())),
    Case(
        "+ steps without labels",
        prm(),
        says=("data.jsonl:2", "'labels'", "nothing"),
        files=lines(stepwise(), {"prompt": "a", "completions": ["b"]}),
    ),
    Case(
        "+ fewer labels than steps",
        prm(),
        says=("data.jsonl:1", "1 labels"),
        files=lines(stepwise(labels=[True])),
    ),
    Case("+ labels that are numbers", prm(), says=("data.jsonl:1", "'labels'"), files=lines(stepwise(labels=[1, 0]))),
    Case("+ a step of turns", prm(), says=("data.jsonl:1", "step 1"), files=lines(stepwise(completions=[[GOOD], "b"]))),
    Case("+ steps that are one text", prm(), says="data.jsonl:1", files=lines(stepwise(completions="b"))),
    Case("+ only right steps", prm(), files=lines(stepwise(labels=[True, True]))),
    Case("+ process rewards of pairs", prm(), says="preference pairs", fix="method: dpo", files=lines(pair())),
    Case("+ examples that are steps", both(), fix="method: prm", files=lines(stepwise())),
    Case(
        "+ a whole model that scores steps",
        prm("use_peft=false load_in_4bit=false"),
        says="use_peft",
        files=lines(stepwise()),
    ),
    Case(
        "+ init with steps",
        "init model data.jsonl --method prm",
        code=0,
        says="method: prm",
        files=lines(*[stepwise(prompt=str(n)) for n in range(40)]),
        seconds=4,  # plans several times
    ),
    Case(
        "+ init without a method on steps",
        "init model data.jsonl",
        fix="--method prm",
        files=lines(stepwise()),
    ),
    Case("+ a separator of pairs", dpo("'step_separator=x'"), says="step_separator", fix="method: prm"),
    Case("+ beta of a reward model", both("method=reward beta=0.1"), says="beta: 0.1", fix="remove it"),
]
