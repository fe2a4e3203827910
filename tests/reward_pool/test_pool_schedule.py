"""The scheduler: invariants under any order of events, and each option seen to change what happens."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.reward.breaker import Health
from penstock.reward.failures import (
    BudgetSpent,
    DeadlinePassed,
    JobFailed,
    JobTooLarge,
    NoEndpoint,
    PoolClosed,
    QueueFull,
)
from penstock.reward.jobs import Attempt, Job, State
from penstock.reward.limits import Endpoint, PoolOptions
from penstock.reward.retry import Kind, Outcome
from penstock.reward.schedule import Scheduler
from penstock.simulate.reward_scenarios import SCENARIOS, Scenario

DONE = Outcome(Kind.DONE)
BROKEN = Outcome(Kind.BROKEN, "reset")
AWAY = Outcome(Kind.TURNED_AWAY, "429", 429)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Jobs, answers, cancellations and time in any order, over endpoints that overlap in what they serve."""

    @initialize(
        share=st.sampled_from([0.0, 0.05, 1.0]),
        reserve=st.sampled_from([1, 3, 50]),
        money=st.sampled_from([None, 2.0, 20.0]),
    )
    def make(self, share: float, reserve: int, money: float | None) -> None:
        budgets = {"hedge_share": share, "retry_share": 0.5, "retry_reserve": reserve, "max_spend": money}
        self.options = PoolOptions(hedge_after_s=0.5, attempts=3, max_queued=50, **budgets)  # type: ignore[arg-type]
        self.endpoints = [
            Endpoint("http://a", models=("m", "both"), concurrency=2, price_per_request=0.5),
            Endpoint("http://b", models=("both", "tokens"), requests_per_minute=60, burst=2),
            Endpoint("http://c", models=("tokens", "both"), tokens_per_minute=600),
        ]
        self.scheduler = Scheduler(self.endpoints, self.options)
        self.now = 0.0
        self.jobs: dict[int, Job] = {}
        self.live: list[Attempt] = []
        self.ended: dict[int, str] = {}
        self.all_tokens_count = True
        """Nothing has been turned away: what is, gives its tokens back."""
        self.starts: dict[str, list[tuple[float, float]]] = {endpoint.url: [] for endpoint in self.endpoints}

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        self.live.remove(attempt)
        for loser in self.scheduler.report(attempt, outcome, self.now):
            self._end(loser, Outcome(Kind.CANCELLED))

    def _settle(self) -> None:
        for attempt in self.scheduler.overdue(self.now):
            self._end(attempt, Outcome(Kind.CANCELLED))
        for attempt in self.scheduler.dispatch(self.now):
            self.live.append(attempt)
            if attempt.job.model == "m" and not attempt.hedge:
                self._nobody_was_due_before(attempt.job)
            assert not attempt.place.retired
            self.starts[attempt.place.endpoint.url].append((self.now, attempt.job.tokens))
        for job in self.scheduler.take_finished():
            assert job.number not in self.ended, "resolved twice"
            assert job.state is State.RESOLVED
            self.ended[job.number] = type(job.error).__name__

    def _nobody_was_due_before(self, started: Job) -> None:
        """So nothing starves: a job's due time is fixed as it comes, and only what is due before it goes before it."""
        for number, job in self.jobs.items():
            if number not in self.ended and job.model == "m" and job.state is State.WAITING:
                assert (started.due, started.number) < (job.due, job.number)

    @rule(
        model=st.sampled_from(["m", "both", "tokens"]),
        tokens=st.sampled_from([0.0, 5.0, 300.0]),
        priority=st.integers(0, 2),
        patience=st.sampled_from([0.3, 5.0, math.inf]),
    )
    def submit(self, model: str, tokens: float, priority: int, patience: float) -> None:
        try:
            job = self.scheduler.submit(None, self.now, model, tokens, priority, self.now + patience)
        except QueueFull:
            assert self.scheduler.waiting >= 50
            return
        except NoEndpoint:
            assert not any(place.endpoint.serves(model) for place in self.scheduler.places if not place.retired)
            return
        self.jobs[job.number] = job
        self._settle()

    @rule(data=st.data(), outcome=st.sampled_from([DONE, DONE, BROKEN, AWAY, Outcome(Kind.FINAL, "400", 400)]))
    def answer(self, data: st.DataObject, outcome: Outcome) -> None:
        if self.live:
            self.all_tokens_count &= outcome is not AWAY
            self._end(data.draw(st.sampled_from(self.live)), outcome)
            self._settle()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        running = [job for number, job in self.jobs.items() if number not in self.ended]
        if running:
            job = data.draw(st.sampled_from(running))
            for attempt in self.scheduler.cancel(job):
                self._end(attempt, Outcome(Kind.CANCELLED))
            self.ended[job.number] = "cancelled"
            self._settle()

    @rule(declared=st.sampled_from(["abc", "abc", "ab", "bc", "cab"]))
    def reload(self, declared: str) -> None:
        """An endpoint that leaves finishes what it has; one that comes back has not forgotten what it was sent."""
        self.scheduler.redeclare([self.endpoints["abc".index(name)] for name in declared], self.options, self.now)
        self._settle()

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._settle()

    @invariant()
    def in_flight_is_what_was_admitted_and_not_settled(self) -> None:
        for place in self.scheduler.places:
            assert place.admission.in_flight == sum(1 for attempt in self.live if attempt.place is place)
        assert self.scheduler.running == len(self.live)

    @invariant()
    def no_declared_limit_is_exceeded(self) -> None:
        assert sum(1 for attempt in self.live if attempt.place.endpoint.url == "http://a") <= 2
        starts = [at for at, _ in self.starts["http://b"][-100:]]
        for n, start in enumerate(starts):
            assert sum(1 for at in starts[n:] if at < start + 60.0) <= 60
            assert sum(1 for at in starts[n:] if at <= start + 1.0) <= 3
        sent = self.starts["http://c"][-100:]
        for n, (start, _) in enumerate(sent):
            if self.all_tokens_count:
                assert sum(tokens for at, tokens in sent[n:] if at < start + 60.0) <= 600

    @invariant()
    def every_job_is_somewhere_and_only_there(self) -> None:
        open_jobs = [job for number, job in self.jobs.items() if number not in self.ended]
        waiting = [job for job in open_jobs if job.state in (State.WAITING, State.DEFERRED)]
        assert self.scheduler.waiting == len(waiting)
        for job in open_jobs:
            assert (job.state is State.RUNNING) == bool(job.live)

    @invariant()
    def hedges_and_retries_stay_within_their_budgets(self) -> None:
        assert self.scheduler.hedges <= self.options.hedge_share * self.scheduler.jobs
        earned = 0.5 * self.scheduler.jobs + self.options.retry_reserve * (1 + self.now / 100)
        assert self.scheduler.budget.spent <= earned + 1e-6

    @invariant()
    def no_more_money_is_spent_or_promised_than_there_is(self) -> None:
        ledger = self.scheduler.ledger
        assert ledger.reserved == pytest.approx(sum(attempt.money for attempt in self.live))
        assert self.options.max_spend is None or ledger.spent + ledger.reserved <= self.options.max_spend + 1e-6

    def teardown(self) -> None:
        """Left alone with endpoints that work, every job ends."""
        if not hasattr(self, "scheduler"):
            return
        self.reload("abc")
        for _ in range(2000):
            if len(self.ended) == len(self.jobs):
                break
            for attempt in list(self.live):
                if attempt in self.live:
                    self._end(attempt, DONE)
            self._settle()
            wake = self.scheduler.wake_at(self.now)
            if not self.live and len(self.ended) < len(self.jobs):
                assert wake < math.inf, "jobs wait and nothing will ever wake them"
                self.now = max(self.now, wake)
        assert len(self.ended) == len(self.jobs)
        assert all(place.admission.in_flight == 0 for place in self.scheduler.places)
        assert (self.scheduler.running, self.scheduler.waiting, self.scheduler.ledger.reserved) == (0, 0, 0.0)


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def one(options: PoolOptions | None = None, **declared: float) -> Scheduler:
    return Scheduler([Endpoint("http://a", **declared)], options or PoolOptions())  # type: ignore[arg-type]


