"""Rows of tasks: the columns that users have, their texts as transformers tokenizes them, and named errors."""

import json

import pytest

from halfbyte.config import RunConfig
from halfbyte.methods import method_of
from halfbyte.utils.errors import ConfigError, DataError
from tests.helpers.merge_runs import byte_tokenizer
from tests.helpers.task_runs import rows_of, write


def config(path, method, **keys):
    keys = {"max_length": 48, "device": "cpu", "per_device_train_batch_size": 2} | keys
    return RunConfig(model_name_or_path="tiny", dataset=str(path), method=method, **keys)


def prepared(tmp_path, method, rows, *, name="rows.jsonl", **keys):
    path = tmp_path / name
    if isinstance(rows, str):
        path.write_text(rows, encoding="utf-8")
    else:
        write(path, rows)
    chosen = config(path, method, **keys)
    data = method_of(chosen).ready(chosen, byte_tokenizer())
    method_of(chosen).check_training(chosen, data)
    return data


def read_tokens(row):
    """The tokens whose hidden states are read, by text."""
    tokenizer, begin, texts = byte_tokenizer(), 0, []
    for size in row["seq_lengths"]:
        labels = row["labels"][begin : begin + size]
        texts.append([tokenizer.decode([label]) for label in labels if label != -100])
        begin += size
    return texts


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"text": "ab"}, "ab"),
        ({"sentence": "ab"}, "ab"),
        ({"sentence1": "ab", "sentence2": "cd"}, "abcd"),
        ({"premise": "ab", "hypothesis": "cd"}, "abcd"),
    ],
)
def test_columns_of_texts(tmp_path, columns, text):
    data = prepared(tmp_path, "sequence_classification", [{**columns, "label": n % 2} for n in range(4)])
    assert byte_tokenizer().decode(data.train[0]["input_ids"]) == text
    assert read_tokens(data.train[0]) == [[text[-1]]]
    assert [row["target"] for row in data.train] == [[0.0], [1.0], [0.0], [1.0]]
    assert data.report["train"]["label_names"] == ["LABEL_0", "LABEL_1"]


def test_the_last_token_is_the_one_that_transformers_reads(tmp_path):
    """A text that ends with the pad token is read at the token before."""
    rows = [{"text": text, "label": text[:1]} for text in ("ab<pad>", "cd")]
    data = prepared(tmp_path, "sequence_classification", rows)
    assert [read_tokens(row) for row in data.train] == [[["b"]], [["d"]]]


