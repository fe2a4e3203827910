"""Whose turn it is on the trainer's own devices: the reserved engines', or the trainer's.

    shared --the trainer's first word--> free --the step's window opens--> generating
                                           |  ^                                |
              the trainer wants to train:  |  | it gives    its window is over, or all is generated and
              they are its own             v  | them back   the trainer wants them: HandOver to each engine
                                        training <--if it waits for them-- handing over --> free

A reserved engine that hands over sends what it drew; its samples wait again, with their tokens, and go on elsewhere.
Devices are free while the trainer has nothing to train on and others generate. They open again where nobody else is
left to generate, and for an evaluation once the step itself is generated. So no step waits for ever: without a remote
instance the engines generate to the end; if the last one dies while the trainer trains, they go on once it has nothing
left to train on; an engine that does not hand over within `HAND_OVER_S` loses its samples, and is not waited for; nor
is a window of which no engine is left. Remote machines that are about to be released are not handed anything: they
count while they have all that is left, and no longer where samples wait.

How long a window is, is the policy's (`offload`); this module shows it what was measured, and does what it says. What
plans are made from, and their making, is in `step_plans`. Further turns of conversations are part of the step that they
belong to. It refuses to know the trainer's groups and the engines' devices. While nobody asks for windows, reserved
engines are instances like any other.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from penstock.errors import WireError
from penstock.observe.events import WindowChanged
from penstock.rollout.balance import BalancePolicy, InstanceLoad
from penstock.rollout.batch import Batch
from penstock.rollout.fleet import Fleet, Instance, State
from penstock.rollout.journal import WindowFitted
from penstock.rollout.offload import FixedWindow, Offload, Window, WindowView
from penstock.rollout.outbox import TRAINER, Outbox
from penstock.rollout.step_plans import StepPlans
from penstock.rollout.step_times import StepAccount
from penstock.rollout.tracker import Tracker
from penstock.rollout.window_memory import WindowMemory
from penstock.sample import conversation_of
from penstock.wire import HandOver, TrainerTurn, TurnGranted

__all__ = ["HAND_OVER_S", "Turn", "Windows"]

HAND_OVER_S = 15.0
"""For an engine to end its decode step and to send what it drew."""
LATE_LOADS = 3.0
"""An instance that loads weights counts as about to work until it has taken so many times what loads take."""
STATES = ("begins", "wants", "waits", "trained", "ended")


class Turn(enum.Enum):
    SHARED = "shared"
    GENERATING = "generating"
    HANDING_OVER = "handing over"
    FREE = "free"
    TRAINING = "training"


@dataclass(slots=True)
class _Step:
    """The step that the trainer is in."""

    batch: str
    version: int
    account: StepAccount
    whole: bool
    """Seen from its beginning, so that something can be learned from it."""
    submitted: bool = False
    generated: bool = False
    """All its samples have ended, those of conversations with their first turns."""
    samples: int = 0
    trained: bool = False
    ended: bool = False
    told_s: float | None = None
    """The window's length as last told."""


