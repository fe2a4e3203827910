"""Answers of a real Kubernetes API server, kept to be given again to the same requests in the same order."""

from __future__ import annotations

import json
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from http_on_loopback import listening

RECORDED = Path(__file__).parent / "kube_recorded.json"
USERS = ("admin", "guest", "nobody")


@dataclass(frozen=True)
class Exchange:
    """One request and its answer."""

    user: str
    method: str
    path: str
    query: dict[str, str]
    body: Any
    status: int
    answer: str

    def asks(self, user: str, method: str, url: str, body: Any) -> bool:
        """Whether that is this request. What a page goes on from is the cluster's own word, given back as it was."""
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        return (user, method, parts.path, query, body) == (self.user, self.method, self.path, self.query, self.body)


def load() -> tuple[str, dict[str, list[Exchange]]]:
    """The server's version, and its answers by chapter."""
    told = json.loads(RECORDED.read_text())
    return told["server"], {name: [Exchange(**row) for row in rows] for name, rows in told["chapters"].items()}


def save(server: str, chapters: dict[str, list[Exchange]]) -> None:
    rows = {name: [asdict(exchange) for exchange in exchanges] for name, exchanges in chapters.items()}
    RECORDED.write_text(json.dumps({"server": server, "chapters": rows}, indent=1) + "\n")


def write_kubeconfig(path: Path, url: str) -> None:
    """A context for each user, by a token of the user's name."""
    clusters = [{"name": "c", "cluster": {"server": url}}]
    users = [{"name": user, "user": {"token": user}} for user in USERS]
    contexts = [{"name": user, "context": {"cluster": "c", "user": user}} for user in USERS]
    config = {"apiVersion": "v1", "kind": "Config", "clusters": clusters, "users": users, "contexts": contexts}
    path.write_text(json.dumps(config))


class Answers:
    """Those of one chapter. `unasked`: requests that were not the next ones recorded."""

    def __init__(self, exchanges: list[Exchange]) -> None:
        self.left = deque(exchanges)
        self.unasked: list[str] = []

    def answer(self, user: str, method: str, url: str, body: Any) -> tuple[int, str]:
        if not self.left or not self.left[0].asks(user, method, url, body):
            self.unasked.append(f"{user}: {method} {url} {body}, but recorded is {self.left[0] if self.left else None}")
            return 500, json.dumps({"kind": "Status", "message": self.unasked[-1]})
        exchange = self.left.popleft()
        return exchange.status, exchange.answer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answers: Any

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        user = self.headers.get("Authorization", "").removeprefix("Bearer ")
        status, text = self.answers.answer(user, self.command, self.path, body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = do_DELETE = _any


def served(answers: Any) -> AbstractContextManager[str]:
    """`answers.answer` asked over HTTP; its address."""
    return listening(type("Bound", (Handler,), {"answers": answers}))
