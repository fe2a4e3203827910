"""The agent over a real socket, against a manager that does as the test says."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from aiohttp import WSCloseCode, web
from fake_manager import TOKEN, FakeManager, Session, start_frame

from penstock.errors import AuthError, EngineError, PenstockError, ProtocolMismatch
from penstock.instance import Agent, EngineLoad, PacedEngine, TokenDelta
from penstock.instance.manager_link import agent_url
from penstock.sample import Finish
from penstock.weights import StagedWeights, WeightStore
from penstock.weights.manifest import Encoding
from penstock.weights.shm import SharedLender
from penstock.wire import (
    PROTOCOL,
    BatchDone,
    Drain,
    Goodbye,
    HandedOver,
    HandOver,
    Heartbeat,
    LoadFailed,
    LoadWeights,
    Sampling,
    StopFrame,
    TokenFrame,
    VersionReady,
    Welcome,
    column,
    column_bytes,
    encode,
)
from penstock.wire.codec import PROTOCOL_HEADER

CONFIG = '{"vocab_size": 50}'


@pytest.fixture
def store() -> Iterator[WeightStore]:
    held = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=256)
    held.start()
    for version in (0, 1):
        held.publish(version, [("w", "F32", (500,), bytes(2000))], CONFIG)
    yield held
    held.close()


@contextlib.asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(agent.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def agent_of(manager: FakeManager, engine: PacedEngine | None = None, **options: object) -> Agent:
    settings = {"reconnect_s": 10.0, **options}
    engine = engine or PacedEngine(tokens_per_s=20_000.0, max_running=8, frame_steps=8)
    return Agent(engine, manager.url, TOKEN, "spot-1", **settings)  # type: ignore[arg-type]


async def load(session: Session, store: WeightStore, version: int = 0) -> VersionReady:
    await session.send(LoadWeights(version=version, source=store.address))
    ready = await session.wait_for(lambda frames: [f for f in session.of(VersionReady) if f.version == version])
    return ready[0]


async def test_a_machine_needs_an_address_and_a_token_and_then_works(store: WeightStore) -> None:
    async with FakeManager(frame_steps=4) as manager:
        agent = agent_of(manager)
        async with running(agent):
            session = await manager.session()
            hello = session.frames[0]
            assert (hello.name, hello.engine, hello.max_running) == ("spot-1", "paced", 8)
            ready = await load(session, store)
            assert (ready.version, ready.vocab_size, ready.bytes_fetched) == (0, 50, 2000)
            await session.send(start_frame([1, 2, 3], prefixes={2: [9] * 10}, sampling=Sampling(max_new_tokens=32)))
            await session.wait_for(lambda _: len(session.finishes()) == 3)
            assert {lease: len(tokens) for lease, tokens in session.tokens().items()} == {1: 32, 2: 22, 3: 32}
            assert set(session.finishes().values()) == {Finish.LENGTH}
            # The welcome's frame_steps, not the engine's own.
            assert max(max(column(frame.counts, "I")) for frame in session.of(TokenFrame)) == 4
            beat = await session.wait_for(lambda _: [b for b in session.of(Heartbeat) if b.tokens_generated == 86])
            assert beat[0].running == beat[0].waiting == 0
            assert agent.instance == "i-0"


async def test_heartbeats_keep_coming_at_the_managers_pace(store: WeightStore) -> None:
    async with FakeManager(heartbeat_s=0.01) as manager:
        async with running(agent_of(manager)):
            session = await manager.session()
            await session.next_of(Heartbeat, count=20)


async def test_stopped_sequences_send_nothing_more(store: WeightStore) -> None:
    async with FakeManager(frame_steps=2) as manager:
        engine = PacedEngine(tokens_per_s=2000.0)
        async with running(agent_of(manager, engine)):
            session = await manager.session()
            await load(session, store)
            await session.send(start_frame([1, 2], sampling=Sampling(max_new_tokens=2000)))
            await session.next_of(TokenFrame)
            await session.send(StopFrame(leases=column_bytes([1], "Q")))
            await session.wait_for(lambda _: engine.load().running == 1)
            seen = len(session.tokens()[1])
            await session.next_of(TokenFrame, count=len(session.of(TokenFrame)) + 3)
            assert len(session.tokens()[1]) - seen <= 2  # A frame that was on its way when the stop was.
            assert len(session.tokens()[2]) > len(session.tokens()[1])


async def test_work_for_a_version_that_is_not_held_comes_back_at_once(store: WeightStore) -> None:
    async with FakeManager() as manager:
        async with running(agent_of(manager)):
            session = await manager.session()
            await load(session, store)
            await session.send(start_frame([7], version=1, prefixes={7: [1, 2]}))
            frame = await session.next_of(TokenFrame)
            assert session.rows() == [(7, 2, [], Finish.ABORTED)]
            assert frame.causes == {0: "the engine serves weight version 0, not 1"}


# ---- weights


async def test_a_version_that_cannot_be_had_is_reported_and_the_agent_goes_on(store: WeightStore) -> None:
    async with FakeManager() as manager:
        async with running(agent_of(manager)):
            session = await manager.session()
            await session.send(LoadWeights(version=99, source=store.address))
            failed = await session.next_of(LoadFailed)
            assert failed.version == 99
            assert "does not hold weight version 99" in failed.cause
            await session.send(LoadWeights(version=0, source="nonsense"))
            assert "expected host:port" in (await session.next_of(LoadFailed, count=2)).cause
            await load(session, store)


async def test_a_store_with_another_token_is_a_failed_load_that_says_so() -> None:
    other = WeightStore("run", "127.0.0.1", 0, "another-token")
    other.start()
    try:
        async with FakeManager() as manager:
            async with running(agent_of(manager)):
                session = await manager.session()
                await session.send(LoadWeights(version=0, source=other.address))
                assert "PENSTOCK_TOKEN" in (await session.next_of(LoadFailed)).cause
    finally:
        other.close()


@contextlib.asynccontextmanager
async def silent_store() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Accepts connections and says nothing."""
    connected = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", connected


