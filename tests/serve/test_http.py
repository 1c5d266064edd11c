"""The server at a socket: malformed, slow and partial requests, and responses that arrive."""

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.serve import protocol
from halfbyte.serve.app import Endpoints
from halfbyte.serve.guard import LOCAL
from halfbyte.serve.model import Limits, load
from halfbyte.serve.run import Server, configured

BODY = json.dumps({"model": "tiny", "prompt": "Once", "max_tokens": 2, "temperature": 0}).encode()
CLOSE = b"connection: close\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@contextlib.contextmanager
def running(served):
    """The port of a server in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoints = Endpoints(served)
        server = Server(configured(endpoints, LOCAL), endpoints)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def port(base_folder):
    with running(load(str(base_folder), {}, Limits(body_bytes=100_000, body_seconds=1.0, max_tokens=8))) as port:
        yield port


@pytest.fixture
def ask(port):
    """Sends bytes, one piece after the other, and gives all that comes back until the server closes; `leave`: says
    that nothing follows, as a client does that has gone."""

    def ask(*pieces: bytes, leave=False) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            for piece in pieces:
                client.sendall(piece)
                time.sleep(0.02 if len(pieces) > 1 else 0)
            if leave:
                client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(2**16), b""))

    return ask


def answers(received: bytes) -> list[tuple[int, dict]]:
    """Return status and JSON of each response in the received bytes."""
    found = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        assert headers["content-type"] == "application/json", head
        length = int(headers["content-length"])
        found.append((int(lines[0].split()[1]), json.loads(received[:length])))
        received = received[length:]
    return found


def refused(received: bytes) -> tuple[int, str]:
    ((status, body),) = answers(received)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]["message"]


def whole(body: bytes, head: bytes = HEAD, more: bytes = CLOSE) -> bytes:
    return head + more + b"content-length: %d\r\n\r\n" % len(body) + body


def test_a_request_is_answered(ask):
    ((status, body),) = answers(ask(whole(BODY)))
    assert (status, body["usage"]["completion_tokens"]) == (200, 2)


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"GET\r\n\r\n", 400, "HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 64 + b"\r\n", 400, "HTTP/1.1"),  # https
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\na: " + b"x" * 70_000, 431, "HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nna\0me: x\r\n\r\n", 400, "HTTP/1.1"),
        (b"GET /%00%ff%0a HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 404, r"GET /\x00"),
        (b"GET /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 405, "Method Not Allowed"),
        (HEAD + b"content-length: 1e3\r\n\r\n", 400, "Content-Length"),
        (HEAD + b"transfer-encoding: gzip\r\n\r\n", 501, "Transfer-Encoding"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400, "HTTP/1.1"),
        (HEAD + CLOSE + b"transfer-encoding: chunked\r\n\r\n" + b"2\r\n{}\r\n0\r\n\r\n", 400, "model: Field required"),
        (HEAD + b"expect: 100-continue\r\ncontent-length: 200000\r\n\r\n", 413, "100000 bytes"),
        (HEAD + b"upgrade: websocket\r\nconnection: upgrade, close\r\n" + b"content-length: 2\r\n\r\n{}", 400, "model"),
        (whole(BODY, HEAD.replace(b"localhost", b"evil.example")), 400, "'evil.example'"),
        (whole(BODY, HEAD.replace(b"application/json", b"text/plain")), 415, "application/json"),
    ],
)
def test_malformed_http_gets_an_error_in_openais_format(ask, sent, status, message):
    found = refused(ask(sent))
    assert found[0] == status
    assert message in found[1]


def test_partial_requests_are_closed_silently(ask):
    for cut in (1, 20, len(HEAD), len(whole(BODY)) - 1):
        assert b"200 OK" not in ask(whole(BODY)[:cut], leave=True)
    ((status, _),) = answers(ask(*(bytes([byte]) for byte in whole(BODY)[:60]), whole(BODY)[60:]))
    assert status == 200


def test_pipelined_requests_are_answered_in_order(ask):
    health = b"GET /health HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n"
    asked = whole(b"{}", more=b"") + whole(BODY, more=b"") + health
    assert [status for status, _ in answers(ask(asked))] == [400, 200, 200]
    assert [status for status, _ in answers(ask(whole(BODY, more=b"") + b"\0garbage\r\n\r\n"))] == [200, 400]


@pytest.mark.parametrize("close", [b"", CLOSE])
def test_a_body_that_is_too_long_is_drained_before_the_response(ask, close):
    body = b"[" + b" " * 20_000_000 + b"]"
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for sent in (whole(body, more=close), HEAD + close + chunked):
        assert refused(ask(sent)) == (413, "the body is longer than 100000 bytes")


def test_clients_that_send_everything_first_get_the_refusal(port):
    """Connection: close, as urllib sends."""
    for headers, status in (({"content-type": "application/json"}, 413), ({"content-type": "text/plain"}, 415)):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", b" " * 20_000_000, headers)
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=30)
        assert error.value.code == status
        assert json.load(error.value)["error"]["type"] == "invalid_request_error"
        error.value.close()


def test_slow_bodies_time_out(ask, monkeypatch):
    monkeypatch.setattr(protocol, "REST_SECONDS", 0.1)
    status, message = refused(ask(whole(BODY)[:-5]))
    assert (status, message) == (408, "the request ran out of time before its body had arrived")


def test_slow_clients_do_not_block_others(base_folder, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(protocol, "CONNECTIONS", 110)
    with running(load(str(base_folder), {}, Limits(body_seconds=2.0))) as port, contextlib.ExitStack() as clients:

        def connect(sent: bytes) -> socket.socket:
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            client.sendall(sent)
            return client

        slow = [connect(whole(BODY)[: 5 + at]) for at in range(100)] + [connect(b"") for _ in range(5)]
        client = connect(whole(BODY))
        assert client.recv(2**16).startswith(b"HTTP/1.1 200 OK")
        more = [connect(b"") for _ in range(6)]
        assert more[-1].recv(2**16).startswith(b"HTTP/1.1 503 ")
        said = [client.recv(2**16)[:12] for client in slow]
        assert set(said) == {b"", b"HTTP/1.1 408"}
        assert said[-5:] == [b""] * 5  # they had sent nothing
        assert connect(whole(BODY)).recv(2**16).startswith(b"HTTP/1.1 200 OK")


# Texts that a field may hold, and values of every type, deep and shallow.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([-1, 0, 1, 2, 2**63, 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "refusal", "x"]),
        VALUES | st.sampled_from(["user", "assistant", "system", "tool", "developer", [{"type": "text", "text": "a"}]]),
        max_size=4,
    ),
    max_size=3,
)
NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "chat_template_kwargs", "n", "seed", "stop",
    "stream", "stream_options", "user", "metadata", "max_completion_tokens", "logprobs", "top_logprobs", "store",
    "tools", "tool_choice", "response_format", "logit_bias", "best_of", "echo", "service_tier", "x",
)  # fmt: skip
FIELDS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3)


@pytest.fixture(scope="module")
def client(base_folder):
    from starlette.testclient import TestClient

    from halfbyte.serve.app import application

    served = load(str(base_folder), {}, Limits(max_tokens=4))
    with TestClient(application(Endpoints(served)), base_url="http://localhost") as client:
        yield client


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    fields=FIELDS,
    own=st.fixed_dictionaries(
        {"model": st.just("tiny") | VALUES, "max_tokens": st.just(2) | VALUES},
        optional={"messages": st.just([{"role": "user", "content": "a"}]) | MESSAGES | VALUES, "prompt": VALUES},
    ),
)
def test_any_body_is_answered_or_refused(client, path, fields, own):
    """NaN and infinities included, which Python writes into JSON."""
    answer = client.post(path, content=json.dumps(fields | own), headers={"content-type": "application/json"})
    if answer.status_code == 200:
        return
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 1000
