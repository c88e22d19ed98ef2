"""A local model hub with the part of the HTTP API that huggingface_hub uses."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_token_with_write_access"


@dataclass
class Hub:
    """Content of the hub: files by repository, and what was requested."""

    endpoint: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)  # of the commits
    licenses: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)


@contextmanager
def fake_hub() -> Iterator[Hub]:
    """Run the hub in a thread; use it by setting HF_ENDPOINT to `endpoint`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def respond(self, status: int, content: Any = None, **headers: str) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.respond(401, {"error": "Invalid username or password."})
            parts = self.path.strip("/").split("/")
            if parts == ["api", "repos", "create"]:
                request = json.loads(body)
                name = "/".join(part for part in (request.get("organization"), request["name"]) if part)
                name = name if "/" in name else f"me/{name}"
                hub.repositories.setdefault(name, {})
                hub.private[name] = request.get("private") or request.get("visibility") == "private"
                return self.respond(200, {"url": f"{hub.endpoint}/{name}"})
            if parts == ["api", "validate-yaml"]:
                return self.respond(200, {"errors": [], "warnings": []})
            name, action = "/".join(parts[2:4]), parts[4]
            if action == "preupload":
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                return self.respond(200, {"files": files})
            if action == "commit":
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "header":
                        hub.messages.append(line["value"]["summary"])
                    else:
                        hub.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                commit = {"commitUrl": f"{hub.endpoint}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
                return self.respond(200, commit)
            return self.respond(404, {"error": self.path})

        def do_GET(self) -> None:
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                name = "/".join(parts[2:4])
                if name not in hub.repositories:
                    return self.respond(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
                if "tree" in parts:
                    entries = [
                        {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                        for path, content in hub.repositories[name].items()
                    ]
                    return self.respond(200, entries)
                files = [{"rfilename": path, "size": len(data)} for path, data in hub.repositories[name].items()]
                info = {"id": name, "sha": COMMIT, "siblings": files, "private": False, "tags": []}
                info |= {"gated": "auto" if name in hub.gated else False}
                info |= {"cardData": {"license": hub.licenses[name]}} if name in hub.licenses else {}
                return self.respond(200, info)
            name, path = "/".join(parts[:2]), "/".join(parts[4:])
            content = hub.repositories.get(name, {}).get(path)
            if content is None:
                return self.respond(404, {"error": "not found"}, X_Error_Code="EntryNotFound")
            tag = f'"{hashlib.sha1(content).hexdigest()}"'
            return self.respond(200, content, ETag=tag, X_Repo_Commit=COMMIT, Content_Type="application/octet-stream")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
