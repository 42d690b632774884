"""A stand-in for the Hugging Face hub that serves one repository: `hub.py FOLDER COMMIT LOG`; prints its port.

Each request is a line in LOG. The first try to get a file named `breaks.safetensors` is cut off in the middle, so that
a download has to be gone on with.
"""

from __future__ import annotations

import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

FOLDER, COMMIT, LOG = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
broken: set[str] = set()


class Hub(BaseHTTPRequestHandler):
    """The few addresses that huggingface_hub asks for a snapshot."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        with LOG.open("a") as log:
            log.write(f"{self.client_address[0]} {self.command} {self.path} {self.headers.get('Range', '')}\n")
        path = unquote(urlsplit(self.path).path)
        # The same files are there as a data set.
        path = path.replace("/api/datasets/", "/api/models/", 1).replace("/datasets/org/", "/org/", 1)
        if path.startswith("/api/models/org/tiny/tree/"):
            self.answer(json.dumps([{"type": "file", **entry} for entry in files()]).encode())
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": entry["path"], "size": entry["size"]} for entry in files()]
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            self.file(FOLDER / path.split("/", 5)[5])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def file(self, file: Path) -> None:
        data = file.read_bytes()
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked.startswith("bytes=") else 0
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = file.name == "breaks.safetensors" and self.command == "GET" and not broken
        if cut:
            broken.add(file.name)
        self.answer(data[start:], headers, status=206 if start else 200, sent=len(data) // 2 if cut else None)

    def answer(
        self, data: bytes, headers: dict[str, str] | None = None, *, status: int = 200, sent: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:sent])
        if sent is not None:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def files() -> list[dict[str, object]]:
    found = sorted(path for path in FOLDER.rglob("*") if path.is_file())
    return [
        {"path": str(f.relative_to(FOLDER)), "size": f.stat().st_size, "oid": hashlib.sha1(f.read_bytes()).hexdigest()}
        for f in found
    ]


server = ThreadingHTTPServer(("0.0.0.0", 0), Hub)
print(server.server_address[1], flush=True)
server.serve_forever()
