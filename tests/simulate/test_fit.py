"""A profile fitted from an event log gives back the machines that the log is of, and says where it can't."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import cli
from penstock.errors import ConfigError
from penstock.observe import events
from penstock.observe.events import Event, Work
from penstock.observe.log import EventLog
from penstock.rollout.offload import FixedWindow, Offload
from penstock.simulate.fit import NEVER_FULL, fit_profile
from penstock.simulate.fit_report import as_json, as_text
from penstock.simulate.least_squares import Prior, robust_fit
from penstock.simulate.observed import gather
from penstock.simulate.outcome import Outcome
from penstock.simulate.own_run import OFF, own_run
from penstock.simulate.profiles import Profile, shipped
from penstock.simulate.strategy import Strategy
from penstock.simulate.traces import Trace
from penstock.simulate.world import simulate

TRUTH = (0.006, 2e-5, 3e-8, 2e-5)
CONFIG = {
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 8, "sampling": {"max_new_tokens": 900}},
    "train": {"min_samples_per_micro_batch": 16},
}


def work(rng: random.Random, slowness: float = 1.0, noise: float = 0.0, running: int = 0) -> Work:
    size, steps = running or rng.choice([1, 4, 16, 60, 200]), rng.randrange(100, 900)
    context, prefilled = rng.randrange(200, 3000) * size, rng.randrange(0, 4000)
    wall_s = TRUTH[0] * steps + TRUTH[1] * steps * size + TRUTH[2] * steps * context + TRUTH[3] * prefilled
    wall_s *= slowness * (1 + rng.gauss(0, noise))
    return Work(
        wall_s=wall_s,
        steps=steps,
        tokens=steps * size,
        context_steps=steps * context,
        prefilled=prefilled,
        most_context=context,
    )


def worked(rng: random.Random, name: str, rows: int = 12, reserved: bool = False, **how: float) -> Event:
    found = [work(rng, **how) for _ in range(rows)]  # type: ignore[arg-type]
    return events.InstanceWorked(ts=0.0, instance=name, name=name, reserved=reserved, max_running=256, work=found)


def log_of(*work_events: Event, steps: int = 5) -> list[Event]:
    log: list[Event] = [events.RunStarted(ts=0.0, run="mine", version="1", config=CONFIG), *work_events]
    log += [events.EngineStarted(ts=1.0, name="a", pid=1, cause=""), joined("a", 4.5)]
    for step in range(steps):
        log.append(events.WeightsPublished(ts=0.0, version=step, nbytes=10**9, wall_s=0.1))
        log += [events.WeightsLoaded(ts=0.0, instance=i, version=step, nbytes=10, wall_s=0.5) for i in "ab"]
        log.append(answers(f"train-{step}", step))
        metrics = {"response_tokens": 8000.0, "samples": 32.0, "train_s": 9.6, "step_s": 14.0, "trainer_wait_s": 3.0}
        log.append(events.StepFinished(ts=0.0, step=step, metrics=metrics | {"reward_s_mean": 0.25}))
    return log


def joined(name: str, ts: float) -> Event:
    return events.InstanceChanged(ts=ts, instance=name, name=name, before="", after="joining", cause="")


def answers(batch: str, step: int = 0) -> Event:
    lengths = [100.0 * 1.05**step * (1 + k / 10) for k in range(21)]
    return events.AnswersEnded(
        ts=0.0, batch=batch, prompts=4, samples=32, prompt_tokens=50.0, quantiles=lengths, prompt_share=0.4
    )


def test_a_stall_in_the_one_row_with_prefill_is_not_what_prefill_costs() -> None:
    rng = random.Random(3)
    slow = [msgspec.structs.replace(work(rng, slowness=2.0), prefilled=0) for _ in range(12)]
    bare_s = [2 * (TRUTH[0] * row.steps + TRUTH[1] * row.tokens + TRUTH[2] * row.context_steps) for row in slow]
    slow = [msgspec.structs.replace(row, wall_s=s * (1 + rng.gauss(0, 0.02))) for row, s in zip(slow, bare_s)]
    shortest = min(range(12), key=lambda k: slow[k].wall_s)
    row = slow[shortest]
    slow[shortest] = msgspec.structs.replace(row, prefilled=16, wall_s=row.wall_s * 1.03)
    of_it = events.InstanceWorked(ts=0.0, instance="s", name="s", reserved=False, max_running=256, work=slow)
    profile = fit_profile(gather(log_of(worked(rng, "a", rows=30, noise=0.02), of_it))).profile
    found = profile.kinds["spot-s"]
    # The stall over 16 tokens comes to more than twenty times as much.
    assert 0.03 * row.wall_s / 16 > 20 * 2 * TRUTH[3]
    assert 0.3 * 2 * TRUTH[3] < found.prefill_s_per_token < 3 * 2 * TRUTH[3]
    assert found.step_base_s == pytest.approx(2 * TRUTH[0], rel=0.1)


def test_what_is_known_before_counts_for_as_much_as_rows_leave_open() -> None:
    walls = np.array([1.0, 2.0, 4.0, 3.0])
    design = np.stack([walls, np.zeros(4)], axis=1)
    none = robust_fit(design, walls, walls, {0: Prior(7.0, 7.0), 1: Prior(5.0, 1.0)})
    assert none.values == pytest.approx((1.0, 5.0), rel=1e-4)
    # One row alone shows the second: it is a tenth off the first one's, as rows are here.
    noisy = walls * np.array([1.1, 0.9, 1.1, 1.1])
    design[3, 1] = 1.0
    alone = robust_fit(design, noisy, np.ones(4)).values[1]
    tight = robust_fit(design, noisy, np.ones(4), {1: Prior(0.0, 0.01)}).values[1]
    loose = robust_fit(design, noisy, np.ones(4), {1: Prior(0.0, 100.0)}).values[1]
    assert tight < 0.05 * alone
    assert loose == pytest.approx(alone, rel=0.05)


def test_a_profile_sends_and_reports_as_its_run_did() -> None:
    log = log_of(worked(random.Random(1), "a"))
    rollout = CONFIG["rollout"] | {"max_pending_per_instance": 3, "heartbeat_s": 0.25}
    log[0] = events.RunStarted(ts=0.0, run="mine", version="1", config=CONFIG | {"rollout": rollout})
    profile = fit_profile(gather(log)).profile
    assert (profile.max_pending_per_instance, profile.heartbeat_s) == (3, 0.25)


def test_the_machine_that_made_the_log_is_found() -> None:
    rng = random.Random(1)
    profile = fit_profile(gather(log_of(worked(rng, "a"), worked(rng, "b")))).profile
    spot = profile.spot
    found = (spot.step_base_s, spot.sequence_s, spot.context_s, spot.prefill_s_per_token)
    assert found == pytest.approx(TRUTH, rel=1e-3)
    assert profile.training.s_per_token == pytest.approx(9.6 / (8000 + 32 * 50))
    assert profile.training.optimizer_s == pytest.approx(14.0 - 9.6 - 3.0)
    assert profile.training.reward_s == 0.25
    assert spot.boot_s == 3.5
    assert spot.link_gbit_s == pytest.approx(16.0)
    assert profile.store_gbit_s == pytest.approx(32.0)
    assert (profile.prompts, profile.samples_per_prompt, profile.lengths.max_tokens) == (4, 8, 900)
    assert profile.lengths.growth_per_step == pytest.approx(0.05, rel=0.01)


def test_each_part_of_a_profile_is_from_its_own_place_in_the_log() -> None:
    rng = random.Random(1)
    own = worked(rng, "own", rows=20, reserved=True, slowness=2.0)
    log = log_of(own, worked(rng, "a", rows=30), worked(rng, "other", reserved=True, slowness=2.0))
    # Evaluations are no training.
    log.append(events.AnswersEnded(**{**msgspec.structs.asdict(answers("eval-3")), "prompt_tokens": 900.0}))
    profile = fit_profile(gather(log)).profile
    assert profile.name == "mine"
    assert profile.reserved_instances == 2
    assert profile.reserved.step_base_s == pytest.approx(2 * TRUTH[0], rel=1e-3)
    assert profile.spot.step_base_s == pytest.approx(TRUTH[0], rel=1e-3)
    assert profile.spot.max_running == profile.reserved.max_running == 256
    assert profile.weights_gb == 1.0
    training = profile.training
    assert (training.micro_batch_samples, training.optimizer_s) == (16, pytest.approx(1.4))
    assert training.s_per_token == pytest.approx(9.6 / (8000 + 32 * 50))
    lengths = profile.lengths
    assert (lengths.prompt_tokens, lengths.prompt_share) == (50, pytest.approx(0.4))
    # As they were at the first step: they grow by a twentieth from there.
    assert lengths.quantiles == pytest.approx([100.0 * (1 + k / 10) for k in range(21)], rel=5e-3)
    assert lengths.median_tokens == pytest.approx(200.0, rel=5e-3)


def test_the_first_step_in_which_engines_warm_up_says_nothing_of_training() -> None:
    log = log_of(worked(random.Random(1), "a"), steps=2)
    first = next(event for event in log if isinstance(event, events.StepFinished))
    first.metrics |= {"train_s": 50.0, "step_s": 90.0}
    training = fit_profile(gather(log)).profile.training
    assert training.s_per_token == pytest.approx(9.6 / (8000 + 32 * 50))
    assert training.optimizer_s == pytest.approx(1.4)


def test_what_was_done_ahead_of_whole_groups_can_be_done_so_in_the_profile() -> None:
    log = log_of(worked(random.Random(1), "a"), steps=2)
    assert fit_profile(gather(log)).profile.training.ahead_share == 0.0
    last = [event for event in log if isinstance(event, events.StepFinished)][-1]
    last.metrics |= {"ahead_s": 0.3, "ahead_tokens": 1000.0}
    assert fit_profile(gather(log)).profile.training.ahead_share == pytest.approx(3e-4 / (9.6 / (8000 + 32 * 50)))
    last.metrics |= {"ahead_s": 30.0}
    training = fit_profile(gather(log)).profile.training
    assert training.ahead_share < 1
    assert (training.micro_batch_samples, training.ahead_samples) == (16, 4), "as many at a time as in the run"


def test_a_growth_within_its_own_error_is_none() -> None:
    log = [event for event in log_of(worked(random.Random(1), "a")) if not isinstance(event, events.AnswersEnded)]
    for step, factor in enumerate((1.0, 1.3, 0.8, 1.2, 1.05)):
        log.append(msgspec.structs.replace(answers(f"train-{step}"), quantiles=[factor * 100.0] * 21))  # type: ignore[type-var]
    lengths = fit_profile(gather(log)).profile.lengths
    assert lengths.growth_per_step == 0.0
    assert lengths.median_tokens == pytest.approx(107.0)


def test_machines_with_other_places_are_of_another_kind_though_they_are_as_fast() -> None:
    rng = random.Random(3)
    wide = msgspec.structs.replace(worked(rng, "wide", rows=8), max_running=512)  # type: ignore[type-var]
    fitted = fit_profile(gather(log_of(worked(rng, "a", rows=20), wide)))
    assert fitted.members == {"spot": ["a"], "spot-wide": ["wide"]}
    assert fitted.profile.spot.max_running == 256
    assert fitted.profile.kinds["spot-wide"].max_running == 512


def test_what_a_fit_says_of_its_errors_is_which_of_them_they_are() -> None:
    fitted = fit_profile(gather(log_of(worked(random.Random(7), "a", 30, noise=0.05))))
    solution = fitted.residuals["spot"]
    assert 0 < solution.median_residual < solution.worst_residual / 2
    words = f"spot (a): 30 rows, off by {solution.median_residual:.1%} in the middle and {solution.worst_residual:.1%}"
    assert as_text(fitted).startswith(words)
    assert as_json(fitted)["residuals"]["spot"] == {
        "instances": ["a"],
        "rows": 30,
        "median": solution.median_residual,
        "worst": solution.worst_residual,
    }


def came(version: int, wall_s: float, nbytes: int, way: str) -> Event:
    return events.WeightsLoaded(ts=0.0, instance="a", version=version, nbytes=nbytes, wall_s=wall_s, way=way)


@pytest.mark.parametrize(("wall_s", "nbytes"), [(0.3, 10**7), (0.21, 2 * 10**8), (0.201, 2 * 10**8)])
def test_differences_take_as_long_as_they_took_and_a_new_machine_the_time_of_a_whole_version(
    wall_s: float, nbytes: int
) -> None:
    log = [event for event in log_of(worked(random.Random(1), "a")) if not isinstance(event, events.WeightsLoaded)]
    log += [came(0, 1.0, 10**9, "raw by tcp"), *(came(v, wall_s, nbytes, "delta by tcp") for v in range(1, 5))]
    profile = fit_profile(gather(log)).profile
    assert profile.agent_pull_s() == pytest.approx(1.0)
    assert profile.agent_pull_s(difference=True) == pytest.approx(wall_s)


@pytest.mark.parametrize("way", ["delta by tcp", "raw by shm"])
def test_where_one_kind_of_pull_was_seen_or_differences_were_no_faster_all_count_alike(way: str) -> None:
    log = [event for event in log_of(worked(random.Random(1), "a")) if not isinstance(event, events.WeightsLoaded)]
    alone = fit_profile(gather([*log, *(came(v, 0.5, 10, way) for v in range(5))])).profile
    assert alone.difference_gb is None
    assert alone.agent_pull_s(difference=True) == alone.pull_s() == pytest.approx(0.5)
    slower = fit_profile(gather([*log, came(0, 0.2, 10, "raw by tcp"), came(1, 0.5, 10, way)])).profile
    assert slower.difference_gb is None
    assert slower.pull_s() == pytest.approx(0.35, rel=0.2)


def test_noise_and_a_few_stalls_do_not_bend_it() -> None:
    rng = random.Random(2)
    stalled = worked(rng, "c", rows=3, slowness=8.0)
    log = log_of(worked(rng, "a", 40, noise=0.05), worked(rng, "b", 40, noise=0.05))
    log.insert(
        1,
        events.InstanceWorked(
            ts=0.0,
            instance="a",
            name="a",
            reserved=False,
            max_running=256,
            work=stalled.work,  # type: ignore[union-attr]
        ),
    )
    spot = fit_profile(gather(log)).profile.spot
    for size, context in ((1, 500), (50, 50_000), (200, 400_000)):
        expected = TRUTH[0] + size * TRUTH[1] + context * TRUTH[2]
        assert spot.step_s(size, context) == pytest.approx(expected, rel=0.08)


def test_machines_of_two_speeds_are_two_kinds() -> None:
    rng = random.Random(3)
    fitted = fit_profile(gather(log_of(worked(rng, "a", 20), worked(rng, "b", 20), worked(rng, "slow", slowness=2.0))))
    assert fitted.members == {"spot": ["a", "b"], "spot-slow": ["slow"]}
    slow = fitted.profile.kinds["spot-slow"]
    assert fitted.profile.remote("spot-slow:3") is slow
    assert slow.step_s(100, 1e5) == pytest.approx(2 * fitted.profile.spot.step_s(100, 1e5), rel=0.01)


def test_what_the_run_leaves_open_is_said() -> None:
    rng = random.Random(4)
    fitted = fit_profile(gather(log_of(worked(rng, "a", running=16))))
    said = " ".join(fitted.notes)
    for part in ("always about 16 sequences", "no reserved engine", "prices"):
        assert part in said
    assert fitted.profile.reserved_instances == 0
    assert "beside the trainer" not in said


@pytest.mark.parametrize(("window", "beside"), [("off", True), ("auto", False), ("30", False)])
def test_engines_that_generated_beside_the_trainer_do_so_in_the_profile(window: str, beside: bool) -> None:
    rng = random.Random(1)
    log = log_of(worked(rng, "own", rows=20, reserved=True), worked(rng, "a", rows=30))
    begun = log[0]
    assert isinstance(begun, events.RunStarted)
    log[0] = msgspec.structs.replace(
        begun, config={**begun.config, "rollout": {**begun.config["rollout"], "window": window}}
    )
    fitted = fit_profile(gather(log))
    assert fitted.profile.reserved_beside is beside
    assert any("generated beside the trainer" in note for note in fitted.notes) is beside


def full(event: Event, most_context: int) -> Event:
    """The same, and its first row says that memory was full."""
    assert isinstance(event, events.InstanceWorked)
    first = msgspec.structs.replace(event.work[0], full=True, most_context=most_context)
    return msgspec.structs.replace(event, work=[first, *event.work[1:]])


def test_a_memory_that_was_full_bounds_the_machine_unless_it_held_more_at_another_time() -> None:
    rows = worked(random.Random(6), "a")
    assert isinstance(rows, events.InstanceWorked)
    most = max(row.most_context for row in rows.work)
    assert fit_profile(gather(log_of(rows))).profile.spot.kv_tokens == NEVER_FULL
    assert fit_profile(gather(log_of(full(rows, most)))).profile.spot.kv_tokens == most
    doubtful = fit_profile(gather(log_of(full(rows, most // 2))))
    assert doubtful.profile.spot.kv_tokens == NEVER_FULL
    assert any("its memory is not known" in note for note in doubtful.notes)


def test_a_fit_that_does_not_explain_its_rows_says_so() -> None:
    rng = random.Random(7)
    said = " ".join(fit_profile(gather(log_of(worked(rng, "a", 60, noise=0.3)))).notes)
    assert "WARNING" in said
    said = " ".join(fit_profile(gather(log_of(worked(rng, "a", 60, noise=0.03)))).notes)
    assert "WARNING" not in said


def run_log(step_s: float) -> list[Event]:
    """Two machines that generate five steps of 32 answers, of which the second leaves within the third step."""
    log = log_of(worked(random.Random(8), "a", 20), worked(random.Random(9), "b", 20))
    rows = [event for event in log if not isinstance(event, events.StepFinished)]
    rows += [changed("a", "ready", 90.0), changed("b", "ready", 95.0), changed("b", "gone", 100.0 + 2.5 * step_s)]
    for step in range(5):
        metrics = {"response_tokens": 8000.0, "samples": 32.0, "train_s": 9.6, "step_s": step_s, "trainer_wait_s": 3.0}
        rows.append(events.StepFinished(ts=100.0 + step_s * (step + 1), step=step, metrics=metrics))
    return rows


def changed(name: str, after: str, ts: float) -> Event:
    return events.InstanceChanged(ts=ts, instance=name, name=name, before="loading", after=after, cause="")


def test_a_fit_is_checked_against_its_own_run() -> None:
    seen = gather(run_log(14.0))
    fitted = fit_profile(seen)
    first = own_run(seen, fitted)
    assert first is not None
    # A run that took as long as is predicted is explained; one that took twice as long is not.
    for times in (1, 2):
        own = own_run(gather(run_log(times * first.predicted_s)), fitted)
        assert own is not None
        assert own.off == pytest.approx(1 / times - 1, abs=OFF / 2)
        assert ("does not explain its run" in own.words) == (times == 2)


def with_config(log: list[Event], **rollout: object) -> list[Event]:
    config = {**CONFIG, "rollout": {**CONFIG["rollout"], **rollout}}
    return [events.RunStarted(ts=0.0, run="mine", version="1", config=config), *log[1:]]


@pytest.mark.parametrize(("window", "kind"), [("off", None), ("auto", Offload), ("2.5", FixedWindow)])
def test_the_own_run_is_simulated_with_its_machines_when_they_were_there_and_its_window(
    window: str, kind: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`b` leaves in the third step and comes again in the fourth; `own` is the trainer's."""
    log = with_config(run_log(14.0), window=window)
    log += [worked(random.Random(4), "own", 20, reserved=True, slowness=3.0)]
    log += [changed("own", "ready", 80.0), changed("b", "ready", 150.0), changed("a", "gone", 170.0)]
    seen = gather(log)
    fitted = fit_profile(seen)
    runs: list[tuple[Profile, Trace, Strategy, dict[str, object]]] = []

    def simulated(profile: Profile, trace: Trace, strategy: Strategy, **how: object) -> Outcome:
        runs.append((profile, trace, strategy, how))
        return simulate(profile, trace, strategy, **how)  # type: ignore[arg-type]

    monkeypatch.setattr("penstock.simulate.own_run.simulate", simulated)
    assert own_run(seen, fitted) is not None
    assert [how for *_, how in runs] == [{"steps": 5, "seed": seed} for seed in (0, 1, 2)]
    profile, trace, strategy, _ = runs[0]
    shown = [(change.at_s, change.node, change.there) for change in trace.changes]
    everyone = [
        (0.0, "spot:a.1", True),
        (0.0, "spot:b.1", True),
        (35.0, "spot:b.1", False),
        (50.0, "spot:b.2", True),
    ]
    turns = kind is not None
    assert sorted(shown) == sorted(everyone if turns else [*everyone, (0.0, "reserved:own.1", True)])
    assert strategy.window is None if kind is None else isinstance(strategy.window, kind)
    if isinstance(strategy.window, FixedWindow):
        assert strategy.window.seconds == 2.5
    assert profile.reserved_instances == int(turns)
    if not turns:
        assert profile.remote("reserved:own.1") == profile.reserved != profile.spot


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        (events.StepFinished, "work of instances"),
        (events.InstanceWorked, "finished steps"),
        (events.RunStarted, "lengths of answers"),
    ],
)
def test_too_little_is_refused_with_what_is_missing(keep: type, says: str) -> None:
    log = [event for event in log_of(worked(random.Random(0), "a")) if isinstance(event, keep)]
    with pytest.raises(ConfigError, match=says):
        fit_profile(gather(log))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.integers(0, 1000))
