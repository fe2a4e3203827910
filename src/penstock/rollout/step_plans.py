"""What plans of a step are made from, and their making: bit by bit, since whoever drives this has frames to answer.

Measures answers, loads and training, has `offload` plan with them, and tells the balance policy which limits to follow.
A step's plan is begun once the samples of the one before have all ended, while the trainer still learns from them, so
that it is there when the step begins. Until one is there, the last one for as many machines holds. Refuses to know
whose turn it is on the trainer's devices: that is `windows`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from penstock.rollout.balance import BalancePolicy, InstanceLoad
from penstock.rollout.balanced import Balanced
from penstock.rollout.batch import Batch, TrackedSample
from penstock.rollout.facts import Facts
from penstock.rollout.fleet import Instance
from penstock.rollout.offload import Offload
from penstock.rollout.step_replay import ONE_BY_ONE, Engine, Plan, Training

__all__ = ["StepAnswers", "StepPlans", "Thought"]


class StepAnswers:
    """Tokens of the answers of the last step that was generated, by prompt; those of a conversation as one."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.prompt_tokens = 0.0
        """Mean."""
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        """Row and place in `groups` of each sample of the step that is open, by prompt index and replica."""
        self._further: Counter[tuple[int, int]] = Counter()
        """Tokens of further turns that ended before those places were known."""

    def begin(self) -> None:
        """Another step is open; until it is generated, the one before counts."""
        self._places.clear()
        self._further.clear()

    def take(self, batch: Batch) -> None:
        """All samples of the open step's own batch have ended."""
        rows: dict[int, list[TrackedSample]] = {}
        for sample in batch.held.values():
            if not sample.cause:
                rows.setdefault(sample.prompt, []).append(sample)
        if not rows:
            return
        groups = [rows[prompt] for prompt in sorted(rows)]
        self.groups = [[sample.length for sample in group] for group in groups]
        self.prompt_tokens = batch.prompt_offsets[-1] / len(batch.prompt_indices)
        self._places = {
            (sample.id.prompt, sample.replica): (row, place)
            for row, group in enumerate(groups)
            for place, sample in enumerate(group)
        }
        further, self._further = self._further, Counter()
        for (prompt, replica), tokens in further.items():
            self.lengthen(prompt, replica, tokens)

    def lengthen(self, prompt: int, replica: int, tokens: int) -> None:
        """A further turn of one of the open step's conversations has ended: its answer is longer by that."""
        if (prompt, replica) in self._places:
            row, place = self._places[prompt, replica]
            self.groups[row][place] += tokens
        else:
            self._further[prompt, replica] += tokens


@dataclass(slots=True)
class Thought:
    """A plan that is being made."""

    names: frozenset[str]
    """Of the remote instances that it is for."""
    facts: Facts
    batch: str
    """Of the step in which it was begun."""
    bits: Generator[None, None, Plan | None]
    follows: bool
    """Its limits are to be followed, not the window alone."""
    ahead: bool = False
    """It is for the step after that one."""
    own: frozenset[str] = frozenset()
    """Of the reserved engines that it is for."""
    plan: Plan | None = None
    """What was found."""
    done: bool = False


