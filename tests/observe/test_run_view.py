from __future__ import annotations

import math
import types
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_scenes import START, instance_changed, row, run_events, run_view

from penstock.observe import FleetSnapshot, Notices, RunView, events
from penstock.observe.draw import columns_of, render_svg, render_text, spark
from penstock.observe.instances import is_end, is_loss
from penstock.observe.notices import KEPT
from penstock.observe.state import HISTORY, REPORTS


def said(*log: events.Event) -> list[str]:
    notices = Notices()
    for event in log:
        notices.take(event)
    return [str(notice) for notice in notices]


def test_a_view_knows_where_the_run_stands() -> None:
    view = run_view(steps=8, until=5)
    assert (view.step, view.steps, view.run) == (5, 8, "tiny-001")
    assert view.trainer_wait_share == pytest.approx(0.25)
    assert [step for step, _ in view.accuracies] == [0, 2, 4]
    assert view.tokens_per_s == 2000.0
    assert view.samples_moved == 5
    assert view.elapsed_s == pytest.approx(12.0)
    assert view.remaining_s == pytest.approx(3 * 2.0)


def test_before_anything_happened_nothing_is_invented() -> None:
    view = RunView()
    assert view.trainer_wait_share is None
    assert view.remaining_s is None
    assert view.elapsed_s == 0.0


def test_a_resumed_run_reckons_its_end_from_its_own_steps() -> None:
    view = RunView()
    view.apply(events.RunStarted(ts=0.5, run="r", version="0", config={"train": {"steps": 100}}))
    view.apply(events.StepStarted(ts=10.0, step=90, weight_version=90, prompts=1, samples=1))
    view.apply(events.StepFinished(ts=12.0, step=90, metrics={}))
    assert view.remaining_s == pytest.approx(9 * 2.0)


def window(what: str, **changes: object) -> events.WindowChanged:
    fields = {"batch": "train-3", "fleet": 2, "elapsed_s": 0.0, "cause": "why", "window_s": 4.0, **changes}
    return events.WindowChanged(ts=1.0, what=what, **fields)  # type: ignore[arg-type]


def test_a_window_that_changed_is_told_of_and_one_as_before_is_not() -> None:
    assert said(window("opened"), window("closed"), window("learned", before_s=3.9)) == []
    [learned] = said(window("learned", before_s=2.0, cause="the trainer waited 3 s"))
    assert "own engines generate for 4 s with 2 remote instances: the trainer waited 3 s" in learned
    [again] = said(window("opened", elapsed_s=7.0, cause="no remote instance is left"))
    assert "own engines generate again: no remote instance is left" in again
    [whole] = said(window("planned", before_s=4.0, window_s=-1.0, fleet=0))
    assert "for the whole rollout with 0 remote instances" in whole


def test_whose_turn_it_is_shows_while_the_run_goes_on() -> None:
    view = run_view(steps=8, until=5)
    view.apply_fleet(replace(view.fleet, window="own engines generate, 1.2 s into train-5, window 4 s (why)"))
    assert "own engines generate, 1.2 s into train-5, window 4 s (why)" in render_text(view)
    view.apply(events.RunFinished(ts=99.0, wall_s=9.0, outcome="done"))
    assert "own engines generate" not in render_text(view)


def test_waiting_shows_from_the_event_and_ends_with_it() -> None:
    view = RunView()
    view.apply(events.WaitingForInstances(ts=1.0, waiting_for="an instance with weight version 12", samples=40))
    assert view.waiting_for == "an instance with weight version 12"
    assert "waiting for an instance with weight version 12; 40 samples wait" in render_text(view)
    view.apply(events.WaitingOver(ts=4.0, waited_s=3.0))
    assert view.waiting_for == ""


def test_the_managers_report_is_taken_from_anything_of_its_shape() -> None:
    report = types.SimpleNamespace(
        instances=[row(3)], queued=1, running=2, finished=3, failed=4, tokens_accepted=5, waiting_for="x"
    )
    snapshot = FleetSnapshot.of(report, ts=9.0)
    assert snapshot == FleetSnapshot(9.0, (row(3),), 1, 2, 3, 4, 5, "x")


