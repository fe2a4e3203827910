from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from observe_scenes import START, run_events, run_view

from penstock.errors import MissingExtra
from penstock.observe import FleetSnapshot, RunView, events
from penstock.observe.terminal import LineView, LiveView, QuietView, open_view, step_line


class FakeTerminal(io.StringIO):
    def __init__(self, terminal: bool = True, encoding: str = "utf-8") -> None:
        super().__init__()
        self._terminal = terminal
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


class ClosedPipe(FakeTerminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_auto_is_live_on_a_terminal_and_lines_elsewhere() -> None:
    assert type(open_view("auto", RunView(), FakeTerminal())) is LiveView
    assert type(open_view("auto", RunView(), FakeTerminal(terminal=False))) is LineView
    assert type(open_view("auto", RunView(), FakeTerminal(encoding="ascii"))) is LineView
    assert type(open_view("lines", RunView(), FakeTerminal())) is LineView
    assert type(open_view("live", RunView(), FakeTerminal(terminal=False))) is LiveView
    assert type(open_view("none", RunView(), FakeTerminal())) is QuietView


def test_without_rich_auto_falls_back_and_live_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert type(open_view("auto", RunView(), FakeTerminal())) is LineView
    with pytest.raises(MissingExtra, match=r"the live view needs the package 'rich'.*penstock\[train\]"):
        open_view("live", RunView(), FakeTerminal())


def test_lines_are_one_a_step_and_one_a_notice_without_colour() -> None:
    out = FakeTerminal(terminal=False)
    with LineView(RunView(), out) as view:
        for event in run_events(steps=4, kill_at=2):
            view.apply(event)
    text = out.getvalue()
    assert "\x1b" not in text
    assert text.count("\nstep ") == 4
    assert "step 3/4  reward 0.550  held-out 0.420  trainer waits 25 %  3,000 tokens/s  version 2  2.00 s\n" in text
    assert "  engine-1 is gone: the connection broke off\n" in text
    assert text.splitlines()[0] == "run tiny-001: 4 steps"


def test_a_step_tells_its_own_rate_and_not_that_of_a_report_between_steps() -> None:
    view = RunView()
    view.apply_fleet(FleetSnapshot(ts=1.0))
    view.apply(events.StepFinished(ts=2.0, step=0, metrics={"rollout_tokens_per_s": 3000.0}))
    assert "3,000 tokens/s" in step_line(view)


def test_a_step_without_figures_still_has_its_line() -> None:
    view = RunView()
    view.apply(events.StepFinished(ts=1.0, step=0, metrics={}))
    assert step_line(view) == "step 1  0 tokens/s  version 0"


def test_what_the_encoding_can_not_say_is_replaced() -> None:
    out = FakeTerminal(terminal=False, encoding="ascii")
    with LineView(RunView(), out) as view:
        view.apply(events.Warned(ts=1.0, where="", message="größer …"))
    assert out.getvalue() == "  gr??er ?\n"


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    view = LineView(RunView(), ClosedPipe(terminal=False))
    for event in run_events():
        view.apply(event)
    assert view.state.step == 8


def test_the_quiet_view_keeps_the_state() -> None:
    with QuietView(RunView()) as view:
        for event in run_events():
            view.apply(event)
        view.apply_fleet(FleetSnapshot(ts=START, running=3))
    assert (view.state.step, view.state.fleet.running) == (8, 3)


def test_the_live_view_leaves_its_last_picture_and_a_cursor() -> None:
    out = FakeTerminal()
    with LiveView(run_view(), out) as view:
        view.apply(events.StepFinished(ts=START + 30, step=5, metrics={"reward_mean": 0.777}))
    text = out.getvalue()
    assert "0.777" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


def test_the_live_view_gives_the_terminal_back_after_an_exception() -> None:
    out = FakeTerminal()
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        with LiveView(run_view(), out):
            raise ZeroDivisionError
    text = out.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert threading.active_count() == threads


def test_the_live_view_takes_events_from_many_threads_while_it_draws() -> None:
    out = FakeTerminal()
    with LiveView(RunView(), out) as view:

        def feed(number: int) -> None:
            for step in range(200):
                view.apply(events.Warned(ts=float(step), where=str(number), message=str(step)))
                view.apply_fleet(FleetSnapshot(ts=float(step), running=step))

        threads = [threading.Thread(target=feed, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert view.state.fleet.running == 199


def test_ctrl_c_gives_the_terminal_back(tmp_path: Path) -> None:
    """In a real pseudo-terminal, with a real SIGINT."""
    script = textwrap.dedent("""
        import os, signal, sys, time
        from penstock.observe import RunView, events
        from penstock.observe.terminal import open_view
        with open_view("auto", RunView()) as view:
            view.apply(events.Warned(ts=1.0, where="", message="drawing"))
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
    """)
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", "COLUMNS": "80", "LINES": "24"}
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=follower, stderr=subprocess.DEVNULL, env=environment, cwd=tmp_path
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break  # How a pseudo-terminal says that its other end is closed.
        if not part:
            break
        seen += part
    os.close(leader)
    assert child.wait(timeout=30) != 0
    assert b"drawing" in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
