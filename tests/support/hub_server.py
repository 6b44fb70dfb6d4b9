"""Serves the API of the Hugging Face Hub locally: data sets, uploads, errors and cut transfers."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from support import served
from support.command import Served
from support.served import Server

TOKEN, READ_TOKEN = "hf_write", "hf_read"
USER, ORG, READ_ONLY_ORG = "someone", "team", "museum"


@dataclass
class Repo:
    """A repository: files by commit, and commits by revision."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    visibility: str = "public"
    gated: bool = False

    def commit(self, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Add files to a revision; return the commit."""
        content = {**self.commits.get(self.revisions.get(revision, ""), {}), **files}
        text = json.dumps([sorted(content), len(self.commits)])
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha], self.revisions[revision] = content, sha
        return sha

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        sha = self.revisions.get(revision, revision)
        return (sha, self.commits[sha]) if sha in self.commits else None


@dataclass
class Hub:
    """State of the server.

    Attributes:
        url: Address of the server.
        repos: Repositories by kind and name, ``datasets/ORG/NAME`` or ``models/ORG/NAME``.
        faults: Answers by a part of the path: a list of statuses, or of fractions of a file after
            which the connection ends; each is used once, and the last one stays.
        asked: Number of requests by method and path.
        ranges: Range headers of requests.
    """

    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    faults: dict[str, list[int | float | None]] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    ranges: list[str] = field(default_factory=list)

    def dataset(self, name: str, files: Mapping[str, bytes | str], revision: str = "main") -> str:
        """Put files into a data set; return the commit."""
        repo = self.repos.setdefault(f"datasets/{name}", Repo())
        content = {
            path: text.encode() if isinstance(text, str) else text for path, text in files.items()
        }
        return repo.commit(content, revision)

    def model(self, name: str) -> dict[str, bytes]:
        """Return the files of an uploaded model."""
        found = self.repos[f"models/{name}"].files("main")
        assert found is not None
        return found[1]

    def fault(self, path: str) -> int | float | None:
        """Return the fault of a path; it is used up unless it is the last one."""
        for part, faults in self.faults.items():
            if part in path and faults:
                return faults.pop(0) if len(faults) > 1 else faults[0]
        return None

    def environment(self, folder: Path, *, token: str = "") -> dict[str, str]:
        """Return the environment of a command that uses the server, with a cache in a folder."""
        home = {"HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "cache")}
        return {**home, "HF_ENDPOINT": self.url, "HF_TOKEN": token}

    def use(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, token: str = "") -> None:
        """Let this process use the server, with a cache in a folder."""
        for name, value in self.environment(folder, token=token).items():
            monkeypatch.setenv(name, value)
        for place, name, value in _read_at_import():
            monkeypatch.setattr(place, name, value)


def _read_at_import() -> list[tuple[Any, str, Any]]:
    """Return what huggingface_hub reads from the environment when it is imported, read again."""
    from huggingface_hub import constants, hf_api

    url, home = os.environ["HF_ENDPOINT"], os.environ["HF_HOME"]
    return [
        (constants, "ENDPOINT", url),
        (
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        ),
        (constants, "HF_HUB_CACHE", f"{home}/hub"),
        (constants, "HF_TOKEN_PATH", f"{home}/token"),
        (hf_api, "api", hf_api.HfApi(endpoint=url)),
    ]


@dataclass
class ServedAtHub(Served):
    """The command and its ranks, forked from the server of the tests, with a local Hub.

    Attributes:
        hub: State of the Hub.
    """

    hub: Hub

    def start(self, *overrides: str) -> served.Forked:
        """Start the command without waiting for it."""
        return served.Forked(
            _command,
            self.server,
            self.hub.environment(self.folder),
            *overrides,
            folder=self.folder,
            environment=self.environment(),
        )


def _command(server: Server, variables: dict[str, str], *overrides: str) -> None:
    """Run the ``axonlaunch`` command with a Hub."""
    _with_hub(
        variables, partial(served.command, server, around=partial(_with_hub, variables)), *overrides
    )


def _with_hub(variables: dict[str, str], function: Callable[..., None], *args: Any) -> None:
    """Call a function in a forked process that uses a Hub."""
    os.environ.update(variables)
    for place, name, value in _read_at_import():
        setattr(place, name, value)
    function(*args)


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Run the server; yield its state."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign] # a client may go away
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        return hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        path = unquote(urlsplit(self.path).path)
        self.hub.asked[f"{self.command} {path}"] += 1
        fault = self.hub.fault(f"{self.command} {path}")
        if isinstance(fault, int):
            self._send(fault, {"error": "made to fail"})
            return
        if found := re.fullmatch(
            r"/datasets/([^/]+/[^/]+)/resolve/(refs/\w+/\w+|[^/]+)/(.+)", path
        ):
            self._file(*found.groups(), cut=fault)  # type: ignore[arg-type]
        elif path == "/api/whoami-v2":
            self._whoami()
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif found := re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(.*))?", path):
            self._repo(found[1], found[2], found[3] or "", body)
        else:
            self._send(404, {"error": f"no such path {path}"})

    def _chunks(self) -> bytes:
        parts = []
        while length := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(length))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _file(self, name: str, revision: str, path: str, *, cut: float | None) -> None:
        repo = self.hub.repos.get(f"datasets/{name}")
        if self._is_refused(repo):
            return
        assert repo is not None
        found = repo.files(revision)
        if found is None or path not in found[1]:
            self._send(404, {"error": "Entry not found"}, **{"X-Error-Code": "EntryNotFound"})
            return
        content, status, headers = found[1][path], 200, {}
        if (wanted := self.headers.get("Range")) is not None:
            self.hub.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content, status = content[start:], 206
        self.send_response(status)
        etag = hashlib.sha256(found[1][path]).hexdigest()
        headers |= {"ETag": f'"{etag}"', "X-Repo-Commit": found[0], "Accept-Ranges": "bytes"}
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(cut, float):
            content, self.close_connection = content[: int(cut * len(content))], True
        self.wfile.write(content)

    def _is_refused(self, repo: Repo | None) -> bool:
        """Refuse a missing or gated repository, as the Hub does for a user who is not logged in."""
        if repo is None:
            self._send(401, {"error": "not found"}, **{"X-Error-Code": "RepoNotFound"})
        elif repo.gated:
            self._send(403, {"error": "gated"}, **{"X-Error-Code": "GatedRepo"})
        return repo is None or repo.gated

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _whoami(self) -> None:
        if self._token() not in (TOKEN, READ_TOKEN):
            self._send(401, {"error": "Invalid username or password."})
            return
        role = "write" if self._token() == TOKEN else "read"
        orgs = [
            {"name": ORG, "roleInOrg": "write", "type": "org"},
            {"name": READ_ONLY_ORG, "roleInOrg": "read", "type": "org"},
        ]
        token = {"accessToken": {"role": role, "displayName": "test"}}
        self._send(200, {"type": "user", "name": USER, "orgs": orgs, "auth": token})

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request.get('organization') or USER}/{request['name']}"
        if self._token() != TOKEN:
            self._send(403, {"error": "no right to write"})
            return
        status = 409 if f"models/{name}" in self.hub.repos else 200
        visibility = request.get("visibility") or (
            "private" if request.get("private") else "public"
        )
        self.hub.repos.setdefault(f"models/{name}", Repo(visibility=visibility)).commit({})
        self._send(status, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def _repo(self, kind: str, name: str, rest: str, body: bytes) -> None:
        repo = self.hub.repos.get(f"{kind}/{name}")
        if self._is_refused(repo):
            return
        assert repo is not None
        action, _, revision = rest.partition("/")
        if action == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in files
            ]
            self._send(200, {"files": modes})
            return
        if action == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            sha = repo.commit(files, revision)
            url = f"{self.hub.url}/{name}/commit/{sha}"
            self._send(200, {"success": True, "commitOid": sha, "commitUrl": url})
            return
        found = repo.files(revision or "main")
        if found is None:
            self._send(404, {"error": "no revision"}, **{"X-Error-Code": "RevisionNotFound"})
            return
        sha, content = found
        if action == "tree":
            entries = [
                {
                    "type": "file",
                    "path": path,
                    "size": len(text),
                    "oid": hashlib.sha1(text).hexdigest(),
                }
                for path, text in sorted(content.items())
            ]
            self._send(200, entries)
            return
        siblings = [{"rfilename": path} for path in content]
        private = repo.visibility == "private"
        self._send(200, {"id": name, "sha": sha, "siblings": siblings, "private": private})

    def _send(self, status: int, content: Any, **headers: str) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {**headers, "Content-Type": "application/json"}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)
