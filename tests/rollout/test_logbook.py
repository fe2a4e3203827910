from __future__ import annotations

import logging

import pytest

from penstock.observe import events
from penstock.rollout.logbook import Logbook


def changed(before: str, after: str, cause: str = "") -> events.InstanceChanged:
    return events.InstanceChanged(ts=1, instance="i-1", name="engine-0", before=before, after=after, cause=cause)


def test_the_log_has_what_a_person_wants_and_not_each_step(caplog: pytest.LogCaptureFixture) -> None:
    book = Logbook()
    with caplog.at_level(logging.INFO, "penstock.manager"):
        for step in range(100):
            book.take(changed("loading", "ready"))
            book.take(events.BatchSubmitted(ts=1, batch=f"train-{step}", version=step, samples=8))
            book.take(events.WeightsLoaded(ts=1, instance="i-1", version=step, nbytes=1, wall_s=0.1))
            book.take(events.BatchEnded(ts=1, batch=f"train-{step}", samples=8, failed=0, tokens=9))
            book.take(changed("ready", "loading"))
        book.take(changed("ready", "gone", "3 heartbeats missed"))
        book.take(events.FrameRefused(ts=1, peer="i-2", cause="not msgpack"))
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "engine-0 joined"),
        ("WARNING", "engine-0 is gone: 3 heartbeats missed"),
        ("WARNING", "a frame of i-2 was refused: not msgpack"),
    ]


def test_repeats_and_knocking_peers_fill_no_disk(caplog: pytest.LogCaptureFixture) -> None:
    book = Logbook()
    with caplog.at_level(logging.INFO, "penstock.manager"):
        for number in range(1000):
            book.take(events.SampleFailed(ts=1, sample=str(number), cause="too long"))
        knock = events.ConnectionRefused(ts=1, peer="10.0.0.9", door="agent", cause="the token is wrong", times=512)
        book.take(knock)
    assert len(caplog.records) == 11
    assert caplog.records[-1].message == "a connection from 10.0.0.9 was refused: the token is wrong (512 so far)"
