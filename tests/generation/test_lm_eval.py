"""halfbyte in lm-evaluation-harness: scores compared with HFLM and with full logits."""

import sys
from types import SimpleNamespace

import pytest
import torch

from halfbyte.utils.errors import ConfigError, ModelError
from tests.helpers.serve_tiny import CONTEXT, byte_tokenizer, random_adapter, random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_tokenizer()
    random_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def asked(*arguments):
    return SimpleNamespace(args=arguments)


PAIRS = [("The cat", " sat"), ("", "Once upon"), ("trailing space ", "on"), ("x" * 300, "yz"), ("A", "b")]
LONG = "".join(chr(97 + at % 26) for at in range(3 * CONTEXT + 5))


@pytest.mark.skipif("lm_eval" in sys.modules, reason="it is installed")
def test_without_the_harness_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "halfbyte.lm_eval", raising=False)
    with pytest.raises(ConfigError, match="lm_eval"):
        import halfbyte.lm_eval  # noqa: F401


@pytest.fixture(scope="module")
def ours(folder):
    pytest.importorskip("lm_eval", reason="pip install lm_eval")
    from halfbyte.lm_eval import HalfbyteLM

    return HalfbyteLM(str(folder), batch_size=2, dtype="float32")


@pytest.fixture(scope="module")
def theirs(folder):
    pytest.importorskip("lm_eval", reason="pip install lm_eval")
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(folder), batch_size=2, dtype="float32", device="cpu")


def test_scores_equal_those_of_the_harness(ours, theirs):
    requests = [asked(*pair) for pair in PAIRS]
    for mine, expected in zip(ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True):
        assert mine[0] == pytest.approx(expected[0], rel=1e-4)
        assert mine[1] == expected[1]


def test_greedy_continuations_are_seen(ours):
    prompt = "The cat"
    (answer,) = ours.generate_until([asked(prompt, {"max_gen_toks": 3})])
    ids = ours.tok_encode(prompt)
    likeliest = ours.model(torch.tensor([ids])).logits[0, -1].argmax().item()
    assert [greedy for _, greedy in ours._scores([(ids, [likeliest]), (ids, [likeliest - 1])])] == [True, False]
    assert len(answer) > 0


def test_rolling_scores_equal_those_of_the_harness(ours, theirs):
    requests = [asked(LONG), asked("short")]
    found, expected = ours.loglikelihood_rolling(requests), theirs.loglikelihood_rolling(requests)
    assert found == pytest.approx([float(value) for value in expected], rel=1e-4)


def test_answers_equal_those_of_the_harness(ours, theirs):
    whole = ours.generate_until([asked("The cat", {"max_gen_toks": 12})])[0]
    stop = whole[4:6]
    options = [{"until": [stop], "max_gen_toks": 12}, {"until": ["never"], "max_gen_toks": 12}]
    requests = [asked(text, dict(option)) for text in ("The cat", "Once upon a time") for option in options]
    again = [asked(text, dict(option)) for text in ("The cat", "Once upon a time") for option in options]
    found = ours.generate_until(requests)
    assert found == theirs.generate_until(again)
    assert found[0] == whole[: whole.find(stop)]


def test_a_task_runs_by_name_with_an_adapter(folder, tmp_path):
    lm_eval = pytest.importorskip("lm_eval", reason="pip install lm_eval")
    import halfbyte.lm_eval  # noqa: F401

    (tmp_path / "rows.jsonl").write_text('{"q": "The cat", "a": " sat"}\n{"q": "Once", "a": " upon"}\n')
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": ["{{a}}", " zebra"],
        "doc_to_target": 0,
    }
    results = {}
    for name in (folder, random_adapter(folder, tmp_path / "poet", 1)):
        evaluated = lm_eval.simple_evaluate(
            "halfbyte", model_args={"pretrained": str(name), "dtype": "float32"}, tasks=[task], bootstrap_iters=0
        )
        results[name] = evaluated["samples"]["tiny"][0]["filtered_resps"]
    base, adapted = results.values()
    assert base != adapted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"max_gen_toks": 128}, "128 new"),
        ({"max_gen_toks": "many"}, "max_gen_toks.*'many'"),
        ({"max_gen_toks": 0}, "max_new_tokens is 0"),
        ({"temperature": "hot", "do_sample": True}, "'hot'"),
        ({"top_p": None}, "top_p"),
        ({"until": [1]}, r"until is \[1\]"),
        ({"until": {"a": 1}}, "{'a': 1}"),
    ],
)
def test_options_that_cannot_be_kept(ours, options, message):
    with pytest.raises(ConfigError, match=message):
        ours.generate_until([asked("The cat", options)])


def test_a_continuation_longer_than_the_context(ours):
    with pytest.raises(ModelError, match=r"129 tokens.*max_length 128"):
        ours._scores([([1], [2] * 129)])


@pytest.mark.parametrize("keys", [{"batch_size": "auto"}, {"batch_size": 0}, {"max_batch_size": 8}])
def test_batch_sizes_are_numbers(ours, folder, keys):
    from halfbyte.lm_eval import HalfbyteLM

    with pytest.raises(ConfigError, match="batch_size"):
        HalfbyteLM(str(folder), **keys)
