"""A simulated run: nothing is lost, nothing is faster than it can be, and every option changes what is seen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import MACHINE, small_profile

from penstock.config.run import RolloutConfig
from penstock.rollout.balance import InstanceLoad, Move, PlacedSample, Report, ShortestQueue
from penstock.rollout.balanced import Balanced
from penstock.rollout.balancing import MOVES_S
from penstock.rollout.offload import FixedWindow, Offload
from penstock.rollout.step_replay import Plan
from penstock.simulate.baselines import STRATEGIES, make_strategy
from penstock.simulate.lengths import step_samples
from penstock.simulate.machine import Machine, SimSample
from penstock.simulate.outcome import Outcome
from penstock.simulate.profiles import shipped, shipped_names
from penstock.simulate.strategy import FixedSize, Strategy
from penstock.simulate.traces import Change, Trace, from_counts, static_trace
from penstock.simulate.world import World, simulate


def run(name: str, machines: int, steps: int = 4, **changes: object) -> Outcome:
    profile = small_profile(**changes)
    return simulate(profile, static_trace(machines, 1e9), make_strategy(name, profile, machines=machines), steps=steps)


class _Clocked(ShortestQueue):
    """Notes when it is told and asked."""

    def __init__(self, max_pending: int) -> None:
        super().__init__(max_pending)
        self.world: World
        self.reported: list[float] = []
        self.asked: list[float] = []

    def report(self, report: Report) -> None:
        self.reported.append(self.world.clock.now)

    def moves(
        self, waiting: int, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        self.asked.append(self.world.clock.now)
        return []


class _Followed(Balanced):
    """Notes which plans it is given."""

    def __init__(self, max_pending: int) -> None:
        super().__init__(max_pending)
        self.followed: list[Plan] = []

    def follow(self, plan: Plan) -> None:
        super().follow(plan)
        self.followed.append(plan)


@pytest.mark.parametrize("heartbeat_s", [0.1, 2.0])
def test_reports_come_with_heartbeats_and_moves_at_the_manager_s_times(heartbeat_s: float) -> None:
    profile = small_profile(heartbeat_s=heartbeat_s)
    policy = _Clocked(4)
    world = policy.world = World(profile, static_trace(1, 1e9), Strategy("s", policy, None, FixedSize(1)))
    world.run(steps=3)
    asked = [later - at for at, later in itertools.pairwise(policy.asked)]
    assert asked
    assert asked == pytest.approx([MOVES_S] * len(asked))
    reported = [later - at for at, later in itertools.pairwise(policy.reported)]
    # One that was idle meanwhile says nothing.
    assert min(reported) == pytest.approx(heartbeat_s)
    assert sorted(reported)[len(reported) // 2] < 1.01 * heartbeat_s


class _Swaps(ShortestQueue):
    """Has two machines exchange a running sample, each time that it is asked."""

    def moves(
        self, waiting: int, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        one, other = (load.instance for load in loads)
        lasts = [[sample for sample in placed(name) if sample.running][-1:] for name in (one, other)]
        if not all(lasts):
            return []
        return [Move(one, lasts[0][0].lease, other), Move(other, lasts[1][0].lease, one)]


def test_a_move_costs_its_prefill_and_nothing_else() -> None:
    """Both machines go on with what they were at, whenever their last event was."""
    profile = small_profile(heartbeat_s=7.0)
    strategy = Strategy("s", _Swaps(4), None, FixedSize(2))
    (step,) = simulate(profile, static_trace(2, 1e9), strategy, steps=1).steps
    assert step.moves > 10
    assert [len(step.machine_spans[f"node{k}"]) for k in range(2)] == [1, 1]


def test_strategies_send_as_far_ahead_as_a_run_does() -> None:
    profile = small_profile(max_pending_per_instance=5)
    for name in ("penstock", "penstock-no-moves", "disaggregated", "penstock.rollout.balance:ShortestQueue"):
        balance = make_strategy(name, profile, machines=2).balance
        assert isinstance(balance, ShortestQueue)
        assert balance.max_pending == 5
    assert small_profile().max_pending_per_instance == RolloutConfig().max_pending_per_instance


def test_a_machine_takes_as_long_as_its_steps_do() -> None:
    machine = Machine("m", MACHINE, True)
    for number, length in enumerate((50, 120, 300)):
        machine.give(SimSample(number, number, 100, length))
    machine.settle(0.0)
    began = machine.at_s
    assert began == pytest.approx(300 * MACHINE.prefill_s_per_token)
    ends: list[float] = []
    while (due := machine.next_at()) is not None:
        ends += [due] * len(machine.advance(due))
        machine.settle(due)
    clock, context, lengths = began, 300, [50, 120, 300]
    expected = []
    for step in range(300):
        running = sum(length > step for length in lengths)
        clock += MACHINE.step_s(running, context)
        context += running
        for length in lengths:
            if length == step + 1:
                expected.append(clock)
                context -= 100 + length
    assert ends == pytest.approx(expected, rel=0.01)


def test_a_full_memory_puts_the_last_one_back_and_loses_nothing() -> None:
    machine = Machine("m", MACHINE.model_copy(update={"kv_tokens": 1500}), True)
    for number in range(6):
        machine.give(SimSample(number, number, 50, 600))
    machine.settle(0.0)
    finished = []
    while (due := machine.next_at()) is not None:
        finished += machine.advance(due)
        machine.settle(due)
        assert machine.context <= 1500 + 600
    assert sorted(sample.number for sample in finished) == list(range(6))
    assert machine.retracted > 0
    assert machine.tokens == pytest.approx(6 * 600, rel=1e-6)


@pytest.mark.parametrize("name", list(STRATEGIES))
@pytest.mark.parametrize("machines", [1, 3])
def test_every_strategy_finishes_its_steps_and_none_beats_the_bound(name: str, machines: int) -> None:
    outcome = run(name, machines)
    assert len(outcome.steps) == 4
    for step in outcome.steps:
        assert step.times.step_s >= step.bound_s * (1 - 1e-9)
        assert step.times.step_s >= step.times.train_s


@pytest.mark.parametrize("machines", [0, 2, 4])
def test_what_needs_no_whole_group_is_done_while_there_is_none(machines: int) -> None:
    training = small_profile().training.model_copy(update={"ahead_share": 0.4, "ahead_samples": 2})
    # One window for both, or plans would differ too.
    steps = {}
    for looks in (True, False):
        profile = small_profile(training=training)
        strategy = make_strategy("rlboost", profile, machines=machines)
        strategy.window = FixedWindow(1.0)
        strategy.looks_ahead = looks
        steps[looks] = simulate(profile, static_trace(machines, 1e9), strategy, steps=3).steps
    for ahead, behind in zip(steps[True], steps[False], strict=True):
        assert ahead.times.train_s == pytest.approx(behind.times.train_s), "the same work"
        spans = ahead.trainer_spans
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(spans))
        if machines:
            assert len(spans) > len(behind.trainer_spans)
            assert ahead.times.trainer_wait_s < behind.times.trainer_wait_s
            assert ahead.times.step_s < behind.times.step_s


def test_without_remote_instances_the_step_completes_locally() -> None:
    outcome = run("penstock", 0)
    assert all(step.times.window_s > 0 and step.times.fleet == 0 for step in outcome.steps)
    assert outcome.steps[0].causes[0][1] == "no remote instance"


def test_a_fleet_that_vanishes_in_mid_step_does_not_stop_it() -> None:
    profile = small_profile()
    trace = from_counts([(0.0, 3), (8.0, 0)], 1e6)
    outcome = simulate(profile, trace, make_strategy("penstock", profile, machines=3), steps=3)
    assert len(outcome.steps) == 3
    assert outcome.steps[0].times.preemptions == 3
    assert outcome.steps[2].times.fleet == 0


@pytest.mark.parametrize("name", ["colocated", "disaggregated", "rlboost", "penstock"])
@pytest.mark.parametrize("machines", [0, 2])
def test_a_step_is_its_window_its_training_its_waits_and_what_lies_between(name: str, machines: int) -> None:
    training = small_profile().training
    for times in (step.times for step in run(name, machines).steps):
        between_s = training.optimizer_s + training.switch_s * (times.window_s > 0)
        assert times.step_s == pytest.approx(times.window_s + times.train_s + times.trainer_wait_s + between_s)
        assert (times.window_s > 0) == (machines == 0 or name in ("colocated", "rlboost", "penstock"))


def test_a_window_that_opens_again_counts_from_then_on() -> None:
    """The fleet vanishes while the trainer trains: what it had trained and waited by then is no window."""
    profile = small_profile()
    trace = from_counts([(0.0, 3), (8.0, 0)], 1e6)
    (step,) = simulate(profile, trace, make_strategy("penstock", profile, machines=3), steps=1).steps
    times, training = step.times, profile.training
    assert step.trainer_spans[0][1] < 8.0 < step.trainer_spans[-1][0]
    spent_s = times.window_s + times.train_s + times.trainer_wait_s
    assert times.step_s == pytest.approx(spent_s + 2 * training.switch_s + training.optimizer_s)


def test_a_machine_that_joins_in_mid_step_shortens_it_and_changes_no_limits() -> None:
    profile = small_profile(spot=MACHINE.model_copy(update={"boot_s": 0.0}))
    calm = simulate(profile, static_trace(2, 1e9), make_strategy("penstock", profile, machines=2), steps=2)
    joins_s = calm.steps[0].times.step_s + 0.3 * calm.steps[1].times.window_s
    trace = Trace((Change(0.0, "a", True), Change(0.0, "b", True), Change(joins_s, "c", True)), 1e9)
    strategy = make_strategy("penstock", profile, machines=3)
    balance = strategy.balance = _Followed(strategy.balance.max_pending)  # type: ignore[attr-defined]
    found = simulate(profile, trace, strategy, steps=2)
    assert isinstance(strategy.window, Offload)
    plans = strategy.window.plans
    assert balance.followed == [plans[2], plans[3]], "the second one from the next step on"
    assert found.steps[1].times.step_s < calm.steps[1].times.step_s


def test_with_plenty_the_window_is_less_than_with_few() -> None:
    def window(machines: int) -> float:
        return sum(step.times.window_s for step in run("penstock", machines, steps=8).steps[3:])

    assert window(12) < window(1)


def test_steps_with_more_machines_are_shorter_and_dearer() -> None:
    def looked_after(machines: int) -> Outcome:
        profile, trace = small_profile(), static_trace(machines, 1e9)
        strategy = make_strategy("penstock", profile, machines=machines)
        return simulate(profile, trace, strategy, steps=4)

    one, four = looked_after(1), looked_after(4)
    assert four.wall_s < one.wall_s
    assert sum(step.paid_h for step in four.steps) > sum(step.paid_h for step in one.steps)


def test_the_planned_window_and_width_are_not_slower_than_the_paper_s() -> None:
    ours, theirs = run("penstock", 3, steps=10), run("rlboost", 3, steps=10)
    assert sum(s.times.step_s for s in ours.steps[3:]) <= 1.02 * sum(s.times.step_s for s in theirs.steps[3:])


@pytest.mark.parametrize("machines", [0, 1, 2])
def test_small_steps_whose_answers_take_longer_than_training_are_no_slower_than_without_us(machines: int) -> None:
    """Eight prompts of long answers on engines that are faster than the remote ones: a window of the training's length
    left nearly all of them to the slow machines, and a step took 1.2 times the paper's."""
    profile = shipped("qwen3-8b").model_copy(update={"prompts": 8})
    wall_s = {}
    for name in ("colocated", "rlboost", "penstock"):
        strategy = make_strategy(name, profile, machines=machines)
        outcome = simulate(profile, static_trace(machines, 1e9), strategy, steps=6)
        wall_s[name] = sum(step.times.step_s for step in outcome.steps[1:])
    assert wall_s["penstock"] <= 1.02 * wall_s["rlboost"]
    assert wall_s["penstock"] <= wall_s["colocated"]


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_slow_machines_beside_fast_ones_do_not_make_steps_longer(factor: float) -> None:
    usual = shipped("qwen3-8b").model_copy(update={"prompts": 32})
    profile = usual.model_copy(update={"kinds": {"slow": usual.spot.slower_by(factor)}})

    def later_s(*nodes: str) -> float:
        trace = static_trace(nodes, 1e9)
        outcome = simulate(profile, trace, make_strategy("penstock", profile, machines=len(nodes)), steps=5)
        return sum(step.times.step_s for step in outcome.steps[1:])

    fast, slow = [f"fast:{k}" for k in range(4)], [f"slow:{k}" for k in range(4)]
    assert later_s(*fast, *slow) < 1.05 * later_s(*fast)


