"""Bad days of networks and engines, with real agents on real sockets: each alone, and what it costs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from penstock.bench.chaos_engine import FaultyEngine
from penstock.bench.chaos_links import UP, Link
from penstock.errors import EngineError
from penstock.instance import Agent, PacedEngine, SequenceStart, TokenDelta
from penstock.instance.paced import paced_tokens
from penstock.observe.events import Event, InstanceChanged, SampleFailed, SamplesMoved
from penstock.rollout.client import FinishedSample, RolloutClient
from penstock.rollout.fleet import FleetConfig
from penstock.rollout.manager import ManagerConfig
from penstock.rollout.server import ManagerServer, ServerConfig
from penstock.sample import Finish, Prompt, SampleId, sample_seed
from penstock.weights import WeightStore
from penstock.wire import BatchDone, FleetStatus, Sampling

TOKEN = "the-run's-token"
VOCAB = 50
RUN_SEED = 5
PROMPTS = [Prompt(index=i, text="", token_ids=[i + 1, 2], row={}, source="test") for i in range(8)]
SAMPLING = Sampling(max_new_tokens=300)
FRAME_STEPS = 4
LONG_S = 120.0


@pytest.fixture
def store() -> Iterator[WeightStore]:
    held = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=256)
    held.start()
    held.publish(0, [("w", "F32", (100,), bytes(400))], f'{{"vocab_size": {VOCAB}}}')
    yield held
    held.close()


class Step:
    """A listener that gathers one batch and fails on what comes twice."""

    def __init__(self) -> None:
        self.samples: dict[tuple[int, int], FinishedSample] = {}
        self.done: asyncio.Future[BatchDone] = asyncio.get_running_loop().create_future()

    def on_samples(self, samples: list[FinishedSample]) -> None:
        for sample in samples:
            assert (sample.prompt, sample.replica) not in self.samples
            self.samples[sample.prompt, sample.replica] = sample

    def on_done(self, done: BatchDone) -> None:
        self.done.set_result(done)

    def on_failed(self, error: Exception) -> None:
        self.done.set_exception(error)


class Fleet:
    """A manager, a trainer's client, and agents that each dial over a relay of their own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.events: list[Event] = []
        self.links: dict[str, Link] = {}
        self.agents: list[tuple[Agent, asyncio.Task[None]]] = []
        self.client = RolloutClient(url, TOKEN, self.events.append, _ignore)

    async def __aenter__(self) -> Fleet:
        await self.client.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        for link in self.links.values():
            link.heal()
        for agent, _task in self.agents:
            agent.drain("the test ended")
        await asyncio.wait([task for _, task in self.agents], timeout=20)
        for _agent, task in self.agents:
            task.cancel()
        for link in self.links.values():
            await link.close()

    async def join(self, name: str, engine: PacedEngine) -> Link:
        host, _, port = self.url.rpartition("//")[2].rpartition(":")
        link = self.links[name] = Link(lambda: (host, int(port)))
        await link.open()
        agent = Agent(engine, f"http://127.0.0.1:{link.port}", TOKEN, name)
        self.agents.append((agent, asyncio.create_task(agent.run())))
        return link

    async def submit(self, prompts: Sequence[Prompt] = PROMPTS, replicas: int = 2) -> Step:
        step = Step()
        await self.client.submit("step", 0, prompts, replicas, RUN_SEED, SAMPLING, LONG_S, step)
        return step

    def ends(self, name: str) -> list[InstanceChanged]:
        return [e for e in self.events if isinstance(e, InstanceChanged) and (e.name, e.after) == (name, "gone")]


@pytest.fixture
async def fleet(store: WeightStore) -> AsyncIterator[Fleet]:
    config = ManagerConfig(fleet=FleetConfig(heartbeat_s=0.5), frame_steps=FRAME_STEPS)
    server = ManagerServer(ServerConfig(token=TOKEN, manager=config))
    await server.start()
    async with Fleet(server.url) as made:
        await made.client.publish(0, store.address)
        yield made
    await server.close()


def engine(tokens_per_s: float = 2000.0) -> FaultyEngine:
    return FaultyEngine(tokens_per_s=tokens_per_s, max_running=8, frame_steps=FRAME_STEPS)


