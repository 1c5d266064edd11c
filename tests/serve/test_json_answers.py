"""`response_format` and `chat_template_kwargs`: JSON answers with all other fields, and what is refused."""

import json

import pytest
from transformers import AutoTokenizer

from halfbyte.serve import model as serve_model
from halfbyte.serve.model import load
from tests.helpers.openai_client import CHAT, HELLO, ONCE, TEXT, client_of, error_of, events
from tests.helpers.serve_tiny import byte_tokenizer

TOKENS = byte_tokenizer().get_vocab()
COMPACT = {str(TOKENS[symbol]): -100 for symbol in "ĠĊčĉ"}  # a random model's whitespace would not fit its context
JSON_MODE = {"response_format": {"type": "json_object"}}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Zoë"]}, "born": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "born"],
    "additionalProperties": False,
}


def schema(content, **keys):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": content, **keys}}}


@pytest.fixture(scope="module")
def client(base_folder, adapters, in_float32):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    with client_of(load(str(base_folder), {name: str(path) for name, path in adapters.items()})) as client:
        yield client


def follows(text: str) -> bool:
    answer = json.loads(text)
    return set(answer) == {"name", "born"} and answer["name"] in ("Ada", "Zoë") and 1 <= answer["born"] <= 9


@pytest.mark.parametrize("keys", [
    {"temperature": 0}, {"temperature": 2, "seed": 1, "n": 3}, {"model": "poet"}, {"logprobs": True, "top_logprobs": 2},
    {"top_k": 1, "temperature": 2}, {"min_p": 1},
    {"logit_bias": COMPACT | {"70": 100}, "repetition_penalty": 1.3, "frequency_penalty": 2},
    {"top_p": 0}, {"top_k": -1},
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_answers_follow_a_schema(client, keys, stream):
    body = HELLO | {"max_tokens": 100, "logit_bias": COMPACT} | schema(PERSON, strict=True) | keys
    if not stream:
        choices = client.post(CHAT, json=body).json()["choices"]
        texts = [choice["message"]["content"] for choice in choices]
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
        if "logprobs" in keys:
            spelled = b"".join(bytes(token["bytes"]) for token in choices[0]["logprobs"]["content"])
            assert spelled.decode() == texts[0]
    else:
        texts = [""] * keys.get("n", 1)
        for event in events(client.post(CHAT, json=body | {"stream": True})):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
    assert len(texts) == keys.get("n", 1)
    assert all(map(follows, texts))


def test_log_probabilities_are_the_models_own(client):
    """The first token of a JSON object is a brace, which the random model does not expect."""
    scores = client.post(CHAT, json=HELLO | {"max_tokens": 1, "logprobs": True, "top_logprobs": 1} | JSON_MODE).json()
    [token] = scores["choices"][0]["logprobs"]["content"]
    assert token["token"] == "{"
    assert token["logprob"] < -1e-3
    assert token["top_logprobs"][0]["logprob"] > token["logprob"]


def test_an_answer_may_be_cut_off(client):
    def answer(**keys):
        body = HELLO | {"max_tokens": 100, "temperature": 0, "logit_bias": COMPACT} | schema(PERSON) | keys
        [choice] = client.post(CHAT, json=body).json()["choices"]
        return choice["message"]["content"], choice["finish_reason"]

    whole, _ = answer()
    assert answer(max_tokens=4) == (whole[:4], "length")
    assert answer(stop=":") == (whole.partition(":")[0], "stop")


def test_completions_of_several_prompts_follow_a_schema(client):
    body = ONCE | {"prompt": ["Once", "A"], "n": 2, "best_of": 3, "echo": True} | schema(PERSON)
    body |= {"max_tokens": 100, "logit_bias": COMPACT}
    texts = [choice["text"] for choice in client.post(TEXT, json=body).json()["choices"]]
    assert [text[: text.index("{")] for text in texts] == ["Once", "Once", "A", "A"]
    assert all(follows(text[text.index("{") :]) for text in texts)


@pytest.mark.parametrize("content", [
    {"enum": []}, {"type": "integer", "minimum": 5, "maximum": 3}, {"type": "string", "minLength": 3, "maxLength": 2},
    {"const": 1, "type": "string"}, {"anyOf": [False]}, {"allOf": [{"const": "a"}, {"const": "b"}]},
    {"type": "object", "required": ["a"], "additionalProperties": False}, {"$ref": "#"}, {"$ref": "#/$defs/none"},
    {"type": "array", "minItems": 2, "maxItems": 1}, {"$ref": "http://example.org/schema"}, {"type": "strnig"},
    {"type": "object", "properties": {"a": {"type": "string", "maxlength": 3}}}, {"not": {}}, {"nullable": True},
    {"type": "array", "uniqueItems": True}, {"type": "string", "pattern": "("}, {"type": "string", "format": "none"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"x-guidance": {"lenient": True}}, {"minLength": -1},
    {"description": "a" * 200_000},
])  # fmt: skip
def test_unsupported_schemas_are_refused(client, content, monkeypatch):
    monkeypatch.setattr(serve_model, "continue_texts", None)
    error = error_of(client.post(CHAT, json=HELLO | schema(content)), 400)
    assert (error["param"], error["type"]) == ("response_format", "invalid_request_error")


@pytest.mark.parametrize(("keys", "param"), [
    (schema(None), "response_format.json_schema.schema"), (schema(True), "response_format.json_schema.schema"),
    (schema([]), "response_format.json_schema.schema"), (schema({}, name=""), "response_format.json_schema.name"),
    (schema({}, name="a b"), "response_format.json_schema.name"), (schema({}, x=1), "response_format.json_schema.x"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
     "response_format.json_schema"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
])  # fmt: skip
def test_malformed_formats_are_refused(client, keys, param):
    assert error_of(client.post(CHAT, json=HELLO | keys), 400)["param"] == param


def test_a_missing_package_is_named(client, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    error = error_of(client.post(CHAT, json=HELLO | JSON_MODE), 400)
    assert error["param"] == "response_format"
    assert "llguidance" in error["message"]
    assert client.post(CHAT, json=HELLO | {"max_tokens": 1}).status_code == 200


def test_variables_reach_the_template(base_folder, tmp_path, in_float32):
    served = load(str(base_folder), {})
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    thinking = "{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}{% set x = 1 %}"
    tokenizer.chat_template = tokenizer.chat_template + thinking
    served.saved.tokenizer.chat_template = tokenizer.chat_template
    with client_of(serve_model.Served(served.saved, served.names)) as client:
        count = {"max_tokens": 0, "chat_template_kwargs": {"enable_thinking": False}}
        plain = client.post(CHAT, json=HELLO | {"max_tokens": 0}).json()["usage"]["prompt_tokens"]
        assert client.post(CHAT, json=HELLO | count).json()["usage"]["prompt_tokens"] == plain + len("quiet")
        for name in ("messages", "add_generation_prompt", "tools", "eos_token", "x", "raise_exception", "tokenize"):
            error = error_of(client.post(CHAT, json=HELLO | {"chat_template_kwargs": {name: 1}}), 400)
            assert error["param"] == "chat_template_kwargs"
