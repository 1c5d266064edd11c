"""benchmarks.digits: a tiny language model gets a tower, trains with it on images, and answers in other programs."""

from importlib.util import find_spec

import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks import digits
from halfbyte.config import load_config
from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.merge import merge
from halfbyte.train.run import train
from tests.helpers.gguf_models import byte_tokenizer, save_model


@pytest.fixture
def work(tmp_path):
    """A work folder with a tiny model and 12 rows about images of one of two shades, 4 of them held out."""
    save_model(tmp_path / "text", "llama")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "text")
    digits.save_model(tmp_path / "text", tmp_path / "model")
    answers = [1, 7] * 6
    digits.write_rows(tmp_path, np.stack([np.full((8, 8), 2.0 * answer) for answer in answers]), answers, held_out=4)
    return tmp_path


@pytest.mark.parametrize("name", ["full", pytest.param("whole_tower", marks=pytest.mark.slow)])
def test_a_run_reads_images_and_its_files_do_in_other_programs(work, name):
    keys = digits.COMMON | digits.RUNS[name] | ({"bnb_4bit_blocksize": 32} if name != "full" else {})
    keys |= {"model_name_or_path": str(work / "model"), "dataset": str(work / "train.jsonl"), "device": "cpu"}
    train(load_config(None, keys | {"output_dir": str(work / name), "max_steps": 30, "max_length": 200}))
    merged = work / name / "model"
    if name != "full":
        merged = work / "merged"
        merge(work / name, merged)
    files, answers = zip(*digits.held_out_rows(work), strict=True)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    tokens = digits.transformers_tokens(merged, files)
    assert [tokenizer.decode([token]) for token in tokens] == list(answers)
    report = export_gguf(work / name, "f16", work / "x.gguf", device="cpu")
    if find_spec("cyllama"):
        assert digits.llamacpp_tokens(report.path, report.mmproj, digits.prompt_of(tokenizer), files) == tokens