def test_streaming_ends_a_step_sooner() -> None:
    profile = small_profile()

    def wall(streaming: bool) -> float:
        strategy = Strategy("s", ShortestQueue(4), None, FixedSize(3), streaming=streaming)
        return simulate(profile, static_trace(3, 1e9), strategy, steps=3).wall_s

    assert wall(True) < wall(False)


def test_lengths_grow_and_are_the_same_for_every_strategy() -> None:
    profile = small_profile()
    grown = profile.model_copy(update={"lengths": profile.lengths.model_copy(update={"growth_per_step": 0.05})})
    first = [sample.length for sample in step_samples(grown, 0, 1)]
    later = [sample.length for sample in step_samples(grown, 20, 1)]
    assert sum(later) > sum(first)
    assert first == [sample.length for sample in step_samples(profile, 0, 1)]
    assert first != [sample.length for sample in step_samples(profile, 0, 2)]


def test_weights_over_a_slow_link_make_remote_machines_late() -> None:
    slow = MACHINE.model_copy(update={"link_gbit_s": 0.5})
    assert run("disaggregated", 2, spot=slow).wall_s > run("disaggregated", 2).wall_s + 4 * 10


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.5, 60.0), st.integers(0, 5)), min_size=1, max_size=8),
    st.sampled_from(["penstock", "rlboost"]),
    st.integers(0, 3),
)
def test_no_sample_is_lost_or_done_twice_whatever_comes_and_goes(
    changes: list[tuple[float, int]], name: str, seed: int
) -> None:
    profile = small_profile(prompts=6)
    at, series = 0.0, [(0.0, 2)]
    for gap, count in changes:
        at += gap
        series.append((at, count))
    world = World(profile, from_counts(series, 1e6, seed), make_strategy(name, profile, ceiling=4), seed)
    outcome = world.run(steps=2)
    assert len(outcome.steps) == 2
    for step in outcome.steps:
        expected = sum(s.length + s.prompt_tokens for s in step_samples(profile, step.number, seed))
        assert step.tokens == expected
        assert step.times.train_s == pytest.approx(expected * profile.training.s_per_token)


