"""A hub on loopback that takes uploads as Hugging Face and ModelScope do, and refuses as told."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LFS_SUFFIX = ".safetensors"
COMMIT = "a" * 40


class UploadHub:
    """What came: repositories with their visibility, large files by hash, and commits' lines."""

    def __init__(self) -> None:
        """Empty, and without refusals."""
        self.url = ""
        self.private: dict[str, bool] = {}
        self.blobs: dict[str, bytes] = {}
        self.uploads: list[str] = []  # of large files, each time that one comes
        self.commits: list[str] = []
        self.tokens: set[str] = set()
        self.refused = ""  # requests whose path holds it are answered 403

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if self.refused and self.refused in path:
            return 403, {"error": "you may not write here", "Message": "you may not write here"}
        if path.startswith("/blob/"):
            digest = path.removeprefix("/blob/")
            self.blobs[digest] = body
            self.uploads.append(digest)
            return 200, {}
        if path.endswith("/info/lfs/objects/batch"):
            found = {"objects": [self._object(one) for one in json.loads(body)["objects"]]}
            return 200, {"transfer": "basic", **found, "Code": 200, "Data": found, "Success": True}
        if "/commit/" in path:
            self.commits.append(body.decode())
            page = path.partition("models/")[2].partition("/commit/")[0]
            return 200, {"commitUrl": f"{self.url}/{page}/commit/{COMMIT}", "commitOid": COMMIT}
        if "/preupload/" in path:
            return 200, {"files": [self._mode(file) for file in json.loads(body)["files"]]}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.private[name] = asked["visibility"] == "private"
            return 200, {"url": f"{self.url}/{name}"}
        if path == "/api/v1/models":
            asked = json.loads(body)
            self.private.setdefault(f"{asked['Path']}/{asked['Name']}", asked["Visibility"] == 1)
            return 200, {"Code": 200, "Success": True, "Data": {"Id": 1, **asked}}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        return 404, {"error": "not found", "Code": 404, "Message": "not found"}

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] not in self.blobs:
            href = f"{self.url}/blob/{asked['oid']}"
            found |= {"url": href, "actions": {"upload": {"href": href, "header": {}}}}
        return found

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if file["path"].endswith(LFS_SUFFIX) else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: UploadHub

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if token := self.headers.get("Authorization"):
            self.hub.tokens.add(token.removeprefix("Bearer "))
        status, content = self.hub.answer(self.command, self.path.partition("?")[0], body)
        answer = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_PUT = _serve  # noqa: N815 - the names are http.server's

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def taking_uploads() -> Iterator[UploadHub]:
    """A hub that takes uploads until the block ends."""
    hub = UploadHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
