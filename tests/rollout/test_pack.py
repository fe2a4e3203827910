"""Packing: whole groups, once each, never across a mini-batch boundary, never fewer samples than the bound allows."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.rollout.pack import Packer
from penstock.sample import Finish, Prompt, Sample, SampleId, Score, Unscored


def sample(prompt: int, replica: int, score: Score | Unscored | None = None) -> Sample:
    return Sample(
        id=SampleId("train-0", prompt, replica),
        prompt=Prompt(prompt, f"question {prompt}", [prompt], {}, f"file:{prompt}"),
        token_ids=array("i", [1]),
        logprobs=array("f", [-0.5]),
        version_spans=(),
        finish=Finish.STOP,
        score=Score(float(replica)) if score is None else score,
    )


def fill(packer: Packer, prompt: int, *, unscored: tuple[int, ...] = ()) -> None:
    for replica in range(packer.samples_per_prompt):
        packer.add(sample(prompt, replica, Unscored("timed out") if replica in unscored else None))


def test_nothing_comes_out_before_a_group_is_whole() -> None:
    packer = Packer(2, 3, 2, 1)
    packer.add(sample(7, 0))
    packer.add(sample(7, 2))
    assert packer.take() is None
    assert packer.take(drain=True) is None
    packer.add(sample(7, 1))
    groups = packer.take()
    assert groups is not None
    assert [s.id.replica for s in groups[0].samples] == [0, 1, 2]
    assert groups[0].prompt.index == 7


def test_a_take_waits_for_the_lower_bound() -> None:
    packer = Packer(4, 2, 4, 4)
    fill(packer, 0)
    assert not packer.takeable
    assert packer.take() is None
    fill(packer, 1)
    assert packer.takeable
    groups = packer.take()
    assert groups is not None
    assert len(groups) == 2
    assert not packer.mini_batch_complete
    assert not packer.done


def test_drain_gives_the_remainder_under_the_bound() -> None:
    packer = Packer(4, 2, 4, 100)
    fill(packer, 0)
    assert packer.take() is None
    groups = packer.take(drain=True)
    assert groups is not None
    assert len(groups) == 1


def test_the_end_of_a_mini_batch_comes_out_without_waiting_for_more() -> None:
    packer = Packer(4, 2, 2, 100)
    fill(packer, 3)
    fill(packer, 1)
    fill(packer, 0)
    groups = packer.take()
    assert groups is not None
    assert [g.prompt.index for g in groups] == [3, 1]
    assert packer.mini_batch == 0
    assert packer.mini_batch_complete
    assert packer.take() is None
    fill(packer, 2)
    assert packer.all_complete
    groups = packer.take()
    assert groups is not None
    assert [g.prompt.index for g in groups] == [0, 2]
    assert packer.mini_batch == 1
    assert packer.done


def test_a_group_with_an_unscored_member_is_dropped_and_counted() -> None:
    packer = Packer(2, 2, 1, 1)
    fill(packer, 0, unscored=(1,))
    assert packer.take() == []
    assert packer.mini_batch_complete
    assert packer.dropped_groups == {"timed out": 1}
    assert packer.unscored_samples == {"timed out": 1}
    fill(packer, 1)
    assert packer.take()
    assert packer.done


def test_a_group_can_be_kept_without_its_unscored_member() -> None:
    packer = Packer(1, 3, 1, 1, unscored="drop_sample")
    fill(packer, 0, unscored=(1,))
    groups = packer.take()
    assert groups is not None
    assert [s.id.replica for s in groups[0].samples] == [0, 2]
    assert groups[0].missing == {"timed out": 1}
    assert not packer.dropped_groups


@pytest.mark.parametrize(("policy", "lost"), [("drop_group", {2, 3}), ("drop_sample", {3})])
def test_a_group_is_lost_once_it_is_known_to_be_dropped(policy: str, lost: set[int]) -> None:
    packer = Packer(4, 3, 4, 1, unscored=policy)  # type: ignore[arg-type]
    fill(packer, 0)
    packer.add(sample(1, 0))
    packer.add(sample(2, 0))
    packer.fail(2, 1, "lost")
    fill(packer, 3, unscored=(0, 1, 2))
    assert {prompt for prompt in range(4) if packer.lost(prompt)} == lost
    packer.add(sample(2, 2))
    assert packer.lost(2) == (policy == "drop_group"), "it is whole now"


def test_a_group_whose_every_member_failed_is_dropped_under_either_policy() -> None:
    for policy in ("drop_group", "drop_sample"):
        packer = Packer(1, 2, 1, 1, unscored=policy)
        packer.fail(0, 0, "prompt too long")
        packer.fail(0, 1, "prompt too long")
        assert packer.take() == []
        assert packer.done
        assert packer.dropped_groups == {"prompt too long": 1}


def test_dropped_groups_alone_do_not_wake_a_draining_trainer() -> None:
    packer = Packer(3, 1, 3, 1)
    packer.fail(0, 0, "failed")
    assert packer.take(drain=True) is None


@pytest.mark.parametrize(
    ("prompt", "replica", "says"),
    [(0, 0, "twice"), (0, 5, "outside"), (9, 0, "one more than")],
)
def test_what_does_not_belong_is_refused(prompt: int, replica: int, says: str) -> None:
    packer = Packer(1, 2, 1, 1)
    packer.add(sample(0, 0))
    with pytest.raises(ValueError, match=says):
        packer.add(sample(prompt, replica))
    packer.add(sample(0, 1))
    with pytest.raises(ValueError, match="after its group was whole"):
        packer.fail(0, 1, "late")


def test_a_sample_that_was_never_scored_is_refused() -> None:
    packer = Packer(1, 1, 1, 1)
    unscored = sample(0, 0)
    unscored.score = None
    with pytest.raises(ValueError, match="neither"):
        packer.add(unscored)


class PackerMachine(RuleBasedStateMachine):
    """Samples in any order and of any fate, takes at any time."""

    @initialize(
        groups=st.integers(1, 6),
        replicas=st.integers(1, 3),
        mini_batch=st.integers(1, 6),
        bound=st.integers(1, 8),
        policy=st.sampled_from(["drop_group", "drop_sample"]),
    )
    def start(self, groups: int, replicas: int, mini_batch: int, bound: int, policy: str) -> None:
        self.packer = Packer(groups, replicas, mini_batch, bound, policy)  # type: ignore[arg-type]
        self.coming = [(p, r) for p in range(groups) for r in range(replicas)]
        self.fate: dict[tuple[int, int], bool] = {}
        self.taken: list[int] = []
        self.boundaries = 0

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), fate=st.sampled_from(["scored", "scored", "unscored", "failed"]))
    def one_more(self, data: st.DataObject, fate: str) -> None:
        prompt, replica = self.coming.pop(data.draw(st.integers(0, len(self.coming) - 1)))
        self.fate[prompt, replica] = fate == "scored"
        if fate == "failed":
            self.packer.fail(prompt, replica, "failed")
        else:
            self.packer.add(sample(prompt, replica, Unscored("cause") if fate == "unscored" else Score(1.0)))

    @rule(drain=st.booleans())
    def take(self, drain: bool) -> None:
        packer = self.packer
        expected, before = packer.takeable, packer.done
        groups = packer.take(drain)
        if groups is None:
            assert not expected
            return
        assert not before
        assert expected or drain
        samples = sum(len(g.samples) for g in groups)
        assert packer.mini_batch_complete or drain or samples >= packer.min_samples
        assert packer.mini_batch == self.boundaries
        self.boundaries += packer.mini_batch_complete
        for group in groups:
            self.taken.append(group.prompt.index)
            members = {s.id.replica for s in group.samples}
            scored = {r for (p, r), good in self.fate.items() if p == group.prompt.index and good}
            assert members == scored
            assert len(members) + sum(group.missing.values()) == packer.samples_per_prompt

    @invariant()
    def each_group_comes_out_once(self) -> None:
        assert len(set(self.taken)) == len(self.taken)

    def teardown(self) -> None:
        if not hasattr(self, "packer"):
            return
        packer = self.packer
        while self.coming:
            prompt, replica = self.coming.pop()
            self.fate[prompt, replica] = True
            packer.add(sample(prompt, replica))
        while not packer.done:
            groups = packer.take()
            assert groups is not None
            self.taken += [g.prompt.index for g in groups]
            self.boundaries += packer.mini_batch_complete
        assert packer.take(drain=True) is None
        assert len(set(self.taken)) == len(self.taken)
        assert len(self.taken) + packer.dropped_groups.total() == packer.groups_expected
        assert self.boundaries == -(-packer.groups_expected // packer.mini_batch_groups)


PackerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_any_order_of_samples_and_takes_keeps_the_promises = PackerMachine.TestCase
