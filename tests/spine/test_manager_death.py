"""The manager may die, and the trainer too: real processes, real engines, SIGKILL in mid-step.

What is compared with an undisturbed run is every token of every sample; what is counted is what engines drew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.bench.house import Collected, House, open_house, prompts, small_llama
from penstock.bench.migration import NEAR_TIE, Samples, compare
from penstock.observe.events import BatchTakenUp, ManagerChanged, ManagerRecovered, Warned
from penstock.rollout.client import RolloutClient
from penstock.weights import WeightStore
from penstock.wire import Sampling

ASKED = prompts(16)
SAMPLING = Sampling(max_new_tokens=100, temperature=1.0)
LONG_S = 60.0


SHORTEST_QUEUE = {"balance": "penstock.rollout.balance:ShortestQueue"}
"""Moves nothing that runs: what is drawn twice is then a death's doing alone."""


@contextlib.asynccontextmanager
async def house_with_journal(folder: Path, engines: int) -> AsyncIterator[House]:
    journal = {"journal": "interval"}
    # Few at once, so that a step takes its time: whoever stops engines in its midst may be kept waiting.
    async with open_house(
        folder, engines, manager=journal, rollout=SHORTEST_QUEUE, reconnect_s=LONG_S, max_running=8
    ) as house:
        yield house


def drawn(house: House) -> int:
    return sum(engine.tokens_generated() or 0 for engine in house.processes.engines.values())


def ready(house: House) -> int:
    return sum(row.state == "ready" for row in house.status[-1].instances) if house.status else 0


def kill_manager(house: House) -> None:
    manager = house.processes._manager
    assert manager is not None
    os.killpg(manager.process.pid, signal.SIGKILL)
    manager.process.wait(timeout=LONG_S)


async def submit_to_standing_engines(house: House) -> tuple[Collected, int]:
    """Submits the step while engines stand still; also returns how many tokens they have drawn by then."""
    signal_engines(house, signal.SIGSTOP)
    before = drawn(house)
    return await house.submit("step", ASKED, 4, SAMPLING), before


async def kill_manager_under_way(house: House, accepted_before: int, drawn_by_then: int) -> tuple[int, int]:
    """Kills it when a third of the step's tokens are drawn, and waits until every agent has noticed.

    Returns how many of the step's tokens it had said to have, and how many all engines have drawn since they started.
    """
    # Engines run in short bursts: however slow this process is, they must not come to the step's end meanwhile.
    async with asyncio.timeout(LONG_S):
        while drawn(house) <= drawn_by_then + 2400:
            signal_engines(house, signal.SIGCONT)
            await asyncio.sleep(0.005)
            signal_engines(house, signal.SIGSTOP)
    async with asyncio.timeout(LONG_S):
        while (told := await tokens_accepted(house) - accepted_before) == 0:
            await asyncio.sleep(0.005)
    lost_before = sessions_lost(house)
    kill_manager(house)
    signal_engines(house, signal.SIGCONT)
    # By then an agent has told its engine to stop; one step may still be under way.
    await house.until(
        lambda: all(now > then for now, then in zip(sessions_lost(house), lost_before, strict=True)),
        "every agent to notice",
        LONG_S,
    )
    return told, drawn(house)


def signal_engines(house: House, number: signal.Signals) -> None:
    for engine in house.processes.engines.values():
        os.killpg(engine.process.pid, number)


def sessions_lost(house: House) -> list[int]:
    """Times that each agent has said so on its screen."""
    return [engine.log_path.read_text().count("next attempt in") for engine in house.processes.engines.values()]


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
        await house.until(lambda: ready(house) == 2, "both engines", LONG_S)
        quiet = await house.finish("step", await house.submit("step", ASKED, 4, SAMPLING))

        # The manager dies in mid-step.
        accepted = await tokens_accepted(house)
        collected, by_then = await submit_to_standing_engines(house)
        told, drawn_before = await kill_manager_under_way(house, accepted, by_then)
        house.processes.poll()
        disturbed = await house.finish("step", collected)
        assert_same(model, quiet, disturbed)
        await assert_what_the_journal_had_is_not_drawn_again(house, told, drawn_before, disturbed)
        assert {event.state for event in house.events_of(ManagerChanged)} == {"lost", "restarted", "back"}
        assert len(house.events_of(ManagerRecovered)) == 1

        # Trainer and manager die, as when their machine does; they come back with nothing but the disk.
        accepted = await tokens_accepted(house)
        _, by_then = await submit_to_standing_engines(house)
        told, drawn_before = await kill_manager_under_way(house, accepted, by_then)
        await house.client.close()
        house.processes.poll()
        await resume_trainer(house, model)
        resumed = await house.finish("step", await house.submit("step", ASKED, 4, SAMPLING))
        assert_same(model, quiet, resumed)
        await assert_what_the_journal_had_is_not_drawn_again(house, told, drawn_before, resumed)
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


async def assert_what_the_journal_had_is_not_drawn_again(
    house: House, told: int, drawn_before: int, samples: Samples
) -> None:
    """How far a manager lags behind its engines when it dies is the machine's business; these sums are not.

    `told`: tokens of the step that the dead manager had said to have. `drawn_before`: all tokens drawn before the next.
    """
    whole = sum(len(sample.token_ids) for sample in samples.values())
    recovered = house.events_of(ManagerRecovered)[-1].tokens
    assert 0 < told <= recovered < whole
    assert await tokens_accepted(house) == whole - recovered
    # Running sequences draw one token in the step that was under way when their engine was told to stop.
    assert 0 <= drawn(house) - drawn_before - (whole - recovered) <= len(samples)


async def tokens_accepted(house: House) -> int:
    """Since the present manager's start."""
    headers = {"Authorization": f"Bearer {house.token}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{house.url}/metrics") as response:
        [line] = [row for row in (await response.text()).splitlines() if row.startswith("penstock_tokens_accepted")]
    return int(line.split()[1])


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
