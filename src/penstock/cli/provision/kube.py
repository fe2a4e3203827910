"""Machines that are Pods or Jobs of a Kubernetes cluster, made from the user's template by the official client.

Each has the run's label, by which the next manager finds it, and a name that no other has; its agent joins under that
name. What a cluster answers is taken as it is meant: 404 on a deletion is success, 409 on a creation asks for another
name, 410 begins a list or a watch anew, a watch that times out is followed by a look, and 403 is a cause to be told
(mostly a quota). Decides nothing. The client's calls block, so each is made on a thread, with a deadline of its own.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.cli.provision.kube_template import ContainerEnvironment, filled_in, read_template
from penstock.errors import ConfigError, MissingExtra, ProvisionError
from penstock.rollout.provision_types import JoinOrder, Seen

__all__ = ["KubernetesProvisioner"]

log = logging.getLogger("penstock.provision")

RUN_LABEL = "penstock.dev/run"
PAGE = 200
"""Objects in one page of a list."""
NAMES_TRIED = 5
LISTS_TRIED = 3
WATCH_S = 10
"""Of one watch; then the object is looked at."""
PAUSE_S = 0.1
"""Between two looks, where watches end at once."""
GONE, CONFLICT, EXPIRED = 404, 409, 410


class KubernetesProvisioner:
    """`template`: a YAML or JSON file with a Pod or a Job. `token_secret`: NAME/KEY of a secret with an agent's token.

    `kubeconfig` and `context` choose the cluster; without them the usual file, or within a cluster its own account.
    `grace_s`: for a Pod to leave before it is killed. Raises ConfigError, MissingExtra.
    """

    def __init__(
        self,
        join: JoinOrder,
        *,
        template: str,
        token_secret: str = "",
        namespace: str = "default",
        kubeconfig: str = "",
        context: str = "",
        grace_s: int = 30,
        request_s: float = 15.0,
    ) -> None:
        try:
            import kubernetes
        except ImportError as error:
            raise MissingExtra("kubernetes", "kubernetes", "machines on Kubernetes") from error
        self._k = kubernetes
        self._template = read_template(Path(template))
        self._environment = ContainerEnvironment(join, token_secret)
        # Refused now rather than at the first machine.
        filled_in(copy.deepcopy(self._template), "penstock-check", {}, self._environment)
        self._label = label_of(join.run)
        self._namespace = namespace
        self._grace_s = grace_s
        self._request_s = request_s
        api = self._client(kubeconfig, context)
        self._job = self._template["kind"] == "Job"
        core, batch = kubernetes.client.CoreV1Api(api), kubernetes.client.BatchV1Api(api)
        self._create: Any = batch.create_namespaced_job if self._job else core.create_namespaced_pod
        self._delete = batch.delete_namespaced_job if self._job else core.delete_namespaced_pod
        self._read = batch.read_namespaced_job if self._job else core.read_namespaced_pod
        self._list_page: Any = batch.list_namespaced_job if self._job else core.list_namespaced_pod

    def _client(self, kubeconfig: str, context: str) -> Any:
        config = self._k.config
        try:
            if not kubeconfig and not context:
                try:
                    config.load_incluster_config()
                    return self._k.client.ApiClient()
                except config.ConfigException:
                    pass  # Not within a cluster: the usual file says where one is.
            return config.new_client_from_config(config_file=kubeconfig or None, context=context or None)
        except (config.ConfigException, OSError) as error:
            raise ConfigError(f"no Kubernetes cluster is configured (kubeconfig={kubeconfig!r}): {error}") from error

    async def add(self, count: int) -> Sequence[str]:
        """Those that were made; it raises where none was."""
        made: list[str] = []
        for _ in range(count):
            try:
                made.append(await asyncio.to_thread(self._add_one))
            except ProvisionError as error:
                if not made:
                    raise
                log.warning("%s of %s machines were made: %s", len(made), count, error)
                break
        return made

    async def release(self, machine: str) -> None:
        await asyncio.to_thread(self._release, machine)

    async def list(self) -> Sequence[Seen]:
        return await asyncio.to_thread(self._list)

    async def close(self) -> None:
        """What runs in the cluster stays until it is released."""

    # ---- on a thread

    def _add_one(self) -> str:
        for _ in range(NAMES_TRIED):
            name = f"{self._label[:40].strip('-.')}-{secrets.token_hex(4)}".lower().replace("_", "-").replace(".", "-")
            body = filled_in(copy.deepcopy(self._template), name, {RUN_LABEL: self._label}, self._environment)
            try:
                self._create(self._namespace, body, _request_timeout=self._request_s)
            except self._k.client.ApiException as error:
                if error.status == CONFLICT:
                    continue
                raise ProvisionError(f"a machine could not be made: {words_of(error)}") from error
            except self._errors as error:
                raise ProvisionError(f"the cluster can't be reached: {error}") from error
            return name
        raise ProvisionError(f"{NAMES_TRIED} names were all taken; something else makes objects named {self._label}-*")

    def _release(self, name: str) -> None:
        """Returns once it is gone, so that nothing is taken for ended that still runs."""
        deadline = time.monotonic() + self._grace_s + self._request_s
        policy = {"propagation_policy": "Foreground"} if self._job else {"grace_period_seconds": self._grace_s}
        try:
            self._delete(name, self._namespace, _request_timeout=self._request_s, **policy)
        except self._k.client.ApiException as error:
            if error.status == GONE:
                return
            if error.status != CONFLICT:
                raise ProvisionError(f"{name} could not be released: {words_of(error)}") from error
            # Somebody else is at it, and may be deleting it as well.
        except self._errors as error:
            raise ProvisionError(f"the cluster can't be reached: {error}") from error
        while not self._gone(name):
            if time.monotonic() >= deadline:
                raise ProvisionError(f"{name} is still there {self._grace_s + self._request_s:g} s after its deletion")
            self._watch(name)
            time.sleep(PAUSE_S)

    def _gone(self, name: str) -> bool:
        try:
            self._read(name, self._namespace, _request_timeout=self._request_s)
        except self._k.client.ApiException as error:
            if error.status == GONE:
                return True
            raise ProvisionError(f"{name} can't be looked at: {words_of(error)}") from error
        except self._errors as error:
            raise ProvisionError(f"the cluster can't be reached: {error}") from error
        return False

    def _watch(self, name: str) -> None:
        """Until it is deleted, or the watch ends for whatever reason: who called looks for itself."""
        watch = self._k.watch.Watch()
        try:
            for event in watch.stream(
                self._list_page,
                self._namespace,
                field_selector=f"metadata.name={name}",
                timeout_seconds=WATCH_S,
                _request_timeout=WATCH_S + self._request_s,
            ):
                if event["type"] == "DELETED":
                    return
        except self._k.client.ApiException as error:
            if error.status != EXPIRED:
                raise ProvisionError(f"{name} can't be watched: {words_of(error)}") from error
        except self._errors as error:
            # A watch may be cut at any time; the look that follows says whether the cluster is there.
            log.info("the watch of %s was cut: %s", name, error)
        finally:
            watch.stop()

    def _list(self) -> Sequence[Seen]:
        for _ in range(LISTS_TRIED):
            try:
                return [_seen(item, self._job) for item in self._pages() if not item.metadata.deletion_timestamp]
            except self._k.client.ApiException as error:
                if error.status != EXPIRED:
                    raise ProvisionError(f"machines can't be listed: {words_of(error)}") from error
            except self._errors as error:
                raise ProvisionError(f"the cluster can't be reached: {error}") from error
        raise ProvisionError(f"machines can't be listed: the list expired {LISTS_TRIED} times in mid-way (410)")

    def _pages(self) -> Sequence[Any]:
        found: list[Any] = []
        after: str | None = None
        while True:
            page = self._list_page(
                self._namespace,
                label_selector=f"{RUN_LABEL}={self._label}",
                limit=PAGE,
                _continue=after,
                _request_timeout=self._request_s,
            )
            found += page.items
            after = page.metadata._continue
            if not after:
                return found

    @property
    def _errors(self) -> tuple[type[BaseException], ...]:
        import urllib3

        return (urllib3.exceptions.HTTPError, OSError)


def label_of(run: str) -> str:
    """A run's name as a label's value: letters, digits and any of ._- within, 63 at most."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", run)[:63].strip("-._") or "run"


def words_of(error: Any) -> str:
    """What the cluster says, from the Status that it answers with."""
    try:
        told = json.loads(error.body or "")["message"]
    except (ValueError, TypeError, KeyError):
        told = error.reason
    return f"HTTP {error.status}: {told}"


def _seen(item: Any, job: bool) -> Seen:
    name = item.metadata.name
    if job:
        done = [c for c in item.status.conditions or [] if c.type in ("Complete", "Failed") and c.status == "True"]
        if done:
            return Seen(name, False, f"the job is over: {done[0].type}: {done[0].message or done[0].reason or ''}")
        return Seen(name)
    if item.status.phase in ("Failed", "Succeeded"):
        return Seen(name, False, f"the pod has {item.status.phase.lower()}: {_why(item.status)}")
    return Seen(name)


def _why(status: Any) -> str:
    """The pod's own reason (Evicted, Preempted), or how its container ended."""
    if status.reason or status.message:
        return ": ".join(word for word in (status.reason, status.message) if word)
    for container in status.container_statuses or []:
        ended = container.state.terminated if container.state else None
        if ended is not None:
            return f"{ended.reason or 'ended'}, exit code {ended.exit_code}"
    return "it does not say why"
