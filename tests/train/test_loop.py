from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeRollout, FakeScorer
from runs import MakeRun, Run, apart, weights

from penstock.errors import DeadlineExceeded, RewardError, RolloutError, StorageError
from penstock.observe import events
from penstock.rollout.client import FinishedSample
from penstock.sample import Finish, Sample, Score, Unscored, VersionSpan
from penstock.train.checkpoint import Checkpoints, Saved
from penstock.train.mini_batch import OptimizerStep
from penstock.train.tally import MAX_PARTS


def test_a_run_trains_publishes_evaluates_and_saves(make_run: MakeRun) -> None:
    run = make_run(eval_every=1)
    run.trainer.run()
    assert run.rollout.published == [0, 1, 2]
    assert {batch: version for batch, (version, _, _) in run.rollout.batches.items()} == {
        "train-0": 0,
        "eval-0": 0,
        "train-1": 1,
        "eval-1": 1,
        "eval-2": 2,
    }
    assert sorted(run.rollout.released) == sorted(run.rollout.batches)
    assert [step for step, *_ in run.rollout.steps_reported] == list(range(len(run.rollout.steps_reported)))
    assert all(step_s >= train_s > 0 for _, step_s, train_s, _ in run.rollout.steps_reported)
    assert [(event.step, event.weight_version) for event in run.of(events.Evaluated)] == [(0, 0), (1, 1), (2, 2)]
    assert [event.step for event in run.of(events.StepFinished)] == [0, 1] == sorted(run.metrics)
    assert [event.step for event in run.of(events.CheckpointSaved)] == [2]
    assert run.store.versions[0] != run.store.versions[1] != run.store.versions[2]
    assert [event.version for event in run.of(events.WeightsPublished)] == [0, 1, 2]


def test_samples_reach_the_scorer_whole(make_run: MakeRun) -> None:
    run = make_run(steps=1, evaluate=False)
    run.trainer.run()
    assert len(run.scorer.scored) == 16
    assert len({sample.id for sample in run.scorer.scored}) == 16
    for sample in run.scorer.scored:
        assert sample.prompt.row["answer"] == sample.prompt.text
        # Token 5 is "a"; the response is text without special tokens.
        assert sample.response == "".join(run.trainer.ports.decoder.decode([k]) for k in sample.token_ids)


def test_training_samples_and_evaluation_is_greedy(make_run: MakeRun) -> None:
    run = make_run(steps=1, sampling={"temperature": 0.7})
    run.trainer.run()
    training, evaluation = run.rollout.batches["train-0"][1], run.rollout.batches["eval-0"][1]
    assert (training.temperature, evaluation.temperature) == (0.7, 0.0)
    assert training.max_new_tokens == evaluation.max_new_tokens == 8
    assert training.stop_ids == evaluation.stop_ids == (2, 9)


def test_the_actor_learns_at_the_temperature_that_samples_are_drawn_at(make_run: MakeRun) -> None:
    gaps = {}
    for temperature in (1.0, 0.25):
        run = make_run(steps=1, evaluate=False, sampling={"temperature": temperature})
        run.trainer.run()
        gaps[temperature] = run.metrics[0]["entropy"]
        assert not run.of(events.Warned)
    assert gaps[0.25] < gaps[1.0] - 0.1


def test_truncated_sampling_is_warned_of_once(make_run: MakeRun) -> None:
    run = make_run(evaluate=False, sampling={"top_p": 0.9, "top_k": 20})
    run.trainer.run()
    assert [event.where for event in run.of(events.Warned)] == ["sampling"]
    assert "rollout.sampling.top_p and rollout.sampling.top_k cut" in run.of(events.Warned)[0].message


def test_accuracy_is_the_share_of_full_scores(make_run: MakeRun) -> None:
    values = {0: 1.0, 1: 0.99, 2: 2.0}
    judge = FakeScorer(judge=lambda sample: Score(values.get(sample.id.prompt, 0.0)))
    run = make_run(scorer=judge, steps=1)
    run.trainer.run()
    assert [event.accuracy for event in run.of(events.Evaluated)] == [0.25, 0.25]
    assert [event.questions for event in run.of(events.Evaluated)] == [8, 8]