def test_a_machine_that_has_its_weights_first_leaves_the_others_their_share() -> None:
    """As in a manager. The slow link brings the weights two seconds later, and the share waits for them."""
    profile = small_profile(prompts=4, reserved_instances=1)
    slow = profile.spot.model_copy(update={"link_gbit_s": 4.0})
    profile = profile.model_copy(update={"kinds": {"slow": slow}})
    trace = Trace((Change(0.0, "node0", True), Change(0.0, "slow:1", True)), 1e9)
    strategy = Strategy("x", ShortestQueue(8), None, FixedSize(2))
    world = World(profile, trace, strategy)
    given: list[tuple[float, str, int]] = []
    place = world._place
    world._place = lambda sample, machine: (  # type: ignore[method-assign]
        given.append((world.clock.now, machine.name, sample.number)),
        place(sample, machine),
    )[1]
    world.run(steps=1)
    names = [name for _, name, _ in given]
    assert names.count("node0") == names.count("slow:1") == 8
    assert given[0][0] < given[-1][0]


DIFFERING = {
    "difference_gb": 0.01,
    "encode_s": 0.1,
    "spot": MACHINE.model_copy(update={"apply_s": 0.16, "load_s": 0.2}),
}
"""A whole version takes 0.8 s on its link, and a difference 0.16 s + (0.1 s + 0.008 s) / 16; both are loaded then."""
WHOLE_S, DIFFERENCE_S = 1.0, 0.36675


