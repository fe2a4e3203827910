"""Machines on Ray: its library is in a child, whose end is a failed call; why an actor died is told by its root."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.provision import make_provisioner, on_ray, ray_child
from penstock.cli.provision.ray_child import Actors, death_words
from penstock.cli.provision.ray_lines import AddActors, Answer, Begin, Call, ListActors
from penstock.errors import ConfigError, MissingExtra, ProvisionError
from penstock.rollout.provision_types import JoinOrder, Provisioner, Seen

STAND_IN = """
import json, os, pathlib, sys
begin = json.loads(sys.stdin.readline())
there = pathlib.Path(begin["address"])
with (there / "log").open("a") as log:
    print(json.dumps({"pid": os.getpid(), "args": sys.argv, "begin": begin}), file=log)
for line in sys.stdin:
    call = json.loads(line)
    request, answer = call["request"], {"number": call["number"]}
    fault = (there / "fault").read_text() if (there / "fault").exists() else ""
    if fault:
        (there / "fault").unlink()
    with (there / "log").open("a") as log:
        print(json.dumps(request), file=log)
    if fault == "dies":
        print("the head is gone", file=sys.stderr, flush=True)
        os._exit(3)
    elif fault == "hangs":
        continue
    elif fault == "rubbish":
        print("hello", flush=True)
        continue
    elif fault:
        answer["error"] = fault
    elif request["type"] == "add":
        for name in request["machines"]:
            (there / name).touch()
    elif request["type"] == "release":
        (there / request["machine"]).unlink()
    else:
        names = sorted(path.name for path in there.glob("penstock-*"))
        answer["rows"] = [{"name": name, "cause": (there / name).read_text()} for name in names]
    print(json.dumps(answer), flush=True)
(there / "left").touch()
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        join = JoinOrder("r-1", "http://manager:7070", "secret", ("--engine", "paced"))
        self.provisioner: Provisioner = make_provisioner(
            "ray", join, {"address": str(folder), "resources": {"spot": 1}}
        )

    def fault(self, what: str) -> None:
        (self.folder / "fault").write_text(what)

    @property
    def log(self) -> list[dict[str, Any]]:
        path = self.folder / "log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def pids(self) -> list[int]:
        return [row["pid"] for row in self.log if "pid" in row]

    async def until_asked(self, times: int) -> None:
        while len([row for row in self.log if "type" in row]) < times:
            await asyncio.sleep(0.01)