def two(first: dict, second: dict, options: PoolOptions | None = None) -> Scheduler:
    return Scheduler([Endpoint("http://a", **first), Endpoint("http://b", **second)], options or PoolOptions())


def order(scheduler: Scheduler, now: float = 0.0) -> list:
    """Payloads in the order in which they are started, one at a time."""
    started = []
    while scheduler.waiting:
        (attempt,) = scheduler.dispatch(now)
        started.append(attempt.job.payload)
        scheduler.report(attempt, DONE, now)
    return started


@pytest.mark.parametrize("others", [0, 1])
def test_once_the_money_is_spent_every_job_that_waits_hears_of_it(others: int) -> None:
    declared = [Endpoint("http://a", models=("m",), concurrency=2, price_per_request=0.5)]
    declared += [Endpoint("http://b", models=("other",))] * others
    scheduler = Scheduler(declared, PoolOptions(max_spend=1.0, hedge_share=0))
    jobs = [scheduler.submit(n, 0.0, model="m") for n in range(6)]
    for attempt in scheduler.dispatch(0.0):
        scheduler.report(attempt, DONE, 0.0)
    assert scheduler.dispatch(0.0) == []
    assert scheduler.waiting == 0
    assert [type(job.error) for job in jobs] == [type(None)] * 2 + [BudgetSpent] * 4


