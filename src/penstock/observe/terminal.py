"""What stands on the terminal while a run goes on: a picture that redraws itself, or a line a step.

The edge of the reducer (`state`) and the picture (`draw`): a thread, a lock and a stream. Decides when to draw and how
to leave the terminal as it was. A view never ends a run: where nobody reads any more, it falls silent.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol, Self, TextIO

from penstock.errors import MissingExtra
from penstock.observe.events import Event, RunStarted, StepFinished
from penstock.observe.state import FleetSnapshot, RunView

REDRAW_S = 0.25
"""Between two pictures: calm, and next to no work."""


class View(Protocol):
    """Takes what happens, from any thread; shows it while its `with` block lasts."""

    def apply(self, event: Event) -> None: ...

    def apply_fleet(self, fleet: FleetSnapshot) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def open_view(
    kind: Literal["auto", "live", "lines", "none"], state: RunView, stream: TextIO | None = None
) -> LiveView | LineView | QuietView:
    """The view that a configuration asks for. `auto`: live on a terminal that can show it, else lines.

    Raises MissingExtra where `live` is asked for by name and `rich` is not installed.
    """
    out = sys.stdout if stream is None else stream
    if kind == "none":
        return QuietView(state)
    if kind == "live" or (kind == "auto" and _can_redraw(out)):
        try:
            return LiveView(state, out)
        except MissingExtra:
            if kind == "live":
                raise
    return LineView(state, out)


class QuietView:
    """Shows nothing; keeps the state for the summary."""

    def __init__(self, state: RunView) -> None:
        self.state = state
        self._lock = threading.Lock()

    def apply(self, event: Event) -> None:
        with self._lock:
            self.state.apply(event)

    def apply_fleet(self, fleet: FleetSnapshot) -> None:
        with self._lock:
            self.state.apply_fleet(fleet)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class LineView(QuietView):
    """One line a step, one a notice, in plain ASCII but for names and causes."""

    def __init__(self, state: RunView, stream: TextIO) -> None:
        super().__init__(state)
        self._stream = stream
        self._reader_left = False

    def apply(self, event: Event) -> None:
        with self._lock:
            notice = self.state.apply(event)
            if isinstance(event, RunStarted):
                self._print(f"run {event.run}: {self.state.steps} steps")
            elif isinstance(event, StepFinished):
                self._print(step_line(self.state))
            if notice is not None:
                self._print(f"  {notice}")

    def _print(self, line: str) -> None:
        if self._reader_left:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            print(line.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except BrokenPipeError:
            # `penstock train ... | head`: nobody reads, and the run is worth more than its lines.
            self._reader_left = True


class LiveView(QuietView):
    """Redraws one picture in place, at most four times a second, from a thread of its own.

    Leaves the last picture standing and the terminal as it was, also after an exception or Ctrl-C. Text that others
    print meanwhile appears above the picture. Raises MissingExtra where `rich` is not installed.
    """

    def __init__(self, state: RunView, stream: TextIO) -> None:
        super().__init__(state)
        try:
            from rich.console import Console
            from rich.live import Live

            from penstock.observe.draw import draw
        except ImportError as error:
            raise MissingExtra("rich", "train", "the live view") from error
        self._draw: Callable[[RunView, int, int], Any] = draw
        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._redraw_often, name="live-view", daemon=True)

    def __enter__(self) -> Self:
        self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        try:
            self._redraw()
        finally:
            self._live.stop()

    def _redraw_often(self) -> None:
        while not self._stop.wait(REDRAW_S):
            try:
                self._redraw()
            except OSError:
                # The terminal is gone (closed window, lost connection); the run goes on without it.
                return

    def _redraw(self) -> None:
        width, height = self._console.size
        with self._lock:
            picture = self._draw(self.state, width, height - 1)
        self._live.update(picture, refresh=True)


def step_line(state: RunView) -> str:
    """`step 12/160  reward 0.512  held-out 0.430  trainer waits 12 %  3,210 tokens/s  version 12  1.10 s`."""
    parts = [f"step {state.step}/{state.steps}" if state.steps else f"step {state.step}"]
    if state.rewards:
        parts.append(f"reward {state.rewards[-1][1]:.3f}")
    if state.accuracies:
        parts.append(f"held-out {state.accuracies[-1][1]:.3f}")
    step_s, wait_s = state.step_metrics.get("step_s"), state.step_metrics.get("trainer_wait_s")
    if step_s and wait_s is not None:
        parts.append(f"trainer waits {100 * wait_s / step_s:.0f} %")
    rate = state.step_tokens_per_s
    parts += [f"{state.tokens_per_s if rate is None else rate:,.0f} tokens/s", f"version {state.weight_version}"]
    if step_s is not None:
        parts.append(f"{step_s:.2f} s")
    return "  ".join(parts)


def _can_redraw(stream: TextIO) -> bool:
    return stream.isatty() and (stream.encoding or "").lower().replace("-", "") == "utf8"
