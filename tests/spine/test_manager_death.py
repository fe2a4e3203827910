"""The manager may die, and the trainer too: real processes, real engines, SIGKILL in mid-step.

What is compared with an undisturbed run is every token of every sample; what is counted is what engines drew.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.bench.house import House, open_house, prompts, small_llama
from penstock.bench.migration import NEAR_TIE, Samples, compare
from penstock.observe.events import BatchTakenUp, ManagerChanged, ManagerRecovered, Warned
from penstock.rollout.client import RolloutClient
from penstock.weights import WeightStore
from penstock.wire import Sampling

ASKED = prompts(16)
SAMPLING = Sampling(max_new_tokens=100, temperature=1.0)
LONG_S = 60.0


@contextlib.asynccontextmanager
async def house_with_journal(folder: Path, engines: int) -> AsyncIterator[House]:
    async with open_house(folder, engines, manager={"journal": "interval"}, reconnect_s=LONG_S) as house:
        yield house


def drawn(house: House) -> int:
    return sum(engine.tokens_generated() or 0 for engine in house.processes.engines.values())


def kill_manager(house: House) -> None:
    manager = house.processes._manager
    assert manager is not None
    os.killpg(manager.process.pid, signal.SIGKILL)
    manager.process.wait(timeout=LONG_S)


async def under_way(house: House, tokens: int = 2400) -> int:
    """Waits until more than a third of the step's tokens are drawn; returns how many are."""
    before = drawn(house)
    await house.until(lambda: drawn(house) > before + tokens, "the engines at work", LONG_S)
    return drawn(house) - before


def assert_same(model: Any, quiet: Samples, disturbed: Samples) -> None:
    assert quiet.keys() == disturbed.keys()
    difference = compare(model, ASKED, "step", SAMPLING, quiet, disturbed)
    assert difference.widest_gap < NEAR_TIE, difference.different
    assert difference.identical_share >= 0.98, difference.different


@pytest.mark.slow
async def test_neither_a_killed_manager_nor_a_killed_trainer_changes_or_costs_a_sample(tmp_path: Path) -> None:
    model = small_llama()
    async with house_with_journal(tmp_path, engines=2) as house:
        await house.publish(0, model)
        quiet = await house.finish("step", await house.submit("step", ASKED, 4, SAMPLING))

        # The manager dies in mid-step.
        drawn_before = drawn(house)
        collected = await house.submit("step", ASKED, 4, SAMPLING)
        by_then = await under_way(house)
        kill_manager(house)
        house.processes.poll()
        disturbed = await house.finish("step", collected)
        assert_same(model, quiet, disturbed)
        assert_most_was_kept(house, drawn_before, by_then, disturbed)
        assert {event.state for event in house.events_of(ManagerChanged)} == {"lost", "restarted", "back"}
        assert [event.tokens > 0 for event in house.events_of(ManagerRecovered)] == [True]

        # Trainer and manager die, as when their machine does; they come back with nothing but the disk.
        drawn_before = drawn(house)
        await house.submit("step", ASKED, 4, SAMPLING)
        by_then = await under_way(house)
        await house.client.close()
        kill_manager(house)
        house.processes.poll()
        await resume_trainer(house, model)
        resumed = await house.finish("step", await house.submit("step", ASKED, 4, SAMPLING))
        assert_same(model, quiet, resumed)
        assert_most_was_kept(house, drawn_before, by_then, resumed)
        [taken_up] = [event for event in house.events_of(BatchTakenUp) if event.batch == "step"][-1:]
        assert taken_up.tokens > 0


async def resume_trainer(house: House, model: Any) -> None:
    """Another process would have a client and a weight store of its own, at another address."""
    token = house.token
    house.store.close()
    house.store = WeightStore("house", "127.0.0.1", 0, token)
    house.source = house.store.start()
    house.client = RolloutClient(house.url, token, house.events.append, house.status.append)
    await house.until_connected(LONG_S)
    await house.publish(0, model)


def assert_most_was_kept(house: House, drawn_before: int, by_then: int, samples: Samples) -> None:
    """Drawn again is what the dead manager had not read and what engines drew until they noticed, and no more.

    That is a few frames of each running sample, more on a busy machine: not what a step begun anew would draw again.
    """
    whole = sum(len(sample.token_ids) for sample in samples.values())
    assert 0 <= drawn(house) - drawn_before - whole <= by_then / 2


@pytest.mark.slow
async def test_a_manager_whose_disk_is_full_says_so_and_journals_again_when_there_is_room(tmp_path: Path) -> None:
    async with house_with_journal(tmp_path, engines=0) as house:
        manager = house.processes._manager
        assert manager is not None
        assert await health(house) == "running"
        unlimited = resource.prlimit(manager.process.pid, resource.RLIMIT_FSIZE)
        # No file of its may grow any more: what a full disk answers, for this process alone.
        resource.prlimit(manager.process.pid, resource.RLIMIT_FSIZE, (256, unlimited[1]))
        collected = await house.submit("step", ASKED, 2, SAMPLING)
        warnings: list[Warned] = []

        def warned_of(words: str) -> bool:
            warnings[:] = [event for event in house.events_of(Warned) if event.where == "journal"]
            return any(words in event.message for event in warnings)

        await house.until(lambda: warned_of("running without a journal: File too large"), "the warning")
        assert await health(house) == "File too large"
        assert not collected.ended.is_set()
        resource.prlimit(manager.process.pid, resource.RLIMIT_FSIZE, unlimited)
        again = "the journal is written again, from a fresh snapshot"
        await house.until(lambda: warned_of(again), again, 120.0)
        assert await health(house) == "running"
        kill_manager(house)
        house.processes.poll()
        await house.until(lambda: bool(house.events_of(ManagerRecovered)), "what the snapshot had")
        assert house.events_of(ManagerRecovered)[0].samples == 32


async def health(house: House) -> str:
    async with aiohttp.ClientSession() as http, http.get(f"{house.url}/healthz") as response:
        return str((await response.json())["journal"])