def test_a_job_that_the_money_still_covers_is_not_kept_by_a_dearer_one_before_it() -> None:
    scheduler = one(PoolOptions(max_spend=10.0, hedge_share=0), price_per_1k_tokens=1.0)
    dear, cheap = scheduler.submit("dear", 0.0, tokens=20_000), scheduler.submit("cheap", 0.0, tokens=1000)
    (attempt,) = scheduler.dispatch(0.0)
    assert attempt.job is cheap
    assert type(dear.error) is BudgetSpent


def test_higher_priority_goes_first_and_aging_bounds_how_long() -> None:
    scheduler = one(PoolOptions(aging_s=10), concurrency=1)
    scheduler.submit("old", 0.0)
    scheduler.submit("high", 5.0, priority=1)
    scheduler.submit("late high", 11.0, priority=1)
    assert order(scheduler, 11.0) == ["high", "old", "late high"]
    strict = one(PoolOptions(aging_s=1000), concurrency=1)
    strict.submit("old", 0.0)
    strict.submit("late high", 11.0, priority=1)
    assert order(strict, 11.0) == ["late high", "old"]


def test_a_deadline_puts_a_job_before_patient_ones_and_patience_says_which_those_are() -> None:
    def first(patience_s: float) -> str:
        scheduler = one(PoolOptions(patience_s=patience_s), concurrency=1)
        scheduler.submit("bulk", 0.0)
        scheduler.submit("urgent", 0.0, deadline=20.0)
        return order(scheduler)[0]

    assert first(60.0) == "urgent"
    assert first(10.0) == "bulk"


def test_a_job_turned_away_keeps_its_place_in_the_order() -> None:
    scheduler = one(concurrency=1)
    scheduler.submit("first", 0.0)
    scheduler.submit("second", 1.0)
    (attempt,) = scheduler.dispatch(1.0)
    scheduler.report(attempt, Outcome(Kind.TURNED_AWAY, "429", 429, retry_after_s=0.01), 1.0)
    assert scheduler.dispatch(1.0) == []
    assert order(scheduler, 1.5) == ["first", "second"]


def test_rejected_work_goes_elsewhere_at_once_rather_than_asleep() -> None:
    scheduler = two({"concurrency": 1}, {"concurrency": 1})
    scheduler.submit("job", 0.0)
    (attempt,) = scheduler.dispatch(0.0)
    scheduler.report(attempt, Outcome(Kind.TURNED_AWAY, "429", 429, retry_after_s=30.0), 0.1)
    (again,) = scheduler.dispatch(0.1)
    assert again.place is not attempt.place


