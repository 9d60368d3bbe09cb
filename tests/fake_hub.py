"""A hub on loopback that speaks Hugging Face's and ModelScope's HTTP, and fails as told.

It serves what the real clients ask of the real hubs: revisions, listings with hashes, files with
ranges and redirects. A fault changes one answer on its way out.
"""

import hashlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

PAGE_FILES = 3  # of a Hugging Face listing, so that a listing has pages
LFS_SUFFIXES = (".safetensors", ".parquet")

Files = dict[str, bytes]


@dataclass
class Answer:
    """What is sent, after `pause_s`: `cut` bytes, then one each `drip_s`, or an end."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None
    drip_s: float | None = None
    pause_s: float = 0.0


Change = Callable[[Answer], Answer]


@dataclass
class Request:
    """A request as it came, and the bytes of the body that were sent so far."""

    method: str
    path: str
    range: str | None
    token: str | None
    sent_bytes: int


@dataclass
class Fault:
    """`change` is applied to the next `times` answers to GET requests whose path holds `where`."""

    where: str
    change: Change
    times: int


@dataclass
class FakeRepository:
    """Commits, oldest first, and the branches that point at them."""

    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=dict)
    xet: bool = False

    def commit(self, files: Files, branch: str = "main") -> str:
        """Make `files` the whole content of `branch`; the commit."""
        commit = sha1(f"{len(self.commits)} {sorted(files)}".encode())
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit

    def at(self, revision: str) -> tuple[str, Files] | None:
        commit = self.branches.get("main" if revision == "master" else revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else None

    def changed_by(self, name: str, commit: str) -> tuple[int, str]:
        """Number and id of the last commit up to `commit` that changed the file `name`."""
        found, before = (0, ""), None
        for number, (each, files) in enumerate(self.commits.items()):
            if files.get(name) != before:
                found, before = (number, each), files.get(name)
            if each == commit:
                break
        return found


class FakeHub:
    """Repositories by kind and name, faults, and a record of all requests."""

    def __init__(self) -> None:
        """Empty; see `serving`."""
        self.repositories: dict[tuple[str, str], FakeRepository] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.token: str | None = None
        self.url = ""
        self.closing = threading.Event()
        self.lock = threading.Lock()

    def add(self, kind: str, name: str, files: Files) -> tuple[FakeRepository, str]:
        repository = self.repositories[kind, name] = FakeRepository()
        return repository, repository.commit(files)

    def fault(self, where: str, change: Change, times: int = 1) -> None:
        self.faults.append(Fault(where, change, times))

    def change(self, path: str, answer: Answer) -> Answer:
        """`answer`, as the first fault that fits makes it."""
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.where in unquote(path):
                    fault.times -= 1
                    return fault.change(answer)
        return answer

    def sent_bytes(self, where: str) -> int:
        """Bytes of bodies that were sent so far for paths that hold `where`."""
        return sum(
            request.sent_bytes for request in self.requests if where in unquote(request.path)
        )

    def answer(self, path: str, query: dict[str, str], token: str | None) -> Answer:
        if self.token is not None and token != self.token and not path.startswith("/cdn/"):
            return error(401, "RepoNotFound")
        if path.startswith("/cdn/"):
            return self._cdn(path.removeprefix("/cdn/"))
        if path.startswith("/api/v1/"):
            return self._modelscope(path.removeprefix("/api/v1/").split("/"), query)
        return self._hugging_face(path.strip("/").split("/"), query)

    def _cdn(self, digest: str) -> Answer:
        for repository in self.repositories.values():
            for files in repository.commits.values():
                for content in files.values():
                    if hashlib.sha256(content).hexdigest() == digest:
                        return Answer(headers={"ETag": f'"cdn-{digest[:8]}"'}, body=content)
        return error(404, "")

    def _hugging_face(self, parts: list[str], query: dict[str, str]) -> Answer:
        is_api = parts[0] == "api"
        kind = "dataset" if "datasets" in parts[:2] else "model"
        parts = [part for part in parts if part not in ("api", "models", "datasets")]
        repository = self.repositories.get((kind, "/".join(parts[:2])))
        if repository is None:
            return error(404, "RepoNotFound")
        verb, revision = (parts[2], unquote(parts[3])) if len(parts) > 3 else ("revision", "main")
        found = repository.at(revision)
        if found is None:
            return error(404, "RevisionNotFound")
        commit, files = found
        if not is_api:
            cdn = self.url.replace("127.0.0.1", "localhost")  # another host, as the real one's is
            return _resolved(cdn, commit, files, unquote("/".join(parts[4:])))
        if verb == "tree":
            return self._page(
                repository, "/".join(parts[:2]), kind, commit, int(query.get("cursor", 0))
            )
        return as_json({"id": "/".join(parts[:2]), "sha": commit, "siblings": []})

    def _page(
        self, repository: FakeRepository, name: str, kind: str, commit: str, start: int
    ) -> Answer:
        files = list(repository.commits[commit].items())
        rows = [
            _hugging_face_row(*file, xet=repository.xet)
            for file in files[start : start + PAGE_FILES]
        ]
        answer = as_json(rows)
        if start + PAGE_FILES < len(files):
            url = f"{self.url}/api/{kind}s/{name}/tree/{commit}?recursive=true&cursor={start + PAGE_FILES}"
            answer.headers["Link"] = f'<{url}>; rel="next"'
        return answer

    def _modelscope(self, parts: list[str], query: dict[str, str]) -> Answer:
        repository = self.repositories.get((parts[0].removesuffix("s"), "/".join(parts[1:3])))
        found = repository and repository.at(query.get("Revision", "master"))
        if repository is None or not found:
            return error(404, "")
        commit, files = found
        if parts[3:] == ["repo"]:
            content = files.get(query["FilePath"])
            return error(404, "") if content is None else Answer(body=content)
        rows = [_modelscope_row(repository, commit, *file) for file in files.items()]
        if "PageNumber" in query:
            size = int(query["PageSize"])
            rows = rows[(int(query["PageNumber"]) - 1) * size :][:size]
        return as_json(
            {"Code": 200, "Success": True, "Data": {"Files": rows, "LatestCommitter": {"Id": ""}}}
        )


def as_json(value: Any) -> Answer:
    return Answer(headers={"Content-Type": "application/json"}, body=json.dumps(value).encode())


def error(status: int, code: str) -> Answer:
    """A refusal, with the code that Hugging Face puts into a header."""
    answer = as_json({"error": "refused", "Code": status, "Message": "refused"})
    return replace(answer, status=status, headers={**answer.headers, "X-Error-Code": code})


def _hugging_face_row(name: str, content: bytes, xet: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "type": "file",
        "path": name,
        "size": len(content),
        "oid": git_id(content),
    }
    if name.endswith(LFS_SUFFIXES):
        row["lfs"] = {
            "oid": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 130,
        }
        row |= {"xetHash": "0" * 64} if xet else {}
    return row


def _modelscope_row(
    repository: FakeRepository, commit: str, name: str, content: bytes
) -> dict[str, Any]:
    number, changed_by = repository.changed_by(name, commit)
    return {
        "Path": name,
        "Name": name.rpartition("/")[2],
        "Type": "blob",
        "Size": len(content),
        "Sha256": hashlib.sha256(content).hexdigest(),
        "Revision": changed_by,
        "CommittedDate": 1_700_000_000 + number,
        "Mode": repository.modes.get(name, "33188"),
    }


def _resolved(cdn: str, commit: str, files: Files, name: str) -> Answer:
    content = files.get(name)
    if content is None:
        return error(404, "EntryNotFound")
    headers = {"X-Repo-Commit": commit}
    if not name.endswith(LFS_SUFFIXES):
        return Answer(headers={**headers, "ETag": f'"{git_id(content)}"'}, body=content)
    digest = hashlib.sha256(content).hexdigest()
    headers |= {
        "X-Linked-ETag": f'"{digest}"',
        "X-Linked-Size": str(len(content)),
        "Location": f"{cdn}/cdn/{digest}",
    }
    return Answer(302, headers)


def sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def git_id(content: bytes) -> str:
    return sha1(b"blob %d\0" % len(content) + content)


# What a fault may do to an answer.


def refusal(status: int, code: str = "", **headers: str) -> Change:
    """Refuse with `status`; `Retry_After="1"` sets that header."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    def change(answer: Answer) -> Answer:
        refused = error(status, code)
        return replace(refused, headers={**refused.headers, **named})

    return change


