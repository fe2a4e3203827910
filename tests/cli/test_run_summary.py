"""The end of a run: figures and last words come whatever becomes of the picture, and interrupts wait for them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.interrupts import interruptible
from penstock.cli.run_local import _Run
from penstock.config import load_config
from penstock.observe import plots

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def ended(folder: Path, monkeypatch: pytest.MonkeyPatch, draw: Any, hold_s: float = 30.0) -> None:
    """A run that is done as soon as it begins."""
    monkeypatch.setattr(plots, "draw_curves", draw)
    monkeypatch.setattr(_Run, "_train", lambda *_: None)
    config = load_config([QUICKSTART], ["--observe.view=lines"])
    with interruptible(hold_s) as interrupt:
        _Run(config, folder, None, SimpleNamespace(size=1), interrupt).carry_out()  # type: ignore[arg-type]


def warnings(folder: Path) -> list[str]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [row["message"] for row in rows if row["event"] == "warning"]


def test_an_interrupt_while_the_curves_are_drawn_waits_for_the_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = []

    def draw(*_: object, **__: object) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        drawn.append("to the end")

    with pytest.raises(KeyboardInterrupt):
        ended(tmp_path, monkeypatch, draw)
    assert drawn
    assert "done" in capsys.readouterr().out
    assert warnings(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KeyError("Text:kwdoc"), "there is no picture of the curves: KeyError: 'Text:kwdoc'"),
        (KeyboardInterrupt(), "there is no picture of the curves: KeyboardInterrupt"),
    ],
)
def test_a_picture_that_fails_in_whatever_way_is_told_and_costs_nothing_else(
    error: BaseException,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def draw(*_: object, **__: object) -> None:
        raise error

    with contextlib.suppress(KeyboardInterrupt):
        ended(tmp_path, monkeypatch, draw)
    assert warnings(tmp_path) == [says]
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "done"
    assert "done" in capsys.readouterr().out