def test_a_broken_attempt_prefers_another_endpoint_and_attempts_are_bounded() -> None:
    scheduler = two({}, {}, PoolOptions(attempts=3))
    job = scheduler.submit("job", 0.0)
    places = []
    for _ in range(3):
        (attempt,) = scheduler.dispatch(0.0)
        places.append(attempt.place)
        scheduler.report(attempt, BROKEN, 0.0)
    assert places[0] is not places[1]
    assert scheduler.take_finished() == [job]
    assert isinstance(job.error, JobFailed)
    assert "attempt 3 of 3" in str(job.error)
    lone = scheduler.submit("once", 0.0, attempts=1)
    (attempt,) = scheduler.dispatch(0.0)
    scheduler.report(attempt, BROKEN, 0.0)
    assert scheduler.take_finished() == [lone]


def test_a_final_answer_is_not_retried() -> None:
    scheduler = one()
    job = scheduler.submit("job", 0.0)
    (attempt,) = scheduler.dispatch(0.0)
    scheduler.report(attempt, Outcome(Kind.FINAL, "HTTP 400", 400, body="no such model"), 0.0)
    assert scheduler.take_finished() == [job]
    assert isinstance(job.error, JobFailed)
    assert job.error.status == 400
    assert "no such model" in str(job.error)


def test_retries_over_the_budget_wait_for_it_and_are_not_lost() -> None:
    scheduler = one(PoolOptions(retry_share=0.0, retry_reserve=1, breaker_failures=1000, hedge_share=0))
    jobs = [scheduler.submit(n, 0.0) for n in range(2)]
    for attempt in scheduler.dispatch(0.0):
        scheduler.report(attempt, BROKEN, 0.0)
    assert len(scheduler.dispatch(0.0)) == 1
    assert scheduler.wake_at(0.0) == pytest.approx(100.0)
    (late,) = scheduler.dispatch(100.0)
    scheduler.report(late, DONE, 100.0)
    assert scheduler.take_finished()[0] in jobs


def test_a_job_that_waits_for_the_retry_budget_can_be_cancelled() -> None:
    scheduler = one(PoolOptions(retry_share=0.0, retry_reserve=1, breaker_failures=1000, hedge_share=0))
    jobs = [scheduler.submit(n, 0.0) for n in range(2)]
    for attempt in scheduler.dispatch(0.0):
        scheduler.report(attempt, BROKEN, 0.0)
    (again,) = scheduler.dispatch(0.0)
    (deferred,) = [job for job in jobs if job is not again.job]
    assert scheduler.waiting == 1
    assert scheduler.cancel(deferred) == ()
    assert scheduler.waiting == 0
    assert scheduler.dispatch(1000.0) == []


@pytest.mark.parametrize(("outcome", "error"), [(BROKEN, NoEndpoint), (DONE, type(None))])
def test_a_job_that_runs_as_its_model_is_taken_out_may_end_well_and_is_not_tried_again(
    outcome: Outcome, error: type
) -> None:
    scheduler = one(models=("m",))
    job = scheduler.submit("job", 0.0, model="m")
    (attempt,) = scheduler.dispatch(0.0)
    scheduler.redeclare([Endpoint("http://b", models=("other",))], PoolOptions(), 0.0)
    assert scheduler.take_finished() == []
    scheduler.report(attempt, outcome, 1.0)
    assert scheduler.take_finished() == [job]
    assert type(job.error) is error


def test_an_endpoint_that_is_taken_out_and_declared_again_knows_what_it_was_sent() -> None:
    """A name mistyped in a pool's file and mended a moment later must not double a limit."""
    limited = Endpoint("http://a", requests_per_minute=2, burst=2)
    scheduler = Scheduler([limited], PoolOptions())
    for n in range(3):
        scheduler.submit(n, 0.0)
    for attempt in scheduler.dispatch(0.0):
        scheduler.report(attempt, DONE, 0.1)
    scheduler.redeclare([Endpoint("http://a", name="typo", models=("none",)), Endpoint("http://b")], PoolOptions(), 1.0)
    (elsewhere,) = scheduler.dispatch(1.0)
    assert elsewhere.place.endpoint.url == "http://b"
    scheduler.redeclare([limited], PoolOptions(), 2.0)
    scheduler.submit("late", 2.0, deadline=900.0)
    assert scheduler.dispatch(2.0) == []
    assert scheduler.wake_at(2.0) >= 60.0
    assert len(scheduler.dispatch(61.0)) == 1


