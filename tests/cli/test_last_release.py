"""A run whose manager is gone releases its machines itself: all that it can, whatever fails, and the rest is told."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import last_release
from penstock.cli.run_fleet import RunFleet, fleet_file
from penstock.config.run import RunConfig
from penstock.errors import ProvisionError
from penstock.observe.events import Event, Warned
from penstock.rollout.provision_types import JoinOrder, Seen
from penstock.train.edge import EdgeLoop

GONE_MANAGER = "http://127.0.0.1:9"


class Cloud:
    """`there`: machines by name, with their price. `ended`: those that are listed as ended for good, and how often each
    was released. `faults`: by machine (or `list`), what its next calls meet."""

    there: dict[str, float | None]
    ended: dict[str, int]
    faults: dict[str, list[str]]

    def __init__(self, join: JoinOrder) -> None:
        pass

    async def _meet(self, key: str) -> None:
        faults = self.faults.get(key)
        fault = faults.pop(0) if faults else ""
        if fault == "hangs":
            await asyncio.Event().wait()
        elif fault:
            raise ProvisionError(fault)

    async def add(self, count: int) -> list[str]:
        raise AssertionError

    async def release(self, machine: str) -> None:
        await self._meet(machine)
        self.there.pop(machine, None)
        if machine in self.ended:
            self.ended[machine] += 1

    async def list(self) -> list[Seen]:
        await self._meet("list")
        ended = [Seen(name, False, "terminated") for name in self.ended]
        return [*ended, *(Seen(name, price_per_h=price) for name, price in self.there.items())]

    async def close(self) -> None:
        raise RuntimeError("it won't be closed")


class End:
    """A run that ends, and what it says."""

    def __init__(self, folder: Path, machines: dict[str, float | None], provisioner: str) -> None:
        self.folder = folder
        Cloud.there, Cloud.ended, Cloud.faults = machines, {}, {}
        fleet = {"provisioner": provisioner, "call_s": 0.5, "price_per_h": 10.0, "hour_worth": 1.0}
        data = {"train": [{"kind": "jsonl", "path": "q"}]}
        reward = {"function": "a:b"}
        run = {"model": {"path": "m"}, "data": data, "reward": reward, "fleet": fleet}
        self.config = RunConfig.model_validate(run)
        self.release_s = 30.0
        self.events: list[Event] = []

    def account(self, machines: Any, hours: float = 0.0, **unbilled_hours: float) -> None:
        now = time.time()
        unbilled = {name: now - 3600 * hours for name, hours in unbilled_hours.items()}
        saved = {"spent": 5.0, "wanted": 3, "machines": machines, "unbilled": unbilled, "at": now - 3600 * hours}
        (self.folder / "fleet_account.json").write_text(json.dumps(saved))

    @property
    def kept(self) -> Any:
        return json.loads((self.folder / "fleet_account.json").read_text())

    def release(self) -> str:
        with EdgeLoop() as edge:
            fleet = self.config.fleet.model_copy(update={"release_s": self.release_s})
            config = self.config.model_copy(update={"fleet": fleet})
            fleet = RunFleet(config, fleet_file(config, self.folder), "t", "t", edge, self.events.append)
            fleet.manager_url = GONE_MANAGER
            fleet.release()
        told = [event.message for event in self.events if isinstance(event, Warned)]
        assert told[0].startswith("the manager did not release the run's machines")
        return "\n".join(told[1:])


@pytest.fixture
def end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> End:
    monkeypatch.setattr(last_release, "RETRY_S", 0.01)
    monkeypatch.setattr(last_release, "RETRY_MOST_S", 0.05)
    return End(tmp_path, {"a": None, "b": None, "c": 4.0, "stray": None}, f"{__name__}:Cloud")


def test_one_that_fails_or_hangs_is_tried_again_and_holds_up_no_other(end: End) -> None:
    end.account(["a", "b", "c", "gone"], hours=2.0, a=3.0, gone=100.0)
    Cloud.faults = {
        "list": ["throttled"],
        "a": ["RequestLimitExceeded"] * 2,
        "b": ["hangs"],
        "c": ["no"] * 5,
        "stray": ["no"],
    }
    told = end.release()
    assert Cloud.there == {}
    head, _, names = told.partition(": ")
    assert head == "released without the manager"
    assert set(names.split(", ")) == {"a", "b", "c", "gone", "stray"}
    # One has a price of its own; one was not seen by the manager that is gone; one was not there any more.
    assert end.kept["machines"] == []
    assert end.kept["spent"] == pytest.approx(5.0 + 3 * 10.0 + 2 * (10.0 + 4.0), rel=1e-2)
    assert end.kept["unbilled"] == {}
    assert end.kept["at"] == pytest.approx(time.time(), abs=60)
    assert end.kept["wanted"] == 3


def test_what_may_still_run_is_told_by_name_with_its_cause_and_stays_in_the_account(end: End) -> None:
    end.release_s = 3.0
    end.account(["a", "b"])
    Cloud.faults = {"a": ["not allowed"] * 1000, "c": ["hangs"] * 1000}
    told = end.release()
    assert set(Cloud.there) == {"a", "c"}
    first, second = told.splitlines()
    assert set(first.removeprefix("released without the manager: ").split(", ")) == {"b", "stray"}
    assert "may still run and cost money: " in second
    assert "a (not allowed)" in second
    assert "c (its release did not come back within 0.5 s)" in second
    assert set(end.kept["machines"]) == {"a", "c"}


def test_one_that_is_listed_as_ended_is_gone_once_its_release_came_back(end: End) -> None:
    end.account(["a", "x"])
    Cloud.there = {"a": None}
    Cloud.ended = {"x": 0, "y": 0}
    Cloud.faults = {"a": ["no"] * 3, "y": ["throttled"] * 2}
    told = end.release()
    head, _, names = told.partition(": ")
    assert head == "released without the manager"
    assert set(names.split(", ")) == {"a", "x", "y"}
    assert end.kept["machines"] == []
    assert Cloud.ended == {"x": 1, "y": 1}


def test_where_nothing_can_be_listed_what_the_account_names_is_released(end: End) -> None:
    end.release_s = 3.0
    end.account(["a", "b"], hours=2.0, a=3.0)
    before = end.kept["unbilled"]
    Cloud.faults = {"list": ["hangs", "hangs"] + ["the API is down"] * 1000, "a": ["no"]}
    told = end.release()
    assert set(Cloud.there) == {"c", "stray"}
    for part in ("a (it was released, and no list confirmed it)", "they can't be listed: "):
        assert part in told
    assert set(end.kept["machines"]) == {"a", "b"}
    assert end.kept["unbilled"] == before
    assert end.kept["spent"] == pytest.approx(5.0 + 2 * 10.0, rel=1e-2)


def test_an_account_that_is_none_stays_and_a_provisioner_that_can_t_be_made_is_told(tmp_path: Path) -> None:
    end = End(tmp_path, {}, f"{__name__}:Nobody")
    end.account(["a"])
    assert "a (nobody could release it); they can't be listed: fleet.provisioner=" in end.release()
    assert end.kept["machines"] == ["a"]

    end = End(tmp_path, {"a": None}, f"{__name__}:Cloud")
    (tmp_path / "fleet_account.json").write_text('{"machines": 3}')
    told = end.release()
    assert Cloud.there == {}
    assert "fleet_account.json is no account, and stays as it is" in told
    assert end.kept == {"machines": 3}


async def test_a_list_that_hangs_holds_up_no_second_try() -> None:
    tried = asyncio.Event()

    class Throttled:
        releases = 0

        async def add(self, count: int) -> list[str]:
            raise AssertionError

        async def release(self, machine: str) -> None:
            self.releases += 1
            if self.releases == 1:
                raise RuntimeError("too many requests")
            tried.set()

        async def list(self) -> list[Seen]:
            await asyncio.Event().wait()
            return []

        async def close(self) -> None: ...

    last = last_release.LastRelease(Throttled, ["box"], call_s=1000.0)
    ending = asyncio.create_task(last.carry_out(1000.0))
    async with asyncio.timeout(30):
        await tried.wait()
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)


class Late:
    """A killed manager's script goes on: its machine is there after some lists."""

    def __init__(self, lists: int) -> None:
        self.lists = lists
        self.there: list[str] = []
        self.released = asyncio.Event()

    async def add(self, count: int) -> list[str]:
        raise AssertionError

    async def release(self, machine: str) -> None:
        self.there.remove(machine)
        self.released.set()

    async def list(self) -> list[Seen]:
        self.lists -= 1
        if self.lists == 0:
            self.there.append("late")
        return [Seen(name) for name in self.there]

    async def close(self) -> None: ...


