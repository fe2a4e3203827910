"""The policy that runs by default: queues level by speed, and work that moves when that shortens the step.

Four decisions on top of the shortest queue:

- An instance's share follows its learned speed, so that unequal machines end together, and its room follows the context
  that it was seen to hold when its memory was full, which it often is before `max_running` is. Where a plan holds, its
  limits are the fastest instance's; a slower one is given less, or nothing where answers would end last (`unequal`).
- Nothing waits at the manager, and an instance has a free place while another has samples waiting: those move. They
  have cost nothing yet.
- The reserved instances have handed over what they had: running samples of prompts with more expected to come than of
  all that there is room for wait, and what was handed over goes on in their place.
- Nothing waits anywhere, and one instance would finish much later than another: running samples move, those with the
  longest expected remainder first, if the later of the two then ends earlier by more than a margin and by more than the
  time between two reports, the prefill of what is moved counted at its learned price. A sample that runs is moved by
  choice at most `max_moves` times, but for moves that halve what is left.

Until speeds are learned it is the shortest queue.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.rollout.arrivals import Arrivals
from penstock.rollout.balance import InstanceLoad, Move, PlacedSample, Queue, Report, ShortestQueue
from penstock.rollout.curves import AnswerLengths, Speed, StepCurve, drain_s
from penstock.rollout.step_replay import NEARLY_ALL, Engine, Plan, first_ones, limited
from penstock.rollout.unequal import ALIKE, Beside, compared

__all__ = ["Balanced"]

PAIRS = 4
"""Most and least loaded instances looked at for one answer, whose cost then does not grow with the fleet (but
for `FEW_SAMPLES`)."""
FEW_SAMPLES = 512
"""In all, of which each instance's end is worked out before any is moved: a single one may end last on a slow one."""
FEW_PROMPTS = 4
"""To an instance: of so few, lengths do not make up for each other."""
LONG_ANSWERS = 4.0
"""Of prompts: what a prompt shared is worth is then less than level instances are."""
WAITING = 8
"""So many times as often as one that runs, a sample that waits is moved: it pays no prefill that it would not pay where
it is."""
COMPARED = 16
"""Reports after which an instance is compared with others: a curve of fewer may be far off beside where it was seen,
and one that passes for much faster than it is would leave all others without work."""
PROBED = 16
"""Batches without a report, after which an instance that is too slow for any sample is given some: it may be slow no
more."""
PROBE = 8
"""The part of a limit that it then has, and 2 at least: one alone would not tell what a step costs from what a sequence
does."""
HALVES = 0.5
"""Of the time to the later end, by which a move is made however often a sample was moved: a fast instance is idle, and
what a slow one holds would last. Who gains that much time and again soon has nothing left to gain."""
FASTEST = Beside()
LATELY = 0.1
"""Weight of the newest report in a running mean over the fleet's."""
GOLDEN = 0x9E3779B97F4A7C15
"""The golden ratio's fraction in 64 bits: its multiples lie evenly (Knuth's Fibonacci hashing). Leases have an epoch in
their upper bits, of which floating point would leave nothing."""

_Held = tuple[float, float, int, int]
"""A sample on an instance: expected tokens left, context now, lease, moves."""


