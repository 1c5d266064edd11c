"""The server in this process: answers compared with transformers', streams, adapters, limits, refusals."""

import asyncio
import json
import threading
import time

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM

from halfbyte.generation import generate
from halfbyte.generation.text import Piece
from halfbyte.serve.app import Endpoints, application
from halfbyte.serve.model import Limits, load
from halfbyte.serve.requests import ChatRequest
from halfbyte.utils.errors import CheckpointError, ConfigError
from tests.helpers.openai_client import CHAT, GREEDY, HELLO, ONCE, TEXT, client_of, error_of, events
from tests.helpers.serve_tiny import CONTEXT, random_adapter

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
CALLED_WITH_A_LIST = [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]}]
CALLED_BADLY = [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{"}}]}]


@pytest.fixture(scope="module")
def served(base_folder, adapters, in_float32):
    return load(str(base_folder), {name: str(path) for name, path in adapters.items()})


@pytest.fixture(scope="module")
def client(served):
    with client_of(served, raise_server_exceptions=False) as client:
        yield client


def theirs(folder, prompt: str, adapter=None, new=12) -> str:
    """transformers' greedy continuation."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), LlamaForCausalLM.from_pretrained(folder)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
    found = model.generate(**ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


class TestAnswers:
    def test_models_are_listed_by_name(self, client):
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["tiny", "poet", "clerk"]
        assert client.get("/v1/models/poet").json()["id"] == "poet"
        assert error_of(client.get("/v1/models/other"), 404)["code"] == "model_not_found"

    def test_a_chat_equals_transformers(self, client, base_folder):
        answer = client.post(CHAT, json=HELLO | GREEDY).json()
        prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": theirs(base_folder, prompt)}
        assert (choice["index"], choice["finish_reason"]) == (0, "length")
        assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
        lengths = {"prompt_tokens": 1 + 5 + 5 + 1 + 1 + 1 + 10, "completion_tokens": 12, "total_tokens": 36}
        assert answer["usage"] == lengths

    def test_each_request_names_its_adapter(self, client, base_folder, adapters):
        texts = {}
        for name, folder in {"tiny": None, **adapters, "tiny ": None}.items():
            answer = client.post(TEXT, json=ONCE | GREEDY | {"model": name.strip()}).json()
            texts[name] = answer["choices"][0]["text"]
            assert texts[name] == theirs(base_folder, "Once", folder)
        assert len(set(texts.values())) == 3

    def test_prompts_of_one_request_are_a_batch(self, client, served, base_folder):
        prompts = ["Once", "A longer prompt"]
        for prompt in (prompts, [served.saved.tokenizer(text)["input_ids"] for text in prompts]):
            answer = client.post(TEXT, json=GREEDY | {"model": "tiny", "prompt": prompt}).json()
            assert [choice["text"] for choice in answer["choices"]] == [theirs(base_folder, text) for text in prompts]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1]
            assert answer["usage"]["completion_tokens"] == 24

    def test_stop_sequences_end_the_answer_and_are_left_out(self, client):
        whole = client.post(TEXT, json=ONCE | GREEDY).json()["choices"][0]["text"]
        assert len(whole) > 5
        stop = whole[3:5]
        (choice,) = client.post(TEXT, json=ONCE | GREEDY | {"stop": [stop, "never"]}).json()["choices"]
        assert choice["text"] == whole[: whole.find(stop)]
        assert choice["finish_reason"] == "stop"
        assert text_of(client.post(TEXT, json=ONCE | GREEDY | {"stop": stop, "stream": True})) == choice["text"]

    def test_an_end_token_ends_the_answer(self, client, served, monkeypatch):
        ids = served.saved.tokenizer("Once")["input_ids"]
        (tokens,) = generate(served.saved.model, [ids], max_new_tokens=12, stops=[], adapter=None)
        monkeypatch.setattr(served.conversation, "stops", [tokens[2]])
        answer = client.post(TEXT, json=ONCE | GREEDY).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == tokens.index(tokens[2]) + 1

    def test_a_seed_repeats_an_answer(self, client):
        def answer(seed):
            body = ONCE | {"max_tokens": 12, "seed": seed, "top_p": 0.9, "temperature": 1.5}
            return client.post(TEXT, json=body).json()["choices"][0]["text"]

        assert answer(1) == answer(1) != answer(2)

    def test_text_parts_and_neutral_options(self, client):
        plain = client.post(CHAT, json=HELLO | GREEDY).json()["choices"]
        parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
        nothing = {"n": 1, "logprobs": False, "presence_penalty": 0.0, "stop": None, "tools": [], "user": "me"}
        nothing |= {"max_completion_tokens": None, "metadata": {"job": "1"}, "store": False, "tool_choice": "none"}
        nothing |= {"parallel_tool_calls": True, "response_format": {"type": "text"}, "service_tier": "auto"}
        nothing |= {"prompt_cache_retention": "in_memory", "reasoning_effort": "none"}
        nothing |= {"modalities": ["text"], "safety_identifier": "a", "prompt_cache_key": "b"}
        nothing |= {
            "store": True,
            "prediction": {"type": "content", "content": "a"},
            "prompt_cache_options": {"ttl": "1m"},
        }
        nothing |= {"audio": {"voice": "alloy"}, "service_tier": "flex", "logit_bias": {"50256": 0}, "tools": TOOLS}
        nothing |= {"function_call": "none", "functions": [], "seed": -3, "stream_options": None, "top_logprobs": 0}
        body = HELLO | GREEDY | nothing | {"messages": [{"role": "user", "content": parts, "name": None}]}
        assert client.post(CHAT, json=body).json()["choices"] == plain

    def test_minus_one_generates_to_the_end_of_the_context(self, client):
        for field in ("max_tokens", "max_completion_tokens"):
            usage = client.post(CHAT, json=HELLO | {"temperature": 0, field: -1}).json()["usage"]
            assert usage["total_tokens"] == CONTEXT

    def test_max_tokens_0_counts_the_prompt(self, client):
        body = {"model": "tiny", "prompt": ["Once", "Hello you"], "max_tokens": 0, "best_of": 0}
        answer = client.post(TEXT, json=body).json()
        assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [("", "length")] * 2
        assert answer["usage"] == {"prompt_tokens": 4 + 9, "completion_tokens": 0, "total_tokens": 13}
        streamed = events(client.post(TEXT, json=body | {"stream": True, "stream_options": {"include_usage": True}}))
        assert streamed[-1]["usage"] == answer["usage"]
        assert [choice["text"] for each in streamed for choice in each["choices"]] == ["", ""]
        for keys in ({"max_tokens": 0}, {"max_completion_tokens": 0}):
            chat = client.post(CHAT, json=HELLO | keys).json()
            assert chat["usage"] == {"prompt_tokens": 24, "completion_tokens": 0, "total_tokens": 24}
            assert chat["choices"][0]["finish_reason"] == "length"
        full = {"model": "tiny", "prompt": "a" * CONTEXT, "max_tokens": 0}  # at the end of the context
        assert client.post(TEXT, json=full).json()["usage"]["prompt_tokens"] == CONTEXT

    def test_n_gives_several_answers(self, client):
        plain = client.post(CHAT, json=HELLO | GREEDY).json()
        body = HELLO | GREEDY | {"n": 3}
        answer = client.post(CHAT, json=body).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [choice["message"] for choice in answer["choices"]] == [plain["choices"][0]["message"]] * 3
        assert answer["usage"] == {"prompt_tokens": 24, "completion_tokens": 36, "total_tokens": 60}
        texts = dict.fromkeys(range(3), "")
        streamed = events(client.post(CHAT, json=body | {"stream": True}))
        for event in streamed:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert set(texts.values()) == {plain["choices"][0]["message"]["content"]}
        assert [event["choices"][0]["index"] for event in streamed[:3]] == [0, 1, 2]  # each says who speaks
        drawn = HELLO | {"max_tokens": 12, "temperature": 1.5, "seed": 1, "n": 2}
        first, second = client.post(CHAT, json=drawn).json()["choices"]
        assert first["message"] != second["message"]
        body = GREEDY | {"model": "tiny", "prompt": ["Once", "Twice"], "n": 2}
        once, again, twice, _ = (choice["text"] for choice in client.post(TEXT, json=body).json()["choices"])
        assert once == again != twice

    def test_each_prompt_is_limited_by_the_context(self, client):
        """A request's answer does not depend on the other requests."""
        body = {"model": "tiny", "temperature": 0}
        prompts = ["Once", "x" * 100, "A longer prompt"]
        together = client.post(TEXT, json=body | {"prompt": prompts}).json()
        alone = [client.post(TEXT, json=body | {"prompt": prompt}).json() for prompt in prompts]
        assert [each["text"] for each in together["choices"]] == [each["choices"][0]["text"] for each in alone]
        assert together["usage"]["completion_tokens"] == sum(each["usage"]["completion_tokens"] for each in alone)

    def test_log_probabilities_equal_the_models(self, client, served):
        tokenizer, model = served.saved.tokenizer, served.saved.model
        asked = HELLO | GREEDY | {"logprobs": True, "top_logprobs": 3}
        content = client.post(CHAT, json=asked).json()["choices"][0]["logprobs"]["content"]
        ids = served._chat_prompt(ChatRequest(**HELLO).messages).ids
        with torch.no_grad(), model.disable_adapter():
            logs = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
        best, first = logs.topk(3), content[0]
        assert first["logprob"] == pytest.approx(best.values[0].item(), abs=1e-4)
        assert [each["token"] for each in first["top_logprobs"]] == [tokenizer.decode([i]) for i in best.indices]
        assert [each["logprob"] for each in first["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert first["top_logprobs"][0] == {key: first[key] for key in ("token", "logprob", "bytes")}
        assert len(content) == 12
        for each in content:
            assert bytes(each["bytes"]).decode(errors="replace") == each["token"]
            assert len(each["bytes"]) == 1 or each["token"] != "\ufffd"  # a byte of a character
        streamed = events(client.post(CHAT, json=asked | {"stream": True}))
        parts = [event["choices"][0]["logprobs"] for event in streamed]
        assert [token for part in parts if part for token in part["content"]] == content
        bare = client.post(CHAT, json=asked | {"top_logprobs": 0}).json()["choices"][0]["logprobs"]["content"]
        assert [each["top_logprobs"] for each in bare] == [[]] * 12

    def test_log_probabilities_of_completions(self, client):
        def found(**more):
            return client.post(TEXT, json=ONCE | GREEDY | more).json()["choices"][0]["logprobs"]

        scores = found(logprobs=2)
        for best, own in zip(scores["top_logprobs"], scores["token_logprobs"], strict=True):
            assert max(best.values()) == own
        lengths = [len(token) for token in scores["tokens"]]
        assert scores["text_offset"] == [sum(lengths[:at]) for at in range(12)]
        assert [max(each.values()) for each in found(logprobs=0)["top_logprobs"]] == scores["token_logprobs"]
        assert found() is found(logprobs=False) is None
        streamed = events(client.post(TEXT, json=ONCE | GREEDY | {"logprobs": 2, "stream": True}))
        offsets = [offset for event in streamed for offset in event["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == scores["text_offset"]

    def test_roles_are_those_of_training(self, client, served):
        """The tiny template knows no calls; a developer is the system."""
        turns = [
            {"role": "developer", "content": "be brief", "name": "boss"},
            {"role": "user", "content": "add", "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "two"}]},
        ]
        assert client.post(CHAT, json=HELLO | GREEDY | {"messages": turns}).status_code in (200, 400)
        rendered = served.saved.tokenizer.decode(
            served._chat_prompt(ChatRequest(model="", messages=turns).messages).ids
        )
        assert rendered == (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nadd<|im_end|>\n"
            '<|im_start|>assistant\n{"name": "f", "arguments": {"a": 1}}<|im_end|>\n'
            "<|im_start|>tool\ntwo<|im_end|>\n<|im_start|>assistant\n"
        )


def text_of(response) -> str:
    return "".join(choice["text"] for event in events(response) for choice in event["choices"])


class TestStreams:
    def test_the_events_of_a_chat_add_up(self, client):
        whole = client.post(CHAT, json=HELLO | GREEDY).json()
        body = HELLO | GREEDY | {"stream": True, "stream_options": {"include_usage": True}}
        first, *chunks, last = events(client.post(CHAT, json=body))
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert said == whole["choices"][0]["message"]["content"]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert {event["object"] for event in (first, *chunks, last)} == {"chat.completion.chunk"}
        assert len({event["id"] for event in (first, *chunks, last)}) == 1

    def test_refusals_have_their_status(self, client):
        assert error_of(client.post(CHAT, json=HELLO | {"stream": True, "max_tokens": 10_000}), 400)


SYSTEM_LAST = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        (CHAT, "{", 400, None, "body: Invalid JSON"),
        (CHAT, "[" * 5000, 400, None, "body: Invalid JSON"),
        (CHAT, b'{"model": "\xff"}', 400, None, "body: Invalid JSON"),
        (CHAT, r'{"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}', 400, None, "Invalid JSON"),
        (CHAT, {"messages": []}, 400, "model", "model: Field required"),
        (CHAT, {"model": "tiny"}, 400, "messages", "messages: Field required"),
        (CHAT, {"model": "tiny", "messages": [{"role": "robot", "content": ""}]}, 400, "messages[0].role", "'user'"),
        (CHAT, {"model": "tiny", "messages": [{"role": "user"}]}, 400, "messages[0].content", "Field required"),
        (CHAT, {"model": "tiny", "messages": IMAGE}, 400, "messages[0].content", ""),
        (CHAT, {"model": "tiny", "messages": SYSTEM_LAST}, 400, "messages", ""),
        (CHAT, HELLO | {"model": "gpt-4"}, 404, "model", "'gpt-4'"),
        (CHAT, HELLO | {"temperature": 3}, 400, "temperature", "less than or equal to 2"),
        (CHAT, '{"model": "tiny", "temperature": NaN}', 400, "temperature", "finite"),
        (CHAT, HELLO | {"seed": -(2**64)}, 400, "seed", "greater than or equal to"),
        (CHAT, HELLO | {"max_tokens": "5"}, 400, "max_tokens", "valid integer"),
        (CHAT, HELLO | {"stop": ""}, 400, "stop[0]", "at least 1 character"),
        (CHAT, HELLO | {"stream": "yes"}, 400, "stream", "valid boolean"),
        (CHAT, HELLO | {"n": 17}, 400, "n", "17 answers"),
        (CHAT, HELLO | {"top_logprobs": 2}, 400, "top_logprobs", "true"),
        (CHAT, HELLO | {"max_tokens": -2}, 400, "max_tokens", "greater than or equal to 0"),
        (CHAT, HELLO | {"verbosity": "low"}, 400, "verbosity", ""),
        (CHAT, HELLO | {"logit_bias": {"50256": -100}}, 400, "logit_bias", "token 50256"),
        (CHAT, HELLO | {"logit_bias": {"foo": 1}}, 400, "logit_bias", "'foo'"),
        (CHAT, HELLO | {"tools": TOOLS, "tool_choice": "auto"}, 400, "tools", ""),
        (CHAT, HELLO | {"tool_choice": "required"}, 400, "tool_choice", ""),
        (CHAT, HELLO | {"response_format": {"type": "xml"}}, 400, "response_format.type", "json_object"),
        (CHAT, HELLO | {"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "required"),
        (CHAT, HELLO | {"top_k": -2}, 400, "top_k", ""),
        (CHAT, HELLO | {"min_p": 1.01}, 400, "min_p", ""),
        (TEXT, ONCE | {"repetition_penalty": 0}, 400, "repetition_penalty", ""),
        (CHAT, HELLO | {"chat_template_kwargs": {"enable_thinkin": False}}, 400, "chat_template_kwargs", "thinkin"),
        (CHAT, HELLO | {"moderation": {"model": "m"}}, 400, "moderation", ""),
        (CHAT, HELLO | {"metadata": {"a" * 65: "b"}}, 400, f"metadata.{'a' * 65}.[key]", "at most 64"),
        (CHAT, HELLO | {"model": "x" * 10**5}, 404, "model", "xxx..."),
        (CHAT, HELLO | {"messages": CALLED_BADLY}, 400, "messages", "f:1:"),
        (CHAT, HELLO | {"messages": CALLED_WITH_A_LIST}, 400, "messages", "[1]"),
        (CHAT, HELLO | {"max_tokens": 120}, 400, "messages", "context is 128"),
        (TEXT, {"model": "tiny", "prompt": ""}, 400, "prompt", ""),
        (TEXT, {"model": "tiny", "prompt": ["a", 3]}, 400, "prompt", ""),
        (TEXT, {"model": "tiny", "prompt": [1, 999_999]}, 400, "prompt", "token 999999"),
        (TEXT, {"model": "tiny", "prompt": ["a"] * 17}, 400, "prompt", "17"),
        (TEXT, {"model": "tiny", "prompt": "a" * 128}, 400, "prompt", "asked for 129 (128 in prompt, at least 1"),
        (TEXT, ONCE | {"best_of": 2, "n": 3}, 400, "best_of", "n: 3"),
        (TEXT, ONCE | {"best_of": 2, "stream": True}, 400, "best_of", ""),
        (TEXT, ONCE | {"suffix": "b"}, 400, "suffix", ""),
        ("/v1/embeddings", {}, 404, None, "POST /v1/embeddings:"),
    ],
)
def test_malformed_requests_are_refused_by_field(client, path, body, status, param, message):
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    error = error_of(client.post(path, content=content, headers={"content-type": "application/json"}), status)
    assert message in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_other_methods_and_content_types_are_refused(client):
    assert "Method Not Allowed" in error_of(client.get(TEXT), 405)["message"]
    assert "Method Not Allowed" in error_of(client.delete(CHAT), 405)["message"]
    for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
        answer = client.post(CHAT, content=json.dumps(HELLO), headers={"content-type": kind})
        assert "application/json" in error_of(answer, 415)["message"]


def test_limits_name_the_numbers(base_folder):
    served = load(str(base_folder), {}, Limits(body_bytes=200, prompt_tokens=8, max_tokens=5))
    with client_of(served) as client:
        assert "200 bytes" in error_of(client.post(TEXT, json=ONCE | {"user": "x" * 200}), 413)["message"]
        long = client.post(TEXT, json=ONCE | {"prompt": "123456789"})
        assert error_of(long, 400)["message"] == "prompt: 9 tokens; this server takes 8"
        asked = error_of(client.post(TEXT, json=ONCE | {"max_tokens": 6}), 400)
        assert (asked["param"], asked["message"]) == ("max_tokens", "max_tokens: 6; this server generates 5 at most")
        assert client.post(TEXT, json=ONCE | {"temperature": 0}).json()["usage"]["completion_tokens"] == 5


def test_the_default_length_is_limited_by_the_context(client):
    prompt = [5] * (CONTEXT - 3)
    usage = client.post(TEXT, json={"model": "tiny", "prompt": prompt, "temperature": 0}).json()["usage"]
    assert usage["completion_tokens"] == 3


class Endless:
    """A fake model whose answer continues until it is closed."""

    def __init__(self):
        self.running, self.closed = threading.Event(), threading.Event()

    def __call__(self, work):
        try:
            while True:
                self.running.set()
                time.sleep(0.005)
                yield Piece(0, "x", None)
        finally:
            self.closed.set()


def scope(path: str) -> dict:
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost:8000")]
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "asgi": {}}


async def ask(app, body: dict, gone: asyncio.Event, path=TEXT) -> list[dict]:
    """A request whose client stays until `gone`; the messages that were sent to it."""
    sent: list[dict] = []
    pending = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        if pending:
            return pending.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope(path), receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_stops_the_generation(served, monkeypatch, stream):
    async def scenario():
        endless, gone = Endless(), asyncio.Event()
        monkeypatch.setattr(served, "answer", endless)
        app = application(Endpoints(served))
        request = asyncio.create_task(ask(app, ONCE | {"stream": stream}, gone))
        await asyncio.to_thread(endless.running.wait, 10)
        await asyncio.sleep(0.1)
        assert not endless.closed.is_set()
        gone.set()
        await asyncio.wait_for(request, 10)
        assert await asyncio.to_thread(endless.closed.wait, 10)

    asyncio.run(scenario())


def test_a_full_queue_returns_429(served, monkeypatch):
    async def scenario():
        monkeypatch.setattr(served, "limits", Limits(queue=1))
        app = application(Endpoints(served))
        endless, gone, stays = Endless(), asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(served, "answer", endless)
        running = asyncio.create_task(ask(app, ONCE, gone))
        await asyncio.to_thread(endless.running.wait, 10)
        monkeypatch.undo()
        waiting = asyncio.create_task(ask(app, ONCE | GREEDY, stays))
        await asyncio.sleep(0.1)
        refused = await ask(app, ONCE, stays)
        assert refused[0]["status"] == 429
        assert (b"retry-after", b"1") in refused[0]["headers"]
        assert json.loads(refused[1]["body"])["error"]["code"] == "queue_full"
        gone.set()
        await asyncio.wait_for(running, 10)
        answer = await asyncio.wait_for(waiting, 10)
        assert answer[0]["status"] == 200

    asyncio.run(scenario())


def test_stop_ends_running_and_queued_requests(served, monkeypatch):
    async def scenario():
        endless, stays = Endless(), asyncio.Event()
        monkeypatch.setattr(served, "answer", endless)
        endpoints = Endpoints(served)
        app = application(endpoints)
        requests = [asyncio.create_task(ask(app, ONCE, stays)) for _ in range(2)]
        await asyncio.to_thread(endless.running.wait, 10)
        endpoints.stop()
        for request in requests:
            status, body = await asyncio.wait_for(request, 10)
            assert status["status"] == 503
            assert json.loads(body["body"])["error"]["message"] == "the server is shutting down"
        assert await asyncio.to_thread(endless.closed.wait, 10)

    asyncio.run(scenario())


def test_deadlines_end_requests(served, monkeypatch):
    monkeypatch.setattr(served, "limits", Limits(seconds=0.3))
    endless = Endless()
    monkeypatch.setattr(served, "answer", endless)
    with client_of(served) as client:
        error = error_of(client.post(TEXT, json=ONCE), 504)
        assert error["code"] == "timeout"
        assert endless.closed.wait(10)
        *_, last, end = client.post(TEXT, json=ONCE | {"stream": True}).text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        assert end == ""


def test_out_of_memory_and_internal_errors(served, client, monkeypatch):
    def failing(error):
        def answer(work):
            raise error
            yield

        monkeypatch.setattr(served, "answer", answer)
        return client.post(TEXT, json=ONCE)

    assert "1 prompts of 4 tokens" in error_of(failing(torch.OutOfMemoryError()), 503)["message"]
    assert error_of(failing(ZeroDivisionError("secret")), 500)["message"].startswith("internal error")
    monkeypatch.undo()
    assert client.post(TEXT, json=ONCE | GREEDY).status_code == 200


class TestLoading:
    def test_a_run_answers_with_and_without_its_adapter(self, adapters):
        served = load(str(adapters["poet"]), {"clerk": str(adapters["clerk"])})
        assert served.names == {"poet": "default", "tiny": None, "clerk": "adapter_2"}

    def test_no_template_takes_one_user_message(self, base_folder, served, monkeypatch):
        monkeypatch.setattr(served.conversation, "style", "instruction")
        monkeypatch.setattr(served, "template", None)
        with client_of(served) as client:
            answer = client.post(CHAT, json=HELLO | GREEDY).json()
            expected = theirs(base_folder, served.conversation.prompt("Hello"))
            assert answer["choices"][0]["message"]["content"] == expected
            turns = [{"role": "system", "content": "x"}, *HELLO["messages"]]
            assert "template" in error_of(client.post(CHAT, json=HELLO | {"messages": turns}), 400)["message"]

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("module", ["norm", "embed_tokens"])
    def test_a_trained_copy_of_a_module_answers_for_its_adapter_alone(self, base_folder, adapters, tmp_path, module):
        """Also if the server was started with the adapter."""
        own = random_adapter(base_folder, tmp_path / "own", 5, [module])
        folders = {"tiny": None, "own": own, "poet": adapters["poet"]}
        for served in (load(str(base_folder), {"own": str(own), "poet": str(adapters["poet"])}),
                       load(str(own), {"poet": str(adapters["poet"])})):  # fmt: skip
            client = client_of(served)
            for name, folder in folders.items():
                answer = client.post(TEXT, json=ONCE | GREEDY | {"model": name}).json()["choices"][0]["text"]
                assert answer == theirs(base_folder, ONCE["prompt"], folder), name

    def test_a_used_name_and_a_folder_without_adapter_are_refused(self, base_folder, adapters, tmp_path):
        with pytest.raises(ConfigError, match="--adapter"):
            load(str(base_folder), {"tiny": str(adapters["poet"])})
        with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
            load(str(base_folder), {"poet": str(base_folder)})

    @pytest.mark.parametrize("first", [True, False])
    def test_an_adapter_of_another_base_is_refused(self, first, adapters, base_folder, tiny_checkpoint, tmp_path):
        other = random_adapter(tiny_checkpoint("Llama"), tmp_path / "other", 3)
        further = {} if first else {"poet": str(adapters["poet"])}
        message = r"other\S+ \S+q_proj\S+ .*\(2, 64\).*\(2, 32\)"
        with pytest.raises(CheckpointError, match=message):
            load(str(base_folder), further | {"other": str(other)})