def test_a_dead_endpoint_costs_each_job_at_most_one_attempt_and_few_jobs_any() -> None:
    scheduler = two({"concurrency": 4}, {"concurrency": 4}, PoolOptions(breaker_failures=3))
    dead = scheduler.places[0]
    jobs = [scheduler.submit(n, 0.0) for n in range(100)]
    now, hit = 0.0, 0
    while scheduler.waiting or scheduler.running:
        attempts = scheduler.dispatch(now)
        now += 0.1
        for attempt in attempts:
            hit += attempt.place is dead
            scheduler.report(attempt, BROKEN if attempt.place is dead else DONE, now)
    assert max(job.attempts for job in jobs) == 1
    assert all(job.error is None for job in scheduler.take_finished())
    assert hit <= 10
    assert dead.admission.breaker.health is not Health.CLOSED


def test_jobs_outlive_a_restart_of_the_only_endpoint() -> None:
    """A refused connection comes back at once: four attempts would be over before a server is up again."""
    scheduler = one(PoolOptions(attempts=4, hedge_share=0), concurrency=8)
    jobs = [scheduler.submit(n, 0.0) for n in range(20)]
    gone = Outcome(Kind.BROKEN, "connection refused", unreachable=True)
    now, asked, up_at = 0.0, 0, 6.0
    while scheduler.waiting or scheduler.running:
        for attempt in scheduler.dispatch(now):
            asked += now < up_at
            scheduler.report(attempt, gone if now < up_at else DONE, now + 0.001)
        now = max(now + 0.001, min(1e9, scheduler.wake_at(now)) if scheduler.waiting else now)
    assert [job.error for job in jobs] == [None] * 20
    assert max(job.attempts for job in jobs) <= 3
    assert asked == 8 + 2, "what was in flight at first, and a probe after one second and after two more"


def test_one_refused_connection_among_answers_takes_nothing_out() -> None:
    scheduler = one(PoolOptions(hedge_share=0))
    for n in range(2):
        scheduler.submit(n, 0.0)
    first, second = scheduler.dispatch(0.0)
    scheduler.report(first, DONE, 0.5)
    scheduler.report(second, Outcome(Kind.BROKEN, "connection refused", unreachable=True), 0.6)
    assert len(scheduler.dispatch(0.6)) == 1


def test_an_endpoint_that_recovers_gets_work_again() -> None:
    scheduler = one(PoolOptions(breaker_failures=1, breaker_pause_s=2.0))
    scheduler.submit("job", 0.0)
    (attempt,) = scheduler.dispatch(0.0)
    scheduler.report(attempt, BROKEN, 0.0)
    assert scheduler.dispatch(1.0) == []
    assert scheduler.wake_at(1.0) == 2.0
    (probe,) = scheduler.dispatch(2.0)
    scheduler.report(probe, DONE, 2.1)
    for n in range(5):
        scheduler.submit(n, 2.1)
    assert len(scheduler.dispatch(2.1)) == 5


def _pauses(scheduler: Scheduler, tries: int) -> list[float]:
    """Seconds between the attempts of a job whose endpoint breaks each time."""
    scheduler.submit("job", 0.0, attempts=tries)
    now, began = 0.0, []
    while not scheduler.take_finished():
        for attempt in scheduler.dispatch(now):
            began.append(now)
            scheduler.report(attempt, BROKEN, now)
        if (wake_at := scheduler.wake_at(now)) < math.inf:
            now = wake_at
    return [later - earlier for earlier, later in itertools.pairwise(began)]


def test_an_endpoint_that_stays_broken_is_asked_as_rarely_as_the_options_say() -> None:
    first = PoolOptions(breaker_failures=1, breaker_pause_s=1.0, breaker_pause_max_s=3.0)
    assert _pauses(one(first), 5) == [1.0, 2.0, 3.0, 3.0]
    other = PoolOptions(breaker_failures=2, breaker_pause_s=0.5, breaker_pause_max_s=0.5)
    assert _pauses(one(other), 4) == [0.0, 0.5, 0.5]
    changed = one(first)
    changed.redeclare([changed.places[0].endpoint], other, 0.0)
    assert _pauses(changed, 4) == [0.0, 0.5, 0.5], "and from then on as a reload says"


