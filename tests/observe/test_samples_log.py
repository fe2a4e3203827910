from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DataError, StorageError
from penstock.observe import Event, SamplesLog, events, read_samples
from penstock.sample import Finish, Prompt, Sample, SampleId, Score, Unscored


def sample(score: Score | Unscored, batch: str = "train-3", **changes: Any) -> Sample:
    made = Sample(
        id=SampleId(batch, 7, 1),
        prompt=Prompt(7, "Say: sun", [1, 2, 3], {"answer": "nus"}, "words.jsonl:8"),
        token_ids=array("i", [5, 6, 2]),
        logprobs=array("f", [-1.0] * 3),
        version_spans=(),
        finish=Finish.STOP,
        response="nus",
        score=score,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_record_says_what_was_asked_said_and_earned(tmp_path: Path) -> None:
    with SamplesLog(tmp_path / "samples.jsonl") as log:
        log.write(3, [sample(Score(0.5, {"format": 1.0})), sample(Unscored("judge was away"), "eval-3")])
    scored, missing = (json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines())
    assert scored == {
        "step": 3,
        "batch": "train-3",
        "prompt": 7,
        "replica": 1,
        "source": "words.jsonl:8",
        "text": "Say: sun",
        "response": "nus",
        "finish": "stop",
        "tokens": 3,
        "score": 0.5,
        "parts": {"format": 1.0},
    }
    assert (missing["batch"], missing["unscored"]) == ("eval-3", "judge was away")
    assert "score" not in missing
    read = list(read_samples(tmp_path / "samples.jsonl"))
    assert [(record.score, record.unscored) for record in read] == [(0.5, ""), (None, "judge was away")]


def test_text_that_utf8_cannot_hold_is_recorded_all_the_same(tmp_path: Path) -> None:
    with SamplesLog(tmp_path / "samples.jsonl") as log:
        log.write(0, [sample(Unscored("half \ud83d"), response="a\ud800b\nc 日本")])
    (read,) = read_samples(tmp_path / "samples.jsonl")
    assert (read.response, read.unscored) == ("a?b\nc 日本", "half ?")


def test_a_full_disk_is_a_warning_and_is_counted() -> None:
    heard: list[Event] = []
    log = SamplesLog(Path("/dev/full"), emit=heard.append)
    log.write(0, [sample(Score(1.0))] * 3)
    assert log.dropped == 3
    (warning,) = heard
    assert isinstance(warning, events.Warned)
    assert warning.where == "samples"
    assert "No space left" in warning.message
    log.close()


def test_what_cannot_be_opened_or_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="can't be opened"):
        SamplesLog(tmp_path)
    (tmp_path / "samples.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(DataError, match=r"samples.jsonl:1: not a sample's record"):
        list(read_samples(tmp_path / "samples.jsonl"))