def circle(answer: Answer) -> Answer:
    """Redirect to another address that redirects back."""
    return Answer(302, {"Location": "/api/v1/models/a/circle?FilePath=circle"})


def _changing(changes: Callable[[Answer], dict[str, Any]]) -> Change:
    return lambda answer: replace(answer, **changes(answer))


# Announce all, send half and drop the connection; or keep it and send nothing more; or go on a byte
# now and then.
dropped = _changing(lambda answer: {"cut": len(answer.body) // 2})
silent = _changing(lambda answer: {"cut": len(answer.body) // 2, "drip_s": 60.0})
dripping_later = _changing(lambda answer: {"cut": len(answer.body) // 2, "drip_s": 0.05})
# Send a byte now and then, without end; each byte after a tenth of a second; all after half a
# second.
dripping = _changing(lambda answer: {"cut": 1, "drip_s": 0.05})
slowly = _changing(lambda answer: {"cut": 0, "drip_s": 0.1})
late = _changing(lambda answer: {"pause_s": 0.5})
# A whole body that lacks its last bytes, or has more of them.
shorter = _changing(lambda answer: {"body": answer.body[:-3]})
longer = _changing(lambda answer: {"body": answer.body + b"more"})


def misannounced(answer: Answer) -> Answer:
    """All bytes, and a length that is wrong."""
    return replace(answer, headers={**answer.headers, "Content-Length": str(len(answer.body) - 5)})


def flipped(answer: Answer) -> Answer:
    """The right size, other bytes, and another ETag."""
    return replace(
        answer,
        headers={**answer.headers, "ETag": '"other"'},
        body=bytes(byte ^ 1 for byte in answer.body),
    )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:  # noqa: N802 - the name is http.server's
        self._serve("GET")

    def do_HEAD(self) -> None:  # noqa: N802
        self._serve("HEAD")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _serve(self, method: str) -> None:
        url = urlsplit(self.path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        ranged = self.headers.get("Range")
        answer = _part(self.hub.answer(url.path, query, token), ranged)
        if method == "GET":
            answer = self.hub.change(self.path, answer)
        self.request_made = Request(method, self.path, ranged, token, 0)
        self.hub.requests.append(self.request_made)  # before the client can go on
        try:
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if method == "GET":
                self._send_body(answer)
        except OSError:
            self.close_connection = True

    def _send_body(self, answer: Answer) -> None:
        self.hub.closing.wait(answer.pause_s)
        self._send(answer.body if answer.cut is None else answer.body[: answer.cut])
        if answer.cut is None:
            return
        self.close_connection = True
        for byte in answer.body[answer.cut :] if answer.drip_s else b"":
            if self.hub.closing.wait(answer.drip_s):
                return
            self._send(bytes([byte]))

    def _send(self, content: bytes) -> None:
        self.request_made.sent_bytes += len(content)
        self.wfile.write(content)


def _part(answer: Answer, ranged: str | None) -> Answer:
    if answer.status != 200 or ranged is None:
        return answer
    first, _, last = ranged.removeprefix("bytes=").partition("-")
    start, stop = int(first), int(last or len(answer.body) - 1) + 1
    if start >= len(answer.body):
        return Answer(416, {"Content-Range": f"bytes */{len(answer.body)}"})
    content_range = f"bytes {start}-{min(stop, len(answer.body)) - 1}/{len(answer.body)}"
    return replace(
        answer,
        status=206,
        headers={**answer.headers, "Content-Range": content_range},
        body=answer.body[start:stop],
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the tests."""


@contextmanager
def serving(certificate: Path | None = None) -> Iterator[FakeHub]:
    """A hub that serves until the block ends; over TLS if given `certificate`.

    It is the certificate and the key.
    """
    hub = FakeHub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    scheme = "http"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        scheme = "https"
    hub.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()


def point_clients(hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the real clients here use `hub`, with caches below `root`, and lose patience soon.

    They read most of their variables once, when they are imported.
    """
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "MODELSCOPE_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    huggingface = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(root / "huggingface"),
        "HF_TOKEN_PATH": str(root / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DOWNLOAD_TIMEOUT": 1,
        "HF_HUB_ETAG_TIMEOUT": 1,
        "DOWNLOAD_CHUNK_SIZE": 4096,
    }
    for name, value in huggingface.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(root / "modelscope"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(root / "modelscope-home"))
    monkeypatch.setenv("MODELSCOPE_DOWNLOAD_INTRA_CLOUD", "false")
    modelscope = {
        "_legacy_api.DOWNLOAD_TIMEOUT": 1,
        "_legacy_api.REPO_TREE_PAGE_TIMEOUT_SECONDS": 1,
        "_legacy_api.REPO_TREE_PAGE_MAX_ATTEMPTS": 2,
        "_legacy_api.REPO_TREE_PAGE_RETRY_MAX_DELAY_SECONDS": 0,
        "_download.DOWNLOAD_RETRY_TIMES": 2,
        "_download.DOWNLOAD_RETRY_MAX_DELAY_SECONDS": 0,
        "_download.DOWNLOAD_INTEGRITY_RETRY_BACKOFF": 0.01,
        "_download.DOWNLOAD_LOW_SPEED_WINDOW_SECONDS": 1,
        "config._default_config": None,
    }
    for name, value in modelscope.items():
        monkeypatch.setattr(f"modelscope_hub.{name}", value)
    monkeypatch.setattr("pipeline_lib.hub.patience.FIRST_WAIT_S", 0.01)
