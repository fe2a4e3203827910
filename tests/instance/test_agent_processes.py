"""`penstock join` as a process of its own: signals, a parent that dies, and a real manager that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from fake_manager import TOKEN, FakeManager, Session, start_frame

from penstock.cli.join import own_name
from penstock.rollout.client import RolloutClient
from penstock.rollout.fleet import INSTANCE_NAME
from penstock.weights import WeightStore
from penstock.wire import AgentHello, Goodbye, LoadWeights, Sampling, TokenFrame, VersionReady

WITHIN_S = 60.0


@pytest.fixture
def store() -> Iterator[WeightStore]:
    held = WeightStore("run", "127.0.0.1", 0, TOKEN)
    held.start()
    held.publish(0, [("w", "F32", (500,), bytes(2000))], '{"vocab_size": 50}')
    yield held
    held.close()


class Process:
    """A `penstock` command under way."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._said: list[bytes] = []
        self._more = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self._said.append(line)
            self._more.set()
        self._more.set()

    async def says(self, word: str, times: int = 1) -> None:
        """Waits until it has said so."""
        async with asyncio.timeout(WITHIN_S):
            while b"".join(self._said).count(word.encode()) < times:
                assert not self._listening.done(), b"".join(self._said).decode()
                self._more.clear()
                await self._more.wait()

    async def ended(self) -> tuple[int, str]:
        """Exit code and everything it said."""
        async with asyncio.timeout(WITHIN_S):
            code = await self.process.wait()
            await self._listening
        return code, b"".join(self._said).decode()


@contextlib.asynccontextmanager
async def penstock(*arguments: str, token: str | None = TOKEN) -> AsyncIterator[Process]:
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_TOKEN"}
    if token is not None:
        environment["PENSTOCK_TOKEN"] = token
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock",
        *arguments,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    process = Process(started)
    try:
        yield process
    finally:
        if started.returncode is None:
            started.kill()
        await process.ended()


def joins(manager: FakeManager, *arguments: str) -> list[str]:
    engine = ["--engine", "paced", "--tokens-per-s", "3000", "--preemption", "none"]
    return ["join", "--manager", manager.url, *engine, *arguments]


async def at_work(manager: FakeManager, store: WeightStore) -> Session:
    """The first session, with three long sequences under way."""
    session = await manager.session(within_s=WITHIN_S)
    await session.send(LoadWeights(version=0, source=store.address))
    await session.next_of(VersionReady)
    await session.send(start_frame([1, 2, 3], sampling=Sampling(max_new_tokens=4000)))
    await session.next_of(TokenFrame, count=5)
    return session


def tokens_received(session: Session) -> int:
    return sum(map(len, session.tokens().values()))


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "the parent's end"])
async def test_a_machine_told_to_go_sends_what_it_has_says_goodbye_and_ends_well(
    store: WeightStore, tmp_path: Path, how: str
) -> None:
    progress = tmp_path / "progress"
    async with FakeManager(frame_steps=1) as manager:
        arguments = joins(manager, "--name", "spot-7", "--progress-file", str(progress), "--exit-with-stdin")
        async with penstock(*arguments) as agent:
            session = await at_work(manager, store)
            if how == "the parent's end":
                assert agent.process.stdin is not None
                agent.process.stdin.close()
            else:
                agent.process.send_signal(getattr(signal, how))
            code, said = await agent.ended()
            await asyncio.wait_for(session.closed.wait(), WITHIN_S)
    assert code == 0, said
    hello = session.frames[0]
    assert isinstance(hello, AgentHello)
    assert (hello.name, hello.pid) == ("spot-7", agent.process.pid)
    goodbye = session.frames[-1]
    assert isinstance(goodbye, Goodbye)
    assert goodbye.cause == ("the process that started it is gone" if how == "the parent's end" else f"got {how}")
    assert tokens_received(session) == struct.unpack("<Q", progress.read_bytes())[0] > 0


async def test_after_sigkill_the_progress_file_says_how_many_tokens_were_drawn(
    store: WeightStore, tmp_path: Path
) -> None:
    progress = tmp_path / "progress"
    async with FakeManager(frame_steps=1) as manager:
        async with penstock(*joins(manager, "--progress-file", str(progress))) as agent:
            session = await at_work(manager, store)
            agent.process.kill()
            await agent.ended()
            await asyncio.wait_for(session.closed.wait(), WITHIN_S)
    drawn = struct.unpack("<Q", progress.read_bytes())[0]
    # At most the frames that the queue of the engine and the socket's buffers held are missing here.
    assert 0 < tokens_received(session) <= drawn


