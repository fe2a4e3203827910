"""Agents, weight store, real manager and its client together: machines come, leave and die, and no token is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from penstock.errors import EngineError
from penstock.instance import Agent, PacedEngine, SequenceStart, TokenDelta
from penstock.instance.paced import paced_tokens
from penstock.observe.events import Event, InstanceChanged, SamplesMoved, WaitingForInstances
from penstock.rollout.client import FinishedSample, RolloutClient
from penstock.rollout.fleet import FleetConfig, State
from penstock.rollout.manager import ManagerConfig
from penstock.rollout.server import ManagerServer, ServerConfig
from penstock.sample import Finish, Prompt, SampleId, sample_seed
from penstock.weights import WeightStore
from penstock.wire import BatchDone, FleetStatus, Sampling

TOKEN = "the-run's-token"
VOCAB = 50
PROMPTS = [Prompt(index=i, text="", token_ids=[i + 1, 2, 3], row={}, source="test") for i in range(8)]
SAMPLING = Sampling(max_new_tokens=400, stop_ids=(7,))
RUN_SEED = 11


@pytest.fixture
def store() -> Iterator[WeightStore]:
    held = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=256)
    held.start()
    for version in (0, 1):
        held.publish(version, [("w", "F32", (500,), bytes(2000))], f'{{"vocab_size": {VOCAB}}}')
    yield held
    held.close()


class Batch:
    """A listener that gathers one batch."""

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


def expected(batch: str, prompt: int, replica: int) -> tuple[list[int], Finish]:
    """What a sample says when nothing ever happens to it."""
    seed = sample_seed(RUN_SEED, SampleId(batch, prompt, replica))
    start = SequenceStart(lease=0, seed=seed, prompt_ids=[1], prefix_ids=[], sampling=SAMPLING)
    tokens, finish = paced_tokens(start, 0, SAMPLING.max_new_tokens, VOCAB, 0.0)
    return tokens, finish or Finish.LENGTH


def assert_undisturbed(batch: str, result: Batch, replicas: int) -> None:
    assert set(result.samples) == {(prompt.index, k) for prompt in PROMPTS for k in range(replicas)}
    for (prompt, replica), sample in result.samples.items():
        assert (sample.token_ids.tolist(), sample.finish) == expected(batch, prompt, replica)


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


class Run:
    """A manager, its trainer's client and what they report."""

    def __init__(self, max_context_tokens: int = 0, heartbeat_s: float = 2.0) -> None:
        fleet = FleetConfig(heartbeat_s=heartbeat_s)
        manager = ManagerConfig(fleet=fleet, frame_steps=4, max_context_tokens=max_context_tokens)
        self.server = ManagerServer(ServerConfig(token=TOKEN, manager=manager))
        self.events: list[Event] = []
        self.status: FleetStatus | None = None
        self.agents: dict[str, tuple[Agent, asyncio.Task[None]]] = {}

    async def __aenter__(self) -> Run:
        await self.server.start()
        self.client = RolloutClient(self.server.url, TOKEN, self.events.append, self._on_status)
        await self.client.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.server.close()
        for agent, _ in self.agents.values():
            agent.drain("the test ended")
        async with asyncio.timeout(60):
            await asyncio.gather(*(task for _, task in self.agents.values()), return_exceptions=True)

    def _on_status(self, status: FleetStatus) -> None:
        self.status = status

    def join(
        self, name: str, tokens_per_s: float = 8000.0, context_tokens: int = 0, engine: PacedEngine | None = None
    ) -> Agent:
        engine = engine or PacedEngine(tokens_per_s=tokens_per_s, max_running=8, max_context_tokens=context_tokens)
        agent = Agent(engine, self.server.url, TOKEN, name)
        self.agents[name] = agent, asyncio.create_task(agent.run())
        return agent

    async def submit(self, batch: str, version: int, replicas: int) -> Batch:
        listener = Batch()
        await self.client.submit(batch, version, PROMPTS, replicas, RUN_SEED, SAMPLING, 60.0, listener)
        return listener

    def tokens_of(self, name: str) -> int:
        rows = self.status.instances if self.status else ()
        return sum(row.tokens_accepted for row in rows if row.name == name)


async def test_samples_of_a_machine_that_leaves_go_on_elsewhere_from_their_last_token(store: WeightStore) -> None:
    async with Run() as run:
        await run.client.publish(0, store.address)
        leaver = run.join("leaver", tokens_per_s=2000.0)
        result = await run.submit("s0", version=0, replicas=2)
        await until(lambda: run.tokens_of("leaver") > 200)
        run.join("stayer")
        leaver.drain("spot price rose")
        done = await asyncio.wait_for(result.done, 60)
        assert (done.samples, done.failed) == (16, 0)
        assert_undisturbed("s0", result, replicas=2)
        await run.agents["leaver"][1]
        moved = [event for event in run.events if isinstance(event, SamplesMoved)]
        assert sum(event.tokens_kept for event in moved) > 0
        # Everything drawn was sent before the goodbye, so nothing was drawn twice.
        drawn = sum(agent._engine.load().tokens_generated for agent, _ in run.agents.values())
        assert drawn == done.tokens