def test_metrics_say_what_the_step_was_like(make_run: MakeRun) -> None:
    def truncate(batch: str, sample: FinishedSample) -> FinishedSample:
        return dataclasses.replace(sample, finish=Finish.LENGTH) if sample.replica == 0 else sample

    run = make_run(rollout=FakeRollout(alter=truncate), steps=1, kl_coef=0.1, entropy_coef=0.01)
    run.trainer.run()
    metrics = run.metrics[0]
    scored = [sample for sample in run.scorer.scored if sample.id.batch == "train-0"]
    rewards = [sample.score.value for sample in scored]  # type: ignore[union-attr]
    assert metrics["reward_mean"] == pytest.approx(sum(rewards) / 16)
    assert metrics["train_accuracy"] == metrics["reward_mean"]
    assert metrics["reward_std"] == pytest.approx(torch.tensor(rewards).std(correction=0).item())
    assert metrics["truncated_share"] == 0.25
    assert metrics["response_tokens"] == sum(len(sample.token_ids) for sample in scored)
    assert metrics["response_tokens_mean"] == metrics["response_tokens"] / 16
    assert (metrics["samples"], metrics["unscored"], metrics["failed"]) == (16, 0, 0)
    assert (metrics["lr"], metrics["optimizer_steps"], metrics["staleness"]) == (1e-3, 1, 0)
    assert 0 <= metrics["trainer_wait_s"] <= metrics["step_s"]
    # What `penstock simulate fit` takes for the time that a reward takes.
    assert 0 < metrics["reward_s_mean"] < metrics["step_s"]
    for name in ("kl", "entropy", "clip_fraction", "grad_norm", "rollout_tokens_per_s", "rollout_logprob_gap"):
        assert metrics[name] >= 0, name


def test_parts_of_rewards_are_told_as_means_over_the_samples_that_have_them(make_run: MakeRun) -> None:
    def judge(sample: Sample) -> Score | Unscored:
        if sample.id.replica == 3:
            return Unscored("away")
        # Evaluation's parts are not training's.
        away = 100.0 if sample.id.batch.startswith("eval") else 0.0
        parts = {"length": away + sample.id.replica, **({"format": away + 1.0} if sample.id.replica == 1 else {})}
        return Score(float(sample.id.replica % 2), parts)

    run = make_run(scorer=FakeScorer(judge), steps=1, unscored="drop_sample")
    run.trainer.run()
    assert {name: value for name, value in run.metrics[0].items() if name.startswith("reward/")} == {
        "reward/format": 1.0,
        "reward/length": pytest.approx((0 + 1 + 2) / 3),
    }


def test_a_reward_that_makes_up_part_names_without_end_does_not_fill_the_records(make_run: MakeRun) -> None:
    def judge(sample: Sample) -> Score:
        return Score(1.0, {f"{sample.id}.{k}": 1.0 for k in range(10)})

    run = make_run(scorer=FakeScorer(judge), steps=1, evaluate=False)
    run.trainer.run()
    assert sum(name.startswith("reward/") for name in run.metrics[0]) == MAX_PARTS
    assert run.metrics[0]["reward_parts_left_out"] == 160 - MAX_PARTS


