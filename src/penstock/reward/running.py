"""The scheduler's decisions carried out on one event loop: its timer, its attempts, and the callers' answers.

An attempt runs in its caller's own task: a caller that waits is woken with an attempt to make, not with an answer that
another task has fetched, so a request costs no task and no hand-over. Streams (whose caller reads meanwhile) and hedges
get tasks of their own. Owns the clock; decides nothing about order, place or retry (`schedule`), and refuses to know
what a transport does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from penstock.reward.failures import JobFailed
from penstock.reward.jobs import Attempt, Job
from penstock.reward.report import AttemptEnded, JobEnded, Watcher
from penstock.reward.retry import CANCELLED, DONE, Kind, Outcome
from penstock.reward.schedule import Scheduler
from penstock.reward.transport import Reply, Request, Transport

__all__ = ["Call", "Classify", "Runner"]

Classify = Callable[[Outcome, Reply | None], Kind | None]
"""A user's word on how an attempt ended: another `Kind`, or None to leave it as it is."""
GIVEN_UP = Outcome(CANCELLED, "cancelled")
OVER = object()
"""`Attempt.handle` of one whose end has been reported. None: it is admitted and nobody runs it yet; else its task."""


class Call:
    """A job's payload: the question, who waits for the answer, and the answer."""

    __slots__ = ("error", "granted", "over", "pieces", "reply", "request", "stopped", "task", "waiter")

    def __init__(self, request: Request, pieces: asyncio.Queue[bytes] | None = None) -> None:
        self.request = request
        self.pieces = pieces
        self.reply: Reply | None = None
        self.error: Exception | None = None
        self.over = False
        self.granted: Attempt | None = None
        """An attempt for the caller's task to make."""
        self.task: asyncio.Task[object] | None = None
        """The caller's task while it makes an attempt."""
        self.stopped = False
        """The pool, not the caller's own side, has cancelled that task."""
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Runner:
    """One pool's attempts on one loop at a time; `loop` is set by the pool before anything else is called."""

    def __init__(
        self,
        scheduler: Scheduler,
        transport_of: Callable[[str], Transport],
        on_event: Callable[[AttemptEnded], None] | None,
        classify: Classify | None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.idle: asyncio.Event | None = None
        """Set when nothing runs; made by who waits for that."""
        self._scheduler = scheduler
        self._transport_of = transport_of
        self._on_event = on_event
        self._classify = classify
        self._watchers = tuple(watchers)
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        """When it goes off; not every loop's handles can say (uvloop's are no TimerHandle where the time has come)."""

    def abandon(self) -> None:
        """The loop was closed under us: what was in flight there is over and nobody waits for it."""
        self._timer = None
        for attempt in list(self._scheduler.attempts()):
            attempt.handle = OVER
            self._scheduler.cancel(attempt.job)
            self._scheduler.report(attempt, GIVEN_UP, 0.0)
        self._scheduler.take_finished()

    def rest(self) -> None:
        """Sets no alarm any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def answer(self, call: Call, job: Job) -> Reply:
        """Makes the job's attempts as they are granted, in the caller's own task, until it is over.

        Raises:
            PoolError: there is no answer.
        """
        loop, task = self.loop, asyncio.current_task()
        assert loop is not None
        assert task is not None
        try:
            while not call.over:
                attempt = call.granted
                if attempt is None:
                    call.waiter = loop.create_future()
                    await call.waiter
                    continue
                call.granted, call.stopped, before = None, False, task.cancelling()
                attempt.handle = call.task = task
                try:
                    outcome = await self._send(attempt, call)
                except asyncio.CancelledError:
                    # Cancelled by the pool, the attempt ends; cancelled from outside, so does the job.
                    if not call.stopped or task.uncancel() > before:
                        attempt.handle = None
                        raise
                    outcome = GIVEN_UP
                else:
                    if call.stopped:
                        task.uncancel()  # the transport has swallowed it
                finally:
                    call.task = None
                self._ended(attempt, outcome)
        except BaseException:
            self.cancel(job)
            raise
        if call.error is not None:
            raise call.error
        if call.reply is None:
            raise JobFailed("a transport said that it was done and gave no reply")
        return call.reply

    async def _make_apart(self, attempt: Attempt, call: Call) -> None:
        """One attempt in a task of its own. It never raises: how it ended is reported."""
        try:
            outcome = await self._send(attempt, call)
        except asyncio.CancelledError:
            outcome = GIVEN_UP
        self._ended(attempt, outcome)

    async def _send(self, attempt: Attempt, call: Call) -> Outcome:
        endpoint = attempt.place.endpoint
        chunk = call.pieces.put if call.pieces is not None else None
        try:
            outcome, reply = await self._transport_of(endpoint.url).send(
                endpoint, call.request, endpoint.timeout_s, chunk
            )
            if self._classify is not None and (kind := self._classify(outcome, reply)) is not None:
                outcome = outcome.of_kind(kind)
        except Exception as error:  # noqa: BLE001 - a transport's or a hook's bug fails this job alone, by name
            return Outcome(Kind.FINAL, f"transport or hook raised {type(error).__name__}: {error}")
        if outcome.kind is DONE:
            call.reply = reply
        return outcome

    def pump(self) -> None:
        """Starts what may start, ends what is over, and sets the timer for the next look."""
        loop = self.loop
        assert loop is not None
        scheduler, now = self._scheduler, loop.time()
        for attempt in scheduler.overdue(now):
            self.stop(attempt)
        for attempt in scheduler.dispatch(now):
            call: Call = attempt.job.payload
            if attempt.hedge or call.pieces is not None:
                attempt.handle = loop.create_task(self._make_apart(attempt, call))
            else:
                call.granted = attempt
                call.wake()
        self._look_again(loop, now)

    def _look_again(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        """Ends what is over, and sets the timer for the next look."""
        scheduler = self._scheduler
        for job in scheduler.take_finished():
            self._resolve(job, job.error)
        wake_at = scheduler.wake_at(now)
        timer = self._timer
        if timer is not None and (self._timer_at > wake_at or self._timer_at <= now or timer.cancelled()):
            timer.cancel()
            timer = self._timer = None
        if timer is None and wake_at < math.inf:
            self._timer, self._timer_at = loop.call_at(wake_at, self._wake), wake_at
        if self.idle is not None and not scheduler.running:
            self.idle.set()

    def _wake(self) -> None:
        self._timer = None
        self.pump()

    def _resolve(self, job: Job, error: Exception | None) -> None:
        call: Call = job.payload
        call.over, call.error = True, error
        call.wake()
        if self._watchers:
            self._job_ended(job, "done" if error is None else type(error).__name__)

    def queued(self, job: Job) -> None:
        """A job has just been queued, in its caller's context."""
        for watcher in self._watchers:
            self._tell(watcher.queued, job.number, job.model)

    def _job_ended(self, job: Job, outcome: str) -> None:
        assert self.loop is not None
        event = JobEnded.of(job, outcome, self.loop.time())
        for watcher in self._watchers:
            self._tell(watcher.job_ended, event)

    def stop(self, attempt: Attempt) -> None:
        """Cancels an attempt, wherever it is made; one that nobody makes yet is over at once."""
        if attempt.handle is OVER:
            return
        call: Call = attempt.job.payload
        if attempt.handle is None:
            self._settle(attempt, GIVEN_UP)
            return
        task: asyncio.Task[object] = attempt.handle
        if task is call.task:
            if not call.stopped:
                call.stopped = True
                task.cancel()
        else:
            task.cancel()
            # A task that has not begun never will, so its end is reported from outside.
            task.add_done_callback(lambda _: self._ended(attempt, GIVEN_UP))

    def _settle(self, attempt: Attempt, outcome: Outcome) -> None:
        if attempt.handle is OVER:
            return
        attempt.handle = OVER
        assert self.loop is not None
        now = self.loop.time()
        if self._on_event is not None or self._watchers:
            event = AttemptEnded.of(attempt, outcome, now)
            if self._on_event is not None:
                self._tell(self._on_event, event)
            for watcher in self._watchers:
                self._tell(watcher.attempt_ended, event)
        for loser in self._scheduler.report(attempt, outcome, now):
            self.stop(loser)

    def _ended(self, attempt: Attempt, outcome: Outcome) -> None:
        if attempt.handle is OVER:
            return
        self._settle(attempt, outcome)
        if self._scheduler.waiting:
            self.pump()
        else:  # nothing to start at once; hedges have the timer
            assert self.loop is not None
            self._look_again(self.loop, self.loop.time())

    def _tell(self, listener: Callable[..., None], *what: object) -> None:
        try:
            listener(*what)
        except Exception as error:  # noqa: BLE001 - a listener's fault must not lose a job; it is told through the loop
            assert self.loop is not None
            name = getattr(listener, "__qualname__", repr(listener))
            self.loop.call_exception_handler(
                {"message": f"a listener of a compute pool raised: {name}", "exception": error}
            )

    def cancel(self, job: Job) -> None:
        """The caller no longer wants the answer."""
        call: Call = job.payload
        if not call.over:
            call.over = True
            if self._watchers and self.loop is not None:
                self._job_ended(job, "cancelled")
        for attempt in self._scheduler.cancel(job):
            self.stop(attempt)
        if self.loop is not None and not self.loop.is_closed():
            self.pump()

    def give_up(self, error: Exception) -> None:
        """Cancels all that is in flight; its callers get `error`."""
        for attempt in list(self._scheduler.attempts()):
            call: Call = attempt.job.payload
            self._scheduler.cancel(attempt.job)
            if not call.over:
                self._resolve(attempt.job, error)
            self.stop(attempt)
