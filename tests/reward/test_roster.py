from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.reward.roster import Assignment, QueueFull, Roster

LIMIT_S = 10.0
MAX_WAITING = 5


class RosterMachine(RuleBasedStateMachine):
    """Drives a roster beside a plain model of where each job and worker is."""

    def __init__(self) -> None:
        super().__init__()
        self.roster = Roster(LIMIT_S, MAX_WAITING)
        self.now = 0.0
        self.numbers = 0
        self.waiting: list[int] = []
        self.idle: list[int] = []
        self.running: dict[int, tuple[int, float]] = {}

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    @rule()
    def a_worker_comes(self) -> None:
        worker = self.number()
        self.roster.worker_ready(worker)
        self.idle.append(worker)

    @rule()
    def a_job_comes(self) -> None:
        job = self.number()
        if len(self.waiting) == MAX_WAITING:
            with pytest.raises(QueueFull):
                self.roster.submit(job)
        else:
            self.roster.submit(job)
            self.waiting.append(job)

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def jobs_are_assigned(self) -> None:
        expected = [Assignment(*pair) for pair in zip(self.idle, self.waiting)]
        assert self.roster.assign(self.now) == expected
        for worker, job in expected:
            self.running[worker] = (job, self.now + LIMIT_S)
        del self.idle[: len(expected)], self.waiting[: len(expected)]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_job_finishes(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.running)))
        job, _ = self.running.pop(worker)
        assert not self.roster.finish(worker, job + 1_000_000)
        assert self.roster.finish(worker, job)
        assert not self.roster.finish(worker, job)
        self.idle.append(worker)

    @rule()
    def overdue_jobs_are_ended(self) -> None:
        late = {worker: job for worker, (job, deadline) in self.running.items() if deadline <= self.now}
        assert dict(self.roster.overdue(self.now)) == late
        for worker, job in late.items():
            del self.running[worker]
            assert not self.roster.finish(worker, job)

    @precondition(lambda self: self.running or self.idle)
    @rule(data=st.data())
    def a_worker_dies(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted([*self.running, *self.idle])))
        job, _ = self.running.pop(worker, (None, 0.0))
        if job is None:
            self.idle.remove(worker)
        assert self.roster.lose(worker) == job

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_waiting_job_is_withdrawn(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.waiting))
        assert self.roster.withdraw(job)
        assert not self.roster.withdraw(job)
        self.waiting.remove(job)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_running_job_knows_its_worker_and_is_not_withdrawn(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.running)))
        job = self.running[worker][0]
        assert self.roster.worker_of(job) == worker
        assert not self.roster.withdraw(job)

    @invariant()
    def counts_agree(self) -> None:
        counts = (self.roster.waiting, self.roster.idle, self.roster.running)
        assert counts == (len(self.waiting), len(self.idle), len(self.running))

    @invariant()
    def the_next_deadline_is_the_earliest(self) -> None:
        assert self.roster.next_deadline() == min((deadline for _, deadline in self.running.values()), default=None)


TestRoster = RosterMachine.TestCase


def test_the_time_limit_starts_with_the_work_and_not_with_the_wait() -> None:
    roster = Roster(LIMIT_S, MAX_WAITING)
    roster.worker_ready(1)
    roster.submit(10)
    roster.submit(11)
    assert roster.assign(0.0) == [Assignment(1, 10)]
    assert roster.finish(1, 10)
    assert roster.assign(9.0) == [Assignment(1, 11)]
    assert roster.overdue(18.9) == []
    assert roster.overdue(19.0) == [Assignment(1, 11)]


def test_a_worker_is_on_the_roster_once() -> None:
    roster = Roster(LIMIT_S, MAX_WAITING)
    roster.worker_ready(1)
    with pytest.raises(ValueError, match="worker 1"):
        roster.worker_ready(1)
