"""A rank that is lost is told of in words: who, how, where its output is, and how to go on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from penstock.cli.run_ranks import Peer, RankWatch, exit_code
from penstock.errors import RankLost

RESUME = "torchrun --nproc-per-node 3 -m penstock train my.toml --resume=latest"
BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:736")
Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """A process that stands for a rank: it does what it is told on, once it has a line."""
    started: list[subprocess.Popen[bytes]] = []

    def begun(code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", f"input(); {code}"], stdin=subprocess.PIPE)
        started.append(process)
        return process

    yield begun
    for process in started:
        process.kill()
        process.wait()


def peers(*processes: subprocess.Popen[bytes], host: str = "a", output: str = "") -> list[Peer]:
    return [Peer(rank, host, process.pid, output) for rank, process in enumerate(processes, start=1)]


def end(watch: RankWatch, process: subprocess.Popen[bytes]) -> None:
    """Has it end, and waits until the watch knows."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert watch._news.wait(60)


OWN = Peer(0, "a", 1, "")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL, as the kernel does where"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV; what it said"),
        ("raise SystemExit(3)", "ended with exit code 3; what it said is in /logs/1"),
    ],
)
def test_it_is_said_who_it_was_how_it_ended_and_how_to_go_on(start: Start, code: str, says: str) -> None:
    process, other = start(code), start("pass")
    with closing(RankWatch(OWN, [OWN, *peers(process, other, output="/logs/1")])) as watch:
        end(watch, process)
        lost = watch.explained(BROKEN, RESUME)
    assert isinstance(lost, RankLost)
    assert f"rank 1 (process {process.pid} on a) {says}" in str(lost)
    assert str(lost).endswith(f"from its last checkpoint it does with: {RESUME}")


def test_where_another_has_asked_for_the_exit_before_its_words_are_referred_to(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, other = start("raise SystemExit(3)"), start("pass")

    def asked_before(pid: int) -> int | None:
        process.wait()
        return exit_code(pid)

    monkeypatch.setattr("penstock.cli.run_ranks.exit_code", asked_before)
    with closing(RankWatch(OWN, [OWN, *peers(process, other)])) as watch:
        end(watch, process)
        lost = watch.explained(BROKEN, RESUME)
    assert f"rank 1 (process {process.pid} on a) is gone; torchrun's own lines below say how it ended" in str(lost)


def test_of_those_that_are_left_on_a_machine_the_first_speaks(start: Start) -> None:
    leader, second = start("raise SystemExit(1)"), start("pass")
    told = [Peer(0, "a", leader.pid, ""), Peer(1, "a", second.pid, ""), Peer(2, "a", 1, "")]
    with closing(RankWatch(told[2], told)) as watch:
        end(watch, leader)
        quiet = watch.explained(BROKEN, RESUME)
        assert isinstance(quiet, SystemExit)
        assert quiet.code == 1
        watch._news.clear()
        second.kill()
        assert watch._news.wait(60)
        assert isinstance(watch.explained(BROKEN, RESUME), RankLost)


def test_an_interrupt_comes_of_a_lost_rank_where_that_ended_before(start: Start) -> None:
    """torchrun sends SIGTERM to those that are left; Ctrl-C reaches all, and is none of them."""
    process = start("raise SystemExit(1)")
    with closing(RankWatch(OWN, [OWN, *peers(process)])) as watch:
        before = time.monotonic()
        end(watch, process)
        assert isinstance(watch.explained(KeyboardInterrupt(), RESUME, time.monotonic()), RankLost)
        assert watch.explained(KeyboardInterrupt(), RESUME, before) is None


@pytest.mark.parametrize("code", ["pass", f"raise SystemExit({128 + signal.SIGINT})"])
def test_a_rank_that_is_done_or_interrupted_is_not_lost(start: Start, code: str) -> None:
    process = start(code)
    with closing(RankWatch(OWN, [OWN, *peers(process)])) as watch:
        end(watch, process)
        assert watch.explained(KeyboardInterrupt(), RESUME, time.monotonic()) is None


def test_what_is_of_this_ranks_own_doing_stays_as_it_is(start: Start) -> None:
    process = start("raise SystemExit(1)")
    with closing(RankWatch(OWN, [OWN, *peers(process)])) as watch:
        end(watch, process)
        assert watch.explained(RuntimeError("shapes differ"), RESUME) is None
        assert watch.explained(ValueError("connection reset"), RESUME) is None
    with closing(RankWatch(OWN, [OWN])) as alone:
        assert alone.explained(BROKEN, RESUME) is None


def test_a_rank_of_another_machine_is_known_by_its_connections_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.run_ranks.NOTICE_S", 0.0)
    with closing(RankWatch(OWN, [OWN, Peer(1, "b", 1, "")])) as watch:
        lost = watch.explained(BROKEN, RESUME)
    assert isinstance(lost, RankLost)
    assert "another rank is gone ([gloo/transport/tcp/pair.cc:537] Connection closed by peer" in str(lost)