async def test_a_newer_version_supersedes_a_pull_that_hangs(store: WeightStore) -> None:
    async with FakeManager() as manager, silent_store() as (silent, connected):
        agent = agent_of(manager)
        async with running(agent):
            session = await manager.session()
            await session.send(LoadWeights(version=0, source=silent))
            await connected.wait()
            await session.send(LoadWeights(version=0, source=silent))  # Said twice is not newer.
            await load(session, store, version=1)
            assert agent.superseded_pulls == 1
            assert [f.version for f in session.of(VersionReady)] == [1]
            assert session.of(LoadFailed) == []


class SlowSwap(PacedEngine):
    """Takes its time to swap, until the test lets it."""

    def __init__(self) -> None:
        super().__init__(tokens_per_s=20_000.0)
        self.swapping = asyncio.Event()
        self.go_on = asyncio.Event()
        self.swaps = 0

    async def update_weights(self, weights: StagedWeights) -> None:
        self.swapping.set()
        await self.go_on.wait()
        await super().update_weights(weights)
        self.swaps += 1


async def test_a_swap_that_has_begun_ends_before_a_newer_version_is_loaded(store: WeightStore) -> None:
    async with FakeManager() as manager:
        engine = SlowSwap()
        async with running(agent_of(manager, engine)):
            session = await manager.session()
            await session.send(LoadWeights(version=0, source=store.address))
            await engine.swapping.wait()
            await session.send(LoadWeights(version=1, source=store.address))
            await session.next_of(Heartbeat, count=len(session.of(Heartbeat)) + 2)
            engine.go_on.set()
            await session.next_of(VersionReady, count=2)
            assert [f.version for f in session.of(VersionReady)] == [0, 1]


