"""The life of every machine that the manager has asked for: asked, starting, joined, draining, releasing, ended.

Decides when machines are asked for and which are released, given how many are wanted. The number grows at once; it
shrinks to the most that was wanted within the cool-down (or a machine's start-up time, where that is longer), so that
nothing is released that would be wanted again before it could start. Floor and ceiling bound it, and the budget comes
before the floor. Idle machines go first, of those the dearest; one with samples drains.

What the provisioner lists is the truth about what exists: strays, such as those of an earlier manager or of a call that
was cut off, are taken in, and everything that was ever seen is released in the end. After failed calls and machines
that never join the next try waits, twice as long each time.

Pure: calls go out as `Orders`, answers and `now` come in. Refuses to know why a number is wanted, and what a machine
is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from penstock.observe.events import Event, MachineChanged, Warned
from penstock.rollout.provision_calls import Calls
from penstock.rollout.provision_money import Purse
from penstock.rollout.provision_types import (
    Add,
    InstanceView,
    ListAll,
    Machine,
    MachineState,
    Orders,
    ProvisionConfig,
    Release,
    Seen,
)

__all__ = ["Provision"]

ENDED_SHOWN = 32
ENDED_KNOWN = 4096
"""Ids of ended machines that are recognised if they are listed again."""
SMOOTH = 0.3
"""Weight of the newest machine in the mean start-up time."""
MOST_ENDS = 2
"""Instances of one machine that may be lost before any was ready; then the machine is at fault."""
MOST_MISSING = 2
"""Lists in a row without a machine that has no instance; providers take a moment to show new ones."""

S = MachineState


class Provision:
    """All machines. `emit` gets their events; `wall_offset_s` turns `now` into seconds since 1970."""

    def __init__(self, config: ProvisionConfig, emit: Callable[[Event], None], wall_offset_s: float = 0.0) -> None:
        self.config = config
        self.purse = Purse(config)
        self.wanted = 0
        self.start_s = config.start_s
        """As measured lately."""
        self.counts: Counter[str] = Counter()
        """Of machines asked for, released, failed, lost and never joined; of failed calls by their kind."""
        self.ending = ""
        """Why every machine is released for good; empty while the run goes on."""
        self.short = ""
        """Why there are fewer machines than wanted, where it is for the money."""
        self.calls = Calls(config, emit, self.counts, wall_offset_s)
        self._emit = emit
        self._wall_offset_s = wall_offset_s
        self._machines: list[Machine] = []
        self._ended: deque[Machine] = deque(maxlen=ENDED_SHOWN)
        self._ended_at: dict[str, float] = {}
        self._wanted_log: deque[tuple[float, int]] = deque()
        self._now: float | None = None
        self._listed_once = self._clean = False
        self._uncertain_at: float | None = None
        """An add that failed was made then: machines of it may be there and cost something."""
        self._losses = 0

    # ---- what there is

    @property
    def machines(self) -> list[Machine]:
        """Those that may cost something, oldest first."""
        return list(self._machines)

    @property
    def ended(self) -> list[Machine]:
        """The last ones."""
        return list(self._ended)

    @property
    def cordoned(self) -> set[str]:
        """Peers whose instances get no more work."""
        return {machine.peer for machine in self._machines if machine.peer and not machine.counts}

    @property
    def done(self) -> bool:
        """Everything is released, and a list has shown it."""
        return bool(self.ending) and self._clean and not self._machines and not self.calls

    def take_losses(self) -> int:
        """Machines lost since this was asked last."""
        losses, self._losses = self._losses, 0
        return losses

    # ---- what is wanted

    def want(self, number: int, now: float) -> None:
        """So many machines are worth having from now on."""
        self.wanted = number
        self._wanted_log.append((now, number))

    def restore(self, spent: float, billed: Mapping[str, float], now: float) -> None:
        """Takes up an earlier manager's account. `billed`: its machines, and since when their cost is not in it."""
        self._now = now
        self.purse.spent = spent
        for name, since in billed.items():
            self.purse.charge(self._adopt(name, None, now, "an earlier manager had it"), max(0.0, now - since))

    def end(self, cause: str, now: float) -> None:
        """Releases everything, and asks for nothing any more."""
        if not self.ending:
            self.ending = cause
            self.calls.list_soon(now)

    # ---- time

    def tick(self, instances: Sequence[InstanceView], now: float, active: bool = True) -> Orders:
        """To be called a few times a second. `active`: there is a run to work for, or was a moment ago."""
        if self._now is not None:
            for machine in self._machines:
                self.purse.charge(machine, max(0.0, now - self._now))
        self._now = now
        orders = Orders()
        for call in self.calls.overdue(now):
            self.failed(call, f"it did not come back within {self.config.call_s:g} s", now)
        self._match(instances, now)
        self._check_deadlines(now)
        self._shrink(self._keep_to(active, now), now)
        self._leave(orders, now)
        self._release(orders, now)
        if active and not self.ending:
            self._grow(self._bounded(self.wanted), orders, now)
        if now >= self.calls.list_at and not self.calls.pending(ListAll) and not self.done:
            self.calls.list_at = now + self.config.list_s
            self.calls.send(ListAll(self.calls.number()), orders, now)
        return orders

    # ---- answers

    def added(self, call: int, ids: Sequence[str], now: float) -> None:
        """The provisioner has machines on their way: fewer than asked for is a failure, and more are taken in."""
        sent = self.calls.answered(call)
        if sent is None or not isinstance(sent.call, Add):
            return
        waiting = [machine for machine in self._machines if machine.call == call]
        known = {machine.id for machine in self._machines if machine.id}
        for name in dict.fromkeys(ids):
            if name in known:
                continue
            if not waiting:
                self._adopt(name, None, now, "the provisioner gave more than it was asked for")
                continue
            machine = waiting.pop(0)
            machine.id, machine.call = name, 0
            self._ended_at.pop(name, None)
            self._enter(machine, S.STARTING, "the provisioner has it on its way", now)
        if waiting:
            given = sent.call.count - len(waiting)
            self.calls.failed(sent.call, f"it gave {given} machines where {sent.call.count} were asked for", now)
            for machine in waiting:
                self._end(machine, S.FAILED, "the provisioner gave none", now)

    def released(self, call: int, now: float) -> None:
        self.calls.answered(call)
        for machine in [machine for machine in self._machines if call and machine.call == call]:
            machine.call = 0
            self._confirmed(machine, now)

    def listed(self, call: int, rows: Sequence[Seen], now: float) -> None:
        sent = self.calls.answered(call)
        if sent is None:
            return
        self.calls.listed(sent.at)
        self._clean = not self._machines and not self.calls.unsure
        found = {row.id: row for row in rows}
        for machine in [machine for machine in self._machines if machine.id]:
            row = found.pop(machine.id, None)
            if row is None:
                self._missed(machine, sent.at, now)
                continue
            machine.missing = 0
            machine.price_per_h = machine.price_per_h if row.price_per_h is None else row.price_per_h
            if not row.alive and not machine.peer:
                self._ended_by_itself(machine, row.cause, now)
        for row in found.values():
            self._stray(row, sent.at, now)
        if not self.calls.unsure:
            self._uncertain_at = None
        if not self._listed_once and self._machines:
            # Whoever asked for these knew why: they are not released before this manager knows better.
            self._wanted_log.append((now, sum(machine.counts for machine in self._machines)))
            self._wanted_log.append((now, self.wanted))
        self._listed_once = True

    def failed(self, call: int, cause: str, now: float) -> None:
        """A call failed, or was cut off at its deadline: what became of it only a list can tell."""
        sent = self.calls.answered(call)
        if sent is None:
            return
        if isinstance(sent.call, Add) and self._uncertain_at is None:
            self._uncertain_at = sent.at
        concerned = [machine for machine in self._machines if machine.call == call]
        wait_s = self.calls.failed(sent.call, cause, now, max((machine.tries for machine in concerned), default=0))
        for machine in concerned:
            machine.call = 0
            if isinstance(sent.call, Add):
                self._end(machine, S.FAILED, f"asking for it failed: {cause}", now)
            else:
                machine.tries, machine.retry_at = machine.tries + 1, now + wait_s

    # ---- what a list tells

    def _missed(self, machine: Machine, asked_at: float, now: float) -> None:
        if machine.adopted and not self._listed_once:
            self._end(machine, S.RELEASED, "it was gone when this manager came", now)
            return
        if asked_at < machine.since or machine.peer:
            # It was asked for before the machine came into this state; or the machine is plainly there.
            return
        machine.missing += 1
        if machine.state is S.RELEASING:
            self._confirmed(machine, now)
        elif machine.missing >= MOST_MISSING:
            self._ended_by_itself(machine, "the provisioner no longer has it", now)

    def _ended_by_itself(self, machine: Machine, cause: str, now: float) -> None:
        """No instance of it is there, and it won't come back."""
        if machine.state is S.RELEASING:
            return
        if machine.joined_at is None:
            self._did_not_join(machine, f"it ended before it joined: {cause}", now)
        else:
            self._lost(machine, cause or "it ended by itself", now)

    def _stray(self, row: Seen, asked_at: float, now: float) -> None:
        ended_at = self._ended_at.get(row.id)
        if ended_at is not None and asked_at < ended_at + self.config.call_s:
            # Providers show what was released for a moment longer.
            return
        machine = self._adopt(row.id, row.price_per_h, now, "found at the provisioner")
        if self._uncertain_at is not None:
            self.purse.charge(machine, now - self._uncertain_at)
        if ended_at is not None:
            self._enter(machine, S.RELEASING, "it was released and is still there", now)
        elif not row.alive:
            machine.fault = row.cause or "it ended by itself"
            self._enter(machine, S.RELEASING, machine.fault, now)

    def _adopt(self, name: str, price_per_h: float | None, now: float, cause: str) -> Machine:
        """A machine that this manager has not asked for is its own from now on."""
        price = self.config.price_per_h if price_per_h is None else price_per_h
        machine = Machine(self.calls.number(), price, asked_at=now, since=now, id=name, adopted=True)
        self._machines.append(machine)
        self._clean = False
        self._enter(machine, S.STARTING, cause, now, before="")
        return machine

    # ---- instances

    def left(self, peer: str, cause: str, now: float) -> None:
        """An instance said goodbye by itself, as before a preemption: its machine is not waited for."""
        for machine in self._machines:
            if machine.peer == peer and machine.state is S.JOINED:
                machine.peer, machine.samples = "", 0
                self._lost(machine, f"it left: {cause}", now)

    def _match(self, instances: Sequence[InstanceView], now: float) -> None:
        by_name: dict[str, InstanceView] = {}
        for view in instances:
            if not view.reserved:
                by_name |= dict.fromkeys((view.host.partition(".")[0], view.host, view.name), view)
        for machine in self._machines:
            seen = by_name.get(machine.id) if machine.id else None
            if seen is not None:
                self._present(machine, seen, now)
            elif machine.peer:
                self._absent(machine, now)

    def _present(self, machine: Machine, view: InstanceView, now: float) -> None:
        machine.peer, machine.samples, machine.missing = view.peer, view.samples, 0
        if machine.state is S.STARTING:
            machine.loading_at = None
            machine.joined_at = now if machine.joined_at is None else machine.joined_at
            self.calls.joined()
            self._enter(machine, S.JOINED, "its instance joined", now)
        if view.loading and machine.loading_at is None:
            machine.loading_at = now
        if view.ready and not machine.was_ready:
            machine.was_ready = True
            if not machine.adopted and machine.joined_at is not None:
                # Without its wait for the run's first weights, which no machine is to blame for.
                loading_s = now - machine.loading_at if machine.loading_at is not None else 0.0
                self.start_s += SMOOTH * (machine.joined_at - machine.asked_at + loading_s - self.start_s)

    def _absent(self, machine: Machine, now: float) -> None:
        """Its instance is gone."""
        machine.peer, machine.samples = "", 0
        if machine.state is S.DRAINING:
            if not machine.told:
                self._losses += 1
                self.counts["lost"] += 1
            self._enter(machine, S.RELEASING, machine.cause, now)
        elif machine.state is S.JOINED:
            machine.ends += not machine.was_ready
            if machine.ends >= MOST_ENDS:
                self._did_not_join(machine, f"{machine.ends} instances of it were lost before they were ready", now)
                return
            self._enter(machine, S.STARTING, "its instance is gone; it may be back", now)
            self.calls.list_soon(now)

    def _lost(self, machine: Machine, cause: str, now: float) -> None:
        self._losses += 1
        self.counts["lost"] += 1
        machine.fault = cause
        self._enter(machine, S.RELEASING, cause, now)

    def _did_not_join(self, machine: Machine, cause: str, now: float) -> None:
        """Released and counted; the next one waits, so that what never joins doesn't eat the budget."""
        self.calls.wasted(now)
        self.counts["never_joined"] += 1
        machine.fault = cause
        self._enter(machine, S.RELEASING, cause, now)

    def _check_deadlines(self, now: float) -> None:
        config = self.config
        for machine in self._machines:
            if machine.state is not S.STARTING:
                continue
            if machine.joined_at is None and now - machine.since >= config.join_deadline_s:
                cause = f"no instance of its name or on a host of that name joined within {config.join_deadline_s:g} s"
                self._did_not_join(machine, cause, now)
            elif machine.joined_at is not None and now - machine.since >= config.rejoin_s:
                self._lost(machine, f"its instance was lost and not back within {config.rejoin_s:g} s", now)

    # ---- how many

    def _keep_to(self, active: bool, now: float) -> int:
        """Machines beyond this number are not wanted."""
        if self.ending:
            return 0
        hold_s, log = max(self.config.cool_down_s, self.start_s), self._wanted_log
        # What was wanted when the window began counts as long as nothing else was.
        while len(log) > 1 and log[1][0] <= now - hold_s:
            log.popleft()
        most = max((number for _, number in log), default=0)
        return self._bounded(most) if active else 0

    def _bounded(self, number: int) -> int:
        return max(self.config.floor, min(self.config.ceiling, number))

    def _grow(self, number: int, orders: Orders, now: float) -> None:
        counting = sum(machine.counts for machine in self._machines)
        for machine in self._machines:
            if counting < number and machine.state is S.DRAINING and not machine.told and self._can_keep(machine):
                self._enter(machine, S.JOINED, "it is wanted again", now)
                counting += 1
        price = self.config.price_per_h
        paid = self.purse.affords(self._machines, price, self.start_s)
        self._mind_money(number, counting, paid, now)
        count = min(number - counting, self.config.ceiling - len(self._machines), paid)
        if count <= 0 or now < self.calls.grow_at or self.calls.unsure or self.calls.pending(Add):
            return
        call = Add(self.calls.number(), count)
        self.calls.send(call, orders, now)
        self._clean = False
        for _ in range(count):
            machine = Machine(self.calls.number(), price, asked_at=now, since=now, call=call.call)
            self._machines.append(machine)
            self.counts["asked"] += 1
            self._enter(machine, S.ASKED, f"machines wanted: {number}, there: {counting}", now, before="")

    def _mind_money(self, number: int, counting: int, paid: int, now: float) -> None:
        """Says once that the budget, and nothing else, holds the number down."""
        if counting < len(self._machines):
            # One that is about to go still costs, and there is money for another in a moment.
            return
        before, self.short = self.short, ""
        if number - counting > paid:
            self.short = (
                f"{number} machines are wanted and {counting} there; the budget pays for {paid} more, start-up and "
                f"release included: {self.purse.words()}"
            )
            if not before:
                self._emit(Warned(ts=now + self._wall_offset_s, where="provisioner", message=self.short))

    def _can_keep(self, machine: Machine) -> bool:
        """It, too, can be paid for, with those that count."""
        working = sum(other.price_per_h for other in self._machines if other.counts) + machine.price_per_h
        everyone = sum(other.price_per_h for other in self._machines)
        return self.purse.pays(working, everyone - working)

    def _shrink(self, number: int, now: float) -> None:
        """The idle ones first, of those the dearest, of those the youngest."""
        paid = self.purse.keeps(self._machines)
        why = f"machines wanted: {number}" if number <= paid else f"machines paid for: {paid}, {self.purse.words()}"
        number = min(number, paid)
        surplus = sum(machine.counts for machine in self._machines) - number
        going = [machine for machine in self._machines if machine.state in (S.STARTING, S.JOINED)]
        going.sort(key=lambda machine: (machine.samples > 0, -machine.price_per_h, machine.samples, -machine.number))
        cause = self.ending or why
        for machine in going[: max(0, surplus)]:
            self._enter(machine, S.DRAINING if machine.peer else S.RELEASING, cause, now)

    def _leave(self, orders: Orders, now: float) -> None:
        for machine in self._machines:
            if machine.state is not S.DRAINING or machine.told:
                continue
            if not machine.samples or self.ending or now - machine.since >= self.config.drain_s:
                machine.told = True
                orders.leave.append((machine.peer, f"the machine is released: {machine.cause}"))

    def _release(self, orders: Orders, now: float) -> None:
        for machine in self._machines:
            if machine.state is S.RELEASING and not machine.call and now >= machine.retry_at:
                machine.call = self.calls.number()
                self.calls.send(Release(machine.call, machine.id), orders, now)

    # ---- transitions

    def _confirmed(self, machine: Machine, now: float) -> None:
        """The provisioner has ended it."""
        self._end(machine, S.FAILED if machine.fault else S.RELEASED, machine.fault or machine.cause, now)

    def _end(self, machine: Machine, state: MachineState, cause: str, now: float) -> None:
        self._machines.remove(machine)
        self._ended.append(machine)
        self.counts[state.value] += 1
        if machine.id:
            self._ended_at.pop(machine.id, None)
            self._ended_at[machine.id] = now
            if len(self._ended_at) > ENDED_KNOWN:
                del self._ended_at[next(iter(self._ended_at))]
        if self.ending:
            self.calls.list_soon(now)
        self._enter(machine, state, cause, now)

    def _enter(self, machine: Machine, state: MachineState, cause: str, now: float, before: str | None = None) -> None:
        came_from = machine.state.value if before is None else before
        machine.state, machine.since, machine.cause = state, now, cause
        if state is S.RELEASING:
            machine.tries, machine.retry_at = 0, now
        self._emit(
            MachineChanged(
                ts=now + self._wall_offset_s,
                machine=machine.name,
                before=came_from,
                after=state.value,
                cause=cause,
                price_per_h=machine.price_per_h,
                cost=round(machine.cost, 6),
                spent=round(self.purse.spent, 6),
            )
        )
