from __future__ import annotations

import io
import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from observe_scenes import START, instance_changed, run_events, run_metrics

from penstock.errors import MissingExtra, StorageError
from penstock.observe import Event, EventLog, events
from penstock.observe.events import Evaluated, EvaluatedSet
from penstock.observe.plots import _draw_learning, column, draw_curves, marks, shares, smooth, time_shares
from penstock.observe.summary import (
    Summary,
    print_summary,
    summarise,
    summary_rows,
    tally_summary,
    write_summary,
)
from penstock.observe.summary_tally import SummaryTally


def summary_of(log: list[Event], **options: int | None) -> Summary:
    return summarise(log, run_metrics(), folder="runs/tiny-001", **options)


def test_a_run_comes_to_these_figures() -> None:
    summary = summary_of(run_events(), tokens_drawn=1300, tokens_accepted=1280)
    assert summary.outcome == "done"
    assert summary.accuracy_before == pytest.approx(0.30)
    assert summary.accuracy_after == pytest.approx((0.66 + 0.90) / 2)
    assert (summary.reward_first, summary.reward_last) == pytest.approx((0.3, 0.3 + 0.5 * 7 / 8))
    assert (summary.samples_finished, summary.samples_failed, summary.samples_lost) == (128, 0, 0)
    assert (summary.tokens_generated, summary.tokens_recomputed) == (1300, 20)
    assert summary.trainer_wait_share == pytest.approx(0.25)
    assert (summary.steps, summary.weight_versions) == (8, 8)
    assert (summary.instances_joined, summary.instances_lost, summary.samples_moved) == (2, 1, 5)
    assert summary.wall_s == 18.0


def test_samples_that_a_batch_ends_without_are_lost() -> None:
    log: list[Event] = [
        events.BatchSubmitted(ts=1, batch="b", version=0, samples=16),
        events.BatchEnded(ts=2, batch="b", samples=12, failed=1, tokens=9, cause="deadline"),
    ]
    summary = summary_of(log)
    assert (summary.samples_finished, summary.samples_failed, summary.samples_lost) == (12, 1, 3)


@pytest.mark.parametrize(("outcome", "lost", "unfinished"), [("done", 16, 0), ("interrupted", 0, 16)])
def test_a_batch_that_never_ends_is_lost_in_a_run_that_is_done_and_unfinished_in_one_that_is_not(
    outcome: str, lost: int, unfinished: int
) -> None:
    log: list[Event] = [
        events.BatchSubmitted(ts=1, batch="b", version=0, samples=16),
        events.RunFinished(ts=2, wall_s=1.0, outcome=outcome),
    ]
    summary = summary_of(log)
    assert (summary.samples_lost, summary.samples_unfinished) == (lost, unfinished)


@pytest.mark.parametrize(("outcome", "lost", "unfinished"), [("done", 13, 0), ("interrupted", 0, 13)])
def test_samples_that_an_interrupted_trainer_gave_up_are_unfinished_and_not_lost(
    outcome: str, lost: int, unfinished: int
) -> None:
    log: list[Event] = [
        events.BatchSubmitted(ts=1, batch="b", version=0, samples=16),
        events.BatchEnded(ts=2, batch="b", samples=3, failed=0, tokens=9, cause="cancelled: KeyboardInterrupt"),
        events.RunFinished(ts=2, wall_s=1.0, outcome=outcome),
    ]
    summary = summary_of(log)
    assert (summary.samples_finished, summary.samples_lost, summary.samples_unfinished) == (3, lost, unfinished)
    going_on: list[Event] = [
        events.RunStarted(ts=3, run="r", version="0", config={}),
        events.BatchSubmitted(ts=4, batch="b", version=0, samples=16),
        events.BatchEnded(ts=5, batch="b", samples=16, failed=0, tokens=9),
        events.RunFinished(ts=6, wall_s=1.0, outcome="done"),
    ]
    assert summary_of([*log, *going_on]).samples_lost == 0


def test_what_was_not_measured_is_null_and_not_zero() -> None:
    summary = summarise([], [])
    assert summary.outcome == "unfinished"
    assert summary.accuracy_before is None
    assert summary.accuracy_after is None
    assert summary.tokens_recomputed is None
    assert summary.trainer_wait_share is None
    assert ("held-out accuracy", "not measured before, not measured after") in summary_rows(summary)