def test_jobs_go_only_where_their_model_is_served_and_unserved_ones_are_refused() -> None:
    scheduler = two({"models": ("judge-*",)}, {"models": ("rm",)})
    scheduler.submit("j", 0.0, model="judge-large")
    scheduler.submit("r", 0.0, model="rm")
    assert {a.job.payload: a.place.endpoint.url for a in scheduler.dispatch(0.0)} == {"j": "http://a", "r": "http://b"}
    with pytest.raises(NoEndpoint, match="judge-\\*, rm"):
        scheduler.submit("x", 0.0, model="embed")


def test_an_endpoint_that_serves_a_scarce_model_is_left_to_it() -> None:
    scheduler = two({"models": ("rm", "judge"), "concurrency": 1}, {"models": ("judge",), "concurrency": 1})
    for n in range(4):
        scheduler.submit(f"judge {n}", 0.0, model="judge")
        scheduler.submit(f"rm {n}", 1.0, model="rm")
    went = {a.place.endpoint.url: a.job.payload for a in scheduler.dispatch(1.0)}
    assert went == {"http://a": "rm 0", "http://b": "judge 0"}


def _seen(scheduler: Scheduler, seconds: tuple[float, float]) -> None:
    """As if both endpoints had answered once, in these times."""
    for place, took_s in zip(scheduler.places, seconds, strict=True):
        place.admission.latency.add(took_s)


def test_a_slow_endpoint_is_used_only_when_waiting_for_the_fast_one_takes_longer() -> None:
    def used(queued: int) -> int:
        scheduler = two({"concurrency": 1}, {"concurrency": 1})
        _seen(scheduler, (1.0, 5.0))
        for n in range(queued):
            scheduler.submit(n, 5.0)
        return sum(a.place is scheduler.places[1] for a in scheduler.dispatch(5.0))

    assert used(2) == 0
    assert used(20) == 1


def test_weight_and_price_move_the_choice() -> None:
    def chosen(options: PoolOptions, first: dict, second: dict) -> str:
        scheduler = two({"concurrency": 1} | first, {"concurrency": 1} | second, options)
        _seen(scheduler, (1.0, 1.5))
        scheduler.submit("job", 2.0)
        (attempt,) = scheduler.dispatch(2.0)
        return attempt.place.endpoint.url

    assert chosen(PoolOptions(), {}, {}) == "http://a"
    assert chosen(PoolOptions(), {}, {"weight": 2}) == "http://b"
    dear = {"price_per_request": 1.0}
    assert chosen(PoolOptions(), dear, {}) == "http://a"
    assert chosen(PoolOptions(seconds_per_unit=10), dear, {}) == "http://b"


def test_money_is_a_limit() -> None:
    scheduler = one(PoolOptions(max_spend=2.5), price_per_request=1.0)
    jobs = [scheduler.submit(n, 0.0) for n in range(4)]
    attempts = scheduler.dispatch(0.0)
    assert len(attempts) == 2
    for attempt in attempts:
        scheduler.report(attempt, DONE, 1.0)
    assert scheduler.dispatch(1.0) == []
    scheduler.dispatch(1.0)
    errors = [job.error for job in scheduler.take_finished()]
    assert [type(e) for e in errors if e] == [BudgetSpent, BudgetSpent]
    assert scheduler.spent == 2.0
    assert len(jobs) == 4


def test_an_attempt_that_was_cancelled_is_paid_for_unless_the_provider_refunds_it() -> None:
    def spent(refunds: bool) -> float:
        scheduler = one(price_per_request=1.0, refunds_cancelled=refunds)
        job = scheduler.submit("job", 0.0)
        (attempt,) = scheduler.dispatch(0.0)
        scheduler.cancel(job)
        scheduler.report(attempt, Outcome(Kind.CANCELLED), 1.0)
        return scheduler.spent

    assert spent(False) == 1.0
    assert spent(True) == 0.0