def test_a_few_samples_are_recorded_every_few_steps_and_of_each_evaluation(make_run: MakeRun) -> None:
    def fail(batch: str, sample: FinishedSample) -> FinishedSample:
        if batch != "train-2" or sample.replica:
            return sample
        empty = {"token_ids": array("i"), "logprobs": array("f"), "version_spans": ()}
        return dataclasses.replace(sample, finish=Finish.FAILED, cause="no room", **empty)

    def judge(sample: Sample) -> Score | Unscored:
        return Unscored("away") if sample.id.replica == 1 else Score(float(sample.id.replica))

    run = make_run(
        rollout=FakeRollout(alter=fail),
        scorer=FakeScorer(judge),
        unscored="drop_sample",
        steps=4,
        eval_every=3,
        observe={"samples_every": 2, "samples_per_step": 6},
    )
    run.trainer.run()
    by_batch = {(step, samples[0].id.batch): samples for step, samples in run.recorded}
    assert sorted(by_batch) == [(0, "eval-0"), (0, "train-0"), (2, "train-2"), (3, "eval-3"), (4, "eval-4")]
    assert all(len(samples) == 6 for samples in by_batch.values())
    # One of each prompt first, in the order that they were asked in and not in which they ended.
    asked = run.rollout.batches["train-0"][2]
    found = [(sample.id.prompt, sample.id.replica) for sample in by_batch[0, "train-0"]]
    assert found == [*((prompt, 0) for prompt in asked), (asked[0], 1), (asked[1], 1)]
    causes = [sample.score for sample in by_batch[2, "train-2"]]
    assert causes == [Unscored("generation failed: no room")] * 4 + [Unscored("away")] * 2
    assert all(sample.response and sample.score == Score(0.0) for sample in by_batch[0, "eval-0"])


@pytest.mark.parametrize("off", [{"samples_every": 0}, {"samples_per_step": 0}])
def test_recording_of_samples_can_be_switched_off(make_run: MakeRun, off: dict[str, int]) -> None:
    run = make_run(steps=1, observe=off)
    run.trainer.run()
    assert run.recorded == []


def test_staleness_is_the_mean_version_lag_of_tokens(make_run: MakeRun) -> None:
    def mixed(batch: str, sample: FinishedSample) -> FinishedSample:
        return dataclasses.replace(
            sample,
            token_ids=array("i", [7, 8, 9, 10]),
            logprobs=array("f", [-4.0] * 4),
            version_spans=(VersionSpan(3, 0, 1), VersionSpan(5, 1, 4)),
        )

    run = make_run(rollout=FakeRollout(alter=mixed), steps=6, start_step=5, evaluate=False)
    run.trainer.run()
    assert run.metrics[5]["staleness"] == pytest.approx(2 / 4)


def test_streaming_trains_while_other_rollouts_still_run(make_run: MakeRun) -> None:
    rollout = FakeRollout(gate=lambda batch, number: 0.01)
    seen: list[int] = []
    run = make_run(rollout=rollout, steps=1, evaluate=False)
    accumulate = run.trainer.learner.actor.accumulate
    run.trainer.learner.actor.accumulate = lambda batch: (seen.append(rollout.sent["train-0"]), accumulate(batch))  # type: ignore[assignment,func-returns-value]
    run.trainer.run()
    assert seen[0] < 16
    assert len(seen) == run.metrics[0]["passes"] > 1


def test_without_streaming_training_waits_for_the_whole_batch(make_run: MakeRun) -> None:
    rollout = FakeRollout(gate=lambda batch, number: 0.005)
    seen: list[int] = []
    run = make_run(rollout=rollout, steps=1, evaluate=False, streaming=False, mini_batches_per_step=2)
    accumulate = run.trainer.learner.actor.accumulate
    run.trainer.learner.actor.accumulate = lambda batch: (seen.append(rollout.sent["train-0"]), accumulate(batch))  # type: ignore[assignment,func-returns-value]
    run.trainer.run()
    # The sixteenth sample may be scored just before the fake has counted it.
    assert min(seen) >= 15
    assert run.metrics[0]["optimizer_steps"] == 2


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_streaming_and_waiting_learn_the_same(make_run: MakeRun, aggregation: str) -> None:
    start = make_run(evaluate=False)
    streamed = make_run(
        rollout=FakeRollout(gate=lambda batch, number: 0.002), evaluate=False, aggregation=aggregation, kl_coef=0.05
    )
    waited = make_run(
        streaming=False, tokens_per_micro_batch=999, evaluate=False, aggregation=aggregation, kl_coef=0.05
    )
    streamed.trainer.run()
    waited.trainer.run()
    assert streamed.metrics[0]["passes"] > waited.metrics[0]["passes"] == 1
    assert streamed.metrics[0]["grad_norm"] == pytest.approx(waited.metrics[0]["grad_norm"], rel=1e-5)
    assert apart(streamed, start) > 1e-3
    # Adam divides by the gradient's own size, so noise in tiny gradients shows; it stays far below one step of 1e-3.
    assert apart(streamed, waited) < 1e-4