def pulls(world: World, steps: int) -> list[tuple[int, str, float]]:
    """(step, machine, seconds from the beginning of the step) of everyone who got a version."""
    found: list[tuple[int, str, float]] = []
    dispatch = world.dispatch

    def noted() -> None:
        if world.step is not None:
            for held in world.remotes._held.values():
                row = (world.step.number, held.machine.name)
                if held.machine.ready and row not in [seen[:2] for seen in found]:
                    found.append((*row, (held.ready_at or 0.0) - world.step.began_s))
        dispatch()

    world.dispatch = noted  # type: ignore[method-assign]
    world.run(steps=steps)
    return found


def test_who_holds_the_version_before_pulls_a_difference_and_who_has_just_come_the_whole() -> None:
    profile = small_profile(**DIFFERING)
    calm = simulate(profile, static_trace(1, 1e9), make_strategy("penstock", profile, machines=1), steps=2)
    joins_s = calm.steps[1].began_s + 0.1 - MACHINE.boot_s
    trace = Trace((Change(0.0, "a", True), Change(joins_s, "b", True)), 1e9)
    world = World(profile, trace, make_strategy("penstock", profile, machines=2))
    times = {row[:2]: row[2] for row in pulls(world, 3)}
    assert times[0, "a"] == pytest.approx(WHOLE_S)
    assert [times[1, "a"], times[2, "a"], times[2, "b"]] == pytest.approx([DIFFERENCE_S] * 3)
    assert times[1, "b"] == pytest.approx(0.1 + WHOLE_S, abs=0.05)