class StepPlans:
    """Plans of one step after the other. `load(instance)` is what runs on it."""

    def __init__(self, balance: BalancePolicy, load: Callable[[Instance], InstanceLoad]) -> None:
        self._balance = balance
        self._load = load
        self.answers = StepAnswers()
        self.token_s = 0.0
        """Training on a token, in the last step."""
        self.rest_s = 0.0
        """What the last step took beside its samples."""
        self.ahead_token_s = 0.0
        """Of that, what needs no whole group, as far as was seen."""
        self.ahead_samples = 1
        self.switch_s = 0.0
        """The last handing over."""
        self._load_s: dict[str, float] = {}
        """By instance: its last load of weights."""
        self._thought: Thought | None = None
        """The one that is being made, or one that was made ahead."""
        self._batch = ""
        self._micro_batch_samples = 1
        self._planned_for: frozenset[str] | None = None
        self._followed = False
        """The step goes by limits that were planned for itself."""

    @property
    def thinking(self) -> bool:
        """A plan is being made, and `think` goes on with it."""
        return self._thought is not None and not self._thought.done

    @property
    def slowest_load_s(self) -> float:
        return max(self._load_s.values(), default=0.0)

    def loaded(self, instance: Instance, load_s: float) -> None:
        """It serves a weight version, after so long."""
        self._load_s[instance.id] = load_s

    def gone(self, instance: Instance) -> None:
        self._load_s.pop(instance.id, None)

    def begin(self, batch: str, micro_batch_samples: int) -> None:
        """A step is open. A plan of the one before is made to its end all the same."""
        self._batch, self._micro_batch_samples = batch, micro_batch_samples
        self._planned_for, self._followed = None, False
        self.answers.begin()

    def drop(self) -> None:
        """Nobody waits for a plan any more; another trainer may do nothing ahead."""
        self._thought = None
        self.ahead_token_s, self.ahead_samples = 0.0, 1

    def plan(self, policy: Offload, elapsed_s: float, remote: list[Instance], reserved: list[Instance]) -> None:
        """Begins a plan of the open step on these machines, unless there is one or it is being made."""
        names, thought = frozenset(instance.id for instance in remote), self._thought
        if thought is not None and thought.ahead and thought.batch != self._batch:
            # Its step has begun.
            self._thought = thought = self._come_to(thought, policy) if self._fits(thought, names, reserved) else None
        if names == self._planned_for or (thought is not None and thought.names == names):
            return
        followed = self._balance.plan if isinstance(self._balance, Balanced) else None
        keeps = self._followed and policy.keeps(followed, elapsed_s, len(remote))
        if keeps and len(remote) in policy.plans:
            self._planned_for = names
            return
        known, facts = policy.nearest(len(remote)), self._facts(remote, reserved)
        if facts is not None:
            self._thought = Thought(names, facts, self._batch, policy.planning(facts), follows=not keeps)
        if keeps:
            return
        if known is not None:
            self._follow(known)
        elif facts is not None:
            # What is given too late waits for a moment. What is given too early can't be taken back.
            self._follow(ONE_BY_ONE)

    def plan_ahead(self, policy: Offload, remote: list[Instance], reserved: list[Instance]) -> None:
        """Begins a plan of the step after the open one, whose samples have all ended; on the machines of now."""
        if self._thought is not None and not self._thought.ahead:
            return
        facts = self._facts(remote, reserved)
        names = frozenset(instance.id for instance in remote)
        self._thought = None
        if facts is not None:
            bits = policy.planning(facts, ahead=True)
            own = frozenset(instance.id for instance in reserved)
            self._thought = Thought(names, facts, self._batch, bits, follows=True, ahead=True, own=own)

    def think(self) -> Thought | None:
        """One bit of the plan that is being made: some milliseconds. The thought, once it is at its end and its step
        is open."""
        thought = self._thought
        if thought is None or thought.done:
            return None
        try:
            next(thought.bits)
            return None
        except StopIteration as end:
            thought.plan, thought.done = end.value, True
        if thought.ahead:
            return None
        self._thought = None
        return thought

    def take(self, policy: Offload, thought: Thought) -> bool:
        """Follows what was thought. False where that was begun in a step that is no longer open."""
        fleet = len(thought.names)
        if thought.plan is not None:
            policy.plans[fleet] = thought.plan
        plan = policy.plans.get(fleet)
        if plan is not None and thought.follows:
            self._follow(plan)
        if thought.batch != self._batch:
            return False
        self._planned_for = thought.names
        self._followed = self._followed or thought.follows
        return True

    def awaits_first(self, policy: Offload, fleet: int) -> bool:
        """A plan for so many remote instances is being made, and there was none before: it is a moment's wait."""
        thought = self._thought
        return thought is not None and not thought.ahead and fleet not in policy.plans

    def _fits(self, thought: Thought, names: frozenset[str], reserved: Sequence[Instance]) -> bool:
        """Whether a plan that was begun before its step is one for what is there now."""
        own = frozenset(instance.id for instance in reserved)
        micro_batch_samples = thought.facts.training.micro_batch_samples
        return (thought.names, thought.own, micro_batch_samples) == (names, own, self._micro_batch_samples)

    def _come_to(self, thought: Thought, policy: Offload) -> Thought | None:
        """The step has begun that was thought of ahead: follows what was found, or goes on with it as its own."""
        thought.batch, thought.ahead = self._batch, False
        policy.remember(thought.facts.groups)
        if thought.done:
            self.take(policy, thought)
            return None
        known = policy.nearest(len(thought.names))
        if known is not None:
            self._follow(known)
        return thought

    def _follow(self, plan: Plan) -> None:
        if isinstance(self._balance, Balanced):
            self._balance.follow(plan)

    def _facts(self, remote: Sequence[Instance], reserved: Sequence[Instance]) -> Facts | None:
        """None while too little is known for a plan."""
        balance, answers = self._balance, self.answers
        if not isinstance(balance, Balanced) or not (answers.groups and self.token_s):
            return None
        theirs, own = self._engines(balance, remote), self._engines(balance, reserved)
        if theirs is None or own is None:
            return None
        training = Training(
            self.token_s,
            self._micro_batch_samples,
            self.switch_s,
            self.rest_s,
            min(self.ahead_token_s, self.token_s),
            self.ahead_samples,
        )
        # A copy: turns that end while a plan is made would change it under way.
        groups = [list(group) for group in answers.groups]
        return Facts(groups, answers.prompt_tokens, theirs, own, training, joined=balance.joined())

    def _engines(self, balance: Balanced, instances: Sequence[Instance]) -> list[Engine] | None:
        found = []
        for instance in instances:
            load_s = self._load_s.get(instance.id, self.slowest_load_s)
            engine = balance.engine(self._load(instance), load_s)
            if engine is None:
                return None
            found.append(engine)
        return found
