"""Answers by step (`sample_steps`) and losses of single documents (`row_losses`): contents, resume, refusals."""

import json
import shutil

import pytest

from halfbyte.config import load_config
from halfbyte.train.run import train
from halfbyte.utils.errors import ConfigError
from tests.helpers.sft_runs import keys, run

WATCHED = {"sample_steps": 2, "row_losses": True, "eval_steps": 4}


def lines(output, name):
    return [json.loads(line) for line in (output / name).read_text().splitlines()]


def numbers(output, kind="train"):
    return [
        {key: record[key] for key in ("step", "loss", "grad_norm") if key in record}
        for record in lines(output, "metrics.jsonl")
        if record["kind"] == kind
    ]


@pytest.fixture(scope="module")
def watched(place, tmp_path_factory):
    return run(place, tmp_path_factory.mktemp("watched") / "out", **WATCHED).output_dir


def test_answers_by_step_begin_and_end_as_generations(watched):
    samples = lines(watched, "samples.jsonl")
    assert [record["step"] for record in samples] == [0, 0, 2, 2, 4, 4, 6, 6]
    generations = json.loads((watched / "generations.json").read_text())
    for at, name in ((slice(0, 2), "before"), (slice(6, 8), "after")):
        assert [record["answer"] for record in samples[at]] == [entry[name] for entry in generations]
        assert [record["prompt"] for record in samples[at]] == [entry["prompt"] for entry in generations]


def test_training_keeps_its_bytes(place, watched, tmp_path):
    output = run(place, tmp_path / "out", eval_steps=4).output_dir
    assert not (output / "samples.jsonl").exists()
    assert not (output / "row_losses.jsonl").exists()
    for kind in ("train", "eval"):
        assert numbers(output, kind) == numbers(watched, kind)
    name = "adapter/adapter_model.safetensors"
    assert (output / name).read_bytes() == (watched / name).read_bytes()


def test_a_resumed_run_writes_the_same_files(place, watched, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(watched, output)
    for name in ("checkpoint-6", "adapter"):
        shutil.rmtree(output / name)
    train(load_config(None, keys(place, output, **WATCHED)), resume=True)
    for name in ("samples.jsonl", "row_losses.jsonl"):
        assert (output / name).read_bytes() == (watched / name).read_bytes()
    assert numbers(output) == numbers(watched)


def check_losses(output):
    """Compare the token-weighted means of held-out documents with the evaluations before and after training."""
    documents = lines(output, "row_losses.jsonl")
    held_out = [document for document in documents if document["split"] == "eval"]
    evaluations = numbers(output, "eval")
    for moment, evaluation in (("start", evaluations[0]), ("end", evaluations[-1])):
        total = sum(document[moment] * document["trained_tokens"] for document in held_out)
        tokens = sum(document["trained_tokens"] for document in held_out)
        assert total / tokens == pytest.approx(evaluation["loss"], rel=1e-5)
    return documents


def test_losses_of_documents_add_up_to_the_evaluations(watched):
    documents = check_losses(watched)
    assert [document["split"] for document in documents] == ["train"] * 20 + ["eval"] * 4
    assert len({document["hash"] for document in documents}) == 24
    first = documents[0]
    assert [is_trained for is_trained, _ in first["text"]] == [False, True]
    assert "what is" in first["text"][0][1]
    assert "it is" in first["text"][1][1]


def test_packed_rows_are_measured_document_by_document(place, watched, tmp_path):
    output = run(place, tmp_path / "out", packing=True, row_losses=True, max_steps=2, lora_dropout=0.0).output_dir
    documents = check_losses(output)
    assert sum(document["split"] == "eval" for document in documents) == 4
    whole = {document["hash"]: document["start"] for document in lines(watched, "row_losses.jsonl")}
    assert all(document["start"] == pytest.approx(whole[document["hash"]], rel=1e-4) for document in documents)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"sample_steps": 0}, "sample_steps"),
        ({"sample_steps": 2, "sample_prompts": 0}, "sample_steps"),
        ({"sample_steps": 2, "method": "reward"}, "sample_steps"),
        ({"row_losses": True, "method": "kto"}, "row_losses"),
        ({"row_losses": True, "method": "embedding"}, "row_losses"),
        ({"row_losses": True, "method": "grpo", "reward_funcs": ["exact"]}, "row_losses"),
        ({"row_losses": True, "method": "dpo", "packing": True}, "row_losses"),
    ],
)
def test_keys_without_effect_are_refused(place, tmp_path, changed, key):
    with pytest.raises(ConfigError, match=key):
        load_config(None, keys(place, tmp_path / "out", **changed))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "orpo", "kto", "grpo"])
def test_other_methods_answer_by_step_and_keep_their_bytes(place, tmp_path, method):
    """Losses of documents too, where a loss belongs to one."""
    rows = [json.loads(line) for line in (place / "data.jsonl").read_text().splitlines()]
    data = {
        "dpo": [{**row, "chosen": row["completion"], "rejected": " no"} for row in rows],
        "kto": [{**row, "label": at % 2 == 0} for at, row in enumerate(rows)],
        "grpo": [{"prompt": row["prompt"], "answer": row["completion"]} for row in rows],
    }
    chosen = data.get({"orpo": "dpo"}.get(method, method))
    if method in ("dpo", "orpo"):
        for row in chosen:
            del row["completion"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    changed = {"dataset": str(path), "method": method, "max_steps": 4}
    if method == "grpo":
        changed |= {"reward_funcs": ["repetition"], "num_generations": 2, "max_completion_length": 4}
    watched = {"sample_steps": 2} | ({"row_losses": True} if method in ("dpo", "orpo") else {})
    plain = run(place, tmp_path / "plain", **changed).output_dir
    output = run(place, tmp_path / "watched", **changed, **watched).output_dir
    assert numbers(output) == numbers(plain)
    assert numbers(output, "eval") == numbers(plain, "eval")
    assert {line["step"] for line in lines(output, "samples.jsonl")} == {0, 2, 4}
    if "row_losses" in watched:
        documents = [line for line in lines(output, "row_losses.jsonl") if line["split"] == "eval"]
        mean = sum(document["end"] for document in documents) / len(documents)
        if method == "dpo":  # a mean over pairs
            assert mean == pytest.approx(numbers(output, "eval")[-1]["loss"], rel=1e-4)
