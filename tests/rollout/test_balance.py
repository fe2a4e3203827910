"""The shortest queue: by place, not by instance; never more waiting at one than allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rollout.balance import InstanceLoad, Queue, ShortestQueue


def loads(*pairs: tuple[int, int]) -> list[InstanceLoad]:
    return [InstanceLoad(f"i{k}", samples, max_running) for k, (samples, max_running) in enumerate(pairs)]


def test_samples_go_where_the_queue_is_shortest_for_its_places() -> None:
    assert ShortestQueue(0).assign(Queue(3), loads((0, 4), (0, 2))) == [0, 1, 0]
    assert ShortestQueue(0).assign(Queue(2), loads((3, 4), (0, 2))) == [1, 1]


def test_no_more_than_max_pending_wait_at_an_instance() -> None:
    assert ShortestQueue(1).assign(Queue(99), loads((0, 2), (3, 2))) == [0, 0, 0]
    assert ShortestQueue(0).assign(Queue(99), loads((2, 2))) == []


def test_no_instance_gets_nothing() -> None:
    assert ShortestQueue(4).assign(Queue(5), []) == []


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="max_pending is -1"):
        ShortestQueue(-1)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), max_size=6), st.integers(0, 60), st.integers(0, 4))
def test_all_room_is_used_and_the_ends_are_level(pairs: list[tuple[int, int]], waiting: int, cap: int) -> None:
    picks = ShortestQueue(cap).assign(Queue(waiting), loads(*pairs))
    room = [max(0, size + cap - samples) for samples, size in pairs]
    assert len(picks) == min(waiting, sum(room))
    after = [samples + picks.count(k) for k, (samples, _) in enumerate(pairs)]
    for k, (_, size) in enumerate(pairs):
        if picks.count(k):
            assert after[k] <= size + cap
            # Its last sample went where the queue was shortest: nobody with room left is better off.
            others = [after[j] / s for j, (_, s) in enumerate(pairs) if after[j] < s + cap]
            assert all((after[k] - 1) / size <= other for other in others)


def test_the_first_to_hold_a_version_leaves_the_others_their_share() -> None:
    policy = ShortestQueue(8)
    one = [InstanceLoad("a", 0, 64)]
    assert len(policy.assign(Queue(fresh=40, coming=3), one)) == 10
    # As much has ended as is left: who comes in as long again finds nothing to share.
    assert len(policy.assign(Queue(fresh=40, coming=3, finished=40), one)) == 40
    assert 10 < len(policy.assign(Queue(fresh=40, coming=3, finished=5), one)) < 40
    assert len(policy.assign(Queue(fresh=40), one)) == 40
    later = [InstanceLoad("a", 10, 64), InstanceLoad("b", 0, 64)]
    assert policy.assign(Queue(fresh=30, coming=2), later) == [1] * 10
    unlike = [InstanceLoad("a", 0, 64), InstanceLoad("b", 0, 32)]
    picks = policy.assign(Queue(fresh=40, coming=2), unlike)
    assert (picks.count(0), picks.count(1)) == (12, 6), "those that come are taken to be like the best"
