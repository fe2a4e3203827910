"""Passes that need no whole group are made while the trainer would wait for one, and change nothing that is learned."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeRollout, FakeScorer, make_finished
from rank_scenes import config_of, groups
from runs import MakeRun, Run, apart

from penstock.environments import Observation, Turn
from penstock.environments.outcome import outcome
from penstock.rollout.client import FinishedSample
from penstock.rollout.pack import Packer
from penstock.sample import Prompt, Sample, Score, Unscored
from penstock.train.actor import Actor
from penstock.train.intake import Intake
from penstock.train.learner import Learner
from penstock.train.ports import Listener
from penstock.train.tally import Tally
from penstock.wire import TrainerTurn

SLOWLY = {"evaluate": False, "steps": 2, "min_samples_per_micro_batch": 8}


class Interleaved(FakeRollout):
    """Samples of a step come one after another, the first ones of all prompts before the second ones: groups are whole
    at the end, and what comes of the last ones is looked at before the optimizers step first."""

    async def _answer(self, batch: str, samples: list[FinishedSample], listener: Listener) -> None:
        await super()._answer(batch, sorted(samples, key=lambda sample: sample.replica), listener)


def slow(kind: type[FakeRollout] = Interleaved) -> FakeRollout:
    return kind(gate=lambda batch, number: 0.02)


def learned(make_run: MakeRun, **options: Any) -> Run:
    run = make_run(**{"rollout": slow(), **SLOWLY, **options})
    run.trainer.run()
    return run


def without_first_ones(sample: Sample) -> Score | Unscored:
    """Of half the prompts; the others' scores differ from sample to sample."""
    if sample.id.replica == 0 and sample.prompt.index % 2:
        return Unscored("no verdict")
    return Score(float((sample.id.replica + sample.prompt.index) % 2))


PASSES:dict[str, dict[str, Any]] = {
    "critic": {"advantage": "gae", "critic": {"lr": 1e-3}},
    "critic that learns within the step": {"advantage": "gae", "critic": {"lr": 1e-2}, "mini_batches_per_step": 2},
    "reference in the loss": {"kl_coef": 0.1},
    "reference in the reward": {"kl_coef": 0.1, "kl_in": "reward", "old_logprobs": "recompute"},
    "the step's first weights": {"old_logprobs": "recompute", "mini_batches_per_step": 2, "lr": 1e-2},
    "epochs": {"old_logprobs": "recompute", "epochs": 2},
    "samples without a score": {"kl_coef": 0.1, "unscored": "drop_sample", "judge": without_first_ones},
    "groups that are dropped": {"kl_coef": 0.1, "unscored": "drop_group", "judge": without_first_ones},
    "all": {
        "advantage": "gae", "critic": {"lr": 1e-2}, "kl_coef": 0.1, "epochs": 2, "mini_batches_per_step": 2,
        "old_logprobs": "recompute",
    },
}  # fmt: skip


@pytest.mark.parametrize("train", PASSES.values(), ids=PASSES)
def test_what_is_learned_is_the_same(make_run: MakeRun, train: dict[str, Any]) -> None:
    options = {key: value for key, value in train.items() if key != "judge"}
    ahead, behind = (
        learned(make_run, look_ahead=look, scorer=FakeScorer(train.get("judge", FakeScorer().judge)), **options)
        for look in (True, False)
    )
    assert sum(step["ahead_tokens"] for step in ahead.metrics.values()) > 0
    assert sum(step["ahead_tokens"] for step in behind.metrics.values()) == 0
    assert apart(ahead, behind) < 2e-6
    for step in (0, 1):
        one, other = ahead.metrics[step], behind.metrics[step]
        for name in {"kl", "critic/value", "critic/loss", "policy_kl", "ratio"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


class Asks:
    """Asks every second sample back once."""

    async def reset(self, prompt: Prompt, seed: int) -> int:
        return seed % 2

    async def step(self, state: int, turn: Turn) -> Observation:
        if turn.number < state:
            return Observation([61, 62, 63])
        return Observation(done=True, reward=float(turn.token_ids[-1] % 2 == 0))

    async def close(self, state: int) -> None:
        pass


def test_what_an_environment_said_is_learned_from_as_little_as_ever(make_run: MakeRun) -> None:
    options = {**PASSES["critic"], "kl_coef": 0.1, "environment": Asks(), "sampling": {"max_new_tokens": 30}}
    ahead, behind = (
        learned(make_run, look_ahead=look, scorer=FakeScorer(outcome), **options) for look in (True, False)
    )
    assert sum(step["ahead_tokens"] for step in ahead.metrics.values()) > 0
    assert sum(step["environment_tokens"] for step in ahead.metrics.values()) > 0
    # Adam makes a thousandth of a step of what is rounded otherwise.
    assert apart(ahead, behind) < 1e-4


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


def test_groups_without_signal_cost_no_passes_because_others_were_looked_at(model_folder: Path) -> None:
    config = config_of(model_folder, old_logprobs="recompute", mini_batches_per_step=2)
    actor = Actor(model_folder, config.train, total_optimizer_steps=4, horizon_tokens=8)
    learner = Learner(config, actor)
    made = groups()
    same, other = made[3], made[4]
    for group, scores in ((same, (1.0, 1.0, 1.0, 1.0)), (other, (0.0, 1.0, 0.0, 1.0))):
        for sample, score in zip(group.samples, scores, strict=True):
            sample.score = Score(score)
    learner.begin_step(0)
    learner.learn(made[:3], Tally(0), {}, 0)
    assert learner.looks_ahead, "the step's first weights are no longer the model's"
    learner.look([same.samples[0], other.samples[0]])
    learner.learn([same, other], Tally(0), {}, 1)
    assert [sample.old_logprobs is not None for sample in same.samples] == [True, False, False, False]
    assert all(sample.old_logprobs is not None for sample in other.samples)


def test_long_answers_are_looked_at_as_many_at_a_time_as_short_ones() -> None:
    prompt = Prompt(0, "", [1], {}, "")

    class Silent:
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return ""

    scorer = FakeScorer(lambda sample: Score(1.0))
    intake = Intake("b", [prompt], Packer(1, 40, 1, 40), scorer, Silent(), stall_s=60.0)

    async def come() -> None:
        for replica in range(39):
            intake.on_samples([make_finished("b", 0, replica, 0)])
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)

    asyncio.run(come())
    looks = []
    while intake.ready(least_ahead=8):
        looks.append([sample.id.replica for sample in intake.take_ahead(8, most_tokens=1)])
    assert looks == [list(range(k, k + 8)) for k in range(0, 32, 8)], "as they came, and no more than that"
    assert len(intake.take_ahead(1, most_tokens=10**6)) == 7
