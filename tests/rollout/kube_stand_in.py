"""A Kubernetes API server's answers over HTTP, as its API reference has them: Pods and Jobs of one namespace.

Objects, the Status objects of refusals, list pages with `continue`, and watches as lines of JSON. `refuse` puts a
refusal before the answer to a request.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from http_on_loopback import listening

PATHS = {"/api/v1/namespaces/rl/pods": "Pod", "/apis/batch/v1/namespaces/rl/jobs": "Job"}
VERSION = {"Pod": "v1", "Job": "batch/v1"}
REASONS = {
    403: "Forbidden",
    404: "NotFound",
    409: "AlreadyExists",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
}


class Cluster:
    """`objects` by name; `requests` as (method, path, query, body)."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str, dict[str, list[str]], Any]] = []
        self.refusals: list[tuple[str, int, str]] = []
        self.lingers = 0
        """Looks at an object that is being deleted, until it is gone."""
        self.page = 500
        self.watch_410 = 0
        """Watches that end with an ERROR event of status 410."""
        self.retry_after = ""
        """The header that comes with 429."""

    def refuse(self, method: str, status: int, message: str) -> None:
        """The next request whose method (or `LOOK`, `WATCH`, `CONTINUE`) is this."""
        self.refusals.append((method, status, message))

    def refused(self, method: str) -> tuple[int, str] | None:
        for entry in self.refusals:
            if entry[0] == method:
                self.refusals.remove(entry)
                return entry[1:]
        return None


def status_of(code: int, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": REASONS[code],
        "code": code,
    }


class Handler(BaseHTTPRequestHandler):
    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path, query = self._begin("GET", None)
        cluster = self.cluster
        if path in PATHS:
            if query.get("watch"):
                self._watch(query)
                return
            if "continue" in query and (refusal := cluster.refused("CONTINUE")):
                self._answer(refusal[0], status_of(*refusal))
                return
            if refusal := cluster.refused("GET"):
                self._answer(refusal[0], status_of(*refusal))
                return
            self._answer(200, self._list(path, query))
            return
        if refusal := cluster.refused("LOOK"):
            self._answer(refusal[0], status_of(*refusal))
            return
        name = path.rpartition("/")[2]
        found = cluster.objects.get(name)
        if found is not None and found["metadata"].get("deletionTimestamp"):
            cluster.lingers -= 1
            if cluster.lingers <= 0:
                found = cluster.objects.pop(name) and None
        if found is None:
            self._answer(404, status_of(404, f'pods "{name}" not found'))
        else:
            self._answer(200, found)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path, _ = self._begin("POST", body)
        name = body["metadata"]["name"]
        if refusal := self.cluster.refused("POST"):
            self._answer(refusal[0], status_of(*refusal))
        elif name in self.cluster.objects:
            self._answer(409, status_of(409, f'pods "{name}" already exists'))
        else:
            made = {**body, "status": {"phase": "Pending"} if PATHS[path] == "Pod" else {}}
            made["metadata"] = {**body["metadata"], "namespace": "rl", "creationTimestamp": "2026-01-01T00:00:00Z"}
            self.cluster.objects[name] = made
            self._answer(201, made)

    def do_DELETE(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        path, _ = self._begin("DELETE", json.loads(self.rfile.read(length) or b"null"))
        name = path.rpartition("/")[2]
        if refusal := self.cluster.refused("DELETE"):
            self._answer(refusal[0], status_of(*refusal))
        elif name not in self.cluster.objects:
            self._answer(404, status_of(404, f'pods "{name}" not found'))
        else:
            self.cluster.objects[name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            if not self.cluster.lingers:
                gone = self.cluster.objects.pop(name)
                self._answer(200, gone)
            else:
                self._answer(200, self.cluster.objects[name])

    # ---- within

    def _begin(self, method: str, body: Any) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        self.cluster.requests.append((method, parts.path, query, body))
        return parts.path, query

    def _list(self, path: str, query: dict[str, list[str]]) -> dict[str, Any]:
        kind = PATHS[path]
        label, _, value = query["labelSelector"][0].partition("=")
        rows = [row for row in self.cluster.objects.values() if row["metadata"]["labels"].get(label) == value]
        first = int(query.get("continue", ["0"])[0])
        after = first + self.cluster.page
        metadata = {"resourceVersion": "12", **({"continue": str(after)} if after < len(rows) else {})}
        return {"kind": f"{kind}List", "apiVersion": VERSION[kind], "metadata": metadata, "items": rows[first:after]}

    def _watch(self, query: dict[str, list[str]]) -> None:
        """Some news, and then its time is over; what was deleted meanwhile is not told."""
        if refusal := self.cluster.refused("WATCH"):
            self._answer(refusal[0], status_of(*refusal))
            return
        name = query["fieldSelector"][0].removeprefix("metadata.name=")
        rows = [{"type": "MODIFIED", "object": self.cluster.objects[name]}] if name in self.cluster.objects else []
        if self.cluster.watch_410:
            self.cluster.watch_410 -= 1
            rows = [{"type": "ERROR", "object": status_of(410, "too old resource version: 1 (12)")}]
        self._send(200, b"".join(json.dumps(row).encode() + b"\n" for row in rows))

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        self._send(code, json.dumps(body).encode())

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code == 429 and self.cluster.retry_after:
            self.send_header("Retry-After", self.cluster.retry_after)
        self.end_headers()
        self.wfile.write(body)


def serve(cluster: Cluster) -> AbstractContextManager[str]:
    """Its address."""
    return listening(type("Bound", (Handler,), {"cluster": cluster}))
