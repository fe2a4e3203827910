"""The tracker: rows count only where they continue a sample under its lease; bad ones change nothing."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_helpers import STOP_ID, submit, tokens

from penstock.errors import RolloutError, WireError
from penstock.rollout.batch import MAX_SAMPLES, finished_frame
from penstock.rollout.tracker import Applied, Tracker
from penstock.sample import Finish, SampleId, VersionSpan, sample_seed
from penstock.wire import Sampling, TokenFrame, column_bytes

RUNNING, STOP, LENGTH, ABORTED, FAILED = Finish


def placed(samples: int = 1, **options: object) -> tuple[Tracker, list[int]]:
    """A tracker whose batch runs on instance "a", and the leases."""
    tracker = Tracker()
    batch = tracker.add_batch(submit(samples_per_prompt=samples, **options), 0.0)  # type: ignore[arg-type]
    leases = []
    for _ in range(samples):
        sample = tracker.place(batch, "a")
        assert sample is not None
        leases.append(sample.lease)
    return tracker, leases


def apply(tracker: Tracker, frame: TokenFrame, instance: str = "a", vocabulary: int = 50) -> Applied:
    return tracker.apply(instance, frame, {frame.version}, vocabulary, 1.0)


def snapshot(tracker: Tracker) -> object:
    return (
        tracker.tokens_accepted,
        [(b.placed, b.finished, b.failed, b.tokens, len(b.moved)) for b in tracker.batches()],
        [(s.lease, s.length, bytes(s.tokens), bytes(s.logprobs), s.strikes) for s in tracker.samples_of("a")],
    )


def test_tokens_of_several_frames_join_into_one_sample() -> None:
    tracker, [lease] = placed()
    assert apply(tracker, tokens((lease, 0, [1, 2], RUNNING))).tokens == 2
    applied = apply(tracker, tokens((lease, 2, [3, STOP_ID], STOP)))
    [sample] = applied.finished
    assert sample.id == SampleId("train-0", 0, 0)
    assert sample.seed == sample_seed(0, sample.id)
    assert array("i", bytes(sample.tokens)).tolist() == [1, 2, 3, STOP_ID]
    assert array("f", bytes(sample.logprobs)).tolist() == [-0.5] * 4
    assert sample.finish is STOP
    assert sample.version_spans == (VersionSpan(0, 0, 4),)
    assert tracker.leases_of("a") == 0


def test_a_row_may_carry_a_finish_and_no_token() -> None:
    tracker, [lease] = placed()
    apply(tracker, tokens((lease, 0, [1, STOP_ID], RUNNING)))
    assert apply(tracker, tokens((lease, 2, [], STOP))).finished[0].length == 2


def test_spans_say_which_version_drew_each_token() -> None:
    tracker, [lease] = placed()
    apply(tracker, tokens((lease, 0, [1, 2], RUNNING), version=3))
    apply(tracker, tokens((lease, 2, [3], RUNNING), version=3))
    [sample] = apply(tracker, tokens((lease, 3, [4, STOP_ID], STOP), version=4)).finished
    assert sample.version_spans == (VersionSpan(3, 0, 3), VersionSpan(4, 3, 5))
    frame = finished_frame(sample.batch, [sample])
    assert frame.span_versions == column_bytes([3, 4], "I")
    assert frame.span_ends == column_bytes([3, 5], "I")


def test_prompts_are_placed_in_order_and_moved_samples_first() -> None:
    tracker = Tracker()
    batch = tracker.add_batch(submit(prompts=[[1], [2]], samples_per_prompt=2), 0.0)
    first = [tracker.place(batch, "a") for _ in range(3)]
    assert [(s.prompt, s.replica) for s in first if s] == [(0, 0), (0, 1), (1, 0)]
    tracker.evict("a", "died")
    again = [tracker.place(batch, "b") for _ in range(5)]
    assert [(s.prompt, s.replica) if s else None for s in again] == [(0, 0), (0, 1), (1, 0), (1, 1), None]


def test_a_lease_is_never_given_twice() -> None:
    tracker, [lease] = placed()
    tracker.evict("a", "died")
    batch = tracker.batch("train-0")
    assert batch is not None
    sample = tracker.place(batch, "a")
    assert sample is not None
    assert sample.lease != lease


def test_an_evicted_sample_goes_on_from_its_last_token() -> None:
    tracker, [lease] = placed()
    apply(tracker, tokens((lease, 0, [1, 2, 3], RUNNING)))
    evicted = tracker.evict("a", "died")
    assert (evicted.moved, evicted.tokens_kept) == (1, 3)
    batch = tracker.batch("train-0")
    assert batch is not None
    sample = tracker.place(batch, "b")
    assert sample is not None
    late = apply(tracker, tokens((lease, 3, [4], RUNNING)))
    assert late.refused == {"no such lease is in force": 1}
    apply(tracker, tokens((sample.lease, 3, [4, STOP_ID], STOP)), "b")
    assert array("i", bytes(sample.tokens)).tolist() == [1, 2, 3, 4, STOP_ID]


def test_a_sample_that_had_all_its_tokens_when_its_instance_died_is_finished() -> None:
    tracker, [stopped, full] = placed(2, max_new_tokens=3)
    apply(tracker, tokens((stopped, 0, [1, STOP_ID], RUNNING), (full, 0, [1, 2, 3], RUNNING)))
    evicted = tracker.evict("a", "died")
    assert [sample.finish for sample in evicted.finished] == [STOP, LENGTH]
    assert evicted.moved == 0


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ((0, 3, [1], RUNNING), "a gap"),
        ((0, 1, [1], RUNNING), "a repetition"),
        ((0, 2, [50], RUNNING), "token id 50 is outside the vocabulary of 50"),
        ((0, 2, [-1], RUNNING), "token id -1 is outside"),
        ((0, 2, [1] * 7, RUNNING), "more than max_new_tokens = 8"),
        ((0, 2, [1], STOP), "no stop id"),
        ((0, 2, [1], LENGTH), "LENGTH before max_new_tokens"),
        ((0, 2, [], LENGTH), "LENGTH before max_new_tokens"),
        ((7, 0, [1], RUNNING), "no such lease"),
    ],
)
def test_a_bad_row_is_refused_alone(row: tuple[int, int, list[int], Finish], cause: str) -> None:
    tracker, [bad, good] = placed(2)
    apply(tracker, tokens((bad, 0, [1, 2], RUNNING)))
    lease = 999 if row[0] else bad
    applied = apply(tracker, tokens((lease, *row[1:]), (good, 0, [3], RUNNING)))
    assert applied.tokens == 1
    [(said, rows)] = applied.refused.items()
    assert cause in said
    assert rows == 1
    batch = tracker.batch("train-0")
    assert batch is not None
    assert batch.tokens == 3


def test_a_gap_takes_the_sample_away_and_a_repetition_does_not() -> None:
    tracker, [lease] = placed()
    apply(tracker, tokens((lease, 0, [1, 2], RUNNING)))
    assert apply(tracker, tokens((lease, 0, [1, 2], RUNNING))).stop == []
    assert apply(tracker, tokens((lease, 2, [3], RUNNING))).tokens == 1
    applied = apply(tracker, tokens((lease, 5, [1], RUNNING)))
    assert applied.stop == [lease]
    assert (applied.moved, applied.moved_tokens) == (1, 3)


def test_a_finish_at_the_wrong_place_does_not_leave_the_sample_waiting_for_ever() -> None:
    tracker, [lease] = placed()
    apply(tracker, tokens((lease, 0, [1, 2], RUNNING)))
    applied = apply(tracker, tokens((lease, 1, [2], LENGTH)))
    assert applied.stop == [lease]
    assert applied.moved == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.5])
def test_an_impossible_logprob_takes_down_its_row_alone(value: float) -> None:
    tracker, leases = placed(3)
    rows = [(lease, 0, [1], RUNNING) for lease in leases]
    applied = apply(tracker, tokens(*rows, logprobs=column_bytes([-1.0, value, 0.0], "f")))
    assert applied.tokens == 2
    assert "log-probability" in next(iter(applied.refused))
    assert applied.stop == [leases[1]]


@pytest.mark.parametrize(
    "changes",
    [
        {"starts": b""},
        {"counts": column_bytes([5], "I")},
        {"counts": column_bytes([2**32 - 1], "I")},
        {"finishes": b""},
        {"finishes": b"\x05"},
        {"leases": b"abc"},
        {"token_ids": b"abc"},
        {"logprobs": b""},
        {"version": 7},
    ],
)
def test_a_frame_that_does_not_fit_together_is_refused_whole(changes: dict[str, object]) -> None:
    tracker, [lease] = placed()
    apply(tracker, tokens((lease, 0, [1], RUNNING)))
    before = snapshot(tracker)
    with pytest.raises(WireError):
        tracker.apply("a", tokens((lease, 1, [2], RUNNING), **changes), {0, 1}, 50, 1.0)
    assert snapshot(tracker) == before


def test_a_sample_lost_three_times_without_a_token_is_set_aside_with_the_cause() -> None:
    tracker, _ = placed()
    batch = tracker.batch("train-0")
    assert batch is not None
    for _ in range(2):
        assert tracker.evict("a", "the machine died", suspects=1).moved == 1
        tracker.place(batch, "a")
    [sample] = tracker.evict("a", "the machine died", suspects=1).finished
    assert sample.finish is FAILED
    assert "3 times" in sample.cause
    assert "the machine died" in sample.cause
    assert batch.failed == 1


def test_a_sample_that_makes_progress_may_lose_any_number_of_machines() -> None:
    tracker, [lease] = placed(max_new_tokens=100)
    batch = tracker.batch("train-0")
    assert batch is not None
    for position in range(20):
        apply(tracker, tokens((lease, position, [1], RUNNING)))
        assert tracker.evict("a", "the machine died", suspects=1).moved == 1
        sample = tracker.place(batch, "a")
        assert sample is not None
        lease = sample.lease


def test_samples_that_only_waited_on_a_dead_instance_are_no_suspects() -> None:
    tracker, _ = placed(2)
    batch = tracker.batch("train-0")
    assert batch is not None
    for _ in range(3):
        tracker.evict("a", "died", suspects=1)
        while tracker.place(batch, "a"):
            pass
    assert [sample.replica for sample in tracker.samples_of("a")] == [1]


def test_an_aborted_sample_waits_again_and_a_failed_one_is_missing() -> None:
    tracker, [aborted, failed] = placed(2)
    frame = tokens((aborted, 0, [1, 2], ABORTED), (failed, 0, [], FAILED), causes={1: "the prompt is too long"})
    applied = apply(tracker, frame)
    assert applied.moved == 1
    [sample] = applied.finished
    assert sample.finish is FAILED
    assert "the prompt is too long" in sample.cause
    row = finished_frame(sample.batch, [sample])
    assert row.lengths == column_bytes([0], "I")
    assert row.causes == {0: sample.cause}


def test_removing_a_batch_names_the_leases_in_force() -> None:
    tracker, leases = placed(2)
    assert tracker.remove_batch("train-0") == {"a": leases}
    assert apply(tracker, tokens((leases[0], 0, [1], RUNNING))).refused.total() == 1
    assert tracker.queued == tracker.placed == 0


def test_a_batch_name_in_use_is_refused() -> None:
    tracker, _ = placed()
    with pytest.raises(RolloutError, match="already open"):
        tracker.add_batch(submit(), 0.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": ""}, "name"),
        ({"samples_per_prompt": 0}, "samples"),
        ({"samples_per_prompt": MAX_SAMPLES + 1}, "samples"),
        ({"prompt_indices": b""}, "column"),
        ({"prompt_lengths": column_bytes([0], "I"), "prompt_ids": b""}, "empty"),
        ({"prompt_lengths": column_bytes([4], "I")}, "column"),
        ({"prompt_ids": column_bytes([1, -2, 3], "i")}, "negative"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"version": -1}, "version"),
        ({"version": 2**32}, "version"),
        ({"run_seed": 2**63}, "seed"),
        ({"sampling": Sampling(max_new_tokens=2**31)}, "max_new_tokens"),
        ({"sampling": Sampling(max_new_tokens=1, stop_ids=(-1,))}, "stop id"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused_by_name_and_value(changes: dict[str, object], says: str) -> None:
    tracker = Tracker()
    with pytest.raises(WireError, match=says):
        tracker.add_batch(submit(**changes), 0.0)  # type: ignore[arg-type]
    assert list(tracker.batches()) == []


def test_a_prompt_given_twice_is_refused() -> None:
    frame = submit(prompts=[[1], [2]], prompt_indices=column_bytes([4, 4], "I"))
    with pytest.raises(WireError, match="prompt 4"):
        Tracker().add_batch(frame, 0.0)


class TrackerMachine(RuleBasedStateMachine):
    """Rows in and out of order from instances that come and go; a plain list says what must have been kept."""

    @initialize(samples=st.integers(1, 5), limit=st.integers(1, 12))
    def start(self, samples: int, limit: int) -> None:
        self.tracker = Tracker(max_strikes=10**6)
        self.batch = self.tracker.add_batch(submit(samples_per_prompt=samples, max_new_tokens=limit), 0.0)
        self.model: list[list[int]] = [[] for _ in range(samples)]
        self.held: dict[tuple[str, int], int] = {}
        self.past: list[tuple[str, int]] = []
        self.finished: dict[int, Finish] = {}
        self.drawn = 0

    @rule(instance=st.sampled_from("ab"))
    def place(self, instance: str) -> None:
        sample = self.tracker.place(self.batch, instance)
        if sample is not None:
            assert (instance, sample.lease) not in self.held
            assert sample.lease not in {lease for _, lease in [*self.held, *self.past]}
            self.held[instance, sample.lease] = sample.replica

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(0, 4), shift=st.sampled_from([0, 0, 0, 0, -1, 1]), stop=st.booleans())
    def row(self, data: st.DataObject, count: int, shift: int, stop: bool) -> None:
        instance, lease = data.draw(st.sampled_from(sorted(self.held)))
        replica = self.held[instance, lease]
        kept = self.model[replica]
        limit = self.batch.sampling.max_new_tokens
        start = max(0, len(kept) + shift)
        ids = [10 + (self.drawn + k) % 40 for k in range(count)]
        self.drawn += count
        if stop and ids:
            ids[-1] = STOP_ID
        end = start + count
        finish = STOP if stop and ids else (LENGTH if end == limit else RUNNING)
        applied = apply(self.tracker, tokens((lease, start, ids, finish)), instance)
        if start == len(kept) and end <= limit:
            kept += ids
            if finish:
                self.finished[replica] = finish
                self.leave(instance, lease)
        else:
            assert applied.tokens == 0
            assert applied.refused.total() == 1
            if applied.stop:
                self.leave(instance, lease)
        for sample in applied.finished:
            self.finished.setdefault(sample.replica, sample.finish)

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def late_row(self, data: st.DataObject) -> None:
        instance, lease = data.draw(st.sampled_from(self.past))
        applied = apply(self.tracker, tokens((lease, 0, [1], RUNNING)), instance)
        assert applied.tokens == 0
        assert applied.refused.total() == 1

    @rule(instance=st.sampled_from("ab"))
    def evict(self, instance: str) -> None:
        for sample in self.tracker.evict(instance, "gone", suspects=1).finished:
            assert sample.replica not in self.finished
            self.finished[sample.replica] = sample.finish
        for holder, lease in list(self.held):
            if holder == instance:
                self.leave(holder, lease)

    def leave(self, instance: str, lease: int) -> None:
        del self.held[instance, lease]
        self.past.append((instance, lease))

    @invariant()
    def every_sample_is_somewhere_once_and_has_its_tokens(self) -> None:
        if not hasattr(self, "tracker"):
            return
        counts = self.tracker.state_counts(self.batch)
        assert sum(counts.values()) == self.batch.samples
        assert counts["placed"] + counts["running"] == len(self.held)
        assert counts["finished"] == len(self.finished)
        for instance in "ab":
            for sample in self.tracker.samples_of(instance):
                assert self.held[instance, sample.lease] == sample.replica
                assert array("i", bytes(sample.tokens)).tolist() == self.model[sample.replica]
                assert len(sample.logprobs) == len(sample.tokens) == 4 * sample.length
        assert self.batch.tokens == self.tracker.tokens_accepted == sum(map(len, self.model))


TrackerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_whatever_comes_no_sample_is_lost_and_no_token_twice = TrackerMachine.TestCase
