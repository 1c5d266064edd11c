"""Fuzzed texts are accepted or refused quickly: 20 of each kind, 10,000 in slow tests."""

import resource

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers import fuzz

KINDS = {
    "yaml": (fuzz.read_yaml, fuzz.yaml_text, 20),
    "jsonl": (fuzz.read_jsonl, fuzz.jsonl_text, 20),
    "import": (fuzz.read_import, fuzz.import_text, 20),
    "template": (fuzz.read_template, fuzz.template_text, 5),
}


@pytest.fixture
def place(request, tmp_path, monkeypatch):
    """A folder to write into; for templates a tokenizer."""
    monkeypatch.setattr("halfbyte.reading.bounded.SECONDS", 0.1)
    if "template" not in request.node.callspec.id:
        return tmp_path
    backend = Tokenizer(models.BPE(vocab={"a": 0, "<e>": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")


def check(kind: str, place, examples: int, part: int | None = None) -> None:
    """Templates get a fifth of their time limit, so that 10,000 take minutes."""
    read, texts, _ = KINDS[kind]
    taken = []
    before, largest_child = fuzz.peak(resource.RUSAGE_SELF), fuzz.peak(resource.RUSAGE_CHILDREN)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=part is None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(text=texts)
    def one(text):
        taken.append(fuzz.answered(read, text, place))

    (one if part is None else seed(part)(one))()
    assert fuzz.peak(resource.RUSAGE_SELF) - before < fuzz.BYTES
    # the peak over all children of this process: those of earlier tests may be larger than any of these texts'
    assert fuzz.peak(resource.RUSAGE_CHILDREN) < max(before + fuzz.BYTES, largest_child + 1)
    print(f"{kind}: {len(taken)} texts, {sum(taken)} taken, no other exception")


@pytest.mark.parametrize("kind", KINDS)
def test_some_texts(kind, place):
    check(kind, place, KINDS[kind][2])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_texts(kind, part, place):
    """Split into parts for parallel processes (-n 14)."""
    check(kind, place, 500, part)
