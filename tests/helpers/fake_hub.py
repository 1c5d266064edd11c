"""A stand-in for the Hugging Face hub: repositories in memory, behind the HTTP interface that huggingface_hub uses."""

import base64
import contextlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

TOKEN = "hf_" + "secret" * 5


class FakeHub:
    """Files by repository and path, commit messages in order, and what else was asked.

    Attributes:
        failing: answer every commit with status 503.
    """

    def __init__(self):
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool | None] = {}
        self.commits: list[str] = []
        self.requests: list[str] = []
        self.failing, self.endpoint = False, ""

    def answer(self, method, path, body, token):
        """Return status and document for a request."""
        self.requests.append(f"{method} {path}")
        if method == "HEAD":
            return 200, {}
        if path == "/api/validate-yaml":
            return 200, {"errors": card_errors(json.loads(body)["content"]), "warnings": []}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            status = 409 if name in self.files else 200
            self.files.setdefault(name, {})
            private = asked.get("private") or asked.get("visibility") == "private"  # by the version
            self.private.setdefault(name, private)
            return status, {"url": f"{self.endpoint}/{name}", "name": name, "id": name}
        if found := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            entries = json.loads(body)["files"]
            return 200, {
                "files": [{"path": e["path"], "uploadMode": "regular", "shouldIgnore": False} for e in entries]
            }
        if found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            if self.failing:
                return 503, {"error": "down for maintenance"}
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "header":
                    self.commits.append(entry["value"]["summary"])
                elif entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.files[found[1]][entry["value"]["path"]] = content
            url = f"{self.endpoint}/{found[1]}/commit/{len(self.commits):040x}"
            return 200, {"commitUrl": url, "commitOid": f"{len(self.commits):040x}", "success": True}
        return 404, {"error": f"no {method} {path}"}


def card_errors(content):
    """Errors of a card's header, by the rules of the hub that concern halfbyte's keys."""
    header = yaml.safe_load(re.match(r"---\n(.*?)\n---", content, re.DOTALL)[1])
    errors = []
    if not all(isinstance(tag, str) for tag in header.get("tags", [])):
        errors.append("tags must be strings")
    base = header.get("base_model")
    if base is not None and not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", base):
        errors.append("base_model must be an id of the hub")
    errors += [f"{key} must be text" for key in ("library_name", "pipeline_tag") if not isinstance(header[key], str)]
    return [{"message": error} for error in errors]


@contextlib.contextmanager
def running(monkeypatch):
    """Run the stand-in, and let huggingface_hub use it."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _reply(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else self._chunks()
            path = self.path.partition("?")[0]
            status, document = hub.answer(self.command, path, body, self.headers.get("Authorization"))
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def _chunks(self):
            if self.headers.get("Transfer-Encoding") != "chunked":
                return b""
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        do_GET = do_POST = do_HEAD = _reply

        def log_message(self, *_):
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    from huggingface_hub import constants

    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
