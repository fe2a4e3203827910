"""One rollout instance on a virtual clock: continuous batching, worked out in closed form between two events.

Between events the batch is constant, and each decode step adds a token of context to every sequence, so the time of k
steps is a quadratic in k. Nothing is done token by token: a sample costs a few heap operations, however long it gets.

Decides what the engine would: who is admitted, and who is put back when the memory is full (the last one in, as in
SGLang and vLLM; its prefix is computed again). Prefill stalls decoding for its time. Where prompts are shared, one
counts once in memory and in prefill while any of its samples runs, and for each of them in what a step reads. Refuses
to know where samples come from and who takes them away.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from penstock.rollout.balance import PlacedSample, Report
from penstock.rollout.curves import Speed
from penstock.simulate.profiles import MachineProfile

__all__ = ["Machine", "SimSample"]

GROWTH_TOKENS = 256
"""Room kept for each running sequence when another is let in."""


@dataclass(slots=True, eq=False)
class SimSample:
    """One sample's truth. `length` is what it will get to, which no policy is shown."""

    number: int
    prompt: int
    prompt_tokens: int
    length: int
    done: float = 0.0
    """Output tokens so far."""
    moves: int = 0
    """By choice, while it ran."""
    shifts: int = 0
    """And while it waited for a place."""
    where: str = ""
    lease: int = 0
    offset: float = 0.0
    """While it runs: its tokens less the machine's count of decode steps."""