def test_a_spent_account_is_left_alone_and_the_job_goes_elsewhere_or_says_so() -> None:
    scheduler = two({}, {})
    spent = Outcome(Kind.SPENT, "HTTP 429", 429, body="insufficient_quota")
    job = scheduler.submit("job", 0.0)
    (first,) = scheduler.dispatch(0.0)
    scheduler.report(first, spent, 0.0)
    (second,) = scheduler.dispatch(0.0)
    assert second.place is not first.place
    scheduler.report(second, spent, 0.0)
    assert scheduler.take_finished() == [job]
    assert isinstance(job.error, BudgetSpent)


def _drained(options: PoolOptions, **declared: float) -> Scheduler:
    """One hundred jobs done in 1 s each, and a last one started."""
    scheduler = one(options, concurrency=8, **declared)
    for n in range(100):
        scheduler.submit(n, 0.0)
    now = 0.0
    while scheduler.waiting or scheduler.running:
        attempts = scheduler.dispatch(now)
        now += 1.0
        for attempt in attempts:
            scheduler.report(attempt, DONE, now)
    scheduler.submit("last", now)
    scheduler.dispatch(now)
    scheduler.now = now  # type: ignore[attr-defined]
    return scheduler


def test_a_slow_job_is_hedged_when_nothing_waits_and_the_loser_is_named() -> None:
    scheduler = _drained(PoolOptions())
    now = scheduler.now  # type: ignore[attr-defined]
    assert scheduler.dispatch(now + 1.2) == []
    assert scheduler.wake_at(now + 1.2) == pytest.approx(now + 1.5)
    (hedge,) = scheduler.dispatch(now + 1.6)
    assert hedge.hedge
    assert hedge.job.payload == "last"
    (loser,) = scheduler.report(hedge, DONE, now + 2.0)
    assert not loser.hedge
    scheduler.report(loser, Outcome(Kind.CANCELLED), now + 2.0)
    assert scheduler.running == 0


def test_hedging_obeys_its_options() -> None:
    off = _drained(PoolOptions(hedge_share=0))
    assert off.dispatch(off.now + 50) == []  # type: ignore[attr-defined]
    late = _drained(PoolOptions(hedge_after_s=20))
    assert late.dispatch(late.now + 10) == []  # type: ignore[attr-defined]
    assert len(late.dispatch(late.now + 21)) == 1  # type: ignore[attr-defined]
    few = one(PoolOptions(hedge_after_s=1.0))
    few.submit("lone", 0.0)
    few.dispatch(0.0)
    assert few.dispatch(9.0) == [], "one second attempt for one job would be 100 %"


def test_no_hedge_while_jobs_wait() -> None:
    scheduler = _drained(PoolOptions(hedge_after_s=1.0), requests_per_minute=6000, burst=1)
    now = scheduler.now  # type: ignore[attr-defined]
    for n in range(50):
        scheduler.submit(n, now + 5)
    assert not any(attempt.hedge for attempt in scheduler.dispatch(now + 5))


def test_a_hedge_goes_to_another_endpoint_where_there_is_one() -> None:
    scheduler = two({"concurrency": 8}, {"concurrency": 8}, PoolOptions(hedge_share=1.0, hedge_after_s=1.0))
    scheduler.submit("job", 0.0)
    (attempt,) = scheduler.dispatch(0.0)
    (hedge,) = scheduler.dispatch(1.0)
    assert hedge.place is not attempt.place


def test_a_deadline_ends_a_job_wherever_it_is() -> None:
    scheduler = one(concurrency=1)
    running = scheduler.submit("running", 0.0, deadline=5.0)
    queued = scheduler.submit("queued", 0.0, deadline=5.0)
    (attempt,) = scheduler.dispatch(0.0)
    assert scheduler.overdue(4.9) == []
    assert scheduler.wake_at(4.9) == 5.0
    assert scheduler.overdue(5.0) == [attempt]
    assert {job.number for job in scheduler.take_finished()} == {running.number, queued.number}
    assert isinstance(queued.error, DeadlinePassed)
    assert "in the queue" in str(queued.error)
    assert "at http://a" in str(running.error)


