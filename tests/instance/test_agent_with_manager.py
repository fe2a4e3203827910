"""Agents, weight store, real manager and its client together: machines come, leave and die, and no token is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from fleets import TOKEN, VOCAB, Fleet, until

from penstock.errors import EngineError
from penstock.instance import PacedEngine, TokenDelta
from penstock.instance.engine import EngineInfo
from penstock.observe.events import InstanceChanged, SamplesMoved, WaitingForInstances
from penstock.rollout.fleet import State
from penstock.weights import WeightStore
from penstock.weights.protocol import GetPlan, Layout
from penstock.weights.server import _Reader
from penstock.wire import Sampling

SAMPLING = Sampling(max_new_tokens=400, stop_ids=(7,))


@pytest.fixture
def store() -> Iterator[WeightStore]:
    held = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=256)
    held.start()
    for version in (0, 1):
        held.publish(version, [("w", "F32", (500,), bytes(2000))], f'{{"vocab_size": {VOCAB}}}')
    yield held
    held.close()


async def test_the_store_hears_how_many_ranks_share_the_engine_of_each_machine(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Layout] = []
    send_plan = _Reader._send_plan

    async def heeded(reader: _Reader, request: GetPlan) -> None:
        heard.append(request.layout)
        await send_plan(reader, request)

    monkeypatch.setattr(_Reader, "_send_plan", heeded)
    async with Fleet(SAMPLING) as fleet:
        await fleet.client.publish(0, store.address)
        fleet.join("whole")
        await until(lambda: fleet.server.manager.fleet.count(State.READY) == 1)
        fleet.join("halves", engine=OfTwoRanks(tokens_per_s=8000.0))
        await until(lambda: fleet.server.manager.fleet.count(State.READY) == 2)
    assert heard == [Layout(0, 1), Layout(0, 2)]


class OfTwoRanks(PacedEngine):
    @property
    def info(self) -> EngineInfo:
        return replace(super().info, tensor_parallel=2)


async def test_samples_of_a_machine_that_leaves_go_on_elsewhere_from_their_last_token(store: WeightStore) -> None:
    async with Fleet(SAMPLING) as fleet:
        await fleet.client.publish(0, store.address)
        leaver = fleet.join("leaver", tokens_per_s=2000.0)
        result = await fleet.submit()
        await until(lambda: fleet.tokens_of("leaver") > 200)
        fleet.join("stayer")
        leaver.drain("spot price rose")
        done = await result.whole()
        await fleet.agents["leaver"][1]
        moved = [event for event in fleet.events if isinstance(event, SamplesMoved)]
        assert sum(event.tokens_kept for event in moved) > 0
        # Everything drawn was sent before the goodbye, so nothing was drawn twice.
        drawn = sum(agent._engine.load().tokens_generated for agent, _ in fleet.agents.values())
        assert drawn == done.tokens


async def test_samples_of_a_machine_killed_by_sigkill_go_on_elsewhere_from_their_last_token(store: WeightStore) -> None:
    async with Fleet(SAMPLING) as fleet:
        await fleet.client.publish(0, store.address)
        arguments = ["join", "--manager", fleet.server.url, "--engine", "paced", "--tokens-per-s", "2000"]
        arguments += ["--preemption", "none"]
        doomed = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", *arguments, "--name", "doomed", "--max-running", "8"),
            env={**os.environ, "PENSTOCK_TOKEN": TOKEN},
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            result = await fleet.submit()
            await until(lambda: fleet.tokens_of("doomed") > 200)
            fleet.join("survivor")
            doomed.send_signal(signal.SIGKILL)
            done = await result.whole()
        finally:
            if doomed.returncode is None:
                doomed.kill()
            await doomed.wait()
        assert 0 < fleet.agents["survivor"][0]._engine.load().tokens_generated < done.tokens


async def test_a_new_version_reaches_every_machine_and_its_batch_is_drawn_with_it_alone(store: WeightStore) -> None:
    async with Fleet(SAMPLING) as fleet:
        for name in ("a", "b", "c"):
            fleet.join(name)
        for version in (0, 1):
            await fleet.client.publish(version, store.address)
            result = await fleet.submit(f"s{version}", version=version)
            await result.whole()
            assert {span.version for s in result.samples.values() for span in s.version_spans} == {version}
            await fleet.client.release(f"s{version}")
        await until(lambda: all(agent._engine.version == 1 for agent, _ in fleet.agents.values()))


async def test_a_machine_that_joins_with_an_address_alone_fits_the_run_and_one_that_is_too_small_gets_nothing(
    store: WeightStore,
) -> None:
    async with Fleet(SAMPLING, max_context_tokens=SAMPLING.max_new_tokens + 3) as fleet:
        await fleet.client.publish(0, store.address)
        fleet.join("small", context_tokens=SAMPLING.max_new_tokens + 2)
        await until(lambda: fleet.server.manager.fleet.count(State.READY) == 1)
        result = await fleet.submit()
        await until(lambda: any(isinstance(event, WaitingForInstances) for event in fleet.events))
        fleet.join("spot")
        await result.whole()
        assert fleet.tokens_of("small") == 0
        [waiting] = [event for event in fleet.events if isinstance(event, WaitingForInstances)]
        assert waiting.waiting_for == (
            "an instance with weight version 0 and a context of 403 tokens (1 ready with a context of 402)"
        )


async def test_a_machine_that_hangs_is_given_up_after_three_heartbeats_and_its_late_frames_change_nothing(
    store: WeightStore,
) -> None:
    async with Fleet(SAMPLING, heartbeat_s=1.0) as fleet:
        await fleet.client.publish(0, store.address)
        arguments = ["join", "--manager", fleet.server.url, "--engine", "paced", "--tokens-per-s", "1000"]
        hung = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", *arguments, "--name", "hung", "--max-running", "8"),
            *("--preemption", "none"),
            env={**os.environ, "PENSTOCK_TOKEN": TOKEN},
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            result = await fleet.submit(replicas=4)
            await until(lambda: fleet.tokens_of("hung") > 100)
            hung.send_signal(signal.SIGSTOP)
            fleet.join("survivor", tokens_per_s=2000.0)
            await until(lambda: any("3 heartbeats missed" in event.cause for event in fleet.ends()))
            # What it had on its way arrives while the survivor draws the same samples.
            hung.send_signal(signal.SIGCONT)
            await result.whole()
            await until(lambda: any(isinstance(e, InstanceChanged) and e.instance == "hung~2" for e in fleet.events))
        finally:
            hung.kill()
            await hung.wait()


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
    async with Fleet(SAMPLING) as fleet:
        await fleet.client.publish(0, store.address)
        fleet.join("broken", engine=BreaksDown(error))
        result = await fleet.submit()
        await until(lambda: bool(fleet.ends()))
        fleet.join("survivor")
        await result.whole()
        end = fleet.ends()[0]
        assert not end.orderly
        assert str(error) in end.cause


async def test_a_wall_clock_that_jumps_is_not_noticed(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, jumps = time.time, itertools.cycle((0.0, 1e7, -1e7))
    async with Fleet(SAMPLING) as fleet:
        monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
        await fleet.client.publish(0, store.address)
        fleet.join("engine")
        result = await fleet.submit()
        await result.whole()
        assert not fleet.ends()
