"""Packed runs and evaluations of models in which packed documents would see each other."""

import json

import pytest
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from halfbyte.config import load_config
from halfbyte.evaluation.held_out import evaluate
from halfbyte.train.run import train
from halfbyte.utils.errors import ConfigError
from halfbyte.utils.files import write_text

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with `data.jsonl`, and models of a recurrent and of a bidirectional family, with a tokenizer each."""
    folder = tmp_path_factory.mktemp("place")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["what is 1 plus 2? it is 3."] * 4, vocab_size=270, special_tokens=["</s>", "<pad>"])
    sizes = SIZES | {"vocab_size": bpe.get_vocab_size(), "pad_token_id": 1, "eos_token_id": 0, "bos_token_id": None}
    for name, config in {
        "lfm2": transformers.Lfm2Config(**sizes, num_key_value_heads=1, layer_types=["conv", "full_attention"]),
        "bert": transformers.BertConfig(**sizes),
    }.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # so that what a document sees moves its loss
                parameter += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(folder / name)
        keys = {"eos_token": "</s>", "pad_token": "<pad>"}
        PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **keys).save_pretrained(folder / name)
    rows = [{"prompt": f"what is {n} plus {n % 7}?", "completion": f" it is {n + n % 7}."} for n in range(24)]
    write_text(folder / "data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(place, output, model="lfm2", **changed):
    keys = {
        "model_name_or_path": str(place / model),
        "dataset": str(place / "data.jsonl"),
        "output_dir": str(output),
        "device": "cpu",
        "dtype": "float32",
        "eval_split_size": 8,
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "max_length": 96,
        "r": 4,
        "sample_prompts": 1,
        "sample_max_new_tokens": 2,
    }
    return load_config(None, keys | changed)


def read(output, name):
    return json.loads((output / name).read_text())


def losses(output, kind):
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == kind]


@pytest.fixture(scope="module")
def runs(place, tmp_path_factory):
    outputs = {}
    for key in ("packing", "padding_free", None):
        outputs[key] = tmp_path_factory.mktemp("runs") / str(key)
        train(config(place, outputs[key], **({key: True} if key else {})))
    return outputs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("key", ["packing", "padding_free"])
def test_checks_record_how_documents_were_isolated(runs, key):
    found = read(runs[key], "checks.json")["isolation"]
    assert found["way"] == ("bounds" if transformers.__version__ >= "5.22" else "unpacked")
    assert found["leak"] == "base_model.model.model.layers.0.conv, a Lfm2ShortConv"
    assert found["not_by_positions"].startswith("hidden states change by ")
    assert found["change"] == 0.0
    assert found["alone"] < 1e-5
    assert any("Lfm2ForCausalLM" in words for words in read(runs[key], "environment.json")["notices"])
    assert "isolation" not in read(runs[None], "checks.json")


@pytest.mark.parametrize("key", ["packing", "padding_free"])
def test_losses_are_those_of_documents_in_rows_of_their_own(runs, key):
    assert losses(runs[key], "eval")[0] == pytest.approx(losses(runs[None], "eval")[0], rel=1e-5)
    if key == "padding_free":  # the same documents in each step
        assert losses(runs[key], "train") == pytest.approx(losses(runs[None], "train"), rel=1e-4)


@pytest.mark.slow
def test_evaluation_is_probed_too(runs, place):
    data, output = str(place / "data.jsonl"), str(runs["packing"])
    packed, apart = evaluate(output, data), evaluate(output, data, ["packing=false"])
    assert packed.rows < apart.rows
    assert packed.loss == pytest.approx(apart.loss, rel=1e-5)


def test_a_run_that_nothing_helps_stops_before_training(place, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)packing:.*BertLMHeadModel.*set packing: false"):
        train(config(place, tmp_path / "out", "bert", packing=True))
    assert not (tmp_path / "out").exists()
