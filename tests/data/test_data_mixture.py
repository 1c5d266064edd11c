"""Mixtures: exact shares of several datasets, by seed, before packing, for every method's rows."""

import json
from collections import Counter

import numpy as np
import pytest

from halfbyte.config import RunConfig
from halfbyte.data.mixture import apportion, draw_rows, shares_of
from halfbyte.data.prepare import prepare
from halfbyte.methods import method_of
from halfbyte.utils.errors import ConfigError

SIZES = (30, 8, 50)
ORIGINS = np.repeat(np.arange(3), SIZES)


def mixing(*weights, **keys):
    entries = zip("abc", weights, strict=False)
    dataset = [{"path": name} | ({} if weight is None else {"weight": weight}) for name, weight in entries]
    return RunConfig(model_name_or_path="m", dataset=dataset, **keys)


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        (mixing(None, None, None), SIZES),
        (mixing(2, 1, 1), (44, 22, 22)),
        (mixing(1, 0, 0), (88, 0, 0)),
        (mixing(None, None, None, mixing="interleave"), (8, 8, 8)),
        (mixing(None, None, None, mixing="interleave", stopping="all"), (50, 50, 50)),
        (mixing(2, 1, 1, mixing="interleave"), (15, 8, 7)),
        (mixing(0.5, 0, 0.25, mixing="interleave", stopping="all"), (100, 0, 50)),
        (mixing(None, None, None, mixing="temperature", mixing_temperature=1.0, stopping="all"), SIZES),
    ],
)
def test_an_epoch_has_each_datasets_share_up_to_one_row(config, counts):
    drawn = Counter(ORIGINS[draw_rows(config, ORIGINS)].tolist())
    assert all(abs(drawn[number] - count) <= 1 for number, count in enumerate(counts))
    assert all(count or not drawn[number] for number, count in enumerate(counts))


def test_a_higher_temperature_is_more_even():
    def first_share(temperature):
        return float(shares_of(mixing(None, None, mixing="temperature", mixing_temperature=temperature), (90, 10))[0])

    assert first_share(1.0) == pytest.approx(0.9)
    assert first_share(2.0) == pytest.approx(0.75)
    assert first_share(1e6) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("keys", [{}, {"mixing": "interleave"}, {"mixing": "interleave", "stopping": "all"}])
def test_rows_repeat_evenly_and_depend_on_the_seed_alone(keys):
    config = mixing(3, 1, 1, **keys)
    drawn = draw_rows(config, ORIGINS)
    assert np.array_equal(drawn, draw_rows(config, ORIGINS))
    assert not np.array_equal(drawn, draw_rows(config.model_copy(update={"seed": 7}), ORIGINS))
    for number in range(3):
        repeats = np.bincount(drawn[ORIGINS[drawn] == number], minlength=len(ORIGINS))[number == ORIGINS]
        assert repeats.max() - repeats.min() <= 1


def test_every_part_of_an_interleaved_epoch_has_the_shares():
    origins = np.repeat([0, 1], [600, 300])
    order = origins[draw_rows(mixing(1, 1, mixing="interleave"), origins)]
    assert all(abs(int(order[:stop].sum()) - stop / 2) <= 1 for stop in range(len(order)))


def test_apportioned_numbers_add_up():
    shares = shares_of(mixing(1, 1, 1, mixing="interleave"))
    assert apportion(10, shares) == [4, 3, 3]
    assert [sum(apportion(total, shares)) for total in range(20)] == list(range(20))


@pytest.mark.parametrize(
    "config", [mixing(1, 1), mixing(1, 1e-6, mixing="interleave", stopping="all")], ids=["without rows", "endless"]
)
def test_a_mixture_that_cannot_be_drawn_names_its_key(config):
    origins = np.zeros(5, dtype=int) if config.mixing == "concat" else np.array([0, 1])
    with pytest.raises(ConfigError, match="dataset"):
        draw_rows(config, origins)


