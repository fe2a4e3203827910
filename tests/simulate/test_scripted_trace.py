"""What the scripted trace makes of a measured run: the same accidents in the same steps, and windows that add up."""

from __future__ import annotations

import pytest

from penstock.bench import scripted_trace
from penstock.bench.scripted_trace import Measured, Round
from penstock.instance.engine import SequenceStart
from penstock.instance.paced import paced_tokens
from penstock.observe.events import InstanceChanged, WeightsLoaded, WindowChanged
from penstock.sample import SampleId, sample_seed
from penstock.wire import Sampling


def changed(ts: float, name: str, before: str, after: str) -> InstanceChanged:
    return InstanceChanged(ts=ts, instance=name, name=name, before=before, after=after, cause="script")


def window(ts: float, batch: str, what: str, elapsed_s: float) -> WindowChanged:
    return WindowChanged(ts=ts, batch=batch, what=what, fleet=1, elapsed_s=elapsed_s, cause="why", window_s=1.0)


def measured() -> Measured:
    step = {"step_s": 8.0, "train_s": 4.0, "window_s": 1.0, "trainer_wait_s": 2.9}
    return Measured(
        began_ts=1000.0,
        steps=[dict(step) for _ in range(3)],
        began_s=[0.0, 8.0, 16.0],
        events=[
            WeightsLoaded(ts=999.0, instance="spot-0", version=0, nbytes=1, wall_s=0.02),
            changed(998.0, "spot-0", "", "joining"),
            changed(998.0, "own-0", "", "joining"),
            changed(1001.0, "spot-1", "", "joining"),
            changed(1001.1, "spot-1", "joining", "loading"),
            window(1000.0, "train-0", "opened", 0.0),
            window(1001.0, "train-0", "closed", 1.0),
            window(1008.0, "train-1", "opened", 0.0),
            window(1009.0, "train-1", "closed", 1.0),
            changed(1010.0, "spot-0", "ready", "gone"),
            changed(1010.0, "spot-1", "ready", "gone"),
            window(1016.0, "train-2", "opened", 0.0),
            window(1017.0, "train-2", "closed", 1.0),
            changed(1099.0, "own-0", "ready", "gone"),
        ],
    )


def test_machines_come_and_go_in_the_step_and_at_the_moment_of_it_that_was_measured() -> None:
    first, later = scripted_trace._changes(measured())
    assert [(change.at_s, change.node, change.there) for change in first] == [(0.0, "spot-0", True)]
    assert {step: [(c.at_s, c.node, c.there) for c in changes] for step, changes in later.items()} == {
        0: [(1.0, "spot-1", True)],
        1: [(2.0, "spot-0", False), (2.0, "spot-1", False)],
    }


def test_a_machine_whose_first_load_took_longer_than_loads_do_comes_as_much_later() -> None:
    run = measured()
    run.events.append(WeightsLoaded(ts=1001.4, instance="spot-1", version=0, nbytes=1, wall_s=0.3))
    run.events.append(WeightsLoaded(ts=1009.0, instance="spot-1", version=1, nbytes=1, wall_s=0.01))
    assert run.load_s == pytest.approx(0.11)
    first, later = scripted_trace._changes(run)
    assert [change.at_s for change in first] == [0.0], "those that were there before the run"
    assert [change.at_s for change in later[0]] == [pytest.approx(1.0 + 0.3 - 0.11)]


def test_the_simulator_does_as_many_steps_and_none_is_stuck_when_the_fleet_vanishes() -> None:
    steps = scripted_trace._simulate(measured())
    assert [step.number for step in steps] == [0, 1, 2]
    # Its own machines generated all of the last step.
    assert steps[2].times.fleet == 0
    assert steps[2].times.window_s > steps[0].times.window_s
    results = {result.what: result for result in scripted_trace._results([Round(measured(), [steps])])}
    assert results["changes of the window that no event explains"].value == 0
    assert results["trainer waits, real loop"].value == pytest.approx(2.9 / 8.0)


@pytest.mark.parametrize("fault", ["a window without events", "a window longer than its events", "no cause"])
def test_windows_that_events_do_not_account_for_are_counted(fault: str) -> None:
    run = measured()
    if fault == "a window without events":
        run.events = [e for e in run.events if not (isinstance(e, WindowChanged) and e.batch == "train-1")]
    elif fault == "a window longer than its events":
        run.steps[1]["window_s"] = 2.0
    else:
        next(event for event in run.events if isinstance(event, WindowChanged)).cause = ""
    results = {r.what: r for r in scripted_trace._results([Round(run, [scripted_trace._simulate(measured())])])}
    row = results["changes of the window that no event explains"]
    assert (row.value, row.met) == (1.0, False)


def test_of_several_rounds_the_median_counts_and_of_what_must_not_be_the_sum() -> None:
    rounds = []
    for wait_s in (2.9, 0.5, 3.2):
        run = measured()
        for step in run.steps:
            step["trainer_wait_s"], step["step_s"] = wait_s, 5.1 + wait_s
        run.steps[1]["window_s"] = 2.0
        rounds.append(Round(run, [scripted_trace._simulate(measured())]))
    results = {result.what: result for result in scripted_trace._results(rounds)}
    assert results["trainer waits, real loop"].value == pytest.approx(rounds[0].wait)
    ratio = results["trainer waits, real loop / simulator"]
    assert ratio.value == pytest.approx(sorted(each.wait / each.sim_wait for each in rounds)[1])
    assert ratio.note.count(",") == 2
    assert results["changes of the window that no event explains"].value == 3


def test_of_several_replays_of_a_round_the_mean_counts() -> None:
    replays = [scripted_trace._simulate(measured(), first_tick_s) for first_tick_s in (0.02, 0.05, 0.09)]
    alone = [Round(measured(), [replay]) for replay in replays]
    together = Round(measured(), replays)
    assert together.sim_waits == [each.sim_wait for each in alone]
    assert together.sim_wait == pytest.approx(sum(each.sim_wait for each in alone) / 3)
    assert together.sim_idle == pytest.approx(sum(each.sim_idle for each in alone) / 3)
    # A manager that looks at other moments ends windows at other moments.
    assert len({steps[0].times.window_s for steps in replays}) == 3


def test_the_simulator_is_given_the_lengths_that_paced_engines_draw() -> None:
    number, run_seed = 5, 2
    seed = sample_seed(run_seed, SampleId("train-2", 0, number))
    sampling = Sampling(max_new_tokens=scripted_trace.MOST_TOKENS, stop_ids=(scripted_trace.STOP_ID,))
    start = SequenceStart(0, seed, [0], [], sampling)
    drawn, _ = paced_tokens(start, 0, scripted_trace.MOST_TOKENS, scripted_trace.VOCAB, 1 / scripted_trace.MEAN_TOKENS)
    assert scripted_trace._samples(run_seed, 2)[number].length == len(drawn)
