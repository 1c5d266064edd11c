"""Preparation: tokenized rows, and a report that counts and names everything that was dropped."""

import contextlib
import json

import datasets
import numpy as np
import pytest

from halfbyte.data import prepare as prepare_module
from halfbyte.data.encode import IGNORE_INDEX
from halfbyte.data.prepare import prepare
from halfbyte.data.tables import with_column
from halfbyte.methods import method_of
from halfbyte.utils.errors import ConfigError, DataError
from halfbyte.utils.notices import notices_so_far

PAIRS = [{"prompt": f"question {i}", "completion": f"answer {i} " + "x" * (7 * i % 40)} for i in range(30)]


def rows_of(dataset):
    return [{key: list(value) for key, value in row.items()} for row in dataset]


def test_pairs_become_chats_with_a_template(config, make_tokenizer, write):
    tokenizer = make_tokenizer("plain")
    data = prepare(config(write(PAIRS[:2])), tokenizer)
    assert data.eval is None
    assert tokenizer.decode(data.train[0]["input_ids"]) == (
        "<|im_start|>user\nquestion 0<|im_end|>\n<|im_start|>assistant\nanswer 0 <|im_end|>\n"
    )
    trained = [token for token in data.train[0]["labels"] if token != IGNORE_INDEX]
    assert tokenizer.decode(trained) == "answer 0 <|im_end|>"


def test_report(config, make_tokenizer, write):
    tokenizer = make_tokenizer("plain")
    path = write(PAIRS)
    data = prepare(config(path, eval_split_size=0.2), tokenizer)
    report = data.report
    assert report["sources"] == [
        {"path": path, "format": "prompt-completion", "why": "columns prompt, completion", "rows": 30}
    ]
    assert report["mask"].startswith("assistant turns, by difference of two renderings")
    assert "generation-marks" in notices_so_far()
    assert (report["eos_trained"], report["stop_tokens"]) == (True, ["<|im_end|>"])
    for dataset, split in ((data.train, report["train"]), (data.eval, report["eval"])):
        lengths = [len(row["input_ids"]) for row in dataset]
        assert (split["documents"], split["rows"], split["tokens"]) == (len(dataset), len(dataset), sum(lengths))
        assert split["trained_tokens"] == sum(label != IGNORE_INDEX for row in dataset for label in row["labels"])
        assert (split["dropped"], split["truncated"], split["packing_efficiency"]) == ({}, 0, None)
        edges, counts = split["length_histogram"]["edges"], split["length_histogram"]["counts"]
        assert sum(counts) == len(dataset)
        assert len(edges) == len(counts) + 1
        assert counts[0] == sum(edges[0] <= length < edges[1] for length in lengths)
    assert (len(data.train), len(data.eval)) == (24, 6)
    [first, *_] = report["samples"]
    assert "".join(first["tokens"]) == tokenizer.decode(data.train[0]["input_ids"])
    assert first["trained"] == [label != IGNORE_INDEX for label in data.train[0]["labels"]]
    json.dumps(report)


def test_split_depends_only_on_the_seed(config, make_tokenizer, write):
    path, tokenizer = write(PAIRS), make_tokenizer("marked")
    first, shorter, reseeded = (
        prepare(config(path, eval_split_size=5, seed=seed, max_length=length, packing=packing), tokenizer)
        for seed, length, packing in ((1, 200, False), (1, 100, False), (2, 200, False))
    )
    assert rows_of(first.eval) == rows_of(shorter.eval)
    assert rows_of(first.eval) != rows_of(reseeded.eval)
    everything = sorted(map(json.dumps, rows_of(first.train) + rows_of(first.eval)))
    assert everything == sorted(map(json.dumps, rows_of(prepare(config(path), tokenizer).train)))


STEPS = {"prompt": "1 + 1", "completions": ["It is", "3."], "labels": [True, False]}


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        (PAIRS[1], {"packing": True}),
        ({"prompt": "one", "chosen": " two", "rejected": " three"}, {"method": "dpo", "packing": True}),
        ({"prompt": "one", "completion": " two", "label": True}, {"method": "kto"}),
        (STEPS, {"method": "prm"}),
    ],
)
def test_no_rows_are_pickled_for_a_hash(config, make_tokenizer, write, monkeypatch, row, keys):
    """With libraries in a user's folder, dill treats them as user code and fails to pickle them."""

    def fail(dataset):
        raise AssertionError("hashed")

    monkeypatch.setattr("datasets.arrow_dataset.generate_fingerprint", fail)
    rows = [row, row | {"label": False}] if "label" in row else [row, row]
    run_config = config(write(rows), eval_split_size=1, **keys) if "label" not in row else config(write(rows), **keys)
    assert len(method_of(run_config).ready(run_config, make_tokenizer("plain")).train)


