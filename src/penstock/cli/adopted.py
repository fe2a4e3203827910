"""Agents that the manager's process starts beside engine servers which have none, and ends with itself.

Each is a `penstock join --engine-url` of its own: the manager itself speaks to no server. An agent that gives up is
started again a few times, each after a longer wait; what it says goes to the manager's own error output.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from penstock.cli.engine_server import SERVED
from penstock.cli.restarts import Restarts
from penstock.errors import ConfigError, EngineError
from penstock.tls import client_context

RESTARTS = 3
LEAVE_S = 2.0
"""For an agent to say goodbye; then it is killed."""

log = logging.getLogger("penstock.adopted")


@dataclass(slots=True)
class _Agent:
    name: str
    engine: str
    task: asyncio.Task[None] | None = None
    process: asyncio.subprocess.Process | None = None


@dataclass(frozen=True, slots=True)
class AgentTls:
    """PEM files that these agents are given, where their manager is spoken to over TLS."""

    ca: str = ""
    """That signed the manager's certificate; the system's CAs where it is empty."""
    cert: str = ""
    key: str = ""
    asked_for: bool = False
    """The manager lets nobody in without a certificate."""

    def words(self) -> list[str]:
        """For `penstock join`."""
        files = (("--tls-ca", self.ca), ("--tls-cert", self.cert), ("--tls-key", self.key))
        return [word for option, path in files if path for word in (option, path)]


class AdoptedAgents:
    """`manager_url` is set once the manager listens.

    Raises ConfigError for TLS files that can't be used.
    """

    def __init__(self, token: str, tls: AgentTls | None = None) -> None:
        self.manager_url = ""
        self._token = token
        self._tls = tls or AgentTls()
        if self._tls.words():
            client_context(self._tls.ca, self._tls.cert, self._tls.key)
        self._agents: dict[str, _Agent] = {}
        """By the server's address."""
        self._started = 0

    async def adopt(self, url: str, engine: str) -> str:
        """Starts an agent for the server at `url`; returns its name.

        Raises ConfigError where its agent would have no certificate, for what is no server's address, a kind of engine
        that there is not, and a server that has an agent from here already; EngineError where no such server answers.
        """
        import aiohttp

        from penstock.instance.dialects import dialect_of
        from penstock.instance.supervise import checked_url

        if self._tls.asked_for and not self._tls.cert:
            raise ConfigError(
                "this manager asks every agent for a certificate, and has none for agents that it starts itself; "
                "give it one with --agent-tls-cert and --agent-tls-key"
            )
        if engine not in SERVED:
            raise ConfigError(f"there is no engine server of kind {engine!r}; there are: {', '.join(SERVED)}")
        base, dialect = checked_url(url), dialect_of(engine)
        async with aiohttp.ClientSession() as http:
            if not await dialect.is_up(http, base):
                raise EngineError(f"no {engine} server answers at {base}")
        if base in self._agents:
            raise ConfigError(f"the server at {base} has the agent {self._agents[base].name} already")
        self._started += 1
        agent = self._agents[base] = _Agent(f"adopted-{self._started}", engine)
        agent.task = asyncio.create_task(self._keep(agent, base), name=agent.name)
        return agent.name

    async def close(self) -> None:
        agents = list(self._agents.values())
        for agent in agents:
            if agent.task is not None:
                agent.task.cancel()
        await asyncio.gather(*(agent.task for agent in agents if agent.task), return_exceptions=True)
        await asyncio.gather(*(_end(agent.process) for agent in agents if agent.process))

    async def _keep(self, agent: _Agent, url: str) -> None:
        restarts = Restarts(RESTARTS)
        while True:
            agent.process = await self._spawn(agent, url)
            code = await agent.process.wait()
            wait_s = restarts.died(time.monotonic()) if code else None
            if wait_s is None:
                log.error("%s for %s has left (exit code %d) and is not started again", agent.name, url, code)
                self._agents.pop(url, None)
                return
            log.error("%s for %s ended with exit code %d; it is started again in %g s", agent.name, url, code, wait_s)
            await asyncio.sleep(wait_s)

    async def _spawn(self, agent: _Agent, url: str) -> asyncio.subprocess.Process:
        from penstock.rollout.doors import agents_environment

        words = ["join", "--manager", self.manager_url, "--name", agent.name, "--exit-with-stdin", *self._tls.words()]
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock",
            *words,
            "--engine",
            agent.engine,
            "--engine-url",
            url,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=agents_environment(os.environ, self._token),
            start_new_session=True,
        )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(LEAVE_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
