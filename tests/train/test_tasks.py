"""Runs of tasks: what other tools compute from their files, resume, evaluation, and commands that refuse them."""

import json

import pytest
import torch
from peft import AutoPeftModelForFeatureExtraction, PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.config import load_config
from halfbyte.evaluation.held_out import evaluate
from halfbyte.export.merge import merge
from halfbyte.loading.load import load_model
from halfbyte.methods import method_of
from halfbyte.methods.answers import pooled, score
from halfbyte.runs.saved import load_saved
from halfbyte.train.run import train
from halfbyte.utils.errors import CheckpointError, ConfigError, HalfbyteError, ModelError
from tests.helpers.task_runs import TASKS, config_of, rows_of, run, save_inputs, write

AUTO = {"token_classification": AutoModelForTokenClassification}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return save_inputs(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory):
    """A run of each task, made when a test first asks for it."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def of(task):
        if task not in made:
            made[task] = run(inputs, folder / task, task, eval_split_size=8)
        return made[task]

    return of


def records(output, kind):
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def texts_of(folder, task):
    """Some rows' texts as a plain tokenizer reads them."""
    tokenizer, rows = AutoTokenizer.from_pretrained(folder), rows_of(task, 3)
    if task == "sequence_classification":
        texts = [[row["text"]] for row in rows]
    elif task == "token_classification":
        texts = [[" ".join(row["tokens"])] for row in rows]
    elif task == "embedding":
        texts = [[row[name]] for row in rows for name in ("anchor", "positive", "negative")]
    else:
        texts = [[row["query"], document] for row in rows for document in row["documents"]]
    return tokenizer(*map(list, zip(*texts, strict=True)), padding=True, return_tensors="pt")


@torch.no_grad()
def own_outputs(output, task):
    """halfbyte's outputs for the same texts: [texts, labels], [labelled words, labels], or [texts, width]; the rows."""
    saved = load_saved(str(output), scores=True)
    rows = write(output.parent / f"{task}-rows.jsonl", rows_of(task, 3))
    config = saved.config.model_copy(update={"dataset": str(rows), "eval_split_size": 0.0})
    method = method_of(config)
    data = method.ready(config, saved.tokenizer).train
    batch = method.collator(config, saved.tokenizer)(list(data))
    return pooled(saved.model, batch) if task == "embedding" else score(saved.model, batch, "at"), data


@torch.no_grad()
def their_outputs(model, inputs, task, data):
    """The outputs of transformers' class; for words at their first tokens, for embeddings the last token's."""
    model.eval()
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    if task == "embedding":
        hidden, ends = model(**inputs).last_hidden_state, inputs["attention_mask"].sum(1) - 1
        return hidden[torch.arange(len(ends)), ends]
    logits = model(**inputs).logits
    if task != "token_classification":
        return logits
    at = [[n for n, label in enumerate(row["labels"]) if label != -100] for row in data]
    return torch.cat([logits[row, tokens] for row, tokens in enumerate(at)])


