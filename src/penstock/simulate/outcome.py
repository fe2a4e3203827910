"""What a simulated run came to: steps, throughput, dollars, waiting, and the bound that no policy can pass.

Decides how figures are added up. The bound knows every length and every machine's coming and going in advance, and
still has to obey the machines' rooflines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.rollout.offload import StepTimes
from penstock.simulate.machine import SimSample
from penstock.simulate.profiles import MachineProfile, Profile
from penstock.simulate.strategy import Strategy

__all__ = ["Outcome", "StepOutcome", "lower_bound_s", "work_s"]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    number: int
    began_s: float
    times: StepTimes
    tokens: int
    """Prompts and answers."""
    paid_h: float
    """Machine-hours of remote instances."""
    moves: int
    bound_s: float
    """No policy makes this step shorter on the machines that were there."""
    causes: tuple[tuple[float, str], ...] = ()
    """Why the window stood as it did, whenever that changed."""
    trainer_spans: tuple[tuple[float, float], ...] = ()
    machine_spans: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)


@dataclass
class Outcome:
    strategy: str
    profile: str
    steps: list[StepOutcome] = field(default_factory=list)
    end_s: float = 0.0
    events: int = 0

    def close(self, now: float, events: int) -> None:
        self.end_s, self.events = now, events

    @property
    def wall_s(self) -> float:
        """Of the steps that ended."""
        return sum(step.times.step_s for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        return sum(step.tokens for step in self.steps) / self.wall_s if self.steps else 0.0

    def dollars(self, reserved_per_h: float, instance_per_h: float) -> float:
        return reserved_per_h * self.wall_s / 3600 + instance_per_h * sum(step.paid_h for step in self.steps)

    def tokens_per_dollar(self, reserved_per_h: float, instance_per_h: float) -> float:
        dollars = self.dollars(reserved_per_h, instance_per_h)
        return sum(step.tokens for step in self.steps) / dollars if dollars else 0.0

    @property
    def mean_fleet(self) -> float:
        return sum(step.times.fleet * step.times.step_s for step in self.steps) / self.wall_s if self.steps else 0.0

    @property
    def trainer_wait_share(self) -> float:
        return sum(step.times.trainer_wait_s for step in self.steps) / self.wall_s if self.steps else 0.0

    @property
    def regret(self) -> float:
        """Mean share by which steps were longer than their bound."""
        return sum(step.times.step_s / step.bound_s - 1 for step in self.steps) / len(self.steps) if self.steps else 0.0


def work_s(machine: MachineProfile, samples: Sequence[SimSample]) -> float:
    """Least instance-seconds for samples, whatever the schedule.

    Every output token costs its arithmetic and the reading of its context, which no schedule changes. Weights are read
    once a decode step, and a step serves at most `max_running` sequences and `kv_tokens` of context.
    """
    tokens = float(sum(sample.length for sample in samples))
    context = sum(sample.length * (sample.prompt_tokens + sample.length / 2) for sample in samples)
    steps = max(tokens / machine.max_running, context / machine.kv_tokens)
    prefill = sum(sample.prompt_tokens for sample in samples) * machine.prefill_s_per_token
    return steps * machine.step_base_s + tokens * machine.sequence_s + context * machine.context_s + prefill


def lower_bound_s(
    profile: Profile,
    samples: Sequence[SimSample],
    began_s: float,
    ready: Sequence[tuple[float, float]],
    strategy: Strategy,
) -> float:
    """A clairvoyant bound on the step: the largest of four times that no policy can avoid.

    - Training on everything, after at least a switch where the reserved engines generate at all.
    - The longest answer alone on a machine, then training on its group.
    - Training on everything after the first micro-batch is there. Passes are one after the other, so their times add up
      to `train_s` at least, and none begins before as many groups are complete as a micro-batch takes. A group is not
      complete before its longest answer has run alone, on a machine that held the weights from the start; so the first
      micro-batch is not before the k-th smallest of those times over groups, where k groups make one.
    - The work: reserved engines can generate only while nobody trains, remote ones while they hold the weights.
    """
    training = profile.training
    per = profile.samples_per_prompt
    tokens = [sum(s.length + s.prompt_tokens for s in samples[k : k + per]) for k in range(0, len(samples), per)]
    train_s = sum(tokens) * training.s_per_token + training.optimizer_s
    alone_s, last_s = 0.0, 0.0
    complete_s: list[float] = []
    machine = min(profile.spot, profile.reserved, key=lambda one: one.step_base_s) if strategy.window else profile.spot
    for k, group in enumerate(tokens):
        longest = max(sample.length for sample in samples[k * per : (k + 1) * per])
        one = machine.step_base_s + machine.sequence_s + machine.context_s * (samples[0].prompt_tokens + longest / 2)
        complete_s.append(one * longest)
        if one * longest + group * training.s_per_token > alone_s + last_s:
            alone_s, last_s = one * longest, group * training.s_per_token
    remote_work, reserved_work = work_s(profile.spot, samples), work_s(profile.reserved, samples)
    last_group = min(tokens) * training.s_per_token + training.optimizer_s

    def enough(step_s: float) -> bool:
        # What is generated after the last group could still be trained on comes too late.
        until = began_s + step_s - last_group
        remote = sum(max(0.0, min(to, until) - at) for at, to in ready)
        free_s = max(0.0, step_s - train_s - training.switch_s)
        reserved = 0.0 if strategy.window is None and ready else profile.reserved_instances * free_s
        return remote / remote_work + reserved / reserved_work >= 1

    first_s = sorted(complete_s)[min(len(tokens), -(-training.micro_batch_samples // per)) - 1]
    low = max(first_s + train_s, alone_s + last_s + training.optimizer_s)
    if enough(low):
        return low
    high = low
    while not enough(high) and high < 1e7:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