class Windows:
    """Turns of one run. `give_back(instance, cause)` takes an instance's samples away from it, to go on elsewhere;
    `rearrange()` gives waiting samples to whoever may take them."""

    def __init__(
        self,
        tracker: Tracker,
        fleet: Fleet,
        policy: BalancePolicy,
        outbox: Outbox,
        load: Callable[[Instance], InstanceLoad],
        give_back: Callable[[Instance, str], None],
        rearrange: Callable[[], None],
    ) -> None:
        self._tracker = tracker
        self._fleet = fleet
        self._out = outbox
        self._give_back = give_back
        self._rearrange = rearrange
        self.policy: Offload | FixedWindow = Offload()
        self.turn = Turn.SHARED
        self._cause = ""
        self._step: _Step | None = None
        self._wants = False
        self._number = 0
        self._owing: dict[str, Instance] = {}
        """Engines that have not handed over yet."""
        self._asked_at = 0.0
        self._plans = StepPlans(policy, load)
        self.memory = WindowMemory()
        """Of the policy, as it outlives this manager."""

    def restore(self, fitted: Mapping[int, WindowFitted]) -> None:
        """What an earlier manager's windows had learned."""
        self.policy = self.memory.restore(fitted)

    # ---- shown

    @property
    def thinking(self) -> bool:
        """A plan is being made, and `think` goes on with it."""
        return self._plans.thinking

    def may_generate(self, instance: Instance) -> bool:
        """Whether an instance may be given samples, as far as turns go."""
        return not instance.reserved or self.turn in (Turn.SHARED, Turn.GENERATING)

    @property
    def excuses(self) -> bool:
        """Nobody may generate just now but those who have no turn, so that no batch can be late for it."""
        return self.turn in (Turn.HANDING_OVER, Turn.TRAINING) and not any(self._remote())

    @property
    def measured_groups(self) -> list[list[int]]:
        """Tokens of the last step's answers, by prompt; what plans are made from."""
        return self._plans.answers.groups

    def words(self, now: float) -> str:
        """For people: whose turn it is, since when the step runs, and why. Empty where nobody takes turns."""
        step = self._step
        if self.turn is Turn.SHARED or step is None:
            return ""
        who = {
            Turn.GENERATING: "own engines generate",
            Turn.HANDING_OVER: "own engines hand over",
            Turn.FREE: "own devices wait for samples",
            Turn.TRAINING: "own devices train",
        }[self.turn]
        length_s = self.policy.length_s(self._remote_count())
        planned = "" if length_s is None else f", window {length_s:.3g} s"
        cause = f" ({self._cause})" if self._cause else ""
        return f"{who}, {now - step.account.began_s:.1f} s into {step.batch}{planned}{cause}"

    def state(self, now: float) -> dict[str, object]:
        """For operators."""
        step, fleet = self._step, self._remote_count()
        return {
            "turn": self.turn.value,
            "cause": self._cause,
            "batch": step.batch if step is not None else "",
            "elapsed_s": round(now - step.account.began_s, 3) if step is not None else 0.0,
            "remote": fleet,
            "window_s": self.policy.length_s(fleet),
            "generated_s": round(step.account.window_s, 3) if step is not None else 0.0,
            "trainer_wait_s": round(step.account.wait_s, 3) if step is not None else 0.0,
            "words": self.words(now),
        }

    # ---- told

    def reset(self) -> None:
        """Another trainer is there, and has not said yet whether it takes turns."""
        self.turn, self._step, self._wants, self._cause = Turn.SHARED, None, False, ""
        self._plans.drop()
        self._owing.clear()

    def take(self, frame: TrainerTurn) -> None:
        """The trainer's word. Raises WireError for one that makes no sense; then nothing has changed."""
        _check(frame)
        self._account()
        self._choose_policy(frame.window_s)
        self._number = frame.number
        if self.turn is Turn.SHARED:
            self.turn = Turn.GENERATING if self._busy_engines() else Turn.FREE
        step = self._step
        if step is None or step.batch != frame.batch:
            step = self._begin(frame)
        self._wants = frame.state == "wants"
        if frame.granted and self.turn is not Turn.TRAINING:
            # An earlier manager granted it, and this one learns of it only now.
            self._hand_over(step, "the trainer has its devices already")
        elif not self._wants and self.turn is Turn.TRAINING:
            self.turn = Turn.FREE
        step.trained = step.trained or frame.state in ("trained", "ended")
        if frame.state == "ended" and not step.ended:
            self._end(step, frame)
        if self._wants and self.turn is Turn.TRAINING:
            self._grant()
        self.look()

    def handed_over(self, instance: Instance) -> None:
        """It has sent what it drew, and runs nothing any more."""
        if self._owing.pop(instance.id, None) is not None:
            self._give_back(instance, self._cause)
            self.look()

    def loaded(self, instance: Instance, load_s: float) -> None:
        """It serves a weight version, after so long."""
        self._plans.loaded(instance, load_s)

    def gone(self, instance: Instance) -> None:
        self._owing.pop(instance.id, None)
        self._plans.gone(instance)
        step = self._step
        if step is not None and not instance.reserved and not step.trained:
            step.account.preemptions += 1

    def batch_ended(self, batch: Batch) -> None:
        """All samples of a batch have ended, the step's own or a further turn's; it still has them."""
        step = self._step
        if step is None:
            return
        if batch.name != step.batch:
            talk = conversation_of(batch.name)
            if talk is not None and talk.batch == step.batch:
                tokens = sum(sample.length for sample in batch.held.values() if not sample.cause)
                self._plans.answers.lengthen(talk.prompt, talk.replica, tokens)
                self._plan_ahead(step)
            return
        step.generated, step.samples = True, batch.samples
        self._plans.answers.take(batch)
        self._plan_ahead(step)

    def look(self) -> None:
        """Decides, with the time and whenever something has changed."""
        step = self._step
        if self.turn is Turn.SHARED or step is None:
            return
        self._account()
        step.submitted = step.submitted or self._tracker.batch(step.batch) is not None
        if self.turn is Turn.HANDING_OVER:
            self._settle()
        if self.turn is Turn.GENERATING and (cause := self._why_stop(step)):
            self._hand_over(step, cause)
        if self.turn is Turn.FREE:
            if self._wants:
                self._grant()
            elif cause := self._why_generate(step):
                self._open(step, cause)

    def elapsed_s(self) -> float | None:
        """Since the step began; None where none is open, or one that nobody plans, as an evaluation is."""
        step = self._step
        return self._out.now - step.account.began_s if step is not None and step.whole and not step.ended else None

    def think(self) -> None:
        """One bit of the plan that is being made: some milliseconds. Once it is made, it is followed. One that its step
        did not wait for is made to its end, or steps shorter than a thought would have none; the step that is open by
        then begins its own from there."""
        thought, step = self._plans.think(), self._step
        if thought is None or step is None or not isinstance(self.policy, Offload):
            return
        if not self._plans.take(self.policy, thought) and not step.ended:
            self._plan(step, list(self._remote()))
        self.look()
        self._rearrange()

    # ---- turns

    def _begin(self, frame: TrainerTurn) -> _Step:
        now = self._out.now
        whole = frame.state == "begins"
        step = self._step = _Step(frame.batch, frame.version, StepAccount(now, now), whole)
        self._plans.begin(frame.batch, frame.micro_batch_samples)
        if self.turn is Turn.HANDING_OVER:
            return step
        # An evaluation may have the engines at work.
        generating, self.turn = self.turn is Turn.GENERATING, Turn.FREE
        if not whole:
            return step
        answer = self._review(step)
        if answer.generate:
            self._open(step, answer.cause)
        elif generating:
            self._hand_over(step, answer.cause)
        else:
            self._note(step, "closed", answer.cause)
        return step

    def _why_generate(self, step: _Step) -> str:
        """Why free devices should generate; empty where they should not."""
        alone = not any(self._remote()) and not self._leaving_have_all(step)
        if step.trained or self._generated(step):
            # The trainer is about to want the devices again, unless it has trained on everything.
            evaluating = any(batch.name != step.batch for batch in self._tracker.waiting())
            return "the step is generated, and an evaluation is not" if evaluating and (step.trained or alone) else ""
        if alone:
            return "no remote instance is left" if step.submitted else "no remote instance"
        return ""

    def _why_stop(self, step: _Step) -> str:
        if self._generated(step) or step.trained:
            return "everything is generated" if self._wants else ""
        if self._wants and step.submitted and not any(self._reserved()):
            return "no engine of its own is left"
        if self._wants and self._leaving_have_all(step) and not self._busy_engines():
            return "machines that are about to be released have the rest"
        answer = self._review(step)
        return "" if answer.generate else answer.cause

    def _generated(self, step: _Step) -> bool:
        """All samples have ended. Of conversations no turn is open; between two turns that looks the same as the end,
        and the engines come back for the next one if nobody else can have it."""
        return step.generated and not self._tracker.open_turns[step.batch]

    def _open(self, step: _Step, cause: str) -> None:
        self.turn = Turn.GENERATING
        now = self._out.now
        for batch in self._tracker.batches():
            # Until now nobody could have made progress with it.
            batch.progress_at = max(batch.progress_at, now)
        self._note(step, "opened", cause)
        self._rearrange()

    def _hand_over(self, step: _Step, cause: str) -> None:
        self.turn = Turn.HANDING_OVER
        self._asked_at = self._out.now
        for instance in self._reserved():
            self._owing[instance.id] = instance
            self._out.send(instance.peer, HandOver(cause=cause))
        self._note(step, "closed", cause)
        self._settle()

    def _settle(self) -> None:
        """Ends the handing over once every engine has, or had its time."""
        now = self._out.now
        if self._owing and now - self._asked_at > HAND_OVER_S:
            late, self._owing = self._owing, {}
            for instance in late.values():
                self._out.warn(f"{instance.id} did not hand over within {HAND_OVER_S:g} s", "window")
                self._out.stop(instance.peer, [s.lease for s in self._tracker.samples_of(instance.id)], "training")
                self._give_back(instance, f"it did not hand over within {HAND_OVER_S:g} s")
        if not self._owing and self.turn is Turn.HANDING_OVER:
            self._account()
            self._plans.switch_s = now - self._asked_at
            self.turn = Turn.FREE
            self._rearrange()

    def _grant(self) -> None:
        step = self._step
        self.turn, self._cause = Turn.TRAINING, ""
        window_s = step.account.window_s if step is not None else 0.0
        self._out.send(TRAINER, TurnGranted(number=self._number, window_s=window_s))

    def _end(self, step: _Step, frame: TrainerTurn) -> None:
        """Learns from a step."""
        step.ended = True
        if frame.tokens and step.whole:
            self._plans.token_s = frame.train_s / frame.tokens
            self._plans.rest_s = frame.rest_s
            # A step that nobody waited in says nothing of it.
            self._plans.ahead_token_s = frame.ahead_token_s or self._plans.ahead_token_s
            self._plans.ahead_samples = frame.ahead_samples
            times = step.account.times(frame.train_s)
            self.policy.ended(times)
            self._out.records(self.memory.news(self.policy))
            learned = self.policy.learned
            if learned is not None:
                self._out.emit(
                    WindowChanged(
                        ts=self._out.ts,
                        batch=step.batch,
                        what="learned",
                        fleet=learned.fleet,
                        elapsed_s=times.step_s,
                        cause=learned.cause,
                        window_s=learned.window_s,
                        before_s=learned.before_s,
                        trainer_wait_s=times.trainer_wait_s,
                        remote_wait_s=times.remote_wait_s,
                    )
                )

    # ---- what the policy is shown

    def _review(self, step: _Step) -> Window:
        fleet = list(self._remote())
        self._plan(step, fleet)
        batch = self._tracker.batch(step.batch)
        finished = (batch.finished + batch.failed) / batch.samples if batch is not None else float(step.submitted)
        step.samples = batch.samples if batch is not None else step.samples
        # A conversation of which a turn is open has ended its first one.
        finished = max(0.0, finished - self._tracker.open_turns[step.batch] / max(1, step.samples))
        elapsed_s = self._out.now - step.account.began_s
        reserved = sum(1 for _ in self._reserved())
        loading = sum(1 for instance in fleet if not instance.holds(step.version))
        answer = self.policy.review(WindowView(elapsed_s, len(fleet), finished, reserved, loading))
        if not answer.generate and self.turn is Turn.GENERATING and self._awaits_first_plan(len(fleet)):
            answer = Window(True, f"the first plan for {len(fleet)} instances is being made")
        length_s = self.policy.length_s(len(fleet))
        if self.turn is Turn.GENERATING and length_s != step.told_s:
            self._note(step, "planned", f"{len(fleet)} remote instances now", before_s=step.told_s)
        return answer

    def _plan(self, step: _Step, fleet: list[Instance]) -> None:
        if isinstance(self.policy, Offload):
            elapsed_s = self._out.now - step.account.began_s
            self._plans.plan(self.policy, elapsed_s, fleet, list(self._reserved()))

    def _plan_ahead(self, step: _Step) -> None:
        if isinstance(self.policy, Offload) and self._generated(step):
            self._plans.plan_ahead(self.policy, list(self._remote()), list(self._reserved()))

    def _awaits_first_plan(self, fleet: int) -> bool:
        return isinstance(self.policy, Offload) and self._plans.awaits_first(self.policy, fleet)

    def _reserved(self) -> Iterator[Instance]:
        for instance in self._fleet:
            if instance.reserved and instance.name and instance.state is not State.DRAINING:
                yield instance

    def _remote(self) -> Iterator[Instance]:
        """Remote instances that may take samples of the step, or are about to."""
        return (instance for instance in self._working() if not instance.cordoned)

    def _leaving_have_all(self, step: _Step) -> bool:
        """None of the step's samples waits, and some are with machines that leave once they have ended them."""
        batch = self._tracker.batch(step.batch)
        leaving = any(instance.cordoned and self._tracker.leases_of(instance.id) for instance in self._working())
        return leaving and (batch is None or not batch.waiting)

    def _working(self) -> Iterator[Instance]:
        """The same, and those that end what they have before they are released."""
        step = self._step
        version = step.version if step is not None else -1
        batch = self._tracker.batch(step.batch) if step is not None else None
        context_tokens = batch.context_tokens if batch is not None else 0
        for instance in self._fleet:
            if instance.reserved or not instance.name:
                continue
            loading_s = self._out.now - instance.state_since
            late = instance.load_tries or loading_s > LATE_LOADS * self._plans.slowest_load_s
            coming = instance.state is State.LOADING and instance.target == version and not late
            if coming or (instance.holds(version) and instance.max_context_tokens >= context_tokens):
                yield instance

    def _remote_count(self) -> int:
        return sum(1 for _ in self._remote())

    def _busy_engines(self) -> bool:
        return any(self._tracker.leases_of(instance.id) for instance in self._reserved())

    # ---- within

    def _account(self) -> None:
        step = self._step
        if step is None or step.ended:
            return
        working = list(self._working())
        ready = [instance for instance in working if instance.holds(step.version)]
        # With no engine to generate an open window is the trainer's waiting like any other.
        generating = self.turn is Turn.GENERATING and any(self._reserved())
        idle = [instance.id for instance in ready if not self._tracker.leases_of(instance.id)]
        step.account.seen.update(instance.id for instance in ready)
        step.account.pass_time(
            self._out.now,
            window=generating and not step.trained,
            training=self.turn is Turn.TRAINING,
            waiting=self.turn in (Turn.FREE, Turn.GENERATING) and not generating and not step.trained,
            fleet=len(working),
            idle=idle,
            busy=len(ready) - len(idle),
        )

    def _choose_policy(self, window_s: float) -> None:
        if window_s < 0:
            if not isinstance(self.policy, Offload):
                self.policy = Offload()
        elif not (isinstance(self.policy, FixedWindow) and self.policy.seconds == window_s):
            self.policy = FixedWindow(window_s)

    def _note(self, step: _Step, what: str, cause: str, before_s: float | None = None) -> None:
        self._cause = cause
        fleet = self._remote_count()
        step.told_s = self.policy.length_s(fleet)
        self._out.emit(
            WindowChanged(
                ts=self._out.ts,
                batch=step.batch,
                what=what,
                fleet=fleet,
                elapsed_s=self._out.now - step.account.began_s,
                cause=cause,
                window_s=-1.0 if step.told_s is None else step.told_s,
                before_s=-1.0 if before_s is None else before_s,
            )
        )


def _check(frame: TrainerTurn) -> None:
    figures = (frame.window_s, frame.train_s, frame.rest_s, frame.ahead_token_s)
    least = min(frame.micro_batch_samples, frame.ahead_samples)
    if frame.state not in STATES or least < 1 or not all(map(math.isfinite, figures)):
        raise WireError(
            f"a trainer's turn {frame.state[:40]!r} (there are {', '.join(STATES)}) with micro_batch_samples = "
            f"{frame.micro_batch_samples}, ahead_samples = {frame.ahead_samples} and window_s, train_s, rest_s, "
            f"ahead_token_s = {figures}"
        )
    if min(frame.tokens, frame.train_s, frame.rest_s, frame.ahead_token_s) < 0:
        raise WireError(
            f"a step of {frame.tokens} tokens that took {frame.train_s} s and {frame.rest_s} s, and "
            f"{frame.ahead_token_s} s a token ahead"
        )
