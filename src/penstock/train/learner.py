"""From whole groups to optimizer steps, on every rank alike: actor, critic, advantages, epochs.

Decides which passes are this rank's and in what order gradients, optimizer steps and epochs come. The leader tells
the others of each call before it does its own part (`ranks`); `Follower` is what they run. Refuses to know where
groups come from and who gets the weights.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.config.run import RunConfig
from penstock.sample import Group, Sample
from penstock.train.actor import Actor, NamedTensor
from penstock.train.appraisal import Appraiser
from penstock.train.batching import PassBatch
from penstock.train.checkpoint import SAVE_S, Checkpoints, Position
from penstock.train.critic import Critic
from penstock.train.flops import ModelSize, learning_flops
from penstock.train.mini_batch import OptimizerStep
from penstock.train.ranks import BeginStep, Collect, End, Learn, Look, Ranks, Save, Start, pack, unpack
from penstock.train.stages import Stages
from penstock.train.tally import Tally
from penstock.train.writing import Writing, stage

__all__ = ["WORK", "Follower", "Learner", "Steps"]

WORK = ("learned/flops", "learned/tokens", "learned/output_tokens", "looked/flops")
"""Model FLOPs of the learning passes, tokens fed to them, and output tokens learned from; and FLOPs of passes without a
gradient. Of all ranks and epochs."""


class Steps(NamedTuple):
    """What an optimizer boundary did; the actor's is None while the critic learns alone."""

    actor: OptimizerStep | None
    critic: OptimizerStep | None