@pytest.mark.parametrize(
    ("token", "arguments", "named"),
    [
        (None, [], "PENSTOCK_TOKEN"),
        ("wrong", [], "refused this agent (HTTP 401)"),
        (TOKEN, ["--token-file", "/does/not/exist"], "/does/not/exist can't be read"),
        (TOKEN, ["--token-file", sys.executable], "can't be read: it is no text"),
        (TOKEN, ["--name", "spot 7"], "--name 'spot 7' is no name of an instance"),
        (TOKEN, ["--progress-file", "/does/not/exist"], "progress file /does/not/exist can't be written"),
    ],
)
async def test_what_keeps_a_machine_out_is_said_on_its_own_screen(
    token: str | None, arguments: list[str], named: str
) -> None:
    async with FakeManager() as manager:
        async with penstock(*joins(manager, *arguments), token=token) as agent:
            code, said = await agent.ended()
    assert code not in (0, None)
    assert named in said
    assert "Traceback" not in said


@pytest.mark.parametrize("host", ["vm", "-.odd_host!", "x" * 63, "node-7." + "far.away." * 20 + "example", ""])
def test_a_machine_without_a_name_takes_one_that_every_manager_takes(host: str) -> None:
    name = own_name(host, 4_000_000)
    assert INSTANCE_NAME.fullmatch(name)
    assert name.endswith("-4000000")
    assert name != own_name(host + "2", 4_000_000)


@pytest.mark.parametrize("arguments", [["--max-running", "0"], ["--tokens-per-s", "-1"], ["--threads", "many"]])
async def test_impossible_arguments_are_refused_before_anything_is_dialled(arguments: list[str]) -> None:
    async with FakeManager() as manager:
        async with penstock(*joins(manager, *arguments)) as agent:
            code, said = await agent.ended()
    assert code == 2
    assert arguments[0] in said
    assert manager.attempts == 0


async def test_a_token_may_come_from_a_file(store: WeightStore, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    async with FakeManager() as manager:
        async with penstock(*joins(manager, "--token-file", str(tmp_path / "token")), token="ignored"):
            await at_work(manager, store)


@contextlib.asynccontextmanager
async def real_manager(folder: Path, *options: str, port: int = 0) -> AsyncIterator[tuple[Process, str]]:
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    arguments = ["manager", "--port", str(port), "--ready-file", str(ready), "--heartbeat-s", "0.1", *options]
    async with penstock(*arguments) as manager:
        deadline = time.monotonic() + WITHIN_S
        while not ready.exists():
            assert manager.process.returncode is None
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        yield manager, json.loads(ready.read_text())["url"]


async def test_a_manager_killed_by_sigkill_is_dialled_again_and_then_given_up(tmp_path: Path) -> None:
    async with real_manager(tmp_path) as (manager, url):
        arguments = ["join", "--manager", url, "--engine", "paced", "--reconnect-s", "0.6", "--name", "spot-1"]
        async with penstock(*arguments) as agent:
            await agent.says("joined")
            manager.process.send_signal(signal.SIGKILL)
            code, said = await agent.ended()
    assert code == 1
    assert "next attempt in" in said
    assert f"no manager at {url}/agent for 0.6 s" in said
    assert "Traceback" not in said


async def test_a_manager_that_is_restarted_gets_its_machines_back(tmp_path: Path) -> None:
    async with real_manager(tmp_path) as (manager, url):
        async with penstock("join", "--manager", url, "--engine", "paced", "--name", "spot-1") as agent:
            await agent.says("joined")
            manager.process.send_signal(signal.SIGKILL)
            await manager.ended()
            async with real_manager(tmp_path, port=int(url.rpartition(":")[2])) as (_, again):
                assert again == url
                await agent.says("joined", times=2)
                agent.process.terminate()
                code, said = await agent.ended()
    assert code == 0, said


@pytest.mark.parametrize(("options", "served"), [([], 5000), (["--max-context", "300"], 300)])
async def test_the_managers_address_is_all_that_a_machine_needs_to_fit_the_run(
    store: WeightStore, tmp_path: Path, options: list[str], served: int
) -> None:
    async with real_manager(tmp_path, "--max-context", "5000") as (_, url):
        client = RolloutClient(url, TOKEN, lambda event: None, lambda status: None)
        await client.connect()
        await client.publish(0, store.address)
        async with penstock("join", "--manager", url, "--engine", "paced", *options) as agent:
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
                rows: list[dict[str, object]] = []
                deadline = time.monotonic() + WITHIN_S
                while not any(row["state"] == "ready" for row in rows):
                    assert time.monotonic() < deadline
                    assert agent.process.returncode is None
                    await asyncio.sleep(0.05)
                    async with http.get(f"{url}/instances") as answer:
                        rows = await answer.json()
        await client.close()
    # On a machine that is busy with other things it may have been lost once, and come back.
    assert [row["max_context_tokens"] for row in rows if row["state"] == "ready"] == [served]
