"""The live table: what fits a width, what is redrawn on a terminal, and that a pipe gets plain lines."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.pool_table import PoolTable, Screen
from penstock.reward.report import EndpointRow

LONG = "https://judge-with-a-very-long-name.provider.example/v1"


def row(**changes) -> EndpointRow:
    values = {"endpoint": LONG, "health": "closed", "in_flight": 7, "cap": 64, "sent": 100, "done": 90, "refused": 2}
    values |= {"broken": 1, "rate_limit": 10.0, "latency_s": 0.25, "slow_s": 0.5, "spent": 1.5}
    return EndpointRow(**{**values, **changes})


@pytest.mark.parametrize("width", [20, 50, 79, 119, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = PoolTable().lines([row(), row(endpoint="b", cap=None, latency_s=None)], 1234, width)
    assert all(len(line) <= width for line in lines)
    assert len(lines) == 4
    assert (LONG in lines[1]) == (width == 200)
    assert ("7/64" in lines[1]) == (width > 20), "in flight is among the last to go"
    assert lines[-1].startswith("1234 waiting"[:width])


def test_80_columns_have_room_for_what_is_wrong() -> None:
    head, first, *_ = PoolTable().lines([row(endpoint="judge", broken=17, refused=23)], 0, 79)
    assert "broken" in head
    assert first.split()[-1] == "17"
    assert "429s" in head
    assert "done" not in PoolTable().lines([row(in_flight=1000, cap=1024, sent=10**6, done=10**6)], 0, 60)[0]


def test_the_rate_is_what_was_sent_between_two_looks() -> None:
    now = [0.0]
    table = PoolTable(clock=lambda: now[0])
    table.lines([row(sent=100)], 0, 200)
    now[0] = 2.0
    assert "15.0/10.0" in table.lines([row(sent=130)], 0, 200)[1]
    now[0] = 2.1
    assert "15.0/10.0" in table.lines([row(sent=131)], 0, 200)[1], "two looks close together say nothing new"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_redrawn_and_a_pipe_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown: dict[type, str] = {}
    for stream in (Terminal(), io.StringIO()):
        screen = Screen(stream)
        screen.draw(["a", "b"])
        screen.draw(["c"])
        screen.say("said")
        screen.draw(["d"])
        shown[type(stream)] = stream.getvalue()
    assert shown[Terminal] == "a\nb\n\r\x1b[2A\x1b[Jc\n\r\x1b[1A\x1b[Jsaid\nd\n"
    assert shown[io.StringIO] == "a\nb\nc\nsaid\nd\n"


def test_a_picture_is_wiped_whole_where_the_terminal_has_become_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    screen = Screen(stream)
    screen.draw(["x" * 39, "short", ""])
    monkeypatch.setenv("COLUMNS", "13")
    screen.draw(["x"])
    assert stream.getvalue().endswith("\r\x1b[5A\x1b[Jx\n"), "39 characters have become three rows of 13"


def test_the_gateway_draws_on_a_terminal_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text('[[endpoints]]\nurl = "http://127.0.0.1:9"\nname = "judge"\n')
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "gateway", "pool.toml", "--port", "0", "--table-every", "0.05"],
        cwd=tmp_path,
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(its)
    try:
        seen = b""
        while seen.count(b"\x1b[3A\x1b[J") < 2:
            piece = os.read(ours, 4096)
            assert piece, seen
            seen += piece
        assert b"in flight" in seen
        assert b"judge" in seen
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