class Learner:
    """One rank's part. All ranks make the same calls in the same order; the leader's make the others'."""

    def __init__(
        self, config: RunConfig, actor: Actor, critic: Critic | None = None, ranks: Ranks | None = None
    ) -> None:
        self.config = config
        self.actor = actor
        self.critic = critic
        self.ranks = ranks or Ranks()
        self._appraiser = Appraiser(config.train, actor, critic, self.ranks)
        self.estimator = self._appraiser.estimator
        self.stages = Stages()
        """Where the time goes; the loop that this learner is in counts its own stages there too."""
        self._sizes = [ModelSize.of(actor.model)]
        if critic is not None:
            self._sizes.append(ModelSize.of(critic.model.backbone, has_head=False))
        self._done: defaultdict[str, float] = defaultdict(float)
        """This rank's learning since metrics were last asked for: `flops`, `tokens` and `output_tokens`."""
        self._step = 0
        self._under_way = False
        self._writing: Writing | None = None
        self._kept: list[PassBatch] = []
        """Passes of the mini-batch under way, where there are further epochs."""
        self._ahead: list[Sample] = []
        """Looked at since the optimizers stepped last."""

    def begin_step(self, step: int) -> None:
        with self._together():
            self.ranks.tell(BeginStep(step, self.actor.kl_coef))
            self._step = step
            self._kept, self._ahead = [], []
            self.actor.begin_step(self.config.rollout.sampling.temperature)
            if self.critic is not None:
                self.critic.begin_step()

    @property
    def looks_ahead(self) -> bool:
        """Whether samples can be looked at before their groups are whole: what is learned from them needs passes of
        its own."""
        return self.config.train.look_ahead and self._appraiser.looks_ahead(self._actor_learns)

    def look(self, samples: Sequence[Sample], watch: Callable[[], None] = lambda: None) -> None:
        """The passes without a gradient that learning from these samples will need; their groups are not whole."""
        groups = _in_groups(samples)
        samples = [sample for group in groups for sample in group.samples]
        with self._together():
            if self.ranks.size > 1:
                self.ranks.tell(Look(pack(groups)))
            with self.stages("look_ahead"):
                self._appraiser.look(samples, self._actor_learns, watch)
            self._ahead += samples

    def learn(
        self,
        groups: Sequence[Group],
        tally: Tally,
        baselines: Mapping[int, float],
        mini_batch: int | None,
        watch: Callable[[], None] = lambda: None,
    ) -> list[Steps]:
        """The gradient of whole groups; with `mini_batch` they are its last, and the optimizers step.

        `baselines`: rewards of the greedy answers, by prompt, where the advantage asks for them.
        """
        with self._together():
            if self.ranks.size > 1:
                self.ranks.tell(Learn(pack(groups), dict(baselines), -1 if mini_batch is None else mini_batch))
            with self.stages("advantages"):
                passes = self._appraiser.passes(groups, tally, baselines, watch)
            self._accumulate(passes, watch)
            if self.config.train.epochs > 1:
                self._kept += passes
            return [] if mini_batch is None else self._end_mini_batch(mini_batch, watch)

    def weights(self) -> Iterator[NamedTensor]:
        """All weights as they are sent, to be written before the next optimizer step."""
        with self._together():
            self.ranks.tell(Collect("weights"))
            yield from self.actor.named_tensors()

    def begin_save(self, checkpoints: Checkpoints, position: Position) -> Writing:
        """Has every rank copy what a checkpoint keeps, and write it behind what follows; the result is a Saved.

        Raises StorageError where there is no room to begin in. No other may be under way.
        """
        folder = checkpoints.prepare()
        with self._together():
            self.ranks.tell(Save(str(folder.resolve())))
            return checkpoints.begin(folder, stage(self.actor, self.critic), position, self.ranks)

    def write_part(self, folder: Path) -> None:
        """A follower's part of a checkpoint. Raises what the one before failed with but for its disk."""
        self.finish_part()
        self._writing = Writing(stage(self.actor, self.critic), folder, self.ranks)

    def finish_part(self) -> None:
        """Waits for a follower's part to be written."""
        if self._writing is not None:
            self._writing.result(SAVE_S)
        self._writing = None

    def metrics(self) -> dict[str, float]:
        """Means over all ranks since they were last asked for; of what is in WORK, sums."""
        sums = [self.actor.sums, *([self.critic.sums] if self.critic is not None else [])]
        own = {name: both for one in sums for name, both in one.totals().items()}
        for role in (self.actor, self.critic):
            if role is not None:
                self._done["looked/flops"] += role.looked_flops
                role.looked_flops = 0.0
        own |= {name: (self._done[name], 1.0) for name in WORK if self.ranks.leads}
        own |= {name: (self._done[name], 0.0) for name in WORK if not self.ranks.leads}
        self._done.clear()
        with self._together():
            self.ranks.tell(Collect("metrics"))
            collected = self.ranks.collect(json.dumps(own).encode())
        totals: dict[str, tuple[float, float]] = {}
        for given in collected:
            for name, (total, weight) in json.loads(given).items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = before[0] + total, before[1] + weight
        return {name: total / weight for name, (total, weight) in totals.items() if weight > 0}

    def end(self) -> None:
        """Lets the other ranks go."""
        self.ranks.tell(End())

    @property
    def in_step(self) -> bool:
        """Whether the ranks stand where they can make another call: not where one broke off in the middle."""
        return self.ranks.size == 1 or not self._under_way

    # ---- within

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What is done here all ranks do; one that breaks off leaves the others waiting for it."""
        self._under_way = True
        yield
        self._under_way = False

    def _accumulate(self, passes: Sequence[PassBatch], watch: Callable[[], None]) -> None:
        with self.stages("forward_backward"):
            for batch in passes:
                if self._actor_learns:
                    self.actor.accumulate(batch)
                if self.critic is not None:
                    self.critic.accumulate(batch)
                self._count(batch)
                watch()
            if passes and self.actor.device.type == "cuda":
                # Or the next stage would have the time that this one's kernels take.
                torch.cuda.synchronize(self.actor.device)

    def _count(self, batch: PassBatch) -> None:
        learning = self._sizes if self._actor_learns else self._sizes[1:]
        self._done["learned/flops"] += sum(learning_flops(size, batch) for size in learning)
        if batch.at_N.numel():
            self._done["learned/tokens"] += batch.tokens
            self._done["learned/output_tokens"] += batch.at_N.numel()

    def _end_mini_batch(self, mini_batch: int, watch: Callable[[], None]) -> list[Steps]:
        """The optimizer step, and for each further epoch the same passes and another one."""
        train = self.config.train
        first = (self._step * train.mini_batches_per_step + mini_batch) * train.epochs
        done = []
        for position in range(first, first + train.epochs):
            if position > first:
                self._accumulate(self._kept, watch)
            with self.stages("optimizer"):
                actor = self.actor.optimizer_step(position) if self._actor_learns else None
                critic = None if self.critic is None else self.critic.optimizer_step(position)
            done.append(Steps(actor, critic))
        self._kept = []
        for sample in self._ahead:
            # The critic is another one now. Old and reference log-probabilities are of weights that stay.
            sample.values = None
        self._ahead = []
        return done

    @property
    def _actor_learns(self) -> bool:
        return self.critic is None or self._step >= self.config.train.critic.alone_steps


def _in_groups(samples: Sequence[Sample]) -> list[Group]:
    """Samples by prompt, as they are sent; a group is what has come of it."""
    groups: dict[int, Group] = {}
    for sample in samples:
        group = groups.setdefault(sample.id.prompt, Group(sample.id.batch, sample.prompt, []))
        group.samples.append(sample)
    return list(groups.values())


class Follower:
    """What a rank other than the leader runs: the leader's calls, as they come."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def run(self) -> None:
        """Returns when the leader ends the run."""
        learner = self._learner
        while True:
            match learner.ranks.heard():
                case BeginStep(step=step, kl_coef=kl_coef):
                    learner.actor.kl_coef = kl_coef
                    learner.begin_step(step)
                case Learn(groups=groups, baselines=baselines, mini_batch=mini_batch):
                    learner.learn(unpack(groups), Tally(0), baselines, None if mini_batch < 0 else mini_batch)
                case Look(groups=groups):
                    learner.look([sample for group in unpack(groups) for sample in group.samples])
                case Collect(what="weights"):
                    for _ in learner.weights():
                        pass
                case Save(folder=folder):
                    learner.write_part(Path(folder))
                case Collect(what="metrics"):
                    learner.metrics()
                case End():
                    learner.finish_part()
                    return
                case Start() | Collect() as order:
                    raise AssertionError(f"an order that has no place here: {order}")
