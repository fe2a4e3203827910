"""Moves inside a step: only where they pay, never twice at once, never too often; and policies by import path."""

from __future__ import annotations

import math

import pytest
from balance_helpers import report_of, rows
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.rollout.balance import InstanceLoad, PlacedSample, Queue, Report, ShortestQueue, load_policy
from penstock.rollout.balanced import Balanced
from penstock.rollout.curves import Speed
from penstock.rollout.step_replay import Limits, Plan
from penstock.rollout.tracker import EPOCH_SHIFT

TRUTH = Speed(0.01, 2e-4, 1e-6, 1e-5)


def learned(max_pending: int = 4, **options: float) -> Balanced:
    """A policy that has seen enough of two equal machines and of answers of 100 to 1000 tokens."""
    policy = Balanced(max_pending, **options)  # type: ignore[arg-type]
    for k in range(40):
        policy.report(report_of(f"i{k % 2}", TRUTH, k, 100))
    for k in range(200):
        policy.finished(k // 4, 100 + 900 * (k * 37 % 200) // 200)
    policy.batch_ended()
    return policy


def test_running_samples_move_to_an_idle_instance_and_not_the_other_way() -> None:
    held = {"i0": rows(1, 24), "i1": rows(100, 1)}
    loads = [InstanceLoad("i0", 24, 32), InstanceLoad("i1", 1, 32)]
    moves = learned().moves(0, loads, held.__getitem__)
    assert moves
    assert {(move.source, move.target) for move in moves} == {("i0", "i1")}
    assert len(moves) < 24


def certain(prefill_s: float = 0.0) -> Balanced:
    """It has seen answers of 400 tokens and no others, and machines on which a sequence costs as much as a step."""
    policy = Balanced(4)
    for k in range(40):
        running, prefilled = 1 + k * 7 % 40, 10 * (k % 3)
        wall_s = 10 * (0.001 + 0.001 * running) + prefilled * prefill_s
        policy.report(Report(f"i{k % 2}", wall_s, running, 0.0, 10 * running, prefilled))
        policy.finished(k // 4, 400)
    policy.batch_ended()
    return policy


def test_those_with_the_longest_expected_remainder_move_first() -> None:
    held = {"i0": rows(1, 8, tokens=350) + rows(50, 8, tokens=10), "i1": []}
    moves = certain().moves(0, [InstanceLoad("i0", 16, 32), InstanceLoad("i1", 0, 32)], held.__getitem__)
    assert 0 < len(moves) <= 8
    assert {move.lease for move in moves} <= set(range(50, 58)), "who has but 50 tokens to come stays"


def test_a_move_is_not_worth_a_prefill_that_takes_longer_than_it_saves() -> None:
    held = {"i0": rows(1, 8, tokens=200), "i1": rows(50, 2, tokens=200)}
    loads = [InstanceLoad("i0", 8, 32), InstanceLoad("i1", 2, 32)]
    assert certain(prefill_s=1e-6).moves(0, loads, held.__getitem__)
    assert certain(prefill_s=0.01).moves(0, loads, held.__getitem__) == [], "a prefill of 264 tokens takes 2.6 s"


@pytest.mark.parametrize("epoch", [0, 1, (1 << 22) - 1])
def test_leases_of_whatever_epoch_have_quantiles_of_their_own(epoch: int) -> None:
    """A manager's leases are beyond 2^53: with one quantile for all, nothing that runs seems to have much to come."""
    first = epoch << EPOCH_SHIFT
    held = {"i0": rows(first + 1, 24), "i1": rows(first + 100, 1)}
    policy = learned()
    expected = [left for left, *_ in policy._held(held["i0"])]
    assert sum(expected) / 24 == pytest.approx(policy.lengths.left(50), rel=0.1)
    assert len(set(expected)) > 20
    moves = policy.moves(0, [InstanceLoad("i0", 24, 32), InstanceLoad("i1", 1, 32)], held.__getitem__)
    assert moves


def test_a_single_sample_leaves_a_slow_instance_where_it_would_end_last() -> None:
    policy = Balanced(4)
    for k in range(40):
        for name, base_s in (("slow", 0.05), ("fast", 0.01)):
            running = 1 + k * 7 % 40
            policy.report(Report(name, 10 * (base_s + 1e-4 * running), running, 0.0, 10 * running, 0))
        policy.finished(k // 4, 400)
    policy.batch_ended()
    held = {"slow": rows(1, 1, tokens=10), "fast": rows(10, 8, tokens=10)}
    loads = [InstanceLoad("slow", 1, 32), InstanceLoad("fast", 8, 32, reserved=True)]
    assert [(move.lease, move.target) for move in policy.moves(0, loads, held.__getitem__)] == [(1, "fast")]
    # Nor does it go to one where it is no sooner done.
    assert policy.moves(0, [loads[1], InstanceLoad("slow", 0, 32)], {**held, "slow": []}.__getitem__) == []


class _Counting(Balanced):
    """A user's: level is as many samples everywhere."""

    def weight(self, load: InstanceLoad) -> float:
        return 1.0


@pytest.mark.parametrize(("kind", "moved"), [(_Counting, False), (Balanced, True)])
def test_what_is_level_may_be_said_by_a_policy_of_one_s_own(kind: type[Balanced], moved: bool) -> None:
    held = {"i0": rows(1, 12), "i1": rows(100, 12)}
    policy = kind(4)
    for k in range(40):
        running = 1 + k * 7 % 40
        for name, sequence_s in (("i0", 0.01), ("i1", 0.001)):
            policy.report(Report(name, 10 * (0.001 + sequence_s * running), running, 0.0, 10 * running, 0))
        policy.finished(k // 4, 400)
    policy.batch_ended()
    loads = [InstanceLoad("i0", 12, 32), InstanceLoad("i1", 12, 32)]
    assert bool(policy.moves(0, loads, held.__getitem__)) is moved


@pytest.mark.parametrize(("finished", "moved"), [(0.5, False), (0.95, True)])
def test_both_kinds_are_levelled_only_where_the_reserved_ones_hand_nothing_much_over(
    finished: float, moved: bool
) -> None:
    policy = learned()
    policy.follow(Plan(Limits(), Limits(), 10.0, finished=finished))
    held = {"i0": rows(1, 24), "i1": rows(100, 1)}
    loads = [InstanceLoad("i0", 24, 32), InstanceLoad("i1", 1, 32, reserved=True)]
    assert policy.assign(Queue(0, elapsed_s=1.0), loads) == []
    assert bool(policy.moves(0, loads, held.__getitem__)) is moved


def shared_prompts(picks: list[int], per: int) -> int:
    """Prompts whose samples all go to one instance."""
    return sum(len(set(picks[k : k + per])) == 1 for k in range(0, len(picks), per))


def test_siblings_go_to_different_instances_where_all_of_a_few_prompts_go_out_at_once() -> None:
    policy, loads = learned(), [InstanceLoad(f"i{k}", 0, 64) for k in range(4)]
    few = Queue(64, samples_per_prompt=8, prompt_tokens=32.0)
    assert shared_prompts(policy.assign(few, loads), 8) == 0
    assert shared_prompts(Balanced(4).assign(few, loads), 8) == 8, "nothing is known of answers"
    assert shared_prompts(policy.assign(Queue(64, samples_per_prompt=8), loads), 8) == 8, "nor of the prompts"
    long_prompts = Queue(64, samples_per_prompt=8, prompt_tokens=2000.0)
    assert shared_prompts(policy.assign(long_prompts, loads), 8) == 8
    narrow = [InstanceLoad(f"i{k}", 0, 8) for k in range(4)]
    picks = policy.assign(few, narrow)
    assert len(picks) < 64, "some wait"
    assert shared_prompts(picks[:48], 8) >= 4
    wide = [InstanceLoad(f"i{k}", 0, 1024) for k in range(4)]
    assert shared_prompts(policy.assign(Queue(8 * 64, samples_per_prompt=8, prompt_tokens=32.0), wide), 8) >= 60


def test_level_instances_are_left_alone() -> None:
    held = {"i0": rows(1, 12), "i1": rows(100, 12)}
    assert learned().moves(0, [InstanceLoad("i0", 12, 32), InstanceLoad("i1", 12, 32)], held.__getitem__) == []


def test_nothing_runs_elsewhere_while_samples_wait_at_the_manager() -> None:
    held = {"i0": rows(1, 24), "i1": rows(100, 1)}
    assert learned().moves(3, [InstanceLoad("i0", 24, 32), InstanceLoad("i1", 1, 32)], held.__getitem__) == []


def test_waiting_samples_move_before_running_ones() -> None:
    held = {"i0": rows(1, 8) + rows(50, 4, tokens=0, running=False), "i1": rows(100, 2)}
    moves = learned().moves(0, [InstanceLoad("i0", 12, 8, pending=4), InstanceLoad("i1", 2, 8)], held.__getitem__)
    assert {move.lease for move in moves} == {50, 51, 52, 53}


def test_a_sample_is_moved_by_choice_no_more_than_allowed() -> None:
    held = {"i0": rows(1, 24, moves=2), "i1": rows(100, 1)}
    loads = [InstanceLoad("i0", 24, 32), InstanceLoad("i1", 1, 32)]
    assert learned(max_moves=2).moves(0, loads, held.__getitem__) == []
    assert learned(max_moves=3).moves(0, loads, held.__getitem__)


def test_a_sample_that_waits_goes_where_there_is_a_place_however_often_it_was_moved() -> None:
    """Else what a full memory keeps putting back ends a step alone, beside machines with nothing to do."""
    held = {"i0": rows(1, 8) + rows(50, 4, running=False, shifts=5), "i1": rows(100, 2)}
    loads = [InstanceLoad("i0", 12, 8, pending=4), InstanceLoad("i1", 2, 8)]
    assert {move.lease for move in learned(max_moves=3).moves(0, loads, held.__getitem__)} == {50, 51, 52, 53}
    assert learned(max_moves=0).moves(0, loads, held.__getitem__) == []
    held["i0"] = rows(1, 8) + rows(50, 4, running=False, shifts=24)
    assert learned(max_moves=3).moves(0, loads, held.__getitem__) == [], "but not for ever"


def test_what_waits_at_an_instance_goes_to_one_that_came_while_a_plan_holds_up_to_the_plan_s_limit() -> None:
    policy = learned()
    policy.follow(Plan(Limits(0.25, 0.25), Limits(), 10.0))
    new = InstanceLoad("new", 1, 32)
    loads = [InstanceLoad("i0", 40, 32, pending=8), InstanceLoad("own", 32, 32, reserved=True), new]
    held = {"i0": rows(0, 32) + rows(50, 8, running=False), "own": rows(100, 32), "new": rows(200, 1)}
    assert policy.assign(Queue(0, elapsed_s=1.0), loads) == []
    moves = policy.moves(0, loads, held.__getitem__)
    assert [(move.lease, move.target) for move in moves] == [(50 + k, "new") for k in range(7)]


def test_a_move_that_gains_too_little_is_not_made() -> None:
    held = {"i0": rows(1, 24), "i1": rows(100, 1)}
    loads = [InstanceLoad("i0", 24, 32), InstanceLoad("i1", 1, 32)]
    assert learned(gain=0.9).moves(0, loads, held.__getitem__) == []


def test_what_is_gained_within_one_report_is_no_reason_to_move() -> None:
    held = {"i0": rows(1, 24), "i1": rows(100, 1)}
    loads = [InstanceLoad("i0", 24, 32), InstanceLoad("i1", 1, 32)]
    policy = learned()
    assert policy.moves(0, loads, held.__getitem__)
    for k in range(60):
        policy.report(Report(f"i{k % 2}", 60.0, 20, 2000.0, round(60 / TRUTH.step_s(20, 2000.0)) * 20, 0))
    assert policy.moves(0, loads, held.__getitem__) == []


def test_before_anything_is_learned_no_running_sample_moves() -> None:
    held = {"i0": rows(1, 24), "i1": rows(100, 1)}
    assert Balanced(4).moves(0, [InstanceLoad("i0", 24, 32), InstanceLoad("i1", 1, 32)], held.__getitem__) == []


def test_the_faster_machine_gets_more() -> None:
    policy = learned()
    slow = Speed(0.04, 8e-4, 4e-6, 4e-5)
    for k in range(40):
        running, context = 1 + k * 7 % 40, 1000.0 * (1 + k * 13 % 50)
        policy.report(Report("i9", 100 * slow.step_s(running, context), running, context, 100 * running, 0))
    picks = policy.assign(Queue(30), [InstanceLoad("i0", 0, 64), InstanceLoad("i9", 0, 64)])
    assert picks.count(0) > 2 * picks.count(1) > 0


def test_the_prompt_with_the_least_expected_to_come_goes_out_first() -> None:
    assert learned().order([950, 0, 500], [0, 1, 2]) == [0, 2, 1]
    assert Balanced(4).order([950, 0, 500], [0, 1, 2]) == [0, 1, 2]


def test_a_plan_s_limits_bound_what_is_given_by_kind_of_instance_and_time() -> None:
    policy = learned(0)
    policy.follow(Plan(Limits(0.5, 0.125), Limits(1.0, 0.25), 10.0))
    loads = [InstanceLoad("i0", 0, 32), InstanceLoad("own", 0, 32, reserved=True)]

    def given_to(queue: Queue) -> tuple[int, int]:
        picks = policy.assign(queue, loads)
        return picks.count(0), picks.count(1)

    assert given_to(Queue(99)) == (32, 32), "an evaluation is not what was planned"
    assert given_to(Queue(99, elapsed_s=0.0)) == (16, 32)
    assert given_to(Queue(99, elapsed_s=5.0)) == (8, 16)
    assert given_to(Queue(99, elapsed_s=10.0)) == (4, 8)
    assert given_to(Queue(0, moved=99, elapsed_s=11.0)) == (4, 8), "what was handed over waits, too"
    assert policy.assign(Queue(9, elapsed_s=5.0), [InstanceLoad("i0", 9, 32)]) == [], "and nobody is taken off"


def test_while_a_plan_holds_the_two_kinds_apart_nothing_moves_between_them() -> None:
    policy = learned()
    held = {"i0": rows(0, 24), "own": rows(100, 1)}
    loads = [InstanceLoad("i0", 24, 32), InstanceLoad("own", 1, 32, reserved=True)]
    assert policy.moves(0, loads, held.__getitem__)
    policy.follow(Plan(Limits(), Limits(), 10.0))
    assert policy.moves(0, loads, held.__getitem__), "no step has begun"
    assert policy.assign(Queue(0, elapsed_s=1.0), loads) == []
    assert policy.moves(0, loads, held.__getitem__) == []
    alike = [loads[0], InstanceLoad("own", 1, 32)]
    assert policy.moves(0, alike, held.__getitem__), "remote ones alone end together, as ever"


def test_an_instance_that_comes_when_all_is_given_out_is_given_some_of_it_while_a_plan_holds() -> None:
    policy = learned()
    policy.follow(Plan(Limits(), Limits(), 10.0))
    loads = [InstanceLoad("i0", 24, 32), InstanceLoad("own", 24, 32, reserved=True), InstanceLoad("new", 0, 32)]
    held = {"i0": rows(0, 24), "own": rows(100, 24), "new": []}
    assert policy.assign(Queue(0, elapsed_s=1.0), loads) == []
    assert {move.target for move in policy.moves(0, loads, held.__getitem__)} == {"new"}
    loads[2] = InstanceLoad("new", 1, 32)
    assert policy.moves(0, loads, {**held, "new": rows(200, 1)}.__getitem__) == []


def test_when_a_window_has_ended_running_samples_wait_that_come_later_than_there_is_room_for() -> None:
    policy = learned(0)
    policy.follow(Plan(Limits(1.0, 0.25), Limits(), 10.0))
    early, late = (
        [PlacedSample(10 * prompt + k, tokens, 64 + tokens, True, 0, prompt) for k in range(4)]
        for prompt, tokens in ((0, 900), (1, 50))
    )
    held = {"i0": early, "i1": late, "own": []}
    i0, i1 = InstanceLoad("i0", 4, 8), InstanceLoad("i1", 4, 8)
    own = InstanceLoad("own", 4, 8, reserved=True)
    assert policy.assign(Queue(0, samples_per_prompt=4, elapsed_s=9.0), [i0, i1, own]) == []
    assert policy.moves(0, [i0, i1, own], held.__getitem__) == []
    # Two places each are left; the four of another prompt's are handed over.
    assert policy.order([500] * 4, [2] * 4) == [0, 1, 2, 3]
    assert policy.assign(Queue(0, samples_per_prompt=4, moved=4, elapsed_s=10.0), [i0, i1]) == []
    moves = policy.moves(4, [i0, i1], held.__getitem__)
    assert [(move.source, move.lease, move.target) for move in moves] == [("i1", 10 + k, "") for k in range(4)]
    assert policy.moves(8, [i0, i1], held.__getitem__) == [], "once"


def test_when_a_window_has_ended_and_there_is_room_for_all_nobody_waits() -> None:
    policy = learned(0)
    policy.follow(Plan(Limits(), Limits(), 10.0))
    held = {"i0": [PlacedSample(k, 50, 114, True, 0, 1) for k in range(4)]}
    loads = [InstanceLoad("i0", 4, 8), InstanceLoad("own", 4, 8, reserved=True)]
    policy.assign(Queue(0, samples_per_prompt=4, elapsed_s=9.0), loads)
    policy.order([500] * 4, [2] * 4)
    policy.assign(Queue(0, samples_per_prompt=4, moved=4, elapsed_s=10.0), loads[:1])
    assert policy.moves(4, loads[:1], held.__getitem__) == []


def test_a_new_instance_s_memory_is_taken_to_be_like_its_own_kind_s() -> None:
    policy = learned()
    own, spot = InstanceLoad("own", 1, 32, reserved=True), InstanceLoad("spot", 1, 32)
    policy.report(Report("own", 1.0, 4.0, 5000.0, 100, 0, pending=3))
    first = policy.engine(own, 0.0)
    assert first is not None
    assert first.memory == 5000.0
    other = policy.engine(spot, 0.0)
    assert other is not None
    assert math.isinf(other.memory)
    policy.report(Report("spot", 1.0, 4.0, 9000.0, 100, 0, pending=3))
    new = policy.engine(InstanceLoad("new", 0, 32), 0.0)
    assert new is not None
    assert new.memory == 9000.0


def test_replicas_of_a_prompt_meet_and_balance_costs_nothing() -> None:
    loads = [InstanceLoad(f"i{k}", 0, 8) for k in range(3)]
    queue = Queue(fresh=24, samples_per_prompt=4)
    apart, together = ShortestQueue(0, affinity=False).assign(queue, loads), ShortestQueue(0).assign(queue, loads)
    assert sorted(apart) == sorted(together)
    assert all(len(set(together[k : k + 4])) == 1 for k in range(0, 24, 4))
    assert any(len(set(apart[k : k + 4])) > 1 for k in range(0, 24, 4))


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 24)), min_size=2, max_size=6),
    st.integers(0, 3),
    st.integers(0, 400),
)
def test_a_sample_is_moved_once_an_answer_and_only_from_where_it_is(
    shapes: list[tuple[int, int]], moves: int, tokens: int
) -> None:
    held: dict[str, list[PlacedSample]] = {}
    loads = []
    for k, (samples, places) in enumerate(shapes):
        running = min(samples, places)
        held[f"i{k}"] = rows(1000 * k, running, tokens, True, moves) + rows(
            1000 * k + 500, samples - running, 0, False, moves
        )
        loads.append(InstanceLoad(f"i{k}", samples, places, pending=samples - running))
    found = learned().moves(0, loads, held.__getitem__)
    assert len({move.lease for move in found}) == len(found)
    for move in found:
        sample = next(row for row in held[move.source] if row.lease == move.lease)
        assert move.source != move.target
        assert sample.moves < (3 if sample.running else 24)
    for load in loads:
        arrived = sum(move.target == load.instance for move in found)
        if any(not next(r for r in held[m.source] if r.lease == m.lease).running for m in found):
            assert load.samples + arrived <= max(load.samples, load.max_running)


