"""Real machines of a real manager: it grows from none, shrinks back, is killed and comes back, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.bench import house as houses
from penstock.bench.house import House, open_house, prompts
from penstock.cli.run_fleet import RunFleet, fleet_file
from penstock.config.fleet import FleetConfig
from penstock.config.run import RunConfig
from penstock.observe.events import FleetSized, MachineChanged
from penstock.train.edge import EdgeLoop
from penstock.wire import Sampling

WAIT_S = 60.0


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s for {what}"
        await asyncio.sleep(0.02)


async def ask(house: House, path: str) -> Any:
    headers = {"Authorization": f"Bearer {house.token}"}
    async with aiohttp.ClientSession() as http, http.get(f"{house.url}{path}", headers=headers) as answer:
        text = await answer.text()
        return json.loads(text) if answer.content_type == "application/json" else text


def lives(pid: int) -> bool:
    """It runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def machines_in(house: House, after: str) -> list[str]:
    return [event.machine for event in house.events_of(MachineChanged) if event.after == after]


async def test_a_local_machine_that_ends_by_itself_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However seldom lists of other provisioners are asked for."""
    fleet = FleetConfig(
        provisioner="local", options={"arguments": ["--engin", "builtin"]}, ceiling=1, first=1, list_s=1e6
    )

    def config_for(folder: Path, *args: Any, **options: Any) -> RunConfig:
        config = plain(folder, *args, **options).model_copy(update={"fleet": fleet})
        (folder / "fleet.json").write_text(fleet_file(config, folder).model_dump_json())
        return config

    plain = houses.config_for
    monkeypatch.setattr(houses, "config_for", config_for)
    async with open_house(tmp_path, engines=1) as house:
        await house.until(lambda: machines_in(house, "failed"), "its end")
        first = next(event for event in house.events_of(MachineChanged) if event.after == "failed")
        assert first.cause.startswith(
            f"it ended before it joined: exit code 2, see logs/{first.machine}.log; last words:"
        )
        assert "unrecognized arguments: --engin builtin" in first.cause


async def test_machines_come_with_the_work_and_go_with_it_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--engine", "paced", "--tokens-per-s", "4000", "--threads", "1"]
    fleet = FleetConfig(
        provisioner="local",
        options={"arguments": words},
        ceiling=2,
        first=0,
        price_per_h=1.0,
        reserved_price_per_h=10.0,
        patience=1,
        start_s=0.2,
        cool_down_s=0.2,
        drain_s=5.0,
        list_s=1.0,
    )
    made: list[RunConfig] = []

    def config_for(folder: Path, *args: Any, **options: Any) -> RunConfig:
        config = plain(folder, *args, **options).model_copy(update={"fleet": fleet})
        (folder / "fleet.json").write_text(fleet_file(config, folder).model_dump_json())
        made.append(config)
        return config

    plain = houses.config_for
    monkeypatch.setattr(houses, "config_for", config_for)
    async with open_house(tmp_path, engines=1, max_running=16, tokens_per_s=400.0) as house:
        manifest = house.store.publish(0, [("w", "F32", (4,), bytes(16))], '{"vocab_size": 97}')
        await house.client.publish(0, house.source, manifest.digest)
        collected = await house.submit("step", prompts(60), 1, Sampling(max_new_tokens=150))
        await house.until(lambda: any(row.running for seen in house.status[-1:] for row in seen.instances), "work")
        assert (await ask(house, "/fleet"))["machines"] == []

        # The engine here is at work all the time: two more are worth their price.
        await asyncio.sleep(0.3)
        await house.client.report_step(0, step_s=10.0, train_s=1.0, trainer_wait_s=9.0)
        await house.until(lambda: len(machines_in(house, "joined")) == 2, "two machines")
        rows = [row for row in await ask(house, "/instances") if not row["reserved"]]
        pids = [row["pid"] for row in rows]
        assert {row["name"] for row in rows} == set(machines_in(house, "joined"))
        assert all(map(lives, pids))
        done = await house.finish("step", collected)
        assert len(done) == 60

        # Nothing to do, and all the time training: none is.
        for step in range(1, 14):
            await house.client.report_step(step, step_s=20.0, train_s=10.0, trainer_wait_s=0.0)
        await house.until(lambda: len(machines_in(house, "released")) == 2, "their release")
        state = await ask(house, "/fleet")
        assert state["machines"] == []
        assert state["wanted"] == 0
        assert state["counts"] == {"asked": 2, "released": 2}
        assert state["spent"] > 0
        await until(lambda: not any(map(lives, pids)), "their processes' end")
        sizes = [event.after for event in house.events_of(FleetSized)]
        assert sizes[0] == 2
        assert sorted(sizes, reverse=True) == sizes
        metrics = await ask(house, "/metrics")
        assert 'penstock_machines_ended_total{outcome="released"} 2' in metrics
        assert "penstock_machines_spent_dollars_total" in metrics

        # It is wanted again just before the run ends: it is released with the run.
        for step in range(14, 22):
            busy = await house.submit(f"s{step}", prompts(8), 1, Sampling(max_new_tokens=40))
            await asyncio.sleep(0.05)
            await house.client.report_step(step, step_s=100.0, train_s=1.0, trainer_wait_s=99.0)
            if (await ask(house, "/fleet"))["machines"]:
                break
            await house.finish(f"s{step}", busy)
        assert (await ask(house, "/fleet"))["machines"]
        with EdgeLoop() as edge:
            file = fleet_file(made[0], tmp_path)
            end = RunFleet(made[0], file, house.token, house.token, edge, house.events.append)
            end.manager_url = house.url
            await asyncio.to_thread(end.release)
        state = await ask(house, "/fleet")
        assert state["done"]
        assert state["machines"] == []
        account = json.loads((tmp_path / "fleet_account.json").read_text())
        assert account["machines"] == []
        assert account["spent"] > 0
    assert [event for event in house.events if "provisioner" in str(getattr(event, "where", ""))] == []


SCRIPT = """#!/bin/sh
cd "$(dirname "$0")"
case "$1" in
add) for n in $(seq "$2"); do sleep 300 & echo "box-$!" | tee "there/box-$!"; done ;;
release) rm -f "there/$2"; kill "${2#box-}" 2>/dev/null; true ;;
list) ls there ;;
esac
"""


async def test_machines_of_a_manager_that_was_killed_are_found_by_the_next_one_and_released_at_its_end(
    tmp_path: Path,
) -> None:
    script, there = tmp_path / "boxes.sh", tmp_path / "there"
    script.write_text(SCRIPT)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    there.mkdir()
    settings = tmp_path / "fleet.toml"
    settings.write_text(
        f'run = "spot"\nfolder = "{tmp_path}"\n[fleet]\nprovisioner = "command"\nfloor = 2\nceiling = 2\n'
        f'price_per_h = 3600.0\nlist_s = 0.2\noptions = {{ command = "{script}" }}\n'
    )
    ready = tmp_path / "ready.json"
    words = ["manager", "--fleet", str(settings), "--ready-file", str(ready)]

    def start() -> subprocess.Popen[bytes]:
        ready.unlink(missing_ok=True)
        environment = {**os.environ, "PENSTOCK_TOKEN": "secret"}
        return subprocess.Popen([sys.executable, "-m", "penstock", *words], env=environment, stdout=subprocess.DEVNULL)

    def boxes() -> set[str]:
        return {path.name for path in there.iterdir()}

    async def fleet() -> dict[str, Any]:
        await until(ready.exists, "the manager")
        url, headers = json.loads(ready.read_text())["url"], {"Authorization": "Bearer secret"}
        async with aiohttp.ClientSession() as http, http.get(f"{url}/fleet", headers=headers) as answer:
            return await answer.json()  # type: ignore[no-any-return]

    async def known(names: set[str]) -> dict[str, Any]:
        """What the manager says of its machines, once it is these."""
        deadline = time.monotonic() + WAIT_S
        while True:
            state = await fleet()
            if {row["machine"] for row in state["machines"]} == names:
                return state
            assert time.monotonic() < deadline, f"{names} never were the machines of {state}"
            await asyncio.sleep(0.02)

    manager = start()
    try:
        await until(lambda: len(boxes()) == 2, "two machines")
        first = boxes()
        before = await known(first)
        manager.send_signal(signal.SIGKILL)
        await asyncio.to_thread(manager.wait)
        manager = start()
        after = await known(first)
        assert boxes() == first
        # A dollar a second each, also while no manager was there, once a list has shown them.
        deadline = time.monotonic() + WAIT_S
        while after["spent"] <= before["spent"]:
            assert time.monotonic() < deadline
            after = await known(first)
        assert after["counts"].get("asked", 0) == 0
        manager.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(manager.wait, WAIT_S) == 0
        assert boxes() == set()
        await until(lambda: not any(lives(int(name.removeprefix("box-"))) for name in first), "their end")
        assert "release box-" in (tmp_path / "logs" / "provisioner.log").read_text()
    finally:
        manager.kill()
        await asyncio.to_thread(manager.wait)
        for name in boxes():
            os.kill(int(name.removeprefix("box-")), signal.SIGKILL)
