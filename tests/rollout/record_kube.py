"""Records a real Kubernetes API server's answers to the chapters of `kube_chapters`, for the tests to give again.

    python tests/rollout/record_kube.py --server https://127.0.0.1:6443 --etcd http://127.0.0.1:2379

The server's static tokens are `admin` (of system:masters) and `guest` (no rights); the controllers run beside it (jobs,
garbage collection, quotas, service accounts), a kubelet does not: what a node does to a Pod, this does by the API.
Versions that are too old for a page's next one are etcd's: they are compacted away.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kube_chapters import CHAPTERS, Scene
from kube_recorded import Exchange, save, served, write_kubeconfig


class Real:
    """The server, and what happens in one namespace of it. `exchanges`: what went through so far."""

    def __init__(self, server: str, etcd: str, namespace: str) -> None:
        self.server = server
        self.etcd = etcd
        self.namespace = namespace
        self.exchanges: list[Exchange] = []
        self._before_next_page: list[Callable[[], None]] = []

    # ---- through which it is recorded

    def answer(self, user: str, method: str, url: str, body: Any) -> tuple[int, str]:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        if "continue" in query:
            while self._before_next_page:
                self._before_next_page.pop()()
        status, text = self.ask(user, method, url, body)
        text = "".join(json.dumps(lean(json.loads(line))) + "\n" for line in text.splitlines())
        self.exchanges.append(Exchange(user, method, parts.path, query, body, status, text))
        return status, text

    def ask(
        self, user: str, method: str, url: str, body: Any = None, kind: str = "application/json"
    ) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {user}", "Content-Type": kind, "Accept": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server + url, data, headers, method=method)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            with urllib.request.urlopen(request, timeout=60, context=context) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def admin(self, method: str, url: str, body: Any = None, kind: str = "application/json") -> Any:
        status, text = self.ask("admin", method, url, body, kind)
        if status >= 300:
            raise RuntimeError(f"{method} {url}: {status} {text}")
        return json.loads(text)

    @property
    def _place(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}"

    def make_namespace(self) -> None:
        account = f"{self._place}/serviceaccounts/default"
        self.admin("POST", "/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": self.namespace}})
        # Without it no Pod is admitted.
        self._until(lambda: bool(json.loads(self.ask("admin", "GET", account)[1]).get("secrets")))

    # ---- what happens in it

    def runs_on_a_node(self, name: str) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        self.admin("POST", f"{self._place}/pods/{name}/binding", binding)
        self.pod_ends(name, {"phase": "Running"})

    def node_ends_it_after(self, name: str, seconds: float) -> None:
        def end() -> None:
            self._until(lambda: "deletionTimestamp" in self.admin("GET", f"{self._place}/pods/{name}")["metadata"])
            time.sleep(seconds)
            self.admin("DELETE", f"{self._place}/pods/{name}", {"kind": "DeleteOptions", "gracePeriodSeconds": 0})

        threading.Thread(target=end).start()

    def pod_ends(self, name: str, status: dict[str, object]) -> None:
        patch = "application/merge-patch+json"
        self.admin("PATCH", f"{self._place}/pods/{name}/status", {"status": status}, patch)

    def pod_of_job_fails(self, name: str) -> None:
        pods = f"{self._place}/pods?labelSelector=job-name%3D{name}"
        self._until(lambda: bool(self.admin("GET", pods)["items"]))
        self.pod_ends(self.admin("GET", pods)["items"][0]["metadata"]["name"], {"phase": "Failed"})
        job = f"/apis/batch/v1/namespaces/{self.namespace}/jobs/{name}"
        self._until(lambda: bool(self.admin("GET", job)["status"].get("conditions")))

    def quota_of_pods(self, pods: int) -> None:
        quotas = f"{self._place}/resourcequotas"
        self.admin("POST", quotas, {"metadata": {"name": "few"}, "spec": {"hard": {"pods": str(pods)}}})
        self._until(lambda: "used" in self.admin("GET", f"{quotas}/few").get("status", {}))

    def old_versions_go_before_the_next_page(self) -> None:
        def compact() -> None:
            # What is compacted must be older than something.
            self.admin("POST", f"{self._place}/configmaps", {"metadata": {"name": "newer"}})
            newest = self.admin("GET", f"{self._place}/configmaps/newer")["metadata"]["resourceVersion"]
            subprocess.run(["etcdctl", f"--endpoints={self.etcd}", "compact", newest], check=True)

        self._before_next_page.append(compact)

    def _until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not true():
            if time.monotonic() > deadline:
                raise RuntimeError("the cluster did not do what it should within 60 s")
            time.sleep(0.1)


def lean(answer: Any) -> Any:
    """Without who set which field, which is most of an answer and nobody reads."""
    if isinstance(answer, dict):
        return {key: lean(value) for key, value in answer.items() if key != "managedFields"}
    return [lean(value) for value in answer] if isinstance(answer, list) else answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--etcd", required=True)
    chosen = parser.parse_args()
    chapters: dict[str, list[Exchange]] = {}
    for name, chapter in CHAPTERS.items():
        real = Real(chosen.server, chosen.etcd, name)
        real.make_namespace()
        with tempfile.TemporaryDirectory() as folder, served(real) as url:
            write_kubeconfig(Path(folder) / "kubeconfig", url)
            asyncio.run(chapter(Scene(Path(folder), Path(folder) / "kubeconfig", real)))
        chapters[name] = real.exchanges
        print(f"{name}: {len(real.exchanges)} requests")
    version = real.admin("GET", "/version")["gitVersion"]
    save(version, chapters)


if __name__ == "__main__":
    main()