class MostFree:
    """A user's own: everything to the instance with the most free places."""

    def __init__(self, max_pending: int) -> None:
        self.max_pending = max_pending

    def assign(self, queue: Queue, loads: list[InstanceLoad]) -> list[int]:
        best = max(range(len(loads)), key=lambda k: loads[k].max_running - loads[k].samples, default=0)
        return [best] * queue.waiting if loads else []

    def order(self, output_tokens: list[int], prompts: list[int]) -> list[int]:
        return list(range(len(output_tokens)))

    def moves(self, waiting: int, loads: object, placed: object) -> list[object]:
        return []

    def report(self, report: Report) -> None: ...

    def finished(self, prompt: int, output_tokens: int) -> None: ...

    def batch_ended(self) -> None: ...

    def gone(self, instance: str) -> None: ...


def test_a_user_s_own_policy_is_found_by_its_path() -> None:
    policy = load_policy("test_balance_moves:MostFree", max_pending=3)
    assert policy.assign(Queue(2), [InstanceLoad("a", 0, 2), InstanceLoad("b", 0, 4)]) == [1, 1]


@pytest.mark.parametrize(
    ("path", "says"),
    [("nowhere.at.all:X", "nowhere"), ("json:Nothing", "Nothing"), ("json:JSONDecoder", "max_pending"), ("x", "x")],
)
def test_what_is_no_policy_is_refused(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_policy(path, max_pending=3)


def test_a_class_that_lacks_a_method_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="has no assign"):
        load_policy("types:SimpleNamespace", max_pending=3)