def test_the_wires_report_has_that_shape() -> None:
    from penstock.wire import FleetStatus, InstanceStatus

    status = InstanceStatus(
        instance="i-3",
        name="engine-3",
        engine="builtin",
        state="ready",
        version=4,
        running=10,
        pending=0,
        tokens_accepted=100,
        tokens_per_s=1000.0,
        age_s=10.0,
    )
    report = FleetStatus(
        instances=(status,), queued=1, running=2, finished=3, failed=4, tokens_accepted=5, waiting_for=""
    )
    assert FleetSnapshot.of(report, ts=9.0).instances == (row(3),)


def test_memory_does_not_grow_with_the_run() -> None:
    view = RunView()
    for step in range(HISTORY + 50):
        view.apply(events.StepFinished(ts=float(step), step=step, metrics={"reward_mean": 0.5}))
        view.apply(events.Warned(ts=float(step), where="", message=str(step)))
        view.apply(instance_changed(float(step), step, "loading", "ready"))
    assert len(view.rewards) == HISTORY
    assert len(view.notices) == KEPT


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (
            events.EngineExited(ts=1, name="engine-1", pid=7, exit_code=-9, cause="killed on purpose by the drill"),
            "engine-1 was killed (SIGKILL): killed on purpose by the drill",
        ),
        (
            events.EngineExited(ts=1, name="engine-1", pid=7, exit_code=3, cause="exit code 3"),
            "engine-1 ended with exit code 3: exit code 3",
        ),
        (
            events.SamplesMoved(ts=1, instance="i-9", samples=37, tokens_kept=1204, cause="gone"),
            "37 samples of i-9 go on elsewhere from their last token, 1,204 tokens kept",
        ),
        (
            events.SamplesMoved(ts=1, instance="i-9", samples=1, tokens_kept=1, cause="gone"),
            "1 sample of i-9 goes on elsewhere from its last token, 1 token kept",
        ),
        (instance_changed(1, 3, "loading", "ready"), "engine-3 joined"),
        (instance_changed(1, 3, "ready", "draining", "SIGTERM"), "engine-3 is leaving: SIGTERM"),
        (instance_changed(1, 3, "ready", "gone", "3 heartbeats missed"), "engine-3 is gone: 3 heartbeats missed"),
        (instance_changed(1, 3, "ready", "gone", "SIGTERM", orderly=True), "engine-3 left: SIGTERM"),
        (
            events.WaitingForInstances(ts=1, waiting_for="an instance with weight version 12", samples=40),
            "waiting for an instance with weight version 12; 40 samples to go",
        ),
        (events.WaitingOver(ts=1, waited_s=3.21), "the wait is over after 3.2 s"),
        (
            events.Unscorable(ts=1, step=3, causes={"raised": 1, "exit code 7": 6}, groups_dropped=2),
            "7 samples without a score (6 x exit code 7; 1 x raised); 2 groups left out",
        ),
        (
            events.Unscorable(ts=1, step=3, causes={f"cause {k}": 9 - k for k in range(5)}, groups_dropped=0),
            "35 samples without a score (9 x cause 0; 8 x cause 1; 7 x cause 2; 11 x other causes)",
        ),
        (
            events.BatchEnded(ts=1, batch="train-3", samples=8, failed=0, tokens=9, cause="batch train-3 stood still"),
            "batch train-3 stood still",
        ),
        (
            events.BatchEnded(ts=1, batch="train-3", samples=8, failed=0, tokens=9, cause="cancelled"),
            "batch train-3 was given up: cancelled",
        ),
        (events.SampleFailed(ts=1, sample="a", cause="too long"), "a sample failed: too long"),
        (events.FrameRefused(ts=1, peer="i-2", cause="no msgpack"), "a frame of i-2 was refused: no msgpack"),
        (events.RowsRefused(ts=1, instance="i-2", rows=12, cause="late"), "12 rows of i-2 refused: late"),
        (
            events.WeightsFailed(ts=1, instance="i-2", version=4, cause="checksum"),
            "i-2 could not load weights 4: checksum",
        ),
        (
            events.BatchEnded(ts=1, batch="train-3", samples=8, failed=2, tokens=9, cause="deadline"),
            "batch train-3: 2 samples failed: deadline",
        ),
        (events.Warned(ts=1, where="event log", message="full"), "event log: full"),
        (
            events.CheckpointSaved(ts=1, step=20, path="runs/a/20", nbytes=5_200_000, wall_s=1.0),
            "checkpoint after 20 steps, 5.2 MB: runs/a/20",
        ),
    ],
)
def test_what_happens_is_told_in_a_sentence(event: events.Event, sentence: str) -> None:
    assert said(event) == [sentence]