def base_of(inputs, adapter, task):
    """The base as a user loads it for PEFT, with the config that is beside the adapter."""
    auto = AutoModel if task == "embedding" else AUTO.get(task, AutoModelForSequenceClassification)
    config = None if task == "embedding" else AutoConfig.from_pretrained(adapter)
    return auto.from_pretrained(inputs / "model", config=config, dtype=torch.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", TASKS)
def test_peft_and_transformers_compute_the_trained_outputs(inputs, runs, tmp_path, task):
    output = runs(task)
    expected, data = own_outputs(output, task)
    texts = texts_of(output / "adapter", task)
    theirs = PeftModel.from_pretrained(base_of(inputs, output / "adapter", task), output / "adapter")
    torch.testing.assert_close(their_outputs(theirs, texts, task, data), expected, **TOLERANCE)
    with torch.no_grad(), theirs.disable_adapter():  # the adapter matters
        assert not torch.allclose(their_outputs(theirs, texts, task, data), expected, atol=1e-2)

    merged = tmp_path / "merged"
    merge(output, merged)
    own = load_model(str(merged), load_in_4bit=False, dtype="float32", device="cpu")
    auto = AutoModel if task == "embedding" else AUTO.get(task, AutoModelForSequenceClassification)
    theirs, info = auto.from_pretrained(merged, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    found = their_outputs(theirs, texts, task, data)
    own = own.base_model if task == "embedding" else own
    torch.testing.assert_close(their_outputs(own, texts, task, data), found, **TOLERANCE)
    largest = float(expected.abs().max())
    assert float((found - expected).abs().max()) < 0.02 * largest  # 16 bits
    labels = {"sequence_classification": ["bad", "good"], "token_classification": ["B-BAD", "B-GOOD", "O"]}
    if task in labels:
        named = json.loads((merged / "config.json").read_text())
        assert named["id2label"] == {str(n): name for n, name in enumerate(labels[task])}
        assert named["label2id"] == {name: n for n, name in enumerate(labels[task])}
        assert theirs.config.num_labels == len(labels[task])


def test_an_embedding_adapter_is_for_the_backbone(inputs, runs):
    """AutoPeftModel finds the base by itself, and no tensor of the file is left over."""
    output = runs("embedding")
    names = load_file(output / "adapter" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.layers.") for name in names)
    model = AutoPeftModelForFeatureExtraction.from_pretrained(output / "adapter", dtype=torch.float32)
    texts = texts_of(output / "adapter", "embedding")
    expected, data = own_outputs(output, "embedding")
    torch.testing.assert_close(their_outputs(model, texts, "embedding", data), expected, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("pooling", "normalize"), [("last", True), ("mean", False)])
def test_sentence_transformers_loads_both_folders(inputs, tmp_path, pooling, normalize):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    keys = {"pooling": pooling, "normalize_embeddings": normalize, "query_prompt": "q: ", "document_prompt": "d: "}
    output = run(inputs, tmp_path / "run", "embedding", **keys)
    expected, _ = own_outputs(output, "embedding")
    expected = torch.nn.functional.normalize(expected, dim=-1) if normalize else expected
    merge(output, tmp_path / "merged")
    rows = rows_of("embedding", 3)
    for folder, tolerance in ((output / "adapter", TOLERANCE), (tmp_path / "merged", {"rtol": 0.05, "atol": 0.05})):
        model = sentence_transformers.SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
        queries = torch.tensor(model.encode([row["anchor"] for row in rows], prompt_name="query"))
        documents = model.encode(
            [row[name] for row in rows for name in ("positive", "negative")], prompt_name="document"
        )
        torch.testing.assert_close(queries, expected[::3], **tolerance)
        assert expected[1:3].shape == torch.tensor(documents)[:2].shape
        torch.testing.assert_close(torch.tensor(documents)[:2], expected[1:3], **tolerance)
        assert model.max_seq_length == 64


@pytest.mark.slow
def test_a_cross_encoder_loads_the_merged_reranker(inputs, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    for loss in ("binary_cross_entropy", "listnet"):
        output = run(inputs, tmp_path / loss, "reranker", loss_type=loss)
        merge(output, tmp_path / f"{loss}-merged")
        own = load_model(str(tmp_path / f"{loss}-merged"), load_in_4bit=False, dtype="float32", device="cpu")
        texts = texts_of(output / "adapter", "reranker")
        expected = their_outputs(own, texts, "reranker", None)[:, 0]
        expected = expected.sigmoid() if loss == "binary_cross_entropy" else expected
        path = str(tmp_path / f"{loss}-merged")
        model = sentence_transformers.CrossEncoder(path, device="cpu", model_kwargs={"dtype": "float32"})
        pairs = [(row["query"], document) for row in rows_of("reranker", 3) for document in row["documents"]]
        torch.testing.assert_close(torch.tensor(model.predict(pairs)), expected, **TOLERANCE)


NUMBERS = {
    "sequence_classification": {"accuracy", "f1"},
    "token_classification": {"accuracy", "f1"},
    "embedding": {"accuracy", "ndcg_at_10", "recall_at_1", "recall_at_10"},
    "reranker": {"ndcg_at_10", "recall_at_1", "recall_at_10"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", TASKS)
def test_evaluations_have_the_numbers_of_the_task(inputs, runs, task):
    output = runs(task)
    last = records(output, "eval")[-1]
    assert NUMBERS[task] <= last.keys()
    assert all(0 <= last[name] <= 1 for name in NUMBERS[task])
    assert "macro F1" in (output / "report.html").read_text() or task not in (
        "sequence_classification",
        "token_classification",
    )
    resolved = load_config(output / "config.resolved.yaml")
    held_out = write(output.parent / f"{task}-held.jsonl", rows_of(task, 4, seed=9)[1::2])  # one label only
    numbers = evaluate(str(output), str(held_out)).numbers
    halves = evaluate(str(output), str(held_out), ["per_device_eval_batch_size=1"]).numbers
    same = NUMBERS[task] - ({"accuracy"} if task == "embedding" else set())  # accuracy within a batch
    assert {name: halves[name] for name in same} == pytest.approx({name: numbers[name] for name in same})
    assert resolved.method == task


@pytest.mark.sampled(4)
@pytest.mark.parametrize("task", TASKS)
def test_a_resumed_run_has_equal_bytes(inputs, runs, tmp_path, task):
    """The labels come from the rows again."""
    whole = runs(task)
    part = run(inputs, tmp_path / "part", task, eval_split_size=8, max_steps=2, lr_scheduler_type="constant")
    full = run(inputs, tmp_path / "full", task, eval_split_size=8, lr_scheduler_type="constant")
    train(config_of(inputs, part, task, eval_split_size=8, lr_scheduler_type="constant"), resume=True)
    saved, expected = (load_file(output / "adapter" / "adapter_model.safetensors") for output in (part, full))
    assert saved.keys() == expected.keys() == load_file(whole / "adapter" / "adapter_model.safetensors").keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("layout", ["packing", "padding_free"])
def test_layouts_train_the_same_steps(inputs, tmp_path, task, layout):
    keys = {"per_device_train_batch_size": 32, "max_steps": 2, "save_steps": 10}
    padded = run(inputs, tmp_path / "padded", task, **keys)
    other = run(inputs, tmp_path / layout, task, **keys, **{layout: True})
    found, expected = ([record["loss"] for record in records(output, "train")] for output in (other, padded))
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_task_learns(inputs, tmp_path):
    rows = [{"text": "ab"[n % 2] * (n % 5 + 2), "label": n % 2} for n in range(32)]
    keys = {"max_steps": 16, "save_steps": 100, "dataset": str(write(tmp_path / "rows.jsonl", rows))}
    output = run(inputs, tmp_path / "run", "sequence_classification", eval_split_size=8, **keys)
    before, *_, after = records(output, "eval")
    assert after["f1"] > max(0.9, before["f1"])


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["nf4", "bnb-int8", "w8a16", "fp8-block"])
def test_quantized_merges_keep_the_head(inputs, runs, tmp_path, quantize):
    output = runs("sequence_classification")
    report = merge(output, tmp_path / "merged", quantize=quantize, verify=quantize != "bnb-int8")
    model = load_model(str(tmp_path / "merged"), dtype="float32", device="cpu")
    assert report.quantize == quantize
    head = load_file(output / "adapter" / "adapter_model.safetensors")["base_model.model.score.weight"]
    torch.testing.assert_close(model.score.weight.float(), head, rtol=0.01, atol=0.01)
    expected, _ = own_outputs(output, "sequence_classification")
    texts = texts_of(output / "adapter", "sequence_classification")
    found = their_outputs(model, texts, "sequence_classification", None)
    if quantize != "nf4":  # 4 bits move the outputs of a random model by half their size
        assert float((found - expected).abs().max()) < 0.2 * float(expected.abs().max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", TASKS)
def test_commands_that_need_text_refuse_a_task(runs, tmp_path, task):
    output = runs(task)
    (tmp_path / "prompts.txt").write_text("what is 1?\n")
    for command in (
        ["generate", str(output), str(tmp_path / "prompts.txt")],
        ["export", str(output), "--out", str(tmp_path / "x.gguf")],
        ["serve", str(output)],
    ):
        answered = CliRunner().invoke(app, command)
        assert answered.exit_code in (1, 2), command
        assert not isinstance(answered.exception, AttributeError | KeyError | TypeError), command
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.slow
def test_a_merged_classifier_is_no_language_model(inputs, runs, tmp_path):
    merge(runs("sequence_classification"), tmp_path / "merged")
    with pytest.raises(ModelError, match="LlamaForSequenceClassification"):
        train(config_of(inputs, tmp_path / "out", "embedding", model_name_or_path=str(tmp_path / "merged")))


def test_an_adapter_of_other_labels_is_not_continued(inputs, runs, tmp_path):
    path = str(runs("sequence_classification") / "adapter")
    task, keys = "sequence_classification", {"adapter_path": path, "max_steps": 1, "eval_split_size": 8}
    run(inputs, tmp_path / "more", task, **keys)
    for labels in (["good", "bad"], ["bad", "good", "other"]):
        with pytest.raises(CheckpointError, match="adapter_path"):
            run(inputs, tmp_path / "out", task, labels=labels, **keys)
    with pytest.raises(HalfbyteError, match="adapter_path"):
        run(inputs, tmp_path / "out", "embedding", **keys)


def test_preview_shows_texts_and_targets(inputs):
    for task in TASKS:
        keys = [f"model_name_or_path={inputs / 'model'}", f"dataset={inputs / task}.jsonl", f"method={task}"]
        answered = CliRunner().invoke(app, ["preview", *keys])
        assert answered.exit_code == 0, answered.output


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"use_peft": False}, "use_peft"),
        ({"num_labels": 1}, "num_labels"),
        ({"labels": ["only"]}, "labels"),
        ({"problem_type": "regression", "labels": ["a", "b"]}, "labels"),
        ({"streaming": True, "max_steps": 2}, "labels"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"qat_scheme": "nf4"}, "qat_scheme"),
        ({"parallel": {"pipeline": 2}}, "parallel"),
        ({"method": "embedding", "pooling": "cls"}, "pooling"),
        ({"method": "embedding", "problem_type": "regression"}, "problem_type"),
        ({"method": "embedding", "target_modules": r".*\.q_proj"}, "target_modules"),
        (
            {"method": "embedding", "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            "ensure_weight_tying",
        ),
        ({"method": "reranker", "loss_type": "cosent"}, "loss_type"),
        ({"pooling": "mean"}, "pooling"),
    ],
)
def test_keys_that_do_not_fit_a_task(inputs, tmp_path, keys, match):
    with pytest.raises(ConfigError, match=match):
        method_of(config_of(inputs, tmp_path / "out", "sequence_classification", **keys))


def test_families_without_a_class_of_the_task_are_refused(inputs, tmp_path):
    from transformers import BertConfig, BertLMHeadModel

    folder = tmp_path / "bert"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertLMHeadModel(BertConfig(vocab_size=272, **sizes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(folder)
    with pytest.raises(HalfbyteError, match="bert"):
        train(config_of(inputs, tmp_path / "out", "embedding", model_name_or_path=str(folder)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("task", TASKS)
def test_the_card_s_code_loads_the_model(inputs, runs, task):
    output = runs(task)
    card = (output / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace("'adapter'", repr(str(output / "adapter")))
    code = code.replace('"adapter"', repr(str(output / "adapter")))
    if task == "embedding":
        pytest.importorskip("sentence_transformers")
    names: dict = {}
    exec(code, names)
    if task != "embedding":
        labels = {"sequence_classification": "good", "token_classification": "O", "reranker": "LABEL_0"}
        assert labels[task] in names["model"].config.id2label.values()
