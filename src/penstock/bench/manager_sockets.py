"""A `penstock manager` process under agents on sockets of their own: its rate, and how long its operators wait."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.manager_world import PROMPT_TOKENS, FrameMaker, hello, ready
from penstock.sample import Prompt
from penstock.wire import FleetStatus, LoadWeights, Sampling, StartFrame, column, decode_from_manager, encode

if TYPE_CHECKING:
    import aiohttp

RUNNING = 256
"""Of each agent."""
LENGTH = 1 << 20


@dataclass(slots=True)
class Edge:
    """What was found."""

    tokens_per_cpu_s: float
    tokens_per_s: float
    """By the clock."""
    answers_s: list[float] = field(default_factory=list)
    """Of the operator's API, meanwhile."""


EDGE_START_S = 30.0
EDGE_WORK_S = 120.0


def measure_edge(agents: int, row_tokens: int, rounds: int, tokens_per_s: float = 0.0, operator: bool = False) -> Edge:
    """A real manager process with `agents` x 256 running samples. `tokens_per_s`: offered, 0 for all that it takes.

    `operator`: somebody asks its pages meanwhile.
    """
    token = secrets.token_hex(16)
    with _manager_process(token) as (url, pid):
        return asyncio.run(_drive(url, pid, token, agents, row_tokens, rounds, tokens_per_s, operator))


@contextmanager
def _manager_process(token: str) -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "manager", "--ready-file", str(ready), "--heartbeat-s", "100"],
            env={**os.environ, "PENSTOCK_TOKEN": token},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + EDGE_START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the manager process did not start")
                time.sleep(0.02)
            yield json.loads(ready.read_text())["url"], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Nobody:
    """Listens to a batch that never ends."""

    def on_samples(self, samples: Sequence[object]) -> None:
        raise RuntimeError("no sample ends in this benchmark")

    def on_done(self, done: object) -> None:
        raise RuntimeError("the batch can't be done in this benchmark")

    def on_failed(self, error: Exception) -> None:
        """The client is closed with the batch still open."""


async def _drive(
    url: str, pid: int, token: str, count: int, row_tokens: int, rounds: int, tokens_per_s: float, asked: bool
) -> Edge:
    import aiohttp

    from penstock.rollout.client import RolloutClient
    from penstock.wire.codec import PROTOCOL, PROTOCOL_HEADER

    accepted = 0

    def on_status(status: FleetStatus) -> None:
        nonlocal accepted
        accepted = status.tokens_accepted

    client = RolloutClient(url, token, lambda event: None, on_status)
    await client.connect()
    headers = {"Authorization": f"Bearer {token}", PROTOCOL_HEADER: str(PROTOCOL)}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:
        agents = [FrameMaker(f"agent-{k}") for k in range(count)]
        sockets = [await http.ws_connect(f"{url}/agent", max_msg_size=0) for _ in agents]
        for agent, socket in zip(agents, sockets, strict=True):
            await socket.send_bytes(encode(hello(agent.peer, RUNNING)))
        await client.publish(1, "bench:1")
        # More than all can take, pending ones too: those that are ready first must leave enough for the last.
        prompts = [Prompt(k, "", range(PROMPT_TOKENS), {}, "bench") for k in range(count * 36)]
        await client.submit("bench", 1, prompts, 8, 0, Sampling(max_new_tokens=LENGTH), 1e6, _Nobody())
        async with asyncio.timeout(EDGE_WORK_S):
            await asyncio.gather(*(_until_full(a, s) for a, s in zip(agents, sockets, strict=True)))
            messages = [[agent.next_frame(row_tokens, LENGTH) for _ in range(rounds)] for agent in agents]
            expected = sum(len(agent.drawn) for agent in agents) * row_tokens * rounds
            pause_s = expected / rounds / tokens_per_s if tokens_per_s else 0.0
            before_s, began = _cpu_s(pid), time.monotonic()
            operator = await _start_operator(url, token) if asked else None
            await asyncio.gather(
                *(
                    # Spread over a round, as agents that know nothing of each other are.
                    _send_all(socket, frames, began + pause_s * number / count, pause_s)
                    for number, (socket, frames) in enumerate(zip(sockets, messages, strict=True))
                )
            )
            while accepted < expected:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            edge = Edge(expected / (_cpu_s(pid) - before_s), expected / (time.monotonic() - began))
            if operator is not None:
                edge.answers_s = await _answers(operator)
        await client.close()
    return edge


async def _start_operator(url: str, token: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.bench.manager_operator", url),
        env={**os.environ, "PENSTOCK_TOKEN": token},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def _answers(operator: asyncio.subprocess.Process) -> list[float]:
    """Ends it; the seconds of each of its answers."""
    async with asyncio.timeout(EDGE_START_S):
        out, _ = await operator.communicate(b"")
    if operator.returncode != 0:
        raise RuntimeError(f"the operator ended with exit code {operator.returncode}")
    return [float(seconds) for seconds in json.loads(out)]


async def _until_full(agent: FrameMaker, socket: aiohttp.ClientWebSocketResponse) -> None:
    """Loads what it is told to, and takes sequences until as many run as it has places for."""
    while len(agent.drawn) < RUNNING:
        frame = decode_from_manager((await socket.receive()).data)
        if isinstance(frame, LoadWeights):
            await socket.send_bytes(encode(ready(frame.version)))
        elif isinstance(frame, StartFrame):
            agent.drawn |= dict.fromkeys(column(frame.leases, "Q").tolist(), 0)


async def _send_all(
    socket: aiohttp.ClientWebSocketResponse, messages: Sequence[bytes], first_at: float, pause_s: float
) -> None:
    for number, message in enumerate(messages):
        if pause_s:
            await asyncio.sleep(max(0.0, first_at + number * pause_s - time.monotonic()))
        await socket.send_bytes(message)


def _cpu_s(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
