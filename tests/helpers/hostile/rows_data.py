"""Datasets: what is in them, and what they are."""

import json

from tests.helpers.hostile.cases import Case, Link, fifo, mode
from tests.helpers.hostile.inputs import DATA
from tests.helpers.hostile.rows_config import both

PAIR = '{"prompt": "a", "completion": "b"}\n'
LONG = json.dumps({"prompt": "a", "completion": "b c " * 1_250_000}) + "\n"


def data(content) -> dict:
    return {"data.jsonl": content}


ROWS = [
    Case("21 a number of 5000 digits", both(), says="data.jsonl:2", files=data(PAIR + f'{{"prompt": {"9" * 5000}}}\n')),
    Case("+ half a surrogate pair", both(), says="data.jsonl:2", files=data(PAIR + r'{"prompt": "\ud800"}' + "\n")),
    Case("+ bytes that are no UTF-8", both(), says="data.jsonl:2", files=data(PAIR.encode() + b'{"prompt": "\xff"}\n')),
    Case(
        "23 a link to nowhere",
        both("dataset=link.jsonl"),
        says="link.jsonl",
        files={"link.jsonl": Link("nowhere")},
        never=("closest existing",),
    ),
    Case("24 a dataset of a hub that is away", both("dataset=tatsu-lab/alpaca"), says="tatsu-lab/alpaca"),
    Case(
        "25 a column twice", both("dataset=d.csv"), says="prompt", files={"d.csv": "prompt,prompt,completion\na,b,c\n"}
    ),
    Case(
        "37 chat rows as alpaca",
        both("dataset_format=alpaca"),
        says=("dataset_format", "messages"),
        never=("'messages' by 'messages'",),
    ),
    Case("39 one row of 5 MB", "check run.yaml max_length=64", code=0, says="ready", files=data(PAIR * 5 + LONG)),
    Case("58 a file that may not be read", both(), says="data.jsonl", files=data(mode(0))),
    Case("+ a pipe", both(), says="data.jsonl", files=data(fifo)),
    Case("+ an empty file", both(), says="data.jsonl", files=data("")),
    Case(
        "83 escapes in the data",
        "preview run.yaml",
        code=0,
        files=data('{"prompt": "\\u001b[2J\\u0000 \\u001b]0;x\\u0007", "completion": "\\u001b[31mred\\u009b"}\n'),
    ),
    Case(
        "+ a BOM and Windows' line ends",
        "check run.yaml",
        code=0,
        says="ready",
        files=data(("\ufeff" + DATA).replace("\n", "\r\n")),
    ),
]