async def until(condition: Callable[[], object], within_s: float = LONG_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def assert_whole(step: Step, replicas: int = 2) -> None:
    done = await asyncio.wait_for(step.done, LONG_S)
    assert (done.samples, done.failed) == (len(PROMPTS) * replicas, 0)
    for (prompt, replica), sample in step.samples.items():
        seed = sample_seed(RUN_SEED, SampleId("step", prompt, replica))
        start = SequenceStart(lease=0, seed=seed, prompt_ids=[1], prefix_ids=[], sampling=SAMPLING)
        tokens, _ = paced_tokens(start, 0, SAMPLING.max_new_tokens, VOCAB, 0.0)
        assert (sample.token_ids.tolist(), sample.finish) == (tokens, Finish.LENGTH)


async def test_a_network_that_swallows_everything_is_a_silent_death_after_three_heartbeats(fleet: Fleet) -> None:
    cut_off = engine()
    link = await fleet.join("cut-off", cut_off)
    step = await fleet.submit()
    await until(lambda: cut_off.tokens_drawn > 200)
    link.swallow()
    await until(lambda: fleet.ends("cut-off"))
    assert "3 heartbeats missed" in fleet.ends("cut-off")[0].cause
    await fleet.join("survivor", engine())
    # What it went on drawing reached nobody; once its network is back it is another instance.
    link.heal()
    await assert_whole(step)
    assert any(isinstance(e, SamplesMoved) and e.tokens_kept > 0 for e in fleet.events)
    assert any(isinstance(e, InstanceChanged) and e.instance == "cut-off~2" for e in fleet.events)


async def test_a_connection_cut_within_a_frame_costs_that_frame_alone(fleet: Fleet) -> None:
    drawing = engine()
    link = await fleet.join("engine", drawing)
    step = await fleet.submit()
    await until(lambda: drawing.tokens_drawn > 200)
    link.cut_within(UP)
    await until(lambda: fleet.ends("engine"))
    assert "connection" in fleet.ends("engine")[0].cause
    await assert_whole(step)
    assert link.cuts_within == 1


async def test_a_slow_instance_delays_its_own_samples_and_changes_none(fleet: Fleet) -> None:
    slow = engine(tokens_per_s=4000.0)
    slow.slow(20.0)
    await fleet.join("slow", slow)
    step = await fleet.submit()
    await until(lambda: slow.tokens_drawn > 0)
    await fleet.join("brisk", engine(tokens_per_s=8000.0))
    await assert_whole(step)
    assert not fleet.ends("slow"), "slow is not dead"


async def test_samples_that_an_engine_aborts_go_on_from_their_last_token(fleet: Fleet) -> None:
    aborting = engine()
    await fleet.join("aborting", aborting)
    step = await fleet.submit()
    await until(lambda: aborting.tokens_drawn > 200)
    aborting.spoil("abort")
    await assert_whole(step)
    assert any(isinstance(e, SamplesMoved) and e.tokens_kept > 0 for e in fleet.events)
    assert not fleet.ends("aborting"), "to abort is an engine's right"


class Breaks(PacedEngine):
    """Dies of one prompt, as an engine does that runs out of memory on it."""

    def __init__(self, cursed: int) -> None:
        super().__init__(tokens_per_s=4000.0, max_running=8, max_context_tokens=0, frame_steps=FRAME_STEPS)
        self._cursed = cursed
        self._doomed = False

    def start(self, sequences: Sequence[SequenceStart]) -> None:
        self._doomed |= any(sequence.prompt_ids[0] == self._cursed for sequence in sequences)
        super().start(sequences)

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        async for delta in super().deltas():
            if self._doomed:
                raise EngineError("CUDA out of memory")
            yield delta


async def keep_joining(fleet: Fleet, cursed: int, step: Step) -> None:
    """A machine whose engine dies is replaced by another, as a cluster does."""
    for life in range(20):
        await fleet.join(f"engine-{life}", Breaks(cursed))
        _, task = fleet.agents[-1]
        await asyncio.wait([task, step.done], return_when=asyncio.FIRST_COMPLETED, timeout=LONG_S)
        if step.done.done():
            return


async def test_a_sample_that_kills_its_engine_three_times_is_set_aside_with_its_cause(fleet: Fleet) -> None:
    step = await fleet.submit(PROMPTS[:1], replicas=1)
    await keep_joining(fleet, cursed=1, step=step)
    done = await asyncio.wait_for(step.done, LONG_S)
    assert (done.samples, done.failed) == (0, 1)
    [failed] = step.samples.values()
    assert failed.finish is Finish.FAILED
    assert "taken back 3 times" in failed.cause
    assert "CUDA out of memory" in failed.cause
    assert len([e for e in fleet.events if isinstance(e, SampleFailed)]) == 1
    assert len(fleet.agents) == 3


async def test_how_often_a_sample_may_kill_is_the_managers_option(store: WeightStore, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    manager = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "manager", "--max-strikes", "1", "--ready-file", str(ready)),
        env={**os.environ, "PENSTOCK_TOKEN": TOKEN},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await until(ready.exists)
        async with Fleet(json.loads(ready.read_text())["url"]) as fleet:
            await fleet.client.publish(0, store.address)
            step = await fleet.submit(PROMPTS[:1], replicas=1)
            await keep_joining(fleet, cursed=1, step=step)
            await asyncio.wait_for(step.done, LONG_S)
            assert len(fleet.agents) == 1
            assert "taken back 1 times" in next(iter(step.samples.values())).cause
    finally:
        manager.kill()
        await manager.wait()


def _ignore(status: FleetStatus) -> None:
    """These runs are watched by their events."""