def test_unknowns_at_or_above_zero_are_found_exactly_where_the_rows_are_exact(truth: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.uniform(0.1, 1.0, (20, 3))
    measured = rows @ np.array(truth) + 1e-9
    solution = robust_fit(rows, measured, np.ones(20))
    assert min(solution.values) >= 0
    assert np.allclose(rows @ np.array(solution.values), measured, rtol=1e-3, atol=1e-6)


def test_fit_writes_a_profile_that_simulates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(5)
    with EventLog(tmp_path / "events.jsonl") as log:
        for event in log_of(worked(rng, "a"), worked(rng, "b", reserved=True), answers("eval-3")):
            log.emit(event)
    assert cli.main(["simulate", "fit", str(tmp_path), "--prices", "80,5,20", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["residuals"]["spot"]["median"] < 0.01
    assert shipped(str(tmp_path / "profile.toml")).model_dump(mode="json") == said["profile"]
    words = ["simulate", str(tmp_path / "profile.toml"), "--machines", "2", "--steps", "3", "--json"]
    assert cli.main(words) == 0
    assert all(row["tokens_per_dollar"] > 0 for row in json.loads(capsys.readouterr().out)["rows"])


def test_fit_has_the_prices_that_are_given_and_writes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        for event in log_of(worked(random.Random(5), "a")):
            log.emit(event)
    out = tmp_path / "mine.toml"
    assert cli.main(["simulate", "fit", str(tmp_path), "--prices", "80,5,20", "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == str(out)
    assert not (tmp_path / "profile.toml").exists()
    prices = shipped(str(out)).prices
    assert (prices.reserved, prices.spot, prices.on_demand) == (80.0, 5.0, 20.0)
    # What is known of its errors stands in the file as it was printed, and so does whether it explains its run.
    assert "note: the log does not say which instances were there when" in said
    head = out.read_text().partition("\n\n")[0].splitlines()
    assert head == [f"# Fitted from {tmp_path}.", *(f"# {line}" for line in said[:-1])]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fit"], "which run"),
        (["fit", "gone"], "gone: can't be read"),
        (["fit", "foreign"], "foreign:1: not an event"),
        (["fit", "empty"], "too little in this run"),
        (["fit", ".", "--prices", "1,2"], "three numbers"),
        (["fit", "empty", "--machines", "3", "--steps", "3"], "--machines, --steps: of no use with"),
        (["fit", "empty", "--seed", "3"], "--seed: of no use with"),
        (["fit", "empty", "--grid", "machines=2"], "--grid: of no use with"),
        (["fit", "empty", "--picture", "x.png"], "--picture: of no use with"),
        (["fit", "empty", "--hour-worth", "3"], "--hour-worth: of no use with"),
    ],
)
def test_a_fit_that_makes_no_sense_is_refused(
    words: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "foreign").write_text('{"some": "thing"}\n')
    (tmp_path / "empty").write_text("")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["simulate", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_log_that_names_no_machines_is_not_checked() -> None:
    seen = gather(log_of(worked(random.Random(1), "a")))
    assert own_run(seen, fit_profile(seen)) is None
