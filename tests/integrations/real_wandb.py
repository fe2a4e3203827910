"""Weights & Biases' own package, offline: `make test-wandb`, in an environment with requirements-wandb.txt.

What it wrote is read back from its file, record by record, and not from what it was told.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2 as records

from penstock.observe import boards
from penstock.observe.boards import Wandb
from penstock.observe.events import Evaluated, EvaluatedSet
from penstock.observe.metrics import MetricsLog, read_metrics

BLOCK = 32768
HEADER = struct.Struct("<IHB")
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


PATIENCE_S = 120
"""Far more than the package's own process takes to write what it was told."""


@pytest.fixture(autouse=True)
def without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "FINISH_S", PATIENCE_S)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def chunks(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, behind seven bytes of the package's own."""
    at, held = 7, b""
    while at + HEADER.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        part = data[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
        held = part if kind in (WHOLE, FIRST) else held + part
        if kind in (WHOLE, LAST):
            yield held


def written(file: Path) -> list[records.Record]:
    """All records of a file, once the last one is there: the package's process writes it behind the run's end."""
    until = time.monotonic() + PATIENCE_S
    while True:
        found = [records.Record.FromString(chunk) for chunk in chunks(file.read_bytes())]
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        assert time.monotonic() < until, f"{file} has no end"
        time.sleep(0.1)


def rows(folder: Path) -> list[dict[str, float]]:
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in written(file):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                found.append({name: value for name, value in row.items() if not name.startswith("_")})
    return found


def test_what_a_run_measures_is_in_the_offline_file_under_the_same_names(tmp_path: Path) -> None:
    said: list[str] = []
    steps = [{"reward_mean": 0.5, "time/optimizer_s": 0.25, "critic/loss": 2.0, "reward/a part": k} for k in (1.0, 2.0)]
    easy = EvaluatedSet(accuracy=0.75, questions=2, asked=2, unscored=0, pass_at={4: 1.0})
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.add(Wandb(tmp_path, said.append, mode="offline", project="p", config={"seed": 1}))
        for step, metrics in enumerate(steps):
            log.write(step, metrics)
        log.take(Evaluated(ts=0, step=2, weight_version=2, accuracy=0.75, questions=2, wall_s=1, whole=easy))
    assert not said
    drawn = rows(tmp_path)
    assert drawn[:2] == [{"step": float(step), **metrics} for step, metrics in enumerate(steps)]
    assert drawn[2]["eval/pass@4"] == 1.0
    jsonl = [{key: value for key, value in row.items() if key != "ts"} for row in read_metrics(log.path)]
    assert jsonl == drawn[:2]


def test_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path) -> None:
    said: list[str] = []
    for step in (0, 1):
        board = Wandb(tmp_path, said.append, mode="offline", project="p")
        board.write(step, {"reward_mean": 0.5})
        board.close()
    assert not said
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{json.loads((tmp_path / 'wandb.json').read_text())['id']}.wandb"}
    assert [row["step"] for row in rows(tmp_path)] == [0.0, 1.0]