async def test_a_swap_outlives_its_session_and_the_next_one_waits_for_it(store: WeightStore) -> None:
    async with FakeManager() as manager:
        engine = SlowSwap()
        async with running(agent_of(manager, engine)):
            session = await manager.session()
            await session.send(LoadWeights(version=0, source=store.address))
            await engine.swapping.wait()
            await session.ws.close()
            second = await manager.session(2)
            await second.send(LoadWeights(version=1, source=store.address))
            await second.next_of(Heartbeat, count=3)
            engine.go_on.set()
            assert (await second.next_of(VersionReady)).version == 1
            assert (engine.swaps, engine.version) == (2, 1)


async def test_an_engine_that_never_ends_a_swap_ends_the_agent_with_that_cause(store: WeightStore) -> None:
    async with FakeManager() as manager:
        agent = agent_of(manager, SlowSwap(), load_deadline_s=3.0)
        async with running(agent) as task:
            session = await manager.session()
            await session.send(LoadWeights(version=0, source=store.address))
            with pytest.raises(EngineError, match=r"did not take weight version 0 within 3 s"):
                await asyncio.wait_for(task, 60)
            goodbye = await session.next_of(Goodbye)
            assert goodbye.engine_failed


async def test_an_engine_that_starts_on_its_first_weights_has_that_time_on_top_of_the_deadline(
    store: WeightStore,
) -> None:
    async with FakeManager() as manager:
        engine = SlowSwap()
        async with running(agent_of(manager, engine, load_deadline_s=3.0, start_s=3600.0)):
            session = await manager.session()
            assert session.frames[0].start_s == 3600.0
            await session.send(LoadWeights(version=0, source=store.address))
            await engine.swapping.wait()
            beats = len(session.of(Heartbeat))
            # 3.5 s of them.
            await session.wait_for(lambda _: len(session.of(Heartbeat)) > beats + 70, within_s=60.0)
            engine.go_on.set()
            assert (await session.next_of(VersionReady)).version == 0
            await session.ws.close()
            assert (await manager.session(2)).frames[0].start_s == 0.0, "it has started"


async def test_an_agent_says_whether_it_is_on_one_of_the_trainers_own_devices() -> None:
    for reserved in (False, True):
        async with FakeManager() as manager, running(agent_of(manager, reserved=reserved)):
            assert (await manager.session()).frames[0].reserved == reserved


async def test_what_the_manager_takes_back_is_said_on_the_machines_own_screen(
    store: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeManager() as manager:
        agent = agent_of(manager)
        async with running(agent):
            session = await manager.session()
            await session.send(StopFrame(leases=column_bytes([1, 2], "Q"), cause="a log-probability of nan"))
            await session.next_of(Heartbeat, count=len(session.of(Heartbeat)) + 3)
            assert agent.taken_back == 1
    assert "the manager took back 2 sequences: a log-probability of nan" in caplog.text


class BadWeights(PacedEngine):
    async def update_weights(self, weights: StagedWeights) -> None:
        if weights.version == 1:
            raise EngineError("tensor w does not fit the model")
        await super().update_weights(weights)


async def test_weights_that_the_engine_refuses_leave_the_old_version_serving(store: WeightStore) -> None:
    async with FakeManager() as manager:
        async with running(agent_of(manager, BadWeights(tokens_per_s=20_000.0))):
            session = await manager.session()
            await load(session, store)
            await session.send(LoadWeights(version=1, source=store.address))
            assert "does not fit" in (await session.next_of(LoadFailed)).cause
            await session.send(start_frame([1]))
            await session.wait_for(lambda _: len(session.finishes()) == 1)


async def test_weights_that_the_engine_refuses_are_no_base_of_the_next_difference() -> None:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=256, keep_versions=3)
    store.start()
    try:
        for version in (0, 1, 2):
            store.publish(version, [("w", "F32", (500,), bytes([version]) + bytes(1999))], CONFIG)
        async with FakeManager() as manager:
            async with running(agent_of(manager, BadWeights(tokens_per_s=20_000.0), codec="delta")):
                session = await manager.session()
                await load(session, store)
                await session.send(LoadWeights(version=1, source=store.address))
                await session.next_of(LoadFailed)
                assert (await load(session, store, 2)).way.startswith("delta")
        assert Encoding(1, "delta", 0) in store.encodings()
        assert [encoding for encoding in store.encodings() if encoding.version == 2] == [Encoding(2, "delta", 0)]
    finally:
        store.close()