@pytest.mark.parametrize(
    "event",
    [
        events.StepStarted(ts=1, step=1, weight_version=1, prompts=1, samples=1),
        events.WeightsPublished(ts=1, version=1, nbytes=1, wall_s=1),
        events.BatchEnded(ts=1, batch="train-3", samples=8, failed=0, tokens=9),
        events.EngineExited(ts=1, name="engine-1", pid=7, exit_code=0, cause="the run ended"),
    ],
)
def test_the_ordinary_is_not_told(event: events.Event) -> None:
    assert said(event) == []


def test_an_instance_that_loads_each_steps_weights_joins_once() -> None:
    changes = [instance_changed(1, 0, before, after) for before, after in [("loading", "ready"), ("ready", "loading")]]
    assert said(*changes, *changes, *changes) == ["engine-0 joined"]


@pytest.mark.parametrize("first", ["gone", "exited"])
def test_a_killed_engine_is_told_once_whoever_notices_first(first: str) -> None:
    exited = events.EngineExited(ts=1, name="engine-1", pid=7, exit_code=-9, cause="the drill")
    gone = instance_changed(1, 1, "ready", "gone", "connection lost")
    told = said(gone, exited) if first == "gone" else said(exited, gone)
    assert told == ["engine-1 was killed (SIGKILL): the drill"]


def test_what_a_curve_shows_is_told_in_lines_and_not_under_the_picture() -> None:
    view = RunView()
    notice = view.apply(events.Evaluated(ts=1, step=20, weight_version=20, accuracy=0.5, questions=64, wall_s=1))
    assert str(notice) == "held-out accuracy 0.500 after 20 steps, 64 questions"
    assert "after 20 steps" not in render_text(view)


def test_repeats_are_counted_in_one_sentence() -> None:
    assert said(*[events.SampleFailed(ts=k, sample=str(k), cause="too long") for k in range(3)]) == [
        "a sample failed: too long (x 3)"
    ]


def test_instances_are_called_by_their_names_once_known() -> None:
    moved = events.SamplesMoved(ts=2, instance="i-1", samples=2, tokens_kept=3, cause="gone")
    assert said(instance_changed(1, 1, "loading", "ready"), moved)[-1].startswith("2 samples of engine-1 go on")


@pytest.mark.parametrize(("goodbye", "lost"), [(True, False), (False, True)])
def test_what_the_manager_calls_a_goodbye_is_no_loss(goodbye: bool, lost: bool) -> None:
    from penstock.rollout.manager import Manager, ManagerConfig
    from penstock.wire import AgentHello, Goodbye

    manager = Manager(ManagerConfig())
    manager.on_agent_connected("peer", 0.0)
    hello = AgentHello(name="engine-0", engine="paced", pid=1, host="h", max_running=4, max_context_tokens=64)
    manager.on_agent_frame("peer", hello, 0.1)
    if goodbye:
        told = manager.on_agent_frame("peer", Goodbye(cause="SIGTERM"), 0.2)
    else:
        told = manager.on_agent_lost("peer", "the connection broke off", 0.2)
    (end,) = [event for event in told.events if is_end(event)]
    assert is_loss(end) is lost


def test_a_refused_connection_is_told_with_its_cause_and_how_often() -> None:
    refused = events.ConnectionRefused(ts=1, peer="10.0.0.7", door="agent", cause="the token is wrong", times=4)
    assert said(refused) == ["a connection from 10.0.0.7 was refused: the token is wrong (4 so far)"]


@pytest.mark.parametrize("width", [20, 40, 50, 64, 80, 100, 160])
@pytest.mark.parametrize("height", [8, 16, 24, 50])
def test_no_line_is_wider_than_the_terminal(width: int, height: int) -> None:
    for view in (RunView(), run_view(), run_view(instances=64)):
        for line in render_text(view, width, height).splitlines():
            assert len(line) <= width


def test_a_wide_terminal_shows_all_there_is() -> None:
    text = render_text(run_view(), 100, 40)
    for words in (
        "tiny-001",
        "step 5 of 8",
        "0.550",
        "from 0.300",
        "held-out accuracy      0.540",
        "25 % of its time (0.50 of 2.00 s in the last step)",
        "2,000 (56,789 so far)",
        "20 (3 queued, 1,234 finished, 5 moved)",
        "● engine-0",
        "× engine-1 is gone: the connection broke off",
        "5 samples of engine-1 go on elsewhere",
    ):
        assert words in text, words


