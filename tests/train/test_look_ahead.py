"""Passes that need no whole group are made while the trainer would wait for one, and change nothing that is learned."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FakeRollout
from runs import MakeRun, Run, apart

from penstock.sample import Sample
from penstock.train.learner import Learner
from penstock.wire import TrainerTurn

SLOWLY = {"evaluate": False, "steps": 2, "min_samples_per_micro_batch": 8}
PASSES: dict[str, dict[str, Any]] = {
    "critic": {"advantage": "gae", "critic": {"lr": 1e-3}},
    "critic that learns within the step": {"advantage": "gae", "critic": {"lr": 1e-2}, "mini_batches_per_step": 2},
    "reference in the loss": {"kl_coef": 0.1},
    "reference in the reward": {"kl_coef": 0.1, "kl_in": "reward", "old_logprobs": "recompute"},
    "the step's first weights": {"old_logprobs": "recompute", "mini_batches_per_step": 2, "lr": 1e-2},
    "epochs": {"old_logprobs": "recompute", "epochs": 2},
    "all": {
        "advantage": "gae", "critic": {"lr": 1e-2}, "kl_coef": 0.1, "epochs": 2, "mini_batches_per_step": 2,
        "old_logprobs": "recompute",
    },
}  # fmt: skip


def slow(first: int = 0) -> FakeRollout:
    """Samples of a step come one after another."""
    return FakeRollout(gate=lambda batch, number: 0.02 if number >= first else 0.0)


def learned(make_run: MakeRun, **options: Any) -> Run:
    run = make_run(**{"rollout": slow(), **SLOWLY, **options})
    run.trainer.run()
    return run


@pytest.mark.parametrize("train", PASSES.values(), ids=PASSES)
def test_what_is_learned_is_the_same(make_run: MakeRun, train: dict[str, Any]) -> None:
    ahead, behind = (learned(make_run, look_ahead=look, **train) for look in (True, False))
    assert sum(step["ahead_tokens"] for step in ahead.metrics.values()) > 0
    assert sum(step["ahead_tokens"] for step in behind.metrics.values()) == 0
    assert apart(ahead, behind) < 2e-6
    for step in (0, 1):
        one, other = ahead.metrics[step], behind.metrics[step]
        for name in {"kl", "critic/value", "critic/loss", "policy_kl", "ratio"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


def test_each_sample_is_looked_at_once_and_time_ahead_is_time_trained(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Sample] = []
    look = Learner.look

    def noted(self: Learner, samples: list[Sample], *rest: Any) -> None:
        assert len(samples) >= 2, "a quarter of a micro-batch's eight"
        looked.extend(samples)
        look(self, samples, *rest)

    monkeypatch.setattr(Learner, "look", noted)
    run = learned(make_run, kl_coef=0.1)
    assert len({str(sample.id) for sample in looked}) == len(looked) > 0
    for metrics in run.metrics.values():
        assert 0 < metrics["ahead_s"] < metrics["train_s"]
        assert metrics["time/look_ahead_s"] > 0
    tokens = sum(len(sample.prompt.token_ids) + len(sample.token_ids) for sample in looked)
    assert sum(metrics["ahead_tokens"] for metrics in run.metrics.values()) == tokens


@pytest.mark.parametrize(
    "train", [{}, {"mini_batches_per_step": 2}, {"epochs": 2}, {"kl_coef": 0.1, "streaming": False}]
)
def test_a_run_without_such_passes_or_streaming_looks_at_nothing(make_run: MakeRun, train: dict[str, Any]) -> None:
    run = learned(make_run, **train)
    assert all(metrics["ahead_tokens"] == 0 for metrics in run.metrics.values())


class Windowed(FakeRollout):
    """Notes what the trainer says, and what had been looked at by then."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.said: list[TrainerTurn] = []
        self.events: list[str] = []

    async def take_turn(self, turn: TrainerTurn) -> float:
        self.said.append(turn)
        self.events.append(turn.state)
        return 0.0


def test_nothing_is_looked_at_before_the_devices_are_the_trainers(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = Windowed(gate=lambda batch, number: 0.02)
    look = Learner.look

    def noted(self: Learner, samples: list[Sample], *rest: Any) -> None:
        rollout.events.append("looks")
        look(self, samples, *rest)

    monkeypatch.setattr(Learner, "look", noted)
    learned(make_run, rollout=rollout, kl_coef=0.1, window="auto", steps=1)
    events = rollout.events
    assert "looks" in events
    for k, event in enumerate(events):
        if event == "looks":
            turn = [word for word in events[:k] if word != "looks"][-1]
            assert turn == "wants", events
    ended = rollout.said[-1]
    assert ended.state == "ended"
    assert ended.ahead_token_s > 0