def test_who_was_given_back_or_missed_a_version_pulls_the_next_one_whole() -> None:
    profile = small_profile(**DIFFERING, prompts=4)
    kinds = {"late": profile.spot.model_copy(update={"link_gbit_s": 0.2, "boot_s": 0.0})}
    profile = profile.model_copy(update={"kinds": kinds})
    calm = simulate(profile, static_trace(1, 1e9), make_strategy("penstock", profile, machines=1), steps=2)
    again_s = calm.steps[0].times.step_s - 0.5
    back = (Change(again_s, "b", False), Change(again_s + 0.1, "b", True))
    trace = Trace((Change(0.0, "a", True), Change(0.0, "b", True), Change(0.0, "late:1", True), *back), 1e9)
    world = World(profile, trace, make_strategy("penstock", profile, machines=3))
    times = {row[:2]: row[2] for row in pulls(world, 12)}
    assert all(times[number, "a"] == pytest.approx(DIFFERENCE_S) for number in range(1, 12))
    after = min(number for number, name in times if name == "b" and number > 0)
    assert times[after, "b"] >= WHOLE_S
    assert times[after + 1, "b"] == pytest.approx(DIFFERENCE_S)
    # 40 s for a whole version, and no step is as long: it never gets one, nor ever pulls a difference.
    assert max(step.times.step_s for step in world.outcome.steps) < 40
    assert not any(name == "late:1" for _, name in times)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_baselines_pull_whole_versions_and_a_profile_without_differences_has_none(name: str) -> None:
    ours = name.startswith("penstock")
    profile = small_profile(**DIFFERING)
    without = profile.model_copy(update={"difference_gb": None})
    worlds = [World(p, static_trace(2, 1e9), make_strategy(name, p, machines=2)) for p in (profile, without)]
    times = [[row[2] for row in pulls(world, 3) if row[0] > 0] for world in worlds]
    assert bool(times[0] and times[1]) == (name != "colocated")
    assert times[0] == pytest.approx([DIFFERENCE_S if ours else 0.8] * len(times[0]))
    assert times[1] == pytest.approx([WHOLE_S if ours else 0.8] * len(times[1]))


def test_a_difference_pays_for_what_takes_longest_and_a_part_of_the_rest() -> None:
    profile = small_profile(**DIFFERING)

    def seconds(**changes: object) -> float:
        return profile.model_copy(update=changes).agent_pull_s(difference=True) - 0.2

    assert seconds() == pytest.approx(0.16 + 0.108 / 16)
    assert seconds(encode_s=0.5) == pytest.approx(0.5 + 0.168 / 16)
    assert seconds(difference_gb=0.5) == pytest.approx(0.4 + 0.26 / 16)
    # More than the whole: then it comes whole.
    assert seconds(encode_s=3.0) == pytest.approx(0.8)
    assert profile.agent_pull_s(sharing=40, difference=True) == pytest.approx(0.2 + 0.16 + 0.18 / 16)
    assert profile.least_pull_s() == pytest.approx(0.36675)
    assert small_profile().agent_pull_s(difference=True) == small_profile().least_pull_s() == pytest.approx(0.8)


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_difference_costs_no_less_than_was_measured(name: str) -> None:
    """On the cores that a host is said to have: 80 times smaller, 2.5 and 6 GB/s a core, and PCIe's peak."""
    profile = shipped(name)
    assert profile.difference_gb == pytest.approx(profile.weights_gb / 80, rel=0.01)
    assert profile.encode_s >= profile.weights_gb / 2.5 / 48
    assert profile.spot.apply_s >= profile.weights_gb / 6 / 12
    assert profile.spot.load_s >= profile.weights_gb / 128
    assert profile.agent_pull_s(difference=True) < profile.pull_s()


@pytest.mark.parametrize("pull_s", [20.0, 90.0])
def test_machines_whose_first_version_takes_longer_than_a_step_make_no_step_longer(pull_s: float) -> None:
    spot = MACHINE.model_copy(update={"link_gbit_s": 8.0 / pull_s})
    alone = run("colocated", 0, steps=6)
    helped = run("penstock", 2, steps=6, spot=spot)
    for mine, theirs in zip(helped.steps, alone.steps):
        assert mine.times.step_s <= 1.25 * theirs.times.step_s, mine.causes