def test_a_narrow_terminal_keeps_the_figures() -> None:
    """A picture at 44 columns, as it stood when it was last looked at."""
    assert render_text(run_view(), 44, 22) == NARROW


CAUSE = "an instance with weight version 12 (none has joined yet); the last one, i-3, left because: it was cut off"


@pytest.mark.parametrize("width", [44, 60, 80, 100])
def test_what_is_waited_for_and_why_one_is_gone_is_readable_at_any_width(width: int) -> None:
    view = run_view()
    gone = row(1, "gone", 0, 0.0, "sent a frame that was refused: not msgpack")
    view.apply_fleet(FleetSnapshot(ts=view.now_ts, instances=(row(0), gone), waiting_for=CAUSE))
    text = " ".join(render_text(view, width, 40).split())
    assert f"waiting for {CAUSE}" in text
    assert "× engine-1 is gone: sent a frame that was refused: not msgpack" in text


@pytest.mark.parametrize("width", range(30, 110, 4))
def test_figures_beside_a_figure_are_whole_or_not_there(width: int) -> None:
    view = run_view()
    view.apply_fleet(replace(view.fleet, queued=234, finished=33_990, failed=2))
    lines = render_text(view, width, 40).splitlines()
    (line,) = (line for line in lines if "in flight, peak" in line)
    assert "…" not in line
    assert line.count("(") == line.count(")") <= 1
    if "(" in line:
        assert "2 failed" in line, "trouble is the last to give way"


def test_a_report_between_two_steps_does_not_hide_what_ran() -> None:
    view = RunView()
    for running in (0, 40, 0):
        rows = (row(0, running=running, rate=100.0 * running),)
        view.apply_fleet(FleetSnapshot(ts=1.0, instances=rows, running=running))
    assert (view.running_peak, view.levelled()[0].running) == (40, 40)
    assert view.levelled()[0].tokens_per_s == pytest.approx(4000 / 3)
    assert view.tokens_per_s == pytest.approx(4000 / 3)
    for _ in range(REPORTS):
        view.apply_fleet(FleetSnapshot(ts=2.0, instances=(row(0, running=0, rate=0.0),)))
    assert (view.running_peak, view.tokens_per_s) == (0, 0.0)


def test_engines_that_leave_when_all_is_done_left_calmly() -> None:
    view = run_view(steps=8, until=8)
    view.apply(instance_changed(START + 30, 0, "ready", "draining", "got SIGTERM"))
    notice = view.apply(instance_changed(START + 30, 0, "draining", "gone", "got SIGTERM", orderly=True))
    assert notice is not None
    assert (str(notice), notice.mood) == ("engine-0 left, the run ended", "plain")
    assert "leaving" not in render_text(view)
    view.apply_fleet(FleetSnapshot(ts=START + 31, instances=(row(0, "gone", cause="got SIGTERM", orderly=True),)))
    text = render_text(view)
    assert "○ engine-0 left, the run ended" in text
    assert "× engine-0" not in text


def test_an_engine_that_the_end_of_a_failed_run_stopped_in_its_start_was_not_killed() -> None:
    exited = events.EngineExited(ts=1, name="engine-0", pid=7, exit_code=-15, cause="the run ended")
    assert said(exited) == ["engine-0 left, the run ended"]
    view = RunView()
    view.apply_fleet(FleetSnapshot(ts=1, instances=(row(0, "joining"),)))
    view.apply(exited)
    assert "○ engine-0 left, the run ended" in render_text(view)


def test_one_that_left_in_mid_run_says_why_and_is_no_loss() -> None:
    view = run_view(until=5)
    view.apply_fleet(FleetSnapshot(ts=START + 31, instances=(row(0, "gone", cause="got SIGTERM", orderly=True),)))
    assert "○ engine-0 left: got SIGTERM" in render_text(view)


