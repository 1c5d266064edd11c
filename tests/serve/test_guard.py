"""Access control: clients must know the server's name and key; pages of other sites are refused."""

import socket

import pytest
from starlette.testclient import TestClient

from halfbyte.cli import commands as command
from halfbyte.serve import guard, run
from halfbyte.serve.app import Endpoints, application
from halfbyte.serve.guard import LOCAL, Access, access_to
from halfbyte.serve.model import load
from halfbyte.utils.errors import ConfigError, UsageError

CHAT, MODELS = "/v1/chat/completions", "/v1/models"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
EVIL = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}


@pytest.fixture(scope="module")
def served(base_folder):
    return load(str(base_folder), {})


def client_of(served, access=LOCAL, host="127.0.0.1:8000"):
    return TestClient(application(Endpoints(served), access), headers={"host": host})  # an IPv6 name is no URL for it


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"])
def test_loopback_names_are_allowed(served, host):
    client = client_of(served, host=host)
    assert client.get(MODELS).status_code == 200
    assert client.post(CHAT, json=HELLO, headers={"origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "127.0.0.1.evil.example", "", "[::1", "a@localhost", "localhost/a"]
)
def test_other_names_are_refused(served, host):
    """A page whose name leads to 127.0.0.1 is the browser's same origin: it could post JSON and read the answer."""
    client = client_of(served)
    for answer in (client.get(MODELS, headers={"host": host}), client.post(CHAT, json=HELLO, headers={"host": host})):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "host_not_allowed")


@pytest.mark.parametrize(
    "origin", ["http://evil.example:8000", "https://localhost.evil", "null", "file://", "http://[::1", ""]
)
def test_pages_of_other_sites_are_refused(served, origin):
    for answer in (
        client_of(served).post(CHAT, json=HELLO, headers={"origin": origin}),
        client_of(served).get(MODELS, headers={"origin": origin}),
        client_of(served).options(CHAT, headers={"origin": origin, "access-control-request-method": "POST"}),
    ):
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "origin_not_allowed"


def test_health_needs_no_name_or_key(served):
    """Health probes use an address and no key."""
    client = client_of(served, Access(api_key="secret"), host="10.1.2.3:8000")
    answer = client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert client.get("/health/", headers=EVIL).status_code == 400


def test_allowed_hosts_are_answered(served):
    access = access_to("127.0.0.1", "127.0.0.1", ["gpu.lan", "*.example.com"], None)
    for host, status in (("gpu.lan", 200), ("a.example.com", 200), ("localhost", 200), ("example.org", 400)):
        found = client_of(served, access).get(MODELS, headers={"host": host, "origin": f"https://{host}"})
        assert found.status_code == status
    anyone = access_to("127.0.0.1", "127.0.0.1", ["*"], None)
    assert client_of(served, anyone).get(MODELS, headers=EVIL).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/none"])
@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "secret", "Basic secret", "Bearer secret2"])
def test_requests_without_the_key_are_refused(served, path, header):
    client = client_of(served, Access(api_key="secret"))
    headers = {} if header is None else {"authorization": header}
    for answer in (client.get(path, headers=headers), client.post(path, json=HELLO, headers=headers)):
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert "secret" not in answer.text


def test_requests_with_the_key_are_answered(served, monkeypatch):
    compared = []
    honest = guard.hmac.compare_digest
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda *both: compared.append(both) or honest(*both))
    client = client_of(served, Access(api_key="secret"))
    for kind in ("Bearer", "bearer"):
        assert client.post(CHAT, json=HELLO, headers={"authorization": f"{kind} secret"}).status_code == 200
    assert client.get(MODELS, headers={"authorization": b"Bearer \xff\xfe"}).status_code == 401
    assert len(compared) == 3  # in constant time
    assert client_of(served).get(MODELS, headers={"authorization": "Bearer of OpenAI's clients"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "address", "needed"),
    [
        ("localhost", "127.0.0.1", False),
        ("::1", "::1", False),
        ("0.0.0.0", "0.0.0.0", True),
        ("", "0.0.0.0", True),
        ("127.evil.example", "203.0.113.5", True),
        ("fe80::1%eth0", "fe80::1%eth0", True),
    ],
)
def test_reachable_hosts_need_a_key(host, address, needed):
    if needed:
        with pytest.raises(ConfigError) as refused:
            access_to(host, address, [], None)
        assert "HALFBYTE_API_KEY" in refused.value.fix
    access = access_to(host, address, [], "key" if needed else None)
    named = f"[{host}]" if ":" in host else host
    assert access.hosts == tuple(dict.fromkeys([*guard.LOOPBACK, named]))


def test_a_missing_key_is_reported_before_loading(base_folder, monkeypatch):
    monkeypatch.setattr(run, "load", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0:"):
        command.serve_model(str(base_folder), "0.0.0.0", 0, [])
    with socket.socket() as again:
        again.bind(("0.0.0.0", 0))


def test_a_key_is_read_from_a_file_of_the_user(tmp_path):
    path = tmp_path / "key"
    path.write_text("secret\n")
    path.chmod(0o600)
    assert command.key_of(None, path) == "secret"
    assert command.key_of("other", None) == "other"
    with pytest.raises(UsageError, match="--api-key-file"):
        command.key_of("other", path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="--api-key-file"):
        command.key_of(None, path)
    with pytest.raises(ConfigError):
        command.key_of(None, tmp_path / "none")


@pytest.mark.parametrize("key", ["", " ", "schlüssel", "a\nb", " a"])
def test_invalid_keys_are_refused(key):
    with pytest.raises(ConfigError, match="--api-key"):
        access_to("127.0.0.1", "127.0.0.1", [], key)


@pytest.mark.parametrize("name", ["a*", "*a.com", "http://a.com", "a/b"])
def test_invalid_allowed_hosts_are_refused(name):
    with pytest.raises(ConfigError, match="--allowed-host"):
        access_to("127.0.0.1", "127.0.0.1", [name], None)


def test_the_command_line_passes_hosts_and_key(base_folder, monkeypatch):
    from typer.testing import CliRunner

    from halfbyte.cli.app import app

    seen = []
    monkeypatch.setattr("halfbyte.serve.run.serve", lambda *words: seen.append(words))
    model = str(base_folder)
    words = ["serve", model, "--allowed-host", "gpu.lan", "--allowed-host", "b", "--trust-remote-code"]
    assert CliRunner().invoke(app, [*words, "--api-key", "one"]).exit_code == 0
    assert CliRunner().invoke(app, ["serve", model], env={guard.KEY_VARIABLE: "two"}).exit_code == 0
    assert [each[-4:] for each in seen] == [(["gpu.lan", "b"], "one", True, "auto"), ([], "two", False, "auto")]