async def test_machines_that_were_being_asked_for_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_release, "RETRY_S", 0.001)
    monkeypatch.setattr(last_release, "RETRY_MOST_S", 0.001)
    late = Late(lists=20)
    last = last_release.LastRelease(lambda: late, [], call_s=1000.0, order_s=1000.0)
    ending = asyncio.create_task(last.carry_out(1000.0))
    async with asyncio.timeout(30):
        await late.released.wait()
    assert not ending.done(), "more may come"
    assert last.order_open
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    none = last_release.LastRelease(lambda: Late(lists=0), [], call_s=1000.0, order_s=0.01)
    await none.carry_out(1000.0)
    assert not none.order_open


def test_an_order_may_bring_machines_for_as_long_as_a_call_takes() -> None:
    left = [
        last_release.order_left_s(account, 60.0, 1000.0)
        for account in (None, {}, {"asking": 0.0}, {"asking": "x"}, {"asking": 900.0}, {"asking": 970.0})
    ]
    assert left == [0.0, 0.0, 0.0, 0.0, 0.0, 30.0]


def test_an_order_that_was_under_way_when_time_is_over_is_told(end: End) -> None:
    Cloud.there = {}
    end.release_s = 0.2
    end.config = end.config.model_copy(update={"fleet": end.config.fleet.model_copy(update={"call_s": 1000.0})})
    end.account([])
    (end.folder / "fleet_account.json").write_text(json.dumps({**end.kept, "asking": time.time()}))
    assert "some were being asked for when the manager ended" in end.release()
    assert end.kept["asking"] > 0, "the next manager's run may have to end what it brings"


@pytest.mark.parametrize(("faults", "told_of"), [([], False), (["throttled"] * 1000, True)])
def test_an_order_is_in_the_account_until_a_list_came_after_it(end: End, faults: list[str], told_of: bool) -> None:
    Cloud.there, Cloud.faults = {}, {"list": faults}
    end.release_s = 0.2 if faults else 30.0
    end.account([])
    (end.folder / "fleet_account.json").write_text(json.dumps({**end.kept, "asking": 1.0}))
    end.release()
    assert bool(end.kept["asking"]) == told_of
