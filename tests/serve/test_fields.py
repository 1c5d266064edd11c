"""OpenAI request fields of completions: echo, best_of, penalties and logit_bias."""

import math

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from halfbyte.serve.model import load
from tests.helpers.openai_client import GREEDY, ONCE, TEXT, client_of, error_of, events
from tests.helpers.serve_tiny import byte_tokenizer


@pytest.fixture(scope="module")
def client(base_folder, adapters, in_float32):
    with client_of(load(str(base_folder), {name: str(path) for name, path in adapters.items()})) as client:
        yield client


@pytest.fixture(scope="module")
def theirs(base_folder):
    """transformers' log-probabilities fp32 [T, V] of what follows each token of a text, or of ids; and the tokens."""
    tokenizer, model = AutoTokenizer.from_pretrained(base_folder), LlamaForCausalLM.from_pretrained(base_folder)

    def log_probs(text):
        ids = torch.tensor([tokenizer(text)["input_ids"] if isinstance(text, str) else text])
        with torch.no_grad():
            return model(input_ids=ids).logits[0].log_softmax(-1), ids[0]

    return log_probs


def choice(client, **keys):
    (found,) = client.post(TEXT, json=ONCE | GREEDY | keys).json()["choices"]
    return found


class TestEcho:
    def test_echo_returns_the_prompt_before_the_answer(self, client):
        answer = choice(client)["text"]
        assert choice(client, echo=True)["text"] == "Once" + answer
        streamed = events(client.post(TEXT, json=ONCE | GREEDY | {"echo": True, "stream": True}))
        assert "".join(event["choices"][0]["text"] for event in streamed) == "Once" + answer
        assert choice(client, echo=True, prompt=[5, 6])["text"].endswith(choice(client, prompt=[5, 6])["text"])

    @pytest.mark.parametrize("new", [0, 3])
    def test_echoed_log_probabilities_equal_transformers(self, client, theirs, new):
        found = choice(client, prompt="Once upon", echo=True, logprobs=2, max_tokens=new)
        scores = found["logprobs"]
        logs, ids = theirs("Once upon")
        assert len(scores["tokens"]) == 9 + new
        assert scores["token_logprobs"][0] is None is scores["top_logprobs"][0]
        wanted = logs[:-1].gather(1, ids[1:, None]).flatten()
        torch.testing.assert_close(torch.tensor(scores["token_logprobs"][1:9]), wanted, atol=2e-4, rtol=1e-4)
        for after, best in zip(logs, scores["top_logprobs"][1:], strict=False):
            assert max(best.values()) == pytest.approx(after.max().item(), abs=2e-4)
        assert scores["text_offset"] == list(range(9 + new))

    def test_echoed_prompts_may_have_several_lengths(self, client, theirs):
        body = ONCE | {"prompt": ["Once upon", "A", "To be"], "echo": True, "logprobs": 0, "max_tokens": 0}
        answer = client.post(TEXT, json=body).json()
        assert answer["usage"]["completion_tokens"] == 0
        for text, found in zip(body["prompt"], answer["choices"], strict=True):
            logs, ids = theirs(text)
            wanted = logs[:-1].gather(1, ids[1:, None]).flatten().tolist()
            assert found["text"] == text
            assert found["finish_reason"] == "length"
            assert found["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=2e-4)

    def test_a_prompt_that_fills_the_context_is_echoed_without_scores(self, client):
        body = {"model": "tiny", "prompt": [5] * 128, "echo": True, "max_tokens": 0}
        assert client.post(TEXT, json=body).json()["usage"]["prompt_tokens"] == 128
        assert error_of(client.post(TEXT, json=body | {"logprobs": 1}), 400)["code"] == "context_length_exceeded"


def test_best_of_returns_the_most_likely_answers(client):
    keys = {"temperature": 1.5, "seed": 3, "max_tokens": 6}
    several = client.post(TEXT, json=ONCE | keys | {"n": 5, "logprobs": 0}).json()["choices"]
    means = {each["text"]: math.fsum(each["logprobs"]["token_logprobs"]) / 6 for each in several}
    ranked = sorted(means, key=means.__getitem__, reverse=True)
    answer = client.post(TEXT, json=ONCE | keys | {"n": 2, "best_of": 5}).json()
    assert [each["text"] for each in answer["choices"]] == ranked[:2]
    assert [each["index"] for each in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 30
    assert answer["choices"][0]["logprobs"] is None
    two = client.post(TEXT, json=ONCE | keys | {"prompt": ["Once"] * 2, "best_of": 5}).json()["choices"]
    assert [each["index"] for each in two] == [0, 1]


class TestPenalties:
    def test_penalties_follow_openais_definition(self, client, theirs):
        """Greedy decoding with logits that lose by how often the answer has each token, by transformers' logits."""
        ids = theirs("Once")[1].tolist()
        counts = torch.zeros(len(theirs("a")[0][0]))
        for _ in range(8):
            logits = theirs(ids)[0][-1] - 1.5 * counts - 0.5 * (counts > 0)
            logits[97] += 0.25
            ids.append(int(logits.argmax()))
            counts[ids[-1]] += 1
        keys = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"97": 0.25}, "max_tokens": 8}
        wanted = byte_tokenizer().decode(ids[4:], skip_special_tokens=True)
        assert choice(client, **keys)["text"] == wanted != choice(client, max_tokens=8)["text"]

    def test_a_bias_forces_a_token(self, client):
        found = choice(client, logit_bias={"70": 100}, max_tokens=4, logprobs=0)
        assert len(set(found["logprobs"]["tokens"])) == 1
        assert found["logprobs"]["token_logprobs"][0] < 0


def test_an_adapter_is_unloaded(base_folder, adapters, client):
    with client_of(load(str(base_folder), {name: str(path) for name, path in adapters.items()})) as other:
        assert other.delete("/v1/models/poet").json() == {"id": "poet", "object": "model", "deleted": True}
        assert [each["id"] for each in other.get("/v1/models").json()["data"]] == ["tiny", "clerk"]
        assert error_of(other.post(TEXT, json=ONCE | {"model": "poet"}), 404)["code"] == "model_not_found"
        for name in ("tiny", "clerk"):
            same = [each.post(TEXT, json=ONCE | GREEDY | {"model": name}).json()["choices"] for each in (client, other)]
            assert same[0] == same[1]
        assert error_of(other.delete("/v1/models/tiny"), 403)["message"]
        assert error_of(other.delete("/v1/models/poet"), 404)["code"] == "model_not_found"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("keys", [{}, {"stream": True}, {"max_tokens": 0}])
def test_an_adapter_is_unloaded_while_its_request_is_queued(base_folder, adapters, monkeypatch, keys):
    served = load(str(base_folder), {name: str(path) for name, path in adapters.items()})
    prepare = served.prepare

    def prepared(request):
        work = prepare(request)
        served.unload("poet")
        return work

    monkeypatch.setattr(served, "prepare", prepared)
    with client_of(served) as other:
        assert error_of(other.post(TEXT, json=ONCE | {"model": "poet"} | keys), 404)["code"] == "model_not_found"
        monkeypatch.undo()
        assert other.post(TEXT, json=ONCE | {"model": "clerk"}).status_code == 200
