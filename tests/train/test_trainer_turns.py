"""The trainer's turns on its own devices: what it says when, and that it does not train without them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeRollout
from runs import MakeRun

from penstock.config.load import load_config
from penstock.errors import ConfigError, RolloutError
from penstock.wire import TrainerTurn

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def test_without_windows_the_manager_hears_of_no_turns(make_run: MakeRun) -> None:
    run = make_run(steps=1)
    run.trainer.run()
    assert run.rollout.turns == []
    assert "window_s" not in run.metrics[0]


def test_each_step_begins_wants_its_devices_and_gives_them_back(make_run: MakeRun) -> None:
    run = make_run(steps=2, evaluate=False, window="auto")
    run.trainer.run()
    for step in (0, 1):
        said = [state for batch, state in run.rollout.turns if batch == f"train-{step}"]
        assert said[:2] == ["begins", "wants"]
        assert said[-2:] == ["trained", "ended"]
        # It waits only between two turns of its own.
        between = said[2:-2]
        assert between == ["waits", "wants"] * (len(between) // 2)
    assert run.metrics[0]["window_s"] == 0.0


class Windowed(FakeRollout):
    """Grants the devices once the test says so."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.said: list[TrainerTurn] = []

    async def take_turn(self, turn: TrainerTurn) -> float:
        self.said.append(turn)
        if turn.state == "wants":
            await asyncio.sleep(0.3)
            return 0.2
        return 0.0


def test_the_time_in_which_its_engines_generated_is_not_time_that_the_trainer_waited(make_run: MakeRun) -> None:
    rollout = Windowed()
    run = make_run(rollout=rollout, steps=1, evaluate=False, streaming=False, window=2.5)
    run.trainer.run()
    metrics = run.metrics[0]
    assert metrics["window_s"] == pytest.approx(0.2)
    assert metrics["step_s"] - metrics["train_s"] - metrics["trainer_wait_s"] >= 0.19
    ended = rollout.said[-1]
    assert (ended.state, ended.window_s) == ("ended", 2.5)
    samples = [sample for sample in run.scorer.scored if sample.id.batch == "train-0"]
    assert ended.tokens == sum(len(sample.token_ids) + len(sample.prompt.token_ids) for sample in samples)
    assert ended.train_s > 0


def test_a_manager_that_is_lost_while_the_devices_are_waited_for_ends_the_run(make_run: MakeRun) -> None:
    class Lost(FakeRollout):
        async def take_turn(self, turn: TrainerTurn) -> float:
            if turn.state == "wants":
                raise RolloutError("the manager is lost")
            return 0.0

    run = make_run(rollout=Lost(), steps=1, evaluate=False, window="auto")
    with pytest.raises(RolloutError, match="the manager is lost"):
        run.trainer.run()


@pytest.mark.parametrize(("word", "window"), [("auto", "auto"), ("off", "off"), ("4.5", 4.5)])
def test_a_window_is_off_automatic_or_in_seconds(word: str, window: object) -> None:
    config = load_config([QUICKSTART], [f"--rollout.window={word}"])
    assert config.rollout.window == window


def test_a_window_that_is_none_is_refused() -> None:
    for word in ("-1", "sometimes"):
        with pytest.raises(ConfigError, match=r"rollout\.window"):
            load_config([QUICKSTART], [f"--rollout.window={word}"])