def test_eval_dataset(config, make_tokenizer, write):
    paths = write(PAIRS[:3], "train.jsonl"), write(PAIRS[3:5], "eval.jsonl")
    data = prepare(config(paths[0], eval_dataset=paths[1], eval_split_size=0.5), make_tokenizer("marked"))
    assert (len(data.train), len(data.eval)) == (3, 2)
    assert [source["path"] for source in data.report["sources"]] == list(paths)
    assert "same-data" not in notices_so_far()
    prepare(config(paths[0], eval_dataset=paths[0]), make_tokenizer("marked"))
    assert "same-data" in notices_so_far()


@pytest.mark.parametrize("processes", [None, 2])
def test_long_data_has_one_progress_bar(config, make_tokenizer, write, monkeypatch, capfd, processes):
    monkeypatch.setattr(prepare_module, "ROWS_WITH_PROGRESS", 1)
    done = []

    @contextlib.contextmanager
    def counting(name, total):
        yield done.append
        assert total == len(PAIRS)

    monkeypatch.setattr(prepare_module, "counting", counting)
    datasets.enable_progress_bars()
    data = prepare(config(write(PAIRS), dataset_num_proc=processes), make_tokenizer("marked"))
    drawn = with_column(data.train.select([2, 0]), "number", [1, 2])
    assert drawn["number"][:] == [1, 2]
    assert "examples/s" not in capfd.readouterr().err
    assert not datasets.are_progress_bars_disabled()
    assert done[-1] == len(PAIRS)


@pytest.mark.parametrize("processes", [None, 2])
def test_several_sources_of_several_formats(config, make_tokenizer, write, processes):
    alpaca = write([{"instruction": "i", "input": "x", "output": "o"}], "a.jsonl")
    text = write("plain words", "b.txt")
    tokenizer = make_tokenizer("marked")
    data = prepare(config([alpaca, text], dataset_num_proc=processes), tokenizer)
    assert [tokenizer.decode(row["input_ids"]) for row in data.train] == [
        "<|im_start|>user\ni\n\nx<|im_end|>\n<|im_start|>assistant\no<|im_end|>\n",
        "plain words<|im_end|>",
    ]
    assert data.report["mask"] == ("assistant turns, by the {% generation %} marks of the chat template; every token")


def test_packing(config, make_tokenizer, write):
    path, tokenizer = write(PAIRS), make_tokenizer("marked")
    loose, packed = (prepare(config(path, packing=packing, max_length=200), tokenizer) for packing in (False, True))
    documents = []
    for row in packed.train:
        assert len(row["input_ids"]) == len(row["labels"]) == sum(row["seq_lengths"]) <= 200
        stops = np.cumsum(row["seq_lengths"])
        for start, stop in zip(stops - row["seq_lengths"], stops, strict=True):
            assert row["labels"][start] == IGNORE_INDEX
            documents.append((row["input_ids"][start:stop], row["labels"][start:stop]))
    assert sorted(documents) == sorted((row["input_ids"], row["labels"]) for row in loose.train)
    report = packed.report["train"]
    assert (report["documents"], report["rows"]) == (30, len(packed.train))
    assert report["packing_efficiency"] == report["tokens"] / (len(packed.train) * 200) > 0.8
    assert report["trained_tokens"] == loose.report["train"]["trained_tokens"]


def test_overlong_rows_are_counted_and_reported(config, make_tokenizer, write):
    rows = [{"prompt": "p", "completion": "c" * n} for n in (5, 100)] + [{"prompt": "p" * 200, "completion": "c"}]
    path, tokenizer = write(rows), make_tokenizer("marked")
    cut = prepare(config(path, max_length=80), tokenizer)
    assert cut.report["train"]["truncated"] == 1
    assert cut.report["train"]["dropped"] == {"no trained tokens left after truncation": 1}
    assert [len(row["input_ids"]) for row in cut.train][1] == 80
    assert cut.report["train"]["length_histogram"]["edges"][-1] > 200
    assert notices_so_far()["truncated:training"].startswith("1 of 3 ")
    dropped = prepare(config(path, max_length=80, overlong="drop"), tokenizer)
    assert dropped.report["train"]["dropped"] == {"longer than max_length": 2}
    assert dropped.report["train"]["truncated"] == 0
    assert notices_so_far()["dropped:training documents:longer than max_length"].startswith("2 of 3 ")