CHATS = [{"prompt": f"q{i}", "completion": f"a{i}" + "x" * (i % 5)} for i in range(12)]
SAMPLED = {"method": "grpo", "reward_funcs": ["exact"], "per_device_train_batch_size": 8, "max_completion_length": 8}
PAIRS = [{"prompt": f"q{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(12)]


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        (CHATS, {}),
        (CHATS, {"packing": True}),
        (PAIRS, {"method": "dpo"}),
        (PAIRS, {"method": "kto"}),
        ([{"prompt": row["prompt"]} for row in CHATS], SAMPLED),
    ],
)
def test_every_method_draws_shares_and_reports_them(make_tokenizer, config, write, rows, keys):
    large, small = write(rows, "large.jsonl"), write(rows[:3], "small.jsonl")
    dataset = [{"path": large, "weight": 1}, {"path": small, "weight": 3}]
    run_config = config(dataset, mixing="interleave", stopping="all", max_length=64, **keys)
    report = method_of(run_config).prepare(run_config, make_tokenizer("plain")).report
    first, second = report["train"]["mixture"]
    assert [first["path"], second["path"]] == [large, small]
    assert second["drawn"] == 3 * first["drawn"]
    assert (first["share"], second["share"]) == (0.25, 0.75)
    assert report["train"]["documents"] == first["drawn"] + second["drawn"]
    assert report["train"]["truncated"] == 0
    json.dumps(report)


def test_held_out_rows_are_never_drawn(make_tokenizer, config, write):
    large, small = write(CHATS, "large.jsonl"), write([{**row, "prompt": "z"} for row in CHATS[:4]], "small.jsonl")
    dataset = [{"path": large, "weight": 1}, {"path": small, "weight": 1}]
    data = prepare(config(dataset, mixing="interleave", stopping="all", eval_split_size=6), make_tokenizer("plain"))
    held_out = {tuple(row["input_ids"]) for row in data.eval}
    assert not held_out & {tuple(row["input_ids"]) for row in data.train}


def test_one_dataset_and_datasets_without_weights_are_prepared_as_before(make_tokenizer, config, write):
    first, second = write(CHATS[:5], "one.jsonl"), write(CHATS[5:], "two.jsonl")
    single = prepare(config(write(CHATS, "all.jsonl")), make_tokenizer("plain"))
    split = prepare(config([first, second]), make_tokenizer("plain"))
    assert single.train[:] == split.train[:]
    assert "mixture" not in single.report["train"]
    assert [entry["drawn"] for entry in split.report["train"]["mixture"]] == [5, 7]


def test_max_samples_limits_each_dataset_from_its_start(make_tokenizer, config, write):
    first, second = write(CHATS, "one.jsonl"), write(CHATS, "two.jsonl")
    limited = config([first, {"path": second, "max_samples": 5}], max_samples=2, eval_dataset=first)
    data = prepare(limited, make_tokenizer("plain"))
    assert [source["rows"] for source in data.report["sources"]] == [2, 5, 2]


def test_an_entry_may_name_its_split(make_tokenizer, config, tmp_path):
    for name, rows in (("train", CHATS[:3]), ("test", CHATS[3:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepare(config([{"path": str(tmp_path), "split": "test"}]), make_tokenizer("plain"))
    assert data.report["train"]["documents"] == 9


TURNS = [{"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")]


@pytest.mark.parametrize("template", ["plain", "marked"])
@pytest.mark.parametrize(
    ("keys", "turns", "trained"),
    [
        ({}, TURNS, ["assistant 0", "assistant 1", "assistant 2"]),
        ({"train_on": "last"}, TURNS, ["assistant 2"]),
        ({"train_on": "last"}, TURNS[:-1], ["assistant 1"]),
        ({"train_on": "last"}, TURNS[:2], ["assistant 0"]),
    ],
)
def test_train_on_last_masks_the_earlier_turns(make_tokenizer, config, write, template, keys, turns, trained):
    tokenizer = make_tokenizer(template)
    data = prepare(config(write([{"messages": turns}]), **keys), tokenizer)
    row = data.train[0]
    assert tokenizer.decode([label for label in row["labels"] if label != -100]).split("<|im_end|>")[:-1] == trained
    assert "assistant 0" in tokenizer.decode(row["input_ids"])