def test_a_job_that_ran_out_of_time_says_where_no_endpoint_was_well() -> None:
    scheduler = one(PoolOptions(breaker_failures=1, breaker_pause_s=10.0))
    job = scheduler.submit("job", 0.0, deadline=5.0)
    (attempt,) = scheduler.dispatch(0.0)
    scheduler.report(attempt, BROKEN, 0.0)
    scheduler.overdue(5.0)
    assert str(job.error) == "no answer after 5 s (in the queue; every endpoint for it is out); last: reset"


def test_what_can_not_be_taken_is_refused_at_once() -> None:
    scheduler = one(PoolOptions(max_queued=1), tokens_per_minute=100)
    with pytest.raises(JobTooLarge, match="500 tokens"):
        scheduler.submit("big", 0.0, tokens=500)
    scheduler.submit("one", 0.0)
    with pytest.raises(QueueFull, match="max_queued is 1"):
        scheduler.submit("two", 0.0)
    scheduler.close()
    (job,) = scheduler.take_finished()
    assert isinstance(job.error, PoolClosed)
    with pytest.raises(PoolClosed):
        scheduler.submit("three", 0.0)


def test_tokens_that_were_not_used_are_given_back() -> None:
    def second_at(used: float | None) -> float:
        scheduler = one(tokens_per_minute=600)
        scheduler.submit("a", 0.0, tokens=600)
        scheduler.submit("b", 0.0, tokens=100)
        (attempt,) = scheduler.dispatch(0.0)
        scheduler.report(attempt, Outcome(Kind.DONE, tokens=used), 0.0)
        now = 0.0
        while not scheduler.dispatch(now):
            now = scheduler.wake_at(now)
        return now

    assert second_at(None) == pytest.approx(60.0)
    assert second_at(20.0) < 5.0


def test_a_cancelled_jobs_quota_is_given_back_where_the_provider_does_so() -> None:
    def second_at(refunds: bool) -> float:
        scheduler = one(tokens_per_minute=600, refunds_cancelled=refunds)
        first = scheduler.submit("a", 0.0, tokens=600)
        scheduler.submit("b", 0.0, tokens=100)
        (attempt,) = scheduler.dispatch(0.0)
        assert list(scheduler.cancel(first)) == [attempt]
        scheduler.report(attempt, Outcome(Kind.CANCELLED), 0.0)
        now = 0.0
        while not scheduler.dispatch(now):
            now = scheduler.wake_at(now)
        return now

    assert second_at(False) == pytest.approx(60.0)
    assert second_at(True) < 5.0


def test_undeclared_concurrency_is_tried_up_to_its_bound() -> None:
    def most(max_in_flight: int, reloaded: int | None = None) -> int:
        scheduler = one(PoolOptions(max_in_flight=max_in_flight))
        if reloaded is not None:
            scheduler.redeclare([scheduler.places[0].endpoint], PoolOptions(max_in_flight=reloaded), 0.0)
        for n in range(500):
            scheduler.submit(n, 0.0)
        now, peak = 0.0, 0
        while scheduler.waiting:
            attempts = scheduler.dispatch(now)
            peak, now = max(peak, len(attempts)), now + 1
            for attempt in attempts:
                scheduler.report(attempt, DONE, now)
        return peak

    assert most(4) == 4
    assert most(1024) > 64
    assert most(1024, 4) == 4, "and as a reload says"
    assert most(4, 1024) > 64


def test_nothing_starves_under_a_steady_stream_of_higher_priority() -> None:
    scheduler = one(PoolOptions(aging_s=10), concurrency=1)
    scheduler.submit("low", 0.0)
    now, started = 0.0, []
    while "low" not in started:
        now += 1.0
        for _ in range(2):
            scheduler.submit("high", now, priority=1)
        (attempt,) = scheduler.dispatch(now)
        started.append(attempt.job.payload)
        scheduler.report(attempt, DONE, now + 0.5)
        assert now < 30


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_the_makespan_is_near_its_bound_with_few_429s_and_nothing_lost(scenario: Scenario) -> None:
    report = scenario.run(seed=0)
    assert report.over_bound <= scenario.at_most
    assert report.refused_per_job <= scenario.refused_at_most
    assert report.failed == 0
    assert report.done == scenario.jobs
    assert report.hedges <= 0.05 * scenario.jobs