async def test_a_machine_whose_memory_is_full_says_so_and_the_old_version_serves(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(nbytes: int) -> memoryview:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    async with FakeManager() as manager, running(agent_of(manager)):
        session = await manager.session()
        await load(session, store)
        monkeypatch.setattr("penstock.weights.memory.host_buffer", full)
        await session.send(LoadWeights(version=1, source=store.address))
        cause = (await session.next_of(LoadFailed)).cause
        assert "memory to stage weight version 1" in cause
        assert "Cannot allocate memory" in cause
        await session.send(start_frame([1]))
        await session.wait_for(lambda _: len(session.finishes()) == 1)


async def test_an_engine_of_another_vocabulary_than_the_weights_is_not_ready_and_says_why(
    store: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeManager() as manager:
        async with running(agent_of(manager, PacedEngine(tokens_per_s=20_000.0, vocab_size=49))):
            session = await manager.session()
            await session.send(LoadWeights(version=0, source=store.address))
            failed = await session.next_of(LoadFailed)
    assert "a vocabulary of 49 tokens, and the model of weight version 0 has 50" in failed.cause
    assert failed.cause in caplog.text
    assert not session.of(VersionReady)


# ---- leaving


@pytest.mark.parametrize("asked_by", ["the machine", "the manager"])
async def test_leaving_sends_every_token_drawn_then_says_goodbye(store: WeightStore, asked_by: str) -> None:
    async with FakeManager(frame_steps=1) as manager:
        engine = PacedEngine(tokens_per_s=3000.0)
        agent = agent_of(manager, engine)
        async with running(agent) as task:
            session = await manager.session()
            await load(session, store)
            await session.send(start_frame([1, 2, 3], sampling=Sampling(max_new_tokens=4000)))
            await session.next_of(TokenFrame, count=5)
            if asked_by == "the machine":
                agent.drain("the machine is taken away")
            else:
                await session.send(Drain(cause="the machine is taken away"))
            await asyncio.wait_for(task, 60)
            await asyncio.wait_for(session.closed.wait(), 60)
            assert isinstance(session.frames[-1], Goodbye)
            assert not session.frames[-1].engine_failed
            assert session.frames[-1].cause == "the machine is taken away"
            assert sum(map(len, session.tokens().values())) == engine.load().tokens_generated
            assert session.ws.close_code == WSCloseCode.OK
            assert manager.attempts == 1


async def test_handing_over_sends_what_was_drawn_runs_nothing_on_and_the_agent_stays(store: WeightStore) -> None:
    async with FakeManager(frame_steps=4) as manager:
        engine = PacedEngine(tokens_per_s=3000.0)
        async with running(agent_of(manager, engine)):
            session = await manager.session()
            await load(session, store)
            await session.send(start_frame([1, 2, 3], sampling=Sampling(max_new_tokens=4000)))
            await session.next_of(TokenFrame, count=3)
            await session.send(HandOver(cause="the trainer trains"))
            await session.next_of(HandedOver)
            # Its last word on them: every token drawn came before it.
            drawn = engine.load().tokens_generated
            before = session.frames[: session.frames.index(session.of(HandedOver)[0])]
            assert sum(len(column(frame.counts, "I")) > 0 for frame in before if isinstance(frame, TokenFrame)) >= 3
            assert sum(map(len, session.tokens().values())) == drawn
            assert (engine.load().running, engine.load().waiting) == (0, 0)
            await session.send(start_frame([4], sampling=Sampling(max_new_tokens=8)))
            await session.wait_for(lambda _: 4 in session.finishes())
            assert engine.load().tokens_generated == drawn + 8


async def test_an_engine_that_does_not_hand_over_is_stopped_and_the_manager_hears_of_it(store: WeightStore) -> None:
    class Slow(PacedEngine):
        async def hand_over(self) -> None:
            await asyncio.sleep(3600)

    async with FakeManager() as manager:
        engine = Slow(tokens_per_s=3000.0)
        async with running(agent_of(manager, engine)):
            session = await manager.session()
            await load(session, store)
            await session.send(start_frame([1], sampling=Sampling(max_new_tokens=4000)))
            await session.next_of(TokenFrame)
            await session.send(HandOver(cause="the trainer trains"))
            await session.next_of(HandedOver)
            assert engine.load().running == 0


async def test_leaving_before_a_manager_was_found_just_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    agent = Agent(PacedEngine(tokens_per_s=1.0), f"127.0.0.1:{port}", TOKEN, "x", reconnect_s=600)
    async with running(agent) as task:
        await asyncio.sleep(0.05)
        agent.drain("never mind")
        await asyncio.wait_for(task, 5)


class NeverFlushes(PacedEngine):
    async def flush(self) -> None:
        await asyncio.sleep(3600)


async def test_an_engine_that_does_not_flush_delays_the_goodbye_and_does_not_stop_it(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.instance.agent.FLUSH_S", 0.1)
    async with FakeManager() as manager:
        agent = agent_of(manager, NeverFlushes(tokens_per_s=100.0))
        async with running(agent) as task:
            session = await manager.session()
            agent.drain("going")
            await asyncio.wait_for(task, 60)
            await session.next_of(Goodbye)


# ---- lost and found


async def test_a_lost_connection_is_dialled_again_as_another_instance_with_nothing_running(store: WeightStore) -> None:
    async with FakeManager(frame_steps=1) as manager:
        engine = PacedEngine(tokens_per_s=1000.0)
        agent = agent_of(manager, engine)
        async with running(agent):
            first = await manager.session()
            await load(first, store)
            await first.send(start_frame([1, 2], sampling=Sampling(max_new_tokens=4000)))
            await first.next_of(TokenFrame)
            await first.ws.close()
            second = await manager.session(2)
            await second.next_of(Heartbeat)
            assert engine.load().running == 0
            await load(second, store, version=1)
            await second.send(start_frame([3], version=1))
            await second.wait_for(lambda _: len(second.finishes()) == 1)
            assert set(second.tokens()) == {3}
            assert agent.sessions == 2


def seen(folder: Path) -> list[str]:
    """What this process has of another's memory; a store's own is mapped to be written to."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"{folder}/" in line and " r--s " in line]


async def test_with_a_lost_connection_goes_what_is_kept_of_the_weight_store(tmp_path: Path) -> None:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN, lenders=[SharedLender(tmp_path)])
    store.start()
    try:
        store.publish(0, [("w", "F32", (500,), bytes(2000))], CONFIG)
        async with FakeManager() as manager:
            agent = agent_of(manager, ways=["shm"], keep_base=False)
            async with running(agent):
                first = await manager.session()
                await load(first, store)
                assert len(seen(tmp_path)) == 1
                store.close()  # With the trainer goes the memory that its versions lie in.
                await first.ws.close()
                second = await manager.session(2)
                await second.next_of(Heartbeat)
                assert seen(tmp_path) == []
    finally:
        store.close()


async def test_a_manager_that_is_gone_for_good_is_given_up_with_the_cause() -> None:
    async with FakeManager() as manager:
        agent = agent_of(manager, reconnect_s=0.5)
        task = asyncio.create_task(agent.run())
        await manager.session()
    with pytest.raises(PenstockError, match=r"no manager at http://127\.0\.0\.1:\d+/agent for 0\.5 s .*--manager"):
        await asyncio.wait_for(task, 60)


async def test_a_manager_that_comes_back_at_the_same_address_is_found(store: WeightStore) -> None:
    async with FakeManager() as manager:
        agent = agent_of(manager, reconnect_s=30)
        task = asyncio.create_task(agent.run())
        await manager.session()
    async with FakeManager(port=manager.port) as again:
        session = await again.session()
        await load(session, store)
        agent.drain("done")
        await asyncio.wait_for(task, 60)


async def test_a_wrong_token_ends_the_agent_at_once_and_says_what_to_do() -> None:
    async with FakeManager() as manager:
        agent = Agent(PacedEngine(tokens_per_s=1.0), manager.url, "wrong", "x")
        with pytest.raises(AuthError, match="PENSTOCK_TOKEN"):
            await asyncio.wait_for(agent.run(), 60)
        assert manager.attempts == 1


async def test_another_protocol_version_ends_the_agent_at_once_and_names_both() -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=426, text="upgrade", headers={PROTOCOL_HEADER: "7"})

    async with FakeManager() as manager:
        manager.answer = refuse
        with pytest.raises(ProtocolMismatch, match=rf"speaks protocol 7 and this agent {PROTOCOL}"):
            await asyncio.wait_for(agent_of(manager).run(), 60)
        assert manager.attempts == 1


async def test_what_is_no_manager_is_tried_for_a_while_and_then_named() -> None:
    async def not_found(_: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    async with FakeManager() as manager:
        manager.answer = not_found
        with pytest.raises(PenstockError, match="404"):
            await asyncio.wait_for(agent_of(manager, reconnect_s=3.0).run(), 60)
        assert manager.attempts > 1


# ---- frames that are none


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (b"\xc1 not msgpack", "is not a frame of a manager"),
        (b"\x81\xa4type\xa7unknown", "is not a frame of a manager"),
        ("text", "frames are binary"),
        (BatchDone(batch="b", samples=0, failed=0, tokens=0), "BatchDone is not meant for an agent"),
        (StopFrame(leases=b"123"), "column of type 'Q' holds 3 bytes"),
    ],
)
async def test_a_bad_frame_ends_the_session_by_name_and_is_counted(
    store: WeightStore, message: object, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.agent")
    async with FakeManager() as manager:
        agent = agent_of(manager)
        async with running(agent):
            session = await manager.session()
            if isinstance(message, bytes):
                await session.ws.send_bytes(message)
            elif isinstance(message, str):
                await session.ws.send_str(message)
            else:
                await session.send(message)  # type: ignore[arg-type]
            await asyncio.wait_for(session.closed.wait(), 60)
            assert session.ws.close_code == WSCloseCode.PROTOCOL_ERROR
            await load(await manager.session(2), store)
            assert agent.bad_frames == 1
            assert named in caplog.text


async def test_a_frame_over_the_limit_ends_the_session_by_name_and_is_counted(
    store: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeManager() as manager:
        agent = agent_of(manager, max_frame_bytes=1000)
        async with running(agent):
            session = await manager.session()
            await session.ws.send_bytes(bytes(2000))
            await asyncio.wait_for(session.closed.wait(), 60)
            assert session.ws.close_code == WSCloseCode.MESSAGE_TOO_BIG
            await load(await manager.session(2), store)
            assert agent.bad_frames == 1
            assert "broke the protocol" in caplog.text


async def test_a_frame_over_the_limit_of_the_welcome_ends_the_session_too(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeManager() as manager:
        manager.welcome = Welcome(instance="i", heartbeat_s=1.0, frame_steps=4, max_frame_bytes=20_000)
        async with running(agent_of(manager)) as task:
            session = await manager.session()
            await session.send(start_frame(range(300)))
            await session.wait_for(lambda _: len(session.rows()) == 300)  # Handed back: no weights yet.
            assert max(len(encode(frame)) for frame in session.of(TokenFrame)) <= 20_000
            await session.send(start_frame(range(300, 1000)))
            await asyncio.wait_for(session.closed.wait(), 60)
            assert session.ws.close_code == WSCloseCode.MESSAGE_TOO_BIG
            assert "over the limit of 20000 bytes" in caplog.text
            await manager.session(2)
            assert not task.done()


async def test_token_frames_keep_to_the_limit_of_the_welcome(store: WeightStore) -> None:
    async with FakeManager() as manager:
        manager.welcome = Welcome(instance="i", heartbeat_s=1.0, frame_steps=500, max_frame_bytes=20_000)
        engine = PacedEngine(tokens_per_s=200_000.0, max_running=8)
        async with running(agent_of(manager, engine)):
            session = await manager.session()
            await load(session, store)
            await session.send(start_frame(range(1, 9), sampling=Sampling(max_new_tokens=1000)))
            await session.wait_for(lambda _: len(session.finishes()) == 8)
            assert max(len(encode(frame)) for frame in session.of(TokenFrame)) <= 20_000
            assert {lease: len(tokens) for lease, tokens in session.tokens().items()} == dict.fromkeys(
                range(1, 9), 1000
            )


@pytest.mark.parametrize(("given", "served"), [(0, 8192), (1024, 1024)])
async def test_an_engine_without_a_context_of_its_own_has_the_one_that_the_run_wants(
    store: WeightStore, given: int, served: int
) -> None:
    async with FakeManager() as manager:
        manager.welcome = Welcome(instance="i", heartbeat_s=1.0, frame_steps=4, max_context_tokens=8192)
        async with running(agent_of(manager, PacedEngine(tokens_per_s=1000.0, max_context_tokens=given))):
            session = await manager.session()
            assert (await load(session, store)).max_context_tokens == served
            await session.ws.close()
            manager.welcome = Welcome(instance="i", heartbeat_s=1.0, frame_steps=4, max_context_tokens=100)
            second = await manager.session(2)
            assert (await load(second, store, version=1)).max_context_tokens == served, (
                "an engine's model is built once"
            )


@pytest.mark.parametrize(
    "first",
    [
        Drain(cause="not a welcome"),
        Welcome(instance="i", heartbeat_s=0.0, frame_steps=4),
        Welcome(instance="i", heartbeat_s=float("nan"), frame_steps=4),
        Welcome(instance="i", heartbeat_s=1.0, frame_steps=0),
        Welcome(instance="i", heartbeat_s=1.0, frame_steps=4, max_context_tokens=1),
        Welcome(instance="i", heartbeat_s=1.0, frame_steps=4, max_context_tokens=-5),
        Welcome(instance="i", heartbeat_s=1.0, frame_steps=4, max_frame_bytes=100),
        Welcome(instance="i", heartbeat_s=1.0, frame_steps=4, hold_off_s=float("nan")),
    ],
)
async def test_a_manager_that_does_not_welcome_properly_is_left(first: Welcome | Drain) -> None:
    async with FakeManager() as manager:
        manager.welcome = first
        agent = agent_of(manager, reconnect_s=0.3)
        with pytest.raises(PenstockError, match="broke the protocol"):
            await asyncio.wait_for(agent.run(), 60)
        assert agent.bad_frames >= 1


async def test_a_manager_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.instance.manager_link.WELCOME_S", 0.1)
    async with FakeManager() as manager:
        manager.welcome = None
        with pytest.raises(PenstockError, match=r"no welcome within 0\.1 s"):
            await asyncio.wait_for(agent_of(manager, reconnect_s=0.2).run(), 60)


# ---- engines that fail


class DiesAfter(PacedEngine):
    """Its deltas end in an error after the first one."""

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        async for delta in super().deltas():
            yield delta
            raise EngineError("CUDA error: device lost")


async def test_an_engine_that_dies_ends_the_agent_and_the_manager_is_told(store: WeightStore) -> None:
    async with FakeManager() as manager:
        agent = agent_of(manager, DiesAfter(tokens_per_s=20_000.0))
        async with running(agent) as task:
            session = await manager.session()
            await load(session, store)
            await session.send(start_frame([1], sampling=Sampling(max_new_tokens=4000)))
            with pytest.raises(EngineError, match="device lost"):
                await asyncio.wait_for(task, 60)
            goodbye = await session.next_of(Goodbye)
            assert "device lost" in goodbye.cause
            assert goodbye.engine_failed


class Stuck(PacedEngine):
    """Says that it has work, and does none of it."""

    def start(self, sequences: Sequence[object]) -> None:
        self.taken = len(sequences)

    def load(self) -> EngineLoad:
        return EngineLoad(getattr(self, "taken", 0), 0, 0, 0, 0, 0.0)


async def test_an_engine_that_is_stuck_ends_the_agent_rather_than_beat_on(store: WeightStore) -> None:
    async with FakeManager(heartbeat_s=0.02) as manager:
        agent = agent_of(manager, Stuck(tokens_per_s=1.0), stall_s=0.2)
        async with running(agent) as task:
            session = await manager.session()
            await load(session, store)
            await session.next_of(Heartbeat, count=20)
            assert not task.done()
            await session.send(start_frame([1, 2]))
            with pytest.raises(EngineError, match=r"made no progress .* with 2 sequences running"):
                await asyncio.wait_for(task, 60)
            await asyncio.wait_for(session.closed.wait(), 60)
            [goodbye] = session.of(Goodbye)
            assert "made no progress" in goodbye.cause
            assert goodbye.engine_failed


class LosesEnds(PacedEngine):
    """Draws to the end, and keeps the last tokens of lease 2 to itself."""

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        async for delta in super().deltas():
            if 2 not in delta.leases or delta.finishes[delta.leases.index(2)] is Finish.RUNNING:
                yield delta


async def test_an_engine_that_lost_a_sequence_s_last_tokens_ends_the_agent(store: WeightStore) -> None:
    """It is idle and counts nothing; the manager would wait for the sample, and the step with it."""
    async with FakeManager(heartbeat_s=0.02) as manager:
        agent = agent_of(manager, LosesEnds(tokens_per_s=20_000.0), stall_s=0.2)
        async with running(agent) as task:
            session = await manager.session()
            await load(session, store)
            await session.send(start_frame([1], sampling=Sampling(max_new_tokens=8)))
            await session.wait_for(lambda _: session.finishes().get(1))
            await session.next_of(Heartbeat, count=20)
            assert not task.done(), "everything that it was given has ended"
            await session.send(start_frame([2], sampling=Sampling(max_new_tokens=8)))
            with pytest.raises(EngineError, match=r"0 sequences running and 0 waiting, of 1 that it was given"):
                await asyncio.wait_for(task, 60)
            await asyncio.wait_for(session.closed.wait(), 60)
            assert session.of(Goodbye)[0].engine_failed


async def test_an_agent_that_has_to_wait_for_work_says_so_on_its_own_screen(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeManager() as manager:
        manager.welcome = Welcome(instance="i", heartbeat_s=1.0, frame_steps=4, hold_off_s=30.0)
        async with running(agent_of(manager)):
            session = await manager.session()
            await session.next_of(Heartbeat)
            assert "gives no work for 30 s" in caplog.text


@pytest.mark.parametrize(
    ("given", "dialled"),
    [
        ("http://h:1", "http://h:1/agent"),
        ("h:1/", "http://h:1/agent"),
        ("https://gate.example/run7", "https://gate.example/run7/agent"),
        ("ws://h:1", "ws://h:1/agent"),
    ],
)
def test_an_address_may_be_given_with_or_without_its_scheme(given: str, dialled: str) -> None:
    assert agent_url(given) == dialled


@pytest.mark.parametrize("given", ["", "ftp://h", "http://"])
def test_what_is_no_managers_address_is_refused(given: str) -> None:
    with pytest.raises(PenstockError, match="expected http://host:port"):
        agent_url(given)
