"""Machines that are Pods or Jobs of a Kubernetes cluster, made from the user's template by the official client.

Each has the run's label, by which the next manager finds it, and a name that no other has; its agent joins under that
name. What a cluster answers is taken as it is meant: 404 on a deletion is success, 409 on a creation asks for another
name, 410 begins a list or a watch anew, a watch that times out is followed by a look, 429 is waited out for as long as
it asks (or told, where that is too long), and 403 is a cause to be told (mostly a quota). Decides nothing. The client's
requests block, so each is made on a thread of the provisioner's own, with a deadline. What is waited between them is on
the loop and ends with the call.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.cli.provision.kube_template import ContainerEnvironment, filled_in, read_template
from penstock.errors import ConfigError, MissingExtra, ProvisionError
from penstock.rollout.provision_types import JoinOrder, Seen

__all__ = ["KubernetesProvisioner"]

log = logging.getLogger("penstock.provision")

RUN_LABEL = "penstock.dev/run"
LABEL_CHARS = 63
HASH_CHARS = 16
PAGE = 200
"""Objects in one page of a list."""
NAMES_TRIED = 5
LISTS_TRIED = 3
WATCH_S = 10
"""Of one watch; then the object is looked at."""
PAUSE_S = 0.1
"""Between two looks, where watches end at once."""
RETRY_S = 1.0
"""From 429 to the next request, where the cluster does not say."""
GONE, CONFLICT, EXPIRED, TOO_MANY = 404, 409, 410, 429
THREADS = 64
"""Requests at the same time; a machine that is being deleted has one that waits."""


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
        self._threads = ThreadPoolExecutor(THREADS, "penstock-kubernetes")
        api = self._client(kubeconfig, context)
        self._job = self._template["kind"] == "Job"
        core, batch = kubernetes.client.CoreV1Api(api), kubernetes.client.BatchV1Api(api)
        self._create: Any = batch.create_namespaced_job if self._job else core.create_namespaced_pod
        self._delete = batch.delete_namespaced_job if self._job else core.delete_namespaced_pod
        self._read = batch.read_namespaced_job if self._job else core.read_namespaced_pod
        self._list_page: Any = batch.list_namespaced_job if self._job else core.list_namespaced_pod

    def _client(self, kubeconfig: str, context: str) -> Any:
        config, settings = self._k.config, self._k.client.Configuration()
        # Else urllib3 waits and asks again by itself, past every deadline.
        settings.retries = False
        try:
            if not kubeconfig and not context:
                try:
                    config.load_incluster_config(client_configuration=settings)
                    return self._k.client.ApiClient(settings)
                except config.ConfigException:
                    pass  # Not within a cluster: the usual file says where one is.
            return config.new_client_from_config(
                config_file=kubeconfig or None, context=context or None, client_configuration=settings
            )
        except (config.ConfigException, OSError) as error:
            raise ConfigError(f"no Kubernetes cluster is configured (kubeconfig={kubeconfig!r}): {error}") from error

    async def add(self, count: int) -> Sequence[str]:
        """Those that were made; it raises where none was."""
        made: list[str] = []
        for _ in range(count):
            try:
                made.append(await self._add_one())
            except ProvisionError as error:
                if not made:
                    raise
                log.warning("%s of %s machines were made: %s", len(made), count, error)
                break
        return made

    async def release(self, machine: str) -> None:
        """Returns once it is gone, so that nothing is taken for ended that still runs."""
        deadline = time.monotonic() + self._grace_s + self._request_s
        policy = {"propagation_policy": "Foreground"} if self._job else {"grace_period_seconds": self._grace_s}
        try:
            await self._request(self._delete, machine, self._namespace, **policy)
        except self._k.client.ApiException as error:
            if error.status == GONE:
                return
            if error.status != CONFLICT:
                raise ProvisionError(f"{machine} could not be released: {words_of(error)}") from error
            # Somebody else is at it, and may be deleting it as well.
        while not await self._gone(machine):
            if time.monotonic() >= deadline:
                raise ProvisionError(
                    f"{machine} is still there {self._grace_s + self._request_s:g} s after its deletion"
                )
            await self._watched(machine)
            await asyncio.sleep(PAUSE_S)

    async def list(self) -> Sequence[Seen]:
        for _ in range(LISTS_TRIED):
            try:
                return [_seen(item, self._job) for item in await self._pages() if not item.metadata.deletion_timestamp]
            except self._k.client.ApiException as error:
                if error.status != EXPIRED:
                    raise ProvisionError(f"machines can't be listed: {words_of(error)}") from error
        raise ProvisionError(f"machines can't be listed: the list expired {LISTS_TRIED} times in mid-way (410)")

    async def close(self) -> None:
        """What runs in the cluster stays until it is released."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- what calls are made of

    async def _add_one(self) -> str:
        for _ in range(NAMES_TRIED):
            name = f"{self._label[:40].strip('-.')}-{secrets.token_hex(4)}".lower().replace("_", "-").replace(".", "-")
            body = filled_in(copy.deepcopy(self._template), name, {RUN_LABEL: self._label}, self._environment)
            try:
                await self._request(self._create, self._namespace, body)
            except self._k.client.ApiException as error:
                if error.status == CONFLICT:
                    continue
                raise ProvisionError(f"a machine could not be made: {words_of(error)}") from error
            return name
        raise ProvisionError(f"{NAMES_TRIED} names were all taken; something else makes objects named {self._label}-*")

    async def _gone(self, name: str) -> bool:
        try:
            await self._request(self._read, name, self._namespace)
        except self._k.client.ApiException as error:
            if error.status == GONE:
                return True
            raise ProvisionError(f"{name} can't be looked at: {words_of(error)}") from error
        return False

    async def _watched(self, name: str) -> None:
        """Returns once it is deleted, or the watch ends for whatever reason: who called looks for itself."""
        try:
            await self._request(self._watch, name)
        except self._k.client.ApiException as error:
            if error.status != EXPIRED:
                raise ProvisionError(f"{name} can't be watched: {words_of(error)}") from error

    async def _pages(self) -> Sequence[Any]:
        found: list[Any] = []
        after: str | None = None
        while True:
            selector = f"{RUN_LABEL}={self._label}"
            page = await self._request(
                self._list_page, self._namespace, label_selector=selector, limit=PAGE, _continue=after
            )
            found += page.items
            after = page.metadata._continue
            if not after:
                return found

    async def _request(self, function: Callable[..., Any], *words: Any, **options: Any) -> Any:
        """On a thread. Where the cluster has too many requests, it is waited for as it asks, `request_s` in all.

        Raises ApiException; ProvisionError where the cluster can't be reached or asks for more than that.
        """
        import urllib3

        call = functools.partial(function, *words, **{"_request_timeout": self._request_s, **options})
        left_s = self._request_s
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, call)
            except self._k.client.ApiException as error:
                if error.status != TOO_MANY:
                    raise
                wait_s = _retry_after_s(error)
                if wait_s > left_s:
                    raise ProvisionError(
                        f"the cluster has too many requests and wants no other for {wait_s:g} s: {words_of(error)}"
                    ) from error
                left_s -= max(wait_s, PAUSE_S)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise ProvisionError(f"the cluster can't be reached: {error}") from error
            await asyncio.sleep(max(wait_s, PAUSE_S))

    # ---- on a thread

    def _watch(self, name: str, _request_timeout: float) -> None:
        import urllib3

        watch = self._k.watch.Watch()
        try:
            for event in watch.stream(
                self._list_page,
                self._namespace,
                field_selector=f"metadata.name={name}",
                timeout_seconds=WATCH_S,
                _request_timeout=WATCH_S + _request_timeout,
            ):
                if event["type"] == "DELETED":
                    return
        except (urllib3.exceptions.HTTPError, OSError) as error:
            # A watch may be cut at any time; the look that follows says whether the cluster is there.
            log.info("the watch of %s was cut: %s", name, error)
        finally:
            watch.stop()


def label_of(run: str) -> str:
    """A run's name as a label's value: letters, digits and any of ._- within, 63 at most.

    Where that changes it, a hash of the whole is part of it, so that no two runs have one label.
    """
    label = re.sub(r"[^A-Za-z0-9._-]", "-", run)[:LABEL_CHARS].strip("-._")
    if label == run:
        return label
    digest = hashlib.sha256(run.encode()).hexdigest()[:HASH_CHARS]
    return f"{label[: LABEL_CHARS - HASH_CHARS - 1].strip('-._') or 'run'}-{digest}"


def _retry_after_s(error: Any) -> float:
    """What the answer asks for: the API tells whole seconds."""
    told = (error.headers or {}).get("Retry-After", "").strip()
    return float(told) if told.isdecimal() else RETRY_S


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
