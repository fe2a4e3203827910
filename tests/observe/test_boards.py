"""Boards draw what a run measures, and never stop it. `make test-wandb` has Weights & Biases' own package."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ConfigError, MissingExtra, StorageError
from penstock.observe import boards, events
from penstock.observe.boards import Wandb
from penstock.observe.events import EvaluatedSet
from penstock.observe.metrics import MetricsLog

PATIENCE_S = 10


class Package:
    """The part of wandb that is used, as far as it is seen from outside."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []
        self.lines: list[dict[str, float]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.finished = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.trouble: Exception | None = None
        self.threads: set[str] = set()

    def Settings(self, **options: Any) -> Any:
        return SimpleNamespace(**options)

    def init(self, **options: Any) -> Package:
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(PATIENCE_S)
        if self.trouble is not None:
            raise self.trouble
        self.options.append(options)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, line: dict[str, float]) -> None:
        self.lines.append(line)

    def finish(self) -> None:
        self.finished.set()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    package = Package()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def open_board(folder: Path, said: list[str], mode: str = "offline", **environment: str) -> Wandb:
    return Wandb(folder, said.append, mode=mode, project="p", config={"seed": 1}, environment=environment)


def test_a_resumed_run_goes_on_in_the_same_one_and_says_steps_again(tmp_path: Path, package: Package) -> None:
    said: list[str] = []
    for steps in ((0, 1), (1, 2)):
        board = open_board(tmp_path, said)
        for step in steps:
            board.write(step, {"reward_mean": 0.5, "loss": float("nan")})
        board.close()
    assert [line["step"] for line in package.lines] == [0, 1, 1, 2]
    assert all(line.keys() == {"step", "reward_mean"} for line in package.lines)
    first, second = package.options
    assert first["id"] == second["id"] == json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert (first["mode"], first["project"], first["resume"], first["dir"]) == ("offline", "p", "allow", str(tmp_path))
    assert first["config"] == {"seed": 1}
    assert ("*", "step") in package.metrics
    assert package.finished.is_set()
    assert package.threads == {"wandb"}
    assert not said


def test_the_key_comes_from_the_environment_and_is_written_nowhere(tmp_path: Path, package: Package) -> None:
    with pytest.raises(ConfigError, match='"online" needs a key in WANDB_API_KEY'):
        open_board(tmp_path, [], "online")
    open_board(tmp_path, [], "online", WANDB_API_KEY="secret-key").close()
    assert "secret-key" not in str(package.options)
    assert not any("secret-key" in file.read_text() for file in tmp_path.iterdir())


def test_a_service_that_fails_is_a_warning_and_the_run_goes_on(tmp_path: Path, package: Package) -> None:
    package.trouble = ConnectionError("no route to host")
    said: list[str] = []
    board = open_board(tmp_path, said)
    board.close()
    board.write(0, {"reward_mean": 1.0})
    assert said == ["Weights & Biases is switched off: ConnectionError: no route to host"]


def test_a_service_that_hangs_holds_neither_the_run_nor_its_end(
    tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boards, "FINISH_S", 0.01)
    package.go.clear()
    said: list[str] = []
    board = open_board(tmp_path, said)
    board.write(0, {"reward_mean": 1.0})
    board.close()
    assert said == ["Weights & Biases is switched off: not everything was sent within 0.01 s"]
    package.go.set()


def test_a_board_that_takes_nothing_fills_no_memory(
    tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boards, "WAITING", 2)
    monkeypatch.setattr(boards, "FINISH_S", 0.01)
    package.go.clear()
    said: list[str] = []
    board = open_board(tmp_path, said)
    for step in range(5):
        board.write(step, {"reward_mean": 1.0})
    assert said == ["Weights & Biases is switched off: 2 lines wait for it"]
    board.close()
    package.go.set()


def test_without_the_package_its_extra_is_named_and_a_broken_id_is_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"penstock\[wandb\]"):
        open_board(tmp_path, [])
    monkeypatch.setitem(sys.modules, "wandb", Package())
    (tmp_path / "wandb.json").write_text("{")
    with pytest.raises(StorageError, match=r"wandb\.json can't be read"):
        open_board(tmp_path, [])


def test_boards_are_told_of_steps_and_of_evaluations(tmp_path: Path) -> None:
    class Memory:
        def __init__(self) -> None:
            self.told: list[tuple[int, dict[str, float]]] = []
            self.closed = False

        def write(self, step: int, values: Any) -> None:
            self.told.append((step, dict(values)))

        def close(self) -> None:
            self.closed = True

    memory = Memory()
    easy = EvaluatedSet(accuracy=0.75, questions=2, asked=2, unscored=0, pass_at={1: 0.75, 4: 1.0})
    whole = EvaluatedSet(accuracy=0.5, questions=3, asked=4, unscored=5, pass_at={4: 0.6})
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.add(memory)
        log.write(3, {"reward_mean": 0.5})
        log.take(events.Noted(ts=0, message="nothing to draw"))
        log.take(
            events.Evaluated(
                ts=0, step=4, weight_version=4, accuracy=0.5, questions=3, wall_s=1, whole=whole, sets={"easy": easy}
            )
        )
    assert memory.closed
    assert memory.told[0] == (3, {"reward_mean": 0.5})
    assert memory.told[1] == (
        4,
        {
            "eval/accuracy": 0.5,
            "eval/questions": 3.0,
            "eval/unscored": 5.0,
            "eval/pass@4": 0.6,
            "eval/easy/accuracy": 0.75,
            "eval/easy/unscored": 0.0,
            "eval/easy/pass@1": 0.75,
            "eval/easy/pass@4": 1.0,
        },
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
