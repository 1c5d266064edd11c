"""A column of rows that is not text, declared by the tests alone: an array per row, which the model's forward receives.

`tests/parallel/test_column_ranks.py` trains it on several ranks.
"""

import json
import shutil

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from halfbyte.data.collate import PackedCollator, make_collator
from halfbyte.data.prepare import prepare
from halfbyte.data.tables import digest_of_rows
from halfbyte.optim import trained_parameters
from halfbyte.train.stepper import GraphedStepper
from halfbyte.utils.errors import DataError, HalfbyteError
from tests.helpers.graph_stand_in import StandIn
from tests.helpers.pixel_columns import declare, example_rows, run, write_pixel_place, write_rows
from tests.helpers.rank_runs import configured


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    declare(monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_pixel_place(tmp_path_factory.mktemp("place"))


def weights(output):
    return (output / "adapter/adapter_model.safetensors").read_bytes()


def test_the_forward_receives_the_arrays_of_its_documents_in_every_layout(place, tmp_path):
    """A step over all rows has one loss, however rows are laid out; without the arrays it has another."""
    layouts = {"padded": {}, "packed": {"packing": True, "max_length": 128}, "flat": {"padding_free": True}}
    losses = [run(place, tmp_path / name, max_steps=2, logging_steps=1, **keys) for name, keys in layouts.items()]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    plain = write_rows(tmp_path / "plain.jsonl", [{"text": row["text"]} for row in example_rows()])
    assert run(place, tmp_path / "plain", dataset=str(plain), max_steps=1)[0] != pytest.approx(losses[0][0], rel=1e-4)


@pytest.mark.slow
def test_a_resumed_run_has_equal_bytes_and_refuses_other_arrays(place, tmp_path):
    rows = example_rows()
    data = write_rows(tmp_path / "data.jsonl", rows)
    keys = {"dataset": str(data), "packing": True, "max_length": 64, "per_device_train_batch_size": 4}
    keys |= {"max_steps": 4, "save_steps": 2, "save_total_limit": None}
    run(place, tmp_path / "out", **keys)
    expected = weights(tmp_path / "out")
    for name in ("adapter", "checkpoint-4"):
        shutil.rmtree(tmp_path / "out" / name)
    run(place, tmp_path / "out", resume=str(tmp_path / "out/checkpoint-2"), **keys)
    assert weights(tmp_path / "out") == expected
    rows[5]["pixels"][1][2] += 1
    write_rows(data, rows)
    with pytest.raises(HalfbyteError, match="dataset"):
        run(place, tmp_path / "out", resume=str(tmp_path / "out/checkpoint-2"), **keys)


@pytest.mark.slow
def test_graphs_replay_steps_with_the_arrays_of_each_batch(place, tmp_path, monkeypatch):
    monkeypatch.setattr("halfbyte.data.collate.rounds_widths", lambda device: True)
    keys = {"packing": True, "max_length": 64, "per_device_train_batch_size": 2, "max_steps": 9, "logging_steps": 1}
    keys["optim"] = "adamw_torch"  # whose steps are not captured
    eager = run(place, tmp_path / "eager", **keys)
    stand_in, replayed = StandIn().install(monkeypatch), []
    capture = stand_in.captured

    def captured(step, batch, stream, pool):
        graph = capture(step, batch, stream, pool)
        replayed.append(batch.keys())
        return graph

    def graphed(run, model, graphs):
        stepper = GraphedStepper(list(trained_parameters(model).values()))
        stand_in.graphs, stand_in.gradients = stepper.graphs, stepper.graphs.gradients
        return stepper

    monkeypatch.setattr("halfbyte.train.graph._Captured", captured)
    monkeypatch.setattr("halfbyte.train.setup.make_stepper", graphed)
    assert run(place, tmp_path / "graphed", **keys) == pytest.approx(eager, rel=1e-6)
    assert any("pixels" in columns for columns in replayed)


@pytest.mark.parametrize("name", ["arrow", "csv", "stream"])
def test_files_of_every_kind_give_the_same_arrays(name, place, tmp_path):
    rows = example_rows()
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    keys = {"eval_split_size": 0, "packing": True}
    expected = prepare(configured(place, tmp_path, **keys), tokenizer).train
    if name == "csv":
        path = tmp_path / "data.csv"
        datasets.Dataset.from_list([{**row, "pixels": json.dumps(row["pixels"])} for row in rows]).to_csv(path)
    else:
        path = tmp_path / "saved"
        datasets.Dataset.from_list(rows).save_to_disk(path)
    config = configured(place, tmp_path, dataset=str(path), **keys)
    assert digest_of_rows(prepare(config, tokenizer).train) == digest_of_rows(expected)


def test_packed_rows_keep_ragged_arrays_in_the_order_of_their_documents(place, tmp_path):
    """Rows without an entry have none, and padding has the declared value."""
    rows = example_rows(patches=True)
    del rows[4]["patches"]
    path = write_rows(tmp_path / "data.jsonl", rows)
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    config = configured(place, tmp_path, dataset=str(path), packing=True, eval_split_size=3, padding_free=False)
    prepared = prepare(config, tokenizer)
    collate = make_collator(config, tokenizer)
    for split in (prepared.train, prepared.eval):
        batch = collate(list(split))
        text = tokenizer.decode(batch["input_ids"].flatten())
        numbers = [int(part.split("?")[0]) for part in text.split("what is ")[1:]]
        assert batch["patches"].tolist() == [patch for number in numbers for patch in rows[number].get("patches", [])]
        pixels = np.array([rows[number]["pixels"] for number in numbers], dtype=np.float32)
        np.testing.assert_array_equal(batch["pixels"].numpy(), pixels)
    rounded = PackedCollator(0, rounded=True)(list(prepared.train))
    count = sum(len(array) for row in prepared.train for array in row["patches"]) // 16
    assert rounded["patches"].shape[0] > count
    assert (rounded["patches"][count:] == -1).all()


@pytest.mark.parametrize(
    ("pixels", "problem"),
    [([[1, 2, 3]], "another shape"), ([[1, 2, "a"], [1, 2, 3]], "a text"), (None, "nothing"),
     ([[1, 2, float("nan")], [1, 2, 3]], "no finite number"), ([[1, 2], [1, 2, 3]], "lists of unequal lengths")],
)  # fmt: skip
def test_a_row_without_its_array_is_named(pixels, problem, place, tmp_path):
    rows = example_rows()
    rows[2]["pixels"] = pixels
    path = write_rows(tmp_path / "data.jsonl", rows)
    with pytest.raises(DataError, match=r"data\.jsonl:3.*'pixels'"):
        prepare(configured(place, tmp_path, dataset=str(path)), AutoTokenizer.from_pretrained(place / "model"))