def test_mini_batches_step_the_optimizer_each(make_run: MakeRun) -> None:
    run = make_run(mini_batches_per_step=2, warmup_steps=3, evaluate=False)
    run.trainer.run()
    assert [run.metrics[step]["optimizer_steps"] for step in (0, 1)] == [2, 2]
    assert [run.metrics[step]["lr"] for step in (0, 1)] == [pytest.approx(1e-3 * 2 / 4), 1e-3]


def test_groups_without_signal_are_left_out_of_the_gradient_and_not_of_the_metrics(make_run: MakeRun) -> None:
    def judge(sample: Sample) -> Score:
        return Score(1.0 if sample.id.prompt % 2 else float(sample.id.replica % 2))

    skipped = make_run(scorer=FakeScorer(judge), steps=1, evaluate=False)
    skipped.trainer.run()
    kept = make_run(scorer=FakeScorer(judge), steps=1, evaluate=False, skip_groups_without_signal=False)
    kept.trainer.run()
    for run in (skipped, kept):
        assert run.metrics[0]["groups"] == 4
        assert run.metrics[0]["groups_without_signal"] >= 1
    assert skipped.metrics[0]["reward_mean"] == kept.metrics[0]["reward_mean"]
    # The same gradient over fewer tokens.
    assert skipped.metrics[0]["grad_norm"] > kept.metrics[0]["grad_norm"] * 1.05


@pytest.mark.parametrize("term", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}])
def test_kl_and_entropy_learn_from_groups_without_signal_too(make_run: MakeRun, term: dict[str, float]) -> None:
    def judge(sample: Sample) -> Score:
        return Score(1.0 if sample.id.prompt % 2 else float(sample.id.replica % 2))

    asked = make_run(scorer=FakeScorer(judge), evaluate=False, streaming=False, **term)
    kept = make_run(scorer=FakeScorer(judge), evaluate=False, streaming=False, skip_groups_without_signal=False, **term)
    for run in (asked, kept):
        run.trainer.run()
        assert run.metrics[0]["groups_without_signal"] >= 1
    assert [asked.metrics[step]["passes"] for step in (0, 1)] == [kept.metrics[step]["passes"] for step in (0, 1)]
    assert apart(asked, kept) == 0


def test_entropy_alone_moves_the_weights_of_a_step_without_signal(make_run: MakeRun) -> None:
    run = make_run(scorer=FakeScorer(lambda sample: Score(1.0)), evaluate=False, steps=1, entropy_coef=0.1)
    before = weights(run)
    run.trainer.run()
    assert run.metrics[0]["optimizer_steps"] == 1
    assert not all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())


def test_a_step_without_any_signal_changes_no_weight_and_goes_on(make_run: MakeRun) -> None:
    run = make_run(scorer=FakeScorer(lambda sample: Score(1.0)), evaluate=False)
    before = weights(run)
    run.trainer.run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())
    assert run.rollout.published == [0, 1, 2]
    assert [event.where for event in run.of(events.Warned)] == ["optimizer", "optimizer"]


def test_unscored_samples_are_missing_with_their_causes_and_never_zero(make_run: MakeRun) -> None:
    def judge(sample: Sample) -> Score | Unscored:
        return Unscored("judge was away") if sample.id.replica == 3 and sample.id.prompt < 4 else Score(1.0)

    dropped = make_run(scorer=FakeScorer(judge), steps=1)
    dropped.trainer.run()
    hit = sum(prompt < 4 for prompt in dropped.rollout.batches["train-0"][2])
    assert hit >= 1
    assert dropped.metrics[0]["reward_mean"] == 1.0
    assert dropped.metrics[0]["unscored"] == dropped.metrics[0]["groups_dropped"] == hit
    reported = dropped.of(events.Unscorable)
    assert [event.causes for event in reported] == [{"judge was away": hit}]
    assert reported[0].groups_dropped == hit
    kept = make_run(scorer=FakeScorer(judge), steps=1, unscored="drop_sample")
    kept.trainer.run()
    assert kept.metrics[0]["groups_dropped"] == 0
    assert kept.metrics[0]["groups"] == 4


