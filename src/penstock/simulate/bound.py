"""Least times that no policy can pass on a trace, whatever it knows: every length, every machine's coming and going.

Decides what a clairvoyant has to obey too; refuses to know strategies. Everything here is a lower bound by proof, and
is loose where the proof is: samples of one machine need not share a pace here, and move for nothing.

**Speed and throughput at once.** A decode step of the sequences S takes `base + c(S)` seconds, c(S) the sum of what
each costs with the context that it has then. Put a price of 1 on a second of a remote machine, `reserved` on one of a
reserved machine, and w_i on a second in which sequence i is decoded. A step costs (1 + w(S)) * (base + c(S)), and by
Cauchy and Schwarz

    (1 + sum w_i) * (base + sum c_i) >= sum_i (sqrt(c_i) + sqrt(base * w_i))^2

since what is left of the product is base + sum w_i * sum c_i >= base + (sum sqrt(w_i c_i))^2 >= 2 sqrt(base) sum
sqrt(w_i c_i). So each token has a least cost, in whatever batches it is decoded: wide ones are slow for each sequence,
narrow ones waste machines. All of it has to be paid from the seconds that there are. Of machines: remote ones while
they have the weights, reserved ones while nobody trains (all the time where they take no turns). Of sequences: one of
group k is decoded for no longer than until the group is complete, and the trainer begins on the group after that.
With weights of `price * p_k` for group k, which takes p_k to train on and p in all, and micro-batches of q_b, the best
that a trainer can do is to train without a gap at the very end:

    sum_k p_k * begun_k <= p * end - (p^2 + sum_b q_b^2) / 2

Where a share of training needs no whole group, that much of p_k waits for each sample alone, as much as there is of it
to train on, and only the rest for the group; and only that rest need be in micro-batches.
A step of T seconds in which the least cost is more than what there is to pay is impossible, at any prices. Prices that
change within the step forbid more: `bound_phases`.

**Memory.** A step serves at most `max_running` sequences and `kv_tokens` of context, so any share of `base` may be
counted as context or as sequences instead. Where prompts are shared, a prompt of n samples is in memory once for as
many of them as run, which is no less than 1/n of it for each: so much a prompt's token counts there. What a step reads
of it counts in full. Its prefill counts once, in the cheapest place that there is.

**Pulls.** A step's bound goes by when machines had their weights. That of a run lets a machine have its first version
no sooner than whole, and each later one as soon as a difference can be there (`Profile.least_pull_s`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.simulate.bound_phases import (
    SIMPSON,
    TRAPEZOIDS,
    Cost,
    Demands,
    Supply,
    dealt,
    longer_s,
    prefilled_tokens,
)
from penstock.simulate.machine import SimSample
from penstock.simulate.profiles import MachineProfile, Profile
from penstock.simulate.traces import Trace

__all__ = ["least_run_s", "lower_bound_s"]

SHARES = ((0.0, 0.0), (0.3, 0.0), (1.0, 0.0), (0.0, 1.0))
"""Of `base`, counted as context and as sequences. Any are valid; the best of a few is taken."""
HALVINGS = 40
EVERY = 4
"""Of the groups, by length: so many are searched for prices with."""
HOPELESS = 0.15
"""Share of the remote machines' seconds by which a step is the longer for other reasons than them: then no search."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """At some prices: `machine + share * price + root * sqrt(price)` is the least cost of a step's samples."""

    reserved: float
    """Price of a reserved machine's second; a remote one's is 1."""
    kinds: tuple[Cost, Cost]
    """(remote, reserved)."""
    machine: float
    share: float
    root: float


class _Step:
    """One step's samples: what is asked of machines and trainer, whatever the time."""

    def __init__(self, profile: Profile, samples: Sequence[SimSample]) -> None:
        self.profile, self.training = profile, profile.training
        per = profile.samples_per_prompt
        self.groups = [samples[k : k + per] for k in range(0, len(samples), per)]
        training = self.training
        self.train_s = [
            sum(sample.length + sample.prompt_tokens for sample in group) * training.s_per_token
            for group in self.groups
        ]
        self.all_s = sum(self.train_s)
        together = max(1, -(-training.micro_batch_samples // per))
        self.micro_batches = -(-len(self.groups) // together)
        last = len(self.groups) - (self.micro_batches - 1) * together
        self.ahead = training.ahead_share
        """Of the training on a sample, what need not wait until its group is complete."""
        self.behind = 1 - training.ahead_share
        self.last_s = self.behind * sum(sorted(self.train_s)[:last]) + training.reward_s
        """Between the last token that can be of use and the end of training: the last micro-batch."""
        self.alone_s = self._alone(together)
        """Without regard to how many machines there are."""
        self.demands = list(self._demands())

    def least_s(self, begins_s: float) -> float:
        """Without regard to how many machines there are, the first of which begins at `begins_s`."""
        return begins_s + self.alone_s + self.training.reward_s + self.training.optimizer_s

    def possible(self, step_s: float, begins_s: float, remote_s: Callable[[float], float]) -> bool:
        """Whether no prices forbid a step of so many seconds.

        `begins_s`: until the first machine can generate. `remote_s(until)`: instance-seconds of remote machines with
        weights, until then.
        """
        supply = self.supply(begins_s, remote_s)
        begun, remote, reserved_s = supply.begun(step_s), supply.remote(step_s, math.inf), supply.reserved(step_s)
        # At the price of sequences that asks for the most.
        return all(
            begun > demand.share
            and demand.machine + demand.root**2 / (4 * (begun - demand.share)) <= remote + demand.reserved * reserved_s
            for demand in self.demands
        )

    def supply(self, begins_s: float, remote_s: Callable[[float], float]) -> Supply:
        training = self.training
        # The sum of squares of the micro-batches is least where all are equal.
        late = (1 + self.behind**2 / self.micro_batches) / 2 * self.all_s

        def useful_s(step_s: float, until_s: float) -> float:
            return remote_s(min(until_s, step_s - training.optimizer_s - self.last_s))

        def reserved_s(step_s: float) -> float:
            if self.profile.reserved_beside:
                free_s = step_s - training.optimizer_s - self.last_s - _own_s(self.profile)
            else:
                free_s = step_s - training.optimizer_s - self.all_s - 2 * training.switch_s
            return max(0.0, free_s) * self.profile.reserved_instances

        return Supply(
            remote=useful_s,
            reserved=reserved_s,
            begun=lambda step_s: self.all_s * (step_s - training.optimizer_s - late - training.reward_s - begins_s),
            begins_s=begins_s,
        )

    def longer_s(self, low_s: float, begins_s: float, remote_s: Callable[[float], float]) -> float:
        """A bound with prices that change within the step; at least `low_s`, which is one without."""
        supply = self.supply(begins_s, remote_s)
        begun, remote, reserved_s = supply.begun(low_s), supply.remote(low_s, math.inf), supply.reserved(low_s)
        most, price = -math.inf, 0.0
        hardest = self.demands[0]
        for demand in self.demands:
            root = demand.root / (2 * max(1e-9, begun - demand.share))
            missing = demand.machine + demand.root * root / 2 - remote - demand.reserved * reserved_s
            if missing > most:
                most, price, hardest = missing, root * root, demand
        if price <= 0 or most < -HOPELESS * remote:
            return low_s
        groups = [[(sample.prompt_tokens, sample.length) for sample in group] for group in self.groups]
        by_length = sorted(range(len(groups)), key=lambda k: self.train_s[k])
        part = by_length[len(by_length) % EVERY // 2 :: EVERY]
        some = [groups[k] for k in part]
        coarse = Demands(some, [self.train_s[k] for k in part], *hardest.kinds, SIMPSON, self.ahead)
        whole = Demands(groups, self.train_s, *hardest.kinds, TRAPEZOIDS, self.ahead)
        return longer_s(coarse, whole, supply, low_s, price, hardest.reserved)

    def _alone(self, together: int) -> float:
        """Every answer alone on a machine: the longest one, then training on its group; and from any moment on,
        training on all that was not there before it. Groups are trained on once there are so many `together`."""
        every = [*_remote_kinds(self.profile), self.profile.reserved]
        kinds = [_fastest(_remote_kinds(self.profile)), _fastest([self.profile.reserved])]
        if any(kind.shared_prompts for kind in every):
            # Who moves to where a sibling runs has its prompt there already, and has paid for it on the other kind.
            kinds = [replace(kind, prefill=min(kind.prefill for kind in kinds)) for kind in kinds]
        samples: list[tuple[float, float]] = []
        """(when it is there, what can be done of it ahead)."""
        groups: list[tuple[float, float]] = []
        for group, train_s in zip(self.groups, self.train_s):
            alone = [
                min(
                    sample.prompt_tokens * kind.prefill
                    + sample.length
                    * (kind.base + kind.sequence + kind.context * (sample.prompt_tokens + sample.length / 2))
                    for kind in kinds
                )
                for sample in group
            ]
            tokens = [sample.prompt_tokens + sample.length for sample in group]
            samples += zip(alone, [self.ahead * train_s * count / sum(tokens) for count in tokens])
            groups.append((max(alone), self.behind * train_s))
        longest = max(there + behind_s for there, behind_s in groups)
        samples.sort()
        groups.sort()
        # A first micro-batch, or as many samples as are looked at together, is there when the last of it is.
        least = min(self.training.ahead_samples, together * self.profile.samples_per_prompt, len(samples))
        least_there, groups_there = samples[least - 1][0], groups[min(together, len(groups)) - 1][0]
        work = sorted(
            [(max(there, least_there), ahead_s) for there, ahead_s in samples]
            + [(max(there, groups_there), behind_s) for there, behind_s in groups]
        )
        left_s = self.all_s
        for there, work_s in work:
            longest = max(longest, there + left_s)
            left_s -= work_s
        return longest

    def _demands(self) -> Iterator[_Demand]:
        longest = max(sample.prompt_tokens + sample.length for group in self.groups for sample in group)
        per = self.profile.samples_per_prompt
        for as_context, as_sequences in SHARES:
            remote, reserved = (
                _shifted(_fastest(kinds), kinds, longest, per, as_context, as_sequences)
                for kinds in (_remote_kinds(self.profile), [self.profile.reserved])
            )
            # A price at which neither kind is the cheaper one, in one respect or the other.
            ratios = {
                round(one / other, 9)
                for one, other in ((remote.context, reserved.context), (remote.sequence, reserved.sequence))
                if one > 0 and other > 0
            }
            for price in sorted(ratios) or [1.0]:
                yield self._demand(remote, reserved, price)

    def _demand(self, remote: Cost, reserved: Cost, price: float) -> _Demand:
        base = min(remote.base, reserved.base)
        sequence = min(remote.sequence, price * reserved.sequence)
        context = min(remote.context, price * reserved.context)
        prompt = min(remote.prompt, price * reserved.prompt)
        prefill = min(remote.prefill, price * reserved.prefill)
        once = remote.shared or reserved.shared
        machine = share = root = 0.0
        for group, train_s in zip(self.groups, self.train_s):
            # The integral of sqrt(c) over an answer's tokens.
            roots = []
            machine += prefilled_tokens([sample.prompt_tokens for sample in group], once) * prefill
            for sample in group:
                first = sequence + prompt * sample.prompt_tokens
                machine += sample.length * (first + context * sample.length / 2)
                roots.append(_root_integral(first, context, sample.length))
            if base == 0:
                continue
            tokens = [sample.prompt_tokens + sample.length for sample in group]
            for weights, value, sample in zip(dealt(train_s, self.ahead, tokens, roots), roots, group):
                root += 2 * math.sqrt(base * sum(weights)) * value
                share += sum(weights) * base * sample.length
        return _Demand(price, (remote, reserved), machine, share, root)


def lower_bound_s(
    profile: Profile, samples: Sequence[SimSample], began_s: float, ready: Sequence[tuple[float, float]]
) -> float:
    """Seconds that a step takes at least. `ready`: (from, to) in which each remote machine has its weights."""

    def remote_s(until_s: float) -> float:
        return sum(max(0.0, min(to, began_s + until_s) - max(at, began_s)) for at, to in ready)

    first = min((max(0.0, at - began_s) for at, _ in ready), default=math.inf)
    return _shortest_s(_Step(profile, samples), min(first, _own_s(profile)), remote_s)


def least_run_s(
    profile: Profile, trace: Trace, ceiling: int, samples: Callable[[int], Sequence[SimSample]], steps: int
) -> float:
    """Seconds before which no policy ends so many steps on a trace, with at most so many remote machines at a time.

    Every step begins where the last one's bound ends. That is fair to all: who begins earlier can wait. All machines
    of the trace are taken to be asked for at once, and each pulls the weights alone: its first version whole, and from
    then on as if it always held the one before. More than `ceiling` at a time count as so many.
    """
    there = _there(trace)
    clock_s = 0.0
    for number in range(steps):
        began_s = clock_s
        ready = []
        for node, at, to in there:
            connected_s = at + profile.remote(node).boot_s if at > 0 else 0.0
            first_s, next_s = connected_s + profile.pull_s(node), began_s + profile.least_pull_s(node)
            ready.append((max(first_s, next_s), to))
        at_most = _capped(ready, ceiling)
        clock_s += lower_bound_s(profile, samples(number), began_s, at_most)
    return clock_s


def _own_s(profile: Profile) -> float:
    """Before which no reserved machine generates."""
    if not profile.reserved_beside:
        return profile.training.switch_s
    return min(profile.own_pull_s(), profile.own_pull_s(difference=True))


def _shortest_s(step: _Step, begins_s: float, remote_s: Callable[[float], float]) -> float:
    low = step.least_s(begins_s)
    if step.possible(low, begins_s, remote_s):
        return step.longer_s(low, begins_s, remote_s)
    high = 2 * low
    while not step.possible(high, begins_s, remote_s):
        low, high = high, 2 * high
        if high > 1e9:
            return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if step.possible(middle, begins_s, remote_s) else (middle, high)
    return step.longer_s(low, begins_s, remote_s)


def _remote_kinds(profile: Profile) -> list[MachineProfile]:
    return [profile.spot, *profile.kinds.values()]


def _fastest(kinds: Sequence[MachineProfile]) -> Cost:
    return Cost(
        min(kind.step_base_s for kind in kinds),
        min(kind.sequence_s for kind in kinds),
        min(kind.context_s for kind in kinds),
        min(kind.prefill_s_per_token for kind in kinds),
        min(kind.context_s for kind in kinds),
        any(kind.shared_prompts for kind in kinds),
    )


def _shifted(
    cost: Cost, kinds: Sequence[MachineProfile], longest: int, per_prompt: int, as_context: float, as_sequences: float
) -> Cost:
    """A part of `base` counted as context or as sequences. A single one may be longer than the memory."""
    memory = max(longest, *(kind.kv_tokens + 1 for kind in kinds))
    places = max(kind.max_running for kind in kinds)
    held_s = as_context * cost.base / memory
    return Cost(
        (1 - as_context - as_sequences) * cost.base,
        cost.sequence + as_sequences * cost.base / places,
        cost.context + held_s,
        cost.prefill,
        cost.prompt + held_s / (per_prompt if cost.shared else 1),
        cost.shared,
    )


def _root_integral(first: float, slope: float, tokens: int) -> float:
    """The integral of sqrt(first + slope * x) for x from 0 to `tokens`."""
    if slope * tokens <= 1e-9 * first or slope == 0:
        return tokens * math.sqrt(first)
    return ((first + slope * tokens) ** 1.5 - first**1.5) / (1.5 * slope)


def _there(trace: Trace) -> list[tuple[str, float, float]]:
    """(node, from, to) of every stay."""
    since: dict[str, float] = {}
    found = []
    for change in trace.changes:
        if change.there:
            since.setdefault(change.node, change.at_s)
        elif change.node in since:
            found.append((change.node, since.pop(change.node), change.at_s))
    return found + [(node, at, math.inf) for node, at in since.items()]


def _capped(spans: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Spans with as many open at each moment as there are in `spans`, but at most so many."""
    changes = sorted([(at, 1) for at, to in spans if to > at] + [(to, -1) for at, to in spans if to > at])
    moments = sorted({at for at, _ in changes})
    found: list[tuple[float, float]] = []
    count, index = 0, 0
    for at, to in itertools.pairwise(moments):
        while index < len(changes) and changes[index][0] <= at:
            count += changes[index][1]
            index += 1
        found += [(at, to)] * min(count, most)
    return found