def test_with_two_evaluations_after_is_the_last_and_needs_no_words() -> None:
    log = [
        events.Evaluated(ts=1, step=step, weight_version=step, accuracy=accuracy, questions=9, wall_s=1)
        for step, accuracy in ((0, 0.3), (9, 0.5))
    ]
    assert ("held-out accuracy", "0.300 before, 0.500 after") in summary_rows(summary_of(log))


def test_a_run_on_a_full_disk_has_its_last_words_all_the_same() -> None:
    tally = SummaryTally()
    with EventLog(Path("/dev/full"), tally.take) as log:
        for event in run_events():
            log.emit(event)
    assert log.dropped > 0
    summary = tally_summary(tally, folder="runs/tiny-001", tokens_drawn=1300, tokens_accepted=1280)
    whole = summary_of(run_events(), tokens_drawn=1300, tokens_accepted=1280)
    assert summary == structs.replace(whole, warnings=1), "the warning is that of the log itself"
    out = io.StringIO()
    print_summary(summary, out)
    assert "tiny-001: done" in out.getvalue()


def test_a_tally_does_not_grow_with_the_run() -> None:
    tally = SummaryTally()
    sizes = set()
    for step in range(1, 500):
        tally.take(instance_changed(1, step, "loading", "ready"))
        tally.take(instance_changed(1, step, "ready", "gone", "cut"))
        for event in run_events(steps=1)[3:-1]:
            tally.take(event)
        sizes.add(sum(len(value) for value in vars(tally).values() if hasattr(value, "__len__")))
    assert (tally.instances_joined, tally.instances_lost) == (499, 499)
    assert len(sizes) <= 3


def test_an_instance_that_loads_each_steps_weights_joins_once() -> None:
    changes = [instance_changed(1, 0, before, after) for before, after in [("loading", "ready"), ("ready", "loading")]]
    assert summary_of([*changes, *changes, *changes]).instances_joined == 1


def test_one_that_still_loads_when_the_run_ends_has_joined() -> None:
    """So the summary agrees with the machines that said hello."""
    whole = [
        instance_changed(1, 0, *change) for change in [("", "joining"), ("joining", "loading"), ("loading", "ready")]
    ]
    late = [instance_changed(1, 1, *change) for change in [("", "joining"), ("joining", "loading")]]
    assert summary_of([*whole, *late]).instances_joined == 2


def test_the_last_words_name_the_checkpoint_and_the_curves_that_are_there(tmp_path: Path) -> None:
    saved = [
        events.CheckpointSaved(ts=1, step=step, path=f"runs/a/checkpoints/step-{step}", nbytes=1, wall_s=1)
        for step in (5, 10)
    ]
    without, within = io.StringIO(), io.StringIO()
    print_summary(summarise(saved, [], folder=str(tmp_path)), without)
    assert "curves" not in without.getvalue()
    (tmp_path / "curves.png").touch()
    print_summary(summarise(saved, [], folder=str(tmp_path)), within)
    assert f"curves             {tmp_path}/curves.png" in within.getvalue()
    assert "last checkpoint    runs/a/checkpoints/step-10\n" in within.getvalue()


def test_an_error_is_named_in_the_title_and_told_by_who_ends_the_program() -> None:
    out = io.StringIO()
    ended = events.RunFinished(ts=1, wall_s=1.0, outcome="RewardError: none of the first 256 samples could be scored")
    print_summary(summarise([ended], []), out)
    assert out.getvalue().splitlines()[0] == ": ended by RewardError"
    assert "none of the first" not in out.getvalue()


def test_one_evaluation_is_before_and_not_after() -> None:
    only = events.Evaluated(ts=1, step=0, weight_version=0, accuracy=0.3, questions=9, wall_s=1)
    summary = summary_of([only])
    assert (summary.accuracy_before, summary.accuracy_after) == (0.3, None)