def lives(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and " Z " not in path.read_text()


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(on_ray, "CHILD", (sys.executable, "-c", STAND_IN))
    monkeypatch.setattr(on_ray.importlib.util, "find_spec", lambda name: object())
    made = Place(tmp_path)
    yield made
    await made.provisioner.close()
    assert not any(map(lives, made.pids))


async def test_one_child_does_what_is_asked_and_the_token_goes_by_its_pipe(place: Place) -> None:
    first, second = await place.provisioner.add(2)
    assert await place.provisioner.list() == [Seen(name) for name in sorted((first, second))]
    (place.folder / first).write_text("its agent ended")
    await place.provisioner.release(second)
    assert await place.provisioner.list() == [Seen(first, False, "its agent ended")]
    begin, add = place.log[:2]
    assert len(place.pids) == 1
    assert "secret" not in str(begin["args"])
    assert begin["begin"]["environment"] == {"PENSTOCK_TOKEN": "secret"}
    assert begin["begin"]["placement"] == {"num_cpus": 1, "num_gpus": 0, "resources": {"spot": 1}}
    words = ["join", "--manager", "http://manager:7070", "--name", first, "--engine", "paced"]
    assert add["machines"][first] == words


async def test_its_death_is_a_failed_call_with_its_last_words_and_the_next_call_has_another(place: Place) -> None:
    names = await place.provisioner.add(1)
    place.fault("dies")
    with pytest.raises(ProvisionError, match="speaks to Ray has ended: exit code 3; last words: the head is gone"):
        await place.provisioner.list()
    assert await place.provisioner.list() == [Seen(name) for name in names]
    os.kill(place.pids[-1], 9)
    life = place.provisioner._child._life  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        while not life.over:
            await asyncio.sleep(0.01)
    assert await place.provisioner.list() == [Seen(name) for name in names]
    assert len(set(place.pids)) == 3


async def test_a_call_that_is_cut_off_ends_what_it_is_stuck_in_and_others_say_so(place: Place) -> None:
    place.fault("hangs")
    stuck = asyncio.create_task(place.provisioner.list())
    await place.until_asked(1)
    place.fault("hangs")
    other = asyncio.create_task(place.provisioner.list())
    await place.until_asked(2)
    stuck.cancel()
    with pytest.raises(ProvisionError, match="has ended: it was ended with a call that was cut off"):
        await other
    assert stuck.cancelled()
    assert await place.provisioner.list() == []
    assert not lives(place.pids[0])


async def test_what_it_can_t_do_is_told_and_rubbish_ends_it(place: Place) -> None:
    place.fault("no Ray cluster at 'x'")
    with pytest.raises(ProvisionError, match=r"^no Ray cluster at 'x'$"):
        await place.provisioner.add(1)
    assert await place.provisioner.list() == []
    assert len(place.pids) == 1
    place.fault("rubbish")
    with pytest.raises(ProvisionError, match="its answer is none"):
        await place.provisioner.list()
    assert await place.provisioner.list() == []


async def test_closed_it_leaves_by_itself(place: Place) -> None:
    await place.provisioner.list()
    await place.provisioner.close()
    assert (place.folder / "left").exists()


async def test_a_child_that_can_t_be_started_is_told(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "CHILD", (str(place.folder / "nothing"),))
    with pytest.raises(ProvisionError, match="the process that speaks to Ray can't be started"):
        await Place(place.folder).provisioner.list()


def test_without_ray_it_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(on_ray.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra):
        Place(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arguments": "--engine paced"}, "a list of words"),
        ({"arguments": [3]}, "a list of words"),
        ({"environment": {"MODE": 3}}, "Expected `str`, got `int`.*environment"),
        ({"resources": {"spot": "one"}}, "got `str`.*placement"),
        ({"resources": "spot"}, "can't be made"),
        ({"leave_s": "10"}, "leave_s"),
        ({"address": None}, "address"),
    ],
)
def test_options_that_the_child_would_not_take_are_refused_before_the_run(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ray.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=words):
        make_provisioner("ray", JoinOrder("r-1", "http://manager:7070", "secret"), options)


LIBRARY = """
print("hello from the library")
class exceptions: pass
class util:
    list_named_actors = staticmethod(lambda all_namespaces: print("listing") or [])
def init(**options):
    input("Which cluster? ") if options["address"] == "asks" else print("connecting", options)
def shutdown(): print("bye")
"""


async def test_what_the_library_prints_or_reads_is_no_part_of_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text(LIBRARY)
    paths = [str(tmp_path), *(path for path in sys.path if path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.syspath_prepend(str(tmp_path))
    join = JoinOrder("r-1", "http://manager:7070", "secret")
    provisioner = make_provisioner("ray", join, {})
    assert await provisioner.list() == []
    await provisioner.close()
    asks = make_provisioner("ray", join, {"address": "asks"})
    with pytest.raises(ProvisionError, match="no Ray cluster at 'asks': EOF"):
        await asks.list()
    await asks.close()


def library(init: Any) -> Any:
    actor = SimpleNamespace(ended=SimpleNamespace(remote=lambda: "answer"))
    remote = lambda kind: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: actor))  # noqa: E731
    died = type("RayActorError", (Exception,), {})
    errors = SimpleNamespace(
        GetTimeoutError=type("GetTimeoutError", (Exception,), {}),
        ActorUnavailableError=type("ActorUnavailableError", (died,), {}),
        RayActorError=died,
    )
    util = SimpleNamespace(list_named_actors=lambda all_namespaces: [])
    return SimpleNamespace(init=init, remote=remote, util=util, exceptions=errors, wait=lambda *_, **__: None)


