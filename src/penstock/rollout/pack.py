"""Complete groups into micro-batches: decides when enough of a step is there to train on.

Scored samples go in one by one, as they finish; lists of whole groups come out. A list holds at least `min_samples`
samples, or everything that is left of its mini-batch when no more can come or when the caller asks for it. A list
never reaches across a mini-batch boundary and a group comes out once. Groups belong to mini-batches in the order in
which they complete, so that a slow group never holds back a finished one.

Refuses to know where samples come from, how they are scored, what an advantage is and how many tokens fit in a
forward pass. It has no clock and no lock: one thread calls it, or the callers share a lock.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from penstock.sample import Group, Prompt, Sample, Score

__all__ = ["Packer", "UnscoredPolicy"]

UnscoredPolicy = Literal["drop_group", "drop_sample"]


@dataclass(slots=True)
class _OpenGroup:
    """A group with replicas still to come."""

    batch: str = ""
    prompt: Prompt | None = None
    samples: list[Sample] = field(default_factory=list)
    missing: Counter[str] = field(default_factory=Counter)
    seen: set[int] = field(default_factory=set)


class Packer:
    """Packs one step's groups.

    `groups_expected` groups of `samples_per_prompt` samples make up the step; each `mini_batch_groups` of them (the
    last mini-batch may be smaller) end in one optimizer step. `unscored` says what becomes of a group with a member
    that has no score, be it that its reward or its generation failed: `drop_group` drops it whole, `drop_sample`
    keeps the others. A group with no scored member is always dropped. Dropped groups count towards their mini-batch,
    so the boundary comes even when every group of it is dropped.

    Use::

        groups = packer.take()            # None: not enough yet
        if groups is not None:
            accumulate_gradients(groups)  # [] where a mini-batch ends with dropped groups
            if packer.mini_batch_complete:
                optimizer_step()
    """

    def __init__(
        self,
        groups_expected: int,
        samples_per_prompt: int,
        mini_batch_groups: int,
        min_samples: int,
        unscored: UnscoredPolicy = "drop_group",
    ) -> None:
        for name, value in (
            ("groups_expected", groups_expected),
            ("samples_per_prompt", samples_per_prompt),
            ("mini_batch_groups", mini_batch_groups),
            ("min_samples", min_samples),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if unscored not in ("drop_group", "drop_sample"):
            raise ValueError(f"unscored is {unscored!r}; it must be 'drop_group' or 'drop_sample'")
        self.groups_expected = groups_expected
        self.samples_per_prompt = samples_per_prompt
        self.mini_batch_groups = mini_batch_groups
        self.min_samples = min_samples
        self.unscored: UnscoredPolicy = unscored
        self.mini_batch = -1
        """Index of the mini-batch that the last non-None `take` belongs to; -1 before the first."""
        self.mini_batch_complete = False
        """True where the last non-None `take` was the last one of its mini-batch: time for the optimizer step."""
        self.unscored_samples: Counter[str] = Counter()
        """Samples without a score, by cause."""
        self.dropped_groups: Counter[str] = Counter()
        """Groups dropped whole, by the commonest cause among their missing members."""
        self._open: dict[int, _OpenGroup] = {}
        self._closed: set[int] = set()
        self._dropped: set[int] = set()
        # Completed groups in order of completion, not yet taken; None stands for a dropped one.
        self._ready: deque[Group | None] = deque()
        self._groups_taken = 0

    # ---- in

    def add(self, sample: Sample) -> None:
        """Takes a sample with its `score` set (a Score, or Unscored with its cause). Raises ValueError otherwise."""
        if sample.score is None:
            raise ValueError(f"sample {sample.id} has neither a Score nor an Unscored")
        group = self._account(sample.id.prompt, sample.id.replica)
        group.batch = sample.id.batch
        group.prompt = sample.prompt
        if isinstance(sample.score, Score):
            group.samples.append(sample)
        else:
            group.missing[sample.score.cause] += 1
            self.unscored_samples[sample.score.cause] += 1
        self._close_if_whole(sample.id.prompt, group)

    def fail(self, prompt: int, replica: int, cause: str) -> None:
        """Counts a sample that could not be generated as missing."""
        group = self._account(prompt, replica)
        group.missing[cause] += 1
        self.unscored_samples[cause] += 1
        self._close_if_whole(prompt, group)

    # ---- out

    def take(self, drain: bool = False) -> list[Group] | None:
        """Everything that is ready of the current mini-batch, or None while that is not enough.

        Enough is: `min_samples` samples, or the mini-batch's last group, or with `drain` at least one group. Sets
        `mini_batch` and `mini_batch_complete`. An empty list says that the mini-batch ended with dropped groups.
        """
        room = self._groups_left_in_mini_batch
        available = min(room, len(self._ready))
        if not available:
            return None
        ends = available == room
        groups = [self._ready[k] for k in range(available)]
        whole = [group for group in groups if group is not None]
        if not ends:
            samples = sum(len(group.samples) for group in whole)
            if not whole or (samples < self.min_samples and not drain):
                return None
        for _ in range(available):
            self._ready.popleft()
        self.mini_batch = self._groups_taken // self.mini_batch_groups
        self.mini_batch_complete = ends
        self._groups_taken += available
        return whole

    @property
    def takeable(self) -> bool:
        """Whether `take()` would return a list now."""
        room = self._groups_left_in_mini_batch
        available = min(room, len(self._ready))
        if not available:
            return False
        samples = 0
        for k in range(available):
            group = self._ready[k]
            samples += len(group.samples) if group is not None else 0
        return available == room or samples >= self.min_samples

    @property
    def all_complete(self) -> bool:
        """Whether every sample of the step is accounted for, taken or not; nothing more will come."""
        return len(self._closed) == self.groups_expected

    @property
    def done(self) -> bool:
        """Whether every group has been taken or dropped, the last optimizer boundary included."""
        return self._groups_taken == self.groups_expected

    def lost(self, prompt: int) -> bool:
        """Whether nothing will be learned from a prompt's group: it was dropped, or will be, as far as is known."""
        group = self._open.get(prompt)
        if group is None:
            return prompt in self._dropped
        return bool(group.missing) and self.unscored == "drop_group"

    @property
    def groups_complete(self) -> int:
        """Groups that are whole, dropped ones included."""
        return len(self._closed)

    # ---- within

    @property
    def _groups_left_in_mini_batch(self) -> int:
        start = self._groups_taken // self.mini_batch_groups * self.mini_batch_groups
        return min(start + self.mini_batch_groups, self.groups_expected) - self._groups_taken

    def _account(self, prompt: int, replica: int) -> _OpenGroup:
        if not 0 <= replica < self.samples_per_prompt:
            raise ValueError(f"replica {replica} of prompt {prompt} is outside 0..{self.samples_per_prompt - 1}")
        if prompt in self._closed:
            raise ValueError(f"replica {replica} of prompt {prompt} came after its group was whole")
        group = self._open.get(prompt)
        if group is None:
            if len(self._open) + len(self._closed) == self.groups_expected:
                raise ValueError(f"prompt {prompt} is one more than the {self.groups_expected} groups expected")
            group = self._open[prompt] = _OpenGroup()
        if replica in group.seen:
            raise ValueError(f"replica {replica} of prompt {prompt} came twice")
        group.seen.add(replica)
        return group

    def _close_if_whole(self, prompt: int, group: _OpenGroup) -> None:
        if len(group.seen) < self.samples_per_prompt:
            return
        del self._open[prompt]
        self._closed.add(prompt)
        drop = not group.samples or (self.unscored == "drop_group" and group.missing)
        if drop or group.prompt is None:
            self.dropped_groups[group.missing.most_common(1)[0][0]] += 1
            self._ready.append(None)
            self._dropped.add(prompt)
            return
        group.samples.sort(key=_replica)
        self._ready.append(Group(group.batch, group.prompt, group.samples, dict(group.missing)))


def _replica(sample: Sample) -> int:
    return sample.id.replica
