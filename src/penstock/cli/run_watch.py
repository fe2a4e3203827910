"""What the trainer has looked at while it waits: its processes, and the drill.

The edge of `drill`'s decisions. It may end the run where nothing could go on anyway; a drill that can't be carried out
just now is tried again.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable

import aiohttp

from penstock.cli.drill import Action, Drill
from penstock.cli.restarts import Restarts
from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded, PenstockError
from penstock.observe import events
from penstock.train.edge import EdgeLoop
from penstock.train.processes import Child, LocalProcesses

POLL_S = 0.2
DRILL_CALL_S = 2.0
DRILL_RETRY_S = 1.0


class RunWatch:
    """Called by the trainer, on its main thread, several times a second while it waits and between passes.

    `notice` hears every event of the run. `token` is an operator's.
    """

    def __init__(
        self,
        config: RunConfig,
        processes: LocalProcesses,
        manager_url: str,
        token: str,
        edge: EdgeLoop,
        emit: Callable[[events.Event], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._processes = processes
        self._manager_url = manager_url
        self._token = token
        self._edge = edge
        self._emit = emit
        self._tls = tls
        self._drill = Drill(config.drill, config.train.steps)
        self._step = 0
        self._drawn_before: dict[str, int] = {}
        self._restarts = Restarts(config.rollout.engines.restarts)
        self._ready_once = False
        self._poll_at = 0.0
        self._drill_at = 0.0

    def notice(self, event: events.Event) -> None:
        match event:
            case events.StepStarted(step=step):
                self._step = step
                self._drawn_before = {name: self._drawn(name) for name in self._processes.engines}
            case events.InstanceChanged(after="ready"):
                self._ready_once = True

    def __call__(self) -> None:
        now = time.monotonic()
        if now >= self._poll_at:
            self._poll_at = now + POLL_S
            for child in self._processes.poll():
                self._replace(child, now)
            self._check_start()
        if self._restarts.due(now):
            self._processes.start_engine(self._manager_url, "in place of one that died")
        if not self._drill.over and self._drill.due(self._step) and now >= self._drill_at:
            self._carry_out_drill(now)

    def finish(self) -> None:
        """Says so where a drill that was asked for did not take place."""
        if not self._drill.over:
            message = "the run was over before the drill was: no engine was killed, or none started in its place"
            self._emit(events.Warned(ts=time.time(), where="drill", message=message))

    def _replace(self, child: Child, now: float) -> None:
        if child.end_cause or not self._ready_once:
            return
        wait_s = self._restarts.died(now)
        if wait_s is None:
            message = f"{child.name} died; no further engine is started in its place (rollout.engines.restarts)"
        else:
            message = f"{child.name} died; another engine is started in {wait_s:g} s"
        self._emit(events.Warned(ts=time.time(), where="engines", message=message))

    def _check_start(self) -> None:
        """Engines that all die before any was ready would otherwise be waited for until the deadline."""
        engines = list(self._processes.engines.values())
        if self._ready_once or not engines or not all(child.reported for child in engines):
            return
        raise PenstockError(
            f"all {len(engines)} engines of this machine exited before any instance was ready; "
            f"the log of one, {engines[0].log_path}, ends in:\n{engines[0].log_tail()}"
        )

    def _carry_out_drill(self, now: float) -> None:
        try:
            running = self._edge.run(self._running(), "asking the manager for its instances", DRILL_CALL_S)
        except (DeadlineExceeded, aiohttp.ClientError, OSError) as error:
            self._drill_at = now + DRILL_RETRY_S
            self._emit(
                events.Warned(
                    ts=time.time(), where="drill", message=f"the manager did not answer, trying again: {error}"
                )
            )
            return
        order = self._drill.decide(self._step, running)
        if order is None:
            return
        if order.action is Action.KILL:
            self._processes.kill_engine(order.engine, "killed on purpose by the drill")
        else:
            self._processes.start_engine(self._manager_url, "the drill's replacement")

    async def _running(self) -> dict[str, int]:
        """Each ready engine of this machine, and its samples as the manager knows them once it drew tokens for them."""
        headers = {"Authorization": f"Bearer {self._token}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.get(f"{self._manager_url}/instances", ssl=self._tls or True) as response:
                response.raise_for_status()
                rows = await response.json()
        return {
            row["name"]: row["running"] if self._drawn(row["name"]) > self._drawn_before.get(row["name"], 0) else 0
            for row in rows
            if row["state"] == "ready" and self._lives(row["name"])
        }

    def _drawn(self, name: str) -> int:
        """Tokens that a living engine of this machine has drawn so far."""
        return self._processes.engines[name].tokens_generated() or 0 if self._lives(name) else 0

    def _lives(self, name: str) -> bool:
        child = self._processes.engines.get(name)
        return child is not None and child.process.poll() is None
