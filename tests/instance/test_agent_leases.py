"""The agent's pure parts: which leases are live, when it comes back, when an engine is stuck."""

from __future__ import annotations

import msgspec
import pytest
from fake_manager import start_frame
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.errors import WireError
from penstock.instance import EngineLoad, TokenDelta
from penstock.instance.leases import Leases
from penstock.instance.liveness import FIRST_PAUSE_S, LONGEST_PAUSE_S, STABLE_S, Reconnect, StallWatch
from penstock.sample import Finish
from penstock.wire import (
    MAX_FRAME_BYTES,
    MIN_FRAME_BYTES,
    Sampling,
    StartFrame,
    StopFrame,
    column,
    column_bytes,
    encode,
    offsets,
)


def delta_of(rows: list[tuple[int, int, list[int], Finish]], version: int = 0) -> TokenDelta:
    delta = TokenDelta(version=version)
    for lease, start, tokens, finish in rows:
        delta.leases.append(lease)
        delta.starts.append(start)
        delta.counts.append(len(tokens))
        delta.finishes.append(finish)
        delta.token_ids.extend(tokens)
        delta.logprobs.extend(-0.5 * token for token in tokens)
    return delta


def stop(*leases: int) -> StopFrame:
    return StopFrame(leases=column_bytes(leases, "Q"))


def test_a_start_frame_becomes_sequences_with_their_prefix_and_sampling() -> None:
    leases = Leases()
    sampling = Sampling(max_new_tokens=9, temperature=0.5)
    started = leases.start(start_frame([5, 2**63], prefixes={2**63: [7, 8]}, sampling=sampling), version=0)
    assert started.handed_back == []
    assert [(s.lease, s.seed, list(s.prompt_ids), list(s.prefix_ids)) for s in started.sequences] == [
        (5, 5, [1, 2, 3], []),
        (2**63, 2**63, [1, 2, 3], [7, 8]),
    ]
    assert all(s.sampling == sampling for s in started.sequences)
    assert len(leases) == 2


def test_work_for_a_version_that_the_engine_does_not_hold_is_handed_back_with_the_cause() -> None:
    leases = Leases()
    started = leases.start(start_frame([5, 6], version=4, prefixes={6: [1, 2]}), version=3)
    [frame] = started.handed_back
    assert started.sequences == []
    assert len(leases) == 0
    assert list(column(frame.leases, "Q")) == [5, 6]
    assert list(column(frame.starts, "I")) == [0, 2]
    assert list(column(frame.counts, "I")) == [0, 0]
    assert list(frame.finishes) == [Finish.ABORTED, Finish.ABORTED]
    assert frame.version == 3
    assert frame.causes[1] == "the engine serves weight version 3, not 4"


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": bytes(8)},
        {"leases": bytes(15)},
        {"prompt_lengths": column_bytes([3, 4], "I")},
        {"prompt_lengths": column_bytes([2**32 - 1, 2**32 - 1], "I")},
        {"prefix_ids": bytes(4)},
        {"prefix_lengths": b""},
        {"sampling_of": column_bytes([0, 1], "I")},
        {"samplings": ()},
        {"leases": column_bytes([5, 5], "Q")},
        {"leases": column_bytes([5, 9], "Q")},
    ],
)
def test_a_start_frame_whose_columns_disagree_changes_nothing(change: dict[str, object]) -> None:
    leases = Leases()
    leases.start(start_frame([9]), version=0)
    frame: StartFrame = msgspec.structs.replace(start_frame([5, 6]), **change)
    with pytest.raises(WireError):
        leases.start(frame, version=0)
    assert leases.forget_all() == [9]


def test_a_delta_becomes_a_frame_with_causes_by_row() -> None:
    leases = Leases()
    leases.start(start_frame([1, 2, 3]), version=0)
    delta = delta_of([(1, 0, [4, 5], Finish.RUNNING), (2, 0, [], Finish.FAILED), (3, 0, [6], Finish.STOP)], version=8)
    delta.causes[2] = "no room"
    [frame] = leases.frames(delta, MAX_FRAME_BYTES)
    assert frame.version == 8
    assert list(column(frame.leases, "Q")) == [1, 2, 3]
    assert list(column(frame.counts, "I")) == [2, 0, 1]
    assert list(column(frame.token_ids, "i")) == [4, 5, 6]
    assert list(column(frame.logprobs, "f")) == [-2.0, -2.5, -3.0]
    assert list(frame.finishes) == [Finish.RUNNING, Finish.FAILED, Finish.STOP]
    assert frame.causes == {1: "no room"}
    assert leases.forget_all() == [1]


