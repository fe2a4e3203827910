"""The manager's edge over real sockets: who is let in, what is refused, and what a vanished peer costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from rollout_helpers import SimulatedAgent, output_of

from penstock.errors import AuthError, DeadlineExceeded, PenstockError, PortInUse, ProtocolMismatch, RolloutError
from penstock.observe.events import Event, FrameRefused, InstanceChanged, SamplesMoved, WaitingForInstances, WaitingOver
from penstock.rollout.client import FinishedSample, RolloutClient
from penstock.rollout.fleet import FleetConfig
from penstock.rollout.manager import TRAINER, ManagerConfig
from penstock.rollout.pace import PaceConfig
from penstock.rollout.server import ManagerServer, ServerConfig
from penstock.sample import Prompt, SampleId, sample_seed
from penstock.wire import (
    AgentHello,
    BatchDone,
    FleetStatus,
    FrameToManager,
    Heartbeat,
    Sampling,
    Welcome,
    decode_from_manager,
    encode,
)

TOKEN = "a-shared-secret"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "X-Penstock-Protocol": "1"}


def beat(tokens: int = 0) -> Heartbeat:
    return Heartbeat(running=0, waiting=0, kv_tokens=0, tokens_generated=tokens, tokens_prefilled=0, tokens_per_s=0.0)


BEAT = beat()
LIMIT_BYTES = 64 * 1024


@asynccontextmanager
async def serving(**changes: object) -> AsyncIterator[ManagerServer]:
    options: dict[str, object] = {
        "token": TOKEN,
        "manager": ManagerConfig(fleet=FleetConfig(heartbeat_s=5.0), status_s=0.05, max_frame_bytes=LIMIT_BYTES),
        "tick_s": 0.02,
        "close_s": 0.5,
    }
    server = ManagerServer(ServerConfig(**{**options, **changes}))  # type: ignore[arg-type]
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Remote:
    """A simulated agent behind a real socket."""

    socket: aiohttp.ClientWebSocketResponse
    agent: SimulatedAgent
    frames: list[object] = field(default_factory=list)

    async def send(self, frame: FrameToManager) -> None:
        await self.socket.send_bytes(encode(frame))

    async def read(self) -> bool:
        """Takes one frame; False when the connection has ended."""
        message = await self.socket.receive(timeout=60)
        if message.type is not aiohttp.WSMsgType.BINARY:
            return False
        frame = decode_from_manager(message.data)
        self.frames.append(frame)
        self.agent.take(frame)
        return True

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            assert await self.read(), f"the manager ended the connection: {self.socket.close_code}"

    async def work(self, tokens_a_frame: int = 2, frames: int = 10**9) -> None:
        """Loads what it is told to, and draws, until the connection ends or so many frames are sent."""
        sent = 0
        while sent < frames:
            if self.agent.loading is not None:
                await self.send(self.agent.ready())
            elif self.agent.sequences:
                await self.send(self.agent.draw(list(self.agent.sequences), tokens_a_frame))
                sent += 1
                # Lets frames of the manager in between.
                await asyncio.sleep(0.002)
                continue
            if not await self.read():
                return


@asynccontextmanager
async def agent_at(server: ManagerServer, name: str = "engine", max_running: int = 4) -> AsyncIterator[Remote]:
    async with aiohttp.ClientSession() as http:
        async with http.ws_connect(f"{server.url}/agent", headers=HEADERS) as ws:
            remote = Remote(ws, SimulatedAgent(name))
            await remote.send(
                AgentHello(
                    name=name, engine="simulated", pid=1, host="here", max_running=max_running, max_context_tokens=99
                )
            )
            await remote.until(lambda: remote.agent.instance)
            yield remote


def transport_of(ws: aiohttp.ClientWebSocketResponse) -> asyncio.Transport:
    connection = ws._response.connection
    assert connection is not None
    assert isinstance(connection.transport, asyncio.Transport)
    return connection.transport


@dataclass
class Heard:
    """A listener that remembers, and says when its batch has ended."""

    samples: list[FinishedSample] = field(default_factory=list)
    done: BatchDone | None = None
    error: RolloutError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def on_samples(self, samples: list[FinishedSample]) -> None:
        self.samples += samples

    def on_done(self, done: BatchDone) -> None:
        self.done = done
        self.ended.set()

    def on_failed(self, error: RolloutError) -> None:
        self.error = error
        self.ended.set()

    async def end(self) -> None:
        async with asyncio.timeout(60):
            await self.ended.wait()


@dataclass
class Trainer:
    client: RolloutClient
    events: list[Event] = field(default_factory=list)
    statuses: list[FleetStatus] = field(default_factory=list)

    async def submit(
        self, batch: str = "train-0", samples: int = 6, limit: int = 12, deadline_s: float = 20.0
    ) -> Heard:
        heard = Heard()
        prompts = [Prompt(5, "question", [1, 2, 3], {}, "file:1")]
        sampling = Sampling(max_new_tokens=limit, stop_ids=(9,))
        await self.client.submit(batch, 1, prompts, samples, 0, sampling, deadline_s, heard)
        return heard

    def of_kind(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def gone(self) -> list[InstanceChanged]:
        return [e for e in self.events if isinstance(e, InstanceChanged) and e.after == "gone"]

    async def until(self, condition: Callable[[], object]) -> None:
        await eventually(condition)


@asynccontextmanager
async def trainer_at(server: ManagerServer) -> AsyncIterator[Trainer]:
    events: list[Event] = []
    statuses: list[FleetStatus] = []
    client = RolloutClient(server.url, TOKEN, events.append, statuses.append)
    await client.connect()
    try:
        yield Trainer(client, events, statuses)
    finally:
        await client.close()


def check(heard: Heard, batch: str = "train-0", samples: int = 6, limit: int = 12) -> None:
    assert heard.error is None
    assert sorted((s.prompt, s.replica) for s in heard.samples) == [(5, k) for k in range(samples)]
    for sample in heard.samples:
        ids, logprobs, finish = output_of(sample_seed(0, SampleId(batch, 5, sample.replica)), limit)
        assert (sample.token_ids.tolist(), sample.logprobs.tolist(), sample.finish) == (ids, logprobs, finish)


# ---- who is let in


@pytest.mark.parametrize("path", ["/agent", "/trainer", "/instances", "/samples", "/metrics"])
@pytest.mark.parametrize("given", ["Bearer wrong", "Bearer", "Basic x", "", "Bearer \u00e9"])
async def test_a_wrong_token_gets_401_and_is_told_what_to_do(path: str, given: str) -> None:
    async with serving() as server, aiohttp.ClientSession() as http:
        async with http.get(server.url + path, headers={"Authorization": given}) as response:
            assert response.status == 401
            assert "PENSTOCK_TOKEN" in await response.text()


@pytest.mark.parametrize("path", ["/agent", "/trainer"])
@pytest.mark.parametrize("spoken", ["2", "", "one"])
async def test_another_protocol_gets_426_and_both_versions(path: str, spoken: str) -> None:
    async with serving() as server, aiohttp.ClientSession() as http:
        async with http.get(server.url + path, headers={**HEADERS, "X-Penstock-Protocol": spoken}) as response:
            assert response.status == 426
            assert f"protocol 1 of Penstock and the peer speaks {spoken or 'none'}" in await response.text()


async def test_the_client_names_what_it_was_refused_for() -> None:
    async with serving() as server:
        with pytest.raises(AuthError, match="token"):
            await RolloutClient(server.url, "wrong", print, print).connect()
        async with trainer_at(server):
            with pytest.raises(RolloutError, match="one at a time"):
                await RolloutClient(server.url, TOKEN, print, print).connect()
        other = RolloutClient(server.url, TOKEN, print, print)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.rollout.client.PROTOCOL", 7)
            with pytest.raises(ProtocolMismatch, match="protocol 7"):
                await other.connect()
    with pytest.raises(RolloutError, match="is it running"):
        await RolloutClient(server.url, TOKEN, print, print).connect()


async def test_a_second_trainer_gets_409_and_one_may_follow_the_first() -> None:
    async with serving() as server, aiohttp.ClientSession() as http:
        async with trainer_at(server):
            async with http.get(f"{server.url}/trainer", headers=HEADERS) as response:
                assert response.status == 409
                assert "one at a time" in await response.text()
        await eventually(lambda: not server.manager.trainer_connected)
        async with trainer_at(server) as second:
            await second.until(lambda: second.statuses)


async def test_a_server_without_a_token_does_not_start() -> None:
    with pytest.raises(PenstockError, match="token"):
        ManagerServer(ServerConfig(token=""))


async def test_a_port_in_use_is_named() -> None:
    async with serving() as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port} is in use"):
            await ManagerServer(ServerConfig(token=TOKEN, port=port)).start()


async def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(PenstockError, match=r"can't listen on 192\.0\.2\.1"):
        await ManagerServer(ServerConfig(token=TOKEN, host="192.0.2.1")).start()


# ---- what is refused


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (b"\xc1 not msgpack", "is not a frame for the manager"),
        (encode(Welcome(instance="x", heartbeat_s=1, frame_steps=1)), "is not a frame for the manager"),
        ("text", "text"),
        (bytes(LIMIT_BYTES + 1), f"over the limit of {LIMIT_BYTES} bytes"),
        (bytes(4 * LIMIT_BYTES), f"over the limit of {LIMIT_BYTES} bytes"),
    ],
)
async def test_an_agents_bad_message_is_refused_by_name_and_ends_its_connection(
    message: bytes | str, cause: str
) -> None:
    async with serving() as server, trainer_at(server) as trainer:
        async with agent_at(server) as remote:
            await (remote.socket.send_str(message) if isinstance(message, str) else remote.socket.send_bytes(message))
            while await remote.read():
                pass
        await trainer.until(lambda: trainer.of_kind(FrameRefused))
        [refused] = trainer.of_kind(FrameRefused)
        assert isinstance(refused, FrameRefused)
        assert refused.peer == "engine"
        assert cause in refused.cause
        assert server.manager.counts.frames_refused == 1
        assert len(server.manager.fleet) == 0


async def test_a_trainers_bad_message_is_refused_and_its_batches_fail() -> None:
    async with serving() as server, trainer_at(server) as trainer:
        heard = await trainer.submit()
        assert trainer.client._socket is not None
        await trainer.client._socket.send_bytes(b"\xc1")
        await heard.end()
        assert "is lost" in str(heard.error)
        assert server.manager.counts.frames_refused == 1


async def test_a_peer_that_does_not_read_is_dropped_with_that_cause() -> None:
    async with serving(max_queued_bytes=200_000) as server, trainer_at(server) as trainer:
        async with agent_at(server) as remote:
            transport_of(remote.socket).pause_reading()
            peer = next(peer for name, peer in server._peers.items() if name != TRAINER)
            while not peer.closing_cause:
                peer.put(bytes(100_000))
                await asyncio.sleep(0)
            await trainer.until(trainer.gone)
            transport_of(remote.socket).abort()
        [gone] = trainer.gone()
        assert gone.instance == "engine"
        assert "does not read" in gone.cause


async def test_a_frame_that_does_not_leave_in_time_ends_the_connection() -> None:
    async with serving(send_deadline_s=0.05) as server, trainer_at(server) as trainer:
        async with agent_at(server) as remote:
            transport_of(remote.socket).pause_reading()
            peer = next(peer for name, peer in server._peers.items() if name != TRAINER)
            peer.put(bytes(20_000_000))
            await trainer.until(lambda: len(server.manager.fleet) == 0)
            transport_of(remote.socket).abort()
        assert "did not read a frame for 0.05 s" in peer.closing_cause


async def test_a_peer_over_its_pace_is_slowed_and_loses_nothing() -> None:
    pace = PaceConfig(frames_per_s=200, burst_s=0.05, patience_s=1000)
    async with serving(pace=pace) as server:
        async with agent_at(server) as remote:
            [instance] = server.manager.fleet
            for number in range(60):
                await remote.send(beat(number))
            await eventually(lambda: instance.beat == beat(59))


async def test_a_peer_that_goes_on_at_its_limit_is_dropped_with_the_cause() -> None:
    pace = PaceConfig(frames_per_s=50, burst_s=0.1, patience_s=0.3)
    async with serving(pace=pace) as server, trainer_at(server) as trainer:
        async with agent_at(server) as remote:
            with contextlib.suppress(ConnectionError):
                while not trainer.of_kind(FrameRefused):
                    await remote.send(BEAT)
                    await asyncio.sleep(0)
        [refused] = trainer.of_kind(FrameRefused)
        assert isinstance(refused, FrameRefused)
        assert "it sent at its limit (50 frames" in refused.cause


# ---- samples


async def test_a_batch_comes_back_whole_from_two_agents() -> None:
    async with serving() as server, trainer_at(server) as trainer:
        async with agent_at(server, "one") as one, agent_at(server, "two") as two:
            work = [asyncio.create_task(one.work()), asyncio.create_task(two.work())]
            await trainer.client.publish(1, "store:1")
            heard = await trainer.submit(samples=20)
            await heard.end()
            check(heard, samples=20)
            assert heard.done is not None
            assert heard.done.samples == 20
            assert all(sample.version_spans[-1].version == 1 for sample in heard.samples)
            for task in work:
                task.cancel()


async def test_an_agent_cut_off_in_mid_generation_costs_no_token() -> None:
    async with serving() as server, trainer_at(server) as trainer:
        await trainer.client.publish(1, "store:1")
        async with agent_at(server, "one", max_running=8) as one:
            heard = await trainer.submit(limit=60)
            await one.work(tokens_a_frame=2, frames=2)
            await trainer.until(lambda: server.manager.tracker.tokens_accepted > 6)
            # No closing handshake: the process was killed.
            transport_of(one.socket).abort()
        await trainer.until(lambda: trainer.of_kind(WaitingForInstances))
        assert trainer.of_kind(SamplesMoved)
        await trainer.until(lambda: trainer.statuses and trainer.statuses[-1].waiting_for)
        async with agent_at(server, "two", max_running=8) as two:
            work = asyncio.create_task(two.work())
            await heard.end()
            work.cancel()
        check(heard, limit=60)
        assert trainer.of_kind(WaitingOver)
        assert heard.done is not None
        assert server.manager.tracker.tokens_accepted == heard.done.tokens


async def test_a_deadline_ends_the_waiting_with_its_cause() -> None:
    async with serving() as server, trainer_at(server) as trainer:
        await trainer.client.publish(1, "store:1")
        heard = await trainer.submit(deadline_s=0.1)
        await heard.end()
        assert isinstance(heard.error, DeadlineExceeded)
        assert "an instance with weight version 1 (none has joined yet)" in str(heard.error)


async def test_a_lost_manager_fails_every_open_batch_and_every_later_call() -> None:
    async with serving() as server:
        async with trainer_at(server) as trainer:
            first, second = await trainer.submit("train-0"), await trainer.submit("train-1")
            server._peers[TRAINER]._socket._writer.transport.abort()  # type: ignore[union-attr]
            await first.end()
            await second.end()
            assert "batch train-0: the manager at" in str(first.error)
            assert "is lost" in str(second.error)
            with pytest.raises(RolloutError, match="is lost"):
                await trainer.submit("train-2")


@pytest.mark.parametrize("where", ["on_event", "on_status", "on_samples", "on_done"])
async def test_a_listener_that_raises_is_named_with_its_error_and_not_as_a_lost_manager(where: str) -> None:
    bug = KeyError("reward_mean")

    def fail(*_: object) -> None:
        raise bug

    async with serving() as server:
        on_event, on_status = (fail if where == name else lambda _: None for name in ("on_event", "on_status"))
        client = RolloutClient(server.url, TOKEN, on_event, on_status)
        trainer, other = Trainer(client), Heard()
        await client.connect()
        try:
            heard = Heard()
            if where in ("on_samples", "on_done"):
                setattr(heard, where, fail)
            sampling = Sampling(max_new_tokens=4, stop_ids=(9,))
            prompts = [Prompt(5, "question", [1, 2, 3], {}, "file:1")]
            await client.submit("train-0", 1, prompts, 2, 0, sampling, 20.0, heard)
            with contextlib.suppress(RolloutError):
                await client.submit("train-1", 9, prompts, 2, 0, sampling, 20.0, other)
                await client.publish(1, "store:1")
            if where in ("on_samples", "on_done"):
                async with agent_at(server) as remote:
                    work = asyncio.create_task(remote.work())
                    await heard.end()
                    work.cancel()
            await heard.end()
            assert heard.error is not None
            assert heard.error.__cause__ is bug
            assert str(heard.error).startswith("batch train-0: ")
            assert "KeyError: 'reward_mean'" in str(heard.error)
            assert "is lost" not in str(heard.error)
            with pytest.raises(RolloutError, match="reward_mean") as raised:
                await trainer.submit("train-2")
            assert raised.value.__cause__ is bug
        finally:
            await client.close()


async def test_a_listener_that_raises_on_bad_news_does_not_keep_it_from_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Heard):
        def on_failed(self, error: RolloutError) -> None:
            raise KeyError("state")

    async with serving() as server, trainer_at(server) as trainer:
        prompts = [Prompt(5, "question", [1], {}, "file:1")]
        await trainer.client.submit("train-0", 1, prompts, 1, 0, Sampling(max_new_tokens=1), 20.0, Broken())
        heard = await trainer.submit("train-1")
        assert trainer.client._socket is not None
        transport_of(trainer.client._socket).abort()
        await heard.end()
        assert "is lost" in str(heard.error)
        assert "the listener of batch train-0 failed" in caplog.text


async def test_a_manager_that_shuts_down_says_so() -> None:
    async with serving() as server, trainer_at(server) as trainer:
        async with agent_at(server) as remote:
            heard = await trainer.submit()
            await server.close("the run is over")
            await heard.end()
            assert "the run is over" in str(heard.error)
            while await remote.read():
                pass
            assert remote.agent.draining


async def test_a_cancelled_batch_is_heard_of_no_more() -> None:
    async with serving() as server, trainer_at(server) as trainer:
        await trainer.client.publish(1, "store:1")
        async with agent_at(server) as remote:
            heard = await trainer.submit()
            await remote.work(frames=1)
            await trainer.client.cancel("train-0", "no longer needed")
            await remote.until(lambda: not remote.agent.sequences)
            again = await trainer.submit("train-1")
            work = asyncio.create_task(remote.work())
            await again.end()
            work.cancel()
        check(again, "train-1")
        assert heard.done is None
        assert heard.error is None


async def test_one_name_is_for_one_open_batch() -> None:
    async with serving() as server, trainer_at(server) as trainer:
        await trainer.submit()
        with pytest.raises(RolloutError, match="open already"):
            await trainer.submit()
        with pytest.raises(RolloutError, match="cancel it instead"):
            await trainer.client.release("train-0")


async def test_a_step_too_large_for_a_frame_is_refused_before_it_is_sent() -> None:
    async with serving() as server:
        client = RolloutClient(server.url, TOKEN, print, print, max_frame_bytes=1000)
        await client.connect()
        prompts = [Prompt(0, "long", list(range(1000)), {}, "file:1")]
        with pytest.raises(RolloutError, match="max_frame_mib"):
            await client.submit("train-0", 1, prompts, 1, 0, Sampling(max_new_tokens=1), 5.0, Heard())
        await client.close()


# ---- operators


async def test_operators_see_instances_samples_metrics_and_health() -> None:
    async with serving() as server, trainer_at(server) as trainer, aiohttp.ClientSession(headers=HEADERS) as http:

        async def get(path: str) -> str:
            async with http.get(server.url + path) as response:
                assert response.status == 200
                return await response.text()

        await trainer.client.publish(1, "store:1")
        async with agent_at(server, "one", max_running=2) as remote:
            heard = await trainer.submit(samples=40, limit=60)
            await remote.work(tokens_a_frame=1, frames=1)
            await remote.send(BEAT)
            await trainer.until(lambda: server.manager.tracker.tokens_accepted > 0)
            await trainer.until(lambda: next(iter(server.manager.fleet)).beat)
            [row] = json.loads(await get("/instances"))
            assert (row["instance"], row["state"], row["version"], row["running"]) == ("one", "ready", 1, 2)
            assert row["load"]["running"] == 0
            seen = json.loads(await get("/samples"))
            assert sum(seen["states"].values()) == 40
            assert seen["states"]["running"] > 0
            assert seen["open"][0]["batch"] == "train-0"
            metrics = await get("/metrics")
            assert 'penstock_instances{state="ready"} 1' in metrics
            assert 'penstock_instance_samples{instance="one",state="running"} 2' in metrics
            assert "penstock_frames_refused_total 0" in metrics
            for line in metrics.splitlines():
                assert line.startswith("# ") or float(line.rsplit(" ", 1)[1]) >= -1
            for page in re.findall(r"GET +(\S+)", await get("/")):
                async with http.get(server.url + page) as response:
                    assert response.status == (404 if page == "/fleet" else 200), "nobody adds machines here"
            async with aiohttp.ClientSession() as stranger, stranger.get(f"{server.url}/healthz") as response:
                assert await response.json() == {
                    "status": "ok",
                    "instances_ready": 1,
                    "trainer_connected": True,
                    "waiting": False,
                    "journal": "off",
                }
            work = asyncio.create_task(remote.work())
            await heard.end()
            work.cancel()
        assert json.loads(await get("/samples"))["ended"][0]["states"]["finished"] == 40
        await trainer.client.release("train-0")
        await trainer.until(lambda: not server.manager.ended_batches)


# ---- the process


def start_process(tmp_path: Path, *arguments: str, token: str = TOKEN) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "manager", "--ready-file", str(tmp_path / "ready.json"), *arguments],
        env={**os.environ, "PENSTOCK_TOKEN": token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_ready(process: subprocess.Popen[str], tmp_path: Path) -> str:
    ready = tmp_path / "ready.json"
    deadline = time.monotonic() + 30
    while not ready.exists():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    facts = json.loads(ready.read_text())
    assert facts["pid"] == process.pid
    return str(facts["url"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_cleanly_with_peers_connected(tmp_path: Path, number: signal.Signals) -> None:
    process = start_process(tmp_path)
    try:
        url = wait_ready(process, tmp_path)
        client = RolloutClient(url, TOKEN, lambda _: None, lambda _: None)
        await client.connect()
        process.send_signal(number)
        out, _ = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 0, out
        assert url in out
        assert "Traceback" not in out
        await client.close()
    finally:
        process.kill()
        process.wait()


def test_the_process_leaves_when_its_parent_does(tmp_path: Path) -> None:
    process = start_process(tmp_path, "--exit-with-stdin")
    try:
        wait_ready(process, tmp_path)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "token", "says"),
    [
        ((), "", "no token"),
        (("--token-file", "/nonexistent/token"), TOKEN, "can't read the token file"),
        (("--port", "99999"), TOKEN, "--port is 99999"),
        (("--heartbeat-s", "0"), TOKEN, "--heartbeat-s is 0.0"),
        (("--heartbeat-s", "nan"), TOKEN, "--heartbeat-s is nan"),
        (("--frames-per-s", "0"), TOKEN, "--frames-per-s is 0.0"),
        (("--agent-token-file", "/nonexistent/token"), TOKEN, "can't read the token file"),
        (("--tls-cert", "/nonexistent/cert"), TOKEN, "belong together"),
        (("--hold-off-s", "-1"), TOKEN, "--hold-off-s is -1.0"),
        (("--stall-s", "0"), TOKEN, "--stall-s is 0.0"),
    ],
)
def test_a_start_that_can_not_work_says_why(tmp_path: Path, arguments: tuple[str, ...], token: str, says: str) -> None:
    process = start_process(tmp_path, *arguments, token=token)
    out, _ = process.communicate(timeout=30)
    assert process.returncode not in (0, None)
    assert says in out
    assert "Traceback" not in out


def test_the_process_names_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start_process(tmp_path, "--port", str(port))
        out, _ = process.communicate(timeout=30)
    assert process.returncode not in (0, None)
    assert f"127.0.0.1:{port} is in use" in out


@pytest.mark.parametrize(
    ("arguments", "waits"), [((), 4.0), (("--hold-off-s", "3"), 3.0), (("--hold-off-s", "0"), 0.0)]
)
async def test_the_longest_wait_of_an_agent_that_keeps_being_lost_can_be_set(
    tmp_path: Path, arguments: tuple[str, ...], waits: float
) -> None:
    process = start_process(tmp_path, *arguments)
    try:
        url = await asyncio.to_thread(wait_ready, process, tmp_path)
        hello = AgentHello(name="spot", engine="x", pid=1, host="h", max_running=1, max_context_tokens=99)
        async with aiohttp.ClientSession() as http:
            for life in range(5):
                async with http.ws_connect(f"{url}/agent", headers=HEADERS) as ws:
                    await ws.send_bytes(encode(hello))
                    welcome = decode_from_manager((await ws.receive(timeout=60)).data)
                    assert isinstance(welcome, Welcome)
                    transport_of(ws).abort()
                async with asyncio.timeout(60):
                    while await gone_instances(http, url) <= life:
                        await asyncio.sleep(0.01)
        assert welcome.hold_off_s == waits
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)


async def test_how_long_an_instance_may_hold_work_and_only_beat_can_be_set(tmp_path: Path) -> None:
    process = start_process(tmp_path, "--stall-s", "0.5", "--heartbeat-s", "60")
    try:
        url = await asyncio.to_thread(wait_ready, process, tmp_path)
        client = RolloutClient(url, TOKEN, lambda _: None, lambda _: None)
        await client.connect()
        await client.publish(1, "store:1", "")
        hello = AgentHello(name="idle", engine="x", pid=1, host="h", max_running=1, max_context_tokens=1024)
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/agent", headers=HEADERS) as ws:
            remote = Remote(ws, SimulatedAgent("idle"))
            await remote.send(hello)
            await remote.until(lambda: remote.agent.loading is not None)
            await remote.send(remote.agent.ready())
            await Trainer(client).submit(samples=1, deadline_s=600.0)
            await remote.until(lambda: remote.agent.sequences)
            message = await ws.receive(timeout=60)
        assert message.type is aiohttp.WSMsgType.CLOSE
        assert "alive, with 1 samples, and no token of them for" in message.extra
        await client.close()
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)


async def gone_instances(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(f"{url}/instances", headers=HEADERS) as response:
        return sum(row["state"] == "gone" for row in await response.json())


@pytest.mark.parametrize(
    ("arguments", "slowed"), [((), False), (("--frames-per-s", "1"), True), (("--mib-per-s", "0.001"), True)]
)
async def test_how_fast_a_peer_may_send_can_be_set(tmp_path: Path, arguments: tuple[str, ...], slowed: bool) -> None:
    process = start_process(tmp_path, *arguments)
    try:
        url = await asyncio.to_thread(wait_ready, process, tmp_path)
        hello = AgentHello(name="spot", engine="x", pid=1, host="h", max_running=1, max_context_tokens=99)
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/agent", headers=HEADERS) as ws:
            for frame in (hello, *(beat(number) for number in range(1, 1001))):
                await ws.send_bytes(encode(frame))
            seen = 0
            async with asyncio.timeout(60):
                while seen < (1 if slowed else 1000):
                    async with http.get(f"{url}/instances", headers=HEADERS) as response:
                        rows = await response.json()
                    seen = rows[0]["load"]["tokens_generated"] if rows and rows[0]["load"] else 0
            assert (seen < 1000) is slowed
            transport_of(ws).abort()
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
