"""Answers that follow a JSON schema, and a schema's checks."""

import json
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from halfbyte.generation import Grammar, Penalties, Sampling, generate
from halfbyte.generation.json_schema import check_keywords, check_recursion
from halfbyte.utils.errors import ConfigError, ModelError
from tests.helpers.decoding import transformers_greedy
from tests.helpers.serve_tiny import SIZES, byte_tokenizer

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
LIST_OF = {"type": "array", "items": {"$ref": "#/$defs/node"}}


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    """A model of more tokens than the tokenizer has."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=330, eos_token_id=tokenizer.eos_token_id, **SIZES)).eval()


def test_rows_follow_their_own_grammars(tokenizer, model):
    ends = [tokenizer.eos_token_id]
    schemas = [{"const": "a"}, {"type": "integer", "minimum": 10, "maximum": 99}, {"type": "boolean"}]
    grammars = [*(Grammar(tokenizer, ends, schema) for schema in schemas), None]
    sampling = Sampling(temperature=1.0, seed=3)
    prompts = [[5, 6], [7], [8, 9, 10], [5]]
    answers = generate(model, prompts, max_new_tokens=12, sampling=sampling, stops=ends, grammars=grammars)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers[:3]]
    assert texts[0] == '"a"'
    assert re.fullmatch(r"[1-9][0-9]", texts[1])
    assert texts[2] in ("true", "false")
    assert len(answers[3]) == 12 or answers[3][-1] in ends
    assert generate(model, prompts, max_new_tokens=12, sampling=sampling, stops=ends, grammars=grammars) == answers


def test_rows_without_a_grammar_are_as_without_any(tokenizer, model):
    ends, prompts = [tokenizer.eos_token_id], [[5, 6], [7, 8]]
    alone = generate(model, prompts, max_new_tokens=8, stops=ends)
    assert generate(model, prompts, max_new_tokens=8, stops=ends, grammars=[None, None]) == alone
    beside = generate(model, prompts, max_new_tokens=8, stops=ends, grammars=[Grammar(tokenizer, ends), None])
    assert beside[1] == alone[1]


def test_an_answer_ends_with_its_text_also_without_end_tokens(tokenizer, model):
    [ids] = generate(model, [[5]], max_new_tokens=50, stops=[], grammars=[Grammar(tokenizer, [], {"const": "é"})])
    assert json.loads(tokenizer.decode(ids, skip_special_tokens=True)) == "é"


def test_grammars_are_one_for_each_prompt(tokenizer, model):
    with pytest.raises(ConfigError):
        generate(model, [[5], [6]], grammars=[None])


def test_a_model_without_the_tokens_of_a_grammar_is_refused(tokenizer):
    small = LlamaForCausalLM(LlamaConfig(vocab_size=8, eos_token_id=7, **SIZES)).eval()
    with pytest.raises(ModelError):
        generate(small, [[5]], stops=[7], grammars=[Grammar(tokenizer, [tokenizer.eos_token_id])])


@pytest.mark.parametrize("root", [
    {"$ref": "#"}, {"$ref": "#/$defs/node"}, {"allOf": [{"$ref": "#/$defs/node"}, {"type": "object"}]},
    {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/node"}]}, {**LIST_OF, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#/$defs/node"}], "minItems": 2},
    {"type": "object", "additionalProperties": {"$ref": "#/$defs/node"}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}, "allOf": [{"required": ["a"]}]},
    {"$ref": "#/$defs/there", "$defs": {"there": {"$ref": "#/$defs/back"}, "back": {"$ref": "#/$defs/there"}}},
])  # fmt: skip
def test_recursion_without_an_end_is_refused(root):
    with pytest.raises(ConfigError):
        check_recursion({"$defs": {"node": NODE}, **root})


@pytest.mark.parametrize("root", [
    {}, LIST_OF, {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#/$defs/node"}], "minItems": 1},
    {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#"}}}, {"const": 1, "properties": {"a": {"$ref": "#"}}},
    {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}},
])  # fmt: skip
def test_recursion_that_can_end_is_accepted(root):
    check_recursion({"$defs": {"node": NODE}, **root})


@pytest.mark.parametrize("place", [
    lambda part: part, lambda part: {"properties": {"a": part}}, lambda part: {"items": part},
    lambda part: {"prefixItems": [part]}, lambda part: {"anyOf": [{}, part]}, lambda part: {"$defs": {"a": part}},
    lambda part: {"additionalProperties": part}, lambda part: {"patternProperties": {"a": part}},
    lambda part: {"items": [part]}, lambda part: {"allOf": [{"oneOf": [part]}]},
])  # fmt: skip
def test_unknown_keywords_are_found_everywhere(place):
    with pytest.raises(ConfigError):
        check_keywords(place({"type": "string", "maxlength": 3}))
    check_keywords(place({"enum": [{"maxlength": 3}], "default": {"x": 1}, "properties": {"maxlength": {}}}))


@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize("keys", [
    {"top_k": 5}, {"min_p": 0.2}, {"repetition_penalty": 1.7}, {"repetition_penalty": 0.6}, {"top_p": 0.8},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
])  # fmt: skip
def test_distributions_equal_transformers(keys, temperature):
    from transformers import GenerationConfig

    torch.manual_seed(1)
    logits = 3 * torch.randn(2, 50)
    prompts, answers = [[1, 2, 3], [4, 4, 49]], [[7, 3], [8, 8]]
    read = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    sampled = GenerationConfig(do_sample=True, temperature=temperature, **{"top_k": 0, "top_p": 1.0} | keys)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **SIZES))
    processors = model._get_logits_processor(sampled, input_ids_seq_length=5, device="cpu", logits_processor=[])
    wanted = processors(read, logits.clone()).softmax(-1)

    prompted = torch.zeros(2, 50, dtype=torch.bool).scatter(1, read[:, :3], True)
    counts = torch.zeros(2, 50).scatter_add(1, read[:, 3:], torch.ones(2, 2))
    penalized = Penalties(repetition=keys.get("repetition_penalty", 1.0)).applied(logits, counts, prompted)
    own = Sampling(temperature, **{name: value for name, value in keys.items() if name != "repetition_penalty"})
    torch.testing.assert_close(own.probabilities(penalized), wanted)


def test_a_repetition_penalty_reads_prompt_and_answer(model):
    """Greedy answers of rows of several lengths equal transformers' own generate."""
    prompts = [[5, 6, 7, 8], [9, 10]]
    answers = generate(model, prompts, max_new_tokens=8, stops=[], penalties=Penalties(repetition=1.9))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == transformers_greedy(model, prompt, 8, repetition_penalty=1.9)


@pytest.mark.parametrize("value", [0, -1, 1e-300, 101, float("nan"), float("inf"), "1"])
def test_repetition_penalties_out_of_range_are_refused(value):
    with pytest.raises(ConfigError):
        Penalties(repetition=value)