def test_tokens_of_stopped_sequences_stay_here_and_are_counted() -> None:
    leases = Leases()
    leases.start(start_frame([1, 2, 3]), version=0)
    assert leases.stop(stop(2, 77)) == [2]
    [frame] = leases.frames(
        delta_of([(1, 0, [4], Finish.RUNNING), (2, 0, [5, 6], Finish.RUNNING), (3, 0, [7], Finish.RUNNING)]),
        MAX_FRAME_BYTES,
    )
    assert list(column(frame.leases, "Q")) == [1, 3]
    assert list(column(frame.token_ids, "i")) == [4, 7]
    assert list(column(frame.logprobs, "f")) == [-2.0, -3.5]
    assert leases.tokens_dropped == 2
    leases.forget_all()
    assert leases.frames(delta_of([(1, 1, [4], Finish.RUNNING)]), MAX_FRAME_BYTES) == []


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(list(Finish)), st.booleans()), min_size=1, max_size=60),
    st.integers(MIN_FRAME_BYTES, 4 * MIN_FRAME_BYTES),
)
def test_a_delta_of_any_size_becomes_frames_within_the_limit_that_say_the_same(
    rows: list[tuple[int, Finish, bool]], limit: int
) -> None:
    leases = Leases()
    leases.start(start_frame(range(len(rows))), version=0)
    delta = delta_of([(lease, 7, [lease] * tokens, finish) for lease, (tokens, finish, _) in enumerate(rows)])
    delta.causes = {lease: "\N{WORLD MAP}" * 5000 for lease, (_, _, caused) in enumerate(rows) if caused}
    lengths, ended = [0] * len(rows), {}
    for frame in leases.frames(delta, limit):
        assert len(encode(frame)) <= limit
        begins = offsets(column(frame.counts, "I"))
        ids = column(frame.token_ids, "i").tolist()
        for row, (lease, start) in enumerate(zip(column(frame.leases, "Q"), column(frame.starts, "I"), strict=True)):
            assert lease not in ended
            assert start == 7 + lengths[lease]
            assert set(ids[begins[row] : begins[row + 1]]) <= {lease}
            lengths[lease] += begins[row + 1] - begins[row]
            if frame.finishes[row]:
                ended[lease] = Finish(frame.finishes[row])
            assert (row in frame.causes) == (lease in delta.causes)
    assert lengths == [tokens for tokens, _, _ in rows]
    assert ended == {lease: finish for lease, (_, finish, _) in enumerate(rows) if finish}
    assert len(leases) == len(rows) - len(ended)


