"""Requests to the server's application in this process, and readings of its responses."""

import json

from starlette.testclient import TestClient

from halfbyte.serve.app import Endpoints, application
from halfbyte.serve.guard import LOCAL

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
ONCE = {"model": "tiny", "prompt": "Once"}
GREEDY = {"temperature": 0, "max_tokens": 12}


def client_of(served, access=LOCAL, **keys) -> TestClient:
    return TestClient(application(Endpoints(served), access), base_url="http://localhost:8000", **keys)


def events(response) -> list[dict]:
    """The data of a stream, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