@pytest.mark.parametrize("template", ["marked", None])
def test_empty_answers_are_counted_and_reported(config, make_tokenizer, write, template):
    tokenizer = make_tokenizer(template)
    empty, full = {"prompt": "p", "completion": " \n"}, {"prompt": "p", "completion": "c"}
    prepared = prepare(config(write([empty, full, empty])), tokenizer)
    assert prepared.report["train"]["empty_answers"] == 2
    assert notices_so_far()["empty:training"].startswith("2 of 3 ")
    with pytest.raises(DataError, match=r"(?s)1 training.*column_mapping"):
        prepare(config(write([empty])), tokenizer)
    assert prepare(config(write([full])), tokenizer).report["train"]["empty_answers"] == 0
    everything = prepare(config(write([empty]), completion_only_loss=False), tokenizer)
    assert everything.report["train"]["empty_answers"] == 0


def test_tool_calls_and_other_turns_count_as_answers(config, make_tokenizer, write):
    """Tool calls, and turns of which one is empty. Turns before a completion are not answers."""
    user, nothing = {"role": "user", "content": "q"}, {"role": "assistant", "content": ""}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    said_once = [user, {"role": "assistant", "content": "a"}, user, nothing]
    rows = [{"messages": [user, call]}, {"messages": said_once}]
    tokenizer = make_tokenizer("marked")
    assert prepare(config(write(rows)), tokenizer).report["train"]["empty_answers"] == 0
    rows = [{"prompt": said_once[:3], "completion": [nothing]}]
    with pytest.raises(DataError):
        prepare(config(write(rows)), tokenizer)


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        ([{"prompt": "p" * 99, "completion": "c"}], {"max_length": 20}, "(?s)max_length"),
        ([{"text": "t" * 99}], {"max_length": 20, "overlong": "drop"}, "(?s)overlong: truncate"),
        ([{"messages": [{"role": "user", "content": "hi"}]}], {}, "(?s)column_mapping"),
        ([{"text": ""}], {}, None),
    ],
)
def test_nothing_to_train_on_names_the_key(config, make_tokenizer, write, rows, keys, message):
    with pytest.raises(DataError, match=message):
        prepare(config(write(rows), **keys), make_tokenizer("marked"))


@pytest.mark.parametrize("size", [30, 0.999])
def test_a_split_that_leaves_nothing(config, make_tokenizer, write, size):
    with pytest.raises(ConfigError, match=r"out 30.*30"):
        prepare(config(write(PAIRS), eval_split_size=size), make_tokenizer("marked"))


def test_loss_on_everything_when_asked(config, make_tokenizer, write):
    tokenizer = make_tokenizer("marked")
    pairs = prepare(config(write(PAIRS[:1]), completion_only_loss=False), tokenizer)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    chats = prepare(config(write([{"messages": chat}]), assistant_only_loss=False), tokenizer)
    for data in (pairs, chats):
        row = data.train[0]
        assert row["labels"] == [IGNORE_INDEX, *row["input_ids"][1:]]
        assert data.report["mask"] == "every token"


ENDLESS = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


def test_eos_is_appended_where_the_template_writes_no_end(config, make_tokenizer, write):
    data = prepare(config(write(PAIRS)), make_tokenizer(ENDLESS))
    assert (data.report["eos_trained"], data.report["stop_tokens"]) == (True, ["<|im_end|>"])
    assert "eos-trained" not in notices_so_far()


def test_earlier_turn_without_an_end_is_reported(config, make_tokenizer, write):
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
    data = prepare(config(write([{"messages": turns}])), make_tokenizer(ENDLESS))
    assert not data.report["eos_trained"]
    assert "eos-trained" in notices_so_far()


def test_a_conversation_needs_a_template(config, make_tokenizer, write):
    path = write([{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}])
    with pytest.raises(DataError, match=r"data\.jsonl:1"):
        prepare(config(path), make_tokenizer(None))


def test_half_a_surrogate_is_named(config, make_tokenizer, write):
    path = write('{"text": "fine"}\n{"text": "half \\ud83d"}\n')
    with pytest.raises(DataError, match=r"data\.jsonl:2:"):
        prepare(config(path), make_tokenizer("marked"))


def test_a_refusal_inside_a_worker_still_names_the_row(config, make_tokenizer, write):
    strict = "{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}"
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    path = write([{"messages": turns[:2]}, {"messages": turns}])
    tokenizer = make_tokenizer(strict + make_tokenizer("marked").chat_template)
    with pytest.raises(DataError, match=r"data\.jsonl:2:"):
        prepare(config(path, dataset_num_proc=2), tokenizer)