def test_a_run_that_scored_no_group_at_all_is_saved_and_ends_with_an_error(make_run: MakeRun) -> None:
    run = make_run(scorer=FakeScorer(lambda sample: Unscored("judge was away")), steps=2)
    with pytest.raises(RewardError, match="no group of the whole run could be scored"):
        run.trainer.run()
    assert len(run.of(events.StepFinished)) == 2
    assert run.of(events.CheckpointSaved)


def test_an_evaluation_without_any_score_is_a_warning_and_no_accuracy(make_run: MakeRun) -> None:
    def judge(sample: Sample) -> Score | Unscored:
        return Unscored("away") if sample.id.batch.startswith("eval") else Score(float(sample.id.replica))

    run = make_run(scorer=FakeScorer(judge), steps=1)
    run.trainer.run()
    assert not run.of(events.Evaluated)
    assert [event.where for event in run.of(events.Warned)] == ["evaluation", "evaluation"]


def test_failed_generations_are_missing_with_their_cause(make_run: MakeRun) -> None:
    def fail(batch: str, sample: FinishedSample) -> FinishedSample:
        if sample.replica != 1 or batch.startswith("eval"):
            return sample
        empty = {"token_ids": array("i"), "logprobs": array("f"), "version_spans": ()}
        return dataclasses.replace(sample, finish=Finish.FAILED, cause="no room", **empty)

    run = make_run(rollout=FakeRollout(alter=fail), steps=1, unscored="drop_sample")
    run.trainer.run()
    assert (run.metrics[0]["failed"], run.metrics[0]["unscored"], run.metrics[0]["groups"]) == (4, 4, 4)
    assert run.of(events.Unscorable)[0].causes == {"generation failed: no room": 4}


def test_non_finite_logprobs_leave_the_optimizer_step_out_and_warn(make_run: MakeRun) -> None:
    def poison(batch: str, sample: FinishedSample) -> FinishedSample:
        return dataclasses.replace(sample, logprobs=array("f", [float("nan")] * len(sample.token_ids)))

    run = make_run(rollout=FakeRollout(alter=poison), steps=1, evaluate=False)
    before = weights(run)
    run.trainer.run()
    assert run.metrics[0]["optimizer_steps_skipped_total"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())
    assert "nan" in run.of(events.Warned)[0].message


def test_a_batch_that_fails_ends_the_run_with_its_cause(make_run: MakeRun) -> None:
    run = make_run(rollout=FakeRollout(fail_with=DeadlineExceeded("no instance with weight version 0")))
    with pytest.raises(DeadlineExceeded, match="no instance with weight version 0"):
        run.trainer.run()


def test_a_batch_that_ends_short_is_an_error(make_run: MakeRun) -> None:
    def lose(batch: str, sample: FinishedSample) -> FinishedSample | None:
        return None if sample.replica == 2 else sample

    run = make_run(rollout=FakeRollout(alter=lose), evaluate=False)
    with pytest.raises(RolloutError, match="12 of 16 samples"):
        run.trainer.run()


def test_a_sample_that_comes_twice_or_unasked_is_an_error(make_run: MakeRun) -> None:
    twice = make_run(rollout=FakeRollout(alter=lambda batch, sample: dataclasses.replace(sample, replica=0)))
    with pytest.raises(ValueError, match="twice"):
        twice.trainer.run()
    unasked = make_run(rollout=FakeRollout(alter=lambda batch, sample: dataclasses.replace(sample, prompt=999)))
    with pytest.raises(RolloutError, match="prompt 999, which it didn't ask for"):
        unasked.trainer.run()