def test_a_resumed_run_adds_its_parts_up() -> None:
    first = events.RunStarted(ts=START, run="r", version="0", config={})
    open_batch = events.BatchSubmitted(ts=START + 5, batch="train-3", version=3, samples=16)
    again = events.RunStarted(ts=START + 100, run="r", version="0", config={})
    summary = summary_of(
        [first, open_batch, again, events.RunFinished(ts=START + 107, wall_s=7.0, outcome="done")],
    )
    assert summary.wall_s == pytest.approx(5.0 + 7.0)
    assert summary.samples_lost == 0, "what the first part left open was generated again by the second"


def test_what_an_earlier_part_learned_behind_its_checkpoint_is_taken_back() -> None:
    def evaluated(step: int, accuracy: float) -> Event:
        return Evaluated(ts=1, step=step, weight_version=step, accuracy=accuracy, questions=9, wall_s=1)

    def started(step: int) -> Event:
        return events.StepStarted(ts=1, step=step, weight_version=step, prompts=4, samples=16)

    first = [evaluated(0, 0.1), evaluated(2, 0.2), evaluated(4, 0.9), evaluated(6, 0.8)]
    went_on = summary_of([*first, started(2)])
    assert (went_on.accuracy_before, went_on.accuracy_after, went_on.evaluations) == (0.1, 0.2, 2)
    again = summary_of([*first, started(2), started(3), evaluated(4, 0.4), started(4), started(5)])
    assert (again.accuracy_after, again.accuracy_last, again.evaluations) == (pytest.approx(0.3), 0.4, 3)
    assert summary_of(first).accuracy_after == pytest.approx(0.85)
    # Of steps too, before the first of them is done again.
    assert summary_of([*run_events(), started(4)]).steps == 4
    assert summary_of([*run_events(), started(4), events.StepFinished(ts=1, step=4, metrics={})]).steps == 5


def test_an_instance_that_says_goodbye_is_not_lost() -> None:
    log: list[Event] = [
        instance_changed(1, 0, "ready", "gone", "SIGTERM", orderly=True),
        instance_changed(1, 1, "draining", "gone", "closed", orderly=True),
        instance_changed(1, 2, "ready", "gone", "3 heartbeats missed"),
    ]
    assert summary_of(log).instances_lost == 1


def test_unscored_samples_warnings_and_waits_are_counted() -> None:
    log: list[Event] = [
        events.Unscorable(ts=1, step=0, causes={"timeout": 2, "raised": 1}, groups_dropped=1),
        events.Warned(ts=1, where="", message=""),
        events.WaitingOver(ts=1, waited_s=2.5),
        events.WaitingOver(ts=2, waited_s=0.5),
    ]
    summary = summary_of(log)
    assert (summary.samples_unscored, summary.warnings, summary.waited_for_instances_s) == (3, 1, 3.0)
    assert ("samples", "0 finished, 0 lost, 0 failed, 3 unscored") in summary_rows(summary)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 9)), max_size=20))
def test_every_sample_that_was_asked_for_is_in_one_place(batches: list[tuple[int, int, int]]) -> None:
    log: list[Event] = []
    asked = 0
    for number, (finished, missing, failed) in enumerate(batches):
        samples = finished + missing + failed
        asked += samples
        log.append(events.BatchSubmitted(ts=1, batch=str(number), version=0, samples=samples))
        if number % 3:
            log.append(events.BatchEnded(ts=2, batch=str(number), samples=finished, failed=failed, tokens=0))
    summary = summarise(log, [])
    parts = summary.samples_finished + summary.samples_failed + summary.samples_lost + summary.samples_unfinished
    assert parts == asked


