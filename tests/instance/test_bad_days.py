"""Bad days of networks and engines, with real agents on real sockets: each alone, and what it costs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from fleets import FRAME_STEPS, PROMPTS, TOKEN, VOCAB, WITHIN_S, Batch, Fleet, until

from penstock.bench.chaos_engine import FaultyEngine
from penstock.bench.chaos_links import UP
from penstock.errors import EngineError
from penstock.instance import PacedEngine, SequenceStart, TokenDelta
from penstock.observe.events import InstanceChanged, SampleFailed, SamplesMoved
from penstock.sample import Finish
from penstock.weights import WeightStore
from penstock.wire import Sampling

SAMPLING = Sampling(max_new_tokens=300)


@pytest.fixture
def store() -> Iterator[WeightStore]:
    held = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=256)
    held.start()
    held.publish(0, [("w", "F32", (100,), bytes(400))], f'{{"vocab_size": {VOCAB}}}')
    yield held
    held.close()


@pytest.fixture
async def fleet(store: WeightStore) -> AsyncIterator[Fleet]:
    async with Fleet(SAMPLING) as made:
        await made.client.publish(0, store.address)
        yield made


def engine(tokens_per_s: float = 2000.0) -> FaultyEngine:
    return FaultyEngine(tokens_per_s=tokens_per_s, max_running=8, frame_steps=FRAME_STEPS)


async def test_a_network_that_swallows_everything_is_a_silent_death_after_three_heartbeats(store: WeightStore) -> None:
    async with Fleet(SAMPLING, heartbeat_s=1.0) as fleet:
        await fleet.client.publish(0, store.address)
        cut_off = engine()
        link = await fleet.join_over_a_link("cut-off", cut_off)
        step = await fleet.submit()
        await until(lambda: cut_off.tokens_drawn > 200)
        link.swallow()
        await until(lambda: fleet.ends("cut-off"))
        assert "3 heartbeats missed" in fleet.ends("cut-off")[0].cause
        fleet.join("survivor", engine=engine())
        # What it went on drawing reached nobody; once its network is back it is another instance.
        link.heal()
        await step.whole()
        assert any(isinstance(e, SamplesMoved) and e.tokens_kept > 0 for e in fleet.events)
        await until(lambda: any(e.instance == "cut-off~2" for e in fleet.of(InstanceChanged)))


async def test_a_connection_cut_within_a_frame_costs_that_frame_alone(fleet: Fleet) -> None:
    drawing = engine()
    link = await fleet.join_over_a_link("engine", drawing)
    step = await fleet.submit()
    await until(lambda: drawing.tokens_drawn > 200)
    link.cut_within(UP)
    await until(lambda: fleet.ends("engine"))
    assert "connection" in fleet.ends("engine")[0].cause
    await step.whole()
    assert link.cuts_within == 1


async def test_a_slow_instance_delays_its_own_samples_and_changes_none(fleet: Fleet) -> None:
    slow = engine(tokens_per_s=4000.0)
    slow.slow(20.0)
    fleet.join("slow", engine=slow)
    step = await fleet.submit()
    await until(lambda: slow.tokens_drawn > 0)
    fleet.join("brisk", engine=engine(tokens_per_s=8000.0))
    await step.whole()
    assert not fleet.ends("slow"), "slow is not dead"


async def test_samples_that_an_engine_aborts_go_on_from_their_last_token(fleet: Fleet) -> None:
    aborting = engine()
    fleet.join("aborting", engine=aborting)
    step = await fleet.submit()
    await until(lambda: aborting.tokens_drawn > 200)
    aborting.spoil("abort")
    await step.whole()
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


async def keep_joining(fleet: Fleet, cursed: int, step: Batch) -> None:
    """A machine whose engine dies is replaced by another, as a cluster does."""
    for life in range(20):
        fleet.join(f"engine-{life}", engine=Breaks(cursed))
        _, task = fleet.agents[f"engine-{life}"]
        await asyncio.wait([task, step.done], return_when=asyncio.FIRST_COMPLETED, timeout=WITHIN_S)
        if step.done.done():
            return


async def test_a_sample_that_kills_its_engine_three_times_is_set_aside_with_its_cause(fleet: Fleet) -> None:
    step = await fleet.submit(prompts=PROMPTS[:1], replicas=1)
    await keep_joining(fleet, cursed=1, step=step)
    done = await step.finished()
    assert (done.samples, done.failed) == (0, 1)
    [failed] = step.samples.values()
    assert failed.finish is Finish.FAILED
    assert "taken back 3 times" in failed.cause
    assert "CUDA out of memory" in failed.cause
    assert len(fleet.of(SampleFailed)) == 1
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
        async with Fleet(SAMPLING, url=json.loads(ready.read_text())["url"]) as fleet:
            await fleet.client.publish(0, store.address)
            step = await fleet.submit(prompts=PROMPTS[:1], replicas=1)
            await keep_joining(fleet, cursed=1, step=step)
            await step.finished()
            assert len(fleet.agents) == 1
            assert "taken back 1 times" in next(iter(step.samples.values())).cause
    finally:
        manager.kill()
        await manager.wait()
