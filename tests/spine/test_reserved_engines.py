"""The run's own engines and a machine from outside, as real processes: one manager gives work to both."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp

from penstock.bench.house import House, open_house, prompts
from penstock.wire import FleetStatus, InstanceStatus, Sampling

SAMPLES = 48
TOKENS = 200


def row_of(house: House, name: str) -> InstanceStatus | None:
    last: FleetStatus | None = house.status[-1] if house.status else None
    return next((row for row in last.instances if row.name == name), None) if last else None


async def instances(house: House) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {house.token}"}
    async with aiohttp.ClientSession() as http, http.get(f"{house.url}/instances", headers=headers) as answer:
        return json.loads(await answer.read())  # type: ignore[no-any-return]


async def test_a_step_shared_with_a_remote_machine_completes_on_the_runs_own_engine_when_that_is_killed(
    tmp_path: Path,
) -> None:
    sampling = Sampling(max_new_tokens=TOKENS)
    async with open_house(
        tmp_path, engines=1, rollout={"heartbeat_s": 0.1}, max_running=16, tokens_per_s=4000.0
    ) as house:
        manifest = house.store.publish(0, [("w", "F32", (4,), bytes(16))], '{"vocab_size": 97}')
        await house.client.publish(0, house.source, manifest.digest)
        # With no remote instance.
        alone = await house.finish("step", await house.submit("step", prompts(SAMPLES), 1, sampling))

        words = ["--manager", house.url, "--name", "spot", "--engine", "paced", "--tokens-per-s", "4000"]
        remote = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", "join", *words, "--preemption", "none"),
            env={**os.environ, "PENSTOCK_TOKEN": house.token},
            stderr=subprocess.DEVNULL,
        )
        try:
            await house.until(lambda: (row := row_of(house, "spot")) is not None and row.state == "ready", "the spot")
            reserved = {row["name"]: row["reserved"] for row in await instances(house)}
            collected = await house.submit("step", prompts(SAMPLES), 1, sampling)
            await house.until(
                lambda: (row := row_of(house, "spot")) is not None and row.tokens_accepted > 0, "its work"
            )
            remote.kill()
            assert not collected.ended.is_set(), "it dies at work"
            shared = await house.finish("step", collected)
        finally:
            if remote.returncode is None:
                remote.kill()
            await remote.wait()
    assert reserved == {"engine-0": True, "spot": False}
    assert alone.keys() == shared.keys() == {(prompt, 0) for prompt in range(SAMPLES)}
    # A paced engine's tokens depend on seed and place alone: what came is what one undisturbed engine draws.
    assert {k: list(s.token_ids) for k, s in alone.items()} == {k: list(s.token_ids) for k, s in shared.items()}