class LeasesMachine(RuleBasedStateMachine):
    """Starts, deltas, stops and lost sessions in any order: only live leases are ever spoken for."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases()
        self.live: dict[int, int] = {}
        self.gone: list[int] = []
        self.next_lease = 1

    @rule(count=st.integers(0, 4), version=st.integers(0, 1))
    def start(self, count: int, version: int) -> None:
        new = list(range(self.next_lease, self.next_lease + count))
        self.next_lease += count
        started = self.leases.start(start_frame(new, version=version), version=0)
        if version == 0:
            assert [s.lease for s in started.sequences] == new
            self.live.update(dict.fromkeys(new, 0))
        else:
            assert started.sequences == []
            self.gone += new

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.live) + self.gone), unique=True))
        stopped = self.leases.stop(stop(*chosen))
        assert stopped == [lease for lease in chosen if lease in self.live]
        for lease in stopped:
            del self.live[lease]
        self.gone += stopped

    @precondition(lambda self: self.live or self.gone)
    @rule(data=st.data())
    def tokens(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.live) + self.gone), unique=True, min_size=1))
        finishes = data.draw(st.lists(st.sampled_from(list(Finish)), min_size=len(chosen), max_size=len(chosen)))
        rows = [(x, self.live.get(x, 0), [x, x], f) for x, f in zip(chosen, finishes, strict=True)]
        frames = self.leases.frames(delta_of(rows), MAX_FRAME_BYTES)
        spoken_for = [lease for lease in chosen if lease in self.live]
        assert len(frames) == bool(spoken_for)
        for frame in frames:
            assert list(column(frame.leases, "Q")) == spoken_for
            assert list(column(frame.token_ids, "i")) == [x for lease in spoken_for for x in (lease, lease)]
        for lease, finish in zip(chosen, finishes, strict=True):
            if lease in self.live:
                self.live[lease] += 2
                if finish:
                    del self.live[lease]
                    self.gone.append(lease)

    @rule()
    def lose_the_session(self) -> None:
        assert self.leases.forget_all() == sorted(self.live)
        self.gone += self.live
        self.live.clear()

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.leases) == len(self.live)


TestLeases = LeasesMachine.TestCase


def test_pauses_grow_are_bounded_and_end_in_giving_up() -> None:
    policy = Reconnect(give_up_s=60.0, now=0.0)
    now, pauses = 0.0, []
    while (pause := policy.lost(now, jitter=1.0)) is not None:
        pauses.append(pause)
        now += pause + 0.01
    assert pauses[0] == FIRST_PAUSE_S
    assert max(pauses) == LONGEST_PAUSE_S
    assert pauses[:5] == [FIRST_PAUSE_S * 2**k for k in range(5)]
    assert now == pytest.approx(60.0, abs=0.2)


def test_a_stable_session_starts_the_count_afresh_and_a_flapping_one_does_not() -> None:
    policy = Reconnect(give_up_s=60.0, now=0.0)
    assert policy.lost(59.0, 1.0) is not None
    policy.welcomed(59.5)
    assert policy.lost(59.5 + STABLE_S, 1.0) == FIRST_PAUSE_S
    assert policy.lost(59.5 + STABLE_S + 59.0, 1.0) is not None
    flapping = Reconnect(give_up_s=60.0, now=0.0)
    now = 0.0
    while now < 60.0:
        flapping.welcomed(now)
        now += STABLE_S / 2
        pause = flapping.lost(now, 1.0)
        if pause is None:
            break
        now += pause
    assert flapping.lost(now, 1.0) is None


@given(st.floats(0.5, 1.0), st.floats(0.1, 100.0))
def test_a_pause_never_goes_past_the_time_to_give_up(jitter: float, give_up_s: float) -> None:
    policy = Reconnect(give_up_s, now=0.0)
    now = 0.0
    for _ in range(100):
        pause = policy.lost(now, jitter)
        if pause is None:
            assert now >= give_up_s
            break
        assert 0 < pause <= LONGEST_PAUSE_S
        assert now + pause <= give_up_s * (1 + 1e-9)
        now += pause


def load(running: int = 0, waiting: int = 0, generated: int = 0, prefilled: int = 0, work_done: int = 0) -> EngineLoad:
    return EngineLoad(running, waiting, 0, generated, prefilled, 0.0, work_done)


def test_an_engine_is_stuck_when_it_has_work_and_counts_nothing() -> None:
    watch = StallWatch(stall_s=10.0, now=0.0)
    assert watch.stalled_for(load(), 100.0) == 0
    assert watch.stalled_for(load(running=1), 109.0) == 0
    assert watch.stalled_for(load(running=1), 111.0) == 11.0
    assert watch.stalled_for(load(running=1, prefilled=5), 112.0) == 0
    assert watch.stalled_for(load(running=1, prefilled=5, generated=1), 121.0) == 0
    assert watch.stalled_for(load(waiting=3, prefilled=5, generated=1), 132.0) == 11.0
    watch.excuse(132.0)
    assert watch.stalled_for(load(waiting=3, prefilled=5, generated=1), 141.0) == 0


def test_an_engine_that_is_idle_and_has_not_ended_what_it_was_given_is_stuck() -> None:
    watch = StallWatch(stall_s=10.0, now=0.0)
    assert watch.stalled_for(load(generated=8), 9.0, leases=1) == 0
    assert watch.stalled_for(load(generated=8), 18.0, leases=1) == 0
    assert watch.stalled_for(load(generated=8), 20.0, leases=1) == 11.0
    assert watch.stalled_for(load(generated=8), 21.0, leases=0) == 0
    assert watch.stalled_for(load(generated=8), 30.0, leases=1) == 0


def test_an_engine_in_a_long_prefill_is_slow_and_one_that_hangs_in_it_is_stuck() -> None:
    watch = StallWatch(stall_s=10.0, now=0.0)
    for layer in range(1, 30):
        assert watch.stalled_for(load(waiting=1, work_done=layer), 9.0 * layer) == 0
    assert watch.stalled_for(load(waiting=1, work_done=29), 9.0 * 29 + 11.0) == 11.0
