"""Chats that are kept for their clients."""

import json

import pytest

from halfbyte.serve.model import load
from halfbyte.serve.requests import ChatRequest
from halfbyte.serve.stored import StoredChats
from tests.helpers.openai_client import CHAT, GREEDY, HELLO, client_of, error_of, events

STORED = HELLO | GREEDY | {"store": True, "metadata": {"job": "1"}}


@pytest.fixture(scope="module")
def served(base_folder, in_float32):
    return load(str(base_folder), {})


@pytest.fixture
def client(served):
    with client_of(served) as client:
        yield client


def test_a_chat_is_kept_as_it_was_answered(client):
    answer = client.post(CHAT, json=STORED | {"seed": 3}).json()
    assert client.post(CHAT, json=HELLO | GREEDY).status_code == 200  # not kept
    kept = client.get(f"{CHAT}/{answer['id']}").json()
    assert answer.items() <= kept.items()
    assert kept["metadata"] == {"job": "1"}
    assert kept["seed"] == 3
    assert [each["id"] for each in client.get(CHAT).json()["data"]] == [answer["id"]]
    (message,) = client.get(f"{CHAT}/{answer['id']}/messages").json()["data"]
    assert message == {"id": f"{answer['id']}-0", "role": "user", "content": "Hello"}


def test_a_streamed_chat_is_kept_whole(client):
    streamed = events(client.post(CHAT, json=STORED | {"stream": True}))
    text = "".join(each["choices"][0]["delta"].get("content", "") for each in streamed)
    kept = client.get(f"{CHAT}/{streamed[0]['id']}").json()
    assert kept["choices"][0]["message"]["content"] == text
    assert kept["usage"]["completion_tokens"] == 12


def test_other_metadata_and_no_chat_any_more(client):
    name = client.post(CHAT, json=STORED).json()["id"]
    assert client.post(f"{CHAT}/{name}", json={"metadata": {"job": "2"}}).json()["metadata"] == {"job": "2"}
    assert client.get(CHAT, params={"metadata[job]": "2"}).json()["data"][0]["id"] == name
    assert client.get(CHAT, params={"metadata[job]": "1"}).json()["data"] == []
    assert client.get(CHAT, params={"model": "other"}).json()["data"] == []
    assert client.delete(f"{CHAT}/{name}").json() == {"object": "chat.completion.deleted", "id": name, "deleted": True}
    for gone in (client.get(f"{CHAT}/{name}"), client.delete(f"{CHAT}/{name}"), client.get(f"{CHAT}/{name}/messages")):
        assert "true" in error_of(gone, 404)["message"]


def test_pages(client):
    names = [client.post(CHAT, json=STORED | {"max_tokens": 0}).json()["id"] for _ in range(5)]

    def page(**asked):
        found = client.get(CHAT, params=asked).json()
        return [names.index(each["id"]) for each in found["data"]], found["has_more"]

    assert page() == ([0, 1, 2, 3, 4], False)
    assert page(limit=2) == ([0, 1], True)
    assert page(limit=2, after=names[2]) == ([3, 4], False)
    assert page(limit=2, after=names[2], order="desc") == ([1, 0], False)
    assert page(limit=0) == ([], True)
    assert page(after="nothing") == ([], False)
    for asked in ({"limit": "many"}, {"limit": 101}, {"limit": -1}, {"order": "up"}):
        assert error_of(client.get(CHAT, params=asked), 400)["param"] in asked


def test_the_newest_are_kept_within_bounds():
    chats = StoredChats(most=3, most_bytes=3000)

    def add(name, text="x"):
        asked = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": text}]})
        chats.add(asked, {"id": name, "model": "m"})

    for number in range(5):
        add(str(number))
    assert list(chats.chats) == ["2", "3", "4"]
    add("large", "x" * 2700)
    assert list(chats.chats) == ["large"]
    assert chats.bytes == sum(chat.size for chat in chats.chats.values()) <= 3000
    add("larger", "x" * 4000)
    assert not chats.chats
    assert chats.bytes == 0
    chats.add(ChatRequest.model_validate(json.loads(json.dumps(HELLO))), {"id": "a", "model": "m"})
    chats.update("a", {"k": "v" * 100})
    chats.delete("a")
    assert chats.bytes == 0
