"""`penstock manager` with a journal, as its options say: real processes, signals and sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from test_server import TOKEN, Heard, Trainer, agent_at, check

from penstock.observe.events import BatchTakenUp, Event, ManagerChanged, ManagerRecovered
from penstock.rollout.client import RolloutClient
from penstock.sample import Prompt
from penstock.wire import Drain, Sampling, decode_from_manager

WAIT_S = 60.0


@dataclass
class Served:
    process: subprocess.Popen[bytes]
    url: str

    async def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        assert await asyncio.to_thread(self.process.wait, WAIT_S) == 0

    async def get(self, path: str) -> str:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(headers=headers) as http, http.get(self.url + path) as response:
            return await response.text()

    async def until(self, path: str, words: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while words not in await self.get(path):
                await asyncio.sleep(0.05)


@asynccontextmanager
async def manager(folder: Path, *options: str) -> AsyncIterator[Served]:
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
        [sys.executable, "-m", "penstock", "manager", "--ready-file", str(ready), *options],
        env={**os.environ, "PENSTOCK_TOKEN": TOKEN},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(WAIT_S):
            while not ready.exists():
                assert process.poll() is None
                await asyncio.sleep(0.02)
        yield Served(process, json.loads(ready.read_text())["url"])
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def trainer(url: str, reconnect_s: float = WAIT_S) -> AsyncIterator[Trainer]:
    events: list[Event] = []
    client = RolloutClient(url, TOKEN, events.append, lambda _: None, reconnect_s=reconnect_s)
    await client.connect()
    try:
        yield Trainer(client, events)
    finally:
        await client.close()


async def test_sigterm_with_a_journal_is_a_restart_that_fails_no_batch_and_sends_no_agent_away(tmp_path: Path) -> None:
    journal = ("--journal", str(tmp_path / "journal"))
    async with manager(tmp_path, *journal) as first, trainer(first.url) as its:
        await its.client.publish(1, "store:1", "weights")
        heard = await its.submit(samples=6)
        async with agent_at(first) as remote:  # type: ignore[arg-type]
            work = asyncio.create_task(remote.work())
            await its.until(lambda: heard.samples)
            work.cancel()
            await asyncio.wait([work])
            ending = asyncio.create_task(first.end(signal.SIGTERM))
            async with asyncio.timeout(WAIT_S):
                while (message := await remote.socket.receive()).type is aiohttp.WSMsgType.BINARY:
                    assert not isinstance(decode_from_manager(message.data, 1 << 30), Drain)
            assert remote.socket.close_code == aiohttp.WSCloseCode.GOING_AWAY
            await ending
        assert heard.error is None
        port = first.url.rpartition(":")[2]
        async with manager(tmp_path, *journal, "--port", port) as second:
            await its.until(lambda: its.of_kind(ManagerRecovered))
            async with agent_at(second) as remote:  # type: ignore[arg-type]
                work = asyncio.create_task(remote.work())
                await heard.end()
                work.cancel()
        check(heard)
        lost, back = its.of_kind(ManagerChanged)
        assert isinstance(lost, ManagerChanged)
        assert isinstance(back, ManagerChanged)
        assert (lost.state, back.state) == ("lost", "back")
        assert "expected to start again" in lost.cause


@pytest.mark.parametrize(("options", "number"), [((), signal.SIGTERM), (("--journal", "journal"), signal.SIGINT)])
async def test_without_a_journal_or_by_sigint_a_manager_ends_for_good(
    tmp_path: Path, options: tuple[str, ...], number: signal.Signals
) -> None:
    where = [str(tmp_path / word) if word == "journal" else word for word in options]
    async with manager(tmp_path, *where) as served, trainer(served.url, reconnect_s=0.0) as its:
        heard = await its.submit()
        await served.until("/samples", "train-0")
        await served.end(number)
        await heard.end()
        assert f"the manager got {number.name}" in str(heard.error)


@pytest.mark.parametrize("grace_s", ["0.2", "300"])
async def test_trainer_grace_s_is_how_long_a_batch_outlives_its_trainer(tmp_path: Path, grace_s: str) -> None:
    async with manager(tmp_path, "--trainer-grace-s", grace_s) as served:
        async with trainer(served.url) as its:
            await its.client.publish(1, "store:1", "weights")
            await its.submit()
            await served.until("/samples", "train-0")
        if grace_s == "0.2":
            await served.until("/metrics", 'outcome="cancelled"} 1')
        async with trainer(served.url) as its:
            await its.client.publish(1, "store:1", "weights")
            await its.submit()
            await its.submit("train-1")
            await served.until("/samples", "train-1")
            assert bool(its.of_kind(BatchTakenUp)) == (grace_s == "300")


@pytest.mark.parametrize(("max_mib", "said"), [("1", "and may have 1"), ("16", "running")])
async def test_journal_max_mib_bounds_the_journal(tmp_path: Path, max_mib: str, said: str) -> None:
    options = ("--journal", str(tmp_path / "journal"), "--journal-max-mib", max_mib)
    async with manager(tmp_path, *options) as served, trainer(served.url) as its:
        prompts = [Prompt(index, "question", [1] * 5000, {}, "file:1") for index in range(100)]
        await its.client.submit("large", 1, prompts, 1, 0, Sampling(max_new_tokens=4), 600.0, Heard())
        await served.until("/samples", "large")
        await served.until("/healthz", said)
        assert sum(path.stat().st_size for path in (tmp_path / "journal").glob("segment-*")) > 1 << 20