def test_summary_json_has_the_same_figures(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    summary = summary_of(run_events(), tokens_drawn=1300, tokens_accepted=1280)
    write_summary(path, summary)
    found = json.loads(path.read_text())
    for name in ("accuracy_before", "accuracy_after", "samples_lost", "tokens_recomputed", "trainer_wait_share"):
        assert found[name] == getattr(summary, name)
    assert list(tmp_path.iterdir()) == [path]


def test_a_summary_that_can_not_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the summary can't be written to"):
        write_summary(tmp_path / "nowhere" / "summary.json", summary_of(run_events()))


def test_the_last_words_are_plain_lines_without_a_terminal() -> None:
    out = io.StringIO()
    print_summary(summary_of(run_events(), tokens_drawn=1300, tokens_accepted=1280), out)
    text = out.getvalue()
    assert "\x1b" not in text
    assert "tiny-001: done" in text
    assert "held-out accuracy  0.300 before, 0.780 after (mean of the last two evaluations; the last 0.900)" in text
    assert "generated twice    20 tokens (1.54 %)" in text
    assert "runs/tiny-001" in text


def test_the_last_words_are_a_panel_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    print_summary(summary_of(run_events()), out)
    assert "╭─" in out.getvalue()


def test_curves_are_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    draw_curves(path, run_events(), run_metrics(), "tiny-001")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_curves_show_where_the_time_went_and_each_held_out_set(tmp_path: Path) -> None:
    told = {"time/rollout_wait_s": 2.0, "time/forward_backward_s": 1.0, "time/optimizer_s": 0.5, "time/other_s": 0.5}
    rows: list[dict[str, float | None]] = [
        {"step": 0.0, "step_s": 4.0, "entropy": 1.0, "clip_fraction": 0.01, **told},
        {"step": 1.0, "step_s": 4.0},
        {"step": 2.0, "step_s": 8.0, "entropy": 0.5, "clip_fraction": 0.02, **told},
    ]
    steps, found = time_shares(rows)
    assert steps == [0.0, 2.0]
    assert (found["rollouts"], found["learning"], found["scores"]) == ([0.5, 0.25], [0.375, 0.1875], [0.0, 0.0])
    known = EvaluatedSet(accuracy=0.5, questions=1, asked=1, unscored=0)
    log = [
        Evaluated(ts=1, step=0, weight_version=0, accuracy=0.5, questions=2, wall_s=1, sets={"a": known, "b": known})
    ]
    draw_curves(tmp_path / "curves.png", log, rows)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_curves_of_a_run_without_any_step_are_a_picture_too(tmp_path: Path) -> None:
    draw_curves(tmp_path / "curves.png", [], [])
    assert (tmp_path / "curves.png").exists()


def test_curves_of_a_run_that_went_on_from_an_earlier_step_do_not_turn_back() -> None:
    axes = MagicMock()
    log = [event for part in (run_events(steps=8)[:-2], run_events(steps=6)) for event in part]
    _draw_learning(axes, log, run_metrics(6))
    (curve,) = [call for call in axes.plot.call_args_list if call.kwargs.get("label") == "held-out accuracy"]
    assert curve.args == ([0, 2, 4, 6], [0.3, pytest.approx(0.42), pytest.approx(0.54), 0.9])


def test_curves_say_what_they_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"curves\.png can't be written"):
        draw_curves(tmp_path / "nowhere" / "curves.png", [], [])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"curves\.png needs the package 'matplotlib'"):
        draw_curves(tmp_path / "curves.png", [], [])


def test_accidents_are_marked_at_their_step_and_first_joins_are_not() -> None:
    log = run_events(steps=8, kill_at=4)
    again = instance_changed(START + 2 + 2 * 6 + 0.5, 2, "loading", "ready")
    reload = instance_changed(START + 2 + 2 * 7 + 0.5, 2, "loading", "ready")
    found = marks([*log, again, reload])
    assert [(step, words) for step, words, _ in found] == [(4.0, "engine-1 lost"), (6.0, "engine-2 joined")]


def test_columns_leave_out_what_was_not_measured() -> None:
    rows: list[dict[str, float | None]] = [
        {"step": 0, "x": 1.0, "step_s": 2.0, "trainer_wait_s": 1.0},
        {"step": 1, "x": None},
        {"step": 2},
    ]
    assert column(rows, "x") == ([0], [1.0])
    assert shares(rows) == ([0], [0.5])


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=50))
def test_a_smoothed_curve_stays_within_its_values(values: list[float]) -> None:
    smoothed = smooth(values)
    assert len(smoothed) == len(values)
    assert smoothed[0] == pytest.approx(values[0])
    assert all(min(values) - 1e-9 <= value <= max(values) + 1e-9 for value in smoothed)
