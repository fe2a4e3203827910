"""A weight version on its way: what the trainer waits for, and what becomes of a publication that fails."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes import FakeRollout, FakeStore

from penstock.errors import DeadlineExceeded, WeightError
from penstock.observe import events
from penstock.train import publishing
from penstock.train.actor import NamedTensor
from penstock.train.edge import EdgeLoop
from penstock.train.publishing import Publishing
from penstock.weights import WeightStore


@dataclass
class Ports:
    edge: EdgeLoop
    rollout: FakeRollout = field(default_factory=FakeRollout)
    weights: Any = field(default_factory=FakeStore)
    weights_source: str = "store:1"
    events: list[Any] = field(default_factory=list)

    def emit(self, event: Any) -> None:
        self.events.append(event)


SHAPES = [("w", "BF16", (2,))]


def tensors() -> list[NamedTensor]:
    def write(into: memoryview) -> None:
        into[:] = b"abcd"

    return [(*SHAPES[0], write)]


def test_the_trainer_goes_on_while_checksums_are_made_and_samples_are_asked_for_only_then() -> None:
    with EdgeLoop() as edge:
        ports = Ports(edge)
        ports.weights.digests[1] = later = Future()
        going = Publishing(ports)  # type: ignore[arg-type]
        going.begin(1, tensors(), "{}", SHAPES)
        assert ports.weights.versions == {1: {"w": b"abcd"}}
        assert ports.rollout.published == []
        asked: list[int] = []

        def watch() -> None:
            asked.append(1)
            if not later.done():
                later.set_result("weights 1")

        going.settle(watch)
        assert asked
        assert ports.rollout.published == [1]
        (event,) = ports.events
        assert isinstance(event, events.WeightsPublished)
        assert (event.version, event.nbytes) == (1, 4)
        going.settle()
        assert len(ports.events) == 1


def test_a_version_whose_checksums_fail_is_an_error_and_never_announced() -> None:
    with EdgeLoop() as edge:
        ports = Ports(edge)
        ports.weights.digests[1] = later = Future()
        going = Publishing(ports)  # type: ignore[arg-type]
        going.begin(1, tensors(), "{}", SHAPES)
        later.set_exception(WeightError("no memory for version 1"))
        with pytest.raises(WeightError, match="no memory for version 1"):
            going.begin(2, tensors(), "{}", SHAPES)
        assert ports.rollout.published == []
        assert 2 not in ports.weights.versions


def test_checksums_that_never_end_are_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "PUBLISH_S", 0.3)
    with EdgeLoop() as edge:
        ports = Ports(edge)
        ports.weights.digests[7] = Future()
        going = Publishing(ports)  # type: ignore[arg-type]
        going.begin(7, tensors(), "{}", SHAPES)
        with pytest.raises(DeadlineExceeded, match="checksums and announcement of weight version 7"):
            going.settle()


def test_the_store_itself_says_when_a_version_is_ready_and_that_it_never_will_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with EdgeLoop() as edge:
        store = WeightStore("run", "127.0.0.1", 0, "token")
        store.start()
        ports = Ports(edge, weights=store)
        going = Publishing(ports)  # type: ignore[arg-type]
        going.begin(0, tensors(), "{}", SHAPES)
        going.settle()
        assert ports.rollout.published == [0]
        closed = threading.Event()
        monkeypatch.setattr(WeightStore, "_held_version", lambda *_: closed.wait(30))
        going.begin(1, tensors(), "{}", SHAPES)
        store.close()
        with pytest.raises(WeightError, match="closed before the version was ready"):
            going.settle()
        closed.set()