def test_a_scorer_that_breaks_ends_the_run_with_its_error(make_run: MakeRun) -> None:
    def judge(sample: Sample) -> Score:
        raise RewardError("all reward threads hang; use reward.mode='process'")

    with pytest.raises(RewardError, match="all reward threads hang"):
        make_run(scorer=FakeScorer(judge)).trainer.run()


def test_silence_becomes_an_error_that_says_what_was_awaited(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.train.batches.STALL_GRACE_S", 0.2)
    rollout = FakeRollout(gate=lambda batch, number: 0.0 if number < 5 else 3600.0)
    run = make_run(rollout=rollout, deadline_s=0.1, evaluate=False, talk={"timeout_s": 1.0})
    with pytest.raises(DeadlineExceeded, match=r"train-0: nothing heard .* 5 of 16 samples arrived and 0 being scored"):
        run.trainer.run()


def test_a_long_training_pass_is_not_taken_for_silence(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.train.batches.STALL_GRACE_S", 0.2)
    run = make_run(deadline_s=0.1, steps=1, evaluate=False, talk={"timeout_s": 1.0})
    accumulate = run.trainer.learner.actor.accumulate
    slept = iter([1.5])
    run.trainer.learner.actor.accumulate = lambda batch: (time.sleep(next(slept, 0)), accumulate(batch))  # type: ignore[assignment,func-returns-value]
    run.trainer.run()
    assert run.metrics[0]["optimizer_steps"] == 1


def test_the_watch_is_called_while_waiting_and_can_end_the_run(make_run: MakeRun) -> None:
    calls: list[str] = []

    def watch() -> None:
        calls.append(threading.current_thread().name)
        if len(calls) == 3:
            raise KeyboardInterrupt

    run = make_run(rollout=FakeRollout(gate=lambda batch, number: 3600.0), watch=watch, evaluate=False)
    with pytest.raises(KeyboardInterrupt):
        run.trainer.run()
    assert calls == ["MainThread"] * 3


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_an_interrupt_in_a_steps_last_update_leaves_a_boundary_to_save(make_run: MakeRun, mini_batches: int) -> None:
    steps_of: list[int] = []

    @contextmanager
    def held() -> Iterator[None]:
        steps_of.append(run.trainer.step)
        yield
        assert run.trainer.step == steps_of[-1] + 1
        if run.trainer.step == 2:
            raise KeyboardInterrupt

    run = make_run(steps=5, held=held, evaluate=False, mini_batches_per_step=mini_batches)
    with pytest.raises(KeyboardInterrupt):
        run.trainer.run()
    assert steps_of == [0, 1], "of each step the last update alone"
    run.trainer.save_where_stopped()
    assert [event.step for event in run.of(events.CheckpointSaved)] == [2]
    assert sorted(run.metrics) == [event.step for event in run.of(events.StepFinished)] == [0, 1], "none is missing"
    undisturbed = make_run(steps=2, evaluate=False, mini_batches_per_step=mini_batches)
    undisturbed.trainer.run()
    assert apart(run, undisturbed) < 1e-6


def test_an_interrupt_does_not_wait_for_an_evaluations_answers(make_run: MakeRun) -> None:
    @contextmanager
    def held() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    answers = FakeRollout(gate=lambda batch, number: 3600.0 if batch.startswith("eval") else 0.0)
    run = make_run(steps=5, held=held, rollout=answers, eval_every=1)
    with pytest.raises(KeyboardInterrupt):
        run.trainer.run()
    run.trainer.save_where_stopped()
    assert [event.step for event in run.of(events.CheckpointSaved)] == [1]


def test_an_interrupt_between_the_updates_of_a_step_leaves_none(make_run: MakeRun) -> None:
    stepped: list[int] = []

    def watch() -> None:
        if len(stepped) == 3:
            raise KeyboardInterrupt

    def optimizer_step(position: int) -> OptimizerStep:
        stepped.append(position)
        return step(position)

    run = make_run(steps=5, watch=watch, evaluate=False, mini_batches_per_step=2)
    actor = run.trainer.learner.actor
    step, actor.optimizer_step = actor.optimizer_step, optimizer_step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.trainer.run()
    run.trainer.save_where_stopped()
    assert not run.of(events.CheckpointSaved)


def test_old_checkpoints_that_stay_are_a_warning(make_run: MakeRun, tmp_path: Path) -> None:
    class Stuck(Checkpoints):
        def finish(self, *parts: Any) -> Saved:
            return dataclasses.replace(super().finish(*parts), left="can't be removed: step-000000 (busy)")

    run = make_run(checkpoints=Stuck(tmp_path / "stuck", 1), steps=1, evaluate=False)
    run.trainer.run()
    (warning,) = run.of(events.Warned)
    assert "step-000001 is written; older ones can't be removed: step-000000 (busy)" in warning.message
    assert run.of(events.CheckpointSaved)


def interrupted_while_waiting(make_run: MakeRun, **rollout: Any) -> Run:
    """Ctrl-C with a training batch and an evaluation open, and some samples of the former being scored."""
    submitted = FakeRollout(gate=lambda batch, number: 0.0 if number < 6 else 3600.0, **rollout)

    def watch() -> None:
        if len(run.scorer.scored) >= 12:
            raise KeyboardInterrupt

    run = make_run(rollout=submitted, watch=watch)
    scoring = asyncio.Event()

    async def score(sample: Sample) -> Score | Unscored:
        run.scorer.scored.append(sample)
        await scoring.wait()
        raise AssertionError("never set")

    run.scorer.score = score  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.trainer.run()
    return run


def test_ctrl_c_cancels_the_open_batches_and_their_scoring(make_run: MakeRun) -> None:
    run = interrupted_while_waiting(make_run)
    assert run.rollout.cancelled == {"train-0": "KeyboardInterrupt", "eval-0": "KeyboardInterrupt"}
    assert not run.of(events.Warned)

    async def still_scoring() -> list[str]:
        await asyncio.sleep(0)
        return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("score ")]

    assert run.trainer.ports.edge.run(still_scoring(), "looking", 5) == []


@pytest.mark.parametrize("trouble", [{"cancel_with": RolloutError("the manager is lost")}, {"cancel_s": 3600.0}])
def test_cancelling_that_fails_is_a_warning_and_hides_nothing(make_run: MakeRun, trouble: dict[str, Any]) -> None:
    run = interrupted_while_waiting(make_run, **trouble)
    (warning,) = run.of(events.Warned)
    assert warning.where == "rollout"
    assert "batches could not be cancelled" in warning.message


def test_an_error_cancels_what_is_open_and_a_run_that_ends_well_nothing(make_run: MakeRun) -> None:
    failing = make_run(rollout=FakeRollout(fail_with=DeadlineExceeded("no instance")))
    with pytest.raises(DeadlineExceeded):
        failing.trainer.run()
    assert failing.rollout.released == []
    good = make_run(steps=1)
    good.trainer.run()
    assert good.rollout.cancelled == {}
    broken = make_run(rollout=FakeRollout(gate=lambda batch, number: 0.0 if number < 12 else 3600.0))
    broken.trainer.learner.actor.optimizer_step = lambda position: 1 / 0  # type: ignore[assignment,return-value]
    broken.trainer.learner.actor.accumulate = lambda batch: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        broken.trainer.run()
    assert broken.rollout.cancelled["train-0"] == "ZeroDivisionError: division by zero"


class FullDisk:
    def prepare(self) -> Any:
        raise StorageError("the checkpoint can't be written: No space left on device")


def test_a_full_disk_is_a_warning_until_the_last_checkpoint(make_run: MakeRun) -> None:
    run = make_run(checkpoints=FullDisk(), checkpoint_every=1, evaluate=False)
    with pytest.raises(StorageError, match="No space left"):
        run.trainer.run()
    assert sorted(run.metrics) == [0, 1]
    assert [event.where for event in run.of(events.Warned)] == ["checkpoint"]