@dataclass
class Balanced(ShortestQueue):
    """`max_pending`: samples that may wait at an instance. `gain`: a move must shorten the later end by this share."""

    max_moves: int = 3
    gain: float = 0.08
    plan: Plan | None = None
    """Of the step, with the limits up to which instances are given samples."""
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    fleet_curve: StepCurve = field(default_factory=StepCurve)
    curves: dict[str, StepCurve] = field(default_factory=dict)
    _kind_curves: dict[bool | None, StepCurve] = field(default_factory=dict)
    """Of the trainer's own instances, and of the others."""
    _memory: dict[str, float] = field(default_factory=dict)
    """Tokens of context that an instance held at most while samples waited at it."""
    _emptiest: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Least context, and what ran then, of those of the open batch's reports in which samples waited at an instance."""
    _reserves: dict[str, float] = field(default_factory=dict)
    """Tokens that an instance keeps free for each sequence, as it showed when it let nobody in."""
    _reserved: dict[str, bool] = field(default_factory=dict)
    """Whether it is the trainer's own: one kind has another memory than the other."""
    _smallest: dict[bool | None, float] = field(default_factory=dict)
    """Memory by kind, worked out since one of them changed."""
    _context: float = 0.0
    """Of one running sequence, as reported lately."""
    _elapsed_s: float | None = None
    """Since the step began, at the last question; None: the plan is for none."""
    _report_s: float = 0.0
    """Covered by a report lately: what would be gained within one was not measured."""
    _shares: tuple[float, float] | None = None
    """Of remote and of reserved instances' places, at the last question; None: the plan is for none."""
    _waits: list[float] = field(default_factory=list)
    """What is left of the prompt of each sample that waits, as when they were put in order."""
    _windows: bool = False
    """Reserved instances generate, or did until just now."""
    _per_prompt: int = 1
    _beside: dict[str, Beside] = field(default_factory=dict)
    """Each instance beside the fastest one of its kind, at the last question."""
    _unheard: dict[str, int] = field(default_factory=dict)
    """Batches that ended since an instance's last report."""
    _arrivals: Arrivals = field(default_factory=Arrivals)
    _compared: tuple[float, list[str]] | None = None
    """What they were compared for, since the last report."""
    _weights: dict[str, float] = field(default_factory=dict)
    """Worked out since the last report of each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_moves < 0 or not 0 <= self.gain < 1:
            raise ValueError(f"max_moves is {self.max_moves} and gain {self.gain}; at least 0, and from 0 to below 1")

    # ---- told

    def report(self, report: Report) -> None:
        own = self.curves.setdefault(report.instance, StepCurve())
        kind = self._kind_curves.setdefault(self._reserved.get(report.instance), StepCurve())
        for curve in (own, kind, self.fleet_curve):
            curve.report(report.wall_s, report.running, report.context_tokens, report.tokens, report.prefilled)
        self._weights.pop(report.instance, None)
        self._unheard.pop(report.instance, None)
        self._compared = None
        self._report_s += (report.wall_s - self._report_s) * (LATELY if self._report_s else 1.0)
        if report.pending or report.instance in self._memory:
            # What it holds without anybody waiting fits, too.
            self._memory[report.instance] = max(self._memory.get(report.instance, 0.0), report.context_tokens)
            self._smallest.clear()
        if report.pending:
            seen = report.context_tokens, report.running
            self._emptiest[report.instance] = min(seen, self._emptiest.get(report.instance, seen))
        if report.running > 0:
            context = report.context_tokens / report.running
            self._context += (context - self._context) * (LATELY if self._context else 1.0)

    def finished(self, prompt: int, output_tokens: int) -> None:
        self.lengths.finished(output_tokens, prompt)

    def batch_ended(self) -> None:
        self.lengths.refresh()
        self._weights.clear()
        self._unheard = {instance: self._unheard.get(instance, 0) + 1 for instance in self.curves}
        self._compared = None
        self._windows, self._waits = False, []
        for instance, (context, running) in self._emptiest.items():
            # So much was free, and one more was not let in.
            self._reserves[instance] = max(0.0, self._memory[instance] - context) / (running + 1)
        self._emptiest.clear()

    def gone(self, instance: str) -> None:
        self.curves.pop(instance, None)
        for known in (self._memory, self._weights, self._reserved, self._reserves, self._emptiest, self._unheard):
            known.pop(instance, None)
        self._beside.pop(instance, None)
        self._arrivals.gone(instance)
        self._compared = None
        self._smallest.clear()

    def follow(self, plan: Plan) -> None:
        """Gives instances as many samples as a plan says."""
        self.plan = plan

    # ---- learned

    def rates(self, loads: Sequence[InstanceLoad]) -> dict[str, float]:
        """What instances do in a time beside the fastest one of their kind, with as many samples as a step has for
        each; of those alone of which enough is known."""
        samples, engines = sum(map(len, self.lengths.groups)), len(self._reserved)
        each = samples / engines if samples and engines else math.inf
        return {instance: beside.rate(each) for instance, beside in self._besides(loads, self._context).items()}

    def speed(self, instance: str) -> Speed | None:
        """Of one instance; the fleet's where it has said too little."""
        return self._own_speed(instance) or self.fleet_curve.speed

    def _comparable_speed(self, instance: str) -> Speed | None:
        own = self.curves.get(instance)
        return own.speed if own is not None and own.reports >= COMPARED else None

    def _own_speed(self, instance: str) -> Speed | None:
        own = self.curves.get(instance)
        return own.speed if own is not None else None

    def memory(self, instance: str) -> float:
        """Tokens of context that fit an instance, as far as was seen; a new one is taken to be like the smallest."""
        known = self._memory.get(instance)
        if known is not None or not self._memory:
            return math.inf if known is None else known
        kind = self._reserved.get(instance)
        smallest = self._smallest.get(kind)
        if smallest is None:
            alike = (memory for name, memory in self._memory.items() if self._reserved.get(name) == kind)
            smallest = self._smallest[kind] = min(alike, default=math.inf)
        return smallest

    def reserve(self, instance: str) -> float:
        """Tokens that an instance keeps free for each sequence when it lets another in: nothing in vLLM, a share
        of what it may still draw in SGLang. At least so much, as it showed; a new one is like its kind's mean."""
        known = self._reserves.get(instance)
        if known is not None:
            return known
        kind = self._reserved.get(instance)
        alike = [kept for name, kept in self._reserves.items() if self._reserved.get(name) == kind]
        return sum(alike) / len(alike) if alike else 0.0

    def places(self, load: InstanceLoad) -> int:
        """Sequences that an instance runs at once, with as much context as they have on average."""
        return self._fit(load, self.lengths.mean_progress or self._context)

    def _fit(self, load: InstanceLoad, context: float) -> int:
        """Sequences of so much context that an instance runs at once."""
        return int(max(1.0, min(load.max_running, self.memory(load.instance) / max(1.0, context))))

    def engine(self, load: InstanceLoad, starts_s: float) -> Engine | None:
        """An instance for a plan; None while its speed is not known."""
        self._note(load)
        # The mean of the trainer's engines and of others says little of either.
        kind = self._kind_curves.get(load.reserved)
        speed = self._own_speed(load.instance) or (kind.speed if kind is not None else None) or self.fleet_curve.speed
        if speed is None:
            return None
        memory, reserve = self.memory(load.instance), self.reserve(load.instance)
        known = self._comparable_speed(load.instance) is not None
        machine = load.machine, load.of_machine
        engine = Engine(speed, load.max_running, starts_s, memory, reserve, known, load.price_per_h, *machine)
        if known and not load.reserved:
            self._arrivals.see(load.instance, engine)
        return engine

    def joined(self) -> list[Engine]:
        """Of each of the remote machines that joined last an instance, the newest first, those that are gone since
        among them."""
        return self._arrivals.newest()

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        self._per_prompt, self._elapsed_s = queue.samples_per_prompt, queue.elapsed_s
        for load in loads:
            self._note(load)
            self._windows |= load.reserved
        self._shares = None
        if self.plan is not None and queue.elapsed_s is not None:
            at = queue.elapsed_s, self.plan.window_s
            self._shares = (self.plan.remote.share(*at), self.plan.reserved.share(*at))
        self._compare(loads, queue.prompt_tokens)
        return super().assign(queue, loads)

    def fill(self, queue: Queue, load: InstanceLoad) -> int:
        """By the limits of the last `assign`."""
        return super().fill(queue, load)

    @property
    def _by_speed(self) -> bool:
        """Speeds say what is level; else a user's own weight does."""
        return type(self).weight is Balanced.weight

    def _note(self, load: InstanceLoad) -> None:
        if self._reserved.get(load.instance) is not load.reserved:
            self._reserved[load.instance] = load.reserved
            self._smallest.clear()

    def room(self, load: InstanceLoad) -> int:
        if self._shares is not None:
            # What fits its memory was replayed, and is not guessed again.
            return min(super().room(load), self._limit(load))
        if load.pending:
            return super().room(load)
        return self.places(load) + self.max_pending

    def handicap(self, load: InstanceLoad) -> float:
        return 0.0 if self._probes(load.instance) else self._beside_of(load.instance).handicap

    def _probes(self, instance: str) -> bool:
        return self._unheard.get(instance, 0) >= PROBED

    def _limit(self, load: InstanceLoad) -> int:
        """Samples that an instance may hold by the plan."""
        assert self._shares is not None
        limit = limited(load.max_running, self._shares[load.reserved])
        least = max(2, limit // PROBE) if self._probes(load.instance) else 0
        return max(self._beside_of(load.instance).samples(limit), min(limit, least))

    def _beside_of(self, instance: str) -> Beside:
        return self._beside.get(instance, FASTEST)

    def _compare(self, loads: Sequence[InstanceLoad], prompt_tokens: float) -> None:
        """Where a plan's limits hold, and speeds say what is level."""
        if self._shares is None or not self._by_speed:
            self._beside, self._compared = {}, None
            return
        those = prompt_tokens, [load.instance for load in loads]
        if those != self._compared:
            self._compared = those
            found = self._besides(loads, self.lengths.mean_progress + prompt_tokens)
            # Those that were not shown may be asked about (`fill`) beside those that they were shown with.
            self._beside.update((load.instance, found.get(load.instance, FASTEST)) for load in loads)

    def _besides(self, loads: Sequence[InstanceLoad], context: float) -> dict[str, Beside]:
        """Instances of each kind beside one another; not those of which too little is known."""
        found: dict[str, Beside] = {}
        for kind in (True, False):
            engines = {
                load.instance: (speed, load.max_running, self.memory(load.instance))
                for load in loads
                if load.reserved is kind and (speed := self._comparable_speed(load.instance)) is not None
            }
            found.update(zip(engines, compared(list(engines.values()), context)))
        return found

    def together(self, queue: Queue, going: int, loads: Sequence[InstanceLoad]) -> bool:
        """Not where nobody is left to level instances with later: most of a prompt's answers are long or short, and of
        a few instances with a few prompts each the one with the long ones would end last."""
        samples = queue.first_fresh + queue.fresh
        if going < queue.waiting or samples > FEW_PROMPTS * len(loads) * queue.samples_per_prompt:
            return True
        if not (self.lengths.known and queue.prompt_tokens):
            return True
        tokens = self.lengths.left(0)
        if sum(self.memory(load.instance) for load in loads) < samples * (tokens + queue.prompt_tokens):
            # Some will wait for memory, of which a shared prompt leaves more.
            return True
        return tokens < LONG_ANSWERS * queue.prompt_tokens

    def weight(self, load: InstanceLoad) -> float:
        known = self._weights.get(load.instance)
        if known is None:
            speed = self.speed(load.instance)
            if speed is None or not self.lengths.known:
                return load.max_running
            known = speed.tokens_per_s(self.places(load), self.lengths.left(0) / 2)
            self._weights[load.instance] = known
        return known

    def order(self, output_tokens: Sequence[int], prompts: Sequence[int]) -> list[int]:
        """The prompt with the least expected to come first: the trainer takes whole prompts, and the sooner one is
        whole, the less of it is under way. What is equal stays as it is."""
        if not self.lengths.known:
            return super().order(output_tokens, prompts)
        left = self._left_of_prompts(zip(prompts, output_tokens, strict=True))
        self._waits = [left[prompt] for prompt in prompts]
        return sorted(range(len(prompts)), key=lambda k: left[prompts[k]])

    # ---- moves

    def moves(
        self, waiting: int, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        ended = self._windows and not any(load.reserved for load in loads)
        self._windows &= not ended
        if ended and waiting:
            return self._later_ones(loads, placed)
        if waiting or len(loads) < 2:
            return []
        hands_over = self.plan is not None and self._elapsed_s is not None and self.plan.finished < NEARLY_ALL
        if hands_over and len({load.reserved for load in loads}) > 1 and all(load.samples for load in loads):
            # Unequal on purpose: what the reserved engines hold when they turn to training goes to the others then.
            return self._move_pending(loads, placed)
        found = self._move_pending(loads, placed)
        return found or self._move_running(loads, placed)

    def _later_ones(self, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]) -> list[Move]:
        """The reserved instances have handed over: all that goes on has its turn anew, and what comes later than all
        there is room for waits. What it has costs a prefill, and those before it are whole sooner."""
        if self._shares is None or not self._waits:
            return []
        rows = [(load.instance, sample) for load in loads for sample in placed(load.instance)]
        left = self._left_of_prompts((sample.prompt, sample.output_tokens) for _, sample in rows)
        room = sum(self.room(load) for load in loads)
        stay = first_ones([*self._waits, *(left[sample.prompt] for _, sample in rows)], room)
        return [Move(name, sample.lease, "") for name, sample in rows if left[sample.prompt] > stay]

    def _left_of_prompts(self, rows: Iterable[tuple[int, int]]) -> dict[int, float]:
        """Expected tokens still to come, by prompt, from some of its unfinished samples: (prompt, tokens so far)."""
        lefts: defaultdict[int, list[float]] = defaultdict(list)
        for prompt, tokens in rows:
            lefts[prompt].append(self.lengths.left(tokens))
        return {
            prompt: max(len(seen), self._per_prompt - self.lengths.ended(prompt)) * sum(seen) / len(seen)
            for prompt, seen in lefts.items()
        }

    def _move_pending(
        self, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        free = {load.instance: self._most(load) - load.samples for load in loads if not load.pending}
        total = sum(max(0, count) for count in free.values())
        found: list[Move] = []
        for load in sorted(loads, key=lambda load: -load.pending)[:PAIRS]:
            if not load.pending or total <= 0:
                break
            for sample in placed(load.instance):
                if sample.running or sample.shifts >= WAITING * self.max_moves or total <= 0:
                    continue
                # What ran elsewhere waits by choice where it ends sooner.
                allowed = [name for name in free if not (sample.moves and self._slower(name, load.instance))]
                target = max(allowed, key=lambda name: free[name], default="")
                if not target or free[target] <= 0:
                    continue
                found.append(Move(load.instance, sample.lease, target))
                free[target] -= 1
                total -= 1
        return found

    def _slower(self, instance: str, other: str) -> bool:
        """Whether one instance is slower than another of its kind."""
        alike = self._reserved.get(instance) == self._reserved.get(other)
        return alike and self._beside_of(instance).slower > ALIKE * self._beside_of(other).slower

    def _most(self, load: InstanceLoad) -> int:
        """Samples that an instance may run, by its memory and by the plan."""
        places = self.places(load)
        return places if self._shares is None else min(places, self._limit(load))

    def _move_running(
        self, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        if any(load.pending for load in loads):
            return []
        ends_s = self._ends(loads, placed)
        keys = ends_s or {load.instance: load.samples / self.weight(load) for load in loads}
        ordered = sorted(loads, key=lambda load: (keys[load.instance], -self.weight(load)))
        targets, sources = ordered[:PAIRS], ordered[::-1][:PAIRS]
        found: list[Move] = []
        used: set[str] = set()
        for source, target in zip(sources, targets, strict=True):
            if source.instance in used or target.instance in used or source.samples < (1 if ends_s else 2):
                continue
            if keys[source.instance] <= (1 + self.gain) * keys[target.instance]:
                break
            moved = self._worth(source, target, placed)
            found += [Move(source.instance, lease, target.instance) for lease in moved]
            used |= {source.instance, target.instance}
        return found

    def _ends(self, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]) -> dict[str, float]:
        """Seconds until each instance has finished what it holds; empty where that isn't cheap to say, or not known."""
        if not self._by_speed or sum(load.samples for load in loads) > FEW_SAMPLES:
            return {}
        if not self.lengths.known:
            besides = self._besides(loads, self._context).values()
            if not any(beside.slower > 1 for beside in besides):
                # How many there are says more than how far they have come.
                return {}
        found = {}
        for load in loads:
            speed = self.speed(load.instance)
            if speed is None:
                return {}
            found[load.instance] = self._drain(speed, load, self._held(placed(load.instance)))
        return found

    def _worth(
        self,
        source: InstanceLoad,
        target: InstanceLoad,
        placed: Callable[[str], Sequence[PlacedSample]],
    ) -> list[int]:
        """Leases that should go from one instance to another; none where that would not pay."""
        fast, slow = self.speed(target.instance), self.speed(source.instance)
        if fast is None or slow is None:
            return []
        here, there = self._held(placed(source.instance)), self._held(placed(target.instance))
        # Longest remainder first.
        here.sort(key=lambda held: (-held[0], held[2]))
        before = max(self._drain(slow, source, here), self._drain(fast, target, there))

        def chosen(movable: list[_Held], gain: float) -> list[int]:
            best, best_s = 0, min(before * (1 - gain), before - self._report_s)
            count = 1
            while count <= len(movable):
                going = {held[2] for held in movable[:count]}
                stays = [held for held in here if held[2] not in going]
                goes = there + movable[:count]
                prefill = sum(held[1] for held in movable[:count])
                after = max(self._drain(slow, source, stays), self._drain(fast, target, goes, prefill))
                if after < best_s:
                    best, best_s = count, after
                count = max(count + 1, count * 3 // 2)
            return [held[2] for held in movable[:best]]

        movable = [held for held in here if held[3] < self.max_moves]
        found = chosen(movable, self.gain)
        return found or (chosen(here, HALVES) if self.max_moves and len(movable) < len(here) else [])

    def _held(self, samples: Sequence[PlacedSample]) -> list[_Held]:
        """What an instance holds is taken to be as long as answers that came so far are, the shortest of them to the
        longest, dealt in an order that has nothing to do with lengths.

        Before any length is known, what has come so far is taken to go on for as long again.
        """
        if not self.lengths.known:
            return [
                (float(max(1, sample.output_tokens)), float(sample.context_tokens), sample.lease, sample.moves)
                for sample in samples
            ]
        mixed = sorted(samples, key=lambda sample: sample.lease * GOLDEN % 2**64)
        return [
            (
                self.lengths.left_at(sample.output_tokens, (rank + 0.5) / len(mixed)),
                float(sample.context_tokens),
                sample.lease,
                sample.moves,
            )
            for rank, sample in enumerate(mixed)
        ]

    def _drain(self, speed: Speed, load: InstanceLoad, held: Sequence[_Held], prefill: float = 0.0) -> float:
        mean = sum(context + left / 2 for left, context, _, _ in held) / max(1, len(held))
        return drain_s(speed, self._fit(load, mean), [(left, context) for left, context, _, _ in held], prefill)