async def test_samples_of_a_machine_killed_by_sigkill_go_on_elsewhere_from_their_last_token(store: WeightStore) -> None:
    async with Run() as run:
        await run.client.publish(0, store.address)
        arguments = ["join", "--manager", run.server.url, "--engine", "paced", "--tokens-per-s", "2000"]
        arguments += ["--preemption", "none"]
        doomed = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", *arguments, "--name", "doomed", "--max-running", "8"),
            env={**os.environ, "PENSTOCK_TOKEN": TOKEN},
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            result = await run.submit("s0", version=0, replicas=2)
            await until(lambda: run.tokens_of("doomed") > 200)
            run.join("survivor")
            doomed.send_signal(signal.SIGKILL)
            done = await asyncio.wait_for(result.done, 60)
        finally:
            if doomed.returncode is None:
                doomed.kill()
            await doomed.wait()
        assert (done.samples, done.failed) == (16, 0)
        assert_undisturbed("s0", result, replicas=2)
        assert 0 < run.agents["survivor"][0]._engine.load().tokens_generated < done.tokens


async def test_a_new_version_reaches_every_machine_and_its_batch_is_drawn_with_it_alone(store: WeightStore) -> None:
    async with Run() as run:
        for name in ("a", "b", "c"):
            run.join(name)
        for version in (0, 1):
            await run.client.publish(version, store.address)
            result = await run.submit(f"s{version}", version=version, replicas=2)
            done = await asyncio.wait_for(result.done, 60)
            assert done.failed == 0
            assert_undisturbed(f"s{version}", result, replicas=2)
            assert {span.version for s in result.samples.values() for span in s.version_spans} == {version}
            await run.client.release(f"s{version}")
        await until(lambda: all(agent._engine.version == 1 for agent, _ in run.agents.values()))


async def test_a_machine_that_joins_with_an_address_alone_fits_the_run_and_one_that_is_too_small_gets_nothing(
    store: WeightStore,
) -> None:
    async with Run(max_context_tokens=SAMPLING.max_new_tokens + 3) as run:
        await run.client.publish(0, store.address)
        run.join("small", context_tokens=SAMPLING.max_new_tokens + 2)
        await until(lambda: run.server.manager.fleet.count(State.READY) == 1)
        result = await run.submit("s0", version=0, replicas=2)
        await until(lambda: any(isinstance(event, WaitingForInstances) for event in run.events))
        run.join("spot")
        done = await asyncio.wait_for(result.done, 60)
        assert (done.samples, done.failed) == (16, 0)
        assert_undisturbed("s0", result, replicas=2)
        assert run.tokens_of("small") == 0
        [waiting] = [event for event in run.events if isinstance(event, WaitingForInstances)]
        assert waiting.waiting_for == (
            "an instance with weight version 0 and a context of 403 tokens (1 ready with a context of 402)"
        )


def ends(run: Run) -> list[InstanceChanged]:
    return [event for event in run.events if isinstance(event, InstanceChanged) and event.after == "gone"]


async def test_a_machine_that_hangs_is_given_up_after_three_heartbeats_and_its_late_frames_change_nothing(
    store: WeightStore,
) -> None:
    async with Run(heartbeat_s=1.0) as run:
        await run.client.publish(0, store.address)
        arguments = ["join", "--manager", run.server.url, "--engine", "paced", "--tokens-per-s", "1000"]
        hung = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", *arguments, "--name", "hung", "--max-running", "8"),
            *("--preemption", "none"),
            env={**os.environ, "PENSTOCK_TOKEN": TOKEN},
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            result = await run.submit("s0", version=0, replicas=4)
            await until(lambda: run.tokens_of("hung") > 100)
            hung.send_signal(signal.SIGSTOP)
            run.join("survivor", tokens_per_s=2000.0)
            await until(lambda: any("3 heartbeats missed" in event.cause for event in ends(run)))
            # What it had on its way arrives while the survivor draws the same samples.
            hung.send_signal(signal.SIGCONT)
            done = await asyncio.wait_for(result.done, 60)
            await until(lambda: any(isinstance(e, InstanceChanged) and e.instance == "hung~2" for e in run.events))
        finally:
            hung.kill()
            await hung.wait()
        assert done.failed == 0
        assert_undisturbed("s0", result, replicas=4)


class BreaksDown(PacedEngine):
    """Fails after a few deltas, as a device that is lost or out of memory does."""

    def __init__(self, error: Exception) -> None:
        super().__init__(tokens_per_s=2000.0, max_running=8, max_context_tokens=0)
        self._error = error

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        count = 0
        async for delta in super().deltas():
            yield delta
            count += 1
            if count == 3:
                raise self._error


@pytest.mark.parametrize("error", [EngineError("device lost"), MemoryError("out of memory")])
async def test_an_engine_that_crashes_under_a_live_agent_costs_no_token(store: WeightStore, error: Exception) -> None:
    async with Run() as run:
        await run.client.publish(0, store.address)
        run.join("broken", engine=BreaksDown(error))
        result = await run.submit("s0", version=0, replicas=2)
        await until(lambda: bool(ends(run)))
        run.join("survivor")
        done = await asyncio.wait_for(result.done, 60)
        assert done.failed == 0
        assert_undisturbed("s0", result, replicas=2)
        end = ends(run)[0]
        assert not end.orderly
        assert str(error) in end.cause


async def test_a_wall_clock_that_jumps_is_not_noticed(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, jumps = time.time, itertools.cycle((0.0, 1e7, -1e7))
    async with Run() as run:
        monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
        await run.client.publish(0, store.address)
        run.join("engine")
        result = await run.submit("s0", version=0, replicas=2)
        done = await asyncio.wait_for(result.done, 60)
        assert done.failed == 0
        assert_undisturbed("s0", result, replicas=2)
        assert not ends(run)
