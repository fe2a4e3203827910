"""A run on a virtual clock: reserved engines, machines that come and go by a trace, a trainer that is fed as it goes.

The policies are those that run: `rollout.balance`, `rollout.offload`. The world shows them what a manager would know
(reports, counts, tokens so far) and does what they say; the true lengths are its own. It decides nothing that a policy
could; it refuses to know which strategy it is running.

A step: weights are there; reserved engines generate while the window is open, remote ones pull the version and
generate; then the reserved machines hand over what they have and train, micro-batch by micro-batch of complete groups.
Where a profile has them generate beside the trainer, there is no window, and both work all the time. The step ends with
the optimizer, once everything is trained on.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from penstock.rollout.answers import ask_moves, ask_order, ask_picks, tell
from penstock.rollout.balance import InstanceLoad, PlacedSample, Queue
from penstock.rollout.balancing import MOVES_S
from penstock.rollout.manager import TICK_S
from penstock.rollout.offload import Offload, StepTimes, WindowView
from penstock.simulate.bound import lower_bound_s
from penstock.simulate.clock import Clock
from penstock.simulate.lengths import step_samples
from penstock.simulate.machine import Machine, SimSample
from penstock.simulate.outcome import Outcome, StepOutcome
from penstock.simulate.planning import plan_step
from penstock.simulate.profiles import Profile
from penstock.simulate.remotes import Remotes
from penstock.simulate.stillness import Stillness, StuckError
from penstock.simulate.strategy import Strategy
from penstock.simulate.traces import Trace

__all__ = ["Step", "World", "simulate"]

JUST = 1e-6
"""Seconds: times that are added up are due a little early rather than a round late."""


@dataclass(eq=False)
class Step:
    number: int
    began_s: float
    samples: list[SimSample]
    fresh: int = 0
    """Next sample that was never placed."""
    moved: deque[SimSample] = field(default_factory=deque)
    finished: int = 0
    scored: int = 0
    groups: dict[int, int] = field(default_factory=dict)
    """Members still to come, by prompt."""
    ready: list[int] = field(default_factory=list)
    """Prompts whose groups are complete, and nobody has trained on."""
    waiting: dict[int, SimSample] = field(default_factory=dict)
    """Scored samples that nobody has trained on, and of which no pass was made ahead, by number."""
    ahead_s: dict[int, float] = field(default_factory=dict)
    """What was done ahead, by prompt."""
    trained_groups: int = 0
    window_s: float = 0.0
    train_s: float = 0.0
    wait_s: float = 0.0
    idle_since: float | None = None
    moves: int = 0
    preemptions: int = 0
    planned_for: frozenset[str] | None = None
    causes: list[tuple[float, str]] = field(default_factory=list)
    trainer_spans: list[tuple[float, float]] = field(default_factory=list)


class World:
    """One run of one strategy."""

    def __init__(
        self,
        profile: Profile,
        trace: Trace,
        strategy: Strategy,
        seed: int = 0,
        samples: Callable[[int], list[SimSample]] | None = None,
        first_tick_s: float = TICK_S,
    ) -> None:
        """`samples(step)`: a real run's, instead of the profile's. `first_tick_s`: when the manager looks first; a
        real one's ticks stand anyhow to its steps."""
        self.profile, self.strategy, self.seed, self._first_tick_s = profile, strategy, seed, first_tick_s
        self._samples = samples or (lambda number: step_samples(profile, number, seed))
        self.clock = Clock()
        self.reserved = [Machine(f"reserved{k}", profile.reserved, False) for k in range(profile.reserved_instances)]
        self.remotes = Remotes(self, trace)
        self.outcome = Outcome(strategy.name, profile.name)
        self.window_open = False
        self.training = False
        """The trainer holds the reserved machines and is ready, or busy."""
        self._busy = False
        self._opening = False
        """The reserved machines are about to generate."""
        self._turns = not profile.reserved_beside
        """The reserved machines generate or train; else they do both at once, all the time."""
        self._opened_at = 0.0
        """When they last began to, the switch included."""
        self.token_s: float | None = None
        """Training on one token, as the last step took."""
        self._reported_at = self._moved_at = self._own_busy_before_s = 0.0
        self._leases: dict[int, SimSample] = {}
        self._lease_numbers = itertools.count(1)
        self.step: Step | None = None
        self._stillness = Stillness(self)

    # ---- the run

    def run(self, steps: int | None = None, duration_s: float | None = None) -> Outcome:
        """So many steps, or as many as end within a time. Raises StuckError for a step that can't end.

        Within a time such a step is only the last one, which has not ended: the outcome says so.
        """
        most_steps, most_s = steps or 10**9, duration_s or float("inf")
        self.remotes.start()
        self._begin()
        self.clock.after(self._first_tick_s, self._tick, idle=True)
        self.clock.run(
            lambda: len(self.outcome.steps) >= most_steps or self.clock.now >= most_s or bool(self.outcome.stuck)
        )
        step, stuck = self._now_step(), self.outcome.stuck
        if stuck and duration_s is None:
            self.outcome.close(self.clock.now, self.clock.events)
            raise StuckError(f"{self.strategy.name}: {stuck}", self.outcome)
        self.outcome.left_over = f"{step.finished} of {len(step.samples)} samples"
        # Until a time is up nothing else would happen in a step that can't end.
        self.outcome.close(most_s if stuck else self.clock.now, self.clock.events)
        return self.outcome

    def machines(self) -> list[Machine]:
        """Those that may generate now."""
        return [*(self.reserved if self.window_open else []), *self.remotes.ready()]

    def _begin(self) -> None:
        number = len(self.outcome.steps)
        profile = self.profile
        samples = self._samples(number)
        self.step = step = Step(number, self.clock.now, samples)
        step.groups = dict.fromkeys(range(profile.prompts), profile.samples_per_prompt)
        self.remotes.new_version()
        self.training = False
        if not self._turns:
            self._hand_over(first=True)
            self._open_soon(step, profile.own_pull_s(self.strategy.differences and number > 0))
        elif (self.strategy.window is None and self.remotes.held()) or not self._wants_window():
            self._hand_over(first=True)
        else:
            self._open_soon(step, profile.training.switch_s)

    def _open_soon(self, step: Step, ready_s: float) -> None:
        """The reserved machines go from training to generating, or have the step's weights in so many seconds."""
        self._opening, self._opened_at = True, self.clock.now
        self.clock.after(ready_s, lambda: self._open(step), idle=True)

    def _open(self, step: Step) -> None:
        if step is not self.step:
            return
        self._opening = False
        if not self.window_open:
            self.window_open = True
            for machine in self.reserved:
                machine.at_s = self.clock.now
            self.dispatch()

    # ---- the window

    def _wants_window(self) -> bool:
        """Asks the policy; says whether the reserved machines should generate on."""
        step, window = self._now_step(), self.strategy.window
        if not self.reserved:
            # Nobody would generate in it, and the trainer wait.
            return False
        if window is None:
            return not self.remotes.held()
        fleet = self.remotes.held()
        names = frozenset(machine.name for machine in fleet)
        if step.planned_for != names and plan_step(self, fleet):
            step.planned_for = names
        share = step.finished / len(step.samples)
        elapsed_s = self.clock.now - step.began_s
        answer = window.review(WindowView(elapsed_s, len(fleet), share, len(self.reserved), self.remotes.coming()))
        if not step.causes or step.causes[-1][1] != answer.cause:
            step.causes.append((self.clock.now, answer.cause))
        return answer.generate

    def _hand_over(self, first: bool = False) -> None:
        """The reserved machines stop generating and train."""
        step = self._now_step()
        switch_s = 0.0 if first else self.profile.training.switch_s
        if self.window_open:
            step.window_s += self.clock.now - self._opened_at
            self._moved_at = -math.inf
        self.window_open = False
        for machine in self.reserved:
            self._advance(machine)
            for sample in machine.take_all():
                self._requeue(sample)
        self._order_moved(step)
        self.training = True
        self._busy = True
        self.clock.after(switch_s, lambda: self._trainer_free(step), idle=True)
        self.dispatch()

    def _tick(self) -> None:
        """As often as a manager: the window. Reports come with heartbeats, and moves have their own time."""
        step, now = self._now_step(), self.clock.now
        if now - self._reported_at > self.profile.heartbeat_s - JUST:
            self._reported_at = now
            self._report()
        if self._turns:
            self._review_turn(step)
        if now - self._moved_at > MOVES_S - JUST:
            self._moved_at = now
            self._move()
        self.outcome.stuck = self._stillness.look(step)
        self.clock.after(TICK_S, self._tick, idle=True)

    def _review_turn(self, step: Step) -> None:
        if self.window_open:
            everything = step.finished == len(step.samples)
            if everything or (self.strategy.streaming and not self._wants_window()):
                self._hand_over()
        elif (
            self.reserved
            and self.training
            and not self._busy
            and not self.remotes.held()
            and step.finished < len(step.samples)
        ):
            # Nobody else is left: the trainer's machines complete the step.
            self.training = False
            self._idle_over(step)
            self._open_soon(step, self.profile.training.switch_s)

    # ---- work

    def dispatch(self) -> None:
        """Gives waiting samples to machines, as the policy says."""
        step = self.step
        if step is None or not (step.moved or step.fresh < len(step.samples)):
            return
        machines = self.machines()
        queue = Queue(
            fresh=len(step.samples) - step.fresh,
            first_fresh=step.fresh,
            samples_per_prompt=self.profile.samples_per_prompt,
            moved=len(step.moved),
            coming=self.remotes.coming() + (len(self.reserved) if self._opening else 0),
            elapsed_s=self.clock.now - step.began_s,
            finished=step.finished,
            prompt_tokens=self.profile.lengths.prompt_tokens,
        )
        given: dict[str, Machine] = {}
        for pick in ask_picks(self.strategy.balance, queue, self.loads(machines)):
            if step.moved:
                sample = step.moved.popleft()
            else:
                sample = step.samples[step.fresh]
                step.fresh += 1
            machine = machines[pick]
            self._advance(machine)
            self._place(sample, machine)
            given[machine.name] = machine
        for machine in given.values():
            self._settle(machine)

    def _place(self, sample: SimSample, machine: Machine) -> None:
        sample.lease = next(self._lease_numbers)
        self._leases[sample.lease] = sample
        machine.give(sample)

    def _requeue(self, sample: SimSample) -> None:
        self._leases.pop(sample.lease, None)
        self._now_step().moved.append(sample)

    def _order_moved(self, step: Step) -> None:
        rows = list(step.moved)
        columns = [int(sample.done) for sample in rows], [sample.prompt for sample in rows]
        step.moved = deque(rows[k] for k in ask_order(self.strategy.balance, *columns))

    def lose(self, machine: Machine) -> None:
        """A machine is gone; its samples go on elsewhere."""
        step = self._now_step()
        taken = machine.take_all()
        step.preemptions += 1
        for sample in taken:
            self._requeue(sample)
        self._order_moved(step)
        self.dispatch()

    def advance(self, machine: Machine) -> None:
        self._advance(machine)

    def _advance(self, machine: Machine) -> None:
        for sample in machine.advance(self.clock.now):
            self._leases.pop(sample.lease, None)
            self._sample_done(sample)
            self._score(sample)

    def _settle(self, machine: Machine) -> None:
        machine.settle(self.clock.now)
        due, epoch = machine.next_at(), machine.epoch
        if due is not None:
            self.clock.at(due, lambda: self._machine_event(machine, epoch), idle=True)

    def _machine_event(self, machine: Machine, epoch: int) -> None:
        if machine.epoch != epoch:
            return
        self._advance(machine)
        self._settle(machine)
        self.dispatch()

    def loads(self, machines: list[Machine]) -> list[InstanceLoad]:
        spot = self.strategy.spot
        return [
            InstanceLoad(
                instance=machine.name,
                samples=machine.samples,
                max_running=machine.profile.max_running,
                tokens_per_s=machine.tokens_per_s,
                pending=len(machine.pending),
                reserved=not machine.remote,
                price_per_h=self.profile.price_per_h(machine.name, spot) if machine.remote else None,
            )
            for machine in machines
        ]

    def _report(self) -> None:
        for machine in self.machines():
            self._advance(machine)
            self._settle(machine)
            report = machine.report()
            if report is not None:
                tell(self.strategy.balance, "report", report)
        self.dispatch()

    def _move(self) -> None:
        step = self._now_step()
        machines = {machine.name: machine for machine in self.machines()}
        waiting = len(step.moved) + len(step.samples) - step.fresh
        touched: set[str] = set()

        def placed(name: str) -> list[PlacedSample]:
            self._advance(machines[name])
            return machines[name].placed()

        parked = False
        for move in ask_moves(self.strategy.balance, waiting, self.loads(list(machines.values())), placed):
            for name in filter(None, (move.source, move.target)):
                self._advance(machines[name])
                touched.add(name)
            sample = self._leases.pop(move.lease, None)
            if sample is None or sample.where != move.source:
                continue
            if sample.number in machines[move.source].running:
                sample.moves += 1
            else:
                sample.shifts += 1
            machines[move.source].remove(sample)
            step.moves += 1
            if move.target:
                self._place(sample, machines[move.target])
            else:
                self._requeue(sample)
                parked = True
        for name in touched:
            self._settle(machines[name])
        if parked:
            self._order_moved(step)
            self.dispatch()

    # ---- the trainer

    def _sample_done(self, sample: SimSample) -> None:
        step = self._now_step()
        step.finished += 1
        tell(self.strategy.balance, "finished", sample.prompt, sample.length)
        if step.finished == len(step.samples):
            tell(self.strategy.balance, "batch_ended")
            if self.window_open and self._turns:
                # The policy is not asked: there is nothing left to generate.
                self.clock.after(0.0, lambda: self._hand_over() if self.window_open and step is self.step else None)

    def _score(self, sample: SimSample) -> None:
        reward_s, step = self.profile.training.reward_s, self._now_step()
        if reward_s > 0:
            self.clock.after(reward_s, lambda: self._scored(step, sample))
        else:
            self._scored(step, sample)

    def _scored(self, step: Step, sample: SimSample) -> None:
        step.scored += 1
        step.groups[sample.prompt] -= 1
        step.waiting[sample.number] = sample
        if not step.groups[sample.prompt]:
            step.ready.append(sample.prompt)
        # The last score frees what is left, be it less than a micro-batch.
        if self.training and not self._busy:
            self._train(step)

    def _training_s(self, samples: list[SimSample]) -> float:
        """On so many samples, all passes."""
        return sum(sample.prompt_tokens + sample.length for sample in samples) * self.profile.training.s_per_token

    def _train(self, step: Step) -> None:
        """Begins a micro-batch, where enough is complete; else what can be done ahead, where that is done."""
        per = self.profile.samples_per_prompt
        whole = step.scored == len(step.samples)
        enough = len(step.ready) * per >= self.profile.training.micro_batch_samples
        if not step.ready or not (whole or (enough and self.strategy.streaming)):
            if self.strategy.looks_ahead and self.strategy.streaming:
                self._look_ahead(step)
            return
        count = -(-self.profile.training.micro_batch_samples // per)
        prompts, step.ready = step.ready[:count], step.ready[count:]
        step.trained_groups += len(prompts)
        wall_s = 0.0
        for prompt in prompts:
            members = step.samples[prompt * per : (prompt + 1) * per]
            wall_s += self._training_s(members) - step.ahead_s.pop(prompt, 0.0)
            for member in members:
                step.waiting.pop(member.number, None)
        self._compute(step, wall_s)

    def _look_ahead(self, step: Step) -> None:
        """Begins passes that need no whole group, of the samples that wait longest."""
        training = self.profile.training
        if not training.ahead_share or len(step.waiting) < training.ahead_samples:
            return
        wall_s = 0.0
        for number in list(step.waiting)[: training.micro_batch_samples]:
            sample = step.waiting.pop(number)
            ahead_s = training.ahead_share * self._training_s([sample])
            step.ahead_s[sample.prompt] = step.ahead_s.get(sample.prompt, 0.0) + ahead_s
            wall_s += ahead_s
        self._compute(step, wall_s)

    def _compute(self, step: Step, wall_s: float) -> None:
        """The trainer is busy for so long."""
        self._idle_over(step)
        step.train_s += wall_s
        step.trainer_spans.append((self.clock.now, self.clock.now + wall_s))
        self._busy = True
        self.clock.after(wall_s, lambda: self._trainer_free(step))

    def _trainer_free(self, step: Step) -> None:
        if step is not self.step:
            return
        self._busy = False
        if step.trained_groups == self.profile.prompts:
            self.clock.after(self.profile.training.optimizer_s, lambda: self._end(step))
            return
        self._train(step)
        if not self._busy and step.idle_since is None:
            step.idle_since = self.clock.now

    def _idle_over(self, step: Step) -> None:
        if step.idle_since is not None:
            step.wait_s += self.clock.now - step.idle_since
            step.idle_since = None

    def _end(self, step: Step) -> None:
        now = self.clock.now
        if not self._turns:
            self.window_open = False
            step.window_s = self._own_busy_s()
        remote = self.remotes.settle_step(step.began_s, now)
        times = StepTimes(
            fleet=remote.mean_held,
            step_s=now - step.began_s,
            window_s=step.window_s,
            train_s=step.train_s,
            trainer_wait_s=step.wait_s,
            remote_wait_s=remote.wait_s,
            remote_busy_s=remote.busy_s,
            preemptions=step.preemptions,
            fleet_off=remote.held_off,
        )
        self.token_s = step.train_s / sum(sample.length + sample.prompt_tokens for sample in step.samples)
        self.outcome.steps.append(
            StepOutcome(
                number=step.number,
                began_s=step.began_s,
                times=times,
                tokens=sum(sample.length + sample.prompt_tokens for sample in step.samples),
                paid_h=remote.paid_s / 3600,
                dollars=self.profile.prices.reserved * times.step_s / 3600 + remote.dollars,
                remote_waited_s=remote.waited_s,
                remote_ready_s=sum(until - at for at, until in remote.ready),
                moves=step.moves,
                bound=partial(lower_bound_s, self.profile, step.samples, step.began_s, remote.ready),
                causes=tuple(step.causes),
                trainer_spans=tuple(step.trainer_spans),
                machine_spans=self._spans(step),
            )
        )
        if self.strategy.window is not None:
            self.strategy.window.ended(times)
        predictor = self.strategy.window.predictor() if isinstance(self.strategy.window, Offload) else None
        self.remotes.want(self.strategy.size.ended(times, predictor, beside=not self._turns))
        self._begin()

    def _own_busy_s(self) -> float:
        """Of the step that ends, the mean over reserved machines, as a manager measures it."""
        busy_s = sum(machine.busy_s for machine in self.reserved)
        since_s, self._own_busy_before_s = busy_s - self._own_busy_before_s, busy_s
        return since_s / max(1, len(self.reserved))

    def _spans(self, step: Step) -> dict[str, tuple[tuple[float, float], ...]]:
        found: dict[str, tuple[tuple[float, float], ...]] = {}
        for machine in [*self.reserved, *self.remotes.all_since(step.began_s)]:
            # One that was taken away and came again, however often, is one machine to look at.
            found[machine.name] = tuple(sorted((*found.get(machine.name, ()), *machine.spans)))
            machine.spans.clear()
        return found

    def _now_step(self) -> Step:
        if self.step is None:
            raise RuntimeError("no step is open")
        return self.step


def simulate(
    profile: Profile,
    trace: Trace,
    strategy: Strategy,
    *,
    steps: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
) -> Outcome:
    """Runs one strategy. The last step counts only if it ended in time."""
    return World(profile, trace, strategy, seed).run(steps, duration_s)
