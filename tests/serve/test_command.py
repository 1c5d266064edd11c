"""`halfbyte serve` as a process: it answers, and leaves at a signal with 0."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from halfbyte.cli import commands as command
from halfbyte.serve import model as serve_model
from halfbyte.serve.requests import CompletionRequest
from halfbyte.utils.errors import ConfigError, UsageError


@pytest.mark.slow
def test_a_signal_ends_the_process_during_a_request(base_folder, adapters):
    arguments = ["serve", str(base_folder), "--port", "0", "--adapter", f"poet={adapters['poet']}"]
    program = [sys.executable, "-m", "halfbyte", *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            found = re.fullmatch(r"serving tiny, poet at (http://127\.0\.0\.1:\d+/v1); Ctrl-C stops\n", line)
            assert found, line + server.stderr.read()
            body = json.dumps({"model": "poet", "prompt": "Once", "max_tokens": 100, "stream": True, "temperature": 0})
            request = urllib.request.Request(
                f"{found[1]}/completions", body.encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert response.readline().startswith(b"data: ")
                server.send_signal(signal.SIGTERM)  # the request that runs is answered to its end
                assert response.read().endswith(b"data: [DONE]\n\n")
            assert server.wait(60) == 0
            assert "Traceback" not in server.stderr.read()
        finally:
            server.kill()


STUCK = """
import sys, time
from halfbyte.cli.app import app
from halfbyte.serve.model import Served

def answer(self, work):
    print("running", flush=True)
    time.sleep(60)
    yield

Served.answer = answer
app(sys.argv[1:])
"""


def _hears_hangups():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run after nohup


@pytest.mark.slow
def test_a_signal_ends_the_process_within_5_seconds(base_folder):
    """A long prompt on a CPU takes longer, and nothing interrupts it; a second request waits for its turn."""
    program = [sys.executable, "-c", STUCK, "serve", str(base_folder), "--port", "0"]
    with (
        subprocess.Popen(
            program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_hears_hangups
        ) as server,
        ThreadPoolExecutor(2) as clients,
    ):
        try:
            port = int(re.search(r":(\d+)/v1", server.stdout.readline())[1])

            def ask() -> tuple[int, str]:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                body = json.dumps({"model": "tiny", "prompt": "Once"})
                connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                return answer.status, json.load(answer)["error"]["message"]

            asked = [clients.submit(ask) for _ in range(2)]
            assert server.stdout.readline() == "running\n"
            began = time.monotonic()
            server.send_signal(signal.SIGHUP)  # its terminal is gone
            assert server.wait(10) == 0
            assert time.monotonic() - began < 5
            assert [each.result() for each in asked] == [(503, "the server is shutting down")] * 2
            assert "Traceback" not in server.stderr.read()
        finally:
            server.kill()


def test_a_port_in_use_is_reported_before_loading(base_folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            command.serve_model(str(base_folder), "127.0.0.1", port, [])


@pytest.mark.parametrize(
    ("host", "cause"), [("nowhere.invalid", "[A-Z][a-z]"), ("x" * 70, "invalid host name"), ("a\0b", "[A-Z][a-z]")]
)
def test_invalid_hosts_are_refused(base_folder, host, cause):
    with pytest.raises(ConfigError, match=f"(?s):0: {cause}.*--host.*--port"):
        command.serve_model(str(base_folder), host, 0, [])


@pytest.mark.parametrize(
    ("adapters", "message"),
    [(["poet"], "--adapter"), (["=x"], None), (["a=x", "a=y"], None)],
)
def test_an_adapter_is_a_name_and_a_path(adapters, message):
    with pytest.raises(ConfigError, match=message):
        command.serve_model("m", "127.0.0.1", 0, adapters)


def test_an_unknown_cache_is_refused_before_the_model_is_read():
    with pytest.raises(UsageError, match="--kv-cache"):
        command.serve_model("m", "127.0.0.1", 0, [], kv_cache="int3")


def test_answers_use_the_servers_cache(base_folder, monkeypatch):
    kinds = []
    monkeypatch.setattr(serve_model, "continue_texts", lambda *_, kv_cache, **__: kinds.append(kv_cache) or iter(()))
    served = serve_model.load(str(base_folder), {}, kv_cache="int4")
    list(served.answer(served.prepare(CompletionRequest(model=next(iter(served.names)), prompt=[[3, 4]]))))
    assert kinds == ["int4"]


def test_a_missing_extra_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"(?s)'halfbyte\[serve\]'"):
        command.serve_model("m", "127.0.0.1", 0, [])
