"""Reserved engines that hand over to the trainer, and a fleet that vanishes meanwhile, as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from penstock.bench.house import House, open_house, prompts
from penstock.observe.events import SamplesMoved, WindowChanged
from penstock.wire import Sampling, TrainerTurn

SAMPLES = 40
TOKENS = 200
SAMPLING = Sampling(max_new_tokens=TOKENS)


def turn(state: str, batch: str = "step", window_s: float = 0.0) -> TrainerTurn:
    return TrainerTurn(number=0, batch=batch, version=0, state=state, window_s=window_s)


@contextlib.asynccontextmanager
async def spot(house: House) -> AsyncIterator[asyncio.subprocess.Process]:
    """A remote machine that is ready."""
    words = ["--manager", house.url, "--name", "spot", "--engine", "paced", "--tokens-per-s", "5000"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "join", *words, "--preemption", "none"),
        env={**os.environ, "PENSTOCK_TOKEN": house.token},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await house.until(lambda: state_of(house, "spot") == "ready", "the remote machine")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def state_of(house: House, name: str) -> str:
    rows = house.status[-1].instances if house.status else ()
    return next((row.state for row in rows if row.name == name), "")


def accepted(house: House, name: str) -> int:
    rows = house.status[-1].instances if house.status else ()
    return sum(row.tokens_accepted for row in rows if row.name == name)


async def ask(house: House, path: str) -> Any:
    headers = {"Authorization": f"Bearer {house.token}"}
    async with aiohttp.ClientSession() as http, http.get(f"{house.url}{path}", headers=headers) as answer:
        return json.loads(await answer.read())


async def accepted_now(house: House, name: str) -> int:
    """Tokens, as the manager counts them at this moment."""
    return sum(row["tokens_accepted"] for row in await ask(house, "/instances") if row["name"] == name)


async def publish(house: House) -> None:
    manifest = house.store.publish(0, [("w", "F32", (4,), bytes(16))], '{"vocab_size": 97}')
    await house.client.publish(0, house.source, manifest.digest)


def tokens(samples: dict[Any, Any]) -> dict[Any, list[int]]:
    return {identity: list(sample.token_ids) for identity, sample in samples.items()}


async def test_engines_hand_unfinished_samples_over_and_the_trainer_gets_its_devices(tmp_path: Path) -> None:
    async with open_house(tmp_path, engines=1, max_running=64, tokens_per_s=5000.0) as house:
        await publish(house)
        alone = await house.finish("step", await house.submit("step", prompts(SAMPLES), 1, SAMPLING))
        async with spot(house):
            await house.client.take_turn(turn("begins", window_s=0.2))
            collected = await house.submit("step", prompts(SAMPLES), 1, SAMPLING)
            async with asyncio.timeout(30.0):
                window_s = await house.client.take_turn(turn("wants", window_s=0.2))
            told = await ask(house, "/status")
            before = await accepted_now(house, "engine-0")
            shared = await house.finish("step", collected)
            after = await accepted_now(house, "engine-0")
            await house.client.take_turn(turn("trained", window_s=0.2))
        moved = [event for event in house.events_of(SamplesMoved) if event.instance == "engine-0"]
        changes = house.events_of(WindowChanged)
    # The window's own clock: the engines were given 0.2 s, and what they had drawn went on with their samples.
    assert window_s >= 0.2
    assert sum(event.samples for event in moved) > 0
    assert sum(event.tokens_kept for event in moved) > 0
    assert (told["window"]["turn"], told["window"]["batch"], told["window"]["remote"]) == ("training", "step", 1)
    assert before == after
    assert [(change.what, change.fleet) for change in changes] == [("opened", 1), ("closed", 1)]
    assert changes[-1].cause == "0.2 s, as configured"
    assert tokens(alone) == tokens(shared)


async def test_a_fleet_that_vanishes_while_the_trainer_trains_leaves_the_step_to_its_own_engines(
    tmp_path: Path,
) -> None:
    async with open_house(tmp_path, engines=1, max_running=64, tokens_per_s=5000.0) as house:
        await publish(house)
        alone = await house.finish("step", await house.submit("step", prompts(SAMPLES), 1, SAMPLING))
        drawn = await accepted_now(house, "engine-0")
        async with spot(house) as process:
            await house.client.take_turn(turn("begins"))
            collected = await house.submit("step", prompts(SAMPLES), 1, SAMPLING)
            async with asyncio.timeout(30.0):
                assert await house.client.take_turn(turn("wants")) == 0.0
            await house.until(lambda: accepted(house, "spot") > 0, "tokens of the remote machine")
            process.kill()
            await house.until(lambda: state_of(house, "spot") == "gone", "the manager to notice")
            # The devices are the trainer's for as long as it has something to train on.
            assert (await ask(house, "/status"))["window"]["turn"] == "training"
            assert await accepted_now(house, "engine-0") == drawn
            await house.client.take_turn(turn("waits"))
            shared = await house.finish("step", collected)
            async with asyncio.timeout(30.0):
                assert await house.client.take_turn(turn("wants")) > 0.0
        causes = [(change.what, change.cause) for change in house.events_of(WindowChanged)]
    assert causes == [
        ("closed", "0 s, as configured"),
        ("opened", "no remote instance is left"),
        ("closed", "everything is generated"),
    ]
    assert tokens(alone) == tokens(shared)
