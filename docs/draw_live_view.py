"""Draws docs/live-view.svg: the live view of a real quickstart, some seconds after the killed engine was replaced.

    python docs/draw_live_view.py [more words for `penstock train`]

Runs `penstock train configs/quickstart.toml` from its start to its end; the picture is taken on the way.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from penstock.cli import main, run_local
from penstock.observe import FleetSnapshot, RunView, events
from penstock.observe.draw import render_svg
from penstock.observe.terminal import LineView

HERE = Path(__file__).parent
AFTER_S = 4.0
"""From the replacement's start: it has joined and works."""


class Photographer(LineView):
    """Shows lines, and takes one picture on the way."""

    _replaced_ts = 0.0
    _taken = False

    def apply(self, event: events.Event) -> None:
        super().apply(event)
        if isinstance(event, events.EngineStarted) and self.state.step > 0:
            self._replaced_ts = event.ts

    def apply_fleet(self, fleet: FleetSnapshot) -> None:
        super().apply_fleet(fleet)
        working = all(row.running for row in fleet.instances if row.state != "gone")
        if self._replaced_ts and working and not self._taken and fleet.ts > self._replaced_ts + AFTER_S:
            self._taken = True
            (HERE / "live-view.svg").write_text(render_svg(self.state, width=104, height=36))


def open_view(kind: str, state: RunView, *_: Any) -> Photographer:
    return Photographer(state, sys.stdout)


if __name__ == "__main__":
    run_local.open_view = open_view  # type: ignore[assignment]
    sys.exit(main(["train", str(HERE.parent / "configs" / "quickstart.toml"), *sys.argv[1:]]))