def test_a_run_that_waits_in_vain_is_one_story() -> None:
    why = "batch train-53 made no progress for 15.0 s (deadline_s = 15): 12 samples wait for an instance"
    assert said(
        events.WaitingForInstances(ts=1, waiting_for="an instance", samples=12),
        events.BatchEnded(ts=16, batch="train-53", samples=4, failed=0, tokens=9, cause=why),
        events.WaitingOver(ts=16, waited_s=15.0),
        events.RunFinished(ts=17, wall_s=60.0, outcome=f"DeadlineExceeded: {why}"),
    ) == ["waiting for an instance; 12 samples to go", why, "the run ended after 60 s: DeadlineExceeded"]


def test_a_wait_after_one_in_vain_may_be_over_again() -> None:
    told = said(
        events.BatchEnded(ts=1, batch="eval-1", samples=0, failed=0, tokens=0, cause="cancelled"),
        events.WaitingForInstances(ts=2, waiting_for="an instance", samples=12),
        events.WaitingOver(ts=5, waited_s=3.0),
    )
    assert told[-1] == "the wait is over after 3.0 s"


def test_an_error_that_nobody_told_yet_is_told_when_the_run_ends() -> None:
    assert said(events.RunFinished(ts=17, wall_s=60.0, outcome="StorageError: the disk is full")) == [
        "the run ended after 60 s: StorageError: the disk is full"
    ]


def test_many_instances_are_counted_and_not_listed() -> None:
    text = render_text(run_view(instances=64), 100, 30)
    assert "more" in text
    assert text.count("● engine-") < 20


def test_text_of_other_machines_is_only_text() -> None:
    view = run_view()
    view.apply(events.Warned(ts=START + 20, where="[red]x[/red]", message="[/bad]\x1b[31m\r\n\x07"))
    view.apply_fleet(FleetSnapshot(ts=START + 21, instances=(row(7, "gone", cause="\x1b[2J[b]"),), waiting_for="\x1b["))
    text = render_text(view, 100, 40)
    assert "[red]x[/red]: [/bad] [31m" in text
    assert " [2J[b]" in text
    assert "\x1b" not in text


def test_the_svg_shows_what_the_terminal_shows() -> None:
    svg = render_svg(run_view(), 100, 40)
    assert svg.startswith("<svg")
    assert "penstock train: tiny-001" in svg.replace("&#160;", " ")


def test_a_finished_run_says_so() -> None:
    view = RunView()
    for event in run_events():
        view.apply(event)
    assert view.remaining_s is None
    assert "0:18, done" in render_text(view)


def test_bars_rise_with_their_values() -> None:
    assert spark([0.0, 0.5, 1.0], 0.0, 1.0) == ["▁▅█"]
    assert spark([0.0, 1.0, math.nan], 0.0, 1.0, lines=2) == [" █ ", "▁█ "]
    assert spark([5.0], 0.0, 1.0) == ["█"]
    assert spark([3.0, 3.0], 3.0, 3.0) == ["▅▅"], "all alike stand at half height"


@given(
    st.lists(st.tuples(st.integers(0, 99), st.floats(allow_nan=True, allow_infinity=False)), max_size=50),
    st.integers(1, 60),
)
def test_curves_have_one_value_a_column_and_lie_within_the_points(points: list[tuple[int, float]], width: int) -> None:
    columns = columns_of(points, steps=100, width=width)
    assert len(columns) == width
    values = [value for _, value in points if value == value]
    shown = [value for value in columns if value == value]
    assert bool(shown) == bool(values)
    slack = 1e-6 * max((abs(value) for value in values), default=0.0)
    assert all(min(values) - slack <= value <= max(values) + slack for value in shown)


def test_a_held_figure_is_carried_on_to_its_last_point_and_no_further() -> None:
    columns = columns_of([(0, 0.1), (50, 0.2)], steps=100, width=10, hold=True)
    assert columns[:6] == [0.1, 0.1, 0.1, 0.1, 0.1, 0.2]
    assert all(math.isnan(value) for value in columns[6:])


NARROW = """\

  Penstock  tiny-001
  ━━━━━━━━━━━━━━━━━──────────  step 5 of 8

  reward              0.550 from 0.300
  held-out accuracy   0.540 from 0.300

  trainer waits           25 % of its time
  tokens/s               2,000
  in flight, peak           20 (3 queued)
  weight version             4

  instance      state       peak  tokens/s
  ● engine-0    ready         10     1,000
  ● engine-2    ready         10     1,000
  × engine-1 is gone: the connection broke
    off

     0:11  engine-1 is gone: the
           connection broke off
     0:11  5 samples of engine-1 go on
           elsewhere from their last …"""