BEGIN = Begin("auto", "penstock", "penstock-r-1-", {}, {}, 1.0)


def test_a_cluster_that_is_not_there_is_told_and_tried_again() -> None:
    outcomes = [ConnectionError("nobody listens"), None]

    def init(**_: Any) -> None:
        outcome = outcomes.pop(0)
        if outcome:
            raise outcome

    actors = Actors(library(init), BEGIN)
    assert actors.answer(Call(1, ListActors())) == Answer(1, "no Ray cluster at 'auto': nobody listens")
    assert actors.answer(Call(2, ListActors())) == Answer(2)
    assert actors.answer(Call(3, ListActors())) == Answer(3)
    assert outcomes == []


def test_a_cluster_that_does_not_answer_is_told_soon_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(ray_child, "CONNECT_S", 0.05)
    answered, attempts = threading.Event(), []

    def init(**_: Any) -> None:
        attempts.append(1)
        answered.wait()

    actors = Actors(library(init), BEGIN)
    for number in (1, 2):
        told = Answer(number, "no Ray cluster answers at 'auto' within 0.05 s")
        assert actors.answer(Call(number, ListActors())) == told
    answered.set()
    while actors.answer(Call(3, ListActors())).error:
        pass
    assert attempts == [1]


@pytest.mark.parametrize(
    ("error", "cause"),
    [("GetTimeoutError", ""), ("ActorUnavailableError", ""), ("RayActorError", "its actor died: its node has died")],
)
def test_one_that_has_lost_its_name_is_asked_all_the_same(error: str, cause: str) -> None:
    ray = library(lambda **_: None)

    def get(answer: Any, timeout: float) -> Any:
        raise getattr(ray.exceptions, error)("its node has died")

    ray.get = get
    actors = Actors(ray, BEGIN)
    actors.answer(Call(1, AddActors({"penstock-r-1-0a1b2c3d": ["join"]})))
    for number in (2, 3):
        (row,) = actors.answer(Call(number, ListActors())).rows
        assert (row.name, row.cause) == ("penstock-r-1-0a1b2c3d", cause)


# As Ray 2.60 tells them.
NO_PENSTOCK = (
    "The actor died because of an error raised in its creation task, \x1b[36mray::penstock-x-1:AgentHost.__init__()"
    "\x1b[39m (pid=17770, ip=192.0.2.2, actor_id=3a8f, repr=<penstock.cli.TemporaryActor object at 0x7fba89c210d0>)\n"
    "           ^^^^^^^^^^^^^^^^^^^^^^^^^^\nRuntimeError: The actor with name AgentHost failed to import on the "
    "worker. This may be because needed library dependencies are not installed in the worker environment:\n\n\x1b[36m"
    "ray::penstock-x-1:AgentHost.__init__()\x1b[39m (pid=17770)\n                  ^^^^^^^^^^^^^^^^^^^^^^\n"
    "ModuleNotFoundError: No module named 'penstock'"
)
KILLED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: AgentHost\n\tactor_id: 7a26\n\tname: p-2\n"
    "\tnamespace: penstock\nThe actor is dead because it was killed by `ray.kill`.\n"
    "The actor never ran - it was cancelled before it started running."
)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            NO_PENSTOCK,
            "its actor could not start: ModuleNotFoundError: No module named 'penstock'; penstock must be installed on "
            "Ray's nodes, for the Python that runs their workers",
        ),
        (
            NO_PENSTOCK.replace("ModuleNotFoundError: No module named 'penstock'", "OSError: [Errno 28] No space left"),
            "its actor could not start: OSError: [Errno 28] No space left",
        ),
        (
            KILLED,
            "its actor died: The actor died unexpectedly before finishing this task. The actor is dead because it was "
            "killed by `ray.kill`. The actor never ran - it was cancelled before it started running.",
        ),
        ("", "its actor died: "),
    ],
)
def test_why_an_actor_died_is_told_by_its_root(told: str, words: str) -> None:
    assert death_words(told) == words
