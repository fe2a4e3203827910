"""Machines by a user's script: what it prints is believed where it makes sense; whatever else it does has a cause."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path

import pytest

from penstock.cli.provision import make_provisioner
from penstock.errors import ConfigError, PenstockError
from penstock.rollout.provision_edge import ProvisionEdge
from penstock.rollout.provision_types import Add, Call, JoinOrder, ListAll, Provisioner, Release, Seen


def script(folder: Path, body: str) -> Provisioner:
    path = folder / "fleet.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    join = JoinOrder("run-7", "http://manager:7070", "secret", ("--engine", "paced"), str(folder))
    return make_provisioner("command", join, {"command": str(path), "environment": {"ZONE": "a b"}})


async def test_a_script_is_told_what_to_do_and_what_machines_need(tmp_path: Path) -> None:
    body = (
        f'echo "$@|$PENSTOCK_RUN|$PENSTOCK_JOIN|$PENSTOCK_TOKEN|$ZONE" >> {tmp_path}/calls; [ "$1" = add ] && echo m-1'
    )
    provisioner = script(tmp_path, body + "\ntrue")
    assert await provisioner.add(1) == ["m-1"]
    await provisioner.release("m-1")
    assert await provisioner.list() == []
    told = "run-7|penstock join --manager http://manager:7070 --engine paced|secret|a b"
    assert (tmp_path / "calls").read_text().splitlines() == [f"{w}|{told}" for w in ("add 1", "release m-1", "list")]
    assert "secret" not in (tmp_path / "provisioner.log").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"command": "./x", "environment": {"MODE": 3}}, r"fleet\.options\.environment\.MODE: a variable is a text"),
        ({"command": "./x", "environment": {"MODE": "a\0b"}}, r"environment\.MODE has a NUL"),
        ({"command": "./x", "environment": {"A=B": "c"}}, "'A=B' is no name"),
        ({"command": "./x", "environment": {"": "c"}}, "'' is no name"),
        ({"command": "./x", "environment": ["MODE"]}, r"fleet\.options\.environment: give a table"),
        ({"command": "./x 'y"}, r"fleet\.options\.command: No closing quotation"),
        ({"command": "./x\0"}, r"fleet\.options\.command has a NUL"),
        ({"command": ["./x", 3]}, r"fleet\.options\.command: give a line"),
        ({"command": 3}, r"fleet\.options\.command: give a line"),
        ({"command": []}, r"fleet\.options\.command is empty"),
    ],
)
def test_options_that_no_program_can_be_called_with_are_refused_when_it_is_made(
    options: dict[str, object], says: str
) -> None:
    join = JoinOrder("run-7", "http://manager:7070", "secret")
    with pytest.raises(ConfigError, match=says):
        make_provisioner("command", join, options)


async def test_a_list_may_tell_prices_and_what_has_ended(tmp_path: Path) -> None:
    lines = "i-1\\ni-2 price=5.32\\n\\ni-3 price=1 ended=spot interruption, no refund\\ni-4 ended\\n"
    assert await script(tmp_path, f"printf '{lines}'").list() == [
        Seen("i-1"),
        Seen("i-2", price_per_h=5.32),
        Seen("i-3", False, "spot interruption, no refund", 1.0),
        Seen("i-4", False, "it ended"),
    ]


@pytest.mark.parametrize(
    "line", ["two words", "i-1 price=cheap", "i-1 price=-1", "i-1 price=nan", "../etc", "i-1 owner=me", "-rf", "é"]
)
async def test_rubbish_in_a_list_is_refused_with_the_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(PenstockError, match="printed"):
        await script(tmp_path, f"echo '{line}'").list()


@pytest.mark.parametrize("printed", ["Usage: fleet.sh [options]", "i-1 i-2", "<html>", "{}"])
async def test_rubbish_of_an_add_is_refused(tmp_path: Path, printed: str) -> None:
    with pytest.raises(PenstockError, match="no machine's id"):
        await script(tmp_path, f"echo '{printed}'").add(1)


async def test_a_script_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match=r"`fleet.sh add 2` ended with exit code 3: no capacity in zone a"):
        await script(tmp_path, "echo 'no capacity in zone a' >&2; exit 3").add(2)


async def test_a_script_without_an_end_of_its_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="printed over"):
        await script(tmp_path, "head -c 2000000 /dev/zero").list()


async def test_a_machine_left_in_the_background_keeps_nobody_waiting(tmp_path: Path) -> None:
    began = time.monotonic()
    assert await script(tmp_path, "sleep 20 & echo box-1").add(1) == ["box-1"]
    assert time.monotonic() - began < 10


def lives(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and " Z " not in path.read_text()


async def test_a_script_that_hangs_is_killed_with_its_children_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioner = script(tmp_path, f"sleep 300 & echo $! > {tmp_path}/child; echo half; touch {tmp_path}/hangs; wait")
    answers: list[tuple[Call, object, str]] = []
    done = asyncio.Event()

    def answer(call: Call, result: object, cause: str) -> None:
        answers.append((call, result, cause))
        done.set()

    # The deadline passes when the script is seen to hang, however long it took to get there.
    loop = asyncio.get_running_loop()
    clock, passed_s = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: clock() + passed_s)
    edge = ProvisionEdge(provisioner, 5000.0, answer)
    edge.carry_out([Add(1, 1)])
    async with asyncio.timeout(60):
        while not (tmp_path / "hangs").exists():
            await asyncio.sleep(0.01)
    assert not answers
    passed_s = 5000.0
    async with asyncio.timeout(60):
        await done.wait()
    assert answers == [(Add(1, 1), None, "it did not come back within 5000 s")]
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while lives(child):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert "killed after" in (log := (tmp_path / "provisioner.log").read_text())
    assert "half" in log
    await edge.close()


class Careless:
    """A provisioner as a user may write it."""

    def __init__(self, join: JoinOrder, number: object = 7) -> None:
        self.number = number

    async def add(self, count: int) -> object:
        return self.number

    async def release(self, machine: str) -> None:
        raise KeyError(machine)

    async def list(self) -> object:
        return ["i-1"]

    async def close(self) -> None:
        raise RuntimeError("cannot")


async def test_whatever_a_user_s_own_provisioner_does_is_told_and_ends_nothing() -> None:
    causes: dict[int, str] = {}
    done = asyncio.Event()

    def answer(call: Call, result: object, cause: str) -> None:
        causes[call.call] = cause
        if len(causes) == 3:
            done.set()

    path = f"{__name__}:Careless"
    made = make_provisioner(path, JoinOrder("r", "http://m:1", "t"), {"number": "i-1"})
    edge = ProvisionEdge(made, 5.0, answer)
    edge.carry_out([Add(1, 1), Release(2, "i-9"), ListAll(3)])
    async with asyncio.timeout(20):
        await done.wait()
    assert "add returned 'i-1'; a list of str is needed" in causes[1]
    assert causes[2] == "KeyError: 'i-9'"
    assert "a list of Seen is needed" in causes[3]
    await edge.close()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("nobody", {}, "can't be made"),
        ("command", {"command": ""}, "fleet.options.command is empty"),
        ("command", {}, "missing 1 required"),
        ("command", {"command": "x", "price": 3}, "unexpected keyword"),
        ("local", {"arguments": "--engine paced"}, "a list of words"),
        ("penstock.errors:PenstockError", {}, "has no add, release, list, close"),
    ],
)
def test_a_provisioner_that_can_t_be_made_is_refused_in_words(
    name: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_provisioner(name, JoinOrder("r", "http://m:1", "t"), options)