def test_conversations_are_rendered_without_further_special_tokens(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    rows = [{"messages": [{"role": "user", "content": c}], "label": c} for c in "abab"]
    chosen = config(write(tmp_path / "rows.jsonl", rows), "sequence_classification")
    data = method_of(chosen).ready(chosen, tokenizer)
    assert tokenizer.decode(data.train[1]["input_ids"]) == "b\n"


def test_datasets_of_texts_and_conversations(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    chats = [{"messages": [{"role": "user", "content": c}], "label": c} for c in "ab"]
    texts, chats = (
        write(tmp_path / "a.jsonl", rows_of("sequence_classification", 2)),
        write(tmp_path / "b.jsonl", chats),
    )
    chosen = config(texts, "sequence_classification").model_copy(update={"dataset": [str(texts), str(chats)]})
    data = method_of(chosen).ready(chosen, tokenizer)
    assert [tokenizer.decode(row["input_ids"]) for row in list(data.train)[2:]] == ["a\n", "b\n"]
    assert data.report["train"]["label_names"] == ["a", "b", "bad", "good"]


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_numbers_as_labels(tmp_path, name):
    rows = [{"text": f"t{n}", "label": n % 3} for n in range(6)]
    if name.endswith("csv"):
        rows = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows)
    data = prepared(tmp_path, "sequence_classification", rows, name=name, labels=["low", "mid", "high"])
    assert [row["target"] for row in data.train] == [[0], [1], [2]] * 2
    assert data.report["train"]["labels"] == {"low": 2, "mid": 2, "high": 2}


def test_several_labels_of_a_text(tmp_path):
    names = [["a"], [], ["a", "c"], ["b"]]
    rows = [{"text": "t", "labels": row} for row in names]
    data = prepared(tmp_path, "sequence_classification", rows, problem_type="multi_label_classification")
    assert [row["target"] for row in data.train] == [[1, 0, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0]]
    rows = [{"text": "t", "labels": row} for row in ([0, 1, 0], [1.0, 1.0, 0.0])]
    data = prepared(tmp_path, "sequence_classification", rows, problem_type="multi_label_classification")
    assert [row["target"] for row in data.train] == [[0, 1, 0], [1, 1, 0]]


def test_labels_of_words_are_those_of_their_first_tokens(tmp_path):
    rows = [{"tokens": ["ab", "c", "def"], "ner_tags": ["O", "X", "O"]}, {"tokens": ["g"], "ner_tags": ["X"]}]
    data = prepared(tmp_path, "token_classification", rows)
    assert byte_tokenizer().decode(data.train[0]["input_ids"]) == "ab c def"
    at = [n for n, label in enumerate(data.train[0]["labels"]) if label != -100]
    assert at == [0, 3, 5]
    assert [row["target"] for row in data.train] == [[0, 1, 0], [1]]


def test_unlabelled_and_cut_words_are_not_trained(tmp_path):
    rows = [{"tokens": ["ab", "c" * 60, "d"], "tags": [1, -100, 0]}, {"tokens": ["a", "b"], "tags": [0, 1]}]
    data = prepared(tmp_path, "token_classification", rows)
    assert data.train[0]["target"] == [1]
    assert len(data.train[0]["input_ids"]) == 48
    assert data.report["train"]["truncated"] == 1


@pytest.mark.parametrize(("pooling", "read"), [("last", ["d"]), ("mean", list("abcd"))])
def test_anchors_with_positives_and_negatives(tmp_path, pooling, read):
    rows = [{"query": "cd", "positive": "abcd", "negative": "x", "negative_2": "y"}] * 2
    data = prepared(tmp_path, "embedding", rows, pooling=pooling, document_prompt="", query_prompt="ab")
    assert data.train[0]["texts"] == [4]
    assert read_tokens(data.train[0])[:2] == [read, read]
    listed = [
        {"anchor": "a", "positive": "b", "negatives": ["x", "y", "z"]},
        {"anchor": "a", "positive": "b", "negatives": ["x"]},
    ]
    data = prepared(tmp_path, "embedding", listed)
    assert data.train["texts"][:] == [[5], [3]]
    assert data.answers == 5


def test_documents_of_a_query_are_joined(tmp_path):
    rows = [{"query": q, "document": d, "score": s} for q, d, s in (("a", "x", 1), ("b", "y", 0), ("a", "z", 0.5))]
    data = prepared(tmp_path, "reranker", rows, query_prompt="q", document_prompt="-")
    assert data.train["texts"][:] == [[2], [1]]
    assert data.train[0]["target"] == [1, 0.5]
    assert byte_tokenizer().decode(data.train[0]["input_ids"]) == "qa-xqa-z"
    rows = [{"query": "a", "positive": "x", "negatives": ["y", "z"]}]
    assert prepared(tmp_path, "reranker", rows).train[0]["target"] == [1, 0, 0]


def rows_with(task, **changed):
    rows = rows_of(task, 4)
    return [*rows[:3], {**rows[3], **changed}]


@pytest.mark.parametrize(
    ("method", "rows", "keys", "match"),
    [
        ("sequence_classification", rows_with("sequence_classification", label=7), {}, "rows.jsonl:4"),
        ("sequence_classification", rows_with("sequence_classification", label=None), {}, "rows.jsonl:4"),
        ("sequence_classification", rows_with("sequence_classification", label=["good"]), {}, "rows.jsonl:4"),
        ("sequence_classification", rows_with("sequence_classification", text=3), {}, "rows.jsonl:4"),
        ("sequence_classification", rows_of("sequence_classification", 4)[::2], {}, "bad"),
        ("sequence_classification", [{"text": "t", "label": n / 2} for n in range(3)], {}, "0.5"),
        ("sequence_classification", [{"text": "t", "label": "x"}] * 2, {"problem_type": "regression"}, "rows.jsonl:1"),
        ("sequence_classification", rows_of("sequence_classification", 4), {"labels": ["bad", "fine"]}, "good"),
        (
            "sequence_classification",
            [{"text": "t", "label": n} for n in (0, 3)],
            {"labels": ["a", "b"]},
            "rows.jsonl:2",
        ),
        ("sequence_classification", rows_of("embedding", 2), {}, "sequence_classification"),
        ("token_classification", rows_with("token_classification", ner_tags=["O"]), {}, "rows.jsonl:4"),
        ("token_classification", rows_with("token_classification", ner_tags=[1, 2, 3, 4]), {}, "rows.jsonl:4"),
        ("token_classification", rows_with("token_classification", tokens="text"), {}, "rows.jsonl:4"),
        ("embedding", rows_with("embedding", negative=None), {}, "rows.jsonl:4"),
        (
            "embedding",
            [{"anchor": "a", "positive": "b"}] * 4,
            {"per_device_train_batch_size": 1},
            "per_device_train_batch_size",
        ),
        ("embedding", rows_of("embedding", 2), {"loss_type": "cosent"}, "loss_type: cosent"),
        ("embedding", [{"sentence1": "a", "sentence2": "b", "score": 3}] * 2, {}, "multiple_negatives_ranking"),
        (
            "embedding",
            [{"sentence1": "a", "sentence2": "b", "score": 3}] * 2,
            {"loss_type": "cosine_similarity"},
            "rows.jsonl:1",
        ),
        (
            "embedding",
            [{"sentence1": "a", "sentence2": "b", "score": 1}] * 2,
            {"loss_type": "cosent"},
            "same score",
        ),
        ("reranker", rows_with("reranker", labels=[0, 5]), {}, "rows.jsonl:4"),
        ("reranker", rows_with("reranker", labels=[0]), {}, "rows.jsonl:4"),
        ("reranker", rows_with("reranker", labels=[0, "x"]), {}, "rows.jsonl:4"),
        ("reranker", [{"query": "a", "document": "b", "score": 1}], {"loss_type": "ranknet"}, "same score"),
    ],
)
def test_wrong_rows_are_named(tmp_path, method, rows, keys, match):
    with pytest.raises(DataError, match=match):
        prepared(tmp_path, method, rows, **keys)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.5, 10**12])
