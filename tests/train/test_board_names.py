"""What an engineer looks for has one name wherever it is drawn: JSONL, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeScorer
from runs import MakeRun

from penstock.cli.run_records import open_metrics
from penstock.observe.events import Evaluated
from penstock.sample import Sample, Score, Unscored
from penstock.train.tally import STAGES

LOOKED_FOR = {
    "MFU": {"mfu", "learned/flops"},
    "tokens/s": {"train_tokens_per_s", "rollout_tokens_per_s"},
    "time in each stage": {*(f"time/{stage}_s" for stage in STAGES), "time/other_s", "step_s", "trainer_wait_s"},
    "staleness": {"staleness"},
    "clip fractions": {"clip_fraction", "clip_fraction_low", "clip_fraction_high", "critic/clip_fraction"},
    "KL": {"kl", "kl_coef", "policy_kl"},
    "entropy": {"entropy"},
    "gradient norms": {"grad_norm", "critic/grad_norm"},
    "reward parts": {"reward_mean", "reward/style"},
    "response lengths": {"response_tokens_mean", "response_tokens_p50", "response_tokens_p95", "response_tokens_max"},
    "unscored and truncated shares": {"unscored_share", "truncated_share"},
    "evaluation": {"eval/accuracy", "eval/unscored", "eval/pass@1"},
}


class Package:
    """The part of wandb that is used, as far as it is seen from outside; `make test-wandb` has the package itself."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def Settings(self, **options: Any) -> Any:
        return SimpleNamespace(**options)

    def init(self, **options: Any) -> Package:
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, line: dict[str, float]) -> None:
        self.lines.append(line)

    def finish(self) -> None:
        pass


def judged(sample: Sample) -> Score | Unscored:
    if str(sample.id).endswith("/0.0"):
        return Unscored("away")
    return Score(sample.token_ids[-1] / 64, {"style": 1.0})


def test_all_boards_have_every_figure_under_the_same_name(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    package = Package()
    monkeypatch.setitem(sys.modules, "wandb", package)
    run = make_run(
        scorer=FakeScorer(judged),
        unscored="drop_sample",
        observe={"tensorboard": True, "wandb": "offline"},
        advantage="gae",
        kl_coef=0.1,
        entropy_coef=0.01,
        epochs=2,
        peak_tflops=0.001,
    )
    run.trainer.run()
    warned: list[Any] = []
    with open_metrics(run.trainer.config, tmp_path, warned.append) as log:
        for step, metrics in run.metrics.items():
            log.write(step, metrics)
        for event in run.of(Evaluated):
            log.take(event)
    assert not warned
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    drawn = {
        "TensorBoard": set(board.Tags()["scalars"]),
        "Weights & Biases": {name for line in package.lines for name in line} - {"step"},
    }
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    said = {name for line in lines for name in line} - {"step", "ts"}
    for what, names in LOOKED_FOR.items():
        for place, found in drawn.items():
            assert names <= found, f"{place} lacks {names - found} ({what})"
        if what != "evaluation":
            assert names <= said, f"metrics.jsonl lacks {names - said} ({what})"
    assert drawn["TensorBoard"] == drawn["Weights & Biases"]
    assert said == {name for name in drawn["TensorBoard"] if not name.startswith("eval/")}
    for row in lines:
        assert {point.step: point.value for point in board.Scalars("grad_norm")}[row["step"]] == pytest.approx(
            row["grad_norm"]
        )