@dataclass(eq=False)
class Machine:
    """`remote` ones come and go; `at_s` is the time up to which everything is worked out."""

    name: str
    profile: MachineProfile
    remote: bool
    at_s: float = 0.0
    ready: bool = False
    """It holds the step's weights."""
    steps: float = 0.0
    context: float = 0.0
    """Summed over running sequences: what a decode step reads."""
    spared: float = 0.0
    """Of `context`, prompts' tokens that memory holds for another sequence already."""
    running: dict[int, SimSample] = field(default_factory=dict)
    pending: deque[SimSample] = field(default_factory=deque)
    busy_s: float = 0.0
    tokens: float = 0.0
    tokens_per_s: float = 0.0
    """As it reported last."""
    prefilled: int = 0
    """Tokens, without those that were there already."""
    retracted: int = 0
    epoch: int = 0
    """Counts what makes a planned event void."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    _ends: list[tuple[float, int]] = field(default_factory=list)
    _siblings: dict[int, int] = field(default_factory=dict)
    """Running samples by prompt, where prompts are shared."""
    _since: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0, 0.0])
    """Since the last report: busy seconds, running and context times seconds, tokens, prefilled."""
    _waited: bool = False
    """Samples waited at the last report, beside free places."""

    def __post_init__(self) -> None:
        profile = self.profile
        self.speed = Speed(profile.step_base_s, profile.sequence_s, profile.context_s, profile.prefill_s_per_token)

    @property
    def samples(self) -> int:
        return len(self.running) + len(self.pending)

    @property
    def held(self) -> float:
        """Tokens in memory."""
        return self.context - self.spared

    # ---- time

    def advance(self, now: float) -> list[SimSample]:
        """Works out everything up to `now`, which is no later than the next event. Returns samples that finished."""
        if now <= self.at_s:
            return []
        wall_s, count = now - self.at_s, len(self.running)
        if not count:
            self.at_s = now
            return []
        steps = self.speed.steps_in(wall_s, count, self.context)
        first_end = self._ends[0][0] - self.steps
        if steps > first_end - 1e-6:
            steps = max(0.0, first_end)
        self._count(wall_s, count, self.context + count * steps / 2, count * steps)
        self.steps += steps
        self.context += count * steps
        self._span(self.at_s, now)
        self.at_s = now
        return self._finished()

    def next_at(self) -> float | None:
        """When the next sample finishes or memory is full; None where nothing runs."""
        if not self.running:
            return None
        count = len(self.running)
        steps = max(0.0, self._ends[0][0] - self.steps)
        if count > 1:
            steps = min(steps, max(0.0, (self.profile.kv_tokens - self.held) / count) + 1e-3)
        return self.at_s + self.speed.wall_s(steps, count, self.context)

    # ---- work in and out

    def give(self, sample: SimSample) -> None:
        sample.where = self.name
        self.pending.append(sample)

    def settle(self, now: float) -> None:
        """Lets in what fits and puts back what does not, at a moment up to which all is worked out."""
        self.at_s = max(self.at_s, now)
        while self.held > self.profile.kv_tokens and len(self.running) > 1:
            last = next(reversed(self.running.values()))
            self.remove(last)
            last.where = self.name
            self.pending.appendleft(last)
            self.retracted += 1
        while self.pending and self._fits(self.pending[0]):
            self._admit(self.pending.popleft())
        self.epoch += 1

    def remove(self, sample: SimSample) -> None:
        """Takes a sample away with what it has."""
        if sample.number not in self.running:
            self.pending.remove(sample)
        else:
            sample.done = self.progress(sample)
            self._left(sample)
            del self.running[sample.number]
            self._ends = [end for end in self._ends if end[1] != sample.number]
            heapq.heapify(self._ends)
            # A token is drawn whole or not at all.
            sample.done = float(int(sample.done))
        sample.where = ""
        self.epoch += 1

    def take_all(self) -> list[SimSample]:
        """All it has, running ones first."""
        taken = [*self.running.values(), *self.pending]
        for sample in self.running.values():
            sample.done = float(int(self.progress(sample)))
        for sample in taken:
            sample.where = ""
        self.running.clear()
        self.pending.clear()
        self._ends.clear()
        self._siblings.clear()
        self.context = self.spared = 0.0
        self.epoch += 1
        return taken

    def progress(self, sample: SimSample) -> float:
        """Output tokens of one of its samples."""
        if sample.number not in self.running:
            return sample.done
        return min(float(sample.length), self.steps + sample.offset)

    def placed(self) -> list[PlacedSample]:
        """What a manager would know of its samples."""
        rows = []
        for sample in (*self.running.values(), *self.pending):
            done, running = int(self.progress(sample)), sample.number in self.running
            rows.append(
                PlacedSample(
                    sample.lease, done, sample.prompt_tokens + done, running, sample.moves, sample.prompt, sample.shifts
                )
            )
        return rows

    def report(self) -> Report | None:
        """Work since the last one; None where there was none."""
        wall_s, running_s, context_s, tokens, prefilled = self._since
        if wall_s <= 0 or tokens < 1:
            self._waited = False
            return None
        self._since = [0.0, 0.0, 0.0, 0.0, 0.0]
        self.tokens_per_s = tokens / wall_s
        # As a manager sees it: samples waited beside free places, and none was let in since the report before.
        waits = bool(self.pending) and len(self.running) < self.profile.max_running
        starved = len(self.pending) if waits and self._waited and not prefilled else 0
        self._waited = waits
        return Report(self.name, wall_s, running_s / wall_s, context_s / wall_s, int(tokens), int(prefilled), starved)

    # ---- within

    def _fits(self, sample: SimSample) -> bool:
        if not self.running:
            return True
        if len(self.running) >= self.profile.max_running:
            return False
        needs = sample.prompt_tokens + sample.done - self._there(sample) + GROWTH_TOKENS * (len(self.running) + 1)
        return self.held + needs <= self.profile.kv_tokens

    def _there(self, sample: SimSample) -> int:
        """Tokens of a sample that waits which memory holds for others."""
        return sample.prompt_tokens if sample.prompt in self._siblings else 0

    def _admit(self, sample: SimSample) -> None:
        tokens, there = int(sample.prompt_tokens + sample.done), self._there(sample)
        stall_s = (tokens - there) * self.profile.prefill_s_per_token
        self._count(stall_s, len(self.running) or 1, self.context, 0.0)
        # Engines' adapters report what a sequence began with; what of it was there already they don't see.
        self._since[4] += tokens
        self.prefilled += tokens - there
        self._span(self.at_s, self.at_s + stall_s)
        self.at_s += stall_s
        self.context += sample.prompt_tokens + sample.done
        self.spared += there
        if self.profile.shared_prompts:
            self._siblings[sample.prompt] = self._siblings.get(sample.prompt, 0) + 1
        sample.offset = sample.done - self.steps
        self.running[sample.number] = sample
        heapq.heappush(self._ends, (self.steps + sample.length - sample.done, sample.number))

    def _finished(self) -> list[SimSample]:
        found = []
        while self._ends and self._ends[0][0] <= self.steps + 1e-6:
            _, number = heapq.heappop(self._ends)
            sample = self.running.pop(number)
            sample.done = float(sample.length)
            self._left(sample)
            sample.where = ""
            found.append(sample)
        if not self.running:
            self.context = self.spared = 0.0
        return found

    def _left(self, sample: SimSample) -> None:
        """It runs no more, and has what it has. The last one of its prompt takes the prompt along."""
        self.context -= sample.prompt_tokens + sample.done
        if not self.profile.shared_prompts:
            return
        others = self._siblings.pop(sample.prompt) - 1
        if others:
            self._siblings[sample.prompt] = others
            self.spared -= sample.prompt_tokens

    def _count(self, wall_s: float, running: float, context: float, tokens: float) -> None:
        since = self._since
        since[0] += wall_s
        since[1] += running * wall_s
        since[2] += context * wall_s
        since[3] += tokens
        self.busy_s += wall_s
        self.tokens += tokens

    def _span(self, start_s: float, end_s: float) -> None:
        if self.spans and start_s - self.spans[-1][1] < 1e-6:
            self.spans[-1] = (self.spans[-1][0], end_s)
        else:
            self.spans.append((start_s, end_s))