def test_numbers_that_are_no_labels(tmp_path, value):
    rows = [{"text": "a", "label": 1.0}, {"text": "b", "label": value}]
    with pytest.raises(DataError, match=":2"):
        prepared(tmp_path, "sequence_classification", rows)


def test_labels_that_training_has_not_seen(tmp_path):
    held_out = write(tmp_path / "held.jsonl", [{"text": "t", "label": "other"}])
    with pytest.raises(DataError, match=r"held\.jsonl:1"):
        prepared(tmp_path, "sequence_classification", rows_of("sequence_classification", 4), eval_dataset=str(held_out))


def test_a_wrong_number_of_labels(tmp_path):
    with pytest.raises(ConfigError, match="num_labels"):
        prepared(tmp_path, "sequence_classification", rows_of("sequence_classification", 4), num_labels=3)
    rows = [{"text": "t", "label": n % 2} for n in range(4)]
    data = prepared(tmp_path, "sequence_classification", rows, num_labels=3)
    assert len(data.report["train"]["label_names"]) == 3


def test_a_packed_row_keeps_its_texts_together(tmp_path):
    data = prepared(tmp_path, "embedding", rows_of("embedding", 8), packing=True)
    assert len(data.train) < 8
    row = data.train[0]
    assert sum(row["texts"]) == len(row["seq_lengths"])
    assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) <= 3 * 48
    assert json.dumps(row)


def test_a_conversation_with_an_image_is_refused(tmp_path):
    turns = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    rows = [{"messages": turns, "label": n % 2} for n in range(4)]
    with pytest.raises(DataError, match=r"rows\.jsonl:1"):
        prepared(tmp_path, "sequence_classification", rows)
