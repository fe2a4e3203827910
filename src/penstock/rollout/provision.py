"""The life of every machine that the manager has asked for: asked, starting, joined, draining, releasing, ended.

Decides when machines are asked for and which are released, given how many are wanted. The number grows at once; it
shrinks to the most that was wanted within the cool-down (or a machine's start-up time, where that is longer), so that
nothing is released that would be wanted again before it could start. Floor and ceiling bound it, and the budget comes
before the floor. Who goes first is `releases`'s to say; one with samples drains.

What the provisioner lists is the truth about what exists: strays, such as those of an earlier manager or of a call that
was cut off, are taken in, and everything that was ever seen is released in the end. After failed calls and machines
that never join the next try waits, twice as long each time.

Pure: calls go out as `Orders`, answers and `now` come in. Refuses to know why a number is wanted, and what a machine
is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from penstock.observe.events import Event, MachineChanged, Warned
from penstock.rollout.lately import Lately
from penstock.rollout.provision_calls import Calls
from penstock.rollout.provision_match import ByHand, matched
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
from penstock.rollout.releases import AS_GOOD, first_to_go, work_costs

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

OTHERS_NAMED = 4
DEAR = 20
"""Times as much as elsewhere, beyond which nobody minds how much more work costs."""

S = MachineState


class Provision:
    """All machines. `emit` gets their events; `wall_offset_s` turns `now` into seconds since 1970."""

    def __init__(self, config: ProvisionConfig, emit: Callable[[Event], None], wall_offset_s: float = 0.0) -> None:
        self.config = config
        self.purse = Purse(config)
        self.wanted = 0
        self.start_s = config.start_s
        """As measured lately."""
        self.per_machine = 1.0
        """Instances on one, on the mean of those that have joined; as it was last where none has."""
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
        self._wanted_lately = Lately()
        self._now: float | None = None
        self._listed_once = self._clean = False
        self._uncertain_at: float | None = None
        """An add that failed was made then: machines of it may be there and cost something."""
        self._losses = 0
        self._by_hand = ByHand(config.rejoin_s)

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
        return {peer for machine in self._machines if not machine.counts for peer in machine.peers}

    @property
    def places(self) -> dict[str, Machine]:
        """The machine that each instance is on, by peer."""
        return {peer: machine for machine in self._machines for peer in machine.peers}

    @property
    def by_hand(self) -> int:
        """Remote instances that are connected, or were a moment ago, and are on none of the machines."""
        return self._by_hand.number

    @property
    def done(self) -> bool:
        """Everything is released, and a list has shown it."""
        return bool(self.ending) and self._clean and not self._machines and not self.calls

    @property
    def working(self) -> int:
        """Machines that have an instance."""
        return sum(bool(machine.peers) for machine in self._machines)

    def take_losses(self) -> int:
        """Machines lost since this was asked last."""
        losses, self._losses = self._losses, 0
        return losses

    @property
    def _usual(self) -> int:
        """Instances that are taken to join on a machine."""
        return max(1, round(self.per_machine))

    # ---- what is wanted

    @property
    def price_per_h(self) -> float | None:
        """Of those that work or will, the mean; else of a further one. None where no price is known."""
        prices = [machine.price_per_h for machine in self._machines if machine.counts]
        return sum(prices) / len(prices) if prices else self.purse.price_per_h(self._now or 0.0)

    def want(self, number: int, now: float) -> None:
        """So many remote machines are worth having from now on, instances by hand among them as one each."""
        self.wanted = number
        self._wanted_lately.note(self._worth_keeping(), now)

    def restore(
        self, spent: float, billed: Mapping[str, float], now: float, by_hand: int = 0, per_machine: float = 1.0
    ) -> None:
        """Takes up an earlier manager's account. `billed`: its machines, and since when their cost is not in it: it
        is charged for those that turn out to be there."""
        self._now, self.per_machine = now, per_machine
        self.purse.spent = spent
        self._by_hand.restore(by_hand, now)
        for name, since in billed.items():
            self._adopt(name, now, "an earlier manager had it").unbilled_since = since

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
            self._grow(self._asked_for(), orders, now)
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
                self._adopt(name, now, "the provisioner gave more than it was asked for")
                continue
            machine = waiting.pop(0)
            machine.id, machine.call = name, 0
            self._ended_at.pop(name, None)
            self._enter(machine, S.STARTING, "the provisioner has it on its way", now)
        if self.purse.bounded and self.purse.price_per_h(now) is None:
            # Others wait for what this one costs.
            self.calls.list_soon(now)
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
            self._priced(machine, row.price_per_h, now)
            if row.alive:
                self.purse.found(machine, self._now or now)
            if not row.alive and not machine.peers:
                self._ended_by_itself(machine, row.cause, now)
        for row in found.values():
            # What is being made may be listed before the call that makes it says so; at the end that is all one.
            if self.ending or row.id in self._ended_at or not self.calls.pending(Add):
                self._stray(row, sent.at, now)
        if not self.calls.unsure:
            self._uncertain_at = None
        if not self._listed_once and self._machines:
            # Whoever asked for these knew why: they are not released before this manager knows better.
            self._wanted_lately.note(sum(machine.counts for machine in self._machines), now)
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
        if asked_at < machine.since or machine.peers or machine.call:
            # It was asked for before the machine came into this state; or the machine is plainly there; or whoever
            # ends it will say when it has: what ends is not listed by all.
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
        if self._just_ended(row.id, asked_at):
            # Providers show what was released for a moment longer.
            return
        machine = self._adopt(row.id, now, "found at the provisioner")
        self._priced(machine, row.price_per_h, now)
        if self._uncertain_at is not None:
            self.purse.charge(machine, now - self._uncertain_at)
        if row.id in self._ended_at:
            self._enter(machine, S.RELEASING, "it was released and is still there", now)
        elif not row.alive:
            machine.fault = row.cause or "it ended by itself"
            self._enter(machine, S.RELEASING, machine.fault, now)

    def _just_ended(self, name: str, now: float) -> bool:
        ended_at = self._ended_at.get(name)
        return ended_at is not None and now < ended_at + self.config.call_s

    def _priced(self, machine: Machine, price_per_h: float | None, now: float) -> None:
        if price_per_h is not None:
            self.purse.listed(machine, price_per_h, now if self._now is None else self._now)

    def _adopt(self, name: str, now: float, cause: str) -> Machine:
        """A machine that this manager has not asked for is its own from now on."""
        price = self.purse.price_per_h(now) or 0.0
        machine = Machine(self.calls.number(), price, now, now, id=name, adopted=True, instances=self._usual)
        self._machines.append(machine)
        self._clean = False
        self._enter(machine, S.STARTING, cause, now, before="")
        return machine

    # ---- instances

    def left(self, peer: str, cause: str, now: float) -> None:
        """An instance said goodbye by itself, as before a preemption: once none is left, its machine is not waited
        for."""
        for machine in self._machines:
            if peer in machine.peers and machine.state is S.JOINED:
                machine.peers = tuple(other for other in machine.peers if other != peer)
                if not machine.peers:
                    machine.samples = 0
                    self._lost(machine, f"it left: {cause}", now)

    def _match(self, instances: Sequence[InstanceView], now: float) -> None:
        found, others = matched(self._machines, instances)
        for machine in self._machines:
            if machine.number in found:
                self._present(machine, found[machine.number], now)
            elif machine.peers:
                self._absent(machine, now)
        joined = [machine for machine in self._machines if machine.counts and machine.joined_at is not None]
        if joined:
            self.per_machine = fmean(machine.instances for machine in joined)
        ours = {peer for machine in self._machines for peer in machine.peers}
        self._by_hand.see(others, ours, lambda name: self._just_ended(name, now), now)

    def _present(self, machine: Machine, views: Sequence[InstanceView], now: float) -> None:
        self.purse.found(machine, now)
        machine.peers, machine.missing = tuple(view.peer for view in views), 0
        self._count(machine, len(views), now)
        machine.samples = sum(view.samples for view in views)
        # One that has just come back is what it was.
        if known := [view.rate for view in views if view.rate is not None]:
            machine.instance_rate = fmean(known)
        if machine.state is S.STARTING:
            machine.loading_at = None
            machine.joined_at = now if machine.joined_at is None else machine.joined_at
            self.calls.joined()
            self._enter(machine, S.JOINED, "an instance of it joined", now)
        if machine.loading_at is None and any(view.loading for view in views):
            machine.loading_at = now
        if not machine.was_ready and any(view.ready for view in views):
            machine.was_ready = True
            if not machine.adopted and machine.joined_at is not None:
                # Without its wait for the run's first weights, which no machine is to blame for.
                loading_s = now - machine.loading_at if machine.loading_at is not None else 0.0
                self.start_s += SMOOTH * (machine.joined_at - machine.asked_at + loading_s - self.start_s)

    def _count(self, machine: Machine, instances: int, now: float) -> None:
        if instances != machine.seen:
            machine.seen, machine.seen_since = instances, now
        wait_s = self.config.settle_s if instances > machine.instances else self.config.rejoin_s
        if now - machine.seen_since >= wait_s:
            machine.instances = instances

    def _absent(self, machine: Machine, now: float) -> None:
        """No instance of it is there any more."""
        machine.peers, machine.samples = (), 0
        if machine.state is S.DRAINING:
            if machine.told_at is None:
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
                if others := self._by_hand.since(machine.asked_at):
                    cause += f", but others did since it was asked for: {', '.join(others[:OTHERS_NAMED])}"
                self._did_not_join(machine, cause, now)
            elif machine.joined_at is not None and now - machine.since >= config.rejoin_s:
                self._lost(machine, f"its instance was lost and not back within {config.rejoin_s:g} s", now)

    # ---- how many

    def _keep_to(self, active: bool, now: float) -> int:
        """Machines beyond this number are not wanted."""
        if self.ending:
            return 0
        self._wanted_lately.note(self._worth_keeping(), now)
        most = self._wanted_lately.most(now - max(self.config.cool_down_s, self.start_s))
        return int(most or 0) if active else 0

    def _asked_for(self) -> int:
        """Of what is wanted, the machines that are not there without us."""
        return max(0, self._within - self.by_hand)

    def _worth_keeping(self) -> int:
        """The same, where instances by hand may be those of machines that we wait for, under other names: released for
        them, such machines would be asked for again as soon as they are gone."""
        waited_for = [m.asked_at for m in self._machines if m.state is S.STARTING and m.joined_at is None]
        return max(0, self._within - self._by_hand.sure(waited_for))

    @property
    def _within(self) -> int:
        return max(self.config.floor, min(self.config.ceiling, self.wanted))

    def _why(self, number: int) -> str:
        return f"machines wanted: {number}" + (f", beside {self.by_hand} by hand" if self.by_hand else "")

    def _grow(self, number: int, orders: Orders, now: float) -> None:
        counting = sum(machine.counts for machine in self._machines)
        draining = [m for m in self._machines if m.state is S.DRAINING and m.told_at is None]
        for machine in reversed(first_to_go(draining)):
            if counting < number and self.purse.keeps_too(machine, self._machines):
                self._enter(machine, S.JOINED, "it is wanted again", now)
                counting += 1
        paid = self.purse.affords(self._machines, self.start_s, now)
        self._mind_money(number, counting, paid, now)
        count = min(number - counting, self.config.ceiling - self.by_hand - len(self._machines), paid)
        if count <= 0 or now < self.calls.grow_at or self.calls.unsure or self.calls.pending(Add):
            return
        call = Add(self.calls.number(), count)
        self.calls.send(call, orders, now)
        self._clean = False
        price = self.purse.price_per_h(now) or 0.0
        for _ in range(count):
            machine = Machine(self.calls.number(), price, now, now, call=call.call, instances=self._usual)
            self._machines.append(machine)
            self.counts["asked"] += 1
            self._enter(machine, S.ASKED, f"{self._why(number)}, there: {counting}", now, before="")

    def _mind_money(self, number: int, counting: int, paid: int, now: float) -> None:
        """Says once that the budget, and nothing else, holds the number down."""
        if counting < len(self._machines):
            # One that is about to go still costs, and there is money for another in a moment.
            return
        before, self.short = self.short, ""
        if number - counting > paid:
            self.short = self.purse.short(number, counting, paid, now)
            if not before:
                self._emit(Warned(ts=now + self._wall_offset_s, where="provisioner", message=self.short))

    def _shrink(self, number: int, now: float) -> None:
        paid = self.purse.keeps(self._machines)
        counting = [machine for machine in self._machines if machine.counts]
        surplus = len(counting) - min(number, paid)
        if surplus <= 0:
            return
        why = self._why(number) if number <= paid else f"machines paid for: {paid}, {self.purse.words()}"
        costs = {machine.number: cost for machine, cost in zip(counting, work_costs(counting))}
        for machine in first_to_go(machine for machine in counting if machine.may_go)[:surplus]:
            cost = costs[machine.number]
            # Of one that is too slow to do anything that is all that can be said.
            words = f"{cost:.1f} x" if cost < DEAR else f"over {DEAR} x"
            cause = self.ending or why + (f"; the same work costs {words} as much on it" if cost > AS_GOOD else "")
            self._enter(machine, S.DRAINING if machine.peers else S.RELEASING, cause, now)

    def _leave(self, orders: Orders, now: float) -> None:
        for machine in self._machines:
            if machine.state is not S.DRAINING:
                continue
            if machine.told_at is None:
                if machine.samples and not self.ending and now - machine.since < self.config.drain_s:
                    continue
                machine.told_at = now
            if now - machine.told_at >= self.config.leave_s:
                # One that stays, or comes again and again, costs as much as one that works.
                late = f"an instance is there {self.config.leave_s:g} s after it was told to leave"
                self._enter(machine, S.RELEASING, f"{machine.cause}; {late}", now)
                continue
            for peer in machine.peers:
                if peer not in machine.told:
                    machine.told.add(peer)
                    orders.leave.append((peer, f"the machine is released: {machine.cause}"))

    def _release(self, orders: Orders, now: float) -> None:
        for machine in self._machines:
            # What an earlier manager had costs nothing if it is gone: the first list says so, as a release does not. At
            # the end nothing is waited for.
            unlisted = not self.ending and self.calls.unlisted(machine.asked_at, now)
            unseen = unlisted and machine.unbilled_since is not None
            if machine.state is S.RELEASING and not machine.call and not unseen and now >= machine.retry_at:
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
